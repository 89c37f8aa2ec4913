// AVX-512 with AMX: also eight tiles, registers of 16 rows of 64 bytes, and their products. A product C += A B takes a row of
// A (numbers of one row of activations, four bytes at a time) with a column of B, in which the four bytes that belong
// together are neighbours: row i of B has, for each of 16 columns, numbers 4i .. 4i + 3.
//
//   Tiles          while one lives, tiles have these sizes: 0 to 3 are C, 4 and 5 are A, with rows of `bytes` bytes (at most
//                  64), 6 and 7 are B, with bytes / 4 rows. Tiles are a thread's own
//   clear<T>       sets all numbers of tile T to zero
//   load_tile<T>   reads the rows of tile T, `stride` bytes apart
//   store_tile<T>  writes them
//   add_bytes<C, A, B>    C += A B: int32 sums, which wrap, of products of signed bytes
//   add_bfloats<C, A, B>  the same of bfloat16, two at a time; sums are float32
//
// DIFFBIT_EMULATE_TILES: the same on AVX2, with tiles in memory, so that tests run everywhere and sanitizers see every byte.
#pragma once

#ifdef DIFFBIT_EMULATE_TILES
#include "avx2.h"
#else
#include "avx512vnni.h"
#endif

#define DIFFBIT_MANY_ROWS 24  // for more rows a tile of a weight is unpacked
#define DIFFBIT_TILES

