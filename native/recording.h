// What `eclip record` wants to know: every kernel's time on a lane of one size.
//
// Kernels are timed by a pair of events; what is complete is written out whenever the program waits
// for the device, a line each:
//   C ns                          what a pair of events with nothing between measures
//   K worker busy_ns gap_ns gx gy gz bx by bz shared cluster blocks_per_unit name
//   S [worker]                    the program waited here (for this worker, or for all), or said
//                                 that a request begins
#pragma once

#include <vector>

#include "identities.h"
#include "lanes.h"
#include "stream.h"
#include "table.h"

namespace eclip {

constexpr uint32_t kAllWorkers = 0;  // others are from 1

// Write out what is complete, and a mark.
void mark_record(uint32_t worker);

// The calling thread's number, from 1.
uint32_t thread_number();

// Whose launches on this stream are, as the record names workers.
uint32_t recorded_worker(const Table& table, const Stream& stream);

// A lane of the stream's own, of the table's one size.
void open_record_lane(const Table& table, Pool& pool, Stream& stream);

// Around a launch. `marked`: the program has said that a request begins with it.
struct Timing {
    CUevent begin, end;
};
Timing begin_timing(CUstream target);
void drop_timing(const Timing& timing);
// Several kernels share its time alike.
void end_timing(const Timing& timing, CUstream target, uint32_t worker,
                const std::vector<Launch>& launches, bool marked);

}  // namespace eclip
