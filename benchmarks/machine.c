// What this machine can do at most: read bandwidth the way weights are read (mapped memory, several streams per thread)
// and the rate of its byte dot products and float multiply-adds, in registers.
//
//     cc -O3 -march=native -shared -fPIC -pthread machine.c -o libmachine.so
//
// machine.py compiles and calls it.
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { LINE = 64, MOST_STREAMS = 8, MOST_THREADS = 64 };
typedef uint64_t Vector __attribute__((vector_size(LINE)));

typedef struct {
  const uint8_t* data;
  size_t bytes;
  int streams, prefetch;
  uint64_t sum;
} Task;

static double on_threads(void* (*run)(void*), Task* tasks, int threads) {
  pthread_t ids[MOST_THREADS];
  struct timespec begin, end;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  for (int t = 1; t < threads; ++t) pthread_create(&ids[t], NULL, run, &tasks[t]);
  run(&tasks[0]);
  for (int t = 1; t < threads; ++t) pthread_join(ids[t], NULL);
  clock_gettime(CLOCK_MONOTONIC, &end);
  return (end.tv_sec - begin.tv_sec) + (end.tv_nsec - begin.tv_nsec) * 1e-9;
}

// One stream per equal share of the data; inlined with a constant number of streams, so that sums stay in registers.
static inline __attribute__((always_inline)) uint64_t sum(const uint8_t* data, size_t bytes, int streams,
                                                          int prefetch) {
  const size_t share = bytes / streams / (2 * LINE) * (2 * LINE);
  Vector sums[MOST_STREAMS], total = {0};
  memset(sums, 0, sizeof sums);
  for (size_t at = 0; at < share; at += 2 * LINE)
    for (int s = 0; s < streams; ++s) {
      const uint8_t* p = data + s * share + at;
      if (prefetch) {
        __builtin_prefetch(p + prefetch);
        __builtin_prefetch(p + prefetch + LINE);
      }
      sums[s] += *(const Vector*)p ^ *(const Vector*)(p + LINE);
    }
  for (int s = 0; s < streams; ++s) total += sums[s];
  uint64_t all = 0;
  for (int i = 0; i < LINE / 8; ++i) all += total[i];
  return all;
}

static void* read_part(void* argument) {
  Task* task = argument;
  switch (task->streams) {
    case 1: task->sum = sum(task->data, task->bytes, 1, task->prefetch); break;
    case 2: task->sum = sum(task->data, task->bytes, 2, task->prefetch); break;
    case 4: task->sum = sum(task->data, task->bytes, 4, task->prefetch); break;
    default: task->sum = sum(task->data, task->bytes, 8, task->prefetch);
  }
  return NULL;
}

// Seconds for reading `bytes` at `data` (64-byte aligned) once, in equal parts on `threads` (1 to 64) threads with
// `streams` (1, 2, 4 or 8) streams each, prefetching `prefetch` bytes ahead (0: not at all). *check receives a sum of
// the data, so that nobody optimizes the reads away.
double read_seconds(const uint8_t* data, size_t bytes, int threads, int streams, int prefetch, uint64_t* check) {
  Task tasks[MOST_THREADS];
  const size_t part = bytes / threads / LINE * LINE;
  for (int t = 0; t < threads; ++t) tasks[t] = (Task){data + t * part, part, streams, prefetch, 0};
  const double seconds = on_threads(read_part, tasks, threads);
  *check = 0;
  for (int t = 0; t < threads; ++t) *check += tasks[t].sum;
  return seconds;
}

// Rates: `bytes` iterations of ten independent instructions on each thread
#if defined(__x86_64__)
#define RATE(name, isa, type, zero, begin, step)                                               \
  static __attribute__((target(isa))) void* name(void* argument) {                             \
    Task* task = argument;                                                                     \
    type a[10], x = begin;                                                                     \
    for (int i = 0; i < 10; ++i) {                                                             \
      a[i] = zero;                                                                             \
      __asm__ volatile("" : "+x"(a[i])); /* else the compiler makes one of the ten */          \
    }                                                                                          \
    for (size_t n = 0; n < task->bytes; ++n)                                                   \
      for (int i = 0; i < 10; ++i) {                                                           \
        __asm__ volatile("" : "+x"(x)); /* and one of their products */                        \
        step;                                                                                  \
      }                                                                                        \
    uint64_t words[sizeof a / 8];                                                              \
    memcpy(words, a, sizeof a);                                                                \
    task->sum = 0;                                                                             \
    for (size_t i = 0; i < sizeof a / 8; ++i) task->sum += words[i];                           \
    return NULL;                                                                               \
  }
RATE(dot_avx512vnni, "avx512f,avx512bw,avx512vl,avx512vnni", __m512i, _mm512_setzero_si512(), _mm512_set1_epi8(1),
     a[i] = _mm512_dpbusd_epi32(a[i], x, x))
RATE(dot_avxvnni, "avx2,avxvnni", __m256i, _mm256_setzero_si256(), _mm256_set1_epi8(1),
     a[i] = _mm256_dpbusd_avx_epi32(a[i], x, x))
RATE(dot_avx2, "avx2", __m256i, _mm256_setzero_si256(), _mm256_set1_epi8(1),
     a[i] = _mm256_add_epi16(a[i], _mm256_maddubs_epi16(x, x)))
RATE(fma_avx512, "avx512f", __m512, _mm512_setzero_ps(), _mm512_set1_ps(1), a[i] = _mm512_fmadd_ps(x, x, a[i]))
RATE(fma_avx2, "avx2,fma", __m256, _mm256_setzero_ps(), _mm256_set1_ps(1), a[i] = _mm256_fmadd_ps(x, x, a[i]))

static const struct {
  const char* name;
  void* (*run)(void*);
  int multiplications;  // in one instruction
} RATES[] = {
    {"int8 avx512vnni", dot_avx512vnni, 64}, {"int8 avxvnni", dot_avxvnni, 32}, {"int8 avx2", dot_avx2, 32},
    {"fp32 avx512", fma_avx512, 16},         {"fp32 avx2", fma_avx2, 8},
};
#endif

// Multiply-adds per second, counted twice as usual, of RATES[name] on `threads` threads; 0: no such rate here. The CPU
// must have the instructions.
double operations_per_second(const char* name, int threads) {
#if defined(__x86_64__)
  for (size_t r = 0; r < sizeof RATES / sizeof *RATES; ++r)
    if (!strcmp(RATES[r].name, name)) {
      const size_t rounds = 2000000;
      Task tasks[MOST_THREADS];
      for (int t = 0; t < threads; ++t) tasks[t].bytes = rounds;
      const double seconds = on_threads(RATES[r].run, tasks, threads);
      return 2.0 * RATES[r].multiplications * 10 * rounds * threads / seconds;
    }
#endif
  (void)name, (void)threads;
  return 0;
}
