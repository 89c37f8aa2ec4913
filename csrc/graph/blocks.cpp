// Products with weights in blocks that ONNX Runtime has operators for: MatMulNBits (codes of 2, 4 or 8 bits, a scale and maybe a
// zero point for each block of a row; int8 activations with a scale for each block at accuracy level 4, else floats) and
// MatMulBnb4 (4-bit codes of a table, an absmax for each block of the whole weight; float activations).
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "onnx_ops.h"
#include "pool.h"

namespace diffbit::graph {
namespace {

constexpr int64_t MOST_BLOCK = 1024, ROWS_PER_TASK = 16;  // rows of the weight
constexpr int64_t PART = 4096;  // of a row, which is unpacked at a time; a multiple of every block

const GraphKernels& kernels() {
  static const GraphKernels* const chosen = DIFFBIT_PICK(graph_kernels);
  return *chosen;
}

struct Sizes {
  int64_t k, n, block, rows;
};

/// Reads and checks the attributes and the shape of x; gives y its shape.
Sizes sizes_of(Node& node) {
  const OrtValue& x = node.in(0);
  const Sizes sizes = {node.integer("K", 0), node.integer("N", 0), node.integer("block_size", 0), 0};
  constexpr int64_t MOST = int64_t{1} << 31;
  const bool is_power = sizes.block >= 16 && sizes.block <= MOST_BLOCK && !(sizes.block & (sizes.block - 1));
  if (sizes.k < 1 || sizes.n < 1 || sizes.k > MOST || sizes.n > MOST || !is_power) fail("%s has sizes that are not known here", node.op.c_str());
  if (!x.rank || x.shape[x.rank - 1] != sizes.k) fail("%s of matrices that do not fit", node.op.c_str());
  Shape shape;
  std::memcpy(shape, x.shape, sizeof shape);
  shape[x.rank - 1] = sizes.n;
  node.out(0).resize(shape, x.rank);
  return {sizes.k, sizes.n, sizes.block, x.size(0, x.rank - 1)};
}

void expect(const Node& node, const OrtValue& value, int type, int64_t size) {
  if (value.type != type || value.size() != size) fail("%s has codes or scales of another type or size", node.op.c_str());
}

/// Calls work(n) for the rows of the weight.
template <class Work>
void each_weight_row(int64_t n, const Work& work) {
  parallel((n + ROWS_PER_TASK - 1) / ROWS_PER_TASK, [&](int64_t task) {
    for (int64_t row = task * ROWS_PER_TASK; row < n && row < (task + 1) * ROWS_PER_TASK; ++row) work(row);
  });
}

}  // namespace

void nbits(Node& node) {
  const Sizes sizes = sizes_of(node);
  const int64_t bits = node.integer("bits", 4), blocks = (sizes.k + sizes.block - 1) / sizes.block, width = blocks * sizes.block;
  if (bits != 2 && bits != 4 && bits != 8) fail("MatMulNBits of %lld bits", static_cast<long long>(bits));
  for (size_t i = 4; i < node.inputs.size(); ++i)
    if (node.inputs[i]) fail("MatMulNBits with more inputs than are known here");
  const OrtValue &x = node.in(0), &codes = node.in(1), &scales = node.in(2);
  const OrtValue* zeros = node.maybe(3);
  const int64_t zero_bytes = (blocks * bits + 7) / 8, row_bytes = width * bits / 8;
  expect(node, codes, ort::UINT8, sizes.n * row_bytes);
  expect(node, scales, ort::FLOAT32, sizes.n * blocks);
  if (zeros) expect(node, *zeros, ort::UINT8, sizes.n * zero_bytes);
  float* const y = node.out(0).as<float>();
  const bool is_rounded = node.integer("accuracy_level", 0) == 4;

  // x in whole blocks: int16, which holds int8 values, and their scales; or floats
  std::vector<int16_t> rounded(is_rounded ? static_cast<size_t>(sizes.rows * width) : 0);
  std::vector<float> factors(is_rounded ? static_cast<size_t>(sizes.rows * blocks) : 0);
  std::vector<float> padded(is_rounded ? 0 : static_cast<size_t>(sizes.rows * width));
  for (int64_t row = 0; row < sizes.rows; ++row) {
    const float* from = x.as<float>() + row * sizes.k;
    if (is_rounded)
      kernels().round_blocks(from, sizes.k, sizes.block, rounded.data() + row * width, factors.data() + row * blocks);
    else
      std::memcpy(padded.data() + row * width, from, static_cast<size_t>(sizes.k) * sizeof(float));
  }
  each_weight_row(sizes.n, [&](int64_t n) {
    const uint8_t* of_row = codes.as<uint8_t>() + n * row_bytes;
    const float* of_blocks = scales.as<float>() + n * blocks;
    for (int64_t row = 0; row < sizes.rows; ++row) y[row * sizes.n + n] = 0;
    for (int64_t begin = 0; begin < width; begin += PART) {
      const int64_t size = std::min(PART, width - begin), first = begin / sizes.block, count = size / sizes.block;
      int16_t values[PART];
      kernels().unpack(of_row + begin * bits / 8, static_cast<int>(bits), size, values);
      for (int64_t block = 0; block < count; ++block) {
        const int64_t at = (first + block) * bits;
        const int zero = !zeros ? 1 << (bits - 1)
                                : zeros->as<uint8_t>()[n * zero_bytes + at / 8] >> at % 8 & ((1 << bits) - 1);
        for (int64_t i = block * sizes.block; i < (block + 1) * sizes.block; ++i) values[i] = static_cast<int16_t>(values[i] - zero);
      }
      if (is_rounded) {
        for (int64_t row = 0; row < sizes.rows; ++row)
          y[row * sizes.n + n] += kernels().dot_blocks(rounded.data() + row * width + begin, factors.data() + row * blocks + first, values,
                                                       of_blocks + first, count, sizes.block);
        continue;
      }
      float weight[PART];
      for (int64_t i = 0; i < size; ++i) weight[i] = static_cast<float>(values[i]) * of_blocks[first + i / sizes.block];
      for (int64_t row = 0; row < sizes.rows; ++row)
        y[row * sizes.n + n] += kernels().dot(padded.data() + row * width + begin, weight, size);
    }
  });
}

void bnb4(Node& node) {
  static constexpr float TABLES[2][16] = {  // bitsandbytes' fp4 and nf4
      {0.0f, 5.208333333e-03f, 0.66666667f, 1.0f, 0.33333333f, 0.5f, 0.16666667f, 0.25f,
       -0.0f, -5.208333333e-03f, -0.66666667f, -1.0f, -0.33333333f, -0.5f, -0.16666667f, -0.25f},
      {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f, -0.18477343022823334f,
       -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
       0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f}};
  const Sizes sizes = sizes_of(node);
  const int64_t type = node.integer("quant_type", 1), count = sizes.n * sizes.k;
  if (type != 0 && type != 1) fail("MatMulBnb4 of a type that is not known here");
  const OrtValue &x = node.in(0), &codes = node.in(1), &peaks = node.in(2);
  expect(node, codes, ort::UINT8, (count + 1) / 2);
  expect(node, peaks, ort::FLOAT32, (count + sizes.block - 1) / sizes.block);
  float* const y = node.out(0).as<float>();
  each_weight_row(sizes.n, [&](int64_t n) {
    for (int64_t row = 0; row < sizes.rows; ++row) y[row * sizes.n + n] = 0;
    for (int64_t begin = 0; begin < sizes.k; begin += PART) {
      const int64_t size = std::min(PART, sizes.k - begin);
      float weight[PART];
      for (int64_t i = 0; i < size; ++i) {
        const int64_t at = n * sizes.k + begin + i;
        const int code = at % 2 ? codes.as<uint8_t>()[at / 2] & 15 : codes.as<uint8_t>()[at / 2] >> 4;
        weight[i] = TABLES[type][code] * peaks.as<float>()[at / sizes.block];
      }
      for (int64_t row = 0; row < sizes.rows; ++row)
        y[row * sizes.n + n] += kernels().dot(x.as<float>() + row * sizes.k + begin, weight, size);
    }
  });
}

void blocks_checked(Node& node) {
  if (node.in(0).type != ort::FLOAT32) fail("%s of ONNX's type %d", node.op.c_str(), node.in(0).type);
  node.out(0).set_type(ort::FLOAT32);
}

}  // namespace diffbit::graph
