// WebAssembly's SIMD128: the dot product is of int16, and there is no fused multiply-add: `fma` rounds twice, so floats may
// differ in their last bits from the other sets', while integers are the same. Relaxed SIMD, which some browsers lack, has a
// dot product of bytes.
#pragma once

#include "../half.h"
#include "prelude.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

// ---- floats ----

using F32 = float __attribute__((vector_size(16)));
constexpr int F32_LANES = 4;

DIFFBIT_INLINE v128_t raw(F32 a) { return (v128_t)a; }
DIFFBIT_INLINE F32 floats(v128_t a) { return (F32)a; }

DIFFBIT_INLINE F32 splat(float x) { return floats(wasm_f32x4_splat(x)); }
DIFFBIT_INLINE F32 load(const float* from) { return floats(wasm_v128_load(from)); }
/// The bits of a half moved into place are a float that is 2^112 times too small; a product corrects that, also for
/// subnormals. Infinity and NaN come out above the largest half, and get their exponent.
DIFFBIT_INLINE F32 load(const uint16_t* from) {
  const v128_t wide = wasm_i32x4_shl(wasm_i32x4_extend_low_i16x8(wasm_v128_load64_zero(from)), 13);
  const v128_t small = wasm_v128_and(wide, wasm_i32x4_const_splat(static_cast<int32_t>(0x8fffe000u)));
  const v128_t value = raw(floats(small) * splat(0x1p112f));
  const v128_t special = wasm_f32x4_ge(wasm_f32x4_abs(value), wasm_f32x4_const_splat(65536.0f));
  return floats(wasm_v128_or(value, wasm_v128_and(special, wasm_i32x4_const_splat(0x7f800000))));
}
DIFFBIT_INLINE F32 load(const int8_t* from) {
  const v128_t wide = wasm_i16x8_extend_low_i8x16(wasm_v128_load32_zero(from));
  return floats(wasm_f32x4_convert_i32x4(wasm_i32x4_extend_low_i16x8(wide)));
}
DIFFBIT_INLINE void store(float* to, F32 a) { wasm_v128_store(to, raw(a)); }
DIFFBIT_INLINE void store(uint16_t* to, F32 a) {
  for (int i = 0; i < F32_LANES; ++i) to[i] = to_half(a[i]);
}
DIFFBIT_INLINE v128_t nearest_ints(F32 a) { return wasm_i32x4_trunc_sat_f32x4(wasm_f32x4_nearest(raw(a))); }
DIFFBIT_INLINE void store_rounded(int8_t* to, F32 a) {
  const v128_t narrow = wasm_i16x8_narrow_i32x4(nearest_ints(a), nearest_ints(a));
  wasm_v128_store32_lane(to, wasm_i8x16_narrow_i16x8(narrow, narrow), 0);
}
DIFFBIT_INLINE F32 fma(F32 a, F32 b, F32 c) { return a * b + c; }
DIFFBIT_INLINE F32 larger(F32 a, F32 b) { return floats(wasm_f32x4_pmax(raw(b), raw(a))); }
DIFFBIT_INLINE F32 smaller(F32 a, F32 b) { return floats(wasm_f32x4_pmin(raw(b), raw(a))); }
DIFFBIT_INLINE F32 magnitude(F32 a) { return floats(wasm_f32x4_abs(raw(a))); }
DIFFBIT_INLINE F32 rounded(F32 a) { return floats(wasm_f32x4_nearest(raw(a))); }
DIFFBIT_INLINE F32 power_of_two(F32 n) {
  return floats(wasm_i32x4_shl(wasm_i32x4_add(wasm_i32x4_trunc_sat_f32x4(raw(n)), wasm_i32x4_const_splat(127)), 23));
}
DIFFBIT_INLINE F32 zero_below(F32 x, float limit, F32 a) {
  return floats(wasm_v128_andnot(raw(a), wasm_f32x4_lt(raw(x), wasm_f32x4_splat(limit))));
}
DIFFBIT_INLINE float sum(F32 a) { return (a[0] + a[1]) + (a[2] + a[3]); }
DIFFBIT_INLINE float largest(F32 a) {
  const float low = a[0] > a[1] ? a[0] : a[1], high = a[2] > a[3] ? a[2] : a[3];
  return low > high ? low : high;
}
DIFFBIT_INLINE v128_t evens(v128_t a, v128_t b) { return wasm_i32x4_shuffle(a, b, 0, 2, 4, 6); }
DIFFBIT_INLINE v128_t odds(v128_t a, v128_t b) { return wasm_i32x4_shuffle(a, b, 1, 3, 5, 7); }
DIFFBIT_INLINE F32 pair_sums(F32 a, F32 b) { return floats(evens(raw(a), raw(b))) + floats(odds(raw(a), raw(b))); }
DIFFBIT_INLINE void store_sums(float* to, F32 a, F32 b, F32 c, F32 d) {
  store(to, pair_sums(pair_sums(a, b), pair_sums(c, d)));
}

