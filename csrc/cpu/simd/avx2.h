// AVX2 has no dot product into int32, so a Partial is int16.
#pragma once

#include "vectors256.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

constexpr bool PARTIAL_IS_INTS = false;

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

DIFFBIT_INLINE Partial no_partial() { return {_mm256_setzero_si256()}; }
/// Calls of `dot` that a Partial holds, for codes up to `largest` and activations -127..127.
constexpr int64_t dots(int largest) { return 32767 / (2 * 127 * largest); }
/// Keeps products in order: GCC would compute all of them before it adds any, and run out of registers.
DIFFBIT_INLINE void in_order(Partial& partial) { __asm__("" : "+x"(partial.v)); }
/// Returns a Partial that includes `sums` if it can hold them, and the sums from it; saves the addition in `flush`.
DIFFBIT_INLINE Partial partial_of(Ints) { return no_partial(); }
DIFFBIT_INLINE Ints with_partial(Ints sums, Partial partial) { return flush(sums, partial); }

DIFFBIT_INLINE Ints dot_signed(Ints sums, Bytes a, Bytes b) {  // b -127..127
  const __m256i products = _mm256_maddubs_epi16(_mm256_abs_epi8(a.v), _mm256_sign_epi8(b.v, a.v));
  return {_mm256_add_epi32(sums, _mm256_madd_epi16(products, _mm256_set1_epi16(1)))};
}
DIFFBIT_INLINE Ints start_signed(Ints sums, Bytes) { return sums; }

constexpr uint8_t PLUS = 1;
DIFFBIT_INLINE Bytes signed_by(Bytes a, Bytes signs) { return {_mm256_sign_epi8(a.v, signs.v)}; }
DIFFBIT_INLINE Ints dot_small(Ints sums, Bytes codes, Bytes activations) {
  const __m256i products = _mm256_maddubs_epi16(codes.v, activations.v);
  return {_mm256_add_epi32(sums, _mm256_madd_epi16(products, _mm256_set1_epi16(1)))};
}

constexpr int32_t BYTE_MIDDLE = 128;
DIFFBIT_INLINE Ints dot_centered(Ints sums, Bytes codes, Bytes activations) { return dot_signed(sums, codes, activations); }
DIFFBIT_INLINE Ints dot_bytes(Ints sums, Bytes codes, Bytes activations) {
  return dot_signed(sums, {_mm256_xor_si256(codes.v, splat(uint8_t{128}).v)}, activations);
}

constexpr int TERNARY_ROWS = 2, TERNARY_COLUMNS = 4, TERNARY_CHAINS = 1;  // each product needs one more register
constexpr TernaryPass TERNARY_PASSES[4] = {{3, 6, 3, false}, {2, 4, 3, false}, {1, 2, 3, false}, {0, 0, 3, false}};

}  // namespace
}  // namespace diffbit::DIFFBIT_ISA
