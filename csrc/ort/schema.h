// What generated/schema.h is made of: names and positions as values, so that no kernel spells out either.
#pragma once

#include <cstddef>
#include <cstdint>

namespace diffbit::schema {

/// A tensor's position, and its name as messages have it.
struct Input {
  size_t index;
  const char* name;
};
struct Output {
  size_t index;
  const char* name;
};

/// An attribute; one of `count` choices, or without choices in values[0] .. values[1].
struct Integer {
  const char* name;
  int count;
  int64_t values[4];
};
struct Number {
  const char* name;
};

/// An op as ONNX Runtime asks for it; bit i of a mask is tensor i.
struct Signature {
  size_t inputs, outputs;
  uint32_t optional_inputs, optional_outputs;
  uint32_t host_inputs;  // read by the CPU wherever the op runs
};

}  // namespace diffbit::schema
