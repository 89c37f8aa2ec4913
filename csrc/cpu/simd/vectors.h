// Vectors with the same names for every instruction set. Kernels that are compiled once per set include this file, so
// everything here has internal linkage. The set's own header defines
//
//   F32, F32_LANES     floats: + - * / round once each, fma once for both; splat, load (of float32, float16 and int8),
//                      store (to float32 and float16), store_rounded (to int8, halves to even; in -127..127), larger and
//                      smaller (of a NaN and a number: the number), clipped, magnitude, rounded, power_of_two,
//                      zero_below, sum, largest, store_sums (to[i] = the sum of vector i, its
//                      lanes added 1, 2, 4 and 8 apart), partners (each lane's, APART
//                      lanes away), in_lanes
//   Bytes              WIDTH bytes: load_bytes, store, splat, splat4 (four bytes in every lane of an Ints), &, |, ^, shift (each
//                      byte's bits down, or up; bits of its neighbour or zeros come in, so the caller masks them), once,
//                      rounded_bytes (of four F32), store_parted, minus, lookup (of indices 0..15 in a table of
//                      load_table; indices 16..127 wrap if LOOKUP_WRAPS, else they find 0, as 128..255 always do)
//   Ints               WIDTH / 4 int32 lanes; arithmetic wraps: zero, splat_int, +, shift (arithmetic), store, to_floats,
//                      add_sums, pair_sums (of neighbouring lanes, of two vectors), larger_bits, times_bytes
//   Partial            what `dot` adds products of unsigned codes and signed activations to. AVX2 has no dot product into
//                      int32: there a Partial is int16, holds the products of `dots(largest_code)` calls, and must then be
//                      flushed. Elsewhere it is an Ints and never needs it (partial_is_ints.h), but flushing is always
//                      right, so a kernel is written once:
//
//                        Ints sums = zero();
//                        for (each run of at most dots(15) vectors) {
//                          Partial partial = no_partial();
//                          for (each vector) partial = dot(partial, codes, activations);    0..15, -127..127
//                          sums = flush(sums, partial);
//                        }
//
//   dot_signed         products of signed bytes, in int32, of sums that began with start_signed
//   dot_bytes          products of unsigned bytes, less BYTE_MIDDLE (0 or 128), and activations -127..127, in int32
//   dot_centered       the same of bytes that are already less BYTE_MIDDLE
//   dot_small          the products of bytes 0..127 and activations, in int32
//   signed_by          bytes, or where `signs` is 255 and not PLUS, their negatives
//   unpack_run<BITS>   codes packed by kv_cache.pack, 4, 3 or 2 bits each: those of a vector, or of 32 channels if that is more,
//                      a byte each, neighbours side by side
//   load_weights       of TernaryMatMul; REST: half a vector, where a row is an odd number of blocks
//   store_activations  of TernaryMatMul: the first 32 bytes, and the others (a vector of 32 or less has none)
//   dot_nibbles        the products of both nibbles of `both`, times 2^NIBBLE_SHIFT, where that needs fewer shifts; shift 0:
//                      there is no such function
//   REGISTERS          how many vectors stay in registers: 16 or 32
//   TERNARY_ROWS, TERNARY_COLUMNS, TERNARY_CHAINS, TERNARY_PASSES, INT4_ROWS, INT4_TWO_TILES
//                      sizes of tiles whose sums stay in registers: cpu/ternary/vector.cpp and cpu/int4/vector.cpp say how
#pragma once

#include DIFFBIT_SIMD  // avx2.h, ...: CMakeLists.txt says which

