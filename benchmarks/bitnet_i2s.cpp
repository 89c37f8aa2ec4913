// bitnet.cpp's I2_S kernels behind one C function, for kernels.py to measure beside ours. Holds nothing of bitnet.cpp:
// it compiles that project's src/ggml-bitnet-mad.cpp from a checkout (github.com/microsoft/BitNet), with small
// headers in place of ggml's. kernels.py does this at each run:
//
//     c++ -O3 -march=native -shared -fPIC -pthread -I STUBS -I CHECKOUT/include
//         bitnet_i2s.cpp CHECKOUT/src/ggml-bitnet-mad.cpp -o libbitnet_i2s.so
//
// Its weights: N rows of blocks of 128 in 32 bytes, codes w+1; byte j holds the weights j, j+32, j+64, j+96 from the
// highest two bits to the lowest. The kernels give sum(code * q); the activations' sum is taken off here, as ggml does.
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

void ggml_vec_dot_i2_i8_s_1x1(int n, float* s, size_t bs, const void* vx, size_t bx, const void* vy, size_t by, int nrc);
void ggml_vec_dot_i2_i8_s_1xN(int n, float* s, size_t bs, const void* vx, size_t bx, const void* vy, size_t by, int nrc);
void ggml_vec_dot_i2_i8_s_Nx1(int n, float* s, size_t bs, const void* vx, size_t bx, const void* vy, size_t by, int nrc);

namespace {

// Its default blocks: activation rows taken at once, and weight rows that stay in the cache for all of them
constexpr int ROW_BLOCK = 4, COLUMN_BLOCK = 128;

class Barrier {
 public:
  explicit Barrier(int count) : count_(count) {}
  void wait() {
    const int round = round_.load(std::memory_order_acquire);
    if (waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
      waiting_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    while (round_.load(std::memory_order_acquire) == round) {
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
  }

 private:
  const int count_;
  std::atomic<int> waiting_{0}, round_{0};
};

void quantize(const float* x, int k, int8_t* q, float* step, float* sum) {
  float largest = 1e-5f;
  for (int i = 0; i < k; ++i) largest = std::fabs(x[i]) > largest ? std::fabs(x[i]) : largest;
  const float inverse = 127 / largest;
  int total = 0;
  for (int i = 0; i < k; ++i) {
    const int value = static_cast<int>(std::lrintf(x[i] * inverse));
    q[i] = static_cast<int8_t>(value);
    total += value;
  }
  *step = largest / 127;
  *sum = static_cast<float>(total);
}

}  // namespace

// y[i] [M, N] = x [M, K] times weights[i] [N, K] transposed, for every i < count, on `threads` threads.
// kernel 0: one weight row and one token at a time (1x1); 1: several weight rows at a time (1xN); 2: several tokens at
// a time (Nx1; M a multiple of 4).
extern "C" void bitnet_i2s(int kernel, int threads, int count, const uint8_t* const* weights, const float* x, int m,
                           int n, int k, float* const* y) {
  std::vector<int8_t> q(static_cast<size_t>(m) * k);
  std::vector<float> steps(m), sums(m);
  Barrier barrier(threads);
  const auto work = [&](int thread) {
    const int begin = n / 4 * thread / threads * 4, end = thread + 1 == threads ? n : n / 4 * (thread + 1) / threads * 4;
    for (int i = 0; i < count; ++i) {
      for (int row = thread; row < m; row += threads)
        quantize(x + static_cast<size_t>(row) * k, k, &q[static_cast<size_t>(row) * k], &steps[row], &sums[row]);
      barrier.wait();
      float* out = y[i];
      for (int c0 = begin; c0 < end; c0 += COLUMN_BLOCK) {
        const int c1 = c0 + COLUMN_BLOCK < end ? c0 + COLUMN_BLOCK : end;
        const uint8_t* block = weights[i] + static_cast<size_t>(c0) * k / 4;
        if (kernel < 2) {
          const auto dot = kernel ? ggml_vec_dot_i2_i8_s_1xN : ggml_vec_dot_i2_i8_s_1x1;
          for (int row = 0; row < m; ++row)
            dot(k, out + static_cast<size_t>(row) * n + c0, 0, block, k, &q[static_cast<size_t>(row) * k], 0, c1 - c0);
        } else {
          for (int row = 0; row < m; row += ROW_BLOCK)
            for (int c = c0; c < c1; ++c)
              ggml_vec_dot_i2_i8_s_Nx1(k, out + static_cast<size_t>(row) * n + c, n,
                                       weights[i] + static_cast<size_t>(c) * k / 4, k,
                                       &q[static_cast<size_t>(row) * k], k, ROW_BLOCK);
        }
        for (int row = 0; row < m; ++row)
          for (int c = c0; c < c1; ++c) {
            float& value = out[static_cast<size_t>(row) * n + c];
            value = (value - sums[row]) * steps[row];
          }
      }
      barrier.wait();
    }
  };
  std::vector<std::thread> pool;
  for (int thread = 1; thread < threads; ++thread) pool.emplace_back(work, thread);
  work(0);
  for (std::thread& thread : pool) thread.join();
}
