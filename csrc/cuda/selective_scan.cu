// SelectiveScan (ops/selective_scan.py): a thread has a channel, with up to 16 states in registers, and goes from token to
// token. B and C of TOKENS tokens are in shared memory. exp and log1p are CUDA's, so the last bits differ from the CPU's.
#include "../ort/layouts.h"
#include "activations.h"

namespace diffbit::cuda {
namespace {

constexpr int THREADS = 64, TOKENS = 8;
constexpr int FEW = 16;  // states that a thread keeps in registers; more are in memory, and loops over them are not unrolled

template <class T, int MOST>
__global__ void __launch_bounds__(THREADS) scan(DiffbitSelectiveScan op) {
  float* numbers = shared_memory<float>();  // [TOKENS, B or C, states]
  const int states = static_cast<int>(op.states);
  const int64_t batch = blockIdx.y, channel = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  const bool mine = channel < op.channels;
  const int64_t first = batch * op.steps, state = batch * states * op.channels + channel;
  const int64_t* mask = static_cast<const int64_t*>(op.attention_mask) + (batch + 1) * op.total - op.steps;
  const auto row = [&](const void* tensor, int64_t t) {
    return mine ? to_float(static_cast<const T*>(tensor)[(first + t) * op.channels + channel]) : 0.0f;
  };
  const float bias = mine ? static_cast<const float*>(op.dt_bias)[channel] : 0.0f;
  const float skip = mine ? static_cast<const float*>(op.d)[channel] : 0.0f;
  float h[MOST], rate[MOST];
#pragma unroll(MOST == FEW ? FEW : 1)
  for (int n = 0; n < MOST; ++n) {
    const bool in_state = mine && n < states;
    h[n] = in_state ? static_cast<const float*>(op.past_state)[state + n * op.channels] : 0.0f;
    rate[n] = in_state ? static_cast<const float*>(op.a)[n * op.channels + channel] : 0.0f;
  }
  for (int64_t begin = 0; begin < op.steps; begin += TOKENS) {
    const int count = static_cast<int>(op.steps - begin < TOKENS ? op.steps - begin : TOKENS);
    __syncthreads();
    for (int i = threadIdx.x; i < count * states; i += THREADS) {
      const int64_t from = (first + begin) * states + i;
      float* to = numbers + i / states * 2 * states + i % states;
      to[0] = to_float(static_cast<const T*>(op.b)[from]);
      to[states] = to_float(static_cast<const T*>(op.c)[from]);
    }
    float x[TOKENS], dt[TOKENS], z[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      const int64_t at = begin + (t < count ? t : 0);
      x[t] = row(op.x, at), dt[t] = row(op.dt, at), z[t] = row(op.z, at);
    }
    __syncthreads();
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) {
      if (t >= count) break;
      float memory = 0.0f;
      if (mask[begin + t]) {
        const float biased = dt[t] + bias, size = fmaxf(biased, 0.0f) + log1pf(expf(-fabsf(biased))), input = size * x[t];
        const float* b = numbers + t * 2 * states;
        memory = skip * x[t];
#pragma unroll(MOST == FEW ? FEW : 1)
        for (int n = 0; n < MOST; ++n) {
          if (n >= states) continue;
          h[n] = __fmaf_rn(expf(size * rate[n]), h[n], input * b[n]);
          memory = __fmaf_rn(b[states + n], h[n], memory);
        }
      }
      if (!mine) continue;
      const int64_t to = (first + begin + t) * op.channels + channel;
      if (op.memory) static_cast<T*>(op.memory)[to] = from_float<T>(memory);
      static_cast<T*>(op.y)[to] = from_float<T>(mask[begin + t] ? memory * (z[t] / (1.0f + expf(-z[t]))) : 0.0f);
    }
  }
  if (!mine) return;
#pragma unroll(MOST == FEW ? FEW : 1)
  for (int n = 0; n < MOST; ++n)
    if (n < states) static_cast<float*>(op.present_state)[state + n * op.channels] = h[n];
}

}  // namespace
}  // namespace diffbit::cuda

size_t diffbit_cuda_selective_scan_workspace(const DiffbitSelectiveScan*) { return 0; }

const char* diffbit_cuda_selective_scan(const DiffbitSelectiveScan* op, void*, void* stream) {
  using namespace diffbit;
  using namespace diffbit::cuda;
  if (!op->batch) return nullptr;
  if (op->batch > 65535 || op->states > SCAN_MOST_STATES)
    return sentence("SelectiveScan: %lld sequences of %lld states are too many", static_cast<long long>(op->batch),
                    static_cast<long long>(op->states));
  const dim3 grid(static_cast<unsigned>((op->channels + THREADS - 1) / THREADS), static_cast<unsigned>(op->batch));
  const size_t shared = static_cast<size_t>(2 * TOKENS * op->states) * sizeof(float);
  return with_type(op->type, "SelectiveScan", [&](auto number) {
    using T = decltype(number);
    const auto kernel = op->states <= FEW ? scan<T, FEW> : scan<T, SCAN_MOST_STATES>;
    return launch(kernel, grid, THREADS, shared, static_cast<cudaStream_t>(stream), *op);
  });
}
