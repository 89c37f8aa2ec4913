// The slow, obvious version: the reference for all others, and the fallback for CPUs without their instruction sets.
#include <cmath>

#include "../half.h"
#include "kernels.h"

namespace diffbit::scalar {
namespace {

float number(FloatRows rows, int64_t row, int64_t column) {
  return column < rows.k ? get(rows.data, rows.half, row * rows.k + column) : 0.0f;
}

void widen(FloatRows from, int64_t first, int64_t last, int64_t width, float* to) {
  for (int64_t row = first; row < last; ++row)
    for (int64_t c = 0; c < width; ++c) *to++ = number(from, row, c);
}

void multiply(const float* x, int64_t count, int64_t width, FloatRows weight, int64_t first, int64_t last, int64_t apart,
              int64_t n, bool half_y, void* y) {
  for (int64_t stream = 0; stream < (apart ? FLOAT_STREAMS : 1); ++stream)
    for (int64_t row = stream * apart + first; row < stream * apart + last; ++row)
      for (int64_t i = 0; i < count; ++i) {
        float sums[FLOAT_LANES] = {};
        for (int64_t c = 0; c < width; ++c) {
          float& sum = sums[c % FLOAT_LANES];
          sum = std::fma(x[i * width + c], number(weight, row, c), sum);
        }
        for (int64_t far = 1; far < FLOAT_LANES; far *= 2)
          for (int64_t j = 0; j < FLOAT_LANES; j += 2 * far) sums[j] += sums[j + far];
        put(y, half_y, i * n + row, sums[0]);
      }
}

}  // namespace

extern const FloatMatMulKernels float_matmul = {widen, multiply, 4};

}  // namespace diffbit::scalar
