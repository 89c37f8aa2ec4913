// Int4MatMul (ops/int4_matmul.py), the reference's bits: a group's sum is an integer, whoever adds it up, and the groups of
// an output are taken together by one thread, in order.
//
// The weight is read as it lies in the file and meets the tensor cores without a shuffle. 32 weights of a pair of tiles (32
// rows) are two runs of 256 bytes: [step][row][4]. Lane 4 g + t reads 16 of them, the eight weights of step t of the rows
// 4 g ... 4 g + 3, a row in each word; low and high nibbles are registers of mma_s8 as they stand: four codes of one row,
// at the even and the odd k of the step. Which k stands in which of the product's 32 columns is free as long as both
// matrices agree: the activations are stored as [32 k][row][step][even, odd]. Zero points come in as where the sum starts:
// minus the sum of the group's q, times 8 or the row's own.
//
// Few rows (M <= 16) are bound by the weight's bytes: 14336 x 4096 are 33 MB with scales, 7.7 us at 4.3 TB/s. A block a
// multiprocessor has a run of pairs of tiles. Its 16 workers take their groups in turns, copy them six times 0.6 KiB ahead
// (48 KiB a multiprocessor under way; 4.3 TB/s in 132 parts over 1 us are 33), and put a group's sums into shared memory; M
// other warps, one a row of activations with a lane for each of the 32 rows of the weight, run s = fma(sum, d a, s) along
// them, a segment behind: two loads, a product and an fma a group, hidden behind the workers. So K is split over 16 warps
// and the order of the float sums is still the reference's. Up to eight rows are quantized by each block for itself while
// its first weights come.
//
// Many rows: a block has 64 rows of activations, quantized before, by 64 PAIRS of the weight, 128 of k at a time, twice
// buffered; a warp a quarter. A sum starts at the bits of 1.5 * 2^23, so that one subtraction makes a float of it.
#include "activations.h"

namespace diffbit::cuda {
namespace {

constexpr int TILE = 16, PAIR = 2 * TILE;  // rows of the weight
constexpr int SLAB = 32;                   // of k, in one product
constexpr int SLAB_BYTES = SLAB * TILE / 2;  // of a tile
constexpr int GROUP = 8;                   // rows of activations in a product
constexpr int WORKERS = 16;
constexpr int STAGES = 6;
constexpr int SLOT = 2 * SLAB_BYTES + 2 * PAIR + PAIR;  // codes, scales, zeros of a pair
constexpr int RING = STAGES * WORKERS * SLOT;
constexpr float SMALLEST = 1e-30f;
constexpr int MANY_THREADS = 128, MANY_ROWS = 64, MANY_SLABS = 4;
constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: the bits of MAGIC + i are those of MAGIC, plus i, for |i| < 2^22

struct Product {
  const void* a;
  const uint8_t* codes;   // [tiles][groups][slabs][4][16][4]
  const uint8_t* scales;  // [tiles][groups][16] float16
  const uint8_t* zeros;   // [tiles][groups][16]; null: 8 everywhere
  const float* factor;
  void* y;
  // Activations: rows from m on are never written, and their products never stored
  uint8_t* q;        // [groups * slabs][columns][4][8]
  int32_t* offsets;  // [groups][columns]: minus the sum of the group's q; 8 times that without zeros
  float* steps;      // [groups][columns]
  int64_t n, tiles, columns;
  int m, k, groups, slabs;  // slabs of a group
  bool aligned;
};

/// Quantizes rows first ... first + count - 1 of a, all threads of the block. Row i goes to q + 32 i, offsets + i and steps
/// + i, of `columns` rows.
template <class T>
__device__ void quantize(const Product& p, int64_t first, int count, uint8_t* q, int32_t* offsets, float* steps,
                         int64_t columns) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, each = blockDim.x / 32 / count;
  const int row = warp % count, part = warp / count;
  if (part >= each) return;
  const T* from = static_cast<const T*>(p.a) + (first + row) * p.k;
  const int lanes = p.slabs * (SLAB / 8), eights = p.groups * lanes;  // lanes of a group
  for (int begin = 32 * part; begin < eights; begin += 32 * each) {
    const int i = begin + lane;
    float x[8];
    load8(x, from, 8 * i, p.k, p.aligned);
    int bits = larger(0, x);
    for (int with = 1; with < lanes; with *= 2) bits = max(bits, __shfl_xor_sync(WARP, bits, with));
    const float largest = __int_as_float(bits);
    const bool wild = bits >= INFINITE, zero = wild || largest < SMALLEST;
    const float inverse = zero ? 0.0f : __fdiv_rn(127.0f, largest);
    int codes[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) codes[j] = zero ? 0 : __float2int_rn(__fmul_rn(x[j], inverse));
    const uint32_t even = bytes(codes[0], codes[2], codes[4], codes[6]);
    const uint32_t odd = bytes(codes[1], codes[3], codes[5], codes[7]);
    int sum = __dp4a(static_cast<int>(even), 0x01010101, __dp4a(static_cast<int>(odd), 0x01010101, 0));
    for (int with = 1; with < lanes; with *= 2) sum += __shfl_xor_sync(WARP, sum, with);
    if (i >= eights) continue;
    *reinterpret_cast<uint2*>(q + (i / 4 * columns + row) * SLAB + i % 4 * 8) = make_uint2(even, odd);
    if (i % lanes) continue;
    const int64_t at = i / lanes * columns + row;
    offsets[at] = (p.zeros ? -1 : -8) * sum;
    steps[at] = wild ? __int_as_float(0x7fc00000) : zero ? 0.0f : __fdiv_rn(largest, 127.0f);
  }
}

/// One row a block, into the workspace.
template <class T>
__global__ void __launch_bounds__(256) quantize_rows(const Product p) {
  const int64_t row = blockIdx.x;
  quantize<T>(p, row, 1, p.q + row * SLAB, p.offsets + row, p.steps + row, p.columns);
}

__device__ __forceinline__ uint32_t low(uint32_t word) { return word & 0x0f0f0f0fu; }
__device__ __forceinline__ uint32_t high(uint32_t word) { return word >> 4 & 0x0f0f0f0fu; }

/// Byte i of eight, as a number.
__device__ __forceinline__ int byte(uint2 eight, int i) { return (i < 4 ? eight.x : eight.y) >> 8 * (i % 4) & 0xff; }

/// The shared memory of a block for few rows.
struct Shared {
  int segment;         // groups
  size_t sums, scales, q, offsets, steps, size;  // where they start: [2][segment][m][32] float, [2][segment][32] float, ...

