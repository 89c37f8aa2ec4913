// Vectors of bytes, and dot products of unsigned codes with signed activations: the same names for every instruction
// set. Included by kernels that are compiled once per set, so everything here has internal linkage.
//
//   Bytes     WIDTH bytes
//   Ints      WIDTH / 4 int32 lanes; arithmetic wraps
//   Partial   what `dot` adds to. AVX2 has no dot product into int32: there a Partial is int16, holds the products of
//             `dots(largest_code)` calls, and must then be flushed. Elsewhere it is an Ints and never needs it, but
//             flushing is always right, so a kernel is written once.
//
//   Ints sums = zero();
//   for (each run of at most dots(15) vectors) {
//     Partial partial = no_partial();
//     for (each vector) partial = dot(partial, codes, activations);    codes 0..15, activations -127..127
//     sums = flush(sums, partial);
//   }
#pragma once

#include <cstdint>
#include <cstring>

#include "intrinsics.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

/// For a line that is read once, soon.
DIFFBIT_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }

/// Keeps the compiler from loading a vector again for each of its uses.
template <class Vector>
DIFFBIT_INLINE Vector once(Vector a) {
#if DIFFBIT_ISA_NEON
  __asm__("" : "+w"(a.v));
#else
  __asm__("" : "+v"(a.v));
#endif
  return a;
}

#if DIFFBIT_ISA_AVX512VNNI

constexpr int WIDTH = 64;
struct Bytes { __m512i v; };
// Lanes typed as int32 all the way: with __m512i, whose lanes are int64, GCC 12 keeps two copies of each sum in a
// loop and runs out of registers
struct Ints {
  int32_t v __attribute__((vector_size(64)));
  Ints() = default;
  DIFFBIT_INLINE Ints(__m512i x) : v((decltype(v))x) {}
  DIFFBIT_INLINE operator __m512i() const { return (__m512i)v; }
};
using Partial = Ints;

DIFFBIT_INLINE Bytes load(const void* from) { return {_mm512_loadu_si512(from)}; }
/// The first half, and zeros.
DIFFBIT_INLINE Bytes load_half(const void* from) {
  return {_mm512_zextsi256_si512(_mm256_loadu_si256(static_cast<const __m256i*>(from)))};
}
DIFFBIT_INLINE Bytes splat(uint8_t byte) { return {_mm512_set1_epi8(static_cast<char>(byte))}; }
/// Four bytes, in every lane of an Ints.
DIFFBIT_INLINE Bytes splat4(const void* from) {
  int32_t four;
  std::memcpy(&four, from, 4);
  return {_mm512_set1_epi32(four)};
}
DIFFBIT_INLINE Bytes operator&(Bytes a, Bytes b) { return {_mm512_and_si512(a.v, b.v)}; }
/// Each byte's bits BY and up move down; above them lie bits of its neighbour or zeros: mask the field that is wanted.
template <int BY>
DIFFBIT_INLINE Bytes shift(Bytes a) {
  return {BY ? _mm512_srli_epi16(a.v, BY) : a.v};
}

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
DIFFBIT_INLINE void store_halves(void* low, void* high, Bytes a) {
  _mm256_storeu_si256(static_cast<__m256i*>(low), _mm512_castsi512_si256(a.v));
  _mm256_storeu_si256(static_cast<__m256i*>(high), _mm512_extracti64x4_epi64(a.v, 1));
}
DIFFBIT_INLINE void store(int32_t* to, Ints a) { _mm512_storeu_si512(to, a); }

#elif DIFFBIT_ISA_NEON

constexpr int WIDTH = 16;
struct Bytes { uint8x16_t v; };
struct Ints { int32x4_t v; };
using Partial = Ints;

DIFFBIT_INLINE Bytes load(const void* from) { return {vld1q_u8(static_cast<const uint8_t*>(from))}; }
DIFFBIT_INLINE Bytes splat(uint8_t byte) { return {vdupq_n_u8(byte)}; }
DIFFBIT_INLINE Bytes splat4(const void* from) {
  uint32_t four;
  std::memcpy(&four, from, 4);
  return {vreinterpretq_u8_u32(vdupq_n_u32(four))};
}
DIFFBIT_INLINE Bytes operator&(Bytes a, Bytes b) { return {vandq_u8(a.v, b.v)}; }
template <int BY>
DIFFBIT_INLINE Bytes shift(Bytes a) {
  return BY ? Bytes{vshrq_n_u8(a.v, BY ? BY : 1)} : a;
}

DIFFBIT_INLINE Ints zero() { return {vdupq_n_s32(0)}; }
DIFFBIT_INLINE Ints operator+(Ints a, Ints b) { return {vaddq_s32(a.v, b.v)}; }
template <int BY>
DIFFBIT_INLINE Ints shift(Ints a) {
  return {vshrq_n_s32(a.v, BY)};
}
DIFFBIT_INLINE Ints dot(Ints sums, Bytes codes, Bytes activations) {  // codes 0..127
  return {vdotq_s32(sums.v, vreinterpretq_s8_u8(codes.v), vreinterpretq_s8_u8(activations.v))};
}
DIFFBIT_INLINE void store(void* to, Bytes a) { vst1q_u8(static_cast<uint8_t*>(to), a.v); }
DIFFBIT_INLINE void store(int32_t* to, Ints a) { vst1q_s32(to, a.v); }

