// Packed codes (kv_cache.pack) as vectors of floats, and integer dot products of rows of bytes: how a low-bit cache is read.
//
//   load_codes      a group of 32 packed codes as floats, neighbours side by side
//   dot_signed      products of signed bytes, in int32
//   pair_sums       sums of neighbouring lanes, of two vectors
#pragma once

#include "float.h"
#include "int8.h"  // after float.h, whose functions must not see its overloads

namespace diffbit::DIFFBIT_ISA {
namespace {

#if DIFFBIT_ISA_AVX512VNNI

template <int BITS>
DIFFBIT_INLINE void load_codes(const uint8_t* from, F32 (&to)[2]) {
  if (BITS == 4) {
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    to[0] = _mm512_permutexvar_ps(bytes, numbers);  // looks at the lowest four bits alone
    to[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), numbers);
  } else {
    const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3);
    const __m512i low = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2);
    const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_unpacklo_epi64(eight, eight));
    to[0] = _mm512_permutexvar_ps(_mm512_srlv_epi32(bytes, low), numbers);
    to[1] = _mm512_permutexvar_ps(_mm512_srlv_epi32(bytes, _mm512_add_epi32(low, _mm512_set1_epi32(4))), numbers);
  }
}

DIFFBIT_INLINE F32 to_floats(Ints a) { return _mm512_cvtepi32_ps(a); }
DIFFBIT_INLINE Ints pair_sums(Ints a, Ints b) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return {_mm512_add_epi32(_mm512_permutex2var_epi32(a, even, b), _mm512_permutex2var_epi32(a, odd, b))};
}

#elif DIFFBIT_ISA_NEON

template <int BITS>
DIFFBIT_INLINE void load_codes(const uint8_t* from, F32 (&to)[8]) {
  uint8x8_t codes[4];
  if (BITS == 4) {
    const uint8x16_t bytes = vld1q_u8(from), low = vandq_u8(bytes, vdupq_n_u8(15)), high = vshrq_n_u8(bytes, 4);
    codes[0] = vget_low_u8(low), codes[1] = vget_high_u8(low);
    codes[2] = vget_low_u8(high), codes[3] = vget_high_u8(high);
  } else {
    const uint8x8_t bytes = vld1_u8(from), mask = vdup_n_u8(3);
    codes[0] = vand_u8(bytes, mask), codes[1] = vand_u8(vshr_n_u8(bytes, 2), mask);
    codes[2] = vand_u8(vshr_n_u8(bytes, 4), mask), codes[3] = vshr_n_u8(bytes, 6);
  }
  DIFFBIT_UNROLL for (int i = 0; i < 4; ++i) {
    const uint16x8_t wide = vmovl_u8(codes[i]);
    to[2 * i] = vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)));
    to[2 * i + 1] = vcvtq_f32_u32(vmovl_u16(vget_high_u16(wide)));
  }
}

DIFFBIT_INLINE F32 to_floats(Ints a) { return vcvtq_f32_s32(a.v); }
DIFFBIT_INLINE Ints pair_sums(Ints a, Ints b) { return {vpaddq_s32(a.v, b.v)}; }

#else  // AVX2, AVX-VNNI

template <int BITS>
DIFFBIT_INLINE void load_codes(const uint8_t* from, F32 (&to)[4]) {
  const auto eight = [&](int i) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i)));
  };
  if (BITS == 4) {
    const __m256i mask = _mm256_set1_epi32(15);
    DIFFBIT_UNROLL for (int i = 0; i < 2; ++i) {
      const __m256i bytes = eight(8 * i);
      to[i] = _mm256_cvtepi32_ps(_mm256_and_si256(bytes, mask));
      to[2 + i] = _mm256_cvtepi32_ps(_mm256_srli_epi32(bytes, 4));
    }
  } else {
    const __m256 numbers = _mm256_setr_ps(0, 1, 2, 3, 0, 1, 2, 3);
    const __m256i bytes = eight(0);
    to[0] = _mm256_permutevar8x32_ps(numbers, bytes);  // looks at the lowest three bits alone
    to[1] = _mm256_permutevar8x32_ps(numbers, _mm256_srli_epi32(bytes, 2));
    to[2] = _mm256_permutevar8x32_ps(numbers, _mm256_srli_epi32(bytes, 4));
    to[3] = _mm256_permutevar8x32_ps(numbers, _mm256_srli_epi32(bytes, 6));
  }
}

DIFFBIT_INLINE F32 to_floats(Ints a) { return _mm256_cvtepi32_ps(a); }
DIFFBIT_INLINE Ints pair_sums(Ints a, Ints b) {
  return {_mm256_permute4x64_epi64(_mm256_hadd_epi32(a, b), 0xd8)};  // hadd works by halves
}

#endif

// The dot products of VNNI take unsigned bytes: 128 is added to the one side, and taken from the sums before they begin.
#if DIFFBIT_ISA_AVX2
DIFFBIT_INLINE Ints dot_signed(Ints sums, Bytes a, Bytes b) {  // b -127..127
  const __m256i products = _mm256_maddubs_epi16(_mm256_abs_epi8(a.v), _mm256_sign_epi8(b.v, a.v));
  return {_mm256_add_epi32(sums, _mm256_madd_epi16(products, _mm256_set1_epi16(1)))};
}
DIFFBIT_INLINE Ints start_signed(Ints sums, Bytes) { return sums; }
#elif DIFFBIT_ISA_NEON
DIFFBIT_INLINE Ints dot_signed(Ints sums, Bytes a, Bytes b) { return dot(sums, a, b); }
DIFFBIT_INLINE Ints start_signed(Ints sums, Bytes) { return sums; }
#elif DIFFBIT_ISA_AVX512VNNI
DIFFBIT_INLINE Ints dot_signed(Ints sums, Bytes a, Bytes b) {
  return dot(sums, {_mm512_xor_si512(a.v, splat(uint8_t{128}).v)}, b);
}
DIFFBIT_INLINE Ints start_signed(Ints sums, Bytes b) {
  return {_mm512_sub_epi32(sums, dot(zero(), splat(uint8_t{128}), b))};
}
#else
DIFFBIT_INLINE Ints dot_signed(Ints sums, Bytes a, Bytes b) {
  return dot(sums, {_mm256_xor_si256(a.v, splat(uint8_t{128}).v)}, b);
}
DIFFBIT_INLINE Ints start_signed(Ints sums, Bytes b) {
  return {_mm256_sub_epi32(sums, dot(zero(), splat(uint8_t{128}), b))};
}
#endif

}  // namespace
}  // namespace diffbit::DIFFBIT_ISA
