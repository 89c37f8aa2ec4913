#include "graph.h"

#include <cstdlib>
#include <memory>
#include <utility>

#include "../cpu/half.h"

namespace diffbit::graph {
namespace {

constexpr size_t ALIGNMENT = 64;
constexpr int64_t MOST_BYTES = 0xffffffff;  // of a tensor that a node computes

}  // namespace

void* allocate(size_t bytes) {
  const size_t rounded_up = bytes > ALIGNMENT ? (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT : ALIGNMENT;
  void* data = nullptr;
#ifdef _WIN32
  data = _aligned_malloc(rounded_up, ALIGNMENT);
#else
  if (posix_memalign(&data, ALIGNMENT, rounded_up)) data = nullptr;
#endif
  if (!data || rounded_up < bytes) fail("out of memory: %zu bytes", bytes);
  return data;
}

void release(void* data) {
#ifdef _WIN32
  _aligned_free(data);
#else
  std::free(data);
#endif
}

int64_t element_bytes(int type) {
  switch (type) {
    case ort::UINT8: case ort::INT8: case BOOL: return 1;
    case ort::FLOAT16: case ort::BFLOAT16: return 2;
    case ort::FLOAT32: case INT32: return 4;
    case ort::INT64: return 8;
    default: fail("a tensor of ONNX's type %d is not known", type);
  }
}

int64_t tensor_bytes(int type, const int64_t* shape, int rank, int64_t most) {
  int64_t bytes = element_bytes(type);
  bool is_empty = false;
  for (int i = 0; i < rank; ++i) {
    if (shape[i] < 0 || __builtin_mul_overflow(bytes, shape[i] ? shape[i] : 1, &bytes) || bytes > most) return -1;
    is_empty = is_empty || !shape[i];
  }
  return is_empty ? 0 : bytes;
}

Known known(const Node& node) {
  if (node.domain == "diffbit") return Known::YES;
  const OnnxOp* op = find_onnx_op(node);
  return !op ? Known::NO : op->is_view ? Known::VIEW : Known::YES;
}

namespace {

/// An operator of float32 with tensors of float16: it computes with copies, as ONNX Runtime does on a CPU.
struct Widened : Node {
  struct Copy {
    OrtValue value;
    Memory memory;
    ~Copy() { release(memory.data); }
  };
  std::vector<std::unique_ptr<Copy>> copies;
  std::vector<std::pair<OrtValue*, OrtValue*>> widened, narrowed;  // from, to
  std::vector<bool> is_constant;                                   // of those widened

  OrtValue* copy() {
    copies.push_back(std::make_unique<Copy>());
    copies.back()->value.memory = &copies.back()->memory;
    return &copies.back()->value;
  }
};

void run_widened(Node& node) {
  Widened& inner = *static_cast<Widened*>(node.inner.get());
  for (size_t i = 0; i < inner.widened.size(); ++i) {
    const auto& [from, to] = inner.widened[i];
    if (inner.is_constant[i] && to->data) continue;
    to->resize(from->shape, from->rank);
    for (int64_t at = 0, count = from->size(); at < count; ++at) to->as<float>()[at] = to_float(from->as<uint16_t>()[at]);
  }
  inner.run(inner);
  for (const auto& [from, to] : inner.narrowed) {
    to->resize(from->shape, from->rank);
    for (int64_t at = 0, count = from->size(); at < count; ++at) to->as<uint16_t>()[at] = to_half(from->as<float>()[at]);
  }
}

/// Creates the node with copies in float32 of its tensors in float16.
bool create_widened(Node& node) {
  auto inner = std::make_shared<Widened>();
  static_cast<OrtKernelInfo&>(*inner) = node;
  inner->domain = node.domain;
  inner->op = node.op;
  for (OrtValue* input : node.inputs) {
    const bool is_half = input && input->type == ort::FLOAT16;
    inner->inputs.push_back(is_half ? inner->copy() : input);
    if (!is_half) continue;
    inner->inputs.back()->type = ort::FLOAT32;
    inner->widened.emplace_back(input, inner->inputs.back());
    inner->is_constant.push_back(!input->memory && input->data);  // a weight
  }
  for (OrtValue* output : node.outputs) {
    inner->outputs.push_back(output ? inner->copy() : nullptr);
    if (output) inner->narrowed.emplace_back(inner->outputs.back(), output);
  }
  if (!create(*inner)) return false;
  for (const auto& [from, to] : inner->narrowed) {
    if (from->type != ort::FLOAT32) fail("%s computes no floats", node.op.c_str());
    to->set_type(ort::FLOAT16);
  }
  node.inner = std::move(inner);
  node.run = run_widened;
  return true;
}

}  // namespace

bool create(Node& node) {
  if (node.domain == "diffbit") return create_custom(node);
  const OnnxOp* op = find_onnx_op(node);
  if (!op) return false;
  if (op->computes && !node.inputs.empty() && node.in(0).type == ort::FLOAT16) return create_widened(node);
  node.run = op->run;
  if (op->prepare)
    op->prepare(node);
  else
    for (OrtValue* output : node.outputs)
      if (output) output->set_type(node.in(0).type);
  return true;
}

}  // namespace diffbit::graph

using namespace diffbit::graph;

void OrtValue::resize(const int64_t* dimensions, int count) {
  if (!memory) {
    bool fits = count == rank;
    for (int i = 0; fits && i < count; ++i) fits = shape[i] == dimensions[i];
    if (!fits) fail("the memory of an output has another shape than its op computes");
    return;
  }
  if (count > MOST_DIMENSIONS) fail("a tensor has %d dimensions, wanted at most %d", count, MOST_DIMENSIONS);
  const int64_t bytes = tensor_bytes(type, dimensions, count, MOST_BYTES);
  if (bytes < 0) fail("a node computes a tensor of more than %lld bytes", static_cast<long long>(MOST_BYTES));
  rank = count;
  for (int i = 0; i < count; ++i) shape[i] = dimensions[i];
  if (static_cast<size_t>(bytes) > memory->bytes || !memory->data) {
    release(memory->data);
    *memory = {};
    *memory = {allocate(static_cast<size_t>(bytes)), static_cast<size_t>(bytes)};
  }
  data = memory->data;
}

void OrtValue::set_type(int computed) {
  if (type && type != computed) fail("an output of ONNX's type %d is computed as %d", type, computed);
  type = computed;
}
