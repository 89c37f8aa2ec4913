// Included by every instruction set's header: the compiler's intrinsics, and types for our tables.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__aarch64__)
#include <arm_neon.h>
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

}  // namespace
}  // namespace diffbit::DIFFBIT_ISA