  __host__ __device__ Shared(int m, int groups, int slabs, bool fused) : segment(m <= 4 ? 2 * WORKERS : WORKERS) {
    const size_t part = static_cast<size_t>(2 * segment) * PAIR * sizeof(float), rows = fused ? m : 0;
    sums = RING;
    scales = sums + part * m;
    q = scales + part;
    offsets = q + rows * groups * slabs * SLAB;
    steps = offsets + rows * groups * sizeof(int32_t);
    size = steps + rows * groups * sizeof(float);
  }
};

/// m <= 8 GROUPS rows. FUSED: it quantizes them itself (one group), else they are in the workspace. WORKERS warps and one
/// for each row, 8 of these at most.
template <class T, int GROUPS, bool FUSED>
__global__ void __launch_bounds__(32 * (WORKERS + GROUP), 1) few_rows(const Product p) {
  static_assert(!FUSED || GROUPS == 1);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int64_t all = (p.tiles + 1) / 2, first_pair = all * blockIdx.x / gridDim.x;
  const int units = static_cast<int>(all * (blockIdx.x + 1) / gridDim.x - first_pair) * p.groups;
  const bool worker = warp < WORKERS;

  unsigned char* shared = shared_memory();
  const Shared plan(p.m, p.groups, p.slabs, FUSED);
  float* sums = reinterpret_cast<float*>(shared + plan.sums);
  float* scales = reinterpret_cast<float*>(shared + plan.scales);
  unsigned char* ring = shared + warp * SLOT;  // [stage][warp]

  // What a worker copies next: slab `copied_slab` of group `copied_group` of a pair, WORKERS groups apart
  int copied = worker ? warp : units, copied_group = copied % p.groups, copied_slab = 0;
  int64_t copied_pair = first_pair + copied / p.groups;
  const auto copy = [&](int stage) {
    if (copied < units) {
      unsigned char* to = ring + stage * (WORKERS * SLOT);
      const auto group = [&](int half) {  // beyond the last tile: that again, which nobody stores
        return min(2 * copied_pair + half, p.tiles - 1) * p.groups + copied_group;
      };
      copy_async16(to + 16 * lane,
                   p.codes + (group(g / 4) * p.slabs + copied_slab) * SLAB_BYTES + t * (4 * TILE) + g % 4 * 16);
      if (!copied_slab) {
        if (lane < 4) copy_async16(to + 2 * SLAB_BYTES + 16 * lane, p.scales + group(lane / 2) * (2 * TILE) + lane % 2 * 16);
        if (p.zeros && lane >= 4 && lane < 6)
          copy_async16(to + 2 * SLAB_BYTES + 16 * lane, p.zeros + group(lane - 4) * TILE);
      }
      if (++copied_slab == p.slabs) {
        copied_slab = 0;
        copied += WORKERS;
        copied_group += WORKERS;
        while (copied_group >= p.groups) {
          copied_group -= p.groups;
          ++copied_pair;
        }
      }
    }
    copy_async_commit();
  };
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) copy(stage);

