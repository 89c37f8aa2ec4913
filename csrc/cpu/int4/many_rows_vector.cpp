// Products of many rows of activations with an unpacked tile of any format in groups, by matrix instructions; compiled once per
// instruction set, and empty in sets without them.
//
// With tiles, a group's product has 16 x 16 sums, which go through memory to vectors of 16 columns; there they are scaled and
// added to results that stay in registers. The products of the next groups are computed meanwhile. With pairs of rows (i8mm)
// sums and results of 8 x 4 stay in registers.
#include "groups.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

#ifdef DIFFBIT_MANY_ROWS

/// Returns how many neighbouring bytes of a row are in a slice.
DIFFBIT_INLINE int64_t slice_of([[maybe_unused]] int64_t group_size) {
#ifdef DIFFBIT_TILES
  return group_size < TILE_BYTES ? group_size : TILE_BYTES;
#else
  return INT4_STEP;
#endif
}

void quantize(const void* x, bool half, int64_t k, int64_t groups, int64_t group_size, int32_t minus,
              const Int4Rows& rows) {
  const int64_t slice = slice_of(group_size);
  const auto put = [&](int64_t row, int64_t g, const int8_t* bytes, int32_t sum, float scale) {
    for (int64_t i = 0; i < group_size; i += INT4_STEP) {
      int8_t* to = rows.q + (g * group_size + i / slice * slice) * MANY_ROWS + row * slice + i % slice;
      store_parted(bytes + i, to, to + 4);
    }
    rows.offsets[g * MANY_ROWS + row] = minus * sum;
    rows.scales[g * MANY_ROWS + row] = scale;
  };
  round_groups(x, half, k, groups, group_size, rows.count, put);
}

#ifdef DIFFBIT_TILES

constexpr int VECTORS = INT4_TILE / F32_LANES;
constexpr int64_t AHEAD = 2;  // groups
static_assert(INT4_TILE * 4 == TILE_BYTES && MANY_ROWS == TILE_ROWS, "a tile of the weight fills rows of B");

/// Computes a group's sums, of 16 rows of q and 16 of the weight.
template <int TILE>
DIFFBIT_INLINE void sum_group(const int8_t* q, const int8_t* values, int64_t group_size, int64_t slice, int32_t* sums) {
  clear<TILE>();
  for (int64_t i = 0; i < group_size; i += slice) {
    load_tile<4 + TILE>(q + i * MANY_ROWS, slice);
    load_tile<6 + TILE>(values + i * INT4_TILE, TILE_BYTES);
    add_bytes<TILE, 4 + TILE, 6 + TILE>();
  }
  store_tile<TILE>(sums, TILE_BYTES);
}

