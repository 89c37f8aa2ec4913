// Int4MatMul (ops/int4_matmul.py), bit-identical to the reference: a group's sum is an integer, so its order does not matter,
// and one thread adds up the groups of an output, in order.
//
// The weight is read in the file's layout and used by the tensor cores without a shuffle. 32 weights of a pair of tiles
// (32 rows) are two runs of 256 bytes: [step][row][4]. Lane 4 g + t reads 16 of them, the eight weights of step t of
// the rows 4 g ... 4 g + 3, one row per word; low and high nibbles are registers of mma_s8 without further changes: four
// codes of one row, at the even and the odd k of the step. The order of k in the product's 32 columns is arbitrary if it is
// the same in both matrices, so the activations are stored in the matching order. A chunk is 128 of k: q[chunk][half][row][t]
// has the 16 bytes of step t of two slabs of 32 k, even, odd, even, odd. Each of its groups also has the step size a and
// minus the sum of q, by which the zero points are multiplied.
//
// Few rows (M <= 16) are limited by reading the weight: 14336 x 4096 are 33 MB with scales, 7.7 us at 4.3 TB/s. One block per
// multiprocessor has a run of pairs of tiles, whose chunks its 8 workers take in turns, copied three ahead (7 KB per warp,
// 56 KB per multiprocessor in flight; 4.3 TB/s in 132 parts over 1 us are 33). A worker turns its chunk's sums into floats
// in shared memory, the groups of an output side by side. M other warps, one per row of activations with a lane for each of
// the 32 rows of the weight, compute s = fma(sum, d a, s) along them, one chunk per worker later: for one row that is one
// warp, whose few instructions a group bound the speed. So K is split over 8 warps, and the order of the float sums is
// still that of the reference. Up to eight rows, of MOST_FUSED numbers, are quantized by each block separately while its first weights
// arrive.
//
// Many rows: a block has 64 rows of activations, quantized before, by 64 PAIRS of the weight, one chunk of k at a time,
// double-buffered; a warp computes a quarter. A sum starts at the bits of 1.5 * 2^23, so one subtraction converts it to
// float.
#include "activations.h"

namespace diffbit::cuda {
namespace {

constexpr int TILE = 16, PAIR = 2 * TILE;    // rows of the weight
constexpr int SLAB = 32;                     // of k, in one product
constexpr int SLAB_BYTES = SLAB * TILE / 2;  // of a tile
constexpr int CHUNK_SLABS = 4, CHUNK = CHUNK_SLABS * SLAB;
constexpr int GROUP = 8;  // rows of activations in a product
constexpr int WORKERS = 8;
constexpr int MOST_STAGES = 4, LEAST_STAGES = 2;
constexpr int CODES = 2 * CHUNK_SLABS * SLAB_BYTES;  // of a pair's chunk
constexpr float SMALLEST = 1e-30f;
constexpr int MANY_THREADS = 128, MANY_ROWS = 64;
constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: the bits of MAGIC + i are those of MAGIC, plus i, for |i| < 2^22
constexpr int32_t MAGIC_BITS = 0x4b400000;

/// A group of a row of activations.
struct Step {
  int32_t minus;  // the sum of q, negated; 8 times that for a weight without zeros
  float step;     // a
};

struct Product {
  const void* a;
  const uint8_t* codes;   // [tiles][groups][slabs][4][16][4]
  const uint8_t* scales;  // [tiles][groups][16] float16
  const uint8_t* zeros;   // [tiles][groups][16]; null: 8 everywhere
  const float* factor;
  void* y;
  // Activations: rows from m on are never written, and their products are never stored
  uint8_t* q;   // [chunks][2][columns][4][16]
  Step* steps;  // [chunks][columns][4 / slabs]
  int64_t n, tiles, columns;
  int m, k, groups, slabs, chunks;  // slabs of a group
  bool aligned;
};

/// Quantizes rows first ... first + count - 1 of a, with all threads of the block, as rows 0 ... of `columns` in q and
/// steps.
template <class T>
__device__ void quantize(const Product& p, int64_t first, int count, uint8_t* q, Step* steps, int64_t columns) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row_warps = blockDim.x / 32 / count;
  const int row = warp % count, part = warp / count;
  if (part >= row_warps) return;
  const T* from = static_cast<const T*>(p.a) + (first + row) * p.k;
  const int lanes = p.slabs * (SLAB / 8), eights = p.chunks * (CHUNK / 8);  // lanes of a group
  for (int begin = 32 * part; begin < eights; begin += 32 * row_warps) {
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
    // i = 16 chunk + 8 half + 4 slab + t
    *reinterpret_cast<uint2*>(q + (i / 8 * columns + row) * 64 + i % 4 * 16 + i / 4 % 2 * 8) = make_uint2(even, odd);
    if (i % lanes) continue;
    const int groups = CHUNK_SLABS / p.slabs;  // of a chunk
    steps[(i / 16 * columns + row) * groups + i / lanes % groups] = {
        (p.zeros ? -1 : -8) * sum, wild ? __int_as_float(0x7fc00000) : zero ? 0.0f : __fdiv_rn(largest, 127.0f)};
  }
}

/// Quantizes one row per block, into the workspace.
template <class T>
__global__ void __launch_bounds__(256, 4) quantize_rows(const Product p) {
  const int64_t row = blockIdx.x;
  quantize<T>(p, row, 1, p.q + row * 64, p.steps + row * (CHUNK_SLABS / p.slabs), p.columns);
}

__device__ __forceinline__ uint32_t low(uint32_t word) { return word & 0x0f0f0f0fu; }
__device__ __forceinline__ uint32_t high(uint32_t word) { return word >> 4 & 0x0f0f0f0fu; }

/// Returns byte i of eight, as a number.
__device__ __forceinline__ int byte(uint2 eight, int i) { return (i < 4 ? eight.x : eight.y) >> 8 * (i % 4) & 0xff; }

/// What the groups of a chunk have, read and written at once.
template <class T, int SIZE>
struct alignas(SIZE * sizeof(T)) Vector {
  T x[SIZE];
};

/// The shared memory of a block for few rows: the workers' rings [stages][WORKERS] of codes, scales and zeros; then, twice,
/// [WORKERS][m][32][groups of a chunk] sums and [WORKERS][32][groups] scales; then the activations.
struct Shared {
  int stages, slot;
  int sums, scales, q, steps;  // where they start
  size_t size;

