// The inner loops of LowBitMatMul, one table per instruction set (ops/lowbit_matmul.py defines the computation and the layout).
#pragma once

#include <cstdint>

#include "../int4/kernels.h"

namespace diffbit {

constexpr int64_t LOWBIT_RING = 4;      // tiles of a ring of trellis codes
constexpr int64_t LOWBIT_FEW_ROWS = 4;  // of activations, for which codes are unpacked as they are multiplied

struct LowBitWeight {
  const uint8_t* codes;        // [tiles, groups, group_size / 32, bits, 16, 4]
  const void* scales;          // [tiles, groups, 16] float16, or (int8_scales) int8
  bool int8_scales;
  const uint16_t* row_scales;  // [tiles, 16] float16; null: 1 everywhere
  const uint8_t* levels;       // [2^bits], or m of trellis codes (ops/trellis.py); null: integers
  const uint8_t* map;          // [8], of trellis codes; null: none
  bool doubled;                // level i is level 0 and 2 i more, so codes are multiplied and no level is looked up
  float factor;
  int64_t n, groups, group_size, bits;
  const uint8_t* unpacked = nullptr;  // the tile to multiply, by `unpack`
};

/// Members not explained here are Int4Kernels'.
struct LowBitMatMulKernels {
  int64_t most_rows;
  int64_t streams[INT4_MOST_ROWS + 1];
  int32_t minus_of_levels;  // `minus` for a weight with levels; for integers it is -2^(bits - 1), if `doubled` level 0
  /// Unpacks a tile into the form that is multiplied fastest, and sets weight.unpacked to it; `to` has room for a byte for each
  /// weight, of trellis codes for four tiles; those come in order.
  void (*unpack)(LowBitWeight& weight, int64_t tile, uint8_t* to);
  /// Multiplies as Int4Kernels' multiply; for more than LOWBIT_FEW_ROWS rows `weight` is unpacked. Of trellis codes that are not, it
  /// multiplies the tiles of a ring, of which `first` is the first.
  void (*multiply)(const Int4Rows& rows, const LowBitWeight& weight, int64_t first, int64_t apart, int64_t count, void* y,
                   bool half);
  void (*unpack_values)(const LowBitWeight& weight, int64_t tile, UnpackedTile& to);
};

DIFFBIT_DECLARE(LowBitMatMulKernels, lowbit_matmul)

}  // namespace diffbit
