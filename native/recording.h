// What `eclip record` wants to know: every kernel's time on a lane of one size.
//
// Kernels are timed by a pair of events; what is complete is written out whenever the program waits
// for the device, a line each:
//   C ns                          what a pair of events with nothing between measures
//   K worker busy_ns gap_ns gx gy gz bx by bz shared cluster blocks_per_unit name
//   S [worker]                    the program waited here (for this worker, or for all), or said
//                                 that a request begins
#pragma once

#include "dispatcher.h"

namespace eclip {

// The driver's name of a function or kernel, "" if it has none.
const char* function_name(CUfunction function);

constexpr uint32_t kAllWorkers = 0;  // others are from 1

// Write out what is complete, and a mark.
void mark_record(uint32_t worker);

// The calling thread's number, from 1.
uint32_t thread_number();

}  // namespace eclip
