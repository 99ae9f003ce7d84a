// What libeclip remembers of a thread of the program.
#pragma once

#include <memory>

#include "stream.h"

namespace eclip {

// Many times more than programs have streams at once: who is not found is looked up under a lock.
constexpr int kStreamShift = 64 - 11;
constexpr size_t kStreamCache = size_t{1} << (64 - kStreamShift), kStreamProbes = 4;

struct StreamEntry {
    CUstream raw;
    Stream* stream;
    uint64_t epoch;
};

struct ThreadState {
    StreamEntry streams[kStreamCache] = {};
    std::unique_ptr<Stream> own;  // its default stream is a stream of its own
    Tracker tracker;
    Followers* followers = nullptr;
    bool marked = false;  // the thread's next launch begins a request
    int marked_worker = kUnplanned;
    ~ThreadState();
};

// On the heap: what is thread-local itself must be small, or a process that is running already
// cannot load the library. The pointer beside the owner is read without asking whether it was made.
extern constinit thread_local ThreadState* state_of_thread;
ThreadState& make_thread_state();
inline ThreadState& thread_state() {
    return state_of_thread != nullptr ? *state_of_thread : make_thread_state();
}

// Set while a call of ours is under way, so that what the driver calls in turn goes straight on.
class Inside {
public:
    Inside() { inside_ = true; }
    ~Inside() { inside_ = false; }
    static bool now() { return inside_; }

private:
    static constinit thread_local bool inside_;
};

}  // namespace eclip
