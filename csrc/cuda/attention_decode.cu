// DiffAttention with few queries: the context is cut into splits, a block a split, and a second kernel merges them.
//
// A split reads its keys and values once, for both softmaxes and for 8 rows (branch, pair, step) of a kv head. More
// rows are more blocks, neighbours in the grid, so that the second finds the split in the second-level cache. A row
// keeps the maximum of its logits, the sum of its shares and their product with the values; the merge weighs these
// (log-sum-exp), subtracts, and norms.
//
// What bounds it is bytes: 4 * channels with 16 bits, a token and kv head (channels = width d; 8 d in version 1). An
// H200 reads 4.3 TB/s, 18.6 bytes a clock of each of its 132 multiprocessors at 1.75 GHz. 16 tokens of 128 channels are
// 8 KB, or 440 clocks, in which a multiprocessor issues 1760 instructions. A warp's instructions for these 16 tokens:
//     CUDA cores     one pair 16 (6 d fmas + 4 d conversions) / 32 = 320, four pairs 900, and the sums across lanes
//     tensor cores   32 mma and 24 ldmatrix, the same for any number of rows up to 8
// int8 halves the bytes, to 234 clocks or 936 instructions, and adds 5 instructions for 4 codes made floats, 160 here.
// So all is done on tensor cores (mma m16n8k16), and with copies, addresses and softmax a tile takes about 350
// instructions with 16 bits, 510 with int8, and 560 with int4, whose bytes have room for 550 (counted in code for
// sm_90a). Their other 8 rows are not wasted: queries and shares want float32's precision (the difference of two
// softmaxes cancels, and the norm enlarges what is left), so each is the sum of two 16-bit numbers, and 8 rows with
// what rounding left of them are the 16 rows of a fragment. Logits leave the first product where the second wants its
// shares: nothing moves between lanes but a row's maximum.
//
// A warp has a ring in shared memory of its own, filled by cp.async, and no barrier but its own: keys and values of a
// tile of 16 tokens in turn, up to 3 slots ahead. With 8 to 16 warps 60 to 140 KB are on their way to a multiprocessor,
// more than a microsecond of its share of the bandwidth, 33 KB. The new tokens are appended by the blocks of the last
// split while their first tiles come, and are a tile of their own.
//
//     kernel         caches                                       what it multiplies
//     decode_fast    float16, bfloat16, int8; d 64 and 128        the numbers; codes as float16, which is exact
//     decode_grids   int4, d 64 and 128; queries of 16 bits       codes as float16 and bfloat16
//     decode_any     everything else                              floats on CUDA cores; right, not fast
#include "attention.h"

namespace diffbit::cuda {
namespace {

constexpr int ROWS = 8;         // that a block takes: columns of a tensor core's product
constexpr int FAST_WARPS = 4;   // at most, of a block of the kernels on tensor cores
constexpr float LOG2_E = 1.4426950408889634f;

/// A part of a call, and how it is cut. Rows are the queries of a kv head in the order [branch, pair, step]. A split
/// leaves of each row the shares' product with its values, sums [B, G, splits, rows, width d], and the maximum of its
/// logits (as powers of 2) and the sum of its shares, marks [B, G, splits, rows, 2].
struct Cut {
  Part part;
  int64_t past, all;       // tokens before the part, and with it
  int64_t rows;            // of a kv head
  int64_t row_blocks;      // of ROWS
  int64_t splits;          // of all kernels
  float* sums;
  float* marks;
  // A kernel's: the tokens begin .. end in `own_splits` of `span` tokens, the first of which is split `first_split`
  int64_t begin, end, own_splits, span, first_split;
};

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

/// The reference level of shares: no infinity where a row has seen nothing.
__device__ __forceinline__ float level(float most) { return most == -infinity() ? 0.0f : most; }

struct Row {
  int64_t branch, pair, step;
};
__device__ __forceinline__ Row row_of(const Attention& a, const Part& part, int64_t row) {
  return {row / (pairs(a) * part.steps), row / part.steps % pairs(a), row % part.steps};
}

/// Channels i and i + d / 2 of a row's query, rotated and scaled, every step rounded.
__device__ __forceinline__ float2 query_at(const Attention& a, const Part& part, int64_t b, int64_t g, int64_t row,
                                           int64_t i) {
  const Row r = row_of(a, part, row);
  const int64_t s = part.first + r.step, sub_head = a.branches * (g * pairs(a) + r.pair) + r.branch;
  const float2 x = rotated(a, b, s, a.query, (b * a.steps + s) * a.branches * a.heads + sub_head, i);
  return make_float2(__fmul_rn(x.x, a.scale), __fmul_rn(x.y, a.scale));
}

__device__ __forceinline__ bool hidden(const Attention& a, int64_t b, int64_t t) {
  return !static_cast<const int64_t*>(a.attention_mask)[b * (a.past_length + a.steps) + t];
}

__device__ __forceinline__ float warp_sum(float x) {
  for (int with = 16; with; with /= 2) x += __shfl_xor_sync(0xffffffffu, x, with);
  return x;
}
__device__ __forceinline__ float warp_most(float x) {
  for (int with = 16; with; with /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, with));
  return x;
}

/// A lane's channels of a row's query, lane + 32 k and d / 2 further, times a power of 2 that brings the row to 1 .. 2;
/// returns that power's inverse. Zeros for a row that is none.
template <int EACH>
__device__ __forceinline__ float query_of(const Attention& a, const Cut& cut, int64_t b, int64_t group, int64_t row,
                                          int lane, float2 (&x)[EACH]) {
  float largest = 0;
#pragma unroll
  for (int k = 0; k < EACH; ++k) {
    const int i = lane + 32 * k;
    x[k] = row < cut.rows && i < a.d / 2 ? query_at(a, cut.part, b, group, row, i) : make_float2(0.0f, 0.0f);
    largest = fmaxf(largest, fmaxf(fabsf(x[k].x), fabsf(x[k].y)));
  }
  const uint32_t exponent = __float_as_uint(warp_most(largest)) >> 23;
  const bool normal = exponent > 0 && exponent < 254;
#pragma unroll
  for (int k = 0; k < EACH; ++k) {
    const float by = normal ? __uint_as_float((254 - exponent) << 23) : 1.0f;
    x[k] = make_float2(x[k].x * by, x[k].y * by);
  }
  return normal ? __uint_as_float(exponent << 23) : 1.0f;
}

/// A block's rows to the workspace: `sum` has a warp's sums of them, under the warp's maximum.
template <int CHANNELS, class Sum>
__device__ __forceinline__ void leave(const Attention& a, const Cut& cut, int64_t first_row, int rows, int warps,
                                      const float (*mosts)[ROWS], const float (*shares)[ROWS], const Sum& sum) {
  const int64_t head = blockIdx.z * groups(a) + blockIdx.y, split = blockIdx.x / cut.row_blocks;
  const int64_t at = (head * cut.splits + cut.first_split + split) * cut.rows + first_row;
  for (int r = 0; r < rows; ++r) {
    float most = -infinity(), share = 0, factors[FAST_WARPS];
    for (int w = 0; w < warps; ++w) most = fmaxf(most, mosts[w][r]);
#pragma unroll
    for (int w = 0; w < FAST_WARPS; ++w) {
      factors[w] = w < warps ? exp2_approx(mosts[w][r] - level(most)) : 0.0f;
      if (w < warps) share += shares[w][r] * factors[w];
    }
    for (int channel = static_cast<int>(threadIdx.x); channel < CHANNELS; channel += 32 * warps) {
      float x = 0;
#pragma unroll
      for (int w = 0; w < FAST_WARPS; ++w)
        if (w < warps) x += factors[w] * sum(w, r, channel);
      cut.sums[(at + r) * CHANNELS + channel] = x;
    }
    if (threadIdx.x == 0) cut.marks[2 * (at + r)] = most, cut.marks[2 * (at + r) + 1] = share;
  }
}

// ---- the cache that tensor cores take ------------------------------------------------------------------------------

constexpr int FAST_TOKENS = 16;                     // of a tile, a warp's
constexpr int FAST_BESIDE = 2 * 4 * FAST_TOKENS;    // bytes: of each token two steps, or its mask

/// Kind of the rows, the width of a sub-head, and whether a kv head has two of them.
template <class Kind, int D, bool WIDE>
struct Fast {
  static constexpr int CHANNELS = WIDE ? 2 * D : D;
  static constexpr int ROW = D * static_cast<int>(sizeof(Kind));  // bytes of a sub-head's token
  static constexpr bool CODES = sizeof(Kind) == 1;
  using Number = std::conditional_t<CODES, __half, Kind>;  // that the tensor cores multiply
  static constexpr int BYTES = CHANNELS * static_cast<int>(sizeof(Kind));  // of a token
  static constexpr int PIECES = BYTES / 16;
  static constexpr int TILE = FAST_TOKENS * BYTES;
  static constexpr int SLOT = TILE + 2 * FAST_BESIDE;  // keys: steps, mask; values: steps
  static constexpr int SLOTS = BYTES == 512 ? 3 : 4;   // of a warp
  static constexpr int QUERIES = 2 * ROWS * CHANNELS * 2;
  static constexpr int BLOCKS = CHANNELS == 256 ? 2 : CHANNELS == 128 ? 3 : 4;  // of a multiprocessor

