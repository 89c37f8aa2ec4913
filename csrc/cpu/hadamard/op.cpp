#include <algorithm>

#include "../half.h"
#include "../ops.h"
#include "kernels.h"

namespace diffbit {
namespace {

enum Scratch { FLOATS };
constexpr int64_t NUMBERS_PER_TASK = 32 * 1024;  // some ten microseconds

struct Hadamard : HadamardNode {
  using HadamardNode::HadamardNode;
  void compute(Context& context) const;
  const HadamardKernels* kernels = DIFFBIT_PICK(hadamard);
};

void Hadamard::compute(Context& context) const {
  const Tensors tensors = this->tensors(context);
  const Tensor &a = tensors.a, &y = tensors.y;
  const int64_t size = a.size();
  if (!size) return;

  const bool half = a.type == ort::FLOAT16;
  const int64_t item = half ? 2 : 4, width = std::max(block, HADAMARD_LANES);
  const int64_t numbers_per_task = divide_up(NUMBERS_PER_TASK, width) * width, tasks = divide_up(size, numbers_per_task);
  float* floats = scratch<float>(FLOATS, tasks * width);
  context.parallel(tasks, [&](int64_t task) {
    const int64_t at = task * numbers_per_task * item;
    const int64_t count = std::min(numbers_per_task, size - task * numbers_per_task);
    kernels->transform(a.as<char>() + at, y.as<char>() + at, half, block, count, floats + task * width);
  });
}

}  // namespace

Kernel* create_hadamard(const Node& node) { return new KernelOf<Hadamard>(node); }

}  // namespace diffbit
