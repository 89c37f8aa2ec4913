// The entry point that ONNX Runtime calls: registers diffbit's ops, one entry per combination of tensor types.
//
// Once a library is registered, ONNX Runtime no longer uses an op's portable body: a model with types that no entry has fails
// to load. So there is an entry for every combination that diffbit exports, for each device with kernels in the library.

#include <new>
#include <vector>

#include "../cpu/isa.h"
#include "../cpu/ops.h"
#include "diffbit_ops.h"
#include "op.h"
#if DIFFBIT_HAS_CUDA
#include "../cuda/ops.h"
#endif

#define DIFFBIT_EXPORT __attribute__((visibility("default")))

namespace diffbit {
namespace {

struct Entry : OrtCustomOp {
  const char* name;
  const schema::Signature* signature;
  const int* types;      // of inputs, then of outputs
  const char* provider;  // null: the CPU
};

struct Kernel {
  virtual ~Kernel() = default;
  virtual void compute(Context& context) const = 0;
  const OrtApi* api = nullptr;
};

template <class Op>
struct KernelOf final : Kernel {
  explicit KernelOf(const Node& node) : op(node) {}
  void compute(Context& context) const override { op.compute(context); }
  Op op;
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

template <class Op>
Entry make(const char* name, const int* types, const char* provider) {
  Entry made{};
  made.name = name;
  made.signature = &Op::SIGNATURE;
  made.types = types;
  made.provider = provider;
  made.version = ort::API_VERSION;
  made.GetName = [](const OrtCustomOp* op) { return entry(op).name; };
  made.GetExecutionProviderType = [](const OrtCustomOp* op) { return entry(op).provider; };
  made.GetInputType = [](const OrtCustomOp* op, size_t i) { return entry(op).types[i]; };
  made.GetInputTypeCount = [](const OrtCustomOp* op) { return entry(op).signature->inputs; };
  made.GetOutputType = [](const OrtCustomOp* op, size_t i) { return entry(op).types[entry(op).signature->inputs + i]; };
  made.GetOutputTypeCount = [](const OrtCustomOp* op) { return entry(op).signature->outputs; };
  made.GetInputCharacteristic = [](const OrtCustomOp* op, size_t i) -> int {
    return entry(op).signature->optional_inputs >> i & 1 ? ort::OPTIONAL : ort::REQUIRED;
  };
  made.GetOutputCharacteristic = [](const OrtCustomOp* op, size_t i) -> int {
    return entry(op).signature->optional_outputs >> i & 1 ? ort::OPTIONAL : ort::REQUIRED;
  };
  made.GetInputMemoryType = [](const OrtCustomOp* op, size_t i) -> int {
    return entry(op).provider && entry(op).signature->host_inputs >> i & 1 ? ort::CPU_INPUT : ort::DEVICE;
  };
  made.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
  made.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 1; };
  made.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  made.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 1; };
  made.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  made.GetEndVersion = [](const OrtCustomOp*) { return 0x7fffffff; };
  made.CreateKernelV2 = [](const OrtCustomOp*, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
    return guarded(api, Op::NAME, [&] {
      Kernel* created = new KernelOf<Op>(Node(api, info, Op::NAME, Op::VERSION));
      created->api = api;
      *kernel = created;
    });
  };
  made.KernelComputeV2 = [](void* kernel, OrtKernelContext* context) {
    const Kernel& run = *static_cast<const Kernel*>(kernel);
    return guarded(run.api, Op::NAME, [&] {
      Context wrapped(run.api, context);
      run.compute(wrapped);
    });
  };
  made.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  return made;
}

template <class Op, size_t ROWS, size_t TENSORS>
void add(std::vector<Entry>& all, const int (&types)[ROWS][TENSORS], const char* provider) {
  for (const char* name : Op::NAMES)
    for (const int(&row)[TENSORS] : types) all.push_back(make<Op>(name, row, provider));
}

std::vector<Entry> every_entry() {
  std::vector<Entry> all;
  add<CausalConv>(all, CausalConv::TYPES, nullptr);
  add<DiffAttention>(all, DiffAttention::TYPES, nullptr);
  add<FloatMatMul>(all, FloatMatMul::TYPES, nullptr);
  add<GatherQuantized>(all, GatherQuantized::TYPES, nullptr);
  add<Hadamard>(all, Hadamard::TYPES, nullptr);
  add<Int4MatMul>(all, Int4MatMul::TYPES, nullptr);
  add<Int8MatMul>(all, Int8MatMul::TYPES, nullptr);
  add<SelectiveScan>(all, SelectiveScan::TYPES, nullptr);
  add<TernaryMatMul>(all, TernaryMatMul::TYPES, nullptr);
#if DIFFBIT_HAS_CUDA
  add<cuda::CausalConv>(all, cuda::CausalConv::GPU_TYPES, cuda::PROVIDER);
  add<cuda::DiffAttention>(all, cuda::DiffAttention::GPU_TYPES, cuda::PROVIDER);
  add<cuda::FloatMatMul>(all, cuda::FloatMatMul::GPU_TYPES, cuda::PROVIDER);
  add<cuda::GatherQuantized>(all, cuda::GatherQuantized::GPU_TYPES, cuda::PROVIDER);
  add<cuda::Hadamard>(all, cuda::Hadamard::GPU_TYPES, cuda::PROVIDER);
  add<cuda::Int4MatMul>(all, cuda::Int4MatMul::GPU_TYPES, cuda::PROVIDER);
  add<cuda::Int8MatMul>(all, cuda::Int8MatMul::GPU_TYPES, cuda::PROVIDER);
  add<cuda::SelectiveScan>(all, cuda::SelectiveScan::GPU_TYPES, cuda::PROVIDER);
  add<cuda::TernaryMatMul>(all, cuda::TernaryMatMul::GPU_TYPES, cuda::PROVIDER);
#endif
  return all;
}

}  // namespace
}  // namespace diffbit

DIFFBIT_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace diffbit;
  const OrtApi* api = base->GetApi(ort::API_VERSION);
  if (!api) return nullptr;  // an ONNX Runtime before 1.18 has printed why, and runs the bodies
  // The domain and its ops must outlive every session, so they are created once and never freed
  static OrtStatus* failed = nullptr;
  static std::vector<Entry> entries = every_entry();
  static OrtCustomOpDomain* domain = [&]() -> OrtCustomOpDomain* {
    OrtCustomOpDomain* made = nullptr;
    failed = ort::call<OrtStatus*>(api, ort::CreateCustomOpDomain, "diffbit", &made);
    for (Entry& op : entries)
      if (!failed) failed = ort::call<OrtStatus*>(api, ort::CustomOpDomain_Add, made, static_cast<const OrtCustomOp*>(&op));
    return made;
  }();
  if (failed) return ort::call<OrtStatus*>(api, ort::CreateStatus, int{ort::FAIL}, "diffbit's ops cannot be registered");
  return ort::call<OrtStatus*>(api, ort::AddCustomOpDomain, options, domain);
}

DIFFBIT_EXPORT const char* diffbit_isas() {
  static const std::string text = diffbit::available_isas(" ");
  return text.c_str();
}

DIFFBIT_EXPORT const char* diffbit_cuda_architectures() {
#ifdef DIFFBIT_CUDA_ARCHITECTURES
  return DIFFBIT_CUDA_ARCHITECTURES;
#else
  return "";
#endif
}
