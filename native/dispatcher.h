// The dispatcher: every call's way to the queue it runs on, and the parts that know it.
//
//   Setup     whether the process is planned, its table and its lanes
//   Registry  the program's streams
//   Workers   the plan: which lane a launch wishes for
//   Placing   where a call may run, what it must wait for, and the call itself
//   Captures  streams that capture, which take no part
//   Events    behind which of a stream's calls they were recorded
#pragma once

#include <atomic>

#include "captures.h"
#include "cutting.h"
#include "events.h"
#include "placing.h"
#include "recording.h"
#include "registry.h"
#include "setup.h"
#include "stats.h"
#include "thread.h"
#include "workers.h"

// Every call on a launch's way is inlined: that is most of what a hook costs. Sanitizers' checks are
// many times the code, and there it would take the compiler minutes.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define ECLIP_FLATTEN
#else
#define ECLIP_FLATTEN [[gnu::flatten]]
#endif

namespace eclip {

class Dispatcher {
public:
    static Dispatcher& get() {
        Dispatcher* made = only_.load(std::memory_order_acquire);
        return made != nullptr ? *made : make();
    }

    bool on() const { return setup_.on(); }

    // A call on a stream that is no kernel. `held`: it returns at once, and locks are held meanwhile.
    template <class Call>
    CUresult pass(CUstream raw, Default meaning, int wish, bool held, Call&& call) {
        Stream* stream = attend(raw, meaning);
        if (stream == nullptr || captures_.has(stream->home)) return call(raw);
        Inside inside;
        Placing::Hold hold(placing_, *stream);
        if (!held && stream->order->kind == Kind::legacy) wish = kHome;
        return placing_.make(*stream, hold, wish, held, raw, call).status;
    }

    template <class Call>
    ECLIP_FLATTEN CUresult launch(CUstream raw, Default meaning, const Launch& launch, Call&& call) {
        Stream* stream = attend(raw, meaning);
        if (stream == nullptr || captures_.has(stream->home)) return call(raw);
        Counters& counts = counters();
        count(counts.launches);
        Inside inside;
        Placing::Hold hold(placing_, *stream);
        if (table().mode == Mode::record) return record(*stream, hold, launch, raw, call);
        if (table().mode == Mode::cap) return launch_under_cap(*stream, hold, raw, call);
        Workers::Place place = workers_.next(*stream, launch);
        auto [status, queue, refused] = placing_.make(*stream, hold, place.lane, true, raw, call);
        if (refused) workers_.mark_misfit(place.step);
        if (queue >= 0) count(counts.redirected);
        if (place.lane >= 0 && queue == kHome) count(counts.contended);
        if (queue != stream->last_queue) count(counts.switches);
        stream->last_queue = queue;
        return status;
    }

    // Its kernels go wherever the process may run.
    template <class Call>
    CUresult launch_under_cap(Stream& stream, Placing::Hold& hold, CUstream raw, Call& call) {
        auto [status, queue, refused] = placing_.make(stream, hold, kWork, true, raw, call);
        Counters& counts = counters();
        if (queue >= 0) count(counts.redirected);
        if (refused) meet_misfit();
        if (queue != stream.last_queue) count(counts.switches);
        stream.last_queue = queue;
        return status;
    }

    // A copy between contexts takes its place in the default streams of both and of the current one.
    template <class Call>
    CUresult copy_between(CUcontext one, CUcontext other, Default meaning, Call&& call) {
        if (!on() || !setup_.ready()) return call();
        CUcontext primary = pool().primary;
        if (one != primary && other != primary && device::current_context() != primary)
            return call();
        PrimaryCurrent current(primary);  // until the user's own call
        return pass(nullptr, meaning, kHome, false, [&](CUstream) {
            current.restore();
            return call();
        });
    }

