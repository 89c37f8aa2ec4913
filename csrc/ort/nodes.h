// What nodes of the matrix products and of Hadamard say, checked; the same on every device. attention_node.h has the other.
#pragma once

#include "generated/schema.h"
#include "op.h"

namespace diffbit {

struct HadamardNode : schema::Hadamard {
  struct Tensors {
    Tensor a, y;
  };

  explicit HadamardNode(const Node& node);
  Tensors tensors(Context& context) const;

  int64_t block;
};

struct Int4Node : schema::Int4MatMul {
  struct Tensors {
    Tensor a, codes, scales, zeros, factor, y;
    int64_t rows;    // of a
    bool symmetric;  // zeros is one number
  };

  explicit Int4Node(const Node& node);
  Tensors tensors(Context& context) const;

  int64_t k, n, group_size;
};

struct TernaryNode : schema::TernaryMatMul {
  struct Tensors {
    Tensor a, packed, scale, y;
    int64_t rows;  // of a
  };

  explicit TernaryNode(const Node& node);
  Tensors tensors(Context& context) const;

  int64_t k, n, activation_bits;
};

}  // namespace diffbit
