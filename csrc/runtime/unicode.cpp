#include "unicode.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "generated/unicode.h"
#include "utf8.h"

namespace diffbit::runtime::unicode {
namespace {

constexpr const char* NAMES[] = {"", "Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps", "Pe",
                                 "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Co"};

template <size_t N>
bool in_runs(const uint32_t (&runs)[N], uint32_t code) {
  const auto at = std::upper_bound(std::begin(runs), std::end(runs), code) - std::begin(runs);
  return at % 2 || (at && runs[at - 1] == code);
}

// Hangul syllables are composed by arithmetic (Unicode 3.12)
constexpr uint32_t SYLLABLES = 0xac00, LEADS = 0x1100, VOWELS = 0x1161, TAILS = 0x11a7;
constexpr uint32_t LEAD_COUNT = 19, VOWEL_COUNT = 21, TAIL_COUNT = 28, SYLLABLE_COUNT = LEAD_COUNT * VOWEL_COUNT * TAIL_COUNT;

uint32_t combining_class(uint32_t code) {
  if (code < COMBINING[0] >> 8) return 0;
  const auto at = std::lower_bound(std::begin(COMBINING), std::end(COMBINING), code << 8);
  return at != std::end(COMBINING) && *at >> 8 == code ? *at & 255 : 0;
}

void decompose(uint32_t code, std::vector<uint32_t>& to) {
  if (code - SYLLABLES < SYLLABLE_COUNT) {
    const uint32_t index = code - SYLLABLES;
    to.push_back(LEADS + index / (VOWEL_COUNT * TAIL_COUNT));
    to.push_back(VOWELS + index / TAIL_COUNT % VOWEL_COUNT);
    if (index % TAIL_COUNT) to.push_back(TAILS + index % TAIL_COUNT);
    return;
  }
  static const std::vector<uint32_t> places = [] {
    std::vector<uint32_t> found;
    for (uint32_t at = 0; at < std::size(DECOMPOSITIONS); at += 1 + (DECOMPOSITIONS[at] >> 24)) found.push_back(at);
    return found;
  }();
  const auto at = std::lower_bound(places.begin(), places.end(), code,
                                   [](uint32_t place, uint32_t wanted) { return (DECOMPOSITIONS[place] & 0xffffff) < wanted; });
  if (at == places.end() || (DECOMPOSITIONS[*at] & 0xffffff) != code) return to.push_back(code);
  to.insert(to.end(), DECOMPOSITIONS + *at + 1, DECOMPOSITIONS + *at + 1 + (DECOMPOSITIONS[*at] >> 24));
}

/// Returns the character that two compose to; 0: none.
uint32_t composed(uint32_t first, uint32_t second) {
  if (first - LEADS < LEAD_COUNT && second - VOWELS < VOWEL_COUNT)
    return SYLLABLES + ((first - LEADS) * VOWEL_COUNT + second - VOWELS) * TAIL_COUNT;
  if (first - SYLLABLES < SYLLABLE_COUNT && (first - SYLLABLES) % TAIL_COUNT == 0 && second - TAILS - 1 < TAIL_COUNT - 1)
    return first + second - TAILS;
  size_t low = 0, high = std::size(COMPOSITIONS) / 3;
  while (low < high) {
    const size_t middle = (low + high) / 2;
    const uint32_t* pair = COMPOSITIONS + 3 * middle;
    if (pair[0] == first && pair[1] == second) return pair[2];
    if (pair[0] < first || (pair[0] == first && pair[1] < second)) low = middle + 1;
    else high = middle;
  }
  return 0;
}

}  // namespace

int category(uint32_t code) {
  const auto at = std::upper_bound(std::begin(CATEGORY_STARTS), std::end(CATEGORY_STARTS), code << 8 | 255);
  return static_cast<int>(at[-1] & 255);
}

uint32_t categories_of(std::string_view name) {
  uint32_t bits = 0;
  for (size_t i = 1; i < std::size(NAMES); ++i)
    if (name == NAMES[i] || (name.size() == 1 && name[0] == NAMES[i][0] && name[0] != 'C')) bits |= 1u << i;
  return bits;
}

bool is_space(uint32_t code) { return in_runs(SPACES, code); }
bool is_numeric(uint32_t code) { return in_runs(NUMERIC, code); }

std::string nfc(std::string_view text) {
  constexpr uint32_t FIRST = 0x300;  // all before are composed, and have no class
  bool is_plain = true;
  for (size_t at = 0; at < text.size() && is_plain;) is_plain = next_utf8(text, at) < FIRST;
  if (is_plain) return std::string(text);
  std::vector<uint32_t> codes;
  for (size_t at = 0; at < text.size();) decompose(next_utf8(text, at), codes);
  for (size_t i = 0; i < codes.size();) {  // marks in the order of their classes
    if (!combining_class(codes[i])) {
      ++i;
      continue;
    }
    size_t end = i;
    while (end < codes.size() && combining_class(codes[end])) ++end;
    std::stable_sort(codes.begin() + static_cast<std::ptrdiff_t>(i), codes.begin() + static_cast<std::ptrdiff_t>(end),
                     [](uint32_t a, uint32_t b) { return combining_class(a) < combining_class(b); });
    i = end;
  }
  std::vector<uint32_t> result;
  size_t starter = SIZE_MAX;  // the last character of class 0
  uint32_t last_class = 0;    // of what is between it and the next
  for (const uint32_t code : codes) {
    const uint32_t of_code = combining_class(code);
    const bool is_blocked = starter == SIZE_MAX || (starter + 1 != result.size() && (last_class >= of_code));
    if (!is_blocked) {
      if (const uint32_t both = composed(result[starter], code)) {
        result[starter] = both;
        continue;
      }
    }
    if (!of_code) starter = result.size();
    last_class = of_code;
    result.push_back(code);
  }
  std::string composed_text;
  for (const uint32_t code : result) append_utf8(composed_text, code);
  return composed_text;
}

}  // namespace diffbit::runtime::unicode
