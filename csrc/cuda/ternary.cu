// TernaryMatMul (ops/ternary_matmul.py). All sums are integers, so the bits of y do not depend on how they are divided.
//
// The weight is read in the file's layout and used by the tensor cores without a shuffle. mma_s8 multiplies 16 rows by 32
// columns; the order of k in its columns is arbitrary if it is the same in both matrices. Lane 4 g + t reads the 16 bytes t
// of a run of 64 of row g: 64 weights in four words of four fields. A masked field of a word is a register of the product
// without further changes: four codes of one row, at k = 128 (t / 2) + 32 field + 16 (t % 2) + 4 word + 0..3. The
// activations, whose order we choose, are stored in the matching order: 16-byte pieces q[step][field][row][t] for steps of
// 256 k. Codes are one more than weights, so the sum of a row's q is subtracted at its end.
//
// Few rows (M <= 16) are limited by reading the weight. Per KiB of it, 4096 weights, a warp issues 2 copies, 2 + 4 loads
// from shared memory, 40 masks and shifts (one shift of a word serves two fields; those masked with 0x0c count fourfold in
// separate sums) and 8 mma_s8; with pointer arithmetic about 100 instructions in sm_90's code. dp4a would take 32 for the
// products alone, and that for one row of activations, while the mma serves eight. On an H200 this is 1.6 us of issuing for
// a weight of 14336 x 4096, whose 14.7 MB take 3.4 us at 4.3 TB/s. There is one block of 16 warps per multiprocessor: each
// block has a run of tiles of 16 weight rows, contiguous in memory, and cuts it into 16 equal runs of KiB (tile, step), one
// per warp, whichever tiles they touch; sums are combined in shared memory by atomic additions at the end of a tile or run.
// So all warps have the same work, there is one barrier, and 64 KiB per multiprocessor are in flight from the first
// instruction on (4.3 TB/s in 132 parts over 1 us are 33 KiB). Each lane copies what it will read itself, so the ring needs
// no barrier. Quantizing 4096 numbers costs a block 0.3 us while its first weights arrive; a separate kernel would cost a
// launch of 2 us or more, so every block quantizes up to eight rows itself.
//
// Many rows: a block has 32 MT rows of activations, quantized before, by 16 NT of the weight, 256 of k at a time,
// double-buffered; a warp computes a quarter of it. A word of the weight is unpacked in registers, 7 instructions for four
// fields, for MT products: at MT = 4 less than one instruction per product.
#include "activations.h"

namespace diffbit::cuda {
namespace {

constexpr int STEP = 256;  // of k: 64 bytes of a row of the weight
constexpr int PIECE = 16;  // bytes
constexpr int TILE = 16;   // rows of the weight in a product of few rows
constexpr int GROUP = 8;   // rows of activations that are stored together
constexpr int GROUP_STEP = GROUP * STEP;  // bytes of their q in a step
constexpr int WARPS = 16, THREADS = 32 * WARPS;  // of few rows
constexpr int STAGES = 5;                        // of their ring, 1 KiB a warp each
constexpr int RING = STAGES * WARPS * 1024;
constexpr int MOST_TOTALS = 64 << 10;  // bytes of sums in a block
constexpr int FLUSH = 4096;            // steps; 4 * 3 * 127 * FLUSH * STEP / 2 is below 2^31
constexpr int MANY_THREADS = 128;

struct Product {
  const void* a;
  const uint8_t* packed;
  const float* scale;
  void* y;
  // Activations: rows from m on are never written, and their products are never stored
  uint8_t* q;        // [steps][groups][4][8][4] pieces
  float* row_steps;  // [m]
  int32_t* sums;     // [m]
  int64_t m, n, groups, row_bytes;
  int k, steps, bits;
  bool aligned;
  int scale_step;  // 1: a scale for each row of the weight; 0: one for all
};

/// What a block computes about at most GROUP rows while it quantizes them.
struct Rows {
  int largest[GROUP];  // bits of max |x|
  int sum[GROUP];
  float step[GROUP];
  double part[GROUP][WARPS];
};

/// Quantizes rows first ... first + count - 1 of a, with all threads of the block. Row i's pieces [step][field][t] go to q +
/// 64 i, `step_bytes` and `field_bytes` apart; after the next barrier `rows` has the step sizes and sums.
template <class T>
__device__ void quantize(const Product& p, int64_t first, int count, uint8_t* q, int64_t step_bytes, int field_bytes,
                         Rows& rows) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int row_warps = warps / count;  // warps per row
  const int row = warp % count, part = warp / count, apart = 32 * row_warps, eights = p.steps * (STEP / 8);
  const int begin = part < row_warps ? 32 * part + lane : eights;
  const T* from = static_cast<const T*>(p.a) + (first + row) * p.k;
  if (threadIdx.x < GROUP) rows.largest[threadIdx.x] = rows.sum[threadIdx.x] = 0;
  __syncthreads();

