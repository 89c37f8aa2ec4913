// Products of attention with many query rows by matrix instructions of bfloat16. A float is the sum of three bfloat16, its
// parts: its upper half, that of the rest, and what then remains. Of the nine products of parts three are at most 2^-22 of the whole
// and left out; the other six are added in float32, so results are about as near as those of floats. Keys and values of a
// float16 cache are the sum of two parts, so then it is five. Where the session asks for bfloat16, rows and columns have one
// part, the nearest bfloat16, and it is one product.
//
//   A   rows of floats become, 32 at a time, 32 first parts, 32 second ones ...
//   B   [rows, columns] becomes [rows / 32, columns / 16, parts, 16 pairs of rows, 16 columns, 2]; rows beyond are zeros
#pragma once

#include "kernels.h"

#include "../simd/vectors.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

constexpr int64_t STEP = SPLIT_STEP;             // numbers of a row of A in a tile
constexpr int64_t PART = TILE_ROWS * TILE_BYTES / 4;  // floats that a tile takes
constexpr int row_parts(int parts) { return parts == 1 ? 1 : 3; }  // of A
constexpr int64_t COLUMNS = TILE_BYTES / 4;
constexpr int64_t TOGETHER = SPLIT_ROWS;
static_assert(STEP == TILE_BYTES / 2 && TOGETHER == 2 * TILE_ROWS, "what tiles hold");

/// The numbers that parts are taken from.
template <int PARTS>
DIFFBIT_INLINE F32 to_split(F32 a) {
  return PARTS == 1 ? to_upper(a) : a;
}

/// n floats to a row of A.
template <int PARTS>
void split_row(const float* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += STEP) {
    F32 rest[STEP / F32_LANES];
    DIFFBIT_UNROLL
    for (int64_t j = 0; j < STEP / F32_LANES; ++j) {
      const int64_t left = n - i - j * F32_LANES;
      const float* at = from + i + j * F32_LANES;
      rest[j] = to_split<PARTS>(left >= F32_LANES ? load(at) : left > 0 ? load_part(at, left) : splat(0.0f));
    }
    DIFFBIT_UNROLL
    for (int part = 0; part < row_parts(PARTS); ++part, to += STEP / 2) {
      store_upper(reinterpret_cast<uint16_t*>(to), rest);
      for (F32& one : rest) one = one - upper(one);
    }
  }
}

/// `from` [rows, columns] to B; columns are a multiple of 16.
template <int PARTS>
void split_matrix(const float* from, int64_t rows, int64_t columns, float* to) {
  for (int64_t begin = 0; begin < rows; begin += STEP)
    for (int64_t column = 0; column < columns; column += COLUMNS, to += PARTS * PART)
      for (int64_t row = begin; row < begin + STEP; row += 2)
        for (int64_t i = 0; i < COLUMNS; i += F32_LANES) {
          const float* at = from + row * columns + column + i;
          F32 even = row < rows ? load(at) : splat(0.0f), odd = row + 1 < rows ? load(at + columns) : splat(0.0f);
          even = to_split<PARTS>(even), odd = to_split<PARTS>(odd);
          DIFFBIT_UNROLL
          for (int part = 0; part < PARTS; ++part) {
            store(to + part * PART + (row - begin) / 2 * COLUMNS + i, upper_pairs(even, odd));
            even = even - upper(even), odd = odd - upper(odd);
          }
        }
}

/// c [16 ROWS, 16 WIDE] = a b, or (ADD) += a b, for `steps` steps of 32, which are b_step floats apart in b.
template <int PARTS, bool ADD, int ROWS, int WIDE>
void multiply_tiles(const float* a, int64_t a_stride, const float* b, int64_t b_step, int64_t steps, float* c,
                    int64_t c_stride) {
  constexpr int ROW_PARTS = row_parts(PARTS);
  const int64_t a_bytes = 4 * a_stride, c_bytes = 4 * c_stride;
  const float* down = a + TILE_ROWS * a_stride;
  float* c_down = c + TILE_ROWS * c_stride;
  if (ADD) {
    load_tile<0>(c, c_bytes);
    if (WIDE > 1) load_tile<1>(c + COLUMNS, c_bytes);
    if (ROWS > 1) load_tile<2>(c_down, c_bytes);
    if (ROWS > 1 && WIDE > 1) load_tile<3>(c_down + COLUMNS, c_bytes);
  } else {
    clear<0>(), clear<1>(), clear<2>(), clear<3>();
  }
  for (int64_t i = 0; i < steps; ++i, b += b_step)
    DIFFBIT_UNROLL
    for (int part = 0; part < ROW_PARTS; ++part, a += STEP / 2, down += STEP / 2) {
      load_tile<4>(a, a_bytes);
      if (ROWS > 1) load_tile<5>(down, a_bytes);
      DIFFBIT_UNROLL
      for (int64_t line = 0; line < WIDE * PART && part < PARTS; line += COLUMNS) prefetch(b + b_step + part * WIDE * PART + line);
      DIFFBIT_UNROLL
      for (int other = PARTS < ROW_PARTS - part ? PARTS - 1 : ROW_PARTS - 1 - part; other >= 0; --other) {
        load_tile<6>(b + other * PART, TILE_BYTES);
        if (WIDE > 1) load_tile<7>(b + (PARTS + other) * PART, TILE_BYTES);
        add_bfloats<0, 4, 6>();
        if (WIDE > 1) add_bfloats<1, 4, 7>();
        if (ROWS > 1) add_bfloats<2, 5, 6>();
        if (ROWS > 1 && WIDE > 1) add_bfloats<3, 5, 7>();
      }
    }
  store_tile<0>(c, c_bytes);
  if (WIDE > 1) store_tile<1>(c + COLUMNS, c_bytes);
  if (ROWS > 1) store_tile<2>(c_down, c_bytes);
  if (ROWS > 1 && WIDE > 1) store_tile<3>(c_down + COLUMNS, c_bytes);
}

