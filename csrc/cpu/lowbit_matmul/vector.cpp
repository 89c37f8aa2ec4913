// LowBitMatMul with vectors; compiled once per instruction set. Like cpu/int4/vector.cpp, but for the codes: a vector of WIDTH
// bytes of a plane has bits of eight, four or two quads of each of WIDTH / 4 rows, so a quad's codes are put together from one or
// two planes. Levels of a table are looked up with a shuffle of bytes. For many rows of activations a tile is unpacked once, to a
// byte for each code or level.
#include "kernels.h"

#include <cstring>
#include <vector>

#include "../simd/vectors.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

constexpr int VECTORS = LOWBIT_PLANE / WIDTH;
constexpr int64_t AHEAD = 4096;  // bytes to prefetch
constexpr int MOST_ROWS = INT4_ROWS;
constexpr int streams_of(int rows) { return rows <= INT4_TWO_TILES ? 2 : 1; }

// How codes are stored, in planes or (BITS 8) in bytes, and what is multiplied: codes of TOP bits, or levels
template <int BITS_, int TOP_, bool DOUBLED_ = false>
struct Kind {
  static constexpr int BITS = BITS_, TOP = TOP_;
  static constexpr bool DOUBLED = DOUBLED_;
};
constexpr int LEVELS = 8;

/// Returns field `quad` of the fields of WIDE bits whose planes begin at `planes`, with its lowest bit at TO.
template <int WIDE, int TO>
DIFFBIT_INLINE Bytes field(const uint8_t* planes, int quad) {
  const Bytes plane = load_bytes(planes + quad * WIDE / 8 * LOWBIT_PLANE);
  const Bytes mask = splat(static_cast<uint8_t>(((1 << WIDE) - 1) << TO));
  switch (quad * WIDE % 8 - TO) {
    case 7: return shift<7>(plane) & mask;
    case 6: return shift<6>(plane) & mask;
    case 5: return shift<5>(plane) & mask;
    case 4: return shift<4>(plane) & mask;
    case 3: return shift<3>(plane) & mask;
    case 2: return shift<2>(plane) & mask;
    case 1: return shift<1>(plane) & mask;
    case 0: return plane & mask;
    case -1: return shift<-1>(plane) & mask;
    case -2: return shift<-2>(plane) & mask;
    case -3: return shift<-3>(plane) & mask;
    default: return shift<-4>(plane) & mask;
  }
}

/// Returns the codes of a quad.
template <int BITS>
DIFFBIT_INLINE Bytes codes_of(const uint8_t* run, int quad) {
  constexpr int LOW = BITS == 1 ? 1 : BITS < 4 ? 2 : 4, HIGH = BITS - LOW;
  if constexpr (BITS == 8)
    return load_bytes(run + quad * LOWBIT_PLANE);
  else if constexpr (HIGH == 0)
    return field<LOW, 0>(run, quad);
  else
    return field<LOW, 0>(run, quad) | field<HIGH, LOW>(run + LOW * LOWBIT_PLANE, quad);
}

/// Returns the levels less BYTE_MIDDLE, for `lookup`.
Bytes table_of(const uint8_t* levels, int64_t bits) {
  uint8_t bytes[16] = {};
  for (int i = 0; i < 1 << bits; ++i) bytes[i] = levels[i] ^ BYTE_MIDDLE;
  return load_table(bytes);
}

