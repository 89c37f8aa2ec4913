// Shared by the files of DiffAttention. attention.cu cuts a call into parts, attention_cache.cu makes tokens present,
// attention_decode.cu computes attention for few queries, attention_prefill.cu for many. Both read only present, which
// contains the old tokens when they start. Without a key nothing is appended: present is past, and has all tokens.
#pragma once

#include "../ort/abi.h"
#include "../ort/generated/levels.h"
#include "../ort/layouts.h"
#include "api.h"
#include "device.h"
#include "hadamard.h"

namespace diffbit::cuda {

constexpr int64_t FEW_STEPS = 8;  // most steps of a part for attention_decode.cu

using Attention = DiffbitDiffAttention;

/// Some steps of a call; the tokens before them are present.
struct Part {
  int64_t first, steps;
};

/// attention_cache.cu: copies all of past into present, including the slots after its tokens, and appends a part's tokens.
const char* copy_past(const Attention& a, bool keys, cudaStream_t stream);
const char* append(const Attention& a, Part part, cudaStream_t stream);

/// Keys or values of a call's tokens as 16-bit numbers of its type, not rotated, [B, Hk, capacity, d]: token t is in row t
/// where a query sees it quantized, and in row t + apart where not. One of the first tokens is in both as it was.
struct Rows {
  const void* rows;
  int64_t capacity, apart;
};

/// attention_cache.cu: appends all tokens of a call, and unpacks a cache that is not in 16-bit numbers of its type.
bool must_unpack(const Attention& a);
size_t unpack_workspace(const Attention& a);
const char* append_and_unpack(const Attention& a, void* workspace, Rows& keys, Rows& values, cudaStream_t stream);

/// attention_prefill.cu: whether it supports a call, its scratch memory, and all steps of a call, whose tokens it appends.
bool prefill_takes(const Attention& a);
size_t prefill_workspace(const Attention& a);
const char* prefill(const Attention& a, void* workspace, cudaStream_t stream);

/// attention_decode.cu: the steps of a part; its tokens are present, unless it appends them itself.
bool decode_appends(const Attention& a);
size_t decode_workspace(const Attention& a, Part part);
const char* decode(const Attention& a, Part part, void* workspace, cudaStream_t stream);

__host__ __device__ inline int64_t quantized_tokens(int64_t total, int64_t window) {
  return total > window ? (total - window) / CACHE_BLOCK * CACHE_BLOCK : 0;
}
__host__ __device__ inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// How many of a cache's tokens are quantized for a part that ends with `all` tokens.
__host__ __device__ inline int64_t quantized_for(const Attention& a, int64_t all) {
  return quantized_tokens(a.key ? all : a.past_length + a.steps, a.window);
}

// A kv head has `width` sub-heads of keys and values, and `pairs` heads read it.
__host__ __device__ inline int64_t width(const Attention& a) { return 1 + a.wide_value; }
__host__ __device__ inline int64_t groups(const Attention& a) { return a.kv_heads / width(a); }
__host__ __device__ inline int64_t pairs(const Attention& a) { return a.heads / groups(a); }
// Their queries are in groups of noise_ratio signal heads and the noise head that these share; with one branch there is no
// noise head.
__host__ __device__ inline int64_t noises(const Attention& a) { return (a.branches - 1) * pairs(a) / a.noise_ratio; }
__host__ __device__ inline int64_t query_head(int64_t branches, int64_t ratio, int64_t head, int64_t branch) {
  return head / ratio * (ratio + branches - 1) + (branch ? ratio : head % ratio);
}
/// The gate of a head at step s; 1 without gates.
__device__ __forceinline__ float gate_of(const Attention& a, int64_t b, int64_t s, int64_t head) {
  return a.gates ? static_cast<const float*>(a.gates)[(b * a.steps + s) * a.heads + head] : 1.0f;
}
__host__ __device__ inline bool blockwise(const Attention& a) { return a.key_bits < 8 || a.value_bits < 8; }

/// Keys or values: the new tokens, and the present.
struct Side {
  bool keys;
  int bits;
  int64_t type;  // of 16 bits
  const void* fresh;
  char* rows;
  __half* scales;
  __half* recent;
  int64_t capacity;
};

__host__ __device__ inline Side side_of(const Attention& a, bool keys) {
  Side side;
  side.keys = keys;
  side.bits = static_cast<int>(keys ? a.key_bits : a.value_bits);
  side.type = keys ? a.key_type : a.value_type;
  side.fresh = keys ? a.key : a.value;
  side.rows = static_cast<char*>(keys ? a.present_key : a.present_value);
  side.scales = static_cast<__half*>(keys ? a.present_key_scale : a.present_value_scale);
  side.recent = static_cast<__half*>(keys ? a.present_key_recent : a.present_value_recent);
  side.capacity = keys ? a.key_capacity : a.value_capacity;
  return side;
}

inline bool aligned(const void* pointer, uintptr_t to) { return reinterpret_cast<uintptr_t>(pointer) % to == 0; }

/// Whether present can be copied 16 bytes at a time.
inline bool aligned_caches(const Attention& a) {
  for (const bool keys : {true, false}) {
    const Side side = side_of(a, keys);
    if (!aligned(side.rows, 16) || !aligned(side.scales, 16) || !aligned(side.recent, 16)) return false;
  }
  return true;
}

__host__ __device__ inline int64_t row_bytes(const Attention& a, bool keys) {
  const Side side = side_of(a, keys);
  return side.bits == 16 && side.type == ort::FLOAT32 ? a.d * 4 : a.d * side.bits / 8;
}

/// Bytes of a row's scale.
__host__ __device__ inline int64_t scale_bytes(const Side& side) { return side.bits == 16 ? 0 : sizeof(__half); }

/// The recent rows of a sub-head: the first tokens, the offset of keys, the residual window.
__host__ __device__ inline int64_t residual_row(const Attention& a, bool keys) { return a.first + keys; }
__host__ __device__ inline int64_t recent_rows(const Attention& a, bool keys) {
  return residual_row(a, keys) + a.window + CACHE_BLOCK;
}
/// The offset of a sub-head's keys [d]; null for values, which have none.
__device__ __forceinline__ const __half* offset_of(const Attention& a, const Side& side, int64_t head) {
  return side.keys ? side.recent + (head * recent_rows(a, true) + a.first) * a.d : nullptr;
}

__device__ __forceinline__ float nan_number() { return __int_as_float(0x7fffffff); }

/// Number i of a tensor of any float type.
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

/// Channels i and i + d / 2 of row `row` of x (query or key), rotated by the angle of step s of batch row b; products
/// and their difference are rounded separately.
__device__ __forceinline__ float2 rotated(const Attention& a, int64_t b, int64_t s, const void* x, int64_t row,
                                          int64_t i) {
  const int64_t position = static_cast<const int64_t*>(a.position_ids)[b * a.steps + s], half = a.d / 2;
  const bool known = position >= 0 && position < a.positions;
  const float c = known ? static_cast<const float*>(a.cos)[position * half + i] : nan_number();
  const float n = known ? static_cast<const float*>(a.sin)[position * half + i] : c;
  const float low = number(x, a.type, row * a.d + i), high = number(x, a.type, row * a.d + i + half);
  return make_float2(__fsub_rn(__fmul_rn(low, c), __fmul_rn(high, n)),
                     __fadd_rn(__fmul_rn(high, c), __fmul_rn(low, n)));
}

// ---- rows of a warp ----
// Lane l has the channels l + 32 k of a row of d numbers in x[k], and zeros beyond the last.

constexpr int MOST_PIECES = static_cast<int>(ATTENTION_MOST_D) / 32;

__device__ __forceinline__ float warp_sum(float x) {
  for (int with = 16; with; with /= 2) x += __shfl_xor_sync(0xffffffffu, x, with);
  return x;
}
__device__ __forceinline__ float warp_most(float x) {
  for (int with = 16; with; with /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, with));
  return x;
}

