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
struct OneLength : AttentionNode {
  using AttentionNode::AttentionNode;
  Tensors tensors(Context& context) const {
    const Tensors of = AttentionNode::tensors(context);
    if (of.lengths) throw Error("past_length has %lld numbers, wanted one on a GPU", number(of.batch));
    return of;
  }
};

#define DIFFBIT_LAUNCH(Node, Op, function) \
  Launch<Node, Diffbit##Op, diffbit_cuda_##function##_workspace, diffbit_cuda_##function>

using CausalConv = DIFFBIT_LAUNCH(CausalConvNode, CausalConv, causal_conv);
using DiffAttention = DIFFBIT_LAUNCH(OneLength, DiffAttention, attention);
using FloatMatMul = DIFFBIT_LAUNCH(FloatMatMulNode, FloatMatMul, float_matmul);
using GatherLowBit = DIFFBIT_LAUNCH(GatherLowBitNode, GatherLowBit, gather_lowbit);
using GatherQuantized = DIFFBIT_LAUNCH(GatherNode, GatherQuantized, gather_quantized);
using Hadamard = DIFFBIT_LAUNCH(HadamardNode, Hadamard, hadamard);
using Int4MatMul = DIFFBIT_LAUNCH(Int4Node, Int4MatMul, int4_matmul);
using Int8MatMul = DIFFBIT_LAUNCH(Int8Node, Int8MatMul, int8_matmul);
using LowBitMatMul = DIFFBIT_LAUNCH(LowBitNode, LowBitMatMul, lowbit_matmul);
using SelectiveScan = DIFFBIT_LAUNCH(SelectiveScanNode, SelectiveScan, selective_scan);
using SiluGate = DIFFBIT_LAUNCH(SiluGateNode, SiluGate, silu_gate);
using TernaryMatMul = DIFFBIT_LAUNCH(TernaryNode, TernaryMatMul, ternary_matmul);

}  // namespace diffbit::cuda
