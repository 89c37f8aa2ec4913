// float16 (as 16 bits) without a special instruction set.
#pragma once

#include <cstdint>
#include <cstring>

namespace diffbit {

using Half = uint16_t;

inline float to_float(Half half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, magnitude = half & 0x7fff;
  uint32_t bits;
  if (magnitude >= 0x7c00) {  // infinity, NaN
    bits = 0x7f800000 | (magnitude & 0x3ff) << 13;
  } else if (magnitude >= 0x400) {
    bits = (magnitude << 13) + (112u << 23);
  } else {  // zero and subnormals: magnitude * 2^-24, exact in float
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    std::memcpy(&bits, &value, 4);
  }
  bits |= sign;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

/// Rounds halves to even; numbers that are too large become infinity.
inline Half to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const Half sign = static_cast<Half>(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x47800000) return sign | 0x7c00;
  if (bits < 0x38800000) {  // a subnormal half: adding 0.5 lets the addition round at the right place
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return sign | static_cast<Half>(bits - 0x3f000000);
  }
  bits += 0xfff + (bits >> 13 & 1);
  return sign | static_cast<Half>((bits >> 13) - (112u << 10));
}

/// Returns number i of `from`, floats or (half) float16.
inline float get(const void* from, bool half, int64_t i) {
  return half ? to_float(static_cast<const Half*>(from)[i]) : static_cast<const float*>(from)[i];
}
inline void put(void* to, bool half, int64_t i, float x) {
  if (half)
    static_cast<Half*>(to)[i] = to_half(x);
  else
    static_cast<float*>(to)[i] = x;
}

}  // namespace diffbit
