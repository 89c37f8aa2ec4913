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
  const Tensors tensors = this->tensors(context);
  const int64_t item = tensors.x.type == ort::FLOAT16 ? 2 : 4, row = tensors.steps * tensors.channels * item;
  const int64_t tasks = divide_up(tensors.channels, CONV_CHANNELS), state = (tensors.width - 1) * tensors.channels;
  context.parallel(tensors.batch * tasks, [&](int64_t task) {
    const int64_t b = task / tasks, begin = task % tasks * CONV_CHANNELS;
    ConvTokens tokens{};
    tokens.x = tensors.x.as<char>() + b * row, tokens.y = tensors.y.as<char>() + b * row, tokens.half = item == 2;
    tokens.steps = tensors.steps, tokens.channels = tensors.channels;
    tokens.mask = tensors.attention_mask.as<int64_t>() + (b + 1) * tensors.total - tensors.steps;
    tokens.past = tensors.past_state.as<float>() + b * state, tokens.present = tensors.present_state.as<float>() + b * state;
    tokens.weight = tensors.weight.as<float>(), tokens.bias = tensors.bias.as<float>(), tokens.width = tensors.width;
    const int64_t room = divide_up(std::min(CONV_CHANNELS, tensors.channels), MAMBA_LANES) * MAMBA_LANES;
    kernels->conv(tokens, begin, std::min(begin + CONV_CHANNELS, tensors.channels),
                  scratch<float>(FLOATS, tensors.width * room));
  });
}

void SelectiveScan::compute(Context& context) const {
  const Tensors tensors = this->tensors(context);
  const int64_t item = tensors.x.type == ort::FLOAT16 ? 2 : 4, row = tensors.steps * tensors.channels * item;
  const int64_t channels_per_task = tensors.steps < PROMPT ? TOKEN_CHANNELS : PROMPT_CHANNELS;
  const int64_t tasks = divide_up(tensors.channels, channels_per_task);
  const int64_t state = tensors.states * tensors.channels, low = tensors.steps * tensors.states * item;
  context.parallel(tensors.batch * tasks, [&](int64_t task) {
    const int64_t b = task / tasks, begin = task % tasks * channels_per_task;
    const auto at = [&](const Tensor& tensor, int64_t bytes) { return tensor.as<char>() + b * bytes; };
    ScanTokens tokens{};
    tokens.x = at(tensors.x, row), tokens.y = at(tensors.y, row);
    tokens.dt = at(tensors.dt, row), tokens.z = at(tensors.z, row);
    tokens.b = at(tensors.b, low), tokens.c = at(tensors.c, low);
    tokens.memory = tensors.memory.data ? at(tensors.memory, row) : nullptr;
    tokens.half = item == 2, tokens.steps = tensors.steps, tokens.channels = tensors.channels, tokens.states = tensors.states;
    tokens.mask = tensors.attention_mask.as<int64_t>() + (b + 1) * tensors.total - tensors.steps;
    tokens.past = tensors.past_state.as<float>() + b * state, tokens.present = tensors.present_state.as<float>() + b * state;
    tokens.a = tensors.a.as<float>(), tokens.d = tensors.d.as<float>(), tokens.dt_bias = tensors.dt_bias.as<float>();
    kernels->scan(tokens, begin, std::min(begin + channels_per_task, tensors.channels),
                  scratch<float>(FLOATS, 2 * tensors.states * SCAN_TOKENS));
  });
}

}  // namespace

Kernel* create_causal_conv(const Node& node) { return new KernelOf<CausalConv>(node); }
Kernel* create_selective_scan(const Node& node) { return new KernelOf<SelectiveScan>(node); }

}  // namespace diffbit
