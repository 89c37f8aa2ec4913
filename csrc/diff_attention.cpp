// How the work of DiffAttention is cut into tasks. The cuts depend on shapes alone, never on the number of threads, and
// what several tasks made is summed in one order: the same bits on any number of threads.
//
// Rows. The queries of one kv head g are rows in the order [branch, pair, step]; sub-head j of the keys serves the rows
// j * rows .. (j + 1) * rows. After the difference the rows of the first branch hold A1 - lambda A2.
//
// Few rows (decode): the context is cut into chunks.
//     1. per (batch, kv head, chunk): append what is new, scores, exp(s - chunk's maximum)
//     2. per (batch, kv head):        what each chunk's numbers must be multiplied by (log-sum-exp)
//     3. per (batch, kv head, chunk): the difference, its product with the chunk's values
//     4. per (batch, kv head):        the sum over the chunks, head norm
// One chunk: all of it in one task. What is in the cache is read once, as it lies there.
//
// Many rows (prefill): the kv heads of which FLOATS_AT_ONCE hold the keys are taken together.
//     1. per (batch, kv head, chunk): append, keys packed for the product with many queries, values made float
//     2. per (batch, kv head, block of queries): scores of the keys that the block sees, softmax, difference, product
// A block's [rows, T] scores stay with the thread that made them.
#include "diff_attention.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>

#include "half.h"
#include "kernels/attention.h"

namespace diffbit {
namespace {

// SCORES, QUERIES and MIXED belong to the calling thread where the rows are few, to each worker where they are many
enum Scratch { SCORES, QUERIES, MIXED, MAXIMA, SUMS, KEYS, VALUES };
constexpr int64_t CHUNK = 256;               // keys
constexpr int64_t FEW_ROWS = 16;             // per branch: up to here the work is reading the cache
constexpr int64_t BLOCK_ROWS = 16;           // of queries per branch in a block
constexpr int64_t FLOATS_AT_ONCE = 4 << 20;  // of packed keys and values

static_assert(CHUNK % ATTENTION_KEYS == 0, "a chunk is packed by itself");

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/// Keys or values: what was, and the buffer that holds it with what is new.
struct Cache {
  const char* past;
  char* present;
  const float* past_steps;
  float* steps;
  int64_t past_capacity, capacity;
  size_t row_bytes;
  bool in_place;

  /// Rows begin..end of a sub-head (counted through the batch) into the present, as they are.
  void copy(int64_t head, int64_t begin, int64_t end) const {
    if (in_place || begin >= end) return;
    std::memcpy(present + (head * capacity + begin) * row_bytes, past + (head * past_capacity + begin) * row_bytes,
                (end - begin) * row_bytes);
    if (steps)
      std::memcpy(steps + head * capacity + begin, past_steps + head * past_capacity + begin,
                  (end - begin) * sizeof(float));
  }
};

struct Run {
  const AttentionKernels& kernels;
  int64_t batch, steps, heads, kv_heads, width, groups, pairs, d, past, total;
  int64_t chunks, rows, stream_rows;  // rows of a branch; rows that one sub-head of the keys serves
  float scale, norm_eps;
  bool half;  // query, key, value, out are float16
  CacheKind kind;
  Tensor query, key, value, lambda, positions, cos, sin, mask, out;
  Cache keys, values;

  int64_t width_floats() const { return width * padded(d); }
  bool few() const { return rows <= FEW_ROWS; }

  /// d numbers of a tensor [B, S, any, d] as floats; `room` is used where they are not floats yet.
  const float* floats(const Tensor& tensor, int64_t index, float* room) const {
    if (!half) return tensor.as<float>() + index * d;
    kernels.widen(tensor.as<Half>() + index * d, d, room);
    return room;
  }

  void rotate(const float* x, int64_t b, int64_t step, float by, float* y) const {
    const int64_t position = positions.as<int64_t>()[b * steps + step];
    kernels.rotate(x, cos.as<float>() + position * (d / 2), sin.as<float>() + position * (d / 2), d, by, y);
  }

