#include "sequence.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>

namespace eclip {
namespace {

struct Edge {
    size_t from, to;  // in the order of the level's nodes
    bool programmatic;
};

// The nodes of one graph, each after all it depends on, otherwise as they were added.
CUresult order_level(CUgraph graph, std::vector<CUgraphNode>& ordered, std::vector<Edge>& edges) {
    const Driver& real = driver();
    size_t count = 0, edge_count = 0;
    CUresult status = real.cuGraphGetNodes(graph, nullptr, &count);
    if (status != CUDA_SUCCESS || count == 0) return status;
    std::vector<CUgraphNode> nodes(count);
    status = real.cuGraphGetNodes(graph, nodes.data(), &count);
    if (status == CUDA_SUCCESS)
        status = real.cuGraphGetEdges_v2(graph, nullptr, nullptr, nullptr, &edge_count);
    if (status != CUDA_SUCCESS) return status;
    std::vector<CUgraphNode> from(edge_count), to(edge_count);
    std::vector<CUgraphEdgeData> data(edge_count);
    if (edge_count > 0)
        status = real.cuGraphGetEdges_v2(graph, from.data(), to.data(), data.data(), &edge_count);
    if (status != CUDA_SUCCESS) return status;
    std::unordered_map<CUgraphNode, size_t> rank(count);
    for (size_t index = 0; index < count; ++index) rank[nodes[index]] = index;
    std::vector<int> waits(count);
    std::vector<std::vector<size_t>> after(count);
    for (size_t edge = 0; edge < edge_count; ++edge) {
        ++waits[rank[to[edge]]];
        after[rank[from[edge]]].push_back(rank[to[edge]]);
    }
    std::vector<size_t> ready;  // a heap, the lowest rank first
    std::vector<size_t> place(count);
    auto later = std::greater<size_t>();
    for (size_t index = 0; index < count; ++index)
        if (waits[index] == 0) ready.push_back(index);
    std::make_heap(ready.begin(), ready.end(), later);
    while (!ready.empty()) {
        std::pop_heap(ready.begin(), ready.end(), later);
        size_t index = ready.back();
        ready.pop_back();
        place[index] = ordered.size();
        ordered.push_back(nodes[index]);
        for (size_t follower : after[index])
            if (--waits[follower] == 0) {
                ready.push_back(follower);
                std::push_heap(ready.begin(), ready.end(), later);
            }
    }
    for (size_t edge = 0; edge < edge_count; ++edge)
        edges.push_back({place[rank[from[edge]]], place[rank[to[edge]]], data[edge].type != 0});
    return CUDA_SUCCESS;
}

// Parts run one after the other, so whatever only has to come after something may be cut apart. What
// two branches of a graph may say to each other meanwhile would never be heard: events, semaphores
// and words in memory. Graphs with memory of their own, loops or choices cannot be cloned.
const char* reason_to_keep_whole(int type) {
    switch (type) {
        case kNodeKernel: case kNodeMemcpy: case kNodeMemset: case kNodeHost: case kNodeChild:
        case kNodeEmpty: return nullptr;
        case kNodeEventWait: case kNodeEventRecord: return "it waits for events or records them";
        case kNodeAllocate: case kNodeFree: return "it allocates or frees memory";
        case kNodeConditional: return "it has loops or choices";
        default: return "it has nodes that wait for others or signal to them";
    }
}

CUresult read_level(CUgraph graph, bool nested, int parent, Sequence& sequence) {
    const Driver& real = driver();
    std::vector<CUgraphNode> ordered;
    std::vector<Edge> edges;
    CUresult status = order_level(graph, ordered, edges);
    std::vector<size_t> places;
    for (size_t index = 0; index < ordered.size() && status == CUDA_SUCCESS; ++index) {
        int type = -1;
        status = real.cuGraphNodeGetType(ordered[index], &type);
        if (status != CUDA_SUCCESS) break;
        const size_t place = sequence.size();
        places.push_back(place);
        sequence.nodes.push_back({type, parent, place + 1, place > 0});
        sequence.handles.push_back(ordered[index]);
        sequence.records_events |= type == kNodeEventRecord;
        if (sequence.whole == nullptr) sequence.whole = reason_to_keep_whole(type);
        if (type != kNodeChild || !nested) continue;
        CUgraph child = nullptr;
        status = real.cuGraphChildGraphNodeGetGraph(ordered[index], &child);
        if (status == CUDA_SUCCESS)
            status = read_level(child, nested, static_cast<int>(place), sequence);
        sequence.nodes[place].end = sequence.size();
    }
    if (status != CUDA_SUCCESS) return status;
    // A programmatic edge lets the second kernel begin before the first has ended: never cut there.
    for (const Edge& edge : edges)
        if (edge.programmatic)
            for (size_t place = places[edge.from] + 1; place <= places[edge.to]; ++place)
                sequence.nodes[place].joint = false;
    return CUDA_SUCCESS;
}

}  // namespace

bool Sequence::is_within(size_t index, size_t begin, size_t end) const {
    const size_t first = is_leaf(index) ? index : index + 1;
    return std::max(first, begin) < std::min(nodes[index].end, end);
}

bool Sequence::is_like(const Sequence& other) const {
    return std::equal(nodes.begin(), nodes.end(), other.nodes.begin(), other.nodes.end(),
                      [](const Node& one, const Node& two) {
                          return one.type == two.type && one.parent == two.parent;
                      });
}

CUresult read_sequence(CUgraph graph, bool nested, Sequence& sequence) {
    const Driver& real = driver();
    if (real.cuGraphGetEdges_v2 == nullptr) return CUDA_ERROR_NOT_SUPPORTED;
    sequence = Sequence{};
    return read_level(graph, nested && real.cuGraphChildGraphNodeGetGraph != nullptr, -1, sequence);
}

CUresult find_in_clone(const Sequence& sequence, const std::vector<CUgraphNode>& handles,
                       CUgraph clone, std::vector<CUgraphNode>& twins) {
    const Driver& real = driver();
    twins.assign(handles.size(), nullptr);
    std::vector<CUgraph> children(handles.size());
    for (size_t index = 0; index < handles.size(); ++index) {
        if (handles[index] == nullptr) continue;
        const int parent = sequence.nodes[index].parent;
        CUgraph level = parent < 0 ? clone : children[static_cast<size_t>(parent)];
        CUresult status = real.cuGraphNodeFindInClone(&twins[index], handles[index], level);
        if (status == CUDA_SUCCESS && !sequence.is_leaf(index))
            status = real.cuGraphChildGraphNodeGetGraph(twins[index], &children[index]);
        if (status != CUDA_SUCCESS) return status;
    }
    return CUDA_SUCCESS;
}

}  // namespace eclip
