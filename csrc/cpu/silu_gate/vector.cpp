// SiluGate with vectors; compiled once per instruction set.
#include "kernels.h"

#include "../simd/vectors.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

template <class T>
void multiply_of(const T* g, const T* u, T* y, int64_t size) {
  constexpr int64_t L = F32_LANES;
  int64_t i = 0;
  for (; i + L <= size; i += L) store(y + i, silu(load(g + i)) * load(u + i));
  if (const int64_t rest = size - i) store_part(y + i, rest, silu(load_part(g + i, rest)) * load_part(u + i, rest));
}

void multiply(const void* g, const void* u, void* y, bool half, int64_t size) {
  if (half)
    multiply_of(static_cast<const uint16_t*>(g), static_cast<const uint16_t*>(u), static_cast<uint16_t*>(y), size);
  else
    multiply_of(static_cast<const float*>(g), static_cast<const float*>(u), static_cast<float*>(y), size);
}

}  // namespace

extern const SiluGateKernels silu_gate = {multiply};

}  // namespace diffbit::DIFFBIT_ISA
