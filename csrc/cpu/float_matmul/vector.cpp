// FloatMatMul with vectors; compiled once per instruction set. A tile of WEIGHTS rows of the weight by up to ROWS rows of
// activations keeps its sums in registers.
#include "kernels.h"

#include "../simd/vectors.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

constexpr int VECTORS = FLOAT_LANES / F32_LANES;
constexpr bool WIDE = VECTORS == 1;  // 24 sums of 32 registers; else 12 of 16 (AVX2) or 24 of 32 (NEON)
constexpr int WEIGHTS = WIDE ? 4 : 2, ROWS = WIDE ? 6 : 3;
constexpr int64_t AHEAD = 1024;  // numbers to prefetch

/// Sets to[i] = the sum of the lanes of sums[i]: lanes 1, 2, ... apart in each vector, then the vectors in the same way.
template <int COUNT>
DIFFBIT_INLINE void totals(const F32 (&sums)[COUNT][VECTORS], float* to) {
  DIFFBIT_UNROLL
  for (int i = 0; i < COUNT; i += 4) {
    const auto column_sums = [&](int j) -> const F32(&)[VECTORS] { return sums[i + j < COUNT ? i + j : i]; };
    float parts[VECTORS][4];
    DIFFBIT_UNROLL
    for (int v = 0; v < VECTORS; ++v)
      store_sums(parts[v], column_sums(0)[v], column_sums(1)[v], column_sums(2)[v], column_sums(3)[v]);
    for (int apart = 1; apart < VECTORS; apart *= 2)
      for (int v = 0; v < VECTORS; v += 2 * apart)
        for (int j = 0; j < 4; ++j) parts[v][j] += parts[v + apart][j];
    std::memcpy(to + i, parts[0], sizeof parts[0]);
  }
}

template <class T>
DIFFBIT_INLINE F32 load_some(const T* from, int64_t left) {
  return left >= F32_LANES ? load(from) : left > 0 ? load_part(from, left) : splat(0.0f);
}

/// Multiplies COUNT rows of the weight, `apart` rows from each other, by R rows of activations.
template <int R, int COUNT, class T, class Y>
void tile(const float* x, int64_t width, const T* weight, int64_t k, int64_t apart, int64_t n, Y* y) {
  F32 sums[R * COUNT][VECTORS];
  DIFFBIT_UNROLL
  for (int i = 0; i < R * COUNT; ++i)
    DIFFBIT_UNROLL
    for (int v = 0; v < VECTORS; ++v) sums[i][v] = splat(0.0f);
  const int64_t stride = apart * k;
  const auto step = [&](int64_t c, const auto& read) {
    DIFFBIT_UNROLL
    for (int v = 0; v < VECTORS; ++v) {
      F32 weights[COUNT];
      DIFFBIT_UNROLL
      for (int w = 0; w < COUNT; ++w) weights[w] = read(weight + w * stride + c + v * F32_LANES, k - c - v * F32_LANES);
      DIFFBIT_UNROLL
      for (int r = 0; r < R; ++r) {
        const F32 activation = load(x + r * width + c + v * F32_LANES);
        DIFFBIT_UNROLL
        for (int w = 0; w < COUNT; ++w) sums[r * COUNT + w][v] = fma(activation, weights[w], sums[r * COUNT + w][v]);
      }
    }
  };
  int64_t c = 0;
  for (; c + FLOAT_LANES <= k; c += FLOAT_LANES) {
    if constexpr (R == 1) {
      DIFFBIT_UNROLL
      for (int w = 0; w < COUNT; ++w) prefetch(weight + w * stride + c + AHEAD);
    }
    step(c, [](const T* from, int64_t) { return load(from); });
  }
  if (c < k) step(c, [](const T* from, int64_t left) { return load_some(from, left); });
  constexpr int ROOM = (R * COUNT + F32_LANES - 1) / F32_LANES * F32_LANES;
  float results[ROOM];
  totals(sums, results);
  Y rounded[ROOM];
  DIFFBIT_UNROLL
  for (int i = 0; i < ROOM; i += F32_LANES) store(rounded + i, load(results + i));
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < COUNT; ++w) y[r * n + w * apart] = rounded[r * COUNT + w];
}

template <int R, class T, class Y>
void rows(const float* x, int64_t width, const T* weight, int64_t k, int64_t first, int64_t last, int64_t n, Y* y) {
  int64_t row = first;
  for (; row + WEIGHTS <= last; row += WEIGHTS) tile<R, WEIGHTS>(x, width, weight + row * k, k, 1, n, y + row);
  for (; row < last; ++row) tile<R, 1>(x, width, weight + row * k, k, 1, n, y + row);
}

template <int R, class T, class Y>
void counted(const float* x, int64_t count, int64_t width, const T* weight, int64_t k, int64_t first, int64_t last,
             int64_t n, Y* y) {
  if (count == R) return rows<R>(x, width, weight, k, first, last, n, y);
  if constexpr (R > 1) counted<R - 1>(x, count, width, weight, k, first, last, n, y);
}

template <class T, class Y>
void multiply(const float* x, int64_t count, int64_t width, const T* weight, int64_t k, int64_t first, int64_t last,
              int64_t apart, int64_t n, Y* y) {
  if (!apart) return counted<ROWS>(x, count, width, weight, k, first, last, n, y);
  for (int64_t row = first; row < last; ++row) tile<1, FLOAT_STREAMS>(x, width, weight + row * k, k, apart, n, y + row);
}

void multiply(const float* x, int64_t count, int64_t width, FloatRows weight, int64_t first, int64_t last, int64_t apart,
              int64_t n, bool half_y, void* y) {
  const auto* halves = static_cast<const uint16_t*>(weight.data);
  const auto* floats = static_cast<const float*>(weight.data);
  auto* to = static_cast<uint16_t*>(y);
  if (weight.half)
    multiply(x, count, width, halves, weight.k, first, last, apart, n, to);
  else if (half_y)
    multiply(x, count, width, floats, weight.k, first, last, apart, n, to);
  else
    multiply(x, count, width, floats, weight.k, first, last, apart, n, static_cast<float*>(y));
}

template <class T>
void widen(const T* from, int64_t k, int64_t width, float* to) {
  for (int64_t c = 0; c < width; c += F32_LANES) store(to + c, load_some(from + c, k - c));
}

void widen(FloatRows from, int64_t first, int64_t last, int64_t width, float* to) {
  for (int64_t row = first; row < last; ++row, to += width) {
    if (from.half)
      widen(static_cast<const uint16_t*>(from.data) + row * from.k, from.k, width, to);
    else
      widen(static_cast<const float*>(from.data) + row * from.k, from.k, width, to);
  }
}

}  // namespace

extern const FloatMatMulKernels float_matmul = {widen, multiply, ROWS};

}  // namespace diffbit::DIFFBIT_ISA
