// ONNX's operators that diffbit's artifacts use, beside diffbit's own. The table at the end is the list of them.
//
// Numbers are float32, shapes int64; an operator of other types is refused when the graph is read. Time goes into MatMul and
// Sigmoid, which are written with vectors; the others are simple loops, which the compiler vectorizes.
#include "onnx_ops.h"

#include <algorithm>
#include <cmath>

#include "../cpu/simd/vectors.h"

namespace diffbit::wasm {
namespace {

using namespace diffbit::DIFFBIT_ISA;

template <class T, class F>
void binary_of(Node& node, const F& f) {
  const OrtValue &a = node.in(0), &b = node.in(1);
  OrtValue& y = node.out(0);
  Shape shape, by_a, by_b;
  const int rank = std::max(a.rank, b.rank);
  for (int i = 0; i < rank; ++i) {
    const int64_t left = i < rank - a.rank ? 1 : a.shape[i - rank + a.rank];
    const int64_t right = i < rank - b.rank ? 1 : b.shape[i - rank + b.rank];
    shape[i] = left == 1 ? right : left;
  }
  y.resize(shape, rank);
  strides_in(a, y, by_a);
  strides_in(b, y, by_b);
  const T *from_a = a.as<T>(), *from_b = b.as<T>();
  T* to = y.as<T>();
  const bool one_a = !rank || !by_a[rank - 1], one_b = !rank || !by_b[rank - 1];
  each_row(y, by_a, by_b, [&](int64_t at, int64_t i, int64_t j, int64_t count) {
    const T *p = from_a + i, *q = from_b + j;
    T* r = to + at;
    if (one_a && one_b)
      for (int64_t c = 0; c < count; ++c) r[c] = f(*p, *q);
    else if (one_a)
      for (int64_t c = 0; c < count; ++c) r[c] = f(*p, q[c]);
    else if (one_b)
      for (int64_t c = 0; c < count; ++c) r[c] = f(p[c], *q);
    else
      for (int64_t c = 0; c < count; ++c) r[c] = f(p[c], q[c]);
  });
}

template <class F>
void binary(Node& node) {
  if (node.in(0).type == ort::INT64)
    binary_of<int64_t>(node, F());
  else
    binary_of<float>(node, F());
}
struct Plus { template <class T> T operator()(T a, T b) const { return a + b; } };
struct Minus { template <class T> T operator()(T a, T b) const { return a - b; } };
struct Times { template <class T> T operator()(T a, T b) const { return a * b; } };
struct Over {
  float operator()(float a, float b) const { return a / b; }
  int64_t operator()(int64_t a, int64_t b) const { return b ? a / b : 0; }
};

void numbers(Node& node) {  // float32, or int64 in the arithmetic of shapes
  const int type = node.in(0).type;
  if (type != ort::FLOAT32 && type != ort::INT64) fail("%s of ONNX's type %d", node.op.c_str(), type);
  if (node.in(1).type != type) fail("%s of different types", node.op.c_str());
  node.out(0).type = type;
}
void floats_only(Node& node) {
  if (node.in(0).type != ort::FLOAT32) fail("%s of ONNX's type %d", node.op.c_str(), node.in(0).type);
  for (OrtValue* output : node.outputs)
    if (output) output->type = ort::FLOAT32;
}

template <class F>
void unary(Node& node) {
  const OrtValue& x = node.in(0);
  OrtValue& y = node.out(0);
  y.resize(x.shape, x.rank);
  const float* from = x.as<float>();
  float* to = y.as<float>();
  const int64_t count = x.size();
  const F f;
  int64_t i = 0;
  for (; i + F32_LANES <= count; i += F32_LANES) store(to + i, f(load(from + i)));
  if (i < count) store_part(to + i, count - i, f(load_part(from + i, count - i)));
}
struct Logistic {
  F32 operator()(F32 x) const {  // of the tail's exponential, which cannot overflow
    const F32 one = splat(1.0f), tail = diffbit::DIFFBIT_ISA::exp(splat(0.0f) - magnitude(x));
    const v128_t negative = wasm_f32x4_lt(raw(x), raw(splat(0.0f)));
    return floats(wasm_v128_bitselect(raw(tail), raw(one), negative)) / (one + tail);
  }
};
struct Positive { F32 operator()(F32 x) const { return floats(wasm_f32x4_max(raw(x), raw(splat(0.0f)))); } };
template <float (*F)(float)>
struct Each {
  F32 operator()(F32 x) const { return F32{F(x[0]), F(x[1]), F(x[2]), F(x[3])}; }
};

/// Computes y = x / sqrt(mean(x^2) + epsilon) * weight, of rows; CENTERED: of x less its mean, plus the bias if there is one.
template <bool CENTERED>
void norm_rows(const float* x, int64_t rows, int64_t width, const float* weight, const float* bias, float epsilon,
               float* y) {
  for (int64_t row = 0; row < rows; ++row, x += width, y += width) {
    double total = 0, squares = 0;
    if (CENTERED)
      for (int64_t i = 0; i < width; ++i) total += x[i];
    const float mean = static_cast<float>(total / static_cast<double>(width));
    for (int64_t i = 0; i < width; ++i) squares += static_cast<double>(x[i] - mean) * (x[i] - mean);
    const float scale = 1 / std::sqrt(static_cast<float>(squares / static_cast<double>(width)) + epsilon);
    for (int64_t i = 0; i < width; ++i) y[i] = (x[i] - mean) * scale * weight[i] + (bias ? bias[i] : 0.0f);
  }
}

template <bool CENTERED>
void norm_of(Node& node, const OrtValue& x, const OrtValue& weight, const OrtValue* bias, OrtValue& y) {
  const int64_t width = weight.size();
  if (!x.rank || x.shape[x.rank - 1] != width)
    fail("%s: a weight of %lld for another width", node.op.c_str(), static_cast<long long>(width));
  y.resize(x.shape, x.rank);
  norm_rows<CENTERED>(x.as<float>(), x.size() / width, width, weight.as<float>(), bias ? bias->as<float>() : nullptr,
            node.number("epsilon", 1e-5f), y.as<float>());
}

template <bool CENTERED>
void norm(Node& node) {
  norm_of<CENTERED>(node, node.in(0), node.in(1), CENTERED ? node.maybe(2) : nullptr, node.out(0));
}
template <bool CENTERED>
void skip_norm(Node& node) {
  const OrtValue &x = node.in(0), &skipped = node.in(1);
  OrtValue& total = node.out(3);
  total.resize(x.shape, x.rank);
  if (skipped.size() != x.size()) fail("%s of different shapes", node.op.c_str());
  const float *a = x.as<float>(), *b = skipped.as<float>();
  float* to = total.as<float>();
  for (int64_t i = 0, count = x.size(); i < count; ++i) to[i] = a[i] + b[i];
  norm_of<CENTERED>(node, total, node.in(2), CENTERED ? node.maybe(3) : nullptr, node.out(0));
}

/// Multiplies ROWS rows of x by the columns of a weight [k, n] from `from` on, 4 * WIDE at a time.
template <int ROWS, int WIDE>
int64_t multiply_columns(const float* x, int64_t k, const float* weight, int64_t n, int64_t from, float* y) {
  for (; from + WIDE * F32_LANES <= n; from += WIDE * F32_LANES) {
    F32 sums[ROWS][WIDE];
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < WIDE; ++v) sums[r][v] = splat(0.0f);
    for (int64_t i = 0; i < k; ++i) {
      F32 row[WIDE];
      for (int v = 0; v < WIDE; ++v) row[v] = load(weight + i * n + from + v * F32_LANES);
      for (int r = 0; r < ROWS; ++r) {
        const F32 factor = splat(x[r * k + i]);
        for (int v = 0; v < WIDE; ++v) sums[r][v] = fma(factor, row[v], sums[r][v]);
      }
    }
    for (int r = 0; r < ROWS; ++r)
      for (int v = 0; v < WIDE; ++v) store(y + r * n + from + v * F32_LANES, sums[r][v]);
  }
  return from;
}

template <int ROWS, int WIDE>
void multiply_rows(const float* x, int64_t k, const float* weight, int64_t n, float* y) {
  int64_t at = multiply_columns<ROWS, WIDE>(x, k, weight, n, 0, y);
  at = multiply_columns<ROWS, 1>(x, k, weight, n, at, y);
  for (; at < n; ++at)
    for (int r = 0; r < ROWS; ++r) {
      float sum = 0;
      for (int64_t i = 0; i < k; ++i) sum += x[r * k + i] * weight[i * n + at];
      y[r * n + at] = sum;
    }
}

void matmul_checked(Node& node) {
  if (node.in(1).type != ort::FLOAT32 || node.in(1).rank != 2) fail("MatMul by anything but a float32 matrix");
  floats_only(node);
}
void matmul(Node& node) {
  const OrtValue &x = node.in(0), &weight = node.in(1);
  OrtValue& y = node.out(0);
  const int64_t k = weight.shape[0], n = weight.shape[1];
  if (!x.rank || x.shape[x.rank - 1] != k) fail("MatMul of matrices that do not fit");
  Shape shape;
  std::copy_n(x.shape, x.rank, shape);
  shape[x.rank - 1] = n;
  y.resize(shape, x.rank);
  const float* from = x.as<float>();
  float* to = y.as<float>();
  int64_t rows = k ? x.size() / k : 0;
  constexpr int FEW = 4;
  for (; rows >= FEW; rows -= FEW, from += FEW * k, to += FEW * n)
    multiply_rows<FEW, 2>(from, k, weight.as<float>(), n, to);
  for (; rows; --rows, from += k, to += n) multiply_rows<1, 8>(from, k, weight.as<float>(), n, to);
}

constexpr const char* MICROSOFT = "com.microsoft";
constexpr OnnxOp OPS[] = {
    {"", "Add", binary<Plus>, numbers, false},
    {"", "Cast", cast, cast_checked, false},
    {"", "Concat", concat, nullptr, false},
    {"", "Div", binary<Over>, numbers, false},
    {"", "Erf", unary<Each<std::erf>>, floats_only, false},
    {"", "Exp", unary<Each<std::exp>>, floats_only, false},
    {"", "Expand", expand, nullptr, false},
    {"", "Gather", gather, gather_checked, false},
    {"", "Identity", identity, nullptr, true},
    {"", "LayerNormalization", norm<true>, floats_only, false},
    {"", "MatMul", matmul, matmul_checked, false},
    {"", "Mul", binary<Times>, numbers, false},
    {"", "Relu", unary<Positive>, floats_only, false},
    {"", "Reshape", reshape, nullptr, true},
    {"", "Shape", shape_of, is_integers, false},
    {"", "Sigmoid", unary<Logistic>, floats_only, false},
    {"", "SimplifiedLayerNormalization", norm<false>, floats_only, false},
    {"", "Slice", slice, nullptr, false},
    {"", "Split", split, nullptr, false},
    {"", "Sqrt", unary<Each<std::sqrt>>, floats_only, false},
    {"", "Squeeze", squeeze, nullptr, true},
    {"", "Sub", binary<Minus>, numbers, false},
    {"", "Tanh", unary<Each<std::tanh>>, floats_only, false},
    {"", "Transpose", transpose, nullptr, false},
    {"", "Unsqueeze", unsqueeze, nullptr, true},
    {MICROSOFT, "SkipLayerNormalization", skip_norm<true>, floats_only, false},
    {MICROSOFT, "SkipSimplifiedLayerNormalization", skip_norm<false>, floats_only, false},
};

}  // namespace

const OnnxOp* find_onnx_op(const Node& node) {
  for (const OnnxOp& op : OPS)
    if (node.domain == op.domain && node.op == op.name) return &op;
  return nullptr;
}

}  // namespace diffbit::wasm
