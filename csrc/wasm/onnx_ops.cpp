// ONNX's operators that diffbit's artifacts use, beside diffbit's own. The table at the end is the list of them.
//
// Numbers are float32, shapes int64; an operator of other types is refused when the graph is read. Weights are where the
// time goes: only MatMul is written with vectors, the others are simple loops, which the compiler vectorizes.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "../cpu/half.h"
#include "../cpu/simd/vectors.h"
#include "graph.h"

namespace diffbit::wasm {
namespace {

using namespace diffbit::DIFFBIT_ISA;
using Shape = int64_t[OrtValue::MOST_DIMENSIONS];
enum { BOOL = 9, INT32 = 6 };

int64_t axis_of(const OrtValue& x, int64_t axis) {
  if (axis < 0) axis += x.rank;
  if (axis < 0 || axis >= x.rank) fail("an axis does not exist");
  return axis;
}

/// The integers of an int64 input.
struct Integers {
  const int64_t* begin_;
  int64_t count;
  explicit Integers(const OrtValue& x) : begin_(x.as<int64_t>()), count(x.size()) {
    if (x.type != ort::INT64) fail("an axis or a shape is not int64");
  }
  int64_t operator[](int64_t i) const { return begin_[i]; }
  int count_in(int most) const {
    if (count > most) fail("a list of axes or dimensions is too long");
    return static_cast<int>(count);
  }
};

// ---- numbers ----

/// Strides of x within the shape that it is broadcast to: 0 along repeated dimensions.
void strides_in(const OrtValue& x, const OrtValue& y, Shape& strides) {
  int64_t stride = 1;
  for (int i = y.rank - 1, j = x.rank - 1; i >= 0; --i, --j) {
    const int64_t dimension = j < 0 ? 1 : x.shape[j];
    if (dimension != 1 && dimension != y.shape[i]) fail("shapes cannot be broadcast");
    strides[i] = dimension == 1 ? 0 : stride;
    stride *= dimension;
  }
}

/// Calls row(y, a, b) with the offset of each run of the last dimension.
template <class Row>
void each_row(const OrtValue& y, const Shape& a, const Shape& b, const Row& row) {
  const int64_t last = y.rank ? y.shape[y.rank - 1] : 1, rows = last ? y.size() / last : 0;
  for (int64_t r = 0; r < rows; ++r) {
    int64_t at_a = 0, at_b = 0, rest = r;
    for (int i = y.rank - 2; i >= 0; --i) {
      at_a += rest % y.shape[i] * a[i];
      at_b += rest % y.shape[i] * b[i];
      rest /= y.shape[i];
    }
    row(r * last, at_a, at_b, last);
  }
}

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
    const F32 tail = diffbit::DIFFBIT_ISA::exp(splat(0.0f) - magnitude(x)), small = tail / (splat(1.0f) + tail);
    const v128_t negative = wasm_f32x4_lt(raw(x), raw(splat(0.0f)));
    return floats(wasm_v128_bitselect(raw(small), raw(splat(1.0f) / (splat(1.0f) + tail)), negative));
  }
};
struct Positive { F32 operator()(F32 x) const { return floats(wasm_f32x4_max(raw(x), raw(splat(0.0f)))); } };
template <float (*F)(float)>
struct Each {
  F32 operator()(F32 x) const { return F32{F(x[0]), F(x[1]), F(x[2]), F(x[3])}; }
};

/// y = x / sqrt(mean(x^2) + epsilon) * weight, of rows; CENTERED: of x less its mean, plus the bias if there is one.
template <bool CENTERED>
void norm_rows(const float* x, int64_t rows, int64_t width, const float* weight, const float* bias, float epsilon, float* y) {
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
  if (!x.rank || x.shape[x.rank - 1] != width) fail("%s: a weight of %lld for another width", node.op.c_str(), static_cast<long long>(width));
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
  const OrtValue &x = node.in(0), &more = node.in(1);
  OrtValue& total = node.out(3);
  total.resize(x.shape, x.rank);
  if (more.size() != x.size()) fail("%s of different shapes", node.op.c_str());
  const float *a = x.as<float>(), *b = more.as<float>();
  float* to = total.as<float>();
  for (int64_t i = 0, count = x.size(); i < count; ++i) to[i] = a[i] + b[i];
  norm_of<CENTERED>(node, total, node.in(2), CENTERED ? node.maybe(3) : nullptr, node.out(0));
}