DIFFBIT_INLINE F32 clipped(F32 a, float low, float high) {
  return floats(wasm_f32x4_pmax(wasm_f32x4_splat(low), wasm_f32x4_pmin(wasm_f32x4_splat(high), raw(a))));
}

template <int APART>
DIFFBIT_INLINE F32 partners(F32 a) {
  if (APART == 1) return floats(wasm_i32x4_shuffle(raw(a), raw(a), 1, 0, 3, 2));
  return floats(wasm_i32x4_shuffle(raw(a), raw(a), 2, 3, 0, 1));
}

// ---- bytes and integers ----

constexpr int WIDTH = 16;
struct Bytes { v128_t v; };
struct Ints { v128_t v; };

DIFFBIT_INLINE Bytes load_bytes(const void* from) { return {wasm_v128_load(from)}; }
DIFFBIT_INLINE Bytes splat(uint8_t byte) { return {wasm_u8x16_splat(byte)}; }
DIFFBIT_INLINE Bytes splat4(const void* from) { return {wasm_v128_load32_splat(from)}; }
DIFFBIT_INLINE Bytes operator&(Bytes a, Bytes b) { return {wasm_v128_and(a.v, b.v)}; }
DIFFBIT_INLINE Bytes operator|(Bytes a, Bytes b) { return {wasm_v128_or(a.v, b.v)}; }
DIFFBIT_INLINE Bytes operator^(Bytes a, Bytes b) { return {wasm_v128_xor(a.v, b.v)}; }
template <int BY>
DIFFBIT_INLINE Bytes shift(Bytes a) {
  return {BY > 0 ? wasm_u16x8_shr(a.v, BY > 0 ? BY : 0) : BY < 0 ? wasm_i16x8_shl(a.v, BY < 0 ? -BY : 0) : a.v};
}
DIFFBIT_INLINE Bytes load_table(const uint8_t* from) { return load_bytes(from); }
DIFFBIT_INLINE Bytes minus(Bytes a, Bytes b) { return {wasm_i8x16_sub(a.v, b.v)}; }
constexpr bool LOOKUP_WRAPS = false;
DIFFBIT_INLINE Bytes lookup(Bytes table, Bytes indices) { return {wasm_i8x16_swizzle(table.v, indices.v)}; }

DIFFBIT_INLINE Ints zero() { return {wasm_i32x4_const_splat(0)}; }
DIFFBIT_INLINE Ints operator+(Ints a, Ints b) { return {wasm_i32x4_add(a.v, b.v)}; }
template <int BY>
DIFFBIT_INLINE Ints shift(Ints a) {
  return {wasm_i32x4_shr(a.v, BY)};
}
DIFFBIT_INLINE Ints pair_sums(Ints a, Ints b) { return {wasm_i32x4_add(evens(a.v, b.v), odds(a.v, b.v))}; }

