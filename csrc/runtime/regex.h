// Regular expressions of pre-tokenizers: the part of Oniguruma's syntax that they use, over UTF-8, by backtracking. A pattern
// with anything else is refused.
//
//     characters, escapes \r \n \t \s \S \d \D \p{L} \P{N} ..., classes [^\s\p{L}], alternatives a|b, groups (?:a) and
//     (?i:a) of ASCII letters, lookahead (?=a) and (?!a), repetitions * + ? {2} {1,3} {1,} of a character (with + after
//     them: without backtracking), and ? of a group
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace diffbit::runtime {

class Regex {
 public:
  /// Throws Error, which names the pattern, if it has what is not known here.
  explicit Regex(std::string_view pattern);
  /// How many steps the matches in a text may take together: a second or so, and 1,000 for each byte.
  static uint64_t work_for(std::string_view text) { return 100'000'000 + 1000 * static_cast<uint64_t>(text.size()); }
  /// Returns the end of the match that begins at `at`; npos if there is none. Throws Error if there is no work left for it.
  size_t match(std::string_view text, size_t at, uint64_t& work) const { return run(text, at, 0, work); }

 private:
  friend struct RegexParser;
  /// Characters: those of a range, of a property, or not of it.
  struct Item {
    uint32_t first = 1, last = 0;  // a range
    uint32_t categories = 0;       // bits of unicode::Category
    bool spaces = false, negated = false;
  };
  struct Set {
    std::vector<Item> items;
    bool negated = false;
    bool ascii[128] = {};
    bool holds(uint32_t code) const { return code < 128 ? ascii[code] : contains(code); }
    bool contains(uint32_t code) const;
  };
  struct Step {
    enum Kind : uint8_t { REPEAT, FORK, JUMP, LOOK, END } kind;
    bool flag = false;       // REPEAT: without backtracking; LOOK: nothing may follow
    uint32_t set = 0;        // REPEAT
    uint32_t least = 0, most = 0;
    uint32_t target = 0;     // FORK: the second choice; JUMP; LOOK: the step after it, its own begin behind it
  };
  size_t run(std::string_view text, size_t at, uint32_t step, uint64_t& left) const;

  std::vector<Set> sets_;
  std::vector<Step> steps_;
};

}  // namespace diffbit::runtime
