// Hooks of calls that change an executable graph: translated to what stands behind the user's handle.
//
// An executable cannot change its nodes' contexts, so an update keeps them; what the driver refuses of
// one on lanes is instantiated anew, once for that call, and said. The executable's parts and variants
// are changed likewise. Where a part cannot be, the graph is cut anew; where a variant cannot be, it is
// given up.
#include <algorithm>
#include <cstring>
#include <utility>

#include "device.h"
#include "hook.h"
#include "identities.h"
#include "rehome.h"

namespace eclip {
namespace {

// Nothing waits for those that are not launched any more; they go once the last launch is done.
void end_retired(Executable& exec) {
    if (exec.retired.empty()) return;
    Relaxed relaxed;
    if (exec.launched != nullptr && driver().cuEventQuery(exec.launched) != CUDA_SUCCESS) return;
    for (CUgraphExec old : exec.retired) driver().cuGraphExecDestroy(old);
    exec.retired.clear();
}

// Put a new executable of the clone behind the user's handle. It does not wait for the device: the
// program may be what the device waits for.
CUresult instantiate_again(Executable& exec) {
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
    status = exec.repeat_updates(made);
    if (status != CUDA_SUCCESS) {
        real.cuGraphExecDestroy(made);
        return status;
    }
    // The first one stays: its address is the user's handle and must not be given out again.
    if (exec.current != exec.first) exec.retired.push_back(exec.current);
    exec.current = made;
    if (exec.clone != exec.stored) real.cuGraphDestroy(exec.clone);
    exec.clone = exec.stored;
    for (Placed& placed : exec.nodes) placed.twin = placed.stored;
    count(counters().reinstantiations);
    say("an update of a graph on lanes was refused by the driver: it was instantiated anew");
    return CUDA_SUCCESS;
}

// The same change in the part that has the node.
template <class Update>
void update_part(Executable& exec, const Placed& placed, Update&& update) {
    if (exec.parts.empty()) return;
    // Recorded parts are elsewhere, and cut anew for less.
    if (exec.recorded_on != kNotRecorded) return exec.drop_parts();
    const auto place = static_cast<size_t>(&placed - exec.nodes.data());
    auto part = exec.parts.begin();
    while (part->end <= place) ++part;
    bool kept = exec.repeatable && placed.piece != nullptr &&
                update(part->exec, placed.piece, placed) == CUDA_SUCCESS;
    if (!kept) exec.drop_parts();
}

// Of a child graph that was replaced as a whole, single nodes cannot be repeated.
bool is_in_replaced_child(const Executable& exec, const Placed& placed) {
    auto place = static_cast<int>(&placed - exec.nodes.data());
    for (int parent; (parent = exec.sequence.nodes[place].parent) >= 0; place = parent)
        if (exec.nodes[parent].child != nullptr) return true;
    return false;
}

enum class Refusal { is_ours, is_the_users };

// An update of one node of an executable, its parts and variants. `set` changes what is stored
// likewise, for the case that the executable cannot be changed, now or later. Where it may be our own
// lanes that the driver refuses, the executable is made anew.
template <class Update, class Set>
CUresult update_node(Executable& exec, CUgraphNode node, Refusal refusal, Update&& update,
                     Set&& set) {
    Placed* known = exec.find(node);
    if (known == nullptr) {
        if (exec.moved) return CUDA_ERROR_INVALID_VALUE;
        exec.keep_whole("a node of it was changed that its clone does not have");
        return update(exec.current, node, Placed{});
    }
    if (exec.moved) count(counters().updates);
    CUresult status = update(exec.current, known->twin, *known);
    const bool refused = status != CUDA_SUCCESS;
    if (refused && (!exec.moved || refusal == Refusal::is_the_users)) return status;
    CUresult stored = known->stored != nullptr ? set(*known) : CUDA_ERROR_NOT_SUPPORTED;
    if (refused && stored != CUDA_SUCCESS) return status;
    if (stored != CUDA_SUCCESS || is_in_replaced_child(exec, *known)) exec.repeatable = false;
    if (refused) status = instantiate_again(exec);
    if (status != CUDA_SUCCESS) return status;
    update_part(exec, *known, update);
    for (auto& variant : exec.variants)
        if (variant != nullptr && update_node(*variant, node, refusal, update, set) != CUDA_SUCCESS)
            variant = nullptr;
    return CUDA_SUCCESS;
}

CUresult update_kernel(Executable& exec, CUgraphNode node, const void* params, size_t bytes) {
    const Driver& real = driver();
    KernelNodeParams wanted{};
    std::memcpy(&wanted, params, bytes);
    auto homed = [&](const Placed& placed) {
        KernelNodeParams moved = wanted;
        if (placed.lane < 0) return moved;
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
            moved.ctx = context_of_lane(placed.lane);
        }
        return moved;
    };
    return update_node(
        exec, node, Refusal::is_ours,
        [&](CUgraphExec current, CUgraphNode twin, const Placed& placed) {
            KernelNodeParams moved = homed(placed);
            // Which version was called matters to a driver that knows only that one.
            return placed.lane < 0 && bytes == kKernelNodeParamsV1
                       ? real.cuGraphExecKernelNodeSetParams(current, twin, params)
                       : real.cuGraphExecKernelNodeSetParams_v2(current, twin, &moved);
        },
        [&](const Placed& placed) {
            KernelNodeParams moved = homed(placed);
            return real.cuGraphKernelNodeSetParams_v2(placed.stored, &moved);
        });
}

// A copy or a memset, in the context of its lane. `describe` gives all that the graph's own node is to
// have, in that context.
template <class Update, class Describe>
CUresult update_memory(Executable& exec, CUgraphNode node, const void* params, CUcontext context,
                       Update* update, Describe&& describe) {
    auto home = [&](const Placed& placed) {
        return placed.lane >= 0 ? context_of_lane(placed.lane) : context;
    };
    return update_node(
        exec, node, Refusal::is_ours,
        [&](CUgraphExec current, CUgraphNode twin, const Placed& placed) {
            return update(current, twin, params, home(placed));
        },
        [&](const Placed& placed) {
            GraphNodeParams wanted = describe(home(placed));
            return driver().cuGraphNodeSetParams(placed.stored, &wanted);
        });
}

std::vector<int> lanes_of(const Executable& exec) {
    std::vector<int> lanes;
    for (const Placed& placed : exec.nodes) lanes.push_back(placed.lane);
    return lanes;
}

// What an executable would be made from now.
struct Stored {
    CUgraph graph = nullptr;
    std::vector<CUgraphNode> nodes;
    std::vector<CUgraph> children;
    bool repeatable = true;
};

// Put the one in the other's place.
Stored exchange_stored(Executable& exec, const Stored& next) {
    Stored before{std::exchange(exec.stored, next.graph), {}, {},
                  std::exchange(exec.repeatable, next.repeatable)};
    for (size_t place = 0; place < exec.nodes.size(); ++place) {
        Placed& placed = exec.nodes[place];
        before.nodes.push_back(std::exchange(placed.stored, next.nodes[place]));
        CUgraph child = next.children.empty() ? nullptr : next.children[place];
        before.children.push_back(std::exchange(placed.child, child));
    }
    return before;
}

void destroy_stored(const Stored& stored) {
    if (stored.graph != nullptr) driver().cuGraphDestroy(stored.graph);
    for (CUgraph child : stored.children)
        if (child != nullptr) driver().cuGraphDestroy(child);
}

// The new graph goes to the lanes of the first. What the driver refuses is instantiated anew.
template <class Update>
CUresult update_on_lanes(Executable& exec, const Sequence& wanted, Stored&& next,
                         GraphExecUpdateResultInfo& info, Update&& update) {
    count(counters().updates);
    CUresult status = update(exec.current, next.graph, info);
    // What is wrong is said of the user's nodes, not of the clone's.
    for (CUgraphNode* node : {&info.errorNode, &info.errorFromNode}) {
        auto twin = std::find(next.nodes.begin(), next.nodes.end(), *node);
        *node = twin != next.nodes.end() ? wanted.handles[twin - next.nodes.begin()] : nullptr;
    }
    Stored before = exchange_stored(exec, next);
    const bool alone = before.graph != exec.clone;  // nothing else keeps it
    if (status != CUDA_SUCCESS && instantiate_again(exec) != CUDA_SUCCESS) {
        destroy_stored(exchange_stored(exec, before));
        return status;
    }
    if (!alone) before.graph = nullptr;
    destroy_stored(before);
    info = {CU_GRAPH_EXEC_UPDATE_SUCCESS, nullptr, nullptr};
    return CUDA_SUCCESS;
}

// As the user made it; or another graph altogether, which the driver refuses without us, too.
template <class Update>
CUresult update_as_given(Executable& exec, CUgraph graph, Stored&& next,
                         GraphExecUpdateResultInfo& info, Update&& update) {
    CUresult status = update(exec.current, graph, info);
    if (status != CUDA_SUCCESS || exec.moved || next.graph == nullptr) {
        if (status == CUDA_SUCCESS) exec.repeatable = false;
        destroy_stored(next);
        return status;
    }
    destroy_stored(exchange_stored(exec, next));
    return CUDA_SUCCESS;
}

// The whole graph at once. The executable's nodes keep their names, which are those of the graph that
// was instantiated.
template <class Update>
CUresult update_graph(Executable& exec, CUgraph graph, GraphExecUpdateResultInfo& info,
                      Update&& update) {
    Sequence wanted;
    bool alike = false;
    for (bool nested : {true, false})
        alike = alike || (read_sequence(graph, nested, wanted) == CUDA_SUCCESS &&
                          exec.sequence.is_like(wanted));
    Stored next;
    if (alike && exec.stored != nullptr &&
        clone_on_lanes(graph, wanted, wanted.handles, lanes_of(exec), next.graph, next.nodes) !=
            CUDA_SUCCESS)
        next = {};
    CUresult status =
        exec.moved && next.graph != nullptr
            ? update_on_lanes(exec, wanted, std::move(next), info, update)
            : update_as_given(exec, graph, std::move(next), info, update);
    if (status != CUDA_SUCCESS) return status;
    exec.drop_parts();
    for (auto& variant : exec.variants) {
        GraphExecUpdateResultInfo unseen{};
        if (variant != nullptr && update_graph(*variant, graph, unseen, update) != CUDA_SUCCESS)
            variant = nullptr;
    }
    return CUDA_SUCCESS;
}

}  // namespace

