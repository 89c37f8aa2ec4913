#include <algorithm>

#include "../half.h"
#include "../ops.h"
#include "kernels.h"

namespace diffbit {
namespace {

enum Scratch { QUANTIZED, ROWS };
constexpr int64_t NUMBERS_PER_TASK = 32 * 1024;  // for quantizing: a few microseconds
constexpr int64_t WEIGHTS_PER_TASK = 128;        // rows of the weight if arithmetic is the bottleneck

/// Returns the rows of the weight in a task if memory is the bottleneck: long streams, but work for sixteen threads if each task
/// then has 64 KiB.
int64_t streamed_rows(int64_t n, int64_t row_bytes) {
  const int64_t bytes = std::min(std::max(n * row_bytes / 16, int64_t{64} << 10), int64_t{512} << 10);
  return std::max(bytes / row_bytes / 4 * 4, int64_t{4});
}

struct TernaryMatMul : TernaryMatMulNode {
  using TernaryMatMulNode::TernaryMatMulNode;
  void compute(Context& context) const;
  const TernaryKernels* kernels = DIFFBIT_PICK(ternary);
};

void TernaryMatMul::compute(Context& context) const {
  const Tensors tensors = this->tensors(context);
  const Tensor &a = tensors.a, &packed = tensors.packed, &scale = tensors.scale, &y = tensors.y;
  const int64_t rows = tensors.rows, blocks = divide_up(k, TERNARY_BLOCK);
  if (!rows) return;

  const bool half = a.type == ort::FLOAT16;
  const int64_t q_size = kernels->quantized_size(blocks);
  int8_t* q = scratch<int8_t>(QUANTIZED, divide_up(rows, TERNARY_ROWS_TOGETHER) * TERNARY_ROWS_TOGETHER * q_size);
  TernaryRow* quantized = scratch<TernaryRow>(ROWS, rows);
  const int64_t quantized_per_task = divide_up(NUMBERS_PER_TASK, k);
  context.parallel(divide_up(rows, quantized_per_task), [&](int64_t task) {
    for (int64_t row = task * quantized_per_task; row < rows && row < (task + 1) * quantized_per_task; ++row) {
      const void* x = half ? static_cast<const void*>(a.as<Half>() + row * k) : a.as<float>() + row * k;
      quantized[row] = kernels->quantize(x, half, activation_bits, k, blocks, q + row * q_size);
    }
  });

  const TernaryProduct product = {q, quantized, packed.as<uint8_t>(), blocks, n, scale.as<float>(), tensors.scale_per_row,
                                  y.data, half};
  const int64_t row_tasks = divide_up(rows, kernels->rows_per_task);
  const int64_t rows_each = divide_up(divide_up(rows, row_tasks), TERNARY_ROWS_TOGETHER) * TERNARY_ROWS_TOGETHER;
  const int64_t weights_each = rows < 4 ? streamed_rows(n, blocks * TERNARY_BLOCK_BYTES) : WEIGHTS_PER_TASK;
  const int64_t weight_tasks = divide_up(n, weights_each);
  context.parallel(row_tasks * weight_tasks, [&](int64_t task) {
    const int64_t row = task / weight_tasks * rows_each, begin = task % weight_tasks * weights_each;
    if (row >= rows) return;
    kernels->multiply(product, row, std::min(row + rows_each, rows), begin,
                       std::min(begin + weights_each, n));
  });
}

}  // namespace

Kernel* create_ternary_matmul(const Node& node) { return new KernelOf<TernaryMatMul>(node); }

}  // namespace diffbit
