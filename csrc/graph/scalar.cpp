// The slow, obvious version: the reference for all others, and the fallback for CPUs without their instruction sets.
#include <cmath>

#include "kernels.h"

namespace diffbit::scalar {
namespace {

void multiply(const float* x, int64_t rows, int64_t k, const float* weight, int64_t n, int64_t begin, int64_t end,
              float* y) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = begin; column < end; ++column) {
      float sum = 0;
      for (int64_t i = 0; i < k; ++i) sum += x[row * k + i] * weight[i * n + column];
      y[row * n + column] = sum;
    }
}

void sigmoid(const float* x, int64_t count, float* y) {
  for (int64_t i = 0; i < count; ++i) y[i] = 1 / (1 + std::exp(-x[i]));
}

void norm(const float* x, int64_t rows, int64_t width, const float* weight, float epsilon, float* y) {
  for (int64_t row = 0; row < rows; ++row, x += width, y += width) {
    double squares = 0;
    for (int64_t i = 0; i < width; ++i) squares += static_cast<double>(x[i]) * x[i];
    const float scale = 1 / std::sqrt(static_cast<float>(squares / static_cast<double>(width)) + epsilon);
    for (int64_t i = 0; i < width; ++i) y[i] = x[i] * scale * weight[i];
  }
}

float dot(const float* x, const float* y, int64_t count) {
  float sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += x[i] * y[i];
  return sum;
}

#include "blocks.h"

}  // namespace

extern const GraphKernels graph_kernels = {multiply, sigmoid, norm, dot, round_blocks, unpack, dot_blocks};

}  // namespace diffbit::scalar
