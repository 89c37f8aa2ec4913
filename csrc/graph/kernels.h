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
};

DIFFBIT_DECLARE(GraphKernels, graph_kernels)

}  // namespace diffbit
