#include <algorithm>

#include "../ops.h"
#include "kernels.h"

namespace diffbit {
namespace {

enum Scratch { ACTIVATIONS, PANEL };
constexpr int64_t BYTES_PER_TASK = 192 << 10;  // of the weight: they stay in a core's cache while many activations pass
constexpr int64_t MOST_ROWS = 480;             // rows of activations that are converted to floats at a time

struct FloatMatMul : FloatMatMulNode {
  using FloatMatMulNode::FloatMatMulNode;
  void compute(Context& context) const;
  const FloatMatMulKernels* kernels = DIFFBIT_PICK(float_matmul);
};

void FloatMatMul::compute(Context& context) const {
  const Tensors tensors = this->tensors(context);
  const int64_t k = tensors.w.shape[1], n = tensors.w.shape[0], width = divide_up(k, FLOAT_LANES) * FLOAT_LANES;
  if (!tensors.rows || !n) return;
  const bool half = tensors.a.type == ort::FLOAT16;
  const int64_t item = half ? 2 : 4, rows_at_once = kernels->most_rows;
  const FloatRows activations = {tensors.a.data, half, k}, weight = {tensors.w.data, half, k};
  float* x = scratch<float>(ACTIVATIONS, std::min(tensors.rows, MOST_ROWS) * width);

  if (tensors.rows == 1) {  // bound by memory: several distant rows of the weight at once, then the remaining ones
    kernels->widen(activations, 0, 1, width, x);
    const int64_t apart = n / FLOAT_STREAMS;
    const int64_t tasks = std::clamp<int64_t>(n * k * item / BYTES_PER_TASK, 1, std::max<int64_t>(apart, 1));
    context.parallel(tasks, [&](int64_t task) {
      kernels->multiply(x, 1, width, weight, apart * task / tasks, apart * (task + 1) / tasks, apart, n, half, tensors.y.data);
      if (task == tasks - 1)
        kernels->multiply(x, 1, width, weight, apart * FLOAT_STREAMS, n, 0, n, half, tensors.y.data);
    });
    return;
  }
  const int64_t rows_per_task = std::max<int64_t>(1, BYTES_PER_TASK / 16 / width) * 4;  // rows of the weight in a task
  for (int64_t begin = 0; begin < tensors.rows; begin += MOST_ROWS) {
    const int64_t rows = std::min(MOST_ROWS, tensors.rows - begin);
    char* y = tensors.y.as<char>() + begin * n * item;
    kernels->widen(activations, begin, begin + rows, width, x);
    context.parallel(divide_up(n, rows_per_task), [&](int64_t task) {
      const int64_t first = task * rows_per_task, count = std::min(rows_per_task, n - first);
      FloatRows panel = {tensors.w.as<char>() + first * k * item, half, k};
      if (half && rows > rows_at_once) {  // read several times, so converted once
        float* floats = scratch<float>(PANEL, rows_per_task * width);
        kernels->widen(weight, first, first + count, width, floats);
        panel = {floats, false, width};
      }
      for (int64_t row = 0; row < rows; row += rows_at_once)
        kernels->multiply(x + row * width, std::min(rows_at_once, rows - row), width, panel, 0, count, 0, n, half,
                          y + (row * n + first) * item);
    });
  }
}

}  // namespace

Kernel* create_float_matmul(const Node& node) { return new KernelOf<FloatMatMul>(node); }

}  // namespace diffbit
