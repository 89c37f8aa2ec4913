// A pair of numbers of a Hadamard transform (ops/hadamard.py), rounded as defined.
#pragma once

#include "device.h"

namespace diffbit::cuda {

__device__ __forceinline__ void butterfly(float& u, float& v) {
  const float sum = __fadd_rn(u, v);
  v = __fsub_rn(u, v);
  u = sum;
}

}  // namespace diffbit::cuda
