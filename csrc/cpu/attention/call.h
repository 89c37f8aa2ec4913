// A call of DiffAttention: its shapes and tensors, and the steps that decode.cpp and prefill.cpp share.
//
// Rows: the queries of one kv head g are rows, first those of the signal heads in the order [pair, token], then those of the
// noise heads, each of which `ratio` neighbouring pairs share. With one sub-head of keys, all rows are multiplied by it; with
// two, the signal rows by the first and the noise rows by the second. After the difference the signal rows hold
// A1 - lambda A2. With one branch there are no noise rows and nothing is subtracted. Rows whose gate is 0 are left out.
#pragma once

#include <vector>

#include "../hadamard/kernels.h"
#include "cache.h"
#include "op.h"

namespace diffbit {

/// The scratch buffers of a thread. `decode` takes all of them in the calling thread; in `prefill`, SCORES, QUERIES and
/// MIXED belong to the workers.
enum Scratch { SCORES, QUERIES, MIXED, MAXIMA, SUMS, KEYS, VALUES, RECENT, KEY_ROWS, VALUE_ROWS };
static_assert(VALUE_ROWS < SCRATCH_SLOTS, "a thread has as many");

constexpr int64_t CHUNK = 256;  // keys per task
static_assert(CHUNK % ATTENTION_KEYS == 0, "a chunk is packed by itself");

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

struct Call;

/// The rows of a kv head that are computed for some new tokens: the signal rows whose gate is not 0, then the noise rows that
/// they need.
struct Rows {
  struct Row {
    int64_t head, i;  // a pair, or a noise head, of the kv head; the new token
    int64_t noise;    // of a signal row with noise: the row to subtract
  };
  std::vector<Row> all;
  int64_t signals = 0;

  Rows(const Call& call, int64_t b, int64_t g, int64_t begin, int64_t end);
  int64_t count() const { return static_cast<int64_t>(all.size()); }
  const Row& operator[](int64_t row) const { return all[static_cast<size_t>(row)]; }
  QueryRows of_sub_heads(int64_t width) const {
    return width == 2 ? QueryRows{{signals, count() - signals}} : QueryRows{{count(), 0}};
  }
};

struct Call {
  /// row: one of the batch's, where rows have lengths of their own; else -1, and the call has all of them.
  Call(const DiffAttention& op, const AttentionNode::Tensors& tensors, int64_t row = -1);

  const AttentionKernels& kernels;
  const LowBitKernels& lowbit;
  const HadamardKernels& hadamard_kernels;
  bool bfloat16;
  int64_t first_row, batch;  // rows first_row .. first_row + batch of the tensors
  int64_t heads, query_heads, kv_heads, width, branches, ratio, d;
  int64_t groups, pairs, noises;  // groups: kv heads; pairs and noise heads per kv head
  int64_t window, sliding;
  bool appends;
  int top;  // largest code of the query; 0: the query is not rounded
  float scale, norm_eps;
  bool half;  // query, key, value, out are float16
  Tensor query, lambda, positions, cos, sin, mask, gates, out;
  Cache keys, values;

  // A part of a call: the new tokens first .. first + length of all_length, after `past` tokens. With a sliding window
  // tokens are counted from the cache's `base` on, because earlier tokens are neither visible nor quantized.
  int64_t first, length, past;
  int64_t all_length, all_total, mask_columns;
  // Derived from them: tokens in all, and in the cache before the part; quantized tokens before and after the part (0
  // for 8 bits and more); signal rows
  int64_t total, cached, before, after, rows;
  void set_part(int64_t first_, int64_t length_, int64_t all_past);

  bool is_low_bit() const { return keys.is_low_bit() || values.is_low_bit(); }
  /// Whether the part quantizes the first block of all, whose keys make the offset.
  bool quantizes_first() const { return appends && keys.base == 0 && before == 0 && after > 0; }
  int64_t all_rows() const { return rows + noises * length; }
  int64_t width_floats() const { return width * padded(d); }
  /// Sub-head j of kv head g, counted through the batch.
  int64_t head(int64_t b, int64_t g, int64_t j) const { return b * kv_heads + g * width + j; }
  /// New token i of the part, counted through the batch.
  int64_t token(int64_t b, int64_t i) const { return b * all_length + first + i; }
  /// How many quantized tokens the new token i sees.
  int64_t seen_quantized(int64_t i) const {
    return !is_low_bit() ? 0 : appends ? quantized_tokens(past + i + 1, window) : after;
  }
  /// The first token that new token i sees.
  int64_t first_seen(int64_t i) const { return sliding ? larger(0, past + i + 1 - sliding) : 0; }
  const int64_t* mask_of(int64_t b) const { return mask.as<int64_t>() + b * mask_columns + keys.base; }
  float lambda_of(int64_t b, int64_t i, int64_t pair) const {
    return lambda.as<float>()[lambda.rank == 1 ? pair : token(b, i) * heads + pair];
  }
  /// The gate of a pair of kv head g, 0 where its row is not computed.
  float gate_of(int64_t b, int64_t i, int64_t g, int64_t pair) const {
    return gates ? gates.as<float>()[token(b, i) * heads + g * pairs + pair] : 1;
  }

  /// d numbers of a tensor [B, S, any, d] as floats; `wide` is memory for converting them.
  const float* floats(const Tensor& tensor, int64_t index, float* wide) const;
  /// y = RoPE(x) * by, at the position of new token i.
  void rotate(const float* x, int64_t b, int64_t i, float by, float* y) const;
  /// y = the Hadamard transform of x, d numbers.
  void hadamard(const float* x, float* y) const;
  /// The queries of rows of kv head g, after RoPE, scaled, and rotated if keys are: q [rows, padded(d)].
  void rotate_queries(int64_t b, int64_t g, const Rows& of, float* q) const;
  /// The score of queries with the first tokens of a low-bit cache, which are in float16: s[i * stride + t] for the `count`
  /// rows of q of sub-head j and t < `tokens`.
  void first_scores(int64_t b, int64_t g, int64_t j, const float* q, int64_t count, int64_t tokens, float* s,
                    int64_t stride) const;
  /// query . offset of the keys of sub-head j.
  float offset_score(int64_t b, int64_t g, int64_t j, const float* query) const;
  /// Writes the outputs of kv head g for the new tokens begin..end, whose signal rows are `of`: the sum of `count` parts of a
  /// row, `part_stride` floats apart, through the head norm, times the gate. Rows that were left out are zeros.
  void write(int64_t b, int64_t g, int64_t begin, int64_t end, const Rows& of, const float* parts, int64_t count,
             int64_t part_stride) const;
};

/// For few rows, in each call of tokens that all see the same quantized tokens. The calls have other rows of the batch.
void decode(const std::vector<Call>& calls, Context& context);
/// For many rows. The cache has its tokens in order.
void prefill(const Call& call, Context& context);

}  // namespace diffbit
