// diffbit.TernaryMatMul (ops/ternary_matmul.py says what it computes and how the weights lie).
#pragma once

#include "op.h"

namespace diffbit {

struct TernaryKernels;

/// What a node and its tensors say, checked; the same on every device.
struct TernaryNode {
  struct Tensors {
    Tensor a, packed, scale, y;
    int64_t rows;  // of a
  };

  explicit TernaryNode(const Node& node);
  Tensors tensors(Context& context) const;

  int64_t k, n, activation_bits;
};

class TernaryMatMul : TernaryNode {
 public:
  static constexpr const char* NAME = "TernaryMatMul";
  explicit TernaryMatMul(const Node& node);
  void compute(Context& context) const;

 private:
  const TernaryKernels* kernels_;
};

}  // namespace diffbit
