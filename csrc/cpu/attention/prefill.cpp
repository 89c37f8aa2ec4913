// DiffAttention for many query rows (prefill): as many kv heads at a time as FLOATS_AT_ONCE has room for.
//     1. per (batch, kv head, chunk): append, pack keys for the product with many queries, convert values to float
//     2. per (batch, kv head, block of queries): scores of the keys that the block sees, softmax, difference, product
// A block's [rows, T] scores stay with the thread that computed them. With gates, a block has the rows that are on of as many
// more tokens, and step 1 makes floats only of kv heads with such rows. Below 8 bits, a token that is quantized in the
// call exists twice, as float16 and as codes; the queries of a block, which all see the same quantized tokens, use what they
// see.
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "call.h"

namespace diffbit {
namespace {

constexpr int64_t BLOCK_ROWS = 16, SPLIT_BLOCK_ROWS = 32;  // of queries per branch in a block
constexpr int64_t STRETCH = 4;  // most tokens of a block with gates, in those of a block without
constexpr int64_t FLOATS_AT_ONCE = 4 << 20;  // of packed keys and values

/// Keys or values as floats, for the kv heads that are computed together: the quantized tokens (of 8 bits and more all
/// tokens); below 8 bits also the unquantized tokens from `before` on. `slot` is the position of a kv head.
struct Side {
  const Call& call;
  const Cache& cache;
  const SplitKernels* split;       // by which blocks of tokens are multiplied, if the set has any
  int64_t row;                     // floats of a token
  int64_t coded, coded_floats;     // tokens; floats of one kv head
  int64_t recent, recent_floats;
  float* from = nullptr;
  Half* halves = nullptr;

  Side(const Call& call_, const Cache& cache_) : call(call_), cache(cache_) {
    const int64_t parts = call.bfloat16 ? 1 : cache.type == CACHE_FLOAT16 && !cache.is_low_bit() ? 2 : 3;
    split = call.kernels.split ? call.kernels.split + parts - 1 : nullptr;
    const int64_t together = cache.is_keys || split ? ATTENTION_KEYS : 1;
    const auto whole = [&](int64_t tokens) { return divide_up(tokens, together) * together; };
    row = split ? split_size(call.d, split->parts) : cache.is_keys ? call.d : padded(call.d);
    coded = whole(cache.is_low_bit() ? call.after : call.total);
    recent = cache.is_low_bit() ? whole(call.total - call.before) : 0;
    coded_floats = is_row_major() ? 0 : call.width * coded * row;
    recent_floats = call.width * recent * row;
  }

  /// Whether the product can read the cache's rows directly.
  bool is_row_major() const {
    return !split && !cache.is_keys && !cache.is_low_bit() && cache.type == CACHE_FLOAT32 && padded(call.d) == call.d;
  }
  int64_t floats() const { return coded_floats + recent_floats; }
  int64_t halves_floats() const { return cache.is_low_bit() ? call.width * (call.total - call.before) * call.d : 0; }
  float* coded_of(int64_t slot, int64_t j, int64_t t) const { return from + slot * floats() + (j * coded + t) * row; }
  float* recent_of(int64_t slot, int64_t j, int64_t t) const {
    return from + slot * floats() + coded_floats + (j * recent + t - call.before) * row;
  }
  Half* halves_of(int64_t slot, int64_t j, int64_t t) const {
    return halves + slot * halves_floats() + (j * (call.total - call.before) + t - call.before) * call.d;
  }

  /// Calls pack(t, count, to) for `count` tokens, or for each block of them that is then split.
  template <class Pack>
  void packed(int64_t count, float* to, const Pack& pack) const {
    if (!split) return pack(0, count, to);
    float block[ATTENTION_KEYS * ATTENTION_MOST_D];
    for (int64_t t = 0; t < count; t += ATTENTION_KEYS, to += ATTENTION_KEYS * row) {
      const int64_t some = smaller(ATTENTION_KEYS, count - t);
      pack(t, some, block);
      if (!cache.is_keys) std::fill(block + some * padded(call.d), block + ATTENTION_KEYS * padded(call.d), 0.0f);
      (cache.is_keys ? split->keys : split->values)(block, call.d, to);
    }
  }

