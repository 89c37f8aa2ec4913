#include "graph.h"

#include <cstdlib>

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

Known known(const Node& node) {
  if (node.domain == "diffbit") return Known::YES;
  const OnnxOp* op = find_onnx_op(node);
  return !op ? Known::NO : op->is_view ? Known::VIEW : Known::YES;
}

bool create(Node& node) {
  if (node.domain == "diffbit") return create_custom(node);
  const OnnxOp* op = find_onnx_op(node);
  if (!op) return false;
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
  int64_t bytes = element_bytes(type);
  for (int i = 0; i < count; ++i)
    if (dimensions[i] < 0 || __builtin_mul_overflow(bytes, dimensions[i], &bytes) || bytes > MOST_BYTES)
      fail("a tensor of %lld bytes is too large", static_cast<long long>(bytes));
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
