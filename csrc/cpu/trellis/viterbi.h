// Viterbi's algorithm on rings of 64; loops that a compiler turns into vectors.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

constexpr int STATES = 128, HALF = STATES / 2, RING = 64, LANES = 16, TILES = 4;
constexpr int AHEAD = 32;  // steps before the ring's first weight, after which the best path hardly depends on its start
constexpr float NEVER = 1e30f;

struct Ring {
  const Trellis& trellis;
  int subsets, choices;
  std::vector<float> errors;    // [RING, subsets], of the nearest level of each subset
  std::vector<uint8_t> nearest;  // [RING, subsets], its place in the subset
  float costs[RING + 1][STATES];
  float branches[2][STATES];
  uint8_t subset_of[2][STATES];  // by u and the state before

  explicit Ring(const Trellis& trellis)
      : trellis(trellis), subsets(1 << trellis.subset_bits), choices(1 << (trellis.bits - 1)), errors(RING * subsets),
        nearest(RING * subsets) {
    for (int state = 0; state < STATES; ++state)
      for (int u = 0; u < 2; ++u) subset_of[u][state] = trellis.subsets[state << 1 | u];
  }

  void measure(int p, float target, float weight) {
    float* error = &errors[p * subsets];
    uint8_t* place = &nearest[p * subsets];
    for (int q = 0; q < subsets; ++q) error[q] = NEVER, place[q] = 0;
    for (int a = 0; a < choices; ++a)
      for (int q = 0; q < subsets; ++q) {
        const float lost = target - trellis.levels[a * subsets + q], square = lost * lost * weight;
        place[q] = square < error[q] ? a : place[q];
        error[q] = std::min(error[q], square);
      }
  }

  /// Extends all paths by weight p; the state after it is the state before, shifted, and u.
  void step(int p, const float* __restrict before, float* __restrict after) {
    const float* error = &errors[p * subsets];
    for (int u = 0; u < 2; ++u)
      for (int state = 0; state < STATES; ++state) branches[u][state] = error[subset_of[u][state]];
    float least[2][HALF];
    for (int u = 0; u < 2; ++u)
      for (int j = 0; j < HALF; ++j)
        least[u][j] = std::min(before[j] + branches[u][j], before[j + HALF] + branches[u][j + HALF]);
    for (int j = 0; j < HALF; ++j) after[2 * j] = least[0][j], after[2 * j + 1] = least[1][j];
  }

  /// Follows the best path back from `state` after the ring, and returns its first state; indices: null, or those of the ring.
  int trace(int state, uint8_t* indices) {
    for (int p = RING - 1; p >= 0; --p) {
      const float* error = &errors[p * subsets];
      const int u = state & 1, low = state >> 1, high = low + HALF;
      const bool is_high = costs[p][high] + error[subset_of[u][high]] < costs[p][low] + error[subset_of[u][low]];
      const int before = is_high ? high : low, q = subset_of[u][before];
      if (indices) indices[p] = static_cast<uint8_t>(nearest[p * subsets + q] * subsets + q);
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

void encode(const Trellis& trellis, const float* targets, const float* weights, int64_t rows, int64_t columns, int64_t apart,
            uint8_t* indices) {
  Ring ring(trellis);
  uint8_t found[RING];
  for (int64_t row = 0; row < rows; row += RING)
    for (int64_t column = 0; column < columns; ++column) {
      const auto at = [&](int p) { return (row + p % TILES * LANES + p / TILES) * apart + column; };
      for (int p = 0; p < RING; ++p) ring.measure(p, targets[at(p)], weights[at(p)]);
      ring.encode(found);
      for (int p = 0; p < RING; ++p) indices[at(p)] = found[p];
    }
}

}  // namespace

extern const TrellisKernels trellis = {encode};

}  // namespace diffbit::DIFFBIT_ISA
