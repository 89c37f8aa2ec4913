// What the files of DiffAttention share. attention.cu makes the new tokens present and cuts a call into parts,
// attention_decode.cu attends with few queries, attention_prefill.cu with many.
#pragma once

#include "../ort_abi.h"
#include "api.h"
#include "device.h"

namespace diffbit::cuda {

constexpr int64_t GROUP = 32;          // tokens that share a key's grid, channels that share a value's
constexpr int64_t FEW_STEPS = 8;       // of a part that attention_decode.cu takes
constexpr int64_t ATTENTION_MOST_D = 512;

using Attention = DiffbitAttention;

/// Some steps of a call, whose tokens are the last that the present holds.
struct Part {
  int64_t first, steps;
};

/// attention_prefill.cu: whether it takes a call; its scratch memory; all steps of a call whose tokens the present holds.
bool prefill_takes(const Attention& a);
size_t prefill_workspace(const Attention& a);
const char* prefill(const Attention& a, void* workspace, cudaStream_t stream);

__host__ __device__ inline int64_t settled(int64_t total, int64_t window) {
  return total > window ? (total - window) / GROUP * GROUP : 0;
}
inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows of a call: a sub-head of the keys or values serves `width` = 1 + wide_value sub-heads of a kv head.
__host__ __device__ inline int64_t width(const Attention& a) { return 1 + a.wide_value; }
__host__ __device__ inline int64_t groups(const Attention& a) { return a.kv_heads / width(a); }
__host__ __device__ inline int64_t pairs(const Attention& a) { return a.heads / groups(a); }  // of a kv head
__host__ __device__ inline int64_t total(const Attention& a) { return a.past_length + a.steps; }

/// Number i of a tensor of one of the types of floats.
__device__ __forceinline__ float number(const void* x, int64_t type, int64_t i) {
  if (type == ort::FLOAT16) return to_float(static_cast<const __half*>(x)[i]);
  if (type == ort::BFLOAT16) return to_float(static_cast<const __nv_bfloat16*>(x)[i]);
  return static_cast<const float*>(x)[i];
}
__device__ __forceinline__ void put_number(void* x, int64_t type, int64_t i, float y) {
  if (type == ort::FLOAT16)
    static_cast<__half*>(x)[i] = from_float<__half>(y);
  else if (type == ort::BFLOAT16)
    static_cast<__nv_bfloat16*>(x)[i] = from_float<__nv_bfloat16>(y);
  else
    static_cast<float*>(x)[i] = y;
}

/// Channels i and i + d / 2 of a row of d numbers, rotated by the angle of token s of batch row b; every product and
/// difference is rounded for itself.
__device__ __forceinline__ float2 rotated(const Attention& a, int64_t b, int64_t s, const void* x, int64_t row, int64_t i) {
  const int64_t position = static_cast<const int64_t*>(a.position_ids)[b * a.steps + s], half = a.d / 2;
  const bool known = position >= 0 && position < a.positions;
  const float c = known ? static_cast<const float*>(a.cos)[position * half + i] : __int_as_float(0x7fffffff);
  const float n = known ? static_cast<const float*>(a.sin)[position * half + i] : c;
  const float low = number(x, a.type, row * a.d + i), high = number(x, a.type, row * a.d + i + half);
  return make_float2(__fsub_rn(__fmul_rn(low, c), __fmul_rn(high, n)), __fadd_rn(__fmul_rn(high, c), __fmul_rn(low, n)));
}

}  // namespace diffbit::cuda