  int bits = 0;
  for (int i = begin; i < eights; i += apart) {
    float x[8];
    load8(x, from, 8 * i, p.k, p.aligned);
    bits = larger(bits, x);
  }
  bits = __reduce_max_sync(WARP, bits);
  if (lane == 0) atomicMax(&rows.largest[row], bits);
  __syncthreads();
  bits = rows.largest[row];
  const bool wild = bits >= INFINITE;
  const float largest = __int_as_float(bits);
  float step = wild ? __int_as_float(0x7fc00000) : __fdiv_rn(fmaxf(largest, 1e-5f), 127.0f);
  if (p.bits == 4) {
    const double grid = __dmul_rn(largest, 2.0 * p.k);
    double sum = 0;
    for (int i = begin; i < eights; i += apart) {
      float x[8];
      load8(x, from, 8 * i, p.k, p.aligned);
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += __dsub_rn(__dadd_rn(fabsf(x[j]), grid), grid);
    }
#pragma unroll
    for (int with = 16; with; with /= 2) sum += __shfl_xor_sync(WARP, sum, with);
    if (lane == 0 && part < row_warps) rows.part[row][part] = sum;
    __syncthreads();
    double total = 0;
    for (int i = 0; i < row_warps; ++i) total += rows.part[row][i];
    const float mean = __double2float_rn(__ddiv_rn(total, p.k));
    if (!wild) step = __fdiv_rn(fmaxf(mean, 1e-5f), 2.6457513f);
  }

