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

/// Quantizes one block of `count` numbers: x(k) is the k-th, put(k, code) receives its code.
template <int BITS, class X, class Put>
void quantize_block(int64_t count, const X& x, const Put& put, Half* scale_half, Half* zero_half) {
  constexpr float TOP = (1 << BITS) - 1;
  float least = x(0), most = least, poison = 0;
  for (int64_t k = 0; k < count; ++k) {
    least = std::min(least, x(k)), most = std::max(most, x(k));
    poison += x(k) * 0;
  }
  const float zero = least + poison;
  *scale_half = to_half((most - zero) / TOP);
  *zero_half = to_half(zero);
  const float scale = to_float(*scale_half), divisor = scale == 0 ? 1 : scale;
  for (int64_t k = 0; k < count; ++k) {
    const float rounded = std::nearbyint((x(k) - zero) / divisor);
    put(k, rounded > 0 ? static_cast<int>(std::min(TOP, rounded)) : 0);  // also 0 for a NaN
  }
}

template <int BITS>
void put_code(uint8_t* packed, int64_t i, int code) {
  const Place<BITS> place(i);
  packed[place.byte] = static_cast<uint8_t>(packed[place.byte] | code << place.shift);
}

template <int BITS>
void quantize_keys(const Half* x, int64_t d, uint8_t* packed, Half* scales) {
  const int64_t bytes = d * BITS / 8;
  std::fill(packed, packed + BLOCK * bytes, uint8_t{0});
  for (int64_t i = 0; i < d; ++i)
    quantize_block<BITS>(
        BLOCK, [&](int64_t t) { return to_float(x[t * d + i]); },
        [&](int64_t t, int code) { put_code<BITS>(packed + t * bytes, i, code); }, scales + i, scales + d + i);
}

template <int BITS>
void quantize_value(const Half* x, int64_t d, uint8_t* packed, Half* scales) {
  std::fill(packed, packed + d * BITS / 8, uint8_t{0});
  for (int64_t group = 0; group < d / BLOCK; ++group)
    quantize_block<BITS>(
        BLOCK, [&](int64_t k) { return to_float(x[group * BLOCK + k]); },
        [&](int64_t k, int code) { put_code<BITS>(packed, group * BLOCK + k, code); }, scales + group,
        scales + d / BLOCK + group);
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
      const uint8_t* packed = keys.codes[row >= rows.count[0]] + t * d * BITS / 8;
      const Half* scales = keys.scales[row >= rows.count[0]] + t / BLOCK * 2 * d;
      double sum = 0;
      for (int64_t i = 0; i < d; ++i)
        sum += q[row * d + i] *
               (static_cast<float>(code<BITS>(packed, i)) * to_float(scales[i]) + to_float(scales[d + i]));
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
void unpack_values(const uint8_t* packed, const Half* scales, int64_t n, int64_t d, float* values) {
  const int64_t groups = d / BLOCK;
  for (int64_t t = 0; t < n; ++t, packed += d * BITS / 8, scales += 2 * groups)
    for (int64_t i = 0; i < d; ++i)
      *values++ = static_cast<float>(code<BITS>(packed, i)) * to_float(scales[i / BLOCK]) +
                  to_float(scales[groups + i / BLOCK]);
}

template <int BITS>
void mix(const BlockRows& values, int64_t n, int64_t d, const float* p, int64_t rows, int64_t stride, float* out) {
  float value[ATTENTION_MOST_D];
  for (int64_t j = 0; j < values.count; ++j)
    for (int64_t t = 0; t < n; ++t) {
      unpack_values<BITS>(values.codes[j] + t * d * BITS / 8, values.scales[j] + t * 2 * (d / BLOCK), 1, d, value);
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < d; ++i) out[(row * values.count + j) * d + i] += p[row * stride + t] * value[i];
    }
}

template <int BITS>
void pack_keys(const uint8_t* packed, const Half* scales, int64_t n, int64_t d, float* blocks) {
  for (int64_t begin = 0; begin < n; begin += BLOCK)
    for (int64_t i = 0; i < d; ++i)
      for (int64_t t = begin; t < begin + BLOCK; ++t) {
        const float number = static_cast<float>(code<BITS>(packed + t * d * BITS / 8, i));
        const Half* of_block = scales ? scales + begin / BLOCK * 2 * d : nullptr;
        *blocks++ = of_block ? number * to_float(of_block[i]) + to_float(of_block[d + i]) : number;
      }
}

float quantize_query(const float* q, const Half* scales, int key_bits, int64_t d, int top, float* rounded, float* offset) {
  int codes[ATTENTION_MOST_D];
  const float scale = quantize_with(q, scales, key_bits, d, top, codes, offset);
  for (int64_t i = 0; i < d; ++i) rounded[i] = static_cast<float>(codes[i]);
  return scale;
}

}  // namespace

extern const LowBitKernels lowbit = {
    {quantize_keys<4>, quantize_keys<2>},
    {quantize_value<4>, quantize_value<2>},
    {scores<4>, scores<2>},
    {integer_scores<4>, integer_scores<2>},
    integer_row_scores,
    {mix<4>, mix<2>},
    {pack_keys<4>, pack_keys<2>},
    {unpack_values<4>, unpack_values<2>},
    quantize_query,
};

}  // namespace diffbit::scalar
