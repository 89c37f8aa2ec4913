// The slow, obvious version: the reference for all others, and the fallback for CPUs without their instruction sets.
#include <algorithm>
#include <cmath>
#include <limits>

#include "lowbit.h"

namespace diffbit::scalar {
namespace {

constexpr int64_t BLOCK = CACHE_BLOCK;

/// The position of channel i's code in a packed row: its byte, and the field in it.
template <int BITS>
struct Place {
  int64_t byte;
  int shift;
  explicit Place(int64_t i)
      : byte(i / BLOCK * (4 * BITS) + i % (4 * BITS)), shift(static_cast<int>(i % BLOCK / (4 * BITS)) * BITS) {}
};

template <int BITS>
int code(const uint8_t* packed, int64_t i) {
  const Place<BITS> place(i);
  return packed[place.byte] >> place.shift & ((1 << BITS) - 1);
}

template <int BITS>
void put_code(uint8_t* packed, int64_t i, int code) {
  const Place<BITS> place(i);
  packed[place.byte] = static_cast<uint8_t>(packed[place.byte] | code << place.shift);
}

template <int BITS>
void quantize(const Half* x, int64_t d, uint8_t* packed, Half* scales) {
  constexpr float TOP = (1 << BITS) - 1;
  const int64_t bytes = d * BITS / 8;
  std::fill(packed, packed + BLOCK * bytes, uint8_t{0});
  for (int64_t i = 0; i < d; ++i) {
    float least = to_float(x[i]), most = least, poison = 0;
    for (int64_t t = 0; t < BLOCK; ++t) {
      const float one = to_float(x[t * d + i]);
      least = std::min(least, one), most = std::max(most, one);
      poison += one * 0;
    }
    const float zero = least + poison;
    scales[i] = to_half((most - zero) / TOP);
    scales[d + i] = to_half(zero);
    const float scale = to_float(scales[i]), divisor = scale == 0 ? 1 : scale;
    for (int64_t t = 0; t < BLOCK; ++t) {
      const float rounded = std::nearbyint((to_float(x[t * d + i]) - zero) / divisor);
      put_code<BITS>(packed + t * bytes, i, rounded > 0 ? static_cast<int>(std::min(TOP, rounded)) : 0);  // also for a NaN
    }
  }
}

/// Channel i of token t; without scales, its code.
template <int BITS>
float number(const uint8_t* packed, const Half* scales, int64_t d, int64_t t, int64_t i) {
  const float value = static_cast<float>(code<BITS>(packed + t * d * BITS / 8, i));
  const Half* of_block = scales ? scales + t / BLOCK * 2 * d : nullptr;
  return of_block ? value * to_float(of_block[i]) + to_float(of_block[d + i]) : value;
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

/// Rounds the query times the scales of a block of keys, or without them the query itself.
float quantize_with(const float* q, const Half* scales, int key_bits, int64_t d, int top, int* codes, float* offset) {
  float scaled[ATTENTION_MOST_D] = {};
  *offset = 0;
  for (int64_t i = 0; i < d; ++i) {
    scaled[i] = scales ? q[i] * to_float(scales[i]) : q[i];
    if (scales) *offset += q[i] * to_float(scales[d + i]);
  }
  const float scale = round_row(scaled, d, top, codes);
  float lost = 0;
  for (int64_t i = 0; i < d; ++i) lost += scaled[i] - static_cast<float>(codes[i]) * scale;
  if (scales) *offset += middle(key_bits) * lost;
  return scale;
}

template <int BITS>
void scores(const BlockRows& keys, int64_t n, int64_t d, const float* q, QueryRows rows, float* s, int64_t stride) {
  for (int64_t row = 0; row < rows.end(keys.count - 1); ++row)
    for (int64_t t = 0; t < n; ++t) {
      const int64_t j = row >= rows.count[0];
      double sum = 0;
      for (int64_t i = 0; i < d; ++i) sum += q[row * d + i] * number<BITS>(keys.codes[j], keys.scales[j], d, t, i);
      s[row * stride + t] = static_cast<float>(sum);
    }
}

template <int BITS>
void integer_scores(const BlockRows& keys, int64_t n, int64_t d, const float* q, QueryRows rows, int top, float* s,
                    int64_t stride) {
  for (int64_t row = 0; row < rows.end(keys.count - 1); ++row)
    for (int64_t block = 0; block < n / BLOCK; ++block) {
      int codes[ATTENTION_MOST_D];
      float offset;
      const float scale =
          quantize_with(q + row * d, keys.scales[row >= rows.count[0]] + block * 2 * d, BITS, d, top, codes, &offset);
      for (int64_t t = block * BLOCK; t < (block + 1) * BLOCK; ++t) {
        int32_t sum = 0;
        for (int64_t i = 0; i < d; ++i) sum += codes[i] * code<BITS>(keys.codes[row >= rows.count[0]] + t * d * BITS / 8, i);
        s[row * stride + t] = static_cast<float>(sum) * scale + offset;
      }
    }
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

template <int BITS>
void mix(const BlockRows& values, int64_t n, int64_t d, const float* p, int64_t rows, int64_t stride, float* out) {
  for (int64_t j = 0; j < values.count; ++j)
    for (int64_t t = 0; t < n; ++t)
      for (int64_t i = 0; i < d; ++i) {
        const float value = number<BITS>(values.codes[j], values.scales[j], d, t, i);
        for (int64_t row = 0; row < rows; ++row) out[(row * values.count + j) * d + i] += p[row * stride + t] * value;
      }
}

template <int BITS>
void pack_keys(const uint8_t* codes, const Half* scales, int64_t n, int64_t d, float* packed) {
  for (int64_t begin = 0; begin < n; begin += BLOCK)
    for (int64_t i = 0; i < d; ++i)
      for (int64_t t = begin; t < begin + BLOCK; ++t) *packed++ = number<BITS>(codes, scales, d, t, i);
}

template <int BITS>
void unpack_values(const uint8_t* codes, const Half* scales, int64_t n, int64_t d, float* values) {
  for (int64_t t = 0; t < n; ++t)
    for (int64_t i = 0; i < d; ++i) *values++ = number<BITS>(codes, scales, d, t, i);
}

float quantize_query(const float* q, const Half* scales, int key_bits, int64_t d, int top, float* rounded, float* offset) {
  int codes[ATTENTION_MOST_D];
  const float scale = quantize_with(q, scales, key_bits, d, top, codes, offset);
  for (int64_t i = 0; i < d; ++i) rounded[i] = static_cast<float>(codes[i]);
  return scale;
}

}  // namespace

extern const LowBitKernels lowbit = DIFFBIT_LOWBIT_KERNELS;

}  // namespace diffbit::scalar
