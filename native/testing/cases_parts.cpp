// Cases of graphs in parts, of child graphs, and of events that end streams.
#include "captured.h"

using namespace cases;

namespace {

constexpr const char* kLongKernels = "1000";  // each is a stretch, and thereby a part
constexpr uint64_t kLongKernelUs = 1000;     // as long as that, or measuring would join the parts again

// Kernels that each need the one before: what comes out depends on their order.
void run_step(const uint64_t* arguments) {
    auto cell = reinterpret_cast<uint64_t*>(arguments[0]);
    uint64_t before = *cell;
    usleep(static_cast<useconds_t>(arguments[2]));
    *cell = 10 * before + arguments[1];
}

CUfunction make_step(const char* name) { return standin_function(name, run_step, 3, 1); }

Captured steps(uint64_t* cell, std::vector<uint64_t> digits, uint64_t us = kLongKernelUs) {
    return Captured([&](CUstream stream) {
        for (uint64_t digit : digits)
            CHECK(launch(make_step("a"), stream, {address(cell), digit, us}));
    });
}

CUresult set_step(const Captured& one, size_t index, uint64_t* cell, uint64_t digit) {
    uint64_t values[3] = {address(cell), digit, kLongKernelUs};
    void* pointers[3] = {&values[0], &values[1], &values[2]};
    KernelNodeParams params{make_step("a"), {1, 1, 1}, {1, 1, 1}, 0, pointers,
                            nullptr, nullptr, nullptr};
    return cuGraphExecKernelNodeSetParams_v2(one.exec, one.nodes[index], &params);
}

uint64_t run(const Captured& one, uint64_t* cell) {
    *cell = 0;
    one.run();
    return *cell;
}

// Two graphs, one after the other, as child graphs of a third.
struct Nested {
    CUstream stream = make_stream();
    CUgraph graph;
    CUgraphNode children[2];
    CUgraphExec exec;

    Nested(const Captured& first, const Captured& second) {
        CHECK(cuGraphCreate(&graph, 0));
        CHECK(cuGraphAddChildGraphNode(&children[0], graph, nullptr, 0, first.graph));
        CHECK(cuGraphAddChildGraphNode(&children[1], graph, &children[0], 1, second.graph));
        CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    }
    void run() const {
        CHECK(cuGraphLaunch(exec, stream));
        CHECK(cuStreamSynchronize(stream));
    }
};

}  // namespace

CASE(graph_of_background_is_cut) {
    use_background(kLongKernels);
    start();
    uint64_t* cell = make_cells(1);
    Captured one = steps(cell, {1, 2, 3, 4});
    GraphLaunches launches;
    return same("the cell", run(one, cell), uint64_t{1234}) &&
           same("launches", launches.count(), uint64_t{preloaded() ? 4u : 1u});
}

CASE(graph_that_takes_long_is_cut_once_that_is_known) {
    use_background("0");
    start();
    uint64_t* cell = make_cells(1);
    Captured one = steps(cell, {1, 2, 3}, 2000);
    for (int request = 0; request < 12; ++request)
        if (!same("the cell", run(one, cell), uint64_t{123})) return false;
    GraphLaunches launches;
    return same("the cell", run(one, cell), uint64_t{123}) &&
           same("launches", launches.count(), uint64_t{preloaded() ? 3u : 1u});
}

CASE(updates_reach_the_parts_of_a_graph) {
    use_background(kLongKernels);
    start();
    uint64_t* cell = make_cells(1);
    Captured one = steps(cell, {1, 2, 3});
    if (!same("the cell", run(one, cell), uint64_t{123})) return false;
    CHECK(set_step(one, 1, cell, 7));
    if (!same("the cell, a node changed", run(one, cell), uint64_t{173})) return false;
    CHECK(cuGraphNodeSetEnabled(one.exec, one.nodes[0], 0));
    if (!same("the cell, a node disabled", run(one, cell), uint64_t{73})) return false;
    CHECK(cuGraphNodeSetEnabled(one.exec, one.nodes[0], 1));
    GraphLaunches launches;
    if (!same("the cell, enabled again", run(one, cell), uint64_t{173}) ||
        !same("launches", launches.count(), uint64_t{preloaded() ? 3u : 1u}))
        return false;
    Captured other = steps(cell, {4, 5, 6});
    GraphExecUpdateResultInfo info{};
    CHECK(cuGraphExecUpdate_v2(one.exec, other.graph, &info));
    return same("the cell, the whole changed", run(one, cell), uint64_t{456});
}