    // Wait for a stream, or ask whether it is done.
    template <class Call>
    CUresult wait(CUstream raw, Default meaning, Call&& call) {
        Stream* stream = attend(raw, meaning);
        if (stream == nullptr || captures_.has(stream->home)) return call(raw);
        Inside inside;
        CUstream target = raw;
        uint64_t calls;
        {
            Placing::Hold hold(placing_, *stream);
            CUresult status = placing_.find_end(*stream, raw, target);
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
        if (!setup_.ready() || Inside::now()) return call();
        if (context == nullptr) context = device::current_context();
        if (context != pool().primary) return call();
        Inside inside;
        CUresult status = placing_.drain([&] {
            if (table().mode == Mode::record) mark_record(kAllWorkers);
            return call();
        });
        if (status == CUDA_SUCCESS) workers_.waited_for_all();
        return status;
    }

    // An event of all work of a context: what is called there from now on waits for it, or it waits
    // for what was called.
    template <class Call>
    CUresult context_event(CUcontext context, CUevent event, bool waits, Call&& call) {
        if (on() && setup_.ready() && context == pool().primary) {
            CUresult status = waits ? placing_.lanes_wait_for(event) : placing_.gather_lanes();
            if (status != CUDA_SUCCESS) return status;
        }
        return call();
    }

    // A capture takes no part in the order of streams, but its stream starts from home.
    template <class Call>
    CUresult begin_capture(CUstream raw, Default meaning, Call&& call) {
        if (!on()) return call();
        // While a blocking stream captures, the legacy stream cannot be called, not even by us.
        if (placing_.legacy_strayed()) {
            PrimaryCurrent current(pool().primary);
            pass(kLegacyStream, meaning, kHome, true, [](CUstream) { return CUDA_SUCCESS; });
        }
        return captures_.begin([&] {
            return pass(raw, meaning, kHome, true, [&](CUstream) { return call(); });
        });
    }

    template <class Call>
    CUresult end_capture(CUstream raw, Default meaning, Call&& call) {
        return on() ? captures_.end(explicit_handle(raw, meaning), call) : call();
    }

    // Whether the stream of a call captures; asked only where some may.
    bool captures(CUstream raw, Default meaning) const {
        bool all_counted = on() && !setup_.at_home();
        if (all_counted && !captures_.any()) return false;
        return device::is_capturing(explicit_handle(raw, meaning));
    }
    bool any_capture() const { return captures_.any(); }

    CUresult destroy(CUstream raw, CUresult (*call)(CUstream));
    void forget_contexts() {  // another may be where one was
        setup_.forget_contexts();
        registry_.look_again();
    }
    void meet_unknown(const char* name);  // it is about to be called, and may take any stream
    int begin_graph(CUstream raw, Default meaning, int worker);  // of this worker; its variant

    // An event is recorded where its stream's last work went.
    template <class Call>
    CUresult record_event(CUevent event, CUstream raw, Default meaning, Call&& call) {
        events_.forget(event);
        Stream* stream = attend(raw, meaning);
        if (stream == nullptr || captures_.has(stream->home)) return call(raw);
        Inside inside;
        Placing::Hold hold(placing_, *stream);
        CUresult status = placing_.make(*stream, hold, kFollow, true, raw, call).status;
        if (status == CUDA_SUCCESS)
            events_.note(event, {stream->home, stream->order->id, stream->calls});
        return status;
    }

    // Wait for an event, or ask whether it is done: then all of its stream is, if nothing was called
    // there since. It must be noted likewise before and after, for it may be recorded meanwhile.
    template <class Call>
    CUresult wait_for_event(CUevent event, Call&& call) {
        std::optional<Ending> before = Inside::now() ? std::nullopt : events_.find(event);
        CUresult status = call();
        if (status != CUDA_SUCCESS || !before || events_.find(event) != before) return status;
        Inside inside;
        ended_at(*before);
        return status;
    }

    // It is destroyed, or recorded where nobody looks.
    void forget_event(CUevent event) { events_.forget(event); }
    // Others than the program's own calls record events: what was noted of any may be out of date.
    void distrust_events() { events_.stop(); }

    // When recording: a graph on the stream's lane, `parts_on(lane)` one after another by
    // `call(part, queue)`, each timed; without parts it is called as it is.
    template <class PartsOn, class Call>
    CUresult record_graph(CUstream raw, Default meaning, PartsOn&& parts_on, Call&& call) {
        Stream* stream = attend(raw, meaning);
        if (stream == nullptr || captures_.has(stream->home)) return call(nullptr, raw);
        Inside inside;
        Placing::Hold hold(placing_, *stream);
        if (!stream->record_ready) open_record_lane(table(), setup_.pool(), *stream);
        const std::vector<Part>& parts = parts_on(stream->record_lane);
        size_t next = 0;  // what a lane has taken is not made again at home
        auto all = [&](CUstream target) {
            if (parts.empty()) return call(nullptr, target);
            for (; next < parts.size(); ++next) {
                CUresult status = record_part(*stream, parts[next], target, call);
                if (status != CUDA_SUCCESS) return status;
            }
            return CUDA_SUCCESS;
        };
        int wish = parts.empty() ? kFollow : stream->record_lane;
        return placing_.make(*stream, hold, wish, true, raw, all).status;
    }

    Setup& setup() { return setup_; }
    Workers& workers() { return workers_; }
    const Table& table() const { return setup_.table(); }
    const Pool& pool() { return setup_.pool(); }
    Cap& cap() { return setup_.cap(); }

private:
    Dispatcher();
    static Dispatcher& make();
    static constinit std::atomic<Dispatcher*> only_;

    // The stream of a call, or none where the call is not for us to place.
    Stream* attend(CUstream raw, Default meaning) {
        if (!on() || Inside::now() || !setup_.ready()) return nullptr;
        return registry_.find(raw, meaning, pool().primary);
    }
    void join_home(Stream& stream);
    void meet_misfit();  // a kernel that does not fit under the cap
    void ended(Stream& stream, uint64_t calls);

    // What an event ends: a stream, up to so many calls.
    struct Ending {
        CUstream stream = nullptr;
        uint64_t id = 0, calls = 0;
        bool operator==(const Ending&) const = default;
    };
    void ended_at(const Ending& ending);

    // Only what has kernels is timed: the rest is a pause between two of them.
    template <class Call>
    CUresult record_part(Stream& stream, const Part& part, CUstream target, Call& call) {
        if (part.kernels.empty()) return call(&part, target);
        Timing timing = begin_timing(target);
        CUresult status = call(&part, target);
        if (status == CUDA_SUCCESS)
            end_timing(timing, target, recorded_worker(table(), stream), part.kernels,
                       workers_.take_mark());
        else
            drop_timing(timing);
        return status;
    }

    template <class Call>
    [[gnu::cold, gnu::noinline]] CUresult record(Stream& stream, Placing::Hold& hold, const Launch& launch, CUstream raw,
                    Call& call) {
        if (!stream.record_ready) open_record_lane(table(), setup_.pool(), stream);
        auto timed = [&](CUstream target) {
            Timing timing = begin_timing(target);
            CUresult status = call(target);
            if (status != CUDA_SUCCESS) {
                drop_timing(timing);
                return status;
            }
            uint32_t worker = recorded_worker(table(), stream);
            end_timing(timing, target, worker, {launch}, workers_.take_mark());
            return status;
        };
        return placing_.make(stream, hold, stream.record_lane, true, raw, timed).status;
    }

    Setup setup_;
    Placing placing_;
    Workers workers_;
    Registry registry_;
    Captures captures_;
    EventNotes<Ending> events_;
};

}  // namespace eclip
