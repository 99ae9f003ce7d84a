// The plan's workers: whose launch it is, where in the trace it stands, and which lane that has.
#pragma once

#include <atomic>
#include <memory>

#include "lanes.h"
#include "identities.h"
#include "stats.h"
#include "stream.h"
#include "table.h"
#include "thread.h"

namespace eclip {

class Workers {
public:
    Workers(const Table& table, const Pool& pool);

    // The place of the stream's next launch, and the lane it has there, or kHome.
    struct Place {
        Tracker::Step step;
        int lane = kHome;
    };
    Place next(Stream& stream, const Launch& launch) {
        Tracker& tracker = track(stream);
        Place place{tracker.next(table_, followers_, identities_.of(launch))};
        if (place.step.worker < 0) return place;
        Counters& counts = counters();
        count(counts.planned);
        if (place.step.begins_request) count(counts.requests);
        if (!table_.variants.empty()) choose_variant(stream, tracker, place.step);
        place.lane = lane_of(place.step, tracker.variant);
        return place;
    }

    Identities& identities() { return identities_; }
    // Or kHome, for the whole device.
    int lane_of(const Tracker::Step& step, int variant) const {
        const TableWorker& worker = table_.workers[step.worker];
        size_t kernel = worker.first + step.position;
        int lane = variant == kMainVariant ? worker.kernels[step.position].lane
                                           : table_.variants[variant].lanes[kernel];
        // A worker that was taken up in the middle of a request has another's variant.
        if (lane < 0) lane = worker.kernels[step.position].lane;
        if (pool_.lanes[lane].stream == nullptr) return kHome;
        return misfits_[kernel].load(std::memory_order_relaxed) ? kHome : lane;
    }
    void mark_misfit(const Tracker::Step& step);  // its lane refused it

    // The thread's next launch begins a request; of this worker, if one is named.
    void begin_request(int worker);
    bool take_mark();  // whether the thread has said so

    // The worker has launched on the stream; who is active now, this worker among them.
    uint32_t begin_serving(Stream& stream, int worker);
    int variant_for(uint32_t active) const;  // the plan's, for the fewest workers that holds these
    void waited_for(Stream& stream);
    void waited_for_all() { active_.fetch_and(in_request_.load()); }

    Followers& followers() { return followers_; }

private:
    Tracker& track(Stream& stream) {
        ThreadState& thread = thread_state();
        bool by_stream = table_.workers_by == WorkersBy::stream;
        Tracker& tracker = by_stream ? stream.tracker : thread.tracker;
        thread.followers = &followers_;
        if (thread.marked) {
            thread.marked = false;
            tracker.begin_request(table_, thread.marked_worker, followers_);
        }
        return tracker;
    }
    void choose_variant(Stream& stream, Tracker& tracker, const Tracker::Step& step);

    const Table& table_;
    const Pool& pool_;
    Identities identities_;
    Followers followers_{};
    std::unique_ptr<std::atomic<bool>[]> misfits_;  // per kernel of all workers
    // A bit a worker: between the first and the last launch of a request; and from its first launch
    // until the program has waited for what it launched. Hints: they choose lanes, never order.
    std::atomic<uint32_t> in_request_{0}, active_{0};
};

}  // namespace eclip
