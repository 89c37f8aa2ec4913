// diffbit.Hadamard (ops/hadamard.py says what it computes).
#pragma once

#include "op.h"

namespace diffbit {

struct HadamardKernels;

/// What a node and its tensors say, checked; the same on every device.
struct HadamardNode {
  struct Tensors {
    Tensor a, y;
  };

  explicit HadamardNode(const Node& node);
  Tensors tensors(Context& context) const;

  int64_t block;
};

class Hadamard : HadamardNode {
 public:
  static constexpr const char* NAME = "Hadamard";
  explicit Hadamard(const Node& node);
  void compute(Context& context) const;

 private:
  const HadamardKernels* kernels_;
};

}  // namespace diffbit
