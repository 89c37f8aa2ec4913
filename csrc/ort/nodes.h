// Checks the attributes and tensors of nodes, for every device. DiffAttention is in attention_node.h.
#pragma once

#include "generated/schema.h"
#include "op.h"

namespace diffbit {

struct CausalConvNode : schema::CausalConv {
  struct Tensors {
    Tensor x, weight, bias, attention_mask, past_state, y, present_state;
    int64_t batch, steps, total, channels, width;  // total: columns of attention_mask
  };

  explicit CausalConvNode(const Node& node);
  Tensors tensors(Context& context) const;
};

struct FloatMatMulNode : schema::FloatMatMul {
  struct Tensors {
    Tensor a, w, y;
    int64_t rows;  // of a
  };

  explicit FloatMatMulNode(const Node& node);
  Tensors tensors(Context& context) const;
};

struct SiluGateNode : schema::SiluGate {
  struct Tensors {
    Tensor a, y;
    int64_t rows, n;  // of y
  };

  explicit SiluGateNode(const Node&) {}
  Tensors tensors(Context& context) const;
};

struct HadamardNode : schema::Hadamard {
  struct Tensors {
    Tensor a, y;
  };

  explicit HadamardNode(const Node& node);
  Tensors tensors(Context& context) const;

  int64_t block;
};

/// Int4MatMul and Int8MatMul.
template <class Schema, int64_t BITS_>
struct TiledNode : Schema {
  static constexpr int64_t WEIGHT_BITS = BITS_;
  struct Tensors {
    Tensor a, codes, scales, zeros, factor, y;  // zeros.data is null if there is one zero point
    int64_t rows;                               // of a
    int64_t scale_groups;                       // scales in a row of the weight
    const uint8_t* zero;                        // the one zero point, else null
  };

  explicit TiledNode(const Node& node);
  Tensors tensors(Context& context) const;

  int64_t k, n, group_size;
};
using Int4MatMulNode = TiledNode<schema::Int4MatMul, 4>;
using Int8MatMulNode = TiledNode<schema::Int8MatMul, 8>;

/// Throws if the one zero point is not that of a symmetric format. For CPUs: on a GPU it is in the device's memory.
void expect_middle(const Tensor& zeros, const uint8_t* zero, int64_t bits);

struct GatherQuantizedNode : schema::GatherQuantized {
  struct Tensors {
    Tensor ids, codes, scales, zeros, factor, y;  // as in TiledNode
    int64_t rows;                                 // of y
    int64_t scale_groups;
    const uint8_t* zero;
  };

  explicit GatherQuantizedNode(const Node& node);
  Tensors tensors(Context& context) const;

  int64_t k, n, group_size, bits;
};

/// LowBitMatMul (`a` and `y`) and GatherLowBit (`ids`).
struct LowBitTensors {
  Tensor a, ids, codes, scales, row_scales, levels, factor, y;  // row_scales and levels: data is null if there is a single one
  int64_t rows;                                                 // of y
  const uint16_t* row_scale;                                    // the single one, else null
  const uint8_t* level;
  bool is_trellis;
};

struct LowBitMatMulNode : schema::LowBitMatMul {
  using Tensors = LowBitTensors;
  explicit LowBitMatMulNode(const Node& node);
  Tensors tensors(Context& context) const;

  int64_t k, n, group_size, bits;
};

struct GatherLowBitNode : schema::GatherLowBit {
  using Tensors = LowBitTensors;
  explicit GatherLowBitNode(const Node& node);
  Tensors tensors(Context& context) const;

  int64_t k, n, group_size, bits;
};

struct SelectiveScanNode : schema::SelectiveScan {
  struct Tensors {
    Tensor x, dt, z, b, c, a, d, dt_bias, attention_mask, past_state;
    Tensor y, memory, present_state;  // memory.data is null if it is not requested
    int64_t batch, steps, total, channels, states;
  };

  explicit SelectiveScanNode(const Node& node);
  Tensors tensors(Context& context) const;
};

struct TernaryMatMulNode : schema::TernaryMatMul {
  struct Tensors {
    Tensor a, packed, scale, y;
    int64_t rows;        // of a
    bool scale_per_row;  // of the weight; else scale is one number
  };

  explicit TernaryMatMulNode(const Node& node);
  Tensors tensors(Context& context) const;

  int64_t k, n, activation_bits;
};

}  // namespace diffbit