/// The same for at most 32 rows and 32 columns.
template <int PARTS, bool ADD>
void multiply_some(const float* a, int64_t a_stride, const float* b, int64_t b_step, int64_t steps, int64_t rows,
                   int64_t columns, float* c, int64_t c_stride) {
  const bool tall = rows > TILE_ROWS, wide = columns > COLUMNS;
  (tall ? wide ? multiply_tiles<PARTS, ADD, 2, 2> : multiply_tiles<PARTS, ADD, 2, 1>
        : wide ? multiply_tiles<PARTS, ADD, 1, 2> : multiply_tiles<PARTS, ADD, 1, 1>)(a, a_stride, b, b_step, steps, c, c_stride);
}

template <int PARTS>
void split_keys(const float* block, int64_t d, float* to) {
  split_matrix<PARTS>(block, d, ATTENTION_KEYS, to);
}

template <int PARTS>
void split_values(const float* block, int64_t d, float* to) {
  split_matrix<PARTS>(block, ATTENTION_KEYS, padded(d), to);
}

template <int PARTS>
void split_scores(const float* packed, int64_t blocks, int64_t d, const float* q, int64_t rows, float* s, int64_t stride) {
  constexpr int ROW_PARTS = row_parts(PARTS);
  const int64_t width = split_size(d, ROW_PARTS), of_key = split_size(d, PARTS);  // floats
  const Tiles in_use(TILE_BYTES);
  for (int64_t row = 0; row < rows; row += TOGETHER) {
    const int64_t some = rows - row < TOGETHER ? rows - row : TOGETHER;
    alignas(64) float split[TOGETHER * split_size(ATTENTION_MOST_D, ROW_PARTS)];
    for (int64_t i = 0; i < some; ++i) split_row<PARTS>(q + (row + i) * padded(d), d, split + i * width);
    for (int64_t block = 0; block < blocks; ++block)
      multiply_some<PARTS, false>(split, width, packed + block * ATTENTION_KEYS * of_key, 2 * PARTS * PART, (d + STEP - 1) / STEP, some,
                           ATTENTION_KEYS, s + row * stride + block * ATTENTION_KEYS, stride);
  }
}

template <int PARTS>
void split_mix(const CacheRows& values, int64_t n, int64_t d, const float* p, int64_t rows, int64_t stride, float* out) {
  constexpr int64_t KEYS = 128, WIDTH = KEYS * row_parts(PARTS) / 2;  // keys at a time, floats that they take
  const int64_t columns = padded(d), width = values.count * columns;
  const Tiles in_use(TILE_BYTES);
  alignas(64) float split[TOGETHER * WIDTH];
  for (int64_t row = 0; row < rows; row += TOGETHER)
    for (int64_t t = 0; t < n; t += KEYS) {
      const int64_t some = rows - row < TOGETHER ? rows - row : TOGETHER, keys = n - t < KEYS ? n - t : KEYS;
      for (int64_t i = 0; i < some; ++i) split_row<PARTS>(p + (row + i) * stride + t, keys, split + i * WIDTH);
      for (int64_t j = 0; j < values.count; ++j)
        for (int64_t column = 0; column < columns; column += 2 * COLUMNS) {
          const float* from = static_cast<const float*>(values.rows[j]) + t * split_size(d, PARTS) + column / COLUMNS * PARTS * PART;
          multiply_some<PARTS, true>(split, WIDTH, from, ATTENTION_KEYS * split_size(d, PARTS), (keys + STEP - 1) / STEP, some,
                              columns - column, out + row * width + j * columns + column, width);
        }
    }
}

template <int PARTS>
constexpr SplitKernels split_kernels = {PARTS, split_keys<PARTS>, split_values<PARTS>, split_scores<PARTS>, split_mix<PARTS>};
constexpr SplitKernels SPLIT[] = {split_kernels<1>, split_kernels<2>, split_kernels<3>};

}  // namespace
}  // namespace diffbit::DIFFBIT_ISA
