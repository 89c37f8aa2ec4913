// CausalConv (ops/causal_conv.py): a thread computes a channel of some tokens. A second kernel writes the state, because
// blocks of the first may still read it. The sum begins with the latest token, so the last bits differ from the CPU's.
#include "../ort/layouts.h"
#include "activations.h"

namespace diffbit::cuda {
namespace {

constexpr int THREADS = 128, TOKENS = 8;

/// The rows of one channel, backwards from the latest: those of x that are not padding, then those of the state.
template <class T>
struct Back {
  __device__ Back(const DiffbitCausalConv& op, int64_t batch, int64_t channel, int64_t from)
      : x(static_cast<const T*>(op.x) + batch * op.steps * op.channels + channel),
        past(static_cast<const float*>(op.past_state) + batch * (op.width - 1) * op.channels + channel),
        mask(static_cast<const int64_t*>(op.attention_mask) + (batch + 1) * op.total - op.steps),
        channels(op.channels), t(from), row(op.width - 1) {}

  __device__ float next() {
    do --t;
    while (t >= 0 && !mask[t]);
    if (t >= 0) return to_float(x[t * channels]);
    t = 0;
    return past[--row * channels];
  }

  const T* x;
  const float* past;
  const int64_t* mask;
  int64_t channels, t, row;
};

template <class T>
__global__ void __launch_bounds__(THREADS) convolve(DiffbitCausalConv op) {
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x, batch = blockIdx.z;
  if (channel >= op.channels) return;
  const float* weight = static_cast<const float*>(op.weight) + channel;
  const int64_t* mask = static_cast<const int64_t*>(op.attention_mask) + (batch + 1) * op.total - op.steps;
  T* y = static_cast<T*>(op.y) + batch * op.steps * op.channels + channel;
  for (int64_t t = static_cast<int64_t>(blockIdx.y) * TOKENS, i = 0; i < TOKENS && t < op.steps; ++i, ++t) {
    float sum = static_cast<const float*>(op.bias)[channel];
    Back<T> rows(op, batch, channel, t + 1);
    if (mask[t])
      for (int64_t k = op.width - 1; k >= 0; --k) sum = __fmaf_rn(rows.next(), weight[k * op.channels], sum);
    y[t * op.channels] = from_float<T>(mask[t] ? sum / (1.0f + expf(-sum)) : 0.0f);
  }
}

template <class T>
__global__ void __launch_bounds__(THREADS) keep(DiffbitCausalConv op) {
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x, batch = blockIdx.y;
  if (channel >= op.channels) return;
  const int state_rows = static_cast<int>(op.width - 1);
  float latest[CONV_MOST_WIDTH];
  Back<T> rows(op, batch, channel, op.steps);
  for (int k = state_rows - 1; k >= 0; --k) latest[k] = rows.next();
  float* present = static_cast<float*>(op.present_state) + batch * state_rows * op.channels + channel;
  for (int k = 0; k < state_rows; ++k) present[k * op.channels] = latest[k];
}

}  // namespace
}  // namespace diffbit::cuda

size_t diffbit_cuda_causal_conv_workspace(const DiffbitCausalConv*) { return 0; }

const char* diffbit_cuda_causal_conv(const DiffbitCausalConv* op, void*, void* stream) {
  using namespace diffbit::cuda;
  if (!op->batch) return nullptr;
  const int64_t down = (op->steps + TOKENS - 1) / TOKENS;
  if (down > 65535 || op->batch > 65535)
    return sentence("CausalConv: %lld tokens of %lld sequences are too many", static_cast<long long>(op->steps),
                    static_cast<long long>(op->batch));
  const unsigned across = static_cast<unsigned>((op->channels + THREADS - 1) / THREADS), batch = static_cast<unsigned>(op->batch);
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  return with_type(op->type, "CausalConv", [&](auto number) {
    using T = decltype(number);
    const char* wrong = nullptr;
    if (down) wrong = launch(convolve<T>, dim3(across, static_cast<unsigned>(down), batch), THREADS, 0, on, *op);
    return wrong ? wrong : launch(keep<T>, dim3(across, batch), THREADS, 0, on, *op);
  });
}
