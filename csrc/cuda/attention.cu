// DiffAttention: cuts a call into parts (cpu/attention/op.cpp does the same on a CPU).
//
// The past is copied into present unless they are the same memory; from then on everything is in place. A part has at most
// FEW_STEPS steps, which with a low-bit cache all see the same quantized tokens; attention_decode.cu computes it. A call
// with more steps that attention_prefill.cu supports is not cut.
#include "attention.h"

namespace diffbit::cuda {
namespace {

/// Copies entries begin .. end, of `bytes` each, between the heads' rings, where entry i is in slot i % slots, and the heads'
/// runs, which have room for `room` entries and begin with entry `base`.
struct Turn {
  char *ring, *run;
  int64_t slots, room, base, begin, end, bytes;
  bool back;  // direction: to the ring
};

template <class Word>
__global__ void turn(const Turn t) {
  const int64_t head = blockIdx.y, entry_words = t.bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t words = (t.end - t.begin) * entry_words, stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += stride) {
    const int64_t entry = t.begin + i / entry_words;
    Word* in_ring = reinterpret_cast<Word*>(t.ring + (head * t.slots + entry % t.slots) * t.bytes) + i % entry_words;
    Word* in_run = reinterpret_cast<Word*>(t.run + (head * t.room + entry - t.base) * t.bytes) + i % entry_words;
    if (t.back)
      *in_ring = *in_run;
    else
      *in_run = *in_ring;
  }
}

const char* start(const Turn& t, int64_t heads, cudaStream_t stream) {
  if (t.begin >= t.end || !heads) return nullptr;
  const bool wide = ((reinterpret_cast<uintptr_t>(t.ring) | reinterpret_cast<uintptr_t>(t.run)) | static_cast<uint64_t>(t.bytes)) % 16 == 0;
  const int64_t blocks = divide_up((t.end - t.begin) * t.bytes / (wide ? 16 : 1), 256 * 4);
  const dim3 grid(static_cast<unsigned>(blocks < 1024 ? blocks : 1024), static_cast<unsigned>(heads));
  return wide ? launch(turn<uint4>, grid, 256, 0, stream, t) : launch(turn<char>, grid, 256, 0, stream, t);
}

/// The part of attention_mask that step s's token may see, from token `base` on, [B, count].
__global__ void look(const Attention a, int64_t base, int64_t first, int64_t count, int64_t* seen) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x, b = blockIdx.y, t = base + i;
  const int64_t* mask = static_cast<const int64_t*>(a.attention_mask) + b * a.mask_row;
  if (i < count) seen[b * count + i] = t >= first ? mask[t] : 0;
}

/// A call with more tokens than its sliding window: the tokens that any of its steps sees, in order and with room for the
/// new ones, in the workspace after the memory of the other kernels.
struct Window {
  const Attention& a;
  int64_t past, all, base, room, heads, at = 0;  // base: the first of the tokens
  struct Place {
    int64_t rows, scales, row, scale;  // offsets in the workspace; bytes of a token's row, and of its scale
  } keys, values;
  int64_t mask, bytes;

  Window(const Attention& a_, int64_t before)
      : a(a_), past(a.past_length), all(past + a.steps), base(base_of(0)), heads(a.batch * a.kv_heads), at(before) {
    room = divide_up(all - base, CACHE_BLOCK) * CACHE_BLOCK;
    for (const bool of_keys : {true, false}) {
      Place& place = of_keys ? keys : values;
      const Side side = side_of(a, of_keys);
      place.row = row_bytes(a, of_keys);
      place.scale = scale_bytes(side);
      place.rows = take(heads * room * place.row);
      place.scales = take(heads * room * place.scale);
    }
    mask = take(a.batch * room * static_cast<int64_t>(sizeof(int64_t)));
    bytes = at;
  }

  int64_t take(int64_t count) {
    const int64_t begin = divide_up(at, 256) * 256;
    at = begin + count;
    return begin;
  }

  /// The first token that step s needs: one that it sees, and of a low-bit cache the block that was quantized last, so that
  /// the keys' offset exists.
  int64_t base_of(int64_t s) const {
    const int64_t seen = past + s + 1 - a.sliding_window, first = seen > 0 ? seen : 0;
    if (!blockwise(a)) return first;
    const int64_t block = first / CACHE_BLOCK * CACHE_BLOCK, quantized = quantized_tokens(past + s, a.window);
    return block < quantized ? block : quantized > 0 ? quantized - CACHE_BLOCK : 0;
  }

  /// Runs the call on the workspace's tokens, from `first` on.
  Attention from(char* workspace, int64_t first) const {
    Attention local = a;
    local.past_length = past - first;
    const auto shifted = [&](int64_t offset, int64_t bytes) {
      return static_cast<void*>(workspace + offset + (first - base) * bytes);
    };
    local.present_key = shifted(keys.rows, keys.row);
    local.present_value = shifted(values.rows, values.row);
    if (keys.scale) local.present_key_scale = shifted(keys.scales, keys.scale);
    if (values.scale) local.present_value_scale = shifted(values.scales, values.scale);
    local.key_capacity = local.value_capacity = room;
    local.attention_mask = static_cast<const int64_t*>(a.attention_mask) + first;
    return local;
  }