/// Calls use(k, channel) for each of a lane's channels.
template <int PIECES, class Use>
__device__ __forceinline__ void each_channel(int64_t d, int lane, const Use& use) {
#pragma unroll
  for (int k = 0; k < PIECES; ++k)
    if (const int64_t channel = lane + 32 * k; channel < d) use(k, channel);
}

/// A row whose channels i and i + d / 2 are pair(i).
template <int PIECES, class Pair>
__device__ __forceinline__ void row_of_pairs(int64_t d, int lane, float (&x)[PIECES], const Pair& pair) {
#pragma unroll
  for (int k = 0; k < PIECES; ++k) x[k] = 0;
  each_channel<PIECES>(d, lane, [&](int k, int64_t channel) {
    const bool low = channel < d / 2;
    const float2 both = pair(low ? channel : channel - d / 2);
    x[k] = low ? both.x : both.y;
  });
}

/// Rounds a row to whole numbers -top .. top (kv_cache.quantize_rows). HALF: the scale is first rounded to float16. Returns
/// the scale.
template <bool HALF = false, int PIECES>
__device__ __forceinline__ float round_row(float (&x)[PIECES], float top) {
  float largest = 0;
  bool finite = true;
#pragma unroll
  for (int k = 0; k < PIECES; ++k) {
    finite = finite && fabsf(x[k]) <= FLT_MAX;
    largest = fmaxf(largest, fabsf(x[k]));
  }
  finite = __all_sync(0xffffffffu, finite);
  float scale = __fdiv_rn(warp_most(largest), top);
  if (HALF) scale = to_float(from_float<__half>(scale)), finite = finite && scale <= FLT_MAX;
  if (!finite) scale = nan_number();
#pragma unroll
  for (int k = 0; k < PIECES; ++k)  // beyond top only if scale is denormal or rounded
    x[k] = !finite || scale == 0 ? 0.0f : fminf(top, fmaxf(-top, rintf(__fdiv_rn(x[k], scale))));
  return scale;
}

