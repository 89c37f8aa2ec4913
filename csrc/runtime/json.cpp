#include "json.h"

#include <clocale>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "../ort/op.h"
#include "utf8.h"

namespace diffbit::runtime {
namespace {

constexpr int MOST_DEPTH = 64;
constexpr size_t MOST_BYTES = 1u << 30;

}  // namespace

struct Json::Parser {
  Json& json;
  const std::string& file;
  char* at;
  char* const end;
  std::vector<Entry>& entries = json.entries_;

  [[noreturn]] void fail(const char* what) const {
    throw Error("%s: is not JSON: %s at byte %lld; restore the file or export the model again", file.c_str(), what,
                diffbit::number(at - json.text_.data()));
  }
  uint32_t offset(const char* pointer) const { return static_cast<uint32_t>(pointer - json.text_.data()); }
  void blanks() {
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r')) ++at;
  }
  bool take(char wanted) {
    if (at == end || *at != wanted) return false;
    ++at;
    return true;
  }

  void value(int depth) {
    if (depth > MOST_DEPTH) fail("it is nested too deeply");
    blanks();
    if (at == end) fail("it ends too early");
    const size_t index = entries.size();
    switch (*at) {
      case '"':
        return string();
      case '[':
      case '{': {
        const bool is_object = *at++ == '{';
        const char close = is_object ? '}' : ']';
        entries.push_back({is_object ? OBJECT : ARRAY, 0, 0, 0});
        blanks();
        if (!take(close))
          for (;;) {
            if (is_object) {
              blanks();
              if (at == end || *at != '"') fail("a key is missing");
              string();
              blanks();
              if (!take(':')) fail("a colon is missing");
            }
            value(depth + 1);
            ++entries[index].size;
            blanks();
            if (take(close)) break;
            if (!take(',')) fail("a comma is missing");
          }
        entries[index].next = static_cast<uint32_t>(entries.size());
        return;
      }
      case 't': return word("true", TRUE);
      case 'f': return word("false", FALSE);
      case 'n': return word("null", NUL);
      default: return number();
    }
  }

  void add(Type type, uint32_t begin, uint32_t size) {
    entries.push_back({type, begin, size, static_cast<uint32_t>(entries.size() + 1)});
  }
  void word(const char* text, Type type) {
    const size_t size = std::strlen(text);
    if (static_cast<size_t>(end - at) < size || std::memcmp(at, text, size)) fail("a value is unknown");
    at += size;
    add(type, 0, 0);
  }
  bool digits() {
    const char* begin = at;
    while (at < end && *at >= '0' && *at <= '9') ++at;
    return at > begin;
  }
  void number() {
    char* begin = at;
    take('-');
    if (!take('0') && !digits()) fail("a value is unknown");
    if (take('.') && !digits()) fail("a number has no digits");
    if (at < end && (*at == 'e' || *at == 'E')) {
      ++at;
      if (at < end && (*at == '+' || *at == '-')) ++at;
      if (!digits()) fail("a number has no digits");
    }
    add(NUMBER, offset(begin), static_cast<uint32_t>(at - begin));
  }

  unsigned hexadecimal() {
    if (end - at < 4) fail("a string has no end");
    unsigned code = 0;
    for (int i = 0; i < 4; ++i, ++at) {
      const char c = *at;
      if (c >= '0' && c <= '9') code = code * 16 + static_cast<unsigned>(c - '0');
      else if ((c | 32) >= 'a' && (c | 32) <= 'f') code = code * 16 + static_cast<unsigned>((c | 32) - 'a') + 10;
      else fail("an escape is unknown");
    }
    return code;
  }
  void string() {
    char* const begin = ++at;
    while (at < end && *at != '"' && *at != '\\' && static_cast<unsigned char>(*at) >= 32) ++at;
    char* to = at;
    while (at < end && *at != '"') {
      if (static_cast<unsigned char>(*at) < 32) fail("a string has a control character");
      if (*at != '\\') {
        *to++ = *at++;
        continue;
      }
      if (++at == end) break;
      const char* const known = "\"\\/bfnrt";
      const char* const found = *at ? std::strchr(known, *at) : nullptr;
      if (found) {
        *to++ = "\"\\/\b\f\n\r\t"[found - known];
        ++at;
        continue;
      }
      if (*at++ != 'u') fail("an escape is unknown");
      unsigned code = hexadecimal();
      if (code >= 0xd800 && code < 0xdc00) {
        if (end - at < 2 || at[0] != '\\' || at[1] != 'u') fail("a surrogate is alone");
        at += 2;
        const unsigned low = hexadecimal();
        if (low < 0xdc00 || low > 0xdfff) fail("a surrogate is alone");
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
      } else if (code >= 0xdc00 && code < 0xe000) {
        fail("a surrogate is alone");
      }
      to = put_utf8(to, code);
    }
    if (at == end) fail("a string has no end");
    ++at;
    add(STRING, offset(begin), static_cast<uint32_t>(to - begin));
  }
};

Json::Json(std::string_view text, const std::string& file) {
  if (text.size() > MOST_BYTES) throw Error("%s: is too large", file.c_str());
  if (!is_utf8(text)) throw Error("%s: is not UTF-8; restore the file or export the model again", file.c_str());
  text_ = text;
  entries_.reserve(text.size() / 12);
  Parser parser{*this, file, text_.data(), text_.data() + text_.size()};
  parser.value(0);
  parser.blanks();
  if (parser.at != parser.end) parser.fail("something follows its end");
}

bool JsonValue::is_null() const { return json_->entries_[index_].type == Json::NUL; }
bool JsonValue::is_number() const { return json_->entries_[index_].type == Json::NUMBER; }
bool JsonValue::is_string() const { return json_->entries_[index_].type == Json::STRING; }
bool JsonValue::is_array() const { return json_->entries_[index_].type == Json::ARRAY; }
bool JsonValue::is_object() const { return json_->entries_[index_].type == Json::OBJECT; }
bool JsonValue::is_bool() const { return json_->entries_[index_].type == Json::TRUE || json_->entries_[index_].type == Json::FALSE; }
bool JsonValue::truth(bool otherwise) const { return is_bool() ? json_->entries_[index_].type == Json::TRUE : otherwise; }

double JsonValue::number(double otherwise) const {
  if (!is_number()) return otherwise;
  const Json::Entry& entry = json_->entries_[index_];
  std::string digits(json_->text_, entry.begin, entry.size);
  if (const size_t point = digits.find('.'); point != std::string::npos)
    digits.replace(point, 1, std::localeconv()->decimal_point);  // strtod reads numbers as the program's locale writes them
  return std::strtod(digits.c_str(), nullptr);
}

std::string_view JsonValue::text() const {
  if (!is_string()) return {};
  const Json::Entry& entry = json_->entries_[index_];
  return std::string_view(json_->text_).substr(entry.begin, entry.size);
}

uint32_t JsonValue::size() const { return is_array() || is_object() ? json_->entries_[index_].size : 0; }

JsonValue JsonValue::operator[](std::string_view key) const {
  static const Json nothing;
  JsonValue found(&nothing, 0);
  members([&](std::string_view name, JsonValue value) {
    if (name == key) found = value;
  });
  return found;
}

int64_t JsonValue::integer(const char* name, int64_t least, int64_t most) const {
  const double value = is_number() ? number() : NAN;
  if (!(value >= static_cast<double>(least) && value <= static_cast<double>(most)) || value != std::floor(value))
    throw Error("%s is not a whole number from %lld to %lld", name, diffbit::number(least), diffbit::number(most));
  return static_cast<int64_t>(value);
}

}  // namespace diffbit::runtime
