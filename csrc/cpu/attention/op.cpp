// DiffAttention on a CPU: a call, and which way it takes.
#include "call.h"

namespace diffbit {
namespace {

constexpr int64_t FEW_ROWS = 16;  // per branch: up to here the work is reading the cache

/// Few rows whose tokens do not all see the same tokens quantized: one part after the other, in the present's buffers.
void decode_parts(Call call, Context& context) {
  const int64_t length = call.length, past = call.past;
  for (int64_t begin = 0, end; begin < length || begin == 0; begin = end) {
    call.set_part(0, length, past);
    for (end = begin + 1; end < length && call.seen_quantized(end) == call.seen_quantized(begin);) ++end;
    end = smaller(end, length);
    call.set_part(begin, end - begin, past + begin);
    decode(call, context);
    if (end == length) break;
    for (Cache* cache : {&call.keys, &call.values}) {
      cache->past = cache->present, cache->past_scales = cache->scales, cache->past_recent = cache->recent;
      cache->past_capacity = cache->capacity;
      cache->in_place = cache->recent_in_place = true;
    }
  }
}

}  // namespace

DiffAttention::DiffAttention(const Node& node)
    : AttentionNode(node), kernels(DIFFBIT_PICK(attention)), lowbit(DIFFBIT_PICK(lowbit)) {}

void DiffAttention::compute(Context& context) const {
  const AttentionTensors of = tensors(context);
  const int64_t positions = of.batch * of.length, rows = of.cos.shape[0];
  for (int64_t i = 0; i < positions; ++i)
    if (const int64_t position = of.positions.as<int64_t>()[i]; position < 0 || position >= rows)
      throw Error("%s holds %lld, wanted 0 to %lld: cos has %lld rows", of.positions.name, number(position),
                  number(rows - 1), number(rows));
  const Call call(*this, of);
  if (call.rows <= FEW_ROWS)
    decode_parts(call, context);
  else
    prefill(call, context);
}

Call::Call(const DiffAttention& op, const AttentionTensors& of)
    : kernels(*op.kernels),
      lowbit(*op.lowbit),
      batch(of.batch),
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
      top(op.query_bits ? (1 << (op.query_bits - 1)) - 1 : 0),
      scale(op.scale),
      norm_eps(op.norm_eps),
      half(of.query.type == ort::FLOAT16),
      query(of.query),
      lambda(of.lambda),
      positions(of.positions),
      cos(of.cos),
      sin(of.sin),
      mask(of.mask),
      out(of.out),
      keys(of.keys, true, d, window),
      values(of.values, false, d, window),
      all_length(of.length),
      all_total(of.past + of.length) {
  set_part(0, of.length, of.past);
}

void Call::set_part(int64_t first_, int64_t length_, int64_t past_) {
  first = first_, length = length_, past = past_;
  total = past + length;
  before = blockwise() ? quantized_tokens(past, window) : 0;
  after = blockwise() ? quantized_tokens(total, window) : 0;
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

void Call::rotate_queries(int64_t b, int64_t g, int64_t begin, int64_t end, float* q) const {
  float wide[ATTENTION_MOST_D];
  for (int64_t row = 0; row < pairs + noises; ++row) {
    const int64_t noise = row - pairs, in_group = noise < 0 ? row % ratio : ratio;
    const int64_t sub_head = g * (pairs + noises) + (noise < 0 ? row / ratio : noise) * (ratio + branches - 1) + in_group;
    for (int64_t i = begin; i < end; ++i, q += padded(d)) {
      rotate(floats(query, token(b, i) * query_heads + sub_head, wide), b, i, scale, q);
      for (int64_t k = d; k < padded(d); ++k) q[k] = 0;
    }
  }
}

void Call::write(int64_t b, int64_t i, int64_t head_, const float* parts, int64_t count, int64_t part_stride) const {
  float normed[2 * ATTENTION_MOST_D];
  const int64_t index = (token(b, i) * heads + head_) * width * d;
  kernels.finish(parts, count, part_stride, width, d, norm_eps, half ? normed : out.as<float>() + index);
  if (half) kernels.narrow(normed, width * d, out.as<Half>() + index);
}

}  // namespace diffbit
