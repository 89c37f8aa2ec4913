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

/// A token's row of a sub-head, in any type of cache.
struct Token {
  const char* x;
  const __half* scales;  // of the channels, then zero points; null if they have none
  int64_t d;
  int bits;
  int64_t type;
  float scale;           // of the row

  /// A code, or the number itself.
  __device__ float code(int64_t i) const {
    if (bits == 16) return number(x, type, i);
    if (bits == 8) return static_cast<float>(reinterpret_cast<const int8_t*>(x)[i]);
    const int bytes = 4 * bits, k = static_cast<int>(i % CACHE_BLOCK);
    const unsigned byte = reinterpret_cast<const uint8_t*>(x)[i / CACHE_BLOCK * bytes + k % bytes];
    return static_cast<float>(byte >> k / bytes * bits & ((1u << bits) - 1));
  }
  /// Number i without the row's scale.
  __device__ float at(int64_t i) const {
    return scales ? code(i) * to_float(scales[i]) + to_float(scales[d + i]) : code(i);
  }
};

__device__ __forceinline__ Token token_of(const Attention& a, const Side& side, int64_t head, int64_t t,
                                          int64_t after) {
  Token token;
  token.scales = nullptr, token.d = a.d, token.scale = 1;
  if (side.bits < 8 && t >= after) {
    token.x = reinterpret_cast<const char*>(side.recent + (head * (a.window + CACHE_BLOCK) + t - after) * a.d);
    token.bits = 16, token.type = ort::FLOAT16;
    return token;
  }
  const int64_t slot = head * side.capacity + t;
  token.bits = side.bits, token.type = side.type;
  token.x = side.rows + slot * (side.bits == 16 && side.type == ort::FLOAT32 ? a.d * 4 : a.d * side.bits / 8);
  if (side.bits == 8) token.scale = reinterpret_cast<const float*>(side.scales)[slot];
  if (side.bits < 8) token.scales = reinterpret_cast<const __half*>(side.scales) + slot / CACHE_BLOCK * 2 * a.d;
  return token;
}

/// A warp rounds a row of d numbers to -top .. top (kv_cache.quantize_rows). Returns the scale.
template <class X>
__device__ float round_row(int64_t d, float top, int lane, const X& x, float* codes) {
  float largest = 0;
  bool finite = true;
  for (int64_t i = lane; i < d; i += 32) {
    finite = finite && fabsf(x(i)) <= FLT_MAX;
    largest = fmaxf(largest, fabsf(x(i)));
  }
  finite = __all_sync(0xffffffffu, finite);
  const float scale = finite ? __fdiv_rn(warp_most(largest), top) : nan_number();
  for (int64_t i = lane; i < d; i += 32)
    codes[i] = !finite || scale == 0 ? 0.0f : fminf(top, fmaxf(-top, rintf(__fdiv_rn(x(i), scale))));
  return scale;
}

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
  const int64_t begin = split * cut.span, end = min(begin + cut.span, cut.end);
  const int64_t after = blockwise(a) ? quantized_for(a, cut.all) : 0;
  const Side keys = side_of(a, true), values = side_of(a, false);
  const float top = static_cast<float>((1 << (a.query_bits ? a.query_bits - 1 : 0)) - 1);

  for (int row = 0; row < ROWS; ++row)
    for (int64_t i = thread; i < d / 2; i += ANY_THREADS) {
      const float2 x = row < rows ? query_at(a, cut.part, b, g, first_row + row, i) : make_float2(0.0f, 0.0f);
      q[row * d + i] = x.x;
      q[row * d + i + d / 2] = x.y;
    }
  __syncthreads();
  if (a.query_bits && keys.bits == 8) {
    const float scale = round_row(d, top, lane, [&](int64_t i) { return q[warp * d + i]; }, codes + warp * d);
    if (lane == 0) query_scales[warp] = scale, offsets[warp] = 0;
  }

  float sums[ROWS][ANY_EACH] = {}, most = -infinity(), sum = 0;  // of row `warp`
  for (int64_t t0 = begin; t0 < end; t0 += ANY_TOKENS) {
    const int count = static_cast<int>(min(static_cast<int64_t>(ANY_TOKENS), end - t0));
    const bool rounded = a.query_bits && (keys.bits == 8 || t0 < after);
    if (rounded && keys.bits < 8) {  // multiplies the query by the block's scales
      const int64_t sub_head = a.wide_value ? row_of(a, cut.part, min(first_row + warp, cut.rows - 1)).branch : 0;
      const Token token = token_of(a, keys, head + sub_head, t0, after);
      const float* query = q + warp * d;
      const auto scaled = [&](int64_t i) { return __fmul_rn(query[i], to_float(token.scales[i])); };
      const float scale = round_row(d, top, lane, scaled, codes + warp * d);
      float offset = 0, lost = 0;
      for (int64_t i = lane; i < d; i += 32) {
        offset += query[i] * to_float(token.scales[d + i]);
        lost += scaled(i) - codes[warp * d + i] * scale;
      }
      offset = warp_sum(offset) + static_cast<float>((1 << keys.bits) - 1) / 2 * warp_sum(lost);
      if (lane == 0) query_scales[warp] = scale, offsets[warp] = offset;
    }
    __syncthreads();
    const float* from = rounded ? codes : q;
    for (int k = warp; k < ANY_TOKENS; k += ANY_WARPS) {
      float dots[ROWS] = {};
      const int64_t t = t0 + min(k, count - 1);
      const Token first = token_of(a, keys, head, t, after), second = token_of(a, keys, head + a.wide_value, t, after);
      for (int64_t i = lane; i < d; i += 32) {
        const float x = rounded ? first.code(i) : first.at(i);
        const float y = a.wide_value ? rounded ? second.code(i) : second.at(i) : x;
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
          dots[row] += from[row * d + i] * (first_row + row >= pairs(a) * cut.part.steps ? y : x);
      }
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        float s = warp_sum(dots[row]);
        if (rounded) s = s * query_scales[row] + offsets[row];
        s *= first_row + row >= pairs(a) * cut.part.steps && a.wide_value ? second.scale : first.scale;
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
        const float x = token.at(channel % d) * token.scale;
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
