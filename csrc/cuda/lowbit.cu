// LowBitMatMul and GatherLowBit (ops/lowbit_matmul.py). As in int8.cu, sums of a group are integers, and a thread adds the groups
// of its output in order, so the bits of y do not depend on how sums are divided.
//
// A block has a tile, 16 rows of the weight, and up to ROWS rows of activations; its warps take the groups of the tile in turn.
// Lane `row` has quads 0 to 3 of a run of 32 weights of that row, lane 16 + row its quads 4 to 7: a quad's four codes are put
// together from one word of one or two planes, and multiplied with one dp4a.
#include "../ort/layouts.h"
#include "rounded_groups.h"

namespace diffbit::cuda {
namespace {

constexpr int TILE = 16, RUN = 32, QUADS = 8;
constexpr int ROWS = 8;    // of activations in a block
constexpr int WARPS = 8, THREADS = 32 * WARPS;
constexpr int CHUNK = 32;  // groups whose sums are in shared memory at once: 16 KiB

struct Planes {
  const uint32_t* codes;     // [tiles, groups, group_size / 32, bits, 16]
  const void* scales;        // [tiles, groups, 16]
  bool int8_scales;
  const __half* row_scales;  // [tiles, 16], or null
  const uint8_t* levels;     // [2^bits], or null
  const uint8_t* map;        // [8] of trellis codes, or null
  int64_t n;
  int groups, group_size, bits, subset_bits;
};

template <class Op>
Planes planes_of(const Op& op) {
  Planes p = {};
  p.codes = static_cast<const uint32_t*>(op.codes), p.scales = op.scales, p.int8_scales = op.scale_type == 3;
  p.row_scales = static_cast<const __half*>(op.row_scales), p.levels = static_cast<const uint8_t*>(op.levels);
  p.n = op.n, p.group_size = static_cast<int>(op.group_size), p.bits = static_cast<int>(op.bits);
  p.groups = static_cast<int>((op.k + op.group_size - 1) / op.group_size);
  if (op.is_trellis) {
    p.map = p.levels + trellis_levels(op.bits) - TRELLIS_MAP;
    p.subset_bits = static_cast<int>(trellis_subset_bits(op.bits));
  }
  return p;
}

struct Product : RoundedGroups {
  Planes weight;
  const float* factor;
  void* y;
};

/// Returns the field of `width` bits of each byte of a row's word; `run` is the row's first word in the first plane of the
/// fields.
__device__ __forceinline__ uint32_t field(const uint32_t* run, int width, int quad) {
  return __ldg(run + quad * width / 8 * TILE) >> quad * width % 8 & 0x01010101u * ((1u << width) - 1);
}

__device__ __forceinline__ uint32_t codes_of(const uint32_t* run, int bits, int quad) {
  const int low = bits == 1 ? 1 : bits < 4 ? 2 : 4;
  const uint32_t codes = field(run, low, quad);
  return bits == low ? codes : codes | field(run + low * TILE, bits - low, quad) << low;
}

/// Returns the indices of levels of a quad of trellis codes, a byte each (ops/trellis.py); `run`: the run of a group's tile.
__device__ __forceinline__ uint32_t indices_of(const Planes& p, int64_t tile, int64_t group, int64_t run, int quad, int row) {
  constexpr int TILES = TRELLIS_ROWS / TILE;
  const int64_t runs = p.group_size / RUN, first = tile / TILES * TILES;
  const int place = row * TILES + static_cast<int>(tile % TILES);
  uint32_t codes = 0, x = 0;
#pragma unroll
  for (int ago = TRELLIS_MAP - 1; ago >= 0; --ago) {
    const int at = (place - ago + TRELLIS_ROWS) % TRELLIS_ROWS;
    const int64_t words = ((first + at % TILES) * p.groups + group) * runs + run;
    codes = codes_of(p.codes + words * p.bits * TILE + at / TILES, p.bits, quad);
    x ^= (codes >> (p.bits - 1) & 0x01010101u) * (__ldg(p.map + ago) & ((1u << p.subset_bits) - 1));
  }
  return (codes & 0x01010101u * ((1u << (p.bits - 1)) - 1)) << p.subset_bits | x;
}

/// Returns the level of an index.
__device__ __forceinline__ int level_of(const Planes& p, int index) {
  const int half = 1 << (p.bits - 2 + p.subset_bits);
  if (p.bits > TRELLIS_TABLE_BITS) return index - half;
  return index >= half ? __ldg(p.levels + index - half) : -static_cast<int>(__ldg(p.levels + half - 1 - index));
}

__device__ __forceinline__ float scale_of(const Planes& p, int64_t at) {
  return p.int8_scales ? static_cast<float>(static_cast<const int8_t*>(p.scales)[at])
                       : __half2float(static_cast<const __half*>(p.scales)[at]);
}

__device__ __forceinline__ float row_scale_of(const Planes& p, int64_t n) {
  return p.row_scales ? __half2float(p.row_scales[n]) : 1.0f;
}

template <class T, int COUNT>
__global__ void __launch_bounds__(THREADS) multiply(Product p) {
  int32_t* totals = shared_memory<int32_t>();                      // [CHUNK][COUNT][16]
  uint32_t* levels = reinterpret_cast<uint32_t*>(totals + CHUNK * COUNT * TILE);  // [16], or [256] of trellis codes; bytes
  const Planes& weight = p.weight;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, runs = weight.group_size / RUN, bits = weight.bits;
  const int row = lane % TILE, half = lane / TILE;
  const int64_t tile = blockIdx.x, first = static_cast<int64_t>(blockIdx.y) * ROWS;
  const int count = static_cast<int>(p.m - first < COUNT ? p.m - first : COUNT);
  const int output_row = threadIdx.x / TILE, column = threadIdx.x % TILE;  // of the number that this thread adds up
  if (weight.map)
    for (int i = threadIdx.x; i < 1 << (bits - 1 + weight.subset_bits); i += THREADS)
      levels[i] = static_cast<uint8_t>(level_of(weight, i));
  else if (weight.levels && threadIdx.x < 1 << bits)
    levels[threadIdx.x] = weight.levels[threadIdx.x] ^ 0x80u;
  __syncthreads();
  float result = 0;
  for (int begin = 0; begin < p.groups; begin += CHUNK) {
    const int end = begin + CHUNK < p.groups ? begin + CHUNK : p.groups;
    for (int g = begin + warp; g < end; g += WARPS) {
      const uint32_t* codes = weight.codes + (tile * p.groups + g) * runs * bits * TILE + row;
      const uint32_t* q = p.q + (first * p.groups + g) * runs * QUADS;
      const int64_t apart = static_cast<int64_t>(p.groups) * runs * QUADS;  // of rows of q
      int32_t sums[COUNT] = {};
      for (int run = 0; run < runs; ++run, codes += bits * TILE, q += QUADS)
#pragma unroll
        for (int i = 0; i < QUADS / 2; ++i) {
          const int quad = half * (QUADS / 2) + i;
          uint32_t weights = weight.map ? indices_of(weight, tile, g, run, quad, row) : codes_of(codes, bits, quad);
          if (weight.levels)
            weights = levels[weights & 255] | levels[weights >> 8 & 255] << 8 | levels[weights >> 16 & 255] << 16 |
                      levels[weights >> 24] << 24;
#pragma unroll
          for (int r = 0; r < COUNT; ++r)
            if (r < count)
              sums[r] = __dp4a(static_cast<int>(weights), static_cast<int>(__ldg(q + r * apart + quad)), sums[r]);
        }
#pragma unroll
      for (int r = 0; r < COUNT; ++r) {
        const int32_t both = sums[r] + __shfl_xor_sync(WARP, sums[r], TILE);
        if (half == 0) totals[((g - begin) * COUNT + r) * TILE + row] = both;
      }
    }
    __syncthreads();
    if (output_row < count)
      for (int g = begin; g < end; ++g) {
        const int64_t group = (first + output_row) * p.groups + g;
        const int middle = weight.levels ? 0 : 1 << (bits - 1);
        const int32_t sum = totals[((g - begin) * COUNT + output_row) * TILE + column] - middle * p.sums[group];
        const float scale = scale_of(weight, (tile * p.groups + g) * TILE + column);
        result = __fmaf_rn(static_cast<float>(sum), __fmul_rn(scale, p.row_scales[group]), result);
      }
    __syncthreads();
  }
  const int64_t n = tile * TILE + column;
  if (output_row < count && n < weight.n) {
    const float row_factor = __fmul_rn(row_scale_of(weight, n), __ldg(p.factor));
    static_cast<T*>(p.y)[(first + output_row) * weight.n + n] = from_float<T>(__fmul_rn(result, row_factor));
  }
}

/// A block computes a row, a thread every THREADS-th of its numbers.
template <class T>
__global__ void __launch_bounds__(THREADS) rows(Planes p, const int64_t* ids, const T* factor, T* table, int64_t k) {
  const int64_t id = ids[blockIdx.x];
  T* y = table + blockIdx.x * k;
  if (id < 0 || id >= p.n) {
    for (int64_t i = threadIdx.x; i < k; i += THREADS) y[i] = from_float<T>(__int_as_float(0x7fc00000));
    return;
  }
  const int64_t tile = id / TILE, row = id % TILE, runs = p.group_size / RUN;
  const float row_factor = __fmul_rn(row_scale_of(p, id), to_float(*factor));
  for (int64_t i = threadIdx.x; i < k; i += THREADS) {
    const int64_t group = tile * p.groups + i / p.group_size, run = i % p.group_size / RUN;
    const int quad = static_cast<int>(i % RUN / 8 * 2 + i % 2), byte = static_cast<int>(i % 8 / 2);
    const uint32_t codes = p.map ? indices_of(p, tile, i / p.group_size, run, quad, static_cast<int>(row))
                                 : codes_of(p.codes + (group * runs + run) * p.bits * TILE + row, p.bits, quad);
    const int code = static_cast<int>(codes >> 8 * byte & 255);
    const int value = p.map ? level_of(p, code) : p.levels ? p.levels[code] - 128 : code - (1 << (p.bits - 1));
    const float scaled = __fmul_rn(static_cast<float>(value), scale_of(p, group * TILE + row));
    y[i] = from_float<T>(__fmul_rn(scaled, row_factor));
  }
}

}  // namespace
}  // namespace diffbit::cuda

