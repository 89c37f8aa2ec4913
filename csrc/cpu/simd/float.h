// Vectors of floats: the same names for every instruction set. Included by kernels that are compiled once per set, so
// everything here has internal linkage.
//
//   F32             F32_LANES floats; + - * / round once each, fma once for both
//   load            F32_LANES consecutive float32, float16 or int8 as floats
//   load_part       the first `count` of them, zeros behind; touches nothing beyond
#pragma once

#include <cstdint>
#include <cstring>

#include "intrinsics.h"

#if defined(__clang__)
#define DIFFBIT_UNROLL _Pragma("unroll")
#else
#define DIFFBIT_UNROLL _Pragma("GCC unroll 16")
#endif

namespace diffbit::DIFFBIT_ISA {
namespace {

#if DIFFBIT_ISA_AVX512VNNI

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
/// Halves to even; the numbers must lie in -127..127.
DIFFBIT_INLINE void store_rounded(int8_t* to, F32 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
}
DIFFBIT_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
/// Of a NaN and a number: b.
DIFFBIT_INLINE F32 larger(F32 a, F32 b) { return _mm512_max_ps(a, b); }
DIFFBIT_INLINE F32 smaller(F32 a, F32 b) { return _mm512_min_ps(a, b); }
DIFFBIT_INLINE F32 magnitude(F32 a) { return _mm512_abs_ps(a); }
DIFFBIT_INLINE F32 rounded(F32 a) { return _mm512_roundscale_ps(a, 0); }
/// 2^n for whole n in -126..127.
DIFFBIT_INLINE F32 power_of_two(F32 n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
/// a, or 0 where x < limit.
DIFFBIT_INLINE F32 zero_below(F32 x, float limit, F32 a) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, splat(limit), _CMP_NLT_UQ), a);
}
DIFFBIT_INLINE float sum(F32 a) { return _mm512_reduce_add_ps(a); }
DIFFBIT_INLINE float largest(F32 a) { return _mm512_reduce_max_ps(a); }
/// to[i] = the sum of vector i.
DIFFBIT_INLINE void store_sums(float* to, F32 a, F32 b, F32 c, F32 d) {
  const F32 ab = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
  const F32 cd = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
  const F32 four = _mm512_shuffle_ps(ab, cd, 0x44) + _mm512_shuffle_ps(ab, cd, 0xee);
  const __m256 two = _mm512_castps512_ps256(four) + _mm512_extractf32x8_ps(four, 1);
  _mm_storeu_ps(to, _mm256_castps256_ps128(two) + _mm256_extractf128_ps(two, 1));
}

#elif DIFFBIT_ISA_NEON

using F32 = float32x4_t;
constexpr int F32_LANES = 4;

DIFFBIT_INLINE F32 splat(float x) { return vdupq_n_f32(x); }
DIFFBIT_INLINE F32 load(const float* from) { return vld1q_f32(from); }
DIFFBIT_INLINE F32 load(const uint16_t* from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }
DIFFBIT_INLINE F32 load(const int8_t* from) {
  int32_t four;
  std::memcpy(&four, from, 4);
  const int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}
DIFFBIT_INLINE void store(float* to, F32 a) { vst1q_f32(to, a); }
DIFFBIT_INLINE void store(uint16_t* to, F32 a) { vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(a))); }
DIFFBIT_INLINE void store_rounded(int8_t* to, F32 a) {
  const int16x4_t narrow = vmovn_s32(vcvtnq_s32_f32(a));
  const int8x8_t bytes = vmovn_s16(vcombine_s16(narrow, narrow));
  std::memcpy(to, &bytes, 4);
}
DIFFBIT_INLINE F32 fma(F32 a, F32 b, F32 c) { return vfmaq_f32(c, a, b); }
DIFFBIT_INLINE F32 larger(F32 a, F32 b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
DIFFBIT_INLINE F32 smaller(F32 a, F32 b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
DIFFBIT_INLINE F32 magnitude(F32 a) { return vabsq_f32(a); }
DIFFBIT_INLINE F32 rounded(F32 a) { return vrndnq_f32(a); }
DIFFBIT_INLINE F32 power_of_two(F32 n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}
DIFFBIT_INLINE F32 zero_below(F32 x, float limit, F32 a) {
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(a), vcltq_f32(x, splat(limit))));
}
DIFFBIT_INLINE float sum(F32 a) { return vaddvq_f32(a); }
DIFFBIT_INLINE float largest(F32 a) { return vmaxvq_f32(a); }
DIFFBIT_INLINE void store_sums(float* to, F32 a, F32 b, F32 c, F32 d) {
  vst1q_f32(to, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}

#else  // AVX2

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
  const F32 ab = _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b);
  const F32 cd = _mm256_unpacklo_ps(c, d) + _mm256_unpackhi_ps(c, d);
  _mm_storeu_ps(to, halves_sum(_mm256_shuffle_ps(ab, cd, 0x44) + _mm256_shuffle_ps(ab, cd, 0xee)));
}

#endif

template <class T>
DIFFBIT_INLINE F32 load_part(const T* from, int64_t count) {
  T part[F32_LANES] = {};
  std::memcpy(part, from, static_cast<size_t>(count) * sizeof(T));
  return load(part);
}

DIFFBIT_INLINE void store_part(float* to, int64_t count, F32 a) {
  float part[F32_LANES];
  store(part, a);
  std::memcpy(to, part, static_cast<size_t>(count) * sizeof(float));
}

/// e^x for x <= 0, to about an ulp; 0 below the smallest normal number. NaN stays.
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
  p = fma(p * r, r, r) + splat(1);
  return zero_below(x, LEAST, p * power_of_two(n));
}

/// d floats to codes in -top..top; a row of zeros has step 0 and codes 0, one with an infinity or a NaN has step NaN and
/// codes 0. Returns the step.
DIFFBIT_INLINE float round_row(const float* x, int64_t d, int top, int8_t* codes) {
  constexpr int64_t L = F32_LANES;
  F32 most = splat(0), poison = splat(0);  // poison: infinity and NaN times 0 are NaN
  const auto take = [&](F32 values) {
    most = larger(magnitude(values), most);
    poison = fma(values, splat(0), poison);
  };
  int64_t i = 0;
  for (; i + L <= d; i += L) take(load(x + i));
  if (i < d) take(load_part(x + i, d - i));
  if (sum(poison) != 0) {
    std::memset(codes, 0, static_cast<size_t>(d));
    return __builtin_nanf("");
  }
  const float step = largest(most) / static_cast<float>(top);
  const F32 divisor = splat(step == 0 ? 1 : step), high = splat(static_cast<float>(top));
  const F32 low = splat(static_cast<float>(-top));
  const auto rounded_codes = [&](F32 values) { return smaller(high, larger(low, values / divisor)); };
  for (i = 0; i + L <= d; i += L) store_rounded(codes + i, rounded_codes(load(x + i)));
  if (i < d) {
    int8_t part[L];
    store_rounded(part, rounded_codes(load_part(x + i, d - i)));
    std::memcpy(codes + i, part, static_cast<size_t>(d - i));
  }
  return step;
}

}  // namespace
}  // namespace diffbit::DIFFBIT_ISA
