// Dot products of a rounded query with 32 rows of packed codes.
//
// A vector of bytes holds several short rows or a part of a long one. The products of a row of the block with u stay in
// separate lanes of a vector, and rounds of pair_sums add them up to 32 sums.
#pragma once

#include "../simd/vectors.h"
#include "lowbit.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

constexpr int64_t L = F32_LANES, BLOCK = CACHE_BLOCK, MOST_D = ATTENTION_MOST_D;
template <int BITS>
constexpr int64_t group_bytes() {
  return BLOCK * BITS / 8;
}

constexpr int64_t PLACES_MOST = 4, ROW_MOST = (MOST_D + WIDTH - 1) / WIDTH * WIDTH;

/// u in the order of the rows' codes: one row of vectors for each field of a byte, repeated if a vector holds several keys.
struct Rounded {
  alignas(64) uint8_t codes[PLACES_MOST * ROW_MOST];
  float scale;
  Ints start;  // initial value of the sums
};

template <int PLACES>
DIFFBIT_INLINE Ints one_vector(const uint8_t* rows, int64_t vectors, const Rounded& u, int index) {
  constexpr int BITS = 8 / PLACES;
  Ints sum = u.start;
  for (int64_t v = 0; v < vectors; ++v) {
    const Bytes bytes = load_bytes(rows + (index * vectors + v) * WIDTH);
    const uint8_t* by = u.codes + v * WIDTH;
    const auto at = [&](int place) { return load_bytes(by + place * vectors * WIDTH); };
    if constexpr (PLACES == 1) {
      sum = dot_signed(sum, bytes, at(0));
    } else {
      const Bytes mask = splat(uint8_t{(1 << BITS) - 1});
      static_assert(dots((1 << BITS) - 1) >= PLACES, "a Partial holds a vector's products");
      Partial partial = partial_of(sum);
      partial = dot(partial, bytes & mask, at(0));
      partial = dot(partial, shift<BITS>(bytes) & mask, at(1));
      if constexpr (PLACES == 4) {
        partial = dot(partial, shift<2 * BITS>(bytes) & mask, at(2));
        partial = dot(partial, shift<3 * BITS>(bytes) & mask, at(3));
      }
      sum = with_partial(sum, partial);
    }
  }
  return sum;
}

template <int PLACES, int DEPTH>
DIFFBIT_INLINE Ints tree(const uint8_t* rows, int64_t vectors, const Rounded& u, int first) {
  if constexpr (DEPTH == 0)
    return one_vector<PLACES>(rows, vectors, u, first);
  else
    return pair_sums(tree<PLACES, DEPTH - 1>(rows, vectors, u, first),
                     tree<PLACES, DEPTH - 1>(rows, vectors, u, first + (1 << (DEPTH - 1))));
}

/// put(t, the dot products of the keys t .. t + WIDTH / 4 with u) for the 32 keys in `rows`.
template <int PLACES, int DEPTH, class Put>
DIFFBIT_INLINE void dots_of_block(const uint8_t* rows, int64_t vectors, const Rounded& u, const Put& put) {
  for (int i = 0; i < static_cast<int>(BLOCK * 4 / WIDTH); ++i)
    put(i * (WIDTH / 4), tree<PLACES, DEPTH>(rows, vectors, u, i << DEPTH));
}

/// The layout of rows of `bytes` bytes in vectors.
struct Layout {
  int64_t bytes, stride;  // of a row; a row is padded unless it divides a vector or consists of whole ones
  explicit Layout(int64_t row) : bytes(row), stride(row) {
    if (row % WIDTH && (WIDTH % row || row < 8)) stride = (row + WIDTH - 1) / WIDTH * WIDTH;
  }
  int64_t vectors() const { return stride < WIDTH ? 1 : stride / WIDTH; }
};

template <int PLACES, class Put>
DIFFBIT_INLINE void dots_of_block(const uint8_t* rows, const Layout& layout, const Rounded& u, const Put& put) {
  switch (layout.stride) {
    case 8: return dots_of_block<PLACES, 1>(rows, 1, u, put);
    case 16: return dots_of_block<PLACES, 2>(rows, 1, u, put);
    case 32:
      if constexpr (WIDTH >= 32) return dots_of_block<PLACES, 3>(rows, 1, u, put);
      break;
    case 64:
      if constexpr (WIDTH >= 64) return dots_of_block<PLACES, 4>(rows, 1, u, put);
      break;
  }
  constexpr int DEPTH = WIDTH == 64 ? 4 : WIDTH == 32 ? 3 : 2;
  dots_of_block<PLACES, DEPTH>(rows, layout.vectors(), u, put);
}

/// `count` of 32 rows, padded as `layout` says; the others are zeros.
DIFFBIT_INLINE const uint8_t* laid_out(const uint8_t* rows, int64_t count, const Layout& layout, uint8_t* padded_rows) {
  if (count == BLOCK && layout.stride == layout.bytes) return rows;
  std::memset(padded_rows, 0, static_cast<size_t>(BLOCK * layout.stride));
  for (int64_t t = 0; t < count; ++t)
    std::memcpy(padded_rows + t * layout.stride, rows + t * layout.bytes, static_cast<size_t>(layout.bytes));
  return padded_rows;
}

/// Codes of the query, from the order of channels to that of the packed rows.
template <int BITS>
DIFFBIT_INLINE void arrange(const int8_t* codes, int64_t d, const Layout& layout, Rounded& u) {
  constexpr int PLACES = 8 / BITS;
  constexpr int64_t BYTES = group_bytes<BITS>();
  const int64_t row = layout.vectors() * WIDTH;
  for (int place = 0; place < PLACES; ++place) {
    uint8_t* to = u.codes + place * row;
    if constexpr (PLACES == 1) {
      std::memcpy(to, codes, static_cast<size_t>(d));
    } else {
      for (int64_t group = 0; group < d / BLOCK; ++group)
        std::memcpy(to + group * BYTES, codes + group * BLOCK + place * BYTES, BYTES);
    }
    for (int64_t i = layout.bytes; i < layout.stride; ++i) to[i] = 0;
    for (int64_t i = layout.stride; i < row; i += layout.stride)
      std::memcpy(to + i, to, static_cast<size_t>(layout.stride));
  }
}

}  // namespace
}  // namespace diffbit::DIFFBIT_ISA
