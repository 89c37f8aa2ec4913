// The encoder of trellis codes for any CPU.
#define DIFFBIT_ISA scalar
#include "viterbi.h"
