// ARM NEON with the dot product, of signed bytes: 32 registers.
#pragma once

#include "prelude.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

// ---- floats ----

using F32 = float32x4_t;
constexpr int F32_LANES = 4;

DIFFBIT_INLINE F32 splat(float x) { return vdupq_n_f32(x); }
DIFFBIT_INLINE F32 load(const float* from) { return vld1q_f32(from); }
DIFFBIT_INLINE F32 load(const uint16_t* from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }
DIFFBIT_INLINE F32 load(const int8_t* from) {
  int32_t four;
  std::memcpy(&four, from, 4);
  const int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
}
DIFFBIT_INLINE void store(float* to, F32 a) { vst1q_f32(to, a); }
DIFFBIT_INLINE void store(uint16_t* to, F32 a) { vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(a))); }
DIFFBIT_INLINE void store_rounded(int8_t* to, F32 a) {
  const int16x4_t narrow = vmovn_s32(vcvtnq_s32_f32(a));
  const int8x8_t bytes = vmovn_s16(vcombine_s16(narrow, narrow));
  std::memcpy(to, &bytes, 4);
}
DIFFBIT_INLINE F32 fma(F32 a, F32 b, F32 c) { return vfmaq_f32(c, a, b); }
DIFFBIT_INLINE F32 larger(F32 a, F32 b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
DIFFBIT_INLINE F32 smaller(F32 a, F32 b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
DIFFBIT_INLINE F32 magnitude(F32 a) { return vabsq_f32(a); }
DIFFBIT_INLINE F32 rounded(F32 a) { return vrndnq_f32(a); }
DIFFBIT_INLINE F32 power_of_two(F32 n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23));
}
DIFFBIT_INLINE F32 zero_below(F32 x, float limit, F32 a) {
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(a), vcltq_f32(x, splat(limit))));
}
DIFFBIT_INLINE float sum(F32 a) { return vaddvq_f32(a); }
DIFFBIT_INLINE float largest(F32 a) { return vmaxvq_f32(a); }
DIFFBIT_INLINE void store_sums(float* to, F32 a, F32 b, F32 c, F32 d) {
  vst1q_f32(to, vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
}

DIFFBIT_INLINE F32 clipped(F32 a, float low, float high) {
  return vmaxq_f32(vminq_f32(a, vdupq_n_f32(high)), vdupq_n_f32(low));
}

template <int APART>
DIFFBIT_INLINE F32 partners(F32 a) {
  if (APART == 1) return vrev64q_f32(a);
  return vextq_f32(a, a, 2);
}

// ---- bytes and integers ----

constexpr int WIDTH = 16;
struct Bytes { uint8x16_t v; };
struct Ints { int32x4_t v; };

DIFFBIT_INLINE Bytes load_bytes(const void* from) { return {vld1q_u8(static_cast<const uint8_t*>(from))}; }
DIFFBIT_INLINE Bytes splat(uint8_t byte) { return {vdupq_n_u8(byte)}; }
DIFFBIT_INLINE Bytes splat4(const void* from) {
  uint32_t four;
  std::memcpy(&four, from, 4);
  return {vreinterpretq_u8_u32(vdupq_n_u32(four))};
}
DIFFBIT_INLINE Bytes operator&(Bytes a, Bytes b) { return {vandq_u8(a.v, b.v)}; }
DIFFBIT_INLINE Bytes operator|(Bytes a, Bytes b) { return {vorrq_u8(a.v, b.v)}; }
DIFFBIT_INLINE Bytes operator^(Bytes a, Bytes b) { return {veorq_u8(a.v, b.v)}; }
template <int BY>
DIFFBIT_INLINE Bytes shift(Bytes a) {
  return BY > 0 ? Bytes{vshrq_n_u8(a.v, BY > 0 ? BY : 1)} : BY < 0 ? Bytes{vshlq_n_u8(a.v, BY < 0 ? -BY : 0)} : a;
}
DIFFBIT_INLINE Bytes load_table(const uint8_t* from) { return load_bytes(from); }
DIFFBIT_INLINE Bytes minus(Bytes a, Bytes b) { return {vsubq_u8(a.v, b.v)}; }
constexpr bool LOOKUP_WRAPS = false;
DIFFBIT_INLINE Bytes lookup(Bytes table, Bytes indices) { return {vqtbl1q_u8(table.v, indices.v)}; }

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

/// Adds the sums of the lanes of four vectors to four numbers.
DIFFBIT_INLINE void add_sums(uint32_t* to, Ints a, Ints b, Ints c, Ints d) {
  const int32x4_t four = vpaddq_s32(vpaddq_s32(a.v, b.v), vpaddq_s32(c.v, d.v));
  vst1q_u32(to, vaddq_u32(vld1q_u32(to), vreinterpretq_u32_s32(four)));
}

DIFFBIT_INLINE F32 to_floats(Ints a) { return vcvtq_f32_s32(a.v); }

DIFFBIT_INLINE Ints times_bytes(int32_t offset, const uint8_t* zeros) {
  const int32_t lanes[4] = {zeros[0], zeros[1], zeros[2], zeros[3]};
  return {vmulq_n_s32(vld1q_s32(lanes), offset)};
}
DIFFBIT_INLINE Ints splat_int(int32_t x) { return {vdupq_n_s32(x)}; }

DIFFBIT_INLINE void store_parted(const int8_t* from, int8_t* even, int8_t* odd) {
  const int8x8_t eight = vld1_s8(from);
  const uint32_t parts[2] = {vget_lane_u32(vreinterpret_u32_s8(vuzp1_s8(eight, eight)), 0),
                             vget_lane_u32(vreinterpret_u32_s8(vuzp2_s8(eight, eight)), 0)};
  std::memcpy(even, &parts[0], 4);
  std::memcpy(odd, &parts[1], 4);
}

template <int BITS>
DIFFBIT_INLINE void unpack_run(const uint8_t* from, Bytes (&to)[2]) {
  if (BITS == 4) {
    const uint8x16_t bytes = vld1q_u8(from);
    to[0] = {vandq_u8(bytes, vdupq_n_u8(15))}, to[1] = {vshrq_n_u8(bytes, 4)};
    return;
  }
  const uint8x8_t bytes = vld1_u8(from);
  const uint8x16_t low = vcombine_u8(bytes, vshr_n_u8(bytes, 2)), mask = vdupq_n_u8(3);
  to[0] = {vandq_u8(low, mask)}, to[1] = {vandq_u8(vshrq_n_u8(low, 4), mask)};
  if (BITS != 3) return;
  uint32_t high;
  std::memcpy(&high, from + 8, 4);
  DIFFBIT_UNROLL for (int half = 0; half < 2; ++half) {
    const int32_t first = -4 * half, by[4] = {first, first - 1, first - 2, first - 3};
    const uint8x16_t bits = vreinterpretq_u8_u32(vshlq_u32(vdupq_n_u32(high), vld1q_s32(by)));
    to[half].v = vorrq_u8(to[half].v, vshlq_n_u8(vandq_u8(bits, vdupq_n_u8(1)), 2));
  }
}

DIFFBIT_INLINE Ints pair_sums(Ints a, Ints b) { return {vpaddq_s32(a.v, b.v)}; }

DIFFBIT_INLINE Ints larger_bits(Ints bits, F32 x) {
  return {vmaxq_s32(bits.v, vreinterpretq_s32_f32(vabsq_f32(x)))};
}
DIFFBIT_INLINE Bytes rounded_bytes(const F32 (&f)[4]) {
  int16x4_t q[4];
  for (int part = 0; part < 4; ++part) q[part] = vmovn_s32(vcvtnq_s32_f32(f[part]));
  const int8x8_t low = vmovn_s16(vcombine_s16(q[0], q[1])), high = vmovn_s16(vcombine_s16(q[2], q[3]));
  return {vreinterpretq_u8_s8(vcombine_s8(low, high))};
}

template <bool REST>
DIFFBIT_INLINE Bytes load_weights(const uint8_t* from) {
  return load_bytes(from);
}
DIFFBIT_INLINE void store_activations(int8_t* to, int8_t*, Bytes a) { store(to, a); }

DIFFBIT_INLINE Ints dot_signed(Ints sums, Bytes a, Bytes b) { return dot(sums, a, b); }
DIFFBIT_INLINE Ints start_signed(Ints sums, Bytes) { return sums; }

constexpr int32_t BYTE_MIDDLE = 128;
DIFFBIT_INLINE Ints dot_centered(Ints sums, Bytes codes, Bytes activations) { return dot(sums, codes, activations); }
DIFFBIT_INLINE Ints dot_bytes(Ints sums, Bytes codes, Bytes activations) {
  return dot(sums, {veorq_u8(codes.v, vdupq_n_u8(128))}, activations);
}

constexpr int TERNARY_ROWS = 4, TERNARY_COLUMNS = 4, TERNARY_CHAINS = 2;
constexpr TernaryPass TERNARY_PASSES[4] = {{2, 0, 0x30, true}, {1, 0, 0x0c, true}, {3, 6, 3, false}, {0, 0, 3, false}};
constexpr int INT4_ROWS = 4, INT4_TWO_TILES = 2, REGISTERS = 32, NIBBLE_SHIFT = 0;

}  // namespace
}  // namespace diffbit::DIFFBIT_ISA

#include "partial_is_ints.h"