#else  // AVX2, AVX-VNNI

constexpr int WIDTH = 32;
struct Bytes { __m256i v; };
struct Ints {  // as above
  int32_t v __attribute__((vector_size(32)));
  Ints() = default;
  DIFFBIT_INLINE Ints(__m256i x) : v((decltype(v))x) {}
  DIFFBIT_INLINE operator __m256i() const { return (__m256i)v; }
};

DIFFBIT_INLINE Bytes load(const void* from) { return {_mm256_loadu_si256(static_cast<const __m256i*>(from))}; }
DIFFBIT_INLINE Bytes splat(uint8_t byte) { return {_mm256_set1_epi8(static_cast<char>(byte))}; }
DIFFBIT_INLINE Bytes splat4(const void* from) {
  int32_t four;
  std::memcpy(&four, from, 4);
  return {_mm256_set1_epi32(four)};
}
DIFFBIT_INLINE Bytes operator&(Bytes a, Bytes b) { return {_mm256_and_si256(a.v, b.v)}; }
template <int BY>
DIFFBIT_INLINE Bytes shift(Bytes a) {
  return {BY ? _mm256_srli_epi16(a.v, BY) : a.v};
}

DIFFBIT_INLINE Ints zero() { return {_mm256_setzero_si256()}; }
DIFFBIT_INLINE Ints operator+(Ints a, Ints b) { return {_mm256_add_epi32(a, b)}; }
template <int BY>
DIFFBIT_INLINE Ints shift(Ints a) {
  return {_mm256_srai_epi32(a, BY)};
}
DIFFBIT_INLINE void store(void* to, Bytes a) { _mm256_storeu_si256(static_cast<__m256i*>(to), a.v); }
DIFFBIT_INLINE void store(int32_t* to, Ints a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), a); }

#if DIFFBIT_ISA_AVXVNNI
using Partial = Ints;
DIFFBIT_INLINE Ints dot(Ints sums, Bytes codes, Bytes activations) {
  return {_mm256_dpbusd_avx_epi32(sums, codes.v, activations.v)};
}
#else
struct Partial {
  int16_t v __attribute__((vector_size(32)));
  Partial() = default;
  DIFFBIT_INLINE Partial(__m256i x) : v((decltype(v))x) {}
  DIFFBIT_INLINE operator __m256i() const { return (__m256i)v; }
};
DIFFBIT_INLINE Partial dot(Partial partial, Bytes codes, Bytes activations) {
  return {_mm256_add_epi16(partial, _mm256_maddubs_epi16(codes.v, activations.v))};
}
DIFFBIT_INLINE Ints flush(Ints sums, Partial partial) {
  return {_mm256_add_epi32(sums, _mm256_madd_epi16(partial, _mm256_set1_epi16(1)))};
}
#endif

#endif

#if DIFFBIT_ISA_AVX2
DIFFBIT_INLINE Partial no_partial() { return {_mm256_setzero_si256()}; }
/// Calls of `dot` that a Partial holds, for codes up to `largest` and activations -127..127.
constexpr int64_t dots(int largest) { return 32767 / (2 * 127 * largest); }
/// GCC would take all products first and then add, and run out of registers: this keeps a sum where it stands.
DIFFBIT_INLINE void in_order(Partial& partial) { __asm__("" : "+x"(partial.v)); }
/// A Partial that `sums` are part of, where it can hold them, and the sums with it: one addition less than `flush`.
DIFFBIT_INLINE Partial partial_of(Ints) { return no_partial(); }
DIFFBIT_INLINE Ints with_partial(Ints sums, Partial partial) { return flush(sums, partial); }
#else
DIFFBIT_INLINE Partial no_partial() { return zero(); }
constexpr int64_t dots(int) { return int64_t{1} << 40; }
DIFFBIT_INLINE Ints flush(Ints sums, Partial partial) { return sums + partial; }
DIFFBIT_INLINE void in_order(Partial&) {}
DIFFBIT_INLINE Partial partial_of(Ints sums) { return sums; }
DIFFBIT_INLINE Ints with_partial(Ints, Partial partial) { return partial; }
#endif

/// Adds the sums of the lanes of four vectors to four numbers.
DIFFBIT_INLINE void add_sums(uint32_t* to, Ints a, Ints b, Ints c, Ints d) {
#if DIFFBIT_ISA_NEON
  const int32x4_t four = vpaddq_s32(vpaddq_s32(a.v, b.v), vpaddq_s32(c.v, d.v));
  vst1q_u32(to, vaddq_u32(vld1q_u32(to), vreinterpretq_u32_s32(four)));
#else
#if DIFFBIT_ISA_AVX512VNNI
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const __m512i wide = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i all = _mm256_add_epi32(_mm512_castsi512_si256(wide), _mm512_extracti64x4_epi64(wide, 1));
#else
  const __m256i ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  const __m256i cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
  const __m256i all = _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
#endif
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  __m128i* at = reinterpret_cast<__m128i*>(to);
  _mm_storeu_si128(at, _mm_add_epi32(_mm_loadu_si128(at), four));
#endif
}

/// The sum of the lanes.
DIFFBIT_INLINE int32_t sum(Ints a) {
  uint32_t sums[4] = {};
  add_sums(sums, a, a, a, a);
  return static_cast<int32_t>(sums[0]);
}

}  // namespace
}  // namespace diffbit::DIFFBIT_ISA
