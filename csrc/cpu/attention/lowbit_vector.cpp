// A low-bit cache with vectors: packed codes are read and unpacked in registers.
//
// Keys, for a block of 32 tokens and a query row: u = q * scales and q . zero points once, then 32 products u . codes, in
// floats or, with u rounded, in integers. Values: the probabilities of a block's tokens are multiplied by their codes; the
// sums, times the scales, and the sum of the probabilities, times the zero points, are added to the output once a block. The
// two sub-heads alternate block by block, so two streams of memory are open; lines are prefetched.
#include "integer_dots.h"
#include "lowbit.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

constexpr int VECTORS = static_cast<int>(BLOCK / L);  // of floats in a group
constexpr int64_t AHEAD = 2048, LINE = 64;            // bytes
static_assert(BLOCK % L == 0, "vectors fit");

DIFFBIT_INLINE void ask(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += LINE) prefetch(static_cast<const char*>(from) + i + AHEAD);
}

// ---- rounding ----

/// codes [d] -> d * BITS / 8 bytes.
template <int BITS>
DIFFBIT_INLINE void pack(const int8_t* codes, int64_t d, uint8_t* packed) {
  constexpr int64_t BYTES = group_bytes<BITS>();
  for (int64_t i = 0; i < d; i += BLOCK, codes += BLOCK, packed += BYTES) {
    uint8_t group[BYTES] = {};
    for (int place = 0; place < 8 / BITS; ++place)
      for (int64_t byte = 0; byte < BYTES; ++byte)
        group[byte] = static_cast<uint8_t>(group[byte] | codes[place * BYTES + byte] << (place * BITS));
    std::memcpy(packed, group, BYTES);
  }
}

/// The scale, rounded to float16, for numbers from the zero point to `most`.
template <int BITS>
DIFFBIT_INLINE F32 scale_of(F32 most, F32 zero_point) {
  Half scale[L];
  store(scale, (most - zero_point) / splat(float{(1 << BITS) - 1}));
  return load(scale);
}

template <int BITS>
DIFFBIT_INLINE F32 code_of(F32 x, F32 zero_point, F32 divisor) {
  return smaller(splat(float{(1 << BITS) - 1}), larger((x - zero_point) / divisor, splat(0.0f)));
}

/// The divisor that makes codes of numbers: the scale, or 1 if it is 0.
DIFFBIT_INLINE F32 divisor_of(F32 scale) {
  float lanes[L];
  store(lanes, scale);
  for (float& lane : lanes) lane = lane == 0 ? 1 : lane;
  return load(lanes);
}

template <int BITS>
void quantize(const Half* x, int64_t d, uint8_t* packed, Half* scales) {
  int8_t codes[BLOCK * MOST_D];
  for (int64_t i = 0; i < d; i += L) {
    F32 least = load(x + i), most = least, poison = splat(0.0f);
    for (int64_t t = 0; t < BLOCK; ++t) {
      const F32 one = load(x + t * d + i);
      least = smaller(one, least), most = larger(one, most), poison = fma(one, splat(0.0f), poison);
    }
    const F32 zero_point = least + poison, scale = scale_of<BITS>(most, zero_point), divisor = divisor_of(scale);
    for (int64_t t = 0; t < BLOCK; ++t)
      store_rounded(codes + t * d + i, code_of<BITS>(load(x + t * d + i), zero_point, divisor));
    store(scales + i, scale);
    store(scales + d + i, zero_point);
  }
  for (int64_t t = 0; t < BLOCK; ++t) pack<BITS>(codes + t * d, d, packed + t * (d * BITS / 8));
}

// ---- scores in floats ----