  Shared(int m, const Product& p, bool fused, int stages_) : stages(stages_) {
    const int groups = CHUNK_SLABS / p.slabs, of_weight = 3 * PAIR * groups, rows = fused ? m : 0;
    slot = CODES + of_weight;
    sums = stages * WORKERS * slot;
    scales = sums + 2 * WORKERS * groups * m * PAIR * static_cast<int>(sizeof(float));
    q = scales + 2 * WORKERS * groups * PAIR * 2;
    const size_t row_chunks = static_cast<size_t>(p.chunks) * rows;
    steps = static_cast<int>(std::min<size_t>(q + row_chunks * CHUNK, INT32_MAX));
    size = q + row_chunks * (CHUNK + groups * sizeof(Step));
  }
};

/// The pairs of tiles of a block: `pairs`, and one more in the first `rest` blocks.
struct Share {
  int64_t pairs, rest;
};

/// Computes m <= 8 GROUPS rows. FUSED: the kernel quantizes them itself (one group), else they are in the workspace. It has
/// WORKERS warps and one for each row, at most 8 of these.
template <class T, int SLABS, int GROUPS, bool FUSED>
__global__ void __launch_bounds__(32 * (WORKERS + GROUP), 1)
    few_rows(const Product p, const Shared at, const Share share) {
  static_assert(!FUSED || GROUPS == 1);
  constexpr int PARTS = CHUNK_SLABS / SLABS;  // groups of a chunk
  constexpr int SCALES = 2 * PAIR * PARTS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int64_t block = blockIdx.x, first_pair = block * share.pairs + min(block, share.rest);
  const int units = static_cast<int>(share.pairs + (block < share.rest)) * p.chunks;
  const bool worker = warp < WORKERS;
  const int m = p.m;

  unsigned char* shared = shared_memory();
  unsigned char* ring = shared + warp * at.slot;  // [stage][warp]
  Vector<float, PARTS>* sums = reinterpret_cast<Vector<float, PARTS>*>(shared + at.sums);
  Vector<__half, PARTS>* scales_of = reinterpret_cast<Vector<__half, PARTS>*>(shared + at.scales);
  // Of a column's row, so that neither what a worker stores nor what a row's warp reads meets in one bank
  const auto place = [](int row, int column) { return row ^ column / 2 % 4; };

  // What a worker copies next: a chunk of a pair, WORKERS chunks apart. Beyond the last tile it repeats that one, and the
  // result is not stored
  int copied = worker ? warp : units, copied_chunk = copied % p.chunks;
  int64_t copied_pair = first_pair + copied / p.chunks;
  const uint8_t *codes = nullptr, *scales = nullptr, *zeros = nullptr;
  const auto enter = [&] {
    const auto tile = [&](int half) { return min(2 * copied_pair + half, p.tiles - 1) * p.groups; };
    codes = p.codes + tile(g / 4) * (SLABS * SLAB_BYTES) + t * (4 * TILE) + g % 4 * 16;
    // Of a chunk and tile 2 PARTS pieces, and PARTS
    scales = p.scales + tile(lane / (2 * PARTS) % 2) * (2 * TILE) + lane % (2 * PARTS) * 16;
    if (p.zeros) zeros = p.zeros + tile(lane / PARTS % 2) * TILE + lane % PARTS * 16;
  };
  const auto copy = [&](int stage) {
    if (copied < units) {
      unsigned char* to = ring + stage * (WORKERS * at.slot) + 16 * lane;
      const uint8_t* from = codes + static_cast<int64_t>(copied_chunk) * (CHUNK_SLABS * SLAB_BYTES);
      const int groups = p.groups - copied_chunk * PARTS;  // the last chunk may lack some
#pragma unroll
      for (int i = 0; i < CHUNK_SLABS; ++i) {
        const bool valid = i / SLABS < groups;
        copy_async16(to + i * (2 * SLAB_BYTES), from + (valid ? i * SLAB_BYTES : 0), valid);
      }
      if (lane < 4 * PARTS) {
        const bool valid = lane % (2 * PARTS) / 2 < groups;
        copy_async16(to + CODES, valid ? scales + static_cast<int64_t>(copied_chunk) * (PARTS * 2 * TILE) : p.scales,
                     valid);
      }
      if (p.zeros && lane < 2 * PARTS) {
        const bool valid = lane % PARTS < groups;
        copy_async16(to + CODES + SCALES, valid ? zeros + static_cast<int64_t>(copied_chunk) * (PARTS * TILE) : p.zeros,
                     valid);
      }
      copied += WORKERS;
      copied_chunk += WORKERS;
      if (copied_chunk >= p.chunks) {
        do {
          copied_chunk -= p.chunks;
          ++copied_pair;
        } while (copied_chunk >= p.chunks);
        enter();
      }
    }
    copy_async_commit();
  };
  enter();
  for (int stage = 0; stage < at.stages - 1; ++stage) copy(stage);

  const uint8_t* q = p.q;
  const Step* steps = p.steps;
  const int64_t columns = FUSED ? m : p.columns;
  if constexpr (FUSED) {
    quantize<T>(p, 0, m, shared + at.q, reinterpret_cast<Step*>(shared + at.steps), m);
    q = shared + at.q;
    steps = reinterpret_cast<const Step*>(shared + at.steps);
    __syncthreads();
  }
  q += (GROUPS == 1 ? min(g, m - 1) : g) * 64 + 16 * t;  // columns beyond m: the last one again, or arbitrary values

  int stage = 0, chunk = warp % p.chunks;  // a worker's
  int64_t pair = first_pair;               // the others'
  int done = 0;
  float totals[GROUPS] = {};
  for (int begin = 0, turn = 0; begin < units; begin += WORKERS, turn ^= 1) {
    if (worker && begin + warp < units) {
      // All but the latest groups have arrived
      if (at.stages == 4) copy_async_wait<2>();
      else if (at.stages == 3) copy_async_wait<1>();
      else copy_async_wait<0>();
      __syncwarp();
      const unsigned char* slot = ring + stage * (WORKERS * at.slot);
      uint4 words[CHUNK_SLABS], b[2][GROUPS];
#pragma unroll
      for (int i = 0; i < CHUNK_SLABS; ++i) words[i] = reinterpret_cast<const uint4*>(slot + i * (2 * SLAB_BYTES))[lane];
      const uint8_t* of_chunk = q + chunk * columns * CHUNK;
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
        b[0][i] = *reinterpret_cast<const uint4*>(of_chunk + GROUP * i * 64);
        b[1][i] = *reinterpret_cast<const uint4*>(of_chunk + columns * 64 + GROUP * i * 64);
      }
      Vector<__half, PARTS> scale;
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
        scale.x[part] =
            reinterpret_cast<const __half*>(slot + CODES)[(lane / TILE * PARTS + part) * TILE + lane % TILE];
      scales_of[(turn * WORKERS + warp) * PAIR + lane] = scale;

      Vector<float, PARTS> results[GROUPS][2][4];  // of columns 8 j + 2 t + r, rows 4 g ...
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        uint32_t zero = 0x01010101;
        if (p.zeros)
          zero = *reinterpret_cast<const uint32_t*>(slot + CODES + SCALES + (g / 4 * PARTS + part) * TILE + g % 4 * 4);
        int32_t c[GROUPS][2][4];
#pragma unroll
        for (int j = 0; j < GROUPS; ++j)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int column = min(8 * j + 2 * t + r, m - 1);
            const int minus = steps[(chunk * columns + column) * PARTS + part].minus;
#pragma unroll
            for (int i = 0; i < 4; ++i)
              c[j][i / 2][i % 2 * 2 + r] = MAGIC_BITS + (p.zeros ? minus * static_cast<int>(zero >> 8 * i & 0xff) : minus);
          }
#pragma unroll
        for (int i = part * SLABS; i < (part + 1) * SLABS; ++i) {
          const uint4 w = words[i];
          const uint32_t upper[4] = {low(w.x), low(w.y), high(w.x), high(w.y)};
          const uint32_t lower[4] = {low(w.z), low(w.w), high(w.z), high(w.w)};
#pragma unroll
          for (int j = 0; j < GROUPS; ++j) {
            const uint4 both = b[i / 2][j];
            const uint32_t k[2] = {i % 2 ? both.z : both.x, i % 2 ? both.w : both.y};
            mma_s8(c[j][0], upper, k);
            mma_s8(c[j][1], lower, k);
          }
        }
#pragma unroll
        for (int j = 0; j < GROUPS; ++j)
#pragma unroll
          for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int i = 0; i < 4; ++i)
              results[j][r][i].x[part] = __fsub_rn(__int_as_float(c[j][i / 2][i % 2 * 2 + r]), MAGIC);
      }
      Vector<float, PARTS>* to = sums + (turn * WORKERS + warp) * m * PAIR;
