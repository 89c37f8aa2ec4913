// Differential attention over many new tokens, with tensor cores: both softmaxes of a head in one kernel (arXiv
// 2205.14135 and 2307.08691 for the streaming of keys; eq. 1-3 of 2410.05258 for the difference).
//
// A block owns ROWS queries of one head and streams the keys and values that they see through shared memory, 32 tokens
// per step. Its warps work in pairs. The warps of a pair own the same rows; warp b of a pair computes
//     S = Q_b K_b^T, the running maximum, P_b = exp(S - maximum)           for branch b, all 32 keys
//     O_0 += P_0 V_b,  O_1 += P_1 V_b                                      for both branches, half of the columns of V
// and the two exchange their P through shared memory. So a value is read from there once for both branches, the
// difference is computed in registers at the end, and d = 128 needs no more registers than d = 64. (The difference cannot
// be accumulated directly, because either branch's maximum may still grow.) With one branch there are no pairs, and each
// warp does all of this.
//
// The widest variants (version 1, value 2d wide), per warp and step; an MMA is 16 x 8 x 16:
//     d     rows a warp   registers: O   Q   S   P    MMA   read from shared memory       ROWS   from L2 a block
//     64    32                      128  32  32   -    96   4 KB of K, 4 of V, 4 of P     128    16 KB
//     128   16                      128  32  16   8    96   8 KB of K, 8 of V, 1 of P      64    32 KB
// Shared memory delivers 128 bytes per cycle; a multiprocessor takes 2 cycles for an MMA on sm_80, about 1.6 on sm_90. So
// on sm_90 the 8 warps need 1230 cycles for their products and 770 (d = 64) or 1090 (128) for their reads. With one warp
// per branch and all columns of V, reads would take 770 and 1540 cycles; with both branches in one warp, 1020 and 1540.
// At d = 128 the registers hold 64 rows per block: 96 operations per byte from L2; d = 64 has 192.
//
// A step's scores are computed one step ahead: S(i + 1) = Q K(i + 1) first, then O += P(i) V(i) with the softmax of
// S(i + 1) in between, so each warp has work for the tensor cores and for the other units at the same time. This also
// makes one barrier per step enough: after it, K(i + 1) and V(i) have arrived, P(i) is written, and the slots of K(i) and
// V(i - 1) may be filled.
//
// The reference level of P follows the maximum only if scores grow by more than 2^8 (P in float16 or bfloat16 is as
// precise at 256 as at 1, and sums are float32), so after the first steps O is hardly ever rescaled.
//
// A separate kernel determines once which keys padding hides, as one bit per key. A step with 32 ones that is below the
// diagonal is not masked; steps before the first key and after the last row's keys are not read. Blocks with the most keys
// start first.
//
// With gates, the rows of a head are its steps that are on, in order, and then the others, which are zeros (`sort_steps`). So
// blocks are full of rows that are computed, and only as many of them as there are.
//
// In a low-bit cache (attention_cache.cu unpacks it) a row sees a key quantized if the key's 32 tokens are far enough in the
// past. The rows of a block agree on all but a few steps of keys, which are read twice: the first pass is over quantized
// keys and ends with the last row's, the second begins with the first unquantized keys of the first row. In either pass a
// step hides its keys from the rows that see them in the other.
#include "attention.h"
#include "device.h"

