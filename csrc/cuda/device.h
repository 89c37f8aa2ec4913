// The only include of a kernel: CUDA under nvcc, the same names on the CPU (emulate.h) under another compiler.
//
// Kernels are plain CUDA C++. Operations that C++ cannot express (conversions between pairs, asynchronous copies, matrix
// fragments, tensor cores) have one function each here with a specification. The emulation computes them from that
// specification, so kernels are tested without a GPU.
#pragma once

#include <cfloat>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#else
#include "emulate.h"  // of tests/native
#endif

namespace diffbit::cuda {

/// Returns an error message of this thread, printf-style, valid until its next one.
__attribute__((format(printf, 1, 2))) const char* sentence(const char* format, ...);

/// Return the bytes of dynamic shared memory that a block can have on the current device (99 KB on sm_86, 89 and 120; 163 on
/// 80; 227 on 90), and its multiprocessors. 0 without a device.
size_t most_shared();
int multiprocessors();

/// Allows a kernel as much dynamic shared memory as blocks of the current device can have, once per kernel and device. It does
/// not set what one launch needs, because two threads that launch it with different shapes would interfere.
void allow_most_shared(const void* kernel);

/// Returns the error message of a failed launch; null after a successful one.
const char* launched(const char* what);

// ---- numbers -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

/// Returns the nearest T, halves to even.
template <class T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, __half>) return __float2half_rn(x);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(x);
  else return x;
}

/// Returns the two 16-bit numbers T of a word, the lower bits first.
template <class T>
__device__ __forceinline__ float2 unpack2(uint32_t word) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
  } else {
    static_assert(std::is_same_v<T, __half>);
#ifdef __CUDACC__
    return __half22float2(*reinterpret_cast<const __half2*>(&word));
#else
    return make_float2(emulate::half_to_float(static_cast<uint16_t>(word)),
                       emulate::half_to_float(static_cast<uint16_t>(word >> 16)));
#endif
  }
}

/// Returns the nearest two numbers T as a word, `low` in the lower bits.
template <class T>
__device__ __forceinline__ uint32_t pack2(float low, float high) {
  static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>);
#ifdef __CUDACC__
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
#else
  return emulate::bits(from_float<T>(low)) | static_cast<uint32_t>(emulate::bits(from_float<T>(high))) << 16;
#endif
}

/// Differences of two pairs of T.
template <class T>
__device__ __forceinline__ uint32_t subtract2(uint32_t a, uint32_t b) {
#ifdef __CUDACC__
  uint32_t c;
  if constexpr (std::is_same_v<T, __half>)
    asm("sub.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  else  // sm_80 has no subtraction: a * 1 + -b
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(0x3f803f80u), "r"(b ^ 0x80008000u));
  return c;
#else
  const float2 x = unpack2<T>(a), y = unpack2<T>(b);
  return pack2<T>(x.x - y.x, x.y - y.y);
#endif
}

/// Returns 2^x to about 2 ulp; 0 for -infinity.
__device__ __forceinline__ float exp2_approx(float x) {
#ifdef __CUDACC__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return emulate::exp2(x);
#endif
}

/// Returns x, hidden from the optimizer, so values derived from it earlier are not kept in registers.
__device__ __forceinline__ unsigned anew(unsigned x) {
#ifdef __CUDACC__
  asm volatile("" : "+r"(x));
#endif
  return x;
}

// ---- memory --------------------------------------------------------------------------------------------------------

/// Returns the block's dynamic shared memory, aligned to 128 bytes.
template <class T = unsigned char>
__device__ __forceinline__ T* shared_memory() {
#ifdef __CUDACC__
  extern __shared__ __align__(128) unsigned char diffbit_shared_memory[];
  return reinterpret_cast<T*>(diffbit_shared_memory);
#else
  return static_cast<T*>(emulate::shared_memory());
#endif
}

/// Loads 16 bytes that are read once, bypassing the first-level cache.
__device__ __forceinline__ uint4 load_streaming(const void* global) {
#ifdef __CUDACC__
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(global));
  return x;
#else
  return emulate::load<uint4>(global);
#endif
}

/// Starts a copy of 16 bytes into shared memory; both addresses are multiples of 16. If not `valid`, nothing is read and
/// zeros are written.
__device__ __forceinline__ void copy_async16(void* shared, const void* global, bool valid = true) {
#ifdef __CUDACC__
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(valid ? 16 : 0) : "memory");
#else
  emulate::copy_async(shared, global, 16, valid ? 16 : 0);
#endif
}

/// Does the same as copy_async16, with BYTES 4 or 8 and addresses that are multiples of it, of which the `first` are read,
/// and zeros written behind; they pass through the first-level cache.
template <int BYTES>
__device__ __forceinline__ void copy_async(void* shared, const void* global, int first = BYTES) {
  static_assert(BYTES == 4 || BYTES == 8);
#ifdef __CUDACC__
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(global), "n"(BYTES), "r"(first) : "memory");
#else
  emulate::copy_async(shared, global, BYTES, first);
#endif
}

