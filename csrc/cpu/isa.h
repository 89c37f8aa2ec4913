// Instruction sets: each kernel is compiled once per set, and the best that the CPU has is chosen when a node is made.
//
// The environment variable DIFFBIT_ISA names another one (scalar, avx2, avxvnni, avx512vnni, neon): for tests and
// measurements. A set that this CPU or this build lacks is an error, never a silent choice of another.
#pragma once

#include <string>

#if defined(__x86_64__) || defined(_M_X64)
#define DIFFBIT_X86 1
#elif defined(__aarch64__)
#define DIFFBIT_ARM 1
#endif

namespace diffbit {

enum class Isa { scalar, avx2, avxvnni, avx512vnni, neon };

const char* name(Isa isa);

/// Whether this CPU and its operating system run it, and this library holds it.
bool available(Isa isa);

/// The set that DIFFBIT_ISA names, else the best available one. Throws Error where the variable names none of those.
Isa choose_isa();

}  // namespace diffbit

// DIFFBIT_PICK(isa, ternary) is the object `ternary` of the namespace (scalar::, avx2::, ...) that belongs to `isa`.
// The build defines DIFFBIT_HAS_AVXVNNI and the like for the sets whose flags the compiler knows.
#if DIFFBIT_HAS_AVX2
#define DIFFBIT_PICK_AVX2(isa, object) (isa) == Isa::avx2 ? avx2::object:
#else
#define DIFFBIT_PICK_AVX2(isa, object)
#endif
#if DIFFBIT_HAS_AVXVNNI
#define DIFFBIT_PICK_AVXVNNI(isa, object) (isa) == Isa::avxvnni ? avxvnni::object:
#else
#define DIFFBIT_PICK_AVXVNNI(isa, object)
#endif
#if DIFFBIT_HAS_AVX512VNNI
#define DIFFBIT_PICK_AVX512VNNI(isa, object) (isa) == Isa::avx512vnni ? avx512vnni::object:
#else
#define DIFFBIT_PICK_AVX512VNNI(isa, object)
#endif
#if DIFFBIT_HAS_NEON
#define DIFFBIT_PICK_NEON(isa, object) (isa) == Isa::neon ? neon::object:
#else
#define DIFFBIT_PICK_NEON(isa, object)
#endif
#define DIFFBIT_PICK(isa, object)                                        \
  (DIFFBIT_PICK_AVX512VNNI(isa, object) DIFFBIT_PICK_AVXVNNI(isa, object) \
       DIFFBIT_PICK_AVX2(isa, object) DIFFBIT_PICK_NEON(isa, object) scalar::object)
// Declares that object in every namespace.
#define DIFFBIT_DECLARE(Type, object)            \
  namespace scalar { extern const Type object; } \
  namespace avx2 { extern const Type object; }   \
  namespace avxvnni { extern const Type object; } \
  namespace avx512vnni { extern const Type object; } \
  namespace neon { extern const Type object; }
