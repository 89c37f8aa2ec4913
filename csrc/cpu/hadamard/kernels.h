// The inner loops of Hadamard, one table per instruction set.
#pragma once

#include <cstdint>

#include "../isa.h"

namespace diffbit {

struct HadamardKernels {
  /// Computes y = the transform of x, `size` numbers, fp32 or fp16, in blocks of `block`, a power of two. `floats` holds
  /// max(block, HADAMARD_LANES) of them.
  void (*transform)(const void* x, void* y, bool half, int64_t block, int64_t size, float* floats);
};

constexpr int64_t HADAMARD_LANES = 16;  // of the widest vectors

DIFFBIT_DECLARE(HadamardKernels, hadamard)

}  // namespace diffbit
