// Int4MatMul and Int8MatMul with vectors; compiled once per instruction set.
//
// A vector of WIDTH bytes of a tile's step holds 8 weights of each of WIDTH / 4 rows, one row per lane. A dot product of its
// low nibbles with four even activations, broadcast to all lanes, and one of its high nibbles with the four odd ones advance
// all rows by 8 weights. A group's sums are converted to floats and scaled in their lanes.
//
// TILES tiles, far apart in memory, by ROWS rows of activations keep all their sums in registers: with few rows, memory is
// read in several streams; with many rows, each unpacking serves all of them.
#include "kernels.h"

#include "../simd/vectors.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

constexpr int VECTORS = INT4_TILE * 4 / WIDTH;
constexpr int64_t STEP_BYTES = INT4_TILE * 4;
constexpr int STEPS = 4;  // between flushes: 32 weights, the smallest group
static_assert(2 * STEPS <= dots(15), "a Partial holds the products of its steps");
constexpr int64_t AHEAD = 4096;  // bytes to prefetch
constexpr int64_t LARGEST_GROUP = 128;

/// Initial value of a group's sums: its offset times each row's zero point, if `dot` and `dot_bytes` do not include it.
template <int BITS, bool ZEROS>
DIFFBIT_INLINE Ints offsets(int32_t offset, const uint8_t* zeros) {
  constexpr int32_t TIMES = 1 << NIBBLE_SHIFT;
  if (BITS == 4) return ZEROS ? times_bytes(offset * TIMES, zeros) : splat_int(offset * TIMES);
  if (!ZEROS) return splat_int(offset * (128 - BYTE_MIDDLE));
  return times_bytes(offset, zeros) + splat_int(-offset * BYTE_MIDDLE);
}

/// A group's sums as floats.
template <int BITS>
DIFFBIT_INLINE F32 total(Ints sums) {
  if constexpr (BITS == 4 && NIBBLE_SHIFT) return to_floats(shift<NIBBLE_SHIFT>(sums));
  return to_floats(sums);
}

template <class T>
void quantize(const T* x, int64_t k, int64_t groups, int64_t group_size, int32_t minus, const Int4Rows& rows) {
  for (int64_t row = 0; row < rows.count; ++row) {
    int8_t* q = rows.q + 4 * row;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = g * group_size;
      const T* from = x + row * k + begin;
      T part[LARGEST_GROUP];
      if (begin + group_size > k) {
        std::memset(part, 0, sizeof part);
        std::memcpy(part, from, static_cast<size_t>(k - begin) * sizeof(T));
        from = part;
      }
      F32 most = splat(0.0f), poison = splat(0.0f);  // poison: infinity and NaN times 0 are NaN
      for (int64_t i = 0; i < group_size; i += F32_LANES) {
        const F32 values = load(from + i);
        most = larger(magnitude(values), most);
        poison = fma(values, splat(0.0f), poison);
      }
      const float size = largest(most);
      const bool finite = sum(poison) == 0, zero = !finite || size < INT4_SMALLEST;
      const F32 inverse = splat(zero ? 0.0f : 127 / size);
      int8_t bytes[LARGEST_GROUP];
      F32 total = splat(0.0f);
      if (zero)
        std::memset(bytes, 0, sizeof bytes);
      else
        for (int64_t i = 0; i < group_size; i += F32_LANES) {
          const F32 values = rounded(load(from + i) * inverse);
          store_rounded(bytes + i, values);
          total = total + values;
        }
      for (int64_t i = 0; i < group_size; i += INT4_STEP, q += 8 * rows.count)
        store_parted(bytes + i, q, q + 4 * rows.count);
      rows.offsets[g * rows.count + row] = minus * static_cast<int32_t>(sum(total));
      rows.scales[g * rows.count + row] = !finite ? __builtin_nanf("") : zero ? 0 : size / 127;
    }
  }
}

void quantize(const void* x, bool half, int64_t k, int64_t groups, int64_t group_size, int32_t minus,
              const Int4Rows& rows) {
  if (half)
    quantize(static_cast<const uint16_t*>(x), k, groups, group_size, minus, rows);
  else
    quantize(static_cast<const float*>(x), k, groups, group_size, minus, rows);
}

/// Stores F32_LANES numbers, or fewer at the end of the row.
template <class T>
DIFFBIT_INLINE void put(T* to, int64_t room, F32 values) {
  if (room >= F32_LANES) return store(to, values);
  T part[F32_LANES];
  store(part, values);
  if (room > 0) std::memcpy(to, part, static_cast<size_t>(room) * sizeof(T));
}