template <class Kind, bool UNPACKED, int TILES, int ROWS>
void tiles(const Int4Rows& rows, const LowBitWeight& weight, int64_t first, int64_t apart, void* y, bool half) {
  constexpr int BITS = Kind::BITS, MOST = (1 << Kind::TOP) - 1;
  constexpr bool TABLE = Kind::TOP == LEVELS;
  constexpr int QUADS = TABLE || dots(MOST) >= 8 ? 8 : dots(MOST) >= 4 ? 4 : 2;  // between flushes of Partials
  const int64_t runs = weight.group_size / LOWBIT_RUN;
  [[maybe_unused]] Bytes table;
  if (TABLE && BITS < 8) table = table_of(weight.levels, BITS);
  const uint8_t* codes[TILES];
  const char* scales[TILES];
  const int64_t scale_bytes = weight.int8_scales ? INT4_TILE : 2 * INT4_TILE;
  F32 results[TILES][ROWS][VECTORS];
  DIFFBIT_UNROLL
  for (int t = 0; t < TILES; ++t) {
    const int64_t group = (first + t * apart) * weight.groups;
    codes[t] = UNPACKED ? weight.unpacked : weight.codes + group * runs * BITS * LOWBIT_PLANE;
    scales[t] = static_cast<const char*>(weight.scales) + group * scale_bytes;
    DIFFBIT_UNROLL
    for (int r = 0; r < ROWS; ++r)
      DIFFBIT_UNROLL
      for (int v = 0; v < VECTORS; ++v) results[t][r][v] = splat(0.0f);
  }
  const int8_t* q = rows.q;
  const int32_t* offsets = rows.offsets;
  const float* row_scales = rows.scales;
  for (int64_t g = 0; g < weight.groups; ++g, offsets += ROWS, row_scales += ROWS) {
    Ints sums[TILES][ROWS][VECTORS];
    DIFFBIT_UNROLL
    for (int t = 0; t < TILES; ++t)
      DIFFBIT_UNROLL
      for (int r = 0; r < ROWS; ++r)
        DIFFBIT_UNROLL
        for (int v = 0; v < VECTORS; ++v) sums[t][r][v] = splat_int(offsets[r]);
    for (int64_t run = 0; run < runs; ++run) {
      DIFFBIT_UNROLL
      for (int t = 0; t < TILES; ++t)
        DIFFBIT_UNROLL
        for (int plane = 0; BITS < 8 && plane < BITS; ++plane) prefetch(codes[t] + plane * LOWBIT_PLANE + AHEAD);
      DIFFBIT_UNROLL
      for (int begin = 0; begin < LOWBIT_QUADS; begin += QUADS) {
        Partial partial[TILES][ROWS][VECTORS];
        DIFFBIT_UNROLL
        for (int t = 0; t < TILES; ++t)
          DIFFBIT_UNROLL
          for (int r = 0; r < ROWS; ++r)
            DIFFBIT_UNROLL
            for (int v = 0; v < VECTORS; ++v) partial[t][r][v] = partial_of(sums[t][r][v]);
        DIFFBIT_UNROLL
        for (int quad = begin; quad < begin + QUADS; ++quad) {
          DIFFBIT_UNROLL
          for (int t = 0; t < TILES; ++t) {
            Bytes weights[VECTORS];
            DIFFBIT_UNROLL
            for (int v = 0; v < VECTORS; ++v) {
              weights[v] = codes_of<BITS>(codes[t] + v * WIDTH, quad);
              if (TABLE && BITS < 8) weights[v] = lookup(table, weights[v]);
            }
            DIFFBIT_UNROLL
            for (int r = 0; r < ROWS; ++r) {
              const auto four = splat4(q + 4 * r);
              DIFFBIT_UNROLL
              for (int v = 0; v < VECTORS; ++v) {
                if constexpr (TABLE) {
                  sums[t][r][v] = dot_centered(sums[t][r][v], weights[v], four);
                } else {
                  partial[t][r][v] = dot(partial[t][r][v], weights[v], four);
                  in_order(partial[t][r][v]);
                }
              }
            }
          }
          q += 4 * ROWS;
        }
        if constexpr (!TABLE)
          DIFFBIT_UNROLL
          for (int t = 0; t < TILES; ++t)
            DIFFBIT_UNROLL
            for (int r = 0; r < ROWS; ++r)
              DIFFBIT_UNROLL
              for (int v = 0; v < VECTORS; ++v) sums[t][r][v] = with_partial(sums[t][r][v], partial[t][r][v]);
      }
      DIFFBIT_UNROLL
      for (int t = 0; t < TILES; ++t) codes[t] += BITS * LOWBIT_PLANE;
    }
    DIFFBIT_UNROLL
    for (int t = 0; t < TILES; ++t) {
      prefetch(scales[t] + AHEAD / 16);
      DIFFBIT_UNROLL
      for (int v = 0; v < VECTORS; ++v) {
        const F32 scale = weight.int8_scales ? load(reinterpret_cast<const int8_t*>(scales[t]) + v * F32_LANES)
                                             : load(reinterpret_cast<const uint16_t*>(scales[t]) + v * F32_LANES);
        DIFFBIT_UNROLL
        for (int r = 0; r < ROWS; ++r) {
          Ints sum = sums[t][r][v];
          if constexpr (Kind::DOUBLED) sum = sum + sum + splat_int(-offsets[r]);
          results[t][r][v] = fma(to_floats(sum), scale * splat(row_scales[r]), results[t][r][v]);
        }
      }
      scales[t] += scale_bytes;
    }
  }
  float totals[TILES][ROWS][INT4_TILE];  // or GCC would store the results after every group
  DIFFBIT_UNROLL
  for (int t = 0; t < TILES; ++t)
    DIFFBIT_UNROLL
    for (int r = 0; r < ROWS; ++r)
      DIFFBIT_UNROLL
      for (int v = 0; v < VECTORS; ++v) store(totals[t][r] + v * F32_LANES, results[t][r][v]);
  for (int t = 0; t < TILES; ++t)
    for (int v = 0; v < VECTORS; ++v) {
      const int64_t column = (first + t * apart) * INT4_TILE + v * F32_LANES, room = weight.n - column;
      if (room <= 0) continue;
      const F32 row_scale = weight.row_scales ? load(weight.row_scales + column) : splat(1.0f);
      for (int r = 0; r < ROWS; ++r) {
        const F32 values = load(totals[t][r] + v * F32_LANES) * (row_scale * splat(weight.factor));
        const auto put = [&](auto* to) { room < F32_LANES ? store_part(to, room, values) : store(to, values); };
        if (half)
          put(static_cast<uint16_t*>(y) + r * weight.n + column);
        else
          put(static_cast<float*>(y) + r * weight.n + column);
      }
    }
}

