// Hadamard with vectors; compiled once per instruction set.
//
// For pairs within one vector, u + v and u - v are the permuted vector plus the vector with the signs of its v's flipped,
// which gives the same roundings. Pairs further apart are pairs of vectors; two stages at a time load and store four
// vectors only once.
#include "kernels.h"

#include "../simd/vectors.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

static_assert(F32_LANES <= HADAMARD_LANES, "a vector of scratch memory");

/// Returns the vector with the signs of its v's flipped: the lanes whose number has the bit APART.
template <int APART>
DIFFBIT_INLINE F32 turned(F32 a) {
  float signs[F32_LANES];
  for (int i = 0; i < F32_LANES; ++i) signs[i] = i & APART ? -1.0f : 1.0f;
  return a * load(signs);
}

template <int APART>
DIFFBIT_INLINE F32 stage(F32 a) {
  return partners<APART>(a) + turned<APART>(a);
}

/// Computes the stages within a vector, for blocks of `block` numbers.
DIFFBIT_INLINE F32 near_stages(F32 a, int64_t block) {
  if (block > 1) a = stage<1>(a);
  if (block > 2) a = stage<2>(a);
  if (F32_LANES > 4 && block > 4) a = stage<4>(a);
  if (F32_LANES > 8 && block > 8) a = stage<8>(a);
  return a;
}

/// Computes two stages between vectors that are `apart` and 2 * apart numbers from each other.
DIFFBIT_INLINE void two_stages(float* x, int64_t block, int64_t apart) {
  for (int64_t begin = 0; begin < block; begin += 4 * apart)
    for (int64_t i = begin; i < begin + apart; i += F32_LANES) {
      const F32 a = load(x + i), b = load(x + i + apart), c = load(x + i + 2 * apart), d = load(x + i + 3 * apart);
      const F32 ab = a + b, cd = c + d, a_b = a - b, c_d = c - d;
      store(x + i, ab + cd);
      store(x + i + apart, a_b + c_d);
      store(x + i + 2 * apart, ab - cd);
      store(x + i + 3 * apart, a_b - c_d);
    }
}

DIFFBIT_INLINE void one_stage(float* x, int64_t block, int64_t apart) {
  for (int64_t begin = 0; begin < block; begin += 2 * apart)
    for (int64_t i = begin; i < begin + apart; i += F32_LANES) {
      const F32 a = load(x + i), b = load(x + i + apart);
      store(x + i, a + b);
      store(x + i + apart, a - b);
    }
}

/// Transforms the numbers of whole vectors: a block, or as many small ones as a vector holds.
template <class T>
DIFFBIT_INLINE void transform_vectors(const T* x, T* y, int64_t block, int64_t size, float scale, float* floats) {
  if (size == F32_LANES) return store(y, near_stages(load(x), block) * splat(scale));
  for (int64_t i = 0; i < size; i += F32_LANES) store(floats + i, near_stages(load(x + i), block));
  int64_t apart = F32_LANES;
  for (; 2 * apart < block; apart *= 4) two_stages(floats, block, apart);
  if (apart < block) one_stage(floats, block, apart);
  for (int64_t i = 0; i < size; i += F32_LANES) store(y + i, load(floats + i) * splat(scale));
}

template <class T>
void transform(const T* x, T* y, int64_t block, int64_t size, float* floats) {
  const float scale = static_cast<float>(1 / __builtin_sqrt(static_cast<double>(block)));
  const int64_t width = block < F32_LANES ? F32_LANES : block;
  for (; size >= width; x += width, y += width, size -= width) transform_vectors(x, y, block, width, scale, floats);
  if (!size) return;
  T rest[F32_LANES] = {};  // small blocks that fill no vector
  std::memcpy(rest, x, static_cast<size_t>(size) * sizeof(T));
  transform_vectors(rest, rest, block, F32_LANES, scale, floats);
  std::memcpy(y, rest, static_cast<size_t>(size) * sizeof(T));
}

void transform(const void* x, void* y, bool half, int64_t block, int64_t size, float* floats) {
  if (half)
    transform(static_cast<const uint16_t*>(x), static_cast<uint16_t*>(y), block, size, floats);
  else
    transform(static_cast<const float*>(x), static_cast<float*>(y), block, size, floats);
}

}  // namespace

extern const HadamardKernels hadamard = {transform};

}  // namespace diffbit::DIFFBIT_ISA
