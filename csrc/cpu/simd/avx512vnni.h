// AVX-512 with VNNI: 32 registers; a dot product into int32, of unsigned by signed bytes.
#pragma once

#include "prelude.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

// ---- floats ----

using F32 = __m512;
constexpr int F32_LANES = 16;

DIFFBIT_INLINE F32 splat(float x) { return _mm512_set1_ps(x); }
DIFFBIT_INLINE F32 load(const float* from) { return _mm512_loadu_ps(from); }
DIFFBIT_INLINE F32 load(const uint16_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
DIFFBIT_INLINE F32 load(const int8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
DIFFBIT_INLINE void store(float* to, F32 a) { _mm512_storeu_ps(to, a); }
DIFFBIT_INLINE void store(uint16_t* to, F32 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
/// Rounds halves to even; the numbers must lie in -127..127.
DIFFBIT_INLINE void store_rounded(int8_t* to, F32 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
}
DIFFBIT_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
/// Returns b if either is a NaN.
DIFFBIT_INLINE F32 larger(F32 a, F32 b) { return _mm512_max_ps(a, b); }
DIFFBIT_INLINE F32 smaller(F32 a, F32 b) { return _mm512_min_ps(a, b); }
DIFFBIT_INLINE F32 magnitude(F32 a) { return _mm512_abs_ps(a); }
DIFFBIT_INLINE F32 rounded(F32 a) { return _mm512_roundscale_ps(a, 0); }
/// Returns 2^n for an integer n in -126..127.
DIFFBIT_INLINE F32 power_of_two(F32 n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
/// Returns a, or 0 where x < limit.
DIFFBIT_INLINE F32 zero_below(F32 x, float limit, F32 a) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, splat(limit), _CMP_NLT_UQ), a);
}
DIFFBIT_INLINE float sum(F32 a) { return _mm512_reduce_add_ps(a); }
DIFFBIT_INLINE float largest(F32 a) { return _mm512_reduce_max_ps(a); }
/// Sets to[i] = the sum of vector i: neighbours first, then these sums, and so on, as in every set.
DIFFBIT_INLINE void store_sums(float* to, F32 a, F32 b, F32 c, F32 d) {
  const F32 ab = _mm512_shuffle_ps(a, b, 0x88) + _mm512_shuffle_ps(a, b, 0xdd);
  const F32 cd = _mm512_shuffle_ps(c, d, 0x88) + _mm512_shuffle_ps(c, d, 0xdd);
  const F32 four = _mm512_shuffle_ps(ab, cd, 0x88) + _mm512_shuffle_ps(ab, cd, 0xdd);
  const F32 two = four + _mm512_shuffle_f32x4(four, four, 0xb1);
  _mm_storeu_ps(to, _mm512_castps512_ps128(two) + _mm512_extractf32x4_ps(two, 2));
}

DIFFBIT_INLINE F32 clipped(F32 a, float low, float high) {
  return _mm512_max_ps(_mm512_min_ps(a, splat(high)), splat(low));
}

/// Returns each lane's partner, APART lanes away.
template <int APART>
DIFFBIT_INLINE F32 partners(F32 a) {
  if (APART == 1) return _mm512_permute_ps(a, 0xb1);
  if (APART == 2) return _mm512_permute_ps(a, 0x4e);
  if (APART == 4) return _mm512_shuffle_f32x4(a, a, 0xb1);
  return _mm512_shuffle_f32x4(a, a, 0x4e);
}

// ---- bytes and integers ----

constexpr int WIDTH = 64;
struct Bytes { __m512i v; };
// The lanes are typed as int32 throughout: with __m512i, whose lanes are int64, GCC 12 keeps two copies of each sum in a
// loop and runs out of registers
struct Ints {
  int32_t v __attribute__((vector_size(64)));
  Ints() = default;
  DIFFBIT_INLINE Ints(__m512i x) : v((decltype(v))x) {}
  DIFFBIT_INLINE operator __m512i() const { return (__m512i)v; }
};

DIFFBIT_INLINE Bytes load_bytes(const void* from) { return {_mm512_loadu_si512(from)}; }
DIFFBIT_INLINE Bytes splat(uint8_t byte) { return {_mm512_set1_epi8(static_cast<char>(byte))}; }
/// Copies four bytes into every lane of an Ints.
DIFFBIT_INLINE Bytes splat4(const void* from) {
  int32_t four;
  std::memcpy(&four, from, 4);
  return {_mm512_set1_epi32(four)};
}
DIFFBIT_INLINE Bytes operator&(Bytes a, Bytes b) { return {_mm512_and_si512(a.v, b.v)}; }
DIFFBIT_INLINE Bytes operator|(Bytes a, Bytes b) { return {_mm512_or_si512(a.v, b.v)}; }
DIFFBIT_INLINE Bytes operator^(Bytes a, Bytes b) { return {_mm512_xor_si512(a.v, b.v)}; }
/// Shifts each byte's bits down by BY, or up by -BY; bits from beyond are the neighbour's or zeros, so mask the required field.
template <int BY>
DIFFBIT_INLINE Bytes shift(Bytes a) {
  return {BY > 0 ? _mm512_srli_epi16(a.v, BY) : BY < 0 ? _mm512_slli_epi16(a.v, -BY) : a.v};
}
/// Loads bytes 0..15 of a table for `lookup`; its indices are 0..15.
DIFFBIT_INLINE Bytes load_table(const uint8_t* from) {
  return {_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
}
DIFFBIT_INLINE Bytes minus(Bytes a, Bytes b) { return {_mm512_sub_epi8(a.v, b.v)}; }
constexpr bool LOOKUP_WRAPS = true;
DIFFBIT_INLINE Bytes lookup(Bytes table, Bytes indices) { return {_mm512_shuffle_epi8(table.v, indices.v)}; }

DIFFBIT_INLINE Ints zero() { return {_mm512_setzero_si512()}; }
DIFFBIT_INLINE Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a, b)}; }
template <int BY>
DIFFBIT_INLINE Ints shift(Ints a) {  // arithmetic
  return {_mm512_srai_epi32(a, BY)};
}
DIFFBIT_INLINE Ints dot(Ints sums, Bytes codes, Bytes activations) {
  return {_mm512_dpbusd_epi32(sums, codes.v, activations.v)};
}
DIFFBIT_INLINE void store(void* to, Bytes a) { _mm512_storeu_si512(to, a.v); }
DIFFBIT_INLINE void store(int32_t* to, Ints a) { _mm512_storeu_si512(to, a); }

