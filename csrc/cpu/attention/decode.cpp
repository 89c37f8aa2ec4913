// DiffAttention for few query rows (decode): the context is cut into chunks.
//     1. per (batch, kv head, chunk): append new tokens, scores, exp(s - chunk's maximum)
//     2. per (batch, kv head):        the factor of each chunk (log-sum-exp)
//     3. per (batch, kv head, chunk): the difference, its product with the chunk's values
//     4. per (batch, kv head):        the sum over the chunks, head norm
// With one chunk, one task does all of this. The cache is read once, in its stored form. Below 8 bits the quantized tokens
// are cut into chunks, and the last chunk also has the residual window: it quantizes, shifts and appends, and no other task reads
// the tokens that it moves. Otherwise, except in rings, only tokens that the mask shows are counted. So holes in a row of a
// batch change neither its chunks nor any sum, and the row computes the same bits as alone.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "call.h"

namespace diffbit {
namespace {

/// The tokens of a batch row that the mask shows, counted from 0, and their slots in the cache.
struct Shown {
  int64_t slots, count;                   // of the cache; tokens
  std::vector<int64_t> begins, lies_at;   // of each run of tokens: the first one, its slot; empty: token t is in slot t

  Shown(const Call& call, int64_t b) : slots(call.total), count(call.total) {
    const int64_t* mask = call.mask_of(b);
    if (call.is_low_bit() || call.keys.ring || !call.kernels.hides(mask, slots)) return;
    count = 0;
    for (int64_t slot = 0; slot < slots; ++slot) {
      if (!mask[slot]) continue;
      if (slot == 0 || !mask[slot - 1]) begins.push_back(count), lies_at.push_back(slot);
      ++count;
    }
    if (begins.empty()) begins.push_back(0), lies_at.push_back(slots);  // none is shown
  }

  bool all() const { return begins.empty(); }
  int64_t chunks() const { return larger(1, divide_up(count, CHUNK)); }
  size_t run_of(int64_t t) const {
    return static_cast<size_t>(std::upper_bound(begins.begin(), begins.end(), t) - begins.begin()) - 1;
  }
  /// How many of the tokens t .. end are contiguous from t on.
  int64_t run(int64_t t, int64_t end) const {
    const size_t at = run_of(t) + 1;
    return (at < begins.size() ? smaller(begins[at], end) : end) - t;
  }
  int64_t slot(int64_t t) const { return all() ? t : lies_at[run_of(t)] + t - begins[run_of(t)]; }
  /// The first slot of a chunk, where the previous chunk ends.
  int64_t chunk_slot(int64_t chunk) const {
    return chunk == 0 ? 0 : chunk < chunks() ? slot(chunk * CHUNK) : slots;
  }
  /// How many of the tokens are in the first `end` slots.
  int64_t before(int64_t end) const {
    if (all()) return end;
    const auto at = std::lower_bound(lies_at.begin(), lies_at.end(), end) - lies_at.begin();
    if (at == 0) return 0;
    const size_t run = static_cast<size_t>(at) - 1;
    const int64_t stop = run + 1 < begins.size() ? begins[run + 1] : count;
    return smaller(stop, begins[run] + end - lies_at[run]);
  }
};

/// The arrays of a task: q [rows, padded(d)], s [rows, span], mixed [signal rows, width_floats]. Those of a kv head: maxima and
/// sums [rows, chunks]; the maxima become factors. There is room for the rows of all heads. A call's tasks are [batch row, kv head, chunk], its
/// heads [batch row, kv head].
struct Decode {
  /// Counts of heads, tasks, and floats in the arrays.
  struct Places {
    int64_t heads = 0, tasks = 0, q = 0, s = 0, mixed = 0, of_chunks = 0;
  };

  const Call& call;
  int64_t chunks, span;  // span: keys of the longest chunk
  std::vector<Shown> shown;  // of each batch row
  std::vector<Rows> rows;    // of each kv head; without gates, one for all
  Places first;  // those of the calls before this one

  Decode(const Call& call_)
      : call(call_),
        chunks(larger(1, divide_up(call.is_low_bit() ? call.after : call.total, CHUNK))),
        span(larger(CHUNK, divide_up(call.total - (chunks - 1) * CHUNK, CACHE_BLOCK) * CACHE_BLOCK)) {
    for (int64_t b = 0; b < call.batch; ++b) shown.emplace_back(call, call.first_row + b);
    for (int64_t head = 0; head < (call.gates ? call.batch * call.groups : 1); ++head)
      rows.emplace_back(call, row_of(head), head % call.groups, 0, call.length);
  }

