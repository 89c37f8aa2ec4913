// A stand-in for ONNX Runtime that runs recorded nodes: what the library computes, seen without Python. It works where
// ONNX Runtime itself does not: under sanitizers, and on another architecture's emulator.
//
//   diffbit_host LIBRARY NODES RESULTS THREADS [PROVIDER]
//   diffbit_host LIBRARY                         prints the instruction sets that it can use
//
// Every tensor is a heap block of its own that ends where the tensor ends, so that AddressSanitizer sees each byte read
// beyond. With more than one thread it is as unkind as ONNX Runtime may be: tensors are aligned to their elements only,
// the tasks of a node start from the last, and a node is computed by two callers at once, who must get the same bits.
// An output's memory is NaN until it is written; empty tensors have no memory.
//
// PROVIDER chooses the ops of another execution provider than the CPU's; for it, too, all memory is the host's.
//
// NODES is a sequence of lines; the bytes of a tensor follow its line, and a line end follows the bytes:
//   node NAME OP
//   integer ATTRIBUTE VALUE
//   number ATTRIBUTE VALUE
//   input TYPE DIMENSION...     TYPE as ONNX numbers it
//   omitted                     an optional input that is not there
//   output TYPE                 or "output TYPE INPUT": in the memory of that input, as a bound KV cache is
//   end
// RESULTS has for each node "node NAME", then "error SENTENCE" or "output TYPE DIMENSION..." with bytes, then "end".
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <new>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/ort/host.h"

#ifdef _WIN32  // of windows.h, whose macros would rename what abi.h declares
extern "C" {
__declspec(dllimport) void* __stdcall LoadLibraryA(const char* path);
__declspec(dllimport) void* __stdcall GetProcAddress(void* library, const char* name);
__declspec(dllimport) unsigned long __stdcall GetLastError();
}
#else
#include <dlfcn.h>
#endif

using namespace diffbit;

struct OrtStatus {
  std::string text;
};

struct OrtCustomOpDomain {
  std::string name;
  std::vector<const OrtCustomOp*> ops;
};

struct OrtSessionOptions {
  std::vector<const OrtCustomOpDomain*> domains;
};

struct OrtTensorTypeAndShapeInfo {
  int type = ort::UNDEFINED;
  std::vector<int64_t> shape;
};

struct OrtValue {
  OrtTensorTypeAndShapeInfo info;
  std::shared_ptr<void> block;
  char* data = nullptr;
  size_t bytes = 0;
};

struct OrtKernelInfo {
  std::map<std::string, int64_t> integers;
  std::map<std::string, float> numbers;
};

struct OrtKernelContext {
  std::vector<std::shared_ptr<OrtValue>> inputs;  // null: omitted
  std::vector<int> output_types;  // UNDEFINED: omitted
  std::vector<int> shared;        // for each output the input whose memory it takes, or -1
  std::vector<std::shared_ptr<OrtValue>> outputs;
  int threads = 1;
};

namespace {

constexpr int64_t MOST_BYTES = int64_t{1} << 32;

[[noreturn]] void fail(const std::string& text) {
  std::cerr << "diffbit_host: " << text << "\n";
  std::exit(2);
}

#ifdef _WIN32
void* load(const char* path) {
  void* library = LoadLibraryA(path);
  if (!library) fail(std::string(path) + ": error " + std::to_string(GetLastError()));
  return library;
}
void* symbol(void* library, const char* name) { return GetProcAddress(library, name); }
#else
void* load(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) fail(dlerror());
  return library;
}
void* symbol(void* library, const char* name) { return dlsym(library, name); }
#endif

int element_bytes(int type) {
  switch (type) {
    case ort::UINT8: case ort::INT8: return 1;
    case ort::FLOAT16: case ort::BFLOAT16: return 2;
    case ort::FLOAT32: return 4;
    case ort::INT64: case 11: return 8;  // 11: double
    default: fail("a tensor of type " + std::to_string(type));
  }
}