/// ROWS rows of x by the columns of a weight [k, n] from `from` on, 4 * WIDE at a time.
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
        const F32 one = splat(x[r * k + i]);
        for (int v = 0; v < WIDE; ++v) sums[r][v] = fma(one, row[v], sums[r][v]);
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
  for (; rows >= FEW; rows -= FEW, from += FEW * k, to += FEW * n) multiply_rows<FEW, 2>(from, k, weight.as<float>(), n, to);
  for (; rows; --rows, from += k, to += n) multiply_rows<1, 8>(from, k, weight.as<float>(), n, to);
}

// ---- memory ----

void gather(Node& node) {
  const OrtValue &table = node.in(0), &indices = node.in(1);
  OrtValue& y = node.out(0);
  if (node.integer("axis", 0) || !table.rank) fail("Gather along another axis than the first");
  Shape shape;
  if (indices.rank + table.rank - 1 > OrtValue::MOST_DIMENSIONS) fail("Gather of too many dimensions");
  std::copy_n(indices.shape, indices.rank, shape);
  std::copy_n(table.shape + 1, table.rank - 1, shape + indices.rank);
  y.resize(shape, indices.rank + table.rank - 1);
  const int64_t bytes = table.size(1, table.rank) * element_bytes(table.type), rows = table.shape[0];
  for (int64_t i = 0; i < indices.size(); ++i) {
    int64_t row = indices.as<int64_t>()[i];
    if (row < 0) row += rows;
    if (row < 0 || row >= rows) fail("an index of %lld is beyond the %lld rows of a table", static_cast<long long>(row), static_cast<long long>(rows));
    std::memcpy(y.as<char>() + i * bytes, table.as<char>() + row * bytes, static_cast<size_t>(bytes));
  }
}
void gather_checked(Node& node) {
  if (node.in(1).type != ort::INT64) fail("Gather by indices that are not int64");
  node.out(0).type = node.in(0).type;
}

/// y, whose shape is set, from x along `strides` from `from` on, in elements.
void copy_strided(const OrtValue& x, int64_t from, const Shape& strides, const OrtValue& y) {
  const int64_t bytes = element_bytes(x.type);
  const Shape none = {};
  const int64_t last = y.rank ? strides[y.rank - 1] : 1;
  each_row(y, strides, none, [&](int64_t at, int64_t offset, int64_t, int64_t count) {
    const char* source = x.as<char>() + (from + offset) * bytes;
    char* to = y.as<char>() + at * bytes;
    if (last == 1) {
      std::memcpy(to, source, static_cast<size_t>(count * bytes));
      return;
    }
    for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * bytes, source + i * last * bytes, static_cast<size_t>(bytes));
  });
}

void strides_of(const OrtValue& x, Shape& strides) {
  int64_t stride = 1;
  for (int i = x.rank - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= x.shape[i];
  }
}

void slice(Node& node) {
  const OrtValue& x = node.in(0);
  const Integers starts(node.in(1)), ends(node.in(2));
  Shape shape, strides;
  std::copy_n(x.shape, x.rank, shape);
  strides_of(x, strides);
  int64_t from = 0;
  for (int64_t i = 0; i < starts.count; ++i) {
    const int64_t axis = axis_of(x, node.maybe(3) ? Integers(node.in(3))[i] : i);
    const int64_t step = node.maybe(4) ? Integers(node.in(4))[i] : 1, size = x.shape[axis];
    if (step < 1) fail("Slice with a step of %lld", static_cast<long long>(step));
    const auto inside = [&](int64_t at) { return std::clamp<int64_t>(at < 0 ? at + size : at, 0, size); };
    const int64_t begin = inside(starts[i]), end = inside(ends[i]);
    shape[axis] = end > begin ? (end - begin + step - 1) / step : 0;
    from += begin * strides[axis];
    strides[axis] *= step;
  }
  node.out(0).resize(shape, x.rank);
  copy_strided(x, from, strides, node.out(0));
}

