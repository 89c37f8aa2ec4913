#include "pool.h"

#include <algorithm>
#include <set>
#include <string>

#include "../graph/pool.h"

#ifdef __linux__
#include <sched.h>

#include <cstdio>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace diffbit {
namespace runtime {
namespace {

constexpr int SPINS = 2000;  // looks for work before a thread sleeps: some ten microseconds

thread_local Pool* current = nullptr;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

}  // namespace

int default_threads() {
#ifdef __linux__
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
    std::set<std::string> cores;  // each as the list of its hardware threads
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &allowed)) continue;
      const std::string path = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list";
      char line[256] = "";
      if (std::FILE* file = std::fopen(path.c_str(), "r")) {
        if (!std::fgets(line, sizeof line, file)) line[0] = 0;
        std::fclose(file);
      }
      cores.insert(line[0] ? line : std::to_string(cpu));
    }
    if (!cores.empty()) return static_cast<int>(cores.size());
  }
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

Pool::Pool(int threads) {
  try {
    for (int i = 1; i < threads; ++i) threads_.emplace_back([this] { serve(); });
  } catch (const std::exception&) {}  // the system has no more threads: those that began are enough
}

Pool::~Pool() {
  has_ended_ = true;
  announce();
  for (std::thread& thread : threads_) thread.join();
}

void Pool::announce() {
  number_.fetch_add(1);
  if (!asleep_.load()) return;
  { const std::lock_guard<std::mutex> lock(mutex_); }
  changed_.notify_all();
}

void Pool::work() {
  for (size_t i; (i = next_task_.fetch_add(1)) < job_.total;) job_.task(job_.data, i);
}

void Pool::run(void (*task)(void*, size_t), size_t total, void* data) {
  if (threads_.empty() || total < 2) {
    for (size_t i = 0; i < total; ++i) task(data, i);
    return;
  }
  job_ = {task, data, total};
  next_task_ = 0;
  is_open_ = true;
  announce();
  work();
  is_open_ = false;
  while (inside_.load()) pause();
}

void Pool::serve() {
  for (uint32_t last = 0; !has_ended_.load();) {
    for (int i = 0; number_.load() == last; ++i) {
      if (i < SPINS) {
        pause();
        continue;
      }
      std::unique_lock<std::mutex> lock(mutex_);
      asleep_.fetch_add(1);
      changed_.wait(lock, [&] { return number_.load() != last; });
      asleep_.fetch_sub(1);
    }
    last = number_.load();
    inside_.fetch_add(1);
    if (is_open_.load()) work();
    inside_.fetch_sub(1);
  }
}

Pool::Use::Use(Pool& pool) : before_(current) { current = &pool; }
Pool::Use::~Use() { current = before_; }

}  // namespace runtime

void graph::run_tasks(void (*task)(void*, size_t), size_t total, void* data) {
  if (runtime::current) return runtime::current->run(task, total, data);
  for (size_t i = 0; i < total; ++i) task(data, i);
}

}  // namespace diffbit
