// What JavaScript calls (apps/web/js/wasm/module.js). Pointers are numbers there; strings end with a zero.
#include "graph.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <typeinfo>

#include "export.h"

extern "C" [[noreturn]] __attribute__((import_module("env"), import_name("fail"))) void diffbit_fail(const char* text);

namespace diffbit::wasm {

void fail(const char* format, ...) {
  static char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  diffbit_fail(text);
}

namespace {

constexpr size_t ALIGNMENT = 64;

void* allocate(size_t bytes) {
  void* data = nullptr;
  const size_t rounded_up = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  if (posix_memalign(&data, ALIGNMENT, rounded_up ? rounded_up : ALIGNMENT)) fail("out of memory: %zu bytes", bytes);
  return data;
}

}  // namespace

int64_t element_bytes(int type) {
  switch (type) {
    case ort::UINT8: case ort::INT8: case 9: return 1;  // 9: bool
    case ort::FLOAT16: case ort::BFLOAT16: return 2;
    case ort::FLOAT32: case 6: return 4;  // 6: int32
    case ort::INT64: return 8;
    default: fail("a tensor of ONNX's type %d is not known", type);
  }
}

}  // namespace diffbit::wasm

using namespace diffbit;
using namespace diffbit::wasm;

void OrtValue::resize(const int64_t* dimensions, int count) {
  if (!memory) {
    bool fits = count == rank;
    for (int i = 0; fits && i < count; ++i) fits = shape[i] == dimensions[i];
    if (!fits) fail("the memory of an output has another shape than its op computes");
    return;
  }
  if (count > MOST_DIMENSIONS) fail("a tensor has %d dimensions, wanted at most %d", count, MOST_DIMENSIONS);
  rank = count;
  for (int i = 0; i < count; ++i) shape[i] = dimensions[i];
  const int64_t bytes = size() * element_bytes(type);
  if (bytes < 0 || bytes > int64_t{0xffffffff}) fail("a tensor of %lld bytes is too large", static_cast<long long>(bytes));
  if (static_cast<size_t>(bytes) > memory->bytes) {
    std::free(memory->data);
    *memory = {allocate(static_cast<size_t>(bytes)), static_cast<size_t>(bytes)};
  }
  data = memory->data;
}

// The library is compiled without exceptions, which need more of a browser than SIMD: a `throw` ends here
extern "C" void* __cxa_allocate_exception(size_t bytes) noexcept { return std::malloc(bytes); }
extern "C" [[noreturn]] void __cxa_throw(void* thrown, std::type_info*, void (*)(void*)) {
  fail("%s", static_cast<std::exception*>(thrown)->what());  // all that is thrown here has it as its first base
}
// Of threads, which last as long as the module
extern "C" int __cxa_thread_atexit(void (*)(void*), void*, void*) { return 0; }

static_assert(sizeof(OrtValue) == 80 && offsetof(OrtValue, shape) == 16, "JavaScript knows where its members are");

EXPORT(allocate) void* diffbit_allocate(size_t bytes) { return wasm::allocate(bytes); }
EXPORT(free) void diffbit_free(void* data) { std::free(data); }
EXPORT(memory) Memory* diffbit_memory() { return new Memory; }
EXPORT(value) OrtValue* diffbit_value(Memory* memory) {
  auto* value = new OrtValue;
  value->memory = memory;
  return value;
}
EXPORT(node) Node* diffbit_node(const char* domain, const char* op) {
  auto* node = new Node;
  node->domain = domain;
  node->op = op;
  return node;
}
EXPORT(integer) void diffbit_integer(Node* node, const char* name, int64_t value) { node->integers[name] = value; }
EXPORT(number) void diffbit_number(Node* node, const char* name, float value) { node->numbers[name] = value; }
EXPORT(item) void diffbit_item(Node* node, const char* name, int64_t value) { node->lists[name].push_back(value); }
EXPORT(input) void diffbit_input(Node* node, OrtValue* value) { node->inputs.push_back(value); }
EXPORT(output) void diffbit_output(Node* node, OrtValue* value) { node->outputs.push_back(value); }

/// Whether there is such an operator: 0, 1, or 2 if its output is its input's memory.
EXPORT(known) int diffbit_known(const Node* node) {
  if (node->domain == "diffbit") return 1;
  const OnnxOp* op = find_onnx_op(*node);
  return !op ? 0 : op->is_view ? 2 : 1;
}
/// Prepares a node whose inputs have types. 0: there is no such operator.
EXPORT(create) int diffbit_create(Node* node) {
  if (node->domain == "diffbit") return create_custom(*node);
  const OnnxOp* op = find_onnx_op(*node);
  if (!op) return 0;
  node->run = op->run;
  if (op->prepare) {
    op->prepare(*node);
    return 1;
  }
  for (OrtValue* output : node->outputs)
    if (output) output->type = node->in(0).type;
  return 1;
}
EXPORT(run) void diffbit_run(Node* const* nodes, size_t count) {
  for (size_t i = 0; i < count; ++i) nodes[i]->run(*nodes[i]);
}
