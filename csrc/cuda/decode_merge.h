// merge: combines the splits of a head.
#pragma once

#include "attention_decode.h"

namespace diffbit::cuda {
namespace {

constexpr int MERGE_THREADS = 256;
constexpr int MERGE_WARPS = MERGE_THREADS / 32;
constexpr int MERGE_CHANNELS = 128;  // at once

/// A head of a step: merges its splits, then the difference, the head norm, and the way back of rotated values. Warps take splits.
__global__ void __launch_bounds__(MERGE_THREADS) merge(const Attention a, const Cut cut) {
  __shared__ float parts[MERGE_WARPS][MERGE_CHANNELS], out[2 * ATTENTION_MOST_D], squares_of[MERGE_WARPS];
  const int64_t head = blockIdx.x, step = blockIdx.y, b = blockIdx.z, s = cut.part.first + step;
  const int64_t g = head / pairs(a), channels = width(a) * a.d, first = (b * groups(a) + g) * cut.splits * cut.rows;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const float gate = gate_of(a, b, s, head);
  const int64_t out_at = ((b * a.steps + s) * a.heads + head) * channels;
  if (gate == 0) {  // its rows may not be there
    for (int64_t channel = thread; channel < channels; channel += MERGE_THREADS)
      put_number(a.out, a.type, out_at + channel, 0.0f);
    return;
  }
  int64_t rows[2];
  float levels[2], shares[2] = {};
#pragma unroll
  for (int branch = 0; branch < 2; ++branch) {
    if (branch == a.branches) break;
    const int64_t pair = head % pairs(a);
    rows[branch] = first + (branch ? pairs(a) + pair / a.noise_ratio : pair) * cut.part.steps + step;
    float most = -infinity(), sum = 0;
    for (int64_t split = lane; split < cut.splits; split += 32)
      most = fmaxf(most, cut.marks[2 * (rows[branch] + split * cut.rows)]);
    levels[branch] = level(warp_most(most));
    for (int64_t split = lane; split < cut.splits; split += 32) {
      const float* mark = cut.marks + 2 * (rows[branch] + split * cut.rows);
      sum += mark[1] * exp2_approx(mark[0] - levels[branch]);
    }
    sum = warp_sum(sum);
    shares[branch] = sum == 0 ? 0.0f : 1 / sum;
  }
  if (a.branches == 2) {
    const float* lambda = static_cast<const float*>(a.lambda);
    shares[1] *= -lambda[a.lambda_per_token ? (b * a.steps + s) * a.heads + head : head];
  }

  float squares = 0;
  for (int64_t begin = 0; begin < channels; begin += MERGE_CHANNELS) {
    float sums[MERGE_CHANNELS / 32] = {};
#pragma unroll 4
    for (int64_t split = warp; split < cut.splits; split += MERGE_WARPS)
#pragma unroll
      for (int branch = 0; branch < 2; ++branch) {
        if (branch == a.branches) break;
        const int64_t row = rows[branch] + split * cut.rows;
        const float factor = exp2_approx(cut.marks[2 * row] - levels[branch]) * shares[branch];
#pragma unroll
        for (int k = 0; k < MERGE_CHANNELS / 32; ++k)
          if (const int64_t channel = begin + lane + 32 * k; channel < channels)
            sums[k] += factor * cut.sums[row * channels + channel];
      }
#pragma unroll
    for (int k = 0; k < MERGE_CHANNELS / 32; ++k) parts[warp][lane + 32 * k] = sums[k];
    __syncthreads();
    if (const int64_t channel = begin + thread; thread < MERGE_CHANNELS && channel < channels) {
      float x = 0;
      for (int k = 0; k < MERGE_WARPS; ++k) x += parts[k][thread];
      out[channel] = x;
      squares += x * x;
    }
    __syncthreads();
  }
  squares = warp_sum(squares);
  if (lane == 0) squares_of[warp] = squares;
  __syncthreads();
  float root = 1;
  if (a.norm_eps > 0) {
    squares = 0;
    for (int k = 0; k < MERGE_WARPS; ++k) squares += squares_of[k];
    root = sqrtf(squares / static_cast<float>(channels) + a.norm_eps);
  }
  if (a.value_bits < 16) {
    if (warp < width(a)) {
      float x[MOST_PIECES] = {};
      each_channel<MOST_PIECES>(a.d, lane, [&](int k, int64_t i) { x[k] = out[warp * a.d + i]; });
      rotate(x, a.d, lane);
      each_channel<MOST_PIECES>(a.d, lane, [&](int k, int64_t i) { out[warp * a.d + i] = x[k]; });
    }
    __syncthreads();
  }
  for (int64_t channel = thread; channel < channels; channel += MERGE_THREADS)
    put_number(a.out, a.type, out_at + channel, out[channel] / root * gate);
}

}  // namespace
}  // namespace diffbit::cuda
