// The inner loops of DiffAttention, one table per instruction set.
//
// Rows of a cache are d numbers of float32, float16 or int8 (with one scale per row: the number is code * scale). Rows of
// floats that the op itself makes are padded with zeros to `padded(d)`. Rows of scores have room for padded(n) numbers;
// those from n on may be overwritten.
#pragma once

#include <cstdint>

#include "../../ort/layouts.h"
#include "../half.h"
#include "../isa.h"

namespace diffbit {

constexpr int64_t ATTENTION_PAD = 16;   // a multiple of every vector's length
constexpr int64_t ATTENTION_KEYS = 32;  // keys in a block of packed keys
constexpr int64_t SPLIT_STEP = 32;       // split rows are a multiple of so many numbers long
constexpr int64_t SPLIT_ROWS = 32;       // a product of split rows writes a multiple of so many rows

enum CacheType { CACHE_FLOAT32, CACHE_FLOAT16, CACHE_INT8, CACHE_TYPES };

/// The same rows of the one or two sub-heads of a kv head.
struct CacheRows {
  const void* rows[2];
  const float* scales[2];  // int8 only
  int64_t count;
};

/// Rows of queries for each sub-head of the keys; those of the second follow those of the first.
struct QueryRows {
  int64_t count[2];
  __attribute__((always_inline)) int64_t begin(int64_t j) const { return j ? count[0] : 0; }
  __attribute__((always_inline)) int64_t end(int64_t j) const { return begin(j) + count[j]; }
};

/// Floats that n numbers of a row take, in parts of 16 bits.
static constexpr int64_t split_size(int64_t n, int64_t parts) {
  return (n + SPLIT_STEP - 1) / SPLIT_STEP * SPLIT_STEP * parts / 2;
}

/// Products of matrix instructions. Packed blocks of 32 keys [d, 32] or values [32, padded(d)] are split before they are
/// multiplied; a token then takes split_size(d, parts) floats.
struct SplitKernels {
  int64_t parts;  // of a key or a value, in bfloat16: two hold a float16, three a float, one is rounded
  void (*keys)(const float* block, int64_t d, float* to);
  void (*values)(const float* block, int64_t d, float* to);
  /// As AttentionKernels' packed_scores and mix, but SPLIT_ROWS - 1 more rows of `s` or `out` may be overwritten.
  void (*scores)(const float* packed, int64_t blocks, int64_t d, const float* q, int64_t rows, float* s, int64_t stride);
  void (*mix)(const CacheRows& values, int64_t n, int64_t d, const float* p, int64_t rows, int64_t stride, float* out);
};

struct AttentionKernels {
  void (*widen)(const Half* x, int64_t n, float* y);
  void (*narrow)(const float* x, int64_t n, Half* y);
  /// y = RoPE(x) * scale, with every product and difference rounded separately; d floats, d/2 angles.
  void (*rotate)(const float* x, const float* cos, const float* sin, int64_t d, float scale, float* y);
  /// scale = max|x| / 127, codes = round-half-even(x / scale); a row of zeros has scale 0 and codes 0, one with an infinity
  /// or a NaN has scale NaN and codes 0. Returns the scale.
  Half (*quantize)(const float* x, int64_t d, int8_t* codes);

  /// s[i * stride + t] = q[i] . key t of sub-head j, for the rows i of j and t < n. q: rows of padded(d).
  void (*scores[CACHE_TYPES])(const CacheRows& keys, int64_t n, int64_t d, const float* q, QueryRows rows, float* s,
                              int64_t stride);
  /// Whether a key is hidden: the mask is 0.
  bool (*hides)(const int64_t* mask, int64_t n);
  /// Sets s = -infinity for hidden keys.
  void (*hide)(float* s, const int64_t* mask, int64_t n);
  /// Replaces s by exp(s - m), m its maximum (returned; -infinity if nothing is visible); *sum is their sum.
  float (*softmax)(float* s, int64_t n, float* sum);
  /// p = a * a_factor - b * b_factor; p may be a or b.
  void (*combine)(const float* a, float a_factor, const float* b, float b_factor, int64_t n, float* p);
  /// Adds sum_t p[i * stride + t] * value t of sub-head j to out[i * width + j * padded(d) ..], width = values.count *
  /// padded(d).
  void (*mix[CACHE_TYPES])(const CacheRows& values, int64_t n, int64_t d, const float* p, int64_t rows, int64_t stride,
                           float* out);
  /// out[0 .. width * d) = the head norm (none for eps 0) of the sum of `count` parts, `part_stride` floats apart.
  void (*finish)(const float* parts, int64_t count, int64_t part_stride, int64_t width, int64_t d, float eps, float* out);

  // Many query rows: keys as blocks [d, 32], values as rows of padded(d) floats; both zero beyond the tokens. int8
  // without scales: the codes themselves
  void (*pack_keys[CACHE_TYPES])(const void* rows, const float* scales, int64_t n, int64_t d, float* packed);
  void (*unpack_values[CACHE_TYPES])(const void* rows, const float* scales, int64_t n, int64_t d, float* values);
  /// s[i * stride + t] = q[i] . key t for t < blocks * 32.
  void (*packed_scores)(const float* packed, int64_t blocks, int64_t d, const float* q, int64_t rows, float* s,
                        int64_t stride);
  const SplitKernels* split;  // those of 1, 2 and 3 parts, for sets with matrix instructions; else null
};

/// The table in a namespace that defines all of these, and DIFFBIT_SPLIT as the last.
#define DIFFBIT_ATTENTION_KERNELS                                                                                   \
  {widen, narrow, rotate, quantize, {scores<float>, scores<Half>, scores<int8_t>}, hides, hide, softmax, combine,    \
   {mix<float>, mix<Half>, mix<int8_t>}, finish, {pack_keys<float>, pack_keys<Half>, pack_keys<int8_t>},             \
   {unpack_values<float>, unpack_values<Half>, unpack_values<int8_t>}, packed_scores, DIFFBIT_SPLIT}

static constexpr int64_t padded(int64_t d) { return (d + ATTENTION_PAD - 1) / ATTENTION_PAD * ATTENTION_PAD; }

DIFFBIT_DECLARE(AttentionKernels, attention)

}  // namespace diffbit
