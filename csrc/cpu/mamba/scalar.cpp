// The slow, obvious version: the reference for all others, and the fallback for CPUs without their instruction sets.
#include <cmath>

#include "../half.h"
#include "kernels.h"

namespace diffbit::scalar {
namespace {

float silu(float x) { return x / (1 + std::exp(-x)); }
float softplus(float x) { return std::fmax(x, 0.0f) + std::log1p(std::exp(-std::fabs(x))); }

void conv(const ConvTokens& call, int64_t begin, int64_t end, float* last) {  // last: of one channel, the latest last
  const int64_t state_rows = call.width - 1;
  for (int64_t c = begin; c < end; ++c) {
    for (int64_t k = 0; k < state_rows; ++k) last[k] = call.past[k * call.channels + c];
    for (int64_t t = 0; t < call.steps; ++t) {
      const int64_t i = t * call.channels + c;
      if (!call.mask[t]) {
        put(call.y, call.half, i, 0);
        continue;
      }
      last[state_rows] = get(call.x, call.half, i);
      float sum = call.bias[c];
      for (int64_t k = 0; k < call.width; ++k) sum = std::fma(last[k], call.weight[k * call.channels + c], sum);
      put(call.y, call.half, i, silu(sum));
      for (int64_t k = 0; k < state_rows; ++k) last[k] = last[k + 1];
    }
    for (int64_t k = 0; k < state_rows; ++k) call.present[k * call.channels + c] = last[k];
  }
}

void scan(const ScanTokens& call, int64_t begin, int64_t end, float* h) {
  for (int64_t c = begin; c < end; ++c) {
    for (int64_t n = 0; n < call.states; ++n) h[n] = call.past[n * call.channels + c];
    for (int64_t t = 0; t < call.steps; ++t) {
      const int64_t i = t * call.channels + c;
      float memory = 0, y = 0;
      if (call.mask[t]) {
        const float x = get(call.x, call.half, i), size = softplus(get(call.dt, call.half, i) + call.dt_bias[c]);
        const float input = size * x;
        memory = call.d[c] * x;
        for (int64_t n = 0; n < call.states; ++n) {
          const int64_t j = t * call.states + n;
          h[n] = std::fma(std::exp(size * call.a[n * call.channels + c]), h[n], input * get(call.b, call.half, j));
          memory = std::fma(get(call.c, call.half, j), h[n], memory);
        }
        y = memory * silu(get(call.z, call.half, i));
      }
      put(call.y, call.half, i, y);
      if (call.memory) put(call.memory, call.half, i, memory);
    }
    for (int64_t n = 0; n < call.states; ++n) call.present[n * call.channels + c] = h[n];
  }
}

}  // namespace

extern const MambaKernels mamba = {conv, scan};

}  // namespace diffbit::scalar
