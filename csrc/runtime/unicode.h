// Properties of characters (generated/unicode.h has the tables), and the normalization form NFC.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace diffbit::runtime::unicode {

/// Returns the general category, one of Category in generated/unicode.h.
int category(uint32_t code);
/// Returns the bits of the categories that a name such as "Lu" or "L" stands for; 0: there is none.
uint32_t categories_of(std::string_view name);
bool is_space(uint32_t code);    // \s
bool is_numeric(uint32_t code);  // what the pre-tokenizer Digits splits off
/// Returns UTF-8 text in NFC (Unicode Standard Annex 15).
std::string nfc(std::string_view text);

}  // namespace diffbit::runtime::unicode