#pragma unroll
      for (int j = 0; j < GROUPS; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if (r && m == 1) continue;
          const int column = 8 * j + 2 * t + r;
          if (column < m)
#pragma unroll
            for (int i = 0; i < 4; ++i) to[column * PAIR + place(4 * g + i, column)] = results[j][r][i];
        }
      copy(stage ? stage - 1 : at.stages - 1);  // into the slot of the previous turn
      stage = stage + 1 < at.stages ? stage + 1 : 0;
      chunk += WORKERS;
      while (chunk >= p.chunks) chunk -= p.chunks;
    }
    __syncthreads();
    if (worker) continue;

    // The operands of unit `unit`'s fma, which are independent of each other
    struct Ready {
      Vector<float, PARTS> sum[GROUPS], scale[GROUPS];
    };
    const auto load = [&](int unit, int ring_slot) {
      Ready ready;
      const Vector<__half, PARTS> scale = scales_of[(turn * WORKERS + unit) * PAIR + lane];
#pragma unroll
      for (int j = 0; j < GROUPS; ++j) {
        const int column = min(GROUP * j + warp - WORKERS, m - 1);
        const Step* step = steps + (ring_slot * columns + column) * PARTS;
        ready.sum[j] = sums[((turn * WORKERS + unit) * m + column) * PAIR + place(lane, column)];
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
          ready.scale[j].x[part] = __fmul_rn(__half2float(scale.x[part]), step[part].step);
      }
      return ready;
    };
    const int count = min(WORKERS, units - begin);
    Ready next = load(0, done);
    for (int unit = 0; unit < count; ++unit) {
      const Ready now = next;
      const int after = done + 1 < p.chunks ? done + 1 : 0;
      if (unit + 1 < count) next = load(unit + 1, after);
      const int groups = p.groups - done * PARTS;
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
        if (part < groups)
#pragma unroll
          for (int j = 0; j < GROUPS; ++j) totals[j] = __fmaf_rn(now.sum[j].x[part], now.scale[j].x[part], totals[j]);
      done = after;
      if (done) continue;
      const int64_t n = pair * PAIR + lane;
      ++pair;
#pragma unroll
      for (int j = 0; j < GROUPS; ++j) {
        const int column = GROUP * j + warp - WORKERS;
        if (n < p.n && column < m)
          static_cast<T*>(p.y)[column * p.n + n] = from_float<T>(__fmul_rn(totals[j], __ldg(p.factor)));
        totals[j] = 0;
      }
    }
  }
}