// The bytes of each 16 bits, as int16: a dot product of the first and one of the second of each pair stay in their lane
DIFFBIT_INLINE v128_t first_codes(Bytes a) { return wasm_v128_and(a.v, wasm_i16x8_const_splat(255)); }
DIFFBIT_INLINE v128_t second_codes(Bytes a) { return wasm_u16x8_shr(a.v, 8); }
DIFFBIT_INLINE v128_t first_signed(Bytes a) { return wasm_i16x8_shr(wasm_i16x8_shl(a.v, 8), 8); }
DIFFBIT_INLINE v128_t second_signed(Bytes a) { return wasm_i16x8_shr(a.v, 8); }
DIFFBIT_INLINE Ints add_dot(Ints sums, v128_t a, v128_t b) { return {wasm_i32x4_add(sums.v, wasm_i32x4_dot_i16x8(a, b))}; }

DIFFBIT_INLINE Ints dot_bytes(Ints sums, Bytes codes, Bytes activations) {
  sums = add_dot(sums, first_codes(codes), first_signed(activations));
  return add_dot(sums, second_codes(codes), second_signed(activations));
}
constexpr int32_t BYTE_MIDDLE = 0;
DIFFBIT_INLINE Ints dot_centered(Ints sums, Bytes codes, Bytes activations) { return dot_bytes(sums, codes, activations); }

#if defined(__wasm_relaxed_simd__)
/// Multiplies codes up to 127, for which every processor computes the same.
DIFFBIT_INLINE Ints dot(Ints sums, Bytes codes, Bytes activations) {
  return {wasm_i32x4_relaxed_dot_i8x16_i7x16_add(activations.v, codes.v, sums.v)};
}
constexpr int NIBBLE_SHIFT = 0;
#else
DIFFBIT_INLINE Ints dot(Ints sums, Bytes codes, Bytes activations) { return dot_bytes(sums, codes, activations); }
/// Nibbles are masked but not shifted down; activations have the other factor of 256 = 2^NIBBLE_SHIFT.
constexpr int NIBBLE_SHIFT = 8;
#endif
DIFFBIT_INLINE Ints dot_nibbles(Ints sums, Bytes both, Bytes even, Bytes odd) {
  sums = add_dot(sums, wasm_v128_and(both.v, wasm_i16x8_const_splat(0x000f)), wasm_i16x8_shl(even.v, 8));
  sums = add_dot(sums, wasm_v128_and(both.v, wasm_i16x8_const_splat(0x00f0)), wasm_i16x8_shr(wasm_i16x8_shl(odd.v, 8), 4));
  sums = add_dot(sums, wasm_v128_and(both.v, wasm_i16x8_const_splat(0x0f00)), second_signed(even));
  return add_dot(sums, wasm_u16x8_shr(both.v, 12), wasm_v128_and(odd.v, wasm_i16x8_const_splat(-256)));
}

DIFFBIT_INLINE void store(void* to, Bytes a) { wasm_v128_store(to, a.v); }
DIFFBIT_INLINE void store(int32_t* to, Ints a) { wasm_v128_store(to, a.v); }

/// Adds the sums of the lanes of four vectors to four numbers.
DIFFBIT_INLINE void add_sums(uint32_t* to, Ints a, Ints b, Ints c, Ints d) {
  const Ints four = pair_sums(pair_sums(a, b), pair_sums(c, d));
  wasm_v128_store(to, wasm_i32x4_add(wasm_v128_load(to), four.v));
}

DIFFBIT_INLINE F32 to_floats(Ints a) { return floats(wasm_f32x4_convert_i32x4(a.v)); }

