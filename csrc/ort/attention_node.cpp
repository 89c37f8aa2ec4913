// What a node of DiffAttention and its tensors must be, and where what it makes will lie.
#include <cstring>
#include <utility>

#include "diff_attention.h"
#include "kernels/attention.h"
#include "kernels/lowbit.h"

namespace diffbit {
namespace {

constexpr int64_t GROUP = LOWBIT_GROUP;

/// Whether a past and its present are one memory.
bool shared(const Tensor& past, const Tensor& present) { return past.size() > 0 && past.data == present.data; }

/// Refuses inputs that do not fit `bits`.
CacheTensors past_of(const Context& context, bool keys, const Tensor& fresh, int bits, int64_t kv_heads, int64_t d,
                     int64_t window) {
  CacheTensors cache{};
  cache.fresh = fresh;
  cache.bits = bits;
  cache.past = context.input(keys ? 4 : 5, keys ? "DiffAttention: past_key" : "DiffAttention: past_value");
  cache.past_scale =
      context.input(keys ? 11 : 12, keys ? "DiffAttention: past_key_scale" : "DiffAttention: past_value_scale");
  cache.past_recent =
      context.input(keys ? 13 : 14, keys ? "DiffAttention: past_key_recent" : "DiffAttention: past_value_recent");
  const Tensor &past = cache.past, &scale = cache.past_scale, &recent = cache.past_recent;
  const bool grids = cache.grids();
  const bool codes = past.type == ort::UINT8 || past.type == ort::INT8;  // which floats there are, the entries say
  const bool fits = bits == 16 ? !codes : past.type == (grids ? ort::UINT8 : ort::INT8);
  if (!fits)
    throw Error("%s is not %s, wanted where %s is %d", past.name,
                bits == 16 ? "float" : grids ? "uint8" : "int8", keys ? "key_bits" : "value_bits", bits);
  if (grids && d % GROUP)
    throw Error("%s holds %lld numbers a token, wanted a multiple of %lld where %s is %d", past.name, number(d),
                number(GROUP), keys ? "key_bits" : "value_bits", bits);
  const int64_t batch = fresh.shape[0];
  past.expect({batch, kv_heads, -1, grids ? d * bits / 8 : d});
  const int64_t capacity = past.shape[2];
  if (grids && capacity % GROUP)
    throw Error("%s has room for %lld tokens, wanted a multiple of %lld", past.name, number(capacity), number(GROUP));
  if (static_cast<bool>(scale) != (bits < 16))
    throw Error("%s is %s, wanted exactly where the cache is int8, int4 or int2", scale.name, scale ? "given" : "missing");
  if (static_cast<bool>(recent) != grids)
    throw Error("%s is %s, wanted exactly where the cache is int4 or int2", recent.name, recent ? "given" : "missing");
  if (bits == 8) scale.expect({batch, kv_heads, capacity});
  if (grids && keys) scale.expect({batch, kv_heads, capacity / GROUP, 2, d});
  if (grids && !keys) scale.expect({batch, kv_heads, capacity, 2, d / GROUP});
  if (grids) recent.expect({batch, kv_heads, window + GROUP, d});
  cache.past_capacity = capacity;
  cache.scale_tokens = grids && keys ? GROUP : 1;
  return cache;
}

/// The present's buffers, with room for `tokens`.
void bind(Context& context, bool keys, CacheTensors& cache, int64_t tokens) {
  const char* const names[2][3] = {
      {"DiffAttention: present_value", "DiffAttention: present_value_scale", "DiffAttention: present_value_recent"},
      {"DiffAttention: present_key", "DiffAttention: present_key_scale", "DiffAttention: present_key_recent"}};
  const char* const* name = names[keys];
  const size_t first = keys ? 1 : 2;
  const auto output = [&](size_t index, const char* what, const Tensor& of, int64_t room) {
    int64_t shape[Tensor::MOST_DIMENSIONS];
    std::memcpy(shape, of.shape, sizeof shape);
    shape[2] = room;
    const Tensor found = context.output(index, what, shape, of.rank);
    if (!found.data && found.size())
      throw Error("%s is missing, wanted where the cache is %s", what, cache.grids() ? "int4 or int2" : "int8");
    return found;
  };
  const auto refuse = [&](size_t index, const char* what, const char* where) {  // nobody would write it
    if (context.wants(index)) throw Error("%s is given, wanted exactly where the cache is %s", what, where);
  };
  const Tensor &past = cache.past, &scale = cache.past_scale;
  cache.capacity = cache.past_capacity > tokens ? cache.past_capacity : tokens;
  cache.present = output(first, name[0], past, cache.capacity);
  cache.in_place = shared(past, cache.present);
  if (cache.in_place && cache.past_capacity != cache.capacity)
    throw Error("%s shares its memory with %s, but has room for %lld tokens where %lld are needed", past.name,
                cache.present.name, number(cache.past_capacity), number(cache.capacity));
  if (cache.bits == 16) {
    refuse(first + 2, name[1], "int8, int4 or int2");
  } else {
    cache.present_scale = output(first + 2, name[1], scale, cache.capacity / cache.scale_tokens);
    if (scale.size() > 0 && cache.in_place != (scale.data == cache.present_scale.data))
      throw Error("%s and %s must share their memory with the outputs both or neither", past.name, scale.name);
  }
  if (!cache.grids()) return refuse(first + 4, name[2], "int4 or int2");
  cache.present_recent = output(first + 4, name[2], cache.past_recent, cache.past_recent.shape[2]);
  cache.recent_in_place = shared(cache.past_recent, cache.present_recent);
}

}  // namespace

int64_t settled(int64_t total, int64_t window) { return total > window ? (total - window) / GROUP * GROUP : 0; }

AttentionNode::AttentionNode(const Node& node)
    : heads(node.integer("num_heads", 1, 1 << 16)),
      kv_heads(node.integer("num_kv_heads", 1, 1 << 16)),
      width(1 + node.integer("wide_value", 0, 1)),
      branches(node.integer("branches", 1, 2)),
      window(node.integer("window", 0, 1 << 20)),
      key_bits(static_cast<int>(node.integer("key_bits", 2, 16))),
      value_bits(static_cast<int>(node.integer("value_bits", 2, 16))),
      query_bits(static_cast<int>(node.integer("query_bits", 0, 8))),
      scale(node.number("scale")),
      norm_eps(node.number("norm_eps")) {
  node.expect_version(2);
  for (const auto& [name, bits] : {std::pair{"key_bits", key_bits}, {"value_bits", value_bits}})
    if (bits != 2 && bits != 4 && bits != 8 && bits != 16)
      throw Error("DiffAttention: %s is %d, wanted 16, 8, 4 or 2", name, bits);
  if (query_bits != 0 && query_bits != 4 && query_bits != 8)
    throw Error("DiffAttention: query_bits is %d, wanted 0, 8 or 4", query_bits);
  if (query_bits && key_bits == 16)
    throw Error("DiffAttention: query_bits is %d, wanted 0 where key_bits is 16", query_bits);
  if (branches == 1 && width == 2) throw Error("DiffAttention: wide_value is 1, wanted 0 where branches is 1");
  if (kv_heads % width || heads % (kv_heads / width))
    throw Error("DiffAttention: num_heads is %lld, wanted a multiple of the %lld kv heads of num_kv_heads %lld%s",
                number(heads), number(kv_heads / width), number(kv_heads),
                width == 2 ? ", which must be even with wide_value" : "");
}

AttentionTensors AttentionNode::tensors(Context& context) const {
  AttentionTensors of{};
  const Tensor query = context.input(0, "DiffAttention: query"), key = context.input(1, "DiffAttention: key"),
               value = context.input(2, "DiffAttention: value"), lambda = context.input(3, "DiffAttention: lambda"),
               past_length = context.input(6, "DiffAttention: past_length"),
               positions = context.input(7, "DiffAttention: position_ids"),
               cos = context.input(8, "DiffAttention: cos"), sin = context.input(9, "DiffAttention: sin"),
               mask = context.input(10, "DiffAttention: attention_mask");
  query.expect({-1, -1, -1});
  key.expect({query.shape[0], query.shape[1], -1});
  const int64_t batch = query.shape[0], steps = query.shape[1], d = key.shape[2] / kv_heads;
  if (d < 2 || d % 2 || d > ATTENTION_MOST_D || key.shape[2] % kv_heads)
    throw Error("%s is %s, wanted %lld sub-heads of an even number of at most %lld numbers", key.name,
                key.shape_text().c_str(), number(kv_heads), number(ATTENTION_MOST_D));
  query.expect({batch, steps, branches * heads * d});
  value.expect({batch, steps, kv_heads * d});
  of.keys = past_of(context, true, key, key_bits, kv_heads, d, window);
  of.values = past_of(context, false, value, value_bits, kv_heads, d, window);
  if (of.keys.grids() == of.values.grids())
    of.values.past.expect({batch, kv_heads, of.keys.past_capacity, of.values.past.shape[3]});
  past_length.expect({1});
  const int64_t past = *past_length.as<int64_t>();
  for (const CacheTensors* cache : {&of.keys, &of.values}) {
    const int64_t most = cache->past_capacity + (cache->grids() ? window + GROUP - 1 : 0);
    if (past < 0 || past > most)
      throw Error("%s is %lld, wanted 0 to %lld, the capacity of %s%s", past_length.name, number(past), number(most),
                  cache == &of.keys ? "past_key" : "past_value", cache->grids() ? " and its recent tokens" : "");
  }
  const int64_t total = past + steps;
  mask.expect({batch, total});
  positions.expect({batch, steps});
  cos.expect({-1, d / 2});
  sin.expect({cos.shape[0], d / 2});
  if (static_cast<bool>(lambda) != (branches == 2))
    throw Error("%s is %s, wanted exactly where branches is 2", lambda.name, lambda ? "given" : "missing");
  if (lambda.rank == 3)
    lambda.expect({batch, steps, heads});
  else if (lambda)
    lambda.expect({heads});

  of.batch = batch, of.steps = steps, of.past = past, of.d = d;
  of.query = query, of.lambda = lambda, of.positions = positions, of.cos = cos, of.sin = sin, of.mask = mask;
  of.out = context.output(0, "DiffAttention: out", {batch, steps, heads * width * d});
  bind(context, true, of.keys, of.keys.grids() ? settled(total, window) : total);
  bind(context, false, of.values, of.values.grids() ? settled(total, window) : total);
  return of;
}

}  // namespace diffbit