  /// Writes the tokens begin..end of a sub-head to the present, and, if it is read, as floats. Below 8 bits the present's recent tokens are
  /// written later, when the past's are no longer read.
  void append(int64_t slot, int64_t b, int64_t g, int64_t j, int64_t begin, int64_t end,
              bool is_read) const {
    const int64_t sub_head = g * call.width + j, head = call.head(b, g, j), d = call.d;
    float* to = coded_of(slot, j, begin);
    if (!cache.is_low_bit()) {
      cache.append_rows(call, b, sub_head, begin, end);
      if (is_row_major() || !is_read) return;
      packed(end - begin, to, [&](int64_t t, int64_t count, float* some) {
        float scales[CHUNK];
        if (cache.bits == 8) call.kernels.widen(cache.scale(head, begin + t), count, scales);
        const float* of_rows = cache.is_keys && call.top ? nullptr : scales;
        (cache.is_keys ? call.kernels.pack_keys : call.kernels.unpack_values)[cache.type](
            cache.row(head, begin + t), of_rows, count, d, some);
      });
      return;
    }
    cache.copy(head, begin, smaller(end, call.before));
    if (end == call.total) cache.copy(head, call.after, cache.past_capacity);
    if (const int64_t t = larger(begin, call.before); t < end) {
      Half* rows = halves_of(slot, j, t);
      cache.halves(call, b, sub_head, t, end, rows);
      if (t < call.after) cache.quantize(call, head, t, smaller(end, call.after) - t, rows);
      if (is_read) packed(end - t, recent_of(slot, j, t), [&](int64_t i, int64_t count, float* some) {
        (cache.is_keys ? call.kernels.pack_keys : call.kernels.unpack_values)[CACHE_FLOAT16](
            rows + i * d, nullptr, count, d, some);
      });
    }
    if (!is_read) return;
    packed(smaller(end, call.after) - begin, to, [&](int64_t t, int64_t count, float* some) {
      for (int64_t i = 0; i < count; i += CACHE_BLOCK, some += CACHE_BLOCK * d) coded_block(head, begin + t + i, some);
    });
  }

  /// The CACHE_BLOCK quantized tokens from t on as floats; keys for products of integers: their levels. d is a multiple of the
  /// padding.
  void coded_block(int64_t head, int64_t t, float* to) const {
    const int64_t d = call.d;
    int8_t levels[CACHE_BLOCK * ATTENTION_MOST_D];
    float scales[CACHE_BLOCK];
    call.lowbit.unpack[cache.codes()](reinterpret_cast<const uint8_t*>(cache.row(head, t)), CACHE_BLOCK, d, levels);
    call.kernels.widen(cache.scale(head, t), CACHE_BLOCK, scales);
    if (!cache.is_keys) {
      call.kernels.unpack_values[CACHE_INT8](levels, scales, CACHE_BLOCK, d, to);
      const int64_t first = larger(0, smaller(cache.first - t, CACHE_BLOCK));
      if (first && t == 0) call.kernels.widen(cache.recent + head * cache.slots * d, first * d, to);
      return;
    }
    call.kernels.pack_keys[CACHE_INT8](levels, call.top ? nullptr : scales, CACHE_BLOCK, d, to);
    if (call.top) return;
    float offset[ATTENTION_MOST_D];
    call.kernels.widen(cache.offset(call, head), d, offset);
    for (int64_t i = 0; i < d; ++i)
      for (int64_t lane = 0; lane < CACHE_BLOCK; ++lane) to[i * CACHE_BLOCK + lane] += offset[i];
  }

  void keep_recent(int64_t slot, int64_t b, int64_t g) const {
    for (int64_t j = 0; j < call.width; ++j) {
      const int64_t head = call.head(b, g, j);
      std::memcpy(cache.recent + (head * cache.slots + cache.lead) * call.d, halves_of(slot, j, call.after),
                  static_cast<size_t>((call.total - call.after) * call.d) * sizeof(Half));
      cache.copy_free_slots(call, head);
    }
  }
};

struct Prefill {
  const Call& call;
  Side keys, values;

  explicit Prefill(const Call& call_) : call(call_), keys(call, call.keys), values(call, call.values) {}

