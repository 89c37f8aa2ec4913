// A stand-in for ONNX Runtime's header of this name: as much of it as examples/cpp/run.cpp uses, with the same signatures.
// No package that the tests can install carries the header; the shared library they link is the real one. Slots are
// positions in OrtApi, as in csrc/ort/abi.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

extern "C" {
struct OrtStatus;
struct OrtSessionOptions;
struct OrtMemoryInfo;
struct OrtAllocator;
struct OrtApi {
  void* slot[101];
};
struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};
const OrtApiBase* OrtGetApiBase();
}
#ifdef _WIN32
using ORTCHAR_T = wchar_t;
#else
using ORTCHAR_T = char;
#endif
enum OrtAllocatorType { OrtDeviceAllocator = 0 };
enum OrtLoggingLevel { ORT_LOGGING_LEVEL_ERROR = 3 };
enum OrtMemType { OrtMemTypeDefault = 0 };
enum ONNXTensorElementDataType { ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED = 0, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 = 7 };

namespace Ort {

struct Exception : std::exception {
  explicit Exception(std::string text) : text(std::move(text)) {}
  const char* what() const noexcept override { return text.c_str(); }
  std::string text;
};

template <class Result, class... Arguments>
Result call(int slot, Arguments... arguments) {
  static const OrtApi* api = OrtGetApiBase()->GetApi(18);
  return reinterpret_cast<Result (*)(Arguments...)>(api->slot[slot])(arguments...);
}

inline void ThrowOnError(OrtStatus* status) {
  if (!status) return;
  const Exception error(call<const char*, const OrtStatus*>(2, status));  // GetErrorMessage
  call<void>(93, status);                                                 // ReleaseStatus
  throw error;
}

template <class... Arguments>
void check(int slot, Arguments... arguments) {
  ThrowOnError(call<OrtStatus*, Arguments...>(slot, arguments...));
}

template <int RELEASE>
struct Object {
  explicit Object(void* handle = nullptr) : handle(handle) {}
  Object(Object&& other) noexcept : handle(std::exchange(other.handle, nullptr)) {}
  Object& operator=(Object&& other) noexcept { return std::swap(handle, other.handle), *this; }
  ~Object() {
    if (handle) call<void, void*>(RELEASE, handle);
  }
  void* handle;
};

struct Env : Object<92> {
  explicit Env(OrtLoggingLevel level) { check<int, const char*, void**>(3, level, "", &handle); }
};

struct SessionOptions : Object<100> {
  SessionOptions() { check<void**>(10, &handle); }
  operator OrtSessionOptions*() { return static_cast<OrtSessionOptions*>(handle); }
};

struct RunOptions : Object<97> {
  explicit RunOptions(std::nullptr_t) {}
};

struct AllocatorWithDefaultOptions {
  AllocatorWithDefaultOptions() { check<OrtAllocator**>(78, &handle); }
  operator OrtAllocator*() const { return handle; }
  OrtAllocator* handle = nullptr;
};

struct MemoryInfo : Object<94> {
  static MemoryInfo CreateCpu(OrtAllocatorType allocator, OrtMemType memory) {
    MemoryInfo created;
    check<int, int, void**>(69, allocator, memory, &created.handle);
    return created;
  }
  operator const OrtMemoryInfo*() const { return static_cast<const OrtMemoryInfo*>(handle); }
};

struct TensorTypeAndShapeInfo {
  std::vector<int64_t> GetShape() const {
    size_t count = 0;
    check<const void*, size_t*>(61, handle, &count);
    std::vector<int64_t> shape(count);
    check<const void*, int64_t*, size_t>(62, handle, shape.data(), count);
    return shape;
  }
  ONNXTensorElementDataType GetElementType() const {
    int type = 0;
    check<const void*, int*>(60, handle, &type);
    return static_cast<ONNXTensorElementDataType>(type);
  }
  const void* handle;
  std::shared_ptr<Object<99>> owned{};
};

struct TypeInfo : Object<98> {
  TensorTypeAndShapeInfo GetTensorTypeAndShapeInfo() const {
    const void* info = nullptr;
    check<const void*, const void**>(55, handle, &info);
    return {info};
  }
};

struct Value : Object<96> {
  static Value CreateTensor(const OrtMemoryInfo* info, void* data, size_t bytes, const int64_t* shape, size_t dims,
                            ONNXTensorElementDataType type) {
    Value created;
    check<const OrtMemoryInfo*, void*, size_t, const int64_t*, size_t, int, void**>(49, info, data, bytes, shape, dims, type,
                                                                                    &created.handle);
    return created;
  }
  template <class T>
  static Value CreateTensor(const OrtMemoryInfo* info, T* data, size_t count, const int64_t* shape, size_t dims) {
    static_assert(std::is_same<T, int64_t>::value, "the only one here");
    return CreateTensor(info, data, count * sizeof(T), shape, dims, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64);
  }
  template <class T>
  T* GetTensorMutableData() {
    void* data = nullptr;
    check<void*, void**>(51, handle, &data);
    return static_cast<T*>(data);
  }
  TensorTypeAndShapeInfo GetTensorTypeAndShapeInfo() const {
    void* info = nullptr;
    check<const void*, void**>(65, handle, &info);
    return {info, std::make_shared<Object<99>>(info)};
  }
};

struct Freed {
  void operator()(char* text) const { check<OrtAllocator*, void*>(76, allocator, text); }
  OrtAllocator* allocator = nullptr;
};
using AllocatedStringPtr = std::unique_ptr<char, Freed>;

struct Session : Object<95> {
  Session(const Env& env, const ORTCHAR_T* path, const SessionOptions& options) {
    check<const void*, const ORTCHAR_T*, const void*, void**>(7, env.handle, path, options.handle, &handle);
  }
  size_t GetInputCount() const { return count(30); }
  size_t GetOutputCount() const { return count(31); }
  AllocatedStringPtr GetInputNameAllocated(size_t index, OrtAllocator* allocator) const { return name(36, index, allocator); }
  AllocatedStringPtr GetOutputNameAllocated(size_t index, OrtAllocator* allocator) const { return name(37, index, allocator); }
  TypeInfo GetInputTypeInfo(size_t index) const {
    TypeInfo info;
    check<const void*, size_t, void**>(33, handle, index, &info.handle);
    return info;
  }
  std::vector<Value> Run(const RunOptions& options, const char* const* inputs, const Value* values, size_t input_count,
                         const char* const* outputs, size_t output_count) {
    std::vector<const void*> from;
    for (size_t i = 0; i < input_count; ++i) from.push_back(values[i].handle);
    std::vector<void*> to(output_count);
    check<void*, const void*, const char* const*, const void* const*, size_t, const char* const*, size_t, void**>(
        9, handle, options.handle, inputs, from.data(), input_count, outputs, output_count, to.data());
    std::vector<Value> results(output_count);
    for (size_t i = 0; i < output_count; ++i) results[i].handle = to[i];
    return results;
  }

 private:
  size_t count(int slot) const {
    size_t found = 0;
    check<const void*, size_t*>(slot, handle, &found);
    return found;
  }
  AllocatedStringPtr name(int slot, size_t index, OrtAllocator* allocator) const {
    char* found = nullptr;
    check<const void*, size_t, OrtAllocator*, char**>(slot, handle, index, allocator, &found);
    return AllocatedStringPtr(found, Freed{allocator});
  }
};

}  // namespace Ort