/// Stores eight neighbours of a row of y. `by_eights`: they are at a multiple of 16 bytes.
template <class T>
__device__ __forceinline__ void store8(T* to, const float (&x)[8], int64_t room, bool by_eights) {
  if (!by_eights) {
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

/// Multiplies 64 rows of activations by 64 PAIRS rows of the weight per block, 2 x 2 warps.
template <class T, int SLABS, int PAIRS>
__global__ void __launch_bounds__(MANY_THREADS, PAIRS == 1 ? 3 : 2)
    many_rows(const Product p, int blocks_down, bool by_eights) {
  constexpr int MT = MANY_ROWS / 2 / 16, PARTS = CHUNK_SLABS / SLABS, TILES = 4 * PAIRS;
  constexpr int A = CHUNK * MANY_ROWS, B = 2 * PAIRS * CODES, SCALES = PARTS * TILES * TILE * 2, ZEROS = SCALES / 2;
  constexpr int STEPS = MANY_ROWS * PARTS * static_cast<int>(sizeof(Step)), STAGE = A + B + SCALES + ZEROS + STEPS;
  static_assert(SCALES / 16 <= 64 && ZEROS / 16 <= 64 && STEPS / 16 <= MANY_THREADS);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int down = warp % 2, across = warp / 2;
  const int64_t first = static_cast<int64_t>(blockIdx.x % blocks_down) * MANY_ROWS;
  const int64_t first_tile = static_cast<int64_t>(blockIdx.x / blocks_down) * TILES;
  unsigned char* shared = shared_memory();

  const auto copy = [&](int chunk) {
    unsigned char* to = shared + chunk % 2 * STAGE;
    if (chunk < p.chunks) {
      const int group = chunk * PARTS, groups = min(PARTS, p.groups - group), slabs = groups * SLABS;
#pragma unroll
      for (int i = 0; i < A / (16 * MANY_THREADS); ++i) {
        const int64_t half = 2 * chunk + i / 2;
        copy_async16(to + (i * MANY_THREADS + thread) * 16,
                     p.q + (half * p.columns + first) * 64 + (i % 2 * MANY_THREADS + thread) * 16);
      }
#pragma unroll
      for (int i = 0; i < 2 * PAIRS; ++i) {  // one slab per warp, one pair after the other, lane by lane as they are read
        const int64_t tile = min(first_tile + 2 * i + g / 4, p.tiles - 1);
        const int slab = warp < slabs ? warp : 0;
        copy_async16(to + A + i * CODES + warp * (2 * SLAB_BYTES) + 16 * lane,
                     p.codes + ((tile * p.groups + group) * SLABS + slab) * SLAB_BYTES + t * (4 * TILE) + g % 4 * 16,
                     warp < slabs);
      }
      const auto group_of = [&](int tile, int i) {
        return min(first_tile + tile, p.tiles - 1) * p.groups + group + (i < groups ? i : 0);
      };
      if (thread < SCALES / 16) {
        const int i = thread / (2 * TILES);
        copy_async16(to + A + B + 16 * thread,
                     p.scales + group_of(thread / 2 % TILES, i) * (2 * TILE) + thread % 2 * 16, i < groups);
      } else if (p.zeros && thread >= 64 && thread < 64 + ZEROS / 16) {
        const int i = (thread - 64) / TILES;
        copy_async16(to + A + B + SCALES + 16 * (thread - 64), p.zeros + group_of((thread - 64) % TILES, i) * TILE,
                     i < groups);
      }
      if (thread < STEPS / 16)
        copy_async16(to + A + B + SCALES + ZEROS + 16 * thread,
                     reinterpret_cast<const uint8_t*>(p.steps + (chunk * p.columns + first) * PARTS) + 16 * thread);
    }
    copy_async_commit();
  };

  float sums[MT][2][PAIRS][8] = {};  // of row g + 8 half, at the pair's columns 8 t ...
  copy(0);
  copy(1);
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    copy_async_wait<1>();
    __syncthreads();
    const unsigned char* base = shared + chunk % 2 * STAGE;
    const unsigned char* a = base + (down * (16 * MT) + g) * 64 + 16 * t;
    const unsigned char* b = base + A + across * PAIRS * CODES + 16 * lane;
    const unsigned char* scales = base + A + B;
    const unsigned char* zeros = scales + SCALES;
    const Step* steps = reinterpret_cast<const Step*>(zeros + ZEROS);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      if (chunk * PARTS + part >= p.groups) break;
      Step step[2 * MT];
#pragma unroll
      for (int i = 0; i < 2 * MT; ++i) step[i] = steps[((down * MT * 2 + i) * 8 + g) * PARTS + part];
#pragma unroll
      for (int pair = 0; pair < PAIRS; ++pair) {
        const int tile = part * TILES + 2 * (across * PAIRS + pair) + t / 2, eight = t % 2 * 8;
        uint2 zero = make_uint2(0x01010101, 0x01010101);
        if (p.zeros) zero = *reinterpret_cast<const uint2*>(zeros + tile * TILE + eight);
        int32_t c[MT][4][4];
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
          for (int u = 0; u < 4; ++u)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
              // Unsigned: rows from m on have arbitrary values
              const uint32_t minus = static_cast<uint32_t>(step[2 * i + r / 2].minus);
              const uint32_t z = static_cast<uint32_t>(byte(zero, u + r % 2 * 4));
              c[i][u][r] = static_cast<int32_t>(MAGIC_BITS + (p.zeros ? minus * z : minus));
            }
#pragma unroll
        for (int k = part * SLABS; k < (part + 1) * SLABS; ++k) {
          const uint4 words = *reinterpret_cast<const uint4*>(b + pair * CODES + k * (2 * SLAB_BYTES));
          const uint32_t word[4] = {words.x, words.y, words.z, words.w};
          uint2 rows[2 * MT];
#pragma unroll
          for (int i = 0; i < 2 * MT; ++i)
            rows[i] = *reinterpret_cast<const uint2*>(a + (k / 2 * MANY_ROWS + i * 8) * 64 + k % 2 * 8);
#pragma unroll
          for (int u = 0; u < 4; ++u)
#pragma unroll
            for (int i = 0; i < MT; ++i)
              mma_s8(c[i][u], {rows[2 * i].x, rows[2 * i + 1].x, rows[2 * i].y, rows[2 * i + 1].y},
                     {low(word[u]), high(word[u])});
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
                            __fmul_rn(scale[r % 2 * 4 + u], step[2 * i + r / 2].step), s);
            }
      }
    }
    __syncthreads();
    copy(chunk + 2);
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
      store8(static_cast<T*>(p.y) + row * p.n + n, x, p.n - n, by_eights);
    }
  }
}

