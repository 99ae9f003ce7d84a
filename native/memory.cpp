#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

#include "driver.h"
#include "seat.h"
#include "setup.h"

namespace eclip::memory {

std::atomic<int64_t> cap{-1};

namespace {

std::atomic<int64_t> used{0};

struct Known {
    std::mutex lock;
    std::map<std::pair<Kind, uint64_t>, uint64_t> bytes;
};
Known& known() {
    static Known& only = *new Known;  // freed to the very end
    return only;
}

double gib(int64_t bytes) { return static_cast<double>(bytes) / (1 << 30); }

}  // namespace

int64_t read_cap() {
    const char* wanted = is_disabled() ? nullptr : secure_getenv("ECLIP_MEMORY");
    const int64_t bytes = wanted != nullptr ? std::max(atoll(wanted), 0LL) : 0;
    cap.store(bytes);
    return bytes;
}

bool reserve(uint64_t bytes) {
    const int64_t most = cap.load();
    int64_t seen = used.load(), more = 0;
    do {
        const bool fits = bytes <= static_cast<uint64_t>(std::max<int64_t>(most - seen, 0));
        if (!fits) {
            say("an allocation of %.2f GiB is refused: the process has %.2f GiB of its cap of %.2f GiB",
                gib(static_cast<int64_t>(std::min<uint64_t>(bytes, INT64_MAX))), gib(seen), gib(most));
            return false;
        }
        more = seen + static_cast<int64_t>(bytes);
    } while (!used.compare_exchange_weak(seen, more));
    Seat::get().show_memory(most, more);
    return true;
}

void give_back(uint64_t bytes) {
    const int64_t left = used.fetch_sub(static_cast<int64_t>(bytes)) - static_cast<int64_t>(bytes);
    Seat::get().show_memory(cap.load(), left);
}

void note(Kind kind, uint64_t handle, uint64_t bytes) {
    std::lock_guard hold(known().lock);
    known().bytes[{kind, handle}] = bytes;
}

uint64_t forget(Kind kind, uint64_t handle) {
    std::lock_guard hold(known().lock);
    auto found = known().bytes.find({kind, handle});
    if (found == known().bytes.end()) return 0;
    const uint64_t bytes = found->second;
    known().bytes.erase(found);
    return bytes;
}

void limit(size_t* free, size_t* total) {
    const int64_t most = cap.load();
    const int64_t left = std::max<int64_t>(most - used.load(), 0);
    if (total != nullptr) *total = std::min(*total, static_cast<size_t>(most));
    if (free != nullptr) *free = std::min(*free, static_cast<size_t>(left));
}

}  // namespace eclip::memory
