// Characters in UTF-8.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace diffbit::runtime {

/// Writes a character; returns the end.
inline char* put_utf8(char* to, uint32_t code) {
  if (code < 0x80) {
    *to++ = static_cast<char>(code);
    return to;
  }
  const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  static constexpr uint8_t FIRST[] = {0, 0xc0, 0xe0, 0xf0};
  *to++ = static_cast<char>(FIRST[more] | code >> 6 * more);
  for (int i = more - 1; i >= 0; --i) *to++ = static_cast<char>(0x80 | (code >> 6 * i & 63));
  return to;
}
inline void append_utf8(std::string& to, uint32_t code) {
  char bytes[4];
  to.append(bytes, static_cast<size_t>(put_utf8(bytes, code) - bytes));
}

/// Returns the number of bytes of the character at `at`; 0 if there is none in UTF-8 (RFC 3629). bad: then how many bytes one
/// U+FFFD stands for, as Unicode recommends (3.9, "maximal subparts").
inline int utf8_length(std::string_view text, size_t at, int* bad = nullptr) {
  const auto byte = [&](size_t i) { return at + i < text.size() ? static_cast<uint8_t>(text[at + i]) : 0; };
  const uint8_t first = static_cast<uint8_t>(text[at]);
  if (first < 0x80) return 1;
  int size = first >= 0xc2 && first < 0xe0 ? 2 : first >= 0xe0 && first < 0xf0 ? 3 : first >= 0xf0 && first < 0xf5 ? 4 : 0;
  const uint8_t low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
  const uint8_t high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
  for (int i = 1; i < size; ++i) {
    const uint8_t next = byte(static_cast<size_t>(i));
    if (next >= (i == 1 ? low : 0x80) && next <= (i == 1 ? high : 0xbf)) continue;
    if (bad) *bad = i;
    return 0;
  }
  if (!size && bad) *bad = 1;
  return size;
}

/// Returns the character at `at` of UTF-8 text, and moves `at` behind it.
inline uint32_t next_utf8(std::string_view text, size_t& at) {
  const uint8_t first = static_cast<uint8_t>(text[at]);
  const size_t size = first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  uint32_t code = size == 1 ? first : first & (0x7f >> size);
  for (size_t i = 1; i < size; ++i) code = code << 6 | (static_cast<uint8_t>(text[at + i]) & 63);
  at += size;
  return code;
}

/// Returns how many bytes the last character of UTF-8 text has.
inline size_t last_utf8_length(std::string_view text) {
  size_t size = 1;
  while (size < text.size() && (static_cast<uint8_t>(text[text.size() - size]) & 0xc0) == 0x80) ++size;
  return size;
}
inline uint32_t last_utf8(std::string_view text) {
  size_t at = text.size() - last_utf8_length(text);
  return next_utf8(text, at);
}

inline bool is_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    if (static_cast<uint8_t>(text[at]) < 0x80) {
      ++at;
      continue;
    }
    const int size = utf8_length(text, at);
    if (!size) return false;
    at += static_cast<size_t>(size);
  }
  return true;
}

/// Returns the bytes as UTF-8: what is no character becomes U+FFFD.
inline std::string lossy_utf8(std::string_view bytes) {
  std::string text;
  for (size_t at = 0; at < bytes.size();) {
    int bad = 0;
    const int size = utf8_length(bytes, at, &bad);
    if (size)
      text.append(bytes.substr(at, static_cast<size_t>(size)));
    else
      text.append("\xef\xbf\xbd");
    at += static_cast<size_t>(size ? size : bad);
  }
  return text;
}

}  // namespace diffbit::runtime
