// placeholder per ISA, replaced by the real kernels
#include "int4.h"
namespace diffbit::DIFFBIT_ISA {
extern const Int4Kernels int4 = scalar::int4;
}
