// The weight of LowBitMatMul and GatherLowBit, read one code at a time.
#pragma once

#include <algorithm>

#include "../../ort/layouts.h"
#include "../../ort/nodes.h"
#include "../half.h"
#include "kernels.h"

namespace diffbit {

/// Returns the weight of a node; throws if a single scale or level is not the one that the definition says.
template <class Node_>
LowBitWeight planes_of(const Node_& node, const LowBitTensors& tensors, float factor) {
  const float row_scale = tensors.row_scale ? to_float(*tensors.row_scale) : 1.0f;
  const int64_t middle = int64_t{1} << (node.bits - 1);
  if (row_scale != 1.0f) throw Error("%s is one %g, wanted one 1 or one of each row", tensors.row_scales.name, double{row_scale});
  if (tensors.level && *tensors.level != middle)
    throw Error("%s is one %d, wanted one %lld for integers", tensors.levels.name, int{*tensors.level}, number(middle));
  const uint8_t *levels = tensors.levels.as<uint8_t>(), *map = nullptr;
  if (tensors.is_trellis) {
    map = levels + trellis_levels(node.bits) - TRELLIS_MAP;
    const int32_t subsets = 1 << trellis_subset_bits(node.bits);
    for (const uint8_t* level = levels; level < map; ++level)
      if (*level > 127) throw Error("%s has a level of %d, wanted at most 127", tensors.levels.name, int{*level});
    for (int64_t j = 0; j < TRELLIS_MAP; ++j)
      if (map[j] >= subsets)
        throw Error("%s has %d for a bit of a window, wanted less than %d", tensors.levels.name, int{map[j]}, subsets);
  }
  bool doubled = levels && !map && node.bits < 4;
  for (int64_t i = 1; doubled && i < int64_t{1} << node.bits; ++i) doubled = levels[i] == levels[0] + 2 * i;
  return {tensors.codes.as<uint8_t>(), tensors.scales.data, tensors.scales.type == ort::INT8, tensors.row_scales.as<uint16_t>(),
          levels, map, doubled, factor, node.n, divide_up(node.k, node.group_size), node.group_size, node.bits};
}

/// Returns the code of a row's weight in a run; `run` is the row's first byte in it.
inline int32_t code_at(const uint8_t* run, int64_t bits, int64_t quad, int64_t byte) {
  const auto field = [&](int64_t first, int64_t width) {
    return run[(first + quad * width / 8) * LOWBIT_PLANE + byte] >> quad * width % 8 & ((1 << width) - 1);
  };
  const int64_t low = bits == 1 ? 1 : bits < 4 ? 2 : 4;
  return bits == low ? field(0, low) : field(0, low) | field(low, bits - low) << low;
}

/// Returns a weight of trellis codes, plus 128 (ops/trellis.py).
inline int32_t trellis_byte_at(const LowBitWeight& weight, int64_t row, int64_t run, int64_t quad, int64_t byte) {
  constexpr int64_t LANES = INT4_TILE, TILES = LOWBIT_RING, RING = LANES * TILES;
  const int64_t runs = weight.groups * weight.group_size / LOWBIT_RUN, first = row / RING * TILES;
  const int64_t place = row % LANES * TILES + row % RING / LANES;
  int32_t code = 0, x = 0;
  for (int64_t j = 7; j >= 0; --j) {
    const int64_t p = (place - j + RING) % RING;
    const uint8_t* planes = weight.codes + ((first + p % TILES) * runs + run) * weight.bits * LOWBIT_PLANE + p / TILES * 4;
    code = code_at(planes, weight.bits, quad, byte);
    if (code >> (weight.bits - 1)) x ^= weight.map[j];
  }
  const int64_t subset_bits = trellis_subset_bits(weight.bits);
  const int32_t a = code & ((1 << (weight.bits - 1)) - 1), index = a << subset_bits | x;
  const int32_t half = 1 << (weight.bits - 2 + subset_bits);
  if (weight.bits > TRELLIS_TABLE_BITS) return index;
  const int32_t upper = (weight.levels[index < half ? half - 1 - index : (index - half) & (half - 1)]);
  return 128 + (index < half ? -upper : upper);
}

inline float scale_at(const LowBitWeight& weight, int64_t at) {
  return weight.int8_scales ? static_cast<float>(static_cast<const int8_t*>(weight.scales)[at])
                            : to_float(static_cast<const uint16_t*>(weight.scales)[at]);
}

}  // namespace diffbit
