// What the parts of the stand-in's interface share.
#pragma once

#include "graph.h"

#define API extern "C" __attribute__((visibility("default"))) CUresult

namespace standin {

constexpr int kDevices = 2;
extern Context primaries[kDevices];
extern bool nodes_have_contexts;  // HIP's have none: a graph runs in its stream's mask
Context& current_context();  // the first device's where none was made current
std::vector<WorkPtr> work_of_all(const Context& context);  // the last of every stream

using Hold = std::unique_lock<std::mutex>;
Hold held();

// A call that may not happen while somebody captures, unless in relaxed mode.
CUresult unsafe();

}  // namespace standin