  /// Where a piece of a token lies in a tile: eight tokens' same pieces are in different banks.
  static __device__ __forceinline__ int place(int token, int piece) {
    return token * BYTES + (piece ^ (PIECES >= 8 ? token & 7 : token >> 1 & 3)) * 16;
  }
  /// Where a channel of a query lies among the channels, so that it meets the key's: a lane's four neighbouring codes
  /// become the pairs that it has of a row of 16.
  static __device__ __forceinline__ int column(int channel) {
    if (!CODES) return channel;
    const int k = channel % 16;
    return channel - k + k / 4 * 2 + k % 2 + k % 4 / 2 * 8;
  }
};

/// Four codes of 8 bits as pairs of halves: of `first` the bytes 0 and 1, or 0 and 2, of `second` the others.
__device__ __forceinline__ void halves(uint32_t codes, unsigned first, unsigned second, uint32_t& a, uint32_t& b) {
  const uint32_t moved = codes ^ 0x80808080u;  // + 128; 0x64 before a byte is 1024 + that
  a = subtract2<__half>(__byte_perm(moved, 0x64646464u, first), 0x64806480u);
  b = subtract2<__half>(__byte_perm(moved, 0x64646464u, second), 0x64806480u);
}

template <class Kind, int D, bool WIDE>
__global__ void __launch_bounds__(32 * FAST_WARPS, Fast<Kind, D, WIDE>::BLOCKS)
    decode_fast(const Attention a, const Cut cut) {
  using F = Fast<Kind, D, WIDE>;
  using Number = typename F::Number;
  constexpr int CHANNELS = F::CHANNELS, BLOCKS_OF_16 = CHANNELS / 16;
  __shared__ float scales[ROWS], mosts[FAST_WARPS][ROWS], shares_of[FAST_WARPS][ROWS];
  unsigned char* shared = shared_memory();
  Number* queries = reinterpret_cast<Number*>(shared);
  const int64_t first_row = blockIdx.x % cut.row_blocks * ROWS, split = blockIdx.x / cut.row_blocks;
  const int64_t group = blockIdx.y, b = blockIdx.z, head = b * a.kv_heads + group * (1 + WIDE);
  const bool recent = a.key_bits < 8;  // of a cache with grids; its new tokens are there
  const int rows = static_cast<int>(min(static_cast<int64_t>(ROWS), cut.rows - first_row));
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int warps = static_cast<int>(blockDim.x) / 32, g = lane / 4, t = lane % 4;
  unsigned char* ring = shared + F::QUERIES + warp * F::SLOTS * F::SLOT;
  const bool last = split == cut.own_splits - 1;

  // A warp's tiles: every warps-th of the split's, and with one warp of the last split the new tokens'
  const int64_t begin = cut.begin + split * cut.span, end = min(begin + cut.span, cut.end);
  const int64_t in_split = begin < end ? divide_up(end - begin, FAST_TOKENS) : 0;
  const int old_tiles = static_cast<int>(in_split > warp ? divide_up(in_split - warp, warps) : 0);
  const int tiles = old_tiles + (last && in_split % warps == warp);
  const auto first_of = [&](int tile) {
    return tile == old_tiles ? cut.end : begin + (static_cast<int64_t>(tile) * warps + warp) * FAST_TOKENS;
  };

  // Lane l copies piece l % PIECES of tokens l / PIECES, + TOGETHER, ...; step l, of sub-head l / 16; and mask l
  constexpr int TOGETHER = 32 / F::PIECES;
  const int piece = lane % F::PIECES, token_ = lane / F::PIECES, in_tile = lane % FAST_TOKENS;
  const int64_t key_slots = recent ? a.window + GROUP : a.key_capacity;
  const int64_t value_slots = recent ? a.window + GROUP : a.value_capacity;
  const auto piece_of = [&](const void* rows_, int64_t slots) {  // of token 0
    return static_cast<const char*>(rows_) + ((head + piece * 16 / F::ROW) * slots - cut.begin) * F::ROW +
           piece * 16 % F::ROW;
  };
  const char* const key_rows = piece_of(recent ? a.present_key_recent : a.present_key, key_slots);
  const char* const value_rows = piece_of(recent ? a.present_value_recent : a.present_value, value_slots);
  const bool has_step = F::CODES && lane < (WIDE ? 32 : FAST_TOKENS);
  const int64_t step_head = head + lane / FAST_TOKENS;
  const float* const key_steps = static_cast<const float*>(a.present_key_scale) + step_head * key_slots;
  const float* const value_steps = static_cast<const float*>(a.present_value_scale) + step_head * value_slots;
  const int64_t* const mask = static_cast<const int64_t*>(a.attention_mask) + b * (a.past_length + a.steps);
  const int64_t of_whole = begin < end ? (end - begin) / FAST_TOKENS : 0;  // tiles
  const int whole = static_cast<int>(of_whole > warp ? divide_up(of_whole - warp, warps) : 0);

  const auto load = [&](const char* rows_, const float* steps, int tile, unsigned char* slot) {
    const int64_t first = first_of(tile);
    if (tile < whole) {
      const char* from = rows_ + (first + token_) * F::ROW;
#pragma unroll
      for (int k = 0; k < FAST_TOKENS / TOGETHER; ++k)
        copy_async16(slot + F::place(token_ + k * TOGETHER, piece), from + k * TOGETHER * F::ROW);
      if (has_step) copy_async<4>(slot + F::TILE + 4 * lane, steps + first + in_tile);
      return;
    }
    const int count = static_cast<int>((tile == old_tiles ? cut.all : end) - first);
#pragma unroll
    for (int k = 0; k < FAST_TOKENS / TOGETHER; ++k) {
      const int token = token_ + k * TOGETHER;
      const bool valid = token < count;
      copy_async16(slot + F::place(token, piece), rows_ + (valid ? first + token : cut.begin) * F::ROW, valid);
    }
    const bool valid = in_tile < count;
    if (has_step) copy_async<4>(slot + F::TILE + 4 * lane, steps + (valid ? first + in_tile : 0), valid);
  };
  const auto start_keys = [&](int tile, unsigned char* slot) {
    if (tile < tiles) {
      load(key_rows, key_steps, tile, slot);
      const int64_t t = first_of(tile) + lane;
      const bool valid = t < (tile == old_tiles ? cut.all : end);  // zeros beyond the end: hidden
      if (lane < FAST_TOKENS) copy_async<8>(slot + F::TILE + FAST_BESIDE + 8 * lane, mask + (valid ? t : 0), valid);
    }
    copy_async_commit();
  };
  const auto start_values = [&](int tile, unsigned char* slot) {
    if (tile < tiles) load(value_rows, value_steps, tile, slot);
    copy_async_commit();
  };
  const auto start_first = [&](bool old) {  // keys and values of a tile, in turn
#pragma unroll
    for (int unit = 0; unit < F::SLOTS - 1; ++unit)
      if ((unit / 2 < old_tiles) == old)
        unit % 2 ? start_values(unit / 2, ring + unit * F::SLOT) : start_keys(unit / 2, ring + unit * F::SLOT);
  };

  start_first(true);
  if (last && !recent) {  // the new tokens
    const int each = (1 + WIDE) * static_cast<int>(cut.part.steps);
    for (int i = warp; i < 2 * each; i += warps)
      append_row(a, side_of(a, i < each), b, cut.part.first + i % each / (1 + WIDE),
                 group * (1 + WIDE) + i % (1 + WIDE), lane);
    __threadfence();
  }
  for (int row = warp; row < ROWS; row += warps) {
    constexpr int EACH = D / 64;
    float2 x[EACH];
    const float size = query_of(a, cut, b, group, first_row + row, lane, x);
    if (lane == 0) scales[row] = size * LOG2_E;
    const int own = WIDE && first_row + row >= pairs(a) * cut.part.steps ? D : 0;  // where its sub-head's keys begin
    const auto put = [&](int channel, float y) {
      const int column = F::column(channel), at = (column / 8 ^ (row & 7)) * 8 + column % 8;
      const Number high = from_float<Number>(y);
      queries[row * CHANNELS + at] = high;
      queries[(row + ROWS) * CHANNELS + at] = from_float<Number>(y - to_float(high));
    };
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
      const int i = lane + 32 * k;
      put(own + i, x[k].x);
      put(own + i + D / 2, x[k].y);
      if (WIDE) put(D - own + i, 0.0f), put(D - own + i + D / 2, 0.0f);
    }
  }
  __syncthreads();
  start_first(false);

