#include "cutting.h"

#include <algorithm>

namespace eclip {
namespace {

// Instantiations of parts take the program's flags, without what concerns the call alone or memory.
constexpr uint64_t kUseNodePriority = 8;

// One cut of a graph. Halving is what keeps it cheap: a part's nodes are cloned a few times instead
// of once for every part.
struct Cutter {
    const Sequence& sequence;
    const std::vector<size_t>& places;
    uint64_t flags;
    std::vector<Part>& parts;
    std::vector<CUgraphNode>& pieces;

    // The parts from `first` to before `last`, out of a graph that has at least their nodes.
    CUresult split(CUgraph graph, const std::vector<CUgraphNode>& handles, size_t first,
                   size_t last) {
        CUgraph clone = nullptr;
        CUresult status = driver().cuGraphClone(&clone, graph);
        if (status != CUDA_SUCCESS) return status;
        std::vector<CUgraphNode> twins;
        status = find_in_clone(sequence, handles, clone, twins);
        if (status == CUDA_SUCCESS) status = remove_others(twins, places[first], places[last]);
        if (status == CUDA_SUCCESS && last - first == 1) return finish(clone, twins, first);
        const size_t middle = (first + last) / 2;
        if (status == CUDA_SUCCESS) status = split(clone, twins, first, middle);
        if (status == CUDA_SUCCESS) status = split(clone, twins, middle, last);
        driver().cuGraphDestroy(clone);
        return status;
    }

    CUresult remove_others(std::vector<CUgraphNode>& twins, size_t begin, size_t end) {
        for (size_t index = 0; index < twins.size(); ++index) {
            if (twins[index] == nullptr || sequence.is_within(index, begin, end)) continue;
            CUresult status = driver().cuGraphDestroyNode(twins[index]);
            if (status != CUDA_SUCCESS) return status;
            // A child graph goes with all it holds.
            std::fill(twins.begin() + static_cast<long>(index),
                      twins.begin() + static_cast<long>(sequence.nodes[index].end), nullptr);
        }
        return CUDA_SUCCESS;
    }

    CUresult finish(CUgraph clone, const std::vector<CUgraphNode>& twins, size_t part) {
        Part made{places[part], places[part + 1], clone};
        CUresult status =
            driver().cuGraphInstantiateWithFlags(&made.exec, clone, flags & kUseNodePriority);
        if (status != CUDA_SUCCESS) {
            driver().cuGraphDestroy(clone);
            return status;
        }
        std::copy(twins.begin() + static_cast<long>(made.begin),
                  twins.begin() + static_cast<long>(made.end),
                  pieces.begin() + static_cast<long>(made.begin));
        parts.push_back(made);
        return CUDA_SUCCESS;
    }
};

}  // namespace

CUresult cut_graph(const Sequence& sequence, CUgraph graph,
                   const std::vector<CUgraphNode>& handles, const std::vector<size_t>& places,
                   uint64_t flags, std::vector<Part>& parts, std::vector<CUgraphNode>& pieces) {
    if (driver().cuGraphDestroyNode == nullptr) return CUDA_ERROR_NOT_SUPPORTED;
    pieces.assign(sequence.size(), nullptr);
    Cutter cutter{sequence, places, flags, parts, pieces};
    CUresult status = cutter.split(graph, handles, 0, places.size() - 1);
    if (status != CUDA_SUCCESS) destroy_parts(parts);
    return status;
}

void destroy_parts(std::vector<Part>& parts) {
    for (Part& part : parts) {
        driver().cuGraphExecDestroy(part.exec);
        driver().cuGraphDestroy(part.graph);
    }
    parts.clear();
}

std::vector<size_t> choose_cuts(const Sequence& sequence, const std::vector<double>& node_ns,
                                double grain_ns) {
    std::vector<size_t> places{0};
    double open_ns = 0;
    for (size_t index = 0; index < sequence.size(); ++index) {
        if (open_ns > 0 && open_ns + node_ns[index] > grain_ns && sequence.nodes[index].joint) {
            places.push_back(index);
            open_ns = 0;
        }
        open_ns += node_ns[index];
    }
    places.push_back(sequence.size());
    return places;
}

}  // namespace eclip
