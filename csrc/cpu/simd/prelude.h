// Included by every instruction set's header: the compiler's intrinsics, and what does not depend on the vectors' width.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__wasm__)
#include <wasm_simd128.h>
#else
#if !defined(__clang__)  // GCC 12 warns of its own _mm512_undefined_epi32 (its bug 105593)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif

#define DIFFBIT_INLINE inline __attribute__((always_inline))

#if defined(__clang__)
#define DIFFBIT_UNROLL _Pragma("unroll")
#else
#define DIFFBIT_UNROLL _Pragma("GCC unroll 16")
#endif

namespace diffbit::DIFFBIT_ISA {
namespace {

/// How TernaryMatMul extracts one of a byte's four codes: shifted down, or only masked, which leaves a factor of a power of
/// 4; `quarter`: after this pass the sums so far are divided by 4, exactly.
struct TernaryPass {
  int field, shift, mask;
  bool quarter;
};

#if defined(__x86_64__)
/// Splits eight bytes: those at even positions to `even`, the others to `odd`.
DIFFBIT_INLINE void store_parted(const int8_t* from, int8_t* even, int8_t* odd) {
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m128i eight = _mm_shuffle_epi8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)), order);
  uint32_t parts[2];
  _mm_storel_epi64(reinterpret_cast<__m128i*>(parts), eight);
  std::memcpy(even, &parts[0], 4);
  std::memcpy(odd, &parts[1], 4);
}
#endif

}  // namespace
}  // namespace diffbit::DIFFBIT_ISA
