// CUDA on a CPU, as far as this library's kernels use it: for tests on machines without a GPU, never for use.
//
// A block's threads are fibers that run one at a time, each until it waits for others (a barrier, a shuffle, a matrix
// product); blocks run one after the other. Who goes first is drawn from a seed (environment DIFFBIT_EMULATE_SEED), so
// that a missing barrier shows in some order. Stricter than a GPU: shared memory starts as NaN; an asynchronous copy
// spoils its target at once and brings the bytes only at the wait; addresses that are not aligned, a barrier that not
// all threads reach and a shuffle with a lane that is not there end the process with a sentence.
//
// What it cannot show: speed, and races within a warp between instructions that do not wait.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <math.h>  // fmaf and the like, without std::

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __grid_constant__

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

extern dim3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

using cudaStream_t = void*;

enum cudaError_t { cudaSuccess };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
struct cudaFuncAttributes { size_t sharedSizeBytes; };
cudaError_t cudaGetDevice(int* device);  // a card with another most_shared() is another device
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) { return *attributes = {}, cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value);

#define DIFFBIT_VECTOR(name, type)                                        \
  struct alignas(2 * sizeof(type)) name##2 { type x, y; };                \
  struct name##3 { type x, y, z; };                                       \
  struct alignas(4 * sizeof(type)) name##4 { type x, y, z, w; };          \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }        \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
DIFFBIT_VECTOR(float, float)
DIFFBIT_VECTOR(int, int)
DIFFBIT_VECTOR(uint, unsigned)
DIFFBIT_VECTOR(char, signed char)
DIFFBIT_VECTOR(uchar, unsigned char)
DIFFBIT_VECTOR(short, short)
DIFFBIT_VECTOR(ushort, unsigned short)
#undef DIFFBIT_VECTOR

struct __half { uint16_t bits; };
struct __nv_bfloat16 { uint16_t bits; };

namespace diffbit::cuda::emulate {

float half_to_float(uint16_t bits);
uint16_t half_from_float(float x);
inline float bfloat16_to_float(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &wide, 4);
  return x;
}
uint16_t bfloat16_from_float(float x);
inline uint16_t bits(__half x) { return x.bits; }
inline uint16_t bits(__nv_bfloat16 x) { return x.bits; }

/// 2^x, subnormals as zero.
inline float exp2(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}

size_t most_shared();
void* shared_memory();

/// Runs the threads of each block of the grid; `kernel` must have been allowed so much shared memory.
void run(const void* kernel, dim3 grid, dim3 block, size_t shared, const std::function<void()>& thread);

/// Ends the process with a sentence about the thread that runs.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

inline void check_aligned(const void* address, size_t to, const char* what) {
  if (reinterpret_cast<uintptr_t>(address) % to) fail("%s: the address %p is no multiple of %zu", what, address, to);
}

template <class T>
T load(const void* address) {
  check_aligned(address, alignof(T), "load");
  T x;
  std::memcpy(&x, address, sizeof x);
  return x;
}

void barrier(int id, int threads);  // id 0: all threads of the block
void copy_async(void* shared, const void* global, size_t bytes, int read);  // the first `read`, behind them zeros
void copy_async_commit();
void copy_async_wait(int pending);

/// Gives `bytes` (at most 64) to the other lanes of `mask` and waits until all of them have given theirs to the same
/// `what`; lane l's then lie at the result + 64 l until this lane's next exchange but one.
const unsigned char* exchange(unsigned mask, const char* what, const void* given, size_t bytes);
int lane();

template <class T>
T shuffle(unsigned mask, const char* what, T value, int from) {
  const unsigned char* all = exchange(mask, what, &value, sizeof value);
  if (!(mask >> from & 1)) fail("%s: reads lane %d, which the mask %08x does not name", what, from, mask);
  T got;
  std::memcpy(&got, all + 64 * from, sizeof got);
  return got;
}

void load_matrix(uint32_t* r, int matrices, const void* row, bool transposed);
void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], float (*number)(uint16_t));
void mma_s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

/// Combines the lanes' values.
template <class T, class Combine>
T reduce(unsigned mask, const char* what, T value, const Combine& combine) {
  const unsigned char* all = exchange(mask, what, &value, sizeof value);
  bool first = true;
  T total{};
  for (int l = 0; l < 32; ++l) {
    if (!(mask >> l & 1)) continue;
    T x;
    std::memcpy(&x, all + 64 * l, sizeof x);
    total = first ? x : combine(total, x);
    first = false;
  }
  return total;
}

}  // namespace diffbit::cuda::emulate

