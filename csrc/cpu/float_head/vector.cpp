// FloatHead with vectors; compiled once per instruction set. Four rows of the weight at a time, so that their sums do not
// wait for one another, by up to four rows of activations, for which each of them is read and widened once.
#include "kernels.h"

#include "../simd/vectors.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

constexpr int VECTORS = FLOAT_HEAD_LANES / F32_LANES;
constexpr int WEIGHTS = 4;  // rows of the weight at a time
constexpr int64_t AHEAD = 1024;  // numbers to prefetch

DIFFBIT_INLINE float total(const F32 (&sums)[VECTORS]) {
  float lanes[FLOAT_HEAD_LANES];
  for (int v = 0; v < VECTORS; ++v) store(lanes + v * F32_LANES, sums[v]);
  for (int64_t apart = FLOAT_HEAD_LANES / 2; apart; apart /= 2)
    for (int64_t j = 0; j < apart; ++j) lanes[j] += lanes[j + apart];
  return lanes[0];
}

DIFFBIT_INLINE void put(float* to, float value) { *to = value; }
DIFFBIT_INLINE void put(uint16_t* to, float value) {
  uint16_t lanes[F32_LANES];
  store(lanes, splat(value));
  *to = lanes[0];
}

template <class T, int ROWS, int COUNT>
void some_rows(const float* x, int64_t width, const T* weight, int64_t k, int64_t n, T* y) {
  F32 sums[COUNT][ROWS][VECTORS];
  DIFFBIT_UNROLL
  for (int w = 0; w < COUNT; ++w)
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < VECTORS; ++v) sums[w][r][v] = splat(0.0f);
  const auto step = [&](int64_t c, const auto& read) {
    DIFFBIT_UNROLL
    for (int v = 0; v < VECTORS; ++v) {
      F32 given[ROWS];
      DIFFBIT_UNROLL
      for (int r = 0; r < ROWS; ++r) given[r] = load(x + r * width + c + v * F32_LANES);
      DIFFBIT_UNROLL
      for (int w = 0; w < COUNT; ++w) {
        const F32 weights = read(weight + w * k + c + v * F32_LANES, k - c - v * F32_LANES);
        DIFFBIT_UNROLL
        for (int r = 0; r < ROWS; ++r) sums[w][r][v] = fma(given[r], weights, sums[w][r][v]);
      }
    }
  };
  int64_t c = 0;
  for (; c + FLOAT_HEAD_LANES <= k; c += FLOAT_HEAD_LANES) {
    DIFFBIT_UNROLL
    for (int w = 0; w < COUNT; ++w) prefetch(weight + w * k + c + AHEAD);
    step(c, [](const T* from, int64_t) { return load(from); });
  }
  if (c < k)
    step(c, [](const T* from, int64_t left) {
      return left >= F32_LANES ? load(from) : left > 0 ? load_part(from, left) : splat(0.0f);
    });
  for (int w = 0; w < COUNT; ++w)
    for (int r = 0; r < ROWS; ++r) put(y + r * n + w, total(sums[w][r]));
}

template <class T, int ROWS>
void rows(const float* x, int64_t width, const T* weight, int64_t k, int64_t n, int64_t first, int64_t last, T* y) {
  int64_t row = first;
  for (; row + WEIGHTS <= last; row += WEIGHTS) some_rows<T, ROWS, WEIGHTS>(x, width, weight + row * k, k, n, y + row);
  for (; row < last; ++row) some_rows<T, ROWS, 1>(x, width, weight + row * k, k, n, y + row);
}

template <class T>
void multiply(const float* x, int64_t count, int64_t width, const T* weight, int64_t k, int64_t n, int64_t first,
              int64_t last, T* y) {
  switch (count) {
    case 1: return rows<T, 1>(x, width, weight, k, n, first, last, y);
    case 2: return rows<T, 2>(x, width, weight, k, n, first, last, y);
    case 3: return rows<T, 3>(x, width, weight, k, n, first, last, y);
    default: return rows<T, 4>(x, width, weight, k, n, first, last, y);
  }
}

void multiply(const float* x, int64_t count, int64_t width, const void* weight, bool half, int64_t k, int64_t n,
              int64_t first, int64_t last, void* y) {
  if (half)
    multiply(x, count, width, static_cast<const uint16_t*>(weight), k, n, first, last, static_cast<uint16_t*>(y));
  else
    multiply(x, count, width, static_cast<const float*>(weight), k, n, first, last, static_cast<float*>(y));
}

}  // namespace

extern const FloatHeadKernels float_head = {multiply};

}  // namespace diffbit::DIFFBIT_ISA
