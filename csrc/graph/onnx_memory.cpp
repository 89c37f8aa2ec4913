// ONNX's operators that move memory or change a tensor's shape or type.
#include <algorithm>
#include <cstring>

#include "../cpu/half.h"
#include "onnx_ops.h"

namespace diffbit::graph {

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
    int64_t row = indices.type == INT32 ? indices.as<int32_t>()[i] : indices.as<int64_t>()[i];
    if (row < 0) row += rows;
    if (row < 0 || row >= rows)
      fail("an index of %lld is beyond the %lld rows of a table", static_cast<long long>(row), static_cast<long long>(rows));
    if (bytes == 2)  // tables of two numbers (mxfp4)
      std::memcpy(y.as<char>() + i * 2, table.as<char>() + row * 2, 2);
    else
      std::memcpy(y.as<char>() + i * bytes, table.as<char>() + row * bytes, static_cast<size_t>(bytes));
  }
}
void gather_checked(Node& node) {
  if (node.in(1).type != ort::INT64 && node.in(1).type != INT32) fail("Gather by indices that are no integers");
  node.out(0).set_type(node.in(0).type);
}

/// Fills y, whose shape is set, from x along `strides` from `from` on, in elements.
static void copy_strided(const OrtValue& x, int64_t from, const Shape& strides, const OrtValue& y) {
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
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(to + i * bytes, source + i * last * bytes, static_cast<size_t>(bytes));
  });
}

static void strides_of(const OrtValue& x, Shape& strides) {
  int64_t stride = 1;
  for (int i = x.rank - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= x.shape[i];
  }
}

