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
    std::map<CUgraphNode, size_t> rank;
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

// How many of a graph's kernels are a worker's, and the lane of each.
size_t match(const TableWorker& worker, const std::vector<uint64_t>& identities,
             std::vector<int>& positions) {
    size_t matched = 0;
    uint32_t place = 0;
    positions.assign(identities.size(), -1);
    for (size_t index = 0; index < identities.size(); ++index) {
        if (worker.kernels[place].identity != identities[index]) {
            auto known = worker.positions.find(identities[index]);
            if (known == worker.positions.end()) continue;
            auto next = std::lower_bound(known->second.begin(), known->second.end(), place);
            place = next == known->second.end() ? known->second.front() : *next;
        } else {
            ++matched;  // only kernels in their place count for the choice of a worker
        }
        positions[index] = static_cast<int>(place);
        place = (place + 1) % static_cast<uint32_t>(worker.kernels.size());
    }
    return matched;
}

// Whether a kernel's clusters can be resident on a lane; without clusters it always fits.
bool fits(CUgraphNode node, CUstream lane) {
    const Driver& real = driver();
    if (real.cuGraphKernelNodeGetAttribute == nullptr || real.cuOccupancyMaxActiveClusters == nullptr)
        return true;  // a driver without clusters
    CUlaunchAttribute attribute{};
    attribute.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    KernelNodeParams params{};
    if (real.cuGraphKernelNodeGetAttribute(node, attribute.id, &attribute.bytes) != CUDA_SUCCESS ||
        attribute.cluster[0] * attribute.cluster[1] * attribute.cluster[2] <= 1 ||
        real.cuGraphKernelNodeGetParams_v2(node, &params) != CUDA_SUCCESS)
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
    std::vector<int> lanes;  // kHome: stays
    size_t kernels = 0, planned = 0;
};

// Which lane every node goes to; false where the graph is nobody's. An update's worker is given.
bool plan_graph(CUgraph graph, int wanted_worker, Plan& plan) {
    Dispatcher& dispatcher = Dispatcher::get();
    const Driver& real = driver();
    if (launch_order(graph, plan.nodes) != CUDA_SUCCESS || plan.nodes.empty()) return false;
    std::vector<uint64_t> identities;
    for (CUgraphNode node : plan.nodes) {
        int type = -1;
        if (real.cuGraphNodeGetType(node, &type) != CUDA_SUCCESS) return false;
        plan.types.push_back(type);
        if (type != kNodeKernel) continue;
        KernelNodeParams params{};
        if (real.cuGraphKernelNodeGetParams_v2(node, &params) != CUDA_SUCCESS) return false;
        Launch launch{params.kern ? reinterpret_cast<CUfunction>(params.kern) : params.func,
                      {params.grid[0], params.grid[1], params.grid[2]},
                      {params.block[0], params.block[1], params.block[2]},
                      params.sharedMemBytes, 1};
        identities.push_back(dispatcher.identify(launch));
    }
    const Table& table = dispatcher.table();
    static std::atomic<int> graphs_of[kMostWorkers];
    size_t best_score = 0;
    int best = -1;
    std::vector<int> positions, best_positions;
    for (size_t worker = 0; worker < table.workers.size(); ++worker) {
        if (wanted_worker >= 0 && static_cast<int>(worker) != wanted_worker) continue;
        size_t score = match(table.workers[worker], identities, positions);
        bool equal = best >= 0 && score == best_score && graphs_of[worker] < graphs_of[best];
        if (best < 0 || score > best_score || equal) {
            best_score = score;
            best = static_cast<int>(worker);
            best_positions = positions;
        }
    }
    if (best < 0 || identities.empty()) return false;
    if (wanted_worker < 0) {
        if (best_score * 2 < identities.size()) return false;
        ++graphs_of[best];
    }
    plan.worker = best;
    std::vector<int> kernel_lanes;
    for (int position : best_positions) {
        if (position >= 0) ++plan.planned;
        kernel_lanes.push_back(
            position < 0 ? kHome
                         : dispatcher.lane_of({best, static_cast<uint32_t>(position), false}));
    }
    plan.kernels = identities.size();
    size_t seen = 0;  // memory nodes go with the kernel that follows them, or the last
    for (size_t index = 0; index < plan.types.size(); ++index) {
        int type = plan.types[index];
        bool moves = type == kNodeKernel || type == kNodeMemset || type == kNodeMemcpy;
        int lane = moves ? kernel_lanes[std::min(seen, plan.kernels - 1)] : kHome;
        if (type == kNodeKernel) {
            ++seen;
            if (lane >= 0 && !fits(plan.nodes[index], dispatcher.pool().lanes[lane].stream))
                lane = kHome;
        }
        plan.lanes.push_back(lane);
    }
    return true;
}

CUresult move_node(CUgraphNode node, CUgraphNode twin, int type, CUcontext context) {
    const Driver& real = driver();
    GraphNodeParams params{};
    params.type = type;
    if (type == kNodeKernel) {
        KernelNodeParams kernel{};
        CUresult status = real.cuGraphKernelNodeGetParams_v2(node, &kernel);
        // A function belongs to one context, a kernel to none: only the latter can move.
        if (status != CUDA_SUCCESS || kernel.kern == nullptr) return status;
        kernel.func = nullptr;
        kernel.ctx = context;
        return real.cuGraphKernelNodeSetParams_v2(twin, &kernel);
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
    if (!dispatcher.on() || !dispatcher.ready() || dispatcher.table().mode != Mode::plan)
        return nullptr;
    if (real.cuGraphNodeSetParams == nullptr || real.cuGraphGetEdges_v2 == nullptr ||
        real.cuGraphKernelNodeGetParams_v2 == nullptr) {
        say("this driver cannot re-home graphs (CUDA 12.3 or newer can); they run unplanned");
        return nullptr;
    }
    Plan plan;
    if (!plan_graph(graph, worker, plan)) return nullptr;
    auto made = std::make_unique<Rehomed>();
    made->worker = plan.worker;
    made->order = plan.nodes;
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
            status = move_node(plan.nodes[index], twin, plan.types[index], context);
        made->nodes[plan.nodes[index]] = {twin, twin, context, plan.types[index]};
    }
    if (status != CUDA_SUCCESS) {
        real.cuGraphDestroy(made->clone);
        say("a graph cannot be placed on lanes (status %d) and runs unplanned", status);
        return nullptr;
    }
    made->stored = made->clone;
    if (worker < 0) {
        Counters& counts = counters();
        count(counts.graphs);
        count(counts.graph_kernels, plan.kernels);
        count(counts.graph_planned, plan.planned);
    }
    return made;
}

}  // namespace eclip
