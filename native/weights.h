// Weights: how long a launch takes on the device, as far as stretches of background have shown.
//
// One table of fixed size for all threads, by function and number of blocks. Reading takes no lock.
// Where its places are taken, launches share one; where a handle is given out again, the new function
// begins with what the old one took: both correct themselves, and cost a stretch's length, never order.
#pragma once

#include <atomic>
#include <cstdint>

#include "cuda_abi.h"

namespace eclip::giving {

// What is launched: of a kernel which and how large, of a graph how long it takes.
struct Work {
    enum Kind { other, kernel, graph } kind = other;
    CUfunction function = nullptr;
    uint64_t blocks = 0;
    double ns = 0;
};

constexpr uint32_t kNoPlace = UINT32_MAX;  // a graph: who launches it knows how long it takes
constexpr uint32_t kWhole = UINT32_MAX;    // what a graph weighs of which nobody knows that

struct Weight {
    uint32_t place = kNoPlace;  // in the table
    uint32_t ns = 0;
};

// A launch that was never measured weighs as much as it is told here.
Weight weigh(const Work& work, uint32_t unmeasured_ns);

// What launches of one stretch weighed. Beyond those that fit they count, and learn nothing.
struct Weights {
    static constexpr uint32_t kRoom = 64;
    std::atomic<Weight> of[kRoom];
    void note(uint32_t launch, Weight weight) {
        if (launch < kRoom) of[launch].store(weight, std::memory_order_relaxed);
    }
};

// Launches of which a stretch had so many took longer together than they weighed, or less.
void correct(const Weights& weights, uint32_t launches, double more_ns);

}  // namespace eclip::giving
