#include "executable.h"

namespace eclip {

Executable::~Executable() {
    const Driver& real = driver();
    drop_parts();
    for (const Placed& placed : nodes)
        if (placed.child != nullptr) real.cuGraphDestroy(placed.child);
    if (clone != nullptr) real.cuGraphDestroy(clone);
    if (stored != nullptr && stored != clone) real.cuGraphDestroy(stored);
    // The driver lets what still runs come to its end.
    for (CUgraphExec exec : retired) real.cuGraphExecDestroy(exec);
    if (current != first) real.cuGraphExecDestroy(current);
    if (launched != nullptr) real.cuEventDestroy_v2(launched);
    for (const Timings::Pair& pair : timings.pairs) {
        real.cuEventDestroy_v2(pair.begin);
        real.cuEventDestroy_v2(pair.end);
    }
}

Placed* Executable::find(CUgraphNode node) {
    auto known = places.find(node);
    return known == places.end() ? nullptr : &nodes[known->second];
}

CUgraphNode Executable::original(CUgraphNode clone_node) const {
    for (size_t place = 0; place < nodes.size(); ++place)
        if (nodes[place].twin == clone_node) return sequence.handles[place];
    return nullptr;
}

std::vector<CUgraphNode> Executable::stored_handles() const {
    std::vector<CUgraphNode> handles;
    for (const Placed& placed : nodes) handles.push_back(placed.stored);
    return handles;
}

CUresult Executable::repeat_updates(CUgraphExec made) const {
    const Driver& real = driver();
    CUresult status = CUDA_SUCCESS;
    for (const Placed& placed : nodes) {
        if (!placed.enabled && status == CUDA_SUCCESS)
            status = real.cuGraphNodeSetEnabled(made, placed.stored, 0);
        if (placed.child != nullptr && status == CUDA_SUCCESS)
            status = real.cuGraphExecChildGraphNodeSetParams(made, placed.stored, placed.child);
    }
    return status;
}

void Executable::drop_parts() {
    destroy_parts(parts);
    for (Placed& placed : nodes) placed.piece = nullptr;
    recorded_on = kNotRecorded;
    timings.pending = false;
    timings.round = 0;
    timings.wait = 1;
}

void Executable::keep_whole(const char* why) {
    drop_parts();
    sequence.whole = why;
}

}  // namespace eclip
