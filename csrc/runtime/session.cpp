#include "session.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <utility>

#include "../cpu/isa.h"
#include "../ort/op.h"

namespace diffbit {

void graph::fail(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw Error("%s", text);
}

namespace runtime {
namespace {

using graph::Known;
using graph::Memory;
using graph::Node;

constexpr const char* MANIFEST = "diffbit.json";
constexpr int64_t VERSION = 4;              // of the manifest (runtime/artifact.py)
constexpr uint64_t MOST_MANIFEST = 16 << 20;
constexpr int64_t CHUNK = 256, AMX_CHUNK = 512;  // prompt tokens per run (runtime/session.py)
constexpr int64_t ROOM = 128;               // tokens that a cache has room for at first
constexpr int64_t BLOCK = 32;               // capacities are multiples of it: tokens enter low-bit caches in whole blocks
constexpr int64_t MOST_RING = 1 << 20;      // tokens
constexpr int64_t MOST_CONTEXT = 1 << 24, MOST_VOCABULARY = 1 << 24;
constexpr int64_t ALIGNMENT = 16;           // of weights in a file; kernels need no more

int type_of(std::string_view dtype) {
  static const std::pair<const char*, int> TYPES[] = {{"float32", ort::FLOAT32}, {"float16", ort::FLOAT16},
      {"bfloat16", ort::BFLOAT16}, {"int8", ort::INT8}, {"uint8", ort::UINT8}};
  for (const auto& [name, type] : TYPES)
    if (dtype == name) return type;
  throw Error("a cache of %.40s is not known", std::string(dtype).c_str());
}

/// Returns the bytes of a tensor; throws Error if there are too many for memory.
size_t bytes_of(int type, const std::vector<int64_t>& shape) {
  const int64_t bytes = graph::tensor_bytes(type, shape.data(), static_cast<int>(shape.size()), graph::MOST_STORED);
  if (bytes < 0) throw Error("the cache does not fit into memory; export the model with a shorter context_length");
  return static_cast<size_t>(bytes);
}

void place(OrtValue& value, const std::vector<int64_t>& shape, void* data) {
  value.rank = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), value.shape);
  value.data = data;
}

bool has_amx() {
#define DIFFBIT_IS_AMX(name, more) || (std::string_view(#name) == "amx" && chosen == Isa::name)
  const Isa chosen = choose_isa();
  return false DIFFBIT_ISAS(DIFFBIT_IS_AMX, );
#undef DIFFBIT_IS_AMX
}

}  // namespace

Session::Session(const std::string& folder, int threads)
    : folder_(folder),
      manifest_(MappedFile(path_within(folder, MANIFEST), MOST_MANIFEST).text(), folder + "/" + MANIFEST),
      pool_(threads > 0 ? threads : default_threads()) {
  read_manifest();
  const bool is_plain = !manifest_.root()["files"]["model.onnx"].is_null();
  const std::string name = is_plain ? "model.onnx" : "onnx/model.onnx", path = file(name);
  if (path.empty()) throw Error("%s/%s: lists no model.onnx; export the model again", folder.c_str(), MANIFEST);
  const MappedFile mapped(path);
  const OnnxGraph graph = read_onnx(mapped.text(), path);
  try {
    read_inputs(graph);
    read_weights(graph, is_plain ? "" : "onnx/");
    plan(graph);
    reserve(1);
  } catch (const Error& error) {
    throw Error("%s: %s", path.c_str(), error.what());
  }
}

void Session::read_manifest() try {
  const JsonValue root = manifest_.root();
  const double version = root["artifact_version"].number(-1);
  if (version != static_cast<double>(VERSION))
    throw Error("artifact_version is %g, this release reads %lld; %s", version, number(VERSION),
                version > static_cast<double>(VERSION) ? "upgrade diffbit" : "export the model again");
  if (!root["output"].is_null() && root["output"].text() != "logits")
    throw Error("the graph returns no logits; export the model again without --embeddings");
  context_ = root["context_length"].integer("context_length", 1, MOST_CONTEXT);
  const JsonValue model = root["model"];
  vocabulary_ = model["vocab_size"].integer("model.vocab_size", 1, MOST_VOCABULARY);
  if (!model["bos_token_id"].is_null()) bos_ = model["bos_token_id"].integer("model.bos_token_id", 0, vocabulary_ - 1);
  root["eos_token_ids"].each([&](JsonValue id) {
    ends_.insert(static_cast<int32_t>(id.integer("eos_token_ids", 0, vocabulary_ - 1)));
  });
  root["optional_inputs"].each([&](JsonValue name) { has_logits_from_ = has_logits_from_ || name.text() == "logits_from"; });
  read_cache(root["cache"]);
  chunk_ = has_amx() ? AMX_CHUNK : CHUNK;
} catch (const Error& error) {
  throw Error("%s/%s: %s", folder_.c_str(), MANIFEST, error.what());
}

