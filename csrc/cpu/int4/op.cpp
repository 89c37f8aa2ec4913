#include "int4_matmul.h"

#include <algorithm>

#include "kernels/int4.h"

namespace diffbit {
namespace {

enum Scratch { QUANTIZED, OFFSETS, STEPS };
constexpr int64_t BYTES_PER_TASK = 96 << 10;       // of codes, for few rows: some ten microseconds
constexpr int64_t CACHED_BYTES = 384 << 10;        // of activations that stay near a core while tiles pass by
constexpr int64_t TILES_PER_TASK = 8;

}  // namespace

Int4Node::Int4Node(const Node& node)
    : k(node.integer("K", 1, int64_t{1} << 24)),
      n(node.integer("N", 1, int64_t{1} << 31)),
      group_size(node.integer("group_size", 32, 128)) {
  node.expect_version(1);
  if (group_size & (group_size - 1))
    throw Error("Int4MatMul: attribute group_size is %d, wanted 32, 64 or 128", static_cast<int>(group_size));
}

Int4Node::Tensors Int4Node::tensors(Context& context) const {
  const Tensor a = context.input(0, "Int4MatMul: A"), codes = context.input(1, "Int4MatMul: codes"),
               scales = context.input(2, "Int4MatMul: scales"), zeros = context.input(3, "Int4MatMul: zeros"),
               factor = context.input(4, "Int4MatMul: factor");
  const int64_t groups = divide_up(k, group_size), tiles = divide_up(n, INT4_TILE);
  a.expect_last(k);
  codes.expect({tiles, groups, group_size / INT4_STEP, INT4_TILE, 4});
  scales.expect({tiles, groups, INT4_TILE});
  factor.expect({1});
  const bool symmetric = zeros.size() == 1;
  if (symmetric)
    zeros.expect({1, 1, 1});
  else
    zeros.expect({tiles, groups, INT4_TILE});
  return {a, codes, scales, zeros, factor, context.product(0, "Int4MatMul: Y", a, n), a.size() / k, symmetric};
}

Int4MatMul::Int4MatMul(const Node& node) : Int4Node(node) {
  const Isa isa = choose_isa();
  kernels_ = &DIFFBIT_PICK(isa, int4);
}

void Int4MatMul::compute(Context& context) const {
  const Tensors of = tensors(context);
  const Tensor &a = of.a, &codes = of.codes, &scales = of.scales, &zeros = of.zeros, &factor = of.factor, &y = of.y;
  const bool symmetric = of.symmetric;
  if (symmetric && *zeros.as<uint8_t>() != 8)
    throw Error("%s is one %d, wanted one 8 or one of each group", zeros.name, int{*zeros.as<uint8_t>()});
  const int64_t rows = of.rows, groups = divide_up(k, group_size), tiles = divide_up(n, INT4_TILE);
  const int64_t width = groups * group_size;
  if (!rows) return;

  const bool half = a.type == ort::FLOAT16;
  const int64_t item = half ? 2 : 4;
  const Int4Weight weight = {codes.as<uint8_t>(),  scales.as<uint16_t>(), symmetric ? nullptr : zeros.as<uint8_t>(),
                             *factor.as<float>(), n, groups, group_size};
  int8_t* q = scratch<int8_t>(QUANTIZED, rows * width);
  int32_t* offsets = scratch<int32_t>(OFFSETS, rows * groups);
  float* steps = scratch<float>(STEPS, rows * groups);
  const int64_t most = kernels_->most_rows, blocks = divide_up(rows, most);
  const auto block = [&](int64_t i) {
    return Int4Rows{std::min(most, rows - i * most), q + i * most * width, offsets + i * most * groups,
                    steps + i * most * groups};
  };
  const auto output = [&](int64_t i) { return y.as<char>() + i * most * n * item; };
  context.parallel(blocks, [&](int64_t i) {
    kernels_->quantize(a.as<char>() + i * most * k * item, half, k, groups, group_size, symmetric ? -8 : -1, block(i));
  });

  if (blocks == 1) {  // bound by memory: several tiles at once, far apart, then the few that are left
    const int64_t streams = kernels_->streams[rows], apart = tiles / streams;
    const int64_t tasks = std::max<int64_t>(1, std::min(apart, streams * apart * INT4_TILE * width / 2 / BYTES_PER_TASK));
    context.parallel(tasks, [&](int64_t task) {
      for (int64_t tile = apart * task / tasks; tile < apart * (task + 1) / tasks; ++tile)
        kernels_->multiply(block(0), weight, tile, apart, streams, output(0), half);
      if (task == tasks - 1)
        for (int64_t tile = streams * apart; tile < tiles; ++tile)
          kernels_->multiply(block(0), weight, tile, 1, 1, output(0), half);
    });
    return;
  }
  const int64_t near = std::max<int64_t>(1, CACHED_BYTES / (most * width));  // blocks that fit
  const int64_t across = divide_up(tiles, TILES_PER_TASK), down = divide_up(blocks, near);
  context.parallel(across * down, [&](int64_t task) {
    const int64_t column = task % across * TILES_PER_TASK, row = task / across;
    for (int64_t tile = column; tile < std::min(tiles, column + TILES_PER_TASK); ++tile)
      for (int64_t i = blocks * row / down; i < blocks * (row + 1) / down; ++i)
        kernels_->multiply(block(i), weight, tile, 1, 1, output(i), half);
  });
}

}  // namespace diffbit
