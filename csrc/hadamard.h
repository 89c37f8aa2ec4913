// diffbit.Hadamard (ops/hadamard.py says what it computes).
#pragma once

#include "op.h"

namespace diffbit {

struct HadamardKernels;

class Hadamard {
 public:
  static constexpr const char* NAME = "Hadamard";
  explicit Hadamard(const Node& node);
  void compute(Context& context) const;

 private:
  int64_t block_;
  const HadamardKernels* kernels_;
};

}  // namespace diffbit
