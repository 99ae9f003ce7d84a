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

// A word of a lane. Under a cap it changes while others read it, but not while the lane is theirs.
template <class T>
class Slot {
public:
    Slot(T value = {}) : value_(value) {}
    Slot(const Slot& other) : value_(static_cast<T>(other)) {}
    Slot& operator=(const Slot& other) { return *this = static_cast<T>(other); }
    Slot& operator=(T value) {
        value_.store(value, std::memory_order_release);
        return *this;
    }
    operator T() const { return value_.load(std::memory_order_acquire); }

private:
    std::atomic<T> value_;
};

struct Lane {
    // None where all slices and no priority are meant: the user's own stream serves.
    Slot<CUstream> stream = nullptr;
    Slot<CUcontext> context = nullptr;
    Slot<CUevent> event = nullptr;  // recorded for each barrier; a wait keeps what it has seen
    int priority = 0;  // as CUDA counts: lower goes first, 0 is what streams have by default
    Slot<int> place = -1;  // of the cap (cap.h)
};

// Some slices as a cap may have them: what streams there are made of.
struct CapPlace {
    uint64_t slices = 0;  // a bit each
    CUgreenCtx green = nullptr;
    CUcontext context = nullptr;
    CUstream first = nullptr;  // for questions about the place; also the first lane there
};
constexpr int kMostPlaces = 32;  // a green context takes memory that the driver never gives back

struct Pool {
    CUcontext primary = nullptr;
    CUdevice device = -1;
    std::vector<uint32_t> slice_units;  // of the device, in the order of masks
    Lane lanes[kMostLanes];
    CapPlace places[kMostPlaces];
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
std::string open_place(const Pool& pool, CapPlace& place);  // `slices` says which
std::string make_stream(const Pool& pool, const CapPlace& place, CUstream& stream);
}  // namespace masks

std::string failed(const char* call, CUresult status);

}  // namespace eclip