/// Four keys at a time: sums[row][key] = part[row] + the products, one vector each.
template <int BITS, int ROWS>
DIFFBIT_INLINE void score_block(const uint8_t* codes, int64_t d, const float* u, const F32 (&parts)[ROWS], float* s,
                                int64_t stride, bool asks) {
  const int64_t bytes = d * BITS / 8;
  for (int64_t t = 0; t < BLOCK; t += 4) {
    if (asks) ask(codes + t * bytes, 4 * bytes);
    F32 sums[ROWS][4];
    DIFFBIT_UNROLL for (int row = 0; row < ROWS; ++row)
      DIFFBIT_UNROLL for (int key = 0; key < 4; ++key) sums[row][key] = parts[row];
    for (int64_t i = 0; i < d; i += BLOCK)
      DIFFBIT_UNROLL for (int key = 0; key < 4; ++key) {
        F32 c[VECTORS];
        load_codes<BITS>(codes + (t + key) * bytes + i * BITS / 8, c);
        DIFFBIT_UNROLL for (int row = 0; row < ROWS; ++row)
          DIFFBIT_UNROLL for (int v = 0; v < VECTORS; ++v)
            sums[row][key] = fma(load(u + row * d + i + v * L), c[v], sums[row][key]);
      }
    DIFFBIT_UNROLL for (int row = 0; row < ROWS; ++row)
      store_sums(s + row * stride + t, sums[row][0], sums[row][1], sums[row][2], sums[row][3]);
  }
}

template <int BITS, int ROWS>
DIFFBIT_INLINE void score_rows(const uint8_t* codes, const Half* scales, int64_t d, const float* q, float* s,
                               int64_t stride, bool asks) {
  float u[ROWS * MOST_D];
  F32 parts[ROWS];  // of q . zero points
  DIFFBIT_UNROLL for (int row = 0; row < ROWS; ++row) parts[row] = splat(0.0f);
  for (int64_t i = 0; i < d; i += L) {
    const F32 scale = load(scales + i), zero_point = load(scales + d + i);
    DIFFBIT_UNROLL for (int row = 0; row < ROWS; ++row) {
      const F32 one = load(q + row * d + i);
      store(u + row * d + i, one * scale);
      parts[row] = fma(one, zero_point, parts[row]);
    }
  }
  if (d == 64) return score_block<BITS, ROWS>(codes, 64, u, parts, s, stride, asks);  // a constant: u stays in registers
  score_block<BITS, ROWS>(codes, d, u, parts, s, stride, asks);
}

/// Calls work(j, block) for every block of both sub-heads, alternating.
template <class Work>
DIFFBIT_INLINE void each_block(const BlockRows& rows, int64_t n, const Work& work) {
  for (int64_t block = 0; block < n / BLOCK; ++block)
    for (int64_t j = 0; j < rows.count; ++j) work(j, block);
}

template <int BITS>
void scores(const BlockRows& keys, int64_t n, int64_t d, const float* q, QueryRows rows, float* s, int64_t stride) {
  constexpr int MOST = REGISTERS == 16 ? 2 : 4;
  each_block(keys, n, [&](int64_t j, int64_t block) {
    const uint8_t* codes = keys.codes[j] + block * BLOCK * d * BITS / 8;
    const Half* scales = keys.scales[j] + block * 2 * d;
    in_tiles<MOST>(rows.begin(j), rows.end(j), [&](auto count, int64_t row) {
      score_rows<BITS, count()>(codes, scales, d, q + row * d, s + row * stride + block * BLOCK, stride,
                                row == rows.begin(j));
    });
  });
}

// ---- scores in integers ----

/// The sum of the rounding errors of x.
DIFFBIT_INLINE float lost(const float* x, const int8_t* codes, float scale, int64_t d) {
  F32 part = splat(0.0f);
  for (int64_t i = 0; i < d; i += L) part = part + (load(x + i) - load(codes + i) * splat(scale));
  return sum(part);
}

template <int BITS>
void integer_scores(const BlockRows& keys, int64_t n, int64_t d, const float* q, QueryRows rows, int top, float* s,
                    int64_t stride) {
  const Layout layout(d * BITS / 8);
  uint8_t padded_rows[BLOCK * ROW_MOST];
  Rounded u;
  u.start = zero();
  each_block(keys, n, [&](int64_t j, int64_t block) {
    ask(keys.codes[j] + block * BLOCK * layout.bytes, BLOCK * layout.bytes);
    const uint8_t* codes = laid_out(keys.codes[j] + block * BLOCK * layout.bytes, BLOCK, layout, padded_rows);
    const Half* scales = keys.scales[j] + block * 2 * d;
    for (int64_t row = rows.begin(j); row < rows.end(j); ++row) {
      float scaled[MOST_D];
      int8_t rounded_codes[MOST_D];
      F32 part = splat(0.0f);
      for (int64_t i = 0; i < d; i += L) {
        const F32 one = load(q + row * d + i);
        store(scaled + i, one * load(scales + i));
        part = fma(one, load(scales + d + i), part);
      }
      u.scale = round_row(scaled, d, top, rounded_codes);
      arrange<BITS>(rounded_codes, d, layout, u);
      const F32 scale = splat(u.scale), offset = splat(sum(part) + middle(BITS) * lost(scaled, rounded_codes, u.scale, d));
      float* to = s + row * stride + block * BLOCK;
      dots_of_block<8 / BITS>(codes, layout, u, [&](int64_t t, Ints dots) {
        store(to + t, to_floats(dots) * scale + offset);
      });
    }
  });
}

