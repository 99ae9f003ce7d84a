#include "graph_recording.h"

#include <algorithm>

#include "device.h"
#include "rehome.h"
#include "stats.h"

namespace eclip {
namespace {

std::vector<size_t> cuts_around_kernels(const Sequence& sequence) {
    std::vector<size_t> places{0};
    auto is_kernel = [&](size_t place) { return sequence.nodes[place].type == kNodeKernel; };
    for (size_t place = 1; place < sequence.size() && sequence.whole == nullptr; ++place)
        if (sequence.nodes[place].joint && (is_kernel(place) || is_kernel(place - 1)))
            places.push_back(place);
    places.push_back(sequence.size());
    return places;
}

// Those that run, of one part.
CUresult read_kernels(const Executable& exec, const std::vector<CUgraphNode>& pieces, Part& part) {
    for (size_t place = part.begin; place < part.end; ++place) {
        if (exec.sequence.nodes[place].type != kNodeKernel) continue;
        if (!exec.nodes[place].enabled) {
            CUresult status = driver().cuGraphNodeSetEnabled(part.exec, pieces[place], 0);
            if (status != CUDA_SUCCESS) return status;
            continue;
        }
        KernelNodeParams params{};
        CUresult status = driver().cuGraphKernelNodeGetParams_v2(pieces[place], &params);
        if (status != CUDA_SUCCESS) return status;
        part.kernels.push_back(launch_of(pieces[place], params));
    }
    return CUDA_SUCCESS;
}

CUresult cut(Executable& exec, int lane) {
    const Sequence& sequence = exec.sequence;
    bool replaced = std::any_of(exec.nodes.begin(), exec.nodes.end(),
                                [](const Placed& placed) { return placed.child != nullptr; });
    if (exec.stored == nullptr || !exec.repeatable || replaced) return CUDA_ERROR_NOT_SUPPORTED;
    std::vector<int> lanes(sequence.size(), kHome);
    for (size_t place = 0; place < sequence.size(); ++place)
        if (can_move(sequence.nodes[place].type)) lanes[place] = lane;
    Relaxed relaxed;
    CUgraph clone = nullptr;
    std::vector<CUgraphNode> twins, pieces;
    CUresult status =
        clone_on_lanes(exec.stored, sequence, exec.stored_handles(), lanes, clone, twins);
    if (status != CUDA_SUCCESS) return status;
    status = cut_graph(sequence, clone, twins, cuts_around_kernels(sequence), exec.flags, exec.parts,
                       pieces);
    driver().cuGraphDestroy(clone);
    for (Part& part : exec.parts)
        if (status == CUDA_SUCCESS) status = read_kernels(exec, pieces, part);
    return status;
}

}  // namespace

const std::vector<Part>& cut_for_recording(Executable& exec, int lane) {
    if (exec.recorded_on == lane) return exec.parts;  // none: it could not be cut
    exec.drop_parts();
    const bool done = cut(exec, lane) == CUDA_SUCCESS;
    if (!done) exec.drop_parts();
    exec.recorded_on = lane;
    if (!done) {
        count(counters().whole_graphs);
        say("a graph cannot be recorded: %s", exec.sequence.whole != nullptr
                                                  ? exec.sequence.whole
                                                  : "the driver refuses its parts");
    } else if (exec.sequence.whole != nullptr) {
        say("a graph cannot be cut, because %s: its kernels are recorded with equal times",
            exec.sequence.whole);
    }
    return exec.parts;
}

}  // namespace eclip