  void store(const Cache& cache, int64_t head, int64_t t, const float* row) const {
    char* place = cache.present + (head * cache.capacity + t) * cache.row_bytes;
    if (kind == CACHE_FLOAT32) std::memcpy(place, row, cache.row_bytes);
    if (kind == CACHE_FLOAT16) kernels.narrow(row, d, reinterpret_cast<Half*>(place));
    if (kind == CACHE_INT8)
      cache.steps[head * cache.capacity + t] = kernels.quantize(row, d, reinterpret_cast<int8_t*>(place));
  }

  /// Makes the rows begin..end of kv head g's sub-heads present, and with the last of them what lies beyond.
  void append(int64_t b, int64_t g, int64_t begin, int64_t end) const {
    float wide[ATTENTION_MOST_D], rotated[ATTENTION_MOST_D];
    for (int64_t j = 0; j < width; ++j) {
      const int64_t sub_head = g * width + j, head = b * kv_heads + sub_head;
      for (const Cache* cache : {&keys, &values}) {
        cache->copy(head, begin, smaller(end, past));
        if (end == total) cache->copy(head, total, cache->past_capacity);
      }
      for (int64_t t = larger(begin, past); t < end; ++t) {
        const int64_t step = t - past, index = (b * steps + step) * kv_heads + sub_head;
        rotate(floats(key, index, wide), b, step, 1, rotated);
        store(keys, head, t, rotated);
        store(values, head, t, floats(value, index, wide));
      }
    }
  }

  CacheRows at(const Cache& cache, int64_t b, int64_t g, int64_t t) const {
    CacheRows rows_{};
    rows_.count = width;
    for (int64_t j = 0; j < width; ++j) {
      const int64_t row = (b * kv_heads + g * width + j) * cache.capacity + t;
      rows_.rows[j] = cache.present + row * cache.row_bytes;
      rows_.steps[j] = cache.steps ? cache.steps + row : nullptr;
    }
    return rows_;
  }

  /// The queries of kv head g and the steps first..last, rotated and scaled: q [2, pairs, last - first, padded(d)].
  void rotate_queries(int64_t b, int64_t g, int64_t first, int64_t last, float* q) const {
    float wide[ATTENTION_MOST_D];
    for (int64_t branch = 0; branch < 2; ++branch)
      for (int64_t pair = 0; pair < pairs; ++pair)
        for (int64_t step = first; step < last; ++step, q += padded(d)) {
          const int64_t sub_head = 2 * (g * pairs + pair) + branch;
          rotate(floats(query, (b * steps + step) * 2 * heads + sub_head, wide), b, step, scale, q);
          for (int64_t i = d; i < padded(d); ++i) q[i] = 0;
        }
  }

  float lambda_of(int64_t b, int64_t step, int64_t pair) const {
    return lambda.as<float>()[lambda.rank == 1 ? pair : (b * steps + step) * heads + pair];
  }

  const int64_t* mask_of(int64_t b) const { return mask.as<int64_t>() + b * total; }

  void write(int64_t b, int64_t step, int64_t head, const float* parts, int64_t count, int64_t part_stride) const {
    float normed[2 * ATTENTION_MOST_D];
    const int64_t index = ((b * steps + step) * heads + head) * width * d;
    kernels.finish(parts, count, part_stride, width, d, norm_eps, half ? normed : out.as<float>() + index);
    if (half) kernels.narrow(normed, width * d, out.as<Half>() + index);
  }

  // Few rows. The arrays of a task: q [2 * rows, padded(d)], s [2 * rows, CHUNK], mixed [rows, width_floats].
  // Those of a kv head: maxima and sums [2 * rows, chunks]; the maxima become factors.