  /// Copies the old tokens from the rings, or back to them the new tokens that they keep.
  const char* turns(char* workspace, bool back, cudaStream_t stream) const {
    for (const bool of_keys : {true, false}) {
      const Place& place = of_keys ? keys : values;
      const Side side = side_of(a, of_keys);
      const int64_t cached = side.bits < 8 ? quantized_tokens(past, a.window) : past;
      const int64_t count = side.bits < 8 ? quantized_tokens(all, a.window) : all;
      const int64_t kept = count - side.capacity > cached ? count - side.capacity : cached;
      const int64_t begin = back ? kept : base, end = back ? count : cached;
      const Turn rows{side.rows, workspace + place.rows, side.capacity, room, base, begin, end, place.row, back};
      if (const char* wrong = start(rows, heads, stream)) return wrong;
      if (!place.scale) continue;
      const Turn scales{reinterpret_cast<char*>(side.scales), workspace + place.scales, side.capacity, room, base, begin, end, place.scale, back};
      if (const char* wrong = start(scales, heads, stream)) return wrong;
    }
    return nullptr;
  }
};

/// The part that begins at step `first`.
Part part_at(const Attention& a, int64_t first) {
  Part part{first, 1};
  const auto seen = [&](int64_t step) {
    return blockwise(a) && a.key ? quantized_tokens(a.past_length + step + 1, a.window) : 0;
  };
  const int64_t most = a.steps - first < FEW_STEPS ? a.steps - first : FEW_STEPS;
  while (part.steps < most && seen(first + part.steps) == seen(first)) ++part.steps;
  return part;
}

/// By count, unpacking a cache moves the bytes of five (int8) to seven (int4) passes over it, and a part with two
/// branches makes at least two: one for each 8 of its queries.
bool prefills(const Attention& a) { return a.steps > (must_unpack(a) ? 4 : 1) * FEW_STEPS && prefill_takes(a); }

bool exceeds_window(const Attention& a) { return a.sliding_window && a.past_length + a.steps > a.sliding_window; }

/// Scratch memory of such a call.
size_t window_workspace(const Attention& a) {
  const Window window(a, 0);
  size_t most = 0;
  if (prefills(a)) most = prefill_workspace(window.from(nullptr, window.base));
  for (int64_t s = 0; s < a.steps && !prefills(a); ++s) {
    const size_t bytes = decode_workspace(window.from(nullptr, window.base_of(s)), Part{s, 1});
    most = most < bytes ? bytes : most;
  }
  return most;
}

/// Runs such a call, whose past is present: a prompt at once, or step by step.
const char* attend_in_window(const Attention& a, char* workspace, cudaStream_t stream) {
  const Window window(a, static_cast<int64_t>(window_workspace(a)));
  if (const char* wrong = window.turns(workspace, false, stream)) return wrong;
  if (prefills(a)) {
    const Attention local = window.from(workspace, window.base);
    if (const char* wrong = prefill(local, workspace, stream)) return wrong;
  }
  for (int64_t s = 0; s < a.steps && !prefills(a); ++s) {
    const int64_t base = window.base_of(s), count = a.past_length + s + 1 - base;
    int64_t* seen = reinterpret_cast<int64_t*>(workspace + window.mask);
    const dim3 grid(static_cast<unsigned>(divide_up(count, 256)), static_cast<unsigned>(a.batch));
    const int64_t first = a.past_length + s + 1 - a.sliding_window;
    if (const char* wrong = launch(look, grid, 256, 0, stream, a, base, first, count, seen)) return wrong;
    Attention local = window.from(workspace, base);
    local.attention_mask = seen, local.mask_row = count;
    if (!decode_appends(local))
      if (const char* wrong = append(local, Part{s, 1}, stream)) return wrong;
    if (const char* wrong = decode(local, Part{s, 1}, workspace, stream)) return wrong;
  }
  return window.turns(workspace, true, stream);
}

const char* refused(const Attention& a) {
  const bool blocks = blockwise(a);
  if (a.d < 2 || a.d % 2 || a.d > ATTENTION_MOST_D)
    return sentence("DiffAttention: heads are %lld wide, wanted an even number of at most %lld",
                    static_cast<long long>(a.d), static_cast<long long>(ATTENTION_MOST_D));
  if (blocks && a.d % CACHE_BLOCK)
    return sentence("DiffAttention: heads are %lld wide, wanted a multiple of %lld for keys or values of 4, 3 or 2 bits",
                    static_cast<long long>(a.d), static_cast<long long>(CACHE_BLOCK));
  return nullptr;
}

}  // namespace
}  // namespace diffbit::cuda

size_t diffbit_cuda_attention_workspace(const DiffbitDiffAttention* op) {
  using namespace diffbit::cuda;
  if (!op->batch) return 0;
  if (exceeds_window(*op)) return static_cast<size_t>(Window(*op, static_cast<int64_t>(window_workspace(*op))).bytes);
  if (prefills(*op)) return prefill_workspace(*op);
  size_t most = 0;
  for (Part part{0, 0}; part.first < op->steps; part.first += part.steps) {
    part = part_at(*op, part.first);
    const size_t bytes = decode_workspace(*op, part);
    most = most < bytes ? bytes : most;
  }
  return most;
}

const char* diffbit_cuda_attention(const DiffbitDiffAttention* op, void* workspace, void* stream_) {
  using namespace diffbit::cuda;
  cudaStream_t stream = static_cast<cudaStream_t>(stream_);
  if (const char* wrong = refused(*op)) return wrong;
  for (const bool keys : {true, false})
    if (const char* wrong = copy_past(*op, keys, stream)) return wrong;
  if (!op->batch || !op->steps) return nullptr;
  if (exceeds_window(*op)) return attend_in_window(*op, static_cast<char*>(workspace), stream);
  if (prefills(*op)) return prefill(*op, workspace, stream);
  for (Part part{0, 0}; part.first < op->steps; part.first += part.steps) {
    part = part_at(*op, part.first);
    if (op->key && !decode_appends(*op))
      if (const char* wrong = append(*op, part, stream)) return wrong;
    if (const char* wrong = decode(*op, part, workspace, stream)) return wrong;
  }
  return nullptr;
}
