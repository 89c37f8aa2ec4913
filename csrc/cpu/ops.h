// The ops on a CPU. The nodes are checked as on every device (ort/), the kernels of the best instruction set are chosen
// when a node is created, and `compute` splits the work into tasks for the session's threads. The split depends only on
// shapes, so the number of threads does not change any bit of the result.
#pragma once

#include "../ort/attention_node.h"
#include "../ort/nodes.h"

namespace diffbit {

/// Names of the instruction sets that this CPU and this build have, best first.
std::string available_isas(const char* between);

struct AttentionKernels;
struct LowBitKernels;
struct FloatMatMulKernels;
struct HadamardKernels;
struct Int4Kernels;
struct LowBitMatMulKernels;
struct MambaKernels;
struct ManyRowsKernels;
struct SiluGateKernels;
struct TernaryKernels;

struct CausalConv : CausalConvNode {
  explicit CausalConv(const Node& node);
  void compute(Context& context) const;
  const MambaKernels* kernels;
};

struct DiffAttention : AttentionNode {
  explicit DiffAttention(const Node& node);
  void compute(Context& context) const;
  /// Where rows have lengths of their own.
  void compute_rows(const Tensors& of, Context& context) const;
  const AttentionKernels* kernels;
  const LowBitKernels* lowbit;
  bool bfloat16;  // for many rows
};

struct FloatMatMul : FloatMatMulNode {
  explicit FloatMatMul(const Node& node);
  void compute(Context& context) const;
  const FloatMatMulKernels* kernels;
};

struct Hadamard : HadamardNode {
  explicit Hadamard(const Node& node);
  void compute(Context& context) const;
  const HadamardKernels* kernels;
};

/// Int4MatMul and Int8MatMul.
template <class Node_>
struct TiledMatMul : Node_ {
  explicit TiledMatMul(const Node& node);
  void compute(Context& context) const;
  const Int4Kernels* kernels;
  const ManyRowsKernels* many;
};
using Int4MatMul = TiledMatMul<Int4Node>;
using Int8MatMul = TiledMatMul<Int8Node>;

struct GatherQuantized : GatherNode {
  using GatherNode::GatherNode;
  void compute(Context& context) const;
};

struct LowBitMatMul : LowBitNode {
  explicit LowBitMatMul(const Node& node);
  void compute(Context& context) const;
  const LowBitMatMulKernels* kernels;
  const Int4Kernels* rounding;  // of the activations
  const ManyRowsKernels* many;
};

struct GatherLowBit : GatherLowBitNode {
  using GatherLowBitNode::GatherLowBitNode;
  void compute(Context& context) const;
};

struct SelectiveScan : SelectiveScanNode {
  explicit SelectiveScan(const Node& node);
  void compute(Context& context) const;
  const MambaKernels* kernels;
};

struct SiluGate : SiluGateNode {
  explicit SiluGate(const Node& node);
  void compute(Context& context) const;
  const SiluGateKernels* kernels;
};

struct TernaryMatMul : TernaryNode {
  explicit TernaryMatMul(const Node& node);
  void compute(Context& context) const;
  const TernaryKernels* kernels;
};

}  // namespace diffbit
