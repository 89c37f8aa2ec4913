// The inner loop of FloatHead, one per instruction set (ops/float_head.py: what is computed, in which order).
#pragma once

#include <cstdint>

#include "../isa.h"

namespace diffbit {

constexpr int64_t FLOAT_HEAD_LANES = 16;
constexpr int64_t FLOAT_HEAD_ROWS = 4;  // of activations in a block

struct FloatHeadKernels {
  /// Rows first ... last - 1 of the weight [n, k], float or (half) float16, times `count` rows, FLOAT_HEAD_ROWS at most, of
  /// activations float [count, width], width = k rounded up to LANES with zeros behind k; to y [count, n] of the weight's
  /// type.
  void (*multiply)(const float* x, int64_t count, int64_t width, const void* weight, bool half, int64_t k, int64_t n,
                   int64_t first, int64_t last, void* y);
};

DIFFBIT_DECLARE(FloatHeadKernels, float_head)

}  // namespace diffbit
