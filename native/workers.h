// The plan's workers: whose launch it is, where in the trace it stands, and which lane that has.
#pragma once

#include <atomic>
#include <memory>

#include "lanes.h"
#include "names.h"
#include "stream.h"
#include "table.h"

namespace eclip {

class Workers {
public:
    Workers(const Table& table, const Pool& pool);

    // The place of the stream's next launch, and the lane it has there, or kHome.
    struct Place {
        Tracker::Step step;
        int lane = kHome;
    };
    Place next(Stream& stream, const Launch& launch);

    uint64_t identify(const Launch& launch) {
        return identity(names_.hash_of(launch.function), launch.grid, launch.block);
    }
    int lane_of(const Tracker::Step& step, int variant) const;  // or kHome, for the whole device
    void mark_misfit(const Tracker::Step& step);  // its lane refused it
    void forget_names() { names_.forget(); }

    // The thread's next launch begins a request; of this worker, if one is named.
    void begin_request(int worker);
    bool take_mark();  // whether the thread has said so

    // The worker has launched on the stream; who is active now, this worker among them.
    uint32_t begin_serving(Stream& stream, int worker);
    void waited_for(Stream& stream);
    void waited_for_all() { active_.fetch_and(in_request_.load()); }

    Followers& followers() { return followers_; }

private:
    Tracker& track(Stream& stream);
    void choose_variant(Stream& stream, Tracker& tracker, const Tracker::Step& step);

    const Table& table_;
    const Pool& pool_;
    Names names_;
    Followers followers_{};
    std::unique_ptr<std::atomic<bool>[]> misfits_;  // per kernel of all workers
    // A bit a worker: between the first and the last launch of a request; and from its first launch
    // until the program has waited for what it launched. Hints: they choose lanes, never order.
    std::atomic<uint32_t> in_request_{0}, active_{0};
};

}  // namespace eclip