// A launch follows the one before on whatever stream, and so do its parts.
CASE(launches_in_parts_follow_each_other) {
    use_background(kLongKernels);
    start();
    uint64_t* cell = make_cells(1);
    Captured one = steps(cell, {1, 2}, 2000);
    CUstream streams[3] = {make_stream(), make_stream(), make_stream()};
    for (CUstream stream : streams) CHECK(cuGraphLaunch(one.exec, stream));
    CHECK(cuCtxSynchronize());
    return same("the cell", *cell, uint64_t{121212});
}

// A child that is replaced cannot be cut: what is launched then is the whole, behind its parts.
bool whole_follows_parts() {
    start();
    uint64_t* cell = make_cells(1);
    Captured other = steps(cell, {5, 6});
    Nested nested(steps(cell, {1, 2}, 20'000), steps(cell, {3, 4}, 20'000));
    CUstream streams[2] = {make_stream(), make_stream()};
    CHECK(cuGraphLaunch(nested.exec, streams[0]));
    CHECK(cuGraphExecChildGraphNodeSetParams(nested.exec, nested.children[1], other.graph));
    CHECK(cuGraphLaunch(nested.exec, streams[1]));
    CHECK(cuCtxSynchronize());
    return same("the cell", *cell, uint64_t{12341256});
}

CASE(graph_kept_whole_follows_its_parts) {
    use_background(kLongKernels);
    return whole_follows_parts();
}

CASE(recorded_graph_kept_whole_follows_its_parts) {
    use_plan({{0, 1}, {0, 2}}, {}, Use::record);
    setenv("ECLIP_RECORD", "/dev/null", 1);
    return whole_follows_parts();
}

CASE(graph_is_not_cut_at_a_programmatic_edge) {
    use_background(kLongKernels);
    start();
    uint64_t* cell = make_cells(1);
    CUgraph graph;
    CUgraphNode nodes[4];
    CHECK(cuGraphCreate(&graph, 0));
    for (int index = 0; index < 4; ++index) {
        uint64_t values[3] = {address(cell), static_cast<uint64_t>(index + 1), 0};
        void* pointers[3] = {&values[0], &values[1], &values[2]};
        KernelNodeParams params{make_step("a"), {1, 1, 1}, {1, 1, 1}, 0, pointers,
                                nullptr, nullptr, nullptr};
        CHECK(cuGraphAddKernelNode_v2(&nodes[index], graph, nullptr, 0, &params));
        CUgraphEdgeData edge{};
        edge.type = index == 2;  // from the second to the third
        if (index > 0) CHECK(cuGraphAddDependencies_v2(graph, &nodes[index - 1], &nodes[index], &edge, 1));
    }
    CUgraphExec exec;
    CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    GraphLaunches launches;
    CUstream stream = make_stream();
    CHECK(cuGraphLaunch(exec, stream));
    CHECK(cuStreamSynchronize(stream));
    return same("the cell", *cell, uint64_t{1234}) &&
           same("launches", launches.count(), uint64_t{preloaded() ? 3u : 1u});
}

CASE(graph_that_records_an_event_is_not_cut) {
    use_background(kLongKernels);
    start();
    uint64_t* cell = make_cells(1);
    Captured one = steps(cell, {1, 2, 3});
    CUevent event;
    CUgraphNode node;
    CHECK(cuEventCreate(&event, 0));
    CHECK(cuGraphAddEventRecordNode(&node, one.graph, nullptr, 0, event));
    CHECK(cuGraphInstantiateWithFlags(&one.exec, one.graph, 0));
    GraphLaunches launches;
    return same("the cell", run(one, cell), uint64_t{123}) &&
           same("launches", launches.count(), uint64_t{1});
}

CASE(graph_with_a_disabled_node_is_cut_later) {
    use_background("0");
    start();
    uint64_t* cell = make_cells(1);
    Captured one = steps(cell, {1, 2, 3}, 2000);
    CHECK(cuGraphNodeSetEnabled(one.exec, one.nodes[1], 0));
    for (int request = 0; request < 12; ++request)
        if (!same("the cell", run(one, cell), uint64_t{13})) return false;
    GraphLaunches launches;
    return same("the cell, cut", run(one, cell), uint64_t{13}) &&
           same("whether it is cut", launches.count() > 1, preloaded());
}

