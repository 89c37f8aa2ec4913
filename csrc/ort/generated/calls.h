// Written by python -m diffbit.ops.schema, from ops/schema.py: change that.
#pragma once

#include <cstddef>
#include <cstdint>

#define DIFFBIT_CUDA_API extern "C" __attribute__((visibility("default")))

struct DiffbitCausalConv {
  const void* x;
  const void* weight;
  const void* bias;
  const void* attention_mask;
  const void* past_state;
  void* y;
  void* present_state;
  int64_t batch;
  int64_t steps;
  int64_t total;  // columns of attention_mask
  int64_t channels;
  int64_t width;  // rows of weight
  int64_t type;  // of x and y: FLOAT32, FLOAT16 or BFLOAT16

  template <class Node, class Tensors>
  static DiffbitCausalConv from([[maybe_unused]] const Node& node, const Tensors& tensors) {
    return {
        tensors.x.data,
        tensors.weight.data,
        tensors.bias.data,
        tensors.attention_mask.data,
        tensors.past_state.data,
        tensors.y.data,
        tensors.present_state.data,
        tensors.batch,
        tensors.steps,
        tensors.total,
        tensors.channels,
        tensors.width,
        tensors.x.type,
    };
  }
};
static_assert(offsetof(DiffbitCausalConv, x) == 0, "x");
static_assert(offsetof(DiffbitCausalConv, weight) == 8, "weight");
static_assert(offsetof(DiffbitCausalConv, bias) == 16, "bias");
static_assert(offsetof(DiffbitCausalConv, attention_mask) == 24, "attention_mask");
static_assert(offsetof(DiffbitCausalConv, past_state) == 32, "past_state");
static_assert(offsetof(DiffbitCausalConv, y) == 40, "y");
static_assert(offsetof(DiffbitCausalConv, present_state) == 48, "present_state");
static_assert(offsetof(DiffbitCausalConv, batch) == 56, "batch");
static_assert(offsetof(DiffbitCausalConv, steps) == 64, "steps");
static_assert(offsetof(DiffbitCausalConv, total) == 72, "total");
static_assert(offsetof(DiffbitCausalConv, channels) == 80, "channels");
static_assert(offsetof(DiffbitCausalConv, width) == 88, "width");
static_assert(offsetof(DiffbitCausalConv, type) == 96, "type");
static_assert(sizeof(DiffbitCausalConv) == 104, "DiffbitCausalConv");
DIFFBIT_CUDA_API size_t diffbit_cuda_causal_conv_workspace(const DiffbitCausalConv*);
DIFFBIT_CUDA_API const char* diffbit_cuda_causal_conv(const DiffbitCausalConv*, void* workspace, void* stream);

struct DiffbitDiffAttention {
  const void* query;
  const void* key;
  const void* value;
  const void* lambda;
  const void* past_key;
  const void* past_value;
  const void* position_ids;
  const void* cos;
  const void* sin;
  const void* attention_mask;
  const void* past_key_scale;
  const void* past_value_scale;
  const void* past_key_recent;
  const void* past_value_recent;
  const void* gates;
  void* out;
  void* present_key;
  void* present_value;
  void* present_key_scale;
  void* present_value_scale;
  void* present_key_recent;
  void* present_value_recent;
  int64_t batch;
  int64_t steps;
  int64_t past_length;
  int64_t heads;
  int64_t kv_heads;
  int64_t d;
  int64_t past_key_capacity;  // tokens that past and present have room for
  int64_t past_value_capacity;
  int64_t key_capacity;
  int64_t value_capacity;
  int64_t mask_row;  // numbers of a row of attention_mask
  int64_t positions;  // rows of cos and sin; a position beyond them makes its token NaN
  int64_t branches;
  int64_t noise_ratio;
  int64_t wide_value;
  int64_t lambda_per_token;
  int64_t key_bits;
  int64_t value_bits;
  int64_t query_bits;
  int64_t window;
  int64_t first;
  int64_t sliding_window;
  int64_t type;  // of query, key, value and out: FLOAT32, FLOAT16 or BFLOAT16
  int64_t key_type;  // of a cache of 16 bits: FLOAT32, FLOAT16 or BFLOAT16
  int64_t value_type;
  float scale;
  float norm_eps;