namespace diffbit::DIFFBIT_ISA {
namespace {

constexpr int64_t TILE_ROWS = 16, TILE_BYTES = 64;

#ifdef DIFFBIT_EMULATE_TILES

struct EmulatedTile {
  int64_t rows, bytes;
  char data[TILE_ROWS][TILE_BYTES];
};
thread_local EmulatedTile emulated_tiles[8];

struct Tiles {
  explicit Tiles(int64_t bytes) {
    for (int t = 0; t < 8; ++t) {
      emulated_tiles[t].rows = t < 6 ? TILE_ROWS : bytes / 4;
      emulated_tiles[t].bytes = t == 4 || t == 5 ? bytes : TILE_BYTES;
    }
  }
  ~Tiles() { std::memset(emulated_tiles, 0, sizeof emulated_tiles); }
};
template <int T>
void clear() {
  std::memset(emulated_tiles[T].data, 0, sizeof emulated_tiles[T].data);
}
template <int T>
void load_tile(const void* from, int64_t stride) {
  EmulatedTile& tile = emulated_tiles[T];
  for (int64_t row = 0; row < tile.rows; ++row)
    std::memcpy(tile.data[row], static_cast<const char*>(from) + row * stride, static_cast<size_t>(tile.bytes));
}
template <int T>
void store_tile(void* to, int64_t stride) {
  const EmulatedTile& tile = emulated_tiles[T];
  for (int64_t row = 0; row < tile.rows; ++row)
    std::memcpy(static_cast<char*>(to) + row * stride, tile.data[row], static_cast<size_t>(tile.bytes));
}
// The 16 columns of a row: B's bytes, and the floats of its bfloat16 numbers, are shifted to where C's numbers are
using EmulatedRow = uint32_t __attribute__((vector_size(TILE_BYTES)));
using EmulatedInts = int32_t __attribute__((vector_size(TILE_BYTES)));
using EmulatedFloats = float __attribute__((vector_size(TILE_BYTES)));
template <int T>
EmulatedRow row_of(int64_t row) {
  EmulatedRow columns;
  std::memcpy(&columns, emulated_tiles[T].data[row], sizeof columns);
  return columns;
}
template <int C, int A, int B>
void add_bytes() {
  for (int64_t row = 0; row < TILE_ROWS; ++row) {
    EmulatedRow sums = row_of<C>(row);
    for (int64_t four = 0; four < emulated_tiles[B].rows; ++four)
      for (int i = 0; i < 4; ++i) {
        const auto a = static_cast<signed char>(emulated_tiles[A].data[row][4 * four + i]);
        sums += (EmulatedRow)((EmulatedInts)(row_of<B>(four) << (24 - 8 * i)) >> 24) * static_cast<uint32_t>(a);
      }
    std::memcpy(emulated_tiles[C].data[row], &sums, sizeof sums);
  }
}
template <int C, int A, int B>
void add_bfloats() {
  for (int64_t row = 0; row < TILE_ROWS; ++row) {
    EmulatedFloats first = {}, second = {};  // numbers of pairs are added apart, and then to C
    for (int64_t pair = 0; pair < emulated_tiles[B].rows; ++pair) {
      uint32_t bits;
      std::memcpy(&bits, emulated_tiles[A].data[row] + 4 * pair, 4);
      const EmulatedRow a = EmulatedRow{} + bits, b = row_of<B>(pair);
      first += (EmulatedFloats)(a << 16) * (EmulatedFloats)(b << 16);
      second += (EmulatedFloats)(a & 0xffff0000) * (EmulatedFloats)(b & 0xffff0000);
    }
    const EmulatedFloats all = (EmulatedFloats)row_of<C>(row) + (first + second);
    std::memcpy(emulated_tiles[C].data[row], &all, sizeof all);
  }
}

#else

// In assembly, because GCC 12's _tile_loadconfig reads only eight of the 64 bytes as far as its optimizer knows
struct Tiles {
  explicit Tiles(int64_t bytes) {
    struct {
      uint8_t palette = 1, row = 0, zeros[14] = {};
      uint16_t bytes[16] = {};  // of a row
      uint8_t rows[16] = {};
    } sizes;
    static_assert(sizeof sizes == 64, "as the processor reads it");
    for (int t = 0; t < 8; ++t) {
      sizes.rows[t] = static_cast<uint8_t>(t < 6 ? TILE_ROWS : bytes / 4);
      sizes.bytes[t] = static_cast<uint16_t>(t == 4 || t == 5 ? bytes : TILE_BYTES);
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(sizes));
  }
  ~Tiles() { __asm__ volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};
template <int T>
DIFFBIT_INLINE void clear() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(T));
}
template <int T>
DIFFBIT_INLINE void load_tile(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
DIFFBIT_INLINE void store_tile(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B>
DIFFBIT_INLINE void add_bytes() {
  __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
DIFFBIT_INLINE void add_bfloats() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

#endif

/// Returns the float of a's upper half, a bfloat16.
DIFFBIT_INLINE F32 upper(F32 a) {
  using Each = uint32_t __attribute__((vector_size(WIDTH)));
  return (F32)((Each)a & 0xffff0000);
}
/// Returns a float whose upper half is the bfloat16 nearest to a; of two, the one farther from 0. NaN if a is not finite.
DIFFBIT_INLINE F32 to_upper(F32 a) {
  using Each = uint32_t __attribute__((vector_size(WIDTH)));
  return fma(a, splat(0.0f), (F32)((Each)a + 0x8000));
}
/// Stores the upper halves of 32 floats.
DIFFBIT_INLINE void store_upper(uint16_t* to, const F32 (&a)[32 / F32_LANES]) {
#ifdef DIFFBIT_EMULATE_TILES
  for (int i = 0; i < 32; ++i) std::memcpy(to + i, reinterpret_cast<const char*>(&a) + 4 * i + 2, 2);
#else
  const __m512i numbers = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i odd = _mm512_add_epi32(_mm512_mullo_epi32(numbers, _mm512_set1_epi32(0x40004)), _mm512_set1_epi32(0x30001));
  _mm512_storeu_si512(to, _mm512_permutex2var_epi16(_mm512_castps_si512(a[0]), odd, _mm512_castps_si512(a[1])));
#endif
}
/// Returns in each lane the upper halves of a and b.
DIFFBIT_INLINE F32 upper_pairs(F32 a, F32 b) {
  using Each = uint32_t __attribute__((vector_size(WIDTH)));
  return (F32)((Each)a >> 16 | ((Each)b & 0xffff0000));
}

DIFFBIT_INLINE Ints load_ints(const int32_t* from) { return {load_bytes(from).v}; }

/// Sets to[i] = bytes begin + 4i .. of each of 16 rows, for i < bytes / 4; there are 64, or `bytes` of them.
DIFFBIT_INLINE void transpose_fours(const uint8_t* const (&rows)[TILE_ROWS], int64_t begin, int64_t bytes, uint8_t* to) {
#ifndef DIFFBIT_EMULATE_TILES
  if (bytes == TILE_BYTES) {
    __m512i a[16], b[16];
    DIFFBIT_UNROLL for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + begin);
    DIFFBIT_UNROLL for (int i = 0; i < 16; i += 2) {
      b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    DIFFBIT_UNROLL for (int i = 0; i < 16; i += 4)
      DIFFBIT_UNROLL for (int j = 0; j < 2; ++j) {
        a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
        a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
      }
    DIFFBIT_UNROLL for (int j = 0; j < 4; ++j) {  // a[4i + j]: of rows 4i .. 4i + 3, number j of each quarter
      const __m512i even[2] = {_mm512_shuffle_i32x4(a[j], a[4 + j], 0x88), _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88)};
      const __m512i odd[2] = {_mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd), _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd)};
      _mm512_storeu_si512(to + j * 64, _mm512_shuffle_i32x4(even[0], even[1], 0x88));
      _mm512_storeu_si512(to + (4 + j) * 64, _mm512_shuffle_i32x4(odd[0], odd[1], 0x88));
      _mm512_storeu_si512(to + (8 + j) * 64, _mm512_shuffle_i32x4(even[0], even[1], 0xdd));
      _mm512_storeu_si512(to + (12 + j) * 64, _mm512_shuffle_i32x4(odd[0], odd[1], 0xdd));
    }
    return;
  }
#endif
  for (int64_t i = 0; i < bytes; i += 4)
    for (int64_t row = 0; row < TILE_ROWS; ++row) std::memcpy(to + i * TILE_ROWS + 4 * row, rows[row] + begin + i, 4);
}

}  // namespace
}  // namespace diffbit::DIFFBIT_ISA
