// Background without a plan: launches in stretches, few of them in flight, and holds.
//
// A stretch is n launches of one stream, n steered so that it takes about the grain on the device: an
// event is recorded between two stretches, and the times between events say how long they took. Before
// a stretch begins, the one `depth` before it must be done. That is what a service finds in its way.
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

namespace eclip::giving {

struct Line;

constexpr int kRing = 8;  // stretches remembered: those in flight, and one before to measure from

struct Stretch {
    CUevent event = nullptr;
    uint32_t launches = 0;
    bool apart = false;  // says nothing about how long launches take: after a hold, or a new graph
};

struct Pace {
    std::atomic<uint32_t> launched{0};  // of the stretch that is open
    std::atomic<uint32_t> quota{8};     // launches that a stretch has
    std::atomic<int64_t> stretch_ns{0};  // that the last measured one took
    std::atomic<int> given_up{0};       // waits in a row that ended without an answer
    std::mutex lock;                    // of what follows; never held while waiting
    Stretch ring[kRing];
    uint64_t recorded = 0;  // stretches ended by an event, ...
    uint64_t retired = 0;   // ... and of them known to be done
    uint64_t epoch = 0;     // of the contexts in which the events were made
    bool apart = false;     // the open stretch is
};

void begin_background(double floor);  // once the process has its row
// A graph takes so long, or, if that is not known, as long as it likes. Anything else is one launch.
constexpr double kOneLaunch = -1, kUnknownTime = 0;
void pace(Line& line, CUstream stream, Default meaning, double graph_ns);
// Keep the calling thread for as long as that is true; it takes no lock.
void wait_while(const std::atomic<bool>& busy);
int64_t wanted_grain();
void forget_events();  // their contexts are about to end

}  // namespace eclip::giving