  // Fragments lie as device.h says. Logits: rows and what rounding left of them are the 16 rows of a, a tile's keys two
  // times 8 columns of b, so that lane 4 g + t has those of row g and of tokens 2t, 2t + 1, + 8. Shares are then as b
  // wants them, and values, [16 channels, 16 tokens], are a.
  float sums[BLOCKS_OF_16][4] = {}, most = -infinity(), total = 0;
  const int64_t row = min(first_row + g, cut.rows - 1);
  const int seen = static_cast<int>(cut.past + row % cut.part.steps - cut.end);  // of the new tokens' tile
  const int own = WIDE && row >= pairs(a) * cut.part.steps;
  const float scale = scales[g];
  const int token_of_lane = lane / 16 * 8 + lane % 8, half = lane / 8 % 2;  // of load_matrix_x4's rows
  float s[4];

  const auto logits = [&](const unsigned char* slot, int most_seen) {
    float c[2][4] = {};
    const auto query = [&](int k, uint32_t(&q)[4]) {
      load_matrix_x4(q, queries + lane % 16 * CHANNELS + ((2 * k + lane / 16) ^ (lane & 7)) * 8);
    };
#pragma unroll
    for (int k = 0; k < BLOCKS_OF_16; k += 1 + F::CODES) {
      uint32_t q[4], x[4];
      query(k, q);
      if constexpr (F::CODES) {  // two pieces, of 16 channels each
        load_matrix_x4(x, slot + F::place(half * 8 + lane % 8, k + lane / 16));
        uint32_t other[4], key[2];
        query(k + 1, other);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          halves(x[i], 0x4140, 0x4342, key[0], key[1]);
          mma<Number>(c[i % 2], i < 2 ? q : other, key);
        }
      } else {
        load_matrix_x4(x, slot + F::place(token_of_lane, 2 * k + half));
        const uint32_t first[2] = {x[0], x[1]}, second[2] = {x[2], x[3]};
        mma<Number>(c[0], q, first);
        mma<Number>(c[1], q, second);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 8 * i + 2 * t;
      const uint4 mask = *reinterpret_cast<const uint4*>(slot + F::TILE + FAST_BESIDE + 8 * token);
      const float* steps = reinterpret_cast<const float*>(slot + F::TILE) + own * FAST_TOKENS + token;
      const bool shown[2] = {(mask.x | mask.y) && token <= most_seen, (mask.z | mask.w) && token < most_seen};
#pragma unroll
      for (int j = 0; j < 2; ++j)
        s[2 * i + j] = shown[j] ? (c[i][j] + c[i][2 + j]) * scale * (F::CODES ? steps[j] : 1.0f) : -infinity();
    }
  };

  const auto mix = [&](const unsigned char* slot) {
    // Codes: a share times the value's step is at most about 1, too, so the steps' sizes count in the maximum
    float steps[2][4], next = most;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* beside = reinterpret_cast<const float*>(slot + F::TILE) + i / 2 * 8 + 2 * t + i % 2;
      steps[0][i] = F::CODES ? beside[0] : 1.0f;
      steps[1][i] = F::CODES && WIDE ? beside[FAST_TOKENS] : steps[0][i];
      const int size = static_cast<int>(__float_as_uint(fmaxf(steps[0][i], steps[1][i])) >> 23) - 127;
      next = fmaxf(next, F::CODES ? s[i] + static_cast<float>(max(size, -60)) : s[i]);
    }
    next = fmaxf(next, __shfl_xor_sync(0xffffffffu, next, 1));
    next = fmaxf(next, __shfl_xor_sync(0xffffffffu, next, 2));
    if (__any_sync(0xffffffffu, next > most)) {
      const float factor = exp2_approx(most - level(next));
      const float factors[2] = {__shfl_sync(0xffffffffu, factor, 8 * t), __shfl_sync(0xffffffffu, factor, 8 * t + 4)};
      total *= factor;
      most = next;
#pragma unroll
      for (int k = 0; k < BLOCKS_OF_16; ++k)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[k][i] *= factors[i % 2];
    }
    uint32_t high[2][2], low[2][2];  // of the sub-heads
    float shares[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      shares[i] = exp2_approx(s[i] - level(most));
      total += shares[i];
    }
#pragma unroll
    for (int j = 0; j < (F::CODES && WIDE ? 2 : 1); ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float x = shares[2 * i] * steps[j][2 * i], y = shares[2 * i + 1] * steps[j][2 * i + 1];
        high[j][i] = pack2<Number>(x, y);
        const float2 rounded = unpack2<Number>(high[j][i]);
        low[j][i] = pack2<Number>(x - rounded.x, y - rounded.y);
      }
    if constexpr (F::CODES) {
#pragma unroll
      for (int k = 0; k < BLOCKS_OF_16; k += 2) {
        uint32_t x[4], value[4];
        load_matrix_x4_transposed(x, slot + F::place(half * 8 + lane % 8, k + lane / 16));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          halves(x[2 * i], 0x4240, 0x4341, value[0], value[1]);
          halves(x[2 * i + 1], 0x4240, 0x4341, value[2], value[3]);
          const int j = WIDE && k >= BLOCKS_OF_16 / 2;
          mma<Number>(sums[k + i], value, high[j]);
          mma<Number>(sums[k + i], value, low[j]);
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < BLOCKS_OF_16; ++k) {
        uint32_t value[4];
        load_matrix_x4_transposed(value, slot + F::place(token_of_lane, 2 * k + half));
        mma<Number>(sums[k], value, high[0]);
        mma<Number>(sums[k], value, low[0]);
      }
    }
  };

  unsigned char *free = ring + (F::SLOTS - 1) * F::SLOT, *slot = ring;
  const auto next = [&] {
    free = slot;
    slot = slot == ring + (F::SLOTS - 1) * F::SLOT ? ring : slot + F::SLOT;
  };
  for (int tile = 0; tile < tiles; ++tile) {
    copy_async_wait<F::SLOTS - 2>();
    __syncwarp();  // the others' bytes, and all have read what the next copies replace
    F::SLOTS % 2 ? start_keys(tile + F::SLOTS / 2, free) : start_values(tile + F::SLOTS / 2 - 1, free);
    logits(slot, tile == old_tiles ? seen : FAST_TOKENS);
    next();
    copy_async_wait<F::SLOTS - 2>();
    __syncwarp();
    F::SLOTS % 2 ? start_values(tile + F::SLOTS / 2, free) : start_keys(tile + F::SLOTS / 2, free);
    mix(slot);
    next();
  }
  total += __shfl_xor_sync(0xffffffffu, total, 1);
  total += __shfl_xor_sync(0xffffffffu, total, 2);
  copy_async_wait<0>();
  __syncthreads();

  float* all = reinterpret_cast<float*>(shared);  // [warps, ROWS, CHANNELS]
  if (t == 0) mosts[warp][g] = most, shares_of[warp][g] = total;