/// Calls done(block, its results [16][INT4_TILE]) after each block of 16 rows. The first products of the next block are
/// computed while the last ones of a block are added.
template <bool ZEROS, typename Done>
DIFFBIT_INLINE void multiply_blocks(const Int4Rows& rows, const UnpackedTile& tile, int64_t groups, int64_t group_size,
                                    const Done& done) {
  const int64_t slice = slice_of(group_size), bytes = group_size * MANY_ROWS;
  const int64_t blocks = (rows.count + MANY_ROWS - 1) / MANY_ROWS, all = blocks * groups;
  alignas(64) int32_t sums[2 * AHEAD][MANY_ROWS * INT4_TILE];
  int64_t begun = 0, begun_group = 0;
  const auto begin = [&]() __attribute__((always_inline)) {
    if (begun == all) return;
    const int8_t *q = rows.q + begun * bytes, *values = tile.values + begun_group * bytes;
    int32_t* to = sums[begun % (2 * AHEAD)];
    if (begun % 2)
      sum_group<1>(q, values, group_size, slice, to);
    else
      sum_group<0>(q, values, group_size, slice, to);
    ++begun;
    begun_group = begun_group + 1 == groups ? 0 : begun_group + 1;
  };
  for (int64_t i = 0; i < AHEAD; ++i) begin();
  for (int64_t block = 0; block < blocks; ++block) {
    F32 results[MANY_ROWS][VECTORS];
    DIFFBIT_UNROLL
    for (int r = 0; r < MANY_ROWS; ++r)
      DIFFBIT_UNROLL
      for (int v = 0; v < VECTORS; ++v) results[r][v] = splat(0.0f);
    for (int64_t g = 0; g < groups; ++g) {
      begin();
      const int64_t at = block * groups + g;
      const int32_t* group_sums = sums[at % (2 * AHEAD)];
      DIFFBIT_UNROLL
      for (int v = 0; v < VECTORS; ++v) {
        const int64_t column = g * INT4_TILE + v * F32_LANES;
        const F32 scale = load(tile.scales + column);
        DIFFBIT_UNROLL
        for (int r = 0; r < MANY_ROWS; ++r) {
          Ints sum = load_ints(group_sums + r * INT4_TILE + v * F32_LANES);
          if (ZEROS) sum.v += load_ints(tile.zeros + column).v * rows.offsets[at * MANY_ROWS + r];
          results[r][v] = fma(to_floats(sum), scale * splat(rows.scales[at * MANY_ROWS + r]), results[r][v]);
        }
      }
    }
    alignas(64) float values[MANY_ROWS * INT4_TILE];
    DIFFBIT_UNROLL
    for (int v = 0; v < VECTORS; ++v) {
      const F32 factor = load(tile.factors + v * F32_LANES);
      DIFFBIT_UNROLL
      for (int r = 0; r < MANY_ROWS; ++r) store(values + r * INT4_TILE + v * F32_LANES, results[r][v] * factor);
    }
    done(block, values);
  }
}

#else

constexpr int64_t LINE = 2 * INT4_STEP;  // bytes of two rows
constexpr int DOWN = 4, ACROSS = 2;      // pairs of rows, at most, and of columns, whose sums stay in registers

/// Writes the tile as [groups, group_size / 8, 8 pairs of columns, 2, 8], in `wide`.
void pair_columns(const UnpackedTile& tile, int64_t width) {
  uint8_t* to = reinterpret_cast<uint8_t*>(tile.wide);
  const int8_t* from = tile.values;
  for (int64_t i = 0; i < width; i += INT4_STEP, from += 8 * INT4_TILE)
    for (int64_t v = 0; v < 4 * INT4_TILE; v += WIDTH, to += 2 * WIDTH) {
      Bytes both[2];
      interleave(load_bytes(from + v), load_bytes(from + 4 * INT4_TILE + v), both);
      store(to, both[0]), store(to + WIDTH, both[1]);
    }
}