namespace diffbit::cuda {
namespace {

constexpr int KEYS = 32;         // per step, and per word of the mask
constexpr int MOST_STAGES = 4;   // steps in flight, including the current one
constexpr float LATE = 8;        // log2 of how far scores may exceed the reference level of P
constexpr float LEAST = -1e30f;  // reference level if no key was seen: far below all scores, but finite

struct Prefill {
  const void* query;  // [B, S, n*H*d]
  Rows keys, values;
  const float *lambda, *cos, *sin;
  const int64_t* positions;
  const uint32_t* seen;  // [B, words]: bit k % 32 of word k / 32 is 1 if the mask shows key k
  void* out;
  int64_t rotations;  // rows of cos and sin
  int steps, past, heads, noise_ratio, kv_heads, shared, words, stages;  // `shared` heads read one kv head
  int window;  // keys that a row sees
  int unquantized;  // at least so many of a row's newest keys are not quantized
  int tokens;  // 0, or all keys if nothing is appended: then every row sees the same ones quantized
  bool lambda_per_token;
  float scale, norm_eps;  // scale times log2(e)
  const float* gates;
  const int *order, *on;  // [B, H, S]: the step of a row; [B, H]: rows that are computed
};

template <class T_, int D_, bool WIDE, int BRANCHES_, bool GATED_>
struct Shape {
  using T = T_;
  static constexpr bool GATED = GATED_;
  static constexpr int D = D_, BRANCHES = BRANCHES_, WIDTH = WIDE ? 2 : 1;
  static constexpr int WARPS = BRANCHES == 2 ? 8 : 4, THREADS = 32 * WARPS;
  static constexpr int TILES = D == 64 ? 2 : 1;                         // of 16 rows, a warp
  static constexpr int ROWS = WARPS / BRANCHES * TILES * 16;            // a block
  static constexpr int COLUMNS = WIDTH * D / BRANCHES;                  // of O, a warp
  static constexpr int SIDE = WIDTH * KEYS * D * 2;                     // bytes of a step's keys, or its values
  static constexpr int FRAGMENTS = TILES * KEYS / 16;                   // of P, a warp
  static constexpr int SHARES = BRANCHES == 2 ? WARPS * FRAGMENTS * 32 * 16 : 0;  // bytes of all P of a step
  static constexpr bool IN_REGISTERS = BRANCHES == 1 || TILES == 1;  // a warp's own P also stays in registers
  static constexpr int NOTES = BRANCHES == 2 ? WARPS * TILES * 16 * 4 : 0;        // bytes of a number per row
  static constexpr size_t bytes(int stages) { return size_t(stages) * 2 * SIDE + 2 * (SHARES + NOTES); }
};

/// Mask words: word w of row b marks which of the keys 32 w ... 32 w + 31 exist and are not hidden.
__global__ void see(const int64_t* mask, int64_t row, int64_t total, int words, uint32_t* seen) {
  const int64_t key = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, b = blockIdx.y;
  const uint32_t word = __ballot_sync(0xffffffffu, key < total && mask[b * row + key] != 0);
  if (threadIdx.x % 32 == 0 && key / 32 < words) seen[b * words + key / 32] = word;
}

/// Sorts the steps of a head: those that are on, then the others. A warp a head.
__global__ void sort_steps(const float* gates, int steps, int heads, int* order, int* on) {
  const int lane = static_cast<int>(threadIdx.x);
  const int64_t head = blockIdx.x, b = blockIdx.y, at = b * heads + head;
  const auto is_on = [&](int step) { return step < steps && gates[(b * steps + step) * heads + head] != 0; };
  int begin[2] = {};  // of the steps that are off, and on
  for (int first = 0; first < steps; first += 32) begin[0] += __popc(__ballot_sync(0xffffffffu, is_on(first + lane)));
  if (lane == 0) on[at] = begin[0];
  for (int first = 0; first < steps; first += 32) {
    const int step = first + lane;
    const bool mine = is_on(step);
    const uint32_t word = __ballot_sync(0xffffffffu, mine);
    const int before = __popc(word & ((1u << lane) - 1)), count = __popc(word);
    if (step < steps) order[at * steps + (mine ? begin[1] + before : begin[0] + lane - before)] = step;
    begin[1] += count, begin[0] += 32 - count;
  }
}

/// How many keys a row of the new tokens sees quantized, a multiple of 32.
__device__ __forceinline__ int quantized_for(const Prefill& a, int row) {
  const int tokens = a.tokens ? a.tokens : a.past + row + 1;
  return tokens > a.unquantized ? (tokens - a.unquantized) / KEYS * KEYS : 0;
}

/// The steps of a block's rows, in units of 32 keys: `quantized` steps from `begin` on, then the steps over unquantized keys,
/// which begin `back` (at most 0) after those.
struct Steps {
  int begin, quantized, back;

  /// The 32 keys of step i.
  __device__ __forceinline__ int at(int i) const { return begin + i + (i < quantized ? 0 : back); }
};

/// Copies a block's keys or values into shared memory, step by step. There, a row's 16-byte piece c is at c ^ row % 8, so
/// the pieces c of 8 rows are in different banks.
template <class S>
struct Stream {
  static constexpr int PIECES = S::D / 8, ROWS = S::THREADS / PIECES;  // of a sub-head, a pass of the threads
  static_assert(KEYS % ROWS == 0 && ROWS % 8 == 0);

  const Rows& rows;
  const unsigned char* from;

  __device__ __forceinline__ Stream(const Rows& rows_, int64_t first_sub_head, const Steps& steps)
      : rows(rows_),
        from(static_cast<const unsigned char*>(rows_.rows) +
             (first_sub_head * rows_.capacity + steps.begin * KEYS) * (S::D * 2)) {}