  void chunk_scores(int64_t b, int64_t g, int64_t chunk, float* q, float* s, float* maxima, float* sums) const {
    const int64_t begin = chunk * CHUNK, end = smaller(begin + CHUNK, total);
    append(b, g, begin, end);
    rotate_queries(b, g, 0, steps, q);
    kernels.scores[kind](at(keys, b, g, begin), end - begin, d, q, stream_rows, s, CHUNK);
    const bool hide = kernels.hides(mask_of(b) + begin, end - begin);
    for (int64_t row = 0; row < 2 * rows; ++row) {
      const int64_t seen = larger(0, smaller(end - begin, past + row % steps + 1 - begin));
      float* e = s + row * CHUNK;
      if (hide) kernels.hide(e, mask_of(b) + begin, seen);
      maxima[row * chunks + chunk] = kernels.softmax(e, seen, sums + row * chunks + chunk);
      for (int64_t t = seen; t < end - begin; ++t) e[t] = 0;
    }
  }

  void merge(int64_t b, int64_t g, float* maxima, const float* sums) const {
    for (int64_t row = 0; row < 2 * rows; ++row) {
      float *factors = maxima + row * chunks, largest = -std::numeric_limits<float>::infinity(), sum = 0;
      for (int64_t chunk = 0; chunk < chunks; ++chunk)
        if (factors[chunk] > largest) largest = factors[chunk];
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const float found = sums[row * chunks + chunk];
        factors[chunk] = found == 0 ? 0 : std::exp(factors[chunk] - largest);  // 0: nothing visible in the chunk
        sum += found * factors[chunk];
      }
      float share = sum == 0 ? 0 : 1 / sum;
      if (row >= rows) share *= lambda_of(b, row % steps, g * pairs + (row - rows) / steps);
      for (int64_t chunk = 0; chunk < chunks; ++chunk) factors[chunk] *= share;
    }
  }

  void chunk_mix(int64_t b, int64_t g, int64_t chunk, float* s, const float* factors, float* mixed) const {
    const int64_t begin = chunk * CHUNK, count = smaller(CHUNK, total - begin);
    for (int64_t row = 0; row < rows; ++row)
      kernels.combine(s + row * CHUNK, factors[row * chunks + chunk], s + (rows + row) * CHUNK,
                      factors[(rows + row) * chunks + chunk], count, s + row * CHUNK);
    kernels.mix[kind](at(values, b, g, begin), count, d, s, rows, CHUNK, mixed);
  }

  void decode(Context& context) const {
    const int64_t all = batch * groups, tasks = all * chunks;
    float* q = scratch<float>(QUERIES, tasks * 2 * rows * padded(d));
    float* s = scratch<float>(SCORES, tasks * 2 * rows * CHUNK);
    float* mixed = scratch<float>(MIXED, tasks * rows * width_floats());
    float* maxima = scratch<float>(MAXIMA, tasks * 2 * rows);
    float* sums = scratch<float>(SUMS, tasks * 2 * rows);

    const auto scores = [&](int64_t task) {
      const int64_t head = task / chunks, of_head = head * chunks * 2 * rows;
      chunk_scores(head / groups, head % groups, task % chunks, q + task * 2 * rows * padded(d),
                   s + task * 2 * rows * CHUNK, maxima + of_head, sums + of_head);
    };
    const auto factors = [&](int64_t head) {
      merge(head / groups, head % groups, maxima + head * chunks * 2 * rows, sums + head * chunks * 2 * rows);
    };
    const auto products = [&](int64_t task) {
      const int64_t head = task / chunks;
      chunk_mix(head / groups, head % groups, task % chunks, s + task * 2 * rows * CHUNK,
                maxima + head * chunks * 2 * rows, mixed + task * rows * width_floats());
    };
    const auto result = [&](int64_t head) {
      const int64_t g = head % groups;
      for (int64_t row = 0; row < rows; ++row)
        write(head / groups, row % steps, g * pairs + row / steps,
              mixed + (head * chunks * rows + row) * width_floats(), chunks, rows * width_floats());
    };
    if (chunks == 1)
      return context.parallel(all, [&](int64_t head) {
        scores(head);
        factors(head);
        products(head);
        result(head);
      });
    context.parallel(tasks, scores);
    context.parallel(all, factors);
    context.parallel(tasks, products);
    context.parallel(all, result);
  }