/// Rotates a row as a cache of codes has it (kv_cache.rotate).
template <int PIECES>
__device__ __forceinline__ void rotate(float (&x)[PIECES], int64_t d, int lane) {
  const int64_t size = d & -d;  // of a block
  int stages = 0;
#pragma unroll
  for (int apart = 1; apart < 32; apart *= 2) {
    if (apart >= size) break;
    ++stages;
#pragma unroll
    for (int k = 0; k < PIECES; ++k) {
      if (32 * k >= d) break;
      const float other = __shfl_xor_sync(0xffffffffu, x[k], apart);
      x[k] = lane & apart ? __fsub_rn(other, x[k]) : __fadd_rn(x[k], other);
    }
  }
#pragma unroll
  for (int apart = 1; apart < PIECES; apart *= 2) {
    if (32 * apart >= size) break;
    ++stages;
#pragma unroll
    for (int k = 0; k < PIECES; ++k)
      if (!(k & apart) && k + apart < PIECES) butterfly(x[k], x[k + apart]);
  }
  const float scale = ldexpf(stages % 2 ? 0.70710678118654752f : 1.0f, -(stages / 2));  // 1 / sqrt(size)
#pragma unroll
  for (int k = 0; k < PIECES; ++k) x[k] = __fmul_rn(x[k], scale);
}

/// A sub-head's row of step s in float32, as a cache of floats would store it.
template <int PIECES>
__device__ __forceinline__ void fresh_row(const Attention& a, const Side& side, int64_t b, int64_t s, int64_t sub_head,
                                          int lane, float (&x)[PIECES]) {
  const int64_t row = (b * a.steps + s) * a.kv_heads + sub_head;
  row_of_pairs(a.d, lane, x, [&](int64_t i) {
    if (side.keys) return rotated(a, b, s, side.fresh, row, i);
    return make_float2(number(side.fresh, a.type, row * a.d + i), number(side.fresh, a.type, row * a.d + i + a.d / 2));
  });
}

/// Writes a sub-head's row of step s to a cache of 16 or 8 bits.
template <int PIECES>
__device__ __forceinline__ void append_row(const Attention& a, const Side& side, int64_t b, int64_t s, int64_t sub_head,
                                           int lane) {
  const int64_t slot = (b * a.kv_heads + sub_head) * side.capacity + a.past_length + s, at = slot * a.d;
  float x[PIECES];
  fresh_row(a, side, b, s, sub_head, lane, x);
  if (side.bits == 16) {
    each_channel<PIECES>(a.d, lane, [&](int k, int64_t i) { put_number(side.rows, side.type, at + i, x[k]); });
    return;
  }
  rotate(x, a.d, lane);
  const float scale = round_row<true>(x, 127.0f);
  each_channel<PIECES>(a.d, lane, [&](int k, int64_t i) { side.rows[at + i] = static_cast<int8_t>(x[k]); });
  if (lane == 0) side.scales[slot] = from_float<__half>(scale);
}