  int64_t q_floats() const { return call.all_rows() * padded(call.d); }
  int64_t s_floats() const { return call.all_rows() * span; }
  int64_t mixed_floats() const { return call.rows * call.width_floats(); }
  int64_t of_chunks() const { return chunks * call.all_rows(); }
  /// Takes the places after others, and returns where it ends.
  Places place_after(const Places& others) {
    first = others;
    const int64_t heads = call.batch * call.groups, tasks = heads * chunks;
    return {first.heads + heads, first.tasks + tasks, first.q + tasks * q_floats(), first.s + tasks * s_floats(),
            first.mixed + tasks * mixed_floats(), first.of_chunks + heads * of_chunks()};
  }
  const Shown& shown_in(int64_t b) const { return shown[static_cast<size_t>(b - call.first_row)]; }
  const Rows& rows_of(int64_t head) const { return rows[call.gates ? static_cast<size_t>(head) : 0]; }

  int64_t row_of(int64_t head) const { return call.first_row + head / call.groups; }

  int64_t chunk_end(int64_t b, int64_t chunk) const {
    const int64_t count = shown_in(b).count;
    return chunk == chunks - 1 ? count : smaller(count, (chunk + 1) * CHUNK);
  }

  /// Calls work(t, slot, count) for each contiguous run in the tokens begin..end: `count` tokens from t on, in `slot` ...
  template <class Work>
  void in_runs(const Cache& cache, int64_t b, int64_t begin, int64_t end, const Work& work) const {
    const Shown& tokens = shown_in(b);
    for (int64_t t = begin, count; t < end; t += count) {
      count = tokens.all() ? cache.run(t, end) : tokens.run(t, end);
      work(t, tokens.slot(t), count);
    }
  }

  /// Makes the slots begin..end of kv head g's sub-heads present, and with the last chunk also the slots beyond.
  void append(int64_t b, int64_t g, int64_t begin, int64_t end) const {
    if (!call.appends) return;
    for (int64_t sub_head = g * call.width; sub_head < (g + 1) * call.width; ++sub_head)
      for (const Cache* cache : {&call.keys, &call.values})
        if (cache->is_low_bit())
          cache->append_low_bit(call, b, sub_head, begin, end);
        else
          cache->append_rows(call, b, sub_head, begin, end);
  }

  /// Calls work(rows, t, some) for each tile of the `count` rows of codes from `slot` on: `some` rows from t on as int8.
  template <class Work>
  void in_tiles(const Cache& cache, int64_t b, int64_t g, int64_t slot, int64_t count, const Work& work) const {
    constexpr int64_t TILE = 64;  // of rows that are unpacked
    const int64_t most = cache.is_low_bit() ? TILE : CHUNK;
    alignas(64) int8_t levels[2 * TILE * ATTENTION_MOST_D];
    float scales[2][CHUNK];
    CacheRows rows{};
    rows.count = call.width;
    for (int64_t t = 0; t < count; t += most) {
      const int64_t some = smaller(most, count - t);
      for (int64_t j = 0; j < call.width; ++j) {
        const int64_t head = call.head(b, g, j);
        int8_t* to = levels + j * TILE * call.d;
        const char* from = cache.row(head, slot + t);
        if (cache.is_low_bit())
          call.lowbit.unpack[cache.codes()](reinterpret_cast<const uint8_t*>(from), some, call.d, to);
        call.kernels.widen(cache.scale(head, slot + t), some, scales[j]);
        rows.rows[j] = cache.is_low_bit() ? reinterpret_cast<const char*>(to) : from, rows.scales[j] = scales[j];
      }
      work(rows, t, some);
    }
  }

  /// Adds q . offset to the first `count` scores of each row.
  void add_offsets(int64_t b, int64_t g, int64_t count, const Rows& of, const float* q, float* s) const {
    if (count <= 0) return;
    for (int64_t row = 0; row < of.count(); ++row) {
      const int64_t j = call.width == 2 && row >= of.signals;
      const float offset = call.offset_score(b, g, j, q + row * padded(call.d));
      for (int64_t t = 0; t < count; ++t) s[row * span + t] += offset;
    }
  }

  void scores(int64_t b, int64_t g, int64_t begin, int64_t end, const Rows& of, const float* q, float* s) const {
    const Cache& keys = call.keys;
    const int64_t d = call.d;
    const QueryRows queries = of.of_sub_heads(call.width);
    if (keys.bits == 16)
      return in_runs(keys, b, begin, end, [&](int64_t t, int64_t slot, int64_t count) {
        call.kernels.scores[keys.type](keys.rows(call, b, g, slot), count, d, q, queries, s + (t - begin), span);
      });
    in_runs(keys, b, begin, keys.is_low_bit() ? smaller(end, call.after) : end, [&](int64_t t, int64_t slot, int64_t count) {
      in_tiles(keys, b, g, slot, count, [&](const CacheRows& from, int64_t first, int64_t some) {
        float* to = s + (t - begin + first);
        if (call.top)
          call.lowbit.integer_row_scores(from, some, d, q, queries, call.top, to, span);
        else
          call.kernels.scores[CACHE_INT8](from, some, d, q, queries, to, span);
      });
    });
    if (!keys.is_low_bit()) return;
    add_offsets(b, g, smaller(end, call.after) - begin, of, q, s);
    if (const int64_t some = smaller(keys.first, call.after); begin == 0 && some > 0)
      for (int64_t j = 0; j < call.width; ++j)
        call.first_scores(b, g, j, q + queries.begin(j) * padded(d), queries.count[j], some, s + queries.begin(j) * span,
                          span);
    if (end == call.total)
      call.kernels.scores[CACHE_FLOAT16](keys.recent_rows(call, b, g), call.total - call.after, d, q, queries,
                                         s + (call.after - begin), span);
  }

