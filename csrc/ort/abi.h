// The part of ONNX Runtime's C interface that a custom-op library needs, declared here because ONNX Runtime's wheels do not
// contain headers. Slots are positions in the table that GetApi(18) returns; ONNX Runtime only appends to that table, so
// they are valid for every release from 1.18 on.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

struct OrtStatus;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtValue;
struct OrtTensorTypeAndShapeInfo;
struct OrtMemoryInfo;
struct OrtAllocator;

struct OrtApi {
  void* slot[278];
};

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

// The layout of version 18. A library states the version it was written for, and ONNX Runtime reads no further.
struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);  // before version 16
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  int (*GetInputType)(const OrtCustomOp*, size_t);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  int (*GetOutputType)(const OrtCustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void*, OrtKernelContext*);  // before version 16
  void (*KernelDestroy)(void*);
  int (*GetInputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetOutputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
  OrtStatus* (*KernelComputeV2)(void*, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, void*);  // not used: it crashes on omitted inputs before 1.24.4
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  size_t (*GetMayInplace)(int**, int**);
  void (*ReleaseMayInplace)(int*, int*);
  size_t (*GetAliasMap)(int**, int**);
  void (*ReleaseAliasMap)(int*, int*);
};

}  // extern "C"

namespace diffbit::ort {

constexpr uint32_t API_VERSION = 18;

// Element types of tensors, with ONNX's numbers
enum Type : int { UNDEFINED = 0, FLOAT32 = 1, UINT8 = 2, INT8 = 3, INT64 = 7, FLOAT16 = 10, BFLOAT16 = 16 };
enum Characteristic : int { REQUIRED = 0, OPTIONAL = 1 };
enum Memory : int { CPU_INPUT = -2, DEVICE = 0 };
enum Code : int { FAIL = 1, INVALID_ARGUMENT = 2 };

// One entry of the table: ort::call<int, const char*>(api, 0)(FAIL, "...") and so on, with these signatures:
enum Slot : int {
  CreateStatus = 0,                    // OrtStatus* (int code, const char* message)
  GetErrorMessage = 2,                 // const char* (const OrtStatus*)
  CreateCustomOpDomain = 26,           // OrtStatus* (const char* name, OrtCustomOpDomain** out)
  CustomOpDomain_Add = 27,             // OrtStatus* (OrtCustomOpDomain*, const OrtCustomOp*)
  AddCustomOpDomain = 28,              // OrtStatus* (OrtSessionOptions*, OrtCustomOpDomain*)
  GetTensorMutableData = 51,           // OrtStatus* (OrtValue*, void** out)
  GetTensorElementType = 60,           // OrtStatus* (const OrtTensorTypeAndShapeInfo*, int* out)
  GetDimensionsCount = 61,             // OrtStatus* (const OrtTensorTypeAndShapeInfo*, size_t* out)
  GetDimensions = 62,                  // OrtStatus* (const OrtTensorTypeAndShapeInfo*, int64_t* out, size_t count)
  GetTensorTypeAndShape = 65,          // OrtStatus* (const OrtValue*, OrtTensorTypeAndShapeInfo** out)
  AllocatorFree = 76,                  // OrtStatus* (OrtAllocator*, void*)
  KernelInfoGetAttribute_float = 85,   // OrtStatus* (const OrtKernelInfo*, const char* name, float* out)
  KernelInfoGetAttribute_int64 = 86,   // OrtStatus* (const OrtKernelInfo*, const char* name, int64_t* out)
  KernelContext_GetInputCount = 88,    // OrtStatus* (const OrtKernelContext*, size_t* out)
  KernelContext_GetOutputCount = 89,   // OrtStatus* (const OrtKernelContext*, size_t* out)
  KernelContext_GetInput = 90,         // OrtStatus* (const OrtKernelContext*, size_t index, const OrtValue** out)
  KernelContext_GetOutput = 91,        // OrtStatus* (OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue** out)
  ReleaseStatus = 93,                  // void (OrtStatus*)
  ReleaseTensorTypeAndShapeInfo = 99,  // void (OrtTensorTypeAndShapeInfo*)
  ReleaseAllocator = 132,              // void (OrtAllocator*)
  KernelContext_GetGPUComputeStream = 193,  // OrtStatus* (const OrtKernelContext*, void** out)
  GetTensorMemoryInfo = 194,           // OrtStatus* (const OrtValue*, const OrtMemoryInfo** out)
  HasSessionConfigEntry = 237,         // OrtStatus* (const OrtSessionOptions*, const char* key, int* out)
  GetSessionConfigEntry = 238,         // OrtStatus* (const OrtSessionOptions*, const char* key, char* value, size_t* size)
  KernelContext_GetAllocator = 253,    // OrtStatus* (const OrtKernelContext*, const OrtMemoryInfo*, OrtAllocator** out)
  KernelContext_ParallelFor = 274,     // OrtStatus* (const OrtKernelContext*, void (*)(void*, size_t), size_t total,
                                       //             size_t num_batch, void* user_data)
  KernelContext_GetScratchBuffer = 277,  // OrtStatus* (const OrtKernelContext*, const OrtMemoryInfo*, size_t, void** out)
};

template <class Result, class... Arguments>
Result call(const OrtApi* api, Slot slot, Arguments... arguments) {
  return reinterpret_cast<Result (*)(Arguments...)>(api->slot[slot])(arguments...);
}

}  // namespace diffbit::ort
