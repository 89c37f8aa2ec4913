// Checks the node and tensors of diffbit.DiffAttention, for every device (ops/diff_attention.py defines the op).
#pragma once

#include "generated/schema.h"
#include "layouts.h"
#include "op.h"

namespace diffbit {

/// How many of `total` tokens are quantized in a cache of less than 8 bits.
int64_t quantized_tokens(int64_t total, int64_t window);
/// Rows of a sliding window's cache.
int64_t ring_rows(int64_t sliding_window, int bits);

/// Keys or values of a call: past, new tokens, and the buffers of both. Buffers that a cache with these bits does not have
/// are null.
struct CacheTensors {
  Tensor fresh;  // [B, S, Hk * d]; null if nothing is appended
  Tensor past, past_scale, past_recent;
  Tensor present, present_scale, present_recent;
  int bits;
  int64_t past_capacity, capacity;
  int64_t ring;  // rows of a sliding window's cache, which is its capacity; else 0
  bool in_place, recent_in_place;  // past and present are the same memory

  /// Whether rows are rotated codes of less than 8 bits, with a residual window.
  bool is_low_bit() const { return bits < 8; }
};

struct AttentionNode : schema::DiffAttention {
  struct Tensors {
    bool appends;  // else past is another node's present and holds all tokens; present is the same
    int64_t batch, steps, past_length, d;  // steps: the new tokens
    const int64_t* lengths;  // past_length of each row, below 0 for a row that is left alone; null: they are equal
    int64_t total;           // columns of attention_mask
    Tensor query, lambda, position_ids, cos, sin, attention_mask, gates, out;
    CacheTensors keys, values;
  };

  explicit AttentionNode(const Node& node);
  /// Only past_length is read here; the others may be in the GPU's memory.
  Tensors tensors(Context& context) const;

  int64_t query_heads() const { return heads + (branches - 1) * (heads / noise_ratio); }

  int64_t heads, kv_heads, width;  // width: sub-heads of a value, 2 or 1
  int64_t branches, noise_ratio, window, first, sliding_window;
  int key_bits, value_bits, query_bits;
  float scale, norm_eps;
};

}  // namespace diffbit