template <int BITS, int TILES, int ROWS, bool ZEROS>
void tiles(const Int4Rows& rows, const Int4Weight& weight, int64_t first, int64_t apart, void* y, bool half) {
  const int64_t runs = weight.group_size / (STEPS * INT4_STEP);
  const int64_t scale_step = weight.scale_groups == 1 ? 0 : INT4_TILE;
  [[maybe_unused]] const Bytes nibble = splat(uint8_t{15});
  const uint8_t* codes[TILES];
  const uint16_t* scales[TILES];
  const uint8_t* zeros[TILES];
  F32 results[TILES][ROWS][VECTORS];
  DIFFBIT_UNROLL
  for (int t = 0; t < TILES; ++t) {
    const int64_t tile = first + t * apart;
    codes[t] = weight.codes + tile * weight.groups * runs * STEPS * STEP_BYTES * (BITS / 4);
    scales[t] = weight.scales + tile * weight.scale_groups * INT4_TILE;
    zeros[t] = ZEROS ? weight.zeros + tile * weight.scale_groups * INT4_TILE : nullptr;
    DIFFBIT_UNROLL
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < VECTORS; ++v) results[t][r][v] = splat(0.0f);
  }
  const int8_t* q = rows.q;
  for (int64_t g = 0; g < weight.groups; ++g) {
    Ints sums[TILES][ROWS][VECTORS];
    DIFFBIT_UNROLL
    for (int t = 0; t < TILES; ++t)
      DIFFBIT_UNROLL
      for (int r = 0; r < ROWS; ++r)
        DIFFBIT_UNROLL
        for (int v = 0; v < VECTORS; ++v)
          sums[t][r][v] = offsets<BITS, ZEROS>(rows.offsets[g * ROWS + r], zeros[t] + (ZEROS ? v * F32_LANES : 0));
    if constexpr (BITS == 8) {
      constexpr int AT_ONCE = ROWS == 1 ? 2 * STEPS : 1;  // half steps
      for (int64_t begin = 0; begin < 2 * runs * STEPS; begin += AT_ONCE)
        DIFFBIT_UNROLL
        for (int part = 0; part < AT_ONCE; ++part, q += 4 * ROWS)
          DIFFBIT_UNROLL
          for (int t = 0; t < TILES; ++t) {
            prefetch(codes[t] + AHEAD);
            Bytes weights[VECTORS];
            DIFFBIT_UNROLL
            for (int v = 0; v < VECTORS; ++v) weights[v] = load_bytes(codes[t] + v * WIDTH);
            codes[t] += STEP_BYTES;
            DIFFBIT_UNROLL
            for (int r = 0; r < ROWS; ++r) {
              const auto four = splat4(q + 4 * r);
              DIFFBIT_UNROLL
              for (int v = 0; v < VECTORS; ++v) sums[t][r][v] = dot_bytes(sums[t][r][v], weights[v], four);
            }
          }
    }
    for (int64_t run = 0; BITS == 4 && run < runs; ++run) {
      Partial partial[TILES][ROWS][VECTORS];
      DIFFBIT_UNROLL
      for (int t = 0; t < TILES; ++t)
        DIFFBIT_UNROLL
        for (int r = 0; r < ROWS; ++r)
          DIFFBIT_UNROLL
          for (int v = 0; v < VECTORS; ++v) partial[t][r][v] = partial_of(sums[t][r][v]);
      DIFFBIT_UNROLL
      for (int s = 0; s < STEPS; ++s) {
        DIFFBIT_UNROLL
        for (int t = 0; t < TILES; ++t) {
          prefetch(codes[t] + AHEAD);
          Bytes both[VECTORS], low[VECTORS], high[VECTORS];
          DIFFBIT_UNROLL
          for (int v = 0; v < VECTORS; ++v) {
            both[v] = load_bytes(codes[t] + v * WIDTH);
            low[v] = both[v] & nibble;
            high[v] = shift<4>(both[v]) & nibble;
          }
          codes[t] += STEP_BYTES;
          DIFFBIT_UNROLL
          for (int r = 0; r < ROWS; ++r) {
            const auto even = splat4(q + 4 * r), odd = splat4(q + 4 * (ROWS + r));
            if constexpr (NIBBLE_SHIFT) {
              DIFFBIT_UNROLL
              for (int v = 0; v < VECTORS; ++v) partial[t][r][v] = dot_nibbles(partial[t][r][v], both[v], even, odd);
              continue;
            }
            DIFFBIT_UNROLL
            for (int v = 0; v < VECTORS; ++v) partial[t][r][v] = dot(partial[t][r][v], low[v], even);
            DIFFBIT_UNROLL
            for (int v = 0; v < VECTORS; ++v) {
              partial[t][r][v] = dot(partial[t][r][v], high[v], odd);
              in_order(partial[t][r][v]);
            }
          }
        }
        q += 8 * ROWS;
      }
      DIFFBIT_UNROLL
      for (int t = 0; t < TILES; ++t)
        DIFFBIT_UNROLL
        for (int r = 0; r < ROWS; ++r)
          DIFFBIT_UNROLL
          for (int v = 0; v < VECTORS; ++v) sums[t][r][v] = with_partial(sums[t][r][v], partial[t][r][v]);
    }
    DIFFBIT_UNROLL
    for (int t = 0; t < TILES; ++t) {
      prefetch(scales[t] + AHEAD / 16);
      DIFFBIT_UNROLL
      for (int v = 0; v < VECTORS; ++v) {
        const F32 scale = load(scales[t] + v * F32_LANES);
        DIFFBIT_UNROLL
        for (int r = 0; r < ROWS; ++r)
          results[t][r][v] = fma(total<BITS>(sums[t][r][v]), scale * splat(rows.scales[g * ROWS + r]), results[t][r][v]);
      }
      scales[t] += scale_step;
      if (ZEROS) zeros[t] += scale_step;
    }
  }
  for (int t = 0; t < TILES; ++t)
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < VECTORS; ++v) {
        const int64_t column = (first + t * apart) * INT4_TILE + v * F32_LANES, at = r * weight.n + column;
        const F32 values = results[t][r][v] * splat(weight.factor);
        if (half)
          put(static_cast<uint16_t*>(y) + at, weight.n - column, values);
        else
          put(static_cast<float*>(y) + at, weight.n - column, values);
      }
}

