#include "attention.h"
namespace diffbit::scalar { extern const AttentionKernels attention; }
namespace diffbit::DIFFBIT_ISA {
extern const AttentionKernels attention = scalar::attention;
}
