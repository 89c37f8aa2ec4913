// The slow, obvious version: what every other is held against, and what runs on a CPU that has none of their sets.
#include <algorithm>
#include <cmath>

#include "ternary.h"

namespace diffbit::scalar {
namespace {

float quantize(const float* x, int64_t k, int8_t* q) {
  float largest = 1e-5f;
  for (int64_t i = 0; i < k; ++i) largest = std::max(largest, std::fabs(x[i]));
  const float step = largest / 127;
  for (int64_t i = 0; i < k; ++i) q[i] = static_cast<int8_t>(std::nearbyint(x[i] / step));
  return step;
}

void multiply(const int8_t* q, const float* steps, int64_t rows, const uint8_t* packed, int64_t blocks, float scale,
              int64_t begin, int64_t end, int64_t n, float* y) {
  const int64_t width = blocks * TERNARY_BLOCK;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t out = begin; out < end; ++out) {
      const uint8_t* weights = packed + out * blocks * TERNARY_BLOCK_BYTES;
      int32_t sum = 0;
      for (int64_t i = 0; i < width; ++i) {
        const int64_t block = i / TERNARY_BLOCK, field = i % TERNARY_BLOCK / 32, byte = i % 32;
        const int32_t code = weights[block * TERNARY_BLOCK_BYTES + byte] >> (2 * field) & 3;
        sum += (code - 1) * q[row * width + i];
      }
      y[row * n + out] = static_cast<float>(sum) * steps[row] * scale;
    }
}

}  // namespace

extern const TernaryKernels ternary = {quantize, multiply};

}  // namespace diffbit::scalar
