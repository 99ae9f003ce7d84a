#include "graph.h"

#include <cstring>

namespace standin {

thread_local Mask running_mask;

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
        twins[node.get()] = twin.get();
        made->nodes.push_back(std::move(twin));
    }
    for (auto& node : made->nodes)
        for (Node*& before : node->after) before = twins.at(before);
    return made;
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

CUresult launch(Exec& exec, Stream& stream) {
    Engine& engine = Engine::get();
    // The whole graph takes its place in the stream; two launches of one executable follow.
    WorkPtr begin = engine.submit(stream, nullptr, {exec.last});
    std::map<const Node*, WorkPtr> works;
    std::vector<WorkPtr> all{begin};
    size_t index = 0;
    for (const auto& node : exec.graph->nodes) {
        std::vector<WorkPtr> after{begin};
        for (const Node* before : node->after) after.push_back(works.at(before));
        bool runs = exec.enabled[index++];
        Mask mask = stream.context != nullptr ? stream.context->mask : Mask{};
        works[node.get()] = engine.add(runs ? work_of(*node, mask) : nullptr, after);
        all.push_back(works[node.get()]);
    }
    exec.last = engine.submit(stream, nullptr, all);
    return CUDA_SUCCESS;
}

CUresult update(Exec& exec, const Graph& graph) {
    if (exec.graph->nodes.size() != graph.nodes.size()) return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    std::map<const Node*, size_t> here, there;
    for (size_t index = 0; index < graph.nodes.size(); ++index) {
        here[exec.graph->nodes[index].get()] = index;
        there[graph.nodes[index].get()] = index;
    }
    for (size_t index = 0; index < graph.nodes.size(); ++index) {
        const Node& old_node = *exec.graph->nodes[index];
        const Node& new_node = *graph.nodes[index];
        bool same = old_node.type == new_node.type && old_node.after.size() == new_node.after.size();
        for (size_t edge = 0; same && edge < old_node.after.size(); ++edge)
            same = here[old_node.after[edge]] == there[new_node.after[edge]];
        // An executable cannot move its nodes to other contexts.
        if (!same || old_node.kernel.context != new_node.kernel.context)
            return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    }
    // Its nodes are still named by those of the graph that it was instantiated from.
    auto made = graph.clone();
    for (size_t index = 0; index < made->nodes.size(); ++index)
        made->nodes[index]->original = exec.graph->nodes[index]->original;
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
