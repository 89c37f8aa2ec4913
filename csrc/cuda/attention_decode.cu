#include "attention.h"

namespace diffbit::cuda {
namespace {

constexpr int ROWS = 8;         // that a block takes: columns of a tensor core's product
constexpr float LOG2_E = 1.4426950408889634f;

/// A part of a call, and how it is cut. Rows are the queries of a kv head in the order [branch, pair, step]. A split
/// leaves of each row the shares' product with its values, sums [B, G, splits, rows, width d], and the maximum of its
/// logits (as powers of 2) and the sum of its shares, marks [B, G, splits, rows, 2].
struct Cut {
  Part part;
  int64_t past, all;       // tokens before the part, and with it
  int64_t rows;            // of a kv head
  int64_t row_blocks;      // of ROWS
  int64_t splits, span;    // tokens of a split
  float* sums;
  float* marks;
};

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

/// The reference level of shares: no infinity where a row has seen nothing.
__device__ __forceinline__ float level(float most) { return most == -infinity() ? 0.0f : most; }

struct Row {
  int64_t branch, pair, step;
};
__device__ __forceinline__ Row row_of(const Attention& a, const Part& part, int64_t row) {
  return {row / (pairs(a) * part.steps), row / part.steps % pairs(a), row % part.steps};
}

/// Channels i and i + d / 2 of a row's query, rotated and scaled, every step rounded.
__device__ __forceinline__ float2 query_at(const Attention& a, const Part& part, int64_t b, int64_t g, int64_t row,
                                           int64_t i) {
  const Row r = row_of(a, part, row);
  const int64_t s = part.first + r.step, sub_head = a.branches * (g * pairs(a) + r.pair) + r.branch;
  const float2 x = rotated(a, b, s, a.query, (b * a.steps + s) * a.branches * a.heads + sub_head, i);
  return make_float2(__fmul_rn(x.x, a.scale), __fmul_rn(x.y, a.scale));
}

__device__ __forceinline__ bool hidden(const Attention& a, int64_t b, int64_t t) {
  return !static_cast<const int64_t*>(a.attention_mask)[b * (a.past_length + a.steps) + t];
}

__device__ __forceinline__ float warp_sum(float x) {
  for (int with = 16; with; with /= 2) x += __shfl_xor_sync(0xffffffffu, x, with);
  return x;
}
__device__ __forceinline__ float warp_most(float x) {
  for (int with = 16; with; with /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, with));
  return x;
}

// ---- any cache -----------------------------------------------------------------------------------------------------

constexpr int ANY_THREADS = 256;
constexpr int ANY_WARPS = ANY_THREADS / 32;
static_assert(ANY_WARPS == ROWS, "a warp a row");
constexpr int ANY_TOKENS = 32;
constexpr int ANY_EACH = 2 * ATTENTION_MOST_D / ANY_THREADS;  // channels of a thread

/// A token's row of a sub-head, whatever holds it.
struct Token {
  const char* x;
  const __half* grid;  // steps, then points; null where the row has none
  int64_t points;      // how far these lie behind the steps
  int shift;           // channels that share a grid, as a power of 2
  int bits;
  int64_t type;
  float step;          // of the row

