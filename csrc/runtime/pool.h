// The threads of a model. graph::run_tasks (graph/pool.h) gives work to those of the pool that computes on this thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace diffbit::runtime {

/// How many threads are best: one for each physical core that this process may use.
int default_threads();

class Pool {
 public:
  explicit Pool(int threads);  // the one that computes and threads - 1 others
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  int threads() const { return static_cast<int>(threads_.size()) + 1; }
  void run(void (*task)(void*, size_t), size_t total, void* data);

  /// While it lives, the pool computes what this thread runs.
  class Use {
   public:
    explicit Use(Pool& pool);
    ~Use();

   private:
    Pool* before_;
  };

 private:
  void serve();
  void work();
  void announce();

  // A job is open from when its number is set until all its tasks are taken. Threads that are inside may still compute, so
  // the job's members change only when none is
  struct Job {
    void (*task)(void*, size_t) = nullptr;
    void* data = nullptr;
    size_t total = 0;
  } job_;
  std::atomic<size_t> next_task_{0};
  std::atomic<bool> is_open_{false}, has_ended_{false};
  std::atomic<uint32_t> number_{0};
  std::atomic<int> inside_{0}, asleep_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::thread> threads_;
};

}  // namespace diffbit::runtime