  /// Starts the copies of step i's 32 tokens, with zeros for those beyond `total`. Called for every step in turn.
  __device__ __forceinline__ void next(unsigned char* step, const Steps& steps, int i, int total) {
    if (i == steps.quantized) from += (steps.back * KEYS + rows.apart) * (S::D * 2);
    const int left = total - steps.at(i) * KEYS;
    const int64_t sub_head = rows.capacity * (S::D * 2);  // bytes from one to the next
    const unsigned thread = threadIdx.x, row = thread / PIECES, to = thread % PIECES ^ row % 8;
#pragma unroll
    for (int pass = 0; pass < S::WIDTH * KEYS / ROWS; ++pass) {
      const int down = pass * ROWS % KEYS;
      copy_async16(step + row * S::D * 2 + to * 16 + pass * ROWS * S::D * 2,
                   from + pass * ROWS / KEYS * sub_head + down * S::D * 2 + thread * 16,
                   static_cast<int>(row) + down < left);
    }
    from += KEYS * S::D * 2;
  }
};

/// x, which is equal in all lanes; tells the compiler so.
__device__ __forceinline__ int of_warp(int x) { return __shfl_sync(0xffffffffu, x, 0); }

__device__ __forceinline__ void wait_for_all_but(int groups) {
  if (groups == 0) copy_async_wait<0>();
  else if (groups == 1) copy_async_wait<1>();
  else if (groups == 2) copy_async_wait<2>();
  else copy_async_wait<MOST_STAGES - 1>();
}

/// The sum or the maximum over the four lanes that hold a row.
__device__ __forceinline__ float sum_of_row(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ __forceinline__ float maximum_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ void copy(const uint4& from, uint32_t (&to)[4]) {
  to[0] = from.x, to[1] = from.y, to[2] = from.z, to[3] = from.w;
}
__device__ __forceinline__ void copy(const uint32_t (&from)[4], uint32_t (&to)[4]) {
#pragma unroll
  for (int e = 0; e < 4; ++e) to[e] = from[e];
}

/// A warp's registers. Lane 4 g + t has the rows g (half 0) and g + 8 (half 1) of tile m.
template <class S>
struct Warp {
  using T = typename S::T;
  static constexpr int D = S::D, TILES = S::TILES, BRANCHES = S::BRANCHES;

  const Prefill& a;
  unsigned lane;
  int warp, branch;  // `branch` is also the half of the value's columns
  int first_row;           // of this warp: counted from the first new token
  int rows;                // that are computed, of all blocks
  const int* order;        // the steps of rows
  uint32_t q[TILES][D / 16][4];
  float s[TILES][KEYS / 8][4];
  uint32_t p[TILES][KEYS / 16][4];  // of this warp's branch
  float o[BRANCHES][TILES][S::COLUMNS / 8][4];  // of this warp's branch, then of the other one
  // For each row: log2 of the reference level of P, the sum of P, and the factor that the last step applied
  float reference[TILES][2], total[TILES][2], change[TILES][2];

  __device__ __forceinline__ Warp(const Prefill& a_, int rows_, const int* order_) : a(a_), rows(rows_), order(order_) {
    lane = threadIdx.x % 32;
    warp = of_warp(static_cast<int>(threadIdx.x / 32));
    branch = BRANCHES == 2 ? warp % 2 : 0;
    first_row = static_cast<int>(gridDim.y - 1 - blockIdx.y) * S::ROWS + warp / BRANCHES * TILES * 16;
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reference[m][half] = LEAST;
        total[m][half] = 0;
        change[m][half] = 1;
      }
#pragma unroll
    for (int b = 0; b < BRANCHES; ++b)
#pragma unroll
      for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int n = 0; n < S::COLUMNS / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) o[b][m][n][e] = 0;
  }

  __device__ __forceinline__ int row(int m, int half) const {
    return first_row + m * 16 + half * 8 + static_cast<int>(lane / 4);
  }
  /// The step of a row; of the last one for rows that are not computed.
  __device__ __forceinline__ int step(int row_) const {
    const int known = min(row_, rows - 1);
    return S::GATED ? __ldg(order + known) : known;
  }

