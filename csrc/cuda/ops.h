// The ops on an NVIDIA GPU: what a node and its tensors must be is checked as on the CPU, but for what lies on the device;
// the kernels (api.h) are started on ONNX Runtime's stream.
#pragma once

#include "../diff_attention.h"
#include "../hadamard.h"
#include "../int4_matmul.h"
#include "../ternary_matmul.h"

namespace diffbit::cuda {

constexpr const char* PROVIDER = "CUDAExecutionProvider";

/// A position beyond the tables is no error here: it makes its token NaN.
struct DiffAttention : AttentionNode {
  static constexpr const char* NAME = "DiffAttention";
  using AttentionNode::AttentionNode;
  void compute(Context& context) const;
};

struct Hadamard : HadamardNode {
  static constexpr const char* NAME = "Hadamard";
  using HadamardNode::HadamardNode;
  void compute(Context& context) const;
};

/// One zero point for all groups is taken to be 8, unread.
struct Int4MatMul : Int4Node {
  static constexpr const char* NAME = "Int4MatMul";
  using Int4Node::Int4Node;
  void compute(Context& context) const;
};

struct TernaryMatMul : TernaryNode {
  static constexpr const char* NAME = "TernaryMatMul";
  using TernaryNode::TernaryNode;
  void compute(Context& context) const;
};

}  // namespace diffbit::cuda
