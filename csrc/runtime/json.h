// A JSON reader (RFC 8259): strict, with limits, and fast enough for a tokenizer.json of ten megabytes.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace diffbit::runtime {

class Json;

/// A value of a document, which must outlive it. A value that is not there is a null.
class JsonValue {
 public:
  bool is_null() const;
  bool is_bool() const;
  bool is_number() const;
  bool is_string() const;
  bool is_array() const;
  bool is_object() const;
  bool truth(bool otherwise = false) const;       // of a bool
  double number(double otherwise = 0) const;      // of a number
  std::string_view text() const;                  // of a string, else empty
  uint32_t size() const;                          // items of an array, members of an object
  JsonValue operator[](std::string_view key) const;  // a member of an object; the last of equal keys

  /// Calls visit(item) for the items of an array, in order.
  template <class Visit>
  void each(const Visit& visit) const;
  /// Calls visit(key, value) for the members of an object, in order.
  template <class Visit>
  void members(const Visit& visit) const;

  /// Returns the whole number; throws Error with the name of what it is unless it is one of least ... most.
  int64_t integer(const char* name, int64_t least, int64_t most) const;

 private:
  friend class Json;
  JsonValue(const Json* json, uint32_t index) : json_(json), index_(index) {}
  const Json* json_;
  uint32_t index_;
};

/// A parsed document. Throws Error with the file's name for text that is not JSON.
class Json {
 public:
  Json(std::string_view text, const std::string& file);
  explicit Json() : Json("null", "") {}
  JsonValue root() const { return {this, 0}; }

 private:
  friend class JsonValue;
  enum Type : uint8_t { NUL, FALSE, TRUE, NUMBER, STRING, ARRAY, OBJECT };
  /// A value; the values inside it follow. A member is its key, then its value.
  struct Entry {
    Type type;
    uint32_t begin, size;  // of a string or number: where it is in text_; of others: the number of items
    uint32_t next;         // the entry after this value
  };
  struct Parser;
  std::string text_;  // with strings unescaped in place
  std::vector<Entry> entries_;
};

template <class Visit>
void JsonValue::each(const Visit& visit) const {
  if (!is_array()) return;
  const Json::Entry& self = json_->entries_[index_];
  for (uint32_t at = index_ + 1; at < self.next; at = json_->entries_[at].next) visit(JsonValue(json_, at));
}

template <class Visit>
void JsonValue::members(const Visit& visit) const {
  if (!is_object()) return;
  const Json::Entry& self = json_->entries_[index_];
  for (uint32_t at = index_ + 1; at < self.next; at = json_->entries_[at + 1].next)
    visit(JsonValue(json_, at).text(), JsonValue(json_, at + 1));
}

}  // namespace diffbit::runtime