/// The number of bytes of a tensor; -1 where a dimension is negative or there are too many.
int64_t tensor_bytes(int type, const std::vector<int64_t>& shape) {
  int64_t bytes = element_bytes(type);
  for (int64_t dimension : shape)
    if (dimension < 0) return -1;
  for (int64_t dimension : shape)
    if (__builtin_mul_overflow(bytes, dimension, &bytes)) return -1;
  return bytes > MOST_BYTES ? -1 : bytes;
}

std::shared_ptr<OrtValue> new_tensor(int type, std::vector<int64_t> shape, bool aligned) {
  const int64_t bytes = tensor_bytes(type, shape);
  if (bytes < 0) return nullptr;
  auto value = std::make_shared<OrtValue>();
  value->info = {type, std::move(shape)};
  value->bytes = static_cast<size_t>(bytes);
  if (bytes) {
    constexpr std::align_val_t ALIGNMENT{64};
    const size_t offset = aligned ? 0 : static_cast<size_t>(element_bytes(type));
    void* block = ::operator new(offset + value->bytes, ALIGNMENT, std::nothrow);
    if (!block) return nullptr;
    value->block = std::shared_ptr<void>(block, [](void* memory) { ::operator delete(memory, ALIGNMENT); });
    value->data = static_cast<char*>(block) + offset;
    std::memset(value->data, 0xff, value->bytes);
  }
  return value;
}

OrtStatus* status(const std::string& text) { return new OrtStatus{text}; }

// The table of functions

OrtStatus* create_status(int, const char* message) { return status(message); }
const char* get_error_message(const OrtStatus* failed) { return failed->text.c_str(); }
void release_status(OrtStatus* failed) { delete failed; }

OrtStatus* create_domain(const char* name, OrtCustomOpDomain** out) {
  static std::vector<std::unique_ptr<OrtCustomOpDomain>> domains;  // the library keeps its own for ever
  domains.push_back(std::make_unique<OrtCustomOpDomain>());
  domains.back()->name = name;
  *out = domains.back().get();
  return nullptr;
}

OrtStatus* domain_add(OrtCustomOpDomain* domain, const OrtCustomOp* op) {
  domain->ops.push_back(op);
  return nullptr;
}

OrtStatus* add_domain(OrtSessionOptions* options, OrtCustomOpDomain* domain) {
  options->domains.push_back(domain);
  return nullptr;
}

OrtStatus* get_data(OrtValue* value, void** out) {
  *out = value->data;
  return nullptr;
}

OrtStatus* get_type_and_shape(const OrtValue* value, OrtTensorTypeAndShapeInfo** out) {
  *out = new OrtTensorTypeAndShapeInfo(value->info);
  return nullptr;
}

void release_type_and_shape(OrtTensorTypeAndShapeInfo* info) { delete info; }

OrtStatus* get_element_type(const OrtTensorTypeAndShapeInfo* info, int* out) {
  *out = info->type;
  return nullptr;
}

OrtStatus* get_dimensions_count(const OrtTensorTypeAndShapeInfo* info, size_t* out) {
  *out = info->shape.size();
  return nullptr;
}

OrtStatus* get_dimensions(const OrtTensorTypeAndShapeInfo* info, int64_t* out, size_t count) {
  if (count > info->shape.size()) return status("more dimensions asked for than there are");
  std::copy_n(info->shape.begin(), count, out);
  return nullptr;
}

OrtStatus* get_float(const OrtKernelInfo* info, const char* name, float* out) {
  const auto found = info->numbers.find(name);
  if (found == info->numbers.end()) return status(std::string("no float attribute ") + name);
  *out = found->second;
  return nullptr;
}

OrtStatus* get_int64(const OrtKernelInfo* info, const char* name, int64_t* out) {
  const auto found = info->integers.find(name);
  if (found == info->integers.end()) return status(std::string("no integer attribute ") + name);
  *out = found->second;
  return nullptr;
}

OrtStatus* get_input_count(const OrtKernelContext* context, size_t* out) {
  *out = context->inputs.size();
  return nullptr;
}

