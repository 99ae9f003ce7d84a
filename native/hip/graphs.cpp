// Hooks of users' graphs. A launch is one stretch: the whole of it runs on one lane, or at home.
//
// HIP runs a linear graph on the stream that it is launched on, in that stream's mask, and further
// branches on streams of its own, without one (docs/amd.md). So a linear graph of a worker goes to
// the lane that most of its kernels have in the plan; every other one stays at home. The executable
// is the program's own, so updates of it need nothing from us.
#include <algorithm>
#include <map>
#include <shared_mutex>

#include "../hook.h"
#include "../matching.h"
#include "driver.h"
#include "gates.h"

namespace eclip {
namespace {

// Kinds of nodes, counted from 0 as since ROCm 5.3; 5.2 counts from 1, and has other kinds behind
// the first eight: copies.
enum NodeKind : int { kKernel = 0, kMemset = 2, kHost = 3, kChild = 4, kEmpty = 5, kEventRecord = 7 };
constexpr int kCommonKinds = 8;

// What the kind of an empty node says.
int first_kind() {
    static const int first = [] {
        CUgraph graph = nullptr;
        CUgraphNode node = nullptr;
        int type = kEmpty;
        if (hip().hipGraphCreate(&graph, 0) != CUDA_SUCCESS) return 0;
        if (hip().hipGraphAddEmptyNode(&node, graph, nullptr, 0) == CUDA_SUCCESS)
            hip().hipGraphNodeGetType(node, &type);
        hip().hipGraphDestroy(graph);
        return type - kEmpty;
    }();
    return first;
}

bool is_plain(int kind) {
    return kind <= kMemset || kind == kEmpty || (kind >= kCommonKinds && first_kind() == 1);
}

// A graph as it was when it was instantiated.
struct Seen {
    std::vector<CUgraphNode> nodes;  // in their order, if it is linear
    std::vector<int> kinds;
    bool linear = true, waits_for_host = false, records_events = false;
};

// Each node after exactly one other, but for the first.
bool put_in_order(CUgraph graph, std::vector<CUgraphNode>& nodes) {
    size_t count = 0;
    if (hip().hipGraphGetEdges(graph, nullptr, nullptr, &count) != CUDA_SUCCESS) return false;
    if (count + 1 != nodes.size()) return false;
    std::vector<CUgraphNode> from(count), to(count);
    if (count > 0 && hip().hipGraphGetEdges(graph, from.data(), to.data(), &count) != CUDA_SUCCESS)
        return false;
    std::map<CUgraphNode, CUgraphNode> next;
    for (size_t edge = 0; edge < count; ++edge) next[from[edge]] = to[edge];
    auto is_first = [&](CUgraphNode node) {
        return std::find(to.begin(), to.end(), node) == to.end();
    };
    std::vector<CUgraphNode> ordered;
    auto first = std::find_if(nodes.begin(), nodes.end(), is_first);
    for (CUgraphNode node = first == nodes.end() ? nullptr : *first; node != nullptr;) {
        ordered.push_back(node);
        auto after = next.find(node);
        node = after == next.end() || ordered.size() == nodes.size() ? nullptr : after->second;
    }
    if (ordered.size() != nodes.size()) return false;
    nodes = std::move(ordered);
    return true;
}

// False where HIP does not say what is in it.
bool look_at(CUgraph graph, Seen& seen) {
    const Hip& real = hip();
    size_t count = 0;
    if (real.hipGraphGetNodes(graph, nullptr, &count) != CUDA_SUCCESS) return false;
    seen.nodes.resize(count);
    if (count == 0) return true;
    if (real.hipGraphGetNodes(graph, seen.nodes.data(), &count) != CUDA_SUCCESS) return false;
    seen.linear = put_in_order(graph, seen.nodes);
    for (CUgraphNode node : seen.nodes) {
        int type = -1;
        if (real.hipGraphNodeGetType(node, &type) != CUDA_SUCCESS) return false;
        int kind = type - first_kind();
        seen.kinds.push_back(kind);
        if (is_plain(kind)) continue;
        seen.linear = false;
        if (kind == kEventRecord) {
            seen.records_events = true;
        } else if (kind == kChild) {
            CUgraph child = nullptr;
            Seen within;
            if (real.hipGraphChildGraphNodeGetGraph(node, &child) != CUDA_SUCCESS ||
                !look_at(child, within))
                return false;
            seen.waits_for_host |= within.waits_for_host;
            seen.records_events |= within.records_events;
        } else {
            seen.waits_for_host = true;  // a host function, an event of others, or we do not know
        }
    }
    return true;
}

struct Kept {
    int worker = -1;
    std::vector<int> lanes;  // in each variant of the plan, after the main one
    bool waits_for_host = false;
};

std::shared_mutex kept_lock;
std::map<CUgraphExec, Kept> kept;

// What most kernels have in a variant.
int choose_lane(const Kept& graph, const std::vector<int>& positions, int variant) {
    std::map<int, int> kernels_of;
    for (int position : positions)
        if (position >= 0)
            ++kernels_of[Dispatcher::get().workers().lane_of(
                {graph.worker, static_cast<uint32_t>(position), false}, variant)];
    auto fewer = [](const auto& one, const auto& other) { return one.second < other.second; };
    auto most = std::max_element(kernels_of.begin(), kernels_of.end(), fewer);
    return most == kernels_of.end() ? kHome : most->first;
}

// A node names its kernel in either way.
CUfunction launched_as(void* function) {
    bool of_host = hip().hipKernelNameRefByPtr(function, nullptr) != nullptr;
    return of_host ? function_of(function) : static_cast<CUfunction>(function);
}

void plan_graph(const Seen& seen, Kept& made) {
    Dispatcher& dispatcher = Dispatcher::get();
    std::vector<uint64_t> identities;
    for (size_t place = 0; place < seen.nodes.size(); ++place) {
        if (seen.kinds[place] != kKernel) continue;
        hipKernelNodeParams params{};
        if (hip().hipGraphKernelNodeGetParams(seen.nodes[place], &params) != CUDA_SUCCESS) return;
        const Launch launch{launched_as(params.func),
                            {params.gridDim.x, params.gridDim.y, params.gridDim.z},
                            {params.blockDim.x, params.blockDim.y, params.blockDim.z},
                            params.sharedMemBytes, 1};
        identities.push_back(dispatcher.workers().identities().of(launch));
    }
    Match match;
    if (identities.empty()) return;
    made.worker = choose_worker(identities, match);
    if (made.worker < 0) return;
    Counters& counts = counters();
    count(counts.graphs);
    count(counts.graph_kernels, identities.size());
    for (int position : match.positions) count(counts.graph_planned, position >= 0);
    for (int variant = kMainVariant;
         variant < static_cast<int>(dispatcher.table().variants.size()); ++variant)
        made.lanes.push_back(choose_lane(made, match.positions, variant));
}

Kept read_graph(CUgraph graph) {
    Dispatcher& dispatcher = Dispatcher::get();
    Kept made;
    Seen seen;
    bool told = look_at(graph, seen);
    if (!told || seen.records_events) dispatcher.distrust_events();
    made.waits_for_host = !told || seen.waits_for_host;
    bool plans = dispatcher.setup().planning() && dispatcher.table().mode == Mode::plan &&
                 dispatcher.pool().any;
    if (told && seen.linear && plans && !made.waits_for_host) plan_graph(seen, made);
    if (!told) forget_refusal();
    return made;
}

template <class Call>
CUresult instantiate(void* exec_out, CUgraph graph, Call&& call) {
    if (!Dispatcher::get().on() || graph == nullptr) return call();
    Kept made = read_graph(graph);
    CUresult status = call();
    if (status != CUDA_SUCCESS) return status;
    std::lock_guard hold(kept_lock);
    kept[*static_cast<CUgraphExec*>(exec_out)] = std::move(made);
    return status;
}

// One that was not seen may do anything.
Kept find(CUgraphExec exec) {
    std::shared_lock hold(kept_lock);
    auto known = kept.find(exec);
    if (known != kept.end()) return known->second;
    return {-1, {}, true};
}

template <class Launch>
CUresult launch_graph(CUgraphExec exec, CUstream stream, Default meaning, Launch&& launch) {
    giving::launching_graph(stream, meaning);
    Dispatcher& dispatcher = Dispatcher::get();
    if (!dispatcher.on()) return launch(exec, stream);
    count(counters().graph_launches);
    if (dispatcher.table().mode == Mode::record) {
        count(counters().whole_graphs);
        say("graphs are not recorded on AMD GPUs; record the program without them");
    }
    const Kept graph = find(exec);
    int lane = kHome;
    if (graph.worker >= 0)
        lane = graph.lanes[1 + dispatcher.begin_graph(stream, meaning, graph.worker)];
    if (graph.waits_for_host) gates::begin();
    CUresult status = dispatcher.pass(stream, meaning, lane, true, [&](CUstream target) {
        CUresult done = launch(exec, target);
        return target == stream ? done : quietly(done);
    });
    if (graph.waits_for_host) gates::put(stream, meaning, status == CUDA_SUCCESS);
    return status;
}

}  // namespace
}  // namespace eclip

