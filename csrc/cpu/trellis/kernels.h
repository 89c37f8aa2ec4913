// The encoder of trellis codes (ops/trellis.py), one function per instruction set.
#pragma once

#include <cstdint>

#include "../isa.h"

namespace diffbit {

/// A trellis of 128 states: of the index of a level, the window decides the lowest `subset_bits`, 2 to 4.
struct Trellis {
  int64_t bits, subset_bits;
  const uint8_t* subsets;  // [256] of each window
  const float* levels;     // [2^(bits - 1 + subset_bits)]
};

struct TrellisKernels {
  /// Finds indices uint8 [rows, columns], of which every ring can be coded, near the targets [rows, columns], level times scale;
  /// an error's square counts `weights` times. `apart`: numbers from one row to the next.
  void (*encode)(const Trellis& trellis, const float* targets, const float* weights, int64_t rows, int64_t columns, int64_t apart,
                 uint8_t* indices);
};

DIFFBIT_DECLARE(TrellisKernels, trellis)

}  // namespace diffbit