  const uint8_t* q = p.q;
  const int32_t* offsets = p.offsets;
  const float* steps = p.steps;
  const int64_t columns = FUSED ? p.m : p.columns;
  if constexpr (FUSED) {
    quantize<T>(p, 0, p.m, shared + plan.q, reinterpret_cast<int32_t*>(shared + plan.offsets),
                reinterpret_cast<float*>(shared + plan.steps), p.m);
    q = shared + plan.q;
    offsets = reinterpret_cast<const int32_t*>(shared + plan.offsets);
    steps = reinterpret_cast<const float*>(shared + plan.steps);
    __syncthreads();
  }
  q += (FUSED ? min(g, p.m - 1) : g) * SLAB + 8 * t;  // columns beyond m: the last one again, or what lies there

  int stage = 0, group = warp % p.groups;  // a worker's
  int at = 0;                              // the other warps' group
  int64_t pair = first_pair;
  float results[GROUPS] = {};
  for (int begin = 0, turn = 0; begin < units; begin += plan.segment, turn ^= 1) {
    if (worker) {
      for (int unit = warp; unit < plan.segment && begin + unit < units; unit += WORKERS) {
        int32_t c[GROUPS][2][4];
        for (int slab = 0; slab < p.slabs; ++slab) {
          copy_async_wait<STAGES - 2>();
          __syncwarp();
          const unsigned char* slot = ring + stage * (WORKERS * SLOT);
          const uint4 words = *reinterpret_cast<const uint4*>(slot + 16 * lane);
          if (!slab) {
            scales[(turn * plan.segment + unit) * PAIR + lane] =
                __half2float(reinterpret_cast<const __half*>(slot + 2 * SLAB_BYTES)[lane]);
            uint32_t zero = 0x01010101;
            if (p.zeros) zero = *reinterpret_cast<const uint32_t*>(slot + 2 * SLAB_BYTES + 2 * PAIR + 4 * g);
#pragma unroll
            for (int i = 0; i < GROUPS; ++i)
#pragma unroll
              for (int r = 0; r < 8; ++r) {
                const int column = min(8 * i + 2 * t + r % 2, p.m - 1);
                const int32_t offset = offsets[group * columns + column];
                c[i][r / 4][r % 4] = offset * static_cast<int32_t>(zero >> 8 * (r / 2) & 0xff);
              }
          }
#pragma unroll
          for (int i = 0; i < GROUPS; ++i) {
            const uint2 b = *reinterpret_cast<const uint2*>(
                q + ((static_cast<int64_t>(group) * p.slabs + slab) * columns + GROUP * i) * SLAB);
            mma_s8(c[i][0], {low(words.x), low(words.y), high(words.x), high(words.y)}, {b.x, b.y});
            mma_s8(c[i][1], {low(words.z), low(words.w), high(words.z), high(words.w)}, {b.x, b.y});
          }
          copy(stage ? stage - 1 : STAGES - 1);  // where the bytes of the iteration before were
          stage = stage + 1 < STAGES ? stage + 1 : 0;
        }
        group += WORKERS;
        while (group >= p.groups) group -= p.groups;
        float* to = sums + static_cast<int64_t>(turn * plan.segment + unit) * p.m * PAIR + 4 * g;
#pragma unroll
        for (int i = 0; i < GROUPS; ++i)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int column = 8 * i + 2 * t + r;
            if (column < p.m)
              *reinterpret_cast<float4*>(to + column * PAIR) =
                  make_float4(__int2float_rn(c[i][0][r]), __int2float_rn(c[i][0][r + 2]), __int2float_rn(c[i][1][r]),
                              __int2float_rn(c[i][1][r + 2]));
          }
      }
    }
    __syncthreads();
    if (worker) continue;
    constexpr int AHEAD = 4;  // loads of these do not wait for the fma before
    const int count = min(plan.segment, units - begin);
    for (int unit = 0; unit < count; unit += AHEAD) {
      float sum[AHEAD][GROUPS], scale[AHEAD][GROUPS];
      int next = at;
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int from = turn * plan.segment + min(unit + i, count - 1);
#pragma unroll
        for (int j = 0; j < GROUPS; ++j) {
          const int column = min(GROUP * j + warp - WORKERS, p.m - 1);
          sum[i][j] = sums[(static_cast<int64_t>(from) * p.m + column) * PAIR + lane];
          scale[i][j] = __fmul_rn(scales[from * PAIR + lane], steps[next * columns + column]);
        }
        next = next + 1 < p.groups ? next + 1 : 0;
      }
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        if (unit + i >= count) break;
#pragma unroll
        for (int j = 0; j < GROUPS; ++j) results[j] = __fmaf_rn(sum[i][j], scale[i][j], results[j]);
        if (++at < p.groups) continue;
        at = 0;
        const int64_t n = pair * PAIR + lane;
        ++pair;
#pragma unroll
        for (int j = 0; j < GROUPS; ++j) {
          const int column = GROUP * j + warp - WORKERS;
          if (n < p.n && column < p.m)
            static_cast<T*>(p.y)[column * p.n + n] = from_float<T>(__fmul_rn(results[j], __ldg(p.factor)));
          results[j] = 0;
        }
      }
    }
  }
}

