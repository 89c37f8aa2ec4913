// Products of many rows of activations with unpacked tiles of any format in groups, in bfloat16 by matrix instructions; compiled
// once per instruction set, and empty in sets without them.
//
// Activations are rounded to bfloat16 instead of int8, and weights, times their scales, too: groups have no sums of their own,
// and a tile register adds up a whole row. That is less exact than the definition asks for, and several times as fast, so it is
// used where the session asks for it.
#include "groups.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

#ifdef DIFFBIT_TILES

constexpr int VECTORS = INT4_TILE / F32_LANES;
constexpr int64_t STEP = TILE_BYTES / 2;          // numbers of a row in a tile
constexpr int64_t TILE = TILE_ROWS * STEP;        // numbers in a tile
static_assert(MANY_ROWS == TILE_ROWS && INT4_TILE == TILE_BYTES / 4, "what tiles hold");

/// Rounds rows to [steps, MANY_ROWS, STEP].
template <class T>
void round_rows(const T* x, int64_t k, int64_t steps, int64_t rows, uint16_t* to) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < steps; ++i) {
      const T* from = x + row * k + i * STEP;
      T part[STEP];
      if ((i + 1) * STEP > k) {
        std::memset(part, 0, sizeof part);
        if (i * STEP < k) std::memcpy(part, from, static_cast<size_t>(k - i * STEP) * sizeof(T));
        from = part;
      }
      F32 values[STEP / F32_LANES];
      DIFFBIT_UNROLL
      for (int64_t v = 0; v < STEP / F32_LANES; ++v) values[v] = to_upper(load(from + v * F32_LANES));
      store_upper(to + i * TILE + row * STEP, values);
    }
}

void quantize(const void* x, bool half, int64_t k, int64_t groups, int64_t group_size, int32_t, const Int4Rows& rows) {
  uint16_t* to = reinterpret_cast<uint16_t*>(rows.q);
  const int64_t steps = groups * group_size / STEP;  // groups are multiples of 32
  if (half)
    round_rows(static_cast<const uint16_t*>(x), k, steps, rows.count, to);
  else
    round_rows(static_cast<const float*>(x), k, steps, rows.count, to);
}

/// Returns number `BYTE` of four neighbours in each of F32_LANES columns, less zeros.
template <int BYTE, bool ZEROS>
DIFFBIT_INLINE F32 numbers(Bytes fours, Ints zeros) {
  using Each = int32_t __attribute__((vector_size(WIDTH)));
  Ints values;
  values.v = (decltype(values.v))((Each)fours.v << (24 - 8 * BYTE) >> 24);
  if (ZEROS) values.v -= zeros.v;
  return to_floats(values);
}

/// Widens a tile of the weight to [steps, STEP / 2 pairs of numbers, INT4_TILE, 2].
template <bool ZEROS>
void widen(const UnpackedTile& tile, int64_t groups, int64_t group_size, uint16_t* to) {
  for (int v = 0; v < VECTORS; ++v) {
    const F32 factor = load(tile.factors + v * F32_LANES);
    const int8_t* from = tile.values + v * WIDTH;
    float* at = reinterpret_cast<float*>(to) + v * F32_LANES;  // a pair takes the room of a float
    for (int64_t g = 0; g < groups; ++g) {
      const F32 scale = load(tile.scales + g * INT4_TILE + v * F32_LANES) * factor;
      const Ints zeros = ZEROS ? load_ints(tile.zeros + g * INT4_TILE + v * F32_LANES) : Ints{};
      for (int64_t i = 0; i < group_size; i += 8, from += 2 * TILE_BYTES, at += 4 * INT4_TILE) {
        const Bytes even = load_bytes(from), odd = load_bytes(from + TILE_BYTES);  // of eight neighbours
        const auto pair = [&](F32 a, F32 b) { return upper_pairs(to_upper(a * scale), to_upper(b * scale)); };
        store(at, pair(numbers<0, ZEROS>(even, zeros), numbers<0, ZEROS>(odd, zeros)));
        store(at + INT4_TILE, pair(numbers<1, ZEROS>(even, zeros), numbers<1, ZEROS>(odd, zeros)));
        store(at + 2 * INT4_TILE, pair(numbers<2, ZEROS>(even, zeros), numbers<2, ZEROS>(odd, zeros)));
        store(at + 3 * INT4_TILE, pair(numbers<3, ZEROS>(even, zeros), numbers<3, ZEROS>(odd, zeros)));
      }
    }
  }
}

