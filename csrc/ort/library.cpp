// The entry point that ONNX Runtime calls: registers diffbit's ops, one entry per combination of tensor types.
//
// Once a library is registered, ONNX Runtime no longer uses an op's portable body: a model with types that no entry has fails
// to load. So there is an entry for every combination that diffbit exports, for each device with kernels in the library.

#include <new>
#include <vector>

#include "../cpu/isa.h"
#include "../cpu/ops.h"
#include "../cpu/trellis/kernels.h"
#include "diffbit_ops.h"
#include "op.h"
#if DIFFBIT_HAS_CUDA
#include "../cuda/ops.h"
#endif

#ifdef _WIN32
#define DIFFBIT_EXPORT __declspec(dllexport)
#else
#define DIFFBIT_EXPORT __attribute__((visibility("default")))
#endif

namespace diffbit {
namespace {

struct Entry : OrtCustomOp {
  const char* name;
  const schema::Signature* signature;
  const int* types;      // of inputs, then of outputs
  const char* provider;  // null: the CPU
  Kernel* (*create)(const Node& node);
  bool bfloat16;  // of nodes (op.h)
};

/// Runs `body` and converts exceptions to the status that ONNX Runtime reports.
template <class Body>
OrtStatus* guarded(const OrtApi* api, const char* op, const Body& body) {
  try {
    body();
    return nullptr;
  } catch (const Error& error) {
    return ort::call<OrtStatus*>(api, ort::CreateStatus, int{ort::INVALID_ARGUMENT}, error.what());
  } catch (const std::bad_alloc&) {
    return ort::call<OrtStatus*>(api, ort::CreateStatus, int{ort::FAIL}, Error("%s: out of memory", op).what());
  } catch (const std::exception& error) {
    return ort::call<OrtStatus*>(api, ort::CreateStatus, int{ort::FAIL}, error.what());
  }
}

const Entry& entry(const OrtCustomOp* op) { return *static_cast<const Entry*>(op); }

template <class Schema>
Entry entry_of(const char* name, const int* types, const char* provider, Kernel* (*create)(const Node& node)) {
  Entry registered{};
  registered.name = name;
  registered.signature = &Schema::SIGNATURE;
  registered.types = types;
  registered.provider = provider;
  registered.create = create;
  registered.version = ort::API_VERSION;
  registered.GetName = [](const OrtCustomOp* op) { return entry(op).name; };
  registered.GetExecutionProviderType = [](const OrtCustomOp* op) { return entry(op).provider; };
  registered.GetInputType = [](const OrtCustomOp* op, size_t i) { return entry(op).types[i]; };
  registered.GetInputTypeCount = [](const OrtCustomOp* op) { return entry(op).signature->inputs; };
  registered.GetOutputType = [](const OrtCustomOp* op, size_t i) { return entry(op).types[entry(op).signature->inputs + i]; };
  registered.GetOutputTypeCount = [](const OrtCustomOp* op) { return entry(op).signature->outputs; };
  registered.GetInputCharacteristic = [](const OrtCustomOp* op, size_t i) -> int {
    return entry(op).signature->optional_inputs >> i & 1 ? ort::OPTIONAL : ort::REQUIRED;
  };
  registered.GetOutputCharacteristic = [](const OrtCustomOp* op, size_t i) -> int {
    return entry(op).signature->optional_outputs >> i & 1 ? ort::OPTIONAL : ort::REQUIRED;
  };
  registered.GetInputMemoryType = [](const OrtCustomOp* op, size_t i) -> int {
    return entry(op).provider && entry(op).signature->host_inputs >> i & 1 ? ort::CPU_INPUT : ort::DEVICE;
  };
  registered.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
  registered.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 1; };
  registered.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  registered.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 1; };
  registered.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  registered.GetEndVersion = [](const OrtCustomOp*) { return 0x7fffffff; };
  registered.CreateKernelV2 = [](const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
    return guarded(api, Schema::NAME, [&] {
      Kernel* created = entry(op).create(Node(api, info, Schema::NAME, Schema::VERSION, entry(op).bfloat16));
      created->api = api;
      *kernel = created;
    });
  };
  registered.KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
    const Kernel& run = *static_cast<const Kernel*>(kernel);
    return guarded(run.api, Schema::NAME, [&] {
      Context wrapped(run.api, context);
      run.compute(wrapped);
    });
  };
  registered.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  return registered;
}