/// Multiplies, with few rows, streams_of(rows) tiles at a time; of an unpacked weight, one.
template <class Kind, bool UNPACKED, int ROWS>
void multiply_rows(const Int4Rows& rows, const LowBitWeight& weight, int64_t first, int64_t apart, int64_t count, void* y,
                   bool half) {
  constexpr int STREAMS = UNPACKED ? 1 : streams_of(ROWS);
  if (count == STREAMS) return tiles<Kind, UNPACKED, STREAMS, ROWS>(rows, weight, first, apart, y, half);
  for (int64_t i = 0; i < count; ++i) tiles<Kind, UNPACKED, 1, ROWS>(rows, weight, first + i * apart, 0, y, half);
}

/// Calls multiply_rows<Kind, UNPACKED, rows.count>, for 1 to ROWS rows.
template <class Kind, bool UNPACKED, int ROWS>
void multiply_rows_of(const Int4Rows& rows, const LowBitWeight& weight, int64_t first, int64_t apart, int64_t count,
                      void* y, bool half) {
  if constexpr (ROWS > 1)
    if (rows.count < ROWS)
      return multiply_rows_of<Kind, UNPACKED, ROWS - 1>(rows, weight, first, apart, count, y, half);
  multiply_rows<Kind, UNPACKED, ROWS>(rows, weight, first, apart, count, y, half);
}

/// The tables of trellis codes (ops/trellis.py), as `lookup` takes them. A lane's history is a nibble, of the bits u of its four
/// tiles. A weight depends on those of three lanes, so x is the sum over GF(2) of what a table for each says; the code's other
/// bits a turn x around for negative weights, and complete the place of the level.
template <int BITS>
struct Trellis {
  static constexpr int SUBSET_BITS = trellis_subset_bits(BITS);
  static constexpr bool TABLE = BITS <= TRELLIS_TABLE_BITS;
  static constexpr int HALF = 1 << (BITS - 2 + SUBSET_BITS), PIECES = TABLE ? HALF / 16 : 1;  // of levels
  static constexpr int TOP = BITS - 1;  // bits a
  Bytes now[LOWBIT_RING], before[LOWBIT_RING], older[LOWBIT_RING], place, sign, levels[PIECES];

  explicit Trellis(const LowBitWeight& weight) {
    for (int tile = 0; tile < LOWBIT_RING; ++tile) {
      uint8_t tables[3][16] = {};
      for (int lane = 0; lane < 3; ++lane)
        for (int history = 0; history < 16; ++history)
          for (int other = 0; other < LOWBIT_RING; ++other) {
            const int ago = tile + LOWBIT_RING * lane - other;
            if (history >> other & 1 && ago >= 0 && ago < TRELLIS_MAP) tables[lane][history] ^= weight.map[ago];
          }
      now[tile] = load_table(tables[0]), before[tile] = load_table(tables[1]), older[tile] = load_table(tables[2]);
    }
    uint8_t places[16] = {}, signs[16] = {};
    for (int a = 0; TABLE && a < 16; ++a) {
      const int at = (a & ((1 << TOP) - 1)) << SUBSET_BITS;
      signs[a] = at < HALF ? 255 : PLUS;
      places[a] = static_cast<uint8_t>(at < HALF ? HALF - 1 - at : at - HALF);
    }
    place = load_table(places), sign = load_table(signs);
    for (int piece = 0; TABLE && piece < PIECES; ++piece) {
      uint8_t bytes[16];
      for (int i = 0; i < 16; ++i) bytes[i] = weight.levels[16 * piece + i];
      if (LOOKUP_WRAPS && piece)
        for (int i = 0; i < 16; ++i) bytes[i] ^= weight.levels[16 * (piece - 1) + i];
      levels[piece] = load_table(bytes);
    }
  }

