// The stand-in's interface, second half: graphs, green contexts, and finding entry points.
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>

#include "standin.h"

using namespace standin;

namespace {

Graph* graph_of(CUgraph graph) { return reinterpret_cast<Graph*>(graph); }
Node* node_of(CUgraphNode node) { return reinterpret_cast<Node*>(node); }

CUresult set_kernel(Node& node, const KernelNodeParams& given, bool fixed) {
    KernelNodeParams params = given;
    CUfunction function = params.kern ? reinterpret_cast<CUfunction>(params.kern) : params.func;
    if (params.ctx == nullptr && nodes_have_contexts)
        params.ctx = reinterpret_cast<CUcontext>(&current_context());
    Context* context = reinterpret_cast<Context*>(params.ctx);
    if (function == nullptr) return CUDA_ERROR_INVALID_VALUE;
    // A function that was loaded into one context cannot run in another.
    if (context != nullptr && context->green && (params.kern == nullptr || params.func != nullptr))
        return CUDA_ERROR_INVALID_VALUE;
    if (fixed && node.kernel.context != context) return CUDA_ERROR_INVALID_VALUE;
    int priority = node.kernel.priority;
    node.kernel = make_kernel(params, function);
    node.kernel.priority = priority;
    for (size_t index = 0; index < node.kernel.values.size(); ++index)
        node.kernel.pointers[index] = &node.kernel.values[index];
    return CUDA_SUCCESS;
}

// The clone of a node, also within child graphs.
Node* twin_of(Graph& graph, CUgraphNode node) {
    for (auto& mine : graph.nodes) {
        if (mine->original == node_of(node)) return mine.get();
        Node* within = mine->child ? twin_of(*mine->child, node) : nullptr;
        if (within != nullptr) return within;
    }
    return nullptr;
}

Node* exec_node(Exec& exec, CUgraphNode node) { return twin_of(*exec.graph, node); }

std::set<Graph*> clones;  // whose nodes may be destroyed

std::vector<Node*> nodes_of(const CUgraphNode* handles, size_t count) {
    std::vector<Node*> nodes;
    for (size_t index = 0; index < count; ++index) nodes.push_back(node_of(handles[index]));
    return nodes;
}

// A function and what it is given.
void set_host(Node& node, const void* params) {
    auto words = static_cast<void* const*>(params);
    node.host = reinterpret_cast<void (*)(void*)>(words[0]);
    node.host_data = words[1];
}

CUresult instantiate(void* exec_out, CUgraph graph) {
    Hold hold = held();
    auto exec = new Exec;
    exec->graph = graph_of(graph)->clone();
    *static_cast<Exec**>(exec_out) = exec;
    return CUDA_SUCCESS;
}

}  // namespace

