// Hooks of users' graphs: how they are instantiated, launched and destroyed.
//
// At instantiation a clone, re-homed to lanes, takes the graph's place where there is a plan for it.
// A launch is one call, or, where background gives way, one for each part of the graph. Whatever cannot
// be re-homed or cut runs as it is.
#include <map>
#include <optional>
#include <utility>

#include "device.h"
#include "graph_pacing.h"
#include "graph_recording.h"
#include "hook.h"
#include "identities.h"
#include "rehome.h"

namespace eclip {
namespace {

constexpr uint64_t kUpload = 2, kDeviceLaunch = 4;

std::shared_mutex kept_lock;
std::map<CUgraphExec, std::unique_ptr<Executable>> kept;
std::atomic<int> kept_count{0};  // spares processes without graphs the look-up

// The plan's variants, each on its own lanes. Those that are refused run as for all workers.
void instantiate_variants(Executable& main) {
    for (auto& variant : main.variants) {
        variant->flags = main.flags;
        CUresult status = driver().cuGraphInstantiateWithFlags(&variant->current, variant->clone,
                                                               main.flags);
        if (status != CUDA_SUCCESS) variant = nullptr;
    }
}

void finish_executable(Executable& made, CUgraphExec exec, uint64_t flags) {
    made.first = made.current = exec;
    made.flags = flags & ~kUpload;  // that concerns this call alone, and others refuse it
    instantiate_variants(made);
    if (giving::cuts_graphs()) {
        if (flags & kDeviceLaunch) made.keep_whole("kernels may launch it");
        if (made.sequence.whole != nullptr) count(counters().whole_graphs);
        cut_new(made);
        for (auto& variant : made.variants)
            if (variant != nullptr) cut_new(*variant);
    }
}

// Instantiate the clone in the graph's place; whatever fails is done with the user's own graph.
template <class Instantiate>
CUresult instantiate(void* exec_out, CUgraph graph, uint64_t flags, Instantiate&& call) {
    if (flags & kDeviceLaunch) forbid_cutting();
    std::unique_ptr<Executable> made = keep_graph(graph);
    if (made == nullptr) return call(graph);
    CUresult status = call(made->moved ? made->clone : graph);
    if (status != CUDA_SUCCESS && made->moved) {
        say("a graph on lanes is refused at instantiation (status %d) and runs unplanned", status);
        return call(graph);
    }
    if (status != CUDA_SUCCESS) return status;
    CUgraphExec exec = *static_cast<CUgraphExec*>(exec_out);
    finish_executable(*made, exec, flags);
    std::lock_guard hold(kept_lock);
    kept[exec] = std::move(made);
    kept_count.store(static_cast<int>(kept.size()));
    return CUDA_SUCCESS;
}

// Launches of one executable follow each other, also where another has taken its place, and one in
// parts the one before: all of them are marked by an event.
class Followed {
public:
    Followed(Executable& main, const Executable& launched, bool cut)
        : main_(main), whole_(cut ? nullptr : launched.current) {}

    // Nothing that is launched here can take another's place.
    bool needed() const {
        const bool after_parts = main_.was_launched && main_.last != whole_;  // it was kept whole since
        return main_.moved || !main_.variants.empty() || main_.sequence.whole == nullptr || after_parts;
    }
    CUresult wait(CUstream queue) const {
        bool same = whole_ != nullptr && whole_ == main_.last;
        if (!main_.was_launched || same) return CUDA_SUCCESS;
        return driver().cuStreamWaitEvent(queue, main_.launched, 0);
    }
    void mark(CUstream queue) {
        main_.last = whole_;
        main_.was_launched = true;
        if (main_.launched == nullptr) make_event();
        // Without the mark no other executable may take its place.
        if (driver().cuEventRecord(main_.launched, queue) == CUDA_SUCCESS) return;
        main_.repeatable = false;
        main_.keep_whole("its launches cannot be marked");
    }

private:
    void make_event() {
        Dispatcher& dispatcher = Dispatcher::get();
        CUcontext owner = nullptr;
        driver().cuCtxGetCurrent(&owner);
        if (dispatcher.setup().is_ready()) owner = dispatcher.pool().primary;
        PrimaryCurrent ours(owner);
        driver().cuEventCreate(&main_.launched, CU_EVENT_DISABLE_TIMING);
    }

