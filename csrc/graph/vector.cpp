// ONNX's operators with vectors; compiled once per instruction set.
#include "../cpu/simd/vectors.h"
#include "kernels.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

constexpr int64_t L = F32_LANES;

/// Computes WIDE vectors of columns from `column` on, of ROWS rows.
template <int ROWS, int WIDE>
DIFFBIT_INLINE void multiply_tile(const float* x, int64_t k, const float* weight, int64_t n, int64_t column, float* y) {
  F32 sums[ROWS][WIDE];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < WIDE; ++v) sums[r][v] = splat(0.0f);
  for (int64_t i = 0; i < k; ++i) {
    F32 row[WIDE];
    for (int v = 0; v < WIDE; ++v) row[v] = load(weight + i * n + column + v * L);
    for (int r = 0; r < ROWS; ++r) {
      const F32 factor = splat(x[r * k + i]);
      for (int v = 0; v < WIDE; ++v) sums[r][v] = fma(factor, row[v], sums[r][v]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < WIDE; ++v) store(y + r * n + column + v * L, sums[r][v]);
}

template <int ROWS, int WIDE>
void multiply_rows(const float* x, int64_t k, const float* weight, int64_t n, int64_t begin, int64_t end, float* y) {
  int64_t column = begin;
  for (; column + WIDE * L <= end; column += WIDE * L) multiply_tile<ROWS, WIDE>(x, k, weight, n, column, y);
  for (; column + L <= end; column += L) multiply_tile<ROWS, 1>(x, k, weight, n, column, y);
  if (column == end) return;
  F32 sums[ROWS];
  for (int r = 0; r < ROWS; ++r) sums[r] = splat(0.0f);
  for (int64_t i = 0; i < k; ++i) {
    const F32 row = load_part(weight + i * n + column, end - column);
    for (int r = 0; r < ROWS; ++r) sums[r] = fma(splat(x[r * k + i]), row, sums[r]);
  }
  for (int r = 0; r < ROWS; ++r) store_part(y + r * n + column, end - column, sums[r]);
}

/// One row: the weight is read once, row by row, and the sums stay in the first cache.
void multiply_one(const float* x, int64_t k, const float* weight, int64_t n, int64_t begin, int64_t end, float* y) {
  constexpr int64_t TOGETHER = 4;
  int64_t i = 0;
  for (int64_t c = begin; c < end; ++c) y[c] = 0;
  for (; i + TOGETHER <= k; i += TOGETHER) {
    const float* rows = weight + i * n;
    const F32 a = splat(x[i]), b = splat(x[i + 1]), c = splat(x[i + 2]), d = splat(x[i + 3]);
    int64_t at = begin;
    for (; at + L <= end; at += L) {
      F32 sum = fma(a, load(rows + at), load(y + at));
      sum = fma(b, load(rows + n + at), sum);
      sum = fma(c, load(rows + 2 * n + at), sum);
      store(y + at, fma(d, load(rows + 3 * n + at), sum));
    }
    if (const int64_t rest = end - at) {
      F32 sum = fma(a, load_part(rows + at, rest), load_part(y + at, rest));
      sum = fma(b, load_part(rows + n + at, rest), sum);
      sum = fma(c, load_part(rows + 2 * n + at, rest), sum);
      store_part(y + at, rest, fma(d, load_part(rows + 3 * n + at, rest), sum));
    }
  }
  for (; i < k; ++i) {
    int64_t at = begin;
    for (; at + L <= end; at += L) store(y + at, fma(splat(x[i]), load(weight + i * n + at), load(y + at)));
    if (const int64_t rest = end - at)
      store_part(y + at, rest, fma(splat(x[i]), load_part(weight + i * n + at, rest), load_part(y + at, rest)));
  }
}

void multiply(const float* x, int64_t rows, int64_t k, const float* weight, int64_t n, int64_t begin, int64_t end,
              float* y) {
  constexpr int MANY = REGISTERS == 32 ? 8 : 4;
  for (; rows >= MANY; rows -= MANY, x += MANY * k, y += MANY * n) multiply_rows<MANY, 2>(x, k, weight, n, begin, end, y);
  for (; rows; --rows, x += k, y += n) multiply_one(x, k, weight, n, begin, end, y);
}

/// e^min(x, 0) / (1 + e^-|x|): neither can overflow; a NaN propagates through the second.
DIFFBIT_INLINE F32 logistic(F32 x) {
  return exp(smaller(x, splat(0.0f))) / (splat(1.0f) + exp(magnitude(x) * splat(-1.0f)));
}
void sigmoid(const float* x, int64_t count, float* y) {
  int64_t i = 0;
  for (; i + L <= count; i += L) store(y + i, logistic(load(x + i)));
  if (i < count) store_part(y + i, count - i, logistic(load_part(x + i, count - i)));
}

void norm(const float* x, int64_t rows, int64_t width, const float* weight, float epsilon, float* y) {
  for (int64_t row = 0; row < rows; ++row, x += width, y += width) {
    F32 a = splat(0.0f), b = splat(0.0f);
    int64_t i = 0;
    for (; i + 2 * L <= width; i += 2 * L) {
      const F32 first = load(x + i), second = load(x + i + L);
      a = fma(first, first, a);
      b = fma(second, second, b);
    }
    for (; i < width; i += L) {
      const F32 part = width - i < L ? load_part(x + i, width - i) : load(x + i);
      a = fma(part, part, a);
    }
    const float scale = 1 / __builtin_sqrtf(sum(a + b) / static_cast<float>(width) + epsilon);
    const F32 factor = splat(scale);
    for (i = 0; i + L <= width; i += L) store(y + i, load(x + i) * factor * load(weight + i));
    if (const int64_t rest = width - i) store_part(y + i, rest, load_part(x + i, rest) * factor * load_part(weight + i, rest));
  }
}

float dot(const float* x, const float* y, int64_t count) {
  F32 a = splat(0.0f), b = splat(0.0f);
  int64_t i = 0;
  for (; i + 2 * L <= count; i += 2 * L) {
    a = fma(load(x + i), load(y + i), a);
    b = fma(load(x + i + L), load(y + i + L), b);
  }
  for (; i < count; i += L) {
    const int64_t size = count - i < L ? count - i : L;
    a = fma(load_part(x + i, size), load_part(y + i, size), a);
  }
  return sum(a + b);
}

#include "blocks.h"

}  // namespace

extern const GraphKernels graph_kernels = {multiply, sigmoid, norm, dot, round_blocks, unpack, dot_blocks};

}  // namespace diffbit::DIFFBIT_ISA