  /// A code, or the number itself.
  __device__ float code(int64_t i) const {
    if (bits == 16) return number(x, type, i);
    if (bits == 8) return static_cast<float>(reinterpret_cast<const int8_t*>(x)[i]);
    const int bytes = 4 * bits, k = static_cast<int>(i % GROUP);
    const unsigned byte = reinterpret_cast<const uint8_t*>(x)[i / GROUP * bytes + k % bytes];
    return static_cast<float>(byte >> k / bytes * bits & ((1u << bits) - 1));
  }
  /// But for the row's step.
  __device__ float at(int64_t i) const {
    return grid ? code(i) * to_float(grid[i >> shift]) + to_float(grid[points + (i >> shift)]) : code(i);
  }
};

__device__ __forceinline__ Token token_of(const Attention& a, const Side& side, int64_t head, int64_t t,
                                          int64_t after) {
  Token token;
  token.grid = nullptr, token.points = 0, token.shift = 0, token.step = 1;
  if (side.bits < 8 && t >= after) {
    token.x = reinterpret_cast<const char*>(side.recent + (head * (a.window + GROUP) + t - after) * a.d);
    token.bits = 16, token.type = ort::FLOAT16;
    return token;
  }
  const int64_t slot = head * side.capacity + t;
  token.bits = side.bits, token.type = side.type;
  token.x = side.rows + slot * (side.bits == 16 && side.type == ort::FLOAT32 ? a.d * 4 : a.d * side.bits / 8);
  if (side.bits == 8) token.step = reinterpret_cast<const float*>(side.scales)[slot];
  if (side.bits < 8) {
    token.points = side.keys ? a.d : a.d / GROUP;
    token.shift = side.keys ? 0 : 5;
    token.grid = reinterpret_cast<const __half*>(side.scales) + (side.keys ? slot / GROUP : slot) * 2 * token.points;
  }
  return token;
}

/// A warp rounds a row of d numbers to -top .. top (kv_cache.round_rows). Returns the step.
template <class X>
__device__ float round_row(int64_t d, float top, int lane, const X& x, float* codes) {
  float largest = 0;
  bool finite = true;
  for (int64_t i = lane; i < d; i += 32) {
    finite = finite && fabsf(x(i)) <= FLT_MAX;
    largest = fmaxf(largest, fabsf(x(i)));
  }
  finite = __all_sync(0xffffffffu, finite);
  const float step = finite ? __fdiv_rn(warp_most(largest), top) : nan_number();
  for (int64_t i = lane; i < d; i += 32)
    codes[i] = !finite || step == 0 ? 0.0f : fminf(top, fmaxf(-top, rintf(__fdiv_rn(x(i), step))));
  return step;
}

/// Right for every kind, type and width. Warps take tokens for the logits, threads take channels for the values.
/// Shared memory: queries [ROWS, d]; with query bits also their codes [ROWS, d].
__global__ void __launch_bounds__(ANY_THREADS) decode_any(const Attention a, const Cut cut) {
  __shared__ float shares[ANY_TOKENS][ROWS], factors[ROWS], steps[ROWS], offsets[ROWS];
  float* q = shared_memory<float>();
  float* codes = q + ROWS * a.d;
  const int64_t d = a.d, all_groups = groups(a);
  const int64_t first_row = blockIdx.x % cut.row_blocks * ROWS, split = blockIdx.x / cut.row_blocks;
  const int64_t g = blockIdx.y, b = blockIdx.z, head = b * a.kv_heads + g * width(a);
  const int rows = static_cast<int>(min(static_cast<int64_t>(ROWS), cut.rows - first_row));
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int64_t begin = split * cut.span, end = min(begin + cut.span, cut.all);
  const int64_t after = on_grids(a) ? settled(cut.all, a.window) : 0;
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
    const float step = round_row(d, top, lane, [&](int64_t i) { return q[warp * d + i]; }, codes + warp * d);
    if (lane == 0) steps[warp] = step, offsets[warp] = 0;
  }

