// The inner loops of TernaryMatMul, one table per instruction set.
#pragma once

#include <cstdint>

#include "../isa.h"

namespace diffbit {

constexpr int64_t TERNARY_BLOCK = 128;       // weights in a block
constexpr int64_t TERNARY_BLOCK_BYTES = 32;  // byte j: weights j, j+32, j+64, j+96 as codes w+1 in its four fields
static_assert(TERNARY_BLOCK == 4 * TERNARY_BLOCK_BYTES, "two bits a weight");

struct TernaryKernels {
  /// x [K] -> q int8 [blocks * 128], zero beyond K; returns the step a. Halves round to even.
  float (*quantize)(const float* x, int64_t k, int8_t* q);
  /// Rows begin..end of y = float(sum_k q_k w_nk) * a * scale, for `rows` rows of q, each `blocks` * 128 long.
  void (*multiply)(const int8_t* q, const float* steps, int64_t rows, const uint8_t* packed, int64_t blocks, float scale,
                   int64_t begin, int64_t end, int64_t n, float* y);
};

DIFFBIT_DECLARE(TernaryKernels, ternary)

}  // namespace diffbit
