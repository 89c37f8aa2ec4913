#include "attention_node.h"

#include <algorithm>
#include <cstring>

namespace diffbit {
namespace {

/// The tensors and attributes of one side of the cache.
struct Names {
  schema::Input past, past_scale, past_recent;
  schema::Output present, present_scale, present_recent;
  schema::Integer bits;
};

using Schema = schema::DiffAttention;
constexpr Names KEYS = {Schema::PAST_KEY,    Schema::PAST_KEY_SCALE,    Schema::PAST_KEY_RECENT,
                        Schema::PRESENT_KEY, Schema::PRESENT_KEY_SCALE, Schema::PRESENT_KEY_RECENT,
                        Schema::KEY_BITS};
constexpr Names VALUES = {Schema::PAST_VALUE,    Schema::PAST_VALUE_SCALE,    Schema::PAST_VALUE_RECENT,
                          Schema::PRESENT_VALUE, Schema::PRESENT_VALUE_SCALE, Schema::PRESENT_VALUE_RECENT,
                          Schema::VALUE_BITS};

/// Whether a past and its present are the same memory.
bool shared(const Tensor& past, const Tensor& present) { return past.size() > 0 && past.data == present.data; }

/// Throws for inputs that do not fit `bits`.
CacheTensors past_of(const Context& context, const Names& names, const Tensor& fresh, int bits, int64_t batch,
                     int64_t kv_heads, int64_t d, int64_t recent_rows, int64_t ring) {
  CacheTensors cache{};
  cache.fresh = fresh;
  cache.bits = bits;
  cache.past = context.input(names.past);
  cache.past_scale = context.input(names.past_scale);
  cache.past_recent = context.input(names.past_recent);
  const Tensor &past = cache.past, &scale = cache.past_scale, &recent = cache.past_recent;
  const bool blocks = cache.is_low_bit();
  const bool codes = past.type == ort::UINT8 || past.type == ort::INT8;  // the entries determine the type of floats
  const bool fits = bits == 16 ? !codes : past.type == (blocks ? ort::UINT8 : ort::INT8);
  if (!fits)
    throw Error("%s is not %s, wanted where %s is %d", past.name, bits == 16 ? "float" : blocks ? "uint8" : "int8",
                names.bits.name, bits);
  if (blocks && d % CACHE_BLOCK)
    throw Error("%s holds %lld numbers a token, wanted a multiple of %lld where %s is %d", past.name, number(d),
                number(CACHE_BLOCK), names.bits.name, bits);
  past.expect({batch, kv_heads, ring ? ring : -1, blocks ? d * bits / 8 : d});
  const int64_t capacity = past.shape[2];
  if (blocks && capacity % CACHE_BLOCK)
    throw Error("%s has room for %lld tokens, wanted a multiple of %lld", past.name, number(capacity),
                number(CACHE_BLOCK));
  if (static_cast<bool>(scale) != (bits < 16))
    throw Error("%s is %s, wanted exactly where the cache has at most 8 bits", scale.name, scale ? "given" : "missing");
  if (static_cast<bool>(recent) != blocks)
    throw Error("%s is %s, wanted exactly where the cache has less than 8 bits", recent.name, recent ? "given" : "missing");
  if (bits < 16) scale.expect({batch, kv_heads, capacity});
  if (blocks) recent.expect({batch, kv_heads, recent_rows, d});
  cache.past_capacity = capacity;
  cache.ring = ring;
  return cache;
}

/// The present's buffers, with room for `tokens`.
void bind(Context& context, const Names& names, CacheTensors& cache, int64_t tokens) {
  const auto output = [&](const schema::Output& which, const Tensor& of, int64_t capacity) {
    int64_t shape[Tensor::MOST_DIMENSIONS];
    std::memcpy(shape, of.shape, sizeof shape);
    shape[2] = capacity;
    const Tensor buffer = context.output(which, shape, of.rank);
    if (!buffer.data && buffer.size())
      throw Error("%s is missing, wanted where the cache is %s", which.name, cache.is_low_bit() ? "of less than 8 bits" : "int8");
    return buffer;
  };
  const auto refuse = [&](const schema::Output& which, const char* where) {  // it would never be written
    if (context.wants(which)) throw Error("%s is given, wanted exactly where the cache is %s", which.name, where);
  };
  const Tensor &past = cache.past, &scale = cache.past_scale;
  cache.capacity = cache.ring || cache.past_capacity > tokens ? cache.past_capacity : tokens;
  cache.present = output(names.present, past, cache.capacity);
  cache.in_place = shared(past, cache.present);
  if (cache.in_place && cache.past_capacity != cache.capacity)
    throw Error("%s shares its memory with %s, but has room for %lld tokens where %lld are needed", past.name,
                cache.present.name, number(cache.past_capacity), number(cache.capacity));
  if (cache.bits == 16) {
    refuse(names.present_scale, "of at most 8 bits");
  } else {
    cache.present_scale = output(names.present_scale, scale, cache.capacity);
    if (scale.size() > 0 && cache.in_place != (scale.data == cache.present_scale.data))
      throw Error("%s and %s must share their memory with the outputs both or neither", past.name, scale.name);
  }
  if (!cache.is_low_bit()) return refuse(names.present_recent, "of less than 8 bits");
  cache.present_recent = output(names.present_recent, cache.past_recent, cache.past_recent.shape[2]);
  cache.recent_in_place = shared(cache.past_recent, cache.present_recent);
}

/// The past's buffers, if nothing is appended.
void reuse_past(Context& context, const Names& names, CacheTensors& cache) {
  for (const schema::Output& which : {names.present, names.present_scale, names.present_recent})
    if (context.wants(which)) throw Error("%s is given, wanted exactly where key and value are", which.name);
  cache.present = cache.past, cache.present_scale = cache.past_scale, cache.present_recent = cache.past_recent;
  cache.capacity = cache.past_capacity;
  cache.in_place = cache.recent_in_place = true;
}

}  // namespace

int64_t ring_rows(int64_t sliding_window, int bits) {
  return bits < 8 ? divide_up(sliding_window, CACHE_BLOCK) * CACHE_BLOCK : sliding_window;
}

int64_t quantized_tokens(int64_t total, int64_t window) {
  return total > window ? (total - window) / CACHE_BLOCK * CACHE_BLOCK : 0;
}

AttentionNode::AttentionNode(const Node& node)
    : heads(node.integer(NUM_HEADS)),
      kv_heads(node.integer(NUM_KV_HEADS)),
      width(1 + node.integer(WIDE_VALUE)),
      branches(node.integer(BRANCHES)),
      noise_ratio(node.integer(NOISE_RATIO)),
      window(node.integer(WINDOW)),
      first(node.integer(FIRST)),
      sliding_window(node.integer(SLIDING_WINDOW)),
      key_bits(static_cast<int>(node.integer(KEY_BITS))),
      value_bits(static_cast<int>(node.integer(VALUE_BITS))),
      query_bits(static_cast<int>(node.integer(QUERY_BITS))),
      scale(node.number(SCALE)),
      norm_eps(node.number(NORM_EPS)) {
  if (query_bits && key_bits == 16)
    throw Error("DiffAttention: query_bits is %d, wanted 0 where key_bits is 16", query_bits);
  if (first && sliding_window)
    throw Error("DiffAttention: first is %lld, wanted 0 where sliding_window is %lld", number(first), number(sliding_window));
  if (branches == 1 && width == 2) throw Error("DiffAttention: wide_value is 1, wanted 0 where branches is 1");
  if (kv_heads % width || heads % (kv_heads / width))
    throw Error("DiffAttention: num_heads is %lld, wanted a multiple of the %lld kv heads of num_kv_heads %lld%s",
                number(heads), number(kv_heads / width), number(kv_heads),
                width == 2 ? ", which must be even with wide_value" : "");
  const int64_t pairs = heads / (kv_heads / width);
  if (branches == 1 && noise_ratio > 1)
    throw Error("DiffAttention: noise_ratio is %lld, wanted 1 where branches is 1", number(noise_ratio));
  if (pairs % noise_ratio)
    throw Error("DiffAttention: noise_ratio is %lld, wanted a divisor of %lld, the pairs of a kv head",
                number(noise_ratio), number(pairs));
}

AttentionNode::Tensors AttentionNode::tensors(Context& context) const {
  Tensors of{};
  const Tensor query = context.input(QUERY), key = context.input(KEY), value = context.input(VALUE),
               lambda = context.input(LAMBDA), past_length = context.input(PAST_LENGTH),
               positions = context.input(POSITION_IDS), cos = context.input(COS), sin = context.input(SIN),
               mask = context.input(ATTENTION_MASK), gates = context.input(GATES);
  of.appends = static_cast<bool>(key);
  if (static_cast<bool>(value) != of.appends)
    throw Error("%s is %s, wanted exactly where key is", value.name, value ? "given" : "missing");
  if (!of.appends && sliding_window)
    throw Error("%s is missing, wanted where sliding_window is %lld", key.name, number(sliding_window));
  query.expect({-1, -1, -1});
  if (of.appends) key.expect({query.shape[0], query.shape[1], -1});
  const Tensor& heads_of = of.appends ? key : query;
  const int64_t sub_heads = of.appends ? kv_heads : query_heads();
  const int64_t batch = query.shape[0], length = query.shape[1], d = heads_of.shape[2] / sub_heads;
  if (d < 2 || d % 2 || d > ATTENTION_MOST_D || heads_of.shape[2] % sub_heads)
    throw Error("%s is %s, wanted %lld sub-heads of an even number of at most %lld numbers", heads_of.name,
                heads_of.shape_text().c_str(), number(sub_heads), number(ATTENTION_MOST_D));
  query.expect({batch, length, query_heads() * d});
  if (of.appends) value.expect({batch, length, kv_heads * d});
  const auto side = [&](const Names& names, const Tensor& fresh, int bits) {
    const int64_t recent_rows = first + (&names == &KEYS) + window + CACHE_BLOCK;
    return past_of(context, names, fresh, bits, batch, kv_heads, d, recent_rows, ring_rows(sliding_window, bits));
  };
  of.keys = side(KEYS, key, key_bits);
  of.values = side(VALUES, value, value_bits);
  if (of.keys.is_low_bit() == of.values.is_low_bit() && of.appends)
    of.values.past.expect({batch, kv_heads, of.keys.past_capacity, of.values.past.shape[3]});
  const bool by_row = past_length.rank == 1 && past_length.shape[0] != 1;
  past_length.expect({by_row ? batch : 1});
  const int64_t* lengths = past_length.as<int64_t>();
  const int64_t past = past_length.shape[0] ? *std::max_element(lengths, lengths + past_length.shape[0]) : 0;
  constexpr int64_t ANY = int64_t{1} << 40;
  for (const CacheTensors* cache : {&of.keys, &of.values}) {
    const int64_t most = cache->ring ? ANY
                                     : cache->past_capacity + (cache->is_low_bit() ? window + CACHE_BLOCK - 1 : 0) -
                                           (of.appends ? 0 : length);
    if ((past < 0 && !by_row) || past > most)
      throw Error("%s is %lld, wanted 0 to %lld, the capacity of %s%s", past_length.name, number(past), number(most),
                  cache == &of.keys ? "past_key" : "past_value", cache->is_low_bit() ? " and its recent tokens" : "");
  }
  const int64_t total = std::max<int64_t>(0, past) + length;
  mask.expect({batch, by_row ? -1 : total});
  if (by_row && mask.shape[1] < total)
    throw Error("%s is %s, wanted at least %lld columns: %s has a row of %lld tokens", mask.name,
                mask.shape_text().c_str(), number(total), past_length.name, number(past));
  positions.expect({batch, length});
  cos.expect({-1, d / 2});
  sin.expect({cos.shape[0], d / 2});
  if (static_cast<bool>(lambda) != (branches == 2))
    throw Error("%s is %s, wanted exactly where branches is 2", lambda.name, lambda ? "given" : "missing");
  if (lambda.rank == 3)
    lambda.expect({batch, length, heads});
  else if (lambda)
    lambda.expect({heads});
  if (gates) gates.expect({batch, length, heads});

  of.batch = batch, of.steps = length, of.past_length = past, of.d = d;
  of.lengths = by_row ? lengths : nullptr, of.total = mask.shape[1];
  of.query = query, of.lambda = lambda, of.position_ids = positions, of.cos = cos, of.sin = sin, of.attention_mask = mask;
  of.gates = gates;
  of.out = context.output(OUT, {batch, length, heads * width * d});
  if (of.appends) {
    bind(context, KEYS, of.keys, of.keys.is_low_bit() ? quantized_tokens(total, window) : total);
    bind(context, VALUES, of.values, of.values.is_low_bit() ? quantized_tokens(total, window) : total);
  } else {
    reuse_past(context, KEYS, of.keys);
    reuse_past(context, VALUES, of.values);
  }
  for (const CacheTensors* cache : {&of.keys, &of.values})
    if (by_row && !(cache->in_place && (cache->recent_in_place || !cache->is_low_bit())))
      throw Error("%s has %lld numbers, wanted one where past and present are not the same memory", past_length.name,
                  number(batch));
  return of;
}

}  // namespace diffbit