  /// Loads the queries, rotated in float32. Rows after the last token are zeros.
  __device__ __forceinline__ void load_queries(int64_t b, int head) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool there = row(m, half) < rows;
        const int64_t token = b * a.steps + (there ? step(row(m, half)) : 0), requested = a.positions[token];
        const bool known = requested >= 0 && requested < a.rotations;
        const int64_t position = known ? requested : 0;
        const int64_t query_heads = a.heads + (BRANCHES - 1) * (a.heads / a.noise_ratio);
        const int64_t sub_head = query_head(BRANCHES, a.noise_ratio, head, branch);
        const auto* x = static_cast<const T*>(a.query) + (token * query_heads + sub_head) * D;
        const float *cos = a.cos + position * (D / 2), *sin = a.sin + position * (D / 2);
#pragma unroll
        for (int k = 0; k < D / 32; ++k)
#pragma unroll
          for (int eight = 0; eight < 2; ++eight) {
            const unsigned i = k * 16 + eight * 8 + lane % 4 * 2;
            const float2 low = unpack2<T>(*reinterpret_cast<const uint32_t*>(x + i));
            const float2 high = unpack2<T>(*reinterpret_cast<const uint32_t*>(x + i + D / 2));
            float2 c = *reinterpret_cast<const float2*>(cos + i), s_ = *reinterpret_cast<const float2*>(sin + i);
            if (!known) c = s_ = make_float2(NAN, NAN);
            const uint32_t lower = pack2<T>(__fsub_rn(__fmul_rn(low.x, c.x), __fmul_rn(high.x, s_.x)),
                                            __fsub_rn(__fmul_rn(low.y, c.y), __fmul_rn(high.y, s_.y)));
            const uint32_t upper = pack2<T>(__fadd_rn(__fmul_rn(high.x, c.x), __fmul_rn(low.x, s_.x)),
                                            __fadd_rn(__fmul_rn(high.y, c.y), __fmul_rn(low.y, s_.y)));
            q[m][k][2 * eight + half] = there ? lower : 0;
            q[m][k + D / 32][2 * eight + half] = there ? upper : 0;
          }
      }
  }

  /// S = Q K^T; `keys` are those of this branch.
  __device__ __forceinline__ void score(const unsigned char* keys) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[m][n][e] = 0;
    const unsigned at = (lane / 16 * 8 + lane % 8) * D * 2 + (lane / 8 % 2 ^ lane % 8) * 16;
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
#pragma unroll
      for (int n = 0; n < KEYS / 16; ++n) {
        uint32_t r[4];
        load_matrix_x4(r, keys + (at ^ k * 32) + n * 16 * D * 2);
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
          for (int m = 0; m < TILES; ++m) mma<T>(s[m][2 * n + e], q[m][k], {r[2 * e], r[2 * e + 1]});
      }
  }

  /// Hides those of the 32 keys from `first` on that `word` or their position hides, or that a row sees in the other pass.
  __device__ __forceinline__ void hide(int first, uint32_t word, bool quantized) {
    lane = anew(threadIdx.x) % 32;
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = S::GATED ? step(row(m, half)) : row(m, half);
        const int behind = first + KEYS - 1 - a.past - at;  // keys after the row's token
        uint32_t sees = behind <= 0 ? word : behind < KEYS ? word << behind >> behind : 0;
        const int gone = a.past + at + 1 - a.window - first;  // keys before its window
        if (gone > 0) sees = gone < KEYS ? sees >> gone << gone : 0;
        if (quantized != first < quantized_for(a, at)) sees = 0;
        const uint32_t lane_sees = sees >> lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (!(lane_sees & 1u << (n * 8 + e))) s[m][n][2 * half + e] = -INFINITY;
      }
  }

  /// The first part of the softmax: the reference level of P.
  __device__ __forceinline__ void follow_maximum() {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = -INFINITY;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) x = fmaxf(x, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        x = maximum_of_row(x) * a.scale;
        const bool grown = x > reference[m][half] + LATE;
        change[m][half] = grown ? exp2_approx(reference[m][half] - x) : 1;
        if (grown) reference[m][half] = x;
        total[m][half] *= change[m][half];
      }
  }

  /// The other parts of the softmax: P of tile m and 16 keys, and its contribution to the sums.
  __device__ __forceinline__ void weigh(int m, int k, uint32_t (&next)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float x = exp2_approx(fmaf(s[m][2 * k + n][2 * half], a.scale, -reference[m][half]));
        const float y = exp2_approx(fmaf(s[m][2 * k + n][2 * half + 1], a.scale, -reference[m][half]));
        total[m][half] += x + y;
        next[2 * n + half] = pack2<T>(x, y);
      }
    }
  }

  /// O *= by[branch], unless that is 1 everywhere.
  __device__ __forceinline__ void rescale(const float (&by)[BRANCHES][TILES][2]) {
    bool same = true;
#pragma unroll
    for (int b = 0; b < BRANCHES; ++b)
#pragma unroll
      for (int m = 0; m < TILES; ++m) same = same && by[b][m][0] == 1 && by[b][m][1] == 1;
    if (__all_sync(0xffffffffu, same)) return;
#pragma unroll
    for (int b = 0; b < BRANCHES; ++b)
#pragma unroll
      for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int n = 0; n < S::COLUMNS / 8; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) o[b][m][n][e] *= by[b][m][e / 2];
  }

  /// O += P V for 16 keys and 16 columns; `values` are [32, D] with this warp's columns from `piece` on.
  __device__ __forceinline__ void mix(const unsigned char* values, int piece, int k, int column,
                                      const uint32_t (&weights)[BRANCHES][TILES][4]) {
    const unsigned at = (lane / 8 % 2 * 8 + lane % 8) * D * 2 + (lane / 16 ^ lane % 8) * 16;
    uint32_t r[4];
    load_matrix_x4_transposed(r, values + (at ^ (piece + column * 2) * 16) + k * 16 * D * 2);
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int b = 0; b < BRANCHES; ++b)
#pragma unroll
        for (int m = 0; m < TILES; ++m) mma<T>(o[b][m][2 * column + e], weights[b][m], {r[2 * e], r[2 * e + 1]});
  }
};

