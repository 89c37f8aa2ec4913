// Chooses the next token, as runtime/sampler.py defines: penalties, temperature, top-k, top-p, min-p, then the draw.
#pragma once

#include <cstdint>
#include <vector>

#include "diffbit.h"
#include "json.h"

namespace diffbit::runtime {

/// The model's own settings, of its generation_config.json.
diffbit_sampling sampling_of(JsonValue config);

class Sampler {
 public:
  /// Begins to draw with a seed; negative: a random one, which the system is asked for at the first draw.
  void seed(int64_t seed);
  /// Returns a token. ids: those so far, of which the first `prompt` were given. Throws Error for settings out of range, and for
  /// logits that are not finite.
  int32_t choose(const float* logits, int64_t count, const std::vector<int32_t>& ids, size_t prompt, const diffbit_sampling& settings);

 private:
  double draw();  // in [0, 1)
  uint64_t state_ = 0;
  bool is_random_ = false;
};

}  // namespace diffbit::runtime
