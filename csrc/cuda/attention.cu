// DiffAttention: the past made present, new tokens appended, and the call cut into parts (csrc/diff_attention.cpp does
// the same on a CPU).
//
// What past holds is copied into present where they are not one memory; from then on everything is in place. A part has
// at most FEW_STEPS steps, which with a cache of blocks all see the same tokens quantized; attention_decode.cu takes it. A call with
// more steps that attention_prefill.cu takes is not cut.
#include "attention.h"

namespace diffbit::cuda {
namespace {

constexpr int WARPS = 4;

/// `heads` runs of `bytes` bytes, a word a thread.
template <class Word>
__global__ void copy_runs(const char* from, char* to, int64_t bytes, int64_t to_stride) {
  const int64_t head = blockIdx.y;
  const Word* source = reinterpret_cast<const Word*>(from + head * bytes);
  Word* target = reinterpret_cast<Word*>(to + head * to_stride);
  const int64_t words = bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += stride)
    target[i] = source[i];
}

const char* copy(const void* from, void* to, int64_t heads, int64_t bytes, int64_t to_stride, cudaStream_t stream) {
  if (from == to || !bytes || !heads) return nullptr;
  const uint64_t all = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to);
  const bool wide = (all | static_cast<uint64_t>(bytes | to_stride)) % 16 == 0;
  const int64_t blocks = divide_up(bytes / (wide ? 16 : 1), 256 * 4);
  const dim3 grid(static_cast<unsigned>(blocks < 1024 ? blocks : 1024), static_cast<unsigned>(heads));
  const char* source = static_cast<const char*>(from);
  char* target = static_cast<char*>(to);
  return wide ? launch(copy_runs<uint4>, grid, 256, 0, stream, source, target, bytes, to_stride)
              : launch(copy_runs<char>, grid, 256, 0, stream, source, target, bytes, to_stride);
}

/// Everything that past holds, also what lies behind its tokens.
const char* copy_past(const Attention& a, bool keys, cudaStream_t stream) {
  const Side side = side_of(a, keys);
  const int64_t heads = a.batch * a.kv_heads, past = keys ? a.past_key_capacity : a.past_value_capacity;
  const int64_t row = row_bytes(a, keys), together = side.bits < 8 && keys ? CACHE_BLOCK : 1;
  const int64_t scale = side.bits == 8 ? 4 : side.bits < 8 ? 4 * (keys ? a.d : a.d / CACHE_BLOCK) : 0;
  const void* recent = keys ? a.past_key_recent : a.past_value_recent;
  const void* rows = keys ? a.past_key : a.past_value;
  if (const char* wrong = copy(rows, side.rows, heads, past * row, side.capacity * row, stream))
    return wrong;
  if (scale)
    if (const char* wrong = copy(keys ? a.past_key_scale : a.past_value_scale, side.scales, heads,
                                 past / together * scale, side.capacity / together * scale, stream))
      return wrong;
  const int64_t slots = side.bits < 8 ? (a.window + CACHE_BLOCK) * a.d * 2 : 0;
  return copy(recent, side.recent, heads, slots, slots, stream);
}

__global__ void __launch_bounds__(32 * WARPS) append_rows(const Attention a, const Part part) {
  const int64_t rows = a.batch * part.steps * a.kv_heads;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * WARPS + threadIdx.x / 32;
  const Side side = side_of(a, blockIdx.y == 0);
  if (row >= rows || side.bits < 8) return;
  const int64_t s = row / a.kv_heads % part.steps;
  const int64_t b = row / a.kv_heads / part.steps;
  append_row(a, side, b, part.first + s, row % a.kv_heads, static_cast<int>(threadIdx.x % 32));
}

/// The scale and the zero point of `count` numbers, `stride` apart; NaN where one of them is not finite.
__device__ float2 scale_and_zero(const __half* x, int64_t count, int64_t stride, float top) {
  float least = to_float(x[0]), most = least;
  bool finite = true;
  for (int64_t k = 0; k < count; ++k) {
    const float y = to_float(x[k * stride]);
    finite = finite && fabsf(y) <= FLT_MAX;
    least = fminf(least, y), most = fmaxf(most, y);
  }
  const float scale = to_float(from_float<__half>(__fdiv_rn(__fsub_rn(most, least), top)));
  return finite ? make_float2(scale, least) : make_float2(nan_number(), nan_number());
}