template <class S>
__global__ void __launch_bounds__(S::THREADS, 1) attend(const Prefill a) {
  using T = typename S::T;
  constexpr int D = S::D, TILES = S::TILES, BRANCHES = S::BRANCHES, WIDTH = S::WIDTH;
  constexpr int PARTS = KEYS / 16 * (S::COLUMNS / 16);  // of O += P V
  constexpr int PIECES = 1 + TILES * KEYS / 16;         // of a softmax
  constexpr int EARLY = TILES == 1 ? 0 : 2;             // pieces that come first, where registers are scarce
  auto* const keys = shared_memory<unsigned char>();
  auto* const values = keys + a.stages * S::SIDE;
  auto* const shares = reinterpret_cast<uint4*>(values + a.stages * S::SIDE);               // [2][WARPS][FRAGMENTS][32]
  auto* const notes = reinterpret_cast<float*>(values + a.stages * S::SIDE + 2 * S::SHARES);  // [2][WARPS][TILES * 16]
  const int head = static_cast<int>(blockIdx.x);
  const int64_t b = blockIdx.z;
  const int total = a.past + a.steps;
  const int64_t sub_head = b * a.kv_heads + of_warp(head / a.shared) * WIDTH;

  const int64_t in_batch = b * a.heads + head;
  const int first_of_block = static_cast<int>(gridDim.y - 1 - blockIdx.y) * S::ROWS;
  const int rows = S::GATED ? __ldg(a.on + in_batch) : a.steps;
  const int* const order = S::GATED ? a.order + in_batch * a.steps : nullptr;
  if (S::GATED)  // zeros for rows that are off
    for (int row = max(first_of_block, rows); row < min(first_of_block + S::ROWS, a.steps); ++row) {
      T* const out = static_cast<T*>(a.out) + ((b * a.steps + order[row]) * a.heads + head) * (WIDTH * D);
      for (int i = static_cast<int>(threadIdx.x); i < WIDTH * D; i += S::THREADS) out[i] = from_float<T>(0.0f);
    }
  if (S::GATED && first_of_block >= rows) return;

  Warp<S> w(a, rows, order);
  const unsigned& lane = w.lane;
  const int other = w.warp ^ 1;
  // Steps of the first and last row
  const int first_row = S::GATED ? w.step(first_of_block) : first_of_block;
  const int last_row = S::GATED ? w.step(first_of_block + S::ROWS - 1) : min(first_of_block + S::ROWS, a.steps) - 1;
  const uint32_t* seen = a.seen + b * a.words;
  const int end = (a.past + last_row) / KEYS + 1;
  Steps steps;
  steps.begin = max(0, a.past + first_row + 1 - a.window) / KEYS;
  while (steps.begin < end && __ldg(seen + steps.begin) == 0) ++steps.begin;
  const int turn = max(steps.begin, quantized_for(a, last_row) / KEYS);  // the end of the quantized steps
  steps.quantized = turn - steps.begin;
  steps.back = max(steps.begin, quantized_for(a, first_row) / KEYS) - turn;
  const int count = end - steps.begin - steps.back;
  Stream<S> of_keys(a.keys, sub_head, steps), of_values(a.values, sub_head, steps);

  // Numbers per row that the warps of a pair exchange; lane t of a row sends that of tile t / 2, half t % 2
  const auto tell = [&](int i, const float (&x)[TILES][2]) {
    const float low = lane % 2 ? x[0][1] : x[0][0], high = lane % 2 ? x[TILES - 1][1] : x[TILES - 1][0];
    if (lane % 4 < 2 * TILES)
      notes[((i & 1) * S::WARPS + w.warp) * (TILES * 16) + lane % 4 * 8 + lane / 4] = lane % 4 < 2 ? low : high;
  };
  const auto hear = [&](int i, int of, float (&x)[TILES][2]) {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        x[m][half] = notes[((i & 1) * S::WARPS + of) * (TILES * 16) + m * 16 + half * 8 + lane / 4];
  };
  const auto share = [&](int i, int of, int m, int k) -> uint4& {
    return shares[(((i & 1) * S::WARPS + of) * S::FRAGMENTS + m * (KEYS / 16) + k) * 32 + lane];
  };
  const int half_of_keys = WIDTH == 2 ? w.branch * KEYS * D * 2 : 0;
  const auto score = [&](int i, int slot) {
    const uint32_t word = __ldg(seen + steps.at(i));
    const int first = steps.at(i) * KEYS;
    w.score(keys + slot + half_of_keys);
    const bool both = steps.at(i) < steps.begin + steps.quantized && i >= steps.quantized + steps.back;
    const bool partly = first + KEYS - 1 > a.past + first_row || first + a.window <= a.past + last_row || both;
    if (word != 0xffffffffu || partly) w.hide(first, word, i < steps.quantized);
  };
  // part `piece` of the softmax of step i
  const auto soften = [&](int i, int piece, uint32_t (&next)[TILES][KEYS / 16][4]) {
    if (piece == 0) {
      w.follow_maximum();
      if (BRANCHES == 2) tell(i, w.change);
      return;
    }
    const int m = (piece - 1) / (KEYS / 16), k = (piece - 1) % (KEYS / 16);
    uint32_t(&x)[4] = next[m][k];
    w.weigh(m, k, x);
    if (BRANCHES == 2) share(i, w.warp, m, k) = make_uint4(x[0], x[1], x[2], x[3]);
  };

  // The slots of the previous step's values, of the current step, and of the next step's keys
  int before = (a.stages - 1) * S::SIDE, now = 0, after = S::SIDE;
  if (count > 0) of_keys.next(keys, steps, 0, total);
  copy_async_commit();
  for (int i = 1; i < a.stages; ++i) {
    if (i < count) of_keys.next(keys + i * S::SIDE, steps, i, total);
    if (i <= count) of_values.next(values + (i - 1) * S::SIDE, steps, i - 1, total);
    copy_async_commit();
  }
  w.load_queries(b, head);
  if (count > 0) {
    wait_for_all_but(a.stages - 1);
    __syncthreads();
    score(0, 0);
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) soften(0, piece, w.p);
  }
  const auto rescale = [&](int i) {
    float change[BRANCHES][TILES][2];
    if (BRANCHES == 2) {
      hear(i, w.warp, change[0]);
      hear(i, other, change[BRANCHES - 1]);
    } else {
#pragma unroll
      for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) change[0][m][half] = w.change[m][half];
    }
    w.rescale(change);
  };
  uint32_t weights[BRANCHES][TILES][4];
  const auto mix = [&](int i, int part) {  // part `part` of O += P V
    const int k = part / (S::COLUMNS / 16), column = part % (S::COLUMNS / 16);
    if (column == 0)
#pragma unroll
      for (int m = 0; m < TILES; ++m) {
        if (S::IN_REGISTERS) copy(w.p[m][k], weights[0][m]);
        else copy(share(i, w.warp, m, k), weights[0][m]);
        if (BRANCHES == 2) copy(share(i, other, m, k), weights[BRANCHES - 1][m]);
      }
    w.mix(values + now + half_of_keys, WIDTH == 1 ? w.branch * (S::COLUMNS / 8) : 0, k, column, weights);
  };
  for (int i = 0; i + 1 < count; ++i) {
    wait_for_all_but(a.stages - 2);
    __syncthreads();
    score(i + 1, after);
    if (i + a.stages < count) of_keys.next(keys + now, steps, i + a.stages, total);
    if (i + a.stages <= count) of_values.next(values + before, steps, i + a.stages - 1, total);
    copy_async_commit();
    rescale(i);
    uint32_t next[TILES][KEYS / 16][4];
#pragma unroll
    for (int piece = 0; piece < EARLY; ++piece) soften(i + 1, piece, next);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      mix(i, part);
#pragma unroll
      for (int piece = EARLY; piece < PIECES; ++piece)
        if ((piece - EARLY + 1) * PARTS / (PIECES - EARLY + 1) - 1 == part) soften(i + 1, piece, next);
    }
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int k = 0; k < KEYS / 16; ++k) copy(next[m][k], w.p[m][k]);
    before = now, now = after;
    after = after + S::SIDE == a.stages * S::SIDE ? 0 : after + S::SIDE;
  }
  if (count > 0) {
    wait_for_all_but(0);
    __syncthreads();
    rescale(count - 1);
#pragma unroll
    for (int part = 0; part < PARTS; ++part) mix(count - 1, part);
  }

  w.lane = anew(threadIdx.x) % 32;
  const int head_again = static_cast<int>(anew(blockIdx.x));

  // Each branch's factor of the output, -lambda for the second; then the sum of squares of a row
  float by[BRANCHES][TILES][2], squares[BRANCHES][TILES][2];
