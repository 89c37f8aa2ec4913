// The slow, obvious version: the reference for all others, and the fallback for CPUs without their instruction sets.
#include <algorithm>
#include <cmath>
#include <limits>

#include "lowbit.h"

namespace diffbit::scalar {
namespace {

constexpr int64_t BLOCK = CACHE_BLOCK;

/// The bits of channel i's code in a packed row that lie in one plane, of `width` bits, which begins at `byte` of a group.
struct Place {
  int64_t byte;
  int shift;
  Place(int64_t i, int64_t group_bytes, int64_t plane_byte, int width)
      : byte(i / BLOCK * group_bytes + plane_byte + i % (4 * width)),
        shift(static_cast<int>(i % BLOCK / (4 * width)) * width) {}
};

/// Calls work(place, width, shift) for each plane of channel i's code: `shift` is where its bits are in the code.
template <int BITS, class Work>
void each_plane(int64_t i, const Work& work) {
  if (BITS == 3) {
    work(Place(i, 12, 0, 2), 2, 0);
    work(Place(i, 12, 8, 1), 1, 2);
  } else {
    work(Place(i, 4 * BITS, 0, BITS), BITS, 0);
  }
}

template <int BITS>
int code(const uint8_t* packed, int64_t i) {
  int code = 0;
  each_plane<BITS>(i, [&](const Place& place, int width, int shift) {
    code |= (packed[place.byte] >> place.shift & ((1 << width) - 1)) << shift;
  });
  return code;
}

template <int BITS>
void put_code(uint8_t* packed, int64_t i, int code) {
  each_plane<BITS>(i, [&](const Place& place, int width, int shift) {
    packed[place.byte] = static_cast<uint8_t>(packed[place.byte] | (code >> shift & ((1 << width) - 1)) << place.shift);
  });
}

float round_row(const float* x, int64_t d, int top, int* codes) {
  float largest = 0;
  bool finite = true;
  for (int64_t i = 0; i < d; ++i) {
    finite = finite && std::isfinite(x[i]);
    largest = std::max(largest, std::fabs(x[i]));
  }
  const float limit = static_cast<float>(top), scale = finite ? largest / limit : std::numeric_limits<float>::quiet_NaN();
  for (int64_t i = 0; i < d; ++i)
    codes[i] = !finite || scale == 0
                   ? 0
                   : static_cast<int>(std::min(limit, std::max(-limit, std::nearbyint(x[i] / scale))));
  return scale;
}

template <int BITS>
void encode(const Half* x, const Half* offset, int64_t n, int64_t d, uint8_t* codes, Half* scales) {
  using Of = Levels<BITS>;
  std::fill(codes, codes + n * (d * BITS / 8), uint8_t{0});
  for (int64_t t = 0; t < n; ++t) {
    float y[ATTENTION_MOST_D];
    int rounded[ATTENTION_MOST_D];
    for (int64_t i = 0; i < d; ++i) y[i] = to_float(x[t * d + i]) - (offset ? to_float(offset[i]) : 0);
    const float unit = round_row(y, d, 127, rounded);
    int64_t energy = 0, with_levels = 0, of_levels = 0;
    for (int64_t i = 0; i < d; ++i) energy += rounded[i] * rounded[i];
    const float factor = std::sqrt(static_cast<float>(d) / static_cast<float>(std::max<int64_t>(1, energy)));
    for (int64_t i = 0; i < d; ++i) {
      const float z = static_cast<float>(rounded[i]) * factor;
      int code = 0;
      for (float threshold : Of::THRESHOLDS) code += z > threshold;
      with_levels += rounded[i] * Of::LEVELS[code], of_levels += Of::LEVELS[code] * Of::LEVELS[code];
      put_code<BITS>(codes + t * (d * BITS / 8), i, code);
    }
    scales[t] = to_half(unit * (static_cast<float>(with_levels) / static_cast<float>(of_levels)));
  }
}

template <int BITS>
void unpack(const uint8_t* codes, int64_t n, int64_t d, int8_t* levels) {
  for (int64_t t = 0; t < n; ++t)
    for (int64_t i = 0; i < d; ++i) *levels++ = Levels<BITS>::LEVELS[code<BITS>(codes + t * (d * BITS / 8), i)];
}

void integer_row_scores(const CacheRows& keys, int64_t n, int64_t d, const float* q, QueryRows rows, int top, float* s,
                        int64_t stride) {
  for (int64_t row = 0; row < rows.end(keys.count - 1); ++row) {
    int codes[ATTENTION_MOST_D];
    const float scale = round_row(q + row * padded(d), d, top, codes);
    const int8_t* from = static_cast<const int8_t*>(keys.rows[row >= rows.count[0]]);
    for (int64_t t = 0; t < n; ++t) {
      int32_t sum = 0;
      for (int64_t i = 0; i < d; ++i) sum += codes[i] * from[t * d + i];
      s[row * stride + t] = static_cast<float>(sum) * scale * keys.scales[row >= rows.count[0]][t];
    }
  }
}

float quantize_query(const float* q, int64_t d, int top, float* codes) {
  int rounded[ATTENTION_MOST_D];
  const float scale = round_row(q, d, top, rounded);
  for (int64_t i = 0; i < d; ++i) codes[i] = static_cast<float>(rounded[i]);
  return scale;
}

}  // namespace

extern const LowBitKernels lowbit = DIFFBIT_LOWBIT_KERNELS;

}  // namespace diffbit::scalar