  int sum = 0;
  for (int i = begin; i < eights; i += apart) {
    float x[8];
    load8(x, from, 8 * i, p.k, p.aligned);
    int codes[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      codes[j] = wild ? 0 : __float2int_rn(__fdiv_rn(x[j], step));
      if (p.bits == 4) codes[j] = min(max(codes[j], -8), 7);
    }
    const uint32_t low = bytes(codes[0], codes[1], codes[2], codes[3]);
    const uint32_t high = bytes(codes[4], codes[5], codes[6], codes[7]);
    sum = __dp4a(static_cast<int>(low), 0x01010101, __dp4a(static_cast<int>(high), 0x01010101, sum));
    // i = 32 step + 16 block + 4 field + 2 half + eight; t = 2 block + half
    const int t = i / 16 % 2 * 2 + i / 2 % 2;
    uint8_t* to = q + i / 32 * step_bytes + i / 4 % 4 * field_bytes + (row * 4 + t) * PIECE + i % 2 * 8;
    *reinterpret_cast<uint2*>(to) = make_uint2(low, high);
  }
  sum = __reduce_add_sync(WARP, sum);
  if (lane == 0 && part < row_warps) atomicAdd(&rows.sum[row], sum);
  if (lane == 0 && part == 0) rows.step[row] = step;
}

/// Quantizes one row per block, into the workspace.
template <class T>
__global__ void __launch_bounds__(256, 4) quantize_rows(const Product p) {
  Rows& rows = *shared_memory<Rows>();
  const int64_t row = blockIdx.x;
  quantize<T>(p, row, 1, p.q + row / GROUP * GROUP_STEP + row % GROUP * 4 * PIECE, p.groups * GROUP_STEP,
              GROUP_STEP / 4, rows);
  __syncthreads();
  if (threadIdx.x) return;
  p.row_steps[row] = rows.step[0];
  p.sums[row] = rows.sum[0];
}

/// Returns y for a sum of codes times q.
__device__ __forceinline__ float scaled(uint32_t total, int32_t sum, float step, float scale) {
  return __fmul_rn(__fmul_rn(__int2float_rn(static_cast<int32_t>(total - static_cast<uint32_t>(sum))), step), scale);
}

/// Extracts the codes of field F of four words; those of fields 1 and 3 are multiplied by 4.
template <int F>
__device__ __forceinline__ void field(uint32_t (&codes)[4], const uint4& words) {
  constexpr uint32_t mask = F % 2 ? 0x0c0c0c0cu : 0x03030303u;
  constexpr int shift = F / 2 * 4;
  codes[0] = words.x >> shift & mask, codes[1] = words.y >> shift & mask;
  codes[2] = words.z >> shift & mask, codes[3] = words.w >> shift & mask;
}

/// Adds to sums rows g (`upper`) and g + 8 (`lower`) of a tile, field F of them, times the activations' pieces.
template <int F, int GROUPS>
__device__ __forceinline__ void advance(int32_t (&sums)[GROUPS][4], const uint4& upper, const uint4& lower,
                                        const uint4 (&q)[GROUPS]) {
  uint32_t u[4], l[4];
  field<F>(u, upper);
  field<F>(l, lower);
#pragma unroll
  for (int i = 0; i < GROUPS; ++i) {
    mma_s8(sums[i], {u[0], l[0], u[1], l[1]}, {q[i].x, q[i].y});
    mma_s8(sums[i], {u[2], l[2], u[3], l[3]}, {q[i].z, q[i].w});
  }
}

/// The tiles of a block: `tiles`, and one more in the first `rest` blocks.
struct Share {
  int64_t tiles, rest;
};

/// Computes M <= 8 GROUPS rows. FUSED: the kernel quantizes them itself (one group), else they are in the workspace.
template <class T, int GROUPS, bool FUSED>
__global__ void __launch_bounds__(THREADS, 1) few_rows(const Product p, const Share share) {
  static_assert(!FUSED || GROUPS == 1);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int m = static_cast<int>(p.m);
  const int64_t block = blockIdx.x, first_tile = block * share.tiles + min(block, share.rest);
  const int tiles = static_cast<int>(share.tiles + (block < share.rest));

  unsigned char* shared = shared_memory();
  uint4* ring = reinterpret_cast<uint4*>(shared) + warp * 64 + lane;  // [stage][warp][half][lane]
  uint32_t* totals = reinterpret_cast<uint32_t*>(shared + RING);       // [tile][m][row]
  Rows& rows = *reinterpret_cast<Rows*>(totals + tiles * m * TILE);
  uint8_t* q_shared = reinterpret_cast<uint8_t*>(&rows + 1);

  const int64_t units = static_cast<int64_t>(tiles) * p.steps;
  const int begin = static_cast<int>(units * warp / WARPS);
  const int count = static_cast<int>(units * (warp + 1) / WARPS) - begin;
  int tile = begin / p.steps, step = begin % p.steps;

  // What is copied next
  int copied = 0, copied_tile = tile, copied_step = step;
  const int pieces = static_cast<int>(p.row_bytes / PIECE);
  const uint8_t *upper_row = nullptr, *lower_row = nullptr;
  const auto enter = [&] {  // rows beyond N: the last one again, whose result is not stored
    const int64_t row = (first_tile + copied_tile) * TILE + g;
    upper_row = p.packed + min(row, p.n - 1) * p.row_bytes;
    lower_row = p.packed + min(row + 8, p.n - 1) * p.row_bytes;
  };
  const auto copy = [&](int stage) {
    if (copied < count) {
      const int piece = 4 * copied_step + t;
      const bool valid = piece < pieces;  // the last step of a row may be a half
      const int64_t at = valid ? piece * PIECE : 0;
      copy_async16(ring + stage * (WARPS * 64), upper_row + at, valid);
      copy_async16(ring + stage * (WARPS * 64) + 32, lower_row + at, valid);
      ++copied;
      if (++copied_step == p.steps) {
        copied_step = 0;
        ++copied_tile;
        enter();
      }
    }
    copy_async_commit();
  };
  enter();
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) copy(stage);

  for (int i = threadIdx.x; i < tiles * m * TILE; i += THREADS) totals[i] = 0;
  if constexpr (FUSED) quantize<T>(p, 0, m, q_shared, m * STEP, m * STEP / 4, rows);
  __syncthreads();

