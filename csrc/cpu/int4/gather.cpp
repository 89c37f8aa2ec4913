// GatherQuantized: converts the bytes of a tile to numbers, four at a time. A token needs one row, which takes a few
// microseconds, so instruction sets have no versions of their own.
#include "../../ort/layouts.h"
#include "../half.h"
#include "../ops.h"

namespace diffbit {
namespace {

constexpr int64_t ROWS_PER_TASK = 16;

/// Writes a row of a tile as numbers; its first codes, scales and zero points are given.
template <int64_t BITS, class T>
void row(const uint8_t* codes, const uint16_t* scales, const uint8_t* zeros, int64_t scale_step, int64_t k,
         int64_t group_size, float factor, T* to) {
  const auto put = [&](int64_t i, float value) {
    if constexpr (sizeof(T) == 2)
      to[i] = to_half(value);
    else
      to[i] = value;
  };
  for (int64_t begin = 0; begin < k; begin += group_size, scales += scale_step) {
    const float scale = to_float(*scales);
    const int32_t zero = zeros ? *zeros : 1 << (BITS - 1);
    if (zeros) zeros += scale_step;
    const int64_t end = begin + group_size < k ? begin + group_size : k;
    for (int64_t step = begin; step < begin + group_size; step += INT4_STEP, codes += INT4_TILE * BITS)
      for (int64_t i = step; i < step + INT4_STEP && i < end; ++i) {
        const int64_t byte = (i - step) / 2, odd = (i - step) % 2;
        const int32_t code = BITS == 4 ? codes[byte] >> 4 * odd & 15 : codes[odd * INT4_TILE * 4 + byte];
        put(i, static_cast<float>(code - zero) * scale * factor);
      }
  }
}

struct GatherQuantized : GatherQuantizedNode {
  using GatherQuantizedNode::GatherQuantizedNode;
  void compute(Context& context) const;
};

void GatherQuantized::compute(Context& context) const {
  const Tensors tensors = this->tensors(context);
  expect_middle(tensors.zeros, tensors.zero, bits);
  const int64_t count = tensors.rows, groups = divide_up(k, group_size);
  const int64_t* ids = tensors.ids.as<int64_t>();
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= n)
      throw Error("%s holds %lld, wanted 0 to %lld", tensors.ids.name, number(ids[i]), number(n - 1));
  const bool half = tensors.factor.type == ort::FLOAT16;
  const float factor = half ? to_float(*tensors.factor.as<Half>()) : *tensors.factor.as<float>();
  const int64_t tile_bytes = groups * group_size * INT4_TILE * bits / 8, scale_step = tensors.scale_groups == 1 ? 0 : INT4_TILE;
  const auto gather = [&](int64_t i) {
    const int64_t tile = ids[i] / INT4_TILE, lane = ids[i] % INT4_TILE;
    const int64_t scale = tile * tensors.scale_groups * INT4_TILE + lane;
    const uint8_t* codes = tensors.codes.as<uint8_t>() + tile * tile_bytes + lane * 4;
    const uint16_t* scales = tensors.scales.as<uint16_t>() + scale;
    const uint8_t* zeros = tensors.zeros.data ? tensors.zeros.as<uint8_t>() + scale : nullptr;
    if (half) {
      Half* to = tensors.y.as<Half>() + i * k;
      (bits == 4 ? row<4, Half> : row<8, Half>)(codes, scales, zeros, scale_step, k, group_size, factor, to);
    } else {
      float* to = tensors.y.as<float>() + i * k;
      (bits == 4 ? row<4, float> : row<8, float>)(codes, scales, zeros, scale_step, k, group_size, factor, to);
    }
  };
  context.parallel(divide_up(count, ROWS_PER_TASK), [&](int64_t task) {
    for (int64_t i = task * ROWS_PER_TASK; i < count && i < (task + 1) * ROWS_PER_TASK; ++i) gather(i);
  });
}

}  // namespace

Kernel* create_gather_quantized(const Node& node) { return new KernelOf<GatherQuantized>(node); }

}  // namespace diffbit