size_t diffbit_cuda_lowbit_matmul_workspace(const DiffbitLowBitMatMul* op) { return diffbit::cuda::rounded_workspace(*op); }

const char* diffbit_cuda_lowbit_matmul(const DiffbitLowBitMatMul* op, void* workspace, void* stream_) {
  using namespace diffbit::cuda;
  if (!op->m) return nullptr;
  const int64_t across = (op->n + TILE - 1) / TILE, down = (op->m + ROWS - 1) / ROWS;
  if (down > 65535) return sentence("LowBitMatMul: %lld rows are too many", static_cast<long long>(op->m));
  if (reinterpret_cast<uintptr_t>(op->codes) % 4) return sentence("LowBitMatMul: codes are not aligned to 4 bytes");
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_);
  Product p = {};
  if (const char* wrong = round_activations(*op, workspace, stream, p)) return wrong;
  p.weight = planes_of(*op), p.factor = static_cast<const float*>(op->factor), p.y = op->y;
  return with_type(op->type, "LowBitMatMul", [&](auto number) {
    using T = decltype(number);
    const int count = p.m == 1 ? 1 : ROWS;
    const dim3 grid(static_cast<unsigned>(across), static_cast<unsigned>(down));
    const size_t shared = sizeof(int32_t) * (CHUNK * TILE * static_cast<size_t>(count) + (p.weight.map ? 256 : 16));
    return launch(count == 1 ? multiply<T, 1> : multiply<T, ROWS>, grid, THREADS, shared, stream, p);
  });
}

size_t diffbit_cuda_gather_lowbit_workspace(const DiffbitGatherLowBit*) { return 0; }

const char* diffbit_cuda_gather_lowbit(const DiffbitGatherLowBit* op, void*, void* stream) {
  using namespace diffbit::cuda;
  if (!op->m) return nullptr;
  if (op->m > INT32_MAX) return sentence("GatherLowBit: %lld ids are too many", static_cast<long long>(op->m));
  if (reinterpret_cast<uintptr_t>(op->codes) % 4) return sentence("GatherLowBit: codes are not aligned to 4 bytes");
  return with_type(op->type, "GatherLowBit", [&](auto number) {
    using T = decltype(number);
    return launch(rows<T>, static_cast<unsigned>(op->m), THREADS, 0, static_cast<cudaStream_t>(stream), planes_of(*op),
                  static_cast<const int64_t*>(op->ids), static_cast<const T*>(op->factor), static_cast<T*>(op->y), op->k);
  });
}
