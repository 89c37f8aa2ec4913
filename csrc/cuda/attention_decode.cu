// DiffAttention with few queries: the context is cut into splits, one block per split, and a second kernel merges them.
//
// A split reads its keys and values once, for both softmaxes and for 8 rows (branch, pair, step) of a kv head. More
// rows need more blocks, which are neighbours in the grid, so the second finds the split in the second-level cache. A row
// keeps the maximum of its logits, the sum of its shares (exp(logit - maximum)) and their product with the values; the
// merge weights these (log-sum-exp), subtracts, and applies the norm.
//
// Memory bandwidth is the limit: 4 * channels bytes per token and kv head with 16 bits (channels = width d; 8 d in version
// 1). An H200 reads 4.3 TB/s, or 18.6 bytes per clock for each of its 132 multiprocessors at 1.75 GHz. 16 tokens of 128
// channels are 8 KB, or 440 clocks, in which a multiprocessor issues 1760 instructions. A warp's instructions for these 16
// tokens:
//     CUDA cores     one pair 16 (6 d fmas + 4 d conversions) / 32 = 320, four pairs 900, and the sums across lanes
//     tensor cores   32 mma and 24 ldmatrix, the same for any number of rows up to 8
// int8 halves the bytes, to 234 clocks or 936 instructions, and adds 5 instructions to convert 4 codes to floats, 160 here.
// So everything runs on tensor cores (mma m16n8k16). With copies, addresses and softmax a tile takes about 350
// instructions with 16 bits and 510 with int8 (counted in code for sm_90a). Codes of fewer bits first become levels, 4
// with 6 to 11 operations: a tile then takes about as long as its bytes with int8. The other 8 rows of a fragment are not
// wasted: queries and shares need float32's precision (the difference of two softmaxes cancels, and the norm enlarges the
// rest), so each is the sum of two 16-bit numbers, and 8 rows with their rounding errors are the 16 rows of a fragment.
// The first product leaves logits in the lanes in which the second needs its shares, so only a row's maximum moves between
// lanes.
//
// Each warp has its own ring in shared memory, filled by cp.async, and needs no barrier except its own: keys and values of
// tiles of 16 tokens alternate, up to 3 slots ahead, or 7 of fewer bits than 8. With 8 to 16 warps, 60 to 140 KB are in
// flight to a multiprocessor, more than a microsecond of its share of the bandwidth, 33 KB. The blocks of the last split
// append the new tokens while their first tiles arrive; the new tokens are a separate tile.
//
//     kernel         caches                                       what it multiplies
//     decode_fast    float16, bfloat16, int8; int4, int3, int2    the numbers; codes or levels as float16, which is exact
//                    with queries of 16 bits; d 64 and 128
//     decode_any     everything else                              floats on CUDA cores; correct but slow
#include "decode_any.h"
#include "decode_fast.h"
#include "decode_merge.h"

