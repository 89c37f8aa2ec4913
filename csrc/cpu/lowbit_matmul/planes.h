// The weight of LowBitMatMul and GatherLowBit, read one code at a time.
#pragma once

#include "../../ort/layouts.h"
#include "../../ort/nodes.h"
#include "../half.h"
#include "kernels.h"

namespace diffbit {

/// The weight of a node; throws if a single scale or level is another one than the definition says.
template <class Node_>
LowBitWeight planes_of(const Node_& node, const LowBitTensors& of, float factor) {
  const float one = of.row_scale ? to_float(*of.row_scale) : 1.0f;
  const int64_t middle = int64_t{1} << (node.bits - 1);
  if (one != 1.0f) throw Error("%s is one %g, wanted one 1 or one of each row", of.row_scales.name, double{one});
  if (of.level && *of.level != middle)
    throw Error("%s is one %d, wanted one %lld for integers", of.levels.name, int{*of.level}, number(middle));
  return {of.codes.as<uint8_t>(), of.scales.data, of.scales.type == ort::INT8, of.row_scales.as<uint16_t>(),
          of.levels.as<uint8_t>(), factor, node.n, divide_up(node.k, node.group_size), node.group_size, node.bits};
}

/// The code of a row's weight in a run: `run` is the row's first byte in it.
inline int32_t code_at(const uint8_t* run, int64_t bits, int64_t quad, int64_t byte) {
  const auto field = [&](int64_t first, int64_t width) {
    return run[(first + quad * width / 8) * LOWBIT_PLANE + byte] >> quad * width % 8 & ((1 << width) - 1);
  };
  const int64_t low = bits < 4 ? 2 : 4;
  return bits == low ? field(0, low) : field(0, low) | field(low, bits - low) << low;
}

inline float scale_at(const LowBitWeight& weight, int64_t at) {
  return weight.int8_scales ? static_cast<float>(static_cast<const int8_t*>(weight.scales)[at])
                            : to_float(static_cast<const uint16_t*>(weight.scales)[at]);
}

}  // namespace diffbit
