#include "emulate.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "../../csrc/cpu/half.h"

#if defined(__x86_64__)
#define DIFFBIT_SWITCH 1
#else
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace {

std::map<std::pair<const void*, int>, size_t> allowed;  // shared memory of a kernel on a device

}  // namespace

cudaError_t cudaGetDevice(int* device) {
  *device = static_cast<int>(diffbit::cuda::emulate::most_shared());
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  int device = 0;
  cudaGetDevice(&device);
  if (!allowed.emplace(std::pair(kernel, device), value).second)
    diffbit::cuda::emulate::fail("a kernel's shared memory is set again, which takes it from another thread's launch");
  return cudaSuccess;
}

namespace diffbit::cuda::emulate {
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t STACK = size_t{512} << 10;  // its frames are larger
#else
constexpr size_t STACK = size_t{128} << 10;
#endif
constexpr unsigned char SPOILED = 0xff;  // of it, floats and halves are NaN

// ---- fibers ----

#ifdef DIFFBIT_SWITCH
struct Machine {
  void* stack_pointer = nullptr;
};
// Keeps what a called function must keep, on the stack that it leaves
extern "C" void diffbit_switch(void** leave, void* enter);
asm(R"(
.text
.hidden diffbit_switch
.globl diffbit_switch
.type diffbit_switch, @function
diffbit_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size diffbit_switch, .-diffbit_switch
)");
#else
struct Machine {
  ucontext_t context;
};
#endif

struct Copy {
  unsigned char* to;
  size_t bytes;
  unsigned char from[16];
};

struct Fiber {
  Machine machine;
  std::unique_ptr<unsigned char[]> stack;
  dim3 index;
  int number = 0;  // in its block
  bool ended = true;
  const char* waits = nullptr;           // for what
  const int64_t* stage = nullptr;        // it may go on when this is no longer `last_stage`
  int64_t last_stage = 0;
  std::vector<std::vector<Copy>> copies;  // groups; the last one is open
};

/// Where the lanes of a mask meet. Two sets of what they gave: a lane may read the last set while others give the next.
struct Meeting {
  unsigned arrived = 0;
  int64_t stage = 0;
  const char* what = nullptr;
  alignas(64) unsigned char given[2][32 * 64];
};

struct Barrier {
  int arrived = 0, expected = 0;
  int64_t stage = 0;
};

struct Block {
  std::vector<Fiber> fibers;
  int threads = 0;
  std::vector<std::map<unsigned, Meeting>> meetings;  // of each warp
  Barrier barriers[16];
  void* shared = nullptr;
  Machine scheduler;
  Fiber* current = nullptr;
  const std::function<void()>* body = nullptr;
  std::mt19937 random;
} block;

#if defined(__SANITIZE_ADDRESS__)
const void* scheduler_stack = nullptr;
size_t scheduler_size = 0;
#endif

void leave_fiber(bool forever) {
  Fiber& fiber = *block.current;
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(forever ? nullptr : &fake, scheduler_stack, scheduler_size);
#else
  static_cast<void>(forever);
#endif
#ifdef DIFFBIT_SWITCH
  diffbit_switch(&fiber.machine.stack_pointer, block.scheduler.stack_pointer);
#else
  swapcontext(&fiber.machine.context, &block.scheduler.context);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, &scheduler_stack, &scheduler_size);
#endif
}

void enter_fiber(Fiber& fiber) {
  block.current = &fiber;
  threadIdx = fiber.index;
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, fiber.stack.get(), STACK);
#endif
#ifdef DIFFBIT_SWITCH
  diffbit_switch(&block.scheduler.stack_pointer, fiber.machine.stack_pointer);
#else
  swapcontext(&block.scheduler.context, &fiber.machine.context);
#endif
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
  block.current = nullptr;
}

extern "C" void diffbit_fiber_begins() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_size);
#endif
  (*block.body)();
  Fiber& fiber = *block.current;
  for (const auto& group : fiber.copies)
    if (!group.empty()) fail("ends with asynchronous copies under way");
  fiber.ended = true;
  leave_fiber(true);
  std::abort();
}

void prepare(Fiber& fiber) {
  if (!fiber.stack) fiber.stack.reset(new unsigned char[STACK]);
#ifdef DIFFBIT_SWITCH
  // As diffbit_switch leaves a stack: six registers and where to return to; after that `ret` the stack lies 8 bytes
  // off a multiple of 16, as at the start of any function
  auto top = reinterpret_cast<uintptr_t>(fiber.stack.get() + STACK) / 16 * 16;
  auto* words = reinterpret_cast<uintptr_t*>(top) - 8;
  for (int i = 0; i < 6; ++i) words[i] = 0;
  words[6] = reinterpret_cast<uintptr_t>(&diffbit_fiber_begins);
  words[7] = 0;
  fiber.machine.stack_pointer = words;
#else
  getcontext(&fiber.machine.context);
  fiber.machine.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.machine.context.uc_stack.ss_size = STACK;
  fiber.machine.context.uc_link = nullptr;
  makecontext(&fiber.machine.context, diffbit_fiber_begins, 0);
#endif
  fiber.ended = false;
  fiber.waits = nullptr;
  fiber.stage = nullptr;
  fiber.copies.assign(1, {});
}