  /// How many pairs of kv head g are on.
  int64_t on(int64_t b, int64_t g, int64_t i) const {
    if (!call.gates) return call.pairs;
    int64_t count = 0;
    for (int64_t pair = 0; pair < call.pairs; ++pair) count += call.gate_of(b, i, g, pair) != 0;
    return count;
  }
  /// Whether any query reads kv head g.
  bool is_read(int64_t b, int64_t g) const {
    for (int64_t i = 0; i < call.length; ++i)
      if (on(b, g, i)) return true;
    return false;
  }

  /// Where blocks of queries of kv head g begin, and the end: the queries of a block see the same tokens quantized.
  std::vector<int64_t> blocks(int64_t b, int64_t g) const {
    const int64_t most = larger(1, (keys.split ? SPLIT_BLOCK_ROWS : BLOCK_ROWS) / call.pairs), longest = STRETCH * most;
    std::vector<int64_t> starts;
    int64_t rows = 0;  // of the block
    for (int64_t i = 0; i < call.length; ++i) {
      const int64_t more = on(b, g, i);
      if (i == 0 || rows + more > most * call.pairs || i - starts.back() == longest ||
          call.seen_quantized(i) != call.seen_quantized(starts.back()))
        starts.push_back(i), rows = 0;
      rows += more;
    }
    starts.push_back(call.length);
    return starts;
  }

  /// Tokens that a block of queries sees: begin .. end, from `old` on as floats. With a sliding window the first ones may be
  /// hidden from some or all queries.
  struct Seen {
    int64_t begin, old, end;
  };
  Seen seen_of(int64_t begin, int64_t end) const {
    const int64_t first = call.first_seen(begin) / ATTENTION_KEYS * ATTENTION_KEYS, last = call.past + end;
    // another node's cache may have more quantized tokens than are visible
    const int64_t old = smaller(call.seen_quantized(begin), divide_up(last, ATTENTION_KEYS) * ATTENTION_KEYS);
    return {first, larger(first, old), larger(last, old)};
  }

  void packed_scores(const float* packed, int64_t blocks_, int64_t d, const float* q, int64_t rows, float* s,
                     int64_t stride) const {
    (keys.split ? keys.split->scores : call.kernels.packed_scores)(packed, blocks_, d, q, rows, s, stride);
  }

  /// Scores of `count` rows of q with the keys of sub-head j that they see.
  void scores(int64_t b, int64_t g, int64_t slot, int64_t j, const Seen& seen, const float* q, int64_t count, float* s,
              int64_t stride) const {
    const bool low_bit = call.keys.is_low_bit();
    const int64_t blocks_ = divide_up((low_bit ? seen.old : seen.end) - seen.begin, ATTENTION_KEYS);
    if (call.top)
      rounded_scores(b, g, slot, j, seen.begin, blocks_, q, count, s, stride);
    else
      packed_scores(keys.coded_of(slot, j, seen.begin), blocks_, call.d, q, count, s, stride);
    if (const int64_t first = smaller(call.keys.first, seen.old); low_bit && seen.begin == 0 && first > 0)
      call.first_scores(b, g, j, q, count, first, s, stride);
    if (low_bit)
      packed_scores(keys.recent_of(slot, j, seen.old), divide_up(seen.end - seen.old, ATTENTION_KEYS),
                                 call.d, q, count, s + (seen.old - seen.begin), stride);
  }

