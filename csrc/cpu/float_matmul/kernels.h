// The inner loops of FloatMatMul, one table per instruction set (ops/float_matmul.py defines them and their order).
#pragma once

#include <cstdint>

#include "../isa.h"

namespace diffbit {

constexpr int64_t FLOAT_LANES = 16, FLOAT_STREAMS = 4;

/// Rows of a matrix [., k], float or (half) float16.
struct FloatRows {
  const void* data;
  bool half;
  int64_t k;
};

struct FloatMatMulKernels {
  /// Converts rows first ... last - 1 to floats [last - first, width]: width = k rounded up to LANES, with zeros from k on.
  void (*widen)(FloatRows from, int64_t first, int64_t last, int64_t width, float* to);
  /// Multiplies rows first ... last - 1 of the weight by `count` rows (at most most_rows) of activations, float [count,
  /// width], into y [count, n], float16 if `half_y`. With `apart`: for one row of activations and FLOAT_STREAMS times as many
  /// rows of the weight, each further run `apart` rows on.
  void (*multiply)(const float* x, int64_t count, int64_t width, FloatRows weight, int64_t first, int64_t last,
                   int64_t apart, int64_t n, bool half_y, void* y);
  int64_t most_rows;
};

DIFFBIT_DECLARE(FloatMatMulKernels, float_matmul)

}  // namespace diffbit