void wait(const int64_t& stage, const char* what) {
  Fiber& fiber = *block.current;
  fiber.stage = &stage;
  fiber.last_stage = stage;
  fiber.waits = what;
  leave_fiber(false);
  fiber.stage = nullptr;
  fiber.waits = nullptr;
}

[[noreturn]] void stuck() {
  std::string text;
  std::map<std::string, int> waiting;
  for (int i = 0; i < block.threads; ++i)
    ++waiting[block.fibers[i].ended ? "ended" : std::string("wait at ") + block.fibers[i].waits];
  for (const auto& [what, count] : waiting)
    text += (text.empty() ? "" : ", ") + std::to_string(count) + " threads " + what;
  fail("none can go on: %s", text.c_str());
}

/// Warps in an order drawn anew each round, their threads forwards or backwards; each runs until it waits.
void run_block() {
  const int warps = (block.threads + 31) / 32;
  std::vector<int> order(static_cast<size_t>(warps));
  for (int i = 0; i < warps; ++i) order[i] = i;
  for (int left = block.threads; left;) {
    std::shuffle(order.begin(), order.end(), block.random);
    bool any = false;
    for (int warp : order) {
      const bool backwards = block.random() & 1;
      const int first = 32 * warp, count = std::min(32, block.threads - first);
      for (int i = 0; i < count; ++i) {
        Fiber& fiber = block.fibers[first + (backwards ? count - 1 - i : i)];
        if (fiber.ended || (fiber.stage && *fiber.stage == fiber.last_stage)) continue;
        enter_fiber(fiber);
        any = true;
        if (fiber.ended) --left;
      }
    }
    if (!any && left) stuck();
  }
}

}  // namespace

float half_to_float(uint16_t bits) { return diffbit::to_float(bits); }
uint16_t half_from_float(float x) { return diffbit::to_half(x); }
uint16_t bfloat16_from_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

size_t most_shared() {
  const char* expected = std::getenv("DIFFBIT_EMULATE_SHARED");  // bytes
  return expected ? std::strtoul(expected, nullptr, 10) : size_t{99} << 10;
}

void* shared_memory() { return block.shared; }

void fail(const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "emulated kernel, block (%u, %u, %u) of (%u, %u, %u), thread %d of %d: %s\n", blockIdx.x, blockIdx.y,
               blockIdx.z, gridDim.x, gridDim.y, gridDim.z, block.current ? block.current->number : -1, block.threads, text);
  std::abort();
}

void run(const void* kernel, dim3 grid, dim3 size, size_t shared, const std::function<void()>& thread) {
  const char* seed = std::getenv("DIFFBIT_EMULATE_SEED");
  block.random.seed(seed ? static_cast<unsigned>(std::strtoul(seed, nullptr, 10)) : 0u);
  gridDim = grid;
  blockDim = size;
  block.threads = static_cast<int>(size.x * size.y * size.z);
  if (block.threads < 1 || block.threads > 1024) fail("a block of %d threads, wanted 1 to 1024", block.threads);
  if (!grid.x || !grid.y || !grid.z) fail("a grid of %u x %u x %u blocks is empty", grid.x, grid.y, grid.z);
  if (grid.y > 65535 || grid.z > 65535) fail("a grid of %u x %u x %u blocks: y and z end at 65535", grid.x, grid.y, grid.z);
  if (shared > most_shared()) fail("%zu bytes of shared memory, and a block has %zu", shared, most_shared());
  constexpr size_t EVERY = size_t{48} << 10;
  if (shared > EVERY && shared > allowed[{kernel, static_cast<int>(most_shared())}])
    fail("%zu bytes of shared memory, and the kernel was allowed no more than %zu", shared, EVERY);
  if (block.fibers.size() < static_cast<size_t>(block.threads)) block.fibers.resize(static_cast<size_t>(block.threads));
  block.body = &thread;
  // Exactly what was asked for, so that an address sanitizer sees a byte beyond it
  block.shared = std::aligned_alloc(128, (shared + 127) / 128 * 128 + (shared ? 0 : 128));
  for (blockIdx.z = 0; blockIdx.z < grid.z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < grid.y; ++blockIdx.y)
      for (blockIdx.x = 0; blockIdx.x < grid.x; ++blockIdx.x) {
        std::memset(block.shared, SPOILED, shared);
        block.meetings.assign(static_cast<size_t>(block.threads + 31) / 32, {});
        for (Barrier& arrivals : block.barriers) arrivals = {};
        for (int i = 0; i < block.threads; ++i) {
          Fiber& fiber = block.fibers[i];
          prepare(fiber);
          fiber.number = i;
          const unsigned n = static_cast<unsigned>(i);
          fiber.index = dim3(n % size.x, n / size.x % size.y, n / size.x / size.y);
        }
        run_block();
      }
  std::free(block.shared);
  block.shared = nullptr;
  block.threads = 0;
}

int lane() { return block.current->number % 32; }

