// Helpers for rounding rows of activations to integers, shared by the kernels of low-bit matrices.
#pragma once

#include "api.h"
#include "device.h"

namespace diffbit::cuda {

/// Numbers of activations that each block quantizes for itself, at most: beyond that a kernel that quantizes each row once
/// is faster. On an H100, 8 rows of 4096 took 12.0 us by blocks and 16 rows 9.1 us; 4 rows 8.6 us (ternary, N = 4096).
constexpr int64_t MOST_FUSED = 24 << 10;

constexpr unsigned WARP = 0xffffffffu;  // all lanes

/// Whether rows of k numbers T start at multiples of 16 bytes.
template <class T>
bool aligned_rows(const void* a, int64_t k) {
  return reinterpret_cast<uintptr_t>(a) % 16 == 0 && k * static_cast<int64_t>(sizeof(T)) % 16 == 0;
}

/// Loads the numbers begin ... begin + 7 of a row of k, with zeros after its end. `aligned`: the row starts at a multiple of
/// 16 bytes.
template <class T>
__device__ __forceinline__ void load8(float (&x)[8], const T* row, int begin, int k, bool aligned) {
  if (aligned && begin + 8 <= k) {
    if constexpr (std::is_same_v<T, float>) {
      const float4 low = __ldg(reinterpret_cast<const float4*>(row + begin));
      const float4 high = __ldg(reinterpret_cast<const float4*>(row + begin + 4));
      x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
      x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
    } else {
      const uint4 words = __ldg(reinterpret_cast<const uint4*>(row + begin));
      const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack2<T>(word[i]);
        x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = begin + i < k ? to_float(row[begin + i]) : 0.0f;
}

/// Returns the largest of `bits` and the bits of |x|: floats >= 0 have the same order as their bits, with NaN above infinity.
__device__ __forceinline__ int larger(int bits, const float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) bits = max(bits, __float_as_int(x[i]) & 0x7fffffff);
  return bits;
}

constexpr int INFINITE = 0x7f800000;  // bits of infinity; larger values are NaN

/// Packs four 8-bit integers, the first in the lowest byte.
__device__ __forceinline__ uint32_t bytes(int a, int b, int c, int d) {
  const uint32_t low = __byte_perm(static_cast<uint32_t>(a), static_cast<uint32_t>(b), 0x0040);
  const uint32_t high = __byte_perm(static_cast<uint32_t>(c), static_cast<uint32_t>(d), 0x0040);
  return __byte_perm(low, high, 0x5410);
}

/// Stores two neighbours of a row of y, the first at an even position; both at once if `pairs` (rows of even length from
/// an aligned address), and the second only if it exists.
template <class T>
__device__ __forceinline__ void store2(T* to, float first, float second, bool pairs, bool both) {
  if (pairs && both) {
    if constexpr (std::is_same_v<T, float>)
      *reinterpret_cast<float2*>(to) = make_float2(first, second);
    else
      *reinterpret_cast<uint32_t*>(to) = pack2<T>(first, second);
    return;
  }
  to[0] = from_float<T>(first);
  if (both) to[1] = from_float<T>(second);
}

/// Calls run(a number of ONNX's type `type`); returns an error message unless it is float32, float16 or bfloat16.
template <class Run>
const char* with_type(int64_t type, const char* op, const Run& run) {
  switch (type) {
    case 1: return run(float{});
    case 10: return run(__half{});
    case 16: return run(__nv_bfloat16{});
  }
  return sentence("%s: type %d, wanted float32, float16 or bfloat16 (1, 10 or 16)", op, static_cast<int>(type));
}

}  // namespace diffbit::cuda
