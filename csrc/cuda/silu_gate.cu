// SiluGate (ops/silu_gate.py): a thread computes a number.
#include "../ort/abi.h"
#include "api.h"
#include "device.h"

namespace diffbit::cuda {
namespace {

constexpr int THREADS = 256;

template <class T>
__global__ void __launch_bounds__(THREADS) multiply(const T* a, T* y, int64_t size, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  if (i >= size) return;
  const T* g = a + i / n * 2 * n + i % n;
  const float gate = to_float(*g);
  y[i] = from_float<T>(gate / (1.0f + expf(-gate)) * to_float(g[n]));
}

template <class T>
const char* multiply_all(const DiffbitSiluGate& op, cudaStream_t stream) {
  const int64_t size = op.rows * op.n;
  return launch(multiply<T>, static_cast<unsigned>((size + THREADS - 1) / THREADS), THREADS, 0, stream,
                static_cast<const T*>(op.a), static_cast<T*>(op.y), size, op.n);
}

}  // namespace
}  // namespace diffbit::cuda

size_t diffbit_cuda_silu_gate_workspace(const DiffbitSiluGate*) { return 0; }

const char* diffbit_cuda_silu_gate(const DiffbitSiluGate* op, void*, void* stream) {
  using namespace diffbit;
  if (!op->rows || !op->n) return nullptr;
  const auto multiply = op->type == ort::FLOAT16    ? cuda::multiply_all<__half>
                        : op->type == ort::BFLOAT16 ? cuda::multiply_all<__nv_bfloat16>
                                                    : cuda::multiply_all<float>;
  return multiply(*op, static_cast<cudaStream_t>(stream));
}