  // Many rows

  void prefill(Context& context) const {
    const int64_t all = batch * groups, keys_ = chunks * CHUNK;
    const bool as_they_lie = kind == CACHE_FLOAT32 && padded(d) == d;
    const int64_t key_floats = width * keys_ * d, value_floats = as_they_lie ? 0 : total * width_floats();
    const int64_t at_once = smaller(all, larger(1, FLOATS_AT_ONCE / (key_floats + value_floats)));
    float* packed = scratch<float>(KEYS, at_once * key_floats);
    float* floats_ = scratch<float>(VALUES, at_once * value_floats);
    const int64_t block_steps = larger(1, BLOCK_ROWS / pairs), blocks = divide_up(steps, block_steps);
    std::atomic<bool> no_memory{false};

    for (int64_t first = 0; first < all; first += at_once) {
      const int64_t count = smaller(at_once, all - first);
      context.parallel(count * chunks, [&](int64_t task) {
        const int64_t slot = task / chunks, b = (first + slot) / groups, g = (first + slot) % groups;
        const int64_t begin = task % chunks * CHUNK, end = smaller(begin + CHUNK, total);
        append(b, g, begin, end);
        const CacheRows from = at(keys, b, g, begin), values_from = at(values, b, g, begin);
        for (int64_t j = 0; j < width; ++j) {
          kernels.pack_keys[kind](from.rows[j], from.steps[j], end - begin, d,
                                  packed + slot * key_floats + (j * keys_ + begin) * d);
          if (!as_they_lie)
            kernels.unpack_values[kind](values_from.rows[j], values_from.steps[j], end - begin, d,
                                        floats_ + slot * value_floats + (j * total + begin) * padded(d));
        }
      });
      context.parallel(count * blocks, [&](int64_t task) {
        // The last queries see the most keys: they begin
        const int64_t slot = task % count, b = (first + slot) / groups, g = (first + slot) % groups;
        const int64_t begin = (blocks - 1 - task / count) * block_steps, end = smaller(begin + block_steps, steps);
        CacheRows from = at(values, b, g, 0);
        if (!as_they_lie)
          for (int64_t j = 0; j < width; ++j)
            from.rows[j] = floats_ + slot * value_floats + j * total * padded(d);
        try {
          block(b, g, begin, end, packed + slot * key_floats, keys_, from);
        } catch (const std::bad_alloc&) {
          no_memory = true;
        }
      });
    }
    if (no_memory) throw std::bad_alloc();
  }

  /// The steps begin..end of kv head g. packed: [width, keys_ / 32, d, 32]; from: rows of padded(d) floats.
  void block(int64_t b, int64_t g, int64_t begin, int64_t end, const float* packed, int64_t keys_,
             const CacheRows& from) const {
    const int64_t steps_ = end - begin, rows_ = pairs * steps_, streams = 2 * rows_ / width;
    const int64_t seen = past + end, blocks = divide_up(seen, ATTENTION_KEYS), stride = blocks * ATTENTION_KEYS;
    float* q = scratch<float>(QUERIES, 2 * rows_ * padded(d));
    float* s = scratch<float>(SCORES, 2 * rows_ * stride);
    float* mixed = scratch<float>(MIXED, rows_ * width_floats());
    rotate_queries(b, g, begin, end, q);
    for (int64_t j = 0; j < width; ++j)
      kernels.packed_scores(packed + j * keys_ * d, blocks, d, q + j * streams * padded(d), streams,
                            s + j * streams * stride, stride);
    const bool hide = kernels.hides(mask_of(b), seen);
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t step = begin + row % steps_, visible = past + step + 1;
      float *signal = s + row * stride, *noise = s + (rows_ + row) * stride, sums[2];
      for (float* e : {signal, noise}) {
        if (hide) kernels.hide(e, mask_of(b), visible);
        float& sum = sums[e == noise];
        kernels.softmax(e, visible, &sum);
        sum = sum == 0 ? 0 : 1 / sum;
      }
      kernels.combine(signal, sums[0], noise, sums[1] * lambda_of(b, step, g * pairs + row / steps_), visible, signal);
      for (int64_t t = visible; t < seen; ++t) signal[t] = 0;
    }
    kernels.mix[CACHE_FLOAT32](from, seen, padded(d), s, rows_, stride, mixed);
    for (int64_t row = 0; row < rows_; ++row)
      write(b, begin + row % steps_, g * pairs + row / steps_, mixed + row * width_floats(), 1, 0);
  }
};