#pragma unroll
  for (int k = 0; k < BLOCKS_OF_16; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int channel = 16 * k + (F::CODES ? 2 * g + i / 2 : g + i / 2 * 8);
      all[(warp * ROWS + 2 * t + i % 2) * CHANNELS + channel] = sums[k][i];
    }
  __syncthreads();
  leave<CHANNELS>(a, cut, first_row, rows, warps, mosts, shares_of,
                  [&](int w, int r, int channel) { return all[(w * ROWS + r) * CHANNELS + channel]; });
}

// ---- grids of 4 bits -----------------------------------------------------------------------------------------------
// The settled tokens; the recent ones are a cache of __half to decode_fast. A tile is a group of 32 tokens:
//     logit = sum_i (q_i step_i) code_i + q . points        out = sum_t (p_t step_t) code_t + sum_t p_t point_t
// Products q step are two __half (what is lost of small ones does not change a logit), products p step, of any size,
// are two __nv_bfloat16, and the points' sum is a product by itself, whose rows are the grids of a token.

template <int D, bool WIDE>
struct Grid {
  static constexpr int CHANNELS = WIDE ? 2 * D : D;
  static constexpr int BYTES = CHANNELS / 2;  // of a token
  static constexpr int PIECES = BYTES / 16;   // of 32 channels
  static constexpr int TILE = static_cast<int>(GROUP) * BYTES;
  static constexpr int KEY_GRIDS = 4 * CHANNELS;
  static constexpr int VALUE_GRID = CHANNELS / 8 < 16 ? 16 : CHANNELS / 8;  // of a token
  static constexpr int MASK = 8 * static_cast<int>(GROUP);
  static constexpr int SLOT = TILE + (KEY_GRIDS + MASK > 32 * VALUE_GRID ? KEY_GRIDS + MASK : 32 * VALUE_GRID);
  static constexpr int SLOTS = CHANNELS == 256 ? 3 : 4;
  static constexpr int QUERY = CHANNELS + 16;  // floats: two rows are in different banks
  static constexpr int QUERIES = ROWS * QUERY * 4;
  static constexpr int BLOCKS = CHANNELS == 256 ? 2 : 3;

  static __device__ __forceinline__ int place(int token, int piece) {
    return token * BYTES + (piece ^ (token / (8 / PIECES) & (PIECES - 1))) * 16;
  }
};

/// Of eight codes of 4 bits the four low ones or the four high ones as pairs of T, as in `halves`.
template <class T>
__device__ __forceinline__ void nibbles(uint32_t codes, bool of_high, unsigned first, unsigned second, uint32_t& a,
                                        uint32_t& b) {
  constexpr bool HALF = std::is_same_v<T, __half>;  // a byte behind 0x64 is 1024 + it, and 128 + it behind 0x43
  constexpr uint32_t BEFORE = HALF ? 0x64646464u : 0x43434343u, SURPLUS = HALF ? 0x64006400u : 0x43004300u;
  const uint32_t own = (of_high ? codes >> 4 : codes) & 0x0f0f0f0fu;
  a = subtract2<T>(__byte_perm(own, BEFORE, first), SURPLUS);
  b = subtract2<T>(__byte_perm(own, BEFORE, second), SURPLUS);
}

/// x, y as two pairs whose sums they are.
template <class T>
__device__ __forceinline__ void halve(float x, float y, uint32_t& high, uint32_t& low) {
  high = pack2<T>(x, y);
  const float2 rounded = unpack2<T>(high);
  low = pack2<T>(x - rounded.x, y - rounded.y);
}

