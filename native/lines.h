// Lines: what giving way remembers of each stream of the program.
//
// Found by handle and kept for good, so that pointers stay true; a handle that the driver gives out
// again means the same line. The default stream has one for each context, a thread's own default
// stream one for each thread. When all are taken, the rest share the last.
#pragma once

#include <atomic>
#include <mutex>
#include <shared_mutex>

#include "driver.h"
#include "pacing.h"

namespace eclip::giving {

struct alignas(64) Line {
    std::atomic<uint64_t> key{0};
    std::atomic<uint64_t> launches{0};
    std::atomic<int64_t> since{0};  // the oldest launch that nobody has waited for; 0: there is none
    std::atomic<CUstream> stream{nullptr};  // by which another thread may ask; none: it may not
    std::atomic<CUcontext> context{nullptr};
    // Where threads meet that launch here: of the default stream and those that order themselves with
    // it this is the default stream's line, of others their own.
    std::atomic<int> meeting{-1};
    std::atomic<uint64_t> thread{0};      // the only one so far; kSeveralThreads
    std::atomic<bool> in_parts{false};    // it launches a graph in parts, which belong together
    Pace pace;
};
constexpr uint64_t kSeveralThreads = ~uint64_t{0};

constexpr int kLines = 1024;
constexpr int kSharedLine = kLines;  // beyond those

Line& line_at(int index);
int lines_used();  // the highest one and one more

// The line of a stream, made if there is none.
int find_line(CUstream stream, Default meaning, CUcontext context);

// Captures of the program, and the lock under which nobody may begin one or destroy a stream. Held
// alone to begin, shared to ask or record, and never while waiting.
extern std::atomic<int> capture_count;
extern std::shared_mutex quiet_lock;

// Set while a call of ours is under way: what is hooked goes straight on.
extern thread_local bool inside;
struct Inside {
    Inside() { inside = true; }
    ~Inside() { inside = false; }
};

}  // namespace eclip::giving
