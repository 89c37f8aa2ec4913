// What ONNX's operators share: axes, shapes and broadcasting. Those that move memory are in onnx_memory.cpp, those that
// compute in onnx_ops.cpp, which has the list of all.
#pragma once

#include "graph.h"

namespace diffbit::graph {

using Shape = int64_t[OrtValue::MOST_DIMENSIONS];

inline int64_t axis_of(const OrtValue& x, int64_t axis) {
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
  int count_in(int limit) const {
    if (count > limit) fail("a list of axes or dimensions is too long");
    return static_cast<int>(count);
  }
};

/// Computes the strides of x within the shape that it is broadcast to: 0 along repeated dimensions.
inline void strides_in(const OrtValue& x, const OrtValue& y, Shape& strides) {
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

// Operators that move memory
void cast(Node& node);
void concat(Node& node);
void expand(Node& node);
void gather(Node& node);
void identity(Node& node);
void reshape(Node& node);
void shape_of(Node& node);
void slice(Node& node);
void split(Node& node);
void squeeze(Node& node);
void transpose(Node& node);
void unsqueeze(Node& node);
// Products with weights in blocks
void bnb4(Node& node);
void nbits(Node& node);
// Checks and types of some of them
void blocks_checked(Node& node);
void cast_checked(Node& node);
void gather_checked(Node& node);
void is_integers(Node& node);

}  // namespace diffbit::graph
