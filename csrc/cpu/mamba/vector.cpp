// CausalConv and SelectiveScan with vectors over channels; compiled once per instruction set.
//
// The scan takes SCAN_TOKENS tokens at a time. For a vector of channels it first computes the step sizes and inputs of all
// these tokens, then passes a few states over all of them, which stay in registers meanwhile. Most of the time goes into the
// exponentials of the decays; they do not depend on each other, so they overlap.
#include "kernels.h"

#include <initializer_list>
#include <type_traits>

#include "../../ort/layouts.h"
#include "../simd/vectors.h"

namespace diffbit::DIFFBIT_ISA {
namespace {

constexpr int64_t L = F32_LANES;
constexpr int STATES = 4;  // that are in registers at a time

/// Returns log(1 + u) for 0 <= u <= 1, to about an ulp: 2 artanh(s), s = u / (2 + u) <= 1/3, by its minimax polynomial in s^2.
DIFFBIT_INLINE F32 log1p(F32 u) {
  const F32 s = u / (u + splat(2.0f)), q = s * s;
  F32 p = splat(0.2322432922f);
  p = fma(p, q, splat(0.217065758f));
  p = fma(p, q, splat(0.2859235799f));
  p = fma(p, q, splat(0.3999970633f));
  p = fma(p, q, splat(0.6666666732f));
  return fma(p * q, s, s + s);
}

/// Returns log(1 + e^x). Here and below a NaN propagates through the exponential.
DIFFBIT_INLINE F32 softplus(F32 x) { return larger(x, splat(0.0f)) + log1p(exp(magnitude(x) * splat(-1.0f))); }

// A vector; unless it is WHOLE, only `count` lanes are used
template <bool WHOLE, class T>
DIFFBIT_INLINE F32 get(const T* from, int64_t count) {
  return WHOLE ? load(from) : load_part(from, count);
}
template <bool WHOLE, class T>
DIFFBIT_INLINE void put(T* to, int64_t count, F32 a) {
  if (WHOLE) return store(to, a);
  T part[L];
  store(part, a);
  std::memcpy(to, part, static_cast<size_t>(count) * sizeof(T));
}

/// Calls each(std::true_type, i, L) for each whole vector of begin ... end - 1, then each(std::false_type, i, rest).
template <class Use>
DIFFBIT_INLINE void vectors(int64_t begin, int64_t end, const Use& use) {
  int64_t i = begin;
  for (; i + L <= end; i += L) use(std::true_type(), i, L);
  if (i < end) use(std::false_type(), i, end - i);
}

// ---- CausalConv ----

constexpr int64_t MOST = CONV_MOST_WIDTH;

template <class T>
void conv(const ConvTokens& call, int64_t begin, int64_t end, float* floats) {
  const int64_t state_rows = call.width - 1, count = end - begin, room = (count + MAMBA_LANES - 1) / MAMBA_LANES * MAMBA_LANES;
  const size_t bytes = static_cast<size_t>(count) * sizeof(float);
  float* rows[MOST];  // the latest `width` tokens, the latest last
  for (int64_t k = 0; k < call.width; ++k) rows[k] = floats + k * room;
  for (int64_t k = 0; k < state_rows; ++k) std::memcpy(rows[k], call.past + k * call.channels + begin, bytes);
  for (int64_t t = 0; t < call.steps; ++t) {
    const T* x = static_cast<const T*>(call.x) + t * call.channels + begin;
    T* y = static_cast<T*>(call.y) + t * call.channels + begin;
    if (!call.mask[t]) {
      std::memset(y, 0, static_cast<size_t>(count) * sizeof(T));
      continue;
    }
    vectors(0, count, [&](auto is_whole, int64_t i, int64_t lanes) {
      constexpr bool WHOLE = decltype(is_whole)::value;
      const F32 latest = get<WHOLE>(x + i, lanes);
      store(rows[state_rows] + i, latest);
      F32 sum = get<WHOLE>(call.bias + begin + i, lanes);
      const float* weight = call.weight + begin + i;
      for (int64_t k = 0; k < state_rows; ++k, weight += call.channels)
        sum = fma(load(rows[k] + i), get<WHOLE>(weight, lanes), sum);
      put<WHOLE>(y + i, lanes, silu(fma(latest, get<WHOLE>(weight, lanes), sum)));
    });
    float* oldest = rows[0];
    for (int64_t k = 0; k < state_rows; ++k) rows[k] = rows[k + 1];
    rows[state_rows] = oldest;
  }
  for (int64_t k = 0; k < state_rows; ++k) std::memcpy(call.present + k * call.channels + begin, rows[k], bytes);
}

void conv(const ConvTokens& call, int64_t begin, int64_t end, float* floats) {
  call.half ? conv<uint16_t>(call, begin, end, floats) : conv<float>(call, begin, end, floats);
}

// ---- SelectiveScan ----

/// Numbers of a vector of channels for some tokens: step sizes, inputs, and partial sums of m.
struct Tokens {
  F32 size[SCAN_TOKENS], input[SCAN_TOKENS], memory[SCAN_TOKENS];
};

/// Passes COUNT states over `count` tokens; b and c have SCAN_TOKENS numbers per state.
template <int COUNT, bool WHOLE>
DIFFBIT_INLINE void pass(Tokens& tokens, int64_t count, const float* a, float* states, int64_t channels, int64_t lanes,
                         const float* b, const float* c) {
  F32 rate[COUNT], h[COUNT];
  DIFFBIT_UNROLL
  for (int n = 0; n < COUNT; ++n) {
    rate[n] = get<WHOLE>(a + n * channels, lanes);
    h[n] = get<WHOLE>(states + n * channels, lanes);
  }
  for (int64_t t = 0; t < count; ++t) {
    F32 memory = tokens.memory[t];
    DIFFBIT_UNROLL
    for (int n = 0; n < COUNT; ++n) {
      h[n] = fma(exp(tokens.size[t] * rate[n]), h[n], tokens.input[t] * splat(b[n * SCAN_TOKENS + t]));
      memory = fma(splat(c[n * SCAN_TOKENS + t]), h[n], memory);
    }
    tokens.memory[t] = memory;
  }
  DIFFBIT_UNROLL
  for (int n = 0; n < COUNT; ++n) put<WHOLE>(states + n * channels, lanes, h[n]);
}

/// Computes the tokens at[0] ... at[count - 1] for the channels i ... i + lanes - 1.
template <class T, bool WHOLE>
void block(const ScanTokens& call, const int64_t* at, int64_t count, int64_t i, int64_t lanes, const float* b, const float* c) {
  const auto row = [&](const void* rows, int64_t t) { return static_cast<const T*>(rows) + at[t] * call.channels + i; };
  const F32 bias = get<WHOLE>(call.dt_bias + i, lanes), skip = get<WHOLE>(call.d + i, lanes);
  Tokens tokens;
  for (int64_t t = 0; t < count; ++t) {
    const F32 x = get<WHOLE>(row(call.x, t), lanes);
    tokens.size[t] = softplus(get<WHOLE>(row(call.dt, t), lanes) + bias);
    tokens.input[t] = tokens.size[t] * x;
    tokens.memory[t] = skip * x;
  }
  int64_t n = 0;
  const auto states = [&](auto many) {
    constexpr int COUNT = decltype(many)::value;
    for (; n + COUNT <= call.states; n += COUNT)
      pass<COUNT, WHOLE>(tokens, count, call.a + n * call.channels + i, call.present + n * call.channels + i, call.channels,
                         lanes, b + n * SCAN_TOKENS, c + n * SCAN_TOKENS);
  };
  states(std::integral_constant<int, STATES>());
  states(std::integral_constant<int, 1>());
  for (int64_t t = 0; t < count; ++t) {
    const int64_t to = at[t] * call.channels + i;
    if (call.memory) put<WHOLE>(static_cast<T*>(call.memory) + to, lanes, tokens.memory[t]);
    put<WHOLE>(static_cast<T*>(call.y) + to, lanes, tokens.memory[t] * silu(get<WHOLE>(row(call.z, t), lanes)));
  }
}

/// Transposes the numbers of the tokens at[...], [count, states], to floats [states, SCAN_TOKENS].
template <class T>
void transpose(const T* from, const int64_t* at, int64_t count, int64_t states, float* to) {
  for (int64_t t = 0; t < count; ++t) {
    const T* row = from + at[t] * states;
    vectors(0, states, [&](auto is_whole, int64_t n, int64_t lanes) {
      float numbers[L];
      store(numbers, get<decltype(is_whole)::value>(row + n, lanes));
      for (int64_t j = 0; j < lanes; ++j) to[(n + j) * SCAN_TOKENS + t] = numbers[j];
    });
  }
}

template <class T>
void scan(const ScanTokens& call, int64_t begin, int64_t end, float* floats) {
  float *b = floats, *c = floats + call.states * SCAN_TOKENS;
  const size_t bytes = static_cast<size_t>(end - begin);
  if (call.past != call.present)
    for (int64_t n = 0; n < call.states; ++n)
      std::memcpy(call.present + n * call.channels + begin, call.past + n * call.channels + begin, bytes * sizeof(float));
  for (int64_t t = 0; t < call.steps;) {
    int64_t at[SCAN_TOKENS], count = 0;
    for (; t < call.steps && count < SCAN_TOKENS; ++t) {
      if (call.mask[t]) {
        at[count++] = t;
        continue;
      }
      for (void* rows : {call.y, call.memory})
        if (rows) std::memset(static_cast<T*>(rows) + t * call.channels + begin, 0, bytes * sizeof(T));
    }
    transpose(static_cast<const T*>(call.b), at, count, call.states, b);
    transpose(static_cast<const T*>(call.c), at, count, call.states, c);
    vectors(begin, end, [&](auto is_whole, int64_t i, int64_t lanes) {
      block<T, decltype(is_whole)::value>(call, at, count, i, lanes, b, c);
    });
  }
}

void scan(const ScanTokens& call, int64_t begin, int64_t end, float* floats) {
  call.half ? scan<uint16_t>(call, begin, end, floats) : scan<float>(call, begin, end, floats);
}

}  // namespace

extern const MambaKernels mamba = {conv, scan};

}  // namespace diffbit::DIFFBIT_ISA