/// Adds the sums of the lanes of four vectors to four numbers.
DIFFBIT_INLINE void add_sums(uint32_t* to, Ints a, Ints b, Ints c, Ints d) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const __m512i wide = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i all = _mm256_add_epi32(_mm512_castsi512_si256(wide), _mm512_extracti64x4_epi64(wide, 1));
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  __m128i* at = reinterpret_cast<__m128i*>(to);
  _mm_storeu_si128(at, _mm_add_epi32(_mm_loadu_si128(at), four));
}

DIFFBIT_INLINE F32 to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }

/// Multiplies each row's zero point by `offset`.
DIFFBIT_INLINE Ints times_bytes(int32_t offset, const uint8_t* zeros) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros));
  return {_mm512_mullo_epi32(_mm512_set1_epi32(offset), _mm512_cvtepu8_epi32(bytes))};
}
DIFFBIT_INLINE Ints splat_int(int32_t x) { return {_mm512_set1_epi32(x)}; }

template <int BITS>
DIFFBIT_INLINE void unpack_run(const uint8_t* from, Bytes (&to)[1]) {
  if (BITS == 4) {
    const __m512i bytes = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    const __m512i twice = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3), bytes);
    const __m512i codes = _mm512_srlv_epi64(twice, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4));
    to[0] = {_mm512_and_si512(codes, _mm512_set1_epi8(15))};
    return;
  }
  int64_t low[2];
  std::memcpy(low, from, 8);
  std::memcpy(low + 1, from + 4 * BITS, 8);
  const __m512i bytes = _mm512_mask_set1_epi64(_mm512_set1_epi64(low[0]), 0xf0, low[1]);
  const __m512i places = _mm512_setr_epi64(0, 2, 4, 6, 0, 2, 4, 6);
  __m512i codes = _mm512_and_si512(_mm512_srlv_epi64(bytes, places), _mm512_set1_epi8(3));
  if (BITS == 3) {
    int32_t high[2];
    std::memcpy(high, from + 8, 4);
    std::memcpy(high + 1, from + 20, 4);
    const __m512i bits = _mm512_mask_set1_epi32(_mm512_set1_epi32(high[0]), 0xff00, high[1]);
    const __m512i each = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7);
    const __m512i ones = _mm512_and_si512(_mm512_srlv_epi32(bits, each), _mm512_set1_epi8(1));
    codes = _mm512_or_si512(codes, _mm512_slli_epi16(ones, 2));
  }
  to[0] = {codes};
}