API cuGraphCreate(CUgraph* graph, unsigned) {
    *graph = reinterpret_cast<CUgraph>(new Graph);
    return CUDA_SUCCESS;
}
API cuGraphDestroy(CUgraph graph) {
    Hold hold = held();
    clones.erase(graph_of(graph));
    delete graph_of(graph);
    return CUDA_SUCCESS;
}
API cuGraphClone(CUgraph* out, CUgraph graph) {
    Hold hold = held();
    Graph* made = graph_of(graph)->clone().release();
    clones.insert(made);
    *out = reinterpret_cast<CUgraph>(made);
    return CUDA_SUCCESS;
}
API cuGraphNodeFindInClone(CUgraphNode* out, CUgraphNode node, CUgraph clone) {
    Hold hold = held();
    for (auto& twin : graph_of(clone)->nodes)
        if (twin->original == node_of(node)) {
            *out = reinterpret_cast<CUgraphNode>(twin.get());
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}
API cuGraphGetNodes(CUgraph graph, CUgraphNode* out, size_t* count) {
    Hold hold = held();
    auto& nodes = graph_of(graph)->nodes;
    if (out != nullptr)
        for (size_t index = 0; index < *count && index < nodes.size(); ++index)
            out[index] = reinterpret_cast<CUgraphNode>(nodes[index].get());
    *count = nodes.size();
    return CUDA_SUCCESS;
}
API cuGraphGetEdges_v2(CUgraph graph, CUgraphNode* from, CUgraphNode* to, void* data, size_t* count) {
    Hold hold = held();
    size_t edges = 0;
    for (auto& node : graph_of(graph)->nodes)
        for (Node* before : node->after) {
            if (from != nullptr && edges < *count) {
                from[edges] = reinterpret_cast<CUgraphNode>(before);
                to[edges] = reinterpret_cast<CUgraphNode>(node.get());
                auto& special = node->programmatic;
                bool is_special = std::find(special.begin(), special.end(), before) != special.end();
                static_cast<CUgraphEdgeData*>(data)[edges] = {is_special, 0, is_special, {}};
            }
            ++edges;
        }
    *count = edges;
    return CUDA_SUCCESS;
}
API cuGraphNodeGetType(CUgraphNode node, int* type) {
    *type = node_of(node)->type;
    return CUDA_SUCCESS;
}
API cuGraphAddKernelNode_v2(CUgraphNode* out, CUgraph graph, const CUgraphNode* after, size_t count,
                            const KernelNodeParams* params) {
    Hold hold = held();
    std::vector<Node*> before;
    for (size_t index = 0; index < count; ++index) before.push_back(node_of(after[index]));
    Node* node = graph_of(graph)->add(kNodeKernel, before);
    *out = reinterpret_cast<CUgraphNode>(node);
    return set_kernel(*node, *params, false);
}
API cuGraphAddEmptyNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* after, size_t count) {
    Hold hold = held();
    std::vector<Node*> before;
    for (size_t index = 0; index < count; ++index) before.push_back(node_of(after[index]));
    *out = reinterpret_cast<CUgraphNode>(graph_of(graph)->add(kNodeEmpty, before));
    return CUDA_SUCCESS;
}
API cuGraphKernelNodeGetParams_v2(CUgraphNode handle, KernelNodeParams* params) {
    Hold hold = held();
    Node& node = *node_of(handle);
    *params = node.kernel.shape;
    auto function = reinterpret_cast<CUfunction>(node.kernel.function);
    bool library = node.kernel.function->library;
    params->func = library && node.kernel.context->green ? nullptr : function;
    params->kern = library ? reinterpret_cast<CUkernel>(function) : nullptr;
    params->ctx = reinterpret_cast<CUcontext>(node.kernel.context);
    params->kernelParams = node.kernel.pointers.data();
    return CUDA_SUCCESS;
}
API cuGraphKernelNodeSetParams_v2(CUgraphNode node, const KernelNodeParams* params) {
    Hold hold = held();
    return set_kernel(*node_of(node), *params, false);
}
API cuGraphKernelNodeSetAttribute(CUgraphNode node, int attribute, const void* value) {
    if (attribute != CU_LAUNCH_ATTRIBUTE_PRIORITY) return CUDA_ERROR_INVALID_VALUE;
    Hold hold = held();
    node_of(node)->kernel.priority = *static_cast<const int*>(value);
    return CUDA_SUCCESS;
}
API cuGraphMemsetNodeGetParams(CUgraphNode node, MemsetNodeParams* params) {
    std::memcpy(params, &node_of(node)->memset, offsetof(MemsetNodeParams, ctx));
    return CUDA_SUCCESS;
}
API cuGraphMemcpyNodeGetParams(CUgraphNode node, void* params) {
    std::memcpy(params, node_of(node)->memcpy.copy3d, sizeof(MemcpyNodeParams::copy3d));
    return CUDA_SUCCESS;
}
API cuGraphNodeSetParams(CUgraphNode handle, GraphNodeParams* params) {
    Hold hold = held();
    Node& node = *node_of(handle);
    if (params->type == kNodeKernel) return set_kernel(node, params->kernel, false);
    if (params->type == kNodeMemset) node.memset = params->memset;
    if (params->type == kNodeMemcpy) node.memcpy = params->memcpy;
    return CUDA_SUCCESS;
}
API cuGraphInstantiateWithFlags(void* exec, CUgraph graph, uint64_t) {
    return instantiate(exec, graph);
}
API cuGraphExecDestroy(CUgraphExec exec) {
    Hold hold = held();
    delete reinterpret_cast<Exec*>(exec);
    return CUDA_SUCCESS;
}
API cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, void* info) {
    Hold hold = held();
    CUresult status = update(*reinterpret_cast<Exec*>(exec), *graph_of(graph));
    Node* last = graph_of(graph)->nodes.empty() ? nullptr : graph_of(graph)->nodes.back().get();
    bool refused = status != CUDA_SUCCESS;
    *static_cast<GraphExecUpdateResultInfo*>(info) = {
        refused, refused ? reinterpret_cast<CUgraphNode>(last) : nullptr, nullptr};
    return status;
}
API cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node, const void* params) {
    Hold hold = held();
    Node* mine = exec_node(*reinterpret_cast<Exec*>(exec), node);
    if (mine == nullptr) return CUDA_ERROR_INVALID_VALUE;
    return set_kernel(*mine, *static_cast<const KernelNodeParams*>(params), true);
}
API cuGraphHostNodeSetParams(CUgraphNode node, const void* params) {
    Hold hold = held();
    set_host(*node_of(node), params);
    return CUDA_SUCCESS;
}
API cuGraphExecHostNodeSetParams(CUgraphExec exec, CUgraphNode node, const void* params) {
    Hold hold = held();
    Node* mine = exec_node(*reinterpret_cast<Exec*>(exec), node);
    if (mine == nullptr || mine->type != kNodeHost) return CUDA_ERROR_INVALID_VALUE;
    set_host(*mine, params);
    return CUDA_SUCCESS;
}
API cuGraphNodeGetEnabled(CUgraphExec exec, CUgraphNode node, unsigned* enabled) {
    Hold hold = held();
    Node* mine = exec_node(*reinterpret_cast<Exec*>(exec), node);
    if (mine == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *enabled = mine->enabled;
    return CUDA_SUCCESS;
}
API cuGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode node, unsigned enabled) {
    Hold hold = held();
    Node* mine = exec_node(*reinterpret_cast<Exec*>(exec), node);
    if (mine == nullptr) return CUDA_ERROR_INVALID_VALUE;
    mine->enabled = enabled != 0;
    return CUDA_SUCCESS;
}

