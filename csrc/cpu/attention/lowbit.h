// DiffAttention over a low-bit cache (ops/kv_cache.py): its inner loops, one table per instruction set.
//
// A scale and a zero point belong to CACHE_BLOCK tokens of a channel: a number is code * scale + zero. Codes are packed as
// in kv_cache.pack, d * bits / 8 bytes per token. `scales` are float16, followed by the zero points: [2, d] for a block. d
// and all numbers of tokens are multiples of CACHE_BLOCK. Rows of scores and of floats are as in kernels.h.
#pragma once

#include "kernels.h"

namespace diffbit {

static_assert(CACHE_BLOCK == ATTENTION_KEYS && CACHE_BLOCK % ATTENTION_PAD == 0, "a block is packed by itself");

/// The same rows of the one or two sub-heads of a kv head.
struct BlockRows {
  const uint8_t* codes[2];
  const Half* scales[2];
  int64_t count;
};

/// The kernels for codes of `bits` bits.
static constexpr float middle(int bits) { return static_cast<float>((1 << bits) - 1) / 2; }

enum CodeType { CODES_INT4, CODES_INT2, CODE_TYPES };

struct LowBitKernels {
  /// CACHE_BLOCK rows [32, d]; a channel of numbers that are not all finite has scale and zero NaN.
  void (*quantize[CODE_TYPES])(const Half* x, int64_t d, uint8_t* codes, Half* scales);

  /// s[i * stride + t] = q[i] . key t of sub-head j, for the rows i of j and t < n.
  void (*scores[CODE_TYPES])(const BlockRows& keys, int64_t n, int64_t d, const float* q, QueryRows rows, float* s,
                             int64_t stride);
  /// The same with products of integers: for each block the query times the scales is rounded to -top..top. Products of
  /// codes are summed in int32; the rounding error is multiplied by the middle of the keys' codes.
  void (*integer_scores[CODE_TYPES])(const BlockRows& keys, int64_t n, int64_t d, const float* q, QueryRows rows, int top,
                                     float* s, int64_t stride);
  /// The same over int8 rows, any n and d: each query is rounded once.
  void (*integer_row_scores)(const CacheRows& keys, int64_t n, int64_t d, const float* q, QueryRows rows, int top,
                             float* s, int64_t stride);
  /// Adds sum_t p[i * stride + t] * value t of sub-head j to out[i * width + j * d ..], width = values.count * d.
  void (*mix[CODE_TYPES])(const BlockRows& values, int64_t n, int64_t d, const float* p, int64_t rows, int64_t stride,
                          float* out);

  // Many query rows, as in kernels.h. Without scales: the codes themselves
  void (*pack_keys[CODE_TYPES])(const uint8_t* codes, const Half* scales, int64_t n, int64_t d, float* packed);
  void (*unpack_values[CODE_TYPES])(const uint8_t* codes, const Half* scales, int64_t n, int64_t d, float* values);
  /// codes = the rounded q, or with the scales of a block of keys the rounded q * scales, as floats. *offset = q . zeros plus
  /// the rounding error times the middle of the keys' codes; 0 without scales. Returns the scale of the codes.
  float (*quantize_query)(const float* q, const Half* scales, int key_bits, int64_t d, int top, float* codes,
                          float* offset);
};

/// The table in a namespace that defines all of these.
#define DIFFBIT_LOWBIT_KERNELS                                                                                      \
  {{quantize<4>, quantize<2>}, {scores<4>, scores<2>}, {integer_scores<4>, integer_scores<2>}, integer_row_scores,   \
   {mix<4>, mix<2>}, {pack_keys<4>, pack_keys<2>}, {unpack_values<4>, unpack_values<2>}, quantize_query}

DIFFBIT_DECLARE(LowBitKernels, lowbit)

}  // namespace diffbit