/// Computes the results of PAIRS pairs of rows from `row` of a block on, and of all columns.
template <int PAIRS, bool ZEROS>
void multiply_pairs(const Int4Rows& rows, const UnpackedTile& tile, int64_t groups, int64_t group_size, int64_t block,
                    int64_t row, float* values) {
  for (int64_t column = 0; column < INT4_TILE; column += 2 * ACROSS) {
    const int8_t* a = rows.q + block * groups * group_size * MANY_ROWS + row * INT4_STEP;
    const uint8_t* b = reinterpret_cast<const uint8_t*>(tile.wide) + column * INT4_STEP;
    F32 results[PAIRS][ACROSS];
    DIFFBIT_UNROLL for (auto& vectors : results) DIFFBIT_UNROLL for (F32& vector : vectors) vector = splat(0.0f);
    for (int64_t g = 0; g < groups; ++g) {
      Ints sums[PAIRS][ACROSS];
      DIFFBIT_UNROLL for (auto& vectors : sums) DIFFBIT_UNROLL for (Ints& vector : vectors) vector = zero();
      for (int64_t i = 0; i < group_size; i += INT4_STEP, a += MANY_ROWS * INT4_STEP, b += INT4_TILE * INT4_STEP) {
        Bytes right[ACROSS];
        DIFFBIT_UNROLL for (int c = 0; c < ACROSS; ++c) right[c] = load_bytes(b + c * LINE);
        DIFFBIT_UNROLL
        for (int r = 0; r < PAIRS; ++r) {
          const Bytes left = load_bytes(a + r * LINE);
          DIFFBIT_UNROLL for (int c = 0; c < ACROSS; ++c) sums[r][c] = add_pairs(sums[r][c], left, right[c]);
        }
      }
      const int64_t of_rows = (block * groups + g) * MANY_ROWS + row, of_columns = g * INT4_TILE + column;
      DIFFBIT_UNROLL
      for (int r = 0; r < PAIRS; ++r) {
        const F32 row_scales = rows_of(rows.scales + of_rows + 2 * r);
        DIFFBIT_UNROLL
        for (int c = 0; c < ACROSS; ++c) {
          Ints sum = sums[r][c];
          if (ZEROS)
            sum = add_product(sum, columns_of(tile.zeros + of_columns + 2 * c), rows_of(rows.offsets + of_rows + 2 * r));
          results[r][c] = fma(to_floats(sum), columns_of(tile.scales + of_columns + 2 * c) * row_scales, results[r][c]);
        }
      }
    }
    DIFFBIT_UNROLL
    for (int r = 0; r < PAIRS; ++r)
      DIFFBIT_UNROLL
      for (int c = 0; c < ACROSS; ++c)
        store_pair(values + (row + 2 * r) * INT4_TILE + column + 2 * c, INT4_TILE,
                   results[r][c] * columns_of(tile.factors + column + 2 * c));
  }
}

/// Calls done(block, its results [16][INT4_TILE]) after each block of 16 rows.
template <bool ZEROS, typename Done>
DIFFBIT_INLINE void multiply_blocks(const Int4Rows& rows, const UnpackedTile& tile, int64_t groups, int64_t group_size,
                                    const Done& done) {
  using Multiply = decltype(&multiply_pairs<1, ZEROS>);
  constexpr Multiply by_pairs[DOWN] = {multiply_pairs<1, ZEROS>, multiply_pairs<2, ZEROS>, multiply_pairs<3, ZEROS>,
                                 multiply_pairs<4, ZEROS>};
  pair_columns(tile, groups * group_size);
  for (int64_t block = 0; block * MANY_ROWS < rows.count; ++block) {
    alignas(64) float values[MANY_ROWS * INT4_TILE];
    for (int64_t row = 0; row < MANY_ROWS && block * MANY_ROWS + row < rows.count; row += 2 * DOWN) {
      const int64_t pairs = (rows.count - block * MANY_ROWS - row + 1) / 2;
      by_pairs[pairs < DOWN ? pairs - 1 : DOWN - 1](rows, tile, groups, group_size, block, row, values);
    }
    done(block, values);
  }
}

#endif

void multiply(const Int4Rows& rows, const UnpackedTile* tiles, int64_t, int64_t groups, int64_t group_size, void* y, int64_t n,
              int64_t room, bool half) {
  const UnpackedTile& tile = *tiles;
#ifdef DIFFBIT_TILES
  const Tiles in_use(slice_of(group_size));
#endif
  const auto done = [&](int64_t block, const float* values) {
    const int64_t first = block * MANY_ROWS, count = rows.count - first < MANY_ROWS ? rows.count - first : MANY_ROWS;
    put_rows(values, INT4_TILE, count, INT4_TILE, y, first, n, room, half);
  };
  if (tile.has_zeros)
    multiply_blocks<true>(rows, tile, groups, group_size, done);
  else
    multiply_blocks<false>(rows, tile, groups, group_size, done);
}

constexpr ManyRowsKernels KERNELS = {DIFFBIT_MANY_ROWS, 1, 1, quantize, multiply};
#else
constexpr ManyRowsKernels KERNELS = {};
#endif

}  // namespace

extern const ManyRowsKernels many_rows = KERNELS;

}  // namespace diffbit::DIFFBIT_ISA
