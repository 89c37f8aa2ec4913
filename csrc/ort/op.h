// An op's view of ONNX Runtime: attributes when a node is created, tensors and threads when it runs.
//
// An op is a struct with
//     explicit Op(const Node& node);                           reads and checks the attributes
//     void compute(Context& context) const;                    checks the inputs, allocates the outputs, computes
// and a function create_X, which the library calls for each node (cpu/ops.h, cuda/ops.h). Both members may throw Error; ONNX
// Runtime then reports its message with the node's name. `compute` may run on several threads at once, so an op must not own
// scratch memory; take it from `scratch`.
#pragma once

#include <atomic>
#include <cstdarg>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <initializer_list>
#include <new>
#include <string>

#include "abi.h"
#include "schema.h"

namespace diffbit {

inline long long number(int64_t value) { return static_cast<long long>(value); }  // for %lld
inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// An error message for the user; printf-style.
class Error : public std::exception {
 public:
  __attribute__((format(printf, 2, 3))) explicit Error(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(text_, sizeof text_, format, arguments);
    va_end(arguments);
  }
  const char* what() const noexcept override { return text_; }

 private:
  char text_[512];
};

/// Throws the Error of a failed call into ONNX Runtime.
void check(const OrtApi* api, OrtStatus* status);

/// A dense tensor; `data` is null for an omitted optional input.
struct Tensor {
  static constexpr size_t MOST_DIMENSIONS = 8;

  const char* name = "";
  void* data = nullptr;
  int type = ort::UNDEFINED;
  size_t rank = 0;
  int64_t shape[MOST_DIMENSIONS] = {};

  explicit operator bool() const { return data != nullptr || rank != 0 || type != ort::UNDEFINED; }
  int64_t size() const {
    int64_t product = 1;
    for (size_t i = 0; i < rank; ++i) product *= shape[i];
    return product;
  }
  std::string shape_text() const;  // "[2, 3]"
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  /// Throws unless the shape is the given one; -1 fits anything.
  void expect(std::initializer_list<int64_t> dimensions) const;
  /// Throws unless the last dimension is the given one.
  void expect_last(int64_t size) const;
};

/// A node under construction.
class Node {
 public:
  /// Throws if the node's attribute spec_version is not the version of this kernel: it is read before all others, which
  /// another version may lack or mean differently.
  Node(const OrtApi* api, const OrtKernelInfo* info, const char* op, int64_t version, bool bfloat16);
  /// Throws if the attribute does not match the schema.
  int64_t integer(const schema::Integer& attribute) const;
  float number(const schema::Number& attribute) const;
  const bool bfloat16;  // whether products with many rows may round to bfloat16, where the set has matrix instructions

 private:
  int64_t integer(const char* attribute) const;

  const OrtApi* api_;
  const OrtKernelInfo* info_;
  const char* op_;
};

/// One run of a node.
class Context {
 public:
  Context(const OrtApi* api, OrtKernelContext* context) : api_(api), context_(context) {}
  /// Returns an input; an omitted optional one converts to false.
  Tensor input(const schema::Input& position) const;
  Tensor output(const schema::Output& position, std::initializer_list<int64_t> shape);
  Tensor output(const schema::Output& position, const int64_t* shape, size_t rank);
  /// Allocates an output with a's shape except for the last dimension.
  Tensor product(const schema::Output& position, const Tensor& a, int64_t last);
  /// Whether an optional output is requested. If not, its shape is [0].
  bool wants(const schema::Output& position);

  /// Returns the GPU stream on which a node's inputs are ready and its outputs are expected.
  void* stream() const;

  /// Runs task(0) ... task(count - 1) on the session's threads, in any order; of exceptions `task` may throw std::bad_alloc,
  /// which is thrown again here when all have ended: on another thread nobody would catch it.
  template <class Task>
  void parallel(int64_t count, const Task& task) const {
    if (count == 1) return task(int64_t{0});
    struct Tasks {
      const Task& task;
      std::atomic<bool> no_memory{false};
    } tasks{task};
    const auto run = [](void* data, size_t i) {
      Tasks& shared = *static_cast<Tasks*>(data);
      try {
        shared.task(static_cast<int64_t>(i));
      } catch (const std::bad_alloc&) {
        shared.no_memory = true;
      }
    };
    parallel(count, run, &tasks);
    if (tasks.no_memory) throw std::bad_alloc();
  }

 private:
  friend class DeviceScratch;
  void parallel(int64_t count, void (*task)(void*, size_t), void* data) const;

  const OrtApi* api_;
  OrtKernelContext* context_;
};

/// What the library keeps for a node of a session.
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

/// `bytes` bytes on the device of the node's first input, for kernels on the node's stream. The destructor returns them
/// without waiting for the stream: ONNX Runtime records the stream, and gives the memory to another stream only when this
/// one is done; later kernels on the same stream run later anyway.
class DeviceScratch {
 public:
  DeviceScratch(const Context& context, size_t bytes);
  ~DeviceScratch();
  DeviceScratch(const DeviceScratch&) = delete;
  DeviceScratch& operator=(const DeviceScratch&) = delete;
  void* data() const { return data_; }

 private:
  const OrtApi* api_;
  OrtAllocator* allocator_ = nullptr;
  void* data_ = nullptr;
};

/// `bytes` bytes, 64-byte aligned, that stay valid until this thread's next call with the same `slot`. The memory grows and
/// never shrinks. The workers of a run may write into memory that the calling thread took.
constexpr int SCRATCH_SLOTS = 10;
void* scratch(int slot, size_t bytes);

template <class T>
T* scratch(int slot, int64_t count) {
  return static_cast<T*>(scratch(slot, static_cast<size_t>(count) * sizeof(T)));
}

}  // namespace diffbit