/// Eight neighbours of a row of y. `whole`: rows and y are such that they lie at a multiple of 16 bytes.
template <class T>
__device__ __forceinline__ void store8(T* to, const float (&x)[8], int64_t room, bool whole) {
  if (!whole) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < room) to[i] = from_float<T>(x[i]);
    return;
  }
  if (room <= 0) return;
  if constexpr (std::is_same_v<T, float>) {
    *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
    *reinterpret_cast<float4*>(to + 4) = make_float4(x[4], x[5], x[6], x[7]);
  } else {
    *reinterpret_cast<uint4*>(to) =
        make_uint4(pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]), pack2<T>(x[4], x[5]), pack2<T>(x[6], x[7]));
  }
}

/// 64 rows of activations by 64 PAIRS of the weight a block, 2 x 2 warps.
template <class T, int SLABS, int PAIRS>
__global__ void __launch_bounds__(MANY_THREADS, PAIRS == 1 ? 3 : 2) many_rows(const Product p, int blocks_down, bool whole) {
  constexpr int MT = MANY_ROWS / 2 / 16, GROUPS = MANY_SLABS / SLABS, TILES = 4 * PAIRS;  // of a stage
  constexpr int A = MANY_SLABS * MANY_ROWS * SLAB, B = 2 * PAIRS * MANY_SLABS * 2 * SLAB_BYTES;
  constexpr int SCALES = GROUPS * TILES * TILE * 2, ZEROS = SCALES / 2, FOURS = GROUPS * MANY_ROWS * 4;
  constexpr int STAGE = A + B + SCALES + ZEROS + 2 * FOURS;
  static_assert(SCALES / 16 <= 64 && ZEROS / 16 <= 64 && 2 * FOURS / 16 <= MANY_THREADS);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int down = warp % 2, across = warp / 2;
  const int64_t first = static_cast<int64_t>(blockIdx.x % blocks_down) * MANY_ROWS;
  const int64_t first_tile = static_cast<int64_t>(blockIdx.x / blocks_down) * TILES;
  const int stages = (p.groups + GROUPS - 1) / GROUPS;
  unsigned char* shared = shared_memory();

  const auto copy = [&](int stage) {
    unsigned char* to = shared + stage % 2 * STAGE;
    if (stage < stages) {
      const int slab = stage * MANY_SLABS, slabs = min(MANY_SLABS, p.groups * SLABS - slab);
      const int group = stage * GROUPS, groups = min(GROUPS, p.groups - group);
#pragma unroll
      for (int i = 0; i < MANY_SLABS; ++i)
        copy_async16(to + i * (MANY_ROWS * SLAB) + 16 * thread,
                     p.q + ((slab + (i < slabs ? i : 0)) * p.columns + first) * SLAB + 16 * thread, i < slabs);
#pragma unroll
      for (int i = 0; i < 2 * PAIRS; ++i) {  // a warp a slab, a pair after the other, lane by lane as they are read
        const int64_t tile = min(first_tile + 2 * i + g / 4, p.tiles - 1);
        copy_async16(to + A + (i * MANY_SLABS + warp) * (2 * SLAB_BYTES) + 16 * lane,
                     p.codes + (tile * p.groups * SLABS + slab + (warp < slabs ? warp : 0)) * SLAB_BYTES +
                         t * (4 * TILE) + g % 4 * 16,
                     warp < slabs);
      }
      const auto group_of = [&](int64_t tile, int i) {
        return min(first_tile + tile, p.tiles - 1) * p.groups + group + (i < groups ? i : 0);
      };
      if (thread < SCALES / 16) {
        const int i = thread / (2 * TILES);
        copy_async16(to + A + B + 16 * thread, p.scales + group_of(thread / 2 % TILES, i) * (2 * TILE) + thread % 2 * 16,
                     i < groups);
      } else if (p.zeros && thread >= 64 && thread < 64 + ZEROS / 16) {
        const int i = (thread - 64) / TILES;
        copy_async16(to + A + B + SCALES + 16 * (thread - 64), p.zeros + group_of((thread - 64) % TILES, i) * TILE,
                     i < groups);
      }
      if (thread < 2 * FOURS / 16) {
        const int i = thread % (FOURS / 16) / 16;
        const void* from = thread < FOURS / 16 ? static_cast<const void*>(p.offsets) : p.steps;
        copy_async16(to + A + B + SCALES + ZEROS + 16 * thread,
                     static_cast<const uint8_t*>(from) + ((group + (i < groups ? i : 0)) * p.columns + first) * 4 +
                         thread % 16 * 16,
                     i < groups);
      }
    }
    copy_async_commit();
  };

  float sums[MT][2][PAIRS][8] = {};  // of row g + 8 half, at the pair's columns 8 t ...
  copy(0);
  copy(1);
  for (int stage = 0; stage < stages; ++stage) {
    copy_async_wait<1>();
    __syncthreads();
    const unsigned char* base = shared + stage % 2 * STAGE;
    const unsigned char* a = base + (down * (16 * MT) + g) * SLAB + 8 * t;
    const unsigned char* b = base + A + across * PAIRS * MANY_SLABS * (2 * SLAB_BYTES) + 16 * lane;
    const unsigned char* scales = base + A + B;
    const unsigned char* zeros = scales + SCALES;
    const int32_t* offsets = reinterpret_cast<const int32_t*>(zeros + ZEROS);
    const float* steps = reinterpret_cast<const float*>(zeros + ZEROS + FOURS);
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      if (stage * GROUPS + group >= p.groups) break;
      int32_t offset[MT][2];
      float step[MT][2];
#pragma unroll
      for (int i = 0; i < 2 * MT; ++i) {
        // Rows beyond m: the last one again
        const int row = static_cast<int>(min(int64_t{(down * MT + i / 2) * 16 + i % 2 * 8 + g}, p.m - 1 - first));
        offset[i / 2][i % 2] = offsets[group * MANY_ROWS + max(row, 0)];
        step[i / 2][i % 2] = steps[group * MANY_ROWS + max(row, 0)];
      }
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        const int tile = group * TILES + 2 * (across * PAIRS + pair) + t / 2, eight = t % 2 * 8;
        uint2 zero = {};
        if (p.zeros) zero = *reinterpret_cast<const uint2*>(zeros + tile * TILE + eight);
        int32_t c[MT][4][4];
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
          for (int u = 0; u < 4; ++u)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
              const int32_t o = offset[i][r / 2];
              c[i][u][r] = __float_as_int(MAGIC) + (p.zeros ? o * byte(zero, u + r % 2 * 4) : o);
            }
#pragma unroll
        for (int k = 0; k < SLABS; ++k) {
          const int slab = group * SLABS + k;
          const uint4 words = *reinterpret_cast<const uint4*>(b + (pair * MANY_SLABS + slab) * (2 * SLAB_BYTES));
          const uint32_t word[4] = {words.x, words.y, words.z, words.w};
          uint2 upper[MT], lower[MT];
#pragma unroll
          for (int i = 0; i < MT; ++i) {
            upper[i] = *reinterpret_cast<const uint2*>(a + (slab * MANY_ROWS + i * 16) * SLAB);
            lower[i] = *reinterpret_cast<const uint2*>(a + (slab * MANY_ROWS + i * 16 + 8) * SLAB);
          }
#pragma unroll
          for (int u = 0; u < 4; ++u)
#pragma unroll
            for (int i = 0; i < MT; ++i)
              mma_s8(c[i][u], {upper[i].x, lower[i].x, upper[i].y, lower[i].y}, {low(word[u]), high(word[u])});
        }
        const uint4 halves = *reinterpret_cast<const uint4*>(scales + (tile * TILE + eight) * 2);
        const float2 pairs[4] = {unpack2<__half>(halves.x), unpack2<__half>(halves.y), unpack2<__half>(halves.z),
                                 unpack2<__half>(halves.w)};
        const float scale[8] = {pairs[0].x, pairs[0].y, pairs[1].x, pairs[1].y,
                                pairs[2].x, pairs[2].y, pairs[3].x, pairs[3].y};
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
          for (int r = 0; r < 4; ++r)
#pragma unroll
            for (int u = 0; u < 4; ++u) {
              float& s = sums[i][r / 2][pair][r % 2 * 4 + u];
              s = __fmaf_rn(__fsub_rn(__int_as_float(c[i][u][r]), MAGIC),
                            __fmul_rn(scale[r % 2 * 4 + u], step[i][r / 2]), s);
            }
      }
    }
    __syncthreads();
    copy(stage + 2);
  }

  const float factor = __ldg(p.factor);
