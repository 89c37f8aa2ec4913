// An artifact that runs: its graph, the memory of its values and its cache (docs/artifact.md). Token ids in, logits out.
#pragma once

#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "../graph/graph.h"
#include "file.h"
#include "json.h"
#include "onnx.h"
#include "pool.h"

namespace diffbit::runtime {

/// Is thrown where the caller cancelled.
struct Cancelled {};

class Session {
 public:
  /// Opens an artifact's folder. threads: 0: the default. Throws Error.
  Session(const std::string& folder, int threads);
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  /// Appends tokens and returns the logits after the last one, `vocabulary` of them, valid until the next call. Throws Error or
  /// Cancelled; then the cache is empty.
  const float* append(const int32_t* ids, size_t count);
  void reset();
  /// Keeps the cached tokens that `ids` begins with, all but its last, if the cache can; returns how many.
  size_t reuse(const int32_t* ids, size_t count);

  size_t length() const { return cached_.size(); }  // tokens in the cache
  int64_t context() const { return context_; }
  int64_t vocabulary() const { return vocabulary_; }
  int64_t bos() const { return bos_; }  // -1: none
  const std::set<int32_t>& ends() const { return ends_; }
  JsonValue chat() const { return manifest_.root()["chat"]; }  // the manifest's field (chat.h)
  int threads() const { return pool_.threads(); }
  /// Returns the path of a file that the manifest lists; empty if it lists none of this name. Throws Error if it is missing.
  std::string file(const std::string& name) const;

  std::atomic<bool> cancelled{false};

 private:
  struct Release {
    void operator()(void* data) const { graph::release(data); }
  };
  struct OwnedMemory : graph::Memory {
    ~OwnedMemory() { graph::release(data); }
  };
  struct OwnedNode : graph::Node {
    ~OwnedNode() { graph::destroy_custom(*this); }
  };
  /// Memory of zeros, from a cache line on, that the system gives when it is written.
  class Zeroed {
   public:
    Zeroed() = default;
    explicit Zeroed(size_t bytes) : block_(std::calloc(1, bytes + 64)) {
      if (!block_) graph::fail("the cache of %zu bytes does not fit into memory; export the model with a shorter context_length", bytes);
    }
    void* get() const { return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(block_.get()) + 63) / 64 * 64); }
    explicit operator bool() const { return block_ != nullptr; }

   private:
    struct Free {
      void operator()(void* block) const { std::free(block); }
    };
    std::unique_ptr<void, Free> block_;
  };
  /// A tensor of the cache: the graph's input past_key_values.NAME and its output present.NAME.
  struct Buffer {
    std::string name;
    int type = 0;
    std::vector<int64_t> sizes;  // without the batch; GROWS: one entry per token of capacity
    bool is_ring = false;
    bool in_place = false;
    OrtValue* past = nullptr;
    OrtValue* present = nullptr;  // null: the past, in place
    Zeroed data;
    std::vector<int64_t> shape;  // as allocated
  };
  static constexpr int64_t GROWS = -1;
  struct Input {
    OrtValue* value;
    int64_t* numbers;
  };

  void read_manifest();
  void read_cache(JsonValue cache);
  void read_inputs(const OnnxGraph& graph);
  void read_weights(const OnnxGraph& graph, const std::string& folder);
  void plan(const OnnxGraph& graph);
  OrtValue* new_value(int type);
  void* allocate(size_t bytes);
  void reserve(int64_t tokens);
  void run(const int32_t* ids, int64_t count);

  std::string folder_;
  Json manifest_;
  Pool pool_;
  int64_t context_ = 0, vocabulary_ = 0, bos_ = -1, capacity_ = 0, chunk_ = 0;
  bool has_logits_from_ = false;
  std::set<int32_t> ends_;
  std::map<std::string, std::unique_ptr<MappedFile>> files_;
  std::map<std::string, OrtValue*> values_;
  std::map<std::string, Input> inputs_;
  std::vector<Buffer> buffers_;
  std::vector<std::unique_ptr<OrtValue>> all_values_;
  std::vector<std::unique_ptr<OwnedMemory>> memories_;
  std::vector<std::unique_ptr<void, Release>> allocated_;  // beside the values' memory and the cache
  std::vector<std::unique_ptr<OwnedNode>> nodes_;
  OrtValue* logits_ = nullptr;
  std::vector<int32_t> cached_;
};

}  // namespace diffbit::runtime
