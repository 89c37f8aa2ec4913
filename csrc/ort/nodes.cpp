#include "nodes.h"

#include <algorithm>
#include <utility>

#include "layouts.h"

namespace diffbit {

FloatMatMulNode::FloatMatMulNode(const Node& node) { node.expect_version(VERSION); }

FloatMatMulNode::Tensors FloatMatMulNode::tensors(Context& context) const {
  const Tensor a = context.input(A), w = context.input(W);
  w.expect({-1, -1});
  const int64_t k = w.shape[1];
  if (!k) throw Error("%s is %s, wanted rows of numbers", w.name, w.shape_text().c_str());
  a.expect_last(k);
  return {a, w, context.product(Y, a, w.shape[0]), a.size() / k};
}

HadamardNode::HadamardNode(const Node& node) : block(node.integer(BLOCK)) {
  node.expect_version(VERSION);
  if (block & (block - 1)) throw Error("Hadamard: attribute block is %lld, wanted a power of two", number(block));
}

HadamardNode::Tensors HadamardNode::tensors(Context& context) const {
  const Tensor a = context.input(A);
  if (a.rank < 1 || a.shape[a.rank - 1] % block)
    throw Error("%s is %s, wanted its last dimension a multiple of %lld", a.name, a.shape_text().c_str(), number(block));
  return {a, context.output(Y, a.shape, a.rank)};
}

namespace {

/// A weight in tiles: throws where its tensors do not fit each other. {scales in a row, is zeros one number}.
std::pair<int64_t, bool> expect_tiles(int64_t bits, int64_t k, int64_t n, int64_t group_size, const Tensor& codes,
                                      const Tensor& scales, const Tensor& zeros, const Tensor& factor) {
  const int64_t groups = divide_up(k, group_size), tiles = divide_up(n, INT4_TILE), steps = group_size / INT4_STEP;
  if (bits == 4)
    codes.expect({tiles, groups, steps, INT4_TILE, 4});
  else
    codes.expect({tiles, groups, steps, 2, INT4_TILE, 4});
  const int64_t scale_groups = bits == 8 && scales.rank == 3 && scales.shape[1] == 1 ? 1 : groups;
  scales.expect({tiles, scale_groups, INT4_TILE});
  factor.expect({1});
  const bool symmetric = zeros.size() == 1;
  if (symmetric)
    zeros.expect({1, 1, 1});
  else
    zeros.expect({tiles, scale_groups, INT4_TILE});
  return {scale_groups, symmetric};
}

}  // namespace

template <class Schema, int64_t BITS_>
TiledNode<Schema, BITS_>::TiledNode(const Node& node)
    : k(node.integer(Schema::K)), n(node.integer(Schema::N)), group_size(node.integer(Schema::GROUP_SIZE)) {
  node.expect_version(Schema::VERSION);
}

template <class Schema, int64_t BITS_>
typename TiledNode<Schema, BITS_>::Tensors TiledNode<Schema, BITS_>::tensors(Context& context) const {
  const Tensor a = context.input(Schema::A), codes = context.input(Schema::CODES), scales = context.input(Schema::SCALES),
               zeros = context.input(Schema::ZEROS), factor = context.input(Schema::FACTOR);
  a.expect_last(k);
  const auto [scale_groups, symmetric] = expect_tiles(BITS_, k, n, group_size, codes, scales, zeros, factor);
  return {a, codes, scales, zeros, factor, context.product(Schema::Y, a, n), a.size() / k, scale_groups, symmetric};
}

template struct TiledNode<schema::Int4MatMul, 4>;
template struct TiledNode<schema::Int8MatMul, 8>;

GatherNode::GatherNode(const Node& node)
    : k(node.integer(K)), n(node.integer(N)), group_size(node.integer(GROUP_SIZE)), bits(node.integer(BITS)) {
  node.expect_version(VERSION);
}

GatherNode::Tensors GatherNode::tensors(Context& context) const {
  const Tensor ids = context.input(IDS), codes = context.input(CODES), scales = context.input(SCALES),
               zeros = context.input(ZEROS), factor = context.input(FACTOR);
  const auto [scale_groups, symmetric] = expect_tiles(bits, k, n, group_size, codes, scales, zeros, factor);
  int64_t shape[Tensor::MOST_DIMENSIONS];
  if (ids.rank + 1 > Tensor::MOST_DIMENSIONS)
    throw Error("%s has %zu dimensions, wanted fewer", ids.name, ids.rank);
  std::copy_n(ids.shape, ids.rank, shape);
  shape[ids.rank] = k;
  return {ids, codes, scales, zeros, factor, context.output(Y, shape, ids.rank + 1), scale_groups, symmetric};
}

TernaryNode::TernaryNode(const Node& node)
    : k(node.integer(K)), n(node.integer(N)), activation_bits(node.integer(ACTIVATION_BITS)) {
  node.expect_version(VERSION);
}

TernaryNode::Tensors TernaryNode::tensors(Context& context) const {
  const Tensor a = context.input(A), packed = context.input(PACKED), scale = context.input(SCALE);
  a.expect_last(k);
  packed.expect({n, divide_up(k, TERNARY_BLOCK) * TERNARY_BLOCK_BYTES});
  scale.expect({1});
  return {a, packed, scale, context.product(Y, a, n), a.size() / k};
}

}  // namespace diffbit
