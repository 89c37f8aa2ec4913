// DiffAttention's cache: makes the past present, appends new tokens, and unpacks a low-bit cache for a prompt.
//
// A part of few steps reads the cache as it is stored. A prompt reads every token hundreds of times, so it is unpacked once
// per call, into 16-bit numbers of the activations' type in the workspace; that moves fewer bytes than the prompt's products
// read. A low-bit cache is rotated back and unpacked into two runs of rows, one behind the other: the quantized tokens, and
// the tokens that at least one step sees unquantized, which are the recent ones of the past and all new ones. Some tokens are
// in both, and attention_prefill.cu decides for each query which it sees. The first tokens are floats in both.
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
  append_row<MOST_PIECES>(a, side, b, part.first + s, row % a.kv_heads, static_cast<int>(threadIdx.x % 32));
}

/// The thresholds of codes of 2, 3 and 4 bits.
__constant__ float THRESHOLDS[3][15] = {
    {DIFFBIT_CACHE_THRESHOLDS_2}, {DIFFBIT_CACHE_THRESHOLDS_3}, {DIFFBIT_CACHE_THRESHOLDS_4}};

/// A warp's row of step s as a low-bit cache has it before it is quantized: rotated, in float16.
__device__ void put_fresh(const Attention& a, const Side& side, int64_t b, int64_t s, int64_t sub_head, int lane,
                          __half* to) {
  float x[MOST_PIECES];
  fresh_row(a, side, b, s, sub_head, lane, x);
  rotate(x, a.d, lane);
  each_channel<MOST_PIECES>(a.d, lane, [&](int k, int64_t i) { to[i] = from_float<__half>(x[k]); });
  const int64_t t = a.past_length + s, head = b * a.kv_heads + sub_head;
  if (t >= a.first) return;
  __half* first = side.recent + (head * recent_rows(a, side.keys) + t) * a.d;
  each_channel<MOST_PIECES>(a.d, lane, [&](int k, int64_t i) { first[i] = from_float<__half>(x[k]); });
}

/// The offset's channel whose numbers of the tokens 0 ... 31 begin at x (kv_cache.offset_of).
__device__ __half mean(const __half* x, int64_t d) {
  float sums[CACHE_BLOCK / 2];
#pragma unroll
  for (int k = 0; k < CACHE_BLOCK / 2; ++k) sums[k] = to_float(x[(CACHE_BLOCK / 2 + k) * d]);
#pragma unroll
  for (int count = CACHE_BLOCK / 4; count; count /= 2)
#pragma unroll
    for (int k = 0; k < count; ++k) sums[k] = __fadd_rn(sums[k], sums[k + count]);
  return from_float<__half>(sums[0] / (CACHE_BLOCK / 2));
}

/// A warp quantizes token t's rotated row of a sub-head (kv_cache.encode_rows, pack). offset: null for none.
__device__ void encode_row(const Attention& a, const Side& side, int64_t head, int64_t t, const __half* row,
                           const __half* offset, int lane) {
  const int bits = side.bits;
  float n[MOST_PIECES] = {}, energy = 0, product = 0, squares = 0;
  each_channel<MOST_PIECES>(a.d, lane, [&](int k, int64_t i) {
    n[k] = __fsub_rn(to_float(row[i]), offset ? to_float(offset[i]) : 0.0f);
  });
  const float unit = round_row(n, 127.0f);
#pragma unroll
  for (int k = 0; k < MOST_PIECES; ++k) energy += n[k] * n[k];  // these sums are exact
  const float factor = __fsqrt_rn(__fdiv_rn(static_cast<float>(a.d), fmaxf(warp_sum(energy), 1.0f)));
  uint8_t* packed = reinterpret_cast<uint8_t*>(side.rows) + (head * side.capacity + t) * a.d * bits / 8;
  each_channel<MOST_PIECES>(a.d, lane, [&](int k, int64_t) {  // all lanes: d is a multiple of 32
    const float z = __fmul_rn(n[k], factor);
    unsigned code = 0;
    for (int i = 0; i < (1 << bits) - 1; ++i) code += z > THRESHOLDS[bits - 2][i];
    const float level = static_cast<int8_t>(levels_of(code, bits));
    product += n[k] * level;
    squares += level * level;
    const auto put_plane = [&](unsigned field, int width, uint8_t* to) {
      const int bytes = 4 * width;
      for (; width < 8; width *= 2) field |= __shfl_xor_sync(0xffffffffu, field, 4 * width) << width;
      if (lane < bytes) to[lane] = static_cast<uint8_t>(field);
    };
    uint8_t* group = packed + k * 4 * bits;
    put_plane(bits == 3 ? code & 3 : code, bits == 4 ? 4 : 2, group);
    if (bits == 3) put_plane(code >> 2, 1, group + 8);
  });
  const float scale = __fmul_rn(unit, __fdiv_rn(warp_sum(product), warp_sum(squares)));
  if (lane == 0) side.scales[head * side.capacity + t] = from_float<__half>(scale);
}

