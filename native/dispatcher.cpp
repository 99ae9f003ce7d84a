#include "dispatcher.h"

#include <pthread.h>

namespace eclip {

constinit std::atomic<Dispatcher*> Dispatcher::only_{nullptr};

Dispatcher& Dispatcher::make() {
    // Never destroyed: streams may be used by threads that outlive the process's destructors.
    static Dispatcher& only = *new Dispatcher;
    only_.store(&only, std::memory_order_release);
    return only;
}

Dispatcher::Dispatcher()
    : placing_(setup_),
      workers_(setup_.table(), setup_.pool()),
      registry_(placing_.legacy(), workers_.followers(), setup_) {
    if (on()) pthread_atfork(nullptr, nullptr, [] { get().setup_.forked(); });
}

void Dispatcher::join_home(Stream& stream) {
    if (stream.planned && !captures_.has(stream.home)) placing_.join_home(stream);
}

void Dispatcher::meet_unknown(const char* name) {
    if (!on() || Inside::now()) return;
    Inside ours;
    setup_.end_planning(name, [&] {
        PrimaryCurrent current(pool().primary);
        registry_.visit([&](Stream& stream) { join_home(stream); });
    });
    // Another thread's own stream is for that thread to join, when it makes such a call.
    if (!setup_.at_home() || !thread_state().own) return;
    PrimaryCurrent current(pool().primary);
    join_home(*thread_state().own);
}

void Dispatcher::meet_misfit() {
    count(counters().misfits);
    say("a kernel does not fit on the process's SMs and runs on the whole device");
}

void Dispatcher::ended(Stream& stream, uint64_t calls) {
    if (table().mode == Mode::record)
        mark_record(stream.order->kind == Kind::legacy ? kAllWorkers
                                                       : recorded_worker(table(), stream));
    Placing::Hold hold(placing_, stream);
    if (stream.calls != calls) return;  // another thread went on meanwhile
    workers_.waited_for(stream);
    placing_.ended(stream);
}

CUresult Dispatcher::destroy(CUstream raw, CUresult (*call)(CUstream)) {
    Stream* stream = attend(raw, Default::legacy);
    if (stream == nullptr || stream->home != raw) {
        registry_.look_again();
        return call(raw);
    }
    // Joined back, so that whoever must wait for this stream's work finds it where it looks.
    if (!captures_.has(raw))
        pass(raw, Default::legacy, kHome, true, [](CUstream) { return CUDA_SUCCESS; });
    registry_.forget(raw);
    return call(raw);
}

int Dispatcher::begin_graph(CUstream raw, Default meaning, int worker) {
    Stream* stream = table().variants.empty() ? nullptr : attend(raw, meaning);
    if (stream == nullptr) return kMainVariant;
    return workers_.variant_for(workers_.begin_serving(*stream, worker));
}

void Dispatcher::ended_at(const Ending& ending) {
    auto end = [&](Stream& stream) {
        {
            Placing::Hold hold(placing_, stream);
            if (stream.calls != ending.calls) return;  // it went on
        }
        ended(stream, ending.calls);
    };
    registry_.visit_one(ending.stream, ending.id, end);
}

}  // namespace eclip
