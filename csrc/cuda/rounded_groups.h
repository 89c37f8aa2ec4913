// Activations rounded to int8 in groups, as Int8MatMul and LowBitMatMul read them (ops/int4_matmul.py has the definition).
#pragma once

#include "activations.h"

namespace diffbit::cuda {

constexpr float ROUNDED_SMALLEST = 1e-30f;
constexpr int ROUNDING_WARPS = 8;

struct RoundedGroups {
  const void* a;
  uint32_t* q;        // [m, groups, steps of 8, 2]: four even activations, four odd ones
  float* row_scales;  // [m, groups]
  int32_t* sums;      // [m, groups] of q
  int64_t m;
  int k, groups, group_size;
  bool aligned;
};

/// A warp quantizes a group of a row: lanes 0 ... group_size / 8 - 1 have eight numbers each.
template <class T>
__global__ void __launch_bounds__(32 * ROUNDING_WARPS) round_groups(RoundedGroups p) {
  const int lane = threadIdx.x % 32, steps = p.group_size / 8;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * ROUNDING_WARPS + threadIdx.x / 32;  // row * groups + group
  if (at >= p.m * p.groups) return;
  const int64_t row = at / p.groups;
  const int begin = static_cast<int>(at % p.groups) * p.group_size + lane * 8;
  float x[8] = {};
  if (lane < steps) load8(x, static_cast<const T*>(p.a) + row * p.k, begin, p.k, p.aligned);
  const int bits = __reduce_max_sync(WARP, larger(0, x));
  const float size = __int_as_float(bits);
  const bool wild = bits >= INFINITE, zero = wild || size < ROUNDED_SMALLEST;
  const float inverse = zero ? 0.0f : __fdiv_rn(127.0f, size);
  int codes[8], sum = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) sum += codes[j] = zero ? 0 : __float2int_rn(__fmul_rn(x[j], inverse));
  sum = __reduce_add_sync(WARP, sum);
  if (lane < steps) {
    uint32_t* to = p.q + (at * steps + lane) * 2;
    to[0] = bytes(codes[0], codes[2], codes[4], codes[6]);
    to[1] = bytes(codes[1], codes[3], codes[5], codes[7]);
  }
  if (lane == 0) {
    p.row_scales[at] = wild ? __int_as_float(0x7fc00000) : zero ? 0.0f : __fdiv_rn(size, 127.0f);
    p.sums[at] = sum;
  }
}

template <class Op>
size_t groups_of(const Op& op) {
  return static_cast<size_t>(op.m * ((op.k + op.group_size - 1) / op.group_size));
}

template <class Op>
size_t rounded_workspace(const Op& op) {
  return groups_of(op) * (static_cast<size_t>(op.group_size) + sizeof(float) + sizeof(int32_t));
}

/// Rounds the activations of a call into its workspace, and sets `p` to what is there; returns an error message.
template <class Op>
const char* round_activations(const Op& op, void* workspace, cudaStream_t stream, RoundedGroups& p) {
  const size_t groups = groups_of(op);
  p.a = op.a;
  p.q = static_cast<uint32_t*>(workspace);
  p.row_scales = reinterpret_cast<float*>(p.q + groups * static_cast<size_t>(op.group_size) / 4);
  p.sums = reinterpret_cast<int32_t*>(p.row_scales + groups);
  p.m = op.m, p.k = static_cast<int>(op.k), p.group_size = static_cast<int>(op.group_size);
  p.groups = static_cast<int>((op.k + op.group_size - 1) / op.group_size);
  return with_type(op.type, "activations", [&](auto number) {
    using T = decltype(number);
    p.aligned = aligned_rows<T>(p.a, p.k);
    const unsigned blocks = static_cast<unsigned>((groups + ROUNDING_WARPS - 1) / ROUNDING_WARPS);
    return launch(round_groups<T>, blocks, 32 * ROUNDING_WARPS, 0, stream, p);
  });
}

}  // namespace diffbit::cuda
