// How tensors lie, where a node's checks and its kernels must agree; ops/ says why. Nothing else is here: kernels are
// compiled once per instruction set and must not share inline functions.
#pragma once

#include <cstdint>

namespace diffbit {

constexpr int64_t TERNARY_BLOCK = 128;       // weights in a block
constexpr int64_t TERNARY_BLOCK_BYTES = 32;  // byte j: weights j, j+32, j+64, j+96 as codes w+1 in its four fields
static_assert(TERNARY_BLOCK == 4 * TERNARY_BLOCK_BYTES, "two bits a weight");

constexpr int64_t INT4_TILE = 16;  // rows of the weight
constexpr int64_t INT4_STEP = 8;   // weights of a row in its four bytes

constexpr int64_t CONV_MOST_WIDTH = 64;  // so that a thread's stack holds the addresses of as many rows

constexpr int64_t SCAN_MOST_STATES = 256;  // so that a GPU's thread has a channel's states

constexpr int64_t CACHE_BLOCK = 32;        // tokens that share a key's scale, channels that share a value's
constexpr int64_t ATTENTION_MOST_D = 512;  // so that one row fits on a thread's stack

}  // namespace diffbit
