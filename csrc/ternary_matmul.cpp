#include "ternary_matmul.h"

#include "half.h"
#include "kernels/ternary.h"

namespace diffbit {
namespace {

enum Scratch { QUANTIZED, STEPS, WIDE, RESULT };
constexpr int64_t ROWS_PER_TASK = 64;  // of the weight

}  // namespace

TernaryMatMul::TernaryMatMul(const Node& node)
    : k_(node.integer("K", 1, int64_t{1} << 24)), n_(node.integer("N", 1, int64_t{1} << 31)) {
  node.expect_version(1);
  const Isa isa = choose_isa();
  kernels_ = &DIFFBIT_PICK(isa, ternary);
}

void TernaryMatMul::compute(Context& context) const {
  const Tensor a = context.input(0, "TernaryMatMul: A"), packed = context.input(1, "TernaryMatMul: packed"),
               scale = context.input(2, "TernaryMatMul: scale");
  const int64_t blocks = (k_ + TERNARY_BLOCK - 1) / TERNARY_BLOCK, width = blocks * TERNARY_BLOCK;
  if (a.rank < 1 || a.shape[a.rank - 1] != k_)
    throw Error("%s is %s, wanted [..., %lld]", a.name, a.shape_text().c_str(), static_cast<long long>(k_));
  packed.expect({n_, blocks * TERNARY_BLOCK_BYTES});
  scale.expect({1});
  const int64_t rows = a.size() / k_;
  int64_t shape[Tensor::MOST_DIMENSIONS];
  for (size_t i = 0; i < a.rank; ++i) shape[i] = a.shape[i];
  shape[a.rank - 1] = n_;
  const Tensor y = context.output(0, "TernaryMatMul: Y", shape, a.rank);
  if (!rows) return;

  int8_t* q = scratch<int8_t>(QUANTIZED, rows * width);
  float* steps = scratch<float>(STEPS, rows);
  const bool half = a.type == ort::FLOAT16;
  float* wide = half ? scratch<float>(WIDE, rows * k_) : a.as<float>();
  float* result = half ? scratch<float>(RESULT, rows * n_) : y.as<float>();
  context.parallel(rows, [&](int64_t row) {
    float* x = wide + row * k_;
    if (half)
      for (int64_t i = 0; i < k_; ++i) x[i] = to_float(a.as<Half>()[row * k_ + i]);
    for (int64_t i = k_; i < width; ++i) q[row * width + i] = 0;
    steps[row] = kernels_->quantize(x, k_, q + row * width);
  });
  context.parallel((n_ + ROWS_PER_TASK - 1) / ROWS_PER_TASK, [&](int64_t task) {
    const int64_t begin = task * ROWS_PER_TASK, end = begin + ROWS_PER_TASK < n_ ? begin + ROWS_PER_TASK : n_;
    kernels_->multiply(q, steps, rows, packed.as<uint8_t>(), blocks, *scale.as<float>(), begin, end, n_, result);
    if (half)
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t n = begin; n < end; ++n) y.as<Half>()[row * n_ + n] = to_half(result[row * n_ + n]);
  });
}

}  // namespace diffbit
