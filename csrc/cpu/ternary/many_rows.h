// TernaryMatMul of many rows by matrix instructions. A vector of 16 weight rows, transposed by four bytes, is B for
// each of its four fields; the matching activations of 16 rows lie side by side in q, as A.
#pragma once

#include "../simd/quantize.h"
#include "kernels.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

constexpr int64_t SIDE = 2 * TILE_ROWS;  // rows of activations, and of the weight, whose sums are in tiles at a time
constexpr int64_t SLICE_BYTES = 4 * TILE_BYTES;  // of a weight row, unpacked at a time
constexpr int64_t LEAST_MANY_ROWS = 20;
static_assert(TERNARY_ROWS_TOGETHER == SIDE, "op.cpp makes room for whole tiles");

/// Unpacks weights of TILE_ROWS rows, `bytes` bytes of each, as -1, 0 and 1: [vectors of WIDTH bytes, 4 fields, WIDTH / 4, 16
/// rows, 4].
void unpack(const uint8_t* const (&rows)[TILE_ROWS], int64_t bytes, uint8_t* to) {
  constexpr int64_t FIELD = TILE_ROWS * WIDTH;
  const Bytes mask = splat(uint8_t{3}), one = splat(uint8_t{1});
  for (int64_t begin = 0; begin < bytes; begin += WIDTH, to += 4 * FIELD) {
    alignas(64) uint8_t turned[FIELD] = {};
    transpose_fours(rows, begin, bytes - begin < WIDTH ? bytes - begin : WIDTH, turned);
    for (int64_t i = 0; i < FIELD; i += WIDTH) {
      const Bytes codes = load_bytes(turned + i);
      store(to + i, minus(codes & mask, one));
      store(to + FIELD + i, minus(shift<2>(codes) & mask, one));
      store(to + 2 * FIELD + i, minus(shift<4>(codes) & mask, one));
      store(to + 3 * FIELD + i, minus(shift<6>(codes) & mask, one));
    }
  }
}

/// Adds to sums [SIDE, SIDE] the product of `slices` slices of 64 of SIDE rows of q, times weights of two tiles.
void add_products(const int8_t* q, int64_t q_size, const uint8_t* const (&weights)[2], int64_t slices, int32_t* sums) {
  constexpr int64_t ROW = SIDE * 4, DOWN = TILE_ROWS * SIDE;
  load_tile<0>(sums, ROW), load_tile<1>(sums + TILE_ROWS, ROW);
  load_tile<2>(sums + DOWN, ROW), load_tile<3>(sums + DOWN + TILE_ROWS, ROW);
  for (int64_t i = 0; i < slices; ++i) {
    load_tile<4>(q + i * TILE_BYTES, q_size);
    load_tile<6>(weights[0] + i * TILE_ROWS * TILE_BYTES, TILE_BYTES);
    add_bytes<0, 4, 6>();
    load_tile<7>(weights[1] + i * TILE_ROWS * TILE_BYTES, TILE_BYTES);
    add_bytes<1, 4, 7>();
    load_tile<5>(q + TILE_ROWS * q_size + i * TILE_BYTES, q_size);
    add_bytes<2, 5, 6>();
    add_bytes<3, 5, 7>();
  }
  store_tile<0>(sums, ROW), store_tile<1>(sums + TILE_ROWS, ROW);
  store_tile<2>(sums + DOWN, ROW), store_tile<3>(sums + DOWN + TILE_ROWS, ROW);
}

/// Computes y for the activation rows `row` .. row_end and the weight rows begin .. end, at most SIDE.
void multiply_side(const TernaryProduct& product, int64_t row, int64_t row_end, int64_t begin, int64_t end) {
  const int64_t stride = product.blocks * TERNARY_BLOCK_BYTES, q_size = quantized_size(product.blocks);
  const int64_t count = row_end - row, columns = end - begin;
  alignas(64) int32_t sums[TERNARY_MOST_ROWS * SIDE];
  alignas(64) uint8_t unpacked[2][4 * TILE_ROWS * SLICE_BYTES];
  std::memset(sums, 0, sizeof *sums * static_cast<size_t>((count + SIDE - 1) / SIDE * SIDE * SIDE));
  for (int64_t from = 0; from < stride; from += SLICE_BYTES) {
    const int64_t bytes = stride - from < SLICE_BYTES ? stride - from : SLICE_BYTES;
    for (int64_t t = 0; t < 2; ++t) {
      const uint8_t* rows[TILE_ROWS];
      for (int64_t i = 0, at = t * TILE_ROWS; i < TILE_ROWS; ++i, ++at)
        rows[i] = product.packed + (begin + (at < columns ? at : columns - 1)) * stride + from;
      unpack(rows, bytes, unpacked[t]);
    }
    const Tiles in_use(TILE_BYTES);
    for (int64_t i = 0; i < count; i += SIDE)
      add_products(product.q + (row + i) * q_size + 4 * from, q_size, {unpacked[0], unpacked[1]},
                   (bytes + WIDTH - 1) / WIDTH * 4 * WIDTH / TILE_BYTES, sums + i * SIDE);
  }
  for (int64_t i = 0; i < count; ++i)
    for (int64_t j = 0; j < columns; j += LANES) {
      const int64_t room = columns - j, at = (row + i) * product.n + begin + j;
      const float* scale = product.scale + (product.scale_per_row ? begin + j : 0);
      const F32 factors = !product.scale_per_row ? splat(*scale) : room < LANES ? load_part(scale, room) : load(scale);
      const F32 values = to_floats(load_ints(sums + i * SIDE + j)) * splat(product.rows[row + i].scale) * factors;
      const auto put = [&](auto* to) { room < LANES ? store_part(to, room, values) : store(to, values); };
      if (product.half)
        put(static_cast<uint16_t*>(product.y) + at);
      else
        put(static_cast<float*>(product.y) + at);
    }
}

}  // namespace
}  // namespace diffbit::DIFFBIT_ISA