  /// Returns x, from the histories of a lane and the two before it.
  DIFFBIT_INLINE Bytes subset(int tile, Bytes history, Bytes last, Bytes oldest) const {
    Bytes x = lookup(now[tile], history) ^ lookup(before[tile], last);
    return tile < LOWBIT_RING - 1 ? x ^ lookup(older[tile], oldest) : x;
  }

  DIFFBIT_INLINE Bytes magnitude_at(Bytes at) const {
    Bytes result = lookup(levels[0], at);
    DIFFBIT_UNROLL
    for (int piece = 1; piece < PIECES; ++piece)
      result = result ^ lookup(levels[piece], minus(at, splat(static_cast<uint8_t>(16 * piece))));
    return result;
  }
};

/// Returns the bits a of a quad; up to 4 bits, others may be set that `lookup` of the tables place and sign does not see.
template <int BITS>
DIFFBIT_INLINE Bytes upper_of(const uint8_t* run, int quad) {
  constexpr int LOW = BITS < 4 ? 2 : 4;
  if constexpr (BITS >= 5) {
    const Bytes low = field<4, 0>(run, quad);
    if constexpr (BITS == 5) return low;
    const Bytes plane = load_bytes(run + (LOW + quad / 4) * LOWBIT_PLANE), top = splat(uint8_t{16});
    switch (quad % 4) {
      case 0: return low | (shift<-4>(plane) & top);
      case 1: return low | (shift<-2>(plane) & top);
      case 2: return low | (plane & top);
      default: return low | (shift<2>(plane) & top);
    }
  }
  // What is left of a plane is the same for several quads
  const Bytes plane = load_bytes(run + quad * LOW / 8 * LOWBIT_PLANE);
  Bytes a;
  if constexpr (BITS == 2) {
    const Bytes kept = plane & splat(uint8_t{0x55});
    a = quad % 4 == 0 ? kept : quad % 4 == 1 ? shift<2>(kept) : quad % 4 == 2 ? shift<4>(kept) : shift<6>(kept);
  } else if constexpr (BITS == 3) {
    const Bytes kept = (quad % 2 ? shift<2>(plane) : plane) & splat(uint8_t{0x33});
    a = quad % 4 < 2 ? kept : shift<4>(kept);
  } else {
    const Bytes kept = plane & splat(uint8_t{0x77});
    a = quad % 2 ? shift<4>(kept) : kept;
  }
  return LOOKUP_WRAPS ? a : a & splat(uint8_t{15});
}

constexpr int HISTORY = 8 + LOWBIT_PLANE;  // bytes, of two lanes that are the last, too, and of all

