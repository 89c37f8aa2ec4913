// Wire format of Protocol Buffers: a message is a sequence of fields. Each is a varint (field number << 3 | kind) and a value: a
// varint (kind 0), 8 bytes (1), a varint length and as many bytes (2: text, bytes, a message), or 4 bytes (5).
#include "onnx.h"

#include <cstring>

#include "../graph/graph.h"
#include "../ort/op.h"

namespace diffbit::runtime {
namespace {

enum Kind { VARINT = 0, EIGHT = 1, BYTES = 2, FOUR = 5 };

/// A reader of the fields of a message.
class Fields {
 public:
  explicit Fields(std::string_view bytes) : rest_(bytes) {}
  int number = 0;
  Kind kind = VARINT;
  uint64_t value = 0;      // of VARINT, EIGHT and FOUR
  std::string_view bytes;  // of BYTES

  bool next() {
    if (rest_.empty()) return false;
    const uint64_t key = varint();
    if (key >> 3 > INT32_MAX) throw Error("a field has no number");
    number = static_cast<int>(key >> 3);
    kind = static_cast<Kind>(key & 7);
    value = 0;
    bytes = {};
    if (kind == VARINT) {
      value = varint();
    } else if (kind == BYTES) {
      bytes = take(varint());
    } else if (kind == EIGHT || kind == FOUR) {
      const std::string_view fixed = take(kind == EIGHT ? 8 : 4);
      std::memcpy(&value, fixed.data(), fixed.size());
    } else {
      throw Error("a field is of an unknown kind");
    }
    return true;
  }
  /// Calls add with a number of this field: repeated numbers come one by one, or packed.
  template <class Add>
  void each(const Add& add) const {
    if (kind == VARINT) return add(static_cast<int64_t>(value));
    Fields packed(bytes);
    while (!packed.rest_.empty()) add(static_cast<int64_t>(packed.varint()));
  }
  std::string text() const { return std::string(bytes); }

 private:
  uint64_t varint() {
    uint64_t result = 0;
    for (int shift = 0; shift < 70; shift += 7) {
      if (rest_.empty()) break;
      const auto byte = static_cast<uint8_t>(rest_[0]);
      rest_.remove_prefix(1);
      if (shift < 64) result |= static_cast<uint64_t>(byte & 127) << shift;
      if (byte < 128) return result;
    }
    throw Error("a number has no end");
  }
  std::string_view take(uint64_t size) {
    if (size > rest_.size()) throw Error("a field ends beyond the file");
    const std::string_view taken = rest_.substr(0, static_cast<size_t>(size));
    rest_.remove_prefix(static_cast<size_t>(size));
    return taken;
  }
  std::string_view rest_;
};

uint64_t whole(const std::string& text, const std::string& name) {
  uint64_t value = 0;
  for (const char c : text)
    if (c < '0' || c > '9' || __builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, c - '0', &value))
      throw Error("%.100s has the offset or length %.40s", name.c_str(), text.c_str());
  return value;
}

OnnxTensor tensor(std::string_view bytes) {
  OnnxTensor result;
  std::string length;
  bool is_external = false;
  const auto append = [&](const auto& number) { result.data.append(reinterpret_cast<const char*>(&number), sizeof number); };
  for (Fields field(bytes); field.next();) switch (field.number) {
      case 1: field.each([&](int64_t size) { result.shape.push_back(size); }); break;
      case 2: result.type = static_cast<int>(field.value); break;
      case 4: case 9: result.data = field.text(); break;
      case 7: field.each(append); break;
      case 8: result.name = field.text(); break;
      case 13: {
        std::string key, value;
        for (Fields entry(field.bytes); entry.next();) {
          if (entry.number == 1) key = entry.text();
          if (entry.number == 2) value = entry.text();
        }
        if (key == "location") result.file = value, is_external = true;
        if (key == "offset") result.offset = whole(value, result.name);
        if (key == "length") length = value;
        break;
      }
      default: break;
    }
  if (result.shape.size() > static_cast<size_t>(OrtValue::MOST_DIMENSIONS))
    throw Error("%.100s has %zu dimensions", result.name.c_str(), result.shape.size());
  result.bytes = graph::tensor_bytes(result.type, result.shape.data(), static_cast<int>(result.shape.size()), graph::MOST_STORED);
  if (result.bytes < 0) throw Error("%.100s is too large", result.name.c_str());
  const bool has_length = is_external ? length.empty() || whole(length, result.name) == static_cast<uint64_t>(result.bytes)
                                      : static_cast<int64_t>(result.data.size()) == result.bytes;
  if (!has_length) throw Error("%.100s has another number of bytes than its shape", result.name.c_str());
  if (is_external == result.file.empty()) throw Error("%.100s is in a file without a name", result.name.c_str());
  return result;
}

OnnxInput value_info(std::string_view bytes) {
  OnnxInput result;
  for (Fields field(bytes); field.next();) {
    if (field.number == 1) result.name = field.text();
    if (field.number != 2) continue;
    for (Fields type(field.bytes); type.next();) {
      if (type.number != 1) continue;
      for (Fields tensor_type(type.bytes); tensor_type.next();) {
        if (tensor_type.number == 1) result.type = static_cast<int>(tensor_type.value);
        if (tensor_type.number != 2) continue;
        for (Fields dimension(tensor_type.bytes); dimension.next();) {
          result.shape.push_back(-1);
          for (Fields size(dimension.bytes); size.next();)
            if (size.number == 1) result.shape.back() = static_cast<int64_t>(size.value);
        }
      }
    }
  }
  return result;
}

OnnxAttribute attribute(std::string_view bytes) {
  OnnxAttribute result;
  for (Fields field(bytes); field.next();) switch (field.number) {
      case 1: result.name = field.text(); break;
      case 2: {
        const auto bits = static_cast<uint32_t>(field.value);
        std::memcpy(&result.number, &bits, 4);
        result.kind = OnnxAttribute::NUMBER;
        break;
      }
      case 3:
        result.integer = static_cast<int64_t>(field.value);
        result.kind = OnnxAttribute::INTEGER;
        break;
      case 8:
        field.each([&](int64_t item) { result.list.push_back(item); });
        result.kind = OnnxAttribute::LIST;
        break;
      default: break;
    }
  return result;
}

OnnxNode node(std::string_view bytes) {
  OnnxNode result;
  for (Fields field(bytes); field.next();) switch (field.number) {
      case 1: result.inputs.push_back(field.text()); break;
      case 2: result.outputs.push_back(field.text()); break;
      case 4: result.op = field.text(); break;
      case 5: result.attributes.push_back(attribute(field.bytes)); break;
      case 7: result.domain = field.text(); break;
      default: break;
    }
  return result;
}

}  // namespace

OnnxGraph read_onnx(std::string_view bytes, const std::string& file) try {
  OnnxGraph result;
  for (Fields model(bytes); model.next();) {
    if (model.number != 7) continue;
    for (Fields part(model.bytes); part.next();) switch (part.number) {
        case 1: result.nodes.push_back(node(part.bytes)); break;
        case 5: result.initializers.push_back(tensor(part.bytes)); break;
        case 11: result.inputs.push_back(value_info(part.bytes)); break;
        case 12: result.outputs.push_back(value_info(part.bytes).name); break;
        default: break;
      }
  }
  return result;
} catch (const Error& error) {
  throw Error("%s: is damaged: %s; restore the file or export the model again", file.c_str(), error.what());
}

}  // namespace diffbit::runtime
