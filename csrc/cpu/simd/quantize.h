// Activations to 8 or 4 bits, one step per row, for the integer products (ops/ternary_matmul.py has the formulas):
//     8    a = max(max|x|, 1e-5) / 127        q = round-half-to-even(x / a), by a true division: the same bits everywhere
//     4    a = max(mean|x|, 1e-5) / sqrt 7    q = the same, clipped to -8..7
// A row with an infinity or a NaN has the step NaN and zeros: its products are NaN, as in a computation in float.
#pragma once

#include "int8.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

struct Floats {  // WIDTH / 4 of them
#if DIFFBIT_ISA_AVX512VNNI
  __m512 v;
#elif DIFFBIT_ISA_NEON
  float32x4_t v;
#else
  __m256 v;
#endif
};

constexpr int LANES = WIDTH / 4;

/// LANES floats from element `i` of x, fp32 or fp16.
template <bool HALF>
DIFFBIT_INLINE Floats load_floats(const void* x, int64_t i) {
  const float* wide = static_cast<const float*>(x) + i;
  const uint16_t* half = static_cast<const uint16_t*>(x) + i;
#if DIFFBIT_ISA_AVX512VNNI
  if (HALF) return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(half)))};
  return {_mm512_loadu_ps(wide)};
#elif DIFFBIT_ISA_NEON
  if (HALF) return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(half)))};
  return {vld1q_f32(wide)};
#else
  if (HALF) return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(half)))};
  return {_mm256_loadu_ps(wide)};
#endif
}

/// The larger of `bits` and the bits of |x|: floats >= 0 are ordered as their bits are, NaN above infinity.
DIFFBIT_INLINE Ints larger(Ints bits, Floats x) {
#if DIFFBIT_ISA_AVX512VNNI
  const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(0x7fffffff));
  return {_mm512_max_epi32(bits, magnitude)};
#elif DIFFBIT_ISA_NEON
  return {vmaxq_s32(bits.v, vreinterpretq_s32_f32(vabsq_f32(x.v)))};
#else
  const __m256i magnitude = _mm256_and_si256(_mm256_castps_si256(x.v), _mm256_set1_epi32(0x7fffffff));
  return {_mm256_max_epi32(bits, magnitude)};
#endif
}

/// x / step, for four bits no further from zero than -8 and 7, which rounding then leaves there.
template <bool FOUR>
DIFFBIT_INLINE Floats divided(Floats x, float step) {
#if DIFFBIT_ISA_AVX512VNNI
  const __m512 f = _mm512_div_ps(x.v, _mm512_set1_ps(step));
  return {FOUR ? _mm512_max_ps(_mm512_min_ps(f, _mm512_set1_ps(7)), _mm512_set1_ps(-8)) : f};
#elif DIFFBIT_ISA_NEON
  const float32x4_t f = vdivq_f32(x.v, vdupq_n_f32(step));
  return {FOUR ? vmaxq_f32(vminq_f32(f, vdupq_n_f32(7)), vdupq_n_f32(-8)) : f};
#else
  const __m256 f = _mm256_div_ps(x.v, _mm256_set1_ps(step));
  return {FOUR ? _mm256_max_ps(_mm256_min_ps(f, _mm256_set1_ps(7)), _mm256_set1_ps(-8)) : f};
#endif
}

/// WIDTH activations divided by the step and rounded.
template <bool HALF, bool FOUR>
DIFFBIT_INLINE Bytes rounded(const void* x, int64_t i, float step) {
  Floats f[4];
  for (int part = 0; part < 4; ++part) f[part] = divided<FOUR>(load_floats<HALF>(x, i + part * LANES), step);
#if DIFFBIT_ISA_AVX512VNNI
  __m128i q[4];
  for (int part = 0; part < 4; ++part) q[part] = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(f[part].v));
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(q[0]), q[1], 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(q[2]), q[3], 1);
  return {_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1)};
