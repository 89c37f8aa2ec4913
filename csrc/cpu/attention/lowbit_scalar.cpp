// The slow, obvious version: what every other is held against, and what runs on a CPU that has none of their sets.
#include <algorithm>
#include <cmath>
#include <limits>

#include "lowbit.h"

namespace diffbit::scalar {
namespace {

constexpr int64_t GROUP = LOWBIT_GROUP;

/// Where the code of channel i lies in a packed row: its byte, and the place in it.
template <int BITS>
struct Place {
  int64_t byte;
  int shift;
  explicit Place(int64_t i)
      : byte(i / GROUP * (4 * BITS) + i % (4 * BITS)), shift(static_cast<int>(i % GROUP / (4 * BITS)) * BITS) {}
};

template <int BITS>
int code(const uint8_t* packed, int64_t i) {
  const Place<BITS> place(i);
  return packed[place.byte] >> place.shift & ((1 << BITS) - 1);
}

/// One grid: `count` numbers, x(k) the k-th; put(k, code) takes its code.
template <int BITS, class X, class Put>
void round_grid(int64_t count, const X& x, const Put& put, Half* step_half, Half* point_half) {
  constexpr float TOP = (1 << BITS) - 1;
  float least = x(0), most = least, poison = 0;
  for (int64_t k = 0; k < count; ++k) {
    least = std::min(least, x(k)), most = std::max(most, x(k));
    poison += x(k) * 0;
  }
  const float point = least + poison;
  *step_half = to_half((most - point) / TOP);
  *point_half = to_half(point);
  const float step = to_float(*step_half), divisor = step == 0 ? 1 : step;
  for (int64_t k = 0; k < count; ++k) {
    const float rounded = std::nearbyint((x(k) - point) / divisor);
    put(k, rounded > 0 ? static_cast<int>(std::min(TOP, rounded)) : 0);  // 0 for a NaN, too
  }
}

template <int BITS>
void put_code(uint8_t* packed, int64_t i, int code) {
  const Place<BITS> place(i);
  packed[place.byte] = static_cast<uint8_t>(packed[place.byte] | code << place.shift);
}

template <int BITS>
void round_keys(const Half* x, int64_t d, uint8_t* packed, Half* grid) {
  const int64_t bytes = d * BITS / 8;
  std::fill(packed, packed + GROUP * bytes, uint8_t{0});
  for (int64_t i = 0; i < d; ++i)
    round_grid<BITS>(
        GROUP, [&](int64_t t) { return to_float(x[t * d + i]); },
        [&](int64_t t, int code) { put_code<BITS>(packed + t * bytes, i, code); }, grid + i, grid + d + i);
}

template <int BITS>
void round_value(const Half* x, int64_t d, uint8_t* packed, Half* grid) {
  std::fill(packed, packed + d * BITS / 8, uint8_t{0});
  for (int64_t group = 0; group < d / GROUP; ++group)
    round_grid<BITS>(
        GROUP, [&](int64_t k) { return to_float(x[group * GROUP + k]); },
        [&](int64_t k, int code) { put_code<BITS>(packed, group * GROUP + k, code); }, grid + group,
        grid + d / GROUP + group);
}

float round_row(const float* x, int64_t d, int top, int* codes) {
  float largest = 0;
  bool finite = true;
  for (int64_t i = 0; i < d; ++i) {
    finite = finite && std::isfinite(x[i]);
    largest = std::max(largest, std::fabs(x[i]));
  }
  const float limit = static_cast<float>(top), step = finite ? largest / limit : std::numeric_limits<float>::quiet_NaN();
  for (int64_t i = 0; i < d; ++i)
    codes[i] = !finite || step == 0
                   ? 0
                   : static_cast<int>(std::min(limit, std::max(-limit, std::nearbyint(x[i] / step))));
  return step;
}

/// The grid of a block of keys meets the query; without one the query is rounded as it is.
float round_with(const float* q, const Half* grid, int key_bits, int64_t d, int top, int* codes, float* offset) {
  float scaled[ATTENTION_MOST_D] = {};
  *offset = 0;
  for (int64_t i = 0; i < d; ++i) {
    scaled[i] = grid ? q[i] * to_float(grid[i]) : q[i];
    if (grid) *offset += q[i] * to_float(grid[d + i]);
  }
  const float step = round_row(scaled, d, top, codes);
  float lost = 0;
  for (int64_t i = 0; i < d; ++i) lost += scaled[i] - static_cast<float>(codes[i]) * step;
  if (grid) *offset += middle(key_bits) * lost;
  return step;
}

template <int BITS>
void scores(const GridRows& keys, int64_t n, int64_t d, const float* q, int64_t rows, float* s, int64_t stride) {
  for (int64_t row = 0; row < keys.count * rows; ++row)
    for (int64_t t = 0; t < n; ++t) {
      const uint8_t* packed = keys.codes[row / rows] + t * d * BITS / 8;
      const Half* grid = keys.grids[row / rows] + t / GROUP * 2 * d;
      double sum = 0;
      for (int64_t i = 0; i < d; ++i)
        sum += q[row * d + i] *
               (static_cast<float>(code<BITS>(packed, i)) * to_float(grid[i]) + to_float(grid[d + i]));
      s[row * stride + t] = static_cast<float>(sum);
    }
}

template <int BITS>
void integer_scores(const GridRows& keys, int64_t n, int64_t d, const float* q, int64_t rows, int top, float* s,
                    int64_t stride) {
  for (int64_t row = 0; row < keys.count * rows; ++row)
    for (int64_t block = 0; block < n / GROUP; ++block) {
      int codes[ATTENTION_MOST_D];
      float offset;
      const float step =
          round_with(q + row * d, keys.grids[row / rows] + block * 2 * d, BITS, d, top, codes, &offset);
      for (int64_t t = block * GROUP; t < (block + 1) * GROUP; ++t) {
        int32_t sum = 0;
        for (int64_t i = 0; i < d; ++i) sum += codes[i] * code<BITS>(keys.codes[row / rows] + t * d * BITS / 8, i);
        s[row * stride + t] = static_cast<float>(sum) * step + offset;
      }
    }
}

void integer_row_scores(const CacheRows& keys, int64_t n, int64_t d, const float* q, int64_t rows, int top, float* s,
                        int64_t stride) {
  for (int64_t row = 0; row < keys.count * rows; ++row) {
    int codes[ATTENTION_MOST_D];
    const float step = round_row(q + row * padded(d), d, top, codes);
    const int8_t* from = static_cast<const int8_t*>(keys.rows[row / rows]);
    for (int64_t t = 0; t < n; ++t) {
      int32_t sum = 0;
      for (int64_t i = 0; i < d; ++i) sum += codes[i] * from[t * d + i];
      s[row * stride + t] = static_cast<float>(sum) * step * keys.steps[row / rows][t];
    }
  }
}

template <int BITS>
void unpack_values(const uint8_t* packed, const Half* grids, int64_t n, int64_t d, float* values) {
  const int64_t groups = d / GROUP;
  for (int64_t t = 0; t < n; ++t, packed += d * BITS / 8, grids += 2 * groups)
    for (int64_t i = 0; i < d; ++i)
      *values++ = static_cast<float>(code<BITS>(packed, i)) * to_float(grids[i / GROUP]) +
                  to_float(grids[groups + i / GROUP]);
}

template <int BITS>
void mix(const GridRows& values, int64_t n, int64_t d, const float* p, int64_t rows, int64_t stride, float* out) {
  float value[ATTENTION_MOST_D];
  for (int64_t j = 0; j < values.count; ++j)
    for (int64_t t = 0; t < n; ++t) {
      unpack_values<BITS>(values.codes[j] + t * d * BITS / 8, values.grids[j] + t * 2 * (d / GROUP), 1, d, value);
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < d; ++i) out[(row * values.count + j) * d + i] += p[row * stride + t] * value[i];
    }
}

template <int BITS>
void pack_keys(const uint8_t* packed, const Half* grids, int64_t n, int64_t d, float* blocks) {
  for (int64_t begin = 0; begin < n; begin += GROUP)
    for (int64_t i = 0; i < d; ++i)
      for (int64_t t = begin; t < begin + GROUP; ++t) {
        const float number = static_cast<float>(code<BITS>(packed + t * d * BITS / 8, i));
        const Half* grid = grids ? grids + begin / GROUP * 2 * d : nullptr;
        *blocks++ = grid ? number * to_float(grid[i]) + to_float(grid[d + i]) : number;
      }
}

float round_query(const float* q, const Half* grid, int key_bits, int64_t d, int top, float* rounded, float* offset) {
  int codes[ATTENTION_MOST_D];
  const float step = round_with(q, grid, key_bits, d, top, codes, offset);
  for (int64_t i = 0; i < d; ++i) rounded[i] = static_cast<float>(codes[i]);
  return step;
}

}  // namespace

extern const LowBitKernels lowbit = {
    {round_keys<4>, round_keys<2>},
    {round_value<4>, round_value<2>},
    {scores<4>, scores<2>},
    {integer_scores<4>, integer_scores<2>},
    integer_row_scores,
    {mix<4>, mix<2>},
    {pack_keys<4>, pack_keys<2>},
    {unpack_values<4>, unpack_values<2>},
    round_query,
};

}  // namespace diffbit::scalar