  /// The same with integers in floats, which are exact: |dot| < 2^24.
  void rounded_scores(int64_t b, int64_t g, int64_t slot, int64_t j, int64_t begin, int64_t blocks_, const float* q,
                      int64_t count, float* s, int64_t stride) const {
    static_assert(127 * 127 * ATTENTION_MOST_D < 1 << 24, "exact");
    const bool low_bit = call.keys.is_low_bit();
    const int64_t head = call.head(b, g, j), d = call.d;
    float codes[BLOCK_ROWS * ATTENTION_MOST_D], scales[BLOCK_ROWS], offsets[BLOCK_ROWS] = {};
    for (int64_t row = 0; row < count; row += BLOCK_ROWS) {
      const int64_t some = smaller(BLOCK_ROWS, count - row);
      for (int64_t i = 0; i < some; ++i) {
        const float* query = q + (row + i) * padded(d);
        scales[i] = call.lowbit.quantize_query(query, d, call.top, codes + i * padded(d));
        std::fill(codes + i * padded(d) + d, codes + (i + 1) * padded(d), 0.0f);
        if (low_bit) offsets[i] = call.offset_score(b, g, j, query);
      }
      for (int64_t at = 0; at < blocks_; ++at) {
        const int64_t first = begin + at * CACHE_BLOCK;
        float of_rows[CACHE_BLOCK];
        const int64_t tokens = low_bit ? CACHE_BLOCK : smaller(CACHE_BLOCK, call.total - first);
        call.kernels.widen(call.keys.scale(head, first), tokens, of_rows);
        float* to = s + row * stride + at * CACHE_BLOCK;
        packed_scores(keys.coded_of(slot, j, first), 1, d, codes, some, to, stride);
        for (int64_t i = 0; i < some; ++i)
          for (int64_t t = 0; t < tokens; ++t)
            to[i * stride + t] = to[i * stride + t] * scales[i] * of_rows[t] + offsets[i];
      }
    }
  }

  /// The softmaxes of a block's rows and their difference.
  void shares(int64_t b, int64_t g, const Rows& of, const Seen& seen, float* s, int64_t stride) const {
    const int64_t keys_ = seen.end - seen.begin;
    const int64_t* mask = call.mask_of(b) + seen.begin;
    const bool hide = call.kernels.hides(mask, keys_);
    const auto visible = [&](int64_t row) { return call.past + of[row].i + 1 - seen.begin; };
    const auto softmax = [&](int64_t row) {
      float* e = s + row * stride;
      std::fill(e, e + larger(0, call.first_seen(of[row].i) - seen.begin), -std::numeric_limits<float>::infinity());
      if (hide) call.kernels.hide(e, mask, visible(row));
      float sum;
      call.kernels.softmax(e, visible(row), &sum);
      return sum == 0 ? 0 : 1 / sum;
    };
    std::vector<float> by_noise(static_cast<size_t>(of.count() - of.signals));
    for (int64_t row = of.signals; row < of.count(); ++row) by_noise[static_cast<size_t>(row - of.signals)] = softmax(row);
    for (int64_t row = 0; row < of.signals; ++row) {
      const int64_t noise = call.noises ? of[row].noise : row;
      float* signal = s + row * stride;
      const float by = softmax(row), lambda = call.noises ? call.lambda_of(b, of[row].i, g * call.pairs + of[row].head) : 0;
      const float share = call.noises ? by_noise[static_cast<size_t>(noise - of.signals)] : 0;
      call.kernels.combine(signal, by, s + noise * stride, share * lambda, visible(row), signal);
      for (int64_t t = visible(row); t < keys_; ++t) signal[t] = 0;
    }
  }

  /// Adds rows of probabilities times n values.
  void mix(const CacheRows& from, int64_t n, const float* p, int64_t rows, int64_t stride, float* mixed) const {
    if (!values.split) return call.kernels.mix[CACHE_FLOAT32](from, n, values.row, p, rows, stride, mixed);
    values.split->mix(from, n, call.d, p, rows, stride, mixed);
  }