/// Computes y [16 ROWS, 16 WIDE], whose rows are `stride` bytes apart, = ROWS blocks, which are a_size numbers apart, times
/// WIDE tiles.
template <int ROWS, int WIDE>
DIFFBIT_INLINE void multiply_blocks(const uint16_t* a, int64_t a_size, const uint16_t* b, const uint16_t* b_right, int64_t steps,
                                    char* y, int64_t stride) {
  clear<0>(), clear<1>(), clear<2>(), clear<3>();
  for (int64_t i = 0; i < steps; ++i, a += TILE, b += TILE, b_right += TILE) {
    load_tile<6>(b, TILE_BYTES);
    load_tile<4>(a, TILE_BYTES);
    add_bfloats<0, 4, 6>();
    if (WIDE > 1) load_tile<7>(b_right, TILE_BYTES);
    if (WIDE > 1) add_bfloats<1, 4, 7>();
    if (ROWS > 1) load_tile<5>(a + a_size, TILE_BYTES);
    if (ROWS > 1) add_bfloats<2, 5, 6>();
    if (ROWS > 1 && WIDE > 1) add_bfloats<3, 5, 7>();
  }
  store_tile<0>(y, stride);
  if (WIDE > 1) store_tile<1>(y + TILE_BYTES, stride);
  if (ROWS > 1) store_tile<2>(y + TILE_ROWS * stride, stride);
  if (ROWS > 1 && WIDE > 1) store_tile<3>(y + TILE_ROWS * stride + TILE_BYTES, stride);
}

void multiply(const Int4Rows& rows, const UnpackedTile* tiles, int64_t count, int64_t groups, int64_t group_size, void* y,
              int64_t n, int64_t room, bool half) {
  const Tiles in_use(TILE_BYTES);
  const int64_t steps = groups * group_size / STEP, size = steps * TILE;
  const uint16_t* b[2];
  for (int64_t i = 0; i < count; ++i) {
    (tiles[i].has_zeros ? widen<true> : widen<false>)(tiles[i], groups, group_size, tiles[i].wide);
    b[i] = tiles[i].wide;
  }
  constexpr int64_t WIDTH_OF_SUMS = 2 * INT4_TILE;
  alignas(64) float sums[2 * MANY_ROWS * WIDTH_OF_SUMS];
  for (int64_t row = 0; row < rows.count; row += 2 * MANY_ROWS) {
    const uint16_t* a = reinterpret_cast<const uint16_t*>(rows.q) + row / MANY_ROWS * size;
    const int64_t left = rows.count - row < 2 * MANY_ROWS ? rows.count - row : 2 * MANY_ROWS;
    const bool tall = left > MANY_ROWS, wide = count > 1;
    const bool direct = !half && room >= count * INT4_TILE && left % MANY_ROWS == 0;
    char* to = static_cast<char*>(y) + row * n * 4;
    (tall ? wide ? multiply_blocks<2, 2> : multiply_blocks<2, 1>
          : wide ? multiply_blocks<1, 2> : multiply_blocks<1, 1>)(a, size, b[0], b[count - 1], steps, direct ? to : reinterpret_cast<char*>(sums), direct ? n * 4 : WIDTH_OF_SUMS * 4);
    if (!direct) put_rows(sums, WIDTH_OF_SUMS, left, count * INT4_TILE, y, row, n, room, half);
  }
}

constexpr ManyRowsKernels KERNELS = {DIFFBIT_MANY_ROWS, 2, 2, quantize, multiply};
#else
constexpr ManyRowsKernels KERNELS = {};
#endif

}  // namespace

extern const ManyRowsKernels bfloat_rows = KERNELS;

}  // namespace diffbit::DIFFBIT_ISA
