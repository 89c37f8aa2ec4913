#include "../ops.h"
#include "tiles.h"

namespace diffbit {
namespace {

/// Int4MatMul and Int8MatMul.
template <class Node_>
struct TiledMatMul : Node_ {
  explicit TiledMatMul(const Node& node)
      : Node_(node),
        kernels(Node_::WEIGHT_BITS == 4 ? DIFFBIT_PICK(int4) : DIFFBIT_PICK(int8)),
        many(pick_many_rows(node)) {}
  void compute(Context& context) const;
  const Int4Kernels* kernels;
  const ManyRowsKernels* many;
};

template <class Node_>
void TiledMatMul<Node_>::compute(Context& context) const {
  constexpr int64_t BITS = Node_::WEIGHT_BITS;
  const int64_t k = this->k, n = this->n, group_size = this->group_size;
  const typename Node_::Tensors tensors = this->tensors(context);
  expect_middle(tensors.zeros, tensors.zero, BITS);
  const Int4Weight weight = {tensors.codes.template as<uint8_t>(), tensors.scales.template as<uint16_t>(),
                             tensors.zeros.template as<uint8_t>(), *tensors.factor.template as<float>(), n,
                             divide_up(k, group_size), group_size, tensors.scale_groups};
  multiply_tiles(context, tensors.a, tensors.y, k, BITS, weight, tensors.zero && BITS == 4 ? -8 : -1, kernels->quantize,
                 *kernels, *many, kernels->most_rows, [&](int64_t) -> const Int4Weight& { return weight; });
}

}  // namespace

Kernel* create_int4_matmul(const Node& node) { return new KernelOf<TiledMatMul<Int4MatMulNode>>(node); }
Kernel* create_int8_matmul(const Node& node) { return new KernelOf<TiledMatMul<Int8MatMulNode>>(node); }

}  // namespace diffbit
