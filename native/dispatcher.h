// The dispatcher: user streams, and every call's way to the queue it runs on.
//
// Locks, in this order: a stream's own, held while a call of it is decided and made; then the gate,
// shared by calls on blocking streams and held alone by those on the legacy stream, because only
// these two kinds order against each other. Calls on non-blocking streams never meet.
//
// Nothing is held while a call is made that may keep the host waiting, nor while waiting for a stream
// or the device. Other calls of the same stream may then be decided before it is in its queue.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "driver.h"
#include "frontier.h"
#include "lanes.h"
#include "stats.h"
#include "table.h"
#include "tracker.h"

namespace eclip {

struct Stream {
    explicit Stream(CUstream home) : home(home), order(&own) {}
    Stream(CUstream home, StreamOrder& shared) : home(home), order(&shared) {}

    const CUstream home;  // the default ones by their explicit handles
    StreamOrder own;
    StreamOrder* const order;
    std::mutex lock;
    Tracker tracker;
    CUevent event = nullptr;  // for barriers from home; made when first needed
    uint64_t calls = 0;
    int last_queue = kHome;    // of its last kernel
    std::atomic<uint32_t> serves{0};  // workers that launched on it since it was last waited for
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

class Dispatcher {
public:
    static Dispatcher& get();

    // Whether calls need any attention; the one thing an unplanned process pays for.
    bool on() const { return phase_.load(std::memory_order_relaxed) != kOff; }

    // A call on a stream that is no kernel. `held`: it returns at once, and locks are held meanwhile.
    template <class Call>
    CUresult pass(CUstream raw, Default meaning, int wish, bool held, Call&& call) {
        Stream* stream = attend(raw, meaning);
        if (stream == nullptr || capturing(*stream)) return call(raw);
        Inside inside;
        Hold hold(*this, *stream);
        if (!held && stream->order->kind == Kind::legacy) wish = kHome;
        return make(*stream, hold, wish, held, raw, call).status;
    }

    template <class Call>
    CUresult launch(CUstream raw, Default meaning, const Launch& launch, Call&& call) {
        Stream* stream = attend(raw, meaning);
        if (stream == nullptr || capturing(*stream)) return call(raw);
        Counters& counts = counters();
        count(counts.launches);
        Inside inside;
        Hold hold(*this, *stream);
        if (table_.mode == Mode::record) return record(*stream, hold, launch, raw, call);
        Tracker& tracker = track(*stream);
        Tracker::Step step = tracker.next(table_, followers_, identify(launch));
        int wish = kHome;
        if (step.worker >= 0) {
            count(counts.planned);
            if (step.begins_request) count(counts.requests);
            if (!table_.variants.empty()) choose_variant(*stream, tracker, step);
            wish = lane_of(step, tracker.variant);
        }
        auto [status, queue, refused] = make(*stream, hold, wish, true, raw, call);
        if (refused) mark_misfit(step);
        if (queue >= 0) count(counts.redirected);
        if (wish >= 0 && queue == kHome) count(counts.contended);
        if (queue != stream->last_queue) count(counts.switches);
        stream->last_queue = queue;
        return status;
    }

    // A copy between contexts takes its place in the default streams of both and of the current one.
    template <class Call>
    CUresult copy_between(CUcontext one, CUcontext other, Default meaning, Call&& call) {
        if (!on() || !ready()) return call();
        bool ours = one == pool_.primary || other == pool_.primary || is_primary_current();
        if (!ours) return call();
        PrimaryCurrent current(pool_.primary);  // until the user's own call
        return pass(nullptr, meaning, kHome, false, [&](CUstream) {
            current.restore();
            return call();
        });
    }

    // Wait for a stream, or ask whether it is done.
    template <class Call>
    CUresult wait(CUstream raw, Default meaning, Call&& call) {
        Stream* stream = attend(raw, meaning);
        if (stream == nullptr || capturing(*stream)) return call(raw);
        Inside inside;
        CUstream target = raw;
        uint64_t calls;
        {
            Hold hold(*this, *stream);
            CUresult status = find_end(*stream, raw, target);
            if (status != CUDA_SUCCESS) return status;
            calls = stream->calls;
        }
        CUresult status = call(target);
        if (status == CUDA_SUCCESS) ended(*stream, calls);
        return status;
    }