void slice(Node& node) {
  const OrtValue& x = node.in(0);
  const Integers starts(node.in(1)), ends(node.in(2));
  for (size_t i = 2; i <= 4; ++i)
    if (node.maybe(i) && node.in(i).size() != starts.count) fail("Slice with lists of different lengths");
  Shape shape, strides;
  std::copy_n(x.shape, x.rank, shape);
  strides_of(x, strides);
  int64_t from = 0;
  for (int64_t i = 0; i < starts.count; ++i) {
    const int64_t axis = axis_of(x, node.maybe(3) ? Integers(node.in(3))[i] : i);
    const int64_t wanted = node.maybe(4) ? Integers(node.in(4))[i] : 1, size = shape[axis];
    if (wanted < 1) fail("Slice with a step of %lld", static_cast<long long>(wanted));
    const int64_t step = std::min(wanted, std::max<int64_t>(size, 1));  // a longer one gives the same; strides do not overflow
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
  const bool is_reversed = order == node.lists.end();
  if (!is_reversed && order->second.size() != static_cast<size_t>(x.rank)) fail("Transpose of another number of dimensions");
  unsigned taken = 0;  // axes, as bits
  for (int i = 0; i < x.rank; ++i) {
    const int64_t axis = is_reversed ? x.rank - 1 - i : axis_of(x, order->second[static_cast<size_t>(i)]);
    if (taken >> axis & 1) fail("Transpose takes axis %lld twice", static_cast<long long>(axis));
    taken |= 1u << axis;
    shape[i] = x.shape[axis];
    strides[i] = of_x[axis];
  }
  node.out(0).resize(shape, x.rank);
  copy_strided(x, 0, strides, node.out(0));
}

void expand(Node& node) {
  const OrtValue& x = node.in(0);
  const Integers target(node.in(1));
  const int count = target.count_in(OrtValue::MOST_DIMENSIONS), rank = std::max(count, int{x.rank});
  Shape shape, strides;
  for (int i = 0; i < rank; ++i) {
    const int64_t left = i < rank - x.rank ? 1 : x.shape[i - rank + x.rank];
    const int64_t right = i < rank - count ? 1 : target[i - rank + count];
    shape[i] = right == 1 ? left : right;
  }
  node.out(0).resize(shape, rank);
  strides_in(x, node.out(0), strides);
  copy_strided(x, 0, strides, node.out(0));
}

void split(Node& node) {
  const OrtValue& x = node.in(0);
  const int64_t axis = axis_of(x, node.integer("axis", 0)), parts = static_cast<int64_t>(node.outputs.size());
  const int64_t outer = x.size(0, static_cast<int>(axis));
  const int64_t inner = x.size(static_cast<int>(axis) + 1, x.rank) * element_bytes(x.type);
  const OrtValue* sizes = node.maybe(1);
  if (sizes && Integers(*sizes).count != parts) fail("Split into another number of parts");
  if (!parts) fail("Split into nothing");
  const int64_t part_length = (x.shape[axis] + parts - 1) / parts;
  for (int64_t i = 0, begin = 0; i < parts; ++i) {
    const int64_t rest = x.shape[axis] - begin, count = sizes ? Integers(*sizes)[i] : std::min(part_length, rest);
    if (count < 0 || count > rest) fail("Split into more than there is");
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
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    const OrtValue& x = node.in(i);
    if (x.type != first.type || x.rank != first.rank || x.size(0, static_cast<int>(axis)) != first.size(0, static_cast<int>(axis)) ||
        x.size(static_cast<int>(axis) + 1, x.rank) != first.size(static_cast<int>(axis) + 1, first.rank))
      fail("Concat of different types or shapes");
    shape[axis] += x.shape[axis];
  }
  OrtValue& y = node.out(0);
  y.resize(shape, first.rank);
  const int64_t outer = first.size(0, static_cast<int>(axis));
  const int64_t row = y.size(static_cast<int>(axis), y.rank) * element_bytes(y.type);
  int64_t begin = 0;
  for (size_t i = 0; i < node.inputs.size(); ++i) {
    const OrtValue& x = node.in(i);
    const int64_t bytes = x.size(static_cast<int>(axis), x.rank) * element_bytes(x.type);
    for (int64_t r = 0; r < outer; ++r)
      std::memcpy(y.as<char>() + r * row + begin, x.as<char>() + r * bytes, static_cast<size_t>(bytes));
    begin += bytes;
  }
}

/// Makes y x with another shape.
static void view(const OrtValue& x, OrtValue& y, const Shape& shape, int rank) {
  if (rank > OrtValue::MOST_DIMENSIONS) fail("a tensor of too many dimensions");
  if (tensor_bytes(x.type, shape, rank, MOST_STORED) != x.size() * element_bytes(x.type)) fail("a reshaped tensor has another size");
  std::copy_n(shape, rank, y.shape);
  y.rank = rank;
  y.data = x.data;
}

void reshape(Node& node) {
  const OrtValue& x = node.in(0);
  const Integers target(node.in(1));
  const int rank = target.count_in(OrtValue::MOST_DIMENSIONS);
  Shape shape;
  int64_t rest = -1, known = 1;
  for (int i = 0; i < rank; ++i) {
    shape[i] = target[i] == 0 && !node.integer("allowzero", 0) && i < x.rank ? x.shape[i] : target[i];
    if (shape[i] == -1)
      rest = i;
    else if (__builtin_mul_overflow(known, shape[i], &known))
      fail("a reshaped tensor has another size");
  }
  if (rest >= 0) shape[rest] = known > 0 ? x.size() / known : 0;
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
    if (!is_new && j == x.rank) fail("Unsqueeze along the same axis twice");
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
void is_integers(Node& node) { node.out(0).set_type(ort::INT64); }

// ---- types ----

static double number_at(const OrtValue& x, int64_t i) {
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
    if (y.type == ort::INT64 || y.type == INT32 || y.type == ort::INT8) {  // what does not fit has no defined value in ONNX
      const double limit = y.type == ort::INT8 ? 0x1p7 : y.type == INT32 ? 0x1p31 : 0x1p63;
      const int64_t whole = value > -limit && value < limit ? static_cast<int64_t>(value) : 0;
      if (y.type == ort::INT8) y.as<int8_t>()[i] = static_cast<int8_t>(whole);
      else if (y.type == INT32) y.as<int32_t>()[i] = static_cast<int32_t>(whole);
      else y.as<int64_t>()[i] = whole;
      continue;
    }
    switch (y.type) {
      case ort::FLOAT32: y.as<float>()[i] = static_cast<float>(value); break;
      case ort::FLOAT16: y.as<uint16_t>()[i] = to_half(static_cast<float>(value)); break;
      case BOOL: y.as<uint8_t>()[i] = value != 0; break;
      default: fail("Cast to ONNX's type %d", y.type);
    }
  }
}
void cast_checked(Node& node) {
  const int64_t to = node.integer("to", 0);
  if (to != ort::FLOAT32 && to != ort::FLOAT16 && to != ort::INT64 && to != INT32 && to != ort::INT8 && to != BOOL)
    fail("Cast to ONNX's type %lld", static_cast<long long>(to));
  node.out(0).set_type(static_cast<int>(to));
}

}  // namespace diffbit::graph