inline void __syncthreads() { diffbit::cuda::emulate::barrier(0, 0); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { diffbit::cuda::emulate::exchange(mask, "__syncwarp", nullptr, 0); }

/// A lane out of its segment of `width` lanes gets its own value, as on a GPU.
template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  const int base = diffbit::cuda::emulate::lane() / width * width;
  return diffbit::cuda::emulate::shuffle(mask, "__shfl_sync", value, base + (from & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32) {
  const int lane = diffbit::cuda::emulate::lane(), from = lane ^ with;
  return diffbit::cuda::emulate::shuffle(mask, "__shfl_xor_sync", value, from / width > lane / width ? lane : from);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
  const int lane = diffbit::cuda::emulate::lane(), from = lane + static_cast<int>(by);
  return diffbit::cuda::emulate::shuffle(mask, "__shfl_down_sync", value, from / width == lane / width ? from : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
  const int lane = diffbit::cuda::emulate::lane(), from = lane - static_cast<int>(by);
  return diffbit::cuda::emulate::shuffle(mask, "__shfl_up_sync", value,
                                         from >= lane / width * width ? from : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const unsigned own = predicate ? 1u << diffbit::cuda::emulate::lane() : 0;
  return diffbit::cuda::emulate::reduce(mask, "__ballot_sync", own, [](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
template <class T>
T __reduce_add_sync(unsigned mask, T value) {
  return diffbit::cuda::emulate::reduce(mask, "__reduce_add_sync", value, [](T a, T b) { return a + b; });
}
template <class T>
T __reduce_max_sync(unsigned mask, T value) {
  return diffbit::cuda::emulate::reduce(mask, "__reduce_max_sync", value, [](T a, T b) { return std::max(a, b); });
}
inline int __syncthreads_or(int predicate) {
  static int any;  // blocks and their barriers come one after the other
  __syncthreads();
  any = 0;
  __syncthreads();
  any |= predicate != 0;
  __syncthreads();
  return any;
}

template <class T>
T atomicAdd(T* address, T value) {
  const T before = *address;
  *address = before + value;
  return before;
}
template <class T>
T atomicMax(T* address, T value) {
  const T before = *address;
  *address = std::max(before, value);
  return before;
}
template <class T>
T atomicExch(T* address, T value) {
  const T before = *address;
  *address = value;
  return before;
}
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T>
T __ldg(const T* address) {
  return diffbit::cuda::emulate::load<T>(address);
}

inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i)
    c += static_cast<int8_t>(static_cast<unsigned>(a) >> 8 * i) * static_cast<int8_t>(static_cast<unsigned>(b) >> 8 * i);
  return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 4; ++i) c += static_cast<uint8_t>(a >> 8 * i) * static_cast<uint8_t>(b >> 8 * i);
  return c;
}
/// Bytes of (low, high), numbered 0 to 7, chosen by the hexadecimal digits of `selector`, the lowest first.
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t both = low | static_cast<uint64_t>(high) << 32;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= static_cast<unsigned>(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return out;
}
/// Bytes a - b, each modulo 256.
inline unsigned __vsub4(unsigned a, unsigned b) {
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= (((a >> 8 * i) - (b >> 8 * i)) & 0xff) << 8 * i;
  return out;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }

template <class To, class From>
To diffbit_same_bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
inline int __float_as_int(float x) { return diffbit_same_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return diffbit_same_bits<unsigned>(x); }
inline float __int_as_float(int x) { return diffbit_same_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return diffbit_same_bits<float>(x); }

inline float __half2float(__half x) { return diffbit::cuda::emulate::half_to_float(x.bits); }
inline __half __float2half_rn(float x) { return {diffbit::cuda::emulate::half_from_float(x)}; }
inline float __bfloat162float(__nv_bfloat16 x) { return diffbit::cuda::emulate::bfloat16_to_float(x.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {diffbit::cuda::emulate::bfloat16_from_float(x)}; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
/// Saturated; 0 for NaN.
inline int __float2int_rn(float x) {
  if (!(std::fabs(x) < 0x1p31f)) return x > 0 ? INT32_MAX : x < 0 ? INT32_MIN : 0;
  return static_cast<int>(std::nearbyint(x));
}
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }
using std::max;
using std::min;
