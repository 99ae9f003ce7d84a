// What the stand-in is seen doing: launches of graphs and timed kernels, in a log that a test owns.
#pragma once

#include "../cuda_abi.h"

namespace standin {

// Nothing, unless somebody watches.
void watch_launch(CUgraphExec exec, CUstream stream);

}  // namespace standin
