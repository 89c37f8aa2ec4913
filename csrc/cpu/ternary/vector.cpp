// TernaryMatMul with vectors; compiled once per instruction set.
//
// A vector of WIDTH bytes of a weight row holds 4 * WIDTH codes in four fields. A quantized row of activations has the
// matching order: the WIDTH activations for field 0 of the row's first vector, those for fields 1, 2 and 3, then those
// for the second vector. Codes 0, 1, 2 stand for -1, 0, 1, so the activations' sum is subtracted once per output.
//
// Codes are not shifted down, only masked: field 3 counts 64-fold, and the sums are divided by 4, exactly, before those of
// field 2 are added to them, and so on down to field 0.
//
// A tile multiplies ROWS weight rows by COLUMNS activation rows with all sums in registers. It takes activations in slices
// of K that stay in the first-level cache while all weights of the task pass.
#include "kernels.h"

#include "../simd/quantize.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

/// Returns how many bytes of a row of q are used.
int64_t used_size(int64_t blocks) {
  const int64_t bytes = blocks * TERNARY_BLOCK_BYTES;
  return (bytes + WIDTH - 1) / WIDTH * WIDTH * 4;
}

#ifdef DIFFBIT_TILES
/// Rows whose distance is a power of two would meet in the same lines of a cache.
int64_t quantized_size(int64_t blocks) { return used_size(blocks) / 64 % 2 ? used_size(blocks) : used_size(blocks) + 64; }
#else
int64_t quantized_size(int64_t blocks) { return used_size(blocks); }
#endif

}  // namespace
}  // namespace diffbit::DIFFBIT_ISA

#ifdef DIFFBIT_TILES
#include "many_rows.h"
#endif

