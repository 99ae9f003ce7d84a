// How a hook is declared: under the driver's own name, visible to the process. Protected: what we
// ourselves mean by the name is our hook, also where another preloaded library has one.
#pragma once

#include "dispatcher.h"
#include "giving.h"

#define ECLIP_HOOK extern "C" __attribute__((visibility("protected"))) CUresult

namespace eclip {

// A user's executable to the one that stands behind it.
CUgraphExec translate(CUgraphExec exec);

}  // namespace eclip