  float sums[ROWS][ANY_EACH] = {}, most = -infinity(), sum = 0;  // of row `warp`
  for (int64_t t0 = begin; t0 < end; t0 += ANY_TOKENS) {
    const int count = static_cast<int>(min(static_cast<int64_t>(ANY_TOKENS), end - t0));
    const bool rounded = a.query_bits && (keys.bits == 8 || t0 < after);
    if (rounded && keys.bits < 8) {  // the block's grid meets the query
      const int64_t sub_head = a.wide_value ? row_of(a, cut.part, min(first_row + warp, cut.rows - 1)).branch : 0;
      const Token token = token_of(a, keys, head + sub_head, t0, after);
      const float* own = q + warp * d;
      const auto stepped = [&](int64_t i) { return __fmul_rn(own[i], to_float(token.grid[i])); };
      const float step = round_row(d, top, lane, stepped, codes + warp * d);
      float offset = 0, lost = 0;
      for (int64_t i = lane; i < d; i += 32) {
        offset += own[i] * to_float(token.grid[d + i]);
        lost += stepped(i) - codes[warp * d + i] * step;
      }
      offset = warp_sum(offset) + static_cast<float>((1 << keys.bits) - 1) / 2 * warp_sum(lost);
      if (lane == 0) steps[warp] = step, offsets[warp] = offset;
    }
    __syncthreads();
    const float* from = rounded ? codes : q;
    for (int k = warp; k < ANY_TOKENS; k += ANY_WARPS) {
      float dots[ROWS] = {};
      const int64_t t = t0 + min(k, count - 1);
      const Token own = token_of(a, keys, head, t, after), other = token_of(a, keys, head + a.wide_value, t, after);
      for (int64_t i = lane; i < d; i += 32) {
        const float x = rounded ? own.code(i) : own.at(i);
        const float y = a.wide_value ? rounded ? other.code(i) : other.at(i) : x;
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
          dots[row] += from[row * d + i] * (first_row + row >= pairs(a) * cut.part.steps ? y : x);
      }
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        float s = warp_sum(dots[row]);
        if (rounded) s = s * steps[row] + offsets[row];
        s *= first_row + row >= pairs(a) * cut.part.steps && a.wide_value ? other.step : own.step;
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
        const float x = token.at(channel % d) * token.step;
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

// ---- the end -------------------------------------------------------------------------------------------------------

constexpr int MERGE_THREADS = 256;
constexpr int MERGE_WARPS = MERGE_THREADS / 32;
constexpr int MERGE_CHANNELS = 128;  // at once

/// A head of a step: its splits together, the difference, the head norm. Warps take splits.
__global__ void __launch_bounds__(MERGE_THREADS) merge(const Attention a, const Cut cut) {
  __shared__ float parts[MERGE_WARPS][MERGE_CHANNELS], out[2 * ATTENTION_MOST_D], squares_of[MERGE_WARPS];
  const int64_t head = blockIdx.x, step = blockIdx.y, b = blockIdx.z, s = cut.part.first + step;
  const int64_t g = head / pairs(a), channels = width(a) * a.d, first = (b * groups(a) + g) * cut.splits * cut.rows;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  int64_t rows[2];
  float levels[2], shares[2] = {};
#pragma unroll
  for (int branch = 0; branch < 2; ++branch) {
    if (branch == a.branches) break;
    rows[branch] = first + (branch * pairs(a) + head % pairs(a)) * cut.part.steps + step;
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
  for (int64_t channel = thread; channel < channels; channel += MERGE_THREADS)
    put_number(a.out, a.type, ((b * a.steps + s) * a.heads + head) * channels + channel, out[channel] / root);
}

Cut cut_of(const Attention& a, Part part) {
  Cut cut{};
  cut.part = part;
  cut.past = a.past_length + part.first;
  cut.all = cut.past + part.steps;
  cut.rows = a.branches * pairs(a) * part.steps;
  cut.row_blocks = divide_up(cut.rows, ROWS);
  const int64_t units = a.batch * groups(a) * cut.row_blocks, room = 2 * multiprocessors();
  const int64_t wanted = units < room ? room / units : 1, most = divide_up(cut.all, 64);
  cut.span = divide_up(divide_up(cut.all, wanted < most ? wanted : most), ANY_TOKENS) * ANY_TOKENS;
  cut.splits = divide_up(cut.all, cut.span);
  return cut;
}

}  // namespace

bool decode_appends(const Attention&) { return false; }

size_t decode_workspace(const Attention& a, Part part) {
  const Cut cut = cut_of(a, part);
  return static_cast<size_t>(a.batch * groups(a) * cut.splits * cut.rows * (width(a) * a.d + 2)) * sizeof(float);
}

const char* decode(const Attention& a, Part part, void* workspace, cudaStream_t stream) {
  Cut cut = cut_of(a, part);
  const int64_t all = a.batch * groups(a) * cut.splits * cut.rows;
  cut.sums = static_cast<float*>(workspace);
  cut.marks = cut.sums + all * width(a) * a.d;
  const dim3 grid(static_cast<unsigned>(cut.splits * cut.row_blocks), static_cast<unsigned>(groups(a)),
                  static_cast<unsigned>(a.batch));
  const size_t shared = static_cast<size_t>((a.query_bits ? 2 : 1) * ROWS * a.d) * sizeof(float);
  if (const char* wrong = launch(decode_any, grid, ANY_THREADS, shared, stream, a, cut)) return wrong;
  const dim3 heads(static_cast<unsigned>(a.heads), static_cast<unsigned>(part.steps), static_cast<unsigned>(a.batch));
  return launch(merge, heads, MERGE_THREADS, 0, stream, a, cut);
}

}  // namespace diffbit::cuda