OrtStatus* get_output_count(const OrtKernelContext* context, size_t* out) {
  *out = context->output_types.size();
  return nullptr;
}

OrtStatus* get_input(const OrtKernelContext* context, size_t index, const OrtValue** out) {
  if (index >= context->inputs.size()) return status("no such input");
  *out = context->inputs[index].get();
  return nullptr;
}

OrtStatus* get_output(OrtKernelContext* context, size_t index, const int64_t* shape, size_t rank, OrtValue** out) {
  if (index >= context->output_types.size()) return status("no such output");
  *out = nullptr;
  if (context->output_types[index] == ort::UNDEFINED) return nullptr;
  const std::vector<int64_t> wanted(shape, shape + rank);
  auto& output = context->outputs[index];
  if (context->shared[index] >= 0) {
    output = context->inputs[static_cast<size_t>(context->shared[index])];
    if (output->info.shape != wanted) return status("the memory bound to an output has another shape");
  } else {
    output = new_tensor(context->output_types[index], wanted, context->threads == 1);
    if (!output) return status("an output of an impossible shape");
  }
  *out = output.get();
  return nullptr;
}

OrtStatus* parallel_for(const OrtKernelContext* context, void (*task)(void*, size_t), size_t total, size_t, void* data) {
  if (context->threads == 1) {
    for (size_t i = 0; i < total; ++i) task(data, i);
    return nullptr;
  }
  std::atomic<size_t> taken{0};
  const auto work = [&] {
    for (size_t i; (i = taken.fetch_add(1)) < total;) task(data, total - 1 - i);
  };
  std::vector<std::thread> threads;
  for (int i = 1; i < context->threads; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  return nullptr;
}

// Memory of a device

OrtStatus* get_stream(const OrtKernelContext*, void** out) {
  *out = nullptr;
  return nullptr;
}

OrtStatus* get_memory_info(const OrtValue* value, const OrtMemoryInfo** out) {
  if (!value) return status("no value");
  *out = reinterpret_cast<const OrtMemoryInfo*>(&value->info);
  return nullptr;
}

OrtStatus* get_allocator(const OrtKernelContext*, const OrtMemoryInfo*, OrtAllocator** out) {
  *out = reinterpret_cast<OrtAllocator*>(new char);
  return nullptr;
}

void release_allocator(OrtAllocator* allocator) { delete reinterpret_cast<char*>(allocator); }

constexpr std::align_val_t SCRATCH_ALIGNMENT{256};

OrtStatus* get_scratch(const OrtKernelContext*, const OrtMemoryInfo*, size_t bytes, void** out) {
  *out = ::operator new(bytes, SCRATCH_ALIGNMENT, std::nothrow);
  if (!*out) return status("out of memory");
  std::memset(*out, 0xff, bytes);
  return nullptr;
}

OrtStatus* free_scratch(OrtAllocator*, void* memory) {
  ::operator delete(memory, SCRATCH_ALIGNMENT);
  return nullptr;
}

// A session's options are the environment's variables

OrtStatus* has_option(const OrtSessionOptions*, const char* key, int* out) {
  *out = std::getenv(key) != nullptr;
  return nullptr;
}

OrtStatus* get_option(const OrtSessionOptions*, const char* key, char* value, size_t* size) {
  *size = static_cast<size_t>(std::snprintf(value, *size, "%s", std::getenv(key))) + 1;
  return nullptr;
}

OrtStatus* missing() { fail("the library called a function of ONNX Runtime that the host does not have"); }

const OrtApi* api() {
  static const OrtApi table = [] {
    OrtApi filled{};
    for (void*& slot : filled.slot) slot = reinterpret_cast<void*>(missing);
    const auto set = [&](ort::Slot slot, auto function) { filled.slot[slot] = reinterpret_cast<void*>(function); };
    DIFFBIT_HOST_FUNCTIONS(set)
    set(ort::KernelContext_GetGPUComputeStream, get_stream);
    set(ort::GetTensorMemoryInfo, get_memory_info);
    set(ort::KernelContext_GetAllocator, get_allocator);
    set(ort::KernelContext_GetScratchBuffer, get_scratch);
    set(ort::AllocatorFree, free_scratch);
    set(ort::ReleaseAllocator, release_allocator);
    set(ort::HasSessionConfigEntry, has_option);
    set(ort::GetSessionConfigEntry, get_option);
    return filled;
  }();
  return &table;
}

// Nodes

struct Input {
  bool omitted = false;
  OrtTensorTypeAndShapeInfo info;
  std::string bytes;
};

struct Node {
  std::string name, op;
  OrtKernelInfo info;
  std::vector<Input> inputs;
  std::vector<int> output_types, shared;
};

bool read_node(std::istream& file, Node& node) {
  std::string line;
  for (bool begun = false; std::getline(file, line);) {
    std::istringstream words(line);
    std::string what, name;
    words >> what;
    if (what == "end") return true;
    if (what != "node" && !begun) fail("expected a node, found: " + line);
    if (what == "node") {
      begun = true;
      words >> node.name >> node.op;
    } else if (what == "integer") {
      words >> name >> node.info.integers[name];
    } else if (what == "number") {
      std::string value;
      words >> name >> value;
      node.info.numbers[name] = std::strtof(value.c_str(), nullptr);
    } else if (what == "omitted") {
      node.inputs.push_back({true, {}, ""});
    } else if (what == "input") {
      Input input;
      words >> input.info.type;
      for (int64_t dimension; words >> dimension;) input.info.shape.push_back(dimension);
      input.bytes.resize(static_cast<size_t>(tensor_bytes(input.info.type, input.info.shape)));
      file.read(input.bytes.data(), static_cast<std::streamsize>(input.bytes.size()));
      if (file.get() != '\n') fail(node.name + ": an input's bytes do not end where they should");
      node.inputs.push_back(std::move(input));
    } else if (what == "output") {
      int type = 0, shared = -1;
      words >> type;
      if (!(words >> shared)) shared = -1;
      node.output_types.push_back(type);
      node.shared.push_back(shared);
    } else {
      fail("cannot read: " + line);
    }
  }
  return false;
}

/// The entry that ONNX Runtime would take: same name and provider, and types that fit. `why` says what is wrong where
/// there is none.
const OrtCustomOp* find(const OrtSessionOptions& options, const Node& node, const std::string& provider, std::string& why) {
  why = "no such op";
  for (const OrtCustomOpDomain* domain : options.domains)
    for (const OrtCustomOp* op : domain->ops) {
      const char* where = op->GetExecutionProviderType(op);
      if (node.op != op->GetName(op) || provider != (where ? where : "")) continue;
      const size_t inputs = op->GetInputTypeCount(op), outputs = op->GetOutputTypeCount(op);
      bool fits = node.inputs.size() <= inputs && node.output_types.size() <= outputs;
      for (size_t i = 0; fits && i < inputs; ++i) {
        const bool given = i < node.inputs.size() && !node.inputs[i].omitted;
        if (given) fits = op->GetInputType(op, i) == node.inputs[i].info.type;
        else fits = op->GetInputCharacteristic(op, i) == ort::OPTIONAL;
      }
      for (size_t i = 0; fits && i < outputs; ++i) {
        const bool given = i < node.output_types.size() && node.output_types[i] != ort::UNDEFINED;
        if (given) fits = op->GetOutputType(op, i) == node.output_types[i];
        else fits = op->GetOutputCharacteristic(op, i) == ort::OPTIONAL;
      }
      if (fits) return op;
      why = "no entry of the op has these types";
    }
  return nullptr;
}

struct Result {
  std::string error;
  std::vector<std::shared_ptr<OrtValue>> outputs;
};

std::string take(OrtStatus* failed) {
  std::string text = failed->text;
  release_status(failed);
  return text;
}

Result compute(const OrtCustomOp* op, void* kernel, const Node& node, int threads) {
  OrtKernelContext context;
  context.threads = threads;
  context.output_types = node.output_types;
  context.shared = node.shared;
  context.outputs.resize(node.output_types.size());
  for (const Input& input : node.inputs) {
    auto value = input.omitted ? nullptr : new_tensor(input.info.type, input.info.shape, threads == 1);
    if (value && value->bytes) std::memcpy(value->data, input.bytes.data(), input.bytes.size());
    context.inputs.push_back(std::move(value));
  }
  Result result;
  if (OrtStatus* failed = op->KernelComputeV2(kernel, &context)) {
    result.error = take(failed);
    return result;
  }
  for (size_t i = 0; i < context.outputs.size(); ++i) {
    if (node.output_types[i] == ort::UNDEFINED) continue;
    if (!context.outputs[i]) result.error = "output " + std::to_string(i) + " was never asked for";
    result.outputs.push_back(std::move(context.outputs[i]));
  }
  return result;
}

bool same(const Result& a, const Result& b) {
  if (a.error != b.error || a.outputs.size() != b.outputs.size()) return false;
  for (size_t i = 0; i < a.outputs.size(); ++i) {
    const OrtValue &x = *a.outputs[i], &y = *b.outputs[i];
    if (x.info.shape != y.info.shape || (x.bytes && std::memcmp(x.data, y.data, x.bytes))) return false;
  }
  return true;
}

Result run(const OrtSessionOptions& options, const Node& node, int threads, const std::string& provider) {
  Result result;
  const OrtCustomOp* op = find(options, node, provider, result.error);
  if (!op) return result;
  result.error.clear();
  void* kernel = nullptr;
  if (OrtStatus* failed = op->CreateKernelV2(op, api(), &node.info, &kernel)) {
    result.error = take(failed);
    return result;
  }
  if (threads == 1) {
    result = compute(op, kernel, node, threads);
  } else {
    Result other;
    std::thread caller([&] { other = compute(op, kernel, node, threads); });
    result = compute(op, kernel, node, threads);
    caller.join();
    if (!same(result, other)) result.error = "two callers at once got different bits";
  }
  op->KernelDestroy(kernel);
  return result;
}

void write(std::ostream& file, const Result& result) {
  if (!result.error.empty()) {
    file << "error " << result.error << "\n";
  } else {
    for (const auto& output : result.outputs) {
      file << "output " << output->info.type;
      for (int64_t dimension : output->info.shape) file << " " << dimension;
      file << "\n";
      file.write(output->data, static_cast<std::streamsize>(output->bytes)) << "\n";
    }
  }
  file << "end\n";
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2 && count != 5 && count != 6) fail("wanted LIBRARY, or LIBRARY NODES RESULTS THREADS [PROVIDER]");
  void* library = load(arguments[1]);
  if (count == 2) {
    const auto isas = reinterpret_cast<const char* (*)()>(symbol(library, "diffbit_isas"));
    if (!isas) fail("the library has no diffbit_isas");
    std::cout << isas() << "\n";
    return 0;
  }
  const auto register_ops =
      reinterpret_cast<OrtStatus* (*)(OrtSessionOptions*, const OrtApiBase*)>(symbol(library, "RegisterCustomOps"));
  if (!register_ops) fail("the library has no RegisterCustomOps");
  const OrtApiBase base = {[](uint32_t version) { return version == ort::API_VERSION ? api() : nullptr; },
                           [] { return "a stand-in"; }};
  OrtSessionOptions options;
  if (OrtStatus* failed = register_ops(&options, &base)) fail(take(failed));

  std::ifstream nodes(arguments[2], std::ios::binary);
  std::ofstream results(arguments[3], std::ios::binary);
  if (!nodes || !results) fail("cannot open the files");
  const int threads = std::atoi(arguments[4]);
  for (;;) {
    Node node;
    if (!read_node(nodes, node)) break;
    results << "node " << node.name << "\n" << std::flush;  // what a crash leaves behind ends with its node
    write(results, run(options, node, threads, count == 6 ? arguments[5] : ""));
  }
  return results.flush() ? 0 : 2;
}