namespace diffbit::DIFFBIT_ISA {
namespace {

static_assert(F32_LANES == WIDTH / 4, "lanes of floats and of integers meet");

#if defined(__aarch64__)
#define DIFFBIT_IN_REGISTER "+w"
#elif defined(__wasm__)
#define DIFFBIT_IN_REGISTER "+r"
#else
#define DIFFBIT_IN_REGISTER "+v"
#endif
/// Keeps the compiler from loading a vector again for each of its uses.
template <class Vector>
DIFFBIT_INLINE Vector once(Vector a) {
  __asm__("" : DIFFBIT_IN_REGISTER(a.v));
  return a;
}
/// Keeps the compiler from multiplying one lane and copying the product to the others: loads broadcast at no cost.
DIFFBIT_INLINE F32 in_lanes(F32 a) {
  __asm__("" : DIFFBIT_IN_REGISTER(a));
  return a;
}

/// Prefetches a line that will soon be read once.
DIFFBIT_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }

template <class T>
DIFFBIT_INLINE F32 load_part(const T* from, int64_t count) {
  T part[F32_LANES] = {};
  std::memcpy(part, from, static_cast<size_t>(count) * sizeof(T));
  return load(part);
}

template <class T>
DIFFBIT_INLINE void store_part(T* to, int64_t count, F32 a) {
  T part[F32_LANES];
  store(part, a);
  std::memcpy(to, part, static_cast<size_t>(count) * sizeof(T));
}

/// Returns e^x for x <= 0, to about an ulp; 0 below the smallest normal number. NaN stays NaN.
///
/// x = n ln 2 + r, |r| <= ln(2)/2; e^r by its polynomial (coefficients of Cephes' expf), ln 2 in two parts.
DIFFBIT_INLINE F32 exp(F32 x) {
  constexpr float LEAST = -87.33654f;
  const F32 from = larger(splat(LEAST), x), n = rounded(from * splat(1.44269504f));
  const F32 r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), from));
  F32 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p * r, r, r) + splat(1.0f);
  return zero_below(x, LEAST, p * power_of_two(n));
}

/// Returns x / (1 + e^-x), with an exponential that cannot overflow; a NaN propagates through it.
DIFFBIT_INLINE F32 silu(F32 x) {
  const F32 e = exp(magnitude(x) * splat(-1.0f));
  return fma(smaller(x, splat(0.0f)), e, larger(x, splat(0.0f))) / (splat(1.0f) + e);
}

/// Rounds d floats to codes in -top..top; a row of zeros has scale 0 and codes 0, one with an infinity or a NaN has scale NaN
/// and codes 0. HALF: the scale is first rounded to float16. Returns the scale.
template <bool HALF = false>
DIFFBIT_INLINE float round_row(const float* x, int64_t d, int top, int8_t* codes) {
  constexpr int64_t L = F32_LANES;
  F32 peak = splat(0.0f), poison = splat(0.0f);  // poison: infinity and NaN times 0 are NaN
  const auto take = [&](F32 values) {
    peak = larger(magnitude(values), peak);
    poison = fma(values, splat(0.0f), poison);
  };
  int64_t i = 0;
  for (; i + L <= d; i += L) take(load(x + i));
  if (i < d) take(load_part(x + i, d - i));
  float scale = largest(peak) / static_cast<float>(top);
  if (HALF) {
    uint16_t rounded[L];
    store(rounded, splat(scale));
    scale = sum(load_part(rounded, 1));
  }
  if (sum(poison) != 0 || scale == __builtin_inff()) {
    std::memset(codes, 0, static_cast<size_t>(d));
    return __builtin_nanf("");
  }
  const F32 divisor = splat(scale == 0 ? 1.0f : scale), high = splat(static_cast<float>(top));
  const F32 low = splat(static_cast<float>(-top));
  const auto rounded_codes = [&](F32 values) { return smaller(high, larger(low, values / divisor)); };
  for (i = 0; i + L <= d; i += L) store_rounded(codes + i, rounded_codes(load(x + i)));
  if (i < d) {
    int8_t part[L];
    store_rounded(part, rounded_codes(load_part(x + i, d - i)));
    std::memcpy(codes + i, part, static_cast<size_t>(d - i));
  }
  return scale;
}

/// Calls work(count, row) for tiles of `count()` rows, a constant of at most MOST, from begin to end.
template <int MOST, class Work>
DIFFBIT_INLINE void in_tiles(int64_t begin, int64_t end, const Work& work) {
  int64_t row = begin;
  for (; row + MOST <= end; row += MOST) work(std::integral_constant<int, MOST>(), row);
  if constexpr (MOST > 4)
    if (row + 4 <= end) work(std::integral_constant<int, 4>(), row), row += 4;
  if constexpr (MOST > 3 && REGISTERS == 32)
    if (row + 3 == end) return work(std::integral_constant<int, 3>(), row);
  if constexpr (MOST > 2)
    if (row + 2 <= end) work(std::integral_constant<int, 2>(), row), row += 2;
  if (row < end) work(std::integral_constant<int, 1>(), row);
}

/// Returns the sum of the lanes.
DIFFBIT_INLINE int32_t sum(Ints a) {
  uint32_t sums[4] = {};
  add_sums(sums, a, a, a, a);
  return static_cast<int32_t>(sums[0]);
}

}  // namespace
}  // namespace diffbit::DIFFBIT_ISA
