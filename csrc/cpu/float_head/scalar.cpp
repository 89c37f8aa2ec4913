// The slow, obvious version: what every other is held against, and what runs on a CPU that has none of their sets.
#include <cmath>

#include "../half.h"
#include "kernels.h"

namespace diffbit::scalar {
namespace {

void multiply(const float* x, int64_t count, int64_t width, const void* weight, bool half, int64_t k, int64_t n,
              int64_t first, int64_t last, void* y) {
  const Half* halves = static_cast<const Half*>(weight);
  const float* floats = static_cast<const float*>(weight);
  for (int64_t row = first; row < last; ++row)
    for (int64_t i = 0; i < count; ++i) {
      float sums[FLOAT_HEAD_LANES] = {};
      for (int64_t c = 0; c < width; ++c) {
        const float w = c >= k ? 0.0f : half ? to_float(halves[row * k + c]) : floats[row * k + c];
        float& sum = sums[c % FLOAT_HEAD_LANES];
        sum = std::fma(x[i * width + c], w, sum);
      }
      for (int64_t apart = FLOAT_HEAD_LANES / 2; apart; apart /= 2)
        for (int64_t j = 0; j < apart; ++j) sums[j] += sums[j + apart];
      if (half)
        static_cast<Half*>(y)[i * n + row] = to_half(sums[0]);
      else
        static_cast<float*>(y)[i * n + row] = sums[0];
    }
}

}  // namespace

extern const FloatHeadKernels float_head = {multiply};

}  // namespace diffbit::scalar
