// The slow, obvious version: the reference for all others, and the fallback for CPUs without their instruction sets.
#include <cmath>

#include "../half.h"
#include "kernels.h"

namespace diffbit::scalar {
namespace {

void multiply(const void* g, const void* u, void* y, bool half, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    const float gate = get(g, half, i);
    put(y, half, i, gate / (1 + std::exp(-gate)) * get(u, half, i));
  }
}

}  // namespace

extern const SiluGateKernels silu_gate = {multiply};

}  // namespace diffbit::scalar