CASE(recorded_graph_is_cut_again_after_an_update) {
    use_plan({{0, 1}}, {}, Use::record);
    setenv("ECLIP_RECORD", "/dev/null", 1);
    start();
    uint64_t* cell = make_cells(1);
    Captured one = steps(cell, {1, 2, 3}, 0);
    if (!same("the cell", run(one, cell), uint64_t{123})) return false;
    CHECK(set_step(one, 1, cell, 7));
    GraphLaunches launches;
    return same("the cell, a node changed", run(one, cell), uint64_t{173}) &&
           same("launches", launches.count(), uint64_t{preloaded() ? 3u : 1u});
}

CASE(update_by_a_graph_of_another_nesting_is_refused) {
    use_plan();
    start();
    uint64_t* cells = make_cells(1);
    auto adds = [&](int count) {
        return Captured([&](CUstream stream) {
            for (int index = 0; index < count; ++index)
                CHECK(launch(make_add("a"), stream, {address(cells), 1, 0}));
        });
    };
    Captured both = adds(2), one = adds(1);
    CUgraph graphs[2];
    CUgraphNode child, last;
    for (CUgraph& graph : graphs) CHECK(cuGraphCreate(&graph, 0));
    CHECK(cuGraphAddChildGraphNode(&child, graphs[0], nullptr, 0, both.graph));
    CHECK(cuGraphAddChildGraphNode(&child, graphs[1], nullptr, 0, one.graph));
    uint64_t values[3] = {address(cells), 1, 0};
    void* pointers[3] = {&values[0], &values[1], &values[2]};
    KernelNodeParams params{make_add("a"), {1, 1, 1}, {1, 1, 1}, 0, pointers, nullptr, nullptr, nullptr};
    CHECK(cuGraphAddKernelNode_v2(&last, graphs[1], &child, 1, &params));
    CUgraphExec exec;
    CHECK(cuGraphInstantiateWithFlags(&exec, graphs[0], 0));
    GraphExecUpdateResultInfo info{};
    return same("whether it is taken", cuGraphExecUpdate_v2(exec, graphs[1], &info) == CUDA_SUCCESS,
                false);
}

// Work of another thread on the same stream comes before or after a graph, not between its parts.
CASE(graph_on_a_stream_of_two_threads_is_not_cut) {
    use_background(kLongKernels);
    start();
    uint64_t* cell = make_cells(1);
    Captured one = steps(cell, {1, 2, 3}, 200);
    GraphLaunches launches;
    if (!same("the cell", run(one, cell), uint64_t{123}) ||
        !same("launches", launches.count(), uint64_t{preloaded() ? 3u : 1u}))
        return false;
    *cell = 0;
    std::atomic<bool> end{false};
    std::thread other([&] {
        CHECK(cuCtxSetCurrent(primary));
        CUfunction clear = standin_function("clear", [](const uint64_t* arguments) {
            auto seen = reinterpret_cast<uint64_t*>(arguments[0]);
            if (*seen != 0 && *seen != 123) _exit(1);  // between two parts
            *seen = 0;
        }, 1, 1);
        for (int launched = 0; !end.load(); usleep(300)) {
            CHECK(launch(clear, one.stream, {address(cell)}));
            // On busy cores the queue would grow for as long as this thread goes on.
            if (++launched % 8 == 0) CHECK(cuStreamSynchronize(one.stream));
        }
    });
    CUfunction reset = standin_function("reset", [](const uint64_t* arguments) {
        *reinterpret_cast<uint64_t*>(arguments[0]) = 0;
    }, 1, 1);
    for (int request = 0; request < 50; ++request) {
        CHECK(launch(reset, one.stream, {address(cell)}));
        CHECK(cuGraphLaunch(one.exec, one.stream));
        CHECK(cuStreamSynchronize(one.stream));
    }
    end = true;
    other.join();
    CHECK(cuStreamSynchronize(one.stream));
    return true;
}