// Registers: 32 with AVX-512 and NEON, 16 with the others; a tile of one row takes VECTORS of them for its sums. Results may
// stay in memory until the end of a group
constexpr int MOST_ROWS = INT4_ROWS;
constexpr int streams_of(int rows) { return rows <= INT4_TWO_TILES ? 2 : 1; }
static_assert(MOST_ROWS <= INT4_MOST_ROWS, "the table has room");

template <int BITS, int ROWS>
void multiply_rows(const Int4Rows& rows, const Int4Weight& weight, int64_t first, int64_t apart, int64_t count, void* y,
                   bool half) {
  constexpr int STREAMS = streams_of(ROWS);
  const bool zeros = weight.zeros;
  if (count == STREAMS)
    return (zeros ? tiles<BITS, STREAMS, ROWS, true> : tiles<BITS, STREAMS, ROWS, false>)(rows, weight, first, apart, y, half);
  for (int64_t i = 0; i < count; ++i)
    (zeros ? tiles<BITS, 1, ROWS, true> : tiles<BITS, 1, ROWS, false>)(rows, weight, first + i * apart, 0, y, half);
}

/// multiply_rows<BITS, rows.count>, for 1 to ROWS rows.
template <int BITS, int ROWS>
void multiply_rows_of(const Int4Rows& rows, const Int4Weight& weight, int64_t first, int64_t apart, int64_t count,
                      void* y, bool half) {
  if constexpr (ROWS > 1)
    if (rows.count < ROWS) return multiply_rows_of<BITS, ROWS - 1>(rows, weight, first, apart, count, y, half);
  multiply_rows<BITS, ROWS>(rows, weight, first, apart, count, y, half);
}

template <int BITS>
void multiply(const Int4Rows& rows, const Int4Weight& weight, int64_t first, int64_t apart, int64_t count, void* y,
              bool half) {
  multiply_rows_of<BITS, MOST_ROWS>(rows, weight, first, apart, count, y, half);
}

}  // namespace

#define DIFFBIT_TABLE(BITS)                                                                                           \
  {MOST_ROWS,                                                                                                         \
   {0, streams_of(1), streams_of(2), streams_of(3), streams_of(4), streams_of(5), streams_of(6), streams_of(7),       \
    streams_of(8)},                                                                                                   \
   quantize,                                                                                                          \
   multiply<BITS>}
extern const Int4Kernels int4 = DIFFBIT_TABLE(4);
extern const Int4Kernels int8 = DIFFBIT_TABLE(8);

}  // namespace diffbit::DIFFBIT_ISA
