// Vectors of 256 bits, AVX2 with FMA and F16C, 16 registers: everything that avx2.h and avxvnni.h share.
#pragma once

#include "prelude.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

// ---- floats ----

using F32 = __m256;
constexpr int F32_LANES = 8;

DIFFBIT_INLINE F32 splat(float x) { return _mm256_set1_ps(x); }
DIFFBIT_INLINE F32 load(const float* from) { return _mm256_loadu_ps(from); }
DIFFBIT_INLINE F32 load(const uint16_t* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
DIFFBIT_INLINE F32 load(const int8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
DIFFBIT_INLINE void store(float* to, F32 a) { _mm256_storeu_ps(to, a); }
DIFFBIT_INLINE void store(uint16_t* to, F32 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
DIFFBIT_INLINE void store_rounded(int8_t* to, F32 a) {
  const __m256i wide = _mm256_cvtps_epi32(a);
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(words, words));
}
DIFFBIT_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
DIFFBIT_INLINE F32 larger(F32 a, F32 b) { return _mm256_max_ps(a, b); }
DIFFBIT_INLINE F32 smaller(F32 a, F32 b) { return _mm256_min_ps(a, b); }
DIFFBIT_INLINE F32 magnitude(F32 a) { return _mm256_andnot_ps(splat(-0.0f), a); }
DIFFBIT_INLINE F32 rounded(F32 a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
DIFFBIT_INLINE F32 power_of_two(F32 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
DIFFBIT_INLINE F32 zero_below(F32 x, float limit, F32 a) {
  return _mm256_and_ps(_mm256_cmp_ps(x, splat(limit), _CMP_NLT_UQ), a);
}
DIFFBIT_INLINE __m128 halves_sum(F32 a) { return _mm256_castps256_ps128(a) + _mm256_extractf128_ps(a, 1); }
DIFFBIT_INLINE float sum(F32 a) {
  const __m128 four = halves_sum(a), two = four + _mm_movehl_ps(four, four);
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
DIFFBIT_INLINE float largest(F32 a) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
DIFFBIT_INLINE void store_sums(float* to, F32 a, F32 b, F32 c, F32 d) {
  const F32 ab = _mm256_shuffle_ps(a, b, 0x88) + _mm256_shuffle_ps(a, b, 0xdd);
  const F32 cd = _mm256_shuffle_ps(c, d, 0x88) + _mm256_shuffle_ps(c, d, 0xdd);
  _mm_storeu_ps(to, halves_sum(_mm256_shuffle_ps(ab, cd, 0x88) + _mm256_shuffle_ps(ab, cd, 0xdd)));
}

DIFFBIT_INLINE F32 clipped(F32 a, float low, float high) {
  return _mm256_max_ps(_mm256_min_ps(a, splat(high)), splat(low));
}

template <int APART>
DIFFBIT_INLINE F32 partners(F32 a) {
  if (APART == 1) return _mm256_permute_ps(a, 0xb1);
  if (APART == 2) return _mm256_permute_ps(a, 0x4e);
  return _mm256_permute2f128_ps(a, a, 1);
}

// ---- bytes and integers ----

constexpr int WIDTH = 32;
struct Bytes { __m256i v; };
struct Ints {  // as above
  int32_t v __attribute__((vector_size(32)));
  Ints() = default;
  DIFFBIT_INLINE Ints(__m256i x) : v((decltype(v))x) {}
  DIFFBIT_INLINE operator __m256i() const { return (__m256i)v; }
};

DIFFBIT_INLINE Bytes load_bytes(const void* from) { return {_mm256_loadu_si256(static_cast<const __m256i*>(from))}; }
DIFFBIT_INLINE Bytes splat(uint8_t byte) { return {_mm256_set1_epi8(static_cast<char>(byte))}; }
DIFFBIT_INLINE Bytes splat4(const void* from) {
  int32_t four;
  std::memcpy(&four, from, 4);
  return {_mm256_set1_epi32(four)};
}
DIFFBIT_INLINE Bytes operator&(Bytes a, Bytes b) { return {_mm256_and_si256(a.v, b.v)}; }
DIFFBIT_INLINE Bytes operator|(Bytes a, Bytes b) { return {_mm256_or_si256(a.v, b.v)}; }
DIFFBIT_INLINE Bytes operator^(Bytes a, Bytes b) { return {_mm256_xor_si256(a.v, b.v)}; }
template <int BY>
DIFFBIT_INLINE Bytes shift(Bytes a) {
  return {BY > 0 ? _mm256_srli_epi16(a.v, BY) : BY < 0 ? _mm256_slli_epi16(a.v, -BY) : a.v};
}
DIFFBIT_INLINE Bytes load_table(const uint8_t* from) {
  return {_mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))};
}
DIFFBIT_INLINE Bytes minus(Bytes a, Bytes b) { return {_mm256_sub_epi8(a.v, b.v)}; }
constexpr bool LOOKUP_WRAPS = true;
DIFFBIT_INLINE Bytes lookup(Bytes table, Bytes indices) { return {_mm256_shuffle_epi8(table.v, indices.v)}; }

DIFFBIT_INLINE Ints zero() { return {_mm256_setzero_si256()}; }
DIFFBIT_INLINE Ints operator+(Ints a, Ints b) { return {_mm256_add_epi32(a, b)}; }
template <int BY>
DIFFBIT_INLINE Ints shift(Ints a) {
  return {_mm256_srai_epi32(a, BY)};
}
DIFFBIT_INLINE void store(void* to, Bytes a) { _mm256_storeu_si256(static_cast<__m256i*>(to), a.v); }
DIFFBIT_INLINE void store(int32_t* to, Ints a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), a); }

/// Adds the sums of the lanes of four vectors to four numbers.
DIFFBIT_INLINE void add_sums(uint32_t* to, Ints a, Ints b, Ints c, Ints d) {
  const __m256i ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  const __m256i cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
  const __m256i all = _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  __m128i* at = reinterpret_cast<__m128i*>(to);
  _mm_storeu_si128(at, _mm_add_epi32(_mm_loadu_si128(at), four));
}

DIFFBIT_INLINE F32 to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }

