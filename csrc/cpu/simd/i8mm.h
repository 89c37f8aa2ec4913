// NEON with products of matrices of signed bytes (FEAT_I8MM): twice as many products in an instruction as the dot product.
#pragma once

#include "neon.h"

#define DIFFBIT_MANY_ROWS 4  // for more rows a tile of a weight is unpacked

namespace diffbit::DIFFBIT_ISA {
namespace {

/// Adds to sums [2, 2]: a [2, 8] times the transpose of b [2, 8].
DIFFBIT_INLINE Ints add_pairs(Ints sums, Bytes a, Bytes b) {
  return {vmmlaq_s32(sums.v, vreinterpretq_s8_u8(a.v), vreinterpretq_s8_u8(b.v))};
}
/// Writes four bytes of a and four of b, by turns: of the first two lanes, and of the others.
DIFFBIT_INLINE void interleave(Bytes a, Bytes b, Bytes (&both)[2]) {
  const uint32x4_t first = vreinterpretq_u32_u8(a.v), second = vreinterpretq_u32_u8(b.v);
  both[0] = {vreinterpretq_u8_u32(vzip1q_u32(first, second))};
  both[1] = {vreinterpretq_u8_u32(vzip2q_u32(first, second))};
}
/// Returns {x[0], x[1]} twice; rows_of returns each of them twice.
DIFFBIT_INLINE F32 columns_of(const float* x) { return vreinterpretq_f32_u64(vdupq_n_u64(vget_lane_u64(vreinterpret_u64_f32(vld1_f32(x)), 0))); }
DIFFBIT_INLINE F32 rows_of(const float* x) {
  const float32x2_t both = vld1_f32(x);
  return vcombine_f32(vdup_lane_f32(both, 0), vdup_lane_f32(both, 1));
}
DIFFBIT_INLINE Ints columns_of(const int32_t* x) {
  const int32x2_t both = vld1_s32(x);
  return {vcombine_s32(both, both)};
}
DIFFBIT_INLINE Ints rows_of(const int32_t* x) {
  const int32x2_t both = vld1_s32(x);
  return {vcombine_s32(vdup_lane_s32(both, 0), vdup_lane_s32(both, 1))};
}
/// Returns a + b * c, which wraps.
DIFFBIT_INLINE Ints add_product(Ints a, Ints b, Ints c) { return {vmlaq_s32(a.v, b.v, c.v)}; }
/// Stores [2, 2] to two rows.
DIFFBIT_INLINE void store_pair(float* to, int64_t stride, F32 a) {
  vst1_f32(to, vget_low_f32(a));
  vst1_f32(to + stride, vget_high_f32(a));
}

DIFFBIT_INLINE Ints load_ints(const int32_t* from) { return {vld1q_s32(from)}; }

}  // namespace
}  // namespace diffbit::DIFFBIT_ISA