// ---- the cache as it is stored ----

/// Four levels, a byte each.
__host__ __device__ constexpr uint32_t bytes_of(int a, int b, int c, int d) {
  return (a & 0xff) | (b & 0xff) << 8 | (c & 0xff) << 16 | static_cast<uint32_t>(d & 0xff) << 24;
}

/// The levels of four codes of 4, 3 or 2 bits, a byte each.
__device__ __forceinline__ uint32_t levels_of(uint32_t codes, int bits) {
  constexpr int L3[] = {DIFFBIT_CACHE_LEVELS_3}, L4[] = {DIFFBIT_CACHE_LEVELS_4};
  constexpr uint32_t OF_2 = bytes_of(DIFFBIT_CACHE_LEVELS_2);
  constexpr uint32_t OF_3[] = {bytes_of(L3[0], L3[1], L3[2], L3[3]), bytes_of(L3[4], L3[5], L3[6], L3[7])};
  constexpr uint32_t OF_4[] = {bytes_of(L4[0], L4[1], L4[2], L4[3]), bytes_of(L4[4], L4[5], L4[6], L4[7]),
                               bytes_of(L4[8], L4[9], L4[10], L4[11]), bytes_of(L4[12], L4[13], L4[14], L4[15])};
  const uint32_t by = __byte_perm(codes | codes >> 4, 0, 0x4420);  // a code in 4 bits, of which 3 select
  if (bits == 2) return __byte_perm(OF_2, 0, by);
  if (bits == 3) return __byte_perm(OF_3[0], OF_3[1], by);
  const uint32_t negative = __byte_perm(OF_4[0], OF_4[1], by), positive = __byte_perm(OF_4[2], OF_4[3], by);
  const uint32_t upper = (codes >> 3 & 0x01010101u) * 0xffu;
  return (positive & upper) | (negative & ~upper);
}

/// A token's row of a sub-head, in any type of cache.
struct Token {
  const char* x;
  int bits;
  int64_t type;          // of 16 bits
  float scale;           // of the row
  const __half* offset;  // [d]; null: none

  /// A code's level, or the number itself.
  __device__ __forceinline__ float level(int64_t i) const {
    if (bits == 16) return number(x, type, i);
    if (bits == 8) return static_cast<float>(reinterpret_cast<const int8_t*>(x)[i]);
    const uint8_t* packed = reinterpret_cast<const uint8_t*>(x) + i / 32 * 4 * bits;  // of 32 channels
    const int k = static_cast<int>(i % 32), plane = bits == 4 ? 4 : 2, width = 4 * plane;
    unsigned code = packed[k % width] >> k / width * plane & ((1u << plane) - 1);
    if (bits == 3) code |= (packed[8 + k % 4] >> k / 4 & 1u) << 2;
    return static_cast<float>(static_cast<int8_t>(levels_of(code, bits)));
  }
  __device__ __forceinline__ float at(int64_t i) const {
    return level(i) * scale + (offset ? to_float(offset[i]) : 0.0f);
  }
};

/// Token t, with `after` quantized tokens in a low-bit cache.
__device__ __forceinline__ Token token_of(const Attention& a, const Side& side, int64_t head, int64_t t,
                                          int64_t after) {
  if (side.bits < 8 && (t < a.first || t >= after)) {
    const int64_t row = t < a.first ? t : residual_row(a, side.keys) + t - after;
    const __half* x = side.recent + (head * recent_rows(a, side.keys) + row) * a.d;
    return {reinterpret_cast<const char*>(x), 16, ort::FLOAT16, 1.0f, nullptr};
  }
  const int64_t slot = head * side.capacity + t;
  const char* x = side.rows + slot * row_bytes(a, side.keys);
  if (side.bits == 16) return {x, 16, side.type, 1.0f, nullptr};
  return {x, side.bits, 0, to_float(side.scales[slot]), side.bits == 8 ? nullptr : offset_of(a, side, head)};
}

}  // namespace diffbit::cuda