using namespace eclip;

ECLIP_HOOK hipGraphInstantiate(void* exec, CUgraph graph, void* node, void* log, size_t size) {
    return instantiate(exec, graph, [&] {
        return hip().hipGraphInstantiate(exec, graph, node, log, size);
    });
}

ECLIP_HOOK hipGraphInstantiateWithFlags(void* exec, CUgraph graph, unsigned long long flags) {
    return instantiate(exec, graph, [&] {
        return hip().hipGraphInstantiateWithFlags(exec, graph, flags);
    });
}

ECLIP_HOOK hipGraphInstantiateWithParams(void* exec, CUgraph graph, void* params) {
    return instantiate(exec, graph, [&] {
        return hip().hipGraphInstantiateWithParams(exec, graph, params);
    });
}

ECLIP_HOOK hipGraphLaunch(CUgraphExec exec, CUstream stream) {
    return launch_graph(exec, stream, Default::legacy, hip().hipGraphLaunch);
}

ECLIP_HOOK hipGraphLaunch_spt(CUgraphExec exec, CUstream stream) {
    return launch_graph(exec, stream, Default::thread, hip().hipGraphLaunch_spt);
}

ECLIP_HOOK hipGraphExecDestroy(CUgraphExec exec) {
    {
        std::lock_guard hold(kept_lock);
        kept.erase(exec);
    }
    return hip().hipGraphExecDestroy(exec);
}