// A child graph is the node's own: what it was made from may go.
API cuGraphAddChildGraphNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* after, size_t count,
                             CUgraph child) {
    Hold hold = held();
    Node* node = graph_of(graph)->add(kNodeChild, nodes_of(after, count));
    node->child = graph_of(child)->clone();
    *out = reinterpret_cast<CUgraphNode>(node);
    return CUDA_SUCCESS;
}
API cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph* graph) {
    if (node_of(node)->type != kNodeChild) return CUDA_ERROR_INVALID_VALUE;
    *graph = reinterpret_cast<CUgraph>(node_of(node)->child.get());
    return CUDA_SUCCESS;
}
API cuGraphExecChildGraphNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraph child) {
    Hold hold = held();
    Node* mine = exec_node(*reinterpret_cast<Exec*>(exec), node);
    if (mine == nullptr || mine->type != kNodeChild) return CUDA_ERROR_INVALID_VALUE;
    Exec inner{std::make_unique<Graph>(std::move(*mine->child)), nullptr};
    CUresult status = update(inner, *graph_of(child));
    *mine->child = std::move(*inner.graph);
    return status;
}
API cuGraphDestroyNode(CUgraphNode node) {
    Hold hold = held();
    for (Graph* graph : clones)
        if (graph->remove(node_of(node))) return CUDA_SUCCESS;
    return CUDA_ERROR_INVALID_VALUE;
}
API cuGraphAddDependencies_v2(CUgraph, const CUgraphNode* from, const CUgraphNode* to,
                              const CUgraphEdgeData* data, size_t count) {
    Hold hold = held();
    for (size_t edge = 0; edge < count; ++edge) {
        Node& node = *node_of(to[edge]);
        node.after.push_back(node_of(from[edge]));
        if (data != nullptr && data[edge].type != 0) node.programmatic.push_back(node_of(from[edge]));
    }
    return CUDA_SUCCESS;
}
API cuGraphAddEventRecordNode(CUgraphNode* out, CUgraph graph, const CUgraphNode* after, size_t count,
                              CUevent) {
    Hold hold = held();
    *out = reinterpret_cast<CUgraphNode>(graph_of(graph)->add(kNodeEventRecord, nodes_of(after, count)));
    return CUDA_SUCCESS;
}

#ifndef STANDIN_OLD
namespace {

unsigned units() {
    const char* wanted = getenv("STANDIN_UNITS");
    return wanted != nullptr ? static_cast<unsigned>(atoi(wanted)) : 132;
}

struct Described {
    Mask mask;
};

Mask& slices_of(CUdevResource& resource) { return *reinterpret_cast<Mask*>(resource.internal + 4); }

}  // namespace

