#include "../graph/pool.h"

#include <atomic>
#include <cstdint>

#include "export.h"

namespace diffbit::graph {
namespace {

constexpr int SPINS = 20000;  // looks for work before a thread sleeps: some ten microseconds

// A job is open from when its number is set until all its tasks are taken. Threads that are inside may still compute, so the
// job's members change only when none is
struct Job {
  void (*task)(void*, size_t);
  void* data;
  size_t total;
} job;
std::atomic<size_t> next_task;
std::atomic<bool> is_open, has_ended;
std::atomic<int32_t> number, inside, asleep, helpers;

void work() {
  for (size_t i; (i = next_task.fetch_add(1)) < job.total;) job.task(job.data, i);
}

int32_t* address(std::atomic<int32_t>& counter) { return reinterpret_cast<int32_t*>(&counter); }

void announce() {
  number.fetch_add(1);
  if (asleep.load()) __builtin_wasm_memory_atomic_notify(address(number), UINT32_MAX);
}

}  // namespace

void run_tasks(void (*task)(void*, size_t), size_t total, void* data) {
  if (!helpers.load() || total < 2) {
    for (size_t i = 0; i < total; ++i) task(data, i);
    return;
  }
  job = {task, data, total};
  next_task.store(0);
  is_open.store(true);
  announce();
  work();
  is_open.store(false);
  while (inside.load()) {}
}

}  // namespace diffbit::graph

using namespace diffbit::graph;

/// Works with the thread that calls run_tasks, until diffbit_end.
EXPORT(serve) void diffbit_serve() {
  helpers.fetch_add(1);
  for (int32_t last_job = number.load(); !has_ended.load();) {
    for (int i = 0; number.load() == last_job; ++i) {
      if (i < SPINS) continue;
      asleep.fetch_add(1);
      __builtin_wasm_memory_atomic_wait32(address(number), last_job, -1);
      asleep.fetch_sub(1);
    }
    last_job = number.load();
    inside.fetch_add(1);
    if (is_open.load()) work();
    inside.fetch_sub(1);
  }
  helpers.fetch_sub(1);
}
EXPORT(end) void diffbit_end() {
  has_ended.store(true);
  announce();
}
