// Placing calls: what the frontier decides for a stream's next call, carried out on its queue.
//
// Locks, in this order: a stream's own, held while a call of it is decided and made; then the gate,
// shared by calls on blocking streams and held alone by those on the legacy stream, because only
// these two kinds order against each other. Calls on non-blocking streams never meet.
//
// Nothing is held while a call is made that may keep the host waiting, nor while waiting for a stream
// or the device. Other calls of the same stream may then be decided before it is in its queue.
#pragma once

#include <atomic>
#include <shared_mutex>

#include "frontier.h"
#include "setup.h"
#include "stats.h"
#include "stream.h"

namespace eclip {

class Placing {
public:
    explicit Placing(Setup& setup);

    // A stream's lock, and as much of the gate as its kind needs.
    class Hold {
    public:
        Hold(Placing& owner, Stream& stream) : owner_(owner), stream_(stream) { take(); }
        ~Hold() { release(); }
        void take() {
            if (taken_) return;
            taken_ = true;
            stream_.lock.lock();
            if (stream_.order->kind != Kind::nonblocking) enter_gate();
        }
        void release() {
            if (!taken_) return;
            if (gate_ != kNone) leave_gate();
            stream_.lock.unlock();
            taken_ = false;
        }

    private:
        void enter_gate();
        void leave_gate();

        enum { kNone, kShared, kAlone } gate_ = kNone;
        bool taken_ = false;
        Placing& owner_;
        Stream& stream_;
    };

    struct Made {
        CUresult status;
        int queue;
        bool refused;  // by a lane, and taken at home
    };

    // The call, on the queue it belongs to. `held`: it returns at once, and locks are held meanwhile.
    // What a lane refuses, for whatever reason, may do at home. If not, the program is told what it
    // would have been told without us.
    template <class Call>
    Made make(Stream& stream, Hold& hold, int wish, bool held, CUstream raw, Call& call) {
        int queue = kHome;
        CUresult status = make_once(stream, hold, wish, held, raw, call, queue);
        if (status == CUDA_SUCCESS || queue == kHome) return {status, queue, false};
        return make_at_home(stream, hold, held, raw, call);
    }

    // From the lane of its last work, by a barrier, as if something had been called there.
    void join_home(Stream& stream);

    // The queue to wait for that ends after all of the stream.
    CUresult find_end(Stream& stream, CUstream raw, CUstream& target);
    void ended(Stream& stream);  // all that was called on it; the stream is held

    // Make a call after everything on lanes has ended.
    template <class Call>
    CUresult drain(Call&& call) {
        LaneWord::View seen[kMostLanes];
        size_t lanes = wait_for_lanes(seen);
        CUresult status = call();
        for (size_t lane = 0; lane < lanes; ++lane)
            if (status == CUDA_SUCCESS) order_.lanes[lane].emptied(seen[lane]);
        return status;
    }

    // An event of all work of the context takes in the lanes.
    CUresult gather_lanes();
    CUresult lanes_wait_for(CUevent event);

    bool legacy_strayed() const { return order_.legacy_strayed.load(); }
    StreamOrder& legacy() { return order_.legacy; }

private:
    // Carries out what the frontier decides.
    struct Actions {
        Placing& owner;
        Stream& stream;
        CUresult status = CUDA_SUCCESS;
        bool finished(int lane);
        void barrier(const StreamOrder& home, int from, int to);
        void skipped() { count(counters().skipped); }
    };

    template <class Call>
    [[gnu::cold, gnu::noinline]] Made make_at_home(Stream& stream, Hold& hold, bool held,
                                                   CUstream raw, Call& call) {
        int queue = kHome;
        CUresult status = make_once(stream, hold, kHome, held, raw, call, queue);
        return {status, queue, status == CUDA_SUCCESS};
    }

    template <class Call>
    CUresult make_once(Stream& stream, Hold& hold, int wish, bool held, CUstream raw, Call& call,
                       int& queue) {
        Actions actions{*this, stream};
        Frontier<Actions> frontier(order_, actions);
        // Read under the stream's lock, which who ends planning takes after saying so.
        if (setup_.at_home() || must_stay(stream)) wish = kHome;
        if (wish == kWork) queue = decide_under_cap(frontier, stream);
        else queue = frontier.decide(*stream.order, wish);
        ++stream.calls;
        CUresult status = actions.status;
        if (status == CUDA_SUCCESS) {
            if (!held) hold.release();
            status = call(queue_of(queue, raw));
        }
        if (!held) {
            hold.take();
            ++stream.calls;  // who has waited meanwhile may not have waited for this
            // While the lane is still ours: afterwards it may be another's, who would be waited for.
            frontier.arrived(*stream.order, queue);
        }
        if (queue >= 0) order_.lanes[queue].submitted();
        return status;
    }

    // Without a cap, follow. With one, on the stream's lane where the process is, also if it moves
    // meanwhile or another stream takes the lane.
    int decide_under_cap(Frontier<Actions>& frontier, Stream& stream) {
        if (!cap_.on()) return frontier.decide(*stream.order, kFollow);
        for (;;) {
            const int lane = cap_.lane_for(stream);
            const int queue = frontier.decide(*stream.order, lane);
            const bool claimed = queue >= 0;
            if (lane == kHome || (claimed && cap_.is_here(queue))) return queue;
            if (claimed) order_.lanes[queue].submitted();
        }
    }

    // On a lane that orders itself with the default stream, the default stream would wait for it.
    bool must_stay(const Stream& stream) const {
        return pool_.waits_for_host != nullptr && stream.order->kind == Kind::nonblocking &&
               pool_.waits_for_host();
    }
    CUstream queue_of(int queue, CUstream home) const {
        return queue >= 0 ? static_cast<CUstream>(pool_.lanes[queue].stream) : home;
    }
    bool asks(const Stream& stream) const;
    size_t wait_for_lanes(LaneWord::View* seen);

    Setup& setup_;
    Pool& pool_;
    Cap& cap_;
    SharedOrder order_;
    std::shared_mutex gate_;
    int asking_ = 0;  // -1 never, 1 always, 0 whichever is cheaper
};

}  // namespace eclip
