// diffbit.DiffAttention (ops/diff_attention.py says what it computes).
#pragma once

#include "op.h"

namespace diffbit {

struct AttentionKernels;

class DiffAttention {
 public:
  static constexpr const char* NAME = "DiffAttention";
  explicit DiffAttention(const Node& node);
  void compute(Context& context) const;

 private:
  int64_t heads_, kv_heads_, width_;  // width_: sub-heads of a value, 2 or 1
  float scale_, norm_eps_;
  const AttentionKernels* kernels_;
};

}  // namespace diffbit
