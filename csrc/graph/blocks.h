// Loops over blocks of integers, which the compiler vectorizes with the instructions of each set: scalar.cpp and vector.cpp include
// them within their unnamed namespaces.

void round_blocks(const float* x, int64_t count, int64_t block, int16_t* rounded, float* scales) {
  for (int64_t begin = 0; begin < count; begin += block, rounded += block, ++scales) {
    const int64_t size = count - begin < block ? count - begin : block;
    float peak = 0;
    for (int64_t i = 0; i < size; ++i) peak = __builtin_fabsf(x[begin + i]) > peak ? __builtin_fabsf(x[begin + i]) : peak;
    *scales = peak / 127;
    const float factor = peak > 0 && peak <= 3e38f ? 1 / *scales : 0;
    if (!(peak <= 3e38f)) *scales = __builtin_nanf("");
    for (int64_t i = 0; i < size; ++i) rounded[i] = static_cast<int16_t>(__builtin_rintf(factor ? x[begin + i] * factor : 0));
    for (int64_t i = size; i < block; ++i) rounded[i] = 0;
  }
}

void unpack(const uint8_t* codes, int bits, int64_t count, int16_t* to) {
  if (bits == 8)
    for (int64_t i = 0; i < count; ++i) to[i] = codes[i];
  if (bits == 4)
    for (int64_t i = 0; i < count / 2; ++i) {
      to[2 * i] = codes[i] & 15;
      to[2 * i + 1] = codes[i] >> 4;
    }
  if (bits == 2)
    for (int64_t i = 0; i < count / 4; ++i)
      for (int j = 0; j < 4; ++j) to[4 * i + j] = codes[i] >> 2 * j & 3;
}

float dot_blocks(const int16_t* x, const float* x_scales, const int16_t* y, const float* y_scales, int64_t blocks, int64_t block) {
  float total = 0;
  for (int64_t b = 0; b < blocks; ++b, x += block, y += block) {
    int32_t sum = 0;
    for (int64_t i = 0; i < block; ++i) sum += x[i] * y[i];
    total += x_scales[b] * y_scales[b] * static_cast<float>(sum);
  }
  return total;
}
