// How the work of DiffAttention is cut into tasks. The cuts depend on shapes alone, never on the number of threads, and
// what several tasks made is summed in one order: the same bits on any number of threads.
//
// Rows. The queries of one kv head g are rows in the order [branch, pair, step]; sub-head j of the keys serves the rows
// j * streams .. (j + 1) * streams. After the difference the rows of the first branch hold A1 - lambda A2. With one
// branch there is nothing to subtract.
//
// Few rows (decode): the context is cut into chunks.
//     1. per (batch, kv head, chunk): append what is new, scores, exp(s - chunk's maximum)
//     2. per (batch, kv head):        what each chunk's numbers must be multiplied by (log-sum-exp)
//     3. per (batch, kv head, chunk): the difference, its product with the chunk's values
//     4. per (batch, kv head):        the sum over the chunks, head norm
// One chunk: all of it in one task. What is in the cache is read once, as it lies there. With grids the settled tokens
// are cut into chunks, and the last one has the recent tokens, too: it settles, shifts and appends, and no other task
// sees the tokens that this moves. Steps between which a group settles are taken one part after the other.
//
// Many rows (prefill): the kv heads of which FLOATS_AT_ONCE hold the keys are taken together.
//     1. per (batch, kv head, chunk): append, keys packed for the product with many queries, values made float
//     2. per (batch, kv head, block of queries): scores of the keys that the block sees, softmax, difference, product
// A block's [rows, T] scores stay with the thread that made them. With grids a token that settles in the call is there
// twice, as float16 and from its codes; a block's queries, which all see the same tokens settled, take what they see.
#include "diff_attention.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#include "half.h"
#include "kernels/attention.h"
#include "kernels/lowbit.h"

namespace diffbit {
namespace {

// SCORES, QUERIES and MIXED belong to the calling thread where the rows are few, to each worker where they are many
enum Scratch { SCORES, QUERIES, MIXED, MAXIMA, SUMS, KEYS, VALUES, RECENT };
constexpr int64_t CHUNK = 256;               // keys
constexpr int64_t FEW_ROWS = 16;             // per branch: up to here the work is reading the cache
constexpr int64_t BLOCK_ROWS = 16;           // of queries per branch in a block
constexpr int64_t FLOATS_AT_ONCE = 4 << 20;  // of packed keys and values
constexpr int64_t GROUP = LOWBIT_GROUP;

static_assert(CHUNK % ATTENTION_KEYS == 0, "a chunk is packed by itself");

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/// Keys or values: what was, and the buffers that hold it with what is new.
struct Cache {
  Tensor fresh;  // what is new: [B, S, Hk, d]
  bool rotates;
  int bits;        // 16: floats, of `kind`
  CacheKind kind;  // of rows that are no grids
  const char* past;
  char* present;
  size_t row_bytes;
  const char* past_scales;  // steps or grids
  char* scales;
  size_t scale_bytes;    // of scale_tokens tokens
  int64_t scale_tokens;  // how many share one
  int64_t past_capacity, capacity;
  bool in_place;
  const Half* past_recent;  // [B, Hk, slots, d], with grids only
  Half* recent;
  int64_t slots;
  bool recent_in_place;

  bool grids() const { return bits < 8; }
  GridKind grid() const { return bits == 4 ? GRID_INT4 : GRID_INT2; }
  char* row(int64_t head, int64_t t) const { return present + (head * capacity + t) * row_bytes; }
  char* scale(int64_t head, int64_t t) const {
    return scales ? scales + (head * capacity + t) / scale_tokens * scale_bytes : nullptr;
  }

  /// Tokens begin..end of a sub-head (counted through the batch) into the present, as they are.
  void copy(int64_t head, int64_t begin, int64_t end) const {
    if (in_place || begin >= end) return;
    std::memcpy(row(head, begin), past + (head * past_capacity + begin) * row_bytes, (end - begin) * row_bytes);
    if (scales)
      std::memcpy(scale(head, begin), past_scales + (head * past_capacity + begin) / scale_tokens * scale_bytes,
                  (end - begin) / scale_tokens * scale_bytes);
  }
};

struct Run {
  const AttentionKernels& kernels;
  const LowBitKernels& lowbit;
  int64_t batch, steps, heads, kv_heads, width, branches, groups, pairs, d, past, total;
  int64_t first = 0, all_steps, all_total;  // a part of a call: its steps begin at `first` of all_steps
  int64_t window, before, after;        // tokens settled before the call and after it; 0 where there are no grids
  int64_t chunks, rows, streams;        // rows of a branch; rows that one sub-head of the keys serves
  int top;                              // of the query's codes, 0: the query is not rounded
  float scale, norm_eps;
  bool half;  // query, key, value, out are float16
  Tensor query, lambda, positions, cos, sin, mask, out;
  Cache keys, values;