    Executable& main_;
    CUgraphExec whole_;
};

CUstream queue_of(CUstream target, Default meaning) {
    if (target != nullptr) return target;
    return meaning == Default::thread ? kThreadStream : kLegacyStream;
}

// The executable for the workers that are active now.
Executable& choose_variant(Executable& main, CUstream stream, Default meaning) {
    if (main.worker < 0) return main;
    count(counters().graph_launches);
    int variant = Dispatcher::get().begin_graph(stream, meaning, main.worker);
    auto known = main.variant_of.find(variant);
    bool other = known != main.variant_of.end() && main.variants[known->second] != nullptr;
    return other ? *main.variants[known->second] : main;
}

template <class Launch>
CUresult launch_kept(Executable& main, CUstream stream, Default meaning, Launch&& launch) {
    Dispatcher& dispatcher = Dispatcher::get();
    std::optional<Cap::Pin> stays;  // until all of it is launched where its kernels run
    if (main.place >= 0) stays.emplace(dispatcher.cap());
    Executable& exec = main.place >= 0 ? find_placed(main, dispatcher.cap().here())
                                       : choose_variant(main, stream, meaning);
    giving::Alone alone(stream, meaning);
    if (alone.granted()) steer_parts(exec);
    const bool cut = alone.granted() && !exec.parts.empty() && may_launch_parts();
    Followed followed(main, exec, cut);
    const bool measures = alone.granted() && followed.needed() && begin_measuring(exec, cut);
    const size_t count_of_parts = cut ? exec.parts.size() : 1;
    CUresult status = CUDA_SUCCESS;
    for (size_t part = 0; part < count_of_parts && status == CUDA_SUCCESS; ++part) {
        giving::launching_graph(stream, meaning, part_ns(exec, cut, part));
        status = dispatcher.pass(stream, meaning, kWork, true, [&](CUstream target) {
            CUgraphExec made = cut ? exec.parts[part].exec : exec.current;
            if (!followed.needed() || dispatcher.captures(target, meaning)) return launch(made, target);
            CUstream queue = queue_of(target, meaning);
            CUresult done = part == 0 ? followed.wait(queue) : CUDA_SUCCESS;
            if (measures) measure_begin(exec, part, queue);
            if (done == CUDA_SUCCESS) done = launch(made, target);
            if (measures) measure_end(exec, part, queue);
            if (done == CUDA_SUCCESS && part + 1 == count_of_parts) followed.mark(queue);
            return done;
        });
    }
    if (cut) count(counters().graph_parts, count_of_parts);
    return status;
}

template <class Launch>
CUresult launch_recorded(Executable& exec, CUstream stream, Default meaning, Launch&& launch) {
    count(counters().graph_launches);
    giving::launching_graph(stream, meaning);
    return Dispatcher::get().record_graph(
        stream, meaning,
        [&](int lane) -> const std::vector<Part>& { return cut_for_recording(exec, lane); },
        [&](const Part* part, CUstream target) {
            const bool whole = part == nullptr;
            CUgraphExec made = whole ? exec.current : part->exec;
            Followed followed(exec, exec, !whole);
            if (!followed.needed() || Dispatcher::get().captures(target, meaning))
                return launch(made, target);
            CUstream queue = queue_of(target, meaning);
            CUresult status = CUDA_SUCCESS;
            if (whole || part == &exec.parts.front()) status = followed.wait(queue);
            if (status == CUDA_SUCCESS) status = launch(made, target);
            const bool last = whole || part == &exec.parts.back();
            if (status == CUDA_SUCCESS && last) followed.mark(queue);
            return status;
        });
}

template <class Launch>
CUresult launch_graph(CUgraphExec handle, CUstream stream, Default meaning, Launch&& launch) {
    Executable* known = find_executable(handle);
    if (known != nullptr && Dispatcher::get().table().mode == Mode::record)
        return launch_recorded(*known, stream, meaning, launch);
    if (known != nullptr) return launch_kept(*known, stream, meaning, launch);
    giving::launching_graph(stream, meaning);
    Dispatcher& dispatcher = Dispatcher::get();
    if (!dispatcher.on()) return launch(handle, stream);
    return dispatcher.pass(stream, meaning, kWork, true,
                           [&](CUstream target) { return launch(handle, target); });
}

}  // namespace

Executable* find_executable(CUgraphExec exec) {
    if (kept_count.load(std::memory_order_relaxed) == 0) return nullptr;
    std::shared_lock hold(kept_lock);
    auto known = kept.find(exec);
    return known == kept.end() ? nullptr : known->second.get();
}

CUgraphExec translate(CUgraphExec exec) {
    Executable* known = find_executable(exec);
    return known != nullptr ? known->current : exec;
}

}  // namespace eclip

