// decode_fast: caches of 16 bits, int8 and fewer bits on tensor cores (attention_decode.cu describes the method).
//
// Codes of 4, 3 or 2 bits (Element is Packed) become levels, which are multiplied like the codes of int8: a warp writes a
// tile's levels, scales and mask to shared memory as a tile of int8 has them. The tokens that are not quantized are another
// kernel's, as a cache of __half.
#pragma once

#include "attention_decode.h"

namespace diffbit::cuda {
namespace {

constexpr int FAST_TOKENS = 16;                     // of a tile, a warp's
constexpr int FAST_EXTRA = 2 * 4 * FAST_TOKENS;    // bytes: of each token two scales, or its mask

struct Packed {};  // codes of 4, 3 or 2 bits

/// Parameters: the type of rows' elements, the width of a sub-head, and whether a kv head has two of them.
template <class Element, int D, bool WIDE>
struct Fast {
  static constexpr int CHANNELS = WIDE ? 2 * D : D;
  static constexpr bool PACKED = std::is_same_v<Element, Packed>;
  static constexpr int ROW = D * static_cast<int>(sizeof(Element));  // bytes of a sub-head's token; Packed: unpacked
  static constexpr bool CODES = sizeof(Element) == 1;
  using Number = std::conditional_t<CODES, __half, Element>;  // that the tensor cores multiply
  static constexpr int BYTES = CHANNELS * static_cast<int>(sizeof(Element));  // of a token
  static constexpr int CHUNKS = BYTES / 16;
  static constexpr int TILE = FAST_TOKENS * BYTES;
  static constexpr int UNPACKED = TILE + 2 * FAST_EXTRA;     // keys: scales, mask; values: scales
  static constexpr int CODE_TILE = TILE / 2;                 // Packed: bytes of codes, at most
  static constexpr int CODE_SCALES = 2 * 2 * FAST_TOKENS;    // and of their scales
  static constexpr int SLOT = PACKED ? CODE_TILE + CODE_SCALES + FAST_EXTRA : UNPACKED;
  static constexpr int SLOTS = PACKED ? 8 : BYTES == 512 ? 3 : 4;   // of a warp
  static constexpr int RING = SLOTS * SLOT + (PACKED ? UNPACKED : 0);  // bytes of a warp
  static constexpr int QUERIES = 2 * ROWS * CHANNELS * 2;
  static constexpr int BLOCKS = CHANNELS == 256 ? 2 : CHANNELS == 128 ? 3 : 4;  // of a multiprocessor

