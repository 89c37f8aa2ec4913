// decode_int4: a cache of 4 bits on tensor cores (attention_decode.cu describes the method).
//
// It computes the quantized tokens; decode_fast computes the recent ones, as a cache of __half. A tile is a block of 32 tokens:
//     logit = sum_i (q_i scale_i) code_i + q . zeros        out_i = scale_i sum_t p_t code_ti + zero_i sum_t p_t
// Products q scale are two __half (the loss for small ones does not change a logit), shares p, also very small ones, two
// __nv_bfloat16. A tile's products of shares and codes are multiplied by the scales as they are added to the output.
#pragma once

#include "decode_fast.h"

namespace diffbit::cuda {
namespace {

template <int D, bool WIDE>
struct Int4 {
  static constexpr int CHANNELS = WIDE ? 2 * D : D;
  static constexpr int BYTES = CHANNELS / 2;  // of a token
  static constexpr int CHUNKS = BYTES / 16;   // of 32 channels
  static constexpr int TILE = static_cast<int>(CACHE_BLOCK) * BYTES;
  static constexpr int SCALES = 4 * CHANNELS;  // and zero points
  static constexpr int SLOT = TILE + SCALES + 8 * static_cast<int>(CACHE_BLOCK);  // keys: and the mask
  static constexpr int SLOTS = CHANNELS == 256 ? 3 : 4;
  static constexpr int QUERY = CHANNELS + 16;  // floats: two rows are in different banks
  static constexpr int QUERIES = ROWS * QUERY * 4;
  static constexpr int BLOCKS = CHANNELS == 256 ? 2 : 3;