CUgraph place_child(const Executable& exec, const Placed& placed, CUgraph child) {
    const auto place = static_cast<size_t>(&placed - exec.nodes.data());
    const size_t count = exec.sequence.nodes[place].end - place - 1;
    Sequence wanted;
    if (read_sequence(child, true, wanted) != CUDA_SUCCESS) return nullptr;
    std::vector<int> lanes(wanted.size(), kHome);
    for (size_t index = 0; index < lanes.size() && count == lanes.size(); ++index)
        if (wanted.nodes[index].type == exec.sequence.nodes[place + 1 + index].type)
            lanes[index] = exec.nodes[place + 1 + index].lane;
    CUgraph clone = nullptr;
    std::vector<CUgraphNode> twins;
    return clone_on_lanes(child, wanted, wanted.handles, lanes, clone, twins) == CUDA_SUCCESS ? clone
                                                                                             : nullptr;
}

}  // namespace eclip

using namespace eclip;

ECLIP_HOOK cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, void* node, void* result) {
    const auto real = driver().cuGraphExecUpdate;
    Executable* known = find_executable(exec);
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
    Executable* known = find_executable(exec);
    if (known == nullptr || result == nullptr) return real(translate(exec), graph, result);
    return update_graph(*known, graph, *static_cast<GraphExecUpdateResultInfo*>(result),
                        [&](CUgraphExec target, CUgraph made, GraphExecUpdateResultInfo& out) {
                            return real(target, made, &out);
                        });
}

