#include <algorithm>

#include "../half.h"
#include "../ops.h"
#include "kernels.h"

namespace diffbit {
namespace {

enum Scratch { QUANTIZED, OFFSETS, ROW_SCALES };
constexpr int64_t BYTES_PER_TASK = 96 << 10;       // of codes, for few rows: about ten microseconds
constexpr int64_t CACHED_BYTES = 384 << 10;        // of activations that stay in a core's cache while tiles pass
constexpr int64_t TILES_PER_TASK = 8;

}  // namespace

template <class Node_>
TiledMatMul<Node_>::TiledMatMul(const Node& node)
    : Node_(node), kernels(Node_::WEIGHT_BITS == 4 ? DIFFBIT_PICK(int4) : DIFFBIT_PICK(int8)) {}

template <class Node_>
void TiledMatMul<Node_>::compute(Context& context) const {
  constexpr int64_t BITS = Node_::WEIGHT_BITS, MIDDLE = 1 << (BITS - 1);
  const int64_t k = this->k, n = this->n, group_size = this->group_size;
  const typename Node_::Tensors of = this->tensors(context);
  const Tensor &a = of.a, &codes = of.codes, &scales = of.scales, &zeros = of.zeros, &factor = of.factor, &y = of.y;
  if (of.zero && *of.zero != MIDDLE)
    throw Error("%s is one %d, wanted one %lld or one of each group", zeros.name, int{*of.zero}, number(MIDDLE));
  const int64_t rows = of.rows, groups = divide_up(k, group_size), tiles = divide_up(n, INT4_TILE);
  const int64_t width = groups * group_size;
  if (!rows) return;

  const bool half = a.type == ort::FLOAT16;
  const int64_t item = half ? 2 : 4;
  const Int4Weight weight = {codes.as<uint8_t>(),  scales.as<uint16_t>(), zeros.as<uint8_t>(),
                             *factor.as<float>(), n, groups, group_size, of.scale_groups};
  int8_t* q = scratch<int8_t>(QUANTIZED, rows * width);
  int32_t* offsets = scratch<int32_t>(OFFSETS, rows * groups);
  float* row_scales = scratch<float>(ROW_SCALES, rows * groups);
  const int64_t most = kernels->most_rows, blocks = divide_up(rows, most);
  const auto block = [&](int64_t i) {
    return Int4Rows{std::min(most, rows - i * most), q + i * most * width, offsets + i * most * groups,
                    row_scales + i * most * groups};
  };
  const auto output = [&](int64_t i) { return y.as<char>() + i * most * n * item; };
  context.parallel(blocks, [&](int64_t i) {
    kernels->quantize(a.as<char>() + i * most * k * item, half, k, groups, group_size,
                      of.zero && BITS == 4 ? -8 : -1, block(i));
  });

  if (blocks == 1) {  // bound by memory: several distant tiles at once, then the remaining ones
    const int64_t streams = kernels->streams[rows], apart = tiles / streams;
    const int64_t tasks = std::max<int64_t>(1, std::min(apart, streams * apart * INT4_TILE * width * BITS / 8 / BYTES_PER_TASK));
    context.parallel(tasks, [&](int64_t task) {
      for (int64_t tile = apart * task / tasks; tile < apart * (task + 1) / tasks; ++tile)
        kernels->multiply(block(0), weight, tile, apart, streams, output(0), half);
      if (task == tasks - 1)
        for (int64_t tile = streams * apart; tile < tiles; ++tile)
          kernels->multiply(block(0), weight, tile, 1, 1, output(0), half);
    });
    return;
  }
  const int64_t near = std::max<int64_t>(1, CACHED_BYTES / (most * width));  // blocks that fit
  const int64_t across = divide_up(tiles, TILES_PER_TASK), down = divide_up(blocks, near);
  context.parallel(across * down, [&](int64_t task) {
    const int64_t column = task % across * TILES_PER_TASK, row = task / across;
    for (int64_t tile = column; tile < std::min(tiles, column + TILES_PER_TASK); ++tile)
      for (int64_t i = blocks * row / down; i < blocks * (row + 1) / down; ++i)
        kernels->multiply(block(i), weight, tile, 1, 1, output(i), half);
  });
}

template struct TiledMatMul<Int4Node>;
template struct TiledMatMul<Int8Node>;

}  // namespace diffbit
