#include "graph.h"

#include <cstring>

namespace standin {

thread_local Mask running_mask;

Mask mask_of(const Stream& stream) {
    Mask mask = stream.masked ? stream.mask : stream.context->mask;
    mask.priority = stream.priority;
    return mask;
}

Node* Graph::add(int type, const std::vector<Node*>& after) {
    auto& node = nodes.emplace_back(std::make_unique<Node>());
    node->type = type;
    node->after = after;
    return node.get();
}

std::unique_ptr<Graph> Graph::clone() const {
    auto made = std::make_unique<Graph>();
    std::map<const Node*, Node*> twins;
    for (const auto& node : nodes) {
        auto twin = std::make_unique<Node>(*node);
        twin->original = node.get();
        for (size_t index = 0; index < twin->kernel.values.size(); ++index)
            twin->kernel.pointers[index] = &twin->kernel.values[index];
        if (node->child) twin->child = node->child->clone();
        twins[node.get()] = twin.get();
        made->nodes.push_back(std::move(twin));
    }
    for (auto& node : made->nodes) {
        for (Node*& before : node->after) before = twins.at(before);
        for (Node*& before : node->programmatic) before = twins.at(before);
    }
    return made;
}

bool Graph::remove(const Node* gone) {
    auto is_gone = [&](const auto& node) { return &*node == gone; };
    for (auto& node : nodes) {
        std::erase_if(node->after, is_gone);
        std::erase_if(node->programmatic, is_gone);
        if (node->child && node->child->remove(gone)) return true;
    }
    return std::erase_if(nodes, is_gone) > 0;
}

Kernel make_kernel(const KernelNodeParams& params, CUfunction function) {
    Kernel kernel;
    kernel.function = reinterpret_cast<Function*>(function);
    kernel.shape = params;
    kernel.context = reinterpret_cast<Context*>(params.ctx);
    for (int index = 0; index < kernel.function->arguments; ++index) {
        uint64_t value;
        std::memcpy(&value, params.kernelParams[index], sizeof value);
        kernel.values.push_back(value);
    }
    kernel.pointers.resize(kernel.values.size());
    return kernel;
}

void run_kernel(const Kernel& kernel, const Mask& mask) {
    running_mask = mask;
    kernel.function->run(kernel.values.data());
}

namespace {

void run_memset(const MemsetNodeParams& params) {
    auto target = reinterpret_cast<unsigned char*>(params.dst);
    for (size_t index = 0; index < params.width; ++index)
        std::memcpy(target + index * params.elementSize, &params.value, params.elementSize);
}

// The first three words of the description are the stand-in's own: target, source, bytes.
void run_memcpy(const MemcpyNodeParams& params) {
    uint64_t words[3];
    std::memcpy(words, params.copy3d, sizeof words);
    std::memcpy(reinterpret_cast<void*>(words[0]), reinterpret_cast<void*>(words[1]), words[2]);
}

}  // namespace

std::function<void()> work_of(const Node& node, const Mask& stream_mask) {
    switch (node.type) {
        case kNodeKernel: {
            Mask mask = node.kernel.context ? node.kernel.context->mask : stream_mask;
            if (node.kernel.context) mask.priority = node.kernel.priority;
            return [kernel = node.kernel, mask] { run_kernel(kernel, mask); };
        }
        case kNodeMemset: return [params = node.memset] { run_memset(params); };
        case kNodeMemcpy: return [params = node.memcpy] { run_memcpy(params); };
        case kNodeHost: return [host = node.host, data = node.host_data] { host(data); };
        default: return nullptr;
    }
}

namespace {

// All of a graph after some work; what its last nodes are is for whoever waits for all of them.
void launch_nodes(const Graph& graph, const WorkPtr& begin, const Mask& mask, bool runs,
                  std::vector<WorkPtr>& all) {
    Engine& engine = Engine::get();
    std::map<const Node*, WorkPtr> works;
    // Each after those it depends on, in whatever order they were added.
    std::function<WorkPtr(const Node&)> launch_node = [&](const Node& node) {
        if (works.contains(&node)) return works.at(&node);
        std::vector<WorkPtr> after{begin};
        for (const Node* before : node.after) after.push_back(launch_node(*before));
        bool does = runs && node.enabled;
        WorkPtr made;
        if (node.child) {
            std::vector<WorkPtr> inner{engine.add(nullptr, after)};
            WorkPtr first = inner[0];
            launch_nodes(*node.child, first, mask, does, inner);
            made = engine.add(nullptr, inner);
        } else {
            made = engine.add(does ? work_of(node, mask) : nullptr, after);
        }
        all.push_back(made);
        return works[&node] = made;
    };
    for (const auto& node : graph.nodes) launch_node(*node);
}

// Whether an executable's graph may do what another's nodes do.
bool can_update(const Graph& mine, const Graph& graph) {
    if (mine.nodes.size() != graph.nodes.size()) return false;
    std::map<const Node*, size_t> here, there;
    for (size_t index = 0; index < graph.nodes.size(); ++index) {
        here[mine.nodes[index].get()] = index;
        there[graph.nodes[index].get()] = index;
    }
    for (size_t index = 0; index < graph.nodes.size(); ++index) {
        const Node& old_node = *mine.nodes[index];
        const Node& new_node = *graph.nodes[index];
        bool same = old_node.type == new_node.type && old_node.after.size() == new_node.after.size();
        for (size_t edge = 0; same && edge < old_node.after.size(); ++edge)
            same = here[old_node.after[edge]] == there[new_node.after[edge]];
        // An executable cannot move its nodes to other contexts.
        if (!same || old_node.kernel.context != new_node.kernel.context) return false;
        if (old_node.child && !can_update(*old_node.child, *new_node.child)) return false;
    }
    return true;
}

void rename_nodes(Graph& made, const Graph& like) {
    for (size_t index = 0; index < made.nodes.size(); ++index) {
        made.nodes[index]->original = like.nodes[index]->original;
        made.nodes[index]->enabled = like.nodes[index]->enabled;
        if (made.nodes[index]->child) rename_nodes(*made.nodes[index]->child, *like.nodes[index]->child);
    }
}

}  // namespace

CUresult launch(Exec& exec, Stream& stream) {
    Engine& engine = Engine::get();
    // The whole graph takes its place in the stream; two launches of one executable follow.
    WorkPtr begin = engine.submit(stream, nullptr, {exec.last});
    std::vector<WorkPtr> all{begin};
    launch_nodes(*exec.graph, begin, mask_of(stream), true, all);
    exec.last = engine.submit(stream, nullptr, all);
    return CUDA_SUCCESS;
}

CUresult update(Exec& exec, const Graph& graph) {
    if (!can_update(*exec.graph, graph)) return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    // Its nodes are still named by those of the graph that it was instantiated from.
    auto made = graph.clone();
    rename_nodes(*made, *exec.graph);
    exec.graph = std::move(made);
    return CUDA_SUCCESS;
}

}  // namespace standin

// Which slices the calling kernel runs on, as %smid would show.
extern "C" __attribute__((visibility("default"))) void standin_mask(uint64_t bits[2]) {
    bits[0] = standin::running_mask.bits[0];
    bits[1] = standin::running_mask.bits[1];
}
extern "C" __attribute__((visibility("default"))) int standin_priority() {
    return standin::running_mask.priority;
}