  Run(const AttentionKernels& kernels_, const LowBitKernels& lowbit_) : kernels(kernels_), lowbit(lowbit_) {}

  int64_t width_floats() const { return width * padded(d); }
  int64_t all_rows() const { return branches * rows; }
  bool few() const { return rows <= FEW_ROWS; }
  bool grids() const { return keys.grids() || values.grids(); }

  /// d numbers of a tensor [B, S, any, d] as floats; `room` is used where they are not floats yet.
  const float* floats(const Tensor& tensor, int64_t index, float* room) const {
    if (!half) return tensor.as<float>() + index * d;
    kernels.widen(tensor.as<Half>() + index * d, d, room);
    return room;
  }

  int64_t at_step(int64_t b, int64_t step) const { return b * all_steps + first + step; }

  void rotate(const float* x, int64_t b, int64_t step, float by, float* y) const {
    const int64_t position = positions.as<int64_t>()[at_step(b, step)];
    kernels.rotate(x, cos.as<float>() + position * (d / 2), sin.as<float>() + position * (d / 2), d, by, y);
  }

  /// A new token's numbers, as the cache would hold them if it held floats.
  const float* fresh(const Cache& cache, int64_t b, int64_t sub_head, int64_t t, float* wide, float* rotated) const {
    const float* x = floats(cache.fresh, at_step(b, t - past) * kv_heads + sub_head, wide);
    if (!cache.rotates) return x;
    rotate(x, b, t - past, 1, rotated);
    return rotated;
  }

  void store(const Cache& cache, int64_t head, int64_t t, const float* row) const {
    char* place = cache.row(head, t);
    if (cache.kind == CACHE_FLOAT32) std::memcpy(place, row, cache.row_bytes);
    if (cache.kind == CACHE_FLOAT16) kernels.narrow(row, d, reinterpret_cast<Half*>(place));
    if (cache.kind == CACHE_INT8)
      *reinterpret_cast<float*>(cache.scale(head, t)) = kernels.quantize(row, d, reinterpret_cast<int8_t*>(place));
  }

  /// Rows begin..end made present, and with the last of them what lies beyond. Not for grids.
  void append_rows(const Cache& cache, int64_t b, int64_t sub_head, int64_t begin, int64_t end) const {
    float wide[ATTENTION_MOST_D], rotated[ATTENTION_MOST_D];
    const int64_t head = b * kv_heads + sub_head;
    cache.copy(head, begin, smaller(end, past));
    if (end == total) cache.copy(head, total, cache.past_capacity);
    for (int64_t t = larger(begin, past); t < end; ++t) store(cache, head, t, fresh(cache, b, sub_head, t, wide, rotated));
  }

  /// The tokens begin..end, none of which was settled before the call, as float16: rows [end - begin, d].
  void recent_rows(const Cache& cache, int64_t b, int64_t sub_head, int64_t begin, int64_t end, Half* rows_) const {
    float wide[ATTENTION_MOST_D], rotated[ATTENTION_MOST_D];
    const Half* from = cache.past_recent + (b * kv_heads + sub_head) * cache.slots * d;
    if (const int64_t old = smaller(end, past) - begin; old > 0)
      std::memcpy(rows_, from + (begin - before) * d, static_cast<size_t>(old * d) * sizeof(Half));
    for (int64_t t = larger(begin, past); t < end; ++t)
      kernels.narrow(fresh(cache, b, sub_head, t, wide, rotated), d, rows_ + (t - begin) * d);
  }

  /// Rounds the tokens t .. t + count, whole groups, onto grids.
  void settle(const Cache& cache, int64_t head, int64_t t, int64_t count, const Half* rows_) const {
    const int64_t together = cache.scale_tokens;
    const auto round = cache.rotates ? lowbit.round_keys[cache.grid()] : lowbit.round_value[cache.grid()];
    for (int64_t i = 0; i < count; i += together)
      round(rows_ + i * d, d, reinterpret_cast<uint8_t*>(cache.row(head, t + i)),
            reinterpret_cast<Half*>(cache.scale(head, t + i)));
  }

  /// The slots behind the recent tokens, as they were.
  void copy_free_slots(const Cache& cache, int64_t head) const {
    if (cache.recent_in_place) return;
    const int64_t used = total - after, place = (head * cache.slots + used) * d;
    std::memcpy(cache.recent + place, cache.past_recent + place,
                static_cast<size_t>((cache.slots - used) * d) * sizeof(Half));
  }