#pragma unroll
  for (int i = 0; i < 2 * MT; ++i) {
    const int64_t row = first + (down * MT + i / 2) * 16 + i % 2 * 8 + g;
    if (row >= p.m) continue;
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
      const int64_t n = (first_tile / 2 + across * PAIRS + pair) * PAIR + 8 * t;
      float x[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = __fmul_rn(sums[i / 2][i % 2][pair][j], factor);
      store8(static_cast<T*>(p.y) + row * p.n + n, x, p.n - n, whole);
    }
  }
}

/// How few rows are launched: `rows` of them at once.
struct Few {
  int rows;
  bool fused;
};

Few plan_few(const Product& p) {
  const auto fits = [&](int m, bool fused) { return Shared(m, p.groups, p.slabs, fused).size <= most_shared(); };
  if (p.m <= GROUP && fits(p.m, true)) return {p.m, true};
  return {p.m <= GROUP || fits(p.m, false) ? p.m : GROUP, false};
}

template <class T>
const char* few(Product p, cudaStream_t stream) {
  const Few plan = plan_few(p);
  const int64_t blocks = std::max<int64_t>(1, std::min<int64_t>((p.tiles + 1) / 2, multiprocessors()));
  const int m = p.m;
  for (int first = 0; first < m; first += plan.rows) {
    p.m = std::min(plan.rows, m - first);
    const auto kernel = plan.fused ? few_rows<T, 1, true> : p.m <= GROUP ? few_rows<T, 1, false> : few_rows<T, 2, false>;
    const int warps = WORKERS + std::min(p.m, GROUP);
    if (const char* wrong = launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(32 * warps),
                                   Shared(p.m, p.groups, p.slabs, plan.fused).size, stream, p))
      return wrong;
    p.y = static_cast<T*>(p.y) + plan.rows * p.n;
    p.q += plan.rows * SLAB;
    p.offsets += plan.rows;
    p.steps += plan.rows;
  }
  return nullptr;
}

