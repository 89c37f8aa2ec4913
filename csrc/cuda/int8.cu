// Int8MatMul (ops/int8_matmul.py). Sums of a group are integers, and a thread adds the groups of its output in order, so the
// bits of y do not depend on how sums are divided.
//
// It is meant for a head with one or few rows, which is limited by reading the weight. A block has a tile, 16 rows of the
// weight, and up to ROWS rows of activations, which an earlier kernel has quantized. Its warps take the groups of the tile in
// turn. A step of 8 weights is 128 bytes, four for each lane: the even weights of row `lane` for the first 16 lanes, the odd
// ones of row lane - 16 for the others, so a warp reads one line at a time and a product is one dp4a. With many rows, the tile
// is read again from the cache for every ROWS of them.
#include "rounded_groups.h"

namespace diffbit::cuda {
namespace {

constexpr int TILE = 16;
constexpr int ROWS = 8;     // of activations in a block
constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int CHUNK = 32;   // groups whose sums are in shared memory at once: 16 KiB

struct Product : RoundedGroups {
  const uint32_t* codes;   // [tiles, groups, steps, 2, 16]
  const __half* scales;    // [tiles, scale_groups, 16]
  const uint8_t* zeros;    // the same, or null
  const float* factor;
  void* y;
  int64_t n;
  int scale_groups;
};

template <class T, int COUNT>
__global__ void __launch_bounds__(THREADS) multiply(Product p) {
  int32_t* totals = shared_memory<int32_t>();  // [CHUNK][COUNT][16]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, steps = p.group_size / 8;
  const int row = lane % TILE, odd = lane / TILE;
  const int64_t tile = blockIdx.x, first = static_cast<int64_t>(blockIdx.y) * ROWS;
  const int count = static_cast<int>(p.m - first < COUNT ? p.m - first : COUNT);
  const int output_row = threadIdx.x / TILE, column = threadIdx.x % TILE;  // of the number that this thread adds up
  float result = 0;
  for (int begin = 0; begin < p.groups; begin += CHUNK) {
    const int end = begin + CHUNK < p.groups ? begin + CHUNK : p.groups;
    for (int g = begin + warp; g < end; g += WARPS) {
      const uint32_t* codes = p.codes + ((tile * p.groups + g) * steps) * 2 * TILE + lane;
      const uint32_t* q = p.q + (first * p.groups + g) * steps * 2 + odd;
      const int64_t apart = static_cast<int64_t>(p.groups) * steps * 2;  // of rows of q
      int32_t sums[COUNT] = {};
#pragma unroll 4
      for (int s = 0; s < steps; ++s) {
        const int weights = static_cast<int>(__ldg(codes + s * 2 * TILE) ^ 0x80808080u);  // code - 128
#pragma unroll
        for (int r = 0; r < COUNT; ++r)
          if (r < count) sums[r] = __dp4a(weights, static_cast<int>(__ldg(q + r * apart + s * 2)), sums[r]);
      }
#pragma unroll
      for (int r = 0; r < COUNT; ++r) {
        const int32_t both = sums[r] + __shfl_xor_sync(WARP, sums[r], TILE);
        if (odd == 0) totals[((g - begin) * COUNT + r) * TILE + row] = both;
      }
    }
    __syncthreads();
    if (output_row < count)
      for (int g = begin; g < end; ++g) {
        const int64_t at = (tile * p.scale_groups + (p.scale_groups == 1 ? 0 : g)) * TILE + column;
        const int64_t group = (first + output_row) * p.groups + g;
        const int zero = p.zeros ? p.zeros[at] : 128;
        const int32_t sum = totals[((g - begin) * COUNT + output_row) * TILE + column] + (128 - zero) * p.sums[group];
        result = __fmaf_rn(static_cast<float>(sum), __fmul_rn(__half2float(p.scales[at]), p.row_scales[group]), result);
      }
    __syncthreads();
  }
  const int64_t n = tile * TILE + column;
  if (output_row < count && n < p.n)
    static_cast<T*>(p.y)[(first + output_row) * p.n + n] = from_float<T>(__fmul_rn(result, __ldg(p.factor)));
}

}  // namespace
}  // namespace diffbit::cuda

size_t diffbit_cuda_int8_matmul_workspace(const DiffbitInt8MatMul* op) { return diffbit::cuda::rounded_workspace(*op); }

const char* diffbit_cuda_int8_matmul(const DiffbitInt8MatMul* op, void* workspace, void* stream_) {
  using namespace diffbit::cuda;
  if (!op->m) return nullptr;
  const int64_t across = (op->n + TILE - 1) / TILE, down = (op->m + ROWS - 1) / ROWS;
  if (down > 65535) return sentence("Int8MatMul: %lld rows are too many", static_cast<long long>(op->m));
  if (reinterpret_cast<uintptr_t>(op->codes) % 4) return sentence("Int8MatMul: codes are not aligned to 4 bytes");
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_);
  Product p = {};
  if (const char* wrong = round_activations(*op, workspace, stream, p)) return wrong;
  p.factor = static_cast<const float*>(op->factor), p.y = op->y;
  p.codes = static_cast<const uint32_t*>(op->codes), p.scales = static_cast<const __half*>(op->scales);
  p.zeros = static_cast<const uint8_t*>(op->zeros);
  p.n = op->n, p.scale_groups = static_cast<int>(op->scale_groups);
  return with_type(op->type, "Int8MatMul", [&](auto number) {
    using T = decltype(number);
    const int count = p.m == 1 ? 1 : ROWS;
    const dim3 grid(static_cast<unsigned>(across), static_cast<unsigned>(down));
    const size_t shared = sizeof(int32_t) * CHUNK * TILE * static_cast<size_t>(count);
    return launch(count == 1 ? multiply<T, 1> : multiply<T, ROWS>, grid, THREADS, shared, stream, p);
  });
}
