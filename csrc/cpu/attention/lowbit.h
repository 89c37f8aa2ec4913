// DiffAttention over a cache of 4, 3 or 2 bits (ops/kv_cache.py): its inner loops, one table per instruction set.
//
// A row is d codes of `bits` bits, packed as in kv_cache.pack, and a float16 scale; a number is level * scale. d is a multiple
// of CACHE_BLOCK. Rows are unpacked to levels, which are int8, some at a time, and the kernels of int8 rows read those.
#pragma once

#include "../../ort/generated/levels.h"
#include "kernels.h"

namespace diffbit {

static_assert(CACHE_BLOCK == ATTENTION_KEYS && CACHE_BLOCK % ATTENTION_PAD == 0, "a block is packed by itself");

enum CodeType { CODES_INT4, CODES_INT3, CODES_INT2, CODE_TYPES };

/// The levels of a format's codes, and what a number of unit variance has to exceed for each code but the first.
template <int BITS>
struct Levels;
template <>
struct Levels<4> {
  static constexpr int8_t LEVELS[] = {DIFFBIT_CACHE_LEVELS_4};
  static constexpr float THRESHOLDS[] = {DIFFBIT_CACHE_THRESHOLDS_4};
};
template <>
struct Levels<3> {
  static constexpr int8_t LEVELS[] = {DIFFBIT_CACHE_LEVELS_3};
  static constexpr float THRESHOLDS[] = {DIFFBIT_CACHE_THRESHOLDS_3};
};
template <>
struct Levels<2> {
  static constexpr int8_t LEVELS[] = {DIFFBIT_CACHE_LEVELS_2};
  static constexpr float THRESHOLDS[] = {DIFFBIT_CACHE_THRESHOLDS_2};
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
