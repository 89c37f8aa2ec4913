// A graph without ONNX Runtime: values, nodes, and the memory that values share. Nodes are diffbit's ops (host.cpp) and
// ONNX's (onnx_ops.cpp). csrc/runtime builds it from model.onnx; for browsers apps/web/js/wasm does, by csrc/wasm.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../ort/abi.h"

namespace diffbit::graph {

/// Ends what is computed, with a message; printf-style. Natively it throws diffbit::Error. In WebAssembly it is a JavaScript
/// Error: nothing is cleaned up, and the instance is of no more use.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

/// Memory that values use one after the other. It grows and never shrinks.
struct Memory {
  void* data = nullptr;
  size_t bytes = 0;
};

enum { INT32 = 6, BOOL = 9 };  // ONNX's numbers of types that no op of diffbit has

int64_t element_bytes(int type);
/// Returns the bytes of a tensor; -1 if there are more than `most`, also of the dimensions beside one of 0: no product of
/// dimensions may overflow.
int64_t tensor_bytes(int type, const int64_t* shape, int rank, int64_t most);
constexpr int64_t MOST_STORED = int64_t{1} << 46;  // bytes of a weight or a cache, which a file or a mapping may hold

/// Returns memory that begins at a cache line, for `release`; fails if there is none.
void* allocate(size_t bytes);
void release(void* data);

}  // namespace diffbit::graph

/// A tensor. JavaScript reads and writes this struct.
struct OrtValue {
  static constexpr int MOST_DIMENSIONS = 8;

  int32_t type = 0;  // as ONNX numbers it
  int32_t rank = 0;
  void* data = nullptr;
  diffbit::graph::Memory* memory = nullptr;  // null: data is given, and the shape is fixed
  int64_t shape[MOST_DIMENSIONS] = {};

  int64_t size() const { return size(0, rank); }
  /// Returns the product of the dimensions first ... last - 1.
  int64_t size(int first, int last) const {
    int64_t product = 1;
    for (int i = first; i < last; ++i) product *= shape[i];
    return product;
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  /// Gives it a shape, and the memory for that; fails if the shape is fixed and another one.
  void resize(const int64_t* dimensions, int count);
  /// Gives it the type of what computes it; fails if it has another type already.
  void set_type(int computed);
};

/// The attributes of a node.
struct OrtKernelInfo {
  std::map<std::string, int64_t> integers;
  std::map<std::string, float> numbers;
  std::map<std::string, std::vector<int64_t>> lists;
};

/// A node's inputs and outputs; null: omitted.
struct OrtKernelContext {
  std::vector<OrtValue*> inputs, outputs;
};

namespace diffbit::graph {

struct Node : OrtKernelInfo, OrtKernelContext {
  std::string domain, op;
  void (*run)(Node&) = nullptr;

  const OrtCustomOp* custom = nullptr;  // one of diffbit's ops
  void* kernel = nullptr;
  std::shared_ptr<Node> inner;  // what it runs, for an operator with float16

  /// Return an input that must be there, and one that may be null.
  const OrtValue& in(size_t index) const {
    if (index >= inputs.size() || !inputs[index]) fail("%s lacks input %zu", op.c_str(), index);
    return *inputs[index];
  }
  const OrtValue* maybe(size_t index) const { return index < inputs.size() ? inputs[index] : nullptr; }
  OrtValue& out(size_t index) const {
    if (index >= outputs.size() || !outputs[index]) fail("%s lacks output %zu", op.c_str(), index);
    return *outputs[index];
  }
  int64_t integer(const char* name, int64_t otherwise) const {
    const auto at = integers.find(name);
    return at == integers.end() ? otherwise : at->second;
  }
  float number(const char* name, float otherwise) const {
    const auto at = numbers.find(name);
    return at == numbers.end() ? otherwise : at->second;
  }
};

/// One of ONNX's operators. `prepare` checks the types that are known and sets those of the outputs; null: the outputs have
/// the first input's type.
struct OnnxOp {
  const char* domain;
  const char* name;
  void (*run)(Node&);
  void (*prepare)(Node&);
  bool is_view;  // its output is its first input's memory
  bool computes = false;  // with floats; others move memory, of any type
};

/// Returns the operator that the node names; null: there is none.
const OnnxOp* find_onnx_op(const Node& node);
/// Creates the kernel of one of diffbit's ops and sets the types of the outputs; false: there is no such op.
bool create_custom(Node& node);
/// Frees that kernel.
void destroy_custom(Node& node);

/// What is known of a node's operator before its inputs are: it is missing, there, or its output is its input's memory.
enum class Known { NO, YES, VIEW };
Known known(const Node& node);
/// Prepares a node whose inputs have types; false: there is no such operator.
bool create(Node& node);

}  // namespace diffbit::graph
