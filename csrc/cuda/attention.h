// Shared by the files of DiffAttention. attention.cu cuts a call into parts, attention_cache.cu makes tokens present,
// attention_decode.cu computes attention for few queries, attention_prefill.cu for many. Both read only present, which
// contains the old tokens when they start. Without a key nothing is appended: present is past, and has all tokens.
#pragma once

#include "../ort/abi.h"
#include "../ort/layouts.h"
#include "api.h"
#include "device.h"

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

/// Keys or values of a call's tokens as 16-bit numbers of its type, [B, Hk, capacity, d]: token t is in row t where a query
/// sees it quantized, and in row t + apart where not.
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
__host__ __device__ inline bool blockwise(const Attention& a) { return a.key_bits < 8 || a.value_bits < 8; }

/// Keys or values: the new tokens, and the present.
struct Side {
  bool keys;
  int bits;
  int64_t type;  // of 16 bits
  const void* fresh;
  char* rows;
  char* scales;
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
  side.scales = static_cast<char*>(keys ? a.present_key_scale : a.present_value_scale);
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

/// How many of a sub-head's tokens share scales, and the bytes of these.
__host__ __device__ inline int64_t scale_tokens(const Side& side) { return side.bits < 8 ? CACHE_BLOCK : 1; }
__host__ __device__ inline int64_t scale_bytes(const Attention& a, const Side& side) {
  return side.bits == 16 ? 0 : side.bits == 8 ? sizeof(float) : 2 * a.d * sizeof(__half);
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

/// Channels i and i + d / 2 of step s as floats, as a float cache would store them.
__device__ __forceinline__ float2 fresh(const Attention& a, const Side& side, int64_t b, int64_t s, int64_t sub_head,
                                        int64_t i) {
  const int64_t row = (b * a.steps + s) * a.kv_heads + sub_head;
  if (side.keys) return rotated(a, b, s, side.fresh, row, i);
  return make_float2(number(side.fresh, a.type, row * a.d + i), number(side.fresh, a.type, row * a.d + i + a.d / 2));
}

/// A warp writes a sub-head's row of step s to a cache of 16 or 8 bits.
__device__ __forceinline__ void append_row(const Attention& a, const Side& side, int64_t b, int64_t s, int64_t sub_head,
                                           int lane) {
  const int64_t half = a.d / 2, slot = (b * a.kv_heads + sub_head) * side.capacity + a.past_length + s;
  if (side.bits == 16) {
    for (int64_t i = lane; i < half; i += 32) {
      const float2 x = fresh(a, side, b, s, sub_head, i);
      put_number(side.rows, side.type, slot * a.d + i, x.x);
      put_number(side.rows, side.type, slot * a.d + i + half, x.y);
    }
    return;
  }
  float largest = 0;
  bool finite = true;
  for (int64_t i = lane; i < half; i += 32) {
    const float2 x = fresh(a, side, b, s, sub_head, i);
    finite = finite && fabsf(x.x) <= FLT_MAX && fabsf(x.y) <= FLT_MAX;
    largest = fmaxf(largest, fmaxf(fabsf(x.x), fabsf(x.y)));
  }
  for (int with = 16; with; with /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, with));
  finite = __all_sync(0xffffffffu, finite);
  const float scale = finite ? __fdiv_rn(largest, 127.0f) : nan_number();
  const auto code = [&](float x) {
    const float rounded = !finite || scale == 0 ? 0.0f : rintf(__fdiv_rn(x, scale));
    return static_cast<int8_t>(fminf(127.0f, fmaxf(-127.0f, rounded)));  // beyond 127 only if scale is denormal
  };
  int8_t* codes = reinterpret_cast<int8_t*>(side.rows) + slot * a.d;
  for (int64_t i = lane; i < half; i += 32) {
    const float2 x = fresh(a, side, b, s, sub_head, i);
    codes[i] = code(x.x);
    codes[i + half] = code(x.y);
  }
  if (lane == 0) reinterpret_cast<float*>(side.scales)[slot] = scale;
}

}  // namespace diffbit::cuda