#pragma unroll
  for (int m = 0; m < TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = sum_of_row(w.total[m][half]);
      by[0][m][half] = sum > 0 ? 1 / sum : 0;
      if (w.branch == 0) continue;
      const int64_t token = b * a.steps + w.step(w.row(m, half));
      by[0][m][half] *= -a.lambda[a.lambda_per_token ? token * a.heads + head_again : head_again];
    }
  if (BRANCHES == 2) {
    tell(count, by[0]);
    __syncthreads();
    hear(count, other, by[BRANCHES - 1]);
  }
#pragma unroll
  for (int m = 0; m < TILES; ++m) {
    squares[0][m][0] = squares[0][m][1] = 0;
#pragma unroll
    for (int n = 0; n < S::COLUMNS / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = w.o[0][m][n][e];
        x *= by[0][m][e / 2];
        if (BRANCHES == 2) x += w.o[BRANCHES - 1][m][n][e] * by[BRANCHES - 1][m][e / 2];
        squares[0][m][e / 2] += x * x;
      }
#pragma unroll
    for (int half = 0; half < 2; ++half) squares[0][m][half] = sum_of_row(squares[0][m][half]);
  }
  if (BRANCHES == 2) {
    tell(count + 1, squares[0]);
    __syncthreads();
    hear(count + 1, other, squares[BRANCHES - 1]);
  }