  // Columns beyond M: the last one again
  const uint8_t* q = FUSED ? q_shared + (min(g, m - 1) * 4 + t) * PIECE : p.q + lane * PIECE;
  const int64_t q_step = FUSED ? m * STEP : p.groups * GROUP_STEP;
  const int q_field = FUSED ? m * STEP / 4 : GROUP_STEP / 4;
  int32_t ones[GROUPS][4] = {}, fours[GROUPS][4] = {};
  int stage = 0;
  for (int i = 0; i < count; ++i) {
    copy_async_wait<STAGES - 2>();
    const uint4 upper = ring[stage * (WARPS * 64)], lower = ring[stage * (WARPS * 64) + 32];
    uint4 pieces_q[4][GROUPS];
#pragma unroll
    for (int f = 0; f < 4; ++f)
#pragma unroll
      for (int j = 0; j < GROUPS; ++j)
        pieces_q[f][j] = *reinterpret_cast<const uint4*>(q + step * q_step + f * q_field + j * GROUP_STEP);
    advance<0>(ones, upper, lower, pieces_q[0]);
    advance<1>(fours, upper, lower, pieces_q[1]);
    advance<2>(ones, upper, lower, pieces_q[2]);
    advance<3>(fours, upper, lower, pieces_q[3]);
    copy(stage ? stage - 1 : STAGES - 1);  // into the slot of the previous iteration
    stage = stage + 1 < STAGES ? stage + 1 : 0;

    ++step;
    if (step < p.steps && i + 1 < count && step % FLUSH) continue;
#pragma unroll
    for (int j = 0; j < GROUPS; ++j)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int column = 8 * j + 2 * t + r % 2, row = g + r / 2 * 8;
        if (column < m)
          atomicAdd(&totals[(tile * m + column) * TILE + row], static_cast<uint32_t>(ones[j][r] + (fours[j][r] >> 2)));
        ones[j][r] = fours[j][r] = 0;
      }
    if (step == p.steps) {
      step = 0;
      ++tile;
    }
  }
  __syncthreads();

  T* y = static_cast<T*>(p.y) + first_tile * TILE;
  const int64_t left = p.n - first_tile * TILE;
  for (int i = threadIdx.x; i < tiles * TILE && i < left; i += THREADS) {
    const float scale = __ldg(p.scale + (first_tile * TILE + i) * p.scale_step);
    for (int column = 0; column < m; ++column) {
      const int32_t sum = FUSED ? rows.sum[column] : p.sums[column];
      const float row_step = FUSED ? rows.step[column] : p.row_steps[column];
      y[column * p.n + i] =
          from_float<T>(scaled(totals[(i / TILE * m + column) * TILE + i % TILE], sum, row_step, scale));
    }
  }
}

