// A call of DiffAttention: its shapes, its tensors, and what decode.cpp and prefill.cpp both do with them.
//
// Rows. The queries of one kv head g are rows: those of the signal heads in the order [pair, token], then those of the noise
// heads, each of which `ratio` neighbouring pairs share. All meet its one sub-head of the keys; where there are two, the
// signal rows meet the first and the noise rows the second. After the difference the signal rows hold A1 - lambda A2. With
// one branch there are no noise rows and nothing to subtract.
#pragma once

#include "../ops.h"
#include "cache.h"

namespace diffbit {

/// Each memory of a thread: `decode` takes all of them in the calling thread; SCORES, QUERIES and MIXED of `prefill`
/// belong to the workers.
enum Scratch { SCORES, QUERIES, MIXED, MAXIMA, SUMS, KEYS, VALUES, RECENT, KEY_ROWS, VALUE_ROWS };
static_assert(VALUE_ROWS < SCRATCH_SLOTS, "a thread has as many");

constexpr int64_t CHUNK = 256;  // keys of a task
static_assert(CHUNK % ATTENTION_KEYS == 0, "a chunk is packed by itself");

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

struct Call {
  Call(const DiffAttention& op, const AttentionTensors& tensors);

  const AttentionKernels& kernels;
  const LowBitKernels& lowbit;
  int64_t batch, heads, query_heads, kv_heads, width, branches, ratio, d;
  int64_t groups, pairs, noises;  // groups: of sub-heads, the kv heads; pairs and noise heads of each
  int64_t window, sliding;
  bool appends;
  int top;  // of the query's codes, 0: the query is not rounded
  float scale, norm_eps;
  bool half;  // query, key, value, out are float16
  Tensor query, lambda, positions, cos, sin, mask, out;
  Cache keys, values;

  // A part of a call: the new tokens first .. first + length of all_length, behind `past` tokens. With a sliding window
  // tokens are counted from the cache's `base` on: those before it nobody sees, nor quantizes.
  int64_t first, length, past;
  int64_t all_length, all_total;
  // What follows from them: tokens in all, and those that the cache held before the part; those quantized before it and
  // after it, 0 without blocks; signal rows
  int64_t total, held, before, after, rows;
  void set_part(int64_t first_, int64_t length_, int64_t all_past);

  bool blockwise() const { return keys.blockwise() || values.blockwise(); }
  int64_t all_rows() const { return rows + noises * length; }
  QueryRows query_rows() const { return width == 2 ? QueryRows{{rows, all_rows() - rows}} : QueryRows{{all_rows(), 0}}; }
  int64_t width_floats() const { return width * padded(d); }
  /// Sub-head j of kv head g, counted through the batch.
  int64_t head(int64_t b, int64_t g, int64_t j) const { return b * kv_heads + g * width + j; }
  /// New token i of the part, counted through the batch.
  int64_t token(int64_t b, int64_t i) const { return b * all_length + first + i; }
  /// How many tokens new token i sees as codes.
  int64_t seen_quantized(int64_t i) const {
    return !blockwise() ? 0 : appends ? quantized_tokens(past + i + 1, window) : after;
  }
  /// The first token that new token i sees.
  int64_t first_seen(int64_t i) const { return sliding ? larger(0, past + i + 1 - sliding) : 0; }
  const int64_t* mask_of(int64_t b) const { return mask.as<int64_t>() + b * all_total + keys.base; }
  float lambda_of(int64_t b, int64_t i, int64_t pair) const {
    return lambda.as<float>()[lambda.rank == 1 ? pair : token(b, i) * heads + pair];
  }

  /// d numbers of a tensor [B, S, any, d] as floats; `wide` holds them where they are not floats yet.
  const float* floats(const Tensor& tensor, int64_t index, float* wide) const;
  void rotate(const float* x, int64_t b, int64_t i, float by, float* y) const;
  /// The queries of kv head g and the new tokens begin..end, rotated and scaled: q [pairs + noises, end - begin,
  /// padded(d)].
  void rotate_queries(int64_t b, int64_t g, int64_t begin, int64_t end, float* q) const;
  /// The head's output: the sum of `count` parts, `part_stride` floats apart, through the head norm.
  void write(int64_t b, int64_t i, int64_t head, const float* parts, int64_t count, int64_t part_stride) const;
};

/// Few rows, all of whose tokens see the same tokens quantized.
void decode(const Call& call, Context& context);
/// Many rows. The cache has its tokens in order.
void prefill(const Call& call, Context& context);

}  // namespace diffbit