  template <class Node, class Tensors>
  static DiffbitDiffAttention from([[maybe_unused]] const Node& node, const Tensors& tensors) {
    return {
        tensors.query.data,
        tensors.keys.fresh.data,
        tensors.values.fresh.data,
        tensors.lambda.data,
        tensors.keys.past.data,
        tensors.values.past.data,
        tensors.position_ids.data,
        tensors.cos.data,
        tensors.sin.data,
        tensors.attention_mask.data,
        tensors.keys.past_scale.data,
        tensors.values.past_scale.data,
        tensors.keys.past_recent.data,
        tensors.values.past_recent.data,
        tensors.gates.data,
        tensors.out.data,
        tensors.keys.present.data,
        tensors.values.present.data,
        tensors.keys.present_scale.data,
        tensors.values.present_scale.data,
        tensors.keys.present_recent.data,
        tensors.values.present_recent.data,
        tensors.batch,
        tensors.steps,
        tensors.past_length,
        node.heads,
        node.kv_heads,
        tensors.d,
        tensors.keys.past_capacity,
        tensors.values.past_capacity,
        tensors.keys.capacity,
        tensors.values.capacity,
        tensors.attention_mask.shape[1],
        tensors.cos.shape[0],
        node.branches,
        node.noise_ratio,
        node.width - 1,
        tensors.lambda.rank == 3,
        node.key_bits,
        node.value_bits,
        node.query_bits,
        node.window,
        node.first,
        node.sliding_window,
        tensors.query.type,
        tensors.keys.past.type,
        tensors.values.past.type,
        node.scale,
        node.norm_eps,
    };
  }
};
static_assert(offsetof(DiffbitDiffAttention, query) == 0, "query");
static_assert(offsetof(DiffbitDiffAttention, key) == 8, "key");
static_assert(offsetof(DiffbitDiffAttention, value) == 16, "value");
static_assert(offsetof(DiffbitDiffAttention, lambda) == 24, "lambda");
static_assert(offsetof(DiffbitDiffAttention, past_key) == 32, "past_key");
static_assert(offsetof(DiffbitDiffAttention, past_value) == 40, "past_value");
static_assert(offsetof(DiffbitDiffAttention, position_ids) == 48, "position_ids");
static_assert(offsetof(DiffbitDiffAttention, cos) == 56, "cos");
static_assert(offsetof(DiffbitDiffAttention, sin) == 64, "sin");
static_assert(offsetof(DiffbitDiffAttention, attention_mask) == 72, "attention_mask");
static_assert(offsetof(DiffbitDiffAttention, past_key_scale) == 80, "past_key_scale");
static_assert(offsetof(DiffbitDiffAttention, past_value_scale) == 88, "past_value_scale");
static_assert(offsetof(DiffbitDiffAttention, past_key_recent) == 96, "past_key_recent");
static_assert(offsetof(DiffbitDiffAttention, past_value_recent) == 104, "past_value_recent");
static_assert(offsetof(DiffbitDiffAttention, gates) == 112, "gates");
static_assert(offsetof(DiffbitDiffAttention, out) == 120, "out");
static_assert(offsetof(DiffbitDiffAttention, present_key) == 128, "present_key");
static_assert(offsetof(DiffbitDiffAttention, present_value) == 136, "present_value");
static_assert(offsetof(DiffbitDiffAttention, present_key_scale) == 144, "present_key_scale");
static_assert(offsetof(DiffbitDiffAttention, present_value_scale) == 152, "present_value_scale");
static_assert(offsetof(DiffbitDiffAttention, present_key_recent) == 160, "present_key_recent");
static_assert(offsetof(DiffbitDiffAttention, present_value_recent) == 168, "present_value_recent");
static_assert(offsetof(DiffbitDiffAttention, batch) == 176, "batch");
static_assert(offsetof(DiffbitDiffAttention, steps) == 184, "steps");
static_assert(offsetof(DiffbitDiffAttention, past_length) == 192, "past_length");
static_assert(offsetof(DiffbitDiffAttention, heads) == 200, "heads");
static_assert(offsetof(DiffbitDiffAttention, kv_heads) == 208, "kv_heads");
static_assert(offsetof(DiffbitDiffAttention, d) == 216, "d");
static_assert(offsetof(DiffbitDiffAttention, past_key_capacity) == 224, "past_key_capacity");
static_assert(offsetof(DiffbitDiffAttention, past_value_capacity) == 232, "past_value_capacity");
static_assert(offsetof(DiffbitDiffAttention, key_capacity) == 240, "key_capacity");
static_assert(offsetof(DiffbitDiffAttention, value_capacity) == 248, "value_capacity");
static_assert(offsetof(DiffbitDiffAttention, mask_row) == 256, "mask_row");
static_assert(offsetof(DiffbitDiffAttention, positions) == 264, "positions");
static_assert(offsetof(DiffbitDiffAttention, branches) == 272, "branches");
static_assert(offsetof(DiffbitDiffAttention, noise_ratio) == 280, "noise_ratio");
static_assert(offsetof(DiffbitDiffAttention, wide_value) == 288, "wide_value");
static_assert(offsetof(DiffbitDiffAttention, lambda_per_token) == 296, "lambda_per_token");
static_assert(offsetof(DiffbitDiffAttention, key_bits) == 304, "key_bits");
static_assert(offsetof(DiffbitDiffAttention, value_bits) == 312, "value_bits");
static_assert(offsetof(DiffbitDiffAttention, query_bits) == 320, "query_bits");
static_assert(offsetof(DiffbitDiffAttention, window) == 328, "window");
static_assert(offsetof(DiffbitDiffAttention, first) == 336, "first");
static_assert(offsetof(DiffbitDiffAttention, sliding_window) == 344, "sliding_window");
static_assert(offsetof(DiffbitDiffAttention, type) == 352, "type");
static_assert(offsetof(DiffbitDiffAttention, key_type) == 360, "key_type");
static_assert(offsetof(DiffbitDiffAttention, value_type) == 368, "value_type");
static_assert(offsetof(DiffbitDiffAttention, scale) == 376, "scale");
static_assert(offsetof(DiffbitDiffAttention, norm_eps) == 380, "norm_eps");
static_assert(sizeof(DiffbitDiffAttention) == 384, "DiffbitDiffAttention");
DIFFBIT_CUDA_API size_t diffbit_cuda_attention_workspace(const DiffbitDiffAttention*);
DIFFBIT_CUDA_API const char* diffbit_cuda_attention(const DiffbitDiffAttention*, void* workspace, void* stream);