  /// Few steps of a cache with grids: the settled tokens begin..end of a chunk made present, with the last chunk the
  /// recent ones, too.
  void append_grids(const Cache& cache, int64_t b, int64_t sub_head, int64_t begin, int64_t end) const {
    const int64_t head = b * kv_heads + sub_head;
    cache.copy(head, begin, smaller(end, before));
    if (end < total) return;
    cache.copy(head, after, cache.past_capacity);
    Half group[GROUP * ATTENTION_MOST_D];
    for (int64_t t = before; t < after; t += GROUP) {
      recent_rows(cache, b, sub_head, t, t + GROUP, group);
      settle(cache, head, t, GROUP, group);
    }
    Half* slots = cache.recent + head * cache.slots * d;
    const Half* past_slots = cache.past_recent + head * cache.slots * d;
    if (past > after && (!cache.recent_in_place || after > before))
      std::memmove(slots, past_slots + (after - before) * d, static_cast<size_t>((past - after) * d) * sizeof(Half));
    copy_free_slots(cache, head);
    if (const int64_t t = larger(past, after); t < total) recent_rows(cache, b, sub_head, t, total, slots + (t - after) * d);
  }

  /// Makes the tokens begin..end of kv head g's sub-heads present, and with the last of them what lies beyond.
  void append(int64_t b, int64_t g, int64_t begin, int64_t end) const {
    for (int64_t sub_head = g * width; sub_head < (g + 1) * width; ++sub_head)
      for (const Cache* cache : {&keys, &values})
        if (cache->grids())
          append_grids(*cache, b, sub_head, begin, end);
        else
          append_rows(*cache, b, sub_head, begin, end);
  }

  CacheRows at(const Cache& cache, int64_t b, int64_t g, int64_t t) const {
    CacheRows rows_{};
    rows_.count = width;
    for (int64_t j = 0; j < width; ++j) {
      const int64_t head = b * kv_heads + g * width + j;
      rows_.rows[j] = cache.row(head, t);
      rows_.steps[j] = reinterpret_cast<const float*>(cache.scale(head, t));
    }
    return rows_;
  }

  GridRows grids_at(const Cache& cache, int64_t b, int64_t g, int64_t t) const {
    GridRows rows_{};
    rows_.count = width;
    for (int64_t j = 0; j < width; ++j) {
      const int64_t head = b * kv_heads + g * width + j;
      rows_.codes[j] = reinterpret_cast<const uint8_t*>(cache.row(head, t));
      rows_.grids[j] = reinterpret_cast<const Half*>(cache.scale(head, t));
    }
    return rows_;
  }

  CacheRows recent_at(const Cache& cache, int64_t b, int64_t g) const {
    CacheRows rows_{};
    rows_.count = width;
    for (int64_t j = 0; j < width; ++j) rows_.rows[j] = cache.recent + (b * kv_heads + g * width + j) * cache.slots * d;
    return rows_;
  }

  /// The queries of kv head g and the steps begin..end, rotated and scaled: q [branches, pairs, end - begin, padded(d)].
  void rotate_queries(int64_t b, int64_t g, int64_t begin, int64_t end, float* q) const {
    float wide[ATTENTION_MOST_D];
    for (int64_t branch = 0; branch < branches; ++branch)
      for (int64_t pair = 0; pair < pairs; ++pair)
        for (int64_t step = begin; step < end; ++step, q += padded(d)) {
          const int64_t sub_head = branches * (g * pairs + pair) + branch;
          rotate(floats(query, at_step(b, step) * branches * heads + sub_head, wide), b, step, scale, q);
          for (int64_t i = d; i < padded(d); ++i) q[i] = 0;
        }
  }

  float lambda_of(int64_t b, int64_t step, int64_t pair) const {
    return lambda.as<float>()[lambda.rank == 1 ? pair : at_step(b, step) * heads + pair];
  }

  const int64_t* mask_of(int64_t b) const { return mask.as<int64_t>() + b * all_total; }

  void write(int64_t b, int64_t step, int64_t head, const float* parts, int64_t count, int64_t part_stride) const {
    float normed[2 * ATTENTION_MOST_D];
    const int64_t index = (at_step(b, step) * heads + head) * width * d;
    kernels.finish(parts, count, part_stride, width, d, norm_eps, half ? normed : out.as<float>() + index);
    if (half) kernels.narrow(normed, width * d, out.as<Half>() + index);
  }