#pragma unroll
  for (int m = 0; m < TILES; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = squares[0][m][half] + (BRANCHES == 2 ? squares[BRANCHES - 1][m][half] : 0);
      if (w.row(m, half) >= w.rows) continue;
      const int64_t at = (b * a.steps + w.step(w.row(m, half))) * a.heads + head_again;
      const float norm = (a.norm_eps > 0 ? rsqrtf(sum / (WIDTH * D) + a.norm_eps) : 1) * (S::GATED ? a.gates[at] : 1);
      T* const out = static_cast<T*>(a.out) + at * (WIDTH * D) +
                     w.branch * S::COLUMNS + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < S::COLUMNS / 8; ++n)
        *reinterpret_cast<uint32_t*>(out + n * 8) =
            pack2<T>(w.o[0][m][n][2 * half] * norm, w.o[0][m][n][2 * half + 1] * norm);
    }
}

template <class S>
const char* start(const Attention& a, Prefill p, cudaStream_t stream) {
  for (p.stages = MOST_STAGES; p.stages > 2 && S::bytes(p.stages) > most_shared();) --p.stages;
  const dim3 grid(static_cast<unsigned>(a.heads), static_cast<unsigned>(divide_up(a.steps, S::ROWS)),
                  static_cast<unsigned>(a.batch));
  return launch(attend<S>, grid, dim3(S::THREADS), S::bytes(p.stages), stream, p);
}

template <class T, bool GATED>
const char* start_of(const Attention& a, const Prefill& p, cudaStream_t stream) {
  if (a.d == 64) {
    if (a.branches == 1) return start<Shape<T, 64, false, 1, GATED>>(a, p, stream);
    return a.wide_value ? start<Shape<T, 64, true, 2, GATED>>(a, p, stream)
                        : start<Shape<T, 64, false, 2, GATED>>(a, p, stream);
  }
  if (a.branches == 1) return start<Shape<T, 128, false, 1, GATED>>(a, p, stream);
  return a.wide_value ? start<Shape<T, 128, true, 2, GATED>>(a, p, stream)
                      : start<Shape<T, 128, false, 2, GATED>>(a, p, stream);
}