struct DiffbitFloatMatMul {
  const void* a;  // [m, k]
  const void* w;  // [n, k]
  void* y;  // [m, n]
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t type;  // of a, w and y: FLOAT32, FLOAT16 or BFLOAT16

  template <class Node, class Tensors>
  static DiffbitFloatMatMul from([[maybe_unused]] const Node& node, const Tensors& tensors) {
    return {
        tensors.a.data,
        tensors.w.data,
        tensors.y.data,
        tensors.rows,
        tensors.w.shape[0],
        tensors.w.shape[1],
        tensors.a.type,
    };
  }
};
static_assert(offsetof(DiffbitFloatMatMul, a) == 0, "a");
static_assert(offsetof(DiffbitFloatMatMul, w) == 8, "w");
static_assert(offsetof(DiffbitFloatMatMul, y) == 16, "y");
static_assert(offsetof(DiffbitFloatMatMul, m) == 24, "m");
static_assert(offsetof(DiffbitFloatMatMul, n) == 32, "n");
static_assert(offsetof(DiffbitFloatMatMul, k) == 40, "k");
static_assert(offsetof(DiffbitFloatMatMul, type) == 48, "type");
static_assert(sizeof(DiffbitFloatMatMul) == 56, "DiffbitFloatMatMul");
DIFFBIT_CUDA_API size_t diffbit_cuda_float_matmul_workspace(const DiffbitFloatMatMul*);
DIFFBIT_CUDA_API const char* diffbit_cuda_float_matmul(const DiffbitFloatMatMul*, void* workspace, void* stream);

