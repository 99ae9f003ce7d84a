#include "rehome.h"

#include <algorithm>
#include <atomic>

#include "dispatcher.h"

namespace eclip {
namespace {

// The nodes of a graph in launch order: each after all it depends on, otherwise as they were added.
CUresult launch_order(CUgraph graph, std::vector<CUgraphNode>& ordered) {
    const Driver& real = driver();
    size_t count = 0, edges = 0;
    CUresult status = real.cuGraphGetNodes(graph, nullptr, &count);
    if (status != CUDA_SUCCESS || count == 0) return status;
    std::vector<CUgraphNode> nodes(count);
    status = real.cuGraphGetNodes(graph, nodes.data(), &count);
    if (status == CUDA_SUCCESS) status = real.cuGraphGetEdges_v2(graph, nullptr, nullptr, nullptr, &edges);
    if (status != CUDA_SUCCESS) return status;
    std::vector<CUgraphNode> from(edges), to(edges);
    std::vector<unsigned char> data(edges * 8);  // kinds of edges: eight bytes each
    if (edges > 0) status = real.cuGraphGetEdges_v2(graph, from.data(), to.data(), data.data(), &edges);
    if (status != CUDA_SUCCESS) return status;
    std::unordered_map<CUgraphNode, size_t> rank(count);
    for (size_t index = 0; index < count; ++index) rank[nodes[index]] = index;
    std::vector<int> waits(count);
    std::vector<std::vector<size_t>> after(count);
    for (size_t edge = 0; edge < edges; ++edge) {
        ++waits[rank[to[edge]]];
        after[rank[from[edge]]].push_back(rank[to[edge]]);
    }
    std::vector<size_t> ready;  // a heap, the lowest rank first
    auto later = std::greater<size_t>();
    for (size_t index = 0; index < count; ++index)
        if (waits[index] == 0) ready.push_back(index);
    std::make_heap(ready.begin(), ready.end(), later);
    while (!ready.empty()) {
        std::pop_heap(ready.begin(), ready.end(), later);
        size_t index = ready.back();
        ready.pop_back();
        ordered.push_back(nodes[index]);
        for (size_t follower : after[index])
            if (--waits[follower] == 0) {
                ready.push_back(follower);
                std::push_heap(ready.begin(), ready.end(), later);
            }
    }
    return CUDA_SUCCESS;
}

// How a graph's kernels agree with a worker's trace.
struct Match {
    std::vector<int> positions;  // of every kernel in the trace, -1 where it has none
    size_t in_place = 0;         // kernels that the trace has right after the one before
    size_t covered = 0;          // of the trace's kernels, how many the graph has

