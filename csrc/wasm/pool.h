// The module's threads. Each is a worker with an instance of the module in the same memory, which calls diffbit_serve.
#pragma once

#include <cstddef>

namespace diffbit::wasm {

/// Runs task(data, 0) ... task(data, total - 1) on this thread and on those that serve, in any order. One thread calls it.
void run_tasks(void (*task)(void*, size_t), size_t total, void* data);

}  // namespace diffbit::wasm