template <int D, bool WIDE>
__global__ void __launch_bounds__(32 * FAST_WARPS, Grid<D, WIDE>::BLOCKS)
    decode_grids(const Attention a, const Cut cut) {
  using G = Grid<D, WIDE>;
  constexpr int CHANNELS = G::CHANNELS, TOKENS = static_cast<int>(GROUP), OF_HEAD = D / TOKENS;
  __shared__ float scales[ROWS], mosts[FAST_WARPS][ROWS], shares_of[FAST_WARPS][ROWS];
  unsigned char* shared = shared_memory();
  float* queries = reinterpret_cast<float*>(shared);
  const int64_t first_row = blockIdx.x % cut.row_blocks * ROWS, split = blockIdx.x / cut.row_blocks;
  const int64_t group = blockIdx.y, b = blockIdx.z, head = b * a.kv_heads + group * (1 + WIDE);
  const int rows = static_cast<int>(min(static_cast<int64_t>(ROWS), cut.rows - first_row));
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int warps = static_cast<int>(blockDim.x) / 32, g = lane / 4, t = lane % 4;
  unsigned char* ring = shared + G::QUERIES + warp * G::SLOTS * G::SLOT;
  const int64_t begin = split * cut.span, end = min(begin + cut.span, cut.end), in_split = (end - begin) / TOKENS;
  const int tiles = static_cast<int>(in_split > warp ? divide_up(in_split - warp, warps) : 0);

  // Lane l copies piece l % PIECES of tokens l / PIECES, ..., the values' grids of token l, and mask l
  const int piece_ = lane % G::PIECES, token_ = lane / G::PIECES;
  constexpr int ROW = D / 2;  // bytes of a sub-head's token
  const auto piece_of = [&](const void* rows_, int64_t slots) {
    return static_cast<const char*>(rows_) + ((head + piece_ / OF_HEAD) * slots + token_) * ROW + piece_ % OF_HEAD * 16;
  };
  const char* const key_rows = piece_of(a.present_key, a.key_capacity);
  const char* const value_rows = piece_of(a.present_value, a.value_capacity);
  const int64_t* const mask = static_cast<const int64_t*>(a.attention_mask) + b * (a.past_length + a.steps) + lane;
  const int64_t next_values = a.value_capacity * (D / 8), next_keys = a.key_capacity / GROUP * (4 * D);  // sub-head
  const char* const key_grids = static_cast<const char*>(a.present_key_scale) + head * next_keys;
  const char* const value_grids = static_cast<const char*>(a.present_value_scale) + head * next_values + lane * (D / 8);

  const auto load = [&](const char* from, unsigned char* slot) {
#pragma unroll
    for (int k = 0; k < G::PIECES; ++k) {
      constexpr int TOGETHER = 32 / G::PIECES;
      copy_async16(slot + G::place(token_ + k * TOGETHER, piece_), from + k * TOGETHER * ROW);
    }
  };
  const auto first_of = [&](int tile) { return begin + (static_cast<int64_t>(tile) * warps + warp) * TOKENS; };
  const auto start_keys = [&](int tile, unsigned char* slot) {
    if (tile < tiles) {
      const int64_t first = first_of(tile);
      load(key_rows + first * ROW, slot);
      const char* grids = key_grids + first / GROUP * (4 * D);
#pragma unroll
      for (int k = 0; k < (G::KEY_GRIDS + 511) / 512; ++k) {
        const int i = 16 * lane + 512 * k;
        if (i < G::KEY_GRIDS) copy_async16(slot + G::TILE + i, grids + (i / (4 * D) ? next_keys : 0) + i % (4 * D));
      }
      copy_async<8>(slot + G::TILE + G::KEY_GRIDS + 8 * lane, mask + first);
    }
    copy_async_commit();
  };
  const auto start_values = [&](int tile, unsigned char* slot) {
    if (tile < tiles) {
      const int64_t first = first_of(tile);
      load(value_rows + first * ROW, slot);
      const char* grids = value_grids + first * (D / 8);
#pragma unroll
      for (int k = 0; k < CHANNELS / 8; k += 8)
        copy_async<8>(slot + G::TILE + lane * G::VALUE_GRID + k, grids + (k / (D / 8) ? next_values : 0) + k % (D / 8));
    }
    copy_async_commit();
  };
#pragma unroll
  for (int unit = 0; unit < G::SLOTS - 1; ++unit)  // keys and values of a tile, in turn
    unit % 2 ? start_values(unit / 2, ring + unit * G::SLOT) : start_keys(unit / 2, ring + unit * G::SLOT);
  for (int row = warp; row < ROWS; row += warps) {
    constexpr int EACH = D / 64;
    float2 x[EACH];
    const float size = query_of(a, cut, b, group, first_row + row, lane, x);
    if (lane == 0) scales[row] = size * LOG2_E;
    const int own = WIDE && first_row + row >= pairs(a) * cut.part.steps ? D : 0;
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
      float* to = queries + row * G::QUERY + lane + 32 * k;
      to[own] = x[k].x, to[own + D / 2] = x[k].y;
      if (WIDE) to[D - own] = 0, to[D - own + D / 2] = 0;
    }
  }
  __syncthreads();

  float sums[CHANNELS / 16][4] = {}, of_points[4] = {}, s[8], most = -infinity(), total = 0;
  const float scale = scales[g];

  const auto logits = [&](const unsigned char* slot) {
    float c[4][4] = {}, offset = 0;
#pragma unroll
    for (int piece = 0; piece < G::PIECES; ++piece) {
      uint32_t x[4];
      load_matrix_x4(x, slot + G::place(lane, piece));
      const int second = piece / OF_HEAD;
      const __half* grid = reinterpret_cast<const __half*>(slot + G::TILE) + second * D + TOKENS * piece;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = 16 * half + 4 * t;
        const float4 q = *reinterpret_cast<const float4*>(queries + g * G::QUERY + TOKENS * piece + at);
        const uint2 step = *reinterpret_cast<const uint2*>(grid + at);
        const uint2 point = *reinterpret_cast<const uint2*>(grid + D + at);
        const float2 steps[2] = {unpack2<__half>(step.x), unpack2<__half>(step.y)};
        const float2 points[2] = {unpack2<__half>(point.x), unpack2<__half>(point.y)};
        offset += q.x * points[0].x + q.y * points[0].y + q.z * points[1].x + q.w * points[1].y;
        uint32_t query[4], key[2];
        halve<__half>(q.x * steps[0].x, q.y * steps[0].y, query[0], query[1]);
        halve<__half>(q.z * steps[1].x, q.w * steps[1].y, query[2], query[3]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          nibbles<__half>(x[i], half, 0x4140, 0x4342, key[0], key[1]);
          mma<__half>(c[i], query, key);
        }
      }
    }
    offset += __shfl_xor_sync(0xffffffffu, offset, 1);
    offset += __shfl_xor_sync(0xffffffffu, offset, 2);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 mask = *reinterpret_cast<const uint4*>(slot + G::TILE + G::KEY_GRIDS + 8 * (8 * i + 2 * t));
      s[2 * i] = mask.x | mask.y ? (c[i][0] + c[i][2] + offset) * scale : -infinity();
      s[2 * i + 1] = mask.z | mask.w ? (c[i][1] + c[i][3] + offset) * scale : -infinity();
    }
  };

  const auto mix = [&](const unsigned char* slot) {
    float next = most, shares[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) next = fmaxf(next, s[i]);
    next = fmaxf(next, __shfl_xor_sync(0xffffffffu, next, 1));
    next = fmaxf(next, __shfl_xor_sync(0xffffffffu, next, 2));
    if (__any_sync(0xffffffffu, next > most)) {
      const float factor = exp2_approx(most - level(next));
      const float factors[2] = {__shfl_sync(0xffffffffu, factor, 8 * t), __shfl_sync(0xffffffffu, factor, 8 * t + 4)};
      total *= factor;
      most = next;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        of_points[i] *= factors[i % 2];
#pragma unroll
        for (int k = 0; k < CHANNELS / 16; ++k) sums[k][i] *= factors[i % 2];
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      shares[i] = exp2_approx(s[i] - level(most));
      total += shares[i];
    }
    const unsigned char* grids = slot + G::TILE;
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // 16 tokens
      uint32_t point[4] = {}, high[2], low[2];
      halve<__half>(shares[4 * i], shares[4 * i + 1], high[0], low[0]);
      halve<__half>(shares[4 * i + 2], shares[4 * i + 3], high[1], low[1]);
      if constexpr (CHANNELS == 256) {
        load_matrix_x4_transposed(
            point, grids + (16 * i + lane / 16 * 8 + lane % 8) * G::VALUE_GRID + lane / 8 % 2 * 16);
      } else {
        uint32_t x[2];
        load_matrix_x2_transposed(x, grids + (16 * i + lane % 16) * G::VALUE_GRID);
        point[0] = x[0], point[2] = x[1];
      }
      mma<__half>(of_points, point, high);
      mma<__half>(of_points, point, low);
    }