  /// The position of a token's chunk in a tile: the same chunks of eight tokens are in different banks.
  static __device__ __forceinline__ int place(int token, int chunk) {
    return token * BYTES + (chunk ^ (CHUNKS >= 8 ? token & 7 : token >> 1 & 3)) * 16;
  }
  /// The position of a query's channel that matches the key's: a lane's four neighbouring codes become its pairs of a row of
  /// 16.
  static __device__ __forceinline__ int column(int channel) {
    if (!CODES) return channel;
    const int k = channel % 16;
    return channel - k + k / 4 * 2 + k % 2 + k % 4 / 2 * 8;
  }
};

/// Four 8-bit codes as pairs of halves: bytes 0 and 1, or 0 and 2, in `first`, the others in `second`.
__device__ __forceinline__ void halves(uint32_t codes, unsigned first, unsigned second, uint32_t& a, uint32_t& b) {
  const uint32_t moved = codes ^ 0x80808080u;  // + 128; 0x64 before a byte is 1024 + that
  a = subtract2<__half>(__byte_perm(moved, 0x64646464u, first), 0x64806480u);
  b = subtract2<__half>(__byte_perm(moved, 0x64646464u, second), 0x64806480u);
}

/// Codes of 32 channels, BITS words, as levels: those of channels 4 q ... 4 q + 3 are y[q].
template <int BITS>
__device__ __forceinline__ void unpack_group(const void* words, uint32_t (&y)[8]) {
  struct alignas(BITS == 3 ? 4 : 4 * BITS) Words {
    uint32_t x[BITS];
  };
  const Words group = *static_cast<const Words*>(words);
#pragma unroll
  for (int q = 0; q < 8; ++q) {
    uint32_t codes;
    if (BITS == 4) codes = group.x[q % 4] >> q / 4 * 4 & 0x0f0f0f0fu;
    else codes = group.x[q % 2] >> q / 2 * 2 & 0x03030303u;
    if (BITS == 3) codes |= (group.x[BITS - 1] >> q & 0x01010101u) << 2;
    y[q] = levels_of(codes, BITS);
  }
}

template <class Element, int D, bool WIDE>
__global__ void __launch_bounds__(32 * FAST_WARPS, Fast<Element, D, WIDE>::BLOCKS)
    decode_fast(const Attention a, const Cut cut) {
  using F = Fast<Element, D, WIDE>;
  using Number = typename F::Number;
  constexpr int CHANNELS = F::CHANNELS, BLOCKS_OF_16 = CHANNELS / 16;
  __shared__ float scales[ROWS], offsets[ROWS], mosts[FAST_WARPS][ROWS], shares_of[FAST_WARPS][ROWS];
  unsigned char* shared = shared_memory();
  Number* queries = reinterpret_cast<Number*>(shared);
  const int64_t first_row = blockIdx.x % cut.row_blocks * ROWS, split = blockIdx.x / cut.row_blocks;
  const int64_t group = blockIdx.y, b = blockIdx.z, head = b * a.kv_heads + group * (1 + WIDE);
  // The recent tokens of a low-bit cache, which already has the new ones, are counted as rows without the offset: the first
  // tokens, of which there are none if they are in the residual window as well, then the residual window
  const bool recent = std::is_same_v<Element, __half> && a.key_bits < 8;
  const int64_t shift = recent ? quantized_for(a, cut.all) - a.first : 0, all = cut.all - shift;
  const int rows = static_cast<int>(min(static_cast<int64_t>(ROWS), cut.rows - first_row));
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int warps = static_cast<int>(blockDim.x) / 32, g = lane / 4, t = lane % 4;
  unsigned char* ring = shared + F::QUERIES + warp * F::RING;
  const bool last = split == cut.own_splits - 1;

  // A warp's tiles: every warps-th of the split's, and with one warp of the last split the new tokens'
  const int64_t begin = cut.begin + split * cut.span, end = min(begin + cut.span, cut.end);
  const int64_t in_split = begin < end ? divide_up(end - begin, FAST_TOKENS) : 0;
  const int old_tiles = static_cast<int>(in_split > warp ? divide_up(in_split - warp, warps) : 0);
  const int tiles = old_tiles + (!F::PACKED && last && in_split % warps == warp);
  const auto first_of = [&](int tile) {
    return tile == old_tiles ? cut.end : begin + (static_cast<int64_t>(tile) * warps + warp) * FAST_TOKENS;
  };

  // Lane l copies chunk l % CHUNKS of tokens l / CHUNKS, + TOGETHER, ...; scale l, of sub-head l / 16; and mask l
  constexpr int TOGETHER = 32 / F::CHUNKS;
  const int chunk = lane % F::CHUNKS, token_ = lane / F::CHUNKS, in_tile = lane % FAST_TOKENS;
  const int64_t key_slots = recent ? recent_rows(a, true) : a.key_capacity;
  const int64_t value_slots = recent ? recent_rows(a, false) : a.value_capacity;
  const auto chunk_of = [&](const void* rows_, int64_t slots) {  // of token 0
    return static_cast<const char*>(rows_) + (head + chunk * 16 / F::ROW) * slots * F::ROW + chunk * 16 % F::ROW;
  };
  const char* const key_rows = chunk_of(recent ? a.present_key_recent : a.present_key, key_slots);
  const char* const value_rows = chunk_of(recent ? a.present_value_recent : a.present_value, value_slots);
  const bool has_scale = F::CODES && lane < (WIDE ? 32 : FAST_TOKENS);
  const int64_t step_head = head + lane / FAST_TOKENS;
  const __half* const key_steps = static_cast<const __half*>(a.present_key_scale) + step_head * key_slots;
  const __half* const value_steps = static_cast<const __half*>(a.present_value_scale) + step_head * value_slots;
  const int64_t* const mask = static_cast<const int64_t*>(a.attention_mask) + b * a.mask_row;
  const int64_t of_whole = begin < end ? (end - begin) / FAST_TOKENS : 0;  // tiles
  const int whole = static_cast<int>(of_whole > warp ? divide_up(of_whole - warp, warps) : 0);

  // gap: the row of the offset, behind which rows are one further
  constexpr int64_t NO_GAP = INT64_MAX;
  const auto load = [&](const char* rows_, const __half* scales_, int64_t gap, int tile, unsigned char* slot) {
    const int64_t first = first_of(tile);
    const auto row = [&](int64_t token) { return token + (token >= gap); };
    if (tile < whole && (first >= gap || first + FAST_TOKENS <= gap)) {
      const char* from = rows_ + (row(first) + token_) * F::ROW;
#pragma unroll
      for (int k = 0; k < FAST_TOKENS / TOGETHER; ++k)
        copy_async16(slot + F::place(token_ + k * TOGETHER, chunk), from + k * TOGETHER * F::ROW);
      if (has_scale) copy_async2(slot + F::TILE + 4 * lane, scales_ + first + in_tile, true);
      return;
    }
    const int count = static_cast<int>((tile == old_tiles ? all : end) - first);
#pragma unroll
    for (int k = 0; k < FAST_TOKENS / TOGETHER; ++k) {
      const int token = token_ + k * TOGETHER;
      const bool valid = token < count;
      copy_async16(slot + F::place(token, chunk), rows_ + (valid ? row(first + token) : 0) * F::ROW, valid);
    }
    const bool valid = in_tile < count;
    if (has_scale) copy_async2(slot + F::TILE + 4 * lane, scales_ + (valid ? first + in_tile : 0), valid);
  };
  const auto load_codes = [&](bool keys, int tile, unsigned char* slot) {  // 16 tokens of a sub-head follow one another
    const Side side = side_of(a, keys);
    const int bytes = FAST_TOKENS * D / 8 * side.bits;
#pragma unroll
    for (int i = 0; i <= WIDE; ++i) {
      const int64_t first = (head + i) * side.capacity + first_of(tile);
      const char* codes = side.rows + first * (D / 8 * side.bits);
      for (int at = 16 * lane; at < bytes; at += 32 * 16) copy_async16(slot + i * bytes + at, codes + at);
      if (lane < 2)
        copy_async16(slot + F::CODE_TILE + i * 2 * FAST_TOKENS + 16 * lane, side.scales + first + 8 * lane);
    }
  };
  constexpr int MASK = F::PACKED ? F::CODE_TILE + F::CODE_SCALES : F::TILE + FAST_EXTRA;  // place in a slot
  const auto start_keys = [&](int tile, unsigned char* slot) {
    if (tile < tiles) {
      if constexpr (F::PACKED) load_codes(true, tile, slot);
      else load(key_rows, key_steps, recent ? a.first : NO_GAP, tile, slot);
      const int64_t t = first_of(tile) + lane;
      const bool valid = t < (tile == old_tiles ? all : end);  // zeros beyond the end: hidden
      const int64_t token = recent && t >= a.first ? t + shift : t;
      if (lane < FAST_TOKENS) copy_async<8>(slot + MASK + 8 * lane, mask + (valid ? token : 0), valid ? 8 : 0);
    }
    copy_async_commit();
  };
  const auto start_values = [&](int tile, unsigned char* slot) {
    if (tile < tiles) {
      if constexpr (F::PACKED) load_codes(false, tile, slot);
      else load(value_rows, value_steps, NO_GAP, tile, slot);
    }
    copy_async_commit();
  };
  const auto start_first = [&](bool old) {  // keys and values of a tile, alternating
#pragma unroll
    for (int unit = 0; unit < F::SLOTS - 1; ++unit)
      if ((unit / 2 < old_tiles) == old)
        unit % 2 ? start_values(unit / 2, ring + unit * F::SLOT) : start_keys(unit / 2, ring + unit * F::SLOT);
  };
  /// A slot's tile as logits and mix read it.
  const auto unpacked = [&](unsigned char* slot, bool keys, int tile) -> const unsigned char* {
    if constexpr (!F::PACKED) {
      if (has_scale) {
        const __half* scale = (keys ? key_steps : value_steps) + first_of(tile) + in_tile;
        const bool upper = reinterpret_cast<uintptr_t>(scale) % 4;
        float* word = reinterpret_cast<float*>(slot + F::TILE) + lane;
        *word = to_float(reinterpret_cast<const __half*>(word)[upper]);
      }
      if (F::CODES) __syncwarp();
      return slot;
    }
    unsigned char* to = ring + F::SLOTS * F::SLOT;
    const int bits = static_cast<int>(keys ? a.key_bits : a.value_bits);
#pragma unroll
    for (int unit = lane; unit < FAST_TOKENS * CHANNELS / 32; unit += 32) {  // 32 channels of a token of a sub-head
      constexpr int GROUPS = D / 32;
      const int token = unit / GROUPS % FAST_TOKENS, sub_head = unit / GROUPS / FAST_TOKENS;
      uint32_t y[8];
      const unsigned char* codes = slot + unit * 4 * bits;
      bits == 4 ? unpack_group<4>(codes, y) : bits == 3 ? unpack_group<3>(codes, y) : unpack_group<2>(codes, y);
      const int first = sub_head * (D / 16) + unit % GROUPS * 2;
      *reinterpret_cast<uint4*>(to + F::place(token, first)) = make_uint4(y[0], y[1], y[2], y[3]);
      *reinterpret_cast<uint4*>(to + F::place(token, first + 1)) = make_uint4(y[4], y[5], y[6], y[7]);
    }
    if (lane < (1 + WIDE) * FAST_TOKENS)
      reinterpret_cast<float*>(to + F::TILE)[lane] =
          to_float(reinterpret_cast<const __half*>(slot + F::CODE_TILE)[lane]);
    if (keys && lane < FAST_TOKENS)  // the first tokens are among the recent ones
      reinterpret_cast<int64_t*>(to + F::TILE + FAST_EXTRA)[lane] =
          first_of(tile) + lane < a.first ? 0 : reinterpret_cast<const int64_t*>(slot + MASK)[lane];
    __syncwarp();
    return to;
  };

  const auto append_new = [&] {
    if (!last || F::PACKED || recent || !a.key) return;
    const int rows = (1 + WIDE) * static_cast<int>(cut.part.steps);
    for (int i = warp; i < 2 * rows; i += warps)
      append_row<D / 32>(a, side_of(a, i < rows), b, cut.part.first + i % rows / (1 + WIDE),
                         group * (1 + WIDE) + i % (1 + WIDE), lane);
    __threadfence();
  };
  if (!needs(a, cut, b, group, first_row, rows)) return append_new();
  start_first(true);
  append_new();
  for (int row = warp; row < ROWS; row += warps) {
    float x[D / 32];
    query_of(a, cut, b, group, first_row + row, lane, x);
    const float size = normalize(x) * LOG2_E;
    const bool second = WIDE && first_row + row >= pairs(a) * cut.part.steps;  // of its sub-heads
    const float offset = F::PACKED ? offset_product(a, head + second, lane, x) * size : 0.0f;
    if (lane == 0) scales[row] = size, offsets[row] = offset;
    const int keys_at = second ? D : 0;
    const auto put = [&](int channel, float y) {
      const int column = F::column(channel), at = (column / 8 ^ (row & 7)) * 8 + column % 8;
      const Number high = from_float<Number>(y);
      queries[row * CHANNELS + at] = high;
      queries[(row + ROWS) * CHANNELS + at] = from_float<Number>(y - to_float(high));
    };
#pragma unroll
    for (int k = 0; k < D / 32; ++k) {
      put(keys_at + lane + 32 * k, x[k]);
      if (WIDE) put(D - keys_at + lane + 32 * k, 0.0f);
    }
  }
  __syncthreads();
  start_first(false);

  // Fragments are described in device.h. Logits: rows and their rounding errors are the 16 rows of a, a tile's keys are two
  // times 8 columns of b, so lane 4 g + t has the logits of row g and tokens 2t, 2t + 1, + 8. Shares then have the layout of
  // b, and values, [16 channels, 16 tokens], are a.
  float sums[BLOCKS_OF_16][4] = {}, most = -infinity(), total = 0;
  const int64_t row = min(first_row + g, cut.rows - 1);
  const int seen = static_cast<int>(cut.past - shift + row % cut.part.steps - cut.end);  // of the new tokens' tile
  const int sub_head = WIDE && row >= pairs(a) * cut.part.steps;
  const float scale = scales[g], offset = offsets[g];
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
      if constexpr (F::CODES) {  // two chunks, of 16 channels each
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
      const uint4 mask = *reinterpret_cast<const uint4*>(slot + F::TILE + FAST_EXTRA + 8 * token);
      const float* key_scales = reinterpret_cast<const float*>(slot + F::TILE) + sub_head * FAST_TOKENS + token;
      const bool shown[2] = {(mask.x | mask.y) && token <= most_seen, (mask.z | mask.w) && token < most_seen};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float x = (c[i][j] + c[i][2 + j]) * scale * (F::CODES ? key_scales[j] : 1.0f);
        s[2 * i + j] = shown[j] ? (F::PACKED ? x + offset : x) : -infinity();
      }
    }
  };

