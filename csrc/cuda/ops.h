// The ops on an NVIDIA GPU. Nodes and tensors are checked as on the CPU, except for values in device memory; the kernels
// (api.h) are launched on ONNX Runtime's stream.
#pragma once

#include "../ort/attention_node.h"
#include "../ort/nodes.h"

namespace diffbit::cuda {

constexpr const char* PROVIDER = "CUDAExecutionProvider";

struct CausalConv : CausalConvNode {
  using CausalConvNode::CausalConvNode;
  void compute(Context& context) const;
};

/// A position beyond the tables is not an error here: its token becomes NaN.
struct DiffAttention : AttentionNode {
  using AttentionNode::AttentionNode;
  void compute(Context& context) const;
};

struct FloatMatMul : FloatMatMulNode {
  using FloatMatMulNode::FloatMatMulNode;
  void compute(Context& context) const;
};

struct Hadamard : HadamardNode {
  using HadamardNode::HadamardNode;
  void compute(Context& context) const;
};

/// A single zero point for all groups is assumed to be 8 and not read.
struct Int4MatMul : Int4Node {
  using TiledNode::TiledNode;
  void compute(Context& context) const;
};

/// A single zero point is assumed to be 128.
struct Int8MatMul : Int8Node {
  using TiledNode::TiledNode;
  void compute(Context& context) const;
};

/// Likewise; an id outside the table is not an error here: its row becomes NaN.
struct GatherQuantized : GatherNode {
  using GatherNode::GatherNode;
  void compute(Context& context) const;
};

struct SelectiveScan : SelectiveScanNode {
  using SelectiveScanNode::SelectiveScanNode;
  void compute(Context& context) const;
};

struct TernaryMatMul : TernaryNode {
  using TernaryNode::TernaryNode;
  void compute(Context& context) const;
};

}  // namespace diffbit::cuda
