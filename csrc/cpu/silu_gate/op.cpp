#include <algorithm>

#include "../ops.h"
#include "kernels.h"

namespace diffbit {
namespace {

constexpr int64_t NUMBERS_PER_TASK = 16 * 1024;  // some ten microseconds

struct SiluGate : SiluGateNode {
  using SiluGateNode::SiluGateNode;
  void compute(Context& context) const;
  const SiluGateKernels* kernels = DIFFBIT_PICK(silu_gate);
};

void SiluGate::compute(Context& context) const {
  const Tensors tensors = this->tensors(context);
  const int64_t item = tensors.a.type == ort::FLOAT16 ? 2 : 4, n = tensors.n, row_bytes = n * item;
  if (!n) return;
  const int64_t rows_per_task = std::max<int64_t>(1, NUMBERS_PER_TASK / n);
  context.parallel(divide_up(tensors.rows, rows_per_task), [&](int64_t task) {
    for (int64_t row = task * rows_per_task; row < std::min(tensors.rows, (task + 1) * rows_per_task); ++row) {
      const char* g = tensors.a.as<char>() + 2 * row * row_bytes;
      kernels->multiply(g, g + row_bytes, tensors.y.as<char>() + row * row_bytes, item == 2, n);
    }
  });
}

}  // namespace

Kernel* create_silu_gate(const Node& node) { return new KernelOf<SiluGate>(node); }

}  // namespace diffbit