  // Few rows. The arrays of a task: q [all_rows, padded(d)], s [all_rows, span], mixed [rows, width_floats].
  // Those of a kv head: maxima and sums [all_rows, chunks]; the maxima become factors.

  int64_t chunk_end(int64_t chunk) const { return chunk == chunks - 1 ? total : (chunk + 1) * CHUNK; }

  /// Keys of the longest chunk, as far as they reach.
  int64_t span() const { return larger(CHUNK, divide_up(total - (chunks - 1) * CHUNK, GROUP) * GROUP); }

  void scores(int64_t b, int64_t g, int64_t begin, int64_t end, const float* q, float* s) const {
    if (!keys.grids()) {
      const CacheRows from = at(keys, b, g, begin);
      if (top)
        lowbit.integer_row_scores(from, end - begin, d, q, streams, top, s, span());
      else
        kernels.scores[keys.kind](from, end - begin, d, q, streams, s, span());
      return;
    }
    const int64_t count = smaller(end, after) - begin;
    const GridRows from = grids_at(keys, b, g, begin);
    if (count > 0 && top) lowbit.integer_scores[keys.grid()](from, count, d, q, streams, top, s, span());
    if (count > 0 && !top) lowbit.scores[keys.grid()](from, count, d, q, streams, s, span());
    if (end == total)
      kernels.scores[CACHE_FLOAT16](recent_at(keys, b, g), total - after, d, q, streams, s + (after - begin), span());
  }

  void mix(int64_t b, int64_t g, int64_t begin, int64_t end, const float* p, float* mixed) const {
    std::memset(mixed, 0, static_cast<size_t>(rows * width_floats()) * sizeof *mixed);
    if (!values.grids()) return kernels.mix[values.kind](at(values, b, g, begin), end - begin, d, p, rows, span(), mixed);
    const int64_t count = smaller(end, after) - begin;
    if (count > 0) lowbit.mix[values.grid()](grids_at(values, b, g, begin), count, d, p, rows, span(), mixed);
    if (end == total)
      kernels.mix[CACHE_FLOAT16](recent_at(values, b, g), total - after, d, p + (after - begin), rows, span(), mixed);
  }

  void chunk_scores(int64_t b, int64_t g, int64_t chunk, float* q, float* s, float* maxima, float* sums) const {
    const int64_t begin = chunk * CHUNK, end = chunk_end(chunk);
    append(b, g, begin, end);
    rotate_queries(b, g, 0, steps, q);
    scores(b, g, begin, end, q, s);
    const bool hide = kernels.hides(mask_of(b) + begin, end - begin);
    for (int64_t row = 0; row < all_rows(); ++row) {
      const int64_t seen = larger(0, smaller(end - begin, past + row % steps + 1 - begin));
      float* e = s + row * span();
      if (hide) kernels.hide(e, mask_of(b) + begin, seen);
      maxima[row * chunks + chunk] = kernels.softmax(e, seen, sums + row * chunks + chunk);
      for (int64_t t = seen; t < end - begin; ++t) e[t] = 0;
    }
  }

