// Kernels that hold the emulation to what CUDA's manual says, and kernels that it must refuse: emulation NAME.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "device.h"

using namespace diffbit::cuda;

namespace {

/// The product of [16, 16] and [16, 8] through shared memory, ldmatrix and mma; b lies as [k, n].
__global__ void product(const __half* a, const __half* b, float* c) {
  __half* tiles = shared_memory<__half>();
  const int lane = static_cast<int>(threadIdx.x);
  copy_async16(tiles + 8 * lane, a + 8 * lane);                               // a: 32 pieces of 8
  copy_async16(tiles + 256 + 8 * (lane % 16), b + 8 * (lane % 16), lane < 32);  // b: 16
  copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  uint32_t left[4], both[4];
  load_matrix_x4(left, tiles + 16 * (lane % 16) + 8 * (lane / 16));
  load_matrix_x4_transposed(both, tiles + 256 + 8 * (lane % 16));  // the second two matrices are the first
  const uint32_t right[2] = {both[0], both[1]};
  float sums[4] = {};
  mma<__half>(sums, left, right);
  const int g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sums[i];
}

bool product_is_right() {
  std::vector<__half> a(256), b(128);
  std::vector<float> c(128, NAN);
  for (int i = 0; i < 256; ++i) a[i] = from_float<__half>(static_cast<float>(i * 7 % 31 - 15));
  for (int i = 0; i < 128; ++i) b[i] = from_float<__half>(static_cast<float>(i * 5 % 23 - 11));
  launch(product, dim3(1), dim3(32), 768, nullptr, a.data(), b.data(), c.data());
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 8; ++n) {
      float sum = 0;
      for (int k = 0; k < 16; ++k) sum += to_float(a[16 * m + k]) * to_float(b[8 * k + n]);
      if (c[8 * m + n] != sum) return false;
    }
  return true;
}

/// int8: a [16, 32], b [8, 32], both with k in a row.
__global__ void product_s8(const int8_t* a, const int8_t* b, int32_t* c) {
  const int lane = static_cast<int>(threadIdx.x), g = lane / 4, t = lane % 4;
  const auto word = [](const int8_t* from) { return *reinterpret_cast<const uint32_t*>(from); };
  const uint32_t left[4] = {word(a + 32 * g + 4 * t), word(a + 32 * (g + 8) + 4 * t), word(a + 32 * g + 16 + 4 * t),
                            word(a + 32 * (g + 8) + 16 + 4 * t)};
  const uint32_t right[2] = {word(b + 32 * g + 4 * t), word(b + 32 * g + 16 + 4 * t)};
  int32_t sums[4] = {};
  mma_s8(sums, left, right);
  for (int i = 0; i < 4; ++i) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sums[i];
}

bool product_s8_is_right() {
  alignas(4) int8_t a[512], b[256];
  int32_t c[128] = {};
  for (int i = 0; i < 512; ++i) a[i] = static_cast<int8_t>(i * 37);
  for (int i = 0; i < 256; ++i) b[i] = static_cast<int8_t>(i * 91 + 5);
  launch(product_s8, dim3(1), dim3(32), 0, nullptr, a, b, c);
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 8; ++n) {
      int32_t sum = 0;
      for (int k = 0; k < 32; ++k) sum += a[32 * m + k] * b[32 * n + k];
      if (c[8 * m + n] != sum) return false;
    }
  return true;
}

/// Sums of a warp, by shuffles within halves of it and then across.
__global__ void sums(const int* x, int* y) {
  int value = x[threadIdx.x];
  for (int with = 8; with; with /= 2) value += __shfl_xor_sync(0xffffffffu, value, with, 16);
  const int other = __shfl_down_sync(0xffffffffu, value, 16);
  if (threadIdx.x == 0) *y = value + other;
}

bool sums_are_right() {
  int x[32], y = 0;
  for (int i = 0; i < 32; ++i) x[i] = i * i;
  launch(sums, dim3(1), dim3(32), 0, nullptr, x, &y);
  return y == 31 * 32 * 63 / 6;
}

/// What a block of 256 threads makes of its neighbours' numbers, with and without the barrier that this needs.
__global__ void neighbours(float* y, bool correctly) {
  float* shared = shared_memory<float>();
  shared[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (correctly) __syncthreads();
  y[threadIdx.x] = shared[(threadIdx.x + 128) % 256];
}

bool neighbours_are_right(bool correctly) {
  std::vector<float> y(256);
  launch(neighbours, dim3(1), dim3(256), 1024, nullptr, y.data(), correctly);
  for (int i = 0; i < 256; ++i)
    if (y[i] != static_cast<float>((i + 128) % 256)) return false;
  return true;
}

/// Reads what is copied before it has waited.
__global__ void early(const float* x, float* y, bool correctly) {
  float* shared = shared_memory<float>();
  copy_async16(shared, x);
  copy_async_commit();
  if (correctly) copy_async_wait<0>();
  y[0] = shared[0];
  copy_async_wait<0>();
}

bool early_is_right(bool correctly) {
  alignas(16) float x[4] = {1, 2, 3, 4}, y = 0;
  launch(early, dim3(1), dim3(1), 16, nullptr, x, &y, correctly);
  return y == 1;
}

__global__ void divergent() {
  if (threadIdx.x < 40) __syncthreads();
}

__global__ void absent() {
  if (threadIdx.x != 3) __shfl_sync(0xffffffffu, 1, 0);
}

__global__ void misaligned(const float* x) { copy_async16(shared_memory<float>(), x + 1); }

/// Launches of one kernel with more shared memory, with less, and with more again: the kernel's limit is set once.
bool limits_are_right() {
  std::vector<float> y(256);
  for (const size_t kilobytes : {64, 49, 99})
    if (launch(neighbours, dim3(1), dim3(256), kilobytes << 10, nullptr, y.data(), true)) return false;
  return y[0] == 128;
}

/// What CUDA would refuse: the kernel was not allowed that much.
void launch_unasked() {
  emulate::run(reinterpret_cast<const void*>(divergent), dim3(1), dim3(1), size_t{64} << 10, [] {});
}

}  // namespace

int main(int, char** arguments) {
  const char* name = arguments[1];
  const auto is = [&](const char* other) { return !std::strcmp(name, other); };
  const auto tell = [](bool right) { return std::puts(right ? "right" : "wrong"), 0; };
  if (is("product")) return tell(product_is_right());
  if (is("product of integers")) return tell(product_s8_is_right());
  if (is("shuffles")) return tell(sums_are_right());
  if (is("barrier")) return tell(neighbours_are_right(true));
  if (is("missing barrier")) return tell(neighbours_are_right(false));
  if (is("copy")) return tell(early_is_right(true));
  if (is("shared memory")) return tell(limits_are_right());
  if (is("early read")) return tell(early_is_right(false));
  alignas(16) static float numbers[8] = {};
  if (is("divergent barrier")) launch(divergent, dim3(1), dim3(64), 0, nullptr);
  if (is("absent lane")) launch(absent, dim3(1), dim3(32), 0, nullptr);
  if (is("misaligned copy")) launch(misaligned, dim3(1), dim3(1), 16, nullptr, numbers);
  if (is("too much memory")) launch(divergent, dim3(1), dim3(32), size_t{100} << 10, nullptr);
  if (is("memory unasked")) launch_unasked();
  return 0;
}
