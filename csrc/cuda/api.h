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
// A past and its present may be the same memory: of attention if their capacities are equal, otherwise they must not overlap;
// of CausalConv and SelectiveScan always.
//
// Structs and functions are generated from ops/schema.py: pointers first, then int64_t, then float. Types are ONNX's numbers.
#pragma once

#include "../ort/generated/calls.h"