/// Writes the histories of the quads of a run.
template <int BITS>
DIFFBIT_INLINE void histories(const uint8_t* codes, int64_t apart, uint8_t (*to)[HISTORY]) {
  const auto put = [&](int quad, int v, Bytes both, int next) {  // the nibbles of two quads
    const Bytes nibble = splat(uint8_t{15});
    store(to[quad] + 8 + v * WIDTH, both & nibble);
    store(to[next] + 8 + v * WIDTH, shift<4>(both) & nibble);
  };
  DIFFBIT_UNROLL
  for (int v = 0; v < VECTORS; ++v) {
    const uint8_t* at = codes + v * WIDTH;
    if constexpr (BITS == 4) {
      const Bytes mask = splat(uint8_t{0x88});
      DIFFBIT_UNROLL
      for (int plane = 0; plane < 4; ++plane, at += LOWBIT_PLANE) {
        const Bytes low = shift<3>(load_bytes(at) & mask) | shift<2>(load_bytes(at + apart) & mask);
        put(2 * plane, v, low | shift<1>(load_bytes(at + 2 * apart) & mask) | (load_bytes(at + 3 * apart) & mask), 2 * plane + 1);
      }
    } else {
      constexpr int FIRST = BITS == 2 ? 0 : BITS == 3 ? 2 : 4, WIDE = BITS == 2 || BITS == 6 ? 2 : 1;
      const Bytes odd = splat(uint8_t{0xaa}), even = splat(uint8_t{0x55}), two = splat(uint8_t{0x33}), upper = splat(uint8_t{0xcc});
      at += FIRST * LOWBIT_PLANE;
      // pairs of tiles, then all four: of fields that are two bits apart
      const auto put_four = [&](int quad, int step, Bytes first, Bytes second) {
        put(quad, v, (first & two) | shift<-2>(second & two), quad + 2 * step);
        put(quad + step, v, (shift<2>(first) & two) | (second & upper), quad + 3 * step);
      };
      DIFFBIT_UNROLL
      for (int plane = 0; plane < WIDE; ++plane, at += LOWBIT_PLANE) {
        const Bytes tile[4] = {load_bytes(at), load_bytes(at + apart), load_bytes(at + 2 * apart), load_bytes(at + 3 * apart)};
        const auto odds = [&](int i) { return (shift<1>(tile[i]) & even) | (tile[i + 1] & odd); };
        const auto evens = [&](int i) { return (tile[i] & even) | shift<-1>(tile[i + 1] & even); };
        if (WIDE == 2) {
          put_four(4 * plane, 1, odds(0), odds(2));
        } else {
          put_four(0, 2, evens(0), evens(2));
          put_four(1, 2, odds(0), odds(2));
        }
      }
    }
  }
  DIFFBIT_UNROLL
  for (int quad = 0; quad < LOWBIT_QUADS; ++quad) std::memcpy(to[quad], to[quad] + LOWBIT_PLANE, 8);
}

/// Calls each(tile, quad, v, weights) for a run of a ring, whose tiles begin at codes + tile * apart.
template <int BITS, class Each>
DIFFBIT_INLINE void decode_run(const Trellis<BITS>& trellis, const uint8_t* codes, int64_t apart,
                               const uint8_t (*history)[HISTORY], const Each& each) {
  for (int v = 0; v < VECTORS; ++v)
    DIFFBIT_UNROLL
    for (int quad = 0; quad < LOWBIT_QUADS; ++quad) {
      const uint8_t* at = history[quad] + v * WIDTH;
      const Bytes now = load_bytes(at + 8), last = load_bytes(at + 4), oldest = load_bytes(at);
      DIFFBIT_UNROLL
      for (int tile = 0; tile < LOWBIT_RING; ++tile) {
        const Bytes x = trellis.subset(tile, now, last, oldest), a = upper_of<BITS>(codes + tile * apart + v * WIDTH, quad);
        if constexpr (Trellis<BITS>::TABLE)
          each(tile, quad, v, trellis.magnitude_at(x ^ lookup(trellis.place, a)), lookup(trellis.sign, a));
        else
          each(tile, quad, v, x ^ shift<-3>(a) ^ splat(static_cast<uint8_t>(BYTE_MIDDLE)), x);
      }
    }
}

constexpr int RUN_BYTES = LOWBIT_QUADS * LOWBIT_PLANE;