struct DiffbitGatherQuantized {
  const void* ids;  // [m]; one outside the table makes its row NaN
  const void* codes;
  const void* scales;  // [tiles, scale_groups, 16]
  const void* zeros;  // shaped as scales; null: 2^(bits - 1) everywhere
  const void* factor;
  void* y;  // [m, k]
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t group_size;
  int64_t scale_groups;
  int64_t bits;
  int64_t type;  // of factor and y: FLOAT32, FLOAT16 or BFLOAT16

  template <class Node, class Tensors>
  static DiffbitGatherQuantized from([[maybe_unused]] const Node& node, const Tensors& tensors) {
    return {
        tensors.ids.data,
        tensors.codes.data,
        tensors.scales.data,
        tensors.zeros.data,
        tensors.factor.data,
        tensors.y.data,
        tensors.rows,
        node.n,
        node.k,
        node.group_size,
        tensors.scale_groups,
        node.bits,
        tensors.factor.type,
    };
  }
};
static_assert(offsetof(DiffbitGatherQuantized, ids) == 0, "ids");
static_assert(offsetof(DiffbitGatherQuantized, codes) == 8, "codes");
static_assert(offsetof(DiffbitGatherQuantized, scales) == 16, "scales");
static_assert(offsetof(DiffbitGatherQuantized, zeros) == 24, "zeros");
static_assert(offsetof(DiffbitGatherQuantized, factor) == 32, "factor");
static_assert(offsetof(DiffbitGatherQuantized, y) == 40, "y");
static_assert(offsetof(DiffbitGatherQuantized, m) == 48, "m");
static_assert(offsetof(DiffbitGatherQuantized, n) == 56, "n");
static_assert(offsetof(DiffbitGatherQuantized, k) == 64, "k");
static_assert(offsetof(DiffbitGatherQuantized, group_size) == 72, "group_size");
static_assert(offsetof(DiffbitGatherQuantized, scale_groups) == 80, "scale_groups");
static_assert(offsetof(DiffbitGatherQuantized, bits) == 88, "bits");
static_assert(offsetof(DiffbitGatherQuantized, type) == 96, "type");
static_assert(sizeof(DiffbitGatherQuantized) == 104, "DiffbitGatherQuantized");
DIFFBIT_CUDA_API size_t diffbit_cuda_gather_quantized_workspace(const DiffbitGatherQuantized*);
DIFFBIT_CUDA_API const char* diffbit_cuda_gather_quantized(const DiffbitGatherQuantized*, void* workspace, void* stream);

struct DiffbitGatherLowBit {
  const void* ids;  // [m]; one outside the table makes its row NaN
  const void* codes;  // at a multiple of 16
  const void* scales;  // [tiles, groups, 16]
  const void* row_scales;  // [tiles, 16]; null: 1 everywhere
  const void* levels;  // [2^bits], or what ops/trellis.py says; null: none
  const void* factor;
  void* y;  // [m, k]
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t group_size;
  int64_t bits;
  int64_t scale_type;  // FLOAT16 or INT8
  int64_t is_trellis;  // 1 for trellis codes, else 0
  int64_t type;  // of factor and y: FLOAT32, FLOAT16 or BFLOAT16