#elif DIFFBIT_ISA_NEON
  int16x4_t q[4];
  for (int part = 0; part < 4; ++part) q[part] = vmovn_s32(vcvtnq_s32_f32(f[part].v));
  const int8x8_t low = vmovn_s16(vcombine_s16(q[0], q[1])), high = vmovn_s16(vcombine_s16(q[2], q[3]));
  return {vreinterpretq_u8_s8(vcombine_s8(low, high))};
#else
  __m256i q[4];
  for (int part = 0; part < 4; ++part) q[part] = _mm256_cvtps_epi32(f[part].v);
  const __m256i mixed = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
  return {_mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))};  // packs works by halves
#endif
}

/// sums += |x| of WIDTH activations, to multiples of the grid's last place: exact in any order.
template <bool HALF>
DIFFBIT_INLINE void add_magnitudes(double (&sums)[WIDTH], const void* x, int64_t i, double grid) {
  float values[WIDTH];
  for (int part = 0; part < 4; ++part) {
    const Floats f = load_floats<HALF>(x, i + part * LANES);
    std::memcpy(values + part * LANES, &f.v, sizeof f.v);
  }
  for (int j = 0; j < WIDTH; ++j) sums[j] += (static_cast<double>(__builtin_fabsf(values[j])) + grid) - grid;
}

template <bool HALF, bool FOUR, class Put>
DIFFBIT_INLINE float quantize_row(const void* x, int64_t k, const Put& put) {
  constexpr int64_t BYTES = HALF ? 2 : 4;
  const int64_t whole = k / WIDTH * WIDTH;
  uint8_t rest[WIDTH * BYTES] = {};  // the elements after the last whole vector, and zeros
  std::memcpy(rest, static_cast<const uint8_t*>(x) + whole * BYTES, static_cast<size_t>((k - whole) * BYTES));

  Ints most[4] = {zero(), zero(), zero(), zero()};
  for (int part = 0; part < 4; ++part) most[part] = larger(most[part], load_floats<HALF>(rest, part * LANES));
  for (int64_t i = 0; i < whole; i += WIDTH)
    for (int part = 0; part < 4; ++part) most[part] = larger(most[part], load_floats<HALF>(x, i + part * LANES));
  int32_t lanes[4][LANES], bits = 0;
  for (int part = 0; part < 4; ++part) store(lanes[part], most[part]);
  for (const int32_t(&vector)[LANES] : lanes)
    for (int32_t lane : vector) bits = lane > bits ? lane : bits;
  float largest;
  std::memcpy(&largest, &bits, 4);
  if (bits >= 0x7f800000) {
    for (int64_t i = 0; i < k; i += WIDTH) put(i, splat(0));
    return __builtin_nanf("");
  }

  float step = (largest > 1e-5f ? largest : 1e-5f) / 127;
  if (FOUR) {
    const double grid = largest * (2.0 * static_cast<double>(k));
    double sums[WIDTH] = {}, total = 0;
    for (int64_t i = 0; i < whole; i += WIDTH) add_magnitudes<HALF>(sums, x, i, grid);
    add_magnitudes<HALF>(sums, rest, 0, grid);
    for (double sum : sums) total += sum;
    const float mean = static_cast<float>(total / static_cast<double>(k));
    step = (mean > 1e-5f ? mean : 1e-5f) / 2.6457513f;
  }
  for (int64_t i = 0; i < whole; i += WIDTH) put(i, rounded<HALF, FOUR>(x, i, step));
  if (whole < k) put(whole, rounded<HALF, FOUR>(rest, 0, step));
  return step;
}

/// Quantizes k numbers, fp32 or fp16, to 8 or 4 bits; returns the step. put(i, Bytes) takes the values i .. i + WIDTH - 1, for every
/// multiple i of WIDTH below k; values from k on are zero.
template <class Put>
DIFFBIT_INLINE float quantize_row(const void* x, bool half, int64_t bits, int64_t k, const Put& put) {
  if (bits == 4) return half ? quantize_row<true, true>(x, k, put) : quantize_row<false, true>(x, k, put);
  return half ? quantize_row<true, false>(x, k, put) : quantize_row<false, false>(x, k, put);
}

}  // namespace
}  // namespace diffbit::DIFFBIT_ISA