/// Multiplies a ring whose first tile is `first`.
template <int BITS, int ROWS>
void multiply_ring(const Int4Rows& rows, const LowBitWeight& weight, int64_t first, void* y, bool half) {
  constexpr bool TABLE = Trellis<BITS>::TABLE;
  const Trellis<BITS> trellis(weight);
  const int64_t runs = weight.group_size / LOWBIT_RUN, apart = weight.groups * runs * BITS * LOWBIT_PLANE;
  const uint8_t* codes = weight.codes + first * apart;
  // Loads across lanes wait until what they read has left the store buffer, so histories are computed a run ahead
  uint8_t history[2][LOWBIT_QUADS][HISTORY];
  histories<BITS>(codes, apart, history[0]);
  const uint8_t* const last = codes + (weight.groups * runs - 1) * BITS * LOWBIT_PLANE;
  int turn = 0;
  F32 results[LOWBIT_RING][ROWS][VECTORS];
  for (auto& tile : results)
    for (auto& row : tile)
      for (F32& result : row) result = splat(0.0f);
  const int8_t* q = rows.q;
  for (int64_t g = 0; g < weight.groups; ++g) {
    Ints sums[VECTORS][LOWBIT_RING][ROWS];
    for (auto& vector : sums)
      for (auto& tile : vector)
        for (int r = 0; r < ROWS; ++r) tile[r] = TABLE ? zero() : splat_int(rows.offsets[g * ROWS + r]);
    for (int64_t run = 0; run < runs; ++run, codes += BITS * LOWBIT_PLANE, q += LOWBIT_RUN * ROWS) {
      DIFFBIT_UNROLL
      for (int tile = 0; tile < LOWBIT_RING; ++tile)
        DIFFBIT_UNROLL
        for (int plane = 0; plane < BITS; ++plane) prefetch(codes + tile * apart + plane * LOWBIT_PLANE + AHEAD / 4);
      if (codes != last) histories<BITS>(codes + BITS * LOWBIT_PLANE, apart, history[turn ^ 1]);
      decode_run<BITS>(trellis, codes, apart, history[turn], [&](int tile, int quad, int v, Bytes magnitudes, Bytes signs) {
        DIFFBIT_UNROLL
        for (int r = 0; r < ROWS; ++r) {
          const auto four = splat4(q + (quad * ROWS + r) * 4);
          Ints& sum = sums[v][tile][r];
          sum = TABLE ? dot_small(sum, magnitudes, signed_by(four, signs)) : dot_centered(sum, magnitudes, four);
        }
      });
      turn ^= 1;
    }
    for (int tile = 0; tile < LOWBIT_RING; ++tile) {
      const int64_t at = ((first + tile) * weight.groups + g) * INT4_TILE;
      for (int v = 0; v < VECTORS; ++v) {
        const F32 scale = weight.int8_scales ? load(static_cast<const int8_t*>(weight.scales) + at + v * F32_LANES)
                                             : load(static_cast<const uint16_t*>(weight.scales) + at + v * F32_LANES);
        for (int r = 0; r < ROWS; ++r)
          results[tile][r][v] =
              fma(to_floats(sums[v][tile][r]), scale * splat(rows.scales[g * ROWS + r]), results[tile][r][v]);
      }
    }
  }
  for (int tile = 0; tile < LOWBIT_RING; ++tile)
    for (int v = 0; v < VECTORS; ++v) {
      const int64_t column = (first + tile) * INT4_TILE + v * F32_LANES;
      const F32 row_scale = weight.row_scales ? load(weight.row_scales + column) : splat(1.0f);
      for (int r = 0; r < ROWS; ++r) {
        const F32 values = results[tile][r][v] * (row_scale * splat(weight.factor));
        if (half)
          store(static_cast<uint16_t*>(y) + r * weight.n + column, values);
        else
          store(static_cast<float*>(y) + r * weight.n + column, values);
      }
    }
}

template <int BITS>
void multiply_ring_of(const Int4Rows& rows, const LowBitWeight& weight, int64_t first, void* y, bool half) {
  static_assert(LOWBIT_FEW_ROWS == 4);
  constexpr decltype(&multiply_ring<BITS, 1>) by_rows[] = {multiply_ring<BITS, 1>, multiply_ring<BITS, 2>, multiply_ring<BITS, 3>,
                                                      multiply_ring<BITS, 4>};
  by_rows[rows.count - 1](rows, weight, first, y, half);
}

/// Decodes the ring of a tile to levels ^ BYTE_MIDDLE, a byte each.
template <int BITS>
void decode_ring_of(const LowBitWeight& weight, int64_t tile, uint8_t* to, int64_t to_apart) {
  const Trellis<BITS> trellis(weight);
  const int64_t runs = weight.groups * weight.group_size / LOWBIT_RUN, apart = runs * BITS * LOWBIT_PLANE;
  const uint8_t* codes = weight.codes + tile / LOWBIT_RING * LOWBIT_RING * apart;
  const Bytes middle = splat(static_cast<uint8_t>(BYTE_MIDDLE ^ 128));
  uint8_t history[LOWBIT_QUADS][HISTORY];
  for (int64_t run = 0; run < runs; ++run, codes += BITS * LOWBIT_PLANE, to += RUN_BYTES) {
    histories<BITS>(codes, apart, history);
    decode_run<BITS>(trellis, codes, apart, history, [&](int tile, int quad, int v, Bytes magnitudes, Bytes signs) {
      store(to + tile * to_apart + quad * LOWBIT_PLANE + v * WIDTH,
            Trellis<BITS>::TABLE ? signed_by(magnitudes, signs) ^ middle : magnitudes);
    });
  }
}

void decode_ring(const LowBitWeight& weight, int64_t tile, uint8_t* to, int64_t to_apart) {
  constexpr decltype(&decode_ring) by_bits[] = {decode_ring_of<2>, decode_ring_of<3>, decode_ring_of<4>, decode_ring_of<5>,
                                            decode_ring_of<6>};
  by_bits[weight.bits - 2](weight, tile, to, to_apart);
}

