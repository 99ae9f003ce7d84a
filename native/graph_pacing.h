// Graphs of background: how long they take, and parts of about the grain.
//
// A graph is launched whole until two launches of it were measured. If it takes longer than twice the
// grain it is cut then, by the driver's clones and without a wait for the device; so is a part of it,
// later, a few times at most. Where the plan has joints, they are where it is cut first, however short
// the parts are.
#pragma once

#include "executable.h"

namespace eclip {

// Before a launch: read what was measured, and cut it if that tells so.
void steer_parts(Executable& exec);

// Cut a new executable, if its plan has joints for it, or if it was said how long a kernel takes
// (ECLIP_KERNEL_US).
void cut_new(Executable& exec);

// Kernels may launch graphs of the program, and mean whole ones: from now on none is cut.
void forbid_cutting();
bool may_launch_parts();

// Whether it is time to measure a launch; then around each part of it, or the whole.
bool begin_measuring(Executable& exec, bool cut);
void measure_begin(const Executable& exec, size_t part, CUstream queue);
void measure_end(const Executable& exec, size_t part, CUstream queue);

// How long a part takes, or the whole; 0: nobody knows.
double part_ns(const Executable& exec, bool cut, size_t part);

}  // namespace eclip
