// Users' graphs, re-homed: at instantiation a clone's nodes move to the contexts of their lanes.
//
// The user keeps its graph and a handle of its executable; calls that name either are translated to
// the clone's nodes and to the executable that stands behind the handle. An executable cannot change
// its nodes' contexts, so an update keeps them; what the driver refuses is instantiated anew, once
// for that call, and said. Whatever cannot be re-homed is instantiated as it is.
#include <algorithm>
#include <cstring>
#include <map>

#include "dispatcher.h"
#include "hook.h"
#include "recording.h"

namespace eclip {
namespace {

struct Placed {
    CUgraphNode twin;    // by which the executable knows it
    CUgraphNode stored;  // where its newest parameters are kept
    CUcontext context;   // none: where the user put it
    int type;
};

struct Rehomed {
    int worker = -1;
    CUgraph clone = nullptr;   // what the executable was made from
    CUgraph stored = nullptr;  // what it would be made from now; the same until an update
    CUgraphExec first = nullptr;    // the user's handle, kept until the user destroys it
    CUgraphExec current = nullptr;  // what is launched
    uint64_t flags = 0;
    std::vector<CUgraphNode> order;       // the user's nodes in launch order
    std::map<CUgraphNode, Placed> nodes;  // by the user's nodes

    void release() const {
        driver().cuGraphDestroy(clone);
        if (stored != clone) driver().cuGraphDestroy(stored);
    }
};

std::shared_mutex rehomed_lock;
std::map<CUgraphExec, std::unique_ptr<Rehomed>> rehomed;
std::atomic<int> rehomed_count{0};  // spares processes without graphs the look-up

Rehomed* find(CUgraphExec exec) {
    if (rehomed_count.load(std::memory_order_relaxed) == 0) return nullptr;
    std::shared_lock hold(rehomed_lock);
    auto known = rehomed.find(exec);
    return known == rehomed.end() ? nullptr : known->second.get();
}

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

// A clone of the graph with its nodes moved, or none.
std::unique_ptr<Rehomed> rehome(CUgraph graph, int worker = -1) {
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

// Instantiate the clone in the graph's place; whatever fails is done with the user's own graph.
template <class Instantiate>
CUresult instantiate(void* exec_out, CUgraph graph, uint64_t flags, Instantiate&& call) {
    std::unique_ptr<Rehomed> made = rehome(graph);
    if (made == nullptr) return call(graph);
    auto exec = static_cast<CUgraphExec*>(exec_out);
    CUresult status = call(made->clone);
    if (status != CUDA_SUCCESS) {
        driver().cuGraphDestroy(made->clone);
        say("a graph on lanes is refused at instantiation (status %d) and runs unplanned", status);
        return call(graph);
    }
    made->first = made->current = *exec;
    made->flags = flags;
    std::lock_guard hold(rehomed_lock);
    rehomed[*exec] = std::move(made);
    rehomed_count.store(static_cast<int>(rehomed.size()));
    return CUDA_SUCCESS;
}

// Put a new executable of the clone behind the user's handle. Rare, so it may wait for the device.
CUresult instantiate_again(Rehomed& exec) {
    const Driver& real = driver();
    CUgraphExec made = nullptr;
    CUresult status = real.cuGraphInstantiateWithFlags(&made, exec.stored, exec.flags);
    if (status != CUDA_SUCCESS) return status;
    Dispatcher::get().drain([&] { return real.cuCtxSynchronize(); });
    // The first one stays: its address is the user's handle and must not be given out again.
    if (exec.current != exec.first) real.cuGraphExecDestroy(exec.current);
    exec.current = made;
    if (exec.clone != exec.stored) real.cuGraphDestroy(exec.clone);
    exec.clone = exec.stored;
    for (auto& [node, placed] : exec.nodes) placed.twin = placed.stored;
    count(counters().reinstantiations);
    say("an update of a graph on lanes was refused by the driver: it was instantiated anew");
    return CUDA_SUCCESS;
}

// An update of one node of a re-homed executable. `set` changes what is stored likewise, for the case
// that the executable cannot be changed, now or later.
template <class Update, class Set>
CUresult update_node(Rehomed& exec, CUgraphNode node, Update&& update, Set&& set) {
    auto known = exec.nodes.find(node);
    if (known == exec.nodes.end()) return CUDA_ERROR_INVALID_VALUE;
    count(counters().updates);
    CUresult status = update(exec.current, known->second);
    CUresult stored = set(known->second);
    if (status == CUDA_SUCCESS || stored != CUDA_SUCCESS) return status;
    return instantiate_again(exec);
}

CUresult update_kernel(Rehomed& exec, CUgraphNode node, const void* params, size_t bytes) {
    const Driver& real = driver();
    KernelNodeParams wanted{};
    std::memcpy(&wanted, params, bytes);
    auto homed = [&](const Placed& placed) {
        KernelNodeParams moved = wanted;
        if (placed.context == nullptr) return moved;
        if (moved.kern == nullptr) {
            // Version 1 and most callers name a function. The node knows the kernel; if that is
            // another one, the driver refuses and the node goes back to where its function lives.
            KernelNodeParams current{};
            real.cuGraphKernelNodeGetParams_v2(placed.stored, &current);
            const char* name = function_name(moved.func);
            if (current.kern != nullptr &&
                std::strcmp(name, function_name(reinterpret_cast<CUfunction>(current.kern))) == 0)
                moved.kern = current.kern;
        }
        if (moved.kern != nullptr) {
            moved.func = nullptr;
            moved.ctx = placed.context;
        }
        return moved;
    };
    return update_node(
        exec, node,
        [&](CUgraphExec current, const Placed& placed) {
            KernelNodeParams moved = homed(placed);
            return real.cuGraphExecKernelNodeSetParams_v2(current, placed.twin, &moved);
        },
        [&](const Placed& placed) {
            KernelNodeParams moved = homed(placed);
            return real.cuGraphKernelNodeSetParams_v2(placed.stored, &moved);
        });
}

// The whole graph at once: the new one is re-homed like the first and the executable updated by it.
// Its nodes keep their names, which are those of the graph that was instantiated.
template <class Update>
CUresult update_graph(Rehomed& exec, CUgraph graph, Update&& update) {
    std::unique_ptr<Rehomed> wanted = rehome(graph, exec.worker);
    if (wanted == nullptr) return update(exec.current, graph);
    count(counters().updates);
    CUresult status = update(exec.current, wanted->clone);
    bool alike = wanted->order.size() == exec.order.size();
    for (size_t index = 0; alike && index < exec.order.size(); ++index)
        alike = wanted->nodes[wanted->order[index]].type == exec.nodes[exec.order[index]].type;
    if (!alike) {  // another graph altogether, which the driver refuses without us, too
        wanted->release();
        return status;
    }
    std::vector<CUgraphNode> before;
    const CUgraph stored = exec.stored;
    const bool alone = stored != exec.clone;  // nothing else keeps it
    exec.stored = wanted->clone;
    for (size_t index = 0; index < exec.order.size(); ++index) {
        Placed& placed = exec.nodes[exec.order[index]];
        before.push_back(placed.stored);
        placed.stored = wanted->nodes[wanted->order[index]].twin;
    }
    if (status != CUDA_SUCCESS && instantiate_again(exec) != CUDA_SUCCESS) {
        exec.stored = stored;
        for (size_t index = 0; index < exec.order.size(); ++index)
            exec.nodes[exec.order[index]].stored = before[index];
        wanted->release();
        return status;
    }
    if (alone) driver().cuGraphDestroy(stored);
    return CUDA_SUCCESS;
}

}  // namespace

CUgraphExec translate(CUgraphExec exec) {
    Rehomed* known = find(exec);
    return known != nullptr ? known->current : exec;
}

bool translate(CUgraphExec& exec, CUgraphNode& node) {
    Rehomed* known = find(exec);
    if (known == nullptr) return true;
    auto placed = known->nodes.find(node);
    if (placed == known->nodes.end()) return false;
    exec = known->current;
    node = placed->second.twin;
    return true;
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

#define ECLIP_GRAPH_LAUNCH(symbol, meaning)                                             \
    ECLIP_HOOK symbol(CUgraphExec exec, CUstream stream) {                              \
        Dispatcher& dispatcher = Dispatcher::get();                                     \
        if (!dispatcher.on()) return driver().symbol(exec, stream);                     \
        CUgraphExec real_exec = translate(exec);                                        \
        if (real_exec != exec || find(exec) != nullptr) count(counters().graph_launches); \
        return dispatcher.pass(stream, meaning, kFollow, true, [&](CUstream target) {   \
            return driver().symbol(real_exec, target);                                  \
        });                                                                             \
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
    std::unique_ptr<Rehomed> known;
    if (rehomed_count.load() != 0) {
        std::lock_guard hold(rehomed_lock);
        auto found = rehomed.find(exec);
        if (found != rehomed.end()) {
            known = std::move(found->second);
            rehomed.erase(found);
            rehomed_count.store(static_cast<int>(rehomed.size()));
        }
    }
    if (known != nullptr) {
        if (known->current != known->first) driver().cuGraphExecDestroy(known->current);
        known->release();
    }
    return driver().cuGraphExecDestroy(exec);
}

ECLIP_HOOK cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, void* node, void* result) {
    auto update = [&](CUgraphExec target, CUgraph made) {
        return driver().cuGraphExecUpdate(target, made, node, result);
    };
    Rehomed* known = find(exec);
    return known != nullptr ? update_graph(*known, graph, update) : update(exec, graph);
}

ECLIP_HOOK cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, void* result) {
    auto update = [&](CUgraphExec target, CUgraph made) {
        return driver().cuGraphExecUpdate_v2(target, made, result);
    };
    Rehomed* known = find(exec);
    return known != nullptr ? update_graph(*known, graph, update) : update(exec, graph);
}

ECLIP_HOOK cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node, const void* params) {
    Rehomed* known = find(exec);
    if (known == nullptr) return driver().cuGraphExecKernelNodeSetParams(exec, node, params);
    return update_kernel(*known, node, params, kKernelNodeParamsV1);
}

