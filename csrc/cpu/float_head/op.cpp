#include <algorithm>
#include <cstring>

#include "../half.h"
#include "../ops.h"
#include "kernels.h"

namespace diffbit {
namespace {

enum Scratch { ACTIVATIONS };
constexpr int64_t BYTES_PER_TASK = 192 << 10;  // of the weight

}  // namespace

FloatHead::FloatHead(const Node& node) : FloatHeadNode(node), kernels(DIFFBIT_PICK(float_head)) {}

void FloatHead::compute(Context& context) const {
  const Tensors of = tensors(context);
  const int64_t k = of.w.shape[1], n = of.w.shape[0], width = divide_up(k, FLOAT_HEAD_LANES) * FLOAT_HEAD_LANES;
  if (!of.rows || !n) return;
  const bool half = of.a.type == ort::FLOAT16;
  const int64_t item = half ? 2 : 4;
  float* x = scratch<float>(ACTIVATIONS, of.rows * width);
  for (int64_t row = 0; row < of.rows; ++row) {
    float* to = x + row * width;
    if (half)
      std::transform(of.a.as<Half>() + row * k, of.a.as<Half>() + (row + 1) * k, to, [](Half a) { return to_float(a); });
    else
      std::copy_n(of.a.as<float>() + row * k, k, to);
    std::fill(to + k, to + width, 0.0f);
  }
  // a task has some rows of the weight, which stay near while all the activations pass by
  const int64_t some = std::max<int64_t>(4, BYTES_PER_TASK / (k * item) / 4 * 4);
  context.parallel(divide_up(n, some), [&](int64_t task) {
    for (int64_t row = 0; row < of.rows; row += FLOAT_HEAD_ROWS)
      kernels->multiply(x + row * width, std::min(FLOAT_HEAD_ROWS, of.rows - row), width, of.w.data, half, k, n, task * some,
                        std::min(n, (task + 1) * some), of.y.as<char>() + row * n * item);
  });
}

}  // namespace diffbit
