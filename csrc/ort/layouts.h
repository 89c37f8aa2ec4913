// Memory layouts of tensors on which a node's checks and its kernels must agree; ops/ explains them. This file has only
// constants, because kernels are compiled once per instruction set and must not share inline functions.
#pragma once

#include <cstdint>

namespace diffbit {

constexpr int64_t TERNARY_BLOCK = 128;       // weights in a block
constexpr int64_t TERNARY_BLOCK_BYTES = 32;  // byte j has weights j, j+32, j+64, j+96 as codes w+1 in its four fields
static_assert(TERNARY_BLOCK == 4 * TERNARY_BLOCK_BYTES, "two bits a weight");

constexpr int64_t INT4_TILE = 16;  // rows of the weight
constexpr int64_t INT4_STEP = 8;   // weights of a row in its four bytes

constexpr int64_t LOWBIT_RUN = 32;    // weights of a row in a run
constexpr int64_t LOWBIT_QUADS = 8;   // of a run: four weights whose bits are fields of the same four bytes
constexpr int64_t LOWBIT_PLANE = 64;  // bytes: four for each row of a tile; a run has as many planes as a weight has bits

constexpr int64_t TRELLIS_ROWS = 64;       // of a ring of trellis codes
constexpr int64_t TRELLIS_MAP = 8;         // numbers, of the bits of a window
constexpr int64_t TRELLIS_TABLE_BITS = 5;  // of codes up to which there is a table of levels
/// Returns the bits of an index that a window decides.
constexpr int64_t trellis_subset_bits(int64_t bits) { return bits == 2 ? 4 : bits == 5 ? 2 : 3; }
/// Returns the size of the input `levels`.
constexpr int64_t trellis_levels(int64_t bits) {
  return TRELLIS_MAP + (bits > TRELLIS_TABLE_BITS ? 0 : int64_t{1} << (bits - 2 + trellis_subset_bits(bits)));
}

constexpr int64_t CONV_MOST_WIDTH = 64;  // limit, because a thread's stack holds the addresses of that many rows

constexpr int64_t SCAN_MOST_STATES = 256;  // limit, because a GPU thread keeps a channel's states

constexpr int64_t CACHE_BLOCK = 32;        // tokens that leave the residual window of a low-bit cache together
constexpr int64_t OFFSET_BEGIN = 16, OFFSET_TOKENS = 16;  // tokens whose mean is the offset of a low-bit cache's keys
constexpr int64_t MAX_FIRST = 16;  // tokens that a low-bit cache keeps in float16
constexpr int64_t ATTENTION_MOST_D = 512;  // limit, because a row must fit on a thread's stack

}  // namespace diffbit
