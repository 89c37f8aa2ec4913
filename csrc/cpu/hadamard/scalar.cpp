// The slow, obvious version: the reference for all others, and the fallback for CPUs without their instruction sets.
#include <cmath>

#include "../half.h"
#include "kernels.h"

namespace diffbit::scalar {
namespace {

void transform(const void* x, void* y, bool half, int64_t block, int64_t size, float* floats) {
  const float scale = static_cast<float>(1 / std::sqrt(static_cast<double>(block)));
  for (int64_t begin = 0; begin < size; begin += block) {
    for (int64_t i = 0; i < block; ++i) floats[i] = get(x, half, begin + i);
    for (int64_t apart = 1; apart < block; apart *= 2)
      for (int64_t i = 0; i < block; ++i) {
        if (i & apart) continue;
        const float u = floats[i], v = floats[i + apart];
        floats[i] = u + v;
        floats[i + apart] = u - v;
      }
    for (int64_t i = 0; i < block; ++i) put(y, half, begin + i, floats[i] * scale);
  }
}

}  // namespace

extern const HadamardKernels hadamard = {transform};

}  // namespace diffbit::scalar
