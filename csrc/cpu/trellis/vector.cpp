// The encoder of trellis codes; compiled once per instruction set.
#include "viterbi.h"
