// diffbit.Int4MatMul (ops/int4_matmul.py says what it computes and how the weights lie).
#pragma once

#include "op.h"

namespace diffbit {

struct Int4Kernels;

class Int4MatMul {
 public:
  static constexpr const char* NAME = "Int4MatMul";
  explicit Int4MatMul(const Node& node);
  void compute(Context& context) const;

 private:
  int64_t k_, n_, group_size_;
  const Int4Kernels* kernels_;
};

}  // namespace diffbit
