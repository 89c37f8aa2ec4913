// DiffAttention on a CPU: a call, and the choice of its path.
#include <cstring>
#include <utility>

#include "call.h"

namespace diffbit {
namespace {

constexpr int64_t FEW_ROWS = 16;  // per branch: up to here, reading the cache dominates

constexpr int64_t PROMPT = 1024;  // tokens of a prompt that are computed at once with a sliding window

/// Copies the past's rings to the present, which then serves as both.
void copy_rings_to_present(Call& call, Context& context) {
  for (Cache* cache : {&call.keys, &call.values}) {
    if (!cache->in_place) {
      Cache from = *cache;
      from.present = const_cast<char*>(cache->past), from.scales = const_cast<Half*>(cache->past_scales);
      context.parallel(call.batch * call.kv_heads, [&](int64_t head) { from.move(*cache, head, 0, cache->ring); });
    }
    cache->in_place = true;
  }
}

/// Computes few rows, if their tokens do not all see the same tokens or the same quantized tokens: one part after the
/// other, in the present's buffers.
void decode_parts(Call call, Context& context) {
  const int64_t length = call.length, past = call.all_total - length;
  for (int64_t begin = 0, end; begin < length || begin == 0; begin = end) {
    call.set_part(0, length, past);
    const auto joins = [&](int64_t i) {
      return call.seen_quantized(i) == call.seen_quantized(begin) && (!call.sliding || past + i < call.sliding);
    };
    for (end = begin + 1; end < length && joins(end);) ++end;
    end = smaller(end, length);
    call.set_part(begin, end - begin, past + begin);
    decode({call}, context);
    if (end == length) break;
    for (Cache* cache : {&call.keys, &call.values}) {
      cache->past = cache->present, cache->past_scales = cache->scales, cache->past_recent = cache->recent;
      cache->past_capacity = cache->capacity;
      cache->in_place = cache->recent_in_place = true;
    }
  }
}

/// A cache of the tokens that a part sees, in order, with room for its new tokens.
Cache in_order(const Call& call, const Cache& ring, Scratch where, Context& context) {
  Cache ordered = ring;
  const int64_t heads = call.batch * call.kv_heads, cached = ring.is_low_bit() ? call.before : call.cached;
  ordered.ring = 0;
  ordered.capacity = ring.is_low_bit() ? call.after : call.total;
  const int64_t rows = divide_up(heads * ordered.capacity * static_cast<int64_t>(ring.row_bytes), 64) * 64;
  const int64_t scales = heads * ordered.capacity * static_cast<int64_t>(sizeof(Half));
  ordered.present = scratch<char>(where, rows + (ring.scales ? scales : 0));
  if (ring.scales) ordered.scales = reinterpret_cast<Half*>(ordered.present + rows);
  context.parallel(heads, [&](int64_t head) { ring.move(ordered, head, 0, cached); });
  return ordered;
}

/// For many rows after a ring that not all of them see: works on copies of the ring, which in the end has the part's last
/// tokens.
void prefill_parts(Call call, Context& context) {
  const int64_t length = call.all_length, past = call.all_total - length, most = larger(PROMPT, call.sliding);
  for (int64_t begin = 0; begin < length; begin += most) {
    call.set_part(begin, smaller(most, length - begin), past + begin);
    Call part = call;
    part.keys = in_order(call, call.keys, KEY_ROWS, context);
    part.values = in_order(call, call.values, VALUE_ROWS, context);
    prefill(part, context);
    for (auto [from, to] : {std::pair{&part.keys, &call.keys}, std::pair{&part.values, &call.values}}) {
      const int64_t cached = to->is_low_bit() ? call.before : call.cached, count = to->is_low_bit() ? call.after : call.total;
      context.parallel(call.batch * call.kv_heads, [&, from = from, to = to](int64_t head) {
        from->move(*to, head, larger(cached, count - to->ring), count);
      });
      to->past_recent = to->recent, to->recent_in_place = true;
    }
  }
}

}  // namespace

DiffAttention::DiffAttention(const Node& node)
    : AttentionNode(node), kernels(DIFFBIT_PICK(attention)), lowbit(DIFFBIT_PICK(lowbit)), hadamard(DIFFBIT_PICK(hadamard)),
      bfloat16(node.bfloat16) {}

void DiffAttention::compute(Context& context) const {
  const Tensors of = tensors(context);
  const int64_t positions = of.batch * of.steps, rows = of.cos.shape[0];
  for (int64_t i = 0; i < positions; ++i)
    if (const int64_t position = of.position_ids.as<int64_t>()[i]; position < 0 || position >= rows)
      throw Error("%s holds %lld, wanted 0 to %lld: cos has %lld rows", of.position_ids.name, number(position),
                  number(rows - 1), number(rows));
  if (of.lengths) return compute_rows(of, context);
  Call call(*this, of);
  if (sliding_window) copy_rings_to_present(call, context);
  if (call.rows <= FEW_ROWS)
    decode_parts(call, context);
  else if (sliding_window && call.all_total > sliding_window)
    prefill_parts(call, context);
  else
    prefill(call, context);
}

void DiffAttention::compute_rows(const Tensors& of, Context& context) const {
  if (!of.batch) return;
  std::vector<Call> calls;
  const int64_t row_bytes = of.out.size() / of.batch * (of.out.type == ort::FLOAT16 ? 2 : 4);
  for (int64_t row = 0; row < of.batch; ++row)
    if (of.lengths[row] >= 0)
      calls.emplace_back(*this, of, row);
    else
      std::memset(of.out.as<char>() + row * row_bytes, 0, static_cast<size_t>(row_bytes));
  if (of.steps == 1)
    decode(calls, context);
  else
    for (const Call& call : calls) {
      if (call.rows > FEW_ROWS)
        throw Error("%s has a length for each row and %lld new tokens, wanted few", "past_length", number(of.steps));
      decode_parts(call, context);
    }
}

Call::Call(const DiffAttention& op, const AttentionNode::Tensors& of, int64_t row)
    : kernels(*op.kernels),
      lowbit(*op.lowbit),
      hadamard_kernels(*op.hadamard),
      bfloat16(op.bfloat16),
      first_row(larger(0, row)),
      batch(row < 0 ? of.batch : 1),
      heads(op.heads),
      query_heads(op.query_heads()),
      kv_heads(op.kv_heads),
      width(op.width),
      branches(op.branches),
      ratio(op.noise_ratio),
      d(of.d),
      groups(kv_heads / width),
      pairs(heads / groups),
      noises((branches - 1) * (pairs / ratio)),
      window(op.window),
      sliding(op.sliding_window),
      appends(of.appends),
      top(op.query_bits ? (1 << (op.query_bits - 1)) - 1 : 0),
      scale(op.scale),
      norm_eps(op.norm_eps),
      half(of.query.type == ort::FLOAT16),
      query(of.query),
      lambda(of.lambda),
      positions(of.position_ids),
      cos(of.cos),
      sin(of.sin),
      mask(of.attention_mask),
      gates(of.gates),
      out(of.out),
      keys(of.keys, true, d, window, op.first),
      values(of.values, false, d, window, op.first),
      all_length(of.steps),
      all_total((row < 0 ? of.past_length : of.lengths[row]) + of.steps),
      mask_columns(of.total) {
  set_part(0, all_length, all_total - all_length);
}

void Call::set_part(int64_t first_, int64_t length_, int64_t all_past) {
  int64_t base = sliding ? larger(0, all_past + 1 - sliding) : 0;
  if (is_low_bit()) base = smaller(base / CACHE_BLOCK * CACHE_BLOCK, quantized_tokens(all_past, window));
  keys.base = values.base = base;
  first = first_, length = length_, past = all_past - base;
  total = past + length;
  cached = appends ? past : total;
  before = is_low_bit() ? quantized_tokens(cached, window) : 0;
  after = is_low_bit() ? quantized_tokens(total, window) : 0;
  rows = pairs * length;
}

const float* Call::floats(const Tensor& tensor, int64_t index, float* wide) const {
  if (!half) return tensor.as<float>() + index * d;
  kernels.widen(tensor.as<Half>() + index * d, d, wide);
  return wide;
}

void Call::rotate(const float* x, int64_t b, int64_t i, float by, float* y) const {
  const int64_t position = positions.as<int64_t>()[token(b, i)];
  kernels.rotate(x, cos.as<float>() + position * (d / 2), sin.as<float>() + position * (d / 2), d, by, y);
}

void Call::hadamard(const float* x, float* y) const {
  float floats[ATTENTION_MOST_D];
  static_assert(ATTENTION_MOST_D >= HADAMARD_LANES, "room for a vector");
  hadamard_kernels.transform(x, y, false, d & -d, d, floats);
}

void Call::first_scores(int64_t b, int64_t g, int64_t j, const float* q, int64_t count, int64_t tokens, float* s,
                        int64_t stride) const {
  static_assert(MAX_FIRST <= ATTENTION_PAD, "a row of scores");
  float one_row[ATTENTION_PAD];  // a kernel may write behind the tokens
  CacheRows rows{};
  rows.count = 1;
  rows.rows[0] = keys.first_rows(*this, b, g).rows[j];
  for (int64_t i = 0; i < count; ++i) {
    kernels.scores[CACHE_FLOAT16](rows, tokens, d, q + i * padded(d), {{1, 0}}, one_row, ATTENTION_PAD);
    std::memcpy(s + i * stride, one_row, static_cast<size_t>(tokens) * sizeof *s);
  }
}

float Call::offset_score(int64_t b, int64_t g, int64_t j, const float* query) const {
  CacheRows row{};
  row.count = 1;
  row.rows[0] = keys.offset_row(*this, b, g).rows[j];
  float score[ATTENTION_PAD];
  kernels.scores[CACHE_FLOAT16](row, 1, d, query, {{1, 0}}, score, ATTENTION_PAD);
  return score[0];
}

Rows::Rows(const Call& call, int64_t b, int64_t g, int64_t begin, int64_t end) {
  const int64_t tokens = end - begin;
  all.reserve(static_cast<size_t>((call.pairs + call.noises) * tokens));
  for (int64_t pair = 0; pair < call.pairs; ++pair)
    for (int64_t i = begin; i < end; ++i)
      if (call.gate_of(b, i, g, pair) != 0) all.push_back({pair, i, -1});
  signals = count();
  if (!call.noises) return;
  // Signal rows are in the order of their noise heads. `first` is the first one of a noise head.
  for (int64_t noise = 0, first = 0, last = 0; noise < call.noises; ++noise, first = last) {
    while (last < signals && all[static_cast<size_t>(last)].head / call.ratio == noise) ++last;
    for (int64_t i = begin; i < end; ++i) {
      bool needed = false;
      for (int64_t row = first; row < last; ++row)
        if (Row& signal = all[static_cast<size_t>(row)]; signal.i == i) signal.noise = count(), needed = true;
      if (needed) all.push_back({noise, i, -1});
    }
  }
}

void Call::rotate_queries(int64_t b, int64_t g, const Rows& of, float* q) const {
  float wide[ATTENTION_MOST_D];
  for (int64_t row = 0; row < of.count(); ++row, q += padded(d)) {
    const auto [head_, i, noise] = of[row];
    const bool signal = row < of.signals;
    const int64_t group = signal ? head_ / ratio : head_, in_group = signal ? head_ % ratio : ratio;
    const int64_t sub_head = g * (pairs + noises) + group * (ratio + branches - 1) + in_group;
    rotate(floats(query, token(b, i) * query_heads + sub_head, wide), b, i, scale, q);
    if (keys.is_rotated()) hadamard(q, q);
    for (int64_t k = d; k < padded(d); ++k) q[k] = 0;
  }
}

void Call::write(int64_t b, int64_t g, int64_t begin, int64_t end, const Rows& of, const float* parts, int64_t count,
                 int64_t part_stride) const {
  const int64_t numbers = width * d;
  const auto index = [&](int64_t pair, int64_t i) { return (token(b, i) * heads + g * pairs + pair) * numbers; };
  for (int64_t pair = 0; gates && pair < pairs; ++pair)
    for (int64_t i = begin; i < end; ++i)
      if (gate_of(b, i, g, pair) == 0) {
        const int64_t size = half ? sizeof(Half) : sizeof(float);
        std::memset(out.as<char>() + index(pair, i) * size, 0, static_cast<size_t>(numbers * size));
      }
  float normed[2 * ATTENTION_MOST_D];
  for (int64_t row = 0; row < of.signals; ++row) {
    const auto [pair, i, noise] = of[row];
    float* to = half ? normed : out.as<float>() + index(pair, i);
    kernels.finish(parts + row * width_floats(), count, part_stride, width, d, norm_eps, to);
    if (values.is_rotated())  // the norm is the same before and after
      for (int64_t j = 0; j < width; ++j) hadamard(to + j * d, to + j * d);
    if (const float gate = gate_of(b, i, g, pair); gates)
      for (int64_t k = 0; k < numbers; ++k) to[k] *= gate;
    if (half) kernels.narrow(normed, numbers, out.as<Half>() + index(pair, i));
  }
}

Kernel* create_attention(const Node& node) { return new KernelOf<DiffAttention>(node); }

}  // namespace diffbit
