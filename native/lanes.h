// Lanes as the device has them: green contexts of the plan's masks and a stream in each.
//
// The split is that of devices/cuda/lanes.py: the groups of one call and the remainder after them.
// Contexts live until the process ends, because destroying one leaves device memory taken.
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
    CUstream stream = nullptr;  // none where all slices are meant: the user's own stream serves
    CUcontext context = nullptr;
    CUevent event = nullptr;  // recorded for each barrier; a wait keeps what it has seen
    int priority = 0;         // as CUDA counts: lower goes first, 0 is what streams have by default
};

struct Pool {
    CUcontext primary = nullptr;
    CUdevice device = -1;
    std::vector<CUdevResource> slices;  // of one split call, whose groups may be combined
    Lane lanes[kMostLanes];
    std::atomic<size_t> count{0};  // of lanes; recording adds some while others read
    std::mutex growing;
    bool any = false;              // of the plan's lanes is less than the whole device
    CUstream aside = nullptr;  // of the primary context, for what no stream of the program waits for
    double ask_ns = 0;      // what it costs to ask a lane whether it is empty
    double barrier_ns = 0;  // and what a barrier between two lanes costs
};

// Make the table's lanes on the device whose primary context is current. Returns what is wrong,
// for a person, or nothing.
std::string make_pool(const Table& table, Pool& pool);

// One more lane while others read, and its number, if one is left. Recording gives every stream one of
// its own. Returns what is wrong, or nothing.
std::string add_lane(Pool& pool, const TableLane& wanted, int& number);

}  // namespace eclip