template <class T, int PAIRS>
const char* many(const Product& p, int64_t m, cudaStream_t stream) {
  const int64_t down = (m + MANY_ROWS - 1) / MANY_ROWS, blocks = down * ((p.tiles + 4 * PAIRS - 1) / (4 * PAIRS));
  const bool whole = p.n % 8 == 0 && reinterpret_cast<uintptr_t>(p.y) % 16 == 0;
  const auto kernel = p.slabs == 1 ? many_rows<T, 1, PAIRS> : p.slabs == 2 ? many_rows<T, 2, PAIRS> : many_rows<T, 4, PAIRS>;
  const int groups = MANY_SLABS / p.slabs;
  const int stage = MANY_SLABS * MANY_ROWS * SLAB + 2 * PAIRS * MANY_SLABS * 2 * SLAB_BYTES +
                    groups * (4 * PAIRS * TILE * 3 + 2 * MANY_ROWS * 4);
  return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(MANY_THREADS), static_cast<size_t>(2 * stage), stream, p,
                static_cast<int>(down), whole);
}

template <class T>
const char* multiply(Product p, cudaStream_t stream) {
  p.aligned = aligned_rows<T>(p.a, p.k);
  const bool is_few = p.m <= 2 * GROUP;
  if (!is_few || !plan_few(p).fused)
    if (const char* wrong = launch(quantize_rows<T>, dim3(static_cast<unsigned>(p.m)), dim3(256), 0, stream, p)) return wrong;
  if (is_few) return few<T>(p, stream);
  // Wide tiles read the activations less often, narrow ones give every multiprocessor some
  const int64_t wide = (p.m + MANY_ROWS - 1) / MANY_ROWS * ((p.tiles + 7) / 8);
  return wide >= 3 * multiprocessors() ? many<T, 2>(p, p.m, stream) : many<T, 1>(p, p.m, stream);
}

