// LowBitMatMul with vectors; compiled once per instruction set. Like cpu/int4/vector.cpp, but for the codes: a vector of WIDTH
// bytes of a plane has bits of eight, four or two quads of each of WIDTH / 4 rows, so a quad's codes are put together from one or
// two planes. Levels of a table are looked up with a shuffle of bytes.
#include "kernels.h"

#include "../simd/vectors.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

constexpr int VECTORS = LOWBIT_PLANE / WIDTH;
constexpr int64_t AHEAD = 4096;  // bytes to prefetch
constexpr int MOST_ROWS = INT4_ROWS;
constexpr int streams_of(int rows) { return rows <= INT4_TWO_TILES ? 2 : 1; }

/// Field `quad` of the fields of WIDE bits whose planes begin at `planes`, with its lowest bit at TO.
template <int WIDE, int TO>
DIFFBIT_INLINE Bytes field(const uint8_t* planes, int quad) {
  const Bytes plane = load_bytes(planes + quad * WIDE / 8 * LOWBIT_PLANE);
  const Bytes mask = splat(static_cast<uint8_t>(((1 << WIDE) - 1) << TO));
  switch (quad * WIDE % 8 - TO) {
    case 7: return shift<7>(plane) & mask;
    case 6: return shift<6>(plane) & mask;
    case 5: return shift<5>(plane) & mask;
    case 4: return shift<4>(plane) & mask;
    case 3: return shift<3>(plane) & mask;
    case 2: return shift<2>(plane) & mask;
    case 1: return shift<1>(plane) & mask;
    case 0: return plane & mask;
    case -1: return shift<-1>(plane) & mask;
    case -2: return shift<-2>(plane) & mask;
    case -3: return shift<-3>(plane) & mask;
    default: return shift<-4>(plane) & mask;
  }
}

/// The codes of a quad.
template <int BITS>
DIFFBIT_INLINE Bytes codes_of(const uint8_t* run, int quad) {
  constexpr int LOW = BITS < 4 ? 2 : 4, HIGH = BITS - LOW;
  if constexpr (HIGH == 0)
    return field<LOW, 0>(run, quad);
  else
    return field<LOW, 0>(run, quad) | field<HIGH, LOW>(run + LOW * LOWBIT_PLANE, quad);
}

template <int BITS, bool TABLE, int TILES, int ROWS>
void tiles(const Int4Rows& rows, const LowBitWeight& weight, int64_t first, int64_t apart, void* y, bool half) {
  constexpr int MOST = static_cast<int>(dots((1 << BITS) - 1) < LOWBIT_QUADS ? dots((1 << BITS) - 1) : LOWBIT_QUADS);
  constexpr int QUADS = MOST == 8 ? 8 : MOST >= 4 ? 4 : 2;  // between flushes of Partials
  const int64_t runs = weight.group_size / LOWBIT_RUN;
  uint8_t bytes[16] = {};
  if (TABLE)
    for (int i = 0; i < 1 << BITS; ++i) bytes[i] = weight.levels[i] ^ BYTE_MIDDLE;
  [[maybe_unused]] const Bytes table = load_table(bytes);
  const uint8_t* codes[TILES];
  int64_t scales[TILES];  // positions
  F32 results[TILES][ROWS][VECTORS];
  DIFFBIT_UNROLL
  for (int t = 0; t < TILES; ++t) {
    const int64_t group = (first + t * apart) * weight.groups;
    codes[t] = weight.codes + group * runs * BITS * LOWBIT_PLANE;
    scales[t] = group * INT4_TILE;
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
        for (int v = 0; v < VECTORS; ++v) sums[t][r][v] = splat_int(rows.offsets[g * ROWS + r]);
    for (int64_t run = 0; run < runs; ++run) {
      DIFFBIT_UNROLL
      for (int t = 0; t < TILES; ++t)
        DIFFBIT_UNROLL
        for (int plane = 0; plane < BITS; ++plane) prefetch(codes[t] + plane * LOWBIT_PLANE + AHEAD);
      DIFFBIT_UNROLL
      for (int begin = 0; begin < LOWBIT_QUADS; begin += QUADS) {
        Partial partial[TILES][ROWS][VECTORS];
        DIFFBIT_UNROLL
        for (int t = 0; t < TILES; ++t)
          DIFFBIT_UNROLL
          for (int r = 0; r < ROWS; ++r)
            DIFFBIT_UNROLL
            for (int v = 0; v < VECTORS; ++v) partial[t][r][v] = partial_of(sums[t][r][v]);
        DIFFBIT_UNROLL
        for (int quad = begin; quad < begin + QUADS; ++quad) {
          DIFFBIT_UNROLL
          for (int t = 0; t < TILES; ++t) {
            Bytes weights[VECTORS];
            DIFFBIT_UNROLL
            for (int v = 0; v < VECTORS; ++v) {
              weights[v] = codes_of<BITS>(codes[t] + v * WIDTH, quad);
              if (TABLE) weights[v] = lookup(table, weights[v]);
            }
            DIFFBIT_UNROLL
            for (int r = 0; r < ROWS; ++r) {
              const Bytes four = splat4(q + 4 * r);
              DIFFBIT_UNROLL
              for (int v = 0; v < VECTORS; ++v) {
                if constexpr (TABLE) {
                  sums[t][r][v] = dot_centered(sums[t][r][v], weights[v], four);
                } else {
                  partial[t][r][v] = dot(partial[t][r][v], weights[v], four);
                  in_order(partial[t][r][v]);
                }
              }
            }
          }
          q += 4 * ROWS;
        }
        if constexpr (!TABLE)
          DIFFBIT_UNROLL
          for (int t = 0; t < TILES; ++t)
            DIFFBIT_UNROLL
            for (int r = 0; r < ROWS; ++r)
              DIFFBIT_UNROLL
              for (int v = 0; v < VECTORS; ++v) sums[t][r][v] = with_partial(sums[t][r][v], partial[t][r][v]);
      }
      DIFFBIT_UNROLL
      for (int t = 0; t < TILES; ++t) codes[t] += BITS * LOWBIT_PLANE;
    }
    DIFFBIT_UNROLL
    for (int t = 0; t < TILES; ++t) {
      DIFFBIT_UNROLL
      for (int v = 0; v < VECTORS; ++v) {
        const int64_t at = scales[t] + v * F32_LANES;
        const F32 scale = weight.int8_scales ? load(static_cast<const int8_t*>(weight.scales) + at)
                                             : load(static_cast<const uint16_t*>(weight.scales) + at);
        DIFFBIT_UNROLL
        for (int r = 0; r < ROWS; ++r)
          results[t][r][v] = fma(to_floats(sums[t][r][v]), scale * splat(rows.scales[g * ROWS + r]), results[t][r][v]);
      }
      scales[t] += INT4_TILE;
    }
  }
  for (int t = 0; t < TILES; ++t)
    for (int v = 0; v < VECTORS; ++v) {
      const int64_t column = (first + t * apart) * INT4_TILE + v * F32_LANES, room = weight.n - column;
      if (room <= 0) continue;
      const F32 row_scale = weight.row_scales ? load(weight.row_scales + column) : splat(1.0f);
      for (int r = 0; r < ROWS; ++r) {
        const F32 values = results[t][r][v] * (row_scale * splat(weight.factor));
        const auto put = [&](auto* to) { room < F32_LANES ? store_part(to, room, values) : store(to, values); };
        if (half)
          put(static_cast<uint16_t*>(y) + r * weight.n + column);
        else
          put(static_cast<float*>(y) + r * weight.n + column);
      }
    }
}