using Multiply = decltype(LowBitMatMulKernels::multiply);
template <int BITS, int TOP, bool DOUBLED = false>
constexpr Multiply FEW = multiply_rows_of<Kind<BITS, TOP, DOUBLED>, false, LOWBIT_FEW_ROWS>;
/// Without the limits of a Partial, bytes are multiplied like levels, whatever they are.
template <int BITS, int TOP>
constexpr Multiply MANY = multiply_rows_of<Kind<BITS, BITS == 8 && PARTIAL_IS_INTS ? LEVELS : TOP>, true, MOST_ROWS>;

void multiply(const Int4Rows& rows, const LowBitWeight& weight, int64_t first, int64_t apart, int64_t count, void* y,
              bool half) {
  constexpr decltype(&multiply_ring_of<2>) of_ring[] = {multiply_ring_of<2>, multiply_ring_of<3>, multiply_ring_of<4>,
                                                   multiply_ring_of<5>, multiply_ring_of<6>};
  if (weight.map && !weight.unpacked) return of_ring[weight.bits - 2](rows, weight, first, y, half);
  constexpr Multiply of_few[2][6] = {{nullptr, FEW<2, 2>, FEW<3, 3>, FEW<4, 4>, FEW<5, 5>, FEW<6, 6>},
                                     {FEW<1, LEVELS>, FEW<2, LEVELS>, FEW<3, LEVELS>, FEW<4, LEVELS>}};
  constexpr Multiply of_many[2][6] = {{nullptr, MANY<4, 4>, MANY<4, 4>, MANY<4, 4>, MANY<8, 5>, MANY<8, 6>},
                                      {MANY<8, LEVELS>, MANY<8, LEVELS>, MANY<8, LEVELS>, MANY<8, LEVELS>, MANY<8, LEVELS>,
                                       MANY<8, LEVELS>}};
  constexpr Multiply few_doubled[3] = {FEW<1, 1, true>, FEW<2, 2, true>, FEW<3, 3, true>};
  constexpr Multiply many_doubled = multiply_rows_of<Kind<4, 4, true>, true, MOST_ROWS>;
  Multiply chosen = (weight.unpacked ? of_many : of_few)[weight.levels != nullptr][weight.bits - 1];
  if (weight.doubled) chosen = weight.unpacked ? many_doubled : few_doubled[weight.bits - 1];
  chosen(rows, weight, first, apart, count, y, half);
}

/// Unpacks integers of up to 4 bits to planes of 4 bits, others and levels to bytes.
template <int BITS, bool TABLE>
void unpack_planes(const uint8_t* run, int64_t runs, const uint8_t* levels, uint8_t* to) {
  [[maybe_unused]] Bytes table;
  if (TABLE) table = table_of(levels, BITS);
  for (int64_t i = 0; i < runs; ++i, run += BITS * LOWBIT_PLANE) {
    DIFFBIT_UNROLL
    for (int plane = 0; plane < BITS; ++plane) prefetch(run + plane * LOWBIT_PLANE + AHEAD);
    DIFFBIT_UNROLL
    for (int quad = 0; quad < LOWBIT_QUADS; quad += 2)
      DIFFBIT_UNROLL
      for (int v = 0; v < VECTORS; ++v) {
        Bytes even = codes_of<BITS>(run + v * WIDTH, quad), odd = codes_of<BITS>(run + v * WIDTH, quad + 1);
        if (TABLE) even = lookup(table, even), odd = lookup(table, odd);
        if (TABLE || BITS > 4) {
          store(to + quad * LOWBIT_PLANE + v * WIDTH, even);
          store(to + (quad + 1) * LOWBIT_PLANE + v * WIDTH, odd);
        } else {
          store(to + quad / 2 * LOWBIT_PLANE + v * WIDTH, even | shift<-4>(odd));
        }
      }
    to += (TABLE || BITS > 4 ? 8 : 4) * LOWBIT_PLANE;
  }
}