void transpose(Node& node) {
  const OrtValue& x = node.in(0);
  Shape shape, strides, of_x;
  strides_of(x, of_x);
  const auto order = node.lists.find("perm");
  for (int i = 0; i < x.rank; ++i) {
    const int64_t axis = order == node.lists.end() ? x.rank - 1 - i : axis_of(x, order->second.at(static_cast<size_t>(i)));
    shape[i] = x.shape[axis];
    strides[i] = of_x[axis];
  }
  node.out(0).resize(shape, x.rank);
  copy_strided(x, 0, strides, node.out(0));
}

void expand(Node& node) {
  const OrtValue& x = node.in(0);
  const Integers wanted(node.in(1));
  const int count = wanted.count_in(OrtValue::MOST_DIMENSIONS), rank = std::max(count, int{x.rank});
  Shape shape, strides;
  for (int i = 0; i < rank; ++i) {
    const int64_t left = i < rank - x.rank ? 1 : x.shape[i - rank + x.rank], right = i < rank - count ? 1 : wanted[i - rank + count];
    shape[i] = right == 1 ? left : right;
  }
  node.out(0).resize(shape, rank);
  strides_in(x, node.out(0), strides);
  copy_strided(x, 0, strides, node.out(0));
}

void split(Node& node) {
  const OrtValue& x = node.in(0);
  const int64_t axis = axis_of(x, node.integer("axis", 0)), parts = static_cast<int64_t>(node.outputs.size());
  const int64_t outer = x.size(0, static_cast<int>(axis)), inner = x.size(static_cast<int>(axis) + 1, x.rank) * element_bytes(x.type);
  const OrtValue* sizes = node.maybe(1);
  if (sizes && Integers(*sizes).count != parts) fail("Split into another number of parts");
  const int64_t most = (x.shape[axis] + parts - 1) / parts;
  for (int64_t i = 0, begin = 0; i < parts; ++i) {
    const int64_t count = sizes ? Integers(*sizes)[i] : std::min(most, x.shape[axis] - begin);
    if (count < 0 || begin + count > x.shape[axis]) fail("Split into more than there is");
    OrtValue& y = node.out(static_cast<size_t>(i));
    Shape shape;
    std::copy_n(x.shape, x.rank, shape);
    shape[axis] = count;
    y.resize(shape, x.rank);
    for (int64_t row = 0; row < outer; ++row)
      std::memcpy(y.as<char>() + row * count * inner, x.as<char>() + (row * x.shape[axis] + begin) * inner,
                  static_cast<size_t>(count * inner));
    begin += count;
  }
}

void concat(Node& node) {
  const OrtValue& first = node.in(0);
  const int64_t axis = axis_of(first, node.integer("axis", 0));
  Shape shape;
  std::copy_n(first.shape, first.rank, shape);
  shape[axis] = 0;
  for (size_t i = 0; i < node.inputs.size(); ++i) shape[axis] += node.in(i).shape[axis];
  OrtValue& y = node.out(0);
  y.resize(shape, first.rank);
  const int64_t outer = first.size(0, static_cast<int>(axis)), row = y.size(static_cast<int>(axis), y.rank) * element_bytes(y.type);
  int64_t begin = 0;
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    const OrtValue& x = node.in(i);
    const int64_t bytes = x.size(static_cast<int>(axis), x.rank) * element_bytes(x.type);
    if (x.type != first.type || x.size(0, static_cast<int>(axis)) != outer) fail("Concat of different types or shapes");
    for (int64_t r = 0; r < outer; ++r) std::memcpy(y.as<char>() + r * row + begin, x.as<char>() + r * bytes, static_cast<size_t>(bytes));
    begin += bytes;
  }
}

/// y is x with another shape.
void view(const OrtValue& x, OrtValue& y, const Shape& shape, int rank) {
  if (rank > OrtValue::MOST_DIMENSIONS) fail("a tensor of too many dimensions");
  std::copy_n(shape, rank, y.shape);
  y.rank = rank;
  y.data = x.data;
  if (y.size() != x.size()) fail("a reshaped tensor has another size");
}

void reshape(Node& node) {
  const OrtValue& x = node.in(0);
  const Integers wanted(node.in(1));
  const int rank = wanted.count_in(OrtValue::MOST_DIMENSIONS);
  Shape shape;
  int64_t rest = -1, known = 1;
  for (int i = 0; i < rank; ++i) {
    shape[i] = wanted[i] == 0 && !node.integer("allowzero", 0) && i < x.rank ? x.shape[i] : wanted[i];
    if (shape[i] == -1)
      rest = i;
    else
      known *= shape[i];
  }
  if (rest >= 0) shape[rest] = known ? x.size() / known : 0;
  view(x, node.out(0), shape, rank);
}