/// Launch parameters for few rows: `rows` of them at once, with `stages` stages.
struct Few {
  int rows, stages;
  bool fused;
};

Few plan_few(const Product& p) {
  const auto fits = [&](int rows, bool fused, int stages) {
    return Shared(rows, p, fused, stages).size <= most_shared();
  };
  const bool fused = p.m <= GROUP && static_cast<int64_t>(p.m) * p.k <= MOST_FUSED;
  for (int rows = p.m;; rows = (rows + 1) / 2)
    for (int stages = MOST_STAGES; stages >= LEAST_STAGES; --stages) {
      if (fused && rows == p.m && fits(rows, true, stages)) return {rows, stages, true};
      if (fits(rows, false, stages) || (rows == 1 && stages == LEAST_STAGES)) return {rows, stages, false};
    }
}

template <class T, int SLABS>
const char* run_few(Product p, const Few& plan, cudaStream_t stream) {
  const int64_t pairs = (p.tiles + 1) / 2, blocks = std::max<int64_t>(1, std::min<int64_t>(pairs, multiprocessors()));
  const Share share = {pairs / blocks, pairs % blocks};
  const int m = p.m;
  for (int first = 0; first < m; first += plan.rows) {
    p.m = std::min(plan.rows, m - first);
    const auto kernel = plan.fused       ? few_rows<T, SLABS, 1, true>
                        : p.m <= GROUP ? few_rows<T, SLABS, 1, false>
                                       : few_rows<T, SLABS, 2, false>;
    const Shared shared(p.m, p, plan.fused, plan.stages);
    const unsigned threads = static_cast<unsigned>(32 * (WORKERS + std::min(p.m, GROUP)));
    if (const char* wrong = launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(threads), shared.size, stream, p,
                                   shared, share))
      return wrong;
    p.y = static_cast<T*>(p.y) + plan.rows * p.n;
    p.q += plan.rows * 64;
    p.steps += plan.rows * (CHUNK_SLABS / SLABS);
  }
  return nullptr;
}

