// The inner loops of Int4MatMul and Int8MatMul, one table each per instruction set (ops/int4_matmul.py and int8_matmul.py
// define the computation and the layouts).
#pragma once

#include <cstdint>

#include "../../ort/layouts.h"
#include "../isa.h"

namespace diffbit {

constexpr int64_t INT4_MOST_ROWS = 8;
constexpr float INT4_SMALLEST = 1e-30f;  // limit of a group's largest activation; below it the group counts as zeros

struct Int4Weight {
  const uint8_t* codes;    // [tiles, groups, group_size / 8, 16, 4]; with 8 bits [tiles, groups, group_size / 8, 2, 16, 4]
  const uint16_t* scales;  // [tiles, groups or 1, 16] float16
  const uint8_t* zeros;    // shaped as scales; null: 2^(bits - 1) everywhere
  float factor;
  int64_t n, groups, group_size;
  int64_t scale_groups;  // groups; with 8 bits also 1: one scale per row
};

/// A block of R quantized rows of activations, interleaved so that consecutive broadcasts read consecutive bytes.
struct Int4Rows {
  int64_t count;     // R
  int8_t* q;         // [groups, group_size / 8, 2, R, 4]: the even four of eight neighbours, then the odd four
  int32_t* offsets;  // [groups, R]: `minus` * the sum of a group's q
  float* scales;     // [groups, R]
};

struct Int4Kernels {
  int64_t most_rows;                     // of a block; at most INT4_MOST_ROWS
  int64_t streams[INT4_MOST_ROWS + 1];  // best number of distant tiles to read at once, for a block of R rows

  /// Quantizes rows.count rows of x [R, k], float or (half) float16; `width` = groups * group_size, with zeros from k on.
  void (*quantize)(const void* x, bool half, int64_t k, int64_t groups, int64_t group_size, int32_t minus,
                   const Int4Rows& rows);
  /// The tiles first, first + apart, ... (`count` of them, at most streams[R]) of the product with a block, into the
  /// columns of those tiles of y [R, n], float or (half) float16. `minus` was -8 for a weight of 4 bits without zeros, else
  /// -1.
  void (*multiply)(const Int4Rows& rows, const Int4Weight& weight, int64_t first, int64_t apart, int64_t count, void* y,
                   bool half);
};

DIFFBIT_DECLARE(Int4Kernels, int4)
DIFFBIT_DECLARE(Int4Kernels, int8)

}  // namespace diffbit