DIFFBIT_INLINE Ints times_bytes(int32_t offset, const uint8_t* zeros) {
  const v128_t wide = wasm_u32x4_extend_low_u16x8(wasm_u16x8_extend_low_u8x16(wasm_v128_load32_zero(zeros)));
  return {wasm_i32x4_mul(wide, wasm_i32x4_splat(offset))};
}
DIFFBIT_INLINE Ints splat_int(int32_t x) { return {wasm_i32x4_splat(x)}; }

DIFFBIT_INLINE void store_parted(const int8_t* from, int8_t* even, int8_t* odd) {
  const v128_t eight = wasm_v128_load64_zero(from);
  const v128_t parted = wasm_i8x16_shuffle(eight, eight, 0, 2, 4, 6, 1, 3, 5, 7, 0, 0, 0, 0, 0, 0, 0, 0);
  wasm_v128_store32_lane(even, parted, 0);
  wasm_v128_store32_lane(odd, parted, 1);
}

template <int BITS>
DIFFBIT_INLINE void unpack_run(const uint8_t* from, Bytes (&to)[2]) {
  if (BITS == 4) {
    const v128_t bytes = wasm_v128_load(from);
    to[0] = {wasm_v128_and(bytes, wasm_u8x16_const_splat(15))}, to[1] = {wasm_u8x16_shr(bytes, 4)};
    return;
  }
  const v128_t bytes = wasm_v128_load64_zero(from), shifted = wasm_u8x16_shr(bytes, 2);
  const v128_t low = wasm_i64x2_shuffle(bytes, shifted, 0, 2), mask = wasm_u8x16_const_splat(3);
  to[0] = {wasm_v128_and(low, mask)}, to[1] = {wasm_v128_and(wasm_u8x16_shr(low, 4), mask)};
  if (BITS != 3) return;
  uint32_t high;
  std::memcpy(&high, from + 8, 4);
  DIFFBIT_UNROLL for (int half = 0; half < 2; ++half) {
    const uint32_t four = high >> 4 * half;
    const v128_t bits = wasm_v128_and(wasm_u32x4_make(four, four >> 1, four >> 2, four >> 3), wasm_u8x16_const_splat(1));
    to[half] = {wasm_v128_or(to[half].v, wasm_i8x16_shl(bits, 2))};
  }
}

DIFFBIT_INLINE Ints larger_bits(Ints bits, F32 x) {
  return {wasm_i32x4_max(bits.v, wasm_v128_and(raw(x), wasm_i32x4_const_splat(0x7fffffff)))};
}
DIFFBIT_INLINE Bytes rounded_bytes(const F32 (&f)[4]) {
  const v128_t low = wasm_i16x8_narrow_i32x4(nearest_ints(f[0]), nearest_ints(f[1]));
  const v128_t high = wasm_i16x8_narrow_i32x4(nearest_ints(f[2]), nearest_ints(f[3]));
  return {wasm_i8x16_narrow_i16x8(low, high)};
}

template <bool REST>
DIFFBIT_INLINE Bytes load_weights(const uint8_t* from) {
  return load_bytes(from);
}
DIFFBIT_INLINE void store_activations(int8_t* to, int8_t*, Bytes a) { store(to, a); }

DIFFBIT_INLINE Ints dot_signed(Ints sums, Bytes a, Bytes b) {
  sums = add_dot(sums, first_signed(a), first_signed(b));
  return add_dot(sums, second_signed(a), second_signed(b));
}
DIFFBIT_INLINE Ints start_signed(Ints sums, Bytes) { return sums; }

constexpr int TERNARY_ROWS = 2, TERNARY_COLUMNS = 2, TERNARY_CHAINS = 1;
constexpr TernaryPass TERNARY_PASSES[4] = {{2, 0, 0x30, true}, {1, 0, 0x0c, true}, {3, 6, 3, false}, {0, 0, 3, false}};
constexpr int INT4_ROWS = 8, INT4_TWO_TILES = 1, REGISTERS = 16;

}  // namespace
}  // namespace diffbit::DIFFBIT_ISA

#include "partial_is_ints.h"
