// What JavaScript calls (apps/web/js/wasm/module.js). Pointers are numbers there; strings end with a zero.
#include "../graph/graph.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <typeinfo>

#include "export.h"

extern "C" [[noreturn]] __attribute__((import_module("env"), import_name("fail"))) void diffbit_fail(const char* text);

using namespace diffbit;
using namespace diffbit::graph;

void graph::fail(const char* format, ...) {
  static char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  diffbit_fail(text);
}

// The library is compiled without exceptions, which need more of a browser than SIMD: a `throw` ends here
extern "C" void* __cxa_allocate_exception(size_t bytes) noexcept { return std::malloc(bytes); }
extern "C" [[noreturn]] void __cxa_throw(void* thrown, std::type_info*, void (*)(void*)) {
  fail("%s", static_cast<std::exception*>(thrown)->what());  // all that is thrown here has it as its first base
}
// Of threads, which last as long as the module
extern "C" int __cxa_thread_atexit(void (*)(void*), void*, void*) { return 0; }

static_assert(sizeof(OrtValue) == 80 && offsetof(OrtValue, shape) == 16, "JavaScript knows where its members are");

EXPORT(allocate) void* diffbit_allocate(size_t bytes) { return allocate(bytes); }
EXPORT(free) void diffbit_free(void* data) { release(data); }
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
EXPORT(known) int diffbit_known(const Node* node) { return static_cast<int>(known(*node)); }
/// Prepares a node whose inputs have types. 0: there is no such operator.
EXPORT(create) int diffbit_create(Node* node) { return create(*node); }
EXPORT(run) void diffbit_run(Node* const* nodes, size_t count) {
  for (size_t i = 0; i < count; ++i) nodes[i]->run(*nodes[i]);
}