namespace diffbit::DIFFBIT_ISA {
namespace {

#ifdef DIFFBIT_TILES
constexpr int64_t ROWS_PER_TASK = TERNARY_MOST_ROWS;  // unpacking takes as long as products with about 40
#else
constexpr int64_t ROWS_PER_TASK = 96;
#endif
constexpr int64_t PANEL = 1024;      // weight rows whose sums are kept at a time
constexpr int64_t NEAR = 24 * 1024;  // bytes of activations that fit into the first-level cache besides the weights
constexpr int64_t FLIGHT = 8192;     // bytes of weights on their way from memory, over all streams

// The largest tile, whose sums are all in registers
constexpr int ROWS = TERNARY_ROWS, MOST_COLUMNS = TERNARY_COLUMNS;


/// Returns the position of the activation for weight i.
DIFFBIT_INLINE int64_t place(int64_t i) {
  const int64_t field = i % TERNARY_BLOCK / TERNARY_BLOCK_BYTES;
  const int64_t byte = i / TERNARY_BLOCK * TERNARY_BLOCK_BYTES + i % TERNARY_BLOCK_BYTES;
  return (byte / WIDTH * 4 + field) * WIDTH + byte % WIDTH;
}

TernaryRow quantize(const void* x, bool half, int64_t bits, int64_t k, int64_t blocks, int8_t* q) {
  const int64_t size = used_size(blocks);
  constexpr int64_t LAST = 4 * WIDTH > TERNARY_BLOCK ? 4 * WIDTH : TERNARY_BLOCK;  // bytes that x may not write
  for (int64_t i = size - LAST; i < size; i += WIDTH) store(q + i, splat(uint8_t{0}));
  Ints sums = zero();
  TernaryRow row;
  row.scale = quantize_row(x, half, bits, k, [&](int64_t i, Bytes values) {
    store_activations(q + place(i), q + place(i + 32), values);
    sums = flush(sums, dot(no_partial(), splat(uint8_t{1}), values));
  });
  row.sum = sum(sums);
  return row;
}

/// Adds to sums[row][column] the codes in one field of the weights, in bytes begin..end of each row, times the activations.
/// MASK picks the codes after a shift by SHIFT, and may leave them multiplied by a power of 4.
template <int FIELD, int SHIFT, int MASK, bool REST, int COLUMNS>
DIFFBIT_INLINE void accumulate(Partial (&sums)[ROWS][COLUMNS], const uint8_t* const (&weights)[ROWS], int64_t begin,
                               int64_t end, int64_t next, const int8_t* q, int64_t q_size) {
  const Bytes mask = splat(uint8_t{MASK});
  for (int64_t i = begin; i < end; i += WIDTH) {
    Bytes codes[ROWS];
    for (int row = 0; row < ROWS; ++row) {
      codes[row] = shift<SHIFT>(load_weights<REST>(weights[row] + i)) & mask;
      if (!REST) prefetch(weights[row] + next + i / 4);
    }
    for (int column = 0; column < COLUMNS; ++column) {
      const Bytes activations = load_bytes(q + column * q_size + 4 * i + FIELD * WIDTH);
      for (int row = 0; row < ROWS; ++row) sums[row][column] = dot(sums[row][column], codes[row], activations);
    }
  }
}

/// Computes one of the four passes over a tile's weights.
template <int PASS, bool REST, int COLUMNS>
DIFFBIT_INLINE void pass(Ints (&total)[ROWS][COLUMNS], const uint8_t* const (&weights)[ROWS], int64_t bytes,
                         int64_t next, const int8_t* q, int64_t q_size) {
  constexpr TernaryPass HOW = TERNARY_PASSES[PASS];
  next += bytes * PASS / 4;
  if constexpr (PARTIAL_IS_INTS) {
    accumulate<HOW.field, HOW.shift, HOW.mask, REST>(total, weights, 0, bytes, next, q, q_size);
  } else {
    constexpr int64_t RUN = dots(HOW.mask) * WIDTH;  // bytes between flushes
    for (int64_t i = 0; i < bytes; i += RUN) {
      Partial partial[ROWS][COLUMNS];
      for (int row = 0; row < ROWS; ++row)
        for (int column = 0; column < COLUMNS; ++column) partial[row][column] = no_partial();
      const int64_t end = bytes - i < RUN ? bytes : i + RUN;
      accumulate<HOW.field, HOW.shift, HOW.mask, REST>(partial, weights, i, end, next, q, q_size);
      for (int row = 0; row < ROWS; ++row)
        for (int column = 0; column < COLUMNS; ++column)
          total[row][column] = flush(total[row][column], partial[row][column]);
    }
  }
  if (HOW.quarter)  // the codes so far were multiplied by 4 once more than those that follow
    for (int row = 0; row < ROWS; ++row)
      for (int column = 0; column < COLUMNS; ++column) total[row][column] = shift<2>(total[row][column]);
}

/// Adds to sums[column][row] the codes of ROWS weight rows times COLUMNS activation rows, over `bytes` bytes of weight. The
/// weights of the next tile are `next` bytes further on.
template <bool REST, int COLUMNS>
void tile(const uint8_t* const (&weights)[ROWS], int64_t bytes, int64_t next, const int8_t* q, int64_t q_size,
          uint32_t* sums) {
  Ints total[ROWS][COLUMNS];
  for (int row = 0; row < ROWS; ++row)
    for (int column = 0; column < COLUMNS; ++column) total[row][column] = zero();
  pass<0, REST>(total, weights, bytes, next, q, q_size);
  pass<1, REST>(total, weights, bytes, next, q, q_size);
  pass<2, REST>(total, weights, bytes, next, q, q_size);
  pass<3, REST>(total, weights, bytes, next, q, q_size);
  for (int column = 0; column < COLUMNS; ++column) {
    if constexpr (ROWS == 4) {
      add_sums(sums + column * PANEL, total[0][column], total[1][column], total[2][column], total[3][column]);
    } else {
      uint32_t four[4] = {};
      add_sums(four, total[0][column], total[1][column], total[0][column], total[1][column]);
      sums[column * PANEL] += four[0];
      sums[column * PANEL + 1] += four[1];
    }
  }
}

/// Does the same for one row of activations, for which memory is the bottleneck: each byte of the weights is read once, and
/// the bytes `ahead` of it are prefetched.
template <bool REST>
void tile_of_one(const uint8_t* const (&weights)[ROWS], int64_t bytes, int64_t ahead, const int8_t* q,
                 uint32_t* sums) {
  constexpr int CHAINS = TERNARY_CHAINS;  // a dot product into int32 waits four or five cycles for the last one's sum
  constexpr int64_t RUN = dots(12) / 2 * WIDTH;  // bytes between flushes
  const Bytes low = splat(uint8_t{3}), high = splat(uint8_t{12});
  Ints total[ROWS], total4[ROWS];  // of fields 0 and 2; of fields 1 and 3, four times too large
  for (int row = 0; row < ROWS; ++row) total[row] = total4[row] = zero();
  for (int64_t i = 0; i < bytes;) {
    const int64_t end = bytes - i < RUN ? bytes : i + RUN;
    Partial partial[ROWS][CHAINS], partial4[ROWS][CHAINS];
    for (int row = 0; row < ROWS; ++row)
      for (int chain = 0; chain < CHAINS; ++chain) partial[row][chain] = partial4[row][chain] = no_partial();
    for (; i < end; i += WIDTH) {
      const Bytes a0 = load_bytes(q + 4 * i), a1 = load_bytes(q + 4 * i + WIDTH);
      const Bytes a2 = load_bytes(q + 4 * i + 2 * WIDTH), a3 = load_bytes(q + 4 * i + 3 * WIDTH);
      for (int row = 0; row < ROWS; ++row) {
        const Bytes x = once(load_weights<REST>(weights[row] + i)), y = shift<4>(x);
        prefetch(weights[row] + i + ahead);
        partial[row][0] = dot(partial[row][0], x & low, a0);
        partial4[row][0] = dot(partial4[row][0], x & high, a1);
        partial[row][CHAINS - 1] = dot(partial[row][CHAINS - 1], y & low, a2);
        partial4[row][CHAINS - 1] = dot(partial4[row][CHAINS - 1], y & high, a3);
      }
    }
    for (int row = 0; row < ROWS; ++row)
      for (int chain = 0; chain < CHAINS; ++chain) {
        total[row] = flush(total[row], partial[row][chain]);
        total4[row] = flush(total4[row], partial4[row][chain]);
      }
  }
  uint32_t four[4] = {};
  for (int row = 0; row < ROWS; ++row) total[row] = total[row] + shift<2>(total4[row]);
  add_sums(four, total[0], total[1], total[ROWS - 2], total[ROWS - 1]);
  for (int row = 0; row < ROWS; ++row) sums[row] += four[row];
}

/// Computes y for COLUMNS activation rows from `row` on and `count` <= PANEL weight rows from `begin` on.
template <int COLUMNS>
void panel(const TernaryProduct& product, int64_t row, int64_t begin, int64_t count) {
  constexpr int64_t SLICE = NEAR / COLUMNS / (4 * WIDTH) * WIDTH;  // bytes of a weight row
  const int64_t stride = product.blocks * TERNARY_BLOCK_BYTES, q_size = quantized_size(product.blocks);
  const int8_t* q = product.q + row * q_size;
  const uint8_t* packed = product.packed + begin * stride;
  const int64_t tiles = (count + ROWS - 1) / ROWS;
  uint32_t sums[COLUMNS][PANEL];  // unsigned, because sums of codes may exceed 2^31 before the activations' sum is subtracted
  for (int column = 0; column < COLUMNS; ++column)
    for (int64_t i = 0; i < tiles * ROWS; ++i) sums[column][i] = -static_cast<uint32_t>(product.rows[row + column].sum);

  // Row r of tile i is row r * apart + i * step: in as many streams where memory is read once, side by side where again
  const int64_t apart = COLUMNS < MOST_COLUMNS ? tiles : 1, step = COLUMNS < MOST_COLUMNS ? 1 : ROWS;
  const int64_t vector_end = stride / WIDTH * WIDTH;
  for (int64_t offset = 0; offset < stride; offset += SLICE) {
    const int64_t bytes = vector_end - offset < SLICE ? vector_end - offset : SLICE;
    const bool rest = offset + SLICE >= stride && vector_end < stride;
    for (int64_t i = 0; i < tiles; ++i) {
      const uint8_t* weights[ROWS];
      for (int r = 0; r < ROWS; ++r) {
        const int64_t from = r * apart + i * step;
        weights[r] = packed + (from < count ? from : count - 1) * stride + offset;
      }
      uint32_t* at = &sums[0][i * ROWS];
      // At its end a stream continues in the next panel
      constexpr int64_t REACH = FLIGHT / ROWS;
      const int64_t ahead = REACH + ((tiles - i) * stride > REACH ? 0 : (count - tiles) * stride);
      if constexpr (COLUMNS == 1)
        tile_of_one<false>(weights, bytes, ahead, q + 4 * offset, at);
      else
        tile<false, COLUMNS>(weights, bytes, step * stride, q + 4 * offset, q_size, at);
      if (rest) {
        for (int r = 0; r < ROWS; ++r) weights[r] += bytes;
        if constexpr (COLUMNS == 1)
          tile_of_one<true>(weights, WIDTH, 0, q + 4 * vector_end, at);
        else
          tile<true, COLUMNS>(weights, WIDTH, 0, q + 4 * vector_end, q_size, at);
      }
    }
  }

  for (int column = 0; column < COLUMNS; ++column) {
    const float a = product.rows[row + column].scale;
    float wide[PANEL];
    for (int64_t i = 0; i < tiles * ROWS; ++i)
      wide[i] = static_cast<float>(static_cast<int32_t>(sums[column][i])) * a;
    if (apart > 1) {
      float tall[PANEL];
      for (int r = 0; r < ROWS; ++r)
        for (int64_t i = 0; i < tiles; ++i) tall[r * tiles + i] = wide[i * ROWS + r];
      std::memcpy(wide, tall, static_cast<size_t>(count) * 4);
    }
    if (product.scale_per_row)
      for (int64_t i = 0; i < count; ++i) wide[i] *= product.scale[begin + i];
    else
      for (int64_t i = 0; i < count; ++i) wide[i] *= *product.scale;
    const int64_t to = (row + column) * product.n + begin;
    if (product.half) {
      uint16_t narrow[PANEL];
      for (int64_t i = 0; i < count; i += LANES) store(narrow + i, load(wide + i));
      std::memcpy(static_cast<uint16_t*>(product.y) + to, narrow, static_cast<size_t>(count) * 2);
    } else {
      std::memcpy(static_cast<float*>(product.y) + to, wide, static_cast<size_t>(count) * 4);
    }
  }
}

/// Calls panel<rows>, for 1 to COLUMNS rows.
template <int COLUMNS>
void panel_of(int64_t rows, const TernaryProduct& product, int64_t row, int64_t begin, int64_t count) {
  if constexpr (COLUMNS > 1)
    if (rows < COLUMNS) return panel_of<COLUMNS - 1>(rows, product, row, begin, count);
  panel<COLUMNS>(product, row, begin, count);
}

void multiply(const TernaryProduct& product, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end) {
#ifdef DIFFBIT_TILES
  if (row_end - row_begin >= LEAST_MANY_ROWS) {
    for (; begin < end; begin += SIDE)
      multiply_side(product, row_begin, row_end, begin, end - begin < SIDE ? end : begin + SIDE);
    return;
  }
#endif
  for (; begin < end; begin += PANEL) {
    const int64_t count = end - begin < PANEL ? end - begin : PANEL;
    for (int64_t row = row_begin; row < row_end;) {
      const int64_t rows = row_end - row < MOST_COLUMNS ? row_end - row : MOST_COLUMNS;
      panel_of<MOST_COLUMNS>(rows, product, row, begin, count);
      row += rows;
    }
  }
}

}  // namespace

extern const TernaryKernels ternary = {ROWS_PER_TASK, quantized_size, quantize, multiply};

}  // namespace diffbit::DIFFBIT_ISA