void unpack(LowBitWeight& weight, int64_t tile, uint8_t* to) {
  if (weight.map) {  // tiles come in order, and `to` still has what the ring's first was decoded to
    const int64_t size = weight.groups * weight.group_size * INT4_TILE;
    if (tile % LOWBIT_RING == 0) decode_ring(weight, tile, to, size);
    weight.unpacked = to + tile % LOWBIT_RING * size;
    return;
  }
  using Unpack = decltype(&unpack_planes<2, false>);
  constexpr Unpack by_bits[2][6] = {{unpack_planes<1, false>, unpack_planes<2, false>, unpack_planes<3, false>, nullptr, unpack_planes<5, false>,
                                unpack_planes<6, false>},
                               {unpack_planes<1, true>, unpack_planes<2, true>, unpack_planes<3, true>, unpack_planes<4, true>}};
  const int64_t runs = weight.groups * weight.group_size / LOWBIT_RUN;
  const uint8_t* codes = weight.codes + tile * runs * weight.bits * LOWBIT_PLANE;
  weight.unpacked = codes;
  const Unpack chosen = by_bits[weight.levels && !weight.doubled][weight.bits - 1];
  if (!chosen) return;  // planes of 4 bits
  chosen(codes, runs, weight.levels, to);
  weight.unpacked = to;
}

#ifdef DIFFBIT_MANY_ROWS
/// Unpacks every code less 2^(BITS - 1), or every level less 128, to a byte.
template <int BITS, bool TABLE>
void unpack_runs(const uint8_t* run, int64_t runs, const uint8_t* levels, int8_t* to) {
  uint8_t bytes[16] = {};
  for (int i = 0; TABLE && i < 1 << BITS; ++i) bytes[i] = levels[i] ^ 128;
  const Bytes table = load_table(bytes), middle = splat(uint8_t{1 << (BITS - 1)});
  for (int64_t i = 0; i < runs; ++i, run += BITS * LOWBIT_PLANE)
    DIFFBIT_UNROLL
    for (int quad = 0; quad < LOWBIT_QUADS; ++quad, to += LOWBIT_PLANE)
      DIFFBIT_UNROLL
      for (int v = 0; v < VECTORS; ++v) {
        const Bytes codes = codes_of<BITS>(run + v * WIDTH, quad);
        store(to + v * WIDTH, TABLE ? lookup(table, codes) : minus(codes, middle));
      }
}

void unpack_values(const LowBitWeight& weight, int64_t tile, UnpackedTile& to) {
  using Unpack = decltype(&unpack_runs<2, false>);
  constexpr Unpack by_bits[2][6] = {{nullptr, unpack_runs<2, false>, unpack_runs<3, false>, unpack_runs<4, false>,
                                unpack_runs<5, false>, unpack_runs<6, false>},
                               {unpack_runs<1, true>, unpack_runs<2, true>, unpack_runs<3, true>, unpack_runs<4, true>}};
  const int64_t runs = weight.groups * weight.group_size / LOWBIT_RUN, first = tile * weight.groups * INT4_TILE;
  const uint8_t* codes = weight.codes + tile * runs * weight.bits * LOWBIT_PLANE;
  if (weight.map) {
    const int64_t size = weight.groups * weight.group_size * INT4_TILE;
    std::vector<uint8_t> ring(LOWBIT_RING * size);
    decode_ring(weight, tile, ring.data(), size);
    const uint8_t* values = ring.data() + tile % LOWBIT_RING * size;
    for (int64_t i = 0; i < size; i += WIDTH)
      store(to.values + i, load_bytes(values + i) ^ splat(static_cast<uint8_t>(BYTE_MIDDLE ^ 128)));
  } else {
    by_bits[weight.levels != nullptr][weight.bits - 1](codes, runs, weight.levels, to.values);
  }
  for (int64_t i = 0; i < weight.groups * INT4_TILE; i += F32_LANES)
    store(to.scales + i, weight.int8_scales ? load(static_cast<const int8_t*>(weight.scales) + first + i)
                                            : load(static_cast<const uint16_t*>(weight.scales) + first + i));
  for (int i = 0; i < INT4_TILE; i += F32_LANES) {
    const F32 row_scales = weight.row_scales ? load(weight.row_scales + tile * INT4_TILE + i) : splat(1.0f);
    store(to.factors + i, row_scales * splat(weight.factor));
  }
}
#else
constexpr decltype(LowBitMatMulKernels::unpack_values) unpack_values = nullptr;
#endif

}  // namespace

extern const LowBitMatMulKernels lowbit_matmul = {
    MOST_ROWS,
    {0, streams_of(1), streams_of(2), streams_of(3), streams_of(4), streams_of(5), streams_of(6), streams_of(7), streams_of(8)},
    BYTE_MIDDLE - 128,
    unpack,
    multiply,
    unpack_values};

}  // namespace diffbit::DIFFBIT_ISA
