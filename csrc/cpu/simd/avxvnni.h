// AVX-VNNI: AVX2 with a dot product into int32, of unsigned by signed bytes.
#pragma once

#include "vectors256.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

DIFFBIT_INLINE Ints dot(Ints sums, Bytes codes, Bytes activations) {
  return {_mm256_dpbusd_avx_epi32(sums, codes.v, activations.v)};
}

DIFFBIT_INLINE Ints dot_signed(Ints sums, Bytes a, Bytes b) {
  return dot(sums, {_mm256_xor_si256(a.v, splat(uint8_t{128}).v)}, b);
}
DIFFBIT_INLINE Ints start_signed(Ints sums, Bytes b) {
  return {_mm256_sub_epi32(sums, dot(zero(), splat(uint8_t{128}), b))};
}

constexpr int32_t BYTE_MIDDLE = 0;
DIFFBIT_INLINE Ints dot_centered(Ints sums, Bytes codes, Bytes activations) { return dot(sums, codes, activations); }
DIFFBIT_INLINE Ints dot_bytes(Ints sums, Bytes codes, Bytes activations) { return dot(sums, codes, activations); }

constexpr int TERNARY_ROWS = 2, TERNARY_COLUMNS = 6, TERNARY_CHAINS = 2;
constexpr TernaryPass TERNARY_PASSES[4] = {{3, 0, 0xc0, true}, {2, 0, 0x30, true}, {1, 0, 0x0c, true}, {0, 0, 3, false}};

}  // namespace
}  // namespace diffbit::DIFFBIT_ISA

#include "partial_is_ints.h"
