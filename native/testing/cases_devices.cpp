// Cases of several devices and of contexts besides the primary one.
#include "cases.h"

using namespace cases;

namespace {

// Where the kernels of a captured graph run that is made in the current context.
std::vector<uint64_t> slices_of_a_graph() {
    CUfunction first = standin_function("a", run_where, 1, 1);
    CUfunction second = standin_function("b", run_where, 1, 1);
    std::vector<uint64_t> seen(2);
    CUstream stream = make_stream();
    CHECK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    CHECK(launch(first, stream, {address(&seen[0])}));
    CHECK(launch(second, stream, {address(&seen[1])}));
    CUgraph graph;
    CHECK(cuStreamEndCapture(stream, &graph));
    CUgraphExec exec;
    CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    CHECK(cuGraphLaunch(exec, stream));
    CHECK(cuStreamSynchronize(stream));
    return seen;
}

bool on_slices(const char* what, uint64_t first, uint64_t second) {
    std::vector<uint64_t> seen = slices_of_a_graph();
    return same(what, seen[0], first) && same(what, seen[1], second);
}

}  // namespace

CASE(graph_of_another_device) {
    use_plan();
    start();
    bool planned = preloaded();
    if (!on_slices("the planned device's graph", planned ? 1 : kWhole, planned ? 2 : kWhole))
        return false;
    second_device();
    return on_slices("the other device's graph", kWhole, kWhole);
}

CASE(graph_of_a_private_context) {
    use_plan();
    start();
    slices_of_a_graph();
    private_context(0);
    return on_slices("the private context's graph", kWhole, kWhole);
}
