// Rounds activations to 8 or 4 bits, one scale per row, for integer products (ops/ternary_matmul.py has the formulas):
//     8    a = max(max|x|, 1e-5) / 127        q = round-half-to-even(x / a), by a true division: the same bits everywhere
//     4    a = max(mean|x|, 1e-5) / sqrt 7    q = the same, clipped to -8..7
// A row with an infinity or a NaN gets the scale NaN and zeros, so its products are NaN, as in float arithmetic.
#pragma once

#include "vectors.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

constexpr int LANES = F32_LANES;

/// Loads LANES floats from element `i` of x, fp32 or fp16.
template <bool HALF>
DIFFBIT_INLINE F32 load_floats(const void* x, int64_t i) {
  if (HALF) return load(static_cast<const uint16_t*>(x) + i);
  return load(static_cast<const float*>(x) + i);
}

/// Returns WIDTH activations divided by the scale and rounded; four bits no further from zero than -8 and 7.
template <bool HALF, bool FOUR>
DIFFBIT_INLINE Bytes rounded(const void* x, int64_t i, float scale) {
  F32 f[4];
  for (int part = 0; part < 4; ++part) {
    f[part] = load_floats<HALF>(x, i + part * LANES) / splat(scale);
    if (FOUR) f[part] = clipped(f[part], -8, 7);
  }
  return rounded_bytes(f);
}

/// Adds |x| to sums for WIDTH activations, rounded to multiples of the last place of `multiple`, so any order is exact.
template <bool HALF>
DIFFBIT_INLINE void add_magnitudes(double (&sums)[WIDTH], const void* x, int64_t i, double multiple) {
  float values[WIDTH];
  for (int part = 0; part < 4; ++part) {
    store(values + part * LANES, load_floats<HALF>(x, i + part * LANES));
  }
  for (int j = 0; j < WIDTH; ++j) sums[j] += (static_cast<double>(__builtin_fabsf(values[j])) + multiple) - multiple;
}

template <bool HALF, bool FOUR, class Put>
DIFFBIT_INLINE float quantize_row(const void* x, int64_t k, const Put& put) {
  constexpr int64_t BYTES = HALF ? 2 : 4;
  const int64_t vector_end = k / WIDTH * WIDTH;
  uint8_t rest[WIDTH * BYTES] = {};  // the elements after the last whole vector, and zeros
  std::memcpy(rest, static_cast<const uint8_t*>(x) + vector_end * BYTES, static_cast<size_t>((k - vector_end) * BYTES));

  Ints peaks[4] = {zero(), zero(), zero(), zero()};
  for (int part = 0; part < 4; ++part) peaks[part] = larger_bits(peaks[part], load_floats<HALF>(rest, part * LANES));
  for (int64_t i = 0; i < vector_end; i += WIDTH)
    for (int part = 0; part < 4; ++part) peaks[part] = larger_bits(peaks[part], load_floats<HALF>(x, i + part * LANES));
  int32_t lanes[4][LANES], bits = 0;
  for (int part = 0; part < 4; ++part) store(lanes[part], peaks[part]);
  for (const int32_t(&vector)[LANES] : lanes)
    for (int32_t lane : vector) bits = lane > bits ? lane : bits;
  float largest;
  std::memcpy(&largest, &bits, 4);
  if (bits >= 0x7f800000) {
    for (int64_t i = 0; i < k; i += WIDTH) put(i, splat(uint8_t{0}));
    return __builtin_nanf("");
  }

  float scale = (largest > 1e-5f ? largest : 1e-5f) / 127;
  if (FOUR) {
    const double multiple = largest * (2.0 * static_cast<double>(k));
    double sums[WIDTH] = {}, total = 0;
    for (int64_t i = 0; i < vector_end; i += WIDTH) add_magnitudes<HALF>(sums, x, i, multiple);
    add_magnitudes<HALF>(sums, rest, 0, multiple);
    for (double sum : sums) total += sum;
    const float mean = static_cast<float>(total / static_cast<double>(k));
    scale = (mean > 1e-5f ? mean : 1e-5f) / 2.6457513f;
  }
  for (int64_t i = 0; i < vector_end; i += WIDTH) put(i, rounded<HALF, FOUR>(x, i, scale));
  if (vector_end < k) put(vector_end, rounded<HALF, FOUR>(rest, 0, scale));
  return scale;
}

/// Quantizes k numbers, fp32 or fp16, to 8 or 4 bits; returns the scale. put(i, Bytes) takes the values i .. i + WIDTH - 1, for every
/// multiple i of WIDTH below k; values from k on are zero.
template <class Put>
DIFFBIT_INLINE float quantize_row(const void* x, bool half, int64_t bits, int64_t k, const Put& put) {
  if (bits == 4) return half ? quantize_row<true, true>(x, k, put) : quantize_row<false, true>(x, k, put);
  return half ? quantize_row<true, false>(x, k, put) : quantize_row<false, false>(x, k, put);
}

}  // namespace
}  // namespace diffbit::DIFFBIT_ISA