ECLIP_HOOK cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node,
                                             const void* params) {
    Rehomed* known = find(exec);
    if (known == nullptr) return driver().cuGraphExecKernelNodeSetParams_v2(exec, node, params);
    return update_kernel(*known, node, params, sizeof(KernelNodeParams));
}

ECLIP_HOOK cuGraphExecMemcpyNodeSetParams(CUgraphExec exec, CUgraphNode node, const void* params,
                                          CUcontext context) {
    Rehomed* known = find(exec);
    const Driver& real = driver();
    if (known == nullptr) return real.cuGraphExecMemcpyNodeSetParams(exec, node, params, context);
    return update_node(
        *known, node,
        [&](CUgraphExec current, const Placed& placed) {
            CUcontext there = placed.context != nullptr ? placed.context : context;
            return real.cuGraphExecMemcpyNodeSetParams(current, placed.twin, params, there);
        },
        [&](const Placed& placed) {
            GraphNodeParams wanted{};
            wanted.type = kNodeMemcpy;
            wanted.memcpy.copyCtx = placed.context != nullptr ? placed.context : context;
            std::memcpy(wanted.memcpy.copy3d, params, sizeof wanted.memcpy.copy3d);
            return real.cuGraphNodeSetParams(placed.stored, &wanted);
        });
}