void barrier(int id, int threads) {
  Barrier& arrivals = block.barriers[id];
  const int expected = id ? threads : block.threads;
  if (arrivals.arrived && arrivals.expected != expected) fail("barrier %d for %d threads and for %d", id, arrivals.expected, expected);
  arrivals.expected = expected;
  if (++arrivals.arrived == expected) {
    arrivals.arrived = 0;
    ++arrivals.stage;
    return;
  }
  wait(arrivals.stage, id ? "a named barrier" : "__syncthreads");
}

const unsigned char* exchange(unsigned mask, const char* what, const void* given, size_t bytes) {
  const int self = lane();
  if (!(mask >> self & 1)) fail("%s: lane %d is not in its mask %08x", what, self, mask);
  Meeting& meeting = block.meetings[block.current->number / 32][mask];
  unsigned char* set = meeting.given[meeting.stage & 1];
  if (meeting.arrived && std::strcmp(meeting.what, what))
    fail("%s, where other lanes of its warp are at %s", what, meeting.what);
  meeting.what = what;
  if (bytes) std::memcpy(set + 64 * self, given, bytes);
  meeting.arrived |= 1u << self;
  if (meeting.arrived == mask) {
    meeting.arrived = 0;
    ++meeting.stage;
  } else {
    wait(meeting.stage, what);
  }
  return set;
}

void copy_async(void* shared, const void* global, size_t bytes, int read) {
  check_aligned(shared, bytes, "copy_async to shared memory");
  check_aligned(global, bytes, "copy_async from global memory");
  Copy copy{static_cast<unsigned char*>(shared), bytes, {}};
  std::memcpy(copy.from, global, static_cast<size_t>(read));
  std::memset(shared, SPOILED, bytes);
  block.current->copies.back().push_back(copy);
}

void copy_async_commit() { block.current->copies.emplace_back(); }

void copy_async_wait(int pending) {
  auto& groups = block.current->copies;
  const size_t arriving = groups.size() - 1 > static_cast<size_t>(pending) ? groups.size() - 1 - static_cast<size_t>(pending) : 0;
  for (size_t i = 0; i < arriving; ++i)
    for (const Copy& copy : groups[i]) std::memcpy(copy.to, copy.from, copy.bytes);
  groups.erase(groups.begin(), groups.begin() + static_cast<std::ptrdiff_t>(arriving));
}

void load_matrix(uint32_t* r, int matrices, const void* row, bool transposed) {
  const int self = lane(), g = self / 4, t = self % 4;
  if (self < 8 * matrices) check_aligned(row, 16, "load_matrix");
  const unsigned char* all = exchange(0xffffffffu, "load_matrix", &row, sizeof row);
  for (int i = 0; i < matrices; ++i) {
    const auto number = [&](int at, int column) {
      const uint16_t* from;
      std::memcpy(&from, all + 64 * (8 * i + at), sizeof from);
      return static_cast<uint32_t>(from[column]);
    };
    r[i] = transposed ? number(2 * t, g) | number(2 * t + 1, g) << 16 : number(g, 2 * t) | number(g, 2 * t + 1) << 16;
  }
}

namespace {

struct Fragments {
  uint32_t a[4], b[2];
};

Fragments fragments(const unsigned char* all, int lane) {
  Fragments f;
  std::memcpy(&f, all + 64 * lane, sizeof f);
  return f;
}

}  // namespace

void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], float (*number)(uint16_t)) {
  Fragments self;
  std::memcpy(self.a, a, sizeof self.a);
  std::memcpy(self.b, b, sizeof self.b);
  const unsigned char* all = exchange(0xffffffffu, "mma", &self, sizeof self);
  const int g = lane() / 4, t = lane() % 4;
  const auto half = [&](uint32_t word, int which) { return static_cast<double>(number(static_cast<uint16_t>(word >> 16 * which))); };
  for (int i = 0; i < 4; ++i) {
    const int row = i / 2, column = 2 * t + i % 2;  // row: the upper or the lower half
    double sum = c[i];
    for (int k = 0; k < 4; ++k) {
      const Fragments left = fragments(all, 4 * g + k), right = fragments(all, 4 * column + k);
      for (int which = 0; which < 2; ++which) {
        sum += half(left.a[row], which) * half(right.b[0], which);
        sum += half(left.a[row + 2], which) * half(right.b[1], which);
      }
    }
    c[i] = static_cast<float>(sum);
  }
}

void mma_s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  Fragments self;
  std::memcpy(self.a, a, sizeof self.a);
  std::memcpy(self.b, b, sizeof self.b);
  const unsigned char* all = exchange(0xffffffffu, "mma_s8", &self, sizeof self);
  const int g = lane() / 4, t = lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = i / 2, column = 2 * t + i % 2;
    for (int k = 0; k < 4; ++k) {
      const Fragments left = fragments(all, 4 * g + k), right = fragments(all, 4 * column + k);
      c[i] = __dp4a(static_cast<int>(left.a[row]), static_cast<int>(right.b[0]), c[i]);
      c[i] = __dp4a(static_cast<int>(left.a[row + 2]), static_cast<int>(right.b[1]), c[i]);
    }
  }
}

}  // namespace diffbit::cuda::emulate
