// The inner loops of Int4MatMul and Int8MatMul, one table each per instruction set (ops/int4_matmul.py and int8_matmul.py
// define the computation and the layouts).
#pragma once

#include <cstdint>

#include "../../ort/layouts.h"
#include "../isa.h"

namespace diffbit {

constexpr int64_t INT4_MOST_ROWS = 8;
constexpr int64_t MOST_TILES = 2;
constexpr int64_t MANY_ROWS = 16;  // of a block of ManyRowsKernels
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

/// A tile of a weight of any format, unpacked for the product with many rows.
struct UnpackedTile {
  int8_t* values;     // [groups, group_size / 4, 16, 4], in the order of the activations
  float* scales;      // [groups, 16]
  int32_t* zeros;     // [groups, 16]: what is still to be subtracted from each value, if has_zeros
  bool has_zeros;
  float factors[INT4_TILE];  // of the rows
  uint16_t* wide;     // room for the same in the order of the product: [groups * group_size, 16] activations
};

/// Products with many rows, in sets with matrix instructions (simd/amx.h, simd/i8mm.h); null in others. Rows are in blocks of
/// MANY_ROWS, and the last block may be shorter. many_rows computes as defined: q [groups, group_size / S, MANY_ROWS, S] with
/// S = min(group_size, 64), or 8 for pairs of rows, offsets and scales [groups, MANY_ROWS]. bfloat_rows rounds to bfloat16
/// instead: q [groups * group_size / 32, MANY_ROWS, 32] of uint16, and nothing else.
struct ManyRowsKernels {
  int64_t few_rows;  // rows for which the set's other kernels are faster
  int64_t activation_bytes;
  int64_t most_tiles;  // of the weight that are multiplied at a time; at most MOST_TILES
  /// Quantizes a block, as Int4Kernels' quantize does.
  void (*quantize)(const void* x, bool half, int64_t k, int64_t groups, int64_t group_size, int32_t minus,
                   const Int4Rows& rows);
  /// Multiplies rows.count rows, block after block, by `count` tiles, each of which gives 16 columns of y [rows.count, n], float
  /// or (half) float16, or as many as there is `room` for.
  void (*multiply)(const Int4Rows& rows, const UnpackedTile* tiles, int64_t count, int64_t groups, int64_t group_size, void* y,
                   int64_t n, int64_t room, bool half);
};

struct Int4Kernels {
  int64_t most_rows;                     // of a block; at most INT4_MOST_ROWS
  int64_t streams[INT4_MOST_ROWS + 1];  // best number of distant tiles to read at once, for a block of R rows

  /// Quantizes rows.count rows of x [R, k], float or (half) float16; `width` = groups * group_size, with zeros from k on.
  void (*quantize)(const void* x, bool half, int64_t k, int64_t groups, int64_t group_size, int32_t minus,
                   const Int4Rows& rows);
  /// Multiplies a block by the tiles first, first + apart, ... (`count` of them, at most streams[R]), and writes their columns
  /// of y [R, n], float or (half) float16. `minus` was -8 for a weight of 4 bits without zeros, else -1.
  void (*multiply)(const Int4Rows& rows, const Int4Weight& weight, int64_t first, int64_t apart, int64_t count, void* y,
                   bool half);
  /// Unpacks a tile for ManyRowsKernels; null in sets without them.
  void (*unpack_values)(const Int4Weight& weight, int64_t tile, UnpackedTile& to);
};

DIFFBIT_DECLARE(ManyRowsKernels, many_rows)
DIFFBIT_DECLARE(ManyRowsKernels, bfloat_rows)
DIFFBIT_DECLARE(Int4Kernels, int4)
DIFFBIT_DECLARE(Int4Kernels, int8)

}  // namespace diffbit