template <class Schema, size_t ROWS, size_t TENSORS>
void add(std::vector<Entry>& all, const int (&types)[ROWS][TENSORS], const char* provider,
         Kernel* (*create)(const Node& node)) {
  for (const char* name : Schema::NAMES)
    for (const int(&row)[TENSORS] : types) all.push_back(entry_of<Schema>(name, row, provider, create));
}

std::vector<Entry> every_entry() {
  std::vector<Entry> all;
#define DIFFBIT_ADD(Op, function) add<schema::Op>(all, schema::Op::TYPES, nullptr, create_##function);
  DIFFBIT_OPS(DIFFBIT_ADD)
#undef DIFFBIT_ADD
#if DIFFBIT_HAS_CUDA
#define DIFFBIT_ADD(Op, function) add<schema::Op>(all, schema::Op::GPU_TYPES, cuda::PROVIDER, cuda::create_##function);
  DIFFBIT_OPS(DIFFBIT_ADD)
#undef DIFFBIT_ADD
#endif
  return all;
}

/// Adds the operators of sessions that compute in bfloat16, or of the others. They must outlive every session, so they are
/// created once and never freed.
template <bool BFLOAT16>
OrtStatus* add_domain(const OrtApi* api, OrtSessionOptions* options) {
  static OrtStatus* failed = nullptr;
  static std::vector<Entry> entries = every_entry();
  static OrtCustomOpDomain* domain = [&]() -> OrtCustomOpDomain* {
    OrtCustomOpDomain* created = nullptr;
    failed = ort::call<OrtStatus*>(api, ort::CreateCustomOpDomain, "diffbit", &created);
    for (Entry& op : entries) {
      op.bfloat16 = BFLOAT16;
      if (!failed) failed = ort::call<OrtStatus*>(api, ort::CustomOpDomain_Add, created, static_cast<const OrtCustomOp*>(&op));
    }
    return created;
  }();
  if (failed) throw Error("diffbit's ops cannot be registered");
  return ort::call<OrtStatus*>(api, ort::AddCustomOpDomain, options, domain);
}

/// Whether the session option diffbit.bfloat16 is set (diffbit_ops.h).
bool in_bfloat16(const OrtApi* api, const OrtSessionOptions* options) {
  constexpr const char* KEY = "diffbit.bfloat16";
  int is_set = 0;
  char value[2] = "";  // with its end
  size_t size = sizeof value;
  check(api, ort::call<OrtStatus*>(api, ort::HasSessionConfigEntry, options, KEY, &is_set));
  if (!is_set) return false;
  OrtStatus* status =
      ort::call<OrtStatus*>(api, ort::GetSessionConfigEntry, options, KEY, static_cast<char*>(value), &size);
  if (status) ort::call<void>(api, ort::ReleaseStatus, status);  // it is longer
  if (status || (value[0] != '0' && value[0] != '1')) throw Error("the session option %s can only be 0 or 1", KEY);
  return value[0] == '1';
}

}  // namespace
}  // namespace diffbit

DIFFBIT_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace diffbit;
  const OrtApi* api = base->GetApi(ort::API_VERSION);
  if (!api) return nullptr;  // an ONNX Runtime before 1.18 has printed why, and runs the bodies
  OrtStatus* added = nullptr;
  OrtStatus* failed = guarded(api, "diffbit", [&] {
    added = in_bfloat16(api, options) ? add_domain<true>(api, options) : add_domain<false>(api, options);
  });
  return failed ? failed : added;
}

DIFFBIT_EXPORT const char* diffbit_isas() {
  static const std::string text = diffbit::available_isas(" ");
  return text.c_str();
}

DIFFBIT_EXPORT int diffbit_trellis_encode(int64_t bits, int64_t subset_bits, const uint8_t* subsets, const float* levels,
                                          const float* targets, const float* weights, int64_t rows, int64_t columns,
                                          int64_t apart, uint8_t* indices) {
  using namespace diffbit;
  try {
    DIFFBIT_PICK(trellis)->encode({bits, subset_bits, subsets, levels}, targets, weights, rows, columns, apart, indices);
    return 0;
  } catch (const std::exception&) {
    return 1;  // no memory, or DIFFBIT_ISA names a set that this CPU does not have
  }
}

DIFFBIT_EXPORT const char* diffbit_cuda_architectures() {
#ifdef DIFFBIT_CUDA_ARCHITECTURES
  return DIFFBIT_CUDA_ARCHITECTURES;
#else
  return "";
#endif
}
