// A low-bit cache with vectors: a vector of codes is unpacked, and becomes levels by one lookup.
#include "integer_dots.h"
#include "lowbit.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

constexpr int64_t AHEAD = 2048, LINE = 64;  // bytes

DIFFBIT_INLINE void ask(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += LINE) prefetch(static_cast<const char*>(from) + i + AHEAD);
}

// ---- codes ----

/// Packs the PLANE bits of 32 codes from bit SHIFT on.
template <int PLANE, int SHIFT>
DIFFBIT_INLINE void pack_plane(const uint8_t* codes, uint8_t* packed) {
  for (int64_t byte = 0; byte < 4 * PLANE; ++byte) packed[byte] = 0;
  for (int place = 0; place < 8 / PLANE; ++place)
    for (int64_t byte = 0; byte < 4 * PLANE; ++byte)
      packed[byte] = static_cast<uint8_t>(
          packed[byte] | (codes[place * 4 * PLANE + byte] >> SHIFT & ((1 << PLANE) - 1)) << (place * PLANE));
}

/// codes [32] -> 4 * BITS bytes.
template <int BITS>
DIFFBIT_INLINE void pack_group(const uint8_t* codes, uint8_t* packed) {
  pack_plane<BITS == 3 ? 2 : BITS, 0>(codes, packed);
  if (BITS == 3) pack_plane<1, 2>(codes, packed + 8);
}

template <int BITS>
void encode(const Half* x, const Half* offset, int64_t n, int64_t d, uint8_t* packed, Half* scales) {
  using Of = Levels<BITS>;
  float zeros[MOST_D] = {};
  if (offset)
    for (int64_t i = 0; i < d; i += L) store(zeros + i, load(offset + i));
  for (int64_t t = 0; t < n; ++t, packed += d * BITS / 8) {
    float y[MOST_D];
    int8_t rounded[MOST_D];
    uint8_t codes[MOST_D];
    for (int64_t i = 0; i < d; i += L) store(y + i, load(x + t * d + i) - load(zeros + i));
    const float unit = round_row(y, d, 127, rounded);
    int32_t energy = 0, with_levels = 0, of_levels = 0;  // at most 127 * 127 * 512
    for (int64_t i = 0; i < d; ++i) energy += rounded[i] * rounded[i];
    const float factor = __builtin_sqrtf(static_cast<float>(d) / static_cast<float>(energy > 1 ? energy : 1));
    for (int64_t i = 0; i < d; ++i) {
      const float z = static_cast<float>(rounded[i]) * factor;
      int code = 0;
      for (float threshold : Of::THRESHOLDS) code += z > threshold;
      codes[i] = static_cast<uint8_t>(code);
    }
    for (int64_t i = 0; i < d; ++i) {
      const int level = Of::LEVELS[codes[i]];
      with_levels += rounded[i] * level, of_levels += level * level;
    }
    for (int64_t i = 0; i < d; i += BLOCK) pack_group<BITS>(codes + i, packed + i * BITS / 8);
    Half scale[L];
    store(scale, splat(unit * (static_cast<float>(with_levels) / static_cast<float>(of_levels))));
    scales[t] = scale[0];
  }
}

template <int BITS>
void unpack(const uint8_t* packed, int64_t n, int64_t d, int8_t* levels) {
  constexpr int64_t RUN = WIDTH > BLOCK ? WIDTH : BLOCK, VECTORS = RUN / WIDTH;  // codes
  uint8_t entries[16] = {};
  for (int code = 0; code < 1 << BITS; ++code) entries[code] = static_cast<uint8_t>(Levels<BITS>::LEVELS[code]);
  const Bytes table = load_table(entries);
  uint8_t* to = reinterpret_cast<uint8_t*>(levels);
  const int64_t size = n * d, whole = size / RUN * RUN;
  for (int64_t i = 0; i < whole; i += RUN) {
    const int64_t byte = i * BITS / 8;
    if (byte % LINE < RUN * BITS / 8) prefetch(packed + byte + AHEAD);
    Bytes codes[VECTORS];
    unpack_run<BITS>(packed + byte, codes);
    DIFFBIT_UNROLL for (int64_t j = 0; j < VECTORS; ++j) store(to + i + j * WIDTH, lookup(table, codes[j]));
  }
  if (whole == size) return;
  uint8_t rest[RUN * BITS / 8] = {};  // half a run
  std::memcpy(rest, packed + whole * BITS / 8, static_cast<size_t>((size - whole) * BITS / 8));
  Bytes codes[VECTORS];
  unpack_run<BITS>(rest, codes);
  uint8_t last[RUN];
  for (int64_t j = 0; j < VECTORS; ++j) store(last + j * WIDTH, lookup(table, codes[j]));
  std::memcpy(to + whole, last, static_cast<size_t>(size - whole));
}

// ---- scores in integers ----

void integer_row_scores(const CacheRows& keys, int64_t n, int64_t d, const float* q, QueryRows rows, int top, float* s,
                        int64_t stride) {
  const Layout layout(d);
  uint8_t padded_rows[BLOCK * ROW_MOST];
  for (int64_t row = 0; row < rows.end(keys.count - 1); ++row) {
    const int64_t j = row >= rows.count[0];
    int8_t rounded_codes[MOST_D];
    Rounded u;
    u.scale = round_row(q + row * padded(d), d, top, rounded_codes);
    arrange<8>(rounded_codes, d, layout, u);
    u.start = zero();
    for (int64_t v = 0; v < layout.vectors(); ++v)
      u.start = start_signed(u.start, load_bytes(u.codes + v * WIDTH));
    const F32 scale = splat(u.scale);
    const uint8_t* from = static_cast<const uint8_t*>(keys.rows[j]);
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
      const int64_t count = n - begin < BLOCK ? n - begin : BLOCK;
      ask(from + begin * d, count * d);
      const uint8_t* block = laid_out(from + begin * d, count, layout, padded_rows);
      float scaled[BLOCK];
      dots_of_block<1>(block, layout, u, [&](int64_t t, Ints dots) { store(scaled + t, to_floats(dots) * scale); });
      for (int64_t t = 0; t < count; ++t) s[row * stride + begin + t] = scaled[t] * keys.scales[j][begin + t];
    }
  }
}

float quantize_query(const float* q, int64_t d, int top, float* codes) {
  int8_t rounded[MOST_D];
  const float scale = round_row(q, d, top, rounded);
  for (int64_t i = 0; i < d; ++i) codes[i] = rounded[i];
  return scale;
}

}  // namespace

extern const LowBitKernels lowbit = DIFFBIT_LOWBIT_KERNELS;

}  // namespace diffbit::DIFFBIT_ISA
