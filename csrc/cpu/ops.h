// The ops on a CPU. The nodes are checked as on every device (ort/), the kernels of the best instruction set are chosen
// when a node is created, and `compute` splits the work into tasks for the session's threads. The split depends only on
// shapes, so the number of threads does not change any bit of the result.
#pragma once

#include "../ort/nodes.h"

namespace diffbit {

/// Returns the names of the instruction sets that this CPU and this build have, best first.
std::string available_isas(const char* separator);

/// create_X(node), which cpu/X/ defines, for every op.
#define DIFFBIT_DECLARE_OP(Op, function) Kernel* create_##function(const Node& node);
DIFFBIT_OPS(DIFFBIT_DECLARE_OP)
#undef DIFFBIT_DECLARE_OP

}  // namespace diffbit
