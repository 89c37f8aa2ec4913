// GatherLowBit: a token needs one row, which takes a few microseconds, so instruction sets have no versions of their own.
#include "../ops.h"
#include "planes.h"

namespace diffbit {
namespace {

constexpr int64_t ROWS_PER_TASK = 16;

void row(const LowBitWeight& weight, int64_t id, int64_t k, bool half, void* y, int64_t at) {
  const int64_t tile = id / INT4_TILE, lane = id % INT4_TILE, runs = weight.group_size / LOWBIT_RUN;
  const float row_factor = (weight.row_scales ? to_float(weight.row_scales[id]) : 1.0f) * weight.factor;
  const int32_t middle = weight.levels ? 128 : 1 << (weight.bits - 1);
  for (int64_t i = 0; i < k; ++i) {
    const int64_t group = tile * weight.groups + i / weight.group_size, run = i % weight.group_size / LOWBIT_RUN;
    const int64_t quad = i % LOWBIT_RUN / INT4_STEP * 2 + i % 2, byte = i % INT4_STEP / 2;
    const uint8_t* planes = weight.codes + (group * runs + run) * weight.bits * LOWBIT_PLANE + lane * 4;
    const int32_t code = weight.map ? trellis_byte_at(weight, id, i / LOWBIT_RUN, quad, byte)
                                    : code_at(planes, weight.bits, quad, byte);
    const float value = static_cast<float>((weight.levels && !weight.map ? weight.levels[code] : code) - middle);
    put(y, half, at + i, value * scale_at(weight, group * INT4_TILE + lane) * row_factor);
  }
}

struct GatherLowBit : GatherLowBitNode {
  using GatherLowBitNode::GatherLowBitNode;
  void compute(Context& context) const;
};

void GatherLowBit::compute(Context& context) const {
  const LowBitTensors tensors = this->tensors(context);
  const int64_t* ids = tensors.ids.as<int64_t>();
  for (int64_t i = 0; i < tensors.rows; ++i)
    if (ids[i] < 0 || ids[i] >= n)
      throw Error("%s holds %lld, wanted 0 to %lld", tensors.ids.name, number(ids[i]), number(n - 1));
  const bool half = tensors.factor.type == ort::FLOAT16;
  const LowBitWeight weight = planes_of(*this, tensors, get(tensors.factor.data, half, 0));
  context.parallel(divide_up(tensors.rows, ROWS_PER_TASK), [&](int64_t task) {
    for (int64_t i = task * ROWS_PER_TASK; i < tensors.rows && i < (task + 1) * ROWS_PER_TASK; ++i)
      row(weight, ids[i], k, half, tensors.y.data, i * k);
  });
}

}  // namespace

Kernel* create_gather_lowbit(const Node& node) { return new KernelOf<GatherLowBit>(node); }

}  // namespace diffbit
