// FloatMatMul (ops/float_matmul.py), limited by reading the weight if there are few rows: a warp computes a row of the weight
// times ROWS rows of activations. Its lanes sum in another order than the CPU, so the last bits differ. Artifacts for GPUs
// leave products of many rows to cuBLAS (export/onnx_graph.py).
#include "activations.h"

namespace diffbit::cuda {
namespace {

constexpr int ROWS = 8, WARPS = 8, THREADS = 32 * WARPS, EACH = 8;  // numbers of a lane at a time

template <class T>
__global__ void __launch_bounds__(THREADS) multiply(DiffbitFloatMatMul op, bool aligned) {
  const int lane = threadIdx.x % 32;
  const int64_t n = static_cast<int64_t>(blockIdx.x) * WARPS + threadIdx.x / 32, first = static_cast<int64_t>(blockIdx.y) * ROWS;
  if (n >= op.n) return;
  const int k = static_cast<int>(op.k), count = static_cast<int>(op.m - first < ROWS ? op.m - first : ROWS);
  const T* a = static_cast<const T*>(op.a) + first * k;
  const T* w = static_cast<const T*>(op.w) + n * k;
  float sums[ROWS] = {};
  for (int begin = lane * EACH; begin < k; begin += 32 * EACH) {
    float weights[EACH];
    load8(weights, w, begin, k, aligned);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (r >= count) break;
      float x[EACH];
      load8(x, a + static_cast<int64_t>(r) * k, begin, k, aligned);
#pragma unroll
      for (int j = 0; j < EACH; ++j) sums[r] = __fmaf_rn(x[j], weights[j], sums[r]);
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if (r >= count) break;
    float sum = sums[r];
#pragma unroll
    for (int with = 16; with; with /= 2) sum += __shfl_xor_sync(WARP, sum, with);
    if (lane == 0) static_cast<T*>(op.y)[(first + r) * op.n + n] = from_float<T>(sum);
  }
}

}  // namespace
}  // namespace diffbit::cuda

size_t diffbit_cuda_float_matmul_workspace(const DiffbitFloatMatMul*) { return 0; }

const char* diffbit_cuda_float_matmul(const DiffbitFloatMatMul* op, void*, void* stream) {
  using namespace diffbit::cuda;
  if (!op->m || !op->n) return nullptr;
  const int64_t down = (op->m + ROWS - 1) / ROWS;
  if (down > 65535) return sentence("FloatMatMul: %lld rows are too many", static_cast<long long>(op->m));
  const dim3 grid(static_cast<unsigned>((op->n + WARPS - 1) / WARPS), static_cast<unsigned>(down));
  return with_type(op->type, "FloatMatMul", [&](auto number) {
    using T = decltype(number);
    const bool aligned = aligned_rows<T>(op->a, op->k) && aligned_rows<T>(op->w, op->k);
    return launch(multiply<T>, grid, THREADS, 0, static_cast<cudaStream_t>(stream), *op, aligned);
  });
}
