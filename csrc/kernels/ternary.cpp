// TernaryMatMul with vectors; compiled once per instruction set.
//
// A vector of WIDTH bytes of a weight row holds 4 * WIDTH codes in four fields. A quantized row of activations is laid
// out to fit: the WIDTH activations that meet field 0 of the row's first vector, those of field 1, 2 and 3, then those
// of the second vector. Codes 0, 1, 2 stand for -1, 0, 1: the activations' sum is taken off once per output.
//
// A tile multiplies ROWS weight rows by COLUMNS activation rows with all sums in registers. Its weight rows lie a
// quarter of the task's rows apart, so that memory is read in several streams; and COLUMNS activation rows share each
// unpacking. Activations are taken in slices of K that stay in the first-level cache while all weights of the task pass.
#include "ternary.h"

#include "../simd/int8.h"
#include "../simd/quantize.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

constexpr int STREAMS = 4;
constexpr int64_t PANEL = 256;         // weight rows whose sums are held at a time
constexpr int64_t SUMS = PANEL + STREAMS;  // room for the rows that fill up the last tile
constexpr int64_t NEAR = 24 * 1024;    // bytes of activations that the first-level cache holds beside the weights
constexpr int64_t AHEAD = 1024;        // bytes to prefetch

// Sums in registers: 32 vector registers for AVX-512 and NEON, 16 for the others; AVX2 has a temporary in each dot
#if DIFFBIT_ISA_AVX512VNNI
constexpr int MOST_COLUMNS = 6;
constexpr int rows_of(int) { return 4; }
#elif DIFFBIT_ISA_NEON
constexpr int MOST_COLUMNS = 4;
constexpr int rows_of(int) { return 4; }
#elif DIFFBIT_ISA_AVXVNNI
constexpr int MOST_COLUMNS = 6;
constexpr int rows_of(int columns) { return columns <= 2 ? 4 : 2; }
#else
constexpr int MOST_COLUMNS = 4;
constexpr int rows_of(int columns) { return columns <= 2 ? 4 : 2; }
#endif
static_assert(STREAMS % rows_of(1) == 0 && STREAMS % rows_of(MOST_COLUMNS) == 0, "tiles take whole streams");

int64_t quantized_size(int64_t blocks) {
  const int64_t bytes = blocks * TERNARY_BLOCK_BYTES;
  return (bytes + WIDTH - 1) / WIDTH * WIDTH * 4;
}

/// Where the activation that meets weight i lies.
DIFFBIT_INLINE int64_t place(int64_t i) {
  const int64_t field = i % TERNARY_BLOCK / TERNARY_BLOCK_BYTES;
  const int64_t byte = i / TERNARY_BLOCK * TERNARY_BLOCK_BYTES + i % TERNARY_BLOCK_BYTES;
  return (byte / WIDTH * 4 + field) * WIDTH + byte % WIDTH;
}

TernaryRow quantize(const void* x, bool half, int64_t k, int64_t blocks, int8_t* q) {
  const int64_t size = quantized_size(blocks);
  constexpr int64_t LAST = 4 * WIDTH > TERNARY_BLOCK ? 4 * WIDTH : TERNARY_BLOCK;  // what x may leave unwritten
  for (int64_t i = size - LAST; i < size; i += WIDTH) store(q + i, splat(0));
  Ints sums = zero();
  TernaryRow row;
  row.step = quantize_row(x, half, k, [&](int64_t i, Bytes values) {
#if DIFFBIT_ISA_AVX512VNNI
    store_halves(q + place(i), q + place(i + 32), values);
#else
    store(q + place(i), values);
#endif
    sums = flush(sums, dot(no_partial(), splat(1), values));
  });
  row.sum = sum(sums);
  return row;
}

/// sums[column][at[row]] += the codes of `rows` weight rows times COLUMNS activation rows, over `bytes` bytes of weight.
template <int ROWS, int COLUMNS>
void tile(const uint8_t* const* weights, int64_t bytes, const int8_t* q, int64_t q_size, uint32_t (*sums)[SUMS],
          const int64_t* at) {
  constexpr int64_t RUN = dots(3) / 4 * WIDTH;  // bytes of weight between flushes
  const Bytes three = splat(3);
  Ints total[ROWS][COLUMNS];
  for (int row = 0; row < ROWS; ++row)
    for (int column = 0; column < COLUMNS; ++column) total[row][column] = zero();

  for (int64_t i = 0; i < bytes;) {
    const int64_t end = bytes - i < RUN ? bytes : i + RUN;
    Partial partial[ROWS][COLUMNS];
    for (int row = 0; row < ROWS; ++row)
      for (int column = 0; column < COLUMNS; ++column) partial[row][column] = no_partial();
    const auto multiply_add = [&](const Bytes (&codes)[ROWS], int64_t offset) {
      for (int column = 0; column < COLUMNS; ++column) {
        const Bytes activations = load(q + column * q_size + offset);
        for (int row = 0; row < ROWS; ++row) partial[row][column] = dot(partial[row][column], codes[row], activations);
      }
    };
    const auto four_fields = [&](const Bytes (&packed)[ROWS]) {
      Bytes codes[ROWS];
      for (int row = 0; row < ROWS; ++row) codes[row] = packed[row] & three;
      multiply_add(codes, 4 * i);
      for (int row = 0; row < ROWS; ++row) codes[row] = shift<2>(packed[row]) & three;
      multiply_add(codes, 4 * i + WIDTH);
      for (int row = 0; row < ROWS; ++row) codes[row] = shift<4>(packed[row]) & three;
      multiply_add(codes, 4 * i + 2 * WIDTH);
      for (int row = 0; row < ROWS; ++row) codes[row] = shift<6>(packed[row]) & three;
      multiply_add(codes, 4 * i + 3 * WIDTH);
    };
    for (; i + WIDTH <= end; i += WIDTH) {
      Bytes packed[ROWS];
      for (int row = 0; row < ROWS; ++row) {
        if (WIDTH == 64 || i % 64 == 0) prefetch(weights[row] + i + AHEAD);
        packed[row] = load(weights[row] + i);
      }
      four_fields(packed);
    }
#if DIFFBIT_ISA_AVX512VNNI
    if (i < end) {  // an odd number of blocks; the activations that meet the zeros are zero
      Bytes packed[ROWS];
      for (int row = 0; row < ROWS; ++row) packed[row] = load_half(weights[row] + i);
      four_fields(packed);
      i = end;
    }
#endif
    for (int row = 0; row < ROWS; ++row)
      for (int column = 0; column < COLUMNS; ++column)
        total[row][column] = flush(total[row][column], partial[row][column]);
  }

  for (int column = 0; column < COLUMNS; ++column)
    for (int row = 0; row < ROWS; row += 2) {
      int32_t four[4];
      const Ints a = total[row][column], b = total[row + 1][column];
      store_sums(four, a, b, a, b);
      sums[column][at[row]] += static_cast<uint32_t>(four[0]);
      sums[column][at[row + 1]] += static_cast<uint32_t>(four[1]);
    }
}

