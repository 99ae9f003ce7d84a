// Cases of captured graphs and their updates.
#include "captured.h"

using namespace cases;

CASE(disabled_node_stays_disabled) {
    use_plan();
    start();
    uint64_t* cells = make_cells(1);
    Captured one([&](CUstream stream) {
        CHECK(launch(make_add("a"), stream, {address(cells), 1, 0}));
        CHECK(launch(make_add("b"), stream, {address(cells), 100, 0}));
    });
    CHECK(cuGraphNodeSetEnabled(one.exec, one.nodes[1], 0));
    CHECK(one.refuse_update(one.nodes[0], {address(cells), 5, 0}));
    one.run();
    unsigned enabled = 1;
    CHECK(cuGraphNodeGetEnabled(one.exec, one.nodes[1], &enabled));
    if (!same("the cell", cells[0], uint64_t{5}) || !same("whether it runs", enabled, 0u)) return false;
    CHECK(cuGraphNodeSetEnabled(one.exec, one.nodes[1], 1));
    CHECK(one.refuse_update(one.nodes[0], {address(cells), 10, 0}));
    one.run();
    return same("the cell, both enabled", cells[0], uint64_t{115});
}

CASE(update_of_the_executable_alone_stays) {
    use_plan();
    start();
    static uint64_t* cells = make_cells(2);
    Captured one([&](CUstream stream) {
        CHECK(launch(make_add("a"), stream, {address(cells), 1, 0}));
        CHECK(launch(make_add("b"), stream, {address(cells), 1, 0}));
        CHECK(cuLaunchHostFunc(stream, [](void*) { cells[1] = 1; }, nullptr));
    });
    void (*other)(void*) = [](void* data) { cells[1] = address(data); };
    void* params[2] = {reinterpret_cast<void*>(other), reinterpret_cast<void*>(uintptr_t{9})};
    CHECK(cuGraphExecHostNodeSetParams(one.exec, one.nodes[2], params));
    CHECK(one.refuse_update(one.nodes[0], {address(cells), 5, 0}));
    one.run();
    return same("the first cell", cells[0], uint64_t{6}) &&
           same("what the host function wrote", cells[1], uint64_t{9});
}

namespace {

Captured two_kernels(uint64_t* cell) {
    return Captured([&](CUstream stream) {
        CHECK(launch(make_add("a"), stream, {address(cell), 1, 0}));
        CHECK(launch(make_add("b"), stream, {address(cell), 1, 0}));
    });
}

}  // namespace

// The device waits for the thread that updates.
CASE(update_while_the_device_waits_for_the_host) {
    use_plan();
    start();
    uint64_t* cells = make_cells(1);
    Captured one = two_kernels(cells);
    Gate gate;
    CHECK(cuLaunchHostFunc(make_stream(), wait_at_gate, &gate));
    CHECK(one.refuse_update(one.nodes[0], {address(cells), 5, 0}));
    gate.open = true;
    one.run();
    return same("the cell", cells[0], uint64_t{6});
}

CASE(update_while_another_stream_is_captured) {
    use_plan();
    start();
    uint64_t* cells = make_cells(1);
    Captured one = two_kernels(cells);
    CUstream other = make_stream();
    CHECK(cuStreamBeginCapture_v2(other, 0));
    CHECK(launch(make_add("a"), other, {address(cells), 1, 0}));
    for (uint64_t value : {5, 6, 7}) CHECK(one.refuse_update(one.nodes[0], {address(cells), value, 0}));
    CUgraph graph;
    CHECK(cuStreamEndCapture(other, &graph));
    one.run();
    return same("the cell", cells[0], uint64_t{8});
}

