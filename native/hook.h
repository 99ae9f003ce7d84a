// How a hook is declared: under the driver's own name, visible to the process.
#pragma once

#include "dispatcher.h"
#include "giving.h"

#define ECLIP_HOOK extern "C" __attribute__((visibility("default"))) CUresult

namespace eclip {

// A user's executable to the one that stands behind it.
CUgraphExec translate(CUgraphExec exec);

}  // namespace eclip