namespace diffbit::cuda {
namespace {

struct Plan {
  void (*kernel)(Attention, Cut);
  int warps;
  size_t shared;
  int64_t tokens;  // a split has a multiple of them
};

/// A kernel with one ring per warp, and as many warps as the GPU has room for.
template <class Element, int D, bool WIDE>
Plan fast_plan() {
  using F = Fast<Element, D, WIDE>;
  static_assert(F::RING >= ROWS * F::CHANNELS * 4, "a warp's sums fit");
  constexpr size_t RESERVE = 1024;  // the kernel's own shared memory, and a reserve
  const size_t fit = (most_shared() - F::QUERIES - RESERVE) / F::RING;
  const int warps = fit < FAST_WARPS ? static_cast<int>(fit) : FAST_WARPS;
  return {decode_fast<Element, D, WIDE>, warps, static_cast<size_t>(F::QUERIES + warps * F::RING), FAST_TOKENS * warps};
}

template <class Element>
Plan fast_plan(const Attention& a) {
  if (a.d == 64) return a.wide_value ? fast_plan<Element, 64, true>() : fast_plan<Element, 64, false>();
  return a.wide_value ? fast_plan<Element, 128, true>() : fast_plan<Element, 128, false>();
}

Plan any_plan(const Attention& a) {
  const int64_t floats = (a.query_bits ? 2 : 1) * ROWS * a.d;
  return {decode_any, ANY_WARPS, static_cast<size_t>(floats) * sizeof(float), ANY_TOKENS};
}

enum class Way { HALF, BFLOAT16, CODES, PACKED, ANY };

/// The tensor cores need keys and values of the same type, or both of fewer bits than 8. Queries and shares are sums of
/// two numbers: 22 bits with __half, and with __nv_bfloat16 16 bits, which is enough for an output with fewer.
Way way_of(const Attention& a) {
  if (!aligned_caches(a)) return Way::ANY;
  if ((a.d != 64 && a.d != 128) || a.query_bits) return Way::ANY;
  if (!a.key && blockwise(a) && a.steps > 1) return Way::ANY;  // some queries do not see all quantized tokens
  if (a.key_bits < 8 && a.value_bits < 8) return Way::PACKED;
  if (a.key_bits != a.value_bits) return Way::ANY;
  if (a.key_bits == 8) return Way::CODES;
  if (a.key_type != a.value_type) return Way::ANY;
  if (a.key_type == ort::FLOAT16) return Way::HALF;
  return a.key_type == ort::BFLOAT16 && a.type == ort::BFLOAT16 ? Way::BFLOAT16 : Way::ANY;
}

/// A kernel for the tokens begin .. end, with splits that fill the GPU as evenly as possible: the time is that of the waves
/// of blocks, each as long as a split plus a block's other work (as much as SETUP tokens).
struct Run {
  Plan plan;
  int64_t begin, end, splits, span;
};

Run run_of(const Attention& a, const Cut& cut, const Plan& plan, int64_t begin, int64_t end) {
  constexpr int64_t SETUP = 128, ONE = 1;
  const int64_t tokens = end - begin, units = a.batch * groups(a) * cut.row_blocks;
  const int64_t at_once = multiprocessors() * blocks_at_once(plan.kernel, 32 * plan.warps, plan.shared);
  const int64_t most = max(ONE, min(divide_up(tokens, plan.tokens), divide_up(4 * at_once, units)));
  Run run{plan, begin, end, 0, 0};
  int64_t best = 0;
  for (int64_t splits = 1; splits <= most; ++splits) {
    const int64_t span = max(ONE, divide_up(divide_up(tokens, splits), plan.tokens)) * plan.tokens;
    const int64_t used = max(ONE, divide_up(tokens, span)), time = divide_up(units * used, at_once) * (span + SETUP);
    if (best && time >= best) continue;
    best = time, run.span = span, run.splits = used;
  }
  return run;
}

/// Runs a part with one or two kernels.
struct Runs {
  Cut cut;
  int count;
  Run run[2];
};

Runs runs_of(const Attention& a, Part part) {
  Runs runs{};
  Cut& cut = runs.cut;
  cut.part = part;
  cut.past = a.past_length + part.first;
  cut.all = cut.past + part.steps;
  cut.rows = (pairs(a) + noises(a)) * part.steps;
  cut.row_blocks = divide_up(cut.rows, ROWS);
  const auto add = [&](const Plan& plan, int64_t begin, int64_t end) {
    runs.run[runs.count] = run_of(a, cut, plan, begin, end);
    cut.splits += runs.run[runs.count++].splits;
  };
  switch (way_of(a)) {
    case Way::HALF: add(fast_plan<__half>(a), 0, cut.past); break;
    case Way::BFLOAT16: add(fast_plan<__nv_bfloat16>(a), 0, cut.past); break;
    case Way::CODES: add(fast_plan<int8_t>(a), 0, cut.past); break;
    case Way::ANY: add(any_plan(a), 0, cut.all); break;
    case Way::PACKED: {
      const int64_t after = quantized_for(a, cut.all);
      if (after) add(fast_plan<Packed>(a), 0, after);
      // The recent tokens, as decode_fast counts them
      add(fast_plan<__half>(a), after ? 0 : a.first, a.first + max(cut.past - after, int64_t{0}));
    }
  }
  return runs;
}

}  // namespace

bool decode_appends(const Attention& a) { return a.key && !blockwise(a) && way_of(a) != Way::ANY; }

size_t decode_workspace(const Attention& a, Part part) {
  const Cut cut = runs_of(a, part).cut;
  return static_cast<size_t>(a.batch * groups(a) * cut.splits * cut.rows * (width(a) * a.d + 2)) * sizeof(float);
}

const char* decode(const Attention& a, Part part, void* workspace, cudaStream_t stream) {
  const Runs runs = runs_of(a, part);
  Cut cut = runs.cut;
  cut.sums = static_cast<float*>(workspace);
  cut.marks = cut.sums + a.batch * groups(a) * cut.splits * cut.rows * width(a) * a.d;
  for (int i = 0; i < runs.count; ++i) {
    const Run& run = runs.run[i];
    cut.begin = run.begin, cut.end = run.end, cut.own_splits = run.splits, cut.span = run.span;
    const dim3 grid(static_cast<unsigned>(run.splits * cut.row_blocks), static_cast<unsigned>(groups(a)),
                    static_cast<unsigned>(a.batch));
    if (const char* wrong = launch(run.plan.kernel, grid, 32 * run.plan.warps, run.plan.shared, stream, a, cut))
      return wrong;
    cut.first_split += run.splits;
  }
  const dim3 heads(static_cast<unsigned>(a.heads), static_cast<unsigned>(part.steps), static_cast<unsigned>(a.batch));
  return launch(merge, heads, MERGE_THREADS, 0, stream, a, cut);
}

}  // namespace diffbit::cuda
