// The slow, obvious version: the reference for all others, and the fallback for CPUs without their instruction sets.
#include <cmath>

#include "../half.h"
#include "kernels.h"

namespace diffbit::scalar {
namespace {

float silu(float x) { return x / (1 + std::exp(-x)); }
float softplus(float x) { return std::fmax(x, 0.0f) + std::log1p(std::exp(-std::fabs(x))); }

void conv(const ConvTokens& of, int64_t begin, int64_t end, float* last) {  // last: of one channel, the latest last
  const int64_t kept = of.width - 1;
  for (int64_t c = begin; c < end; ++c) {
    for (int64_t k = 0; k < kept; ++k) last[k] = of.past[k * of.channels + c];
    for (int64_t t = 0; t < of.steps; ++t) {
      const int64_t i = t * of.channels + c;
      if (!of.mask[t]) {
        put(of.y, of.half, i, 0);
        continue;
      }
      last[kept] = get(of.x, of.half, i);
      float sum = of.bias[c];
      for (int64_t k = 0; k < of.width; ++k) sum = std::fma(last[k], of.weight[k * of.channels + c], sum);
      put(of.y, of.half, i, silu(sum));
      for (int64_t k = 0; k < kept; ++k) last[k] = last[k + 1];
    }
    for (int64_t k = 0; k < kept; ++k) of.present[k * of.channels + c] = last[k];
  }
}

void scan(const ScanTokens& of, int64_t begin, int64_t end, float* h) {
  for (int64_t c = begin; c < end; ++c) {
    for (int64_t n = 0; n < of.states; ++n) h[n] = of.past[n * of.channels + c];
    for (int64_t t = 0; t < of.steps; ++t) {
      const int64_t i = t * of.channels + c;
      float memory = 0, y = 0;
      if (of.mask[t]) {
        const float x = get(of.x, of.half, i), size = softplus(get(of.dt, of.half, i) + of.dt_bias[c]);
        const float input = size * x;
        memory = of.d[c] * x;
        for (int64_t n = 0; n < of.states; ++n) {
          const int64_t j = t * of.states + n;
          h[n] = std::fma(std::exp(size * of.a[n * of.channels + c]), h[n], input * get(of.b, of.half, j));
          memory = std::fma(get(of.c, of.half, j), h[n], memory);
        }
        y = memory * silu(get(of.z, of.half, i));
      }
      put(of.y, of.half, i, y);
      if (of.memory) put(of.memory, of.half, i, memory);
    }
    for (int64_t n = 0; n < of.states; ++n) of.present[n * of.channels + c] = h[n];
  }
}

}  // namespace

extern const MambaKernels mamba = {conv, scan};

}  // namespace diffbit::scalar
