// Continues token ids with an artifact on plain ONNX Runtime with diffbit's kernels, always with the most likely token.
//
//     run ARTIFACT COUNT ID...        (docs/packages.md says how to compile it)
//
// The cache grows here: each call's present.N.* are the next call's past_key_values.N.*. If `in_place` in the manifest allows
// it, one buffer of full size can be bound as both (docs/artifact.md).
#include <onnxruntime_cxx_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <list>
#include <map>
#include <string>
#include <vector>

#include "diffbit_ops.h"

int main(int argc, char** argv) try {
  if (argc < 4) return std::fprintf(stderr, "usage: run ARTIFACT COUNT ID...\n"), 2;
  std::map<std::string, std::vector<int64_t>> tokens;  // by the input's name: [1, new tokens], the mask [1, all tokens]
  auto &ids = tokens["input_ids"], &mask = tokens["attention_mask"], &positions = tokens["position_ids"];
  for (int i = 3; i < argc; ++i) ids.push_back(std::atoll(argv[i]));

  Ort::Env env(ORT_LOGGING_LEVEL_ERROR);
  Ort::SessionOptions options;
  Ort::ThrowOnError(RegisterCustomOps(options, OrtGetApiBase()));
  Ort::Session session(env, (std::filesystem::path(argv[1]) / "model.onnx").c_str(), options);

  Ort::AllocatorWithDefaultOptions allocator;
  const Ort::MemoryInfo cpu = Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeDefault);
  std::vector<Ort::AllocatedStringPtr> names;
  std::vector<const char*> inputs, outputs;
  std::list<std::vector<char>> zeros;       // a state has a fixed size and begins with zeros
  std::map<std::string, Ort::Value> cache;  // by the input's name
  for (size_t i = 0; i < session.GetInputCount(); ++i) {
    names.push_back(session.GetInputNameAllocated(i, allocator));
    inputs.push_back(names.back().get());
    if (tokens.count(inputs[i])) continue;
    Ort::TypeInfo type = session.GetInputTypeInfo(i);
    std::vector<int64_t> shape = type.GetTensorTypeAndShapeInfo().GetShape();  // [batch, heads, tokens, width], mostly
    shape[0] = 1;
    std::replace(shape.begin(), shape.end(), int64_t{-1}, int64_t{0});  // no tokens yet
    const auto dtype = type.GetTensorTypeAndShapeInfo().GetElementType();
    size_t bytes = sizeof(float);  // of a number, at most
    for (const int64_t size : shape) bytes *= static_cast<size_t>(size);
    std::vector<char>& start = zeros.emplace_back(bytes + 1);
    cache.emplace(inputs[i],
                  Ort::Value::CreateTensor(cpu, start.data(), bytes, shape.data(), shape.size(), dtype));
  }
  for (size_t i = 0; i < session.GetOutputCount(); ++i) {
    names.push_back(session.GetOutputNameAllocated(i, allocator));
    outputs.push_back(names.back().get());
  }

  for (int count = std::atoi(argv[2]); count > 0; --count) {
    positions.clear();
    for (size_t i = 0; i < ids.size(); ++i) positions.push_back(static_cast<int64_t>(mask.size() + i));
    mask.resize(mask.size() + ids.size(), 1);
    std::vector<Ort::Value> values;
    for (const char* name : inputs) {
      if (!tokens.count(name)) {
        values.push_back(std::move(cache.at(name)));
        continue;
      }
      std::vector<int64_t>& row = tokens.at(name);
      const int64_t shape[] = {1, static_cast<int64_t>(row.size())};
      values.push_back(Ort::Value::CreateTensor<int64_t>(cpu, row.data(), row.size(), shape, 2));
    }
    std::vector<Ort::Value> results = session.Run(Ort::RunOptions{nullptr}, inputs.data(), values.data(), values.size(),
                                                  outputs.data(), outputs.size());
    for (size_t i = 1; i < outputs.size(); ++i)  // present.N.* -> past_key_values.N.*
      cache.at("past_key_values" + std::string(outputs[i]).substr(7)) = std::move(results[i]);
    const std::vector<int64_t> shape = results[0].GetTensorTypeAndShapeInfo().GetShape();  // logits [1, S, vocabulary]
    const float* last = results[0].GetTensorMutableData<float>() + (shape[1] - 1) * shape[2];
    ids.assign(1, std::max_element(last, last + shape[2]) - last);
    std::printf("%lld\n", static_cast<long long>(ids[0]));
  }
  return 0;
} catch (const Ort::Exception& error) {
  return std::fprintf(stderr, "%s\n", error.what()), 1;
}
