// The part of ONNX Runtime's interface that diffbit's ops use, for values of this graph: the ops compute here what they
// compute in ONNX Runtime, from the same sources.
#include <cstdlib>

#include "../ort/host.h"
#include "graph.h"
#include "pool.h"

using namespace diffbit;
using graph::fail;

extern "C" OrtStatus* RegisterCustomOps(OrtSessionOptions*, const OrtApiBase*);

struct OrtCustomOpDomain {
  std::vector<const OrtCustomOp*> ops;
};

namespace {

OrtCustomOpDomain registered;

OrtStatus* create_status(int, const char* message) { fail("%s", message); }
const char* get_error_message(const OrtStatus*) { return ""; }
void release_status(OrtStatus* status) { std::free(status); }

OrtStatus* create_domain(const char*, OrtCustomOpDomain** out) {
  *out = &registered;
  return nullptr;
}
OrtStatus* domain_add(OrtCustomOpDomain* domain, const OrtCustomOp* op) {
  domain->ops.push_back(op);
  return nullptr;
}
OrtStatus* add_domain(OrtSessionOptions*, OrtCustomOpDomain*) { return nullptr; }

// A value is its own information about type and shape
const OrtValue* value_of(const OrtTensorTypeAndShapeInfo* info) { return reinterpret_cast<const OrtValue*>(info); }

OrtStatus* get_data(OrtValue* value, void** out) {
  *out = value->data;
  return nullptr;
}
OrtStatus* get_type_and_shape(const OrtValue* value, OrtTensorTypeAndShapeInfo** out) {
  *out = reinterpret_cast<OrtTensorTypeAndShapeInfo*>(const_cast<OrtValue*>(value));
  return nullptr;
}
void release_type_and_shape(OrtTensorTypeAndShapeInfo*) {}
OrtStatus* get_element_type(const OrtTensorTypeAndShapeInfo* info, int* out) {
  *out = value_of(info)->type;
  return nullptr;
}
OrtStatus* get_dimensions_count(const OrtTensorTypeAndShapeInfo* info, size_t* out) {
  *out = static_cast<size_t>(value_of(info)->rank);
  return nullptr;
}
OrtStatus* get_dimensions(const OrtTensorTypeAndShapeInfo* info, int64_t* out, size_t count) {
  for (size_t i = 0; i < count; ++i) out[i] = value_of(info)->shape[i];
  return nullptr;
}

// Fails at once, without a status for the op to throw: an attribute is missing only from a damaged graph
OrtStatus* get_float(const OrtKernelInfo* info, const char* name, float* out) {
  const auto at = info->numbers.find(name);
  if (at == info->numbers.end()) fail("a node of diffbit has no float attribute %s", name);
  *out = at->second;
  return nullptr;
}
OrtStatus* get_int64(const OrtKernelInfo* info, const char* name, int64_t* out) {
  const auto at = info->integers.find(name);
  if (at == info->integers.end()) fail("a node of diffbit has no integer attribute %s", name);
  *out = at->second;
  return nullptr;
}

OrtStatus* get_input_count(const OrtKernelContext* context, size_t* out) {
  *out = context->inputs.size();
  return nullptr;
}
OrtStatus* get_output_count(const OrtKernelContext* context, size_t* out) {
  *out = context->outputs.size();
  return nullptr;
}
OrtStatus* get_input(const OrtKernelContext* context, size_t index, const OrtValue** out) {
  *out = context->inputs[index];
  return nullptr;
}
OrtStatus* get_output(OrtKernelContext* context, size_t index, const int64_t* shape, size_t rank, OrtValue** out) {
  *out = index < context->outputs.size() ? context->outputs[index] : nullptr;
  if (*out) (*out)->resize(shape, static_cast<int>(rank));
  return nullptr;
}
OrtStatus* parallel_for(const OrtKernelContext*, void (*task)(void*, size_t), size_t total, size_t, void* data) {
  graph::run_tasks(task, total, data);
  return nullptr;
}

OrtStatus* has_no_option(const OrtSessionOptions*, const char*, int* out) {
  *out = 0;
  return nullptr;
}

void missing() { fail("an op called a function of ONNX Runtime that this runtime does not have"); }

const OrtApi* api(uint32_t) {
  static const OrtApi table = [] {
    OrtApi filled{};
    for (void*& slot : filled.slot) slot = reinterpret_cast<void*>(missing);
    const auto set = [&](ort::Slot slot, auto function) { filled.slot[slot] = reinterpret_cast<void*>(function); };
    DIFFBIT_HOST_FUNCTIONS(set)
    set(ort::HasSessionConfigEntry, has_no_option);
    return filled;
  }();
  return &table;
}

/// Whether the types of the op's entry are those of the node's inputs, and its outputs are there.
bool fits(const OrtCustomOp* op, const graph::Node& node) {
  const size_t inputs = op->GetInputTypeCount(op);
  if (node.inputs.size() > inputs || node.outputs.size() > op->GetOutputTypeCount(op)) return false;
  for (size_t i = 0; i < inputs; ++i) {
    const OrtValue* input = node.maybe(i);
    if (input ? input->type != op->GetInputType(op, i) : op->GetInputCharacteristic(op, i) != ort::OPTIONAL) return false;
  }
  for (size_t i = 0; i < op->GetOutputTypeCount(op); ++i) {
    const bool is_there = i < node.outputs.size() && node.outputs[i];
    if (!is_there && op->GetOutputCharacteristic(op, i) != ort::OPTIONAL) return false;
  }
  return true;
}

}  // namespace

bool graph::create_custom(Node& node) {
  static const bool is_registered = [] {
    static const OrtApiBase base = {api, nullptr};
    return RegisterCustomOps(nullptr, &base) == nullptr;
  }();
  static_cast<void>(is_registered);
  bool known = false;
  for (const OrtCustomOp* op : registered.ops) {
    if (node.op != op->GetName(op)) continue;
    known = true;
    if (!fits(op, node)) continue;
    for (size_t i = 0; i < node.outputs.size(); ++i)
      if (node.outputs[i]) node.outputs[i]->set_type(op->GetOutputType(op, i));
    node.custom = op;
    op->CreateKernelV2(op, api(ort::API_VERSION), &node, &node.kernel);
    node.run = [](Node& self) { self.custom->KernelComputeV2(self.kernel, &self); };
    return true;
  }
  if (known) fail("diffbit.%s has no kernel for inputs and outputs of these types", node.op.c_str());
  return false;
}

void graph::destroy_custom(Node& node) {
  if (node.kernel) node.custom->KernelDestroy(node.kernel);
  node.kernel = nullptr;
}