  template <class Node, class Tensors>
  static DiffbitGatherLowBit from([[maybe_unused]] const Node& node, const Tensors& tensors) {
    return {
        tensors.ids.data,
        tensors.codes.data,
        tensors.scales.data,
        tensors.row_scales.data,
        tensors.levels.data,
        tensors.factor.data,
        tensors.y.data,
        tensors.rows,
        node.n,
        node.k,
        node.group_size,
        node.bits,
        tensors.scales.type,
        tensors.is_trellis,
        tensors.factor.type,
    };
  }
};
static_assert(offsetof(DiffbitGatherLowBit, ids) == 0, "ids");
static_assert(offsetof(DiffbitGatherLowBit, codes) == 8, "codes");
static_assert(offsetof(DiffbitGatherLowBit, scales) == 16, "scales");
static_assert(offsetof(DiffbitGatherLowBit, row_scales) == 24, "row_scales");
static_assert(offsetof(DiffbitGatherLowBit, levels) == 32, "levels");
static_assert(offsetof(DiffbitGatherLowBit, factor) == 40, "factor");
static_assert(offsetof(DiffbitGatherLowBit, y) == 48, "y");
static_assert(offsetof(DiffbitGatherLowBit, m) == 56, "m");
static_assert(offsetof(DiffbitGatherLowBit, n) == 64, "n");
static_assert(offsetof(DiffbitGatherLowBit, k) == 72, "k");
static_assert(offsetof(DiffbitGatherLowBit, group_size) == 80, "group_size");
static_assert(offsetof(DiffbitGatherLowBit, bits) == 88, "bits");
static_assert(offsetof(DiffbitGatherLowBit, scale_type) == 96, "scale_type");
static_assert(offsetof(DiffbitGatherLowBit, is_trellis) == 104, "is_trellis");
static_assert(offsetof(DiffbitGatherLowBit, type) == 112, "type");
static_assert(sizeof(DiffbitGatherLowBit) == 120, "DiffbitGatherLowBit");
DIFFBIT_CUDA_API size_t diffbit_cuda_gather_lowbit_workspace(const DiffbitGatherLowBit*);
DIFFBIT_CUDA_API const char* diffbit_cuda_gather_lowbit(const DiffbitGatherLowBit*, void* workspace, void* stream);

struct DiffbitHadamard {
  const void* a;  // `size` numbers
  void* y;
  int64_t size;
  int64_t block;
  int64_t type;  // of a and y: FLOAT32, FLOAT16 or BFLOAT16

  template <class Node, class Tensors>
  static DiffbitHadamard from([[maybe_unused]] const Node& node, const Tensors& tensors) {
    return {
        tensors.a.data,
        tensors.y.data,
        tensors.a.size(),
        node.block,
        tensors.a.type,
    };
  }
};
static_assert(offsetof(DiffbitHadamard, a) == 0, "a");
static_assert(offsetof(DiffbitHadamard, y) == 8, "y");
static_assert(offsetof(DiffbitHadamard, size) == 16, "size");
static_assert(offsetof(DiffbitHadamard, block) == 24, "block");
static_assert(offsetof(DiffbitHadamard, type) == 32, "type");
static_assert(sizeof(DiffbitHadamard) == 40, "DiffbitHadamard");
DIFFBIT_CUDA_API size_t diffbit_cuda_hadamard_workspace(const DiffbitHadamard*);
DIFFBIT_CUDA_API const char* diffbit_cuda_hadamard(const DiffbitHadamard*, void* workspace, void* stream);

struct DiffbitInt4MatMul {
  const void* a;  // [m, k]
  const void* codes;  // at a multiple of 16, like scales and zeros
  const void* scales;
  const void* zeros;  // [tiles, groups, 16]; null: 8 everywhere
  const void* factor;
  void* y;  // [m, n]
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t group_size;
  int64_t type;  // of a and y: FLOAT32, FLOAT16 or BFLOAT16

  template <class Node, class Tensors>
  static DiffbitInt4MatMul from([[maybe_unused]] const Node& node, const Tensors& tensors) {
    return {
        tensors.a.data,
        tensors.codes.data,
        tensors.scales.data,
        tensors.zeros.data,
        tensors.factor.data,
        tensors.y.data,
        tensors.rows,
        node.n,
        node.k,
        node.group_size,
        tensors.a.type,
    };
  }
};
static_assert(offsetof(DiffbitInt4MatMul, a) == 0, "a");
static_assert(offsetof(DiffbitInt4MatMul, codes) == 8, "codes");
static_assert(offsetof(DiffbitInt4MatMul, scales) == 16, "scales");
static_assert(offsetof(DiffbitInt4MatMul, zeros) == 24, "zeros");
static_assert(offsetof(DiffbitInt4MatMul, factor) == 32, "factor");
static_assert(offsetof(DiffbitInt4MatMul, y) == 40, "y");
static_assert(offsetof(DiffbitInt4MatMul, m) == 48, "m");
static_assert(offsetof(DiffbitInt4MatMul, n) == 56, "n");
static_assert(offsetof(DiffbitInt4MatMul, k) == 64, "k");
static_assert(offsetof(DiffbitInt4MatMul, group_size) == 72, "group_size");
static_assert(offsetof(DiffbitInt4MatMul, type) == 80, "type");
static_assert(sizeof(DiffbitInt4MatMul) == 88, "DiffbitInt4MatMul");
DIFFBIT_CUDA_API size_t diffbit_cuda_int4_matmul_workspace(const DiffbitInt4MatMul*);
DIFFBIT_CUDA_API const char* diffbit_cuda_int4_matmul(const DiffbitInt4MatMul*, void* workspace, void* stream);

