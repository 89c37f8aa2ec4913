#include "tokenizer.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <queue>

#include "../ort/op.h"
#include "unicode.h"
#include "utf8.h"

namespace diffbit::runtime {
namespace {

constexpr int64_t MOST_ID = 1 << 24;
constexpr size_t MOST_TEXT = 1 << 26;  // bytes
constexpr const char* GPT2 = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

uint64_t hash(std::string_view text) {
  uint64_t value = 0xcbf29ce484222325 ^ text.size();
  size_t at = 0;
  for (; at + 8 <= text.size(); at += 8) {
    uint64_t eight;
    std::memcpy(&eight, text.data() + at, 8);
    value = (value ^ eight) * 0x9e3779b97f4a7c15;
    value ^= value >> 32;
  }
  for (; at < text.size(); ++at) value = (value ^ static_cast<uint8_t>(text[at])) * 0x100000001b3;
  return value ^ value >> 29;
}

/// The character that stands for a byte in a byte-level vocabulary (GPT-2): itself if it can be seen, else one from 256 on.
struct ByteCharacters {
  uint32_t of_byte[256];
  int16_t of_character[512];
  ByteCharacters() {
    uint32_t next = 256;
    std::fill(std::begin(of_character), std::end(of_character), int16_t{-1});
    for (int byte = 0; byte < 256; ++byte) {
      const bool is_seen = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
      of_byte[byte] = is_seen ? static_cast<uint32_t>(byte) : next++;
      of_character[of_byte[byte]] = static_cast<int16_t>(byte);
    }
  }
};
const ByteCharacters BYTE_CHARACTERS;

std::string type_of(JsonValue part) { return std::string(part["type"].text()); }

/// Calls read(step, type) with the parts of a sequence, or the part itself; a null has none.
template <class Read>
void each_step(JsonValue part, const char* key, int depth, const Read& read) {
  if (part.is_null()) return;
  if (depth > 8) throw Error("a sequence in it is nested too deeply");
  const std::string type = type_of(part);
  if (type != "Sequence") return read(part, type);
  part[key].each([&](JsonValue step) { each_step(step, key, depth + 1, read); });
}

[[noreturn]] void refuse(const char* what, const std::string& name) {
  throw Error("has the %s %.60s, which is not known here; pass token ids instead of text", what, name.c_str());
}

bool is_word(uint32_t code) {  // \w of Unicode (UTS 18), which may not be beside a token of single words
  static constexpr const char* WORD[] = {"L", "M", "Nd", "Nl", "Pc"};
  const bool is_circled = (code >= 0x24b6 && code <= 0x24e9) || (code >= 0x1f130 && code <= 0x1f149) ||
                          (code >= 0x1f150 && code <= 0x1f169) || (code >= 0x1f170 && code <= 0x1f189);
  if (is_circled || code == 0x200c || code == 0x200d) return true;
  static const uint32_t bits = [] {
    uint32_t all = 0;
    for (const char* name : WORD) all |= unicode::categories_of(name);
    return all;
  }();
  return bits >> unicode::category(code) & 1;
}

std::string replaced(std::string_view text, const std::string& from, const std::string& to) {
  std::string result;
  for (size_t at = 0;;) {
    const size_t found = text.find(from, at);
    if (result.size() > MOST_TEXT) throw Error("a text becomes too long: its spaces or characters are replaced by longer ones again and again");
    if (found == std::string_view::npos) return result.append(text.substr(at));
    result.append(text.substr(at, found - at)).append(to);
    at = found + from.size();
  }
}

}  // namespace

// ---- the file ----

void Tokenizer::Vocabulary::reserve(size_t count) {
  size_t size = 16;
  while (size < 2 * count) size *= 2;
  slots_.assign(size, {});
}

size_t Tokenizer::Vocabulary::place(std::string_view text) const {
  size_t at = hash(text) & (slots_.size() - 1);
  while (slots_[at].used && std::string_view(texts_).substr(slots_[at].begin, slots_[at].size) != text) at = (at + 1) & (slots_.size() - 1);
  return at;
}

void Tokenizer::Vocabulary::add(std::string_view text, uint32_t id) {
  Slot& slot = slots_[place(text)];
  if (!slot.used) {
    slot = {static_cast<uint32_t>(texts_.size()), static_cast<uint32_t>(text.size()), id, true};
    texts_.append(text);
  }
  slot.id = id;
}

int64_t Tokenizer::Vocabulary::find(std::string_view text) const {
  const Slot& slot = slots_[place(text)];
  return slot.used ? int64_t{slot.id} : -1;
}

Tokenizer::Tokenizer(std::string_view json, const std::string& file) try {
  const Json read(json, file);
  const JsonValue root = read.root();
  if (!root["truncation"].is_null() || !root["padding"].is_null()) throw Error("truncates or pads texts, which is not known here");
  read_model(root["model"]);
  read_normalizer(root["normalizer"]);
  read_splitter(root["pre_tokenizer"]);
  read_added(root["added_tokens"]);
  read_processor(root["post_processor"]);
  read_decoder(root["decoder"]);
} catch (const Error& error) {
  if (!std::strncmp(error.what(), file.c_str(), file.size())) throw;
  throw Error("%s: %s", file.c_str(), error.what());
}

void Tokenizer::read_model(JsonValue model) {
  const std::string type = type_of(model);
  if (type != "BPE" && !(type.empty() && model["merges"].is_array())) refuse("model", type);
  for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (!model[name].text().empty()) refuse("model with a", name);
  if (model["dropout"].number(0) != 0) refuse("model with a", "dropout");
  has_byte_fallback_ = model["byte_fallback"].truth();
  fuses_unknown_ = model["fuse_unk"].truth();
  ignores_merges_ = model["ignore_merges"].truth();
  const JsonValue vocabulary = model["vocab"], merges = model["merges"];
  vocabulary_.reserve(vocabulary.size() + 1);
  vocabulary.members([&](std::string_view text, JsonValue id) {
    const auto number = static_cast<uint32_t>(id.integer("a token's id", 0, MOST_ID));
    vocabulary_.add(text, number);
    if (texts_.size() <= number) texts_.resize(number + 1);
    texts_[number] = text;
  });
  for (int byte = 0; byte < 256; ++byte) {
    char name[8];
    std::snprintf(name, sizeof name, "<0x%02X>", byte);
    byte_ids_[byte] = vocabulary_.find(name);
  }
  if (model["unk_token"].is_string()) {
    unknown_ = vocabulary_.find(model["unk_token"].text());
    if (unknown_ < 0) throw Error("has no unk_token in its vocabulary");
  }
  size_t size = 16;
  while (size < 2 * static_cast<size_t>(merges.size())) size *= 2;
  merges_.assign(size, {});
  uint32_t rank = 0;
  std::string both;
  merges.each([&](JsonValue merge) {
    std::string_view sides[2];
    if (merge.is_string()) {
      const std::string_view text = merge.text();
      const size_t space = text.find(' ');
      if (space == std::string_view::npos || text.find(' ', space + 1) != std::string_view::npos) throw Error("a merge is no pair");
      sides[0] = text.substr(0, space);
      sides[1] = text.substr(space + 1);
    } else {
      int count = 0;
      merge.each([&](JsonValue side) {
        if (count < 2 && side.is_string()) sides[count] = side.text();
        ++count;
      });
      if (count != 2) throw Error("a merge is no pair");
    }
    both.assign(sides[0]).append(sides[1]);
    const int64_t left = vocabulary_.find(sides[0]), right = vocabulary_.find(sides[1]), merged = vocabulary_.find(both);
    if (left < 0 || right < 0 || merged < 0) throw Error("a merge is of tokens that are not in its vocabulary");
    const uint64_t pair = static_cast<uint64_t>(left) << 32 | static_cast<uint64_t>(right);
    size_t at = (pair * 0x9e3779b97f4a7c15 >> 20) & (size - 1);
    while (merges_[at].pair != UINT64_MAX && merges_[at].pair != pair) at = (at + 1) & (size - 1);
    merges_[at] = {pair, rank++, static_cast<uint32_t>(merged)};
  });
}

const Tokenizer::Merge* Tokenizer::find_merge(uint32_t left, uint32_t right) const {
  const uint64_t pair = static_cast<uint64_t>(left) << 32 | right;
  const size_t mask = merges_.size() - 1;
  for (size_t at = (pair * 0x9e3779b97f4a7c15 >> 20) & mask;; at = (at + 1) & mask) {
    if (merges_[at].pair == pair) return &merges_[at];
    if (merges_[at].pair == UINT64_MAX) return nullptr;
  }
}

void Tokenizer::read_added(JsonValue added) {
  added.each([&](JsonValue token) {
    Added one{std::string(token["content"].text()), static_cast<uint32_t>(token["id"].integer("a token's id", 0, MOST_ID)),
              token["single_word"].truth(), token["lstrip"].truth(), token["rstrip"].truth(), token["normalized"].truth(),
              token["special"].truth()};
    if (one.text.empty()) return;
    added_ids_[one.id] = added_.size();
    added_.push_back(std::move(one));
  });
  for (size_t i = 0; i < added_.size(); ++i) {
    raw_texts_.push_back(added_[i].text);
    normalized_texts_.push_back(normalized(added_[i].text));
    const bool after = added_[i].normalized;
    const std::string& text = after ? normalized_texts_[i] : raw_texts_[i];
    if (text.empty()) continue;
    Finder& finder = after ? after_ : raw_;
    finder.tokens[static_cast<uint8_t>(text[0])].push_back(static_cast<uint32_t>(i));
    finder.is_empty = false;
  }
  for (Finder* finder : {&raw_, &after_})
    for (auto& tokens : finder->tokens)
      std::stable_sort(tokens.begin(), tokens.end(), [&](uint32_t a, uint32_t b) {
        const auto& texts = finder == &after_ ? normalized_texts_ : raw_texts_;
        return texts[a].size() > texts[b].size();
      });
}

void Tokenizer::read_normalizer(JsonValue normalizer) {
  each_step(normalizer, "normalizers", 0, [&](JsonValue step, const std::string& type) {
    Normalizer one{Normalizer::NFC, "", ""};
    if (type == "NFC") {
    } else if (type == "Replace" && !step["pattern"]["String"].text().empty()) {
      one = {Normalizer::REPLACE, std::string(step["pattern"]["String"].text()), std::string(step["content"].text())};
    } else if (type == "Prepend") {
      one = {Normalizer::PREPEND, "", std::string(step["prepend"].text())};
    } else {
      refuse("normalizer", type);
    }
    normalizers_.push_back(std::move(one));
  });
}

void Tokenizer::read_splitter(JsonValue splitter) {
  each_step(splitter, "pretokenizers", 0, [&](JsonValue step, const std::string& type) {
    Splitter one{};
    if (is_byte_level_) refuse("pre-tokenizer after ByteLevel", type);
    if (type == "Split") {
      one.kind = Splitter::SPLIT;
      one.inverted = step["invert"].truth();
      const JsonValue pattern = step["pattern"];
      if (pattern["Regex"].is_string()) one.regex = std::make_shared<Regex>(pattern["Regex"].text());
      one.text = pattern["String"].text();
      if (!one.regex && one.text.empty()) refuse("pre-tokenizer", "Split without a pattern");
      static const std::pair<const char*, Splitter::Behavior> BEHAVIORS[] = {{"Isolated", Splitter::ISOLATED},
          {"Removed", Splitter::REMOVED}, {"MergedWithPrevious", Splitter::WITH_PREVIOUS},
          {"MergedWithNext", Splitter::WITH_NEXT}, {"Contiguous", Splitter::CONTIGUOUS}};
      const auto found = std::find_if(std::begin(BEHAVIORS), std::end(BEHAVIORS), [&](const auto& behavior) { return step["behavior"].text() == behavior.first; });
      if (found == std::end(BEHAVIORS)) refuse("pre-tokenizer Split with the behavior", std::string(step["behavior"].text()));
      one.behavior = found->second;
    } else if (type == "Digits") {
      one.kind = Splitter::DIGITS;
      one.is_on = step["individual_digits"].truth();
      one.behavior = one.is_on ? Splitter::ISOLATED : Splitter::CONTIGUOUS;
    } else if (type == "ByteLevel") {
      one.kind = Splitter::BYTES;
      one.prepend = step["add_prefix_space"].truth() ? Splitter::ALWAYS : Splitter::NEVER;
      one.is_on = step["use_regex"].truth(true);
      one.regex = std::make_shared<Regex>(GPT2);
      is_byte_level_ = true;
    } else if (type == "Metaspace") {
      one.kind = Splitter::METASPACE;
      one.text = step["replacement"].text();
      one.is_on = step["split"].truth(true);
      one.behavior = Splitter::WITH_NEXT;
      const std::string_view scheme = step["prepend_scheme"].text();
      const bool old = step["add_prefix_space"].truth(true);  // what older files have
      if (scheme == "always" || (scheme.empty() && old)) one.prepend = Splitter::ALWAYS;
      else if (scheme == "first") one.prepend = Splitter::FIRST;
      else if (scheme != "never" && !scheme.empty()) refuse("pre-tokenizer Metaspace with the scheme", std::string(scheme));
      if (one.text.empty()) refuse("pre-tokenizer", "Metaspace without a replacement");
    } else {
      refuse("pre-tokenizer", type);
    }
    splitters_.push_back(std::move(one));
  });
}

void Tokenizer::read_processor(JsonValue processor) {
  each_step(processor, "processors", 0, [&](JsonValue step, const std::string& type) {
    if (type == "ByteLevel") return;  // it changes where tokens are said to begin
    if (type != "TemplateProcessing") refuse("post-processor", type);
    std::vector<int32_t> before, behind;
    int texts = 0;
    step["single"].each([&](JsonValue part) {
      if (!part["Sequence"].is_null()) {
        ++texts;
        return;
      }
      const std::string_view name = part["SpecialToken"]["id"].text();
      const JsonValue ids = step["special_tokens"][name]["ids"];
      if (!ids.is_array()) throw Error("its template has the token %.60s, which it does not describe", std::string(name).c_str());
      ids.each([&](JsonValue id) {
        (texts ? behind : before).push_back(static_cast<int32_t>(id.integer("a token's id", 0, MOST_ID)));
      });
    });
    if (texts != 1) throw Error("its template does not have the text once");
    before_.insert(before_.begin(), before.begin(), before.end());
    behind_.insert(behind_.end(), behind.begin(), behind.end());
  });
}

void Tokenizer::read_decoder(JsonValue decoder) {
  has_decoder_ = !decoder.is_null();
  each_step(decoder, "decoders", 0, [&](JsonValue step, const std::string& type) {
    Decoder one{};
    if (type == "ByteLevel") {
      one.kind = Decoder::BYTE_LEVEL;
    } else if (type == "Replace" && !step["pattern"]["String"].text().empty()) {
      one.kind = Decoder::REPLACE;
      one.text = step["pattern"]["String"].text();
      one.content = step["content"].text();
    } else if (type == "ByteFallback") {
      one.kind = Decoder::BYTES;
    } else if (type == "Fuse") {
      one.kind = Decoder::FUSE;
    } else if (type == "Strip") {
      one.kind = Decoder::STRIP;
      one.text = step["content"].text();
      one.start = static_cast<uint32_t>(step["start"].integer("a decoder's start", 0, MOST_ID));
      one.stop = static_cast<uint32_t>(step["stop"].integer("a decoder's stop", 0, MOST_ID));
      if (one.text.empty()) refuse("decoder", "Strip without a character");
    } else if (type == "Metaspace") {
      one.kind = Decoder::METASPACE;
      one.text = step["replacement"].text();
      const std::string_view scheme = step["prepend_scheme"].text();
      one.is_on = scheme.empty() ? step["add_prefix_space"].truth(true) : scheme != "never";
      if (one.text.empty()) refuse("decoder", "Metaspace without a replacement");
    } else {
      refuse("decoder", type);
    }
    decoders_.push_back(std::move(one));
  });
}

int32_t Tokenizer::id(std::string_view token) const {
  for (const Added& added : added_)
    if (added.text == token) return static_cast<int32_t>(added.id);
  return static_cast<int32_t>(vocabulary_.find(token));
}

// ---- text to tokens ----

std::string Tokenizer::normalized(std::string_view text) const {
  std::string result(text);
  for (const Normalizer& step : normalizers_) {
    if (step.kind == Normalizer::NFC) result = unicode::nfc(result);
    if (step.kind == Normalizer::REPLACE) result = replaced(result, step.text, step.content);
    if (step.kind == Normalizer::PREPEND && !result.empty()) result = step.content + result;
  }
  return result;
}

/// Splits added tokens from a text: of those that begin first, the longest.
void Tokenizer::split_added(const Finder& finder, const std::vector<std::string>& texts, Piece piece, std::vector<Piece>& to) const {
  if (finder.is_empty || piece.text.empty()) {
    to.push_back(std::move(piece));
    return;
  }
  const std::string_view text = piece.text;
  size_t done = 0;
  const auto rest_until = [&](size_t end) {
    if (end > done) to.push_back({std::string(text.substr(done, end - done)), -1, piece.is_first && !done});
  };
  for (size_t at = 0; at < text.size();) {
    const Added* found = nullptr;
    size_t size = 0;
    for (const uint32_t index : finder.tokens[static_cast<uint8_t>(text[at])]) {
      if (text.compare(at, texts[index].size(), texts[index])) continue;
      found = &added_[index];
      size = texts[index].size();
      break;
    }
    if (!found) {
      ++at;
      continue;
    }
    size_t begin = at, end = at + size;
    at = end;
    if (found->single_word) {
      size_t behind = end;
      if ((begin && is_word(last_utf8(text.substr(0, begin)))) || (end < text.size() && is_word(next_utf8(text, behind)))) continue;
    }
    if (found->left) {
      while (begin && unicode::is_space(last_utf8(text.substr(0, begin)))) begin -= last_utf8_length(text.substr(0, begin));
      begin = std::max(begin, done);
    }
    if (found->right)
      for (size_t next = end; end < text.size() && unicode::is_space(next_utf8(text, next));) end = next;
    rest_until(begin);
    to.push_back({"", found->id, false});
    done = end;
  }
  rest_until(text.size());
}

void Tokenizer::split(const Splitter& splitter, std::vector<Piece>& pieces) const {
  std::vector<Piece> result;
  for (Piece& piece : pieces) {
    if (piece.token >= 0 || piece.text.empty()) {
      if (piece.token >= 0) result.push_back(std::move(piece));
      continue;
    }
    if (splitter.kind == Splitter::METASPACE) piece.text = replaced(piece.text, " ", splitter.text);
    if (splitter.kind == Splitter::METASPACE || splitter.kind == Splitter::BYTES) {
      const std::string mark = splitter.kind == Splitter::BYTES ? " " : splitter.text;
      const bool may = splitter.prepend == Splitter::ALWAYS || (splitter.prepend == Splitter::FIRST && piece.is_first);
      if (may && piece.text.compare(0, mark.size(), mark)) piece.text = mark + piece.text;
      if (!splitter.is_on) {
        result.push_back(std::move(piece));
        continue;
      }
    }
    // the parts of the text: {begin, end, whether it is a match}
    struct Part {
      size_t begin, end;
      bool is_match;
    };
    std::vector<Part> parts;
    const std::string_view text = piece.text;
    const auto add = [&](size_t begin, size_t end, bool is_match) {
      if (begin < end) parts.push_back({begin, end, is_match != splitter.inverted});
    };
    size_t done = 0;
    uint64_t work = Regex::work_for(text);
    for (size_t at = 0; at < text.size();) {
      size_t end = std::string_view::npos, next = at;
      const uint32_t code = next_utf8(text, next);
      if (splitter.kind == Splitter::DIGITS) {
        if (unicode::is_numeric(code)) end = next;
      } else if (splitter.regex) {
        end = splitter.regex->match(text, at, work);
      } else if (!text.compare(at, splitter.text.size(), splitter.text)) {
        end = at + splitter.text.size();
      }
      if (end == std::string_view::npos || end == at) {
        at = next;
        continue;
      }
      add(done, at, false);
      add(at, end, true);
      done = at = end;
    }
    add(done, text.size(), false);
    std::vector<Part> kept;
    for (const Part& part : parts) {
      const bool has_before = !kept.empty();
      switch (splitter.behavior) {
        case Splitter::ISOLATED: kept.push_back(part); break;
        case Splitter::REMOVED:
          if (!part.is_match) kept.push_back(part);
          break;
        case Splitter::WITH_PREVIOUS:  // a match joins the part before it, unless that is a match, too
          if (part.is_match && has_before && !kept.back().is_match) kept.back() = {kept.back().begin, part.end, true};
          else kept.push_back(part);
          break;
        case Splitter::WITH_NEXT:
          if (!part.is_match && has_before && kept.back().is_match) kept.back() = {kept.back().begin, part.end, false};
          else kept.push_back(part);
          break;
        case Splitter::CONTIGUOUS:
          if (has_before && kept.back().is_match == part.is_match) kept.back().end = part.end;
          else kept.push_back(part);
          break;
      }
    }
    for (const Part& part : kept)
      result.push_back({std::string(text.substr(part.begin, part.end - part.begin)), -1, piece.is_first && !part.begin});
  }
  pieces = std::move(result);
}

/// Merges neighbours while the vocabulary has them as one: the pair of least rank first, of equal ones the first.
void Tokenizer::merge(std::vector<uint32_t>& symbols) const {
  constexpr uint32_t NONE = UINT32_MAX;
  struct Symbol {
    uint32_t id, before, behind;
    bool is_gone;
  };
  struct Candidate {
    uint32_t rank, at, id;
    bool operator<(const Candidate& other) const { return rank != other.rank ? rank > other.rank : at > other.at; }
  };
  const auto count = static_cast<uint32_t>(symbols.size());
  std::vector<Symbol> list(count);
  for (uint32_t i = 0; i < count; ++i) list[i] = {symbols[i], i ? i - 1 : NONE, i + 1 < count ? i + 1 : NONE, false};
  std::vector<Candidate> found;
  for (uint32_t i = 0; i + 1 < count; ++i)
    if (const Merge* merge = find_merge(symbols[i], symbols[i + 1])) found.push_back({merge->rank, i, merge->id});
  std::priority_queue<Candidate> queue(std::less<Candidate>(), std::move(found));
  while (!queue.empty()) {
    const Candidate top = queue.top();
    queue.pop();
    Symbol& left = list[top.at];
    if (left.is_gone || left.behind == NONE) continue;
    Symbol& right = list[left.behind];
    const Merge* now = find_merge(left.id, right.id);
    if (!now || now->id != top.id) continue;
    left.id = top.id;
    right.is_gone = true;
    left.behind = right.behind;
    if (left.behind != NONE) list[left.behind].before = top.at;
    if (left.before != NONE)
      if (const Merge* next = find_merge(list[left.before].id, left.id)) queue.push({next->rank, left.before, next->id});
    if (left.behind != NONE)
      if (const Merge* next = find_merge(left.id, list[left.behind].id)) queue.push({next->rank, top.at, next->id});
  }
  symbols.clear();
  for (const Symbol& symbol : list)
    if (!symbol.is_gone) symbols.push_back(symbol.id);
}

void Tokenizer::bpe(std::string_view word, std::vector<int32_t>& to) const {
  if (ignores_merges_) {
    const int64_t whole = vocabulary_.find(word);
    if (whole >= 0) return to.push_back(static_cast<int32_t>(whole));
  }
  std::vector<uint32_t> symbols;
  bool is_unknown = false;  // what is before
  const auto unknown = static_cast<uint32_t>(unknown_);
  for (size_t at = 0; at < word.size();) {
    const size_t begin = at;
    next_utf8(word, at);
    const std::string_view character = word.substr(begin, at - begin);
    const int64_t id = vocabulary_.find(character);
    if (id >= 0) {
      if (is_unknown) symbols.push_back(unknown);
      is_unknown = false;
      symbols.push_back(static_cast<uint32_t>(id));
      continue;
    }
    if (has_byte_fallback_ && std::all_of(character.begin(), character.end(), [&](char byte) { return byte_ids_[static_cast<uint8_t>(byte)] >= 0; })) {
      for (const char byte : character) symbols.push_back(static_cast<uint32_t>(byte_ids_[static_cast<uint8_t>(byte)]));
      continue;
    }
    if (unknown_ < 0) continue;
    if (is_unknown && !fuses_unknown_) symbols.push_back(unknown);
    is_unknown = true;
  }
  if (is_unknown) symbols.push_back(unknown);
  if (symbols.size() > 1) merge(symbols);
  to.insert(to.end(), symbols.begin(), symbols.end());
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, bool add_special) const {
  if (text.size() > MOST_TEXT) throw Error("a text of %zu bytes is too long", text.size());
  for (size_t at = 0; at < text.size();) {
    const int size = utf8_length(text, at);
    if (!size) throw Error("the text to encode is not UTF-8 after %zu bytes", at);
    at += static_cast<size_t>(size);
  }
  std::vector<Piece> raw, pieces;
  split_added(raw_, raw_texts_, {std::string(text), -1, true}, raw);
  for (Piece& piece : raw) {
    if (piece.token >= 0) {
      pieces.push_back(std::move(piece));
      continue;
    }
    piece.text = normalized(piece.text);
    split_added(after_, normalized_texts_, std::move(piece), pieces);
  }
  for (const Splitter& splitter : splitters_) split(splitter, pieces);
  std::vector<int32_t> ids;
  if (add_special) ids = before_;
  std::string bytes;
  for (const Piece& piece : pieces) {
    if (piece.token >= 0) {
      ids.push_back(static_cast<int32_t>(piece.token));
      continue;
    }
    if (!is_byte_level_) {
      bpe(piece.text, ids);
      continue;
    }
    bytes.clear();
    for (const char byte : piece.text) append_utf8(bytes, BYTE_CHARACTERS.of_byte[static_cast<uint8_t>(byte)]);
    bpe(bytes, ids);
  }
  if (add_special) ids.insert(ids.end(), behind_.begin(), behind_.end());
  return ids;
}

// ---- tokens to text ----

std::string Tokenizer::decode(const int32_t* ids, size_t count) const {
  std::vector<std::string> tokens;
  for (size_t i = 0; i < count; ++i) {
    if (ids[i] < 0) continue;
    const auto added = added_ids_.find(static_cast<uint32_t>(ids[i]));
    if (added != added_ids_.end()) {
      // tokens that are searched for after normalization are known by their normalized text, and that may be no special one
      const Added& token = added_[added->second];
      const std::string& text = token.normalized ? normalized_texts_[added->second] : token.text;
      if (!token.special || text != token.text) tokens.push_back(text);
    } else if (static_cast<size_t>(ids[i]) < texts_.size() && !texts_[static_cast<size_t>(ids[i])].empty()) {
      tokens.push_back(texts_[static_cast<size_t>(ids[i])]);
    }
  }
  for (const Decoder& step : decoders_) {
    std::vector<std::string> result;
    std::string run;  // bytes
    const auto end_run = [&] {
      if (run.empty()) return;
      if (is_utf8(run)) result.push_back(run);
      else result.insert(result.end(), run.size(), "\xef\xbf\xbd");
      run.clear();
    };
    for (size_t i = 0; i < tokens.size(); ++i) {
      std::string& token = tokens[i];
      switch (step.kind) {
        case Decoder::BYTE_LEVEL: {
          std::string bytes;
          bool is_known = true;
          for (size_t at = 0; at < token.size() && is_known;) {
            const uint32_t code = next_utf8(token, at);
            is_known = code < 512 && BYTE_CHARACTERS.of_character[code] >= 0;
            if (is_known) bytes += static_cast<char>(BYTE_CHARACTERS.of_character[code]);
          }
          run += is_known ? bytes : token;
          break;
        }
        case Decoder::REPLACE: result.push_back(replaced(token, step.text, step.content)); break;
        case Decoder::BYTES: {
          const auto digit = [](char c) { return c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1; };
          const bool is_byte = token.size() == 6 && !token.compare(0, 3, "<0x") && token[5] == '>' && digit(token[3]) >= 0 && digit(token[4]) >= 0;
          if (is_byte) {
            run += static_cast<char>(digit(token[3]) * 16 + digit(token[4]));
          } else {
            end_run();
            result.push_back(std::move(token));
          }
          break;
        }
        case Decoder::FUSE: run += token; break;
        case Decoder::STRIP: {
          size_t begin = 0, end = token.size();
          for (uint32_t n = 0; n < step.start && !token.compare(begin, step.text.size(), step.text) && begin < end; ++n) begin += step.text.size();
          for (uint32_t n = 0; n < step.stop && end >= begin + step.text.size() && !token.compare(end - step.text.size(), step.text.size(), step.text); ++n) end -= step.text.size();
          result.push_back(token.substr(begin, end - begin));
          break;
        }
        case Decoder::METASPACE: result.push_back(replaced(token, step.text, !i && step.is_on ? "" : " ")); break;
      }
    }
    if (step.kind == Decoder::BYTES) end_run();
    if (step.kind == Decoder::BYTE_LEVEL && !tokens.empty()) result.push_back(lossy_utf8(run));
    if (step.kind == Decoder::FUSE) result.push_back(run);
    tokens = std::move(result);
  }
  std::string text;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (i && !has_decoder_) text += ' ';
    text += tokens[i];
  }
  return text;
}

}  // namespace diffbit::runtime