/// Starts a copy of 2 bytes into a word of shared memory: into its upper half if the address is not a multiple of 4.
__device__ __forceinline__ void copy_async2(void* shared, const void* global, bool valid) {
  const int before = static_cast<int>(reinterpret_cast<uintptr_t>(global) % 4);
  copy_async<4>(shared, static_cast<const char*>(global) - before, valid ? before + 2 : 0);
}

/// Closes the group of the copies that this thread has started.
__device__ __forceinline__ void copy_async_commit() {
#ifdef __CUDACC__
  asm volatile("cp.async.commit_group;" ::: "memory");
#else
  emulate::copy_async_commit();
#endif
}

/// Waits for this thread's groups except the latest N. Other threads see the bytes after a barrier.
template <int N>
__device__ __forceinline__ void copy_async_wait() {
#ifdef __CUDACC__
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#else
  emulate::copy_async_wait(N);
#endif
}

/// Waits at a barrier for `threads` threads, a multiple of 32, that call it with the same id (1 to 15; 0 is __syncthreads).
__device__ __forceinline__ void barrier(int id, int threads) {
#ifdef __CUDACC__
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#else
  emulate::barrier(id, threads);
#endif
}

// ---- matrices ------------------------------------------------------------------------------------------------------
// A warp holds a matrix in fragments; lane l = 4 g + t. Rows of 16-bit matrices come from shared memory, 8 numbers (16
// bytes, aligned) a row.

/// Loads four 8x8 matrices of 16-bit numbers; lane l gives the address of row l % 8 of matrix l / 8. Register i of lane l
/// holds of matrix i row g, columns 2t and 2t + 1.
__device__ __forceinline__ void load_matrix_x4(uint32_t (&r)[4], const void* row) {
#ifdef __CUDACC__
  const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
#else
  emulate::load_matrix(r, 4, row, false);
#endif
}

/// Does the same as load_matrix_x4, but register i holds of matrix i column g, rows 2t and 2t + 1.
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t (&r)[4], const void* row) {
#ifdef __CUDACC__
  const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
#else
  emulate::load_matrix(r, 4, row, true);
#endif
}

/// Loads two matrices; the addresses of lanes 16 to 31 are not read.
__device__ __forceinline__ void load_matrix_x2(uint32_t (&r)[2], const void* row) {
#ifdef __CUDACC__
  const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(from)
               : "memory");
#else
  emulate::load_matrix(r, 2, row, false);
#endif
}

/// Computes c += a b with a [16, 16] and b [16, 8] of T (__half or __nv_bfloat16), c [16, 8] float. Lane 4 g + t holds
///     a[0] rows g, columns 2t, 2t + 1     a[1] rows g + 8     a[2] columns + 8     a[3] both
///     b[0] rows 2t, 2t + 1, column g      b[1] rows + 8
///     c[0], c[1] row g, columns 2t, 2t + 1                    c[2], c[3] row g + 8
template <class T>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>);
#ifdef __CUDACC__
  if constexpr (std::is_same_v<T, __half>)
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  emulate::mma(c, a, b, std::is_same_v<T, __half> ? emulate::half_to_float : emulate::bfloat16_to_float);
#endif
}

/// Computes c += a b with a [16, 32] and b [32, 8] of int8, c [16, 8] int32, exact. Lane 4 g + t holds
///     a[0] row g, columns 4t ... 4t + 3   a[1] row g + 8      a[2] columns + 16    a[3] both
///     b[0] rows 4t ... 4t + 3, column g   b[1] rows + 16
///     c as mma's
__device__ __forceinline__ void mma_s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef __CUDACC__
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  emulate::mma_s8(c, a, b);
#endif
}

// ---- launches ------------------------------------------------------------------------------------------------------

// Bytes of dynamic shared memory that every kernel may have: 48 KB minus what it declares
constexpr size_t SHARED_UNASKED = size_t{32} << 10;

/// Launches `kernel` on the stream; returns an error message if that fails.
template <class... Parameters, class... Arguments>
const char* launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                   Arguments... arguments) {
  const void* address = reinterpret_cast<const void*>(kernel);
  if (shared > SHARED_UNASKED) allow_most_shared(address);
#ifdef __CUDACC__
  kernel<<<grid, block, shared, stream>>>(static_cast<Parameters>(arguments)...);
#else
  static_cast<void>(stream);
  emulate::run(address, grid, block, shared, [=] { kernel(static_cast<Parameters>(arguments)...); });
#endif
  return launched("a kernel");
}

/// Returns the number of blocks of a kernel that run on one multiprocessor at a time.
template <class... Parameters>
int blocks_at_once(void (*kernel)(Parameters...), int threads, size_t shared) {
  if (shared > SHARED_UNASKED) allow_most_shared(reinterpret_cast<const void*>(kernel));
#ifdef __CUDACC__
  int blocks = 0;
  const cudaError_t error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared);
  return error == cudaSuccess && blocks ? blocks : 1;
#else
  static_cast<void>(threads);
  return 1;
#endif
}

}  // namespace diffbit::cuda