CASE(child_graphs_are_cut) {
    use_background(kLongKernels);
    start();
    uint64_t* cell = make_cells(1);
    Nested nested(steps(cell, {1, 2}), steps(cell, {3, 4, 5}));
    GraphLaunches launches;
    nested.run();
    return same("the cell", *cell, uint64_t{12345}) &&
           same("launches", launches.count(), uint64_t{preloaded() ? 5u : 1u});
}

CASE(kernels_of_child_graphs_are_placed) {
    use_plan();
    start();
    static uint64_t seen[2];
    CUfunction first = standin_function("a", run_where, 1, 1);
    CUfunction second = standin_function("b", run_where, 1, 1);
    Captured one([&](CUstream stream) { CHECK(launch(first, stream, {address(&seen[0])})); });
    Captured other([&](CUstream stream) { CHECK(launch(second, stream, {address(&seen[1])})); });
    Nested(one, other).run();
    return same("the slices of the first", seen[0], preloaded() ? uint64_t{1} : kWhole) &&
           same("the slices of the second", seen[1], preloaded() ? uint64_t{2} : kWhole);
}

CASE(child_graph_that_is_replaced_keeps_its_lanes) {
    use_plan();
    start();
    uint64_t* cells = make_cells(2);
    CUfunction where = standin_function("b", run_where, 1, 1);
    Captured one([&](CUstream stream) { CHECK(launch(make_add("a"), stream, {address(cells), 5, 0})); });
    Captured other([&](CUstream stream) { CHECK(launch(where, stream, {address(&cells[1])})); });
    Nested nested(one, other);
    Captured changed([&](CUstream stream) { CHECK(launch(make_add("a"), stream, {address(cells), 7, 0})); });
    CHECK(cuGraphExecChildGraphNodeSetParams(nested.exec, nested.children[0], changed.graph));
    nested.run();
    if (!same("the cell", cells[0], uint64_t{7})) return false;
    // Likewise after it was made anew, for a node of the other child.
    CUgraph child;
    CUgraphNode inner;
    size_t count = 1;
    CHECK(cuGraphChildGraphNodeGetGraph(nested.children[1], &child));
    CHECK(cuGraphGetNodes(child, &inner, &count));
    uint64_t value = address(&cells[1]);
    void* pointers[1] = {&value};
    KernelNodeParams params{standin_function("other", run_where, 1, 0), {1, 1, 1}, {1, 1, 1}, 0,
                            pointers, nullptr, nullptr, nullptr};
    CHECK(cuGraphExecKernelNodeSetParams_v2(nested.exec, inner, &params));
    nested.run();
    return same("the cell, made anew", cells[0], uint64_t{14}) &&
           same("the slices of another function", cells[1], kWhole);
}

CASE(update_inside_a_replaced_child_is_not_lost) {
    use_plan();
    start();
    uint64_t* cells = make_cells(2);
    auto add = [&](uint64_t value) {
        return Captured([&](CUstream stream) {
            CHECK(launch(make_add("a"), stream, {address(cells), value, 0}));
        });
    };
    Captured one = add(5), changed = add(7);
    CUfunction where = standin_function("b", run_where, 1, 1);
    Captured other([&](CUstream stream) { CHECK(launch(where, stream, {address(&cells[1])})); });
    Nested nested(one, other);
    CHECK(cuGraphExecChildGraphNodeSetParams(nested.exec, nested.children[0], changed.graph));
    CUgraphNode inner[2];
    for (int index = 0; index < 2; ++index) {
        CUgraph child;
        size_t count = 1;
        CHECK(cuGraphChildGraphNodeGetGraph(nested.children[index], &child));
        CHECK(cuGraphGetNodes(child, &inner[index], &count));
    }
    uint64_t values[3] = {address(cells), 9, 0}, place = address(&cells[1]);
    void* pointers[3] = {&values[0], &values[1], &values[2]};
    void* places[1] = {&place};
    KernelNodeParams nine{make_add("a"), {1, 1, 1}, {1, 1, 1}, 0, pointers, nullptr, nullptr, nullptr};
    CHECK(cuGraphExecKernelNodeSetParams_v2(nested.exec, inner[0], &nine));
    // Another function may need a new executable, which may be refused; but not what was before.
    KernelNodeParams moved{standin_function("other", run_where, 1, 0), {1, 1, 1}, {1, 1, 1}, 0,
                           places, nullptr, nullptr, nullptr};
    cuGraphExecKernelNodeSetParams_v2(nested.exec, inner[1], &moved);
    nested.run();
    return same("the cell", cells[0], uint64_t{9});
}

