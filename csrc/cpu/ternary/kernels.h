// The inner loops of TernaryMatMul, one table per instruction set.
#pragma once

#include <cstdint>

#include "../../ort/layouts.h"
#include "../isa.h"

namespace diffbit {

constexpr int64_t TERNARY_ROWS_TOGETHER = 32;  // q has room for a multiple of so many rows
constexpr int64_t TERNARY_MOST_ROWS = 256;     // of a call of `multiply`

/// A row of activations: its scale a, and the sum of q, because the codes are one more than the weights.
struct TernaryRow {
  float scale;
  int32_t sum;
};

struct TernaryProduct {
  const int8_t* q;         // [rows, quantized_size]
  const TernaryRow* rows;  // [rows]
  const uint8_t* packed;   // [n, blocks * 32]
  int64_t blocks, n;
  const float* scale;  // [n] if scale_per_row, else [1]
  bool scale_per_row;
  void* y;  // [rows, n], fp32 or fp16
  bool half;
};

struct TernaryKernels {
  int64_t rows_per_task;  // of the activations; a multiple of TERNARY_ROWS_TOGETHER, at most TERNARY_MOST_ROWS
  /// Returns the bytes of a quantized row, a multiple of 64. Each set defines its own order of bytes.
  int64_t (*quantized_size)(int64_t blocks);
  /// Quantizes x [k], fp32 or fp16, to one row of q with 8 or 4 bits.
  TernaryRow (*quantize)(const void* x, bool half, int64_t bits, int64_t k, int64_t blocks, int8_t* q);
  /// Computes y for the activation rows row_begin..row_end, from a multiple of TERNARY_ROWS_TOGETHER on, and the weight rows
  /// begin..end.
  void (*multiply)(const TernaryProduct& product, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end);
};

DIFFBIT_DECLARE(TernaryKernels, ternary)

}  // namespace diffbit
