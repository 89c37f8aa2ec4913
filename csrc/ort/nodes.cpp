#include "nodes.h"

#include "layouts.h"

namespace diffbit {

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

Int4Node::Int4Node(const Node& node)
    : k(node.integer(K)), n(node.integer(N)), group_size(node.integer(GROUP_SIZE)) {
  node.expect_version(VERSION);
}

Int4Node::Tensors Int4Node::tensors(Context& context) const {
  const Tensor a = context.input(A), codes = context.input(CODES), scales = context.input(SCALES),
               zeros = context.input(ZEROS), factor = context.input(FACTOR);
  const int64_t groups = divide_up(k, group_size), tiles = divide_up(n, INT4_TILE);
  a.expect_last(k);
  codes.expect({tiles, groups, group_size / INT4_STEP, INT4_TILE, 4});
  scales.expect({tiles, groups, INT4_TILE});
  factor.expect({1});
  const bool symmetric = zeros.size() == 1;
  if (symmetric)
    zeros.expect({1, 1, 1});
  else
    zeros.expect({tiles, groups, INT4_TILE});
  return {a, codes, scales, zeros, factor, context.product(Y, a, n), a.size() / k, symmetric};
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
