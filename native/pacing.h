// Background without a plan: launches in stretches, few of them in flight, and holds.
//
// A stretch is as many launches of one stream as take the grain on the device, or one that takes longer.
// Every launch weighs what its kernel takes (weights.h). An event is recorded between two stretches, and
// the times between events correct the weights. Before a stretch begins, the one `depth` before it must
// be done. That is what a service finds in its way.
//
// At every launch the board is looked at. While a service counts as busy nothing is launched. No lock
// is held meanwhile, and none of Python's. A hold ends when all services are idle or have launched
// nothing for a while, when the process is behind its floor, and when the user interrupts the program.
// A wait for a stretch has an end as well: the device may be waiting for the program.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "driver.h"
#include "weights.h"

namespace eclip::giving {

struct Line;

constexpr int kRing = 8;  // stretches remembered: those in flight, and one before to measure from

struct Stretch {
    CUevent event = nullptr;
    Weights* weights = nullptr;  // kept for good, as its line is
    uint32_t launches = 0;
    int64_t expected_ns = 0;  // on the device: what its launches weigh together
    int64_t idle_ns = 0;      // of its time, at most: so long nobody has seen the device at work for us
    bool apart = false;       // says nothing about how long launches take: after a hold, or a new graph
};

struct Pace {
    std::atomic<uint64_t> open{0};         // launches of the stretch that is open, and what they weigh
    std::atomic<Weights*> noted{nullptr};  // one by one, for the stretch that is open
    std::atomic<int64_t> at_work_ns{0};    // when the device was last seen to be
    std::atomic<int64_t> stretch_ns{0};    // that the last measured one took
    std::atomic<int> given_up{0};          // waits in a row that ended without an answer
    std::mutex lock;                       // of what follows; never held while waiting
    Stretch ring[kRing];
    uint64_t recorded = 0;   // stretches ended by an event, ...
    uint64_t retired = 0;    // ... and of them known to be done, ...
    int64_t retired_ns = 0;  // ... the last since then; 0: it may have been done for long
    uint64_t epoch = 0;      // of the contexts in which the events were made
    bool apart = false;      // the open stretch is
};

void begin_background(double floor);  // once the process has its row
void pace(Line& line, CUstream stream, Default meaning, const Work& work);
// Keep the calling thread for as long as that is true; it takes no lock.
void wait_while(const std::atomic<bool>& busy);
int64_t wanted_grain();
void forget_events();  // their contexts are about to end

}  // namespace eclip::giving
