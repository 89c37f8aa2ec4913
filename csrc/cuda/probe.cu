// Not part of the library: CMake compiles this to see whether nvcc supports an architecture and the features we use.
#include "device.h"

using namespace diffbit::cuda;

__global__ void probe(const uint32_t* from, float* to) {
  uint32_t a[4];
  float sums[4] = {};
  int32_t integers[4] = {};
  const uint4 words = load_streaming(from + 4 * threadIdx.x);
  const uint32_t b[2] = {words.x, words.y};
  copy_async16(shared_memory<uint32_t>() + 4 * threadIdx.x, from);
  copy_async_commit();
  copy_async_wait<0>();
  barrier(1, 32);
  load_matrix_x4(a, shared_memory<uint32_t>());
  mma<__half>(sums, a, b);
  mma<__nv_bfloat16>(sums, a, b);
  mma_s8(integers, a, b);
  to[threadIdx.x] = exp2_approx(sums[0]) + static_cast<float>(__reduce_add_sync(0xffffffffu, integers[0]));
}
