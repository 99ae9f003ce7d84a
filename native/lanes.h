// Lanes as the device has them: a stream for each of the plan's masks. What they are made of is the
// vendor's: green contexts (green_lanes.cpp) or CU masks (hip/lanes.cpp).
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_abi.h"
#include "frontier.h"
#include "table.h"

namespace eclip {

struct Lane {
    // None where all slices and no priority are meant: the user's own stream serves.
    CUstream stream = nullptr;
    CUcontext context = nullptr;
    CUevent event = nullptr;  // recorded for each barrier; a wait keeps what it has seen
    int priority = 0;         // as CUDA counts: lower goes first, 0 is what streams have by default
};

struct Pool {
    CUcontext primary = nullptr;
    CUdevice device = -1;
    Lane lanes[kMostLanes];
    std::atomic<size_t> count{0};  // of lanes; recording adds some while others read
    std::mutex growing;
    bool any = false;              // of the plan's lanes is less than the whole device
    CUstream aside = nullptr;  // of the primary context, for what no stream of the program waits for
    double ask_ns = 0;      // what it costs to ask a lane whether it is empty
    double barrier_ns = 0;  // and what a barrier between two lanes costs
    // Where lanes order themselves with the default stream: whether work may be under way that waits
    // for the host. Then what is called on non-blocking streams stays off lanes.
    bool (*waits_for_host)() = nullptr;
};

// Make the table's lanes on the device whose primary context is current. Returns what is wrong,
// for a person, or nothing.
std::string make_pool(const Table& table, Pool& pool);

// One more lane while others read, and its number, if one is left. Recording gives every stream one of
// its own. Returns what is wrong, or nothing.
std::string add_lane(Pool& pool, const TableLane& wanted, int& number);

// A vendor's part of it. They, too, say what is wrong, or nothing.
namespace masks {
std::string open(const Table& table, Pool& pool);  // the device is that of the plan
std::string make(const Pool& pool, const TableLane& wanted, Lane& lane);
std::string make_full(const Pool& pool, const TableLane& wanted, Lane& lane);  // with a priority
}  // namespace masks

std::string failed(const char* call, CUresult status);

}  // namespace eclip
