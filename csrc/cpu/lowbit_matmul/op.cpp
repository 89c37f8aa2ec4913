#include "../int4/tiles.h"
#include "../ops.h"
#include "kernels.h"
#include "planes.h"

namespace diffbit {
namespace {

constexpr int UNPACKED = 3;  // slot of scratch

struct LowBitMatMul : LowBitMatMulNode {
  explicit LowBitMatMul(const Node& node) : LowBitMatMulNode(node), many(pick_many_rows(node)) {}
  void compute(Context& context) const;
  const LowBitMatMulKernels* kernels = DIFFBIT_PICK(lowbit_matmul);
  const Int4Kernels* rounding = DIFFBIT_PICK(int4);  // of the activations
  const ManyRowsKernels* many;
};

void LowBitMatMul::compute(Context& context) const {
  const LowBitTensors tensors = this->tensors(context);
  const LowBitWeight weight = planes_of(*this, tensors, *tensors.factor.as<float>());
  const int32_t level = weight.doubled ? weight.levels[0] - 128 : kernels->minus_of_levels;
  const int32_t minus = weight.levels ? level : -(1 << (bits - 1));
  const auto unpack = [&](int64_t tile) {
    LowBitWeight unpacked = weight;
    kernels->unpack(unpacked, tile, scratch<uint8_t>(UNPACKED, weight.groups * weight.group_size * INT4_TILE * (weight.map ? LOWBIT_RING : 1)));
    return unpacked;
  };
  multiply_tiles(context, tensors.a, tensors.y, k, bits, weight, minus, rounding->quantize, *kernels, *many, LOWBIT_FEW_ROWS,
                 unpack, weight.map ? LOWBIT_RING : 0);
}

}  // namespace

Kernel* create_lowbit_matmul(const Node& node) { return new KernelOf<LowBitMatMul>(node); }

}  // namespace diffbit