Product product(const DiffbitInt4MatMul& op, void* workspace) {
  Product p = {};
  p.a = op.a;
  p.codes = static_cast<const uint8_t*>(op.codes);
  p.scales = static_cast<const uint8_t*>(op.scales);
  p.zeros = static_cast<const uint8_t*>(op.zeros);
  p.factor = static_cast<const float*>(op.factor);
  p.y = op.y;
  p.n = op.n;
  p.tiles = (op.n + TILE - 1) / TILE;
  p.m = static_cast<int>(op.m);
  p.columns = op.m <= 2 * GROUP ? (op.m + GROUP - 1) / GROUP * GROUP : (op.m + MANY_ROWS - 1) / MANY_ROWS * MANY_ROWS;
  p.k = static_cast<int>(op.k);
  p.groups = static_cast<int>((op.k + op.group_size - 1) / op.group_size);
  p.slabs = static_cast<int>(op.group_size / SLAB);
  p.q = static_cast<uint8_t*>(workspace);
  p.offsets = reinterpret_cast<int32_t*>(p.q + p.columns * p.groups * p.slabs * SLAB);
  p.steps = reinterpret_cast<float*>(p.offsets + p.columns * p.groups);
  return p;
}

}  // namespace
}  // namespace diffbit::cuda

size_t diffbit_cuda_int4_matmul_workspace(const DiffbitInt4MatMul* op) {
  using namespace diffbit::cuda;
  const Product p = product(*op, nullptr);
  if (op->m <= 2 * GROUP && plan_few(p).fused) return 0;
  return static_cast<size_t>(p.columns * p.groups * (p.slabs * SLAB + 8));
}

const char* diffbit_cuda_int4_matmul(const DiffbitInt4MatMul* op, void* workspace, void* stream) {
  using namespace diffbit::cuda;
  if (!op->m) return nullptr;
  if (op->m > INT32_MAX) return sentence("Int4MatMul: %lld rows are too many", static_cast<long long>(op->m));
  for (const void* tensor : {op->codes, op->scales, op->zeros})
    if (reinterpret_cast<uintptr_t>(tensor) % 16)
      return sentence("Int4MatMul: the weight's tensors are not aligned to 16 bytes");
  const Product p = product(*op, workspace);
  return with_type(op->type, "Int4MatMul",
                   [&](auto number) { return multiply<decltype(number)>(p, static_cast<cudaStream_t>(stream)); });
}
