// malloc and free for the module: ziglang's are for one thread, and round large blocks up to a power of two. Free blocks are in
// a list, ordered by address; the first that fits is taken, and free neighbours become one block. Every block begins at a cache line,
// after a line that holds its size.
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr size_t LINE = 64, PAGE = 64 << 10, LEAST_GROWTH = 16;  // in pages

struct Block {
  size_t bytes;  // with this line
  Block* next;
};
Block* free_blocks = nullptr;
std::atomic_flag locked = ATOMIC_FLAG_INIT;

struct Lock {
  Lock() { while (locked.test_and_set(std::memory_order_acquire)) {} }
  ~Lock() { locked.clear(std::memory_order_release); }
};

char* end_of(Block* block) { return reinterpret_cast<char*>(block) + block->bytes; }

void give_back(Block* block) {
  Block* before = nullptr;
  Block* after = free_blocks;
  for (; after && after < block; after = after->next) before = after;
  block->next = after;
  (before ? before->next : free_blocks) = block;
  Block* const changed[] = {block, before};
  for (Block* candidate : changed)
    if (candidate && candidate->next && end_of(candidate) == reinterpret_cast<char*>(candidate->next)) {
      candidate->bytes += candidate->next->bytes;
      candidate->next = candidate->next->next;
    }
}

/// Takes a block of `bytes` bytes from the end of the first free one that has them; null: there is none.
Block* take(size_t bytes) {
  for (Block** at = &free_blocks; *at; at = &(*at)->next) {
    Block* block = *at;
    if (block->bytes < bytes) continue;
    if (block->bytes == bytes) {
      *at = block->next;
      return block;
    }
    block->bytes -= bytes;
    auto* allocated = reinterpret_cast<Block*>(end_of(block));
    allocated->bytes = bytes;
    return allocated;
  }
  return nullptr;
}

void* allocate(size_t bytes) {
  if (bytes > SIZE_MAX - PAGE * LEAST_GROWTH) return nullptr;
  const size_t size = (bytes + LINE - 1) / LINE * LINE + LINE;
  const Lock lock;
  Block* block = take(size);
  if (!block) {
    const size_t needed = (size + PAGE - 1) / PAGE, pages = needed < LEAST_GROWTH ? LEAST_GROWTH : needed;
    const size_t first = __builtin_wasm_memory_grow(0, pages);
    if (first == SIZE_MAX) return nullptr;
    auto* fresh = reinterpret_cast<Block*>(first * PAGE);
    fresh->bytes = pages * PAGE;
    give_back(fresh);
    block = take(size);
  }
  return reinterpret_cast<char*>(block) + LINE;
}

}  // namespace

extern "C" {

void* malloc(size_t bytes) { return allocate(bytes); }
void free(void* data) {
  if (!data) return;
  const Lock lock;
  give_back(reinterpret_cast<Block*>(static_cast<char*>(data) - LINE));
}
void* calloc(size_t count, size_t bytes) {
  size_t all;
  void* data = __builtin_mul_overflow(count, bytes, &all) ? nullptr : allocate(all);
  return data ? std::memset(data, 0, all) : nullptr;
}
void* realloc(void* data, size_t bytes) {
  void* copy = allocate(bytes);
  if (!data || !copy) return copy;
  const size_t size = reinterpret_cast<Block*>(static_cast<char*>(data) - LINE)->bytes - LINE;
  std::memcpy(copy, data, size < bytes ? size : bytes);
  free(data);
  return copy;
}
void* aligned_alloc(size_t alignment, size_t bytes) { return alignment > LINE ? nullptr : allocate(bytes); }
int posix_memalign(void** to, size_t alignment, size_t bytes) {
  *to = aligned_alloc(alignment, bytes);
  return *to ? 0 : ENOMEM;
}
}
