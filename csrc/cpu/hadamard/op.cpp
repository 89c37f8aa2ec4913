#include "hadamard.h"

#include <algorithm>

#include "kernels/hadamard.h"

namespace diffbit {
namespace {

enum Scratch { FLOATS };
constexpr int64_t NUMBERS_PER_TASK = 32 * 1024;  // some ten microseconds

}  // namespace

HadamardNode::HadamardNode(const Node& node) : block(node.integer("block", 1, int64_t{1} << 24)) {
  node.expect_version(1);
  if (block & (block - 1)) throw Error("Hadamard: attribute block is %d, wanted a power of two", static_cast<int>(block));
}

HadamardNode::Tensors HadamardNode::tensors(Context& context) const {
  const Tensor a = context.input(0, "Hadamard: A");
  if (a.rank < 1 || a.shape[a.rank - 1] % block)
    throw Error("%s is %s, wanted its last dimension a multiple of %d", a.name, a.shape_text().c_str(),
                static_cast<int>(block));
  return {a, context.output(0, "Hadamard: Y", a.shape, a.rank)};
}

Hadamard::Hadamard(const Node& node) : HadamardNode(node) {
  const Isa isa = choose_isa();
  kernels_ = &DIFFBIT_PICK(isa, hadamard);
}

void Hadamard::compute(Context& context) const {
  const Tensors of = tensors(context);
  const Tensor &a = of.a, &y = of.y;
  const int64_t size = a.size();
  if (!size) return;

  const bool half = a.type == ort::FLOAT16;
  const int64_t item = half ? 2 : 4, width = std::max(block, HADAMARD_LANES);
  const int64_t some = divide_up(NUMBERS_PER_TASK, width) * width, tasks = divide_up(size, some);
  float* floats = scratch<float>(FLOATS, tasks * width);
  context.parallel(tasks, [&](int64_t task) {
    const int64_t at = task * some * item;
    kernels_->transform(a.as<char>() + at, y.as<char>() + at, half, block, std::min(some, size - task * some),
                        floats + task * width);
  });
}

}  // namespace diffbit