template <class T, int SLABS, int PAIRS>
const char* many(const Product& p, cudaStream_t stream) {
  const int64_t down = (p.m + MANY_ROWS - 1) / MANY_ROWS, blocks = down * ((p.tiles + 4 * PAIRS - 1) / (4 * PAIRS));
  const bool by_eights = p.n % 8 == 0 && reinterpret_cast<uintptr_t>(p.y) % 16 == 0;
  const int stage = CHUNK * MANY_ROWS + 2 * PAIRS * CODES +
                    CHUNK_SLABS / SLABS * (4 * PAIRS * TILE * 3 + MANY_ROWS * static_cast<int>(sizeof(Step)));
  return launch(many_rows<T, SLABS, PAIRS>, dim3(static_cast<unsigned>(blocks)), dim3(MANY_THREADS),
                static_cast<size_t>(2 * stage), stream, p, static_cast<int>(down), by_eights);
}

template <class T, int SLABS>
const char* multiply(Product p, cudaStream_t stream) {
  p.aligned = aligned_rows<T>(p.a, p.k);
  const bool is_few = p.m <= 2 * GROUP;
  const Few plan = is_few ? plan_few(p) : Few{};
  if (!plan.fused)
    if (const char* wrong = launch(quantize_rows<T>, dim3(static_cast<unsigned>(p.m)), dim3(256), 0, stream, p))
      return wrong;
  if (is_few) return run_few<T, SLABS>(p, plan, stream);
  // Wide tiles read the activations less often; narrow ones give every multiprocessor some work
  const int64_t wide = (p.m + MANY_ROWS - 1) / MANY_ROWS * ((p.tiles + 7) / 8);
  return wide >= 2 * multiprocessors() ? many<T, SLABS, 2>(p, stream) : many<T, SLABS, 1>(p, stream);
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
  p.columns = op.m <= 2 * GROUP ? 2 * GROUP : (op.m + MANY_ROWS - 1) / MANY_ROWS * MANY_ROWS;
  p.k = static_cast<int>(op.k);
  p.groups = static_cast<int>((op.k + op.group_size - 1) / op.group_size);
  p.slabs = static_cast<int>(op.group_size / SLAB);
  p.chunks = static_cast<int>((op.k + CHUNK - 1) / CHUNK);
  p.q = static_cast<uint8_t*>(workspace);
  p.steps = reinterpret_cast<Step*>(p.q + p.columns * p.chunks * CHUNK);
  return p;
}

}  // namespace
}  // namespace diffbit::cuda