__device__ unsigned code_of(__half x, float2 by, float top) {
  const float code = rintf(__fdiv_rn(__fsub_rn(to_float(x), by.y), by.x == 0 ? 1.0f : by.x));
  return code > 0 ? static_cast<unsigned>(fminf(top, code)) : 0;  // 0 for a NaN, too
}

/// A sub-head of keys or values in blocks: what is quantized with the part's tokens, the recent tokens moved up, the new ones
/// behind them. At most one block is. Shared memory: that block as it came, [32, d].
__global__ void __launch_bounds__(32 * WARPS) append_blocks(const Attention a, const Part part) {
  const Side side = side_of(a, blockIdx.y == 0);
  if (side.bits >= 8) return;
  const bool keys = side.keys;
  const int64_t head = blockIdx.x, b = head / a.kv_heads, d = a.d, half = d / 2;
  const int64_t past = a.past_length + part.first, all = past + part.steps;
  const int64_t before = quantized_tokens(past, a.window), after = quantized_tokens(all, a.window);
  __half* recent = side.recent + head * (a.window + CACHE_BLOCK) * d;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);

  const auto put_new = [&](int64_t t, __half* to) {
    const int64_t s = t - a.past_length;
    for (int64_t i = thread; i < half; i += threads) {
      const float2 x = fresh(a, side, b, s, head % a.kv_heads, i);
      to[i] = from_float<__half>(x.x);
      to[i + half] = from_float<__half>(x.y);
    }
  };
  if (after > before) {
    __half* group = shared_memory<__half>();
    for (int64_t k = 0; k < CACHE_BLOCK; ++k) {
      if (before + k >= past) {
        put_new(before + k, group + k * d);
      } else {
        for (int64_t i = thread; i < d; i += threads) group[k * d + i] = recent[k * d + i];
      }
    }
    __syncthreads();
    const int bits = side.bits, bytes = 4 * bits;  // of 32 channels
    const float top = static_cast<float>((1 << bits) - 1);
    const int64_t slot = head * side.capacity + before;
    uint8_t* codes = reinterpret_cast<uint8_t*>(side.rows) + slot * d * bits / 8;
    __half* scales = reinterpret_cast<__half*>(side.scales) + (keys ? slot / CACHE_BLOCK * 2 * d : slot * 2 * (d / CACHE_BLOCK));
    if (keys) {
      for (int64_t at = thread; at < d * bits / 8; at += threads) {  // a byte of each of the 32 tokens
        const int64_t channel = at / bytes * CACHE_BLOCK + at % bytes;
        float2 by[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (k == 8 / bits) break;
          by[k] = scale_and_zero(group + channel + k * bytes, CACHE_BLOCK, d, top);
          scales[channel + k * bytes] = from_float<__half>(by[k].x);
          scales[d + channel + k * bytes] = from_float<__half>(by[k].y);
        }
        for (int64_t t = 0; t < CACHE_BLOCK; ++t) {
          unsigned byte = 0;
#pragma unroll
          for (int k = 0; k < 4; ++k)
            if (k < 8 / bits) byte |= code_of(group[t * d + channel + k * bytes], by[k], top) << k * bits;
          codes[t * (d * bits / 8) + at] = static_cast<uint8_t>(byte);
        }
      }
    } else {
      for (int64_t at = thread; at < d; at += threads) {  // 32 channels of a token
        const int64_t t = at / (d / CACHE_BLOCK), g = at % (d / CACHE_BLOCK);
        const __half* x = group + t * d + g * CACHE_BLOCK;
        const float2 by = scale_and_zero(x, CACHE_BLOCK, 1, top);
        scales[t * 2 * (d / CACHE_BLOCK) + g] = from_float<__half>(by.x);
        scales[(t * 2 + 1) * (d / CACHE_BLOCK) + g] = from_float<__half>(by.y);
        for (int byte = 0; byte < bytes; ++byte) {
          unsigned packed = 0;
          for (int k = 0; k < 8 / bits; ++k) packed |= code_of(x[byte + k * bytes], by, top) << k * bits;
          codes[t * (d * bits / 8) + g * bytes + byte] = static_cast<uint8_t>(packed);
        }
      }
    }
    for (int64_t begin = 0; begin < (past - after) * d; begin += threads) {  // downwards: a chunk is read, then written
      const int64_t i = begin + thread;
      const bool moves = i < (past - after) * d;
      const __half x = moves ? recent[(after - before) * d + i] : __half{};
      __syncthreads();
      if (moves) recent[i] = x;
      __syncthreads();
    }
  }
  for (int64_t t = past > after ? past : after; t < all; ++t) put_new(t, recent + (t - after) * d);
}