    // Half of the graph, or nearly all of the trace: while they are captured, libraries choose other
    // kernels and add some (transformers' BERT has 413 then, 154 otherwise, 140 of them the same).
    bool is_of(const TableWorker& worker) const {
        return 2 * in_place >= positions.size() || 4 * covered >= 3 * worker.kernels.size();
    }
};

Match match(const TableWorker& worker, const std::vector<uint64_t>& identities) {
    Match found;
    uint32_t place = 0;
    found.positions.assign(identities.size(), -1);
    std::vector<bool> seen(worker.kernels.size());
    for (size_t index = 0; index < identities.size(); ++index) {
        if (worker.kernels[place].identity != identities[index]) {
            auto known = worker.positions.find(identities[index]);
            if (known == worker.positions.end()) continue;
            auto next = std::lower_bound(known->second.begin(), known->second.end(), place);
            place = next == known->second.end() ? known->second.front() : *next;
        } else {
            ++found.in_place;
        }
        if (!seen[place]) ++found.covered;
        seen[place] = true;
        found.positions[index] = static_cast<int>(place);
        place = (place + 1) % static_cast<uint32_t>(worker.kernels.size());
    }
    return found;
}

// Whether a kernel's clusters can be resident on a lane; without clusters it always fits.
bool fits(CUgraphNode node, const KernelNodeParams& params, CUstream lane) {
    const Driver& real = driver();
    if (real.cuGraphKernelNodeGetAttribute == nullptr || real.cuOccupancyMaxActiveClusters == nullptr)
        return true;  // a driver without clusters
    CUlaunchAttribute attribute{};
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    if (real.cuGraphKernelNodeGetAttribute(node, attribute.id, &attribute.bytes) != CUDA_SUCCESS ||
        attribute.cluster[0] * attribute.cluster[1] * attribute.cluster[2] <= 1)
        return true;
    CUfunction function = params.func;
    if (params.kern != nullptr && real.cuKernelGetFunction(&function, params.kern) != CUDA_SUCCESS)
        return false;
    CUlaunchConfig config{{params.grid[0], params.grid[1], params.grid[2]},
                          {params.block[0], params.block[1], params.block[2]},
                          params.sharedMemBytes, lane, &attribute, 1};
    int clusters = 0;
    return real.cuOccupancyMaxActiveClusters(&clusters, function, &config) == CUDA_SUCCESS &&
           clusters > 0;
}

struct Plan {
    int worker = -1;
    std::vector<CUgraphNode> nodes;
    std::vector<int> types;
    std::vector<KernelNodeParams> params;  // of kernels; their arguments stay the node's
    std::vector<int> lanes;                // kHome: stays
    size_t kernels = 0, planned = 0;
    bool moves = false;
};

// Lanes are of one context: what belongs to another must not move there. The driver may not say
// whose a kernel is; then it runs where the graph was made, which is most likely the current one.
bool is_of_lanes(const KernelNodeParams& params) {
    CUcontext context = params.ctx;
    if (context == nullptr) driver().cuCtxGetCurrent(&context);
    return context == Dispatcher::get().pool().primary;
}

// What is known of every kernel of a graph, in launch order; false where it is left as it is.
bool read_graph(CUgraph graph, Plan& plan, std::vector<uint64_t>& identities) {
    Dispatcher& dispatcher = Dispatcher::get();
    const Driver& real = driver();
    if (launch_order(graph, plan.nodes) != CUDA_SUCCESS) return false;
    for (CUgraphNode node : plan.nodes) {
        int type = -1;
        if (real.cuGraphNodeGetType(node, &type) != CUDA_SUCCESS) return false;
        plan.types.push_back(type);
        KernelNodeParams& params = plan.params.emplace_back();
        if (type != kNodeKernel) continue;
        if (real.cuGraphKernelNodeGetParams_v2(node, &params) != CUDA_SUCCESS) return false;
        if (!is_of_lanes(params)) {
            say("a graph of another device or context than the plan's runs as it is");
            return false;
        }
        Launch launch{params.kern ? reinterpret_cast<CUfunction>(params.kern) : params.func,
                      {params.grid[0], params.grid[1], params.grid[2]},
                      {params.block[0], params.block[1], params.block[2]},
                      params.sharedMemBytes, 1};
        identities.push_back(dispatcher.workers().identities().of(launch));
    }
    plan.kernels = identities.size();
    return !identities.empty();
}

// Whose graph it is, or nobody's; workers alike take turns. An update's worker is given.
int choose_worker(const std::vector<uint64_t>& identities, int wanted, Match& chosen) {
    const Table& table = Dispatcher::get().table();
    static std::atomic<int> graphs_of[kMostWorkers];
    int best = -1;
    for (int worker = 0; worker < static_cast<int>(table.workers.size()); ++worker) {
        if (wanted >= 0 && worker != wanted) continue;
        Match found = match(table.workers[worker], identities);
        bool better = best < 0 || found.in_place > chosen.in_place ||
                      (found.in_place == chosen.in_place && graphs_of[worker] < graphs_of[best]);
        if (!better) continue;
        best = worker;
        chosen = std::move(found);
    }
    if (wanted >= 0 || best < 0) return best;
    if (!chosen.is_of(table.workers[best])) {
        say("a graph of %zu kernels is not in the plan (%zu of them are) and runs on the whole device",
            identities.size(), chosen.covered);
        count(counters().foreign_graphs);
        return -1;
    }
    ++graphs_of[best];
    return best;
}

// Which lane every node goes to; false where the graph is nobody's. An update's worker is given.
bool plan_graph(CUgraph graph, int wanted_worker, Plan& plan) {
    Dispatcher& dispatcher = Dispatcher::get();
    std::vector<uint64_t> identities;
    if (!read_graph(graph, plan, identities)) return false;
    Match chosen;
    plan.worker = choose_worker(identities, wanted_worker, chosen);
    if (plan.worker < 0) return false;
    if (!dispatcher.table().variants.empty())
        say("graphs take the plan's variant for all workers active");
    std::vector<int> kernel_lanes;
    for (int position : chosen.positions) {
        int before = kernel_lanes.empty() ? kFollow : kernel_lanes.back();
        if (position >= 0) ++plan.planned;
        // One that the trace does not have stays with its neighbour: two switches cost more.
        kernel_lanes.push_back(
            position < 0 ? before
                         : dispatcher.workers().lane_of(
                               {plan.worker, static_cast<uint32_t>(position), false}, kMainVariant));
    }
    auto first = std::find_if(kernel_lanes.begin(), kernel_lanes.end(),
                              [](int lane) { return lane != kFollow; });
    std::fill(kernel_lanes.begin(), first, first == kernel_lanes.end() ? kHome : *first);
    size_t seen = 0;  // memory nodes go with the kernel that follows them, or the last
    for (size_t index = 0; index < plan.types.size(); ++index) {
        int type = plan.types[index];
        bool moves = type == kNodeKernel || type == kNodeMemset || type == kNodeMemcpy;
        int lane = moves ? kernel_lanes[std::min(seen, plan.kernels - 1)] : kHome;
        if (type == kNodeKernel) {
            ++seen;
            if (lane >= 0 && !fits(plan.nodes[index], plan.params[index],
                                   dispatcher.pool().lanes[lane].stream))
                lane = kHome;
        }
        plan.lanes.push_back(lane);
        if (lane >= 0) plan.moves = true;
    }
    return true;
}

// A node has a priority of its own: the stream that its graph is launched on gives it none.
CUresult prefer(CUgraphNode twin, int priority) {
    auto set = driver().cuGraphKernelNodeSetAttribute;
    CUlaunchAttribute attribute{};
    attribute.priority = priority;
    if (priority == 0) return CUDA_SUCCESS;
    if (set != nullptr) return set(twin, CU_LAUNCH_ATTRIBUTE_PRIORITY, &attribute.bytes);
    say("this driver keeps no priorities of graphs' kernels: the plan's are ignored");
    return CUDA_SUCCESS;
}

CUresult move_node(CUgraphNode node, CUgraphNode twin, int type, KernelNodeParams kernel,
                   const Lane& lane) {
    const Driver& real = driver();
    CUcontext context = lane.context;
    GraphNodeParams params{};
    params.type = type;
    if (type == kNodeKernel) {
        // A function belongs to one context, a kernel to none: only the latter can move.
        if (kernel.kern == nullptr) return CUDA_SUCCESS;
        kernel.func = nullptr;
        kernel.ctx = context;
        CUresult status = real.cuGraphKernelNodeSetParams_v2(twin, &kernel);
        return status == CUDA_SUCCESS ? prefer(twin, lane.priority) : status;
    }
    if (type == kNodeMemset) {
        CUresult status = real.cuGraphMemsetNodeGetParams(node, &params.memset);
        if (status != CUDA_SUCCESS) return status;
        params.memset.ctx = context;
    } else {
        CUresult status = real.cuGraphMemcpyNodeGetParams(node, params.memcpy.copy3d);
        if (status != CUDA_SUCCESS) return status;
        params.memcpy.copyCtx = context;
    }
    return real.cuGraphNodeSetParams(twin, &params);
}

}  // namespace

std::unique_ptr<Rehomed> rehome(CUgraph graph, int worker) {
    Dispatcher& dispatcher = Dispatcher::get();
    const Driver& real = driver();
    if (!dispatcher.on() || !dispatcher.setup().planning() || dispatcher.table().mode != Mode::plan ||
        !dispatcher.pool().any)
        return nullptr;
    if (real.cuGraphNodeSetParams == nullptr || real.cuGraphGetEdges_v2 == nullptr ||
        real.cuGraphKernelNodeGetParams_v2 == nullptr) {
        say("this driver cannot re-home graphs (CUDA 12.3 or newer can); they run unplanned");
        return nullptr;
    }
    Plan plan;
    if (!plan_graph(graph, worker, plan)) return nullptr;
    if (worker < 0) {
        Counters& counts = counters();
        count(counts.graphs);
        count(counts.graph_kernels, plan.kernels);
        count(counts.graph_planned, plan.planned);
        if (!plan.moves) return nullptr;  // all on the whole device: it can stay as it is
    }
    auto made = std::make_unique<Rehomed>();
    made->worker = plan.worker;
    made->order = plan.nodes;
    made->nodes.reserve(plan.nodes.size());
    CUresult status = real.cuGraphClone(&made->clone, graph);
    if (status != CUDA_SUCCESS) {
        say("a graph cannot be cloned (status %d) and runs unplanned", status);
        return nullptr;
    }
    for (size_t index = 0; index < plan.nodes.size() && status == CUDA_SUCCESS; ++index) {
        CUgraphNode twin = nullptr;
        status = real.cuGraphNodeFindInClone(&twin, plan.nodes[index], made->clone);
        CUcontext context =
            plan.lanes[index] >= 0 ? dispatcher.pool().lanes[plan.lanes[index]].context : nullptr;
        if (status == CUDA_SUCCESS && context != nullptr)
            status = move_node(plan.nodes[index], twin, plan.types[index], plan.params[index],
                               dispatcher.pool().lanes[plan.lanes[index]]);
        made->nodes[plan.nodes[index]] = {twin, twin, context, plan.types[index], true, nullptr};
    }
    if (status != CUDA_SUCCESS) {
        real.cuGraphDestroy(made->clone);
        say("a graph cannot be placed on lanes (status %d) and runs unplanned", status);
        return nullptr;
    }
    made->stored = made->clone;
    return made;
}

}  // namespace eclip
