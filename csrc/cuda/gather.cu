// GatherQuantized (ops/gather_quantized.py): a block computes a row, a thread every THREADS-th of its numbers.
#include "activations.h"

namespace diffbit::cuda {
namespace {

constexpr int TILE = 16, STEP = 8, THREADS = 256;

template <class T>
__global__ void __launch_bounds__(THREADS) rows(DiffbitGatherQuantized op) {
  const int64_t id = static_cast<const int64_t*>(op.ids)[blockIdx.x];
  T* y = static_cast<T*>(op.y) + blockIdx.x * op.k;
  if (id < 0 || id >= op.n) {
    for (int64_t i = threadIdx.x; i < op.k; i += THREADS) y[i] = from_float<T>(__int_as_float(0x7fc00000));
    return;
  }
  const int bits = static_cast<int>(op.bits);
  const int64_t groups = (op.k + op.group_size - 1) / op.group_size, tile = id / TILE, lane = id % TILE;
  const uint8_t* codes = static_cast<const uint8_t*>(op.codes) + tile * groups * op.group_size * TILE * bits / 8 + lane * 4;
  const float factor = to_float(static_cast<const T*>(op.factor)[0]);
  for (int64_t i = threadIdx.x; i < op.k; i += THREADS) {
    const int64_t group = op.scale_groups == 1 ? 0 : i / op.group_size;
    const int64_t at = (tile * op.scale_groups + group) * TILE + lane, odd = i % 2, byte = i % STEP / 2;
    const uint8_t* step = codes + i / STEP * TILE * bits;
    const int code = bits == 4 ? step[byte] >> 4 * odd & 15 : step[odd * TILE * 4 + byte];
    const int zero = op.zeros ? static_cast<const uint8_t*>(op.zeros)[at] : 1 << (bits - 1);
    const float scaled = __fmul_rn(static_cast<float>(code - zero), __half2float(static_cast<const __half*>(op.scales)[at]));
    y[i] = from_float<T>(__fmul_rn(scaled, factor));
  }
}

}  // namespace
}  // namespace diffbit::cuda

size_t diffbit_cuda_gather_quantized_workspace(const DiffbitGatherQuantized*) { return 0; }

const char* diffbit_cuda_gather_quantized(const DiffbitGatherQuantized* op, void*, void* stream) {
  using namespace diffbit::cuda;
  if (!op->m) return nullptr;
  if (op->m > INT32_MAX) return sentence("GatherQuantized: %lld ids are too many", static_cast<long long>(op->m));
  return with_type(op->type, "GatherQuantized", [&](auto number) {
    return launch(rows<decltype(number)>, static_cast<unsigned>(op->m), THREADS, 0, static_cast<cudaStream_t>(stream), *op);
  });
}