struct DiffbitInt8MatMul {
  const void* a;  // [m, k]
  const void* codes;  // at a multiple of 16
  const void* scales;  // [tiles, scale_groups, 16]
  const void* zeros;  // shaped as scales; null: 128 everywhere
  const void* factor;
  void* y;  // [m, n]
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t group_size;
  int64_t scale_groups;  // of a row: as many as groups, or 1
  int64_t type;  // of a and y: FLOAT32, FLOAT16 or BFLOAT16

  template <class Node, class Tensors>
  static DiffbitInt8MatMul from([[maybe_unused]] const Node& node, const Tensors& tensors) {
    return {
        tensors.a.data,
        tensors.codes.data,
        tensors.scales.data,
        tensors.zeros.data,
        tensors.factor.data,
        tensors.y.data,
        tensors.rows,
        node.n,
        node.k,
        node.group_size,
        tensors.scale_groups,
        tensors.a.type,
    };
  }
};
static_assert(offsetof(DiffbitInt8MatMul, a) == 0, "a");
static_assert(offsetof(DiffbitInt8MatMul, codes) == 8, "codes");
static_assert(offsetof(DiffbitInt8MatMul, scales) == 16, "scales");
static_assert(offsetof(DiffbitInt8MatMul, zeros) == 24, "zeros");
static_assert(offsetof(DiffbitInt8MatMul, factor) == 32, "factor");
static_assert(offsetof(DiffbitInt8MatMul, y) == 40, "y");
static_assert(offsetof(DiffbitInt8MatMul, m) == 48, "m");
static_assert(offsetof(DiffbitInt8MatMul, n) == 56, "n");
static_assert(offsetof(DiffbitInt8MatMul, k) == 64, "k");
static_assert(offsetof(DiffbitInt8MatMul, group_size) == 72, "group_size");
static_assert(offsetof(DiffbitInt8MatMul, scale_groups) == 80, "scale_groups");
static_assert(offsetof(DiffbitInt8MatMul, type) == 88, "type");
static_assert(sizeof(DiffbitInt8MatMul) == 96, "DiffbitInt8MatMul");
DIFFBIT_CUDA_API size_t diffbit_cuda_int8_matmul_workspace(const DiffbitInt8MatMul*);
DIFFBIT_CUDA_API const char* diffbit_cuda_int8_matmul(const DiffbitInt8MatMul*, void* workspace, void* stream);

struct DiffbitLowBitMatMul {
  const void* a;  // [m, k]
  const void* codes;  // at a multiple of 16
  const void* scales;  // [tiles, groups, 16]
  const void* row_scales;  // [tiles, 16]; null: 1 everywhere
  const void* levels;  // [2^bits], or what ops/trellis.py says; null: none
  const void* factor;
  void* y;  // [m, n]
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t group_size;
  int64_t bits;
  int64_t scale_type;  // FLOAT16 or INT8
  int64_t is_trellis;  // 1 for trellis codes, else 0
  int64_t type;  // of a and y: FLOAT32, FLOAT16 or BFLOAT16

