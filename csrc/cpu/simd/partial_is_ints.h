// The part of a set of vectors whose dot product adds int32 to int32 (vectors.h): a Partial is an Ints.
#pragma once

namespace diffbit::DIFFBIT_ISA {
namespace {

using Partial = Ints;
constexpr bool PARTIAL_IS_INTS = true;
DIFFBIT_INLINE Partial no_partial() { return zero(); }
constexpr int64_t dots(int) { return int64_t{1} << 40; }
DIFFBIT_INLINE Ints flush(Ints sums, Partial partial) { return sums + partial; }
DIFFBIT_INLINE void in_order(Partial&) {}
DIFFBIT_INLINE Partial partial_of(Ints sums) { return sums; }
DIFFBIT_INLINE Ints with_partial(Ints, Partial partial) { return partial; }

constexpr uint8_t PLUS = 0;
DIFFBIT_INLINE Bytes signed_by(Bytes a, Bytes signs) { return minus(a ^ signs, signs); }
DIFFBIT_INLINE Ints dot_small(Ints sums, Bytes codes, Bytes activations) { return dot(sums, codes, activations); }

}  // namespace
}  // namespace diffbit::DIFFBIT_ISA
