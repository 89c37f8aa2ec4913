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
  CacheType type;  // of rows, if these are not packed
  const char* past;
  char* present;
  size_t row_bytes;
  const Half* past_scales;
  Half* scales;
  int64_t past_capacity, capacity;
  int64_t ring, base;  // of a sliding window: rows (0: no window); the token that counts as 0
  bool in_place;
  // Below 8 bits [B, Hk, slots, d]: the first tokens, the offset of keys, and from row `lead` on the residual window
  const Half* past_recent;
  Half* recent;
  int64_t first, lead, slots;
  bool recent_in_place;

  Cache(const CacheTensors& tensors, bool is_keys, int64_t d, int64_t window, int64_t first);

  bool is_low_bit() const { return bits < 8; }
  bool is_rotated() const { return bits < 16; }
  CodeType codes() const { return bits == 4 ? CODES_INT4 : bits == 3 ? CODES_INT3 : CODES_INT2; }

  int64_t place(int64_t t) const { return ring ? (base + t) % ring : t; }
  /// How many of the tokens t .. end are stored contiguously from t on.
  int64_t run(int64_t t, int64_t end) const {
    return ring && ring - place(t) < end - t ? ring - place(t) : end - t;
  }
  // `head` counts the sub-heads through the batch
  char* row(int64_t head, int64_t t) const { return present + (head * capacity + place(t)) * row_bytes; }
  Half* scale(int64_t head, int64_t t) const { return scales + head * capacity + place(t); }

  /// The contiguous rows of kv head g from token t on, in a cache of 16 bits.
  CacheRows rows(const Call& call, int64_t b, int64_t g, int64_t t) const;
  /// The residual window of kv head g, its first tokens, or (keys) its offset, in float16.
  CacheRows recent_rows(const Call& call, int64_t b, int64_t g) const { return half_rows(call, b, g, lead); }
  CacheRows first_rows(const Call& call, int64_t b, int64_t g) const { return half_rows(call, b, g, 0); }
  CacheRows offset_row(const Call& call, int64_t b, int64_t g) const { return half_rows(call, b, g, first); }
  /// The offset that is subtracted from rows before they are rounded; null for values.
  const Half* offset(const Call& call, int64_t head) const;

  /// Copies the tokens begin..end of a sub-head to the present.
  void copy(int64_t head, int64_t begin, int64_t end) const;
  /// Makes the tokens begin..end present, and with the last chunk also the slots beyond. Not below 8 bits.
  void append_rows(const Call& call, int64_t b, int64_t sub_head, int64_t begin, int64_t end) const;
  /// Makes first tokens and offset present; the other functions of a low-bit cache need them.
  void begin_low_bit(const Call& call, int64_t b, int64_t sub_head) const;
  /// As append_rows below 8 bits, for few new tokens; the last chunk also makes the residual window present.
  void append_low_bit(const Call& call, int64_t b, int64_t sub_head, int64_t begin, int64_t end) const;

  // Its parts, for many new tokens
  /// The tokens begin..end, none of which was quantized before the call, rotated, as float16: [end - begin, d].
  void halves(const Call& call, int64_t b, int64_t sub_head, int64_t begin, int64_t end, Half* to) const;
  /// Quantizes the tokens t .. t + count, which are whole blocks of CACHE_BLOCK.
  void quantize(const Call& call, int64_t head, int64_t t, int64_t count, const Half* from) const;
  /// Copies the tokens begin..end of a sub-head to their place in `to`.
  void move(const Cache& to, int64_t head, int64_t begin, int64_t end) const;
  /// Copies the slots after the residual window's tokens.
  void copy_free_slots(const Call& call, int64_t head) const;

 private:
  CacheRows half_rows(const Call& call, int64_t b, int64_t g, int64_t slot) const;
  const float* new_row(const Call& call, int64_t b, int64_t sub_head, int64_t t, float* wide, float* rotated) const;
  void store(const Call& call, int64_t head, int64_t t, const float* row) const;
};

}  // namespace diffbit
