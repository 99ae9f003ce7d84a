#include "workers.h"

#include <utility>

#include "driver.h"
#include "stats.h"
#include "thread.h"

namespace eclip {

Workers::Workers(const Table& table, const Pool& pool) : table_(table), pool_(pool) {
    size_t kernels = 0;
    for (const TableWorker& worker : table.workers) kernels += worker.kernels.size();
    misfits_ = std::make_unique<std::atomic<bool>[]>(kernels);
}

void Workers::begin_request(int worker) {
    thread_state().marked = true;
    thread_state().marked_worker = worker;
}

bool Workers::take_mark() { return std::exchange(thread_state().marked, false); }

uint32_t Workers::begin_serving(Stream& stream, int worker) {
    uint32_t bit = 1u << worker;
    stream.serves.fetch_or(bit, std::memory_order_relaxed);
    return active_.fetch_or(bit) | bit;
}

int Workers::variant_for(uint32_t active) const {
    for (size_t index = 0; index < table_.variants.size(); ++index)
        if ((active & ~table_.variants[index].active) == 0) return static_cast<int>(index);
    return kMainVariant;
}

// At a request's first kernel.
void Workers::choose_variant(Stream& stream, Tracker& tracker, const Tracker::Step& step) {
    uint32_t bit = 1u << step.worker;
    if (step.begins_request) {
        tracker.variant = variant_for(begin_serving(stream, step.worker));
        in_request_.fetch_or(bit);
    }
    if (step.position + 1 == table_.workers[step.worker].kernels.size()) in_request_.fetch_and(~bit);
}

void Workers::waited_for(Stream& stream) {
    uint32_t served = stream.serves.exchange(0, std::memory_order_relaxed);
    active_.fetch_and(~(served & ~in_request_.load()));
}

void Workers::mark_misfit(const Tracker::Step& step) {
    misfits_[table_.workers[step.worker].first + step.position].store(true);
    count(counters().misfits);
    say("a kernel of worker %d is refused on its lane and runs on the whole device", step.worker);
}

}  // namespace eclip