// Two launches of one executable follow each other on whatever streams, also with an update between.
CASE(launch_after_an_update_follows_the_one_before) {
    use_plan();
    start();
    uint64_t* cells = make_cells(2);
    Captured one([&](CUstream stream) {
        CHECK(launch(make_add("a"), stream, {address(cells), 1, 20000}));
        CHECK(launch(standin_function("b", [](const uint64_t* a) {
            auto cell = reinterpret_cast<uint64_t*>(a[0]);
            cell[1] = cell[0];
        }, 1, 1), stream, {address(cells)}));
    });
    CUstream second = make_stream();
    CHECK(cuGraphLaunch(one.exec, one.stream));
    CHECK(one.refuse_update(one.nodes[0], {address(cells), 10, 0}));
    CHECK(cuGraphLaunch(one.exec, second));
    CHECK(cuStreamSynchronize(second));
    if (!same("what the second launch read", cells[1], uint64_t{11})) return false;
    for (uint64_t value : {20, 30}) CHECK(one.refuse_update(one.nodes[0], {address(cells), value, 0}));
    one.run();
    CHECK(cuGraphExecDestroy(one.exec));
    return same("what the third launch read", cells[1], uint64_t{41});
}

// What the driver says of a refused update is said of the nodes of the program's own graph.
CASE(update_that_is_refused_names_my_node) {
    use_plan();
    start();
    uint64_t* cells = make_cells(1);
    Captured one = two_kernels(cells);
    Captured longer([&](CUstream stream) {
        for (const char* name : {"a", "b", "a"})
            CHECK(launch(make_add(name), stream, {address(cells), 1, 0}));
    });
    GraphExecUpdateResultInfo info{};
    CUresult status = cuGraphExecUpdate_v2(one.exec, longer.graph, &info);
    return same("the status", status, CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE) &&
           same("the node", address(info.errorNode), address(longer.nodes[2]));
}

// As the plan has them, for launches and for graphs.
CASE(priorities_of_lanes) {
    use_plan({{0, 1, 2}, {0, 2, 0}}, {{{"a", 0}, {"b", 1}}});
    start();
    static int seen[2];
    auto note = [](const uint64_t* arguments) { seen[arguments[0]] = standin_priority(); };
    CUfunction first = standin_function("a", note, 1, 1), second = standin_function("b", note, 1, 1);
    auto body = [&](CUstream stream) {
        CHECK(launch(first, stream, {0}));
        CHECK(launch(second, stream, {1}));
    };
    auto as_planned = [](const char* what) {
        return same(what, seen[0], preloaded() ? -2 : 0) && same(what, seen[1], 0);
    };
    CUstream stream = make_stream();
    body(stream);
    CHECK(cuStreamSynchronize(stream));
    if (!as_planned("the priority of a launch")) return false;
    seen[0] = seen[1] = 1;
    Captured(body).run();
    return as_planned("the priority of a graph's kernel");
}

CASE(updated_node_stays_on_its_lane) {
    use_plan();
    start();
    uint64_t* cells = make_cells(2);
    CUfunction where = standin_function("a", run_where, 1, 1);
    Captured one([&](CUstream stream) { CHECK(launch(where, stream, {address(cells)})); });
    uint64_t argument = address(cells + 1);
    void* pointer = &argument;
    KernelNodeParams params{where, {1, 1, 1}, {1, 1, 1}, 0, &pointer, nullptr, nullptr, nullptr};
    CHECK(cuGraphExecKernelNodeSetParams_v2(one.exec, one.nodes[0], &params));
    one.run();
    return same("where the updated node ran", cells[1], preloaded() ? uint64_t{1} : kWhole);
}

// A function of a module cannot move. That keeps no other node off its lane.
CASE(graph_with_a_function_of_a_module) {
    use_plan();
    start();
    uint64_t* cells = make_cells(2);
    Captured one([&](CUstream stream) {
        CHECK(launch(standin_function("a", run_where, 1, 1), stream, {address(cells)}));
        CHECK(launch(standin_function("b", run_where, 1, 0), stream, {address(cells + 1)}));
    });
    one.run();
    return same("where the kernel ran", cells[0], preloaded() ? uint64_t{1} : kWhole) &&
           same("where the function ran", cells[1], kWhole);
}