  static __device__ __forceinline__ int place(int token, int chunk) {
    return token * BYTES + (chunk ^ (token / (8 / CHUNKS) & (CHUNKS - 1))) * 16;
  }
};

/// The four low or the four high of eight 4-bit codes as pairs of T, as in `halves`.
template <class T>
__device__ __forceinline__ void nibbles(uint32_t codes, bool of_high, unsigned first, unsigned second, uint32_t& a,
                                        uint32_t& b) {
  constexpr bool HALF = std::is_same_v<T, __half>;  // a byte after 0x64 is 1024 + byte, after 0x43 it is 128 + byte
  constexpr uint32_t BEFORE = HALF ? 0x64646464u : 0x43434343u, SURPLUS = HALF ? 0x64006400u : 0x43004300u;
  const uint32_t four = (of_high ? codes >> 4 : codes) & 0x0f0f0f0fu;
  a = subtract2<T>(__byte_perm(four, BEFORE, first), SURPLUS);
  b = subtract2<T>(__byte_perm(four, BEFORE, second), SURPLUS);
}

/// Splits x, y into two pairs whose sums they are.
template <class T>
__device__ __forceinline__ void halve(float x, float y, uint32_t& high, uint32_t& low) {
  high = pack2<T>(x, y);
  const float2 rounded = unpack2<T>(high);
  low = pack2<T>(x - rounded.x, y - rounded.y);
}

template <int D, bool WIDE>
__global__ void __launch_bounds__(32 * FAST_WARPS, Int4<D, WIDE>::BLOCKS)
    decode_int4(const Attention a, const Cut cut) {
  using G = Int4<D, WIDE>;
  constexpr int CHANNELS = G::CHANNELS, TOKENS = static_cast<int>(CACHE_BLOCK), OF_HEAD = D / TOKENS;
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

  // Lane l copies chunk l % CHUNKS of tokens l / CHUNKS, ..., 16 bytes of scales, and mask l
  const int chunk_ = lane % G::CHUNKS, token_ = lane / G::CHUNKS;
  constexpr int ROW = D / 2;  // bytes of a sub-head's token
  const auto chunk_of = [&](const void* rows_, int64_t slots) {
    return static_cast<const char*>(rows_) + ((head + chunk_ / OF_HEAD) * slots + token_) * ROW + chunk_ % OF_HEAD * 16;
  };
  const char* const key_rows = chunk_of(a.present_key, a.key_capacity);
  const char* const value_rows = chunk_of(a.present_value, a.value_capacity);
  const int64_t* const mask = static_cast<const int64_t*>(a.attention_mask) + b * a.mask_row + lane;
  const int64_t next_keys = a.key_capacity / CACHE_BLOCK * (4 * D), next_values = a.value_capacity / CACHE_BLOCK * (4 * D);
  const char* const key_scales = static_cast<const char*>(a.present_key_scale) + head * next_keys;
  const char* const value_scales = static_cast<const char*>(a.present_value_scale) + head * next_values;

  // next: bytes from the scales of a sub-head to those of the next one
  const auto load = [&](const char* rows_, const char* scales_, int64_t next, int64_t first, unsigned char* slot) {
#pragma unroll
    for (int k = 0; k < G::CHUNKS; ++k) {
      constexpr int TOGETHER = 32 / G::CHUNKS;
      copy_async16(slot + G::place(token_ + k * TOGETHER, chunk_), rows_ + (first + k * TOGETHER) * ROW);
    }
    const char* from = scales_ + first / CACHE_BLOCK * (4 * D);
#pragma unroll
    for (int k = 0; k < (G::SCALES + 511) / 512; ++k) {
      const int i = 16 * lane + 512 * k;
      if (i < G::SCALES) copy_async16(slot + G::TILE + i, from + (i / (4 * D) ? next : 0) + i % (4 * D));
    }
  };
  const auto first_of = [&](int tile) { return begin + (static_cast<int64_t>(tile) * warps + warp) * TOKENS; };
  const auto start_keys = [&](int tile, unsigned char* slot) {
    if (tile < tiles) {
      load(key_rows, key_scales, next_keys, first_of(tile), slot);
      copy_async<8>(slot + G::TILE + G::SCALES + 8 * lane, mask + first_of(tile));
    }
    copy_async_commit();
  };
  const auto start_values = [&](int tile, unsigned char* slot) {
    if (tile < tiles) load(value_rows, value_scales, next_values, first_of(tile), slot);
    copy_async_commit();
  };
#pragma unroll
  for (int unit = 0; unit < G::SLOTS - 1; ++unit)  // keys and values of a tile, alternating
    unit % 2 ? start_values(unit / 2, ring + unit * G::SLOT) : start_keys(unit / 2, ring + unit * G::SLOT);
  for (int row = warp; row < ROWS; row += warps) {
    constexpr int EACH = D / 64;
    float2 x[EACH];
    const float size = query_of(a, cut, b, group, first_row + row, lane, x);
    if (lane == 0) scales[row] = size * LOG2_E;
    const int keys_at = WIDE && first_row + row >= pairs(a) * cut.part.steps ? D : 0;
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
      float* to = queries + row * G::QUERY + lane + 32 * k;
      to[keys_at] = x[k].x, to[keys_at + D / 2] = x[k].y;
      if (WIDE) to[D - keys_at] = 0, to[D - keys_at + D / 2] = 0;
    }
  }
  __syncthreads();

  float sums[CHANNELS / 16][4] = {}, s[8], most = -infinity(), total = 0;
  const float scale = scales[g];