void unsqueeze(Node& node) {
  const OrtValue& x = node.in(0);
  const Integers axes(node.in(1));
  const int rank = x.rank + axes.count_in(OrtValue::MOST_DIMENSIONS - x.rank);
  Shape shape;
  for (int i = 0, j = 0; i < rank; ++i) {
    bool is_new = false;
    for (int64_t a = 0; a < axes.count; ++a) is_new = is_new || i == (axes[a] < 0 ? axes[a] + rank : axes[a]);
    shape[i] = is_new ? 1 : x.shape[j++];
  }
  view(x, node.out(0), shape, rank);
}

void squeeze(Node& node) {
  const OrtValue& x = node.in(0);
  Shape shape;
  int rank = 0;
  for (int i = 0; i < x.rank; ++i) {
    bool goes = !node.maybe(1) && x.shape[i] == 1;
    for (int64_t a = 0; node.maybe(1) && a < Integers(node.in(1)).count; ++a)
      goes = goes || i == axis_of(x, Integers(node.in(1))[a]);
    if (!goes) shape[rank++] = x.shape[i];
  }
  view(x, node.out(0), shape, rank);
}

void identity(Node& node) { view(node.in(0), node.out(0), node.in(0).shape, node.in(0).rank); }

void shape_of(Node& node) {
  const OrtValue& x = node.in(0);
  const auto inside = [&](int64_t at) { return std::clamp<int64_t>(at < 0 ? at + x.rank : at, 0, x.rank); };
  const int64_t begin = inside(node.integer("start", 0)), end = inside(node.integer("end", x.rank));
  const int64_t count = std::max<int64_t>(end - begin, 0);
  node.out(0).resize(&count, 1);
  std::copy_n(x.shape + begin, count, node.out(0).as<int64_t>());
}
void is_integers(Node& node) { node.out(0).type = ort::INT64; }

// ---- types ----

double number_at(const OrtValue& x, int64_t i) {
  switch (x.type) {
    case ort::FLOAT32: return x.as<float>()[i];
    case ort::FLOAT16: return to_float(x.as<uint16_t>()[i]);
    case ort::BFLOAT16: {
      const uint32_t bits = static_cast<uint32_t>(x.as<uint16_t>()[i]) << 16;
      float value;
      std::memcpy(&value, &bits, 4);
      return value;
    }
    case ort::INT64: return static_cast<double>(x.as<int64_t>()[i]);
    case INT32: return x.as<int32_t>()[i];
    case BOOL: case ort::UINT8: return x.as<uint8_t>()[i];
    case ort::INT8: return x.as<int8_t>()[i];
    default: fail("Cast from ONNX's type %d", x.type);
  }
}

void cast(Node& node) {
  const OrtValue& x = node.in(0);
  OrtValue& y = node.out(0);
  y.resize(x.shape, x.rank);
  const int64_t count = x.size();
  if (x.type == y.type) {
    std::memcpy(y.data, x.data, static_cast<size_t>(count * element_bytes(x.type)));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const double value = number_at(x, i);
    switch (y.type) {
      case ort::FLOAT32: y.as<float>()[i] = static_cast<float>(value); break;
      case ort::FLOAT16: y.as<uint16_t>()[i] = to_half(static_cast<float>(value)); break;
      case ort::INT64: y.as<int64_t>()[i] = static_cast<int64_t>(value); break;
      case INT32: y.as<int32_t>()[i] = static_cast<int32_t>(value); break;
      case BOOL: y.as<uint8_t>()[i] = value != 0; break;
      default: fail("Cast to ONNX's type %d", y.type);
    }
  }
}
void cast_checked(Node& node) {
  const int64_t to = node.integer("to", 0);
  if (to != ort::FLOAT32 && to != ort::FLOAT16 && to != ort::INT64 && to != INT32 && to != BOOL)
    fail("Cast to ONNX's type %lld", static_cast<long long>(to));
  node.out(0).type = static_cast<int32_t>(to);
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