// Nobody asks a lane here: only the program's own waits show that it is empty.
namespace {

bool lane_is_free_after(void (*wait)(CUevent)) {
    setenv("ECLIP_ASK", "never", 1);
    use_plan({{0, 1}}, {{{"a", 0}}});
    start();
    uint64_t* cells = make_cells(2);
    CUfunction where = standin_function("a", run_where, 1, 1);
    CUstream streams[2] = {make_stream(), make_stream()};
    CUevent event;
    CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    for (int index = 0; index < 2; ++index) {
        // Four in a row make the stream the worker's.
        for (int more = 0; more < 5; ++more)
            CHECK(launch(where, streams[index], {address(&cells[index])}));
        CHECK(cuEventRecord(event, streams[index]));
        wait(event);
        if (!same("the slices", cells[index], preloaded() ? uint64_t{1} : kWhole)) return false;
    }
    return true;
}

}  // namespace

CASE(wait_for_an_event_ends_its_stream) {
    return lane_is_free_after([](CUevent event) { CHECK(cuEventSynchronize(event)); });
}

CASE(event_that_is_found_done_ends_its_stream) {
    return lane_is_free_after([](CUevent event) {
        while (cuEventQuery(event) != CUDA_SUCCESS) usleep(100);
    });
}

// The handle of an event that was destroyed is given out again.
CASE(new_event_with_an_old_handle_ends_nothing) {
    use_plan();
    start();
    uint64_t* cells = make_cells(1);
    CUstream stream = make_stream();
    for (int round = 0; round < 8; ++round) {
        CUevent event, other;
        CHECK(cuEventCreate(&event, 0));
        CHECK(launch(make_step("a"), stream, {address(cells), 1, 2000}));
        CHECK(cuEventRecord(event, stream));
        CHECK(cuEventDestroy_v2(event));
        CHECK(cuEventCreate(&other, 0));
        CHECK(cuEventQuery(other));
        *cells = 0;
        CHECK(launch(make_step("b"), stream, {address(cells), 2, 0}));
        CHECK(cuStreamSynchronize(stream));
        if (!same("the cell", *cells % 100, uint64_t{12})) return false;
        CHECK(cuEventDestroy_v2(other));
    }
    return true;
}

// Recorded anew on another stream, an event says nothing about the first.
CASE(event_that_is_recorded_again_ends_the_other_stream) {
    use_plan();
    start();
    uint64_t* cells = make_cells(2);
    CUstream stream = make_stream(), idle = make_stream();
    CUevent event;
    CHECK(cuEventCreate(&event, 0));
    for (int round = 0; round < 8; ++round) {
        *cells = 0;
        CHECK(launch(make_step("a"), stream, {address(cells), 1, 2000}));
        CHECK(cuEventRecord(event, stream));
        CHECK(cuEventRecord(event, idle));
        CHECK(cuEventSynchronize(event));
        CHECK(launch(make_step("b"), stream, {address(cells), 2, 0}));
        CHECK(cuStreamSynchronize(stream));
        if (!same("the cell", *cells, uint64_t{12})) return false;
    }
    return true;
}

CASE(priority_of_a_lane_of_the_whole_device) {
    use_plan({{0, 0xffff, 2}, {0, 0xffff, 0}}, {{{"a", 0}, {"b", 1}}});
    start();
    static int seen[2];
    auto note = [](const uint64_t* arguments) { seen[arguments[0]] = standin_priority(); };
    CUfunction first = standin_function("a", note, 1, 1), second = standin_function("b", note, 1, 1);
    auto body = [&](CUstream stream) {
        CHECK(launch(first, stream, {0}));
        CHECK(launch(second, stream, {1}));
    };
    CUstream stream = make_stream();
    for (int request = 0; request < 4; ++request) body(stream);
    CHECK(cuStreamSynchronize(stream));
    if (!same("the priority of a launch", seen[0], preloaded() ? -2 : 0)) return false;
    seen[0] = seen[1] = 1;
    Captured(body).run();
    return same("the priority of a graph's kernel", seen[0], preloaded() ? -2 : 0) &&
           same("the priority of the other", seen[1], 0);
}
