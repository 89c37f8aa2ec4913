// DiffAttention over a cache of 4, 3 or 2 bits (ops/kv_cache.py): its inner loops, one table per instruction set.
//
// A row is d codes of `bits` bits, packed as in kv_cache.pack, and a float16 scale; a number is level * scale. d is a multiple
// of CACHE_BLOCK. Rows are unpacked to levels, which are int8, some at a time, and the kernels of int8 rows read those.
#pragma once

#include "kernels.h"

namespace diffbit {

static_assert(CACHE_BLOCK == ATTENTION_KEYS && CACHE_BLOCK % ATTENTION_PAD == 0, "a block is packed by itself");

enum CodeType { CODES_INT4, CODES_INT3, CODES_INT2, CODE_TYPES };

/// The levels of a format's codes, and what a number of unit variance has to exceed for each code but the first.
template <int BITS>
struct Levels;
template <>
struct Levels<4> {
  static constexpr int8_t LEVELS[16] = {-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127};
  static constexpr float THRESHOLDS[15] = {-2.4008f, -1.8435f, -1.4371f, -1.0993f, -0.7996f, -0.5224f, -0.2582f, 0,
                                           0.2582f,  0.5224f,  0.7996f,  1.0993f,  1.4371f,  1.8435f,  2.4008f};
};
template <>
struct Levels<3> {
  static constexpr int8_t LEVELS[8] = {-127, -79, -45, -14, 14, 45, 79, 127};
  static constexpr float THRESHOLDS[7] = {-1.748f, -1.05f, -0.5006f, 0, 0.5006f, 1.05f, 1.748f};
};
template <>
struct Levels<2> {
  static constexpr int8_t LEVELS[4] = {-127, -38, 38, 127};
  static constexpr float THRESHOLDS[3] = {-0.9816f, 0, 0.9816f};
};

struct LowBitKernels {
  /// Rounds n rows x [n, d], less the offset [d] unless that is null. A row whose numbers are not all finite has scale NaN.
  void (*encode[CODE_TYPES])(const Half* x, const Half* offset, int64_t n, int64_t d, uint8_t* codes, Half* scales);
  /// levels [n, d] of n rows.
  void (*unpack[CODE_TYPES])(const uint8_t* codes, int64_t n, int64_t d, int8_t* levels);
  /// As AttentionKernels' scores of int8 rows, with products of integers: each query is rounded to -top..top once, products
  /// are summed in int32.
  void (*integer_row_scores)(const CacheRows& keys, int64_t n, int64_t d, const float* q, QueryRows rows, int top,
                             float* s, int64_t stride);
  /// codes = the rounded q, as floats, for many query rows. Returns their scale.
  float (*quantize_query)(const float* q, int64_t d, int top, float* codes);
};

/// The table in a namespace that defines all of these.
#define DIFFBIT_LOWBIT_KERNELS \
  {{encode<4>, encode<3>, encode<2>}, {unpack<4>, unpack<3>, unpack<2>}, integer_row_scores, quantize_query}

DIFFBIT_DECLARE(LowBitKernels, lowbit)

}  // namespace diffbit
