// Int4MatMul and Int8MatMul with vectors; compiled once per instruction set.
//
// A vector of WIDTH bytes of a tile's step holds 8 weights of each of WIDTH / 4 rows, one row per lane. A dot product of its
// low nibbles with four even activations, broadcast to all lanes, and one of its high nibbles with the four odd ones advance
// all rows by 8 weights. A group's sums are converted to floats and scaled in their lanes.
//
// TILES tiles, far apart in memory, by ROWS rows of activations keep all their sums in registers: with few rows, memory is
// read in several streams; with many rows, each unpacking serves all of them.
#include "groups.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

constexpr int VECTORS = INT4_TILE * 4 / WIDTH;
constexpr int64_t STEP_BYTES = INT4_TILE * 4;
constexpr int STEPS = 4;  // between flushes: 32 weights, the smallest group
static_assert(2 * STEPS <= dots(15), "a Partial holds the products of its steps");
constexpr int64_t AHEAD = 4096;  // bytes to prefetch

/// Returns the initial value of a group's sums: its offset times each row's zero point, if `dot` and `dot_bytes` do not
/// include it.
template <int BITS, bool ZEROS>
DIFFBIT_INLINE Ints offsets(int32_t offset, const uint8_t* zeros) {
  constexpr int32_t TIMES = 1 << NIBBLE_SHIFT;
  if (BITS == 4) return ZEROS ? times_bytes(offset * TIMES, zeros) : splat_int(offset * TIMES);
  if (!ZEROS) return splat_int(offset * (128 - BYTE_MIDDLE));
  return times_bytes(offset, zeros) + splat_int(-offset * BYTE_MIDDLE);
}

/// Returns a group's sums as floats.
template <int BITS>
DIFFBIT_INLINE F32 total(Ints sums) {
  if constexpr (BITS == 4 && NIBBLE_SHIFT) return to_floats(shift<NIBBLE_SHIFT>(sums));
  return to_floats(sums);
}

void quantize(const void* x, bool half, int64_t k, int64_t groups, int64_t group_size, int32_t minus,
              const Int4Rows& rows) {
  const auto put = [&](int64_t row, int64_t g, const int8_t* bytes, int32_t sum, float scale) {
    int8_t* q = rows.q + g * group_size * rows.count + 4 * row;
    for (int64_t i = 0; i < group_size; i += INT4_STEP, q += 8 * rows.count)
      store_parted(bytes + i, q, q + 4 * rows.count);
    rows.offsets[g * rows.count + row] = minus * sum;
    rows.scales[g * rows.count + row] = scale;
  };
  round_groups(x, half, k, groups, group_size, rows.count, put);
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

/// Calls multiply_rows<BITS, rows.count>, for 1 to ROWS rows.
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

#ifdef DIFFBIT_MANY_ROWS
template <int BITS>
void unpack_values(const Int4Weight& weight, int64_t tile, UnpackedTile& to) {
  const int64_t size = weight.group_size, middle = 1 << (BITS - 1);
  const uint8_t* codes = weight.codes + tile * weight.groups * size * INT4_TILE * BITS / 8;
  const int64_t first = tile * weight.scale_groups * INT4_TILE, step = weight.scale_groups == 1 ? 0 : INT4_TILE;
  alignas(64) uint8_t lane_of_byte[STEP_BYTES];  // lane of each byte
  for (int i = 0; i < STEP_BYTES; ++i) lane_of_byte[i] = static_cast<uint8_t>(i / 4);
  int8_t* values = to.values;
  to.has_zeros = BITS == 8 && weight.zeros;
  for (int64_t i = 0; BITS == 4 && weight.zeros && i < weight.groups * INT4_TILE; ++i)
    to.has_zeros |= weight.zeros[first + i] > 128;  // code - zero would wrap around
  const bool lessened = BITS == 4 && weight.zeros && !to.has_zeros;
  for (int64_t g = 0; g < weight.groups; ++g) {
    const uint8_t* zeros = weight.zeros ? weight.zeros + first + g * step : nullptr;
    for (int v = 0; v < VECTORS; ++v)
      store(to.scales + g * INT4_TILE + v * F32_LANES, load(weight.scales + first + g * step + v * F32_LANES));
    if (to.has_zeros)
      for (int i = 0; i < INT4_TILE; ++i) to.zeros[g * INT4_TILE + i] = zeros[i] - middle;
    for (int v = 0; v < VECTORS; ++v) {
      const Bytes subtracted =
          lessened ? lookup(load_table(zeros), load_bytes(lane_of_byte + v * WIDTH)) : splat(uint8_t{middle});
      int8_t* at = values + v * WIDTH;
      for (int64_t i = 0; i < size * BITS / 32; ++i) {
        const Bytes both = load_bytes(codes + i * STEP_BYTES + v * WIDTH);
        if (BITS == 8) {
          store(at + i * STEP_BYTES, minus(both, subtracted));
        } else {
          store(at + 2 * i * STEP_BYTES, minus(both & splat(uint8_t{15}), subtracted));
          store(at + (2 * i + 1) * STEP_BYTES, minus(shift<4>(both) & splat(uint8_t{15}), subtracted));
        }
      }
    }
    codes += size * INT4_TILE * BITS / 8;
    values += size * INT4_TILE;
  }
  for (float& factor : to.factors) factor = weight.factor;
}
#else
template <int BITS>
constexpr decltype(Int4Kernels::unpack_values) unpack_values = nullptr;
#endif

}  // namespace

#define DIFFBIT_TABLE(BITS)                                                                                           \
  {MOST_ROWS,                                                                                                         \
   {0, streams_of(1), streams_of(2), streams_of(3), streams_of(4), streams_of(5), streams_of(6), streams_of(7),       \
    streams_of(8)},                                                                                                   \
   quantize,                                                                                                          \
   multiply<BITS>,                                                                                                    \
   unpack_values<BITS>}
extern const Int4Kernels int4 = DIFFBIT_TABLE(4);
extern const Int4Kernels int8 = DIFFBIT_TABLE(8);

}  // namespace diffbit::DIFFBIT_ISA