  const auto mix = [&](const unsigned char* slot) {
    // Codes: a share times the value's scale must also be at most about 1, so the scales' sizes count in the maximum
    float value_scales[2][4], next = most;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* extra = reinterpret_cast<const float*>(slot + F::TILE) + i / 2 * 8 + 2 * t + i % 2;
      value_scales[0][i] = F::CODES ? extra[0] : 1.0f;
      value_scales[1][i] = F::CODES && WIDE ? extra[FAST_TOKENS] : value_scales[0][i];
      const int size = static_cast<int>(__float_as_uint(fmaxf(value_scales[0][i], value_scales[1][i])) >> 23) - 127;
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
        const float x = shares[2 * i] * value_scales[j][2 * i], y = shares[2 * i + 1] * value_scales[j][2 * i + 1];
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
    __syncwarp();  // the other lanes' bytes have arrived, and all have read what the next copies replace
    F::SLOTS % 2 ? start_keys(tile + F::SLOTS / 2, free) : start_values(tile + F::SLOTS / 2 - 1, free);
    logits(unpacked(slot, true, tile), tile == old_tiles ? seen : FAST_TOKENS);
    next();
    copy_async_wait<F::SLOTS - 2>();
    __syncwarp();
    F::SLOTS % 2 ? start_values(tile + F::SLOTS / 2, free) : start_keys(tile + F::SLOTS / 2, free);
    mix(unpacked(slot, false, tile));
    next();
  }
  total += __shfl_xor_sync(0xffffffffu, total, 1);
  total += __shfl_xor_sync(0xffffffffu, total, 2);
  copy_async_wait<0>();
  __syncthreads();

  float* result = reinterpret_cast<float*>(shared);  // [warps, ROWS, CHANNELS]
  if (t == 0) mosts[warp][g] = most, shares_of[warp][g] = total;
#pragma unroll
  for (int k = 0; k < BLOCKS_OF_16; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int channel = 16 * k + (F::CODES ? 2 * g + i / 2 : g + i / 2 * 8);
      result[(warp * ROWS + 2 * t + i % 2) * CHANNELS + channel] = sums[k][i];
    }
  __syncthreads();
  leave<CHANNELS>(a, cut, first_row, rows, warps, mosts, shares_of,
                  [&](int w, int r, int channel) { return result[(w * ROWS + r) * CHANNELS + channel]; });
}

}  // namespace
}  // namespace diffbit::cuda
