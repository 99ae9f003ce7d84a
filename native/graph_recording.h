// Graphs for `eclip record`: cut before and after every kernel, with all nodes on the lane that is
// recorded, so that each kernel is timed like a launch.
//
// Kernels are recorded in the graph's sequence, which is one of its legal orders: branches that run
// beside each other in the program run one after another here. Where a cut is not legal the kernels
// of a part share its time alike.
#pragma once

#include "executable.h"

namespace eclip {

// The parts of an executable on this lane; none where the graph cannot be cloned, which is then said.
const std::vector<Part>& cut_for_recording(Executable& exec, int lane);

}  // namespace eclip
