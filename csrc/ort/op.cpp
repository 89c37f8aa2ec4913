#include "op.h"

#include <cstdlib>
#include <cstring>
#ifdef _WIN32
#include <malloc.h>
#endif

namespace diffbit {

void check(const OrtApi* api, OrtStatus* status) {
  if (!status) return;
  Error error("%s", ort::call<const char*>(api, ort::GetErrorMessage, static_cast<const OrtStatus*>(status)));
  ort::call<void>(api, ort::ReleaseStatus, status);
  throw error;
}

std::string Tensor::shape_text() const {
  std::string text = "[";
  for (size_t i = 0; i < rank; ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

void Tensor::expect(std::initializer_list<int64_t> dimensions) const {
  bool fits = dimensions.size() == rank;
  size_t i = 0;
  for (int64_t dimension : dimensions) {
    if (fits && dimension >= 0 && shape[i] != dimension) fits = false;
    ++i;
  }
  if (fits) return;
  std::string text;
  for (int64_t dimension : dimensions)
    text += (text.empty() ? "" : ", ") + (dimension < 0 ? std::string("any") : std::to_string(dimension));
  throw Error("%s is %s, wanted [%s]", name, shape_text().c_str(), text.c_str());
}

void Tensor::expect_last(int64_t size) const {
  if (rank < 1 || shape[rank - 1] != size)
    throw Error("%s is %s, wanted [..., %lld]", name, shape_text().c_str(), static_cast<long long>(size));
}

Node::Node(const OrtApi* api, const OrtKernelInfo* info, const char* op, int64_t version, bool bfloat16)
    : bfloat16(bfloat16), api_(api), info_(info), op_(op) {
  const int64_t model_version = integer("spec_version");
  if (model_version != version)
    throw Error("%s: the model's spec_version is %lld, this library computes %lld; run without it, or export again", op_,
                diffbit::number(model_version), diffbit::number(version));
}

int64_t Node::integer(const char* attribute) const {
  int64_t value = 0;
  OrtStatus* status = ort::call<OrtStatus*>(api_, ort::KernelInfoGetAttribute_int64, info_, attribute, &value);
  if (status) {
    ort::call<void>(api_, ort::ReleaseStatus, status);
    throw Error("%s has no integer attribute %s", op_, attribute);
  }
  return value;
}

int64_t Node::integer(const schema::Integer& attribute) const {
  const int64_t value = integer(attribute.name), *values = attribute.values;
  if (!attribute.count) {
    if (value < values[0] || value > values[1])
      throw Error("%s: attribute %s is %lld, wanted %lld to %lld", op_, attribute.name, diffbit::number(value),
                  diffbit::number(values[0]), diffbit::number(values[1]));
    return value;
  }
  std::string choices;
  for (int i = 0; i < attribute.count; ++i) {
    if (value == values[i]) return value;
    choices += (!i ? "" : i < attribute.count - 1 ? ", " : " or ") + std::to_string(values[i]);
  }
  throw Error("%s: attribute %s is %lld, wanted %s", op_, attribute.name, diffbit::number(value), choices.c_str());
}

float Node::number(const schema::Number& attribute) const {
  float value = 0;
  OrtStatus* status = ort::call<OrtStatus*>(api_, ort::KernelInfoGetAttribute_float, info_, attribute.name, &value);
  if (status) {
    ort::call<void>(api_, ort::ReleaseStatus, status);
    throw Error("%s has no float attribute %s", op_, attribute.name);
  }
  return value;
}

Tensor Context::input(const schema::Input& position) const {
  Tensor tensor;
  tensor.name = position.name;
  const OrtValue* value = nullptr;
  size_t count = 0;
  const OrtKernelContext* context = context_;
  check(api_, ort::call<OrtStatus*>(api_, ort::KernelContext_GetInputCount, context, &count));
  if (position.index >= count) return tensor;
  check(api_, ort::call<OrtStatus*>(api_, ort::KernelContext_GetInput, context, position.index, &value));
  if (!value) return tensor;
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(api_, ort::call<OrtStatus*>(api_, ort::GetTensorTypeAndShape, value, &info));
  struct Release {
    const OrtApi* api;
    OrtTensorTypeAndShapeInfo* info;
    ~Release() { ort::call<void>(api, ort::ReleaseTensorTypeAndShapeInfo, info); }
  } release{api_, info};
  const OrtTensorTypeAndShapeInfo* read = info;
  check(api_, ort::call<OrtStatus*>(api_, ort::GetTensorElementType, read, &tensor.type));
  check(api_, ort::call<OrtStatus*>(api_, ort::GetDimensionsCount, read, &tensor.rank));
  if (tensor.rank > Tensor::MOST_DIMENSIONS)
    throw Error("%s has %zu dimensions, wanted at most %zu", position.name, tensor.rank, Tensor::MOST_DIMENSIONS);
  int64_t* shape = tensor.shape;
  check(api_, ort::call<OrtStatus*>(api_, ort::GetDimensions, read, shape, tensor.rank));
  check(api_, ort::call<OrtStatus*>(api_, ort::GetTensorMutableData, const_cast<OrtValue*>(value), &tensor.data));
  return tensor;
}

Tensor Context::output(const schema::Output& position, std::initializer_list<int64_t> shape) {
  return output(position, shape.begin(), shape.size());
}

Tensor Context::product(const schema::Output& position, const Tensor& a, int64_t last) {
  int64_t shape[Tensor::MOST_DIMENSIONS];
  std::memcpy(shape, a.shape, sizeof shape);
  shape[a.rank - 1] = last;
  return output(position, shape, a.rank);
}

Tensor Context::output(const schema::Output& position, const int64_t* shape, size_t rank) {
  Tensor tensor;
  tensor.name = position.name;
  tensor.rank = rank;
  std::memcpy(tensor.shape, shape, rank * sizeof *shape);
  OrtValue* value = nullptr;
  check(api_, ort::call<OrtStatus*>(api_, ort::KernelContext_GetOutput, context_, position.index, shape, rank, &value));
  if (!value) return tensor;
  check(api_, ort::call<OrtStatus*>(api_, ort::GetTensorMutableData, value, &tensor.data));
  return tensor;
}

bool Context::wants(const schema::Output& position) {
  size_t count = 0;
  const OrtKernelContext* context = context_;
  check(api_, ort::call<OrtStatus*>(api_, ort::KernelContext_GetOutputCount, context, &count));
  if (position.index >= count) return false;
  const int64_t shape[] = {0};
  OrtValue* value = nullptr;
  check(api_, ort::call<OrtStatus*>(api_, ort::KernelContext_GetOutput, context_, position.index,
                                    static_cast<const int64_t*>(shape), size_t{1}, &value));
  return value != nullptr;
}

void Context::parallel(int64_t count, void (*task)(void*, size_t), void* data) const {
  if (count <= 0) return;
  const OrtKernelContext* context = context_;
  check(api_, ort::call<OrtStatus*>(api_, ort::KernelContext_ParallelFor, context, task, static_cast<size_t>(count),
                                    size_t{0}, data));
}

void* Context::stream() const {
  void* stream = nullptr;
  const OrtKernelContext* context = context_;
  check(api_, ort::call<OrtStatus*>(api_, ort::KernelContext_GetGPUComputeStream, context, &stream));
  return stream;
}

DeviceScratch::DeviceScratch(const Context& context_, size_t bytes) : api_(context_.api_) {
  if (!bytes) return;
  const OrtKernelContext* context = context_.context_;
  const OrtValue* input = nullptr;
  const OrtMemoryInfo* where = nullptr;
  check(api_, ort::call<OrtStatus*>(api_, ort::KernelContext_GetInput, context, size_t{0}, &input));
  check(api_, ort::call<OrtStatus*>(api_, ort::GetTensorMemoryInfo, input, &where));
  check(api_, ort::call<OrtStatus*>(api_, ort::KernelContext_GetAllocator, context, where, &allocator_));
  OrtStatus* failed = ort::call<OrtStatus*>(api_, ort::KernelContext_GetScratchBuffer, context, where, bytes, &data_);
  if (!failed && data_) return;
  ort::call<void>(api_, ort::ReleaseAllocator, allocator_);
  check(api_, failed);
  throw std::bad_alloc();
}

DeviceScratch::~DeviceScratch() {
  if (!allocator_) return;
  OrtStatus* failed = ort::call<OrtStatus*>(api_, ort::AllocatorFree, allocator_, data_);
  if (failed) ort::call<void>(api_, ort::ReleaseStatus, failed);  // the memory leaks; nothing else can be done here
  ort::call<void>(api_, ort::ReleaseAllocator, allocator_);
}

namespace {

#ifdef _WIN32
void* aligned_memory(size_t bytes, size_t alignment) { return _aligned_malloc(bytes, alignment); }
void free_aligned(void* memory) { _aligned_free(memory); }
#else
void* aligned_memory(size_t bytes, size_t alignment) {
  void* memory = nullptr;
  return posix_memalign(&memory, alignment, bytes) ? nullptr : memory;
}
void free_aligned(void* memory) { std::free(memory); }
#endif

}  // namespace

void* scratch(int slot, size_t bytes) {
  constexpr size_t ALIGNMENT = 64;
#if defined(__SANITIZE_ADDRESS__)  // a new block of exactly this size each time, so reading beyond it is detected
  constexpr size_t STEP = 1;
  constexpr bool KEEP = false;
#else
  constexpr size_t STEP = 4096;
  constexpr bool KEEP = true;
#endif
  struct Buffers {
    void* data[SCRATCH_SLOTS] = {};
    size_t size[SCRATCH_SLOTS] = {};
    ~Buffers() {
      for (void* buffer : data) free_aligned(buffer);
    }
  };
  thread_local Buffers buffers;
  if (!KEEP || buffers.size[slot] < bytes) {
    const size_t rounded_up = (bytes + STEP - 1) / STEP * STEP;
    free_aligned(buffers.data[slot]);
    buffers.size[slot] = 0;
    buffers.data[slot] = aligned_memory(rounded_up, ALIGNMENT);
    if (!buffers.data[slot]) throw std::bad_alloc();
    buffers.size[slot] = rounded_up;
  }
  return buffers.data[slot];
}

}  // namespace diffbit
