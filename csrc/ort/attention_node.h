// diffbit.DiffAttention (ops/diff_attention.py says what it computes).
#pragma once

#include "op.h"

namespace diffbit {

struct AttentionKernels;
struct LowBitKernels;

inline long long number(int64_t value) { return static_cast<long long>(value); }  // for %lld

/// How many of `total` tokens a cache of 4 or 2 bits holds as codes.
int64_t settled(int64_t total, int64_t window);

/// Keys or values of a run: what was, what is new, and the buffers of both; those that the kind has not are null.
struct CacheTensors {
  Tensor fresh;  // [B, S, Hk * d]
  Tensor past, past_scale, past_recent;
  Tensor present, present_scale, present_recent;
  int bits;
  int64_t scale_tokens;  // how many tokens share a scale
  int64_t past_capacity, capacity;
  bool in_place, recent_in_place;  // past and present are one memory

  bool grids() const { return bits < 8; }
};

struct AttentionTensors {
  int64_t batch, steps, past, d;
  Tensor query, lambda, positions, cos, sin, mask, out;
  CacheTensors keys, values;
};

/// What a node and its tensors say, checked; the same on every device.
struct AttentionNode {
  explicit AttentionNode(const Node& node);
  /// Of these only past_length is read: the others may lie where this code cannot look.
  AttentionTensors tensors(Context& context) const;

  int64_t heads, kv_heads, width;  // width: sub-heads of a value, 2 or 1
  int64_t branches, window;
  int key_bits, value_bits, query_bits;
  float scale, norm_eps;
};

class DiffAttention : AttentionNode {
 public:
  static constexpr const char* NAME = "DiffAttention";
  explicit DiffAttention(const Node& node);
  void compute(Context& context) const;

 private:
  const AttentionKernels* kernels_;
  const LowBitKernels* lowbit_;
};

}  // namespace diffbit