size_t diffbit_cuda_int4_matmul_workspace(const DiffbitInt4MatMul* op) {
  using namespace diffbit::cuda;
  const Product p = product(*op, nullptr);
  if (op->m <= 2 * GROUP && plan_few(p).fused) return 0;
  return static_cast<size_t>(p.columns * p.chunks) * (CHUNK + CHUNK_SLABS / p.slabs * sizeof(Step));
}

const char* diffbit_cuda_int4_matmul(const DiffbitInt4MatMul* op, void* workspace, void* stream_) {
  using namespace diffbit::cuda;
  if (!op->m) return nullptr;
  if (op->m > INT32_MAX) return sentence("Int4MatMul: %lld rows are too many", static_cast<long long>(op->m));
  for (const void* tensor : {op->codes, op->scales, op->zeros})
    if (reinterpret_cast<uintptr_t>(tensor) % 16)
      return sentence("Int4MatMul: the weight's tensors are not aligned to 16 bytes");
  const Product p = product(*op, workspace);
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_);
  return with_type(op->type, "Int4MatMul", [&](auto number) {
    using T = decltype(number);
    const auto run = p.slabs == 1 ? multiply<T, 1> : p.slabs == 2 ? multiply<T, 2> : multiply<T, 4>;
    return run(p, stream);
  });
}