#pragma unroll
    for (int piece = 0; piece < G::PIECES; ++piece) {
      const int second = piece / OF_HEAD;
      uint32_t x[4], high[4], low[4], value[4];
      load_matrix_x4_transposed(x, slot + G::place(lane, piece));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const unsigned char* own = grids + (8 * i + 2 * t) * G::VALUE_GRID + 2 * (piece + second * OF_HEAD);
        const float one = to_float(*reinterpret_cast<const __half*>(own));
        const float other = to_float(*reinterpret_cast<const __half*>(own + G::VALUE_GRID));
        halve<__nv_bfloat16>(shares[2 * i] * one, shares[2 * i + 1] * other, high[i], low[i]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          nibbles<__nv_bfloat16>(x[i], half, 0x4240, 0x4341, value[0], value[1]);
          nibbles<__nv_bfloat16>(x[i + 1], half, 0x4240, 0x4341, value[2], value[3]);
          const uint32_t more[2] = {high[i], high[i + 1]}, less[2] = {low[i], low[i + 1]};
          mma<__nv_bfloat16>(sums[2 * piece + half], value, more);
          mma<__nv_bfloat16>(sums[2 * piece + half], value, less);
        }
    }
  };

  unsigned char *free = ring + (G::SLOTS - 1) * G::SLOT, *slot = ring;
  const auto next = [&] {
    free = slot;
    slot = slot == ring + (G::SLOTS - 1) * G::SLOT ? ring : slot + G::SLOT;
  };
  for (int tile = 0; tile < tiles; ++tile) {
    copy_async_wait<G::SLOTS - 2>();
    __syncwarp();
    G::SLOTS % 2 ? start_keys(tile + G::SLOTS / 2, free) : start_values(tile + G::SLOTS / 2 - 1, free);
    logits(slot);
    next();
    copy_async_wait<G::SLOTS - 2>();
    __syncwarp();
    G::SLOTS % 2 ? start_values(tile + G::SLOTS / 2, free) : start_keys(tile + G::SLOTS / 2, free);
    mix(slot);
    next();
  }
  total += __shfl_xor_sync(0xffffffffu, total, 1);
  total += __shfl_xor_sync(0xffffffffu, total, 2);
  copy_async_wait<0>();
  __syncthreads();

  float *all = reinterpret_cast<float*>(shared), *points = all + warps * ROWS * CHANNELS;  // [warps, ROWS, 16]
  if (t == 0) mosts[warp][g] = most, shares_of[warp][g] = total;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int r = warp * ROWS + 2 * t + i % 2;
    points[r * 16 + g + i / 2 * 8] = of_points[i];
#pragma unroll
    for (int k = 0; k < CHANNELS / 16; ++k) all[r * CHANNELS + 16 * k + 2 * g + i / 2] = sums[k][i];
  }
  __syncthreads();
  leave<CHANNELS>(a, cut, first_row, rows, warps, mosts, shares_of, [&](int w, int r, int channel) {
    const int at = w * ROWS + r, of_channels = channel / TOKENS;
    return all[at * CHANNELS + channel] + points[at * 16 + of_channels + (of_channels / OF_HEAD + 1) * OF_HEAD];
  });
}

// ---- any cache -----------------------------------------------------------------------------------------------------

constexpr int ANY_THREADS = 256;
constexpr int ANY_WARPS = ANY_THREADS / 32;
static_assert(ANY_WARPS == ROWS, "a warp a row");
constexpr int ANY_TOKENS = 32;
constexpr int ANY_EACH = 2 * ATTENTION_MOST_D / ANY_THREADS;  // channels of a thread

/// A token's row of a sub-head, whatever holds it.
struct Token {
  const char* x;
  const __half* grid;  // steps, then points; null where the row has none
  int64_t points;      // how far these lie behind the steps
  int shift;           // channels that share a grid, as a power of 2
  int bits;
  int64_t type;
  float step;          // of the row

  /// A code, or the number itself.
  __device__ float code(int64_t i) const {
    if (bits == 16) return number(x, type, i);
    if (bits == 8) return static_cast<float>(reinterpret_cast<const int8_t*>(x)[i]);
    const int bytes = 4 * bits, k = static_cast<int>(i % GROUP);
    const unsigned byte = reinterpret_cast<const uint8_t*>(x)[i / GROUP * bytes + k % bytes];
    return static_cast<float>(byte >> k / bytes * bits & ((1u << bits) - 1));
  }
  /// But for the row's step.
  __device__ float at(int64_t i) const {
    return grid ? code(i) * to_float(grid[i >> shift]) + to_float(grid[points + (i >> shift)]) : code(i);
  }
};

__device__ __forceinline__ Token token_of(const Attention& a, const Side& side, int64_t head, int64_t t,
                                          int64_t after) {
  Token token;
  token.grid = nullptr, token.points = 0, token.shift = 0, token.step = 1;
  if (side.bits < 8 && t >= after) {
    token.x = reinterpret_cast<const char*>(side.recent + (head * (a.window + GROUP) + t - after) * a.d);
    token.bits = 16, token.type = ort::FLOAT16;
    return token;
  }
  const int64_t slot = head * side.capacity + t;
  token.bits = side.bits, token.type = side.type;
  token.x = side.rows + slot * (side.bits == 16 && side.type == ort::FLOAT32 ? a.d * 4 : a.d * side.bits / 8);
  if (side.bits == 8) token.step = reinterpret_cast<const float*>(side.scales)[slot];
  if (side.bits < 8) {
    token.points = side.keys ? a.d : a.d / GROUP;
    token.shift = side.keys ? 0 : 5;
    token.grid = reinterpret_cast<const __half*>(side.scales) + (side.keys ? slot / GROUP : slot) * 2 * token.points;
  }
  return token;
}

/// A warp rounds a row of d numbers to -top .. top (kv_cache.round_rows). Returns the step.
template <class X>
__device__ float round_row(int64_t d, float top, int lane, const X& x, float* codes) {
  float largest = 0;
  bool finite = true;
  for (int64_t i = lane; i < d; i += 32) {
    finite = finite && fabsf(x(i)) <= FLT_MAX;
    largest = fmaxf(largest, fabsf(x(i)));
  }
  finite = __all_sync(0xffffffffu, finite);
  const float step = finite ? __fdiv_rn(warp_most(largest), top) : nan_number();
  for (int64_t i = lane; i < d; i += 32)
    codes[i] = !finite || step == 0 ? 0.0f : fminf(top, fmaxf(-top, rintf(__fdiv_rn(x(i), step))));
  return step;
}

