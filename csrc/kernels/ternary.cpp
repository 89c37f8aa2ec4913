// placeholder per ISA, replaced by the real kernels
#include "ternary.h"
namespace diffbit::scalar { extern const TernaryKernels ternary; }
namespace diffbit::DIFFBIT_ISA {
extern const TernaryKernels ternary = scalar::ternary;
}
