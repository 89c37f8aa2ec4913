#include "ops.h"

#include "api.h"

namespace diffbit::cuda {
namespace {

/// Launches an op on the node's stream.
template <class Op>
void start(const Context& context, const char* name, const Op& op, size_t (*workspace)(const Op*),
           const char* (*run)(const Op*, void*, void*)) {
  const DeviceScratch scratch(context, workspace(&op));
  if (const char* wrong = run(&op, scratch.data(), context.stream())) throw Error("%s: %s", name, wrong);
}

}  // namespace

void CausalConv::compute(Context& context) const {
  const Tensors of = tensors(context);
  DiffbitCausalConv op{};
  op.x = of.x.data, op.weight = of.weight.data, op.bias = of.bias.data, op.attention_mask = of.mask.data;
  op.past_state = of.past.data, op.y = of.y.data, op.present_state = of.present.data;
  op.batch = of.batch, op.steps = of.steps, op.total = of.total, op.channels = of.channels, op.width = of.width;
  op.type = of.x.type;
  start(context, NAME, op, diffbit_cuda_causal_conv_workspace, diffbit_cuda_causal_conv);
}

void DiffAttention::compute(Context& context) const {
  const AttentionTensors of = tensors(context);
  DiffbitAttention op{};
  op.query = of.query.data, op.key = of.keys.fresh.data, op.value = of.values.fresh.data, op.lambda = of.lambda.data;
  op.past_key = of.keys.past.data, op.past_value = of.values.past.data;
  op.position_ids = of.positions.data, op.cos = of.cos.data, op.sin = of.sin.data, op.attention_mask = of.mask.data;
  op.past_key_scale = of.keys.past_scale.data, op.past_value_scale = of.values.past_scale.data;
  op.past_key_recent = of.keys.past_recent.data, op.past_value_recent = of.values.past_recent.data;
  op.out = of.out.data, op.present_key = of.keys.present.data, op.present_value = of.values.present.data;
  op.present_key_scale = of.keys.present_scale.data, op.present_value_scale = of.values.present_scale.data;
  op.present_key_recent = of.keys.present_recent.data, op.present_value_recent = of.values.present_recent.data;
  op.batch = of.batch, op.steps = of.length, op.past_length = of.past, op.d = of.d;
  op.heads = heads, op.kv_heads = kv_heads;
  op.past_key_capacity = of.keys.past_capacity, op.past_value_capacity = of.values.past_capacity;
  op.key_capacity = of.keys.capacity, op.value_capacity = of.values.capacity;
  op.mask_row = of.mask.shape[1], op.positions = of.cos.shape[0];
  op.branches = branches, op.noise_ratio = noise_ratio, op.wide_value = width - 1, op.lambda_per_token = of.lambda.rank == 3;
  op.key_bits = key_bits, op.value_bits = value_bits, op.query_bits = query_bits, op.window = window;
  op.sliding_window = sliding_window;
  op.type = of.query.type, op.key_type = of.keys.past.type, op.value_type = of.values.past.type;
  op.scale = scale, op.norm_eps = norm_eps;
  start(context, NAME, op, diffbit_cuda_attention_workspace, diffbit_cuda_attention);
}

void FloatMatMul::compute(Context& context) const {
  const Tensors of = tensors(context);
  DiffbitFloatMatMul op{};
  op.a = of.a.data, op.w = of.w.data, op.y = of.y.data;
  op.m = of.rows, op.n = of.w.shape[0], op.k = of.w.shape[1], op.type = of.a.type;
  start(context, NAME, op, diffbit_cuda_float_matmul_workspace, diffbit_cuda_float_matmul);
}

void Hadamard::compute(Context& context) const {
  const Tensors of = tensors(context);
  DiffbitHadamard op{};
  op.a = of.a.data, op.y = of.y.data, op.size = of.a.size(), op.block = block, op.type = of.a.type;
  start(context, NAME, op, diffbit_cuda_hadamard_workspace, diffbit_cuda_hadamard);
}

void Int4MatMul::compute(Context& context) const {
  const Tensors of = tensors(context);
  DiffbitInt4MatMul op{};
  op.a = of.a.data, op.codes = of.codes.data, op.scales = of.scales.data, op.factor = of.factor.data, op.y = of.y.data;
  op.zeros = of.symmetric ? nullptr : of.zeros.data;
  op.m = of.rows, op.n = n, op.k = k, op.group_size = group_size, op.type = of.a.type;
  start(context, NAME, op, diffbit_cuda_int4_matmul_workspace, diffbit_cuda_int4_matmul);
}

void Int8MatMul::compute(Context& context) const {
  const Tensors of = tensors(context);
  DiffbitInt8MatMul op{};
  op.a = of.a.data, op.codes = of.codes.data, op.scales = of.scales.data, op.factor = of.factor.data, op.y = of.y.data;
  op.zeros = of.symmetric ? nullptr : of.zeros.data;
  op.m = of.rows, op.n = n, op.k = k, op.group_size = group_size, op.scale_groups = of.scale_groups, op.type = of.a.type;
  start(context, NAME, op, diffbit_cuda_int8_matmul_workspace, diffbit_cuda_int8_matmul);
}

void GatherQuantized::compute(Context& context) const {
  const Tensors of = tensors(context);
  DiffbitGatherQuantized op{};
  op.ids = of.ids.data, op.codes = of.codes.data, op.scales = of.scales.data, op.factor = of.factor.data, op.y = of.y.data;
  op.zeros = of.symmetric ? nullptr : of.zeros.data;
  op.m = of.ids.size(), op.n = n, op.k = k, op.group_size = group_size, op.scale_groups = of.scale_groups, op.bits = bits;
  op.type = of.factor.type;
  start(context, NAME, op, diffbit_cuda_gather_quantized_workspace, diffbit_cuda_gather_quantized);
}

void SelectiveScan::compute(Context& context) const {
  const Tensors of = tensors(context);
  DiffbitSelectiveScan op{};
  op.x = of.x.data, op.dt = of.dt.data, op.z = of.z.data, op.b = of.b.data, op.c = of.c.data;
  op.a = of.a.data, op.d = of.d.data, op.dt_bias = of.dt_bias.data, op.attention_mask = of.mask.data;
  op.past_state = of.past.data, op.y = of.y.data, op.memory = of.memory.data, op.present_state = of.present.data;
  op.batch = of.batch, op.steps = of.steps, op.total = of.total, op.channels = of.channels, op.states = of.states;
  op.type = of.x.type;
  start(context, NAME, op, diffbit_cuda_selective_scan_workspace, diffbit_cuda_selective_scan);
}

void TernaryMatMul::compute(Context& context) const {
  const Tensors of = tensors(context);
  DiffbitTernaryMatMul op{};
  op.a = of.a.data, op.packed = of.packed.data, op.scale = of.scale.data, op.y = of.y.data;
  op.m = of.rows, op.n = n, op.k = k, op.activation_bits = activation_bits, op.scale_per_row = of.scale_per_row;
  op.type = of.a.type;
  start(context, NAME, op, diffbit_cuda_ternary_matmul_workspace, diffbit_cuda_ternary_matmul);
}

}  // namespace diffbit::cuda