    // A call that waits for everything in a context, or needs everything there to have ended. None:
    // the current one. Other contexts' work is none of its business and may even wait for it.
    template <class Call>
    CUresult drain(CUcontext context, Call&& call) {
        if (!ready() || Inside::now()) return call();
        if (context == nullptr ? !is_primary_current() : context != pool_.primary) return call();
        Inside inside;
        LaneWord::View seen[kMostLanes];
        size_t lanes = wait_for_lanes(seen);
        CUresult status = call();
        for (size_t lane = 0; lane < lanes; ++lane)
            if (status == CUDA_SUCCESS) order_.lanes[lane].emptied(seen[lane]);
        if (status == CUDA_SUCCESS) active_.fetch_and(in_request_.load());
        return status;
    }

    // A capture takes no part in the order of streams, but its stream starts from home.
    template <class Call>
    CUresult begin_capture(CUstream raw, Default meaning, Call&& call) {
        if (!on()) return call();
        // While a blocking stream captures, the legacy stream cannot be called, not even by us.
        if (order_.legacy_strayed.load()) {
            PrimaryCurrent current(pool_.primary);
            pass(kLegacyStream, meaning, kHome, true, [](CUstream) { return CUDA_SUCCESS; });
        }
        captures_.fetch_add(1);
        CUresult status = pass(raw, meaning, kHome, true, [&](CUstream) { return call(); });
        if (status != CUDA_SUCCESS) captures_.fetch_sub(1);
        return status;
    }

    template <class Call>
    CUresult end_capture(CUstream raw, Default meaning, Call&& call) {
        if (!on()) return call();
        CUstream stream = raw == nullptr && meaning == Default::thread ? kThreadStream : raw;
        bool before = is_capturing(stream);
        CUresult status = call();
        // A capture that failed has ended too; a call from the wrong thread has ended nothing.
        if (before && !is_capturing(stream)) captures_.fetch_sub(1);
        return status;
    }

    // Whether the stream of a call captures; asked only where some may.
    bool captures(CUstream raw, Default meaning) const {
        if (captures_.load(std::memory_order_relaxed) == 0 && phase_.load() == kReady) return false;
        return is_capturing(raw == nullptr && meaning == Default::thread ? kThreadStream : raw);
    }
    bool any_capture() const { return captures_.load(std::memory_order_relaxed) != 0; }
    CUresult destroy(CUstream raw, CUresult (*call)(CUstream));
    CUresult context_event(CUcontext context, CUevent event, bool waits);
    void forget_contexts() {
        for (auto& known : foreign_) known.store(nullptr);
        forget_streams();
    }
    // Another may get the handle of one that goes: threads look again.
    void forget_streams() { streams_epoch_.fetch_add(1, std::memory_order_release); }
    void forget_names() { names_epoch_.fetch_add(1); }
    void stop(const char* why);
    void meet_unknown(const char* name);  // it is about to be called, and may take any stream
    void begin_request(int worker);

    // For graphs.cpp: places for kernels of graphs are found in the same table.
    bool ready();
    bool planning() { return ready() && phase_.load(std::memory_order_relaxed) == kReady; }
    const Table& table() const { return table_; }
    const Pool& pool() const { return pool_; }
    uint64_t identify(const Launch& launch);
    int lane_of(const Tracker::Step& step, int variant) const;  // or kHome, for the whole device
    void begin_graph(CUstream raw, Default meaning, int worker);  // of this worker, is launched

private:
    // kAtHome: as when ready, but nothing goes to lanes any more.
    enum Phase : int { kOff, kWaiting, kReady, kAtHome };
    struct Timing {
        CUevent begin, end;
    };

    // Set while a call of ours is under way, so that what the driver calls in turn goes straight on.
    class Inside {
    public:
        Inside() { depth() = true; }
        ~Inside() { depth() = false; }
        static bool now() { return depth(); }

    private:
        static bool& depth();
    };

    // A stream's lock, and as much of the gate as its kind needs.
    class Hold {
    public:
        Hold(Dispatcher& owner, Stream& stream);
        ~Hold() { release(); }
        void take();
        void release();

    private:
        enum { kNone, kShared, kAlone } gate_ = kNone;
        bool taken_ = false;
        Dispatcher& owner_;
        Stream& stream_;
    };

    // Carries out what the frontier decides.
    struct Actions {
        Dispatcher& owner;
        Stream& stream;
        CUresult status = CUDA_SUCCESS;
        bool finished(int lane);
        void barrier(const StreamOrder& home, int from, int to);
        void skipped() { count(counters().skipped); }
    };

