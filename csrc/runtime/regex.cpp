#include "regex.h"

#include <algorithm>

#include "../ort/op.h"
#include "generated/unicode.h"
#include "unicode.h"
#include "utf8.h"

namespace diffbit::runtime {
namespace {

constexpr uint32_t MANY = UINT32_MAX;  // repetitions
constexpr int MOST_DEPTH = 16;         // of groups
constexpr size_t MOST_STEPS = 4096, MOST_PATTERN = 4096;

}  // namespace

bool Regex::Set::contains(uint32_t code) const {
  bool found = false;
  for (const Item& item : items) {
    const bool is_in = (code >= item.first && code <= item.last) || (item.categories >> unicode::category(code) & 1) ||
                       (item.spaces && unicode::is_space(code));
    if (is_in != item.negated) {
      found = true;
      break;
    }
  }
  return found != negated;
}

struct RegexParser {
  using Step = Regex::Step;
  using Set = Regex::Set;
  using Item = Regex::Item;
  Regex& regex;
  std::string_view pattern;
  size_t at = 0;
  bool folds = false;  // case

  [[noreturn]] void refuse() const {
    throw Error("the pattern of a pre-tokenizer is not known here: %.300s (at character %zu)", std::string(pattern).c_str(), at);
  }
  bool take(std::string_view text) {
    if (pattern.compare(at, text.size(), text)) return false;
    at += text.size();
    return true;
  }
  uint32_t add(Step step) {
    if (regex.steps_.size() >= MOST_STEPS) refuse();
    regex.steps_.push_back(step);
    return static_cast<uint32_t>(regex.steps_.size() - 1);
  }
  uint32_t here() const { return static_cast<uint32_t>(regex.steps_.size()); }

  void alternatives(int depth) {
    if (depth > MOST_DEPTH) refuse();
    std::vector<uint32_t> jumps;
    for (;;) {
      // a fork before this alternative is of use only if another follows
      const size_t begin = regex.steps_.size();
      sequence(depth);
      if (at >= pattern.size() || pattern[at] != '|') break;
      ++at;
      Step fork{Step::FORK};
      regex.steps_.insert(regex.steps_.begin() + static_cast<std::ptrdiff_t>(begin), fork);
      for (size_t i = begin + 1; i < regex.steps_.size(); ++i) {
        Step& moved = regex.steps_[i];
        if (moved.kind == Step::FORK || moved.kind == Step::JUMP || moved.kind == Step::LOOK) ++moved.target;
      }
      jumps.push_back(add({Step::JUMP}));
      regex.steps_[begin].target = here();
    }
    for (const uint32_t jump : jumps) regex.steps_[jump].target = here();
  }

  void sequence(int depth) {
    while (at < pattern.size() && pattern[at] != '|' && pattern[at] != ')') {
      if (pattern[at] == '(') {
        group(depth);
        continue;
      }
      Set set;
      character(set);
      repeat(std::move(set));
    }
  }

  void group(int depth) {
    const bool folded_before = folds;
    const bool is_negative = take("(?!"), is_look = is_negative || take("(?=");
    if (is_look) {
      const uint32_t look = add({Step::LOOK});
      regex.steps_[look].flag = is_negative;
      alternatives(depth + 1);
      add({Step::END});
      if (!take(")")) refuse();
      regex.steps_[look].target = here();
      return;
    }
    if (take("(?i:")) folds = true;
    else if (!take("(?:")) refuse();
    const size_t begin = regex.steps_.size();
    alternatives(depth + 1);
    if (!take(")")) refuse();
    folds = folded_before;
    if (at < pattern.size() && (pattern[at] == '*' || pattern[at] == '+' || pattern[at] == '{')) refuse();
    if (!take("?")) return;
    if (at < pattern.size() && (pattern[at] == '+' || pattern[at] == '?')) refuse();
    Step fork{Step::FORK};
    regex.steps_.insert(regex.steps_.begin() + static_cast<std::ptrdiff_t>(begin), fork);
    for (size_t i = begin + 1; i < regex.steps_.size(); ++i) {
      Step& moved = regex.steps_[i];
      if (moved.kind == Step::FORK || moved.kind == Step::JUMP || moved.kind == Step::LOOK) ++moved.target;
    }
    regex.steps_[begin].target = here();
  }

  uint32_t count() {
    uint32_t value = 0;
    const size_t begin = at;
    while (at < pattern.size() && pattern[at] >= '0' && pattern[at] <= '9' && at - begin < 4)
      value = value * 10 + static_cast<uint32_t>(pattern[at++] - '0');
    if (at == begin) refuse();
    return value;
  }

  void repeat(Set set) {
    uint32_t least = 1, most = 1;
    bool is_braced = false;
    if (take("*")) least = 0, most = MANY;
    else if (take("+")) most = MANY;
    else if (take("?")) least = 0;
    else if (take("{")) {
      is_braced = true;
      least = most = count();
      if (take(",")) most = at < pattern.size() && pattern[at] == '}' ? MANY : count();
      if (!take("}") || least > most) refuse();
    }
    bool is_possessive = false;
    if (most != 1 || least != 1) {
      if (at < pattern.size() && pattern[at] == '?') refuse();  // lazy
      if (at < pattern.size() && pattern[at] == '+') {
        if (is_braced) refuse();
        ++at;
        is_possessive = true;
      }
      if (at < pattern.size() && (pattern[at] == '*' || pattern[at] == '{' || pattern[at] == '+')) refuse();
    }
    for (uint32_t code = 0; code < 128; ++code) set.ascii[code] = set.contains(code);
    Step step{Step::REPEAT};
    step.flag = is_possessive;
    step.set = static_cast<uint32_t>(regex.sets_.size());
    step.least = least;
    step.most = most;
    regex.sets_.push_back(std::move(set));
    add(step);
  }