/// A sub-head of low-bit keys or values: quantizes the block that the part's tokens complete (at most one), moves the recent
/// tokens up, and appends the new ones. Shared memory: that block before quantization, [32, d], and the offset.
__global__ void __launch_bounds__(32 * WARPS) append_blocks(const Attention a, const Part part) {
  const Side side = side_of(a, blockIdx.y == 0);
  if (side.bits >= 8) return;
  const int64_t head = blockIdx.x, b = head / a.kv_heads, d = a.d;
  const int64_t past = a.past_length + part.first, all = past + part.steps;
  const int64_t before = quantized_tokens(past, a.window), after = quantized_tokens(all, a.window);
  __half* recent = side.recent + head * recent_rows(a, side.keys) * d;
  __half* residual = recent + residual_row(a, side.keys) * d;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int lane = thread % 32, warp = thread / 32;

  const auto put_new = [&](int64_t t, __half* to) {
    put_fresh(a, side, b, t - a.past_length, head % a.kv_heads, lane, to);
  };
  if (after > before) {
    __half* group = shared_memory<__half>();
    __half* offset = group + CACHE_BLOCK * d;
    for (int64_t k = warp; k < CACHE_BLOCK; k += WARPS) {
      if (before + k >= past) {
        put_new(before + k, group + k * d);
      } else {
        for (int64_t i = lane; i < d; i += 32) group[k * d + i] = residual[k * d + i];
      }
    }
    __syncthreads();
    for (int64_t i = thread; i < d && side.keys; i += threads) {
      offset[i] = before ? recent[a.first * d + i] : mean(group + i, d);
      recent[a.first * d + i] = offset[i];
    }
    __syncthreads();
    for (int64_t k = warp; k < CACHE_BLOCK; k += WARPS)
      encode_row(a, side, head, before + k, group + k * d, side.keys ? offset : nullptr, lane);
    for (int64_t begin = 0; begin < (past - after) * d; begin += threads) {  // to lower addresses: a chunk is read, then written
      const int64_t i = begin + thread;
      const bool moves = i < (past - after) * d;
      const __half x = moves ? residual[(after - before) * d + i] : __half{};
      __syncthreads();
      if (moves) residual[i] = x;
      __syncthreads();
    }
  }
  for (int64_t t = (past > after ? past : after) + warp; t < all; t += WARPS) put_new(t, residual + (t - after) * d);
}

/// Appends to the sides of 16 and 8 bits.
const char* append_to_rows(const Attention& a, Part part, cudaStream_t stream) {
  if (a.key_bits < 8 && a.value_bits < 8) return nullptr;
  const dim3 grid(static_cast<unsigned>(divide_up(a.batch * part.steps * a.kv_heads, WARPS)), 2);
  return launch(append_rows, grid, 32 * WARPS, 0, stream, a, part);
}

/// Keys or values of all tokens of a call in the type of its activations, [B, Hk, capacity, d]: tokens 0 .. after, which are
/// quantized, among the first, or need only another type, then the tokens from `before` on, which are not quantized for every
/// step.
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

/// The unpacked row of token t, which is not quantized for every step, of a low-bit cache: rotated float16.
__device__ __half* float_row(const Attention& a, const Unpacked& u, int64_t head, int64_t t) {
  return static_cast<__half*>(u.rows) + (head * u.capacity + u.after - u.before + t) * a.d;
}

/// A warp writes a token's row, which is recent or new.
__global__ void __launch_bounds__(32 * WARPS) put_floats(const Attention a, const bool keys, const Unpacked u) {
  const Side side = side_of(a, keys);
  const int64_t head = blockIdx.y, all = a.past_length + a.steps, past = a.key ? a.past_length : all;
  const int64_t t = u.before + static_cast<int64_t>(blockIdx.x) * WARPS + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (t >= all) return;
  __half* to = float_row(a, u, head, t);
  if (t >= past) return put_fresh(a, side, head / a.kv_heads, t - past, head % a.kv_heads, lane, to);
  const int64_t row = head * recent_rows(a, keys) + residual_row(a, keys) + t - u.before;
  for (int64_t i = lane; i < a.d; i += 32) to[i] = side.recent[row * a.d + i];
}