  void merge(int64_t b, int64_t g, float* maxima, const float* sums) const {
    for (int64_t row = 0; row < all_rows(); ++row) {
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
    const int64_t begin = chunk * CHUNK, end = chunk_end(chunk);
    for (int64_t row = 0; row < rows; ++row) {
      float* signal = s + row * span();
      const float* noise = branches == 2 ? signal + rows * span() : signal;
      kernels.combine(signal, factors[row * chunks + chunk], noise,
                      branches == 2 ? factors[(rows + row) * chunks + chunk] : 0, end - begin, signal);
    }
    mix(b, g, begin, end, s, mixed);
  }

  void decode(Context& context) const {
    const int64_t all = batch * groups, tasks = all * chunks, q_floats = all_rows() * padded(d);
    const int64_t s_floats = all_rows() * span(), of_chunks = chunks * all_rows();
    float* q = scratch<float>(QUERIES, tasks * q_floats);
    float* s = scratch<float>(SCORES, tasks * s_floats);
    float* mixed = scratch<float>(MIXED, tasks * rows * width_floats());
    float* maxima = scratch<float>(MAXIMA, all * of_chunks);
    float* sums = scratch<float>(SUMS, all * of_chunks);

    const auto scores_ = [&](int64_t task) {
      const int64_t head = task / chunks;
      chunk_scores(head / groups, head % groups, task % chunks, q + task * q_floats, s + task * s_floats,
                   maxima + head * of_chunks, sums + head * of_chunks);
    };
    const auto factors = [&](int64_t head) {
      merge(head / groups, head % groups, maxima + head * of_chunks, sums + head * of_chunks);
    };
    const auto products = [&](int64_t task) {
      const int64_t head = task / chunks;
      chunk_mix(head / groups, head % groups, task % chunks, s + task * s_floats, maxima + head * of_chunks,
                mixed + task * rows * width_floats());
    };
    const auto result = [&](int64_t head) {
      const int64_t g = head % groups;
      for (int64_t row = 0; row < rows; ++row)
        write(head / groups, row % steps, g * pairs + row / steps,
              mixed + (head * chunks * rows + row) * width_floats(), chunks, rows * width_floats());
    };
    if (chunks == 1)
      return context.parallel(all, [&](int64_t head) {
        scores_(head);
        factors(head);
        products(head);
        result(head);
      });
    context.parallel(tasks, scores_);
    context.parallel(all, factors);
    context.parallel(tasks, products);
    context.parallel(all, result);
  }

  // Many rows

  /// How a cache lies in floats, for the kv heads that are taken together. `settled_` tokens, all of them where there
  /// are no grids; with grids also those from `before` on as they came.
  struct Floats {
    int64_t settled_, settled_floats;  // floats: of one kv head
    int64_t recent, recent_floats;
    float* from = nullptr;
    Half* halves = nullptr;
    int64_t all() const { return settled_floats + recent_floats; }
    float* settled_of(int64_t slot) const { return from + slot * all(); }
    float* recent_of(int64_t slot) const { return from + slot * all() + settled_floats; }
  };

  Floats floats_of(const Cache& cache) const {
    const int64_t row = cache.rotates ? d : padded(d), block = cache.rotates ? ATTENTION_KEYS : 1;
    const auto whole = [&](int64_t tokens) { return divide_up(tokens, block) * block; };
    Floats found{};
    found.settled_ = whole(cache.grids() ? after : total);
    found.recent = cache.grids() ? whole(total - before) : 0;
    found.settled_floats = as_they_lie(cache) ? 0 : width * found.settled_ * row;
    found.recent_floats = width * found.recent * row;
    return found;
  }

  bool as_they_lie(const Cache& cache) const {
    return !cache.rotates && !cache.grids() && cache.kind == CACHE_FLOAT32 && padded(d) == d;
  }

  int64_t halves_of(const Cache& cache) const { return cache.grids() ? width * (total - before) * d : 0; }

  /// The tokens begin..end of a sub-head in the present, and as floats. With grids the present's recent tokens wait until
  /// nobody reads the past's.
  void append_many(const Cache& cache, const Floats& to, int64_t slot, int64_t b, int64_t g, int64_t j, int64_t begin,
                   int64_t end) const {
    const int64_t sub_head = g * width + j, head = b * kv_heads + sub_head, row = cache.rotates ? d : padded(d);
    float* settled_floats = to.settled_of(slot) + j * to.settled_ * row + begin * row;
    if (!cache.grids()) {
      append_rows(cache, b, sub_head, begin, end);
      const float* steps_ = reinterpret_cast<const float*>(cache.scale(head, begin));
      if (cache.rotates)
        kernels.pack_keys[cache.kind](cache.row(head, begin), top ? nullptr : steps_, end - begin, d, settled_floats);
      else if (!as_they_lie(cache))
        kernels.unpack_values[cache.kind](cache.row(head, begin), steps_, end - begin, d, settled_floats);
      return;
    }
    cache.copy(head, begin, smaller(end, before));
    if (end == total) cache.copy(head, after, cache.past_capacity);
    if (const int64_t from = larger(begin, before); from < end) {
      Half* halves = to.halves + slot * halves_of(cache) + (j * (total - before) + from - before) * d;
      recent_rows(cache, b, sub_head, from, end, halves);
      if (from < after) settle(cache, head, from, smaller(end, after) - from, halves);
      float* recent_floats = to.recent_of(slot) + (j * to.recent + from - before) * row;
      (cache.rotates ? kernels.pack_keys : kernels.unpack_values)[CACHE_FLOAT16](halves, nullptr, end - from, d,
                                                                                  recent_floats);
    }
    if (const int64_t count = smaller(end, after) - begin; count > 0) {
      const uint8_t* codes = reinterpret_cast<const uint8_t*>(cache.row(head, begin));
      const Half* grid = reinterpret_cast<const Half*>(cache.scale(head, begin));
      if (cache.rotates)
        lowbit.pack_keys[cache.grid()](codes, top ? nullptr : grid, count, d, settled_floats);
      else
        lowbit.unpack_values[cache.grid()](codes, grid, count, d, settled_floats);
    }
  }

  void keep_recent(const Cache& cache, const Floats& from, int64_t slot, int64_t b, int64_t g) const {
    for (int64_t j = 0; j < width; ++j) {
      const int64_t head = b * kv_heads + g * width + j;
      const Half* halves = from.halves + slot * halves_of(cache) + (j * (total - before) + after - before) * d;
      std::memcpy(cache.recent + head * cache.slots * d, halves, static_cast<size_t>((total - after) * d) * sizeof(Half));
      copy_free_slots(cache, head);
    }
  }

  /// Where blocks of queries begin, and the end: the queries of a block see the same tokens settled.
  std::vector<int64_t> blocks() const {
    const int64_t most = larger(1, BLOCK_ROWS / pairs);
    std::vector<int64_t> starts;
    for (int64_t step = 0; step < steps; ++step)
      if (step == 0 || step - starts.back() == most || seen_settled(step) != seen_settled(starts.back()))
        starts.push_back(step);
    starts.push_back(steps);
    return starts;
  }

  int64_t seen_settled(int64_t step) const { return grids() ? settled(past + step + 1, window) : 0; }

  void prefill(Context& context) const {
    const int64_t all = batch * groups, chunks_ = divide_up(total, CHUNK);
    Floats of_keys = floats_of(keys), of_values = floats_of(values);
    const int64_t at_once = smaller(all, larger(1, FLOATS_AT_ONCE / (of_keys.all() + of_values.all())));
    of_keys.from = scratch<float>(KEYS, at_once * of_keys.all());
    of_values.from = scratch<float>(VALUES, at_once * of_values.all());
    of_keys.halves = scratch<Half>(RECENT, at_once * (halves_of(keys) + halves_of(values)));
    of_values.halves = of_keys.halves + at_once * halves_of(keys);
    const std::vector<int64_t> starts = blocks();
    const int64_t blocks_ = static_cast<int64_t>(starts.size()) - 1;
    std::atomic<bool> no_memory{false};

    for (int64_t begin = 0; begin < all; begin += at_once) {
      const int64_t count = smaller(at_once, all - begin);
      context.parallel(count * chunks_, [&](int64_t task) {
        const int64_t slot = task / chunks_, b = (begin + slot) / groups, g = (begin + slot) % groups;
        const int64_t t = task % chunks_ * CHUNK, end = smaller(t + CHUNK, total);
        for (int64_t j = 0; j < width; ++j) {
          append_many(keys, of_keys, slot, b, g, j, t, end);
          append_many(values, of_values, slot, b, g, j, t, end);
        }
      });
      if (grids())
        context.parallel(count, [&](int64_t slot) {
          const int64_t b = (begin + slot) / groups, g = (begin + slot) % groups;
          if (keys.grids()) keep_recent(keys, of_keys, slot, b, g);
          if (values.grids()) keep_recent(values, of_values, slot, b, g);
        });
      context.parallel(count * blocks_, [&](int64_t task) {
        // The last queries see the most keys: they begin
        const int64_t slot = task % count, b = (begin + slot) / groups, g = (begin + slot) % groups;
        const int64_t index = blocks_ - 1 - task / count;
        try {
          block(b, g, starts[static_cast<size_t>(index)], starts[static_cast<size_t>(index + 1)], of_keys, of_values,
                slot);
        } catch (const std::bad_alloc&) {
          no_memory = true;
        }
      });
    }
    if (no_memory) throw std::bad_alloc();
  }

  /// Scores of `count` rows of q with the keys of sub-head j that they see.
  void block_scores(int64_t b, int64_t g, int64_t j, int64_t seen, int64_t old, const Floats& from, int64_t slot,
                    const float* q, int64_t count, float* s, int64_t stride) const {
    const float* packed = from.settled_of(slot) + j * from.settled_ * d;
    const int64_t reach = keys.grids() ? old : seen, blocks_ = divide_up(reach, ATTENTION_KEYS);
    if (!top) {
      kernels.packed_scores(packed, blocks_, d, q, count, s, stride);
    } else {
      rounded_scores(b, g, j, blocks_, packed, q, count, s, stride);
    }
    if (!keys.grids()) return;
    kernels.packed_scores(from.recent_of(slot) + (j * from.recent + old - before) * d,
                          divide_up(seen - old, ATTENTION_KEYS), d, q, count, s + old, stride);
  }

  /// The same in integers, which floats hold: |dot| < 2^24.
  void rounded_scores(int64_t b, int64_t g, int64_t j, int64_t blocks_, const float* packed, const float* q,
                      int64_t count, float* s, int64_t stride) const {
    static_assert(127 * 127 * ATTENTION_MOST_D < 1 << 24, "exact");
    const int64_t head = b * kv_heads + g * width + j;
    float codes[BLOCK_ROWS * ATTENTION_MOST_D], steps_[BLOCK_ROWS], offsets[BLOCK_ROWS];
    for (int64_t row = 0; row < count; row += BLOCK_ROWS) {
      const int64_t some = smaller(BLOCK_ROWS, count - row);
      for (int64_t at = 0; at < blocks_; ++at) {
        const bool grid = keys.grids();
        const Half* grid_ = grid ? reinterpret_cast<const Half*>(keys.scale(head, at * GROUP)) : nullptr;
        const float* key_steps = grid ? nullptr : reinterpret_cast<const float*>(keys.scale(head, at * GROUP));
        if (grid || at == 0)
          for (int64_t i = 0; i < some; ++i) {
            float* to = codes + i * padded(d);
            steps_[i] = lowbit.round_query(q + (row + i) * padded(d), grid_, keys.bits, d, top, to, offsets + i);
            for (int64_t k = d; k < padded(d); ++k) to[k] = 0;
          }
        float* to = s + row * stride + at * GROUP;
        kernels.packed_scores(packed + at * GROUP * d, 1, d, codes, some, to, stride);
        const int64_t keys_ = grid ? GROUP : smaller(GROUP, total - at * GROUP);
        for (int64_t i = 0; i < some; ++i)
          for (int64_t t = 0; t < keys_; ++t)
            to[i * stride + t] = to[i * stride + t] * steps_[i] * (grid ? 1 : key_steps[t]) + offsets[i];
      }
    }
  }

  /// The steps begin..end of kv head g.
  void block(int64_t b, int64_t g, int64_t begin, int64_t end, const Floats& of_keys, const Floats& of_values,
             int64_t slot) const {
    const int64_t steps_ = end - begin, rows_ = pairs * steps_, streams_ = branches * rows_ / width;
    const int64_t seen = past + end, old = seen_settled(begin), stride = divide_up(seen, ATTENTION_KEYS) * ATTENTION_KEYS;
    float* q = scratch<float>(QUERIES, branches * rows_ * padded(d));
    float* s = scratch<float>(SCORES, branches * rows_ * stride);
    float* mixed = scratch<float>(MIXED, rows_ * width_floats());
    rotate_queries(b, g, begin, end, q);
    for (int64_t j = 0; j < width; ++j)
      block_scores(b, g, j, seen, old, of_keys, slot, q + j * streams_ * padded(d), streams_, s + j * streams_ * stride,
                   stride);
    const bool hide = kernels.hides(mask_of(b), seen);
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t step = begin + row % steps_, visible = past + step + 1;
      float *signal = s + row * stride, *noise = s + (branches - 1) * rows_ * stride + row * stride, shares[2] = {};
      for (int64_t branch = 0; branch < branches; ++branch) {
        float* e = branch ? noise : signal;
        if (hide) kernels.hide(e, mask_of(b), visible);
        float sum;
        kernels.softmax(e, visible, &sum);
        shares[branch] = sum == 0 ? 0 : 1 / sum;
      }
      if (branches == 2) shares[1] *= lambda_of(b, step, g * pairs + row / steps_);
      kernels.combine(signal, shares[0], noise, shares[1], visible, signal);
      for (int64_t t = visible; t < seen; ++t) signal[t] = 0;
    }
    std::memset(mixed, 0, static_cast<size_t>(rows_ * width_floats()) * sizeof *mixed);
    const int64_t row = padded(d), reach = values.grids() ? old : seen;
    CacheRows from = as_they_lie(values) ? at(values, b, g, 0) : CacheRows{};
    from.count = width;
    if (!as_they_lie(values))
      for (int64_t j = 0; j < width; ++j) from.rows[j] = of_values.settled_of(slot) + j * of_values.settled_ * row;
    kernels.mix[CACHE_FLOAT32](from, reach, row, s, rows_, stride, mixed);
    if (values.grids()) {
      for (int64_t j = 0; j < width; ++j)
        from.rows[j] = of_values.recent_of(slot) + (j * of_values.recent + old - before) * row;
      kernels.mix[CACHE_FLOAT32](from, seen - old, row, s + old, rows_, stride, mixed);
    }
    for (int64_t i = 0; i < rows_; ++i)
      write(b, begin + i % steps_, g * pairs + i / steps_, mixed + i * width_floats(), 1, 0);
  }