CacheKind kind_of(const Tensor& cache) {
  switch (cache.type) {
    case ort::FLOAT16: return CACHE_FLOAT16;
    case ort::INT8: return CACHE_INT8;
    default: return CACHE_FLOAT32;
  }
}

Cache cache_of(const Tensor& past, const Tensor& present, const Tensor& past_steps, const Tensor& steps, size_t bytes) {
  Cache cache{};
  cache.past = past.as<char>();
  cache.present = present.as<char>();
  cache.past_steps = past_steps.as<float>();
  cache.steps = steps.as<float>();
  cache.past_capacity = past.shape[2];
  cache.capacity = present.shape[2];
  cache.row_bytes = static_cast<size_t>(past.shape[3]) * bytes;
  cache.in_place = past.size() > 0 && past.data == present.data;
  if (cache.in_place && cache.past_capacity != cache.capacity)
    throw Error("%s shares its memory with %s, but has room for %lld tokens where %lld are needed", past.name,
                present.name, static_cast<long long>(cache.past_capacity), static_cast<long long>(cache.capacity));
  if (steps && past_steps.size() > 0 && cache.in_place != (past_steps.data == steps.data))
    throw Error("%s and %s must share their memory with the outputs both or neither", past.name, past_steps.name);
  return cache;
}

}  // namespace

DiffAttention::DiffAttention(const Node& node)
    : heads_(node.integer("num_heads", 1, 1 << 16)),
      kv_heads_(node.integer("num_kv_heads", 1, 1 << 16)),
      width_(1 + node.integer("wide_value", 0, 1)),
      scale_(node.number("scale")),
      norm_eps_(node.number("norm_eps")) {
  node.expect_version(1);
  if (kv_heads_ % width_ || heads_ % (kv_heads_ / width_))
    throw Error("DiffAttention: num_heads is %lld, wanted a multiple of the %lld kv heads of num_kv_heads %lld%s",
                static_cast<long long>(heads_), static_cast<long long>(kv_heads_ / width_),
                static_cast<long long>(kv_heads_), width_ == 2 ? ", which must be even with wide_value" : "");
  const Isa isa = choose_isa();
  kernels_ = &DIFFBIT_PICK(isa, attention);
}