    Dispatcher();
    void forked();
    void join_home(Stream& stream);
    void join_all_home();
    Stream* attend(CUstream raw, Default meaning);
    Stream* find(CUstream raw, Default meaning);
    Stream* look_up(CUstream raw);
    bool make_ready();
    bool is_foreign(CUcontext context) const;
    bool is_primary_current() const {
        CUcontext current = nullptr;
        return driver().cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == pool_.primary;
    }
    bool capturing(const Stream& stream) const {
        return captures_.load(std::memory_order_relaxed) != 0 && is_capturing(stream.home);
    }
    bool is_capturing(CUstream stream) const;
    bool asks(bool learning);
    Tracker& track(Stream& stream);
    uint32_t begin_serving(Stream& stream, int worker);
    void choose_variant(Stream& stream, Tracker& tracker, const Tracker::Step& step);
    void mark_misfit(const Tracker::Step& step);
    CUresult find_end(Stream& stream, CUstream raw, CUstream& target);
    void ended(Stream& stream, uint64_t calls);
    size_t wait_for_lanes(LaneWord::View* seen);

    struct Made {
        CUresult status;
        int queue;
        bool refused;  // by a lane, and taken at home
    };

    // What a lane refuses, for whatever reason, may do at home. If not, the program is told what it
    // would have been told without us.
    template <class Call>
    Made make(Stream& stream, Hold& hold, int wish, bool held, CUstream raw, Call& call) {
        int queue = kHome;
        CUresult status = make_once(stream, hold, wish, held, raw, call, queue);
        if (status == CUDA_SUCCESS || queue == kHome) return {status, queue, false};
        status = make_once(stream, hold, kHome, held, raw, call, queue);
        return {status, queue, status == CUDA_SUCCESS};
    }

    template <class Call>
    CUresult make_once(Stream& stream, Hold& hold, int wish, bool held, CUstream raw, Call& call,
                       int& queue) {
        Actions actions{*this, stream};
        Frontier<Actions> frontier(order_, actions);
        // Read under the stream's lock, which who ends planning takes after saying so.
        if (phase_.load(std::memory_order_relaxed) == kAtHome) wish = kHome;
        queue = frontier.decide(*stream.order, wish);
        ++stream.calls;
        CUresult status = actions.status;
        if (status == CUDA_SUCCESS) {
            if (!held) hold.release();
            status = call(queue == kHome ? raw : pool_.lanes[queue].stream);
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

    template <class Call>
    CUresult record(Stream& stream, Hold& hold, const Launch& launch, CUstream raw, Call& call) {
        if (!stream.record_ready) open_record_lane(stream);
        auto timed = [&](CUstream target) {
            Timing timing = begin_timing(target);
            CUresult status = call(target);
            if (status == CUDA_SUCCESS)
                end_timing(timing, target, stream, launch);
            else
                drop_timing(timing);
            return status;
        };
        return make(stream, hold, stream.record_lane, true, raw, timed).status;
    }
    void open_record_lane(Stream& stream);
    uint32_t recorded_worker(const Stream& stream) const;
    bool take_mark();  // whether the thread has said that a request begins here
    Timing begin_timing(CUstream target);
    static void drop_timing(const Timing& timing);
    void end_timing(const Timing& timing, CUstream target, const Stream& stream,
                    const Launch& launch);

    std::atomic<int> phase_{kOff};
    std::atomic<int> captures_{0};
    static constexpr size_t kForeign = 8;
    std::atomic<CUcontext> foreign_[kForeign]{};  // known not to be the device's primary one
    std::atomic<size_t> foreign_next_{0};
    std::atomic<uint64_t> names_epoch_{0};
    std::atomic<uint64_t> streams_epoch_{0};
    std::atomic<uint64_t> next_id_{1};
    std::atomic<uint32_t> asked_{0}, answered_done_{0}, chances_{0};
    Table table_;
    Pool pool_;
    SharedOrder order_;
    Stream legacy_;
    std::shared_mutex gate_;
    Followers followers_{};
    std::mutex setup_;
    std::shared_mutex streams_lock_;
    std::unordered_map<CUstream, std::unique_ptr<Stream>> streams_;
    std::unique_ptr<std::atomic<bool>[]> misfits_;  // per kernel of all workers
    // A bit a worker: between the first and the last launch of a request; and from its first launch
    // until the program has waited for what it launched. Hints: they choose lanes, never order.
    std::atomic<uint32_t> in_request_{0}, active_{0};
    int asking_ = 0;  // -1 never, 1 always, 0 whichever is cheaper
    int wanted_device_ = 0;
};

}  // namespace eclip
