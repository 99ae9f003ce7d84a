// Hooks of users' graphs: at instantiation a clone, re-homed to lanes, takes the graph's place.
//
// The user keeps its graph and a handle of its executable; calls that name either are translated to
// the clone's nodes and to the executable that stands behind the handle. An executable cannot change
// its nodes' contexts, so an update keeps them; what the driver refuses is instantiated anew, once
// for that call, and said. Whatever cannot be re-homed is instantiated as it is.
#include <cstring>
#include <map>
#include <utility>

#include "hook.h"
#include "identities.h"
#include "rehome.h"

namespace eclip {
namespace {

std::shared_mutex rehomed_lock;
std::map<CUgraphExec, std::unique_ptr<Rehomed>> rehomed;
std::atomic<int> rehomed_count{0};  // spares processes without graphs the look-up

Rehomed* find(CUgraphExec exec) {
    if (rehomed_count.load(std::memory_order_relaxed) == 0) return nullptr;
    std::shared_lock hold(rehomed_lock);
    auto known = rehomed.find(exec);
    return known == rehomed.end() ? nullptr : known->second.get();
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
    PrimaryCurrent current(Dispatcher::get().pool().primary);
    if (driver().cuEventCreate(&made->launched, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
        made->repeatable = false;
    std::lock_guard hold(rehomed_lock);
    rehomed[*exec] = std::move(made);
    rehomed_count.store(static_cast<int>(rehomed.size()));
    return CUDA_SUCCESS;
}

// What only executables know, said to a new one.
CUresult repeat_updates(const Rehomed& exec, CUgraphExec made) {
    const Driver& real = driver();
    CUresult status = CUDA_SUCCESS;
    for (const auto& [node, placed] : exec.nodes) {
        if (!placed.enabled && status == CUDA_SUCCESS)
            status = real.cuGraphNodeSetEnabled(made, placed.stored, 0);
        if (placed.child != nullptr && status == CUDA_SUCCESS)
            status = real.cuGraphExecChildGraphNodeSetParams(made, placed.stored, placed.child);
    }
    return status;
}

// Nothing waits for those that are not launched any more; they go once the last launch is done.
void end_retired(Rehomed& exec) {
    if (exec.retired.empty()) return;
    Relaxed relaxed;
    if (driver().cuEventQuery(exec.launched) != CUDA_SUCCESS) return;
    for (CUgraphExec old : exec.retired) driver().cuGraphExecDestroy(old);
    exec.retired.clear();
}

// Launches of one executable follow each other, also where another has taken its place.
template <class Call>
CUresult launch_rehomed(Rehomed& exec, CUstream target, Default meaning, Call&& launch) {
    const Driver& real = driver();
    if (Dispatcher::get().captures(target, meaning)) return launch(exec.current, target);
    CUstream queue = target != nullptr           ? target
                     : meaning == Default::thread ? kThreadStream
                                                  : kLegacyStream;
    CUresult status = CUDA_SUCCESS;
    if (exec.follows) status = real.cuStreamWaitEvent(queue, exec.launched, 0);
    if (status == CUDA_SUCCESS) status = launch(exec.current, target);
    if (status != CUDA_SUCCESS) return status;
    exec.follows = false;
    exec.was_launched = true;
    // Without the mark no other executable may take its place.
    if (real.cuEventRecord(exec.launched, queue) != CUDA_SUCCESS) exec.repeatable = false;
    return CUDA_SUCCESS;
}

// Put a new executable of the clone behind the user's handle. It does not wait for the device: the
// program may be what the device waits for.
CUresult instantiate_again(Rehomed& exec) {
    const Driver& real = driver();
    if (!exec.repeatable) {
        say("an update of a graph on lanes is refused: one before it cannot be repeated");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    end_retired(exec);
    Relaxed relaxed;
    CUgraphExec made = nullptr;
    CUresult status = real.cuGraphInstantiateWithFlags(&made, exec.stored, exec.flags);
    if (status != CUDA_SUCCESS) return status;
    status = repeat_updates(exec, made);
    if (status != CUDA_SUCCESS) {
        real.cuGraphExecDestroy(made);
        return status;
    }
    // The first one stays: its address is the user's handle and must not be given out again.
    if (exec.current != exec.first) exec.retired.push_back(exec.current);
    exec.current = made;
    exec.follows = exec.was_launched;
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
    if (status == CUDA_SUCCESS && stored != CUDA_SUCCESS) exec.repeatable = false;
    if (status == CUDA_SUCCESS || stored != CUDA_SUCCESS) return status;
    return instantiate_again(exec);
}

// Likewise one that the driver would refuse without us, too: only what it takes is stored.
template <class Update, class Set>
CUresult change_node(Rehomed& exec, CUgraphNode node, Update&& update, Set&& set) {
    auto known = exec.nodes.find(node);
    if (known == exec.nodes.end()) return CUDA_ERROR_INVALID_VALUE;
    CUresult status = update(exec.current, known->second.twin);
    if (status == CUDA_SUCCESS && set(known->second) != CUDA_SUCCESS) exec.repeatable = false;
    return status;
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
            const char* name = name_function(moved.func).name;
            if (current.kern != nullptr &&
                std::strcmp(name, name_function(reinterpret_cast<CUfunction>(current.kern)).name) == 0)
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
CUresult update_graph(Rehomed& exec, CUgraph graph, GraphExecUpdateResultInfo& info,
                      Update&& update) {
    std::unique_ptr<Rehomed> wanted = rehome(graph, exec.worker);
    if (wanted == nullptr) return update(exec.current, graph, info);
    count(counters().updates);
    CUresult status = update(exec.current, wanted->clone, info);
    // What is wrong is said of the user's nodes, not of the clone's.
    for (CUgraphNode* node : {&info.errorNode, &info.errorFromNode}) *node = wanted->original(*node);
    bool alike = wanted->order.size() == exec.order.size();
    for (size_t index = 0; alike && index < exec.order.size(); ++index)
        alike = wanted->nodes[wanted->order[index]].type == exec.nodes[exec.order[index]].type;
    if (!alike) {  // another graph altogether, which the driver refuses without us, too
        driver().cuGraphDestroy(wanted->clone);
        return status;
    }
    std::vector<CUgraphNode> before;
    std::vector<CUgraph> children;
    const CUgraph stored = exec.stored;
    const bool alone = stored != exec.clone;  // nothing else keeps it
    exec.stored = wanted->clone;
    for (size_t index = 0; index < exec.order.size(); ++index) {
        Placed& placed = exec.nodes[exec.order[index]];
        before.push_back(placed.stored);
        children.push_back(std::exchange(placed.child, nullptr));
        placed.stored = wanted->nodes[wanted->order[index]].twin;
    }
    const bool repeatable = std::exchange(exec.repeatable, true);
    if (status != CUDA_SUCCESS && instantiate_again(exec) != CUDA_SUCCESS) {
        exec.stored = stored;
        for (size_t index = 0; index < exec.order.size(); ++index) {
            Placed& placed = exec.nodes[exec.order[index]];
            placed.stored = before[index];
            placed.child = children[index];
        }
        exec.repeatable = repeatable;
        driver().cuGraphDestroy(wanted->clone);
        return status;
    }
    if (alone) driver().cuGraphDestroy(stored);
    for (CUgraph child : children)
        if (child != nullptr) driver().cuGraphDestroy(child);
    info = {CU_GRAPH_EXEC_UPDATE_SUCCESS, nullptr, nullptr};
    return CUDA_SUCCESS;
}

}  // namespace

CUgraphExec translate(CUgraphExec exec) {
    Rehomed* known = find(exec);
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

#define ECLIP_GRAPH_LAUNCH(symbol, meaning)                                             \
    ECLIP_HOOK symbol(CUgraphExec exec, CUstream stream) {                              \
        giving::launching(stream, meaning, giving::Work::graph);                        \
        Dispatcher& dispatcher = Dispatcher::get();                                     \
        if (!dispatcher.on()) return driver().symbol(exec, stream);                     \
        Rehomed* known = find(exec);                                                    \
        if (known != nullptr) {                                                         \
            count(counters().graph_launches);                                           \
            dispatcher.begin_graph(stream, meaning, known->worker);                     \
        } else if (dispatcher.table().mode == Mode::record) {                           \
            count(counters().graph_launches); /* unseen otherwise */                    \
        }                                                                               \
        return dispatcher.pass(stream, meaning, kFollow, true, [&](CUstream target) {   \
            if (known == nullptr) return driver().symbol(exec, target);                 \
            return launch_rehomed(*known, target, meaning, driver().symbol);            \
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
    if (known != nullptr) known->release();
    return driver().cuGraphExecDestroy(exec);
}

ECLIP_HOOK cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, void* node, void* result) {
    const auto real = driver().cuGraphExecUpdate;
    Rehomed* known = find(exec);
    if (known == nullptr) return real(exec, graph, node, result);
    GraphExecUpdateResultInfo info{};
    CUresult status = update_graph(
        *known, graph, info, [&](CUgraphExec target, CUgraph made, GraphExecUpdateResultInfo& out) {
            return real(target, made, &out.errorNode, &out.result);
        });
    if (node != nullptr) *static_cast<CUgraphNode*>(node) = info.errorNode;
    if (result != nullptr) *static_cast<int*>(result) = info.result;
    return status;
}

ECLIP_HOOK cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, void* result) {
    const auto real = driver().cuGraphExecUpdate_v2;
    Rehomed* known = find(exec);
    if (known == nullptr || result == nullptr) return real(translate(exec), graph, result);
    return update_graph(*known, graph, *static_cast<GraphExecUpdateResultInfo*>(result),
                        [&](CUgraphExec target, CUgraph made, GraphExecUpdateResultInfo& out) {
                            return real(target, made, &out);
                        });
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

// The same change, said to the graph.
#define ECLIP_STORED_cuGraphExecBatchMemOpNodeSetParams cuGraphBatchMemOpNodeSetParams
#define ECLIP_STORED_cuGraphExecEventRecordNodeSetEvent cuGraphEventRecordNodeSetEvent
#define ECLIP_STORED_cuGraphExecEventWaitNodeSetEvent cuGraphEventWaitNodeSetEvent
#define ECLIP_STORED_cuGraphExecExternalSemaphoresSignalNodeSetParams \
    cuGraphExternalSemaphoresSignalNodeSetParams
#define ECLIP_STORED_cuGraphExecExternalSemaphoresWaitNodeSetParams \
    cuGraphExternalSemaphoresWaitNodeSetParams
#define ECLIP_STORED_cuGraphExecHostNodeSetParams cuGraphHostNodeSetParams

#define HOOK_EXECNODE(symbol, name, since, threaded, parameters, arguments)                    \
    ECLIP_HOOK symbol parameters {                                                             \
        const auto real = driver().symbol;                                                     \
        Rehomed* known = find(a1);                                                             \
        if (known == nullptr) return real arguments;                                           \
        return change_node(                                                                    \
            *known, a2,                                                                        \
            [&](CUgraphExec current, CUgraphNode twin) { return real(current, twin, a3); },    \
            [&](const Placed& placed) {                                                        \
                const auto store = driver().ECLIP_STORED_##symbol;                             \
                return store != nullptr ? store(placed.stored, a3) : CUDA_ERROR_NOT_SUPPORTED; \
            });                                                                                \
    }
#include "hooks.def"

ECLIP_HOOK cuGraphExecChildGraphNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraph child) {
    const auto real = driver().cuGraphExecChildGraphNodeSetParams;
    Rehomed* known = find(exec);
    if (known == nullptr) return real(exec, node, child);
    return change_node(
        *known, node,
        [&](CUgraphExec current, CUgraphNode twin) { return real(current, twin, child); },
        [&](Placed& placed) {
            CUgraph kept = nullptr;
            CUresult status = driver().cuGraphClone(&kept, child);
            if (status != CUDA_SUCCESS) return status;
            if (placed.child != nullptr) driver().cuGraphDestroy(placed.child);
            placed.child = kept;
            return CUDA_SUCCESS;
        });
}

ECLIP_HOOK cuGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode node, unsigned enabled) {
    const auto real = driver().cuGraphNodeSetEnabled;
    Rehomed* known = find(exec);
    if (known == nullptr) return real(exec, node, enabled);
    return change_node(
        *known, node,
        [&](CUgraphExec current, CUgraphNode twin) { return real(current, twin, enabled); },
        [&](Placed& placed) {
            placed.enabled = enabled != 0;
            return CUDA_SUCCESS;
        });
}

ECLIP_HOOK cuGraphNodeGetEnabled(CUgraphExec exec, CUgraphNode node, void* enabled) {
    const auto real = driver().cuGraphNodeGetEnabled;
    Rehomed* known = find(exec);
    if (known == nullptr) return real(exec, node, enabled);
    auto placed = known->nodes.find(node);
    if (placed == known->nodes.end()) return CUDA_ERROR_INVALID_VALUE;
    return real(known->current, placed->second.twin, enabled);
}
