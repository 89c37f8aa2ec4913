// SHA-256 (FIPS 180-4) of bytes in the module's memory: a browser's own function takes a copy of the whole file.
#include <cstdint>
#include <cstring>

#include "export.h"

namespace {

constexpr uint32_t ROUNDS[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01,
    0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc,
    0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147,
    0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08,
    0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208,
    0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
constexpr uint32_t START[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

constexpr size_t PIECE = 64 << 10;  // bytes per call

uint32_t turned(uint32_t x, int bits) { return x >> bits | x << (32 - bits); }

/// Not inlined: browsers optimize a function between two calls of it, and not while it runs.
__attribute__((noinline)) void add_blocks(uint32_t (&state)[8], const uint8_t* data, size_t blocks) {
  for (; blocks; --blocks, data += 64) {
    uint32_t w[16];
    std::memcpy(w, data, sizeof w);
    for (uint32_t& word : w) word = __builtin_bswap32(word);
    uint32_t s[8];
    std::memcpy(s, state, sizeof s);
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      uint32_t& word = w[i % 16];
      if (i >= 16) {
        const uint32_t a = w[(i + 1) % 16], b = w[(i + 14) % 16];
        word += (turned(a, 7) ^ turned(a, 18) ^ a >> 3) + w[(i + 9) % 16] + (turned(b, 17) ^ turned(b, 19) ^ b >> 10);
      }
      const uint32_t a = s[(64 - i) % 8], b = s[(65 - i) % 8], c = s[(66 - i) % 8], e = s[(68 - i) % 8];
      const uint32_t f = s[(69 - i) % 8], g = s[(70 - i) % 8];
      uint32_t &d = s[(67 - i) % 8], &h = s[(71 - i) % 8];
      const uint32_t first = h + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) + (g ^ (e & (f ^ g))) + ROUNDS[i] + word;
      d += first;
      h = first + (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) + ((a & b) | (c & (a | b)));
    }
    for (int i = 0; i < 8; ++i) state[i] += s[i];
  }
}

}  // namespace

/// Returns the digest's 32 bytes, which the next call overwrites.
EXPORT(sha256) const uint8_t* diffbit_sha256(const uint8_t* data, size_t bytes) {
  uint32_t state[8];
  std::memcpy(state, START, sizeof state);
  const size_t blocks_end = bytes / 64 * 64, rest = bytes - blocks_end;
  for (size_t at = 0; at < blocks_end; at += PIECE)
    add_blocks(state, data + at, (blocks_end - at < PIECE ? blocks_end - at : PIECE) / 64);
  uint8_t last[128] = {};
  std::memcpy(last, data + blocks_end, rest);
  last[rest] = 0x80;
  const size_t size = rest < 56 ? 64 : 128;
  const uint64_t bits = __builtin_bswap64(uint64_t{bytes} * 8);
  std::memcpy(last + size - 8, &bits, 8);
  add_blocks(state, last, size / 64);
  static uint8_t digest[32];
  for (int i = 0; i < 8; ++i) {
    const uint32_t word = __builtin_bswap32(state[i]);
    std::memcpy(digest + 4 * i, &word, 4);
  }
  return digest;
}
