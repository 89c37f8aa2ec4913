#include "cache.h"

#include <cstring>

#include "call.h"

namespace diffbit {
namespace {

CacheType type_of(const Tensor& cache) {
  switch (cache.type) {
    case ort::FLOAT16: return CACHE_FLOAT16;
    case ort::INT8: return CACHE_INT8;
    default: return CACHE_FLOAT32;
  }
}

size_t halves_bytes(int64_t count) { return static_cast<size_t>(count) * sizeof(Half); }

}  // namespace

Cache::Cache(const CacheTensors& tensors, bool is_keys_, int64_t d, int64_t window, int64_t first_)
    : fresh(tensors.fresh),
      is_keys(is_keys_),
      bits(tensors.bits),
      type(type_of(tensors.past)),
      past(tensors.past.as<char>()),
      present(tensors.present.as<char>()),
      row_bytes(static_cast<size_t>(type == CACHE_FLOAT32 && bits == 16 ? d * 4 : d * bits / 8)),
      past_scales(tensors.past_scale.as<Half>()),
      scales(tensors.present_scale.as<Half>()),
      past_capacity(tensors.past_capacity),
      capacity(tensors.capacity),
      ring(tensors.ring),
      base(0),
      in_place(tensors.in_place),
      past_recent(tensors.past_recent.as<Half>()),
      recent(tensors.present_recent.as<Half>()),
      first(first_),
      lead(first + is_keys),
      slots(lead + window + CACHE_BLOCK),
      recent_in_place(tensors.recent_in_place) {}

CacheRows Cache::rows(const Call& call, int64_t b, int64_t g, int64_t t) const {
  CacheRows group_rows{};
  group_rows.count = call.width;
  for (int64_t j = 0; j < call.width; ++j) group_rows.rows[j] = row(call.head(b, g, j), t);
  return group_rows;
}

CacheRows Cache::half_rows(const Call& call, int64_t b, int64_t g, int64_t slot) const {
  CacheRows group_rows{};
  group_rows.count = call.width;
  for (int64_t j = 0; j < call.width; ++j) group_rows.rows[j] = recent + (call.head(b, g, j) * slots + slot) * call.d;
  return group_rows;
}

const Half* Cache::offset(const Call& call, int64_t head) const {
  return is_keys ? recent + (head * slots + first) * call.d : nullptr;
}

void Cache::copy(int64_t head, int64_t begin, int64_t end) const {
  if (in_place || begin >= end) return;
  std::memcpy(row(head, begin), past + (head * past_capacity + begin) * row_bytes, (end - begin) * row_bytes);
  if (scales)
    std::memcpy(scale(head, begin), past_scales + head * past_capacity + begin, halves_bytes(end - begin));
}

void Cache::move(const Cache& to, int64_t head, int64_t begin, int64_t end) const {
  for (int64_t t = begin, count; t < end; t += count) {
    count = smaller(run(t, end), to.run(t, end));
    std::memcpy(to.row(head, t), row(head, t), count * row_bytes);
    if (scales) std::memcpy(to.scale(head, t), scale(head, t), halves_bytes(count));
  }
}

/// A new token's numbers as floats, as a float cache would store them.
const float* Cache::new_row(const Call& call, int64_t b, int64_t sub_head, int64_t t, float* wide,
                            float* rotated) const {
  const int64_t i = t - call.past;
  const float* x = call.floats(fresh, call.token(b, i) * call.kv_heads + sub_head, wide);
  if (!is_keys) return x;
  call.rotate(x, b, i, 1, rotated);
  return rotated;
}

void Cache::store(const Call& call, int64_t head, int64_t t, const float* from) const {
  char* place = row(head, t);
  if (type == CACHE_FLOAT32) std::memcpy(place, from, row_bytes);
  if (type == CACHE_FLOAT16) call.kernels.narrow(from, call.d, reinterpret_cast<Half*>(place));
  if (type != CACHE_INT8) return;
  float rotated[ATTENTION_MOST_D];
  call.hadamard(from, rotated);
  *scale(head, t) = call.kernels.quantize(rotated, call.d, reinterpret_cast<int8_t*>(place));
}

void Cache::append_rows(const Call& call, int64_t b, int64_t sub_head, int64_t begin, int64_t end) const {
  float wide[ATTENTION_MOST_D], rotated[ATTENTION_MOST_D];
  const int64_t head = b * call.kv_heads + sub_head;
  copy(head, begin, smaller(end, call.cached));
  if (end == call.total) copy(head, call.total, past_capacity);
  for (int64_t t = larger(begin, call.cached); t < end; ++t)
    store(call, head, t, new_row(call, b, sub_head, t, wide, rotated));
}

void Cache::begin_low_bit(const Call& call, int64_t b, int64_t sub_head) const {
  const int64_t head = b * call.kv_heads + sub_head, d = call.d;
  Half* to = recent + head * slots * d;
  if (!recent_in_place) std::memcpy(to, past_recent + head * slots * d, halves_bytes(lead * d));
  if (call.cached < first) halves(call, b, sub_head, call.cached, smaller(first, call.total), to + call.cached * d);
  if (!is_keys || !call.quantizes_first()) return;
  Half block[OFFSET_TOKENS * ATTENTION_MOST_D];
  halves(call, b, sub_head, OFFSET_BEGIN, OFFSET_BEGIN + OFFSET_TOKENS, block);
  float sums[OFFSET_TOKENS * ATTENTION_MOST_D];
  call.kernels.widen(block, OFFSET_TOKENS * d, sums);
  for (int64_t count = OFFSET_TOKENS / 2; count; count /= 2)
    for (int64_t i = 0; i < count * d; ++i) sums[i] += sums[count * d + i];
  for (int64_t i = 0; i < d; ++i) sums[i] /= OFFSET_TOKENS;
  call.kernels.narrow(sums, d, to + first * d);
}

void Cache::append_low_bit(const Call& call, int64_t b, int64_t sub_head, int64_t begin, int64_t end) const {
  const int64_t head = b * call.kv_heads + sub_head, d = call.d;
  copy(head, begin, smaller(end, call.before));
  if (end < call.total) return;
  copy(head, call.after, past_capacity);
  Half block[CACHE_BLOCK * ATTENTION_MOST_D];
  for (int64_t t = call.before; t < call.after; t += CACHE_BLOCK) {
    halves(call, b, sub_head, t, t + CACHE_BLOCK, block);
    quantize(call, head, t, CACHE_BLOCK, block);
  }
  Half* to = recent + (head * slots + lead) * d;
  const Half* from = past_recent + (head * slots + lead) * d;
  if (call.past > call.after && (!recent_in_place || call.after > call.before))
    std::memmove(to, from + (call.after - call.before) * d, halves_bytes((call.past - call.after) * d));
  copy_free_slots(call, head);
  if (const int64_t t = larger(call.past, call.after); t < call.total)
    halves(call, b, sub_head, t, call.total, to + (t - call.after) * d);
}

void Cache::halves(const Call& call, int64_t b, int64_t sub_head, int64_t begin, int64_t end, Half* to) const {
  float wide[ATTENTION_MOST_D], roped[ATTENTION_MOST_D], rotated[ATTENTION_MOST_D];
  const int64_t d = call.d;
  const Half* from = past_recent + ((b * call.kv_heads + sub_head) * slots + lead) * d;
  if (const int64_t old = smaller(end, call.cached) - begin; old > 0)
    std::memcpy(to, from + (begin - call.before) * d, halves_bytes(old * d));
  for (int64_t t = larger(begin, call.cached); t < end; ++t) {
    call.hadamard(new_row(call, b, sub_head, t, wide, roped), rotated);
    call.kernels.narrow(rotated, d, to + (t - begin) * d);
  }
}

void Cache::quantize(const Call& call, int64_t head, int64_t t, int64_t count, const Half* from) const {
  for (int64_t i = 0; i < count; i += CACHE_BLOCK)
    call.lowbit.encode[codes()](from + i * call.d, offset(call, head), CACHE_BLOCK, call.d,
                                reinterpret_cast<uint8_t*>(row(head, t + i)), scale(head, t + i));
}

void Cache::copy_free_slots(const Call& call, int64_t head) const {
  if (recent_in_place) return;
  const int64_t used = lead + call.total - call.after, place = (head * slots + used) * call.d;
  std::memcpy(recent + place, past_recent + place, halves_bytes((slots - used) * call.d));
}

}  // namespace diffbit