ECLIP_HOOK cuGraphExecMemsetNodeSetParams(CUgraphExec exec, CUgraphNode node, const void* params,
                                          CUcontext context) {
    Rehomed* known = find(exec);
    const Driver& real = driver();
    if (known == nullptr) return real.cuGraphExecMemsetNodeSetParams(exec, node, params, context);
    return update_node(
        *known, node,
        [&](CUgraphExec current, const Placed& placed) {
            CUcontext there = placed.context != nullptr ? placed.context : context;
            return real.cuGraphExecMemsetNodeSetParams(current, placed.twin, params, there);
        },
        [&](const Placed& placed) {
            GraphNodeParams wanted{};
            wanted.type = kNodeMemset;
            std::memcpy(&wanted.memset, params, offsetof(MemsetNodeParams, ctx));
            wanted.memset.ctx = placed.context != nullptr ? placed.context : context;
            return real.cuGraphNodeSetParams(placed.stored, &wanted);
        });
}

ECLIP_HOOK cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node, void* params) {
    Rehomed* known = find(exec);
    const Driver& real = driver();
    if (known == nullptr) return real.cuGraphExecNodeSetParams(exec, node, params);
    auto given = static_cast<const GraphNodeParams*>(params);
    if (given->type == kNodeKernel)
        return update_kernel(*known, node, &given->kernel, sizeof(KernelNodeParams));
    auto homed = [&](const Placed& placed) {
        GraphNodeParams moved = *given;
        if (placed.context != nullptr && moved.type == kNodeMemset) moved.memset.ctx = placed.context;
        if (placed.context != nullptr && moved.type == kNodeMemcpy)
            moved.memcpy.copyCtx = placed.context;
        return moved;
    };
    return update_node(
        *known, node,
        [&](CUgraphExec current, const Placed& placed) {
            GraphNodeParams moved = homed(placed);
            return real.cuGraphExecNodeSetParams(current, placed.twin, &moved);
        },
        [&](const Placed& placed) {
            GraphNodeParams moved = homed(placed);
            return real.cuGraphNodeSetParams(placed.stored, &moved);
        });
}
