// The slow, obvious version: the reference for all others, and the fallback for CPUs without their instruction sets.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels.h"

namespace diffbit::scalar {
namespace {

float number(const float* rows, const float*, int64_t row, int64_t d, int64_t i) { return rows[row * d + i]; }
float number(const Half* rows, const float*, int64_t row, int64_t d, int64_t i) { return to_float(rows[row * d + i]); }
float number(const int8_t* rows, const float* scales, int64_t row, int64_t d, int64_t i) {
  return static_cast<float>(rows[row * d + i]) * (scales ? scales[row] : 1);
}

void widen(const Half* x, int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = to_float(x[i]);
}

void narrow(const float* x, int64_t n, Half* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = to_half(x[i]);
}

void rotate(const float* x, const float* cos, const float* sin, int64_t d, float scale, float* y) {
  const int64_t half = d / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float low = x[i] * cos[i] - x[i + half] * sin[i], high = x[i + half] * cos[i] + x[i] * sin[i];
    y[i] = low * scale;
    y[i + half] = high * scale;
  }
}

Half quantize(const float* x, int64_t d, int8_t* codes) {
  float largest = 0;
  for (int64_t i = 0; i < d; ++i) largest = std::isnan(x[i]) ? x[i] : std::max(largest, std::fabs(x[i]));
  const float scale = to_float(to_half(largest / 127));
  if (!std::isfinite(scale)) {
    std::fill(codes, codes + d, int8_t{0});
    return to_half(std::numeric_limits<float>::quiet_NaN());
  }
  for (int64_t i = 0; i < d; ++i) {
    const float code = scale == 0 ? 0 : std::nearbyint(x[i] / scale);
    codes[i] = static_cast<int8_t>(std::min(127.0f, std::max(-127.0f, code)));  // the scale is rounded
  }
  return to_half(scale);
}

template <class Cache>
void scores(const CacheRows& keys, int64_t n, int64_t d, const float* q, QueryRows rows, float* s, int64_t stride) {
  for (int64_t j = 0; j < keys.count; ++j)
    for (int64_t row = rows.begin(j); row < rows.end(j); ++row)
      for (int64_t t = 0; t < n; ++t) {
        double sum = 0;  // the reference of the other sets and of the host's check
        for (int64_t i = 0; i < d; ++i) {
          const double key = number(static_cast<const Cache*>(keys.rows[j]), keys.scales[j], t, d, i);
          sum += q[row * padded(d) + i] * key;
        }
        s[row * stride + t] = static_cast<float>(sum);
      }
}

bool hides(const int64_t* mask, int64_t n) { return std::find(mask, mask + n, 0) != mask + n; }

void hide(float* s, const int64_t* mask, int64_t n) {
  for (int64_t t = 0; t < n; ++t)
    if (!mask[t]) s[t] = -std::numeric_limits<float>::infinity();
}

float softmax(float* s, int64_t n, float* sum) {
  float largest = -std::numeric_limits<float>::infinity();
  for (int64_t t = 0; t < n; ++t) largest = std::max(largest, s[t]);
  double total = 0;
  for (int64_t t = 0; t < n; ++t) total += s[t] = std::isinf(s[t]) && s[t] < 0 ? 0 : std::exp(s[t] - largest);
  *sum = static_cast<float>(total);
  return largest;
}

void combine(const float* a, float a_factor, const float* b, float b_factor, int64_t n, float* p) {
  for (int64_t t = 0; t < n; ++t) p[t] = a[t] * a_factor - b[t] * b_factor;
}

template <class Cache>
void mix(const CacheRows& values, int64_t n, int64_t d, const float* p, int64_t rows, int64_t stride, float* out) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t j = 0; j < values.count; ++j) {
      float* sums = out + (row * values.count + j) * padded(d);
      for (int64_t i = 0; i < d; ++i) {
        double sum = sums[i];
        for (int64_t t = 0; t < n; ++t) {
          const double value = number(static_cast<const Cache*>(values.rows[j]), values.scales[j], t, d, i);
          sum += p[row * stride + t] * value;
        }
        sums[i] = static_cast<float>(sum);
      }
    }
}

void finish(const float* parts, int64_t count, int64_t part_stride, int64_t width, int64_t d, float eps, float* out) {
  double squares = 0;
  for (int64_t j = 0; j < width; ++j)
    for (int64_t i = 0; i < d; ++i) {
      float sum = 0;
      for (int64_t part = 0; part < count; ++part) sum += parts[part * part_stride + j * padded(d) + i];
      out[j * d + i] = sum;
      squares += double{sum} * sum;
    }
  if (!(eps > 0)) return;
  const float root = std::sqrt(static_cast<float>(squares / static_cast<double>(width * d)) + eps);
  for (int64_t i = 0; i < width * d; ++i) out[i] /= root;
}

template <class Cache>
void pack_keys(const void* rows, const float* scales, int64_t n, int64_t d, float* packed) {
  for (int64_t begin = 0; begin < n; begin += ATTENTION_KEYS)
    for (int64_t i = 0; i < d; ++i)
      for (int64_t lane = 0; lane < ATTENTION_KEYS; ++lane)
        *packed++ = begin + lane < n ? number(static_cast<const Cache*>(rows), scales, begin + lane, d, i) : 0;
}

template <class Cache>
void unpack_values(const void* rows, const float* scales, int64_t n, int64_t d, float* values) {
  for (int64_t t = 0; t < n; ++t)
    for (int64_t i = 0; i < padded(d); ++i)
      *values++ = i < d ? number(static_cast<const Cache*>(rows), scales, t, d, i) : 0;
}

void packed_scores(const float* packed, int64_t blocks, int64_t d, const float* q, int64_t rows, float* s,
                   int64_t stride) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t t = 0; t < blocks * ATTENTION_KEYS; ++t) {
      const float* key = packed + t / ATTENTION_KEYS * ATTENTION_KEYS * d + t % ATTENTION_KEYS;
      float sum = 0;
      for (int64_t i = 0; i < d; ++i) sum += q[row * padded(d) + i] * key[i * ATTENTION_KEYS];
      s[row * stride + t] = sum;
    }
}

}  // namespace

#define DIFFBIT_SPLIT nullptr
extern const AttentionKernels attention = DIFFBIT_ATTENTION_KERNELS;

}  // namespace diffbit::scalar
