// The ops on an NVIDIA GPU: what a node and its tensors must be is checked as on the CPU, but for what lies on the device;
// the kernels (api.h) are started on ONNX Runtime's stream.
#pragma once

#include "../ort/attention_node.h"
#include "../ort/nodes.h"

namespace diffbit::cuda {

constexpr const char* PROVIDER = "CUDAExecutionProvider";

struct CausalConv : CausalConvNode {
  using CausalConvNode::CausalConvNode;
  void compute(Context& context) const;
};

/// A position beyond the tables is no error here: it makes its token NaN.
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

/// One zero point for all groups is taken to be 8, unread.
struct Int4MatMul : Int4Node {
  using TiledNode::TiledNode;
  void compute(Context& context) const;
};

/// Likewise 128.
struct Int8MatMul : Int8Node {
  using TiledNode::TiledNode;
  void compute(Context& context) const;
};

/// Likewise; an id outside the table is no error here: it makes its row NaN.
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
