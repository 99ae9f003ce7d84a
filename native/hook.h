// How a hook is declared: under the driver's own name, visible to the process.
#pragma once

#include "dispatcher.h"

#define ECLIP_HOOK extern "C" __attribute__((visibility("default"))) CUresult

namespace eclip {

// A user's executable and node to those that stand behind them; false if the node is none of its
// graph's.
bool translate(CUgraphExec& exec, CUgraphNode& node);
CUgraphExec translate(CUgraphExec exec);

}  // namespace eclip
