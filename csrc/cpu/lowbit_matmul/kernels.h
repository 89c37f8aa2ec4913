// The inner loops of LowBitMatMul, one table per instruction set (ops/lowbit_matmul.py defines the computation and the layout).
#pragma once

#include <cstdint>

#include "../int4/kernels.h"

namespace diffbit {

struct LowBitWeight {
  const uint8_t* codes;        // [tiles, groups, group_size / 32, bits, 16, 4]
  const void* scales;          // [tiles, groups, 16] float16, or (int8_scales) int8
  bool int8_scales;
  const uint16_t* row_scales;  // [tiles, 16] float16; null: 1 everywhere
  const uint8_t* levels;       // [2^bits]; null: integers
  float factor;
  int64_t n, groups, group_size, bits;
};

/// The members are those of Int4Kernels.
struct LowBitMatMulKernels {
  int64_t most_rows;
  int64_t streams[INT4_MOST_ROWS + 1];
  int32_t minus_of_levels;  // `minus` for a weight with levels; for integers it is -2^(bits - 1)
  void (*multiply)(const Int4Rows& rows, const LowBitWeight& weight, int64_t first, int64_t apart, int64_t count, void* y,
                   bool half);
};

DIFFBIT_DECLARE(LowBitMatMulKernels, lowbit_matmul)

}  // namespace diffbit