ECLIP_HOOK cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node, const void* params) {
    Executable* known = find_executable(exec);
    if (known == nullptr) return driver().cuGraphExecKernelNodeSetParams(exec, node, params);
    return update_kernel(*known, node, params, kKernelNodeParamsV1);
}

ECLIP_HOOK cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node,
                                             const void* params) {
    Executable* known = find_executable(exec);
    if (known == nullptr) return driver().cuGraphExecKernelNodeSetParams_v2(exec, node, params);
    return update_kernel(*known, node, params, sizeof(KernelNodeParams));
}

ECLIP_HOOK cuGraphExecMemcpyNodeSetParams(CUgraphExec exec, CUgraphNode node, const void* params,
                                          CUcontext context) {
    const auto real = driver().cuGraphExecMemcpyNodeSetParams;
    Executable* known = find_executable(exec);
    if (known == nullptr) return real(exec, node, params, context);
    return update_memory(*known, node, params, context, real, [&](CUcontext home) {
        GraphNodeParams wanted{};
        wanted.type = kNodeMemcpy;
        wanted.memcpy.copyCtx = home;
        std::memcpy(wanted.memcpy.copy3d, params, sizeof wanted.memcpy.copy3d);
        return wanted;
    });
}

ECLIP_HOOK cuGraphExecMemsetNodeSetParams(CUgraphExec exec, CUgraphNode node, const void* params,
                                          CUcontext context) {
    const auto real = driver().cuGraphExecMemsetNodeSetParams;
    Executable* known = find_executable(exec);
    if (known == nullptr) return real(exec, node, params, context);
    return update_memory(*known, node, params, context, real, [&](CUcontext home) {
        GraphNodeParams wanted{};
        wanted.type = kNodeMemset;
        std::memcpy(&wanted.memset, params, offsetof(MemsetNodeParams, ctx));
        wanted.memset.ctx = home;
        return wanted;
    });
}