DIFFBIT_INLINE void to_half(const float* from, uint16_t* to) {  // LANES of them
#if DIFFBIT_ISA_AVX512VNNI
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(_mm512_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT));
#elif DIFFBIT_ISA_NEON
  vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(from))));
#else
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(_mm256_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT));
#endif
}

/// y of COLUMNS activation rows from `row` on and `count` <= PANEL weight rows from `begin` on.
template <int COLUMNS>
void panel(const TernaryProduct& product, int64_t row, int64_t begin, int64_t count) {
  constexpr int ROWS = rows_of(COLUMNS);
  constexpr int64_t SLICE = NEAR / COLUMNS / (4 * WIDTH) * WIDTH;  // bytes of a weight row
  const int64_t stride = product.blocks * TERNARY_BLOCK_BYTES, q_size = quantized_size(product.blocks);
  const int8_t* q = product.q + row * q_size;
  const uint8_t* packed = product.packed + begin * stride;
  uint32_t sums[COLUMNS][SUMS];  // unsigned, because the codes' sums may pass 2^31 before the activations' come off
  for (int column = 0; column < COLUMNS; ++column)
    for (int64_t i = 0; i < SUMS; ++i) sums[column][i] = -static_cast<uint32_t>(product.rows[row + column].sum);

  const int64_t quarter = count / STREAMS, left = count % STREAMS;
  for (int64_t offset = 0; offset < stride; offset += SLICE) {
    const int64_t bytes = stride - offset < SLICE ? stride - offset : SLICE;
    for (int64_t i = 0; i < quarter + (left > 0); ++i)
      for (int stream = 0; stream < STREAMS; stream += ROWS) {
        const uint8_t* weights[ROWS];
        int64_t at[ROWS];
        for (int r = 0; r < ROWS; ++r) {
          int64_t from = at[r] = (stream + r) * quarter + i;
          if (i == quarter) {  // the last rows; any weights fill the tile up
            from = at[r] = STREAMS * quarter + stream + r;
            if (from >= count) from = count - 1, at[r] = PANEL + r;
          }
          weights[r] = packed + from * stride + offset;
        }
        tile<ROWS, COLUMNS>(weights, bytes, q + 4 * offset, q_size, sums, at);
      }
  }

  for (int column = 0; column < COLUMNS; ++column) {
    const float step = product.rows[row + column].step;
    float wide[PANEL];
    for (int64_t i = 0; i < count; ++i)
      wide[i] = static_cast<float>(static_cast<int32_t>(sums[column][i])) * step * product.scale;
    const int64_t to = (row + column) * product.n + begin;
    if (product.half) {
      uint16_t narrow[PANEL];
      for (int64_t i = 0; i < PANEL; i += LANES)
        if (i < count) to_half(wide + i, narrow + i);
      std::memcpy(static_cast<uint16_t*>(product.y) + to, narrow, static_cast<size_t>(count) * 2);
    } else {
      std::memcpy(static_cast<float*>(product.y) + to, wide, static_cast<size_t>(count) * 4);
    }
  }
}

void multiply(const TernaryProduct& product, int64_t row_begin, int64_t row_end, int64_t begin, int64_t end) {
  for (; begin < end; begin += PANEL) {
    const int64_t count = end - begin < PANEL ? end - begin : PANEL;
    for (int64_t row = row_begin; row < row_end;) {
      const int64_t rows = row_end - row < MOST_COLUMNS ? row_end - row : MOST_COLUMNS;
      switch (rows) {
        case 1: panel<1>(product, row, begin, count); break;
        case 2: panel<2>(product, row, begin, count); break;
        case 3: panel<3>(product, row, begin, count); break;
#if DIFFBIT_ISA_AVX512VNNI || DIFFBIT_ISA_AVXVNNI
        case 4: panel<4>(product, row, begin, count); break;
        case 5: panel<5>(product, row, begin, count); break;
#endif
        default: panel<MOST_COLUMNS>(product, row, begin, count); break;
      }
      row += rows;
    }
  }
}

}  // namespace

extern const TernaryKernels ternary = {quantized_size, quantize, multiply};

}  // namespace diffbit::DIFFBIT_ISA
