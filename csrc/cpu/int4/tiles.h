// The product of a tensor with a weight in tiles, split into tasks; Int4MatMul, Int8MatMul and LowBitMatMul share it.
#pragma once

#include <algorithm>

#include "../../ort/op.h"
#include "kernels.h"

namespace diffbit {

/// Picks the kernels for the precision that the session asked for, if the set has them.
inline const ManyRowsKernels* pick_many_rows(const Node& node) {
  const ManyRowsKernels* in_bfloats = DIFFBIT_PICK(bfloat_rows);
  return node.bfloat16 && in_bfloats->multiply ? in_bfloats : DIFFBIT_PICK(many_rows);
}

/// Computes y = a times `weight`, whose codes have `bits` bits, with `kernels.multiply`; `quantize` takes `minus`. With more than
/// `few_rows` rows, a tile is multiplied by many blocks of them: by the kernels `many` if the set has them for so many rows, else
/// by `kernels.multiply` with the weight that prepare(tile) returns. With few rows, so many tiles as `adjacent` says are multiplied
/// at once; 0: as many as kernels.streams says, far apart.
template <class Weight, class Kernels, class Prepare>
void multiply_tiles(Context& context, const Tensor& a, const Tensor& y, int64_t k, int64_t bits, const Weight& weight,
                    int32_t minus, decltype(Int4Kernels::quantize) quantize, const Kernels& kernels,
                    const ManyRowsKernels& many, int64_t few_rows, const Prepare& prepare, int64_t adjacent = 0) {
  enum Scratch { QUANTIZED, OFFSETS, ROW_SCALES, VALUES = 4, SCALES, ZEROS, WIDE };  // from VALUES on, the workers'
#if defined(__wasm__)
  constexpr int64_t BYTES_PER_TASK = 32 << 10;  // of codes, for few rows; the module's threads take tasks at little cost
#else
  constexpr int64_t BYTES_PER_TASK = 96 << 10;  // about ten microseconds
#endif
  constexpr int64_t CACHED = 512 << 10;         // activations that stay in a core's cache while tiles pass
  constexpr int64_t TILES_PER_TASK = 8;
  static_assert(TILES_PER_TASK % MOST_TILES == 0, "none are multiplied twice");

  const int64_t rows = a.size() / k, n = weight.n, groups = weight.groups, width = groups * weight.group_size;
  const int64_t tiles = divide_up(n, INT4_TILE);
  if (!rows) return;

  const bool half = a.type == ort::FLOAT16, by_many = rows > many.few_rows && many.multiply;
  const int64_t item = half ? 2 : 4;
  const int64_t block_rows = by_many ? MANY_ROWS : kernels.most_rows, blocks = divide_up(rows, block_rows);
  const int64_t bytes = by_many ? width * many.activation_bytes : width;  // of a row
  int8_t* q = scratch<int8_t>(QUANTIZED, blocks * block_rows * bytes);
  int32_t* offsets = scratch<int32_t>(OFFSETS, blocks * block_rows * groups);
  float* row_scales = scratch<float>(ROW_SCALES, blocks * block_rows * groups);
  const auto block = [&](int64_t i) {
    return Int4Rows{std::min(block_rows, rows - i * block_rows), q + i * block_rows * bytes, offsets + i * block_rows * groups,
                    row_scales + i * block_rows * groups};
  };
  const auto output = [&](int64_t i) { return y.as<char>() + i * block_rows * n * item; };
  if (by_many) quantize = many.quantize;
  context.parallel(blocks, [&](int64_t i) {
    quantize(a.as<char>() + i * block_rows * k * item, half, k, groups, weight.group_size, minus, block(i));
  });

  if (rows <= few_rows) {  // bound by memory: several distant tiles at once, then the remaining ones
    const int64_t streams = adjacent ? adjacent : kernels.streams[rows], apart = tiles / streams;
    const int64_t tasks = std::max<int64_t>(1, std::min(apart, streams * apart * INT4_TILE * width * bits / 8 / BYTES_PER_TASK));
    context.parallel(tasks, [&](int64_t task) {
      for (int64_t tile = apart * task / tasks; tile < apart * (task + 1) / tasks; ++tile)
        kernels.multiply(block(0), weight, adjacent ? tile * adjacent : tile, adjacent ? 1 : apart, streams, output(0), half);
      if (task == tasks - 1)
        for (int64_t tile = streams * apart; tile < tiles; ++tile)
          kernels.multiply(block(0), weight, tile, 1, 1, output(0), half);
    });
    return;
  }
  const int64_t near = std::max<int64_t>(1, CACHED / (block_rows * width));  // blocks that fit
  const int64_t across = divide_up(tiles, TILES_PER_TASK), down = divide_up(blocks, near);
  context.parallel(across * down, [&](int64_t task) {
    const int64_t column = task % across * TILES_PER_TASK, row = task / across;
    if (by_many) {
      UnpackedTile unpacked[MOST_TILES];
      int8_t* values = scratch<int8_t>(VALUES, many.most_tiles * width * INT4_TILE);
      float* scales = scratch<float>(SCALES, many.most_tiles * groups * INT4_TILE);
      int32_t* zeros = scratch<int32_t>(ZEROS, many.most_tiles * groups * INT4_TILE);
      uint16_t* wide = scratch<uint16_t>(WIDE, many.most_tiles * bytes / 2 * INT4_TILE);
      for (int64_t i = 0; i < many.most_tiles; ++i)
        unpacked[i] = {values + i * width * INT4_TILE, scales + i * groups * INT4_TILE, zeros + i * groups * INT4_TILE, false, {},
                       wide + i * bytes / 2 * INT4_TILE};
      const int64_t begin = blocks * row / down * block_rows, end = std::min(rows, blocks * (row + 1) / down * block_rows);
      const Int4Rows part{end - begin, q + begin * bytes, offsets + begin * groups, row_scales + begin * groups};
      for (int64_t tile = column, count; tile < std::min(tiles, column + TILES_PER_TASK); tile += count) {
        count = std::min(many.most_tiles, tiles - tile);
        for (int64_t i = 0; i < count; ++i) kernels.unpack_values(weight, tile + i, unpacked[i]);
        many.multiply(part, unpacked, count, groups, weight.group_size, y.as<char>() + (begin * n + tile * INT4_TILE) * item, n,
                      n - tile * INT4_TILE, half);
      }
      return;
    }
    for (int64_t tile = column; tile < std::min(tiles, column + TILES_PER_TASK); ++tile) {
      const Weight& prepared = prepare(tile);
      for (int64_t i = blocks * row / down; i < blocks * (row + 1) / down; ++i)
        kernels.multiply(block(i), prepared, tile, 1, 1, output(i), half);
    }
  });
}

}  // namespace diffbit