void Session::read_cache(JsonValue cache) {
  int64_t layer = 0;
  cache["layers"].each([&](JsonValue one) {
    one["buffers"].each([&](JsonValue described) {
      Buffer buffer;
      buffer.name = std::to_string(layer) + "." + std::string(described["name"].text());
      buffer.type = type_of(described["dtype"].text());
      buffer.in_place = described["in_place"].text() == "always" || described["in_place"].text() == "native";
      described["shape"].each([&](JsonValue size) {
        constexpr std::string_view TOKENS = "tokens";
        const std::string text(size.text());
        if (text == TOKENS) {
          buffer.sizes.push_back(GROWS);
        } else if (text.compare(0, TOKENS.size() + 1, "tokens%") == 0 && text.size() <= 16) {
          const Json ring(std::string_view(text).substr(TOKENS.size() + 1), "cache");
          buffer.sizes.push_back(ring.root().integer("a ring of the cache", 1, MOST_RING));
          buffer.is_ring = true;
        } else {
          buffer.sizes.push_back(size.integer("a dimension of the cache", 1, INT32_MAX));
        }
      });
      if (buffer.sizes.empty() || buffer.sizes.size() >= OrtValue::MOST_DIMENSIONS)
        throw Error("the cache %.60s has %zu dimensions", buffer.name.c_str(), buffer.sizes.size());
      if (std::count(buffer.sizes.begin(), buffer.sizes.end(), GROWS) > 1)
        throw Error("the cache %.60s grows in two dimensions", buffer.name.c_str());
      buffers_.push_back(std::move(buffer));
    });
    ++layer;
  });
  if (buffers_.empty()) throw Error("no layer has a cache, so the model would keep nothing of the past");
}

std::string Session::file(const std::string& name) const {
  const JsonValue entry = manifest_.root()["files"][name];
  if (entry.is_null()) return "";
  const std::string path = path_within(folder_, name);
  const size_t size = MappedFile(path).size();
  if (entry["bytes"].number(-1) != static_cast<double>(size))
    throw Error("%s: has %zu bytes, the manifest says %.0f; restore the file", path.c_str(), size, entry["bytes"].number(-1));
  return path;
}

OrtValue* Session::new_value(int type) {
  all_values_.push_back(std::make_unique<OrtValue>());
  all_values_.back()->type = type;
  return all_values_.back().get();
}

void* Session::allocate(size_t bytes) {
  allocated_.emplace_back(graph::allocate(bytes));
  return allocated_.back().get();
}

void Session::read_inputs(const OnnxGraph& graph) {
  auto inputs = graph.inputs;
  if (has_logits_from_) inputs.push_back({"logits_from", ort::INT64, {1}});  // an initializer in the file
  const std::map<std::string, int64_t> room = {{"input_ids", chunk_}, {"position_ids", chunk_}, {"attention_mask", context_}, {"logits_from", 1}};
  for (const auto& [name, type, shape] : inputs) {
    if (values_.count(name)) continue;
    constexpr std::string_view PAST = "past_key_values.";
    if (name.compare(0, PAST.size(), PAST) == 0) {
      const std::string_view past = std::string_view(name).substr(PAST.size());
      const auto buffer = std::find_if(buffers_.begin(), buffers_.end(), [&](const Buffer& one) { return one.name == past; });
      bool fits = buffer != buffers_.end() && buffer->type == type && buffer->sizes.size() + 1 == shape.size();
      for (size_t i = 1; fits && i < shape.size(); ++i) {
        const int64_t size = buffer->sizes[i - 1];
        fits = shape[i] == size || shape[i] == -1;
      }
      if (!fits) throw Error("diffbit.json describes another cache than %.100s", name.c_str());
      values_[name] = buffer->past = new_value(type);
      continue;
    }
    const auto size = room.find(name);
    const auto is_input = [&name = name](const OnnxTensor& one) { return one.name == name; };
    const bool is_default = std::any_of(graph.initializers.begin(), graph.initializers.end(), is_input);
    if (size == room.end() && is_default) continue;
    if (size == room.end() || type != ort::INT64) throw Error("this runtime has no input %.100s", name.c_str());
    auto* numbers = static_cast<int64_t*>(allocate(static_cast<size_t>(size->second) * sizeof(int64_t)));
    std::fill_n(numbers, size->second, int64_t{name == "attention_mask"});
    values_[name] = new_value(type);
    inputs_[name] = {values_[name], numbers};
  }
  for (const Buffer& buffer : buffers_)
    if (!buffer.past) throw Error("has no input past_key_values.%.60s", buffer.name.c_str());
  if (!inputs_.count("input_ids")) throw Error("has no input input_ids");
  has_logits_from_ = inputs_.count("logits_from") != 0;
}