/// A thread block quantizes 32 tokens that leave the residual window. Shared memory: the offset.
__global__ void __launch_bounds__(32 * WARPS) encode_floats(const Attention a, const bool keys, const Unpacked u) {
  const Side side = side_of(a, keys);
  const int64_t head = blockIdx.y, begin = u.before + static_cast<int64_t>(blockIdx.x) * CACHE_BLOCK;
  __half* offset = shared_memory<__half>();
  __half* stored = side.recent + (head * recent_rows(a, true) + a.first) * a.d;
  for (int64_t i = threadIdx.x; i < a.d && keys; i += blockDim.x) {
    offset[i] = u.before ? stored[i] : mean(float_row(a, u, head, 0) + i, a.d);
    if (begin == 0) stored[i] = offset[i];
  }
  __syncthreads();
  for (int64_t t = begin + threadIdx.x / 32; t < begin + CACHE_BLOCK; t += WARPS)
    encode_row(a, side, head, t, float_row(a, u, head, t), keys ? offset : nullptr, static_cast<int>(threadIdx.x % 32));
}

/// A warp unpacks a row: dequantizes a token, or keeps one of the last unquantized ones, rotates it back and converts it to T.
template <class T>
__global__ void __launch_bounds__(256) unpack(const Attention a, const bool keys, const Unpacked u) {
  const Side side = side_of(a, keys);
  const int64_t head = blockIdx.y, row = static_cast<int64_t>(blockIdx.x) * 8 + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (row >= u.capacity) return;
  T* to = static_cast<T*>(u.rows) + (head * u.capacity + row) * a.d;
  constexpr int PIECES = 4;  // d is 64 or 128
  float x[PIECES] = {};
  if (row < u.after) {
    const Token token = token_of(a, side, head, row, u.after);
    each_channel<PIECES>(a.d, lane, [&](int k, int64_t i) { x[k] = token.at(i); });
  } else {
    const int64_t t = row - u.after + u.before, slot = residual_row(a, keys) + t - u.after;
    const __half* floats = float_row(a, u, head, t);
    __half* recent = side.recent + (head * recent_rows(a, keys) + slot) * a.d;
    each_channel<PIECES>(a.d, lane, [&](int k, int64_t i) {
      x[k] = to_float(floats[i]);
      if (a.key && t >= u.after) recent[i] = floats[i];
    });
  }
  if (side.bits < 16) rotate(x, a.d, lane);
  each_channel<PIECES>(a.d, lane, [&](int k, int64_t i) { to[i] = from_float<T>(x[k]); });
}

template <class T>
const char* unpack_side(const Attention& a, const Side& side, const Unpacked& u, cudaStream_t stream) {
  const unsigned heads = static_cast<unsigned>(a.batch * a.kv_heads);
  if (side.bits < 8) {
    const dim3 floats(static_cast<unsigned>(divide_up(u.capacity - u.after, WARPS)), heads);
    const dim3 blocks(static_cast<unsigned>((u.after - u.before) / CACHE_BLOCK), heads);
    if (floats.x)
      if (const char* wrong = launch(put_floats, floats, 32 * WARPS, 0, stream, a, side.keys, u)) return wrong;
    const size_t shared = static_cast<size_t>(a.d) * sizeof(__half);
    if (blocks.x)
      if (const char* wrong = launch(encode_floats, blocks, 32 * WARPS, shared, stream, a, side.keys, u)) return wrong;
  }
  const dim3 grid(static_cast<unsigned>(divide_up(u.capacity, 8)), heads);
  return launch(unpack<T>, grid, 256, 0, stream, a, side.keys, u);
}

}  // namespace

const char* copy_past(const Attention& a, bool keys, cudaStream_t stream) {
  const Side side = side_of(a, keys);
  const int64_t heads = a.batch * a.kv_heads, past = keys ? a.past_key_capacity : a.past_value_capacity;
  const int64_t row = row_bytes(a, keys), scale = scale_bytes(side);
  const void* recent = keys ? a.past_key_recent : a.past_value_recent;
  const void* rows = keys ? a.past_key : a.past_value;
  if (const char* wrong = copy(rows, side.rows, heads, past * row, side.capacity * row, stream))
    return wrong;
  if (scale)
    if (const char* wrong = copy(keys ? a.past_key_scale : a.past_value_scale, side.scales, heads,
                                 past * scale, side.capacity * scale, stream))
      return wrong;
  const int64_t slots = side.bits < 8 ? recent_rows(a, keys) * a.d * 2 : 0;
  return copy(recent, side.recent, heads, slots, slots, stream);
}

const char* append(const Attention& a, Part part, cudaStream_t stream) {
  if (const char* wrong = append_to_rows(a, part, stream)) return wrong;
  if (!blockwise(a)) return nullptr;
  const size_t shared = static_cast<size_t>((CACHE_BLOCK + 1) * a.d) * sizeof(__half);
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
