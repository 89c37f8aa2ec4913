// Written by python -m diffbit.ops.schema, from ops/schema.py: change that.
#pragma once

#include "../schema.h"

/// X(Op, function) for every op; the functions are create_`function` and diffbit_cuda_`function`.
#define DIFFBIT_OPS(X) \
  X(CausalConv, causal_conv) \
  X(DiffAttention, attention) \
  X(FloatMatMul, float_matmul) \
  X(GatherQuantized, gather_quantized) \
  X(GatherLowBit, gather_lowbit) \
  X(Hadamard, hadamard) \
  X(Int4MatMul, int4_matmul) \
  X(Int8MatMul, int8_matmul) \
  X(LowBitMatMul, lowbit_matmul) \
  X(SelectiveScan, selective_scan) \
  X(SiluGate, silu_gate) \
  X(TernaryMatMul, ternary_matmul)

namespace diffbit::schema {

struct CausalConv {
  static constexpr const char* NAME = "CausalConv";
  static constexpr int64_t VERSION = 1;
  static constexpr Input X{0, "CausalConv: x"};
  static constexpr Input WEIGHT{1, "CausalConv: weight"};
  static constexpr Input BIAS{2, "CausalConv: bias"};
  static constexpr Input ATTENTION_MASK{3, "CausalConv: attention_mask"};
  static constexpr Input PAST_STATE{4, "CausalConv: past_state"};
  static constexpr Output Y{0, "CausalConv: y"};
  static constexpr Output PRESENT_STATE{1, "CausalConv: present_state"};
  static constexpr int TYPES[2][7] = {
      {1, 1, 1, 7, 1, 1, 1},
      {10, 1, 1, 7, 1, 10, 1},
  };
  static constexpr int GPU_TYPES[3][7] = {
      {1, 1, 1, 7, 1, 1, 1},
      {10, 1, 1, 7, 1, 10, 1},
      {16, 1, 1, 7, 1, 16, 1},
  };
  static constexpr const char* NAMES[1] = {"CausalConv"};
  static constexpr Signature SIGNATURE{5, 2, 0x0, 0x0, 0x0};
};

struct DiffAttention {
  static constexpr const char* NAME = "DiffAttention";
  static constexpr int64_t VERSION = 7;
  static constexpr Input QUERY{0, "DiffAttention: query"};
  static constexpr Input KEY{1, "DiffAttention: key"};
  static constexpr Input VALUE{2, "DiffAttention: value"};
  static constexpr Input LAMBDA{3, "DiffAttention: lambda"};
  static constexpr Input PAST_KEY{4, "DiffAttention: past_key"};
  static constexpr Input PAST_VALUE{5, "DiffAttention: past_value"};
  static constexpr Input PAST_LENGTH{6, "DiffAttention: past_length"};
  static constexpr Input POSITION_IDS{7, "DiffAttention: position_ids"};
  static constexpr Input COS{8, "DiffAttention: cos"};
  static constexpr Input SIN{9, "DiffAttention: sin"};
  static constexpr Input ATTENTION_MASK{10, "DiffAttention: attention_mask"};
  static constexpr Input PAST_KEY_SCALE{11, "DiffAttention: past_key_scale"};
  static constexpr Input PAST_VALUE_SCALE{12, "DiffAttention: past_value_scale"};
  static constexpr Input PAST_KEY_RECENT{13, "DiffAttention: past_key_recent"};
  static constexpr Input PAST_VALUE_RECENT{14, "DiffAttention: past_value_recent"};
  static constexpr Input GATES{15, "DiffAttention: gates"};
  static constexpr Output OUT{0, "DiffAttention: out"};
  static constexpr Output PRESENT_KEY{1, "DiffAttention: present_key"};
  static constexpr Output PRESENT_VALUE{2, "DiffAttention: present_value"};
  static constexpr Output PRESENT_KEY_SCALE{3, "DiffAttention: present_key_scale"};
  static constexpr Output PRESENT_VALUE_SCALE{4, "DiffAttention: present_value_scale"};
  static constexpr Output PRESENT_KEY_RECENT{5, "DiffAttention: present_key_recent"};
  static constexpr Output PRESENT_VALUE_RECENT{6, "DiffAttention: present_value_recent"};
  static constexpr Integer NUM_HEADS{"num_heads", 0, {1, 65536}};
  static constexpr Integer NUM_KV_HEADS{"num_kv_heads", 0, {1, 65536}};
  static constexpr Integer BRANCHES{"branches", 0, {1, 2}};
  static constexpr Integer NOISE_RATIO{"noise_ratio", 0, {1, 65536}};
  static constexpr Integer WIDE_VALUE{"wide_value", 0, {0, 1}};
  static constexpr Number SCALE{"scale"};
  static constexpr Number NORM_EPS{"norm_eps"};
  static constexpr Integer KEY_BITS{"key_bits", 5, {16, 8, 4, 3, 2}};
  static constexpr Integer VALUE_BITS{"value_bits", 5, {16, 8, 4, 3, 2}};
  static constexpr Integer QUERY_BITS{"query_bits", 3, {0, 8, 4}};
  static constexpr Integer WINDOW{"window", 0, {0, 1048576}};
  static constexpr Integer FIRST{"first", 0, {0, 16}};
  static constexpr Integer SLIDING_WINDOW{"sliding_window", 0, {0, 16777216}};
  static constexpr int TYPES[32][23] = {
      {1, 1, 1, 1, 1, 1, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 1, 1, 10, 10, 10, 10},
      {1, 1, 1, 1, 1, 10, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 1, 10, 10, 10, 10, 10},
      {1, 1, 1, 1, 1, 3, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 1, 3, 10, 10, 10, 10},
      {1, 1, 1, 1, 1, 2, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 1, 2, 10, 10, 10, 10},
      {1, 1, 1, 1, 10, 1, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 10, 1, 10, 10, 10, 10},
      {1, 1, 1, 1, 10, 10, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 10, 10, 10, 10, 10, 10},
      {1, 1, 1, 1, 10, 3, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 10, 3, 10, 10, 10, 10},
      {1, 1, 1, 1, 10, 2, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 10, 2, 10, 10, 10, 10},
      {1, 1, 1, 1, 3, 1, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 3, 1, 10, 10, 10, 10},
      {1, 1, 1, 1, 3, 10, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 3, 10, 10, 10, 10, 10},
      {1, 1, 1, 1, 3, 3, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 3, 3, 10, 10, 10, 10},
      {1, 1, 1, 1, 3, 2, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 3, 2, 10, 10, 10, 10},
      {1, 1, 1, 1, 2, 1, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 2, 1, 10, 10, 10, 10},
      {1, 1, 1, 1, 2, 10, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 2, 10, 10, 10, 10, 10},
      {1, 1, 1, 1, 2, 3, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 2, 3, 10, 10, 10, 10},
      {1, 1, 1, 1, 2, 2, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 2, 2, 10, 10, 10, 10},
      {10, 10, 10, 1, 1, 1, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 1, 1, 10, 10, 10, 10},
      {10, 10, 10, 1, 1, 10, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 1, 10, 10, 10, 10, 10},
      {10, 10, 10, 1, 1, 3, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 1, 3, 10, 10, 10, 10},
      {10, 10, 10, 1, 1, 2, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 1, 2, 10, 10, 10, 10},
      {10, 10, 10, 1, 10, 1, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 10, 1, 10, 10, 10, 10},
      {10, 10, 10, 1, 10, 10, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 10, 10, 10, 10, 10, 10},
      {10, 10, 10, 1, 10, 3, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 10, 3, 10, 10, 10, 10},
      {10, 10, 10, 1, 10, 2, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 10, 2, 10, 10, 10, 10},
      {10, 10, 10, 1, 3, 1, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 3, 1, 10, 10, 10, 10},
      {10, 10, 10, 1, 3, 10, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 3, 10, 10, 10, 10, 10},
      {10, 10, 10, 1, 3, 3, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 3, 3, 10, 10, 10, 10},
      {10, 10, 10, 1, 3, 2, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 3, 2, 10, 10, 10, 10},
      {10, 10, 10, 1, 2, 1, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 2, 1, 10, 10, 10, 10},
      {10, 10, 10, 1, 2, 10, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 2, 10, 10, 10, 10, 10},
      {10, 10, 10, 1, 2, 3, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 2, 3, 10, 10, 10, 10},
      {10, 10, 10, 1, 2, 2, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 2, 2, 10, 10, 10, 10},
  };
  static constexpr int GPU_TYPES[75][23] = {
      {1, 1, 1, 1, 1, 1, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 1, 1, 10, 10, 10, 10},
      {1, 1, 1, 1, 1, 10, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 1, 10, 10, 10, 10, 10},
      {1, 1, 1, 1, 1, 16, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 1, 16, 10, 10, 10, 10},
      {1, 1, 1, 1, 1, 3, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 1, 3, 10, 10, 10, 10},
      {1, 1, 1, 1, 1, 2, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 1, 2, 10, 10, 10, 10},
      {1, 1, 1, 1, 10, 1, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 10, 1, 10, 10, 10, 10},
      {1, 1, 1, 1, 10, 10, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 10, 10, 10, 10, 10, 10},
      {1, 1, 1, 1, 10, 16, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 10, 16, 10, 10, 10, 10},
      {1, 1, 1, 1, 10, 3, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 10, 3, 10, 10, 10, 10},
      {1, 1, 1, 1, 10, 2, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 10, 2, 10, 10, 10, 10},
      {1, 1, 1, 1, 16, 1, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 16, 1, 10, 10, 10, 10},
      {1, 1, 1, 1, 16, 10, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 16, 10, 10, 10, 10, 10},
      {1, 1, 1, 1, 16, 16, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 16, 16, 10, 10, 10, 10},
      {1, 1, 1, 1, 16, 3, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 16, 3, 10, 10, 10, 10},
      {1, 1, 1, 1, 16, 2, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 16, 2, 10, 10, 10, 10},
      {1, 1, 1, 1, 3, 1, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 3, 1, 10, 10, 10, 10},
      {1, 1, 1, 1, 3, 10, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 3, 10, 10, 10, 10, 10},
      {1, 1, 1, 1, 3, 16, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 3, 16, 10, 10, 10, 10},
      {1, 1, 1, 1, 3, 3, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 3, 3, 10, 10, 10, 10},
      {1, 1, 1, 1, 3, 2, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 3, 2, 10, 10, 10, 10},
      {1, 1, 1, 1, 2, 1, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 2, 1, 10, 10, 10, 10},
      {1, 1, 1, 1, 2, 10, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 2, 10, 10, 10, 10, 10},
      {1, 1, 1, 1, 2, 16, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 2, 16, 10, 10, 10, 10},
      {1, 1, 1, 1, 2, 3, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 2, 3, 10, 10, 10, 10},
      {1, 1, 1, 1, 2, 2, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 1, 2, 2, 10, 10, 10, 10},
      {10, 10, 10, 1, 1, 1, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 1, 1, 10, 10, 10, 10},
      {10, 10, 10, 1, 1, 10, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 1, 10, 10, 10, 10, 10},
      {10, 10, 10, 1, 1, 16, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 1, 16, 10, 10, 10, 10},
      {10, 10, 10, 1, 1, 3, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 1, 3, 10, 10, 10, 10},
      {10, 10, 10, 1, 1, 2, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 1, 2, 10, 10, 10, 10},
      {10, 10, 10, 1, 10, 1, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 10, 1, 10, 10, 10, 10},
      {10, 10, 10, 1, 10, 10, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 10, 10, 10, 10, 10, 10},
      {10, 10, 10, 1, 10, 16, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 10, 16, 10, 10, 10, 10},
      {10, 10, 10, 1, 10, 3, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 10, 3, 10, 10, 10, 10},
      {10, 10, 10, 1, 10, 2, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 10, 2, 10, 10, 10, 10},
      {10, 10, 10, 1, 16, 1, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 16, 1, 10, 10, 10, 10},
      {10, 10, 10, 1, 16, 10, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 16, 10, 10, 10, 10, 10},
      {10, 10, 10, 1, 16, 16, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 16, 16, 10, 10, 10, 10},
      {10, 10, 10, 1, 16, 3, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 16, 3, 10, 10, 10, 10},
      {10, 10, 10, 1, 16, 2, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 16, 2, 10, 10, 10, 10},
      {10, 10, 10, 1, 3, 1, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 3, 1, 10, 10, 10, 10},
      {10, 10, 10, 1, 3, 10, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 3, 10, 10, 10, 10, 10},
      {10, 10, 10, 1, 3, 16, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 3, 16, 10, 10, 10, 10},
      {10, 10, 10, 1, 3, 3, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 3, 3, 10, 10, 10, 10},
      {10, 10, 10, 1, 3, 2, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 3, 2, 10, 10, 10, 10},
      {10, 10, 10, 1, 2, 1, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 2, 1, 10, 10, 10, 10},
      {10, 10, 10, 1, 2, 10, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 2, 10, 10, 10, 10, 10},
      {10, 10, 10, 1, 2, 16, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 2, 16, 10, 10, 10, 10},
      {10, 10, 10, 1, 2, 3, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 2, 3, 10, 10, 10, 10},
      {10, 10, 10, 1, 2, 2, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 10, 2, 2, 10, 10, 10, 10},
      {16, 16, 16, 1, 1, 1, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 16, 1, 1, 10, 10, 10, 10},
      {16, 16, 16, 1, 1, 10, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 16, 1, 10, 10, 10, 10, 10},
      {16, 16, 16, 1, 1, 16, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 16, 1, 16, 10, 10, 10, 10},
      {16, 16, 16, 1, 1, 3, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 16, 1, 3, 10, 10, 10, 10},
      {16, 16, 16, 1, 1, 2, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 16, 1, 2, 10, 10, 10, 10},
      {16, 16, 16, 1, 10, 1, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 16, 10, 1, 10, 10, 10, 10},
      {16, 16, 16, 1, 10, 10, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 16, 10, 10, 10, 10, 10, 10},
      {16, 16, 16, 1, 10, 16, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 16, 10, 16, 10, 10, 10, 10},
      {16, 16, 16, 1, 10, 3, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 16, 10, 3, 10, 10, 10, 10},
      {16, 16, 16, 1, 10, 2, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 16, 10, 2, 10, 10, 10, 10},
      {16, 16, 16, 1, 16, 1, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 16, 16, 1, 10, 10, 10, 10},
      {16, 16, 16, 1, 16, 10, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 16, 16, 10, 10, 10, 10, 10},
      {16, 16, 16, 1, 16, 16, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 16, 16, 16, 10, 10, 10, 10},
      {16, 16, 16, 1, 16, 3, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 16, 16, 3, 10, 10, 10, 10},
      {16, 16, 16, 1, 16, 2, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 16, 16, 2, 10, 10, 10, 10},
      {16, 16, 16, 1, 3, 1, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 16, 3, 1, 10, 10, 10, 10},
      {16, 16, 16, 1, 3, 10, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 16, 3, 10, 10, 10, 10, 10},
      {16, 16, 16, 1, 3, 16, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 16, 3, 16, 10, 10, 10, 10},
      {16, 16, 16, 1, 3, 3, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 16, 3, 3, 10, 10, 10, 10},
      {16, 16, 16, 1, 3, 2, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 16, 3, 2, 10, 10, 10, 10},
      {16, 16, 16, 1, 2, 1, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 16, 2, 1, 10, 10, 10, 10},
      {16, 16, 16, 1, 2, 10, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 16, 2, 10, 10, 10, 10, 10},
      {16, 16, 16, 1, 2, 16, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 16, 2, 16, 10, 10, 10, 10},
      {16, 16, 16, 1, 2, 3, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 16, 2, 3, 10, 10, 10, 10},
      {16, 16, 16, 1, 2, 2, 7, 7, 1, 1, 7, 10, 10, 10, 10, 1, 16, 2, 2, 10, 10, 10, 10},
  };
  static constexpr const char* NAMES[6] = {"DiffAttention", "DiffAttention_2", "DiffAttention_3", "DiffAttention_4", "DiffAttention_5", "DiffAttention_6"};
  static constexpr Signature SIGNATURE{16, 7, 0xf80e, 0x7e, 0x40};
};

struct FloatMatMul {
  static constexpr const char* NAME = "FloatMatMul";
  static constexpr int64_t VERSION = 1;
  static constexpr Input A{0, "FloatMatMul: A"};
  static constexpr Input W{1, "FloatMatMul: W"};
  static constexpr Output Y{0, "FloatMatMul: Y"};
  static constexpr int TYPES[2][3] = {
      {1, 1, 1},
      {10, 10, 10},
  };
  static constexpr int GPU_TYPES[3][3] = {
      {1, 1, 1},
      {10, 10, 10},
      {16, 16, 16},
  };
  static constexpr const char* NAMES[1] = {"FloatMatMul"};
  static constexpr Signature SIGNATURE{2, 1, 0x0, 0x0, 0x0};
};

struct GatherQuantized {
  static constexpr const char* NAME = "GatherQuantized";
  static constexpr int64_t VERSION = 1;
  static constexpr Input IDS{0, "GatherQuantized: ids"};
  static constexpr Input CODES{1, "GatherQuantized: codes"};
  static constexpr Input SCALES{2, "GatherQuantized: scales"};
  static constexpr Input ZEROS{3, "GatherQuantized: zeros"};
  static constexpr Input FACTOR{4, "GatherQuantized: factor"};
  static constexpr Output Y{0, "GatherQuantized: Y"};
  static constexpr Integer K{"K", 0, {1, 16777216}};
  static constexpr Integer N{"N", 0, {1, 2147483648}};
  static constexpr Integer GROUP_SIZE{"group_size", 3, {32, 64, 128}};
  static constexpr Integer BITS{"bits", 2, {4, 8}};
  static constexpr int TYPES[2][6] = {
      {7, 2, 10, 2, 1, 1},
      {7, 2, 10, 2, 10, 10},
  };
  static constexpr int GPU_TYPES[3][6] = {
      {7, 2, 10, 2, 1, 1},
      {7, 2, 10, 2, 10, 10},
      {7, 2, 10, 2, 16, 16},
  };
  static constexpr const char* NAMES[1] = {"GatherQuantized"};
  static constexpr Signature SIGNATURE{5, 1, 0x0, 0x0, 0x0};
};

struct GatherLowBit {
  static constexpr const char* NAME = "GatherLowBit";
  static constexpr int64_t VERSION = 1;
  static constexpr Input IDS{0, "GatherLowBit: ids"};
  static constexpr Input CODES{1, "GatherLowBit: codes"};
  static constexpr Input SCALES{2, "GatherLowBit: scales"};
  static constexpr Input ROW_SCALES{3, "GatherLowBit: row_scales"};
  static constexpr Input LEVELS{4, "GatherLowBit: levels"};
  static constexpr Input FACTOR{5, "GatherLowBit: factor"};
  static constexpr Output Y{0, "GatherLowBit: Y"};
  static constexpr Integer K{"K", 0, {1, 16777216}};
  static constexpr Integer N{"N", 0, {1, 2147483648}};
  static constexpr Integer GROUP_SIZE{"group_size", 3, {32, 64, 128}};
  static constexpr Integer BITS{"bits", 0, {1, 6}};
  static constexpr int TYPES[4][7] = {
      {7, 2, 10, 10, 2, 1, 1},
      {7, 2, 10, 10, 2, 10, 10},
      {7, 2, 3, 10, 2, 1, 1},
      {7, 2, 3, 10, 2, 10, 10},
  };
  static constexpr int GPU_TYPES[6][7] = {
      {7, 2, 10, 10, 2, 1, 1},
      {7, 2, 10, 10, 2, 10, 10},
      {7, 2, 10, 10, 2, 16, 16},
      {7, 2, 3, 10, 2, 1, 1},
      {7, 2, 3, 10, 2, 10, 10},
      {7, 2, 3, 10, 2, 16, 16},
  };
  static constexpr const char* NAMES[1] = {"GatherLowBit"};
  static constexpr Signature SIGNATURE{6, 1, 0x0, 0x0, 0x0};
};

struct Hadamard {
  static constexpr const char* NAME = "Hadamard";
  static constexpr int64_t VERSION = 1;
  static constexpr Input A{0, "Hadamard: A"};
  static constexpr Output Y{0, "Hadamard: Y"};
  static constexpr Integer BLOCK{"block", 0, {1, 16777216}};
  static constexpr int TYPES[2][2] = {
      {1, 1},
      {10, 10},
  };
  static constexpr int GPU_TYPES[3][2] = {
      {1, 1},
      {10, 10},
      {16, 16},
  };
  static constexpr const char* NAMES[1] = {"Hadamard"};
  static constexpr Signature SIGNATURE{1, 1, 0x0, 0x0, 0x0};
};

struct Int4MatMul {
  static constexpr const char* NAME = "Int4MatMul";
  static constexpr int64_t VERSION = 1;
  static constexpr Input A{0, "Int4MatMul: A"};
  static constexpr Input CODES{1, "Int4MatMul: codes"};
  static constexpr Input SCALES{2, "Int4MatMul: scales"};
  static constexpr Input ZEROS{3, "Int4MatMul: zeros"};
  static constexpr Input FACTOR{4, "Int4MatMul: factor"};
  static constexpr Output Y{0, "Int4MatMul: Y"};
  static constexpr Integer K{"K", 0, {1, 16777216}};
  static constexpr Integer N{"N", 0, {1, 2147483648}};
  static constexpr Integer GROUP_SIZE{"group_size", 3, {32, 64, 128}};
  static constexpr int TYPES[2][6] = {
      {1, 2, 10, 2, 1, 1},
      {10, 2, 10, 2, 1, 10},
  };
  static constexpr int GPU_TYPES[3][6] = {
      {1, 2, 10, 2, 1, 1},
      {10, 2, 10, 2, 1, 10},
      {16, 2, 10, 2, 1, 16},
  };
  static constexpr const char* NAMES[1] = {"Int4MatMul"};
  static constexpr Signature SIGNATURE{5, 1, 0x0, 0x0, 0x0};
};

struct Int8MatMul {
  static constexpr const char* NAME = "Int8MatMul";
  static constexpr int64_t VERSION = 1;
  static constexpr Input A{0, "Int8MatMul: A"};
  static constexpr Input CODES{1, "Int8MatMul: codes"};
  static constexpr Input SCALES{2, "Int8MatMul: scales"};
  static constexpr Input ZEROS{3, "Int8MatMul: zeros"};
  static constexpr Input FACTOR{4, "Int8MatMul: factor"};
  static constexpr Output Y{0, "Int8MatMul: Y"};
  static constexpr Integer K{"K", 0, {1, 16777216}};
  static constexpr Integer N{"N", 0, {1, 2147483648}};
  static constexpr Integer GROUP_SIZE{"group_size", 3, {32, 64, 128}};
  static constexpr int TYPES[2][6] = {
      {1, 2, 10, 2, 1, 1},
      {10, 2, 10, 2, 1, 10},
  };
  static constexpr int GPU_TYPES[3][6] = {
      {1, 2, 10, 2, 1, 1},
      {10, 2, 10, 2, 1, 10},
      {16, 2, 10, 2, 1, 16},
  };
  static constexpr const char* NAMES[1] = {"Int8MatMul"};
  static constexpr Signature SIGNATURE{5, 1, 0x0, 0x0, 0x0};
};

struct LowBitMatMul {
  static constexpr const char* NAME = "LowBitMatMul";
  static constexpr int64_t VERSION = 1;
  static constexpr Input A{0, "LowBitMatMul: A"};
  static constexpr Input CODES{1, "LowBitMatMul: codes"};
  static constexpr Input SCALES{2, "LowBitMatMul: scales"};
  static constexpr Input ROW_SCALES{3, "LowBitMatMul: row_scales"};
  static constexpr Input LEVELS{4, "LowBitMatMul: levels"};
  static constexpr Input FACTOR{5, "LowBitMatMul: factor"};
  static constexpr Output Y{0, "LowBitMatMul: Y"};
  static constexpr Integer K{"K", 0, {1, 16777216}};
  static constexpr Integer N{"N", 0, {1, 2147483648}};
  static constexpr Integer GROUP_SIZE{"group_size", 3, {32, 64, 128}};
  static constexpr Integer BITS{"bits", 0, {1, 6}};
  static constexpr int TYPES[4][7] = {
      {1, 2, 10, 10, 2, 1, 1},
      {1, 2, 3, 10, 2, 1, 1},
      {10, 2, 10, 10, 2, 1, 10},
      {10, 2, 3, 10, 2, 1, 10},
  };
  static constexpr int GPU_TYPES[6][7] = {
      {1, 2, 10, 10, 2, 1, 1},
      {1, 2, 3, 10, 2, 1, 1},
      {10, 2, 10, 10, 2, 1, 10},
      {10, 2, 3, 10, 2, 1, 10},
      {16, 2, 10, 10, 2, 1, 16},
      {16, 2, 3, 10, 2, 1, 16},
  };
  static constexpr const char* NAMES[14] = {"LowBitMatMul", "LowBitMatMul_2", "LowBitMatMul_3", "LowBitMatMul_4", "LowBitMatMul_5", "LowBitMatMul_6", "LowBitMatMul_7", "LowBitMatMul_8", "LowBitMatMul_9", "LowBitMatMul_10", "LowBitMatMul_11", "LowBitMatMul_12", "LowBitMatMul_13", "LowBitMatMul_14"};
  static constexpr Signature SIGNATURE{6, 1, 0x0, 0x0, 0x0};
};

struct SelectiveScan {
  static constexpr const char* NAME = "SelectiveScan";
  static constexpr int64_t VERSION = 1;
  static constexpr Input X{0, "SelectiveScan: x"};
  static constexpr Input DT{1, "SelectiveScan: dt"};
  static constexpr Input Z{2, "SelectiveScan: z"};
  static constexpr Input B{3, "SelectiveScan: B"};
  static constexpr Input C{4, "SelectiveScan: C"};
  static constexpr Input A{5, "SelectiveScan: A"};
  static constexpr Input D{6, "SelectiveScan: D"};
  static constexpr Input DT_BIAS{7, "SelectiveScan: dt_bias"};
  static constexpr Input ATTENTION_MASK{8, "SelectiveScan: attention_mask"};
  static constexpr Input PAST_STATE{9, "SelectiveScan: past_state"};
  static constexpr Output Y{0, "SelectiveScan: y"};
  static constexpr Output MEMORY{1, "SelectiveScan: memory"};
  static constexpr Output PRESENT_STATE{2, "SelectiveScan: present_state"};
  static constexpr int TYPES[2][13] = {
      {1, 1, 1, 1, 1, 1, 1, 1, 7, 1, 1, 1, 1},
      {10, 10, 10, 10, 10, 1, 1, 1, 7, 1, 10, 10, 1},
  };
  static constexpr int GPU_TYPES[3][13] = {
      {1, 1, 1, 1, 1, 1, 1, 1, 7, 1, 1, 1, 1},
      {10, 10, 10, 10, 10, 1, 1, 1, 7, 1, 10, 10, 1},
      {16, 16, 16, 16, 16, 1, 1, 1, 7, 1, 16, 16, 1},
  };
  static constexpr const char* NAMES[1] = {"SelectiveScan"};
  static constexpr Signature SIGNATURE{10, 3, 0x0, 0x2, 0x0};
};

struct SiluGate {
  static constexpr const char* NAME = "SiluGate";
  static constexpr int64_t VERSION = 1;
  static constexpr Input A{0, "SiluGate: A"};
  static constexpr Output Y{0, "SiluGate: Y"};
  static constexpr int TYPES[2][2] = {
      {1, 1},
      {10, 10},
  };
  static constexpr int GPU_TYPES[3][2] = {
      {1, 1},
      {10, 10},
      {16, 16},
  };
  static constexpr const char* NAMES[1] = {"SiluGate"};
  static constexpr Signature SIGNATURE{1, 1, 0x0, 0x0, 0x0};
};

struct TernaryMatMul {
  static constexpr const char* NAME = "TernaryMatMul";
  static constexpr int64_t VERSION = 2;
  static constexpr Input A{0, "TernaryMatMul: A"};
  static constexpr Input PACKED{1, "TernaryMatMul: packed"};
  static constexpr Input SCALE{2, "TernaryMatMul: scale"};
  static constexpr Output Y{0, "TernaryMatMul: Y"};
  static constexpr Integer K{"K", 0, {1, 16777216}};
  static constexpr Integer N{"N", 0, {1, 2147483648}};
  static constexpr Integer ACTIVATION_BITS{"activation_bits", 2, {8, 4}};
  static constexpr int TYPES[2][4] = {
      {1, 2, 1, 1},
      {10, 2, 1, 10},
  };
  static constexpr int GPU_TYPES[3][4] = {
      {1, 2, 1, 1},
      {10, 2, 1, 10},
      {16, 2, 1, 16},
  };
  static constexpr const char* NAMES[1] = {"TernaryMatMul"};
  static constexpr Signature SIGNATURE{3, 1, 0x0, 0x0, 0x0};
};

}  // namespace diffbit::schema