  // Both

  /// What follows from past and steps.
  void derive() {
    total = past + steps;
    before = grids() ? settled(past, window) : 0;
    after = grids() ? settled(total, window) : 0;
    rows = pairs * steps;
    streams = branches * rows / width;
    chunks = larger(1, divide_up(grids() ? after : total, CHUNK));
  }

  /// Few rows whose steps do not all see the same tokens settled: one part after the other, in the present's buffers.
  void decode_parts(Context& context) const {
    Run part = *this;
    for (int64_t begin = 0, end; begin < steps || begin == 0; begin = end) {
      for (end = begin + 1; end < steps && seen_settled(end) == seen_settled(begin);) ++end;
      end = smaller(end, steps);
      part.first = begin, part.past = past + begin, part.steps = end - begin;
      part.derive();
      part.decode(context);
      if (end == steps) break;
      for (Cache* cache : {&part.keys, &part.values}) {
        cache->past = cache->present, cache->past_scales = cache->scales, cache->past_recent = cache->recent;
        cache->past_capacity = cache->capacity;
        cache->in_place = cache->recent_in_place = true;
      }
    }
  }
};

CacheKind kind_of(const Tensor& cache) {
  switch (cache.type) {
    case ort::FLOAT16: return CACHE_FLOAT16;
    case ort::INT8: return CACHE_INT8;
    default: return CACHE_FLOAT32;
  }
}

Cache cache_of(const CacheTensors& tensors, bool keys, int64_t d, int64_t window) {
  Cache cache{};
  cache.fresh = tensors.fresh;
  cache.rotates = keys;
  cache.bits = tensors.bits;
  cache.kind = kind_of(tensors.past);
  cache.row_bytes = static_cast<size_t>(cache.kind == CACHE_FLOAT32 && cache.bits == 16 ? d * 4 : d * cache.bits / 8);
  cache.scale_tokens = tensors.scale_tokens;
  cache.scale_bytes =
      cache.bits == 8 ? sizeof(float) : static_cast<size_t>(2 * (keys ? d : d / GROUP)) * sizeof(Half);
  cache.past_capacity = tensors.past_capacity;
  cache.capacity = tensors.capacity;
  cache.slots = window + GROUP;
  cache.past = tensors.past.as<char>();
  cache.past_scales = tensors.past_scale.as<char>();
  cache.past_recent = tensors.past_recent.as<Half>();
  cache.present = tensors.present.as<char>();
  cache.scales = tensors.present_scale.as<char>();
  cache.recent = tensors.present_recent.as<Half>();
  cache.in_place = tensors.in_place;
  cache.recent_in_place = tensors.recent_in_place;
  return cache;
}

}  // namespace

DiffAttention::DiffAttention(const Node& node) : AttentionNode(node) {
  const Isa isa = choose_isa();
  kernels_ = &DIFFBIT_PICK(isa, attention);
  lowbit_ = &DIFFBIT_PICK(isa, lowbit);
}

void DiffAttention::compute(Context& context) const {
  const AttentionTensors of = tensors(context);
  const int64_t positions = of.batch * of.steps, rows = of.cos.shape[0];
  for (int64_t i = 0; i < positions; ++i)
    if (const int64_t position = of.positions.as<int64_t>()[i]; position < 0 || position >= rows)
      throw Error("%s holds %lld, wanted 0 to %lld: cos has %lld rows", of.positions.name, number(position),
                  number(rows - 1), number(rows));

  Run run(*kernels_, *lowbit_);
  run.batch = of.batch, run.steps = run.all_steps = of.steps, run.past = of.past, run.all_total = of.past + of.steps;
  run.heads = heads, run.kv_heads = kv_heads, run.width = width, run.branches = branches;
  run.groups = kv_heads / width, run.pairs = heads / run.groups, run.d = of.d, run.window = window;
  run.top = query_bits ? (1 << (query_bits - 1)) - 1 : 0;
  run.scale = scale, run.norm_eps = norm_eps, run.half = of.query.type == ort::FLOAT16;
  run.query = of.query, run.lambda = of.lambda, run.positions = of.positions, run.cos = of.cos, run.sin = of.sin;
  run.mask = of.mask, run.out = of.out;
  run.keys = cache_of(of.keys, true, of.d, window), run.values = cache_of(of.values, false, of.d, window);
  run.derive();
  if (run.few())
    run.decode_parts(context);
  else
    run.prefill(context);
}

}  // namespace diffbit
