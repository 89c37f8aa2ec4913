#include "nodes.h"

#include <algorithm>
#include <utility>

#include "layouts.h"

namespace diffbit {

namespace {

/// Checks x [batch, steps, channels] and the mask; throws if they do not fit. Returns the columns of the mask.
int64_t expect_tokens(const Tensor& x, const Tensor& mask) {
  x.expect({-1, -1, -1});
  if (!x.shape[2]) throw Error("%s is %s, wanted channels", x.name, x.shape_text().c_str());
  mask.expect({x.shape[0], -1});
  if (mask.shape[1] < x.shape[1])
    throw Error("%s is %s, wanted a column for each of %lld tokens", mask.name, mask.shape_text().c_str(), number(x.shape[1]));
  return mask.shape[1];
}

}  // namespace

CausalConvNode::CausalConvNode(const Node&) {}

CausalConvNode::Tensors CausalConvNode::tensors(Context& context) const {
  const Tensor x = context.input(X), weight = context.input(WEIGHT), bias = context.input(BIAS),
               mask = context.input(ATTENTION_MASK), past = context.input(PAST_STATE);
  const int64_t total = expect_tokens(x, mask), batch = x.shape[0], channels = x.shape[2];
  weight.expect({-1, channels});
  const int64_t width = weight.shape[0];
  if (width < 2 || width > CONV_MOST_WIDTH)
    throw Error("%s is %s, wanted 2 to %lld rows", weight.name, weight.shape_text().c_str(), number(CONV_MOST_WIDTH));
  bias.expect({channels});
  past.expect({batch, width - 1, channels});
  return {x, weight, bias, mask, past, context.output(Y, x.shape, x.rank), context.output(PRESENT_STATE, past.shape, past.rank),
          batch, x.shape[1], total, channels, width};
}

FloatMatMulNode::FloatMatMulNode(const Node&) {}

FloatMatMulNode::Tensors FloatMatMulNode::tensors(Context& context) const {
  const Tensor a = context.input(A), w = context.input(W);
  w.expect({-1, -1});
  const int64_t k = w.shape[1];
  if (!k) throw Error("%s is %s, wanted rows of numbers", w.name, w.shape_text().c_str());
  a.expect_last(k);
  return {a, w, context.product(Y, a, w.shape[0]), a.size() / k};
}

HadamardNode::HadamardNode(const Node& node) : block(node.integer(BLOCK)) {
  if (block & (block - 1)) throw Error("Hadamard: attribute block is %lld, wanted a power of two", number(block));
}

HadamardNode::Tensors HadamardNode::tensors(Context& context) const {
  const Tensor a = context.input(A);
  if (a.rank < 1 || a.shape[a.rank - 1] % block)
    throw Error("%s is %s, wanted its last dimension a multiple of %lld", a.name, a.shape_text().c_str(), number(block));
  return {a, context.output(Y, a.shape, a.rank)};
}

SiluGateNode::Tensors SiluGateNode::tensors(Context& context) const {
  const Tensor a = context.input(A);
  if (a.rank < 1 || a.shape[a.rank - 1] % 2)
    throw Error("%s is %s, wanted an even last dimension", a.name, a.shape_text().c_str());
  const int64_t n = a.shape[a.rank - 1] / 2;
  return {a, context.product(Y, a, n), n ? a.size() / (2 * n) : 0, n};
}

namespace {

/// Checks that the tensors of a weight in tiles fit together. Returns {scales of a row, the one zero point}; if there is one,
/// takes it out of `zeros`.
std::pair<int64_t, const uint8_t*> expect_tiles(int64_t bits, int64_t k, int64_t n, int64_t group_size,
                                                const Tensor& codes, const Tensor& scales, Tensor& zeros,
                                                const Tensor& factor) {
  const int64_t groups = divide_up(k, group_size), tiles = divide_up(n, INT4_TILE), steps = group_size / INT4_STEP;
  if (bits == 4)
    codes.expect({tiles, groups, steps, INT4_TILE, 4});
  else
    codes.expect({tiles, groups, steps, 2, INT4_TILE, 4});
  const int64_t scale_groups = bits == 8 && scales.rank == 3 && scales.shape[1] == 1 ? 1 : groups;
  scales.expect({tiles, scale_groups, INT4_TILE});
  factor.expect({1});
  if (zeros.size() != 1) {
    zeros.expect({tiles, scale_groups, INT4_TILE});
    return {scale_groups, nullptr};
  }
  zeros.expect({1, 1, 1});
  return {scale_groups, static_cast<const uint8_t*>(std::exchange(zeros.data, nullptr))};
}

}  // namespace

template <class Schema, int64_t BITS_>
TiledNode<Schema, BITS_>::TiledNode(const Node& node)
    : k(node.integer(Schema::K)), n(node.integer(Schema::N)), group_size(node.integer(Schema::GROUP_SIZE)) {}

template <class Schema, int64_t BITS_>
typename TiledNode<Schema, BITS_>::Tensors TiledNode<Schema, BITS_>::tensors(Context& context) const {
  const Tensor a = context.input(Schema::A), codes = context.input(Schema::CODES), scales = context.input(Schema::SCALES),
               factor = context.input(Schema::FACTOR);
  Tensor zeros = context.input(Schema::ZEROS);
  a.expect_last(k);
  const auto [scale_groups, zero] = expect_tiles(BITS_, k, n, group_size, codes, scales, zeros, factor);
  return {a, codes, scales, zeros, factor, context.product(Schema::Y, a, n), a.size() / k, scale_groups, zero};
}

template struct TiledNode<schema::Int4MatMul, 4>;
template struct TiledNode<schema::Int8MatMul, 8>;

void expect_middle(const Tensor& zeros, const uint8_t* zero, int64_t bits) {
  const int64_t middle = int64_t{1} << (bits - 1);
  if (zero && *zero != middle)
    throw Error("%s is one %d, wanted one %lld or one of each group", zeros.name, int{*zero}, number(middle));
}

namespace {

/// Allocates an output [ids..., k].
Tensor rows_of(Context& context, const schema::Output& position, const Tensor& ids, int64_t k) {
  int64_t shape[Tensor::MOST_DIMENSIONS];
  if (ids.rank + 1 > Tensor::MOST_DIMENSIONS)
    throw Error("%s has %zu dimensions, wanted fewer", ids.name, ids.rank);
  std::copy_n(ids.shape, ids.rank, shape);
  shape[ids.rank] = k;
  return context.output(position, shape, ids.rank + 1);
}

}  // namespace

GatherQuantizedNode::GatherQuantizedNode(const Node& node)
    : k(node.integer(K)), n(node.integer(N)), group_size(node.integer(GROUP_SIZE)), bits(node.integer(BITS)) {}

GatherQuantizedNode::Tensors GatherQuantizedNode::tensors(Context& context) const {
  const Tensor ids = context.input(IDS), codes = context.input(CODES), scales = context.input(SCALES),
               factor = context.input(FACTOR);
  Tensor zeros = context.input(ZEROS);
  const auto [scale_groups, zero] = expect_tiles(bits, k, n, group_size, codes, scales, zeros, factor);
  return {ids, codes, scales, zeros, factor, rows_of(context, Y, ids, k), ids.size(), scale_groups, zero};
}

namespace {

/// Reads the inputs that LowBitMatMul and GatherLowBit share; throws if they do not fit together.
template <class Node_>
LowBitTensors expect_planes(const Node_& node, Context& context) {
  LowBitTensors tensors{};
  tensors.codes = context.input(Node_::CODES), tensors.scales = context.input(Node_::SCALES);
  tensors.row_scales = context.input(Node_::ROW_SCALES), tensors.levels = context.input(Node_::LEVELS);
  tensors.factor = context.input(Node_::FACTOR);
  const int64_t groups = divide_up(node.k, node.group_size), tiles = divide_up(node.n, INT4_TILE);
  tensors.codes.expect({tiles, groups, node.group_size / LOWBIT_RUN, node.bits, INT4_TILE, 4});
  tensors.scales.expect({tiles, groups, INT4_TILE});
  tensors.factor.expect({1});
  if (tensors.row_scales.size() == 1) {
    tensors.row_scales.expect({1, 1});
    tensors.row_scale = static_cast<const uint16_t*>(std::exchange(tensors.row_scales.data, nullptr));
  } else {
    tensors.row_scales.expect({tiles, INT4_TILE});
  }
  tensors.is_trellis = node.bits > 1 && tensors.levels.size() == trellis_levels(node.bits);
  if (tensors.is_trellis) {
    tensors.levels.expect({tensors.levels.size()});
    if (node.n % TRELLIS_ROWS) throw Error("N is %lld, wanted a multiple of %lld of trellis codes", number(node.n), number(TRELLIS_ROWS));
  } else if (node.bits > 4 || (node.bits > 1 && tensors.levels.size() == 1)) {
    tensors.levels.expect({1});
    tensors.level = static_cast<const uint8_t*>(std::exchange(tensors.levels.data, nullptr));
  } else {
    tensors.levels.expect({int64_t{1} << node.bits});
  }
  return tensors;
}

}  // namespace

LowBitMatMulNode::LowBitMatMulNode(const Node& node)
    : k(node.integer(K)), n(node.integer(N)), group_size(node.integer(GROUP_SIZE)), bits(node.integer(BITS)) {}

LowBitTensors LowBitMatMulNode::tensors(Context& context) const {
  LowBitTensors tensors = expect_planes(*this, context);
  tensors.a = context.input(A);
  tensors.a.expect_last(k);
  tensors.y = context.product(Y, tensors.a, n);
  tensors.rows = tensors.a.size() / k;
  return tensors;
}

GatherLowBitNode::GatherLowBitNode(const Node& node)
    : k(node.integer(K)), n(node.integer(N)), group_size(node.integer(GROUP_SIZE)), bits(node.integer(BITS)) {}

LowBitTensors GatherLowBitNode::tensors(Context& context) const {
  LowBitTensors tensors = expect_planes(*this, context);
  tensors.ids = context.input(IDS);
  tensors.y = rows_of(context, Y, tensors.ids, k);
  tensors.rows = tensors.ids.size();
  return tensors;
}

SelectiveScanNode::SelectiveScanNode(const Node&) {}

SelectiveScanNode::Tensors SelectiveScanNode::tensors(Context& context) const {
  const Tensor x = context.input(X), dt = context.input(DT), z = context.input(Z), b = context.input(B),
               c = context.input(C), a = context.input(A), d = context.input(D), dt_bias = context.input(DT_BIAS),
               mask = context.input(ATTENTION_MASK), past = context.input(PAST_STATE);
  const int64_t total = expect_tokens(x, mask), batch = x.shape[0], steps = x.shape[1], channels = x.shape[2];
  a.expect({-1, channels});
  const int64_t states = a.shape[0];
  if (states < 1 || states > SCAN_MOST_STATES)
    throw Error("%s is %s, wanted 1 to %lld rows", a.name, a.shape_text().c_str(), number(SCAN_MOST_STATES));
  for (const Tensor* tensor : {&dt, &z}) tensor->expect({batch, steps, channels});
  for (const Tensor* tensor : {&b, &c}) tensor->expect({batch, steps, states});
  for (const Tensor* tensor : {&d, &dt_bias}) tensor->expect({channels});
  past.expect({batch, states, channels});
  return {x, dt, z, b, c, a, d, dt_bias, mask, past, context.output(Y, x.shape, x.rank), context.output(MEMORY, x.shape, x.rank),
          context.output(PRESENT_STATE, past.shape, past.rank), batch, steps, total, channels, states};
}

TernaryMatMulNode::TernaryMatMulNode(const Node& node)
    : k(node.integer(K)), n(node.integer(N)), activation_bits(node.integer(ACTIVATION_BITS)) {}

TernaryMatMulNode::Tensors TernaryMatMulNode::tensors(Context& context) const {
  const Tensor a = context.input(A), packed = context.input(PACKED), scale = context.input(SCALE);
  a.expect_last(k);
  packed.expect({n, divide_up(k, TERNARY_BLOCK) * TERNARY_BLOCK_BYTES});
  const bool scale_per_row = scale.rank == 1 && scale.shape[0] == n;
  if (!scale_per_row && (scale.rank != 1 || scale.shape[0] != 1))
    throw Error("%s is %s, wanted [1] or [%lld]", scale.name, scale.shape_text().c_str(), number(n));
  return {a, packed, scale, context.product(Y, a, n), a.size() / k, scale_per_row};
}

}  // namespace diffbit
