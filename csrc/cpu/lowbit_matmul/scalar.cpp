// The slow, obvious version: the reference for all others, and the fallback for CPUs without their instruction sets.
#include <cmath>

#include "planes.h"

namespace diffbit::scalar {
namespace {

/// Does nothing: `multiply` reads the planes.
void unpack(LowBitWeight&, int64_t, uint8_t*) {}

void multiply(const Int4Rows& rows, const LowBitWeight& weight, int64_t first, int64_t apart, int64_t count, void* y,
              bool half) {
  const int64_t runs = weight.group_size / LOWBIT_RUN;
  for (int64_t tile = first; tile < first + count * apart; tile += apart)
    for (int64_t lane = 0; lane < INT4_TILE; ++lane) {
      const int64_t n = tile * INT4_TILE + lane;
      if (n >= weight.n) break;
      const float row_scale = weight.row_scales ? to_float(weight.row_scales[n]) : 1.0f;
      for (int64_t row = 0; row < rows.count; ++row) {
        float result = 0;
        for (int64_t g = 0; g < weight.groups; ++g) {
          const int64_t group = tile * weight.groups + g;
          const int32_t offset = rows.offsets[g * rows.count + row];
          int32_t sum = offset;
          for (int64_t i = 0; i < runs * LOWBIT_QUADS * 4; ++i) {
            const int64_t run = i / LOWBIT_RUN, quad = i % LOWBIT_RUN / 4, byte = i % 4;
            const uint8_t* planes = weight.codes + (group * runs + run) * weight.bits * LOWBIT_PLANE + lane * 4;
            const int32_t code = weight.map ? trellis_byte_at(weight, n, g * runs + run, quad, byte)
                                            : code_at(planes, weight.bits, quad, byte);
            const int8_t q = rows.q[(((g * runs + run) * LOWBIT_QUADS + quad) * rows.count + row) * 4 + byte];
            sum += (weight.levels && !weight.map && !weight.doubled ? weight.levels[code] : code) * q;
          }
          if (weight.doubled) sum = 2 * sum - offset;
          const float scale = scale_at(weight, group * INT4_TILE + lane) * rows.scales[g * rows.count + row];
          result = std::fma(static_cast<float>(sum), scale, result);
        }
        put(y, half, row * weight.n + n, result * (row_scale * weight.factor));
      }
    }
}

}  // namespace

extern const LowBitMatMulKernels lowbit_matmul = {4, {0, 2, 1, 1, 1, 0, 0, 0, 0}, -128, unpack, multiply, nullptr};

}  // namespace diffbit::scalar
