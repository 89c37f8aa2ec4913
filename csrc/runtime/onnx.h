// Reads model.onnx: the fields of ONNX's protobuf messages that diffbit's export writes. Bodies of functions are not read.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace diffbit::runtime {

struct OnnxTensor {
  std::string name;
  int type = 0;
  std::vector<int64_t> shape;
  int64_t bytes = 0;      // of the whole tensor
  std::string data;       // if it is in the graph
  std::string file;       // if it is in another file, which the graph names relative to itself
  uint64_t offset = 0;
};

struct OnnxAttribute {
  enum Kind { OTHER, INTEGER, NUMBER, LIST } kind = OTHER;
  std::string name;
  int64_t integer = 0;
  float number = 0;
  std::vector<int64_t> list;
};

struct OnnxNode {
  std::string domain, op;
  std::vector<std::string> inputs, outputs;
  std::vector<OnnxAttribute> attributes;
};

struct OnnxInput {
  std::string name;
  int type = 0;
  std::vector<int64_t> shape;  // -1: any size
};

struct OnnxGraph {
  std::vector<OnnxNode> nodes;
  std::vector<OnnxTensor> initializers;
  std::vector<OnnxInput> inputs;
  std::vector<std::string> outputs;
};

/// Throws Error with the file's name for bytes that are no such graph.
OnnxGraph read_onnx(std::string_view bytes, const std::string& file);

}  // namespace diffbit::runtime
