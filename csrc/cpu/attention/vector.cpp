// DiffAttention with vectors of floats.
//
// Reading a cache (scores, mix): the two sub-heads alternate, so two streams of memory are open; the first tile prefetches
// lines, one by one between its products. A tile of query rows uses each number of the cache while it is in a register.
// Many queries (packed_scores, mix): tiles of rows by vectors; a query's number or a probability is broadcast.
#include "kernels.h"

#include "../simd/vectors.h"
#ifdef DIFFBIT_TILES
#include "split.h"
#endif

namespace diffbit::DIFFBIT_ISA {
namespace {

constexpr int64_t L = F32_LANES;
constexpr int64_t TURN = 2048, MOST_TURN = 64;  // bytes and rows of a sub-head before the other one's turn
constexpr int64_t AHEAD = 4096;                 // bytes
constexpr int64_t LINE = 64;
static_assert(ATTENTION_PAD % L == 0 && ATTENTION_KEYS % ATTENTION_PAD == 0, "vectors fit");

DIFFBIT_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/// Prefetches the line AHEAD of number i of a row, if i begins a line.
template <class C>
DIFFBIT_INLINE void ask(const C* row, int64_t i) {
  if (i * static_cast<int64_t>(sizeof(C)) % LINE == 0) prefetch(reinterpret_cast<const char*>(row + i) + AHEAD);
}

/// Calls work(j, begin, end) for rows begin..end of sub-head j, alternating until all n rows of both are done, for `queries`
/// rows of queries. With few queries, memory is the bottleneck and turns are short.
template <class C, class Work>
DIFFBIT_INLINE void in_turns(const CacheRows& cache, int64_t n, int64_t d, int64_t queries, const Work& work) {
  constexpr int64_t FEW = 4;
  const int64_t bytes = d * static_cast<int64_t>(sizeof(C)), rows = TURN / bytes / 4 * 4;
  const int64_t turn = queries < FEW ? (rows < 4 ? 4 : least(rows, MOST_TURN)) : MOST_TURN;
  for (int64_t begin = 0; begin < n; begin += turn)
    for (int64_t j = 0; j < cache.count; ++j) {
      work(j, begin, least(begin + turn, n));
    }
}

void widen(const Half* x, int64_t n, float* y) {
  int64_t i = 0;
  for (; i + L <= n; i += L) store(y + i, load(x + i));
  if (i < n) store_part(y + i, n - i, load_part(x + i, n - i));
}

void narrow(const float* x, int64_t n, Half* y) {
  int64_t i = 0;
  for (; i + L <= n; i += L) store(y + i, load(x + i));
  if (i < n) {
    Half part[L];
    store(part, load_part(x + i, n - i));
    std::memcpy(y + i, part, static_cast<size_t>(n - i) * sizeof *y);
  }
}

void rotate(const float* __restrict__ x, const float* __restrict__ cos, const float* __restrict__ sin, int64_t d,
            float scale, float* __restrict__ y) {
  const int64_t half = d / 2;
  for (int64_t i = 0; i < half; ++i) {
    y[i] = (x[i] * cos[i] - x[i + half] * sin[i]) * scale;
    y[i + half] = (x[i + half] * cos[i] + x[i] * sin[i]) * scale;
  }
}

Half quantize(const float* x, int64_t d, int8_t* codes) {
  Half scale[L];
  store(scale, splat(round_row<true>(x, d, 127, codes)));
  return scale[0];
}

/// ROWS rows of q by n keys.
template <class C, int ROWS>
DIFFBIT_INLINE void score_tile(const C* keys, int64_t n, int64_t d, const float* q, float* s, int64_t stride, bool asks) {
  int64_t t = 0;
  for (; t + 4 <= n; t += 4) {
    F32 sums[ROWS][4];
    DIFFBIT_UNROLL for (int row = 0; row < ROWS; ++row)
      DIFFBIT_UNROLL for (int key = 0; key < 4; ++key) sums[row][key] = splat(0.0f);
    const C* from = keys + t * d;
    int64_t i = 0;
    for (; i + L <= d; i += L) {
      F32 k[4];
      DIFFBIT_UNROLL for (int key = 0; key < 4; ++key) {
        if (asks) ask(from + key * d, i);
        k[key] = load(from + key * d + i);
      }
      DIFFBIT_UNROLL for (int row = 0; row < ROWS; ++row) {
        const F32 one = load(q + row * padded(d) + i);
        DIFFBIT_UNROLL for (int key = 0; key < 4; ++key) sums[row][key] = fma(one, k[key], sums[row][key]);
      }
    }
    if (i < d)
      DIFFBIT_UNROLL for (int key = 0; key < 4; ++key) {
        const F32 k = load_part(from + key * d + i, d - i);
        DIFFBIT_UNROLL for (int row = 0; row < ROWS; ++row)
          sums[row][key] = fma(load(q + row * padded(d) + i), k, sums[row][key]);
      }
    DIFFBIT_UNROLL for (int row = 0; row < ROWS; ++row)
      store_sums(s + row * stride + t, sums[row][0], sums[row][1], sums[row][2], sums[row][3]);
  }
  for (; t < n; ++t)
    for (int row = 0; row < ROWS; ++row) {
      F32 one = splat(0.0f);
      int64_t i = 0;
      for (; i + L <= d; i += L) one = fma(load(q + row * padded(d) + i), load(keys + t * d + i), one);
      if (i < d) one = fma(load(q + row * padded(d) + i), load_part(keys + t * d + i, d - i), one);
      float four[4];  // added in the order of four keys, so a score does not depend on neighbouring keys
      store_sums(four, one, one, one, one);
      s[row * stride + t] = four[0];
    }
}

template <class C>
void scores(const CacheRows& keys, int64_t n, int64_t d, const float* q, QueryRows rows, float* s, int64_t stride) {
  constexpr int MOST = REGISTERS == 16 ? 2 : 4;
  in_turns<C>(keys, n, d, 1, [&](int64_t j, int64_t begin, int64_t end) {
    const C* from = static_cast<const C*>(keys.rows[j]) + begin * d;
    in_tiles<MOST>(rows.begin(j), rows.end(j), [&](auto count, int64_t row) {
      score_tile<C, count()>(from, end - begin, d, q + row * padded(d), s + row * stride + begin, stride,
                             row == rows.begin(j));
    });
  });
  if (sizeof(C) != 1) return;
  for (int64_t j = 0; j < keys.count; ++j)
    for (int64_t row = rows.begin(j); row < rows.end(j); ++row)
      for (int64_t t = 0; t < n; ++t) s[row * stride + t] *= keys.scales[j][t];
}

bool hides(const int64_t* mask, int64_t n) {
  int64_t hidden = 0;
  for (int64_t t = 0; t < n; ++t) hidden |= mask[t] == 0;
  return hidden != 0;
}

void hide(float* s, const int64_t* mask, int64_t n) {
  for (int64_t t = 0; t < n; ++t) s[t] = mask[t] ? s[t] : -__builtin_inff();
}

float softmax(float* s, int64_t n, float* total) {
  for (int64_t t = n; t % L; ++t) s[t] = -__builtin_inff();
  F32 most[2] = {splat(-__builtin_inff()), splat(-__builtin_inff())}, sums[2] = {splat(0.0f), splat(0.0f)};
  int64_t t = 0;
  for (; t + L < n; t += 2 * L)
    for (int part = 0; part < 2; ++part) most[part] = larger(load(s + t + part * L), most[part]);
  if (t < n) most[0] = larger(load(s + t), most[0]);
  const float maximum = largest(larger(most[0], most[1]));
  const F32 shift = splat(maximum == -__builtin_inff() ? 0 : maximum);
  for (t = 0; t + L < n; t += 2 * L)
    for (int part = 0; part < 2; ++part) {
      const F32 e = exp(load(s + t + part * L) - shift);
      store(s + t + part * L, e);
      sums[part] = sums[part] + e;
    }
  if (t < n) {
    const F32 e = exp(load(s + t) - shift);
    store(s + t, e);
    sums[0] = sums[0] + e;
  }
  *total = sum(sums[0] + sums[1]);
  return maximum;
}

void combine(const float* a, float a_factor, const float* b, float b_factor, int64_t n, float* p) {
  const F32 by_a = splat(a_factor), by_b = splat(b_factor);
  for (int64_t t = 0; t < n; t += L) store(p + t, load(a + t) * by_a - load(b + t) * by_b);
}

/// ROWS rows of p by n values, VECTORS vectors of each from `values` on; added to out.
template <class C, int ROWS, int VECTORS>
DIFFBIT_INLINE void mix_tile(const C* values, int64_t n, int64_t d, const float* p, int64_t stride, float* out,
                             int64_t width, bool asks) {
  F32 sums[ROWS][VECTORS];
  DIFFBIT_UNROLL for (int row = 0; row < ROWS; ++row)
    DIFFBIT_UNROLL for (int v = 0; v < VECTORS; ++v) sums[row][v] = load(out + row * width + v * L);
  for (int64_t t = 0; t < n; ++t) {
    F32 from[VECTORS];
    DIFFBIT_UNROLL for (int v = 0; v < VECTORS; ++v) {
      if (asks) ask(values + t * d, v * L);
      from[v] = load(values + t * d + v * L);
    }
    DIFFBIT_UNROLL for (int row = 0; row < ROWS; ++row) {
      const F32 share = splat(p[row * stride + t]);
      DIFFBIT_UNROLL for (int v = 0; v < VECTORS; ++v) sums[row][v] = fma(share, from[v], sums[row][v]);
    }
  }
  DIFFBIT_UNROLL for (int row = 0; row < ROWS; ++row)
    DIFFBIT_UNROLL for (int v = 0; v < VECTORS; ++v) store(out + row * width + v * L, sums[row][v]);
}

/// ROWS rows of p by n whole values.
template <class C, int ROWS>
DIFFBIT_INLINE void mix_rows(const C* values, int64_t n, int64_t d, const float* p, int64_t stride, float* out,
                             int64_t width, bool asks) {
  constexpr int VECTORS = REGISTERS == 16 ? (ROWS == 1 ? 8 : ROWS <= 3 ? 4 : 2) : (L == 4 && ROWS <= 2 ? 8 : 4);
  int64_t i = 0;
  for (; i + VECTORS * L <= d; i += VECTORS * L)
    mix_tile<C, ROWS, VECTORS>(values + i, n, d, p, stride, out + i, width, asks);
  for (; i + L <= d; i += L) mix_tile<C, ROWS, 1>(values + i, n, d, p, stride, out + i, width, asks);
  if (i == d) return;
  for (int row = 0; row < ROWS; ++row) {
    F32 sums = load(out + row * width + i);
    for (int64_t t = 0; t < n; ++t)
      sums = fma(splat(p[row * stride + t]), load_part(values + t * d + i, d - i), sums);
    store(out + row * width + i, sums);
  }
}

template <class C>
DIFFBIT_INLINE void mix_some(const C* values, int64_t n, int64_t d, const float* p, int64_t rows, int64_t stride,
                             float* out, int64_t width) {
  constexpr int64_t MANY = 16;  // with this many rows, memory is fast enough
  in_tiles<6>(0, rows, [&](auto count, int64_t row) {
    mix_rows<C, count()>(values, n, d, p + row * stride, stride, out + row * width, width, rows < MANY && row == 0);
  });
}

template <class C>
void mix(const CacheRows& values, int64_t n, int64_t d, const float* p, int64_t rows, int64_t stride, float* out) {
  constexpr int64_t SOME = 16;  // rows whose probabilities are multiplied by the values' scales at a time
  const int64_t width = values.count * padded(d);
  in_turns<C>(values, n, d, rows, [&](int64_t j, int64_t begin, int64_t end) {
    const C* from = static_cast<const C*>(values.rows[j]) + begin * d;
    const int64_t count = end - begin;
    if (sizeof(C) != 1) return mix_some(from, count, d, p + begin, rows, stride, out + j * padded(d), width);
    float scaled[SOME * MOST_TURN];
    for (int64_t first = 0; first < rows; first += SOME) {
      const int64_t some = least(SOME, rows - first);
      for (int64_t row = 0; row < some; ++row)
        for (int64_t t = 0; t < count; ++t)
          scaled[row * MOST_TURN + t] = p[(first + row) * stride + begin + t] * values.scales[j][begin + t];
      mix_some(from, count, d, scaled, some, MOST_TURN, out + first * width + j * padded(d), width);
    }
  });
}

void finish(const float* parts, int64_t count, int64_t part_stride, int64_t width, int64_t d, float eps, float* out) {
  F32 squares = splat(0.0f);
  float whole[2 * ATTENTION_MOST_D];
  for (int64_t i = 0; i < width * padded(d); i += L) {
    F32 one = load(parts + i);
    for (int64_t part = 1; part < count; ++part) one = one + load(parts + part * part_stride + i);
    store(whole + i, one);
    squares = fma(one, one, squares);  // the padding is zero
  }
  const float root = eps > 0 ? __builtin_sqrtf(sum(squares) / static_cast<float>(width * d) + eps) : 1;
  for (int64_t i = 0; i < width * padded(d); i += L) store(whole + i, load(whole + i) / splat(root));
  for (int64_t j = 0; j < width; ++j)
    std::memcpy(out + j * d, whole + j * padded(d), static_cast<size_t>(d) * sizeof(float));
}

template <class C>
void unpack_values(const void* rows, const float* scales, int64_t n, int64_t d, float* values) {
  const C* from = static_cast<const C*>(rows);
  for (int64_t t = 0; t < n; ++t, from += d, values += padded(d)) {
    const F32 scale = splat(sizeof(C) == 1 && scales ? scales[t] : 1.0f);
    int64_t i = 0;
    for (; i + L <= d; i += L) store(values + i, load(from + i) * scale);
    if (i < d) {
      store(values + i, load_part(from + i, d - i) * scale);
      i += L;
    }
    for (; i < padded(d); i += L) store(values + i, splat(0.0f));
  }
}

template <class C>
void pack_keys(const void* rows, const float* scales, int64_t n, int64_t d, float* packed) {
  const C* from = static_cast<const C*>(rows);
  for (int64_t begin = 0; begin < n; begin += ATTENTION_KEYS, packed += ATTENTION_KEYS * d) {
    const int64_t count = least(ATTENTION_KEYS, n - begin);
    for (int64_t lane = 0; lane < count; ++lane) {
      float row[ATTENTION_MOST_D];
      unpack_values<C>(from + (begin + lane) * d, scales ? scales + begin + lane : scales, 1, d, row);
      for (int64_t i = 0; i < d; ++i) packed[i * ATTENTION_KEYS + lane] = row[i];
    }
    for (int64_t lane = count; lane < ATTENTION_KEYS; ++lane)
      for (int64_t i = 0; i < d; ++i) packed[i * ATTENTION_KEYS + lane] = 0;
  }
}

/// ROWS queries by VECTORS vectors of keys of the block at `packed`.
template <int ROWS, int VECTORS>
DIFFBIT_INLINE void packed_tile(const float* packed, int64_t d, const float* q, float* s, int64_t stride) {
  F32 sums[ROWS][VECTORS];
  DIFFBIT_UNROLL for (int row = 0; row < ROWS; ++row)
    DIFFBIT_UNROLL for (int v = 0; v < VECTORS; ++v) sums[row][v] = splat(0.0f);
  for (int64_t i = 0; i < d; ++i) {
    F32 key[VECTORS];
    DIFFBIT_UNROLL for (int v = 0; v < VECTORS; ++v) key[v] = load(packed + i * ATTENTION_KEYS + v * L);
    DIFFBIT_UNROLL for (int row = 0; row < ROWS; ++row) {
      const F32 one = splat(q[row * padded(d) + i]);
      DIFFBIT_UNROLL for (int v = 0; v < VECTORS; ++v) sums[row][v] = fma(one, key[v], sums[row][v]);
    }
  }
  DIFFBIT_UNROLL for (int row = 0; row < ROWS; ++row)
    DIFFBIT_UNROLL for (int v = 0; v < VECTORS; ++v) store(s + row * stride + v * L, sums[row][v]);
}

void packed_scores(const float* packed, int64_t blocks, int64_t d, const float* q, int64_t rows, float* s,
                   int64_t stride) {
  constexpr int MOST = L == 16 ? 8 : 6, VECTORS = L == 4 && REGISTERS == 32 ? 4 : 2;
  for (int64_t block = 0; block < blocks; ++block)
    for (int64_t key = 0; key < ATTENTION_KEYS; key += VECTORS * L) {
      const float *from = packed + block * ATTENTION_KEYS * d + key, *one = q;
      float* to = s + block * ATTENTION_KEYS + key;
      int64_t left = rows;
      for (; left >= MOST; left -= MOST, one += MOST * padded(d), to += MOST * stride)
        packed_tile<MOST, VECTORS>(from, d, one, to, stride);
      if (left >= 4) {
        packed_tile<4, VECTORS>(from, d, one, to, stride);
        left -= 4, one += 4 * padded(d), to += 4 * stride;
      }
      for (; left; --left, one += padded(d), to += stride) packed_tile<1, VECTORS>(from, d, one, to, stride);
    }
}

}  // namespace

#ifdef DIFFBIT_TILES
#define DIFFBIT_SPLIT SPLIT
#else
#define DIFFBIT_SPLIT nullptr
#endif
extern const AttentionKernels attention = DIFFBIT_ATTENTION_KERNELS;

}  // namespace diffbit::DIFFBIT_ISA