/// Multiplies 32 MT rows of activations by 16 NT rows of the weight per block, 2 x 2 warps.
template <class T, int MT, int NT>
__global__ void __launch_bounds__(MANY_THREADS, MT == 4 ? 2 : 4)
    many_rows(const Product p, int blocks_down, bool pairs) {
  constexpr int A = 4 * MT * GROUP_STEP, B = 16 * NT * 4 * PIECE, ROUNDS = B / (MANY_THREADS * PIECE);
  static_assert(GROUP_STEP == MANY_THREADS * PIECE && ROUNDS * MANY_THREADS * PIECE == B);
  const int thread = threadIdx.x, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int down = thread / 32 % 2, across = thread / 64;
  const int64_t first = static_cast<int64_t>(blockIdx.x % blocks_down) * 32 * MT;
  const int64_t first_n = static_cast<int64_t>(blockIdx.x / blocks_down) * 16 * NT;
  unsigned char* shared = shared_memory();

  const int pieces = static_cast<int>(p.row_bytes / PIECE);
  const uint8_t* activations = p.q + first / GROUP * GROUP_STEP + thread * PIECE;
  uint32_t weight_rows[ROUNDS];  // in pieces
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i)
    weight_rows[i] = static_cast<uint32_t>(min(first_n + i * (MANY_THREADS / 4) + thread / 4, p.n - 1) * pieces);
  const auto copy = [&](int step) {
    unsigned char* to = shared + step % 2 * (A + B) + thread * PIECE;
    if (step < p.steps) {
      const uint8_t* from = activations + step * p.groups * GROUP_STEP;
#pragma unroll
      for (int i = 0; i < 4 * MT; ++i) copy_async16(to + i * GROUP_STEP, from + i * GROUP_STEP);
      const int piece = 4 * step + thread % 4;
      const bool valid = piece < pieces;
#pragma unroll
      for (int i = 0; i < ROUNDS; ++i)
        copy_async16(to + A + i * MANY_THREADS * PIECE,
                     p.packed + static_cast<int64_t>(weight_rows[i] + (valid ? piece : 0)) * PIECE, valid);
    }
    copy_async_commit();
  };

  int32_t sums[MT][NT][4] = {};
  copy(0);
  copy(1);
  for (int step = 0; step < p.steps; ++step) {
    copy_async_wait<1>();
    __syncthreads();
    const unsigned char* stage = shared + step % 2 * (A + B);
    const uint4* a = reinterpret_cast<const uint4*>(stage + down * 2 * MT * GROUP_STEP) + lane;
    const uint4* b = reinterpret_cast<const uint4*>(stage + A) + across * 8 * NT * 4 + lane;
    uint4 words[NT];
#pragma unroll
    for (int j = 0; j < NT; ++j) words[j] = b[j * 32];
#pragma unroll
    for (int f = 0; f < 4; ++f) {
      uint4 upper[MT], lower[MT];
#pragma unroll
      for (int i = 0; i < MT; ++i) {
        upper[i] = a[2 * i * (GROUP_STEP / PIECE) + f * 32];
        lower[i] = a[(2 * i + 1) * (GROUP_STEP / PIECE) + f * 32];
      }
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        const uint32_t codes[4] = {words[j].x >> 2 * f & 0x03030303u, words[j].y >> 2 * f & 0x03030303u,
                                   words[j].z >> 2 * f & 0x03030303u, words[j].w >> 2 * f & 0x03030303u};
#pragma unroll
        for (int i = 0; i < MT; ++i) {
          mma_s8(sums[i][j], {upper[i].x, lower[i].x, upper[i].y, lower[i].y}, {codes[0], codes[1]});
          mma_s8(sums[i][j], {upper[i].z, lower[i].z, upper[i].w, lower[i].w}, {codes[2], codes[3]});
        }
      }
    }
    __syncthreads();
    copy(step + 2);
  }

  float scales[NT][2];
#pragma unroll
  for (int j = 0; j < NT; ++j)
#pragma unroll
    for (int next = 0; next < 2; ++next)
      scales[j][next] = __ldg(p.scale + min(first_n + (across * NT + j) * 8 + 2 * t + next, p.n - 1) * p.scale_step);
#pragma unroll
  for (int i = 0; i < 2 * MT; ++i) {
    const int64_t row = first + (down * MT + i / 2) * 16 + i % 2 * 8 + g;
    if (row >= p.m) continue;
    const int32_t sum = p.sums[row];
    const float row_step = p.row_steps[row];
    T* y = static_cast<T*>(p.y) + row * p.n;
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const int64_t column = first_n + (across * NT + j) * 8 + 2 * t;
      if (column >= p.n) continue;
      const int32_t(&quad)[4] = sums[i / 2][j];
      store2(y + column, scaled(static_cast<uint32_t>(quad[i % 2 * 2]), sum, row_step, scales[j][0]),
             scaled(static_cast<uint32_t>(quad[i % 2 * 2 + 1]), sum, row_step, scales[j][1]), pairs, column + 1 < p.n);
    }
  }
}

/// Launch parameters for few rows.
struct Few {
  int64_t blocks;
  size_t shared;
  bool fused;
};

Few plan_few(const DiffbitTernaryMatMul& op) {
  const int64_t steps = (op.k + STEP - 1) / STEP, tiles = (op.n + TILE - 1) / TILE;
  const int64_t sums = op.m * TILE * static_cast<int64_t>(sizeof(int32_t));  // of a tile
  const int64_t room = static_cast<int64_t>(most_shared()) - RING;
  const int64_t q = static_cast<int64_t>(sizeof(Rows)) + op.m * steps * STEP;
  const int64_t blocks = std::max<int64_t>(1, std::min<int64_t>(tiles, multiprocessors()));
  Few plan = {blocks, 0, op.m <= GROUP && op.m * op.k <= MOST_FUSED && (tiles + blocks - 1) / blocks * sums + q <= room};
  if (!plan.fused)  // as many blocks as their sums need to fit
    plan.blocks = std::max(blocks, (tiles * sums + std::min<int64_t>(MOST_TOTALS, room) - sums - 1) /
                                      std::max<int64_t>(1, std::min<int64_t>(MOST_TOTALS, room) - sums));
  plan.shared = static_cast<size_t>(RING + (tiles + plan.blocks - 1) / plan.blocks * sums + (plan.fused ? q : 0));
  return plan;
}