/// Right for every kind, type and width. Warps take tokens for the logits, threads take channels for the values.
/// Shared memory: queries [ROWS, d]; with query bits also their codes [ROWS, d].
__global__ void __launch_bounds__(ANY_THREADS) decode_any(const Attention a, const Cut cut) {
  __shared__ float shares[ANY_TOKENS][ROWS], factors[ROWS], steps[ROWS], offsets[ROWS];
  float* q = shared_memory<float>();
  float* codes = q + ROWS * a.d;
  const int64_t d = a.d, all_groups = groups(a);
  const int64_t first_row = blockIdx.x % cut.row_blocks * ROWS, split = blockIdx.x / cut.row_blocks;
  const int64_t g = blockIdx.y, b = blockIdx.z, head = b * a.kv_heads + g * width(a);
  const int rows = static_cast<int>(min(static_cast<int64_t>(ROWS), cut.rows - first_row));
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int64_t begin = split * cut.span, end = min(begin + cut.span, cut.end);
  const int64_t after = on_grids(a) ? settled(cut.all, a.window) : 0;
  const Side keys = side_of(a, true), values = side_of(a, false);
  const float top = static_cast<float>((1 << (a.query_bits ? a.query_bits - 1 : 0)) - 1);

  for (int row = 0; row < ROWS; ++row)
    for (int64_t i = thread; i < d / 2; i += ANY_THREADS) {
      const float2 x = row < rows ? query_at(a, cut.part, b, g, first_row + row, i) : make_float2(0.0f, 0.0f);
      q[row * d + i] = x.x;
      q[row * d + i + d / 2] = x.y;
    }
  __syncthreads();
  if (a.query_bits && keys.bits == 8) {
    const float step = round_row(d, top, lane, [&](int64_t i) { return q[warp * d + i]; }, codes + warp * d);
    if (lane == 0) steps[warp] = step, offsets[warp] = 0;
  }

  float sums[ROWS][ANY_EACH] = {}, most = -infinity(), sum = 0;  // of row `warp`
  for (int64_t t0 = begin; t0 < end; t0 += ANY_TOKENS) {
    const int count = static_cast<int>(min(static_cast<int64_t>(ANY_TOKENS), end - t0));
    const bool rounded = a.query_bits && (keys.bits == 8 || t0 < after);
    if (rounded && keys.bits < 8) {  // the block's grid meets the query
      const int64_t sub_head = a.wide_value ? row_of(a, cut.part, min(first_row + warp, cut.rows - 1)).branch : 0;
      const Token token = token_of(a, keys, head + sub_head, t0, after);
      const float* own = q + warp * d;
      const auto stepped = [&](int64_t i) { return __fmul_rn(own[i], to_float(token.grid[i])); };
      const float step = round_row(d, top, lane, stepped, codes + warp * d);
      float offset = 0, lost = 0;
      for (int64_t i = lane; i < d; i += 32) {
        offset += own[i] * to_float(token.grid[d + i]);
        lost += stepped(i) - codes[warp * d + i] * step;
      }
      offset = warp_sum(offset) + static_cast<float>((1 << keys.bits) - 1) / 2 * warp_sum(lost);
      if (lane == 0) steps[warp] = step, offsets[warp] = offset;
    }
    __syncthreads();
    const float* from = rounded ? codes : q;
    for (int k = warp; k < ANY_TOKENS; k += ANY_WARPS) {
      float dots[ROWS] = {};
      const int64_t t = t0 + min(k, count - 1);
      const Token own = token_of(a, keys, head, t, after), other = token_of(a, keys, head + a.wide_value, t, after);
      for (int64_t i = lane; i < d; i += 32) {
        const float x = rounded ? own.code(i) : own.at(i);
        const float y = a.wide_value ? rounded ? other.code(i) : other.at(i) : x;
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
          dots[row] += from[row * d + i] * (first_row + row >= pairs(a) * cut.part.steps ? y : x);
      }
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        float s = warp_sum(dots[row]);
        if (rounded) s = s * steps[row] + offsets[row];
        s *= first_row + row >= pairs(a) * cut.part.steps && a.wide_value ? other.step : own.step;
        const bool seen = k < count && !hidden(a, b, t) && t <= cut.past + (first_row + row) % cut.part.steps;
        if (lane == row) shares[k][row] = seen ? s * LOG2_E : -infinity();
      }
    }
    __syncthreads();
    {
      const float s = shares[lane][warp], next = fmaxf(most, warp_most(s)), share = exp2_approx(s - level(next));
      const float factor = exp2_approx(most - level(next));
      most = next;
      sum = sum * factor + warp_sum(share);
      shares[lane][warp] = share;
      if (lane == 0) factors[warp] = factor;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < ANY_EACH; ++k) {
      const int64_t channel = thread + k * ANY_THREADS;
      if (channel >= width(a) * d) break;
#pragma unroll
      for (int row = 0; row < ROWS; ++row) sums[row][k] *= factors[row];
      for (int i = 0; i < count; ++i) {
        const Token token = token_of(a, values, head + channel / d, t0 + i, after);
        const float x = token.at(channel % d) * token.step;
#pragma unroll
        for (int row = 0; row < ROWS; ++row) sums[row][k] += shares[i][row] * x;
      }
    }
    __syncthreads();
  }

  const int64_t at = ((b * all_groups + g) * cut.splits + split) * cut.rows + first_row;
#pragma unroll
  for (int k = 0; k < ANY_EACH; ++k) {
    const int64_t channel = thread + k * ANY_THREADS;
    if (channel >= width(a) * d) break;
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
      if (row < rows) cut.sums[(at + row) * width(a) * d + channel] = sums[row][k];
  }
  if (warp < rows && lane == 0) cut.marks[2 * (at + warp)] = most, cut.marks[2 * (at + warp) + 1] = sum;
}

// ---- the end -------------------------------------------------------------------------------------------------------

constexpr int MERGE_THREADS = 256;
constexpr int MERGE_WARPS = MERGE_THREADS / 32;
constexpr int MERGE_CHANNELS = 128;  // at once

/// A head of a step: its splits together, the difference, the head norm. Warps take splits.
__global__ void __launch_bounds__(MERGE_THREADS) merge(const Attention a, const Cut cut) {
  __shared__ float parts[MERGE_WARPS][MERGE_CHANNELS], out[2 * ATTENTION_MOST_D], squares_of[MERGE_WARPS];
  const int64_t head = blockIdx.x, step = blockIdx.y, b = blockIdx.z, s = cut.part.first + step;
  const int64_t g = head / pairs(a), channels = width(a) * a.d, first = (b * groups(a) + g) * cut.splits * cut.rows;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  int64_t rows[2];
  float levels[2], shares[2] = {};
#pragma unroll
  for (int branch = 0; branch < 2; ++branch) {
    if (branch == a.branches) break;
    rows[branch] = first + (branch * pairs(a) + head % pairs(a)) * cut.part.steps + step;
    float most = -infinity(), sum = 0;
    for (int64_t split = lane; split < cut.splits; split += 32)
      most = fmaxf(most, cut.marks[2 * (rows[branch] + split * cut.rows)]);
    levels[branch] = level(warp_most(most));
    for (int64_t split = lane; split < cut.splits; split += 32) {
      const float* mark = cut.marks + 2 * (rows[branch] + split * cut.rows);
      sum += mark[1] * exp2_approx(mark[0] - levels[branch]);
    }
    sum = warp_sum(sum);
    shares[branch] = sum == 0 ? 0.0f : 1 / sum;
  }
  if (a.branches == 2) {
    const float* lambda = static_cast<const float*>(a.lambda);
    shares[1] *= -lambda[a.lambda_per_token ? (b * a.steps + s) * a.heads + head : head];
  }

  float squares = 0;
  for (int64_t begin = 0; begin < channels; begin += MERGE_CHANNELS) {
    float sums[MERGE_CHANNELS / 32] = {};
#pragma unroll 4
    for (int64_t split = warp; split < cut.splits; split += MERGE_WARPS)
#pragma unroll
      for (int branch = 0; branch < 2; ++branch) {
        if (branch == a.branches) break;
        const int64_t row = rows[branch] + split * cut.rows;
        const float factor = exp2_approx(cut.marks[2 * row] - levels[branch]) * shares[branch];
#pragma unroll
        for (int k = 0; k < MERGE_CHANNELS / 32; ++k)
          if (const int64_t channel = begin + lane + 32 * k; channel < channels)
            sums[k] += factor * cut.sums[row * channels + channel];
      }
#pragma unroll
    for (int k = 0; k < MERGE_CHANNELS / 32; ++k) parts[warp][lane + 32 * k] = sums[k];
    __syncthreads();
    if (const int64_t channel = begin + thread; thread < MERGE_CHANNELS && channel < channels) {
      float x = 0;
      for (int k = 0; k < MERGE_WARPS; ++k) x += parts[k][thread];
      out[channel] = x;
      squares += x * x;
    }
    __syncthreads();
  }
  squares = warp_sum(squares);
  if (lane == 0) squares_of[warp] = squares;
  __syncthreads();
  float root = 1;
  if (a.norm_eps > 0) {
    squares = 0;
    for (int k = 0; k < MERGE_WARPS; ++k) squares += squares_of[k];
    root = sqrtf(squares / static_cast<float>(channels) + a.norm_eps);
  }
  for (int64_t channel = thread; channel < channels; channel += MERGE_THREADS)
    put_number(a.out, a.type, ((b * a.steps + s) * a.heads + head) * channels + channel, out[channel] / root);
}

