// The entry point that ONNX Runtime calls: registers diffbit's ops, one entry per combination of tensor types.
//
// With a library registered there is no way back to an op's portable body: a model whose types none of these entries
// has fails to load. So every combination that diffbit exports is here, for each device that the library has kernels for.

#include <initializer_list>
#include <new>
#include <vector>

#include "diff_attention.h"
#include "hadamard.h"
#include "int4_matmul.h"
#include "op.h"
#include "ternary_matmul.h"
#if DIFFBIT_HAS_CUDA
#include "cuda/ops.h"
#endif

#define DIFFBIT_EXPORT extern "C" __attribute__((visibility("default")))

namespace diffbit {
namespace {

constexpr size_t MOST_INPUTS = 16, MOST_OUTPUTS = 8;

struct Signature {
  size_t inputs, outputs;
  int input_types[MOST_INPUTS];
  int output_types[MOST_OUTPUTS];
  size_t required_inputs, required_outputs;  // those after them are optional
  size_t optional_input = MOST_INPUTS;       // one before them
};

/// Where an op runs: nullptr, the CPU; and which of its inputs the CPU reads even so.
struct Place {
  const char* provider = nullptr;
  size_t cpu_input = MOST_INPUTS;
};

struct Entry : OrtCustomOp {
  const char* op = "";
  Signature signature{};
  Place place{};
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

/// Runs `body`; what it throws becomes the status that ONNX Runtime reports.
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
Entry make(const Signature& signature, const Place& place = {}) {
  Entry made{};
  made.op = Op::NAME;
  made.signature = signature;
  made.place = place;
  made.version = ort::API_VERSION;
  made.GetName = [](const OrtCustomOp* op) { return entry(op).op; };
  made.GetExecutionProviderType = [](const OrtCustomOp* op) { return entry(op).place.provider; };
  made.GetInputType = [](const OrtCustomOp* op, size_t i) { return entry(op).signature.input_types[i]; };
  made.GetInputTypeCount = [](const OrtCustomOp* op) { return entry(op).signature.inputs; };
  made.GetOutputType = [](const OrtCustomOp* op, size_t i) { return entry(op).signature.output_types[i]; };
  made.GetOutputTypeCount = [](const OrtCustomOp* op) { return entry(op).signature.outputs; };
  made.GetInputCharacteristic = [](const OrtCustomOp* op, size_t i) -> int {
    const Signature& signature = entry(op).signature;
    return i < signature.required_inputs && i != signature.optional_input ? ort::REQUIRED : ort::OPTIONAL;
  };
  made.GetOutputCharacteristic = [](const OrtCustomOp* op, size_t i) -> int {
    return i < entry(op).signature.required_outputs ? ort::REQUIRED : ort::OPTIONAL;
  };
  made.GetInputMemoryType = [](const OrtCustomOp* op, size_t i) -> int {
    return i == entry(op).place.cpu_input ? ort::CPU_INPUT : ort::DEVICE;
  };
  made.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
  made.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 1; };
  made.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
  made.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 1; };
  made.GetStartVersion = [](const OrtCustomOp*) { return 1; };
  made.GetEndVersion = [](const OrtCustomOp*) { return 0x7fffffff; };
  made.CreateKernelV2 = [](const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info, void** kernel) {
    return guarded(api, entry(op).op, [&] {
      Kernel* created = new KernelOf<Op>(Node(api, info, entry(op).op));
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

using namespace ort;

/// T: query, key, value, out; keys and values have types of their own, and what their types need beside them.
Signature diff_attention(int type, int keys, int values) {
  const auto scale = [](int cache) { return cache == UINT8 ? FLOAT16 : FLOAT32; };
  return {15, 7,
          {type, type, type, FLOAT32, keys, values, INT64, INT64, FLOAT32, FLOAT32, INT64, scale(keys), scale(values),
           FLOAT16, FLOAT16},
          {type, keys, values, scale(keys), scale(values), FLOAT16, FLOAT16},
          11, 3, 3};
}

/// The ops of one place, for numbers of one type beside caches of any of these.
template <class Attention, class Transform, class Int4, class Ternary>
void add(std::vector<Entry>& all, int type, std::initializer_list<int> caches, const Place& place, const Place& attention) {
  all.push_back(make<Transform>({1, 1, {type}, {type}, 1, 1}, place));
  all.push_back(make<Int4>({5, 1, {type, UINT8, FLOAT16, UINT8, FLOAT32}, {type}, 5, 1}, place));
  all.push_back(make<Ternary>({3, 1, {type, UINT8, FLOAT32}, {type}, 3, 1}, place));
  for (int keys : caches)
    for (int values : caches) all.push_back(make<Attention>(diff_attention(type, keys, values), attention));
}

std::vector<Entry> every_entry() {
  std::vector<Entry> all;
  for (int type : {FLOAT32, FLOAT16})
    add<DiffAttention, Hadamard, Int4MatMul, TernaryMatMul>(all, type, {FLOAT32, FLOAT16, INT8, UINT8}, {}, {});
#if DIFFBIT_HAS_CUDA
  const Place gpu{cuda::PROVIDER}, attention{cuda::PROVIDER, 6};  // past_length says how much there is to start
  for (int type : {FLOAT32, FLOAT16, BFLOAT16})
    add<cuda::DiffAttention, cuda::Hadamard, cuda::Int4MatMul, cuda::TernaryMatMul>(
        all, type, {FLOAT32, FLOAT16, BFLOAT16, INT8, UINT8}, gpu, attention);
#endif
  return all;
}

}  // namespace
}  // namespace diffbit

DIFFBIT_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace diffbit;
  const OrtApi* api = base->GetApi(ort::API_VERSION);
  if (!api) return nullptr;  // an ONNX Runtime before 1.18 has printed why, and runs the bodies
  // The domain and its ops must outlive every session, so they are made once and kept
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

/// The instruction sets that this CPU and this build have, best first, separated by spaces.
DIFFBIT_EXPORT const char* diffbit_isas() {
  using namespace diffbit;
  static const std::string text = [] {
    std::string found;
    for (Isa isa : {Isa::avx512vnni, Isa::avxvnni, Isa::avx2, Isa::neon, Isa::scalar})
      if (available(isa)) found += std::string(found.empty() ? "" : " ") + name(isa);
    return found;
  }();
  return text.c_str();
}

/// The GPUs that this build has CUDA kernels for, as in "80 90a" of sm_80 and sm_90a, separated by spaces; where the first
/// has no letter, newer ones run them, too. Empty where it has none.
DIFFBIT_EXPORT const char* diffbit_cuda_architectures() {
#ifdef DIFFBIT_CUDA_ARCHITECTURES
  return DIFFBIT_CUDA_ARCHITECTURES;
#else
  return "";
#endif
}
