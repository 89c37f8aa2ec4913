// diffbit.TernaryMatMul (ops/ternary_matmul.py says what it computes and how the weights lie).
#pragma once

#include "op.h"

namespace diffbit {

struct TernaryKernels;

class TernaryMatMul {
 public:
  static constexpr const char* NAME = "TernaryMatMul";
  explicit TernaryMatMul(const Node& node);
  void compute(Context& context) const;

 private:
  int64_t k_, n_, bits_;
  const TernaryKernels* kernels_;
};

}  // namespace diffbit
