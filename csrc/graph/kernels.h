// The inner loops of ONNX's operators, one table per instruction set. The other operators are simple loops.
#pragma once

#include <cstdint>

#include "../cpu/isa.h"

namespace diffbit {

struct GraphKernels {
  /// Computes columns begin ... end - 1 of y [rows, n] = x [rows, k] times weight [k, n]; sums are in the order of k.
  void (*multiply)(const float* x, int64_t rows, int64_t k, const float* weight, int64_t n, int64_t begin, int64_t end,
                   float* y);
  /// Computes y = 1 / (1 + e^-x).
  void (*sigmoid)(const float* x, int64_t count, float* y);
  /// Computes y = x / sqrt(mean(x^2) + epsilon) * weight, of rows of `width` numbers.
  void (*norm)(const float* x, int64_t rows, int64_t width, const float* weight, float epsilon, float* y);
  /// Returns the sum of x times y.
  float (*dot)(const float* x, const float* y, int64_t count);
  /// Rounds `count` numbers to -127 ... 127, with a scale for each block; the last block is filled with zeros.
  void (*round_blocks)(const float* x, int64_t count, int64_t block, int16_t* rounded, float* scales);
  /// Writes `count` codes of 2, 4 or 8 bits as numbers; the first is in the lowest bits of its byte.
  void (*unpack)(const uint8_t* codes, int bits, int64_t count, int16_t* to);
  /// Returns the sum of blocks: both scales times the sum of x times y.
  float (*dot_blocks)(const int16_t* x, const float* x_scales, const int16_t* y, const float* y_scales, int64_t blocks, int64_t block);
};

DIFFBIT_DECLARE(GraphKernels, graph_kernels)

}  // namespace diffbit
