// A plain C interface to the kernels for NVIDIA GPUs, which needs only pointers to device memory. For each op X, defined in
// ops/X.py:
//
//     size_t diffbit_cuda_X_workspace(const DiffbitX*);        bytes of memory that a call needs besides its tensors
//     const char* diffbit_cuda_X(const DiffbitX*, void* workspace, void* stream);
//
// Pointers are to device memory unless stated otherwise, tensors are dense, `stream` is a cudaStream_t (null: the default
// stream). A call launches its kernels on the stream and does not wait for them. It uses the workspace until they are done;
// the workspace need not be initialized. The call returns null, or an error message that is valid until this thread's next
// call. Callers check shapes; a call checks for arguments that its kernels do not support.
//
// The structs are generated from ops/schema.py, like those of tests/native/cuda.py: pointers first, then int64_t, then float.
// Types are ONNX's numbers.
#pragma once

#include "../ort/generated/calls.h"

#define DIFFBIT_CUDA_API extern "C" __attribute__((visibility("default")))

/// Each past may be the same memory as its present if their capacities are equal; otherwise they must not overlap.
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

/// past_state and present_state may be the same memory, also those of the scan.
DIFFBIT_CUDA_API size_t diffbit_cuda_causal_conv_workspace(const DiffbitCausalConv*);
DIFFBIT_CUDA_API const char* diffbit_cuda_causal_conv(const DiffbitCausalConv*, void* workspace, void* stream);

DIFFBIT_CUDA_API size_t diffbit_cuda_selective_scan_workspace(const DiffbitSelectiveScan*);
DIFFBIT_CUDA_API const char* diffbit_cuda_selective_scan(const DiffbitSelectiveScan*, void* workspace, void* stream);