  /// `signals` rows of p by the values.
  void mix(int64_t b, int64_t g, int64_t begin, int64_t end, int64_t signals, const float* p, float* mixed) const {
    const Cache& values = call.values;
    const int64_t d = call.d;
    std::memset(mixed, 0, static_cast<size_t>(signals * call.width_floats()) * sizeof *mixed);
    if (values.bits == 16)
      return in_runs(values, b, begin, end, [&](int64_t t, int64_t slot, int64_t count) {
        call.kernels.mix[values.type](values.rows(call, b, g, slot), count, d, p + (t - begin), signals, span, mixed);
      });
    const auto mix_codes = [&](int64_t from_token, int64_t to_token) {
      in_runs(values, b, from_token, to_token, [&](int64_t t, int64_t slot, int64_t count) {
        in_tiles(values, b, g, slot, count, [&](const CacheRows& from, int64_t at, int64_t some) {
          call.kernels.mix[CACHE_INT8](from, some, d, p + (t - begin + at), signals, span, mixed);
        });
      });
    };
    if (!values.is_low_bit()) return mix_codes(begin, end);
    const int64_t first = smaller(values.first, call.after);
    if (begin < first)
      call.kernels.mix[CACHE_FLOAT16](values.first_rows(call, b, g), first, d, p, signals, span, mixed);
    mix_codes(larger(begin, first), smaller(end, call.after));
    if (end == call.total)
      call.kernels.mix[CACHE_FLOAT16](values.recent_rows(call, b, g), call.total - call.after, d,
                                      p + (call.after - begin), signals, span, mixed);
  }

  /// Makes first tokens and the offset of a kv head present.
  void begin_low_bit(int64_t head) const {
    const int64_t g = head % call.groups;
    for (int64_t sub_head = g * call.width; sub_head < (g + 1) * call.width; ++sub_head)
      for (const Cache* cache : {&call.keys, &call.values})
        if (cache->is_low_bit() && call.appends) cache->begin_low_bit(call, row_of(head), sub_head);
  }
  /// Whether `begin_low_bit` has anything to do.
  bool begins_low_bit() const {
    const auto begins = [&](const Cache& cache) {
      return cache.is_low_bit() && (!cache.recent_in_place || call.cached < cache.first || call.quantizes_first());
    };
    return call.appends && (begins(call.keys) || begins(call.values));
  }

  // Below, the arrays are those of all tasks or heads of the call

  void chunk_scores(int64_t task, float* q, float* s, float* maxima, float* sums) const {
    const int64_t head = task / chunks, chunk = task % chunks, b = row_of(head), g = head % call.groups;
    const Shown& tokens = shown_in(b);
    const Rows& of = rows_of(head);
    q += task * q_floats(), s += task * s_floats(), maxima += head * of_chunks(), sums += head * of_chunks();
    const int64_t begin = chunk * CHUNK, end = chunk_end(b, chunk), seen_tokens = larger(0, end - begin);
    if (tokens.all())
      append(b, g, begin, end);
    else if (chunk < tokens.chunks())  // each slot up to the last one belongs to one task
      append(b, g, tokens.chunk_slot(chunk), tokens.chunk_slot(chunk + 1));
    if (!of.count()) return;
    if (seen_tokens) {
      call.rotate_queries(b, g, of, q);
      scores(b, g, begin, end, of, q, s);
    }
    const int64_t* mask = call.mask_of(b) + begin;
    const bool hide = tokens.all() && call.kernels.hides(mask, end - begin);
    for (int64_t row = 0; row < of.count(); ++row) {
      const int64_t i = of[row].i;
      const int64_t seen = larger(0, smaller(end - begin, tokens.before(call.past + i + 1) - begin));
      float* e = s + row * span;
      std::fill(e, e + larger(0, smaller(seen, call.first_seen(i) - begin)), -std::numeric_limits<float>::infinity());
      if (hide) call.kernels.hide(e, mask, seen);
      maxima[row * chunks + chunk] = call.kernels.softmax(e, seen, sums + row * chunks + chunk);
      for (int64_t t = seen; t < seen_tokens; ++t) e[t] = 0;
    }
  }

