// DiffAttention over a low-bit cache (ops/kv_cache.py): its inner loops, one table per instruction set.
//
// A grid is shared by LOWBIT_GROUP tokens of a channel of the keys, or by LOWBIT_GROUP channels of a token's value: a
// number is code * step + point. Codes are packed as kv_cache.pack packs them, d * bits / 8 bytes a token; grids are
// float16, those of a block of keys [2, d], those of a token's value [2, d / 32], steps before points. d is a multiple
// of LOWBIT_GROUP. Rows of scores and of floats are as in attention.h.
#pragma once

#include "attention.h"

namespace diffbit {

constexpr int64_t LOWBIT_GROUP = 32;
static_assert(LOWBIT_GROUP == ATTENTION_KEYS && LOWBIT_GROUP % ATTENTION_PAD == 0, "a block of keys is packed by itself");

/// The same rows of the one or two sub-heads of a kv head.
struct GridRows {
  const uint8_t* codes[2];
  const Half* grids[2];
  int64_t count;
};

/// Of the codes of a grid.
constexpr float middle(int bits) { return static_cast<float>((1 << bits) - 1) / 2; }

enum GridKind { GRID_INT4, GRID_INT2, GRID_KINDS };

struct LowBitKernels {
  /// 32 keys [32, d], or one value [d], onto grids; a grid of numbers that are not all finite is NaN.
  void (*round_keys[GRID_KINDS])(const Half* x, int64_t d, uint8_t* codes, Half* grid);
  void (*round_value[GRID_KINDS])(const Half* x, int64_t d, uint8_t* codes, Half* grid);

  /// s[(j * rows + i) * stride + t] = q[j * rows + i] . key t of sub-head j, for t < n; n is a multiple of 32.
  void (*scores[GRID_KINDS])(const GridRows& keys, int64_t n, int64_t d, const float* q, int64_t rows, float* s,
                             int64_t stride);
  /// The same with products of integers: for each block the query times the steps is rounded to -top..top. Its codes'
  /// products are summed in int32; what rounding lost meets the middle of the keys' grid.
  void (*integer_scores[GRID_KINDS])(const GridRows& keys, int64_t n, int64_t d, const float* q, int64_t rows, int top,
                                     float* s, int64_t stride);
  /// The same over int8 rows, any n and d: each query is rounded once.
  void (*integer_row_scores)(const CacheRows& keys, int64_t n, int64_t d, const float* q, int64_t rows, int top,
                             float* s, int64_t stride);
  /// Adds sum_t p[i * stride + t] * value t of sub-head j to out[i * width + j * d ..], width = values.count * d.
  void (*mix[GRID_KINDS])(const GridRows& values, int64_t n, int64_t d, const float* p, int64_t rows, int64_t stride,
                          float* out);

  // Many query rows, as in attention.h. Without grids: the codes themselves
  void (*pack_keys[GRID_KINDS])(const uint8_t* codes, const Half* grids, int64_t n, int64_t d, float* packed);
  void (*unpack_values[GRID_KINDS])(const uint8_t* codes, const Half* grids, int64_t n, int64_t d, float* values);
  /// codes = the rounded q, or with the grid of a block of keys the rounded q * steps, as floats. *offset = q . points
  /// and what rounding lost times the middle of the keys' grid, 0 without a grid. Returns the step.
  float (*round_query)(const float* q, const Half* grid, int key_bits, int64_t d, int top, float* codes, float* offset);
};

DIFFBIT_DECLARE(LowBitKernels, lowbit)

}  // namespace diffbit
