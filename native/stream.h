// A user's stream as libeclip keeps it, and a launch on it.
#pragma once

#include <atomic>
#include <mutex>

#include "cuda_abi.h"
#include "frontier.h"
#include "tracker.h"

namespace eclip {

// How lanes answered when this stream asked whether they are empty.
struct Answers {
    uint32_t chances = 0, asked = 0, empty = 0;
};

struct alignas(64) Stream {  // on cache lines of its own
    explicit Stream(CUstream home) : home(home), order(&own) {}
    Stream(CUstream home, StreamOrder& shared) : home(home), order(&shared) {}

    const CUstream home;  // the default ones by their explicit handles
    StreamOrder own;
    StreamOrder* const order;
    std::mutex lock;
    Tracker tracker;
    CUevent event = nullptr;  // for barriers from home; made when first needed
    uint64_t calls = 0;
    Answers answers;
    int last_queue = kHome;    // of its last kernel
    std::atomic<uint32_t> serves{0};  // workers that launched on it since it was last waited for
    int cap_lane = kHome;      // the last one under a cap
    int record_lane = kHome;   // when recording: the lane of its own
    bool record_ready = false;
    bool planned = true;       // of the context whose lanes we have
};

// What identifies a launch.
struct Launch {
    CUfunction function;
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    unsigned cluster;
};

}  // namespace eclip
