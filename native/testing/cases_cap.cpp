// Cases of a cap without a plan: where kernels run, and what happens when it changes.
#include "cases.h"

using namespace cases;

namespace {

constexpr uint64_t kNobody = 0;

using Ask = int (*)(int);
int ask(int units) {
    auto function = reinterpret_cast<Ask>(dlsym(RTLD_DEFAULT, "eclip_sms"));
    return function != nullptr ? function(units) : 0;
}

// Without libeclip everything runs on the whole device.
uint64_t wanted(uint64_t slices) { return preloaded() ? slices : kWhole; }

CUfunction where() {
    static CUfunction made = standin_function("where", run_where, 1, 1);
    return made;
}

uint64_t place_of(CUstream stream) {
    static uint64_t* cell = make_cells(1);
    *cell = kNobody;
    CHECK(launch(where(), stream, {address(cell)}));
    CHECK(cuStreamSynchronize(stream));
    return *cell;
}

// Launches until the cap has changed.
bool moves_to(CUstream stream, uint64_t slices) {
    uint64_t found = kNobody;
    for (int look = 0; look < 20000 && found != wanted(slices); ++look) {
        found = place_of(stream);
        if (found != wanted(slices)) usleep(100);
    }
    return same("the slices after a change", found, wanted(slices));
}

CUgraphExec capture(CUstream stream, uint64_t* cell, CUgraph* graph) {
    CUgraphExec exec;
    CHECK(cuStreamBeginCapture_v2(stream, 1));
    CHECK(launch(where(), stream, {address(cell)}));
    CHECK(cuStreamEndCapture(stream, graph));
    CHECK(cuGraphInstantiateWithFlags(&exec, *graph, 0));
    return exec;
}

uint64_t place_of_graph(CUgraphExec exec, CUstream stream, const uint64_t* cell) {
    CHECK(cuGraphLaunch(exec, stream));
    CHECK(cuStreamSynchronize(stream));
    return *cell;
}

}  // namespace

CASE(cap_holds_for_streams_of_all_kinds) {
    use_cap("24");
    start();
    CUstream streams[] = {nullptr, kThreadStream, make_stream(), make_stream(true)};
    for (CUstream stream : streams)
        if (!same("a stream's slices", place_of(stream), wanted(7))) return false;
    uint64_t other = kNobody;
    CUstream here = make_stream();
    std::thread([&] {
        CHECK(cuCtxSetCurrent(primary));
        other = place_of(here);
    }).join();
    return same("another thread's slices", other, wanted(7));
}

CASE(cap_that_is_no_multiple_of_slices_is_rounded_down) {
    use_cap("31");
    start();
    return same("its slices", place_of(make_stream()), wanted(7));
}

CASE(cap_as_a_share_of_the_device) {
    use_cap("");
    unsetenv("ECLIP_SMS");
    setenv("ECLIP_SHARE", "0.4", 1);  // 52 of 132: six slices
    start();
    return same("its slices", place_of(make_stream()), wanted(0x3f));
}

CASE(cap_that_changes) {
    use_cap("24");
    start();
    CUstream stream = make_stream(), second = make_stream();
    uint64_t* cell = make_cells(1);
    CUgraph graph;
    CUgraphExec exec = capture(stream, cell, &graph);
    if (!same("a graph's slices", place_of_graph(exec, stream, cell), wanted(7))) return false;
    for (auto [units, slices] : {std::pair{48, 0x3full}, {8, 1ull}, {132, 0xffffull}, {24, 7ull}}) {
        if (ask(units) != 0) return false;
        if (!moves_to(stream, slices)) return false;
        if (!same("a second stream's", place_of(second), wanted(slices))) return false;
        if (!same("the graph's", place_of_graph(exec, stream, cell), wanted(slices))) return false;
    }
    CHECK(cuGraphExecDestroy(exec));
    return true;
}

// Its nodes keep what was said to the executable, wherever it runs.
CASE(graph_under_a_cap_keeps_updates_when_it_moves) {
    use_cap("24");
    start();
    CUstream stream = make_stream();
    uint64_t* cells = make_cells(2);
    CUgraph graph;
    CUgraphExec exec = capture(stream, cells, &graph);
    CUgraphNode node;
    size_t count = 1;
    CHECK(cuGraphGetNodes(graph, &node, &count));
    uint64_t second = address(cells + 1);
    void* params[] = {&second};
    KernelNodeParams shape{where(), {1, 1, 1}, {1, 1, 1}, 0, params, nullptr, nullptr, nullptr};
    CHECK(cuGraphExecKernelNodeSetParams_v2(exec, node, &shape));
    ask(48);
    if (!moves_to(stream, 0x3f)) return false;
    if (!same("its second cell", place_of_graph(exec, stream, cells + 1), wanted(0x3f))) return false;
    if (!same("its first cell", cells[0], uint64_t{0})) return false;
    CHECK(cuGraphNodeSetEnabled(exec, node, 0));
    ask(8);
    if (!moves_to(stream, 1)) return false;
    return same("a disabled node's cell", place_of_graph(exec, stream, cells + 1), wanted(0x3f));
}

// More streams than there are lanes, one after another: lanes pass on.
CASE(cap_holds_for_more_streams_than_lanes) {
    use_cap("24");
    start();
    for (int made = 0; made < 200; ++made)
        if (!same("a stream's slices", place_of(make_stream(made % 2 == 0)), wanted(7))) return false;
    return true;
}

CASE(kernel_that_does_not_fit_under_the_cap) {
    use_cap("24");
    start();
    uint64_t* cell = make_cells(1);
    CUstream stream = make_stream();
    CHECK(launch(where(), stream, {address(cell)}, 80));  // as many units as it needs
    CHECK(cuStreamSynchronize(stream));
    return same("its slices", *cell, kWhole) && same("the next one's", place_of(stream), wanted(7));
}

CASE(cap_that_nobody_can_have) {
    use_cap("24");
    start();
    if (!same("the slices", place_of(make_stream()), wanted(7))) return false;
    for (int units : {0, -8})
        if (preloaded() && ask(units) == 0) return false;
    return same("the slices afterwards", place_of(make_stream()), wanted(7));
}