  /// The scales of a chunk's channels; their zero points are D further.
  const auto scales_of = [&](const unsigned char* slot, int chunk) {
    return reinterpret_cast<const __half*>(slot + G::TILE) + chunk / OF_HEAD * D + TOKENS * chunk;
  };
  const auto logits = [&](const unsigned char* slot) {
    float c[4][4] = {}, offset = 0;
#pragma unroll
    for (int chunk = 0; chunk < G::CHUNKS; ++chunk) {
      uint32_t x[4];
      load_matrix_x4(x, slot + G::place(lane, chunk));
      const __half* key_scale = scales_of(slot, chunk);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = 16 * half + 4 * t;
        const float4 q = *reinterpret_cast<const float4*>(queries + g * G::QUERY + TOKENS * chunk + at);
        const uint2 scale = *reinterpret_cast<const uint2*>(key_scale + at);
        const uint2 zero = *reinterpret_cast<const uint2*>(key_scale + D + at);
        const float2 by[2] = {unpack2<__half>(scale.x), unpack2<__half>(scale.y)};
        const float2 zeros[2] = {unpack2<__half>(zero.x), unpack2<__half>(zero.y)};
        offset += q.x * zeros[0].x + q.y * zeros[0].y + q.z * zeros[1].x + q.w * zeros[1].y;
        uint32_t query[4], key[2];
        halve<__half>(q.x * by[0].x, q.y * by[0].y, query[0], query[1]);
        halve<__half>(q.z * by[1].x, q.w * by[1].y, query[2], query[3]);
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
      const uint4 mask = *reinterpret_cast<const uint4*>(slot + G::TILE + G::SCALES + 8 * (8 * i + 2 * t));
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
    const auto of_rows = [&](float x, int i) { return __shfl_sync(0xffffffffu, x, 8 * t + 4 * i); };  // row 2 t + i
    if (__any_sync(0xffffffffu, next > most)) {
      const float factor = exp2_approx(most - level(next)), factors[2] = {of_rows(factor, 0), of_rows(factor, 1)};
      total *= factor;
      most = next;
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int k = 0; k < CHANNELS / 16; ++k) sums[k][i] *= factors[i % 2];
    }
    float share = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      shares[i] = exp2_approx(s[i] - level(most));
      share += shares[i];
    }
    share += __shfl_xor_sync(0xffffffffu, share, 1);
    share += __shfl_xor_sync(0xffffffffu, share, 2);
    total += share;
    const float weights[2] = {of_rows(share, 0), of_rows(share, 1)};
    uint32_t high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) halve<__nv_bfloat16>(shares[2 * i], shares[2 * i + 1], high[i], low[i]);
#pragma unroll
    for (int chunk = 0; chunk < G::CHUNKS; ++chunk) {
      uint32_t x[4], value[4];
      load_matrix_x4_transposed(x, slot + G::place(lane, chunk));
      const __half* value_scale = scales_of(slot, chunk);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float c[4] = {};  // channels 2 g (0, 1) and 2 g + 1 (2, 3), of rows 2 t and 2 t + 1
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          nibbles<__nv_bfloat16>(x[i], half, 0x4240, 0x4341, value[0], value[1]);
          nibbles<__nv_bfloat16>(x[i + 1], half, 0x4240, 0x4341, value[2], value[3]);
          const uint32_t more[2] = {high[i], high[i + 1]}, less[2] = {low[i], low[i + 1]};
          mma<__nv_bfloat16>(c, value, more);
          mma<__nv_bfloat16>(c, value, less);
        }
        const int at = 16 * half + 2 * g;
        const float2 scale = unpack2<__half>(*reinterpret_cast<const uint32_t*>(value_scale + at));
        const float2 zero = unpack2<__half>(*reinterpret_cast<const uint32_t*>(value_scale + D + at));
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sums[2 * chunk + half][i] += c[i] * (i < 2 ? scale.x : scale.y) + weights[i % 2] * (i < 2 ? zero.x : zero.y);
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
  copy_async_wait<0>();
  __syncthreads();

  float* all = reinterpret_cast<float*>(shared);
  if (t == 0) mosts[warp][g] = most, shares_of[warp][g] = total;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int k = 0; k < CHANNELS / 16; ++k)
      all[(warp * ROWS + 2 * t + i % 2) * CHANNELS + 16 * k + 2 * g + i / 2] = sums[k][i];
  __syncthreads();
  leave<CHANNELS>(a, cut, first_row, rows, warps, mosts, shares_of,
                  [&](int w, int r, int channel) { return all[(w * ROWS + r) * CHANNELS + channel]; });
}

}  // namespace
}  // namespace diffbit::cuda
