// The ops on an NVIDIA GPU. Nodes and tensors are checked as on the CPU, except for values in device memory; the kernels
// (api.h) are launched on ONNX Runtime's stream.
//
// Values that are an error on the CPU: a position beyond the tables of DiffAttention and an id outside the table of
// GatherQuantized or GatherLowBit make NaN; a single zero point or level is taken to be 2^(bits - 1), a single scale of rows 1.
#pragma once

#include "../ort/attention_node.h"
#include "../ort/nodes.h"
#include "api.h"

namespace diffbit::cuda {

constexpr const char* PROVIDER = "CUDAExecutionProvider";

template <class Base, class Call, size_t (*WORKSPACE)(const Call*), const char* (*RUN)(const Call*, void*, void*)>
struct Launch : Base {
  using Base::Base;
  void compute(Context& context) const {
    const Call call = Call::from(*this, this->tensors(context));
    const DeviceScratch scratch(context, WORKSPACE(&call));
    if (const char* error = RUN(&call, scratch.data(), context.stream())) throw Error("%s: %s", Base::NAME, error);
  }
};

/// Attention whose rows all have the same length.
struct DiffAttentionNode : AttentionNode {
  using AttentionNode::AttentionNode;
  Tensors tensors(Context& context) const {
    const Tensors tensors = AttentionNode::tensors(context);
    if (tensors.lengths) throw Error("past_length has %lld numbers, wanted one on a GPU", number(tensors.batch));
    return tensors;
  }
};

/// create_X(node) for every op.
#define DIFFBIT_CREATE_OP(Op, function)                                                              \
  inline Kernel* create_##function(const Node& node) {                                               \
    return new KernelOf<Launch<Op##Node, Diffbit##Op, diffbit_cuda_##function##_workspace,           \
                               diffbit_cuda_##function>>(node);                                      \
  }
DIFFBIT_OPS(DIFFBIT_CREATE_OP)
#undef DIFFBIT_CREATE_OP

}  // namespace diffbit::cuda