  void literal(Set& set, uint32_t code) {
    Item item;
    item.first = item.last = code;
    set.items.push_back(item);
    if (!folds) return;
    if (code >= 128) refuse();
    const uint32_t lower = code | 32;
    if (lower < 'a' || lower > 'z') return;
    item.first = item.last = code ^ 32;
    set.items.push_back(item);
    if (lower == 's' || lower == 'k') {  // U+017F and U+212A, which have these letters as their other case
      item.first = item.last = lower == 's' ? 0x17f : 0x212a;
      set.items.push_back(item);
    }
  }

  uint32_t code_point() {
    if (at >= pattern.size()) refuse();
    return next_utf8(pattern, at);
  }

  /// One character, escape or class outside of a class.
  void character(Set& set) {
    const char c = pattern[at];
    if (c == '[') return in_brackets(set);
    if (c == '\\') {
      uint32_t code;
      if (escape(set, code)) literal(set, code);
      return;
    }
    if (c == '.') refuse();
    if (std::string_view("*+?{}^$]").find(c) != std::string_view::npos) refuse();
    literal(set, code_point());
  }

  void in_brackets(Set& set) {
    ++at;
    set.negated = take("^");
    bool is_first = true;
    for (; at < pattern.size() && (pattern[at] != ']' || is_first); is_first = false) {
      if (pattern[at] == '[' || pattern[at] == ']' || !pattern.compare(at, 2, "&&")) refuse();
      uint32_t first;
      if (pattern[at] == '\\') {
        if (!escape(set, first)) continue;
      } else {
        first = code_point();
      }
      const bool is_range = at + 1 < pattern.size() && pattern[at] == '-' && pattern[at + 1] != ']';
      if (!is_range) {
        literal(set, first);
        continue;
      }
      ++at;
      if (pattern[at] == '[' || folds) refuse();
      uint32_t last;
      if (pattern[at] == '\\') {
        if (!escape(set, last)) refuse();
      } else {
        last = code_point();
      }
      if (last < first) refuse();
      Item item;
      item.first = first;
      item.last = last;
      set.items.push_back(item);
    }
    if (!take("]")) refuse();
  }

  /// An escape: false: it was a property, which is added to the set; else it is a character.
  bool escape(Set& set, uint32_t& code) {
    ++at;
    if (at >= pattern.size()) refuse();
    Item item;
    const char c = pattern[at++];
    switch (c) {
      case 'r': code = '\r'; return true;
      case 'n': code = '\n'; return true;
      case 't': code = '\t'; return true;
      case 's': case 'S': item.spaces = true; break;
      case 'd': case 'D': item.categories = 1u << unicode::Nd; break;
      case 'p': case 'P': {
        if (!take("{")) refuse();
        const size_t end = pattern.find('}', at);
        if (end == std::string_view::npos) refuse();
        item.negated = take("^");
        item.categories = unicode::categories_of(pattern.substr(at, end - at));
        if (!item.categories) refuse();
        at = end + 1;
        break;
      }
      default:
        if ((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || static_cast<uint8_t>(c) >= 128) refuse();
        code = static_cast<uint8_t>(c);
        return true;
    }
    if (c == 'S' || c == 'D' || c == 'P') item.negated = !item.negated;
    set.items.push_back(item);
    return false;
  }
};

Regex::Regex(std::string_view pattern) {
  RegexParser parser{*this, pattern};
  if (pattern.size() > MOST_PATTERN) parser.refuse();
  parser.alternatives(0);
  if (parser.at != pattern.size()) parser.refuse();
  steps_.push_back({Step::END});
}

size_t Regex::run(std::string_view text, size_t at, uint32_t step, uint64_t& left) const {
  /// Where to go on if what follows does not match: at `step` after one character less, down to `least`.
  struct Choice {
    uint32_t step;
    size_t at, least;
  };
  std::vector<Choice> choices;
  const auto spend = [&](uint64_t work) {
    if (left < work) throw Error("the pattern of a pre-tokenizer takes too long for this text");
    left -= work;
  };
  for (;;) {
    spend(1);
    const Step& now = steps_[step];
    bool fails = false;
    switch (now.kind) {
      case Step::END:
        return at;
      case Step::JUMP:
        step = now.target;
        continue;
      case Step::FORK:
        choices.push_back({now.target, at, at});
        ++step;
        continue;
      case Step::LOOK:
        fails = (run(text, at, step + 1, left) != std::string_view::npos) == now.flag;
        step = now.target;
        break;
      case Step::REPEAT: {
        const Set& set = sets_[now.set];
        uint32_t count = 0;
        size_t least = at;
        while (count < now.most && at < text.size()) {
          size_t next = at;
          if (!set.holds(next_utf8(text, next))) break;
          at = next;
          if (++count == now.least) least = at;
        }
        spend(count);
        fails = count < now.least;
        ++step;
        if (!fails && !now.flag && at > least) choices.push_back({step, at, least});
        break;
      }
    }
    if (!fails) continue;
    if (choices.empty()) return std::string_view::npos;
    Choice& choice = choices.back();
    step = choice.step;
    if (choice.at == choice.least) {
      at = choice.at;
      choices.pop_back();
      continue;
    }
    do --choice.at; while ((static_cast<uint8_t>(text[choice.at]) & 0xc0) == 0x80);
    at = choice.at;
    if (choice.at == choice.least) choices.pop_back();
  }
}

}  // namespace diffbit::runtime
