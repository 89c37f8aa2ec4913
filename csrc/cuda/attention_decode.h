// Shared by the kernels of attention_decode.cu: how a call is cut, queries, and the results of a split.
#pragma once

#include "attention.h"

namespace diffbit::cuda {
namespace {

constexpr int ROWS = 8;         // rows per block: columns of a tensor core's product
constexpr int FAST_WARPS = 4;   // at most, of a block of the kernels on tensor cores
constexpr float LOG2_E = 1.4426950408889634f;

/// A part of a call, and how it is cut. Rows are the queries of a kv head in the order [pair, step], then those of the
/// noise heads, [noise head, step]. For each row a split writes the product of its shares with the values, sums [B, G,
/// splits, rows, width d], and marks [B, G, splits, rows, 2]: the maximum of its logits (as powers of 2), the sum of shares.
struct Cut {
  Part part;
  int64_t past, all;       // tokens before the part, and with it
  int64_t rows;            // of a kv head
  int64_t row_blocks;      // of ROWS
  int64_t splits;          // of all kernels
  float* sums;
  float* marks;
  // A kernel's: the tokens begin .. end in `own_splits` of `span` tokens, the first of which is split `first_split`
  int64_t begin, end, own_splits, span, first_split;
};

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

/// The reference level of shares: finite even if a row has seen nothing.
__device__ __forceinline__ float level(float most) { return most == -infinity() ? 0.0f : most; }

struct Row {
  int64_t branch, pair, step;
};
__device__ __forceinline__ Row row_of(const Attention& a, const Part& part, int64_t row) {
  const int64_t head = row / part.steps, noise = head - pairs(a);
  return {noise >= 0, noise >= 0 ? noise * a.noise_ratio : head, row % part.steps};
}

/// Whether a head that is on needs a row of a block. If none does, nobody reads the block's results.
__device__ __forceinline__ bool needs(const Attention& a, const Cut& cut, int64_t b, int64_t g, int64_t first_row,
                                      int64_t rows) {
  if (!a.gates) return true;
  for (int64_t row = first_row; row < first_row + rows; ++row) {
    const Row r = row_of(a, cut.part, row);
    for (int64_t pair = r.pair; pair < r.pair + (r.branch ? a.noise_ratio : 1); ++pair)
      if (gate_of(a, b, cut.part.first + r.step, g * pairs(a) + pair) != 0) return true;
  }
  return false;
}

/// Channels i and i + d / 2 of a row's query, rotated and scaled, with every operation rounded.
__device__ __forceinline__ float2 query_at(const Attention& a, const Part& part, int64_t b, int64_t g, int64_t row,
                                           int64_t i) {
  const Row r = row_of(a, part, row);
  const int64_t s = part.first + r.step, query_heads = groups(a) * (pairs(a) + noises(a));
  const int64_t sub_head = query_head(a.branches, a.noise_ratio, g * pairs(a) + r.pair, r.branch);
  const float2 x = rotated(a, b, s, a.query, (b * a.steps + s) * query_heads + sub_head, i);
  return make_float2(__fmul_rn(x.x, a.scale), __fmul_rn(x.y, a.scale));
}

__device__ __forceinline__ bool hidden(const Attention& a, int64_t b, int64_t t) {
  return !static_cast<const int64_t*>(a.attention_mask)[b * a.mask_row + t];
}

/// A warp's row of a query, scaled and rotated as the keys are. Zeros for rows beyond the last.
template <int PIECES>
__device__ __forceinline__ void query_of(const Attention& a, const Cut& cut, int64_t b, int64_t group, int64_t row,
                                         int lane, float (&x)[PIECES]) {
  row_of_pairs(a.d, lane, x, [&](int64_t i) {
    return row < cut.rows ? query_at(a, cut.part, b, group, row, i) : make_float2(0.0f, 0.0f);
  });
  if (a.key_bits < 16) rotate(x, a.d, lane);
}

/// The product of a row's query with the offset of its keys, the sub-head `head`.
template <int PIECES>
__device__ __forceinline__ float offset_product(const Attention& a, int64_t head, int lane, const float (&x)[PIECES]) {
  const __half* offset = offset_of(a, side_of(a, true), head);
  float sum = 0;
  each_channel<PIECES>(a.d, lane, [&](int k, int64_t i) { sum += x[k] * to_float(offset[i]); });
  return warp_sum(sum);
}

/// Multiplies a row by a power of 2 that scales it to 1 .. 2; returns the inverse of that power.
template <int PIECES>
__device__ __forceinline__ float normalize(float (&x)[PIECES]) {
  float largest = 0;
#pragma unroll
  for (int k = 0; k < PIECES; ++k) largest = fmaxf(largest, fabsf(x[k]));
  const uint32_t exponent = __float_as_uint(warp_most(largest)) >> 23;
  const bool normal = exponent > 0 && exponent < 254;
#pragma unroll
  for (int k = 0; k < PIECES; ++k) x[k] *= normal ? __uint_as_float((254 - exponent) << 23) : 1.0f;
  return normal ? __uint_as_float(exponent << 23) : 1.0f;
}

/// Writes a block's rows to the workspace: `sum` has a warp's sums of them, relative to the warp's maximum.
template <int CHANNELS, class Sum>
__device__ __forceinline__ void leave(const Attention& a, const Cut& cut, int64_t first_row, int rows, int warps,
                                      const float (*mosts)[ROWS], const float (*shares)[ROWS], const Sum& sum) {
  const int64_t head = blockIdx.z * groups(a) + blockIdx.y, split = blockIdx.x / cut.row_blocks;
  const int64_t at = (head * cut.splits + cut.first_split + split) * cut.rows + first_row;
  for (int r = 0; r < rows; ++r) {
    float most = -infinity(), share = 0, factors[FAST_WARPS];
    for (int w = 0; w < warps; ++w) most = fmaxf(most, mosts[w][r]);
#pragma unroll
    for (int w = 0; w < FAST_WARPS; ++w) {
      factors[w] = w < warps ? exp2_approx(mosts[w][r] - level(most)) : 0.0f;
      if (w < warps) share += shares[w][r] * factors[w];
    }
    for (int channel = static_cast<int>(threadIdx.x); channel < CHANNELS; channel += 32 * warps) {
      float x = 0;
#pragma unroll
      for (int w = 0; w < FAST_WARPS; ++w)
        if (w < warps) x += factors[w] * sum(w, r, channel);
      cut.sums[(at + r) * CHANNELS + channel] = x;
    }
    if (threadIdx.x == 0) cut.marks[2 * (at + r)] = most, cut.marks[2 * (at + r) + 1] = share;
  }
}

}  // namespace
}  // namespace diffbit::cuda
