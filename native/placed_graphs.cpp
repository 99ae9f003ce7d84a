// Graphs under a cap: their kernels run where the process is, at one of its places (cap.h).
#include <algorithm>

#include "rehome.h"

namespace eclip {
namespace {

constexpr size_t kMostPlaced = 4;  // executables of one graph at other places; each takes memory

bool is_ours(CUcontext context) {
    Dispatcher& dispatcher = Dispatcher::get();
    if (context == nullptr) driver().cuCtxGetCurrent(&context);
    const CapPlace* places = dispatcher.pool().places;
    return context == dispatcher.pool().primary ||
           std::any_of(places, places + dispatcher.cap().places(),
                       [&](const CapPlace& place) { return place.context == context; });
}

// The place for every node that can go there; kHome: it stays. `handles` are the nodes as they are now.
std::vector<int> choose_places(const Sequence& sequence, const std::vector<CUgraphNode>& handles,
                               int place) {
    std::vector<int> lanes(sequence.size(), kHome);
    for (size_t index = 0; index < lanes.size(); ++index) {
        const int type = sequence.nodes[index].type;
        if (type != kNodeKernel) {
            if (can_move(type)) lanes[index] = kFirstPlace + place;
            continue;
        }
        KernelNodeParams params{};
        if (driver().cuGraphKernelNodeGetParams_v2(handles[index], &params) != CUDA_SUCCESS) continue;
        if (!is_ours(params.ctx)) {
            say("a graph of another device or context has no cap");
        } else if (params.kern == nullptr) {
            say("a graph's kernel of a module runs on the whole device: CUDA lets only kernels of "
                "libraries move");
        } else if (!fits(handles[index], params, Dispatcher::get().pool().places[place].first)) {
            say("a graph's kernel does not fit on the process's SMs and runs on the whole device");
        } else {
            lanes[index] = kFirstPlace + place;
        }
    }
    return lanes;
}

// With all that was said to the main one since it was made.
CUresult finish(const Executable& main, Executable& made) {
    for (size_t index = 0; index < made.nodes.size(); ++index) {
        Placed& placed = made.nodes[index];
        placed.enabled = main.nodes[index].enabled;
        if (main.nodes[index].child == nullptr) continue;
        placed.child = place_child(made, placed, main.nodes[index].child);
        if (placed.child == nullptr) return CUDA_ERROR_NOT_SUPPORTED;
    }
    made.flags = main.flags;
    CUresult status =
        driver().cuGraphInstantiateWithFlags(&made.current, made.clone, made.flags);
    return status == CUDA_SUCCESS ? made.repeat_updates(made.current) : status;
}

std::unique_ptr<Executable> make_placed(Executable& main, int place) {
    if (!main.repeatable || main.stored == nullptr) return nullptr;
    const std::vector<CUgraphNode> handles = main.stored_handles();
    auto made = make_on_lanes(main.stored, main.sequence, handles, -1,
                              choose_places(main.sequence, handles, place));
    if (made == nullptr || finish(main, *made) != CUDA_SUCCESS) return nullptr;
    made->place = place;
    made->joints = main.joints;
    return made;
}

}  // namespace

std::unique_ptr<Executable> keep_placed(CUgraph graph, const Sequence& sequence) {
    const int place = Dispatcher::get().cap().here();
    auto made = make_on_lanes(graph, sequence, sequence.handles, -1,
                              choose_places(sequence, sequence.handles, place));
    if (made == nullptr) return nullptr;
    made->place = place;
    count(counters().graphs);
    return made;
}

Executable& find_placed(Executable& main, int place) {
    count(counters().graph_launches);
    if (main.place == place) return main;
    auto& others = main.variants;
    std::erase(others, nullptr);  // given up by an update
    auto known = std::find_if(others.begin(), others.end(),
                              [&](const auto& other) { return other->place == place; });
    if (known != others.end()) {
        std::rotate(known, known + 1, others.end());
        return *others.back();
    }
    auto made = make_placed(main, place);
    if (made == nullptr) {
        say("a graph cannot be placed anew and stays on the SMs that it had");
        return main;
    }
    if (others.size() == kMostPlaced) {
        // Another may get its address.
        if (main.last == others.front()->current) main.last = nullptr;
        others.erase(others.begin());
    }
    others.push_back(std::move(made));
    return *others.back();
}

}  // namespace eclip
