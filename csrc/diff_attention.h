// diffbit.DiffAttention (ops/diff_attention.py says what it computes).
#pragma once

#include "op.h"

namespace diffbit {

struct AttentionKernels;
struct LowBitKernels;

class DiffAttention {
 public:
  static constexpr const char* NAME = "DiffAttention";
  explicit DiffAttention(const Node& node);
  void compute(Context& context) const;

 private:
  int64_t heads_, kv_heads_, width_;  // width_: sub-heads of a value, 2 or 1
  int64_t branches_, window_;
  int key_bits_, value_bits_, query_bits_;
  float scale_, norm_eps_;
  const AttentionKernels* kernels_;
  const LowBitKernels* lowbit_;
};

}  // namespace diffbit
