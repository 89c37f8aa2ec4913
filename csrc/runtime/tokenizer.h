// tokenizer.json, as the library `tokenizers` reads it: byte-level BPE and BPE of characters with bytes for what is unknown
// (SentencePiece). A file with anything else is refused by an Error that names it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "json.h"
#include "regex.h"

namespace diffbit::runtime {

class Tokenizer {
 public:
  Tokenizer(std::string_view json, const std::string& file);

  /// Returns the tokens of UTF-8 text, with or without the special ones that the tokenizer adds. Throws Error.
  std::vector<int32_t> encode(std::string_view text, bool add_special) const;
  /// Returns the text of tokens, without special ones; bytes that form no character are U+FFFD.
  std::string decode(const int32_t* ids, size_t count) const;
  /// Returns a token's id; -1: there is no such token.
  int32_t id(std::string_view token) const;

 private:
  /// Ids of texts: open addressing, since a vocabulary is read whenever an artifact is opened.
  class Vocabulary {
   public:
    void reserve(size_t count);
    void add(std::string_view text, uint32_t id);
    int64_t find(std::string_view text) const;  // -1: none

   private:
    struct Slot {
      uint32_t begin = 0, size = 0, id = 0;
      bool used = false;
    };
    size_t place(std::string_view text) const;
    std::vector<Slot> slots_;
    std::string texts_;
  };
  struct Merge {
    uint64_t pair = UINT64_MAX;
    uint32_t rank = 0, id = 0;
  };
  struct Added {
    std::string text;
    uint32_t id;
    bool single_word, left, right, normalized, special;
  };
  /// The tokens that are found in a text before it is split, by their first bytes.
  struct Finder {
    std::vector<uint32_t> tokens[256];  // indices of added_, longest first
    bool is_empty = true;
  };
  struct Normalizer {
    enum Kind { NFC, REPLACE, PREPEND } kind;
    std::string text, content;
  };
  struct Splitter {
    enum Kind { SPLIT, DIGITS, BYTES, METASPACE } kind;
    enum Behavior { ISOLATED, REMOVED, WITH_PREVIOUS, WITH_NEXT, CONTIGUOUS } behavior = ISOLATED;
    enum Prepend { ALWAYS, FIRST, NEVER } prepend = NEVER;
    std::shared_ptr<Regex> regex;  // else the text
    std::string text;
    bool inverted = false, is_on = false;  // BYTES: splits; METASPACE: splits; DIGITS: each alone
  };
  struct Decoder {
    enum Kind { BYTE_LEVEL, REPLACE, BYTES, FUSE, STRIP, METASPACE } kind;
    std::string text, content;
    uint32_t start = 0, stop = 0;
    bool is_on = false;
  };
  /// A part of a text: one added token, or text to be split.
  struct Piece {
    std::string text;
    int64_t token;  // -1: text
    bool is_first;  // whether it begins where the whole text does
  };

  void read_model(JsonValue model);
  void read_added(JsonValue added);
  void read_normalizer(JsonValue normalizer);
  void read_splitter(JsonValue splitter);
  void read_processor(JsonValue processor);
  void read_decoder(JsonValue decoder);
  std::string normalized(std::string_view text) const;
  void split_added(const Finder& finder, const std::vector<std::string>& texts, Piece piece, std::vector<Piece>& to) const;
  void split(const Splitter& splitter, std::vector<Piece>& pieces) const;
  void bpe(std::string_view word, std::vector<int32_t>& to) const;
  void merge(std::vector<uint32_t>& symbols) const;
  const Merge* find_merge(uint32_t left, uint32_t right) const;

  Vocabulary vocabulary_;
  std::vector<std::string> texts_;  // of tokens, by id
  std::vector<Merge> merges_;       // open addressing
  std::vector<Added> added_;
  std::vector<std::string> raw_texts_, normalized_texts_;  // of added_, as they are searched for
  Finder raw_, after_;                                     // before and after normalization
  std::unordered_map<uint32_t, size_t> added_ids_;
  int64_t byte_ids_[256];       // of <0x00> ... if the model falls back to them
  int64_t unknown_ = -1;
  bool has_byte_fallback_ = false, fuses_unknown_ = false, ignores_merges_ = false;
  bool is_byte_level_ = false;  // texts become characters that stand for bytes
  std::vector<Normalizer> normalizers_;
  std::vector<Splitter> splitters_;
  std::vector<Decoder> decoders_;
  bool has_decoder_ = false;
  std::vector<int32_t> before_, behind_;  // special tokens around a text
};

}  // namespace diffbit::runtime