  /// The new tokens begin..end of kv head g.
  void block(int64_t b, int64_t g, int64_t slot, int64_t begin, int64_t end) const {
    const Rows of(call, b, g, begin, end);
    if (!of.count()) return call.write(b, g, begin, end, of, nullptr, 1, 0);
    const int64_t rows = of.signals;
    const Seen seen = seen_of(begin, end);
    const int64_t more = values.split ? SPLIT_ROWS - 1 : 0;  // rows that products may write
    const int64_t stride = divide_up(seen.end - seen.begin, ATTENTION_KEYS) * ATTENTION_KEYS;
    float* q = scratch<float>(QUERIES, of.count() * padded(call.d));
    float* s = scratch<float>(SCORES, (of.count() + more) * stride);
    float* mixed = scratch<float>(MIXED, (rows + more) * call.width_floats());
    call.rotate_queries(b, g, of, q);
    const QueryRows queries = of.of_sub_heads(call.width);
    for (int64_t j = 0; j < call.width; ++j) {
      const int64_t row = queries.begin(j);
      scores(b, g, slot, j, seen, q + row * padded(call.d), queries.count[j], s + row * stride, stride);
    }
    shares(b, g, of, seen, s, stride);
    std::memset(mixed, 0, static_cast<size_t>(rows * call.width_floats()) * sizeof *mixed);
    const bool low_bit = call.values.is_low_bit();
    CacheRows from = values.is_row_major() ? call.values.rows(call, b, g, seen.begin) : CacheRows{};
    from.count = call.width;
    if (!values.is_row_major())
      for (int64_t j = 0; j < call.width; ++j) from.rows[j] = values.coded_of(slot, j, seen.begin);
    const int64_t coded = (low_bit ? seen.old : seen.end) - seen.begin;
    mix(from, coded, s, rows, stride, mixed);
    if (low_bit) {
      for (int64_t j = 0; j < call.width; ++j) from.rows[j] = values.recent_of(slot, j, seen.old);
      mix(from, seen.end - seen.old, s + coded, rows, stride, mixed);
    }
    call.write(b, g, begin, end, of, mixed, 1, 0);
  }
};

}  // namespace

void prefill(const Call& call, Context& context) {
  Prefill on(call);
  const int64_t all = call.batch * call.groups, chunks = divide_up(call.total, CHUNK);
  const int64_t at_once = smaller(all, larger(1, FLOATS_AT_ONCE / (on.keys.floats() + on.values.floats())));
  on.keys.from = scratch<float>(KEYS, at_once * on.keys.floats());
  on.values.from = scratch<float>(VALUES, at_once * on.values.floats());
  on.keys.halves = scratch<Half>(RECENT, at_once * (on.keys.halves_floats() + on.values.halves_floats()));
  on.values.halves = on.keys.halves + at_once * on.keys.halves_floats();
  struct Block {
    int64_t slot, begin, end;
  };

  for (int64_t begin = 0; begin < all; begin += at_once) {
    const int64_t count = smaller(at_once, all - begin);
    std::vector<Block> blocks;
    std::vector<char> is_read;  // of each slot
    for (int64_t slot = 0; slot < count; ++slot) {
      // Neighbours read the same keys, which stay in a core's cache; the last queries see the most keys, so they come first
      const int64_t b = (begin + slot) / call.groups, g = (begin + slot) % call.groups;
      const std::vector<int64_t> starts = on.blocks(b, g);
      for (size_t i = starts.size() - 1; i > 0; --i) blocks.push_back({slot, starts[i - 1], starts[i]});
      is_read.push_back(on.is_read(b, g));
    }
    if (call.is_low_bit() && call.appends)
      context.parallel(count * call.width, [&](int64_t sub) {
        const int64_t b = (begin + sub / call.width) / call.groups, g = (begin + sub / call.width) % call.groups;
        for (const Cache* cache : {&call.keys, &call.values})
          if (cache->is_low_bit()) cache->begin_low_bit(call, b, g * call.width + sub % call.width);
      });
    context.parallel(count * chunks, [&](int64_t task) {
      const int64_t slot = task / chunks, b = (begin + slot) / call.groups, g = (begin + slot) % call.groups;
      const int64_t t = task % chunks * CHUNK, end = smaller(t + CHUNK, call.total);
      for (int64_t j = 0; j < call.width; ++j) {
        on.keys.append(slot, b, g, j, t, end, is_read[static_cast<size_t>(slot)]);
        on.values.append(slot, b, g, j, t, end, is_read[static_cast<size_t>(slot)]);
      }
    });
    if (call.is_low_bit() && call.appends)
      context.parallel(count, [&](int64_t slot) {
        const int64_t b = (begin + slot) / call.groups, g = (begin + slot) % call.groups;
        if (call.keys.is_low_bit()) on.keys.keep_recent(slot, b, g);
        if (call.values.is_low_bit()) on.values.keep_recent(slot, b, g);
      });
    context.parallel(static_cast<int64_t>(blocks.size()), [&](int64_t task) {
      const Block& block = blocks[static_cast<size_t>(task)];
      const int64_t head = begin + block.slot;
      on.block(head / call.groups, head % call.groups, block.slot, block.begin, block.end);
    });
  }
}

}  // namespace diffbit
