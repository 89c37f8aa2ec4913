// diffbit.Int4MatMul (ops/int4_matmul.py says what it computes and how the weights lie).
#pragma once

#include "op.h"

namespace diffbit {

struct Int4Kernels;

/// What a node and its tensors say, checked; the same on every device.
struct Int4Node {
  struct Tensors {
    Tensor a, codes, scales, zeros, factor, y;
    int64_t rows;  // of a
    bool symmetric;  // zeros is one number
  };

  explicit Int4Node(const Node& node);
  Tensors tensors(Context& context) const;

  int64_t k, n, group_size;
};

class Int4MatMul : Int4Node {
 public:
  static constexpr const char* NAME = "Int4MatMul";
  explicit Int4MatMul(const Node& node);
  void compute(Context& context) const;

 private:
  const Int4Kernels* kernels_;
};

}  // namespace diffbit
