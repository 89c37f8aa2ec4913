#include <algorithm>

#include "../ops.h"
#include "kernels.h"

namespace diffbit {
namespace {

enum Scratch { FLOATS };
// Channels per task: few for a prompt's scan, so their states stay in L1 (with 16 numbers 8 KB, and 8 KB of A); many for a
// single token, so a task is worth starting
constexpr int64_t CONV_CHANNELS = 512, PROMPT_CHANNELS = 128, TOKEN_CHANNELS = 640, PROMPT = 8;

struct CausalConv : CausalConvNode {
  using CausalConvNode::CausalConvNode;
  void compute(Context& context) const;
  const MambaKernels* kernels = DIFFBIT_PICK(mamba);
};

struct SelectiveScan : SelectiveScanNode {
  using SelectiveScanNode::SelectiveScanNode;
  void compute(Context& context) const;
  const MambaKernels* kernels = DIFFBIT_PICK(mamba);
};

void CausalConv::compute(Context& context) const {
  const Tensors of = tensors(context);
  const int64_t item = of.x.type == ort::FLOAT16 ? 2 : 4, row = of.steps * of.channels * item;
  const int64_t tasks = divide_up(of.channels, CONV_CHANNELS), state = (of.width - 1) * of.channels;
  context.parallel(of.batch * tasks, [&](int64_t task) {
    const int64_t b = task / tasks, begin = task % tasks * CONV_CHANNELS;
    ConvTokens tokens{};
    tokens.x = of.x.as<char>() + b * row, tokens.y = of.y.as<char>() + b * row, tokens.half = item == 2;
    tokens.steps = of.steps, tokens.channels = of.channels;
    tokens.mask = of.attention_mask.as<int64_t>() + (b + 1) * of.total - of.steps;
    tokens.past = of.past_state.as<float>() + b * state, tokens.present = of.present_state.as<float>() + b * state;
    tokens.weight = of.weight.as<float>(), tokens.bias = of.bias.as<float>(), tokens.width = of.width;
    kernels->conv(tokens, begin, std::min(begin + CONV_CHANNELS, of.channels),
                  scratch<float>(FLOATS, of.width * divide_up(std::min(CONV_CHANNELS, of.channels), MAMBA_LANES) * MAMBA_LANES));
  });
}

void SelectiveScan::compute(Context& context) const {
  const Tensors of = tensors(context);
  const int64_t item = of.x.type == ort::FLOAT16 ? 2 : 4, row = of.steps * of.channels * item;
  const int64_t some = of.steps < PROMPT ? TOKEN_CHANNELS : PROMPT_CHANNELS, tasks = divide_up(of.channels, some);
  const int64_t state = of.states * of.channels, low = of.steps * of.states * item;
  context.parallel(of.batch * tasks, [&](int64_t task) {
    const int64_t b = task / tasks, begin = task % tasks * some;
    const auto at = [&](const Tensor& tensor, int64_t bytes) { return tensor.as<char>() + b * bytes; };
    ScanTokens tokens{};
    tokens.x = at(of.x, row), tokens.dt = at(of.dt, row), tokens.z = at(of.z, row), tokens.y = at(of.y, row);
    tokens.b = at(of.b, low), tokens.c = at(of.c, low), tokens.memory = of.memory.data ? at(of.memory, row) : nullptr;
    tokens.half = item == 2, tokens.steps = of.steps, tokens.channels = of.channels, tokens.states = of.states;
    tokens.mask = of.attention_mask.as<int64_t>() + (b + 1) * of.total - of.steps;
    tokens.past = of.past_state.as<float>() + b * state, tokens.present = of.present_state.as<float>() + b * state;
    tokens.a = of.a.as<float>(), tokens.d = of.d.as<float>(), tokens.dt_bias = of.dt_bias.as<float>();
    kernels->scan(tokens, begin, std::min(begin + some, of.channels),
                  scratch<float>(FLOATS, 2 * of.states * SCAN_TOKENS));
  });
}

}  // namespace

Kernel* create_causal_conv(const Node& node) { return new KernelOf<CausalConv>(node); }
Kernel* create_selective_scan(const Node& node) { return new KernelOf<SelectiveScan>(node); }

}  // namespace diffbit
