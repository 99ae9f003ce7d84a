// Counters of one process, kept in a file that outlives it however it ends.
//
// Every thread counts in a slot of its own, so that counting costs no more than an addition.
#pragma once

#include <atomic>
#include <cstdint>

namespace eclip {

// programs/table.py reads the names in this order.
#define ECLIP_COUNTERS(COUNTER)                                       \
    COUNTER(launches)    /* kernels, not counting those of graphs */  \
    COUNTER(planned)     /* found in the table */                     \
    COUNTER(redirected)  /* sent to another stream than the user's */ \
    COUNTER(contended)   /* planned, but the lane was another's */    \
    COUNTER(misfits)     /* planned, but the lane cannot hold it */   \
    COUNTER(switches)    /* launches on another queue than the last */ \
    COUNTER(barriers)                                                 \
    COUNTER(skipped)     /* barriers, the predecessor being done */   \
    COUNTER(requests)                                                 \
    COUNTER(graphs)      /* re-homed */                               \
    COUNTER(graph_kernels)                                            \
    COUNTER(graph_planned)                                            \
    COUNTER(graph_launches)                                           \
    COUNTER(updates)     /* of re-homed executables, translated */    \
    COUNTER(reinstantiations)                                         \
    COUNTER(foreign_graphs) /* instantiated as they are: nobody's */  \
    COUNTER(cut_graphs)  /* times that a graph was cut into parts */  \
    COUNTER(graph_parts) /* launched, of graphs that were cut */      \
    COUNTER(whole_graphs) /* that cannot be cut: one stretch each */

struct alignas(128) Counters {
#define ECLIP_COUNTER(name) std::atomic<uint64_t> name;
    ECLIP_COUNTERS(ECLIP_COUNTER)
#undef ECLIP_COUNTER
};

constexpr int kCounterSlots = 64;

// The calling thread's slot; remembered beside what frees it, which has to be asked for every time.
extern constinit thread_local Counters* counters_of_thread;
Counters& find_counters();
inline Counters& counters() {
    return counters_of_thread != nullptr ? *counters_of_thread : find_counters();
}

// Count into a file `PID` in this folder from now on; without one, counts are nowhere to be seen.
void open_counters(const char* folder);

// Only its own thread writes a slot, so adding needs no locked instruction (5 ns each). Beyond 63
// threads at once the rest share the last slot, where a count may rarely be lost.
inline void count(std::atomic<uint64_t>& counter, uint64_t more = 1) {
    counter.store(counter.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
}

}  // namespace eclip