template <class T>
const char* start_of(const Attention& a, const Prefill& p, cudaStream_t stream) {
  return p.gates ? start_of<T, true>(a, p, stream) : start_of<T, false>(a, p, stream);
}

}  // namespace

bool prefill_takes(const Attention& a) {
  const int64_t all_tokens = a.past_length + a.steps;
  constexpr int64_t MOST = int64_t{1} << 30;  // limit of numbers that are int in the kernel
  return (a.type == ort::FLOAT16 || a.type == ort::BFLOAT16) && !a.query_bits && (a.d == 64 || a.d == 128) &&
         a.scale > 0 && all_tokens < MOST && a.window < MOST && a.heads < MOST && divide_up(a.steps, 64) < 65536 &&
         a.batch < 65536 && a.batch * a.kv_heads < 65536 && aligned_caches(a) && aligned(a.query, 4) &&
         aligned(a.out, 4) && aligned(a.cos, 8) && aligned(a.sin, 8) &&
         most_shared() >= Shape<__half, 64, true, 2, false>::bytes(2);
}

namespace {

size_t seen_bytes(const Attention& a) {
  const int64_t words = a.batch * divide_up(a.past_length + a.steps, KEYS);
  return static_cast<size_t>(divide_up(words, 64) * 64) * sizeof(uint32_t);
}

size_t order_bytes(const Attention& a) {
  const int64_t numbers = a.gates ? a.batch * a.heads * (a.steps + 1) : 0;
  return static_cast<size_t>(divide_up(numbers, 64) * 64) * sizeof(int);
}

}  // namespace

size_t prefill_workspace(const Attention& a) { return seen_bytes(a) + order_bytes(a) + unpack_workspace(a); }

const char* prefill(const Attention& a, void* workspace, cudaStream_t stream) {
  const int64_t all_tokens = a.past_length + a.steps;
  Prefill p{};
  p.query = a.query;
  p.lambda = static_cast<const float*>(a.lambda);
  p.cos = static_cast<const float*>(a.cos), p.sin = static_cast<const float*>(a.sin);
  p.positions = static_cast<const int64_t*>(a.position_ids);
  p.out = a.out;
  p.rotations = a.positions;
  p.steps = static_cast<int>(a.steps), p.past = static_cast<int>(a.past_length);
  p.noise_ratio = static_cast<int>(a.noise_ratio);
  p.window = static_cast<int>(a.sliding_window ? a.sliding_window : all_tokens);
  p.unquantized = static_cast<int>(blockwise(a) ? a.window : all_tokens);
  p.tokens = static_cast<int>(a.key ? 0 : all_tokens);
  p.heads = static_cast<int>(a.heads), p.kv_heads = static_cast<int>(a.kv_heads), p.shared = static_cast<int>(pairs(a));
  p.words = static_cast<int>(divide_up(all_tokens, KEYS));
  p.lambda_per_token = a.lambda_per_token != 0;
  p.scale = a.scale * 1.44269504f, p.norm_eps = a.norm_eps;
  uint32_t* const seen = static_cast<uint32_t*>(workspace);
  p.seen = seen;
  int* const on = reinterpret_cast<int*>(static_cast<char*>(workspace) + seen_bytes(a));
  int* const order = on + a.batch * a.heads;
  p.gates = static_cast<const float*>(a.gates), p.on = on, p.order = order;
  if (p.gates) {
    const dim3 heads(static_cast<unsigned>(a.heads), static_cast<unsigned>(a.batch));
    if (const char* wrong = launch(sort_steps, heads, dim3(32), 0, stream, p.gates, p.steps, p.heads, order, on))
      return wrong;
  }
  if (const char* wrong = append_and_unpack(a, static_cast<char*>(workspace) + seen_bytes(a) + order_bytes(a), p.keys,
                                            p.values, stream))
    return wrong;
  const dim3 grid(static_cast<unsigned>(divide_up(all_tokens, 256)), static_cast<unsigned>(a.batch));
  const auto* const mask = static_cast<const int64_t*>(a.attention_mask);
  if (const char* wrong = launch(see, grid, dim3(256), 0, stream, mask, a.mask_row, all_tokens, p.words, seen))
    return wrong;
  return a.type == ort::FLOAT16 ? start_of<__half>(a, p, stream) : start_of<__nv_bfloat16>(a, p, stream);
}

}  // namespace diffbit::cuda
