// Hadamard. A block of threads has TILE numbers, 16 per thread, and computes four stages at a time in registers: those between
// neighbours, then, through shared memory, those between numbers 16 and 256 apart. Stages further apart go through the
// workspace, four per pass. Every number is the sum or difference of the definition, in its order, so the bits are equal.
#include <cmath>

#include "../ort/abi.h"
#include "api.h"
#include "device.h"
#include "hadamard.h"

namespace diffbit::cuda {
namespace {

constexpr int EACH = 16;  // numbers of a thread
constexpr int THREADS = 256;
constexpr int64_t TILE = THREADS * EACH;

/// Computes the stages of 16 numbers that are `apart` numbers from each other, if they are in one block.
__device__ void stages(float (&x)[EACH], int64_t apart, int64_t block) {
#pragma unroll
  for (int near = 1; near < EACH; near *= 2) {
    if (near * apart >= block) return;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (!(i & near)) butterfly(x[i], x[i + near]);
  }
}

/// Returns the position of number i of a tile in shared memory, without bank conflicts within a warp.
__device__ int place(int i) { return i + i / EACH; }

/// Computes the stages within a tile; blocks of at most TILE numbers are then complete, and are scaled.
template <class From, class To>
__global__ void __launch_bounds__(THREADS) near_stages(const From* a, To* y, int64_t size, int64_t block, float scale) {
  float* shared = shared_memory<float>();  // place(TILE) of them
  const int64_t begin = blockIdx.x * TILE;
  const int thread = threadIdx.x;
  float x[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int64_t at = begin + i * THREADS + thread;
    shared[place(i * THREADS + thread)] = at < size ? to_float(a[at]) : 0.0f;
  }
#pragma unroll
  for (int apart = 1; apart < TILE; apart *= EACH) {  // thread = above * apart + below
    __syncthreads();
    const int first = thread / apart * apart * EACH + thread % apart;
#pragma unroll
    for (int i = 0; i < EACH; ++i) x[i] = shared[place(first + i * apart)];
    stages(x, apart, block);
    if (apart * EACH == TILE) break;
#pragma unroll
    for (int i = 0; i < EACH; ++i) shared[place(first + i * apart)] = x[i];
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int64_t at = begin + i * THREADS + thread;
    if (at < size) y[at] = from_float<To>(x[i] * scale);
  }
}

/// Computes the next four stages of blocks of more than TILE numbers, 16 numbers per thread.
template <class To>
__global__ void __launch_bounds__(THREADS) far_stages(const float* from, To* to, int64_t size, int64_t block, int64_t apart,
                                                      float scale) {
  // The numbers of a thread, from one run of `span` numbers, or from a shorter one at the end
  const int64_t span = apart * EACH < block ? apart * EACH : block, count = span / apart;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  const int64_t first = thread / apart * span + thread % apart;
  if (first >= size) return;
  float x[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) x[i] = i < count ? from[first + i * apart] : 0.0f;
  stages(x, apart, block);
#pragma unroll
  for (int i = 0; i < EACH; ++i)
    if (i < count) to[first + i * apart] = from_float<To>(x[i] * scale);
}

template <class T>
const char* transform(const DiffbitHadamard& op, float* floats, cudaStream_t stream) {
  const T* a = static_cast<const T*>(op.a);
  T* y = static_cast<T*>(op.y);
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(op.block)));
  const unsigned tiles = static_cast<unsigned>((op.size + TILE - 1) / TILE);
  const size_t shared = (TILE + THREADS) * sizeof(float);
  if (op.block <= TILE) return launch(near_stages<T, T>, tiles, THREADS, shared, stream, a, y, op.size, op.block, scale);
  const char* wrong = launch(near_stages<T, float>, tiles, THREADS, shared, stream, a, floats, op.size, op.block, 1.0f);
  for (int64_t apart = TILE; apart < op.block && !wrong; apart *= EACH) {
    const int64_t count = op.block / apart < EACH ? op.block / apart : EACH;
    const unsigned blocks = static_cast<unsigned>((op.size / count + THREADS - 1) / THREADS);
    wrong = apart * count < op.block
                ? launch(far_stages<float>, blocks, THREADS, 0, stream, floats, floats, op.size, op.block, apart, 1.0f)
                : launch(far_stages<T>, blocks, THREADS, 0, stream, floats, y, op.size, op.block, apart, scale);
  }
  return wrong;
}

}  // namespace
}  // namespace diffbit::cuda

size_t diffbit_cuda_hadamard_workspace(const DiffbitHadamard* op) {
  return op->block <= diffbit::cuda::TILE ? 0 : static_cast<size_t>(op->size) * sizeof(float);
}

const char* diffbit_cuda_hadamard(const DiffbitHadamard* op, void* workspace, void* stream) {
  using namespace diffbit;
  if (!op->size) return nullptr;
  const auto transform = op->type == ort::FLOAT16    ? cuda::transform<__half>
                         : op->type == ort::BFLOAT16 ? cuda::transform<__nv_bfloat16>
                                                     : cuda::transform<float>;
  return transform(*op, static_cast<float*>(workspace), static_cast<cudaStream_t>(stream));
}
