// Keys or values of a call: what was, what is new, and the buffers that hold both (ops/diff_attention.py: "The cache").
#pragma once

#include "../../ort/attention_node.h"
#include "kernels.h"
#include "lowbit.h"

namespace diffbit {

struct Call;

struct Cache {
  Tensor fresh;  // what is new: [B, S, Hk, d]
  bool is_keys;  // keys are rotated
  int bits;        // 16: floats, of `type`
  CacheType type;  // of rows, where there are no blocks
  const char* past;
  char* present;
  size_t row_bytes;
  const char* past_scales;
  char* scales;          // with the zero points, where there are any
  size_t scale_bytes;    // of scale_tokens tokens
  int64_t scale_tokens;  // how many share one
  int64_t past_capacity, capacity;
  int64_t ring, base;  // of a sliding window: rows, 0 where it is none; the token that is counted as 0
  bool in_place;
  const Half* past_recent;  // [B, Hk, slots, d], with blocks only
  Half* recent;
  int64_t slots;
  bool recent_in_place;

  Cache(const CacheTensors& tensors, bool is_keys, int64_t d, int64_t window);

  bool blockwise() const { return bits < 8; }
  CodeType codes() const { return bits == 4 ? CODES_INT4 : CODES_INT2; }

  int64_t place(int64_t t) const { return ring ? (base + t) % ring : t; }
  /// Of the tokens t .. end those that lie behind t in turn.
  int64_t run(int64_t t, int64_t end) const {
    return ring && ring - place(t) < end - t ? ring - place(t) : end - t;
  }
  // `head` counts the sub-heads through the batch
  char* row(int64_t head, int64_t t) const { return present + (head * capacity + place(t)) * row_bytes; }
  char* scale(int64_t head, int64_t t) const {
    return scales ? scales + (head * capacity + place(t)) / scale_tokens * scale_bytes : nullptr;
  }

  /// Rows of kv head g from token t on, as far as they lie in turn.
  CacheRows rows(const Call& call, int64_t b, int64_t g, int64_t t) const;
  BlockRows blocks(const Call& call, int64_t b, int64_t g, int64_t t) const;
  CacheRows recent_rows(const Call& call, int64_t b, int64_t g) const;

  /// Tokens begin..end of a sub-head into the present, as they are.
  void copy(int64_t head, int64_t begin, int64_t end) const;
  /// Tokens begin..end made present, and with the last of them what lies beyond. Not for blocks.
  void append_rows(const Call& call, int64_t b, int64_t sub_head, int64_t begin, int64_t end) const;
  /// The same for blocks, where few tokens are new: with the last chunk's end the recent tokens, too.
  void append_blocks(const Call& call, int64_t b, int64_t sub_head, int64_t begin, int64_t end) const;

  // Parts of it, where many are new
  /// The tokens begin..end, none of which was quantized before the call, as float16: [end - begin, d].
  void halves(const Call& call, int64_t b, int64_t sub_head, int64_t begin, int64_t end, Half* to) const;
  /// The tokens t .. t + count, whole blocks, to codes.
  void quantize(const Call& call, int64_t head, int64_t t, int64_t count, const Half* from) const;
  /// Tokens begin..end of a sub-head to where `to` has them.
  void move(const Cache& to, int64_t head, int64_t begin, int64_t end) const;
  /// The slots behind the recent tokens, as they were.
  void copy_free_slots(const Call& call, int64_t head) const;

 private:
  const float* new_row(const Call& call, int64_t b, int64_t sub_head, int64_t t, float* wide, float* rotated) const;
  void store(const Call& call, int64_t head, int64_t t, const float* row) const;
};

}  // namespace diffbit