const char* append(const Attention& a, Part part, cudaStream_t stream) {
  if (a.key_bits >= 8 || a.value_bits >= 8) {
    const dim3 grid(static_cast<unsigned>(divide_up(a.batch * part.steps * a.kv_heads, WARPS)), 2);
    if (const char* wrong = launch(append_rows, grid, 32 * WARPS, 0, stream, a, part)) return wrong;
  }
  if (!blockwise(a)) return nullptr;
  const size_t shared = static_cast<size_t>(CACHE_BLOCK * a.d) * sizeof(__half);
  const dim3 grid(static_cast<unsigned>(a.batch * a.kv_heads), 2);
  return launch(append_blocks, grid, 32 * WARPS, shared, stream, a, part);
}

/// The part that begins at step `first`.
Part part_at(const Attention& a, int64_t first) {
  Part part{first, 1};
  const auto seen = [&](int64_t step) { return blockwise(a) ? quantized_tokens(a.past_length + step + 1, a.window) : 0; };
  const int64_t most = a.steps - first < FEW_STEPS ? a.steps - first : FEW_STEPS;
  while (part.steps < most && seen(first + part.steps) == seen(first)) ++part.steps;
  return part;
}

bool prefills(const Attention& a) { return a.steps > FEW_STEPS && prefill_takes(a); }

const char* refused(const Attention& a) {
  const bool blocks = blockwise(a);
  if (a.d < 2 || a.d % 2 || a.d > ATTENTION_MOST_D)
    return sentence("DiffAttention: heads are %lld wide, wanted an even number of at most %lld",
                    static_cast<long long>(a.d), static_cast<long long>(ATTENTION_MOST_D));
  if (blocks && a.d % CACHE_BLOCK)
    return sentence("DiffAttention: heads are %lld wide, wanted a multiple of %lld for keys or values of 4 or 2 bits",
                    static_cast<long long>(a.d), static_cast<long long>(CACHE_BLOCK));
  return nullptr;
}

}  // namespace
}  // namespace diffbit::cuda

size_t diffbit_cuda_attention_workspace(const DiffbitAttention* op) {
  using namespace diffbit::cuda;
  if (!op->batch) return 0;
  if (prefills(*op)) return prefill_workspace(*op);
  size_t most = 0;
  for (Part part{0, 0}; part.first < op->steps; part.first += part.steps) {
    part = part_at(*op, part.first);
    const size_t bytes = decode_workspace(*op, part);
    most = most < bytes ? bytes : most;
  }
  return most;
}

const char* diffbit_cuda_attention(const DiffbitAttention* op, void* workspace, void* stream_) {
  using namespace diffbit::cuda;
  cudaStream_t stream = static_cast<cudaStream_t>(stream_);
  if (const char* wrong = refused(*op)) return wrong;
  for (const bool keys : {true, false})
    if (const char* wrong = copy_past(*op, keys, stream)) return wrong;
  if (!op->batch || !op->steps) return nullptr;
  if (prefills(*op)) {
    if (const char* wrong = append(*op, Part{0, op->steps}, stream)) return wrong;
    return prefill(*op, workspace, stream);
  }
  for (Part part{0, 0}; part.first < op->steps; part.first += part.steps) {
    part = part_at(*op, part.first);
    if (!decode_appends(*op))
      if (const char* wrong = append(*op, part, stream)) return wrong;
    if (const char* wrong = decode(*op, part, workspace, stream)) return wrong;
  }
  return nullptr;
}
