// DiffAttention on a CPU.
#pragma once

#include "../../ort/attention_node.h"
#include "../ops.h"

namespace diffbit {

struct AttentionKernels;
struct HadamardKernels;
struct LowBitKernels;

struct DiffAttention : AttentionNode {
  explicit DiffAttention(const Node& node);
  void compute(Context& context) const;
  /// Where rows have lengths of their own.
  void compute_rows(const Tensors& of, Context& context) const;
  const AttentionKernels* kernels;
  const LowBitKernels* lowbit;
  const HadamardKernels* hadamard;  // of a low-bit cache
  bool bfloat16;  // for many rows
};

}  // namespace diffbit