/// Returns the groups of rows in the workspace: a block for many rows reads whole groups.
int64_t row_groups(int64_t m) { return m <= 2 * GROUP ? (m + GROUP - 1) / GROUP : (m + 127) / 128 * (128 / GROUP); }

template <class T>
const char* multiply(const DiffbitTernaryMatMul& op, Product& p, cudaStream_t stream) {
  p.aligned = aligned_rows<T>(op.a, op.k);
  const bool is_few = op.m <= 2 * GROUP;
  const Few plan = is_few ? plan_few(op) : Few{};
  const int64_t tiles = (op.n + TILE - 1) / TILE;
  const auto run_few = [&](auto kernel) {
    return launch(kernel, dim3(static_cast<unsigned>(plan.blocks)), dim3(THREADS), plan.shared, stream, p,
                  Share{tiles / plan.blocks, tiles % plan.blocks});
  };
  if (plan.fused) return run_few(few_rows<T, 1, true>);
  if (const char* wrong =
          launch(quantize_rows<T>, dim3(static_cast<unsigned>(op.m)), dim3(256), sizeof(Rows), stream, p))
    return wrong;
  if (is_few) return run_few(op.m <= GROUP ? few_rows<T, 1, false> : few_rows<T, 2, false>);

  const auto many = [&](auto kernel, int rows, int columns) {
    const int64_t down = (op.m + rows - 1) / rows, blocks = down * ((op.n + columns - 1) / columns);
    const bool pairs = op.n % 2 == 0 && reinterpret_cast<uintptr_t>(op.y) % 8 == 0;
    const size_t shared = static_cast<size_t>(2 * (rows * STEP + columns * STEP / 4));
    return launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(MANY_THREADS), shared, stream, p,
                  static_cast<int>(down), pairs);
  };
  // Large tiles do less work per product; small ones give every multiprocessor some
  if ((op.m + 127) / 128 * ((op.n + 127) / 128) >= 2 * multiprocessors()) return many(many_rows<T, 4, 8>, 128, 128);
  return many(many_rows<T, 2, 4>, 64, 64);
}

}  // namespace
}  // namespace diffbit::cuda

size_t diffbit_cuda_ternary_matmul_workspace(const DiffbitTernaryMatMul* op) {
  using namespace diffbit::cuda;
  if (op->m <= 2 * GROUP && plan_few(*op).fused) return 0;
  const int64_t steps = (op->k + STEP - 1) / STEP, groups = row_groups(op->m);
  return static_cast<size_t>(groups * steps * GROUP_STEP + op->m * 8);
}

const char* diffbit_cuda_ternary_matmul(const DiffbitTernaryMatMul* op, void* workspace, void* stream) {
  using namespace diffbit::cuda;
  if (!op->m) return nullptr;
  if (reinterpret_cast<uintptr_t>(op->packed) % PIECE)
    return sentence("TernaryMatMul: packed is not aligned to 16 bytes");
  const int64_t steps = (op->k + STEP - 1) / STEP, groups = row_groups(op->m);
  Product p = {};
  p.a = op->a;
  p.packed = static_cast<const uint8_t*>(op->packed);
  p.scale = static_cast<const float*>(op->scale);
  p.scale_step = op->scale_per_row ? 1 : 0;
  p.y = op->y;
  p.q = static_cast<uint8_t*>(workspace);
  p.row_steps = reinterpret_cast<float*>(p.q + groups * steps * GROUP_STEP);
  p.sums = reinterpret_cast<int32_t*>(p.row_steps + op->m);
  p.m = op->m;
  p.n = op->n;
  p.groups = groups;
  p.row_bytes = (op->k + 127) / 128 * 32;
  p.k = static_cast<int>(op->k);
  p.steps = static_cast<int>(steps);
  p.bits = static_cast<int>(op->activation_bits);
  return with_type(op->type, "TernaryMatMul",
                   [&](auto number) { return multiply<decltype(number)>(*op, p, static_cast<cudaStream_t>(stream)); });
}
