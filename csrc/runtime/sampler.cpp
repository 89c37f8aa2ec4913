#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>

#include "../ort/op.h"

namespace diffbit::runtime {

diffbit_sampling sampling_of(JsonValue config) {
  const JsonValue samples = config["do_sample"];
  const bool unsaid = samples.is_null();
  diffbit_sampling settings{};
  settings.temperature = config["temperature"].number(unsaid ? 0.7 : 1);
  settings.top_k = static_cast<int32_t>(std::clamp(config["top_k"].number(50), 0.0, 0x1p30));
  settings.top_p = config["top_p"].number(unsaid ? 0.9 : 1);
  settings.min_p = config["min_p"].number(0);
  settings.repetition_penalty = config["repetition_penalty"].number(1);
  settings.seed = -1;
  if (!unsaid && !samples.truth()) settings.temperature = 0;
  return settings;
}

void Sampler::seed(int64_t seed) { state_ = static_cast<uint64_t>(seed), is_random_ = seed < 0; }

/// Weyl's sequence through a 64-bit mix (splitmix64, doi 10.1145/2660193.2660195).
double Sampler::draw() {
  if (is_random_) state_ = static_cast<uint64_t>(std::random_device()()) << 32 ^ std::random_device()();
  is_random_ = false;
  uint64_t mixed = state_ += 0x9e3779b97f4a7c15;
  mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9;
  mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111eb;
  return static_cast<double>((mixed ^ mixed >> 31) >> 11) * 0x1p-53;
}

int32_t Sampler::choose(const float* logits, int64_t count, const std::vector<int32_t>& ids, size_t prompt, const diffbit_sampling& settings) {
  const auto check = [](const char* name, double value, double least, double most) {
    if (!(value >= least && value <= most)) throw Error("%s is %g, wanted a number from %g to %g", name, value, least, most);
  };
  check("temperature", settings.temperature, 0, 1e6);
  check("top_k", settings.top_k, 0, 0x1p31);
  check("top_p", settings.top_p, 1e-300, 1);
  check("min_p", settings.min_p, 0, 1);
  check("repetition_penalty", settings.repetition_penalty, 1e-6, 1e6);
  check("frequency_penalty", settings.frequency_penalty, -100, 100);
  check("presence_penalty", settings.presence_penalty, -100, 100);

  std::vector<double> values(logits, logits + count);
  if (settings.repetition_penalty != 1)
    for (const int32_t id : std::set<int32_t>(ids.begin(), ids.end())) {
      double& value = values[static_cast<size_t>(id)];
      value = value > 0 ? value / settings.repetition_penalty : value * settings.repetition_penalty;
    }
  if (settings.frequency_penalty != 0 || settings.presence_penalty != 0) {
    std::map<int32_t, int> times;
    for (size_t i = prompt; i < ids.size(); ++i) ++times[ids[i]];
    for (const auto& [id, number] : times)
      values[static_cast<size_t>(id)] -= settings.frequency_penalty * number + settings.presence_penalty;
  }
  size_t best = 0;
  for (size_t i = 0; i < values.size(); ++i)
    if (values[i] > values[best] || std::isnan(values[i])) best = i;
  if (!std::isfinite(values[best])) throw Error("the model returned logits that are not finite: some of its numbers are too large");
  if (settings.temperature == 0) return static_cast<int32_t>(best);

  struct Candidate {
    int32_t id;
    double probability;
  };
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < values.size(); ++i)
    candidates.push_back({static_cast<int32_t>(i), std::exp((values[i] - values[best]) / settings.temperature)});
  const size_t kept = settings.top_k > 0 ? std::min(candidates.size(), static_cast<size_t>(settings.top_k)) : candidates.size();
  std::partial_sort(candidates.begin(), candidates.begin() + static_cast<std::ptrdiff_t>(kept), candidates.end(), [&](const Candidate& a, const Candidate& b) {
    const double left = values[static_cast<size_t>(a.id)], right = values[static_cast<size_t>(b.id)];
    return left != right ? left > right : a.id < b.id;
  });
  candidates.resize(kept);
  const auto total = [&] {
    double sum = 0;
    for (const Candidate& candidate : candidates) sum += candidate.probability;
    return sum;
  };
  double mass = 0;
  const double all = total();
  for (size_t i = 0; i < candidates.size(); ++i) {  // a token stays while those before it add up to less than top_p
    const bool stays = i == 0 || ((settings.top_p == 1 || mass < settings.top_p * all) &&
                                  candidates[i].probability >= settings.min_p * candidates[0].probability);
    if (!stays) {
      candidates.resize(i);
      break;
    }
    mass += candidates[i].probability;
  }
  double rest = draw() * total();
  for (const Candidate& candidate : candidates)
    if ((rest -= candidate.probability) < 0) return candidate.id;
  return candidates.back().id;
}

}  // namespace diffbit::runtime
