// ONNX's operators that diffbit's artifacts use, beside diffbit's own. The table at the end is the list of them.
//
// Numbers are float32, shapes int64; an operator of other types is refused when the graph is read. Time goes into MatMul,
// Sigmoid and norms, which have kernels with vectors (kernels.h); the others are simple loops, which the compiler vectorizes.
#include "onnx_ops.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace diffbit::graph {
namespace {

template <class T, class Result = T, class F>
void binary_of(Node& node, const F& f) {
  const OrtValue &a = node.in(0), &b = node.in(1);
  OrtValue& y = node.out(0);
  Shape shape = {}, by_a, by_b;
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
  Result* to = y.as<Result>();
  const bool one_a = !rank || !by_a[rank - 1], one_b = !rank || !by_b[rank - 1];
  each_row(y, by_a, by_b, [&](int64_t at, int64_t i, int64_t j, int64_t count) {
    const T *p = from_a + i, *q = from_b + j;
    Result* r = to + at;
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
/// The type in which numbers are computed: integers wrap.
template <class T> struct Wrapping { using Type = T; };
template <> struct Wrapping<int64_t> { using Type = uint64_t; };
#define DIFFBIT_BINARY(Name, OPERATOR) \
  struct Name { \
    template <class T> T operator()(T a, T b) const { \
      using W = typename Wrapping<T>::Type; \
      return static_cast<T>(static_cast<W>(a) OPERATOR static_cast<W>(b)); \
    } \
  };
DIFFBIT_BINARY(Plus, +)
DIFFBIT_BINARY(Minus, -)
DIFFBIT_BINARY(Times, *)
#undef DIFFBIT_BINARY
struct Over {
  float operator()(float a, float b) const { return a / b; }
  int64_t operator()(int64_t a, int64_t b) const { return b == -1 ? Minus()(int64_t{0}, a) : b ? a / b : 0; }
};

void numbers(Node& node) {  // float32, or int64 in the arithmetic of shapes
  const int type = node.in(0).type;
  if (type != ort::FLOAT32 && type != ort::INT64) fail("%s of ONNX's type %d", node.op.c_str(), type);
  if (node.in(1).type != type) fail("%s of different types", node.op.c_str());
  node.out(0).set_type(type);
}
void floats_only(Node& node) {
  for (const OrtValue* input : node.inputs)
    if (input && input->type != ort::FLOAT32) fail("%s of ONNX's type %d", node.op.c_str(), input->type);
  for (OrtValue* output : node.outputs)
    if (output) output->set_type(ort::FLOAT32);
}

template <float (*F)(float)>
void each(Node& node) {
  const OrtValue& x = node.in(0);
  OrtValue& y = node.out(0);
  y.resize(x.shape, x.rank);
  const float* from = x.as<float>();
  float* to = y.as<float>();
  for (int64_t i = 0, count = x.size(); i < count; ++i) to[i] = F(from[i]);
}
float positive(float x) { return x < 0 ? 0 : x; }
float nearest(float x) { return __builtin_rintf(x); }  // halves to even

void equal(Node& node) { binary_of<float, uint8_t>(node, [](float a, float b) -> uint8_t { return a == b; }); }
void floats_to_bool(Node& node) {
  if (node.in(0).type != ort::FLOAT32 || node.in(1).type != ort::FLOAT32) fail("%s of other numbers than float32", node.op.c_str());
  node.out(0).set_type(BOOL);
}

/// Chooses one number or tensor where the condition holds, else another, of which each is repeated along dimensions of 1.
void where(Node& node) {
  const OrtValue* const inputs[] = {&node.in(0), &node.in(1), &node.in(2)};
  OrtValue& y = node.out(0);
  Shape shape = {}, strides[3];
  int rank = 0;
  for (const OrtValue* x : inputs) rank = std::max(rank, int{x->rank});
  for (int i = 0; i < rank; ++i) {
    shape[i] = 1;
    for (const OrtValue* x : inputs)
      if (const int j = i - rank + x->rank; j >= 0 && shape[i] == 1) shape[i] = x->shape[j];
  }
  y.resize(shape, rank);
  for (int i = 0; i < 3; ++i) strides_in(*inputs[i], y, strides[i]);
  for (int64_t at = 0, count = y.size(); at < count; ++at) {
    int64_t from[3] = {}, rest = at;
    for (int i = rank - 1; i >= 0; rest /= shape[i--])
      for (int j = 0; j < 3; ++j) from[j] += rest % shape[i] * strides[j][i];
    const int chosen = inputs[0]->as<uint8_t>()[from[0]] ? 1 : 2;
    y.as<float>()[at] = inputs[chosen]->as<float>()[from[chosen]];
  }
}
void where_checked(Node& node) {
  if (node.in(0).type != BOOL || node.in(1).type != ort::FLOAT32 || node.in(2).type != ort::FLOAT32) fail("Where of other types than float32");
  node.out(0).set_type(ort::FLOAT32);
}

/// Reduces the last axis to one number: of(numbers, how many).
template <float of(const float*, int64_t)>
void reduce(Node& node) {
  const OrtValue &x = node.in(0), &axes = node.in(1);
  if (axes.size() != 1 || axis_of(x, Integers(axes)[0]) != x.rank - 1 || !node.integer("keepdims", 1) || !x.shape[x.rank - 1])
    fail("%s along another axis than the last", node.op.c_str());
  const int64_t width = x.shape[x.rank - 1];
  Shape shape;
  std::copy_n(x.shape, x.rank, shape);
  shape[x.rank - 1] = 1;
  OrtValue& y = node.out(0);
  y.resize(shape, x.rank);
  const float* from = x.as<float>();
  for (int64_t row = 0, rows = y.size(); row < rows; ++row, from += width) y.as<float>()[row] = of(from, width);
}
float largest_of(const float* x, int64_t count) { return *std::max_element(x, x + count); }
float sum_of(const float* x, int64_t count) { return static_cast<float>(std::accumulate(x, x + count, 0.0)); }
void reduce_checked(Node& node) {
  if (node.in(0).type != ort::FLOAT32) fail("%s of ONNX's type %d", node.op.c_str(), node.in(0).type);
  node.out(0).set_type(ort::FLOAT32);
}

void less(Node& node) { binary_of<float, uint8_t>(node, [](float a, float b) -> uint8_t { return a < b; }); }

/// Finds the k largest numbers of each row, largest first; of equal ones the earlier.
void top_k(Node& node) {
  const OrtValue& x = node.in(0);
  const Integers count(node.in(1));
  if (count.count != 1 || !x.rank || axis_of(x, node.integer("axis", -1)) != x.rank - 1 || !node.integer("largest", 1))
    fail("TopK of other numbers than the largest along the last axis");
  const int64_t width = x.shape[x.rank - 1], k = count[0];
  if (k < 0 || k > width) fail("TopK of %lld out of %lld", static_cast<long long>(k), static_cast<long long>(width));
  Shape shape;
  std::copy_n(x.shape, x.rank, shape);
  shape[x.rank - 1] = k;
  OrtValue &y = node.out(0), *places = node.outputs.size() > 1 ? node.outputs[1] : nullptr;
  y.resize(shape, x.rank);
  if (places) places->resize(shape, x.rank);
  std::vector<int64_t> order(static_cast<size_t>(width));
  const float* from = x.as<float>();
  for (int64_t row = 0, rows = x.size(0, x.rank - 1); row < rows; ++row, from += width) {
    std::iota(order.begin(), order.end(), int64_t{0});
    const auto before = [&](int64_t a, int64_t b) {  // NaN is the largest, so this is an order
      const bool nan_a = std::isnan(from[a]), nan_b = std::isnan(from[b]);
      if (nan_a || nan_b) return nan_a && nan_b ? a < b : nan_a;
      return from[a] > from[b] || (from[a] == from[b] && a < b);
    };
    std::partial_sort(order.begin(), order.begin() + k, order.end(), before);
    for (int64_t i = 0; i < k; ++i) {
      y.as<float>()[row * k + i] = from[order[static_cast<size_t>(i)]];
      if (places) places->as<int64_t>()[row * k + i] = order[static_cast<size_t>(i)];
    }
  }
}
void top_k_checked(Node& node) {
  if (node.in(0).type != ort::FLOAT32) fail("%s of ONNX's type %d", node.op.c_str(), node.in(0).type);
  node.out(0).set_type(ort::FLOAT32);
  if (node.outputs.size() > 1 && node.outputs[1]) node.outputs[1]->set_type(ort::INT64);
}

void softmax(Node& node) {
  const OrtValue& x = node.in(0);
  if (!x.rank || axis_of(x, node.integer("axis", -1)) != x.rank - 1) fail("Softmax along another axis than the last");
  OrtValue& y = node.out(0);
  y.resize(x.shape, x.rank);
  const int64_t width = x.shape[x.rank - 1];
  const float* from = x.as<float>();
  float* to = y.as<float>();
  for (int64_t row = 0, rows = width ? x.size() / width : 0; row < rows; ++row, from += width, to += width) {
    const float largest = *std::max_element(from, from + width);
    float sum = 0;
    for (int64_t i = 0; i < width; ++i) sum += to[i] = std::exp(from[i] - largest);
    for (int64_t i = 0; i < width; ++i) to[i] /= sum;
  }
}

const GraphKernels& kernels() {
  static const GraphKernels* const chosen = DIFFBIT_PICK(graph_kernels);
  return *chosen;
}

/// Calls work(begin, end) for parts of `count` things, in tasks of at least `least` of them.
template <class Work>
void in_parts(int64_t count, int64_t least, const Work& work) {
  parallel((count + least - 1) / least, [&](int64_t task) { work(task * least, std::min(count, (task + 1) * least)); });
}
constexpr int64_t NUMBERS_PER_TASK = 16 * 1024;  // some microseconds

void sigmoid(Node& node) {
  const OrtValue& x = node.in(0);
  OrtValue& y = node.out(0);
  y.resize(x.shape, x.rank);
  in_parts(x.size(), NUMBERS_PER_TASK, [&](int64_t begin, int64_t end) {
    kernels().sigmoid(x.as<float>() + begin, end - begin, y.as<float>() + begin);
  });
}

/// Computes y = (x - mean) / sqrt(variance + epsilon) * weight, plus the bias if there is one, of rows.
void center_rows(const float* x, int64_t rows, int64_t width, const float* weight, const float* bias, float epsilon,
                 float* y) {
  for (int64_t row = 0; row < rows; ++row, x += width, y += width) {
    double total = 0, squares = 0;
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
  if (!x.rank || x.shape[x.rank - 1] != width || (bias && bias->size() != width))
    fail("%s: a weight of %lld for another width", node.op.c_str(), static_cast<long long>(width));
  y.resize(x.shape, x.rank);
  if (!width) return;
  const float epsilon = node.number("epsilon", 1e-5f);
  in_parts(x.size() / width, std::max<int64_t>(1, NUMBERS_PER_TASK / width), [&](int64_t begin, int64_t end) {
    const float* from = x.as<float>() + begin * width;
    float* to = y.as<float>() + begin * width;
    if (CENTERED)
      center_rows(from, end - begin, width, weight.as<float>(), bias ? bias->as<float>() : nullptr, epsilon, to);
    else
      kernels().norm(from, end - begin, width, weight.as<float>(), epsilon, to);
  });
}

template <bool CENTERED>
void norm(Node& node) {
  norm_of<CENTERED>(node, node.in(0), node.in(1), CENTERED ? node.maybe(2) : nullptr, node.out(0));
}
template <bool CENTERED>
void skip_norm(Node& node) {
  const OrtValue &x = node.in(0), &skipped = node.in(1);
  OrtValue& total = node.out(3);
  if (skipped.size() != x.size()) fail("%s of different shapes", node.op.c_str());
  total.resize(x.shape, x.rank);
  const float *a = x.as<float>(), *b = skipped.as<float>();
  float* to = total.as<float>();
  for (int64_t i = 0, count = x.size(); i < count; ++i) to[i] = a[i] + b[i];
  norm_of<CENTERED>(node, total, node.in(2), CENTERED ? node.maybe(3) : nullptr, node.out(0));
}

void matmul(Node& node) {
  const OrtValue &x = node.in(0), &weight = node.in(1);
  OrtValue& y = node.out(0);
  if (weight.rank != 2) fail("MatMul by anything but a matrix");
  const int64_t k = weight.shape[0], n = weight.shape[1];
  if (!x.rank || x.shape[x.rank - 1] != k) fail("MatMul of matrices that do not fit");
  Shape shape;
  std::copy_n(x.shape, x.rank, shape);
  shape[x.rank - 1] = n;
  y.resize(shape, x.rank);
  constexpr int64_t COLUMNS = 256;  // of a task
  const int64_t rows = x.size(0, x.rank - 1);
  in_parts(n, COLUMNS, [&](int64_t begin, int64_t end) {
    kernels().multiply(x.as<float>(), rows, k, weight.as<float>(), n, begin, end, y.as<float>());
  });
}

constexpr const char* MICROSOFT = "com.microsoft";
constexpr OnnxOp OPS[] = {
    {"", "Abs", each<std::fabs>, floats_only, false, true},
    {"", "Add", binary<Plus>, numbers, false, true},
    {"", "Cast", cast, cast_checked, false},
    {"", "Concat", concat, nullptr, false},
    {"", "Div", binary<Over>, numbers, false, true},
    {"", "Equal", equal, floats_to_bool, false},
    {"", "Erf", each<std::erf>, floats_only, false, true},
    {"", "Exp", each<std::exp>, floats_only, false, true},
    {"", "Expand", expand, nullptr, false},
    {"", "Gather", gather, gather_checked, false},
    {"", "Identity", identity, nullptr, true},
    {"", "LayerNormalization", norm<true>, floats_only, false, true},
    {"", "Less", less, floats_to_bool, false},
    {"", "MatMul", matmul, floats_only, false, true},
    {"", "Mul", binary<Times>, numbers, false, true},
    {"", "ReduceMax", reduce<largest_of>, reduce_checked, false, true},
    {"", "ReduceSum", reduce<sum_of>, reduce_checked, false, true},
    {"", "Relu", each<positive>, floats_only, false, true},
    {"", "Reshape", reshape, nullptr, true},
    {"", "Round", each<nearest>, floats_only, false, true},
    {"", "Shape", shape_of, is_integers, false},
    {"", "Sigmoid", sigmoid, floats_only, false, true},
    {"", "SimplifiedLayerNormalization", norm<false>, floats_only, false, true},
    {"", "Slice", slice, nullptr, false},
    {"", "Softmax", softmax, floats_only, false, true},
    {"", "Split", split, nullptr, false},
    {"", "Sqrt", each<std::sqrt>, floats_only, false, true},
    {"", "Squeeze", squeeze, nullptr, true},
    {"", "Sub", binary<Minus>, numbers, false, true},
    {"", "Tanh", each<std::tanh>, floats_only, false, true},
    {"", "TopK", top_k, top_k_checked, false},
    {"", "Transpose", transpose, nullptr, false},
    {"", "Unsqueeze", unsqueeze, nullptr, true},
    {"", "Where", where, where_checked, false},
    {MICROSOFT, "MatMulBnb4", bnb4, blocks_checked, false, true},
    {MICROSOFT, "MatMulNBits", nbits, blocks_checked, false, true},
    {MICROSOFT, "SkipLayerNormalization", skip_norm<true>, floats_only, false, true},
    {MICROSOFT, "SkipSimplifiedLayerNormalization", skip_norm<false>, floats_only, false, true},
};

}  // namespace

const OnnxOp* find_onnx_op(const Node& node) {
  for (const OnnxOp& op : OPS)
    if (node.domain == op.domain && node.op == op.name) return &op;
  return nullptr;
}

}  // namespace diffbit::graph
