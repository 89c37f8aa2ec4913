// The kernels for NVIDIA GPUs behind a plain C interface, so that they can be run with nothing but pointers to a device's
// memory. For each op X of ops/X.py, which says what it computes:
//
//     size_t diffbit_cuda_X_workspace(const DiffbitX*);        bytes of memory that a call needs beside its tensors
//     const char* diffbit_cuda_X(const DiffbitX*, void* workspace, void* stream);
//
// Pointers are to the device's memory unless said otherwise, tensors are dense, `stream` is a cudaStream_t (null: the
// default one). A call starts its kernels on the stream and does not wait for them; the workspace belongs to it until they
// are done, and may hold anything before. It returns null, or a sentence that says what is wrong, valid until this
// thread's next call. Callers check shapes; a call checks what its kernels cannot do.
//
// Structs have pointers first, then int64_t, then float: runtime/cuda.py holds the same. Types are ONNX's numbers.
#pragma once

#include <cstddef>
#include <cstdint>

#define DIFFBIT_CUDA_API extern "C" __attribute__((visibility("default")))

/// past and present may be one memory, each pair for itself, where their capacities are equal; else they do not overlap.
struct DiffbitAttention {
  const void* query;
  const void* key;
  const void* value;
  const void* lambda;
  const void* past_key;
  const void* past_value;
  const void* position_ids;
  const void* cos;
  const void* sin;
  const void* attention_mask;
  const void* past_key_scale;
  const void* past_value_scale;
  const void* past_key_recent;
  const void* past_value_recent;
  void* out;
  void* present_key;
  void* present_value;
  void* present_key_scale;
  void* present_value_scale;
  void* present_key_recent;
  void* present_value_recent;
  int64_t batch, steps, past_length, heads, kv_heads, d;
  int64_t past_key_capacity, past_value_capacity, key_capacity, value_capacity;  // slots of past and of present
  int64_t positions;  // rows of cos and sin; a position beyond them makes its token NaN
  int64_t branches, wide_value, lambda_per_token;
  int64_t key_bits, value_bits, query_bits, window;
  int64_t type;                  // of query, key, value and out: FLOAT32, FLOAT16 or BFLOAT16
  int64_t key_type, value_type;  // of caches of 16 bits: FLOAT32, FLOAT16 or BFLOAT16
  float scale, norm_eps;
};
DIFFBIT_CUDA_API size_t diffbit_cuda_attention_workspace(const DiffbitAttention*);
DIFFBIT_CUDA_API const char* diffbit_cuda_attention(const DiffbitAttention*, void* workspace, void* stream);

struct DiffbitHadamard {
  const void* a;  // `size` numbers
  void* y;
  int64_t size, block;
  int64_t type;  // FLOAT32, FLOAT16 or BFLOAT16, of both
};
DIFFBIT_CUDA_API size_t diffbit_cuda_hadamard_workspace(const DiffbitHadamard*);
DIFFBIT_CUDA_API const char* diffbit_cuda_hadamard(const DiffbitHadamard*, void* workspace, void* stream);

struct DiffbitTernaryMatMul {
  const void* a;       // [m, k]
  const void* packed;  // at a multiple of 16
  const void* scale;
  void* y;  // [m, n]
  int64_t m, n, k, activation_bits;
  int64_t type;  // FLOAT32, FLOAT16 or BFLOAT16, of a and y
};
DIFFBIT_CUDA_API size_t diffbit_cuda_ternary_matmul_workspace(const DiffbitTernaryMatMul*);
DIFFBIT_CUDA_API const char* diffbit_cuda_ternary_matmul(const DiffbitTernaryMatMul*, void* workspace, void* stream);

struct DiffbitInt4MatMul {
  const void* a;       // [m, k]
  const void* codes;   // these three at multiples of 16
  const void* scales;
  const void* zeros;   // [tiles, groups, 16]; null: 8 everywhere
  const void* factor;
  void* y;  // [m, n]
  int64_t m, n, k, group_size;
  int64_t type;  // FLOAT32, FLOAT16 or BFLOAT16, of a and y
};
DIFFBIT_CUDA_API size_t diffbit_cuda_int4_matmul_workspace(const DiffbitInt4MatMul*);
DIFFBIT_CUDA_API const char* diffbit_cuda_int4_matmul(const DiffbitInt4MatMul*, void* workspace, void* stream);
