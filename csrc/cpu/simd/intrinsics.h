// The compiler's own names for an instruction set.
#pragma once

#if DIFFBIT_ISA_NEON
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