API cuDeviceGetDevResource(CUdevice, CUdevResource* resource, int) {
    *resource = CUdevResource{};
    resource->sm.smCount = units();
    return CUDA_SUCCESS;
}
API cuDevSmResourceSplitByCount(CUdevResource* groups, unsigned* count, const CUdevResource* whole,
                                CUdevResource* rest, unsigned, unsigned least) {
    unsigned most = (whole->sm.smCount - whole->sm.smCount % 16) / least;
    if (whole->sm.smCount == 132) most = 15;  // the last slices of an H200 are uneven
    if (*count > most) *count = most;
    for (unsigned index = 0; index < *count; ++index) {
        groups[index] = CUdevResource{};
        groups[index].sm.smCount = least;
        slices_of(groups[index]).bits[0] = uint64_t{1} << index;
    }
    *rest = CUdevResource{};
    rest->sm.smCount = whole->sm.smCount - *count * least;
    slices_of(*rest).bits[0] = uint64_t{1} << *count;
    return CUDA_SUCCESS;
}
API cuDevResourceGenerateDesc(CUdevResourceDesc* out, CUdevResource* resources, unsigned count) {
    if (count == 0) return CUDA_ERROR_INVALID_VALUE;
    auto described = new Described;
    for (unsigned index = 0; index < count; ++index)
        described->mask.bits[0] |= slices_of(resources[index]).bits[0];
    *out = reinterpret_cast<CUdevResourceDesc>(described);
    return CUDA_SUCCESS;
}
API cuGreenCtxCreate(CUgreenCtx* out, CUdevResourceDesc described, CUdevice device, unsigned) {
    Hold hold = held();
    if (CUresult status = unsafe()) return status;
    auto wanted = reinterpret_cast<Described*>(described);
    *out = reinterpret_cast<CUgreenCtx>(new Context{true, wanted->mask, device, {}});
    delete wanted;
    return CUDA_SUCCESS;
}
API cuCtxFromGreenCtx(CUcontext* out, CUgreenCtx green) {
    *out = reinterpret_cast<CUcontext>(green);
    return CUDA_SUCCESS;
}
API cuGreenCtxStreamCreate(CUstream* out, CUgreenCtx green, unsigned, int priority) {
    Hold hold = held();
    auto stream = new Stream;
    stream->context = reinterpret_cast<Context*>(green);
    stream->blocking = false;
    stream->priority = priority;
    Engine::get().streams.push_back(stream);
    *out = reinterpret_cast<CUstream>(stream);
    return CUDA_SUCCESS;
}
#endif

// Answers as the driver does: the newest interface of a name that the asked-for version knows.
API cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, int* found) {
    struct Known {
        const char* name;
        const char* symbol;
        int since;
        bool threaded;
    };
#define THREADED_none false
#define THREADED_ptsz true
#define THREADED_ptds true
    static const Known known[] = {
#define HOOK(symbol, name, since, threaded, parameters, arguments) \
    {#name, #symbol, since, THREADED_##threaded},
#define ALIAS(name, since, symbol) {#name, #symbol, since, false},
#define PASS(symbol) {#symbol, #symbol, 2000, false},
#include "../hooks.def"
        {"cuGetProcAddress", "cuGetProcAddress_v2", 12000, false},
        {"cuInit", "cuInit", 2000, false},
        {"cuMemcpyWithAttributesAsync", "cuMemcpyWithAttributesAsync", 13020, false},
        {"cuLaunchHostFunc", "cuLaunchHostFunc_v2", 13020, false},
        {"cuLeapAsync", "cuLeapAsync", 13020, false},
    };
    static void* self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    const bool wants_thread = flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    const Known* best = nullptr;
    for (const Known& one : known) {
        if (strcmp(one.name, name) != 0 || one.since > version || (one.threaded && !wants_thread))
            continue;
        if (best == nullptr || one.threaded > best->threaded ||
            (one.threaded == best->threaded && one.since > best->since))
            best = &one;
    }
    // Not dlsym by name of the process: that may be somebody's hook.
    static auto look = reinterpret_cast<void* (*)(void*, const char*)>(
        dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5"));
    *function = best != nullptr ? look(self, best->symbol) : nullptr;
    if (found != nullptr) *found = *function != nullptr ? 0 : 1;
    return *function != nullptr ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