  template <class Node, class Tensors>
  static DiffbitLowBitMatMul from([[maybe_unused]] const Node& node, const Tensors& tensors) {
    return {
        tensors.a.data,
        tensors.codes.data,
        tensors.scales.data,
        tensors.row_scales.data,
        tensors.levels.data,
        tensors.factor.data,
        tensors.y.data,
        tensors.rows,
        node.n,
        node.k,
        node.group_size,
        node.bits,
        tensors.scales.type,
        tensors.is_trellis,
        tensors.a.type,
    };
  }
};
static_assert(offsetof(DiffbitLowBitMatMul, a) == 0, "a");
static_assert(offsetof(DiffbitLowBitMatMul, codes) == 8, "codes");
static_assert(offsetof(DiffbitLowBitMatMul, scales) == 16, "scales");
static_assert(offsetof(DiffbitLowBitMatMul, row_scales) == 24, "row_scales");
static_assert(offsetof(DiffbitLowBitMatMul, levels) == 32, "levels");
static_assert(offsetof(DiffbitLowBitMatMul, factor) == 40, "factor");
static_assert(offsetof(DiffbitLowBitMatMul, y) == 48, "y");
static_assert(offsetof(DiffbitLowBitMatMul, m) == 56, "m");
static_assert(offsetof(DiffbitLowBitMatMul, n) == 64, "n");
static_assert(offsetof(DiffbitLowBitMatMul, k) == 72, "k");
static_assert(offsetof(DiffbitLowBitMatMul, group_size) == 80, "group_size");
static_assert(offsetof(DiffbitLowBitMatMul, bits) == 88, "bits");
static_assert(offsetof(DiffbitLowBitMatMul, scale_type) == 96, "scale_type");
static_assert(offsetof(DiffbitLowBitMatMul, is_trellis) == 104, "is_trellis");
static_assert(offsetof(DiffbitLowBitMatMul, type) == 112, "type");
static_assert(sizeof(DiffbitLowBitMatMul) == 120, "DiffbitLowBitMatMul");
DIFFBIT_CUDA_API size_t diffbit_cuda_lowbit_matmul_workspace(const DiffbitLowBitMatMul*);
DIFFBIT_CUDA_API const char* diffbit_cuda_lowbit_matmul(const DiffbitLowBitMatMul*, void* workspace, void* stream);

struct DiffbitSelectiveScan {
  const void* x;
  const void* dt;
  const void* z;
  const void* b;
  const void* c;
  const void* a;
  const void* d;
  const void* dt_bias;
  const void* attention_mask;
  const void* past_state;
  void* y;
  void* memory;  // null: not requested
  void* present_state;
  int64_t batch;
  int64_t steps;
  int64_t total;  // columns of attention_mask
  int64_t channels;
  int64_t states;  // rows of a
  int64_t type;  // of x, dt, z, b, c, y and memory: FLOAT32, FLOAT16 or BFLOAT16

  template <class Node, class Tensors>
  static DiffbitSelectiveScan from([[maybe_unused]] const Node& node, const Tensors& tensors) {
    return {
        tensors.x.data,
        tensors.dt.data,
        tensors.z.data,
        tensors.b.data,
        tensors.c.data,
        tensors.a.data,
        tensors.d.data,
        tensors.dt_bias.data,
        tensors.attention_mask.data,
        tensors.past_state.data,
        tensors.y.data,
        tensors.memory.data,
        tensors.present_state.data,
        tensors.batch,
        tensors.steps,
        tensors.total,
        tensors.channels,
        tensors.states,
        tensors.x.type,
    };
  }
};
static_assert(offsetof(DiffbitSelectiveScan, x) == 0, "x");
static_assert(offsetof(DiffbitSelectiveScan, dt) == 8, "dt");
static_assert(offsetof(DiffbitSelectiveScan, z) == 16, "z");
static_assert(offsetof(DiffbitSelectiveScan, b) == 24, "b");
static_assert(offsetof(DiffbitSelectiveScan, c) == 32, "c");
static_assert(offsetof(DiffbitSelectiveScan, a) == 40, "a");
static_assert(offsetof(DiffbitSelectiveScan, d) == 48, "d");
static_assert(offsetof(DiffbitSelectiveScan, dt_bias) == 56, "dt_bias");
static_assert(offsetof(DiffbitSelectiveScan, attention_mask) == 64, "attention_mask");
static_assert(offsetof(DiffbitSelectiveScan, past_state) == 72, "past_state");
static_assert(offsetof(DiffbitSelectiveScan, y) == 80, "y");
static_assert(offsetof(DiffbitSelectiveScan, memory) == 88, "memory");
static_assert(offsetof(DiffbitSelectiveScan, present_state) == 96, "present_state");
static_assert(offsetof(DiffbitSelectiveScan, batch) == 104, "batch");
static_assert(offsetof(DiffbitSelectiveScan, steps) == 112, "steps");
static_assert(offsetof(DiffbitSelectiveScan, total) == 120, "total");
static_assert(offsetof(DiffbitSelectiveScan, channels) == 128, "channels");
static_assert(offsetof(DiffbitSelectiveScan, states) == 136, "states");
static_assert(offsetof(DiffbitSelectiveScan, type) == 144, "type");
static_assert(sizeof(DiffbitSelectiveScan) == 152, "DiffbitSelectiveScan");
DIFFBIT_CUDA_API size_t diffbit_cuda_selective_scan_workspace(const DiffbitSelectiveScan*);
DIFFBIT_CUDA_API const char* diffbit_cuda_selective_scan(const DiffbitSelectiveScan*, void* workspace, void* stream);