template <int BITS, bool TABLE, int ROWS>
void multiply_rows(const Int4Rows& rows, const LowBitWeight& weight, int64_t first, int64_t apart, int64_t count, void* y,
                   bool half) {
  constexpr int STREAMS = streams_of(ROWS);
  if (count == STREAMS) return tiles<BITS, TABLE, STREAMS, ROWS>(rows, weight, first, apart, y, half);
  for (int64_t i = 0; i < count; ++i) tiles<BITS, TABLE, 1, ROWS>(rows, weight, first + i * apart, 0, y, half);
}

/// multiply_rows<BITS, TABLE, rows.count>, for 1 to ROWS rows.
template <int BITS, bool TABLE, int ROWS = MOST_ROWS>
void multiply_rows_of(const Int4Rows& rows, const LowBitWeight& weight, int64_t first, int64_t apart, int64_t count,
                      void* y, bool half) {
  if constexpr (ROWS > 1)
    if (rows.count < ROWS) return multiply_rows_of<BITS, TABLE, ROWS - 1>(rows, weight, first, apart, count, y, half);
  multiply_rows<BITS, TABLE, ROWS>(rows, weight, first, apart, count, y, half);
}

void multiply(const Int4Rows& rows, const LowBitWeight& weight, int64_t first, int64_t apart, int64_t count, void* y,
              bool half) {
  using Multiply = decltype(LowBitMatMulKernels::multiply);
  constexpr Multiply INTEGERS[] = {multiply_rows_of<2, false>, multiply_rows_of<3, false>, multiply_rows_of<4, false>,
                                   multiply_rows_of<5, false>, multiply_rows_of<6, false>};
  constexpr Multiply LEVELS[] = {multiply_rows_of<2, true>, multiply_rows_of<3, true>, multiply_rows_of<4, true>};
  (weight.levels ? LEVELS : INTEGERS)[weight.bits - 2](rows, weight, first, apart, count, y, half);
}

}  // namespace

extern const LowBitMatMulKernels lowbit_matmul = {
    MOST_ROWS,
    {0, streams_of(1), streams_of(2), streams_of(3), streams_of(4), streams_of(5), streams_of(6), streams_of(7), streams_of(8)},
    BYTE_MIDDLE - 128,
    multiply};

}  // namespace diffbit::DIFFBIT_ISA
