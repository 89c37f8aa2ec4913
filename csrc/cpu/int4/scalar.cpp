// The slow, obvious version: the reference for all others, and the fallback for CPUs without their instruction sets.
#include <cmath>
#include <limits>

#include "../half.h"
#include "kernels.h"

namespace diffbit::scalar {
namespace {

void quantize(const void* x, bool half, int64_t k, int64_t groups, int64_t group_size, int32_t minus,
              const Int4Rows& rows) {
  for (int64_t row = 0; row < rows.count; ++row) {
    const auto at = [&](int64_t i) { return i < k ? get(x, half, row * k + i) : 0.0f; };
    for (int64_t g = 0; g < groups; ++g) {
      float largest = 0;
      bool finite = true;
      for (int64_t i = g * group_size; i < (g + 1) * group_size; ++i) {
        const float size = std::fabs(at(i));
        finite = finite && std::isfinite(size);
        if (size > largest) largest = size;
      }
      const bool zero = !finite || largest < INT4_SMALLEST;
      const float inverse = 127 / largest;
      int32_t sum = 0;
      for (int64_t i = 0; i < group_size; ++i) {
        const int q = zero ? 0 : static_cast<int>(std::nearbyint(at(g * group_size + i) * inverse));
        const int64_t step = (g * group_size + i) / INT4_STEP, odd = i % 2, byte = i % INT4_STEP / 2;
        rows.q[((step * 2 + odd) * rows.count + row) * 4 + byte] = static_cast<int8_t>(q);
        sum += q;
      }
      rows.offsets[g * rows.count + row] = minus * sum;
      rows.scales[g * rows.count + row] = !finite ? std::numeric_limits<float>::quiet_NaN() : zero ? 0 : largest / 127;
    }
  }
}

template <int BITS>
void multiply(const Int4Rows& rows, const Int4Weight& weight, int64_t first, int64_t apart, int64_t count, void* y,
              bool half) {
  const int64_t steps = weight.group_size / INT4_STEP;
  for (int64_t tile = first; tile < first + count * apart; tile += apart)
    for (int64_t lane = 0; lane < INT4_TILE; ++lane) {
      const int64_t n = tile * INT4_TILE + lane;
      if (n >= weight.n) break;
      for (int64_t row = 0; row < rows.count; ++row) {
        float result = 0;
        for (int64_t g = 0; g < weight.groups; ++g) {
          const int64_t group = tile * weight.groups + g;
          const int64_t at = (tile * weight.scale_groups + (weight.scale_groups == 1 ? 0 : g)) * INT4_TILE + lane;
          const int32_t offset = rows.offsets[g * rows.count + row];
          int32_t sum = weight.zeros ? weight.zeros[at] * offset : BITS == 4 ? offset : 128 * offset;
          for (int64_t s = 0; s < steps; ++s)
            for (int64_t byte = 0; byte < 4; ++byte) {
              const int8_t* q = rows.q + ((g * steps + s) * 2 * rows.count + row) * 4 + byte;
              const uint8_t* codes = weight.codes + ((group * steps + s) * BITS / 4 * INT4_TILE + lane) * 4 + byte;
              const int32_t even = BITS == 4 ? codes[0] & 15 : codes[0];
              const int32_t odd = BITS == 4 ? codes[0] >> 4 : codes[INT4_TILE * 4];
              sum += even * q[0] + odd * q[rows.count * 4];
            }
          const float scale = to_float(weight.scales[at]) * rows.scales[g * rows.count + row];
          result = std::fma(static_cast<float>(sum), scale, result);
        }
        put(y, half, row * weight.n + n, result * weight.factor);
      }
    }
}

}  // namespace

extern const ManyRowsKernels many_rows = {}, bfloat_rows = {};
extern const Int4Kernels int4 = {4, {0, 2, 1, 1, 1, 0, 0, 0, 0}, quantize, multiply<4>, nullptr};
extern const Int4Kernels int8 = {4, {0, 2, 1, 1, 1, 0, 0, 0, 0}, quantize, multiply<8>, nullptr};

}  // namespace diffbit::scalar