void Session::read_weights(const OnnxGraph& graph, const std::string& folder) {
  for (const OnnxTensor& tensor : graph.initializers) {
    if (values_.count(tensor.name)) continue;  // the default of an input
    OrtValue* value = values_[tensor.name] = new_value(tensor.type);
    const auto bytes = static_cast<size_t>(tensor.bytes);
    void* data = nullptr;
    if (tensor.file.empty()) {
      data = allocate(bytes);
      std::memcpy(data, tensor.data.data(), bytes);
    } else {
      auto& mapped = files_[tensor.file];
      if (!mapped) {
        const std::string path = file(folder + tensor.file);
        if (path.empty()) throw Error("takes tensors from \"%.100s\", which %s does not list; export the model again", tensor.file.c_str(), MANIFEST);
        mapped = std::make_unique<MappedFile>(path);
      }
      if (tensor.offset > mapped->size() || bytes > mapped->size() - tensor.offset)
        throw Error("%.100s ends before its weights do; restore the file", tensor.file.c_str());
      data = const_cast<uint8_t*>(mapped->data() + tensor.offset);  // no node writes to it: nothing computes its name
      if (tensor.offset % ALIGNMENT) {
        data = allocate(bytes);
        std::memcpy(data, mapped->data() + tensor.offset, bytes);
      }
    }
    place(*value, tensor.shape, data);
  }
}