  void merge(int64_t head, float* maxima, const float* sums) const {
    for (int64_t row = 0; row < rows_of(head).count(); ++row) {
      float *factors = maxima + row * chunks, largest = -std::numeric_limits<float>::infinity(), sum = 0;
      for (int64_t chunk = 0; chunk < chunks; ++chunk)
        if (factors[chunk] > largest) largest = factors[chunk];
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const float chunk_sum = sums[row * chunks + chunk];
        factors[chunk] = chunk_sum == 0 ? 0 : std::exp(factors[chunk] - largest);  // 0: nothing visible in the chunk
        sum += chunk_sum * factors[chunk];
      }
      const float share = sum == 0 ? 0 : 1 / sum;
      for (int64_t chunk = 0; chunk < chunks; ++chunk) factors[chunk] *= share;
    }
  }

  void chunk_mix(int64_t task, float* s, const float* factors, float* mixed) const {
    const int64_t head = task / chunks, chunk = task % chunks, b = row_of(head), g = head % call.groups;
    s += task * s_floats(), factors += head * of_chunks(), mixed += task * mixed_floats();
    const int64_t begin = chunk * CHUNK, end = larger(begin, chunk_end(b, chunk));
    const Rows& of = rows_of(head);
    if (!of.signals) return;
    for (int64_t row = 0; row < of.signals; ++row) {
      const int64_t pair = of[row].head, i = of[row].i, noise = call.noises ? of[row].noise : row;
      const float by = call.noises ? factors[noise * chunks + chunk] * call.lambda_of(b, i, g * call.pairs + pair) : 0;
      float* signal = s + row * span;
      call.kernels.combine(signal, factors[row * chunks + chunk], s + noise * span, by, end - begin, signal);
    }
    mix(b, g, begin, end, of.signals, s, mixed);
  }

  void write(int64_t head, const float* mixed) const {
    call.write(row_of(head), head % call.groups, 0, call.length, rows_of(head), mixed + head * chunks * mixed_floats(), chunks,
               mixed_floats());
  }
};

}  // namespace

void decode(const std::vector<Call>& calls, Context& context) {
  std::vector<Decode> parts(calls.begin(), calls.end());
  Decode::Places all;
  for (Decode& part : parts) all = part.place_after(all);
  float* q = scratch<float>(QUERIES, all.q);
  float* s = scratch<float>(SCORES, all.s);
  float* mixed = scratch<float>(MIXED, all.mixed);
  float* maxima = scratch<float>(MAXIMA, all.of_chunks);
  float* sums = scratch<float>(SUMS, all.of_chunks);
  // the part that has a head or a task, which are counted through all parts
  const auto part_of = [&](int64_t index, int64_t Decode::Places::*count) -> const Decode& {
    size_t part = 0;
    while (part + 1 < parts.size() && parts[part + 1].first.*count <= index) ++part;
    return parts[part];
  };

  const auto scores = [&](int64_t task) {
    const Decode& on = part_of(task, &Decode::Places::tasks);
    on.chunk_scores(task - on.first.tasks, q + on.first.q, s + on.first.s, maxima + on.first.of_chunks,
                    sums + on.first.of_chunks);
  };
  const auto factors = [&](int64_t head) {
    const Decode& on = part_of(head, &Decode::Places::heads);
    const int64_t place = on.first.of_chunks + (head - on.first.heads) * on.of_chunks();
    on.merge(head - on.first.heads, maxima + place, sums + place);
  };
  const auto products = [&](int64_t task) {
    const Decode& on = part_of(task, &Decode::Places::tasks);
    on.chunk_mix(task - on.first.tasks, s + on.first.s, maxima + on.first.of_chunks, mixed + on.first.mixed);
  };
  const auto result = [&](int64_t head) {
    const Decode& on = part_of(head, &Decode::Places::heads);
    on.write(head - on.first.heads, mixed + on.first.mixed);
  };
  // what other tasks read of a low-bit cache, where it changes
  if (std::any_of(parts.begin(), parts.end(), [](const Decode& part) { return part.begins_low_bit(); }))
    context.parallel(all.heads, [&](int64_t head) {
    const Decode& on = part_of(head, &Decode::Places::heads);
    on.begin_low_bit(head - on.first.heads);
  });
  if (all.tasks == all.heads)
    return context.parallel(all.heads, [&](int64_t head) {
      scores(head);
      factors(head);
      products(head);
      result(head);
    });
  context.parallel(all.tasks, scores);
  context.parallel(all.heads, factors);
  context.parallel(all.tasks, products);
  context.parallel(all.heads, result);
}

}  // namespace diffbit
