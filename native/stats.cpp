#include "stats.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>

namespace eclip {

constinit thread_local Counters* counters_of_thread = nullptr;

namespace {

Counters in_memory[kCounterSlots];
Counters* slots = in_memory;
std::atomic<uint64_t> taken{0};  // slots in use; the last is for all who find no other

// A thread's slot, free again when the thread ends; what it counted stays.
struct Place {
    unsigned slot = kCounterSlots - 1;
    Place() {
        for (uint64_t seen = taken.load(); __builtin_popcountll(~seen) > 1;) {
            unsigned lowest = static_cast<unsigned>(__builtin_ctzll(~seen));
            if (!taken.compare_exchange_weak(seen, seen | uint64_t{1} << lowest)) continue;
            slot = lowest;
            return;
        }
    }
    ~Place() {
        counters_of_thread = &slots[kCounterSlots - 1];  // for what is counted after this
        if (slot != kCounterSlots - 1) taken.fetch_and(~(uint64_t{1} << slot));
    }
};

}  // namespace

Counters& find_counters() {
    thread_local Place place;
    counters_of_thread = &slots[place.slot];
    return *counters_of_thread;
}

void open_counters(const char* folder) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%d", folder, static_cast<int>(getpid()));
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file < 0) return;
    size_t bytes = sizeof(Counters) * kCounterSlots;
    if (ftruncate(file, static_cast<off_t>(bytes)) == 0) {
        void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (made != MAP_FAILED) slots = static_cast<Counters*>(made);
        counters_of_thread = nullptr;  // in a forked child: count in its own file
    }
    close(file);
}

}  // namespace eclip
