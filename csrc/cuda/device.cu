// The functions of device.h for the device and errors.
#include "device.h"

#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <set>
#include <utility>

namespace diffbit::cuda {

const char* sentence(const char* format, ...) {
  static thread_local char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return text;
}

#ifdef __CUDACC__

namespace {

int attribute(cudaDeviceAttr attribute_id) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  return cudaDeviceGetAttribute(&value, attribute_id, device) == cudaSuccess ? value : 0;
}

}  // namespace

size_t most_shared() { return static_cast<size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)); }
int multiprocessors() { return attribute(cudaDevAttrMultiProcessorCount); }

const char* launched(const char* what) {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : sentence("CUDA did not start %s: %s", what, cudaGetErrorString(error));
}

#else

size_t most_shared() { return emulate::most_shared(); }
int multiprocessors() { return 4; }
const char* launched(const char*) { return nullptr; }

#endif

void allow_most_shared(const void* kernel) {
  static std::mutex mutex;
  static std::set<std::pair<const void*, int>> done;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return;  // the launch reports the error
  const std::lock_guard<std::mutex> lock(mutex);
  if (done.count({kernel, device})) return;
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) return;
  const int bytes = static_cast<int>(most_shared() - attributes.sharedSizeBytes);
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes) == cudaSuccess)
    done.emplace(kernel, device);
}

}  // namespace diffbit::cuda