void integer_row_scores(const CacheRows& keys, int64_t n, int64_t d, const float* q, QueryRows rows, int top, float* s,
                        int64_t stride) {
  const Layout layout(d);
  uint8_t padded_rows[BLOCK * ROW_MOST];
  for (int64_t row = 0; row < rows.end(keys.count - 1); ++row) {
    const int64_t j = row >= rows.count[0];
    int8_t rounded_codes[MOST_D];
    Rounded u;
    u.scale = round_row(q + row * padded(d), d, top, rounded_codes);
    arrange<8>(rounded_codes, d, layout, u);
    u.start = zero();
    for (int64_t v = 0; v < layout.vectors(); ++v)
      u.start = start_signed(u.start, load_bytes(u.codes + v * WIDTH));
    const F32 scale = splat(u.scale);
    const uint8_t* from = static_cast<const uint8_t*>(keys.rows[j]);
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
      const int64_t count = n - begin < BLOCK ? n - begin : BLOCK;
      ask(from + begin * d, count * d);
      const uint8_t* block = laid_out(from + begin * d, count, layout, padded_rows);
      float scaled[BLOCK];
      dots_of_block<1>(block, layout, u, [&](int64_t t, Ints dots) { store(scaled + t, to_floats(dots) * scale); });
      for (int64_t t = 0; t < count; ++t) s[row * stride + begin + t] = scaled[t] * keys.scales[j][begin + t];
    }
  }
}

// ---- values ----

/// ROWS rows of p by a block of values, GROUPS groups of their channels; p_sums: of each row.
template <int BITS, int ROWS, int GROUPS>
DIFFBIT_INLINE void mix_tile(const uint8_t* codes, const Half* scales, int64_t d, const float* p, int64_t stride,
                             const float (&p_sums)[ROWS], float* out, int64_t width, bool asks) {
  F32 sums[ROWS][GROUPS][VECTORS];
  DIFFBIT_UNROLL for (int row = 0; row < ROWS; ++row)
    DIFFBIT_UNROLL for (int group = 0; group < GROUPS; ++group)
      DIFFBIT_UNROLL for (int v = 0; v < VECTORS; ++v) sums[row][group][v] = splat(0.0f);
  for (int64_t t = 0; t < BLOCK; ++t, codes += d * BITS / 8) {
    if (asks) prefetch(codes + AHEAD);
    DIFFBIT_UNROLL for (int group = 0; group < GROUPS; ++group) {
      F32 c[VECTORS];
      load_codes<BITS>(codes + group * group_bytes<BITS>(), c);
      DIFFBIT_UNROLL for (int row = 0; row < ROWS; ++row) {
        const F32 share = in_lanes(splat(p[row * stride + t]));
        DIFFBIT_UNROLL for (int v = 0; v < VECTORS; ++v)
          sums[row][group][v] = fma(share, c[v], sums[row][group][v]);
      }
    }
  }
  DIFFBIT_UNROLL for (int group = 0; group < GROUPS; ++group)
    DIFFBIT_UNROLL for (int v = 0; v < VECTORS; ++v) {
      const int64_t i = group * BLOCK + v * L;
      const F32 scale = load(scales + i), zero_point = load(scales + d + i);
      DIFFBIT_UNROLL for (int row = 0; row < ROWS; ++row) {
        float* to = out + row * width + i;
        store(to, fma(sums[row][group][v], scale, fma(splat(p_sums[row]), zero_point, load(to))));
      }
    }
}

