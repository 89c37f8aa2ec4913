// Instruction sets: each kernel is compiled once per set, and the CPU's best set is chosen when a node is created.
//
// The table of sets is in csrc/CMakeLists.txt (instruction_set), which writes isas.h: DIFFBIT_ISAS(X, more) is
// X(name, more) for each set that the compiler knows, best first. The kernels of a set are in the namespace
// diffbit::NAME; those of diffbit::scalar are slow and simple and run on any CPU.
//
// For tests and measurements, the environment variable DIFFBIT_ISA selects another set (scalar, avx2, avxvnni, avx512vnni,
// amx, neon, i8mm). A set that this CPU or this build does not have is an error; no other set is chosen silently.
#pragma once

#include "isas.h"

namespace diffbit {

#define DIFFBIT_NAME(name, more) name,
enum class Isa { DIFFBIT_ISAS(DIFFBIT_NAME, ) scalar };
#undef DIFFBIT_NAME

/// Returns the set that DIFFBIT_ISA names, else the best available one. Throws Error if the named set is not available.
Isa choose_isa();

}  // namespace diffbit

/// DIFFBIT_PICK(ternary): the address of the object `ternary` in the namespace of the chosen set.
#define DIFFBIT_PICK_ONE(name, object) chosen == Isa::name ? &name::object:
#define DIFFBIT_PICK(object) \
  ([](Isa chosen) { return DIFFBIT_ISAS(DIFFBIT_PICK_ONE, object) (static_cast<void>(chosen), &scalar::object); }(choose_isa()))

/// Declares that object in every namespace.
#define DIFFBIT_DECLARE_ONE(name, declaration) namespace name { extern const declaration; }
#define DIFFBIT_DECLARE(Type, object) \
  namespace scalar { extern const Type object; } \
  DIFFBIT_ISAS(DIFFBIT_DECLARE_ONE, Type object)
