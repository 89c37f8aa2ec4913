// DiffAttention's cache: makes the past present, appends new tokens, and unpacks a low-bit cache for a prompt.
//
// A part of few steps reads the cache as it is stored. A prompt reads every token hundreds of times, so it is unpacked once
// per call, into 16-bit numbers of the activations' type in the workspace; that moves fewer bytes than the prompt's products
// read. A cache of blocks is unpacked into two runs of rows, one behind the other: the quantized tokens, and the tokens that
// at least one step sees unquantized, which are the recent ones of the past and all new ones. Some tokens are in both, and
// attention_prefill.cu decides for each query which it sees.
#include "attention.h"

namespace diffbit::cuda {
namespace {

constexpr int WARPS = 4;

/// Copies `heads` runs of `bytes` bytes, one word per thread.
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

__global__ void __launch_bounds__(32 * WARPS) append_rows(const Attention a, const Part part) {
  const int64_t rows = a.batch * part.steps * a.kv_heads;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * WARPS + threadIdx.x / 32;
  const Side side = side_of(a, blockIdx.y == 0);
  if (row >= rows || side.bits < 8) return;
  const int64_t s = row / a.kv_heads % part.steps;
  const int64_t b = row / a.kv_heads / part.steps;
  append_row(a, side, b, part.first + s, row % a.kv_heads, static_cast<int>(threadIdx.x % 32));
}

/// The scale and the zero point of a block's numbers, `stride` apart; NaN if a number is not finite.
__device__ float2 scale_and_zero(const __half* x, int64_t stride, float top) {
  float least = to_float(x[0]), most = least;
  bool finite = true;
  for (int64_t k = 0; k < CACHE_BLOCK; ++k) {
    const float y = to_float(x[k * stride]);
    finite = finite && fabsf(y) <= FLT_MAX;
    least = fminf(least, y), most = fmaxf(most, y);
  }
  const float scale = to_float(from_float<__half>(__fdiv_rn(__fsub_rn(most, least), top)));
  return finite ? make_float2(scale, least) : make_float2(nan_number(), nan_number());
}

__device__ unsigned code_of(__half x, float2 by, float top) {
  const float code = rintf(__fdiv_rn(__fsub_rn(to_float(x), by.y), by.x == 0 ? 1.0f : by.x));
  return code > 0 ? static_cast<unsigned>(fminf(top, code)) : 0;  // also 0 for a NaN
}

/// A thread block quantizes the 32 tokens of a sub-head from `first` on; `group` [32, d] is shared memory.
__device__ void quantize_block(const Attention& a, const Side& side, int64_t head, int64_t first, const __half* group) {
  const int64_t d = a.d, slot = head * side.capacity + first;
  const int bits = side.bits, bytes = 4 * bits;  // of 32 channels
  const float top = static_cast<float>((1 << bits) - 1);
  uint8_t* codes = reinterpret_cast<uint8_t*>(side.rows) + slot * d * bits / 8;
  __half* scales = reinterpret_cast<__half*>(side.scales) + slot / CACHE_BLOCK * 2 * d;
  for (int64_t at = threadIdx.x; at < d * bits / 8; at += blockDim.x) {  // a byte of each of the 32 tokens
    const int64_t channel = at / bytes * CACHE_BLOCK + at % bytes;
    float2 by[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k == 8 / bits) break;
      by[k] = scale_and_zero(group + channel + k * bytes, d, top);
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
}

/// A sub-head of keys or values in blocks: quantizes the block that the part's tokens complete (at most one), moves the recent
/// tokens up, and appends the new ones. Shared memory: that block before quantization, [32, d].
__global__ void __launch_bounds__(32 * WARPS) append_blocks(const Attention a, const Part part) {
  const Side side = side_of(a, blockIdx.y == 0);
  if (side.bits >= 8) return;
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
    quantize_block(a, side, head, before, group);
    for (int64_t begin = 0; begin < (past - after) * d; begin += threads) {  // to lower addresses: a chunk is read, then written
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

/// Appends to the sides of 16 and 8 bits.
const char* append_to_rows(const Attention& a, Part part, cudaStream_t stream) {
  if (a.key_bits < 8 && a.value_bits < 8) return nullptr;
  const dim3 grid(static_cast<unsigned>(divide_up(a.batch * part.steps * a.kv_heads, WARPS)), 2);
  return launch(append_rows, grid, 32 * WARPS, 0, stream, a, part);
}

/// Keys or values of all tokens of a call in the type of its activations, [B, Hk, capacity, d]: tokens 0 .. after, which are
/// quantized or need only another type, then the tokens from `before` on that are not quantized for every step.
struct Unpacked {
  void* rows;
  int64_t capacity, before, after;
};

Unpacked unpacked_of(const Attention& a, const Side& side) {
  const int64_t all = a.past_length + a.steps;
  if (side.bits >= 8) return {nullptr, all, all, all};
  const int64_t before = quantized_tokens(a.key ? a.past_length : all, a.window), after = quantized_tokens(all, a.window);
  return {nullptr, after + all - before, before, after};
}

bool as_it_is(const Attention& a, const Side& side) { return side.bits == 16 && side.type == a.type; }

size_t unpacked_bytes(const Attention& a, const Side& side) {
  if (as_it_is(a, side)) return 0;
  const int64_t numbers = a.batch * a.kv_heads * unpacked_of(a, side).capacity * a.d;
  return static_cast<size_t>(divide_up(numbers * 2, 256) * 256);
}

/// Writes 32 tokens of a sub-head, from the recent ones or new, as float16 to their unpacked rows, and quantizes them if all
/// exist and the window allows it. Shared memory: the tokens, [32, d].
__global__ void __launch_bounds__(32 * WARPS) append_floats(const Attention a, const bool keys, const Unpacked u) {
  const Side side = side_of(a, keys);
  const int64_t head = blockIdx.y, b = head / a.kv_heads, d = a.d, half = d / 2, all = a.past_length + a.steps;
  const int64_t first = u.before + static_cast<int64_t>(blockIdx.x) * CACHE_BLOCK, past = a.key ? a.past_length : all;
  const __half* recent = side.recent + (head * (a.window + CACHE_BLOCK) - u.before) * d;
  __half* floats = static_cast<__half*>(u.rows) + (head * u.capacity + u.after - u.before) * d;
  __half* group = shared_memory<__half>();
  for (int64_t at = threadIdx.x; at < CACHE_BLOCK * half; at += blockDim.x) {
    const int64_t k = at / half, i = at % half, t = first + k;
    if (t >= all) break;
    __half low, high;
    if (t < past) {
      low = recent[t * d + i], high = recent[t * d + i + half];
    } else {
      const float2 x = fresh(a, side, b, t - past, head % a.kv_heads, i);
      low = from_float<__half>(x.x), high = from_float<__half>(x.y);
    }
    group[k * d + i] = floats[t * d + i] = low;
    group[k * d + i + half] = floats[t * d + i + half] = high;
  }
  if (first + CACHE_BLOCK > u.after) return;
  __syncthreads();
  quantize_block(a, side, head, first, group);
}

/// Eight numbers of a token from channel `c` on, a multiple of 8, of any type of cache.
__device__ __forceinline__ void stored(const Attention& a, const Side& side, int64_t slot, int64_t c, float (&x)[8]) {
  if (side.bits == 16) {
#pragma unroll
    for (int k = 0; k < 8; ++k) x[k] = number(side.rows, side.type, slot * a.d + c + k);
    return;
  }
  const int bytes = 4 * side.bits, in_group = static_cast<int>(c % CACHE_BLOCK);  // bytes: of 32 channels
  const int64_t at = slot * a.d * side.bits / 8 + c / CACHE_BLOCK * bytes + in_group % bytes;
  const uint2 words = *reinterpret_cast<const uint2*>(side.rows + at);
  const auto byte = [&](int k) { return (k < 4 ? words.x : words.y) >> k % 4 * 8; };
  if (side.bits == 8) {
    const float scale = reinterpret_cast<const float*>(side.scales)[slot];
#pragma unroll
    for (int k = 0; k < 8; ++k) x[k] = static_cast<float>(static_cast<int8_t>(byte(k))) * scale;
    return;
  }
  const __half* scales = reinterpret_cast<const __half*>(side.scales) + slot / CACHE_BLOCK * 2 * a.d + c;
  const uint4 factors = *reinterpret_cast<const uint4*>(scales), zeros = *reinterpret_cast<const uint4*>(scales + a.d);
  const uint32_t by[4] = {factors.x, factors.y, factors.z, factors.w}, from[4] = {zeros.x, zeros.y, zeros.z, zeros.w};
  const unsigned mask = (1u << side.bits) - 1;
  const int shift = in_group / bytes * side.bits;
#pragma unroll
  for (int k = 0; k < 8; k += 2) {
    const float2 factor = unpack2<__half>(by[k / 2]), zero = unpack2<__half>(from[k / 2]);
    x[k] = fmaf(static_cast<float>(byte(k) >> shift & mask), factor.x, zero.x);
    x[k + 1] = fmaf(static_cast<float>(byte(k + 1) >> shift & mask), factor.y, zero.y);
  }
}

/// 32 unpacked rows of a sub-head: dequantizes tokens, or keeps the last unquantized ones and converts them to T.
template <class T>
__global__ void __launch_bounds__(256) unpack(const Attention a, const bool keys, const Unpacked u) {
  const Side side = side_of(a, keys);
  const int64_t head = blockIdx.y, d = a.d, pieces = d / 8, first = static_cast<int64_t>(blockIdx.x) * CACHE_BLOCK;
  __half* recent = side.recent + head * (a.window + CACHE_BLOCK) * d;
  for (int64_t at = threadIdx.x; at < CACHE_BLOCK * pieces; at += blockDim.x) {
    const int64_t row = first + at / pieces, c = at % pieces * 8, t = row - u.after + u.before;
    if (row >= u.capacity) break;
    uint4& to = *reinterpret_cast<uint4*>(static_cast<T*>(u.rows) + (head * u.capacity + row) * d + c);
    float x[8];
    if (row < u.after) {
      stored(a, side, head * side.capacity + row, c, x);
    } else {
      const uint4 floats = to;
      if (a.key && t >= u.after) *reinterpret_cast<uint4*>(recent + (t - u.after) * d + c) = floats;
      if constexpr (std::is_same_v<T, __half>) continue;
      const uint32_t words[4] = {floats.x, floats.y, floats.z, floats.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 two = unpack2<__half>(words[k]);
        x[2 * k] = two.x, x[2 * k + 1] = two.y;
      }
    }
    to = make_uint4(pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]), pack2<T>(x[4], x[5]), pack2<T>(x[6], x[7]));
  }
}

template <class T>
const char* unpack_side(const Attention& a, const Side& side, const Unpacked& u, cudaStream_t stream) {
  const unsigned heads = static_cast<unsigned>(a.batch * a.kv_heads);
  const dim3 grid(static_cast<unsigned>(divide_up(u.capacity, CACHE_BLOCK)), heads);
  if (side.bits < 8) {
    const dim3 groups(static_cast<unsigned>(divide_up(u.capacity - u.after, CACHE_BLOCK)), heads);
    const size_t shared = static_cast<size_t>(CACHE_BLOCK * a.d) * sizeof(__half);
    if (groups.x)
      if (const char* wrong = launch(append_floats, groups, 32 * WARPS, shared, stream, a, side.keys, u)) return wrong;
  }
  return launch(unpack<T>, grid, 256, 0, stream, a, side.keys, u);
}

}  // namespace

const char* copy_past(const Attention& a, bool keys, cudaStream_t stream) {
  const Side side = side_of(a, keys);
  const int64_t heads = a.batch * a.kv_heads, past = keys ? a.past_key_capacity : a.past_value_capacity;
  const int64_t row = row_bytes(a, keys), together = scale_tokens(side), scale = scale_bytes(a, side);
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

const char* append(const Attention& a, Part part, cudaStream_t stream) {
  if (const char* wrong = append_to_rows(a, part, stream)) return wrong;
  if (!blockwise(a)) return nullptr;
  const size_t shared = static_cast<size_t>(CACHE_BLOCK * a.d) * sizeof(__half);
  const dim3 grid(static_cast<unsigned>(a.batch * a.kv_heads), 2);
  return launch(append_blocks, grid, 32 * WARPS, shared, stream, a, part);
}

bool must_unpack(const Attention& a) { return !as_it_is(a, side_of(a, true)) || !as_it_is(a, side_of(a, false)); }

size_t unpack_workspace(const Attention& a) {
  return unpacked_bytes(a, side_of(a, true)) + unpacked_bytes(a, side_of(a, false));
}

const char* append_and_unpack(const Attention& a, void* workspace, Rows& keys, Rows& values, cudaStream_t stream) {
  if (a.key)
    if (const char* wrong = append_to_rows(a, Part{0, a.steps}, stream)) return wrong;
  char* at = static_cast<char*>(workspace);
  for (const bool of_keys : {true, false}) {
    const Side side = side_of(a, of_keys);
    Rows& rows = of_keys ? keys : values;
    rows = {side.rows, side.capacity, 0};
    if (as_it_is(a, side)) continue;
    Unpacked u = unpacked_of(a, side);
    u.rows = at;
    at += unpacked_bytes(a, side);
    rows = {u.rows, u.capacity, u.after - u.before};
    const auto start = a.type == ort::FLOAT16 ? unpack_side<__half> : unpack_side<__nv_bfloat16>;
    if (const char* wrong = start(a, side, u, stream)) return wrong;
  }
  return nullptr;
}

}  // namespace diffbit::cuda
