// The inner loops of CausalConv and SelectiveScan, one table per instruction set (ops/causal_conv.py and
// ops/selective_scan.py define them). A call computes one sequence and some of its channels.
#pragma once

#include <cstdint>

#include "../isa.h"

namespace diffbit {

/// Arguments of both. Rows of x and y are [steps, channels], fp16 if `half`; past and present may be the same memory.
struct MambaTokens {
  const void* x;
  void* y;
  bool half;
  int64_t steps, channels;
  const int64_t* mask;  // [steps], 0: padding
  const float* past;
  float* present;
};

struct ConvTokens : MambaTokens {
  const float *weight, *bias;
  int64_t width;
};

struct ScanTokens : MambaTokens {
  const void *dt, *z, *b, *c;
  const float *a, *d, *dt_bias;
  void* memory;  // null: not requested
  int64_t states;
};

constexpr int64_t MAMBA_LANES = 16;  // of the widest vectors
constexpr int64_t SCAN_TOKENS = 16;  // tokens whose numbers stay in L1 while each state passes over them

struct MambaKernels {
  /// Computes the channels begin ... end - 1. `floats` holds `width` rows of them, rounded up to MAMBA_LANES.
  void (*conv)(const ConvTokens& call, int64_t begin, int64_t end, float* floats);
  /// Computes them likewise; `floats` holds 2 * states * SCAN_TOKENS of them.
  void (*scan)(const ScanTokens& call, int64_t begin, int64_t end, float* floats);
};

DIFFBIT_DECLARE(MambaKernels, mamba)

}  // namespace diffbit
