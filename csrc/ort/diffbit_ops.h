/* The C interface of diffbit's operators for ONNX Runtime 1.18 or later (libdiffbit_ops.so). `diffbit --library-path`
 * prints where the library lies; this file lies beside it. docs/packages.md and examples/cpp show how to use it. */
#ifndef DIFFBIT_OPS_H
#define DIFFBIT_OPS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct OrtStatus OrtStatus; /* as in onnxruntime_c_api.h, which need not be included */
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtApiBase OrtApiBase;

/* Registers every operator of the domain "diffbit", for each device that the library has kernels for, with sessions made
 * from `options`. `api` is what OrtGetApiBase() returns. Returns null, or a status that the caller releases. May be called
 * for any number of options, from any thread; the library must stay loaded while their sessions live. Registered nodes
 * run these kernels in place of their portable bodies, and a node of other tensor types than they have does not load.
 *
 * The entry diffbit.bfloat16 = "1" of the options' configuration, added before, lets products with many rows (prompts) round
 * to bfloat16 on processors with matrix instructions for it (AMX): faster, and not as the operators define.
 *
 * An ONNX Runtime finds it by this name: RegisterCustomOpsLibrary_V2(options, path) and, in Python,
 * SessionOptions.register_custom_ops_library(path) load the library and call it. */
OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* api);

/* The instruction sets that this processor and this build have, best first, separated by spaces: "avx512vnni avx2 scalar".
 * The first is used, or the one that the environment variable DIFFBIT_ISA names. */
const char* diffbit_isas(void);

/* The NVIDIA GPUs that this build has kernels for, as in "80 90a" of sm_80 and sm_90a; empty where it has none. */
const char* diffbit_cuda_architectures(void);

/* Encodes a weight [rows, columns], rows a multiple of 64, by the trellis of ops/trellis.py: finds the indices of levels, of which
 * each ring of 64 rows can be coded, near `targets`, which are weights over their scales; an error's square counts `weights`
 * times. subsets: uint8 [256], x of each window; levels: [2^(bits - 1 + subset_bits)]; apart: numbers from one row to the next.
 * Returns 0; 1 for no memory, or if DIFFBIT_ISA names an instruction set that this CPU does not have. */
int diffbit_trellis_encode(int64_t bits, int64_t subset_bits, const uint8_t* subsets, const float* levels, const float* targets,
                           const float* weights, int64_t rows, int64_t columns, int64_t apart, uint8_t* indices);

#ifdef __cplusplus
}
#endif

#endif
