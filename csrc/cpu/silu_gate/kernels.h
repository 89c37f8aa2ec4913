// The inner loop of SiluGate, one table per instruction set (ops/silu_gate.py defines it).
#pragma once

#include <cstdint>

#include "../isa.h"

namespace diffbit {

struct SiluGateKernels {
  /// Computes y = silu(g) u for `size` numbers of g, u and y, fp32 or fp16.
  void (*multiply)(const void* g, const void* u, void* y, bool half, int64_t size);
};

DIFFBIT_DECLARE(SiluGateKernels, silu_gate)

}  // namespace diffbit