ECLIP_HOOK cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node, void* params) {
    Executable* known = find_executable(exec);
    const Driver& real = driver();
    if (known == nullptr) return real.cuGraphExecNodeSetParams(exec, node, params);
    auto given = static_cast<const GraphNodeParams*>(params);
    if (given->type == kNodeKernel)
        return update_kernel(*known, node, &given->kernel, sizeof(KernelNodeParams));
    auto homed = [&](const Placed& placed) {
        GraphNodeParams moved = *given;
        CUcontext there = context_of_lane(placed.lane);
        if (there != nullptr && moved.type == kNodeMemset) moved.memset.ctx = there;
        if (there != nullptr && moved.type == kNodeMemcpy) moved.memcpy.copyCtx = there;
        return moved;
    };
    return update_node(
        *known, node, Refusal::is_ours,
        [&](CUgraphExec current, CUgraphNode twin, const Placed& placed) {
            GraphNodeParams moved = homed(placed);
            return real.cuGraphExecNodeSetParams(current, twin, &moved);
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
        Executable* known = find_executable(a1);                                               \
        if (known == nullptr) return real arguments;                                           \
        return update_node(                                                                    \
            *known, a2, Refusal::is_the_users,                                                 \
            [&](CUgraphExec current, CUgraphNode twin, const Placed&) {                        \
                return real(current, twin, a3);                                                \
            },                                                                                 \
            [&](const Placed& placed) {                                                        \
                const auto store = driver().ECLIP_STORED_##symbol;                             \
                return store != nullptr ? store(placed.stored, a3) : CUDA_ERROR_NOT_SUPPORTED; \
            });                                                                                \
    }
#include "hooks.def"

ECLIP_HOOK cuGraphExecChildGraphNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraph child) {
    const auto real = driver().cuGraphExecChildGraphNodeSetParams;
    Executable* known = find_executable(exec);
    if (known == nullptr) return real(exec, node, child);
    known->keep_whole("a child graph of it was replaced");
    for (auto& variant : known->variants) variant = nullptr;
    return update_node(
        *known, node, Refusal::is_the_users,
        [&](CUgraphExec current, CUgraphNode twin, const Placed& placed) {
            if (placed.twin == nullptr) return real(current, twin, child);
            CUgraph there = place_child(*known, *known->find(node), child);
            CUresult status = real(current, twin, there != nullptr ? there : child);
            if (there != nullptr) driver().cuGraphDestroy(there);
            return status;
        },
        [&](Placed& placed) {
            CUgraph there = place_child(*known, *known->find(node), child);
            if (there == nullptr) return CUDA_ERROR_NOT_SUPPORTED;
            if (placed.child != nullptr) driver().cuGraphDestroy(placed.child);
            placed.child = there;
            return CUDA_SUCCESS;
        });
}

ECLIP_HOOK cuGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode node, unsigned enabled) {
    const auto real = driver().cuGraphNodeSetEnabled;
    Executable* known = find_executable(exec);
    if (known == nullptr) return real(exec, node, enabled);
    return update_node(
        *known, node, Refusal::is_the_users,
        [&](CUgraphExec current, CUgraphNode twin, const Placed&) {
            return real(current, twin, enabled);
        },
        [&](Placed& placed) {
            placed.enabled = enabled != 0;
            return CUDA_SUCCESS;
        });
}

ECLIP_HOOK cuGraphNodeGetEnabled(CUgraphExec exec, CUgraphNode node, void* enabled) {
    const auto real = driver().cuGraphNodeGetEnabled;
    Executable* known = find_executable(exec);
    if (known == nullptr) return real(exec, node, enabled);
    const Placed* placed = known->find(node);
    if (placed == nullptr && known->moved) return CUDA_ERROR_INVALID_VALUE;
    return real(known->current, placed != nullptr ? placed->twin : node, enabled);
}