/// Creates the nodes, and memory for their outputs: one piece for several of which no two are needed at once.
void Session::plan(const OnnxGraph& graph) {
  std::map<std::string, std::string> owner;  // view -> the value whose memory it is
  std::map<std::string, size_t> last;        // the last node that reads a value
  for (const std::string& name : graph.outputs) last[name] = SIZE_MAX;
  const auto root = [&](const std::string& name) {
    const auto at = owner.find(name);
    return at == owner.end() ? name : at->second;
  };
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const OnnxNode& read = graph.nodes[i];
    nodes_.push_back(std::make_unique<OwnedNode>());
    Node& node = *nodes_.back();
    node.domain = read.domain == "ai.onnx" ? "" : read.domain;
    node.op = read.op;
    for (const OnnxAttribute& attribute : read.attributes) {
      if (attribute.kind == OnnxAttribute::INTEGER) node.integers[attribute.name] = attribute.integer;
      if (attribute.kind == OnnxAttribute::NUMBER) node.numbers[attribute.name] = attribute.number;
      if (attribute.kind == OnnxAttribute::LIST) node.lists[attribute.name] = attribute.list;
    }
    const Known found = known(node);
    if (found == Known::NO)
      throw Error("this runtime has no operator %.40s%s%.60s", node.domain.c_str(), node.domain.empty() ? "" : ".", node.op.c_str());
    if (found == Known::VIEW) {
      if (read.inputs.empty() || read.outputs.size() != 1) throw Error("%.60s has no input or output", node.op.c_str());
      owner[read.outputs[0]] = root(read.inputs[0]);
    }
    for (const auto* names : {&read.inputs, &read.outputs})
      for (const std::string& name : *names) {
        size_t& reader = last[root(name)];
        reader = std::max({reader, i, last[name]});
      }
  }
  const Pool::Use use(pool_);
  std::set<std::string> constants;  // values that no input changes: nodes that compute them run once, here
  for (const OnnxTensor& tensor : graph.initializers)
    if (!inputs_.count(tensor.name)) constants.insert(tensor.name);
  std::set<std::string> needed;  // values that nodes read later
  std::vector<std::unique_ptr<OwnedNode>> kept;
  std::vector<Memory*> free;
  std::map<std::string, Memory*> used;
  std::map<std::string, Buffer*> present;
  for (Buffer& buffer : buffers_) present["present." + buffer.name] = &buffer;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const OnnxNode& read = graph.nodes[i];
    Node& node = *nodes_[i];
    bool is_constant = node.domain != "diffbit" && !read.inputs.empty();
    for (const std::string& name : read.inputs) is_constant = is_constant && constants.count(name);
    for (const std::string& name : read.outputs) is_constant = is_constant && last[root(name)] != SIZE_MAX && !present.count(name);
    for (const std::string& name : read.inputs) {
      const auto at = values_.find(name);
      if (at == values_.end() && !name.empty()) throw Error("nothing computes %.100s", name.c_str());
      node.inputs.push_back(name.empty() ? nullptr : at->second);
    }
    for (const std::string& name : read.outputs) {
      if (name.empty()) {
        node.outputs.push_back(nullptr);
        continue;
      }
      if (values_.count(name)) throw Error("%.100s is computed twice", name.c_str());
      const auto buffer = present.find(name);
      if (buffer != present.end() && buffer->second->in_place && node.domain == "diffbit") {
        node.outputs.push_back(values_[name] = buffer->second->past);
        continue;
      }
      OrtValue* value = values_[name] = new_value(0);
      if (buffer != present.end()) buffer->second->present = value;
      if (!owner.count(name)) {
        if (free.empty() || is_constant) {
          memories_.push_back(std::make_unique<OwnedMemory>());
          free.push_back(memories_.back().get());
        }
        used[name] = value->memory = free.back();
        free.pop_back();
      }
      node.outputs.push_back(value);
    }
    if (!create(node)) throw Error("this runtime has no operator %.60s", node.op.c_str());
    if (is_constant) {
      node.run(node);
      constants.insert(read.outputs.begin(), read.outputs.end());
    } else {
      kept.push_back(std::move(nodes_[i]));
      for (const std::string& name : read.inputs) needed.insert(root(name));
    }
    for (auto at = used.begin(); at != used.end();) {
      if (last[at->first] > i) {
        ++at;
        continue;
      }
      if (constants.count(at->first)) {
        if (!needed.count(at->first)) {
          graph::release(at->second->data);
          static_cast<Memory&>(*at->second) = {};
        }
      } else {
        free.push_back(at->second);
      }
      at = used.erase(at);
    }
  }
  nodes_ = std::move(kept);
  for (const Buffer& buffer : buffers_) {
    const auto at = values_.find("present." + buffer.name);
    if (at == values_.end() || at->second->type != buffer.type) throw Error("has no output present.%.60s", buffer.name.c_str());
  }
  const auto logits = values_.find("logits");
  if (logits == values_.end() || logits->second->type != ort::FLOAT32 || inputs_.count("logits"))
    throw Error("has no output logits of float32");
  logits_ = logits->second;
}

/// Makes room for `tokens` in the cache; what it holds moves.
void Session::reserve(int64_t tokens) {
  if (tokens <= capacity_) return;
  const int64_t most = (context_ + BLOCK - 1) / BLOCK * BLOCK;
  int64_t capacity = capacity_ ? capacity_ : std::min(ROOM, most);
  while (capacity < tokens) capacity = std::min(2 * capacity, most);
  for (Buffer& buffer : buffers_) {
    const auto axis = std::find(buffer.sizes.begin(), buffer.sizes.end(), GROWS) - buffer.sizes.begin();
    const bool grows = axis < static_cast<int64_t>(buffer.sizes.size());
    if (buffer.data && !(grows && buffer.in_place)) continue;
    std::vector<int64_t> shape = {1};
    for (const int64_t size : buffer.sizes) shape.push_back(size != GROWS ? size : buffer.in_place ? capacity : 0);
    const size_t bytes = bytes_of(buffer.type, shape);
    Zeroed data(bytes);
    if (buffer.data) {
      const std::vector<int64_t> outer(shape.begin(), shape.begin() + 1 + axis);
      int64_t rows = 1;
      for (const int64_t size : outer) rows *= size;
      const size_t from = bytes_of(buffer.type, buffer.shape) / static_cast<size_t>(rows), to = bytes / static_cast<size_t>(rows);
      for (size_t row = 0; row < static_cast<size_t>(rows); ++row)
        std::memcpy(static_cast<char*>(data.get()) + row * to, static_cast<char*>(buffer.data.get()) + row * from, from);
    }
    buffer.data = std::move(data);
    buffer.shape = shape;
    place(*buffer.past, shape, buffer.data.get());
  }
  capacity_ = capacity;
}

