// decode_any: every other cache, on CUDA cores.
#pragma once

#include "attention_decode.h"

namespace diffbit::cuda {
namespace {

constexpr int ANY_THREADS = 256;
constexpr int ANY_WARPS = ANY_THREADS / 32;
static_assert(ANY_WARPS == ROWS, "a warp a row");
constexpr int ANY_TOKENS = 32;
constexpr int ANY_EACH = 2 * ATTENTION_MOST_D / ANY_THREADS;  // channels of a thread

/// Supports all bits, types and widths. Warps take tokens for the logits, threads take channels for the values.
/// Shared memory: queries [ROWS, d]; with query bits also their codes [ROWS, d].
__global__ void __launch_bounds__(ANY_THREADS) decode_any(const Attention a, const Cut cut) {
  __shared__ float shares[ANY_TOKENS][ROWS], factors[ROWS], query_scales[ROWS], offsets[ROWS];
  float* q = shared_memory<float>();
  float* codes = q + ROWS * a.d;
  const int64_t d = a.d, all_groups = groups(a);
  const int64_t first_row = blockIdx.x % cut.row_blocks * ROWS, split = blockIdx.x / cut.row_blocks;
  const int64_t g = blockIdx.y, b = blockIdx.z, head = b * a.kv_heads + g * width(a);
  const int rows = static_cast<int>(min(static_cast<int64_t>(ROWS), cut.rows - first_row));
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  if (!needs(a, cut, b, g, first_row, rows)) return;
  const int64_t begin = split * cut.span, end = min(begin + cut.span, cut.end);
  const int64_t after = blockwise(a) ? quantized_for(a, cut.all) : 0;
  const Side keys = side_of(a, true), values = side_of(a, false);
  const float top = static_cast<float>((1 << (a.query_bits ? a.query_bits - 1 : 0)) - 1);

  {
    float x[MOST_PIECES];
    query_of(a, cut, b, g, first_row + warp, lane, x);
    each_channel<MOST_PIECES>(d, lane, [&](int k, int64_t i) { q[warp * d + i] = x[k]; });
    const int64_t branch = row_of(a, cut.part, min(first_row + warp, cut.rows - 1)).branch;
    const float offset = keys.bits < 8 && after ? offset_product(a, head + branch * a.wide_value, lane, x) : 0.0f;
    const float scale = a.query_bits ? round_row(x, top) : 1.0f;
    if (a.query_bits) each_channel<MOST_PIECES>(d, lane, [&](int k, int64_t i) { codes[warp * d + i] = x[k]; });
    if (lane == 0) query_scales[warp] = scale, offsets[warp] = offset;
  }
  __syncthreads();

  float sums[ROWS][ANY_EACH] = {}, most = -infinity(), sum = 0;  // of row `warp`
  for (int64_t t0 = begin; t0 < end; t0 += ANY_TOKENS) {
    const int count = static_cast<int>(min(static_cast<int64_t>(ANY_TOKENS), end - t0));
    for (int k = warp; k < ANY_TOKENS; k += ANY_WARPS) {
      float dots[ROWS] = {};
      const int64_t t = t0 + min(k, count - 1);
      const Token first = token_of(a, keys, head, t, after), second = token_of(a, keys, head + a.wide_value, t, after);
      const bool rounded = a.query_bits && first.bits < 16;
      const float* from = rounded ? codes : q;
      for (int64_t i = lane; i < d; i += 32) {
        const float x = first.level(i), y = a.wide_value ? second.level(i) : x;
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
          dots[row] += from[row * d + i] * (first_row + row >= pairs(a) * cut.part.steps ? y : x);
      }
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        float s = warp_sum(dots[row]);
        if (rounded) s *= query_scales[row];
        s *= first_row + row >= pairs(a) * cut.part.steps && a.wide_value ? second.scale : first.scale;
        if (first.offset) s += offsets[row];
        const bool seen = k < count && !hidden(a, b, t) && t <= cut.past + (first_row + row) % cut.part.steps;
        if (lane == row) shares[k][row] = seen ? s * LOG2_E : -infinity();
      }
    }
    __syncthreads();
    {
      const float s = shares[lane][warp], next = fmaxf(most, warp_most(s)), share = exp2_approx(s - level(next));
      const float factor = exp2_approx(most - level(next));
      most = next;
      sum = sum * factor + warp_sum(share);
      shares[lane][warp] = share;
      if (lane == 0) factors[warp] = factor;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < ANY_EACH; ++k) {
      const int64_t channel = thread + k * ANY_THREADS;
      if (channel >= width(a) * d) break;
#pragma unroll
      for (int row = 0; row < ROWS; ++row) sums[row][k] *= factors[row];
      for (int i = 0; i < count; ++i) {
        const Token token = token_of(a, values, head + channel / d, t0 + i, after);
        const float x = token.at(channel % d);
#pragma unroll
        for (int row = 0; row < ROWS; ++row) sums[row][k] += shares[i][row] * x;
      }
    }
    __syncthreads();
  }

  const int64_t at = ((b * all_groups + g) * cut.splits + split) * cut.rows + first_row;
#pragma unroll
  for (int k = 0; k < ANY_EACH; ++k) {
    const int64_t channel = thread + k * ANY_THREADS;
    if (channel >= width(a) * d) break;
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
      if (row < rows) cut.sums[(at + row) * width(a) * d + channel] = sums[row][k];
  }
  if (warp < rows && lane == 0) cut.marks[2 * (at + warp)] = most, cut.marks[2 * (at + warp) + 1] = sum;
}

}  // namespace
}  // namespace diffbit::cuda
