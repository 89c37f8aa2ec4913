// The types of generated/schema.h: names and positions as values, so no kernel repeats them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace diffbit::schema {

/// A tensor's position, and its name for messages.
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
  int64_t values[5];
};
struct Number {
  const char* name;
};

/// The description of an op that ONNX Runtime asks for; bit i of a mask is tensor i.
struct Signature {
  size_t inputs, outputs;
  uint32_t optional_inputs, optional_outputs;
  uint32_t host_inputs;  // read by the CPU, on whatever device the op runs
};

}  // namespace diffbit::schema
