// The slow, obvious version: the reference for all others, and the fallback for CPUs without their instruction sets.
#include <algorithm>
#include <cmath>
#include <limits>

#include "../half.h"
#include "kernels.h"

namespace diffbit::scalar {
namespace {

int64_t quantized_size(int64_t blocks) { return blocks * TERNARY_BLOCK; }

TernaryRow quantize(const void* x, bool half, int64_t bits, int64_t k, int64_t blocks, int8_t* q) {
  const auto at = [=](int64_t i) { return get(x, half, i); };
  std::fill(q, q + quantized_size(blocks), int8_t{0});
  float largest = 0;
  for (int64_t i = 0; i < k; ++i) {
    // As in float arithmetic, in which such a row becomes NaN
    if (!std::isfinite(at(i))) return {std::numeric_limits<float>::quiet_NaN(), 0};
    largest = std::max(largest, std::fabs(at(i)));
  }
  TernaryRow row = {std::max(largest, 1e-5f) / 127, 0};
  if (bits == 4) {
    const double multiple = largest * (2.0 * static_cast<double>(k));
    double sum = 0;
    for (int64_t i = 0; i < k; ++i) sum += (static_cast<double>(std::fabs(at(i))) + multiple) - multiple;
    row.scale = std::max(static_cast<float>(sum / static_cast<double>(k)), 1e-5f) / 2.6457513f;
  }
  for (int64_t i = 0; i < k; ++i) {
    float value = std::nearbyint(at(i) / row.scale);
    if (bits == 4) value = std::min(std::max(value, -8.0f), 7.0f);
    q[i] = static_cast<int8_t>(value);
    row.sum += q[i];
  }
  return row;
}

void multiply(const TernaryProduct& product, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end) {
  const int64_t width = quantized_size(product.blocks);
  for (int64_t row = row_begin; row < row_end; ++row)
    for (int64_t out = begin; out < end; ++out) {
      const uint8_t* weights = product.packed + out * product.blocks * TERNARY_BLOCK_BYTES;
      int32_t sum = 0;
      for (int64_t i = 0; i < width; ++i) {
        const int64_t block = i / TERNARY_BLOCK, field = i % TERNARY_BLOCK / 32, byte = i % 32;
        const int32_t code = weights[block * TERNARY_BLOCK_BYTES + byte] >> (2 * field) & 3;
        sum += (code - 1) * product.q[row * width + i];
      }
      const float scale = product.scale[product.scale_per_row ? out : 0];
      put(product.y, product.half, row * product.n + out, static_cast<float>(sum) * product.rows[row].scale * scale);
    }
}

}  // namespace

extern const TernaryKernels ternary = {96, quantized_size, quantize, multiply};

}  // namespace diffbit::scalar
