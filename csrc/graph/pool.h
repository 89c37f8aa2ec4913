// The threads that compute a graph: csrc/runtime/pool.cpp natively, csrc/wasm/pool.cpp in a browser.
#pragma once

#include <cstddef>
#include <cstdint>

namespace diffbit::graph {

/// Runs task(data, 0) ... task(data, total - 1) on this thread and on those that serve, in any order. One thread of a model
/// calls it.
void run_tasks(void (*task)(void*, size_t), size_t total, void* data);

/// The same of task(0) ... task(total - 1), which throw nothing.
template <class Task>
void parallel(int64_t total, const Task& task) {
  const auto run = [](void* data, size_t i) { (*static_cast<const Task*>(data))(static_cast<int64_t>(i)); };
  run_tasks(run, static_cast<size_t>(total), const_cast<Task*>(&task));
}

}  // namespace diffbit::graph