DIFFBIT_INLINE Ints pair_sums(Ints a, Ints b) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return {_mm512_add_epi32(_mm512_permutex2var_epi32(a, even, b), _mm512_permutex2var_epi32(a, odd, b))};
}

/// Returns the larger of `bits` and the bits of |x|: floats >= 0 have the same order as their bits, with NaN above infinity.
DIFFBIT_INLINE Ints larger_bits(Ints bits, F32 x) {
  return {_mm512_max_epi32(bits, _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)))};
}
/// Rounds four vectors, halves to even, to bytes in their order.
DIFFBIT_INLINE Bytes rounded_bytes(const F32 (&f)[4]) {
  __m128i q[4];
  for (int part = 0; part < 4; ++part) q[part] = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(f[part]));
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(q[0]), q[1], 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(q[2]), q[3], 1);
  return {_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1)};
}

template <bool REST>
DIFFBIT_INLINE Bytes load_weights(const uint8_t* from) {
  if (REST) return {_mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)))};
  return load_bytes(from);
}
DIFFBIT_INLINE void store_activations(int8_t* first, int8_t* second, Bytes a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(first), _mm512_castsi512_si256(a.v));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(second), _mm512_extracti64x4_epi64(a.v, 1));
}

DIFFBIT_INLINE Ints dot_signed(Ints sums, Bytes a, Bytes b) {
  return dot(sums, {_mm512_xor_si512(a.v, splat(uint8_t{128}).v)}, b);
}
DIFFBIT_INLINE Ints start_signed(Ints sums, Bytes b) {
  return {_mm512_sub_epi32(sums, dot(zero(), splat(uint8_t{128}), b))};
}

constexpr int32_t BYTE_MIDDLE = 0;
DIFFBIT_INLINE Ints dot_centered(Ints sums, Bytes codes, Bytes activations) { return dot(sums, codes, activations); }
DIFFBIT_INLINE Ints dot_bytes(Ints sums, Bytes codes, Bytes activations) { return dot(sums, codes, activations); }

constexpr int TERNARY_ROWS = 4, TERNARY_COLUMNS = 6, TERNARY_CHAINS = 2;
constexpr TernaryPass TERNARY_PASSES[4] = {{3, 0, 0xc0, true}, {2, 0, 0x30, true}, {1, 0, 0x0c, true}, {0, 0, 3, false}};
constexpr int INT4_ROWS = 8, INT4_TWO_TILES = 4, REGISTERS = 32, NIBBLE_SHIFT = 0;

}  // namespace
}  // namespace diffbit::DIFFBIT_ISA

#include "partial_is_ints.h"
