// What products of few and of many rows share: rounding of activations in groups, and results at the end of a row.
#pragma once

#include "kernels.h"

#include "../simd/vectors.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

constexpr int64_t LARGEST_GROUP = 128;

/// Rounds `rows` rows of x [rows, k]; put(row, g, bytes, sum, scale) takes each group's int8 [group_size], their sum, and a_g.
template <class T, class Put>
DIFFBIT_INLINE void round_groups_of(const T* x, int64_t k, int64_t groups, int64_t group_size, int64_t rows, const Put& put) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = g * group_size;
      const T* from = x + row * k + begin;
      T part[LARGEST_GROUP];
      if (begin + group_size > k) {
        std::memset(part, 0, sizeof part);
        std::memcpy(part, from, static_cast<size_t>(k - begin) * sizeof(T));
        from = part;
      }
      F32 peak = splat(0.0f), poison = splat(0.0f);  // poison: infinity and NaN times 0 are NaN
      for (int64_t i = 0; i < group_size; i += F32_LANES) {
        const F32 values = load(from + i);
        peak = larger(magnitude(values), peak);
        poison = fma(values, splat(0.0f), poison);
      }
      const float size = largest(peak);
      const bool finite = sum(poison) == 0, zero = !finite || size < INT4_SMALLEST;
      const F32 inverse = splat(zero ? 0.0f : 127 / size);
      int8_t bytes[LARGEST_GROUP];
      F32 total = splat(0.0f);
      if (zero)
        std::memset(bytes, 0, sizeof bytes);
      else
        for (int64_t i = 0; i < group_size; i += F32_LANES) {
          const F32 values = rounded(load(from + i) * inverse);
          store_rounded(bytes + i, values);
          total = total + values;
        }
      put(row, g, bytes, static_cast<int32_t>(sum(total)), !finite ? __builtin_nanf("") : zero ? 0 : size / 127);
    }
}

template <class Put>
void round_groups(const void* x, bool half, int64_t k, int64_t groups, int64_t group_size, int64_t rows, const Put& put) {
  if (half)
    round_groups_of(static_cast<const uint16_t*>(x), k, groups, group_size, rows, put);
  else
    round_groups_of(static_cast<const float*>(x), k, groups, group_size, rows, put);
}

/// Stores F32_LANES numbers, or fewer at the end of the row.
template <class T>
DIFFBIT_INLINE void put(T* to, int64_t room, F32 values) {
  if (room >= F32_LANES) return store(to, values);
  T part[F32_LANES];
  store(part, values);
  if (room > 0) std::memcpy(to, part, static_cast<size_t>(room) * sizeof(T));
}

/// Stores rows [count, columns], `stride` floats apart, in y [.., n] of float or (half) float16, from the row `first` on; y has
/// `room` columns for them.
DIFFBIT_INLINE void put_rows(const float* from, int64_t stride, int64_t count, int64_t columns, void* y, int64_t first, int64_t n,
                             int64_t room, bool half) {
  for (int64_t row = 0; row < count; ++row)
    for (int64_t i = 0; i < columns; i += F32_LANES) {
      const F32 values = load(from + row * stride + i);
      const int64_t at = (first + row) * n + i;
      if (half)
        put(static_cast<uint16_t*>(y) + at, room - i, values);
      else
        put(static_cast<float*>(y) + at, room - i, values);
    }
}

}  // namespace
}  // namespace diffbit::DIFFBIT_ISA
