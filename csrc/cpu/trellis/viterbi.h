// Viterbi's algorithm on rings of 64; what is not written with AVX2 are loops that a compiler turns into vectors.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "kernels.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

constexpr int STATES = 128, HALF = STATES / 2, RING = 64, LANES = 16, TILES = 4;
constexpr int AHEAD = 32;  // steps before the ring's first weight, after which the best path hardly depends on its start
constexpr float NEVER = 1e30f;

template <int SUBSETS>
struct Ring {
  const Trellis& trellis;
  int choices;
  float errors[RING][SUBSETS];   // of the nearest level of each subset
  float nearest[RING][SUBSETS];  // its place in the subset; a float, like what it is chosen by
  float costs[RING + 1][STATES];
  int32_t subset_of[2][STATES];  // by u and the state before

  explicit Ring(const Trellis& trellis) : trellis(trellis), choices(1 << (trellis.bits - 1)) {
    for (int state = 0; state < STATES; ++state)
      for (int u = 0; u < 2; ++u) subset_of[u][state] = trellis.subsets[state << 1 | u];
  }

  void measure(int p, float target, float weight) {
    float error[SUBSETS], place[SUBSETS];
    for (int q = 0; q < SUBSETS; ++q) error[q] = NEVER, place[q] = 0;
    for (int a = 0; a < choices; ++a)
      for (int q = 0; q < SUBSETS; ++q) {
        const float lost = target - trellis.levels[a * SUBSETS + q], square = lost * lost * weight;
        place[q] = square < error[q] ? static_cast<float>(a) : place[q];
        error[q] = square < error[q] ? square : error[q];
      }
    std::memcpy(errors[p], error, sizeof error);
    std::memcpy(nearest[p], place, sizeof place);
  }

  /// Extends all paths by weight p; the state after it is the state before, shifted, and u.
  void step(int p, const float* __restrict before, float* __restrict after) {
    const float* error = errors[p];
#if defined(__AVX2__)
    __m256 parts[SUBSETS > 8 ? 2 : 1];
    if constexpr (SUBSETS < 8)
      parts[0] = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(error));
    else
      for (int i = 0; i < SUBSETS / 8; ++i) parts[i] = _mm256_loadu_ps(error + 8 * i);
    const auto path = [&](int u, int state) {
      const __m256i subset = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(subset_of[u] + state));
      __m256 added = _mm256_permutevar8x32_ps(parts[0], subset);
      if constexpr (SUBSETS > 8)  // the sign chooses
        added = _mm256_blendv_ps(added, _mm256_permutevar8x32_ps(parts[1], subset), _mm256_castsi256_ps(_mm256_slli_epi32(subset, 28)));
      return _mm256_add_ps(_mm256_loadu_ps(before + state), added);
    };
    for (int j = 0; j < HALF; j += 8) {
      const __m256 zero = _mm256_min_ps(path(0, j), path(0, j + HALF)), one = _mm256_min_ps(path(1, j), path(1, j + HALF));
      const __m256 low = _mm256_unpacklo_ps(zero, one), high = _mm256_unpackhi_ps(zero, one);
      _mm256_storeu_ps(after + 2 * j, _mm256_permute2f128_ps(low, high, 0x20));
      _mm256_storeu_ps(after + 2 * j + 8, _mm256_permute2f128_ps(low, high, 0x31));
    }
#else
    float least[2][HALF];
    for (int u = 0; u < 2; ++u)
      for (int j = 0; j < HALF; ++j)
        least[u][j] = std::min(before[j] + error[subset_of[u][j]], before[j + HALF] + error[subset_of[u][j + HALF]]);
    for (int j = 0; j < HALF; ++j) after[2 * j] = least[0][j], after[2 * j + 1] = least[1][j];
#endif
  }

  /// Follows the best path back from `state` after the ring, writes its indices, and returns its first state.
  int trace(int state, uint8_t* indices) {
    for (int p = RING - 1; p >= 0; --p) {
      const float* error = errors[p];
      const int u = state & 1, low = state >> 1, high = low + HALF;
      const bool is_high = costs[p][high] + error[subset_of[u][high]] < costs[p][low] + error[subset_of[u][low]];
      const int before = is_high ? high : low, q = subset_of[u][before];
      indices[p] = static_cast<uint8_t>(static_cast<int>(nearest[p][q]) * SUBSETS + q);
      state = before;
    }
    return state;
  }

  void run() {
    for (int p = 0; p < RING; ++p) step(p, costs[p], costs[p + 1]);
  }

  /// Writes the indices of the ring whose weights are measured.
  void encode(uint8_t* indices) {
    float other[STATES];
    std::fill(costs[0], costs[0] + STATES, 0.0f);
    for (int p = RING - AHEAD; p < RING; p += 2) step(p, costs[0], other), step(p + 1, other, costs[0]);
    run();
    const int last = static_cast<int>(std::min_element(costs[RING], costs[RING] + STATES) - costs[RING]);
    const int first = trace(last, indices);
    if (first == last) return;
    std::fill(costs[0], costs[0] + STATES, NEVER);  // the best path that begins and ends in this state
    costs[0][first] = 0;
    run();
    trace(first, indices);
  }
};

template <int SUBSETS>
void encode_with(const Trellis& trellis, const float* targets, const float* weights, int64_t rows, int64_t columns,
                 int64_t apart, uint8_t* indices) {
  Ring<SUBSETS> ring(trellis);
  uint8_t found[RING];
  for (int64_t row = 0; row < rows; row += RING)
    for (int64_t column = 0; column < columns; ++column) {
      const auto at = [&](int p) { return (row + p % TILES * LANES + p / TILES) * apart + column; };
      for (int p = 0; p < RING; ++p) ring.measure(p, targets[at(p)], weights[at(p)]);
      ring.encode(found);
      for (int p = 0; p < RING; ++p) indices[at(p)] = found[p];
    }
}

void encode(const Trellis& trellis, const float* targets, const float* weights, int64_t rows, int64_t columns, int64_t apart,
            uint8_t* indices) {
  const auto chosen = trellis.subset_bits == 2 ? encode_with<4> : trellis.subset_bits == 3 ? encode_with<8> : encode_with<16>;
  chosen(trellis, targets, weights, rows, columns, apart, indices);
}

}  // namespace

extern const TrellisKernels trellis = {encode};

}  // namespace diffbit::DIFFBIT_ISA