using namespace eclip;

ECLIP_HOOK cuGraphInstantiate(void* exec, CUgraph graph, void* node, void* log, size_t size) {
    return instantiate(exec, graph, 0, [&](CUgraph made) {
        return driver().cuGraphInstantiate(exec, made, node, log, size);
    });
}

ECLIP_HOOK cuGraphInstantiate_v2(void* exec, CUgraph graph, void* node, void* log, size_t size) {
    return instantiate(exec, graph, 0, [&](CUgraph made) {
        return driver().cuGraphInstantiate_v2(exec, made, node, log, size);
    });
}

ECLIP_HOOK cuGraphInstantiateWithFlags(void* exec, CUgraph graph, uint64_t flags) {
    return instantiate(exec, graph, flags, [&](CUgraph made) {
        return driver().cuGraphInstantiateWithFlags(exec, made, flags);
    });
}

#define ECLIP_INSTANTIATE(symbol)                                               \
    ECLIP_HOOK symbol(void* exec, CUgraph graph, void* params) {                \
        uint64_t flags = static_cast<GraphInstantiateParams*>(params)->flags;   \
        return instantiate(exec, graph, flags, [&](CUgraph made) {              \
            return driver().symbol(exec, made, params);                         \
        });                                                                     \
    }
ECLIP_INSTANTIATE(cuGraphInstantiateWithParams)
ECLIP_INSTANTIATE(cuGraphInstantiateWithParams_ptsz)

#define ECLIP_GRAPH_LAUNCH(symbol, meaning)                                  \
    ECLIP_HOOK symbol(CUgraphExec exec, CUstream stream) {                   \
        return launch_graph(exec, stream, meaning, driver().symbol);         \
    }
ECLIP_GRAPH_LAUNCH(cuGraphLaunch, Default::legacy)
ECLIP_GRAPH_LAUNCH(cuGraphLaunch_ptsz, Default::thread)

#define ECLIP_GRAPH_UPLOAD(symbol, meaning)                                            \
    ECLIP_HOOK symbol(CUgraphExec exec, CUstream stream) {                             \
        CUgraphExec real_exec = translate(exec);                                       \
        return Dispatcher::get().pass(stream, meaning, kHome, true, [&](CUstream target) { \
            return driver().symbol(real_exec, target);                                 \
        });                                                                            \
    }
ECLIP_GRAPH_UPLOAD(cuGraphUpload, Default::legacy)
ECLIP_GRAPH_UPLOAD(cuGraphUpload_ptsz, Default::thread)

ECLIP_HOOK cuGraphExecDestroy(CUgraphExec exec) {
    std::unique_ptr<Executable> known;
    if (kept_count.load() != 0) {
        std::lock_guard hold(kept_lock);
        auto found = kept.find(exec);
        if (found != kept.end()) {
            known = std::move(found->second);
            kept.erase(found);
            kept_count.store(static_cast<int>(kept.size()));
        }
    }
    known.reset();
    return driver().cuGraphExecDestroy(exec);
}