DIFFBIT_INLINE Ints times_bytes(int32_t offset, const uint8_t* zeros) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(zeros));
  return {_mm256_mullo_epi32(_mm256_set1_epi32(offset), _mm256_cvtepu8_epi32(bytes))};
}
DIFFBIT_INLINE Ints splat_int(int32_t x) { return {_mm256_set1_epi32(x)}; }

template <int BITS>
DIFFBIT_INLINE void unpack_run(const uint8_t* from, Bytes (&to)[1]) {
  if (BITS == 4) {
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m256i codes = _mm256_srlv_epi64(twice, _mm256_setr_epi64x(0, 0, 4, 4));
    to[0] = {_mm256_and_si256(codes, _mm256_set1_epi8(15))};
    return;
  }
  int64_t low;
  std::memcpy(&low, from, 8);
  const __m256i bytes = _mm256_srlv_epi64(_mm256_set1_epi64x(low), _mm256_setr_epi64x(0, 2, 4, 6));
  __m256i codes = _mm256_and_si256(bytes, _mm256_set1_epi8(3));
  if (BITS == 3) {
    int32_t high;
    std::memcpy(&high, from + 8, 4);
    const __m256i bits = _mm256_srlv_epi32(_mm256_set1_epi32(high), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    codes = _mm256_or_si256(codes, _mm256_slli_epi16(_mm256_and_si256(bits, _mm256_set1_epi8(1)), 2));
  }
  to[0] = {codes};
}

DIFFBIT_INLINE Ints pair_sums(Ints a, Ints b) {
  return {_mm256_permute4x64_epi64(_mm256_hadd_epi32(a, b), 0xd8)};  // hadd works by halves
}

DIFFBIT_INLINE Ints larger_bits(Ints bits, F32 x) {
  return {_mm256_max_epi32(bits, _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff)))};
}
DIFFBIT_INLINE Bytes rounded_bytes(const F32 (&f)[4]) {
  __m256i q[4];
  for (int part = 0; part < 4; ++part) q[part] = _mm256_cvtps_epi32(f[part]);
  const __m256i mixed = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
  return {_mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))};  // packs works by halves
}

template <bool REST>
DIFFBIT_INLINE Bytes load_weights(const uint8_t* from) {
  return load_bytes(from);
}
DIFFBIT_INLINE void store_activations(int8_t* to, int8_t*, Bytes a) { store(to, a); }

constexpr int INT4_ROWS = 4, INT4_TWO_TILES = 2, REGISTERS = 16, NIBBLE_SHIFT = 0;

}  // namespace
}  // namespace diffbit::DIFFBIT_ISA