template <int BITS, int ROWS>
DIFFBIT_INLINE void mix_rows(const uint8_t* codes, const Half* scales, int64_t d, const float* p, int64_t stride,
                             float* out, int64_t width, bool asks) {
  constexpr int GROUPS = L == 16 || ROWS == 1 ? 2 : 1;
  float p_sums[ROWS];
  DIFFBIT_UNROLL for (int row = 0; row < ROWS; ++row) {
    F32 part = load(p + row * stride);
    DIFFBIT_UNROLL for (int v = 1; v < VECTORS; ++v) part = part + load(p + row * stride + v * L);
    p_sums[row] = sum(part);
  }
  int64_t i = 0;
  for (; i + GROUPS * BLOCK <= d; i += GROUPS * BLOCK)
    mix_tile<BITS, ROWS, GROUPS>(codes + i * BITS / 8, scales + i, d, p, stride, p_sums, out + i, width,
                                 asks && i * BITS / 8 % LINE == 0);
  for (; i < d; i += BLOCK)
    mix_tile<BITS, ROWS, 1>(codes + i * BITS / 8, scales + i, d, p, stride, p_sums, out + i, width,
                            asks && i * BITS / 8 % LINE == 0);
}

template <int BITS>
void mix(const BlockRows& values, int64_t n, int64_t d, const float* p, int64_t rows, int64_t stride, float* out) {
  constexpr int MOST = L == 16 ? 4 : 2;
  const int64_t width = values.count * d;
  each_block(values, n, [&](int64_t j, int64_t block) {
    const uint8_t* codes = values.codes[j] + block * BLOCK * d * BITS / 8;
    const Half* scales = values.scales[j] + block * 2 * d;
    in_tiles<MOST>(0, rows, [&](auto count, int64_t row) {
      mix_rows<BITS, count()>(codes, scales, d, p + row * stride + block * BLOCK, stride, out + row * width + j * d, width,
                              row == 0);
    });
  });
}

// ---- many query rows ----

/// The numbers of a token; without its block's scales, its codes.
template <int BITS>
DIFFBIT_INLINE void unpack(const uint8_t* codes, const Half* scales, int64_t d, float* row) {
  for (int64_t i = 0; i < d; i += BLOCK) {
    F32 c[VECTORS];
    load_codes<BITS>(codes + i * BITS / 8, c);
    DIFFBIT_UNROLL for (int v = 0; v < VECTORS; ++v) {
      const int64_t at = i + v * L;
      store(row + at, scales ? c[v] * load(scales + at) + load(scales + d + at) : c[v]);
    }
  }
}

template <int BITS>
void unpack_values(const uint8_t* codes, const Half* scales, int64_t n, int64_t d, float* values) {
  for (int64_t t = 0; t < n; ++t)
    unpack<BITS>(codes + t * d * BITS / 8, scales + t / BLOCK * 2 * d, d, values + t * d);
}

template <int BITS>
void pack_keys(const uint8_t* codes, const Half* scales, int64_t n, int64_t d, float* packed) {
  for (int64_t begin = 0; begin < n; begin += BLOCK, packed += BLOCK * d, scales += scales ? 2 * d : 0)
    for (int64_t lane = 0; lane < BLOCK; ++lane, codes += d * BITS / 8) {
      float row[MOST_D];
      unpack<BITS>(codes, scales, d, row);
      for (int64_t i = 0; i < d; ++i) packed[i * BLOCK + lane] = row[i];
    }
}

float quantize_query(const float* q, const Half* scales, int key_bits, int64_t d, int top, float* codes, float* offset) {
  int8_t rounded_codes[MOST_D];
  float scaled[MOST_D];
  F32 part = splat(0.0f);
  if (scales)
    for (int64_t i = 0; i < d; i += L) {
      store(scaled + i, load(q + i) * load(scales + i));
      part = fma(load(q + i), load(scales + d + i), part);
    }
  const float scale = round_row(scales ? scaled : q, d, top, rounded_codes);
  *offset = scales ? sum(part) + middle(key_bits) * lost(scaled, rounded_codes, scale, d) : 0;
  for (int64_t i = 0; i < d; ++i) codes[i] = rounded_codes[i];
  return scale;
}

}  // namespace

extern const LowBitKernels lowbit = DIFFBIT_LOWBIT_KERNELS;

}  // namespace diffbit::DIFFBIT_ISA