// ---- launches ------------------------------------------------------------------------------------------------------

struct Plan {
  void (*kernel)(Attention, Cut);
  int warps;
  size_t shared;
  int64_t tokens;  // a split has a multiple of them
};

/// A kernel with a ring a warp, as many warps as the card has room for.
Plan ring_plan(void (*kernel)(Attention, Cut), size_t queries, size_t ring, int64_t tokens) {
  constexpr size_t BESIDE = 1024;  // what the kernel has for itself, and some
  const size_t room = (most_shared() - queries - BESIDE) / ring;
  const int warps = room < FAST_WARPS ? static_cast<int>(room) : FAST_WARPS;
  return {kernel, warps, queries + warps * ring, tokens * warps};
}

template <class Kind, int D, bool WIDE>
Plan fast_plan() {
  using F = Fast<Kind, D, WIDE>;
  static_assert(F::SLOTS * F::SLOT >= ROWS * F::CHANNELS * 4, "a warp's sums fit");
  return ring_plan(decode_fast<Kind, D, WIDE>, F::QUERIES, F::SLOTS * F::SLOT, FAST_TOKENS);
}

template <class Kind>
Plan fast_plan(const Attention& a) {
  if (a.d == 64) return a.wide_value ? fast_plan<Kind, 64, true>() : fast_plan<Kind, 64, false>();
  return a.wide_value ? fast_plan<Kind, 128, true>() : fast_plan<Kind, 128, false>();
}

template <int D, bool WIDE>
Plan grid_plan() {
  using G = Grid<D, WIDE>;
  static_assert(G::SLOTS * G::SLOT >= ROWS * (G::CHANNELS + 16) * 4, "a warp's sums fit");
  return ring_plan(decode_grids<D, WIDE>, G::QUERIES, G::SLOTS * G::SLOT, GROUP);
}

Plan grid_plan(const Attention& a) {
  if (a.d == 64) return a.wide_value ? grid_plan<64, true>() : grid_plan<64, false>();
  return a.wide_value ? grid_plan<128, true>() : grid_plan<128, false>();
}

Plan any_plan(const Attention& a) {
  const int64_t floats = (a.query_bits ? 2 : 1) * ROWS * a.d;
  return {decode_any, ANY_WARPS, static_cast<size_t>(floats) * sizeof(float), ANY_TOKENS};
}

enum class Way { HALF, BFLOAT16, CODES, GRIDS, ANY };

/// What the tensor cores take are keys and values that are held alike. Queries and shares are sums of two numbers: 22
/// bits with __half, and with __nv_bfloat16 16 bits, enough where the output has fewer.
Way way_of(const Attention& a) {
  if ((a.d != 64 && a.d != 128) || a.key_bits != a.value_bits || a.query_bits) return Way::ANY;
  if (a.key_bits == 8) return Way::CODES;
  if (a.key_bits == 4) return a.type == ort::FLOAT32 ? Way::ANY : Way::GRIDS;
  if (a.key_bits == 2 || a.key_type != a.value_type) return Way::ANY;
  if (a.key_type == ort::FLOAT16) return Way::HALF;
  return a.key_type == ort::BFLOAT16 && a.type == ort::BFLOAT16 ? Way::BFLOAT16 : Way::ANY;
}

/// A kernel for the tokens begin .. end, in splits with which the blocks fill the card as evenly as they can: the time
/// is that of the waves of blocks, each as long as a split and what a block does besides (as much as SETUP tokens).
struct Run {
  Plan plan;
  int64_t begin, end, splits, span;
};

Run run_of(const Attention& a, const Cut& cut, const Plan& plan, int64_t begin, int64_t end) {
  constexpr int64_t SETUP = 128, ONE = 1;
  const int64_t tokens = end - begin, units = a.batch * groups(a) * cut.row_blocks;
  const int64_t room = multiprocessors() * blocks_at_once(plan.kernel, 32 * plan.warps, plan.shared);
  const int64_t most = max(ONE, min(divide_up(tokens, plan.tokens), divide_up(4 * room, units)));
  Run run{plan, begin, end, 0, 0};
  int64_t best = 0;
  for (int64_t splits = 1; splits <= most; ++splits) {
    const int64_t span = max(ONE, divide_up(divide_up(tokens, splits), plan.tokens)) * plan.tokens;
    const int64_t found = max(ONE, divide_up(tokens, span)), time = divide_up(units * found, room) * (span + SETUP);
    if (best && time >= best) continue;
    best = time, run.span = span, run.splits = found;
  }
  return run;
}

/// A part as one or two kernels.
struct Runs {
  Cut cut;
  int count;
  Run run[2];
};

Runs runs_of(const Attention& a, Part part) {
  Runs runs{};
  Cut& cut = runs.cut;
  cut.part = part;
  cut.past = a.past_length + part.first;
  cut.all = cut.past + part.steps;
  cut.rows = a.branches * pairs(a) * part.steps;
  cut.row_blocks = divide_up(cut.rows, ROWS);
  const auto add = [&](const Plan& plan, int64_t begin, int64_t end) {
    runs.run[runs.count] = run_of(a, cut, plan, begin, end);
    cut.splits += runs.run[runs.count++].splits;
  };
  switch (way_of(a)) {
    case Way::HALF: add(fast_plan<__half>(a), 0, cut.past); break;
    case Way::BFLOAT16: add(fast_plan<__nv_bfloat16>(a), 0, cut.past); break;
    case Way::CODES: add(fast_plan<int8_t>(a), 0, cut.past); break;
    case Way::ANY: add(any_plan(a), 0, cut.all); break;
    case Way::GRIDS: {
      const int64_t after = settled(cut.all, a.window);
      if (after) add(grid_plan(a), 0, after);
      add(fast_plan<__half>(a), after, max(cut.past, after));
    }
  }
  return runs;
}

}  // namespace

bool decode_appends(const Attention& a) { return !on_grids(a) && way_of(a) != Way::ANY; }

size_t decode_workspace(const Attention& a, Part part) {
  const Cut cut = runs_of(a, part).cut;
  return static_cast<size_t>(a.batch * groups(a) * cut.splits * cut.rows * (width(a) * a.d + 2)) * sizeof(float);
}

const char* decode(const Attention& a, Part part, void* workspace, cudaStream_t stream) {
  const Runs runs = runs_of(a, part);
  Cut cut = runs.cut;
  cut.sums = static_cast<float*>(workspace);
  cut.marks = cut.sums + a.batch * groups(a) * cut.splits * cut.rows * width(a) * a.d;
  for (int i = 0; i < runs.count; ++i) {
    const Run& run = runs.run[i];
    cut.begin = run.begin, cut.end = run.end, cut.own_splits = run.splits, cut.span = run.span;
    const dim3 grid(static_cast<unsigned>(run.splits * cut.row_blocks), static_cast<unsigned>(groups(a)),
                    static_cast<unsigned>(a.batch));
    if (const char* wrong = launch(run.plan.kernel, grid, 32 * run.plan.warps, run.plan.shared, stream, a, cut))
      return wrong;
    cut.first_split += run.splits;
  }
  const dim3 heads(static_cast<unsigned>(a.heads), static_cast<unsigned>(part.steps), static_cast<unsigned>(a.batch));
  return launch(merge, heads, MERGE_THREADS, 0, stream, a, cut);
}

}  // namespace diffbit::cuda