void DiffAttention::compute(Context& context) const {
  const Tensor query = context.input(0, "DiffAttention: query"), key = context.input(1, "DiffAttention: key"),
               value = context.input(2, "DiffAttention: value"), lambda = context.input(3, "DiffAttention: lambda"),
               past_key = context.input(4, "DiffAttention: past_key"),
               past_value = context.input(5, "DiffAttention: past_value"),
               past_length = context.input(6, "DiffAttention: past_length"),
               positions = context.input(7, "DiffAttention: position_ids"),
               cos = context.input(8, "DiffAttention: cos"), sin = context.input(9, "DiffAttention: sin"),
               mask = context.input(10, "DiffAttention: attention_mask"),
               key_scale = context.input(11, "DiffAttention: past_key_scale"),
               value_scale = context.input(12, "DiffAttention: past_value_scale");
  query.expect({-1, -1, -1});
  key.expect({query.shape[0], query.shape[1], -1});
  const int64_t batch = query.shape[0], steps = query.shape[1], d = key.shape[2] / kv_heads_;
  if (d < 2 || d % 2 || d > ATTENTION_MOST_D || key.shape[2] % kv_heads_)
    throw Error("%s is %s, wanted %lld sub-heads of an even number of at most %lld numbers", key.name,
                key.shape_text().c_str(), static_cast<long long>(kv_heads_), static_cast<long long>(ATTENTION_MOST_D));
  query.expect({batch, steps, 2 * heads_ * d});
  value.expect({batch, steps, kv_heads_ * d});
  past_key.expect({batch, kv_heads_, -1, d});
  past_value.expect({batch, kv_heads_, past_key.shape[2], d});
  past_length.expect({1});
  const int64_t past = *past_length.as<int64_t>(), past_capacity = past_key.shape[2];
  if (past < 0 || past > past_capacity)
    throw Error("%s is %lld, wanted 0 to %lld, the capacity of past_key", past_length.name, static_cast<long long>(past),
                static_cast<long long>(past_capacity));
  const int64_t total = past + steps, capacity = larger(past_capacity, total);
  mask.expect({batch, total});
  positions.expect({batch, steps});
  cos.expect({-1, d / 2});
  sin.expect({cos.shape[0], d / 2});
  for (int64_t i = 0; i < batch * steps; ++i)
    if (const int64_t position = positions.as<int64_t>()[i]; position < 0 || position >= cos.shape[0])
      throw Error("%s holds %lld, wanted 0 to %lld: cos has %lld rows", positions.name, static_cast<long long>(position),
                  static_cast<long long>(cos.shape[0] - 1), static_cast<long long>(cos.shape[0]));
  if (lambda.rank == 3)
    lambda.expect({batch, steps, heads_});
  else
    lambda.expect({heads_});
  const CacheKind kind = kind_of(past_key);
  const bool scaled = kind == CACHE_INT8;
  for (const Tensor& scale : {key_scale, value_scale}) {
    if (static_cast<bool>(scale) != scaled)
      throw Error("%s is %s, wanted exactly where the cache is int8", scale.name, scale ? "given" : "missing");
    if (scaled) scale.expect({batch, kv_heads_, past_capacity});
  }

  const Tensor out = context.output(0, "DiffAttention: out", {batch, steps, heads_ * width_ * d});
  const Tensor present_key = context.output(1, "DiffAttention: present_key", {batch, kv_heads_, capacity, d});
  const Tensor present_value = context.output(2, "DiffAttention: present_value", {batch, kv_heads_, capacity, d});
  Tensor present_key_scale, present_value_scale;
  if (!scaled && context.outputs() > 3)  // nobody would write them, and whoever reads them would crash
    throw Error("DiffAttention: present_key_scale is given, wanted exactly where the cache is int8");
  if (scaled) {
    present_key_scale = context.output(3, "DiffAttention: present_key_scale", {batch, kv_heads_, capacity});
    present_value_scale = context.output(4, "DiffAttention: present_value_scale", {batch, kv_heads_, capacity});
    for (const Tensor& scale : {present_key_scale, present_value_scale})
      if (!scale.data && scale.size()) throw Error("%s is missing, wanted with an int8 cache", scale.name);
  }
  const size_t bytes = kind == CACHE_FLOAT32 ? sizeof(float) : kind == CACHE_FLOAT16 ? sizeof(Half) : 1;
  const int64_t groups = kv_heads_ / width_, pairs = heads_ / groups, rows = pairs * steps;
  const Run run{*kernels_,
                batch,
                steps,
                heads_,
                kv_heads_,
                width_,
                groups,
                pairs,
                d,
                past,
                total,
                larger(1, divide_up(total, CHUNK)),
                rows,
                2 * rows / width_,
                scale_,
                norm_eps_,
                query.type == ort::FLOAT16,
                kind,
                query,
                key,
                value,
                lambda,
                positions,
                cos,
                sin,
                mask,
                out,
                cache_of(past_key, present_key, key_scale, present_key_scale, bytes),
                cache_of(past_value, present_value, value_scale, present_value_scale, bytes)};
  if (run.few())
    run.decode(context);
  else
    run.prefill(context);
}

}  // namespace diffbit