struct DiffbitSiluGate {
  const void* a;
  void* y;
  int64_t rows;
  int64_t n;
  int64_t type;  // of a and y: FLOAT32, FLOAT16 or BFLOAT16

  template <class Node, class Tensors>
  static DiffbitSiluGate from([[maybe_unused]] const Node& node, const Tensors& tensors) {
    return {
        tensors.a.data,
        tensors.y.data,
        tensors.rows,
        tensors.n,
        tensors.a.type,
    };
  }
};
static_assert(offsetof(DiffbitSiluGate, a) == 0, "a");
static_assert(offsetof(DiffbitSiluGate, y) == 8, "y");
static_assert(offsetof(DiffbitSiluGate, rows) == 16, "rows");
static_assert(offsetof(DiffbitSiluGate, n) == 24, "n");
static_assert(offsetof(DiffbitSiluGate, type) == 32, "type");
static_assert(sizeof(DiffbitSiluGate) == 40, "DiffbitSiluGate");
DIFFBIT_CUDA_API size_t diffbit_cuda_silu_gate_workspace(const DiffbitSiluGate*);
DIFFBIT_CUDA_API const char* diffbit_cuda_silu_gate(const DiffbitSiluGate*, void* workspace, void* stream);

struct DiffbitTernaryMatMul {
  const void* a;  // [m, k]
  const void* packed;  // at a multiple of 16
  const void* scale;  // [n] if per row, else [1]
  void* y;  // [m, n]
  int64_t m;
  int64_t n;
  int64_t k;
  int64_t activation_bits;
  int64_t scale_per_row;
  int64_t type;  // of a and y: FLOAT32, FLOAT16 or BFLOAT16

  template <class Node, class Tensors>
  static DiffbitTernaryMatMul from([[maybe_unused]] const Node& node, const Tensors& tensors) {
    return {
        tensors.a.data,
        tensors.packed.data,
        tensors.scale.data,
        tensors.y.data,
        tensors.rows,
        node.n,
        node.k,
        node.activation_bits,
        tensors.scale_per_row,
        tensors.a.type,
    };
  }
};
static_assert(offsetof(DiffbitTernaryMatMul, a) == 0, "a");
static_assert(offsetof(DiffbitTernaryMatMul, packed) == 8, "packed");
static_assert(offsetof(DiffbitTernaryMatMul, scale) == 16, "scale");
static_assert(offsetof(DiffbitTernaryMatMul, y) == 24, "y");
static_assert(offsetof(DiffbitTernaryMatMul, m) == 32, "m");
static_assert(offsetof(DiffbitTernaryMatMul, n) == 40, "n");
static_assert(offsetof(DiffbitTernaryMatMul, k) == 48, "k");
static_assert(offsetof(DiffbitTernaryMatMul, activation_bits) == 56, "activation_bits");
static_assert(offsetof(DiffbitTernaryMatMul, scale_per_row) == 64, "scale_per_row");
static_assert(offsetof(DiffbitTernaryMatMul, type) == 72, "type");
static_assert(sizeof(DiffbitTernaryMatMul) == 80, "DiffbitTernaryMatMul");
DIFFBIT_CUDA_API size_t diffbit_cuda_ternary_matmul_workspace(const DiffbitTernaryMatMul*);
DIFFBIT_CUDA_API const char* diffbit_cuda_ternary_matmul(const DiffbitTernaryMatMul*, void* workspace, void* stream);
