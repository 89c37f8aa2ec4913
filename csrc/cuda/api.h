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
// The structs are made from ops/schema.py, as are those of runtime/cuda.py: pointers first, then int64_t, then float. Types
// are ONNX's numbers.
#pragma once

#include "../ort/generated/calls.h"

#define DIFFBIT_CUDA_API extern "C" __attribute__((visibility("default")))

/// past and present may be one memory, each pair for itself, where their capacities are equal; else they do not overlap.
DIFFBIT_CUDA_API size_t diffbit_cuda_attention_workspace(const DiffbitAttention*);
DIFFBIT_CUDA_API const char* diffbit_cuda_attention(const DiffbitAttention*, void* workspace, void* stream);

DIFFBIT_CUDA_API size_t diffbit_cuda_hadamard_workspace(const DiffbitHadamard*);
DIFFBIT_CUDA_API const char* diffbit_cuda_hadamard(const DiffbitHadamard*, void* workspace, void* stream);

DIFFBIT_CUDA_API size_t diffbit_cuda_ternary_matmul_workspace(const DiffbitTernaryMatMul*);
DIFFBIT_CUDA_API const char* diffbit_cuda_ternary_matmul(const DiffbitTernaryMatMul*, void* workspace, void* stream);

DIFFBIT_CUDA_API size_t diffbit_cuda_int4_matmul_workspace(const DiffbitInt4MatMul*);
DIFFBIT_CUDA_API const char* diffbit_cuda_int4_matmul(const DiffbitInt4MatMul*, void* workspace, void* stream);

DIFFBIT_CUDA_API size_t diffbit_cuda_int8_matmul_workspace(const DiffbitInt8MatMul*);
DIFFBIT_CUDA_API const char* diffbit_cuda_int8_matmul(const DiffbitInt8MatMul*, void* workspace, void* stream);

DIFFBIT_CUDA_API size_t diffbit_cuda_gather_quantized_workspace(const DiffbitGatherQuantized*);
DIFFBIT_CUDA_API const char* diffbit_cuda_gather_quantized(const DiffbitGatherQuantized*, void* workspace, void* stream);

DIFFBIT_CUDA_API size_t diffbit_cuda_float_matmul_workspace(const DiffbitFloatMatMul*);
DIFFBIT_CUDA_API const char* diffbit_cuda_float_matmul(const DiffbitFloatMatMul*, void* workspace, void* stream);

/// past_state and present_state may be one memory; so may those of the scan.
DIFFBIT_CUDA_API size_t diffbit_cuda_causal_conv_workspace(const DiffbitCausalConv*);
DIFFBIT_CUDA_API const char* diffbit_cuda_causal_conv(const DiffbitCausalConv*, void* workspace, void* stream);

DIFFBIT_CUDA_API size_t diffbit_cuda_selective_scan_workspace(const DiffbitSelectiveScan*);
DIFFBIT_CUDA_API const char* diffbit_cuda_selective_scan(const DiffbitSelectiveScan*, void* workspace, void* stream);