void Session::reset() {
  cached_.clear();
  for (Buffer& buffer : buffers_) {
    if (!buffer.data) continue;
    const bool grows = std::count(buffer.sizes.begin(), buffer.sizes.end(), GROWS) != 0;
    if (!grows) std::memset(buffer.data.get(), 0, bytes_of(buffer.type, buffer.shape));  // a state is read as a whole
    if (grows && !buffer.in_place)
      for (size_t i = 0; i < buffer.sizes.size(); ++i)
        if (buffer.sizes[i] == GROWS) buffer.shape[i + 1] = buffer.past->shape[i + 1] = 0;
  }
}

size_t Session::reuse(const int32_t* ids, size_t count) {
  size_t same = 0;
  while (same < cached_.size() && same + 1 < count && cached_[same] == ids[same]) ++same;
  if (same == cached_.size()) return same;
  const bool can_truncate = std::all_of(buffers_.begin(), buffers_.end(), [](const Buffer& buffer) {
    return buffer.in_place && std::count(buffer.sizes.begin(), buffer.sizes.end(), GROWS);  // no blocks, rings or states
  });
  if (can_truncate) {
    cached_.resize(same);
    return same;
  }
  reset();
  return 0;
}

const float* Session::append(const int32_t* ids, size_t count) {
  if (!count) throw Error("there is no token to append");
  for (size_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= vocabulary_)
      throw Error("token id %d is outside the vocabulary of %lld tokens; the tokenizer must be the model's own", ids[i], number(vocabulary_));
  if (count > static_cast<size_t>(context_) - cached_.size())
    throw Error("the context holds %lld tokens, but %zu are wanted (%zu cached and %zu new); shorten the prompt",
                number(context_), cached_.size() + count, cached_.size(), count);
  const Pool::Use use(pool_);
  try {
    reserve(static_cast<int64_t>(cached_.size() + count));
    for (size_t at = 0; at < count; at += static_cast<size_t>(chunk_))
      run(ids + at, std::min<int64_t>(chunk_, static_cast<int64_t>(count - at)));
  } catch (...) {
    reset();  // what the cache holds is unknown
    throw;
  }
  return logits_->as<float>() + logits_->size() - vocabulary_;
}

void Session::run(const int32_t* ids, int64_t count) {
  const auto past = static_cast<int64_t>(cached_.size());
  const auto set = [&](const char* name, const std::vector<int64_t>& shape, const auto& number_of) {
    const auto input = inputs_.find(name);
    if (input == inputs_.end()) return;
    place(*input->second.value, shape, input->second.numbers);
    for (int64_t i = 0; i < shape.back(); ++i) input->second.numbers[i] = number_of(i);
  };
  set("input_ids", {1, count}, [&](int64_t i) { return int64_t{ids[i]}; });
  set("position_ids", {1, count}, [&](int64_t i) { return past + i; });
  set("attention_mask", {1, past + count}, [](int64_t) { return int64_t{1}; });
  set("logits_from", {1}, [&](int64_t) { return count - 1; });
  for (const auto& node : nodes_) {
    if (cancelled.load(std::memory_order_relaxed)) throw Cancelled();
    node->run(*node);
  }
  const int64_t rows = logits_->rank == 3 ? logits_->shape[1] : 0;
  if (!logits_->data || logits_->rank != 3 || logits_->shape[0] != 1 || logits_->shape[2] != vocabulary_ || (rows != 1 && rows != count))
    throw Error("the graph computes logits of another shape");
  std::vector<Zeroed> replaced;  // what the graph computes for one buffer may be in the memory of another
  for (Buffer& buffer : buffers_) {
    if (!buffer.present) continue;
    const OrtValue& present = *buffer.present;
    const std::vector<int64_t> shape(present.shape, present.shape + present.rank);
    if (shape.size() != buffer.shape.size()) throw Error("the graph computes a cache %.60s of another shape", buffer.name.c_str());
    for (size_t i = 0; i < shape.size(); ++i)
      if (shape[i] != (i && buffer.sizes[i - 1] == GROWS ? past + count : buffer.shape[i]))
        throw Error("the graph computes a cache %.60s of another shape", buffer.name.c_str());
    const size_t bytes = bytes_of(buffer.type, shape);
    if (shape != buffer.shape) {
      replaced.push_back(std::exchange(buffer.data, Zeroed(bytes)));
      buffer.shape = shape;
      place(*buffer.past, shape, buffer.data.get());
    }
    std::memmove(buffer.data.get(), present.data, bytes);
  }
  cached_.insert(cached_.end(), ids, ids + count);
}

}  // namespace runtime
}  // namespace diffbit
