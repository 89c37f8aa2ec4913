// Keys or values of a call: past, new tokens, and the buffers that hold both (ops/diff_attention.py: "The cache").
#pragma once

#include "../../ort/attention_node.h"
#include "kernels.h"
#include "lowbit.h"

namespace diffbit {

struct Call;

struct Cache {
  Tensor fresh;  // new tokens: [B, S, Hk, d]
  bool is_keys;  // keys are rotated
  int bits;        // 16: floats, of `type`
  CacheType type;  // of rows, if there are no blocks
  const char* past;
  char* present;
  size_t row_bytes;
  const char* past_scales;
  char* scales;          // followed by the zero points, if there are any
  size_t scale_bytes;    // of scale_tokens() tokens
  int64_t past_capacity, capacity;
  int64_t ring, base;  // of a sliding window: rows (0: no window); the token that counts as 0
  bool in_place;
  const Half* past_recent;  // [B, Hk, slots, d], with blocks only
  Half* recent;
  int64_t slots;
  bool recent_in_place;

  Cache(const CacheTensors& tensors, bool is_keys, int64_t d, int64_t window);

  bool blockwise() const { return bits < 8; }
  int64_t scale_tokens() const { return blockwise() ? CACHE_BLOCK : 1; }  // tokens that share a scale
  CodeType codes() const { return bits == 4 ? CODES_INT4 : CODES_INT2; }

  int64_t place(int64_t t) const { return ring ? (base + t) % ring : t; }
  /// How many of the tokens t .. end are stored contiguously from t on.
  int64_t run(int64_t t, int64_t end) const {
    return ring && ring - place(t) < end - t ? ring - place(t) : end - t;
  }
  // `head` counts the sub-heads through the batch
  char* row(int64_t head, int64_t t) const { return present + (head * capacity + place(t)) * row_bytes; }
  char* scale(int64_t head, int64_t t) const {
    return scales ? scales + (head * capacity + place(t)) / scale_tokens() * scale_bytes : nullptr;
  }

  /// The contiguous rows of kv head g from token t on.
  CacheRows rows(const Call& call, int64_t b, int64_t g, int64_t t) const;
  BlockRows blocks(const Call& call, int64_t b, int64_t g, int64_t t) const;
  CacheRows recent_rows(const Call& call, int64_t b, int64_t g) const;

  /// Copies the tokens begin..end of a sub-head to the present.
  void copy(int64_t head, int64_t begin, int64_t end) const;
  /// Makes the tokens begin..end present, and with the last chunk also the slots beyond. Not for blocks.
  void append_rows(const Call& call, int64_t b, int64_t sub_head, int64_t begin, int64_t end) const;
  /// The same for blocks and few new tokens; the last chunk also makes the recent tokens present.
  void append_blocks(const Call& call, int64_t b, int64_t sub_head, int64_t begin, int64_t end) const;

  // Its parts, for many new tokens
  /// The tokens begin..end, none of which was quantized before the call, as float16: [end - begin, d].
  void halves(const Call& call, int64_t b, int64_t sub_head, int64_t begin, int64_t end, Half* to) const;
  /// Quantizes the tokens t .. t + count, which are whole blocks.
  void quantize(const Call& call, int64_t head, int64_t t, int64_t count, const Half* from) const;
  /// Copies the tokens begin..end of a sub-head to their place in `to`.
  void move(const Cache& to, int64_t head, int64_t begin, int64_t end) const;
  /// Copies the slots after the recent tokens.
  void copy_free_slots(const Call& call, int64_t head) const;

 private:
  const float* new_row(const Call& call, int64_t b, int64_t sub_head, int64_t t, float* wide, float* rotated) const;
  void store(const Call& call, int64_t head, int64_t t, const float* row) const;
};

}  // namespace diffbit
