// Cases of several devices and of contexts besides the primary one.
#include <algorithm>

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

// Either context may be the planned one, and neither need be current.
CASE(peer_copy_from_another_device) {
    use_plan();
    start();
    uint64_t* cells = make_cells(2);
    CHECK(launch(make_add("a"), nullptr, {address(cells), 7, 20000}));
    CUcontext second = second_device();
    CHECK(cuMemcpyPeer(address(cells + 1), second, address(cells), primary, 8));
    return same("what was copied", cells[1], uint64_t{7});
}

CASE(work_after_a_peer_copy) {
    use_plan();
    start();
    uint64_t* cells = make_cells(3);
    CUstream blocking = make_stream(true);
    CHECK(launch(make_add("a"), blocking, {address(cells + 2), 1, 0}));
    CUcontext second = second_device();
    CHECK(launch(make_add("slow"), nullptr, {address(cells), 7, 20000}));
    CHECK(cuMemcpyPeer(address(cells + 1), primary, address(cells), second, 8));
    CHECK(cuCtxSetCurrent(primary));
    CHECK(launch(make_add("a"), blocking, {address(cells + 1), 1, 0}));
    CHECK(cuStreamSynchronize(blocking));
    return same("what was copied, and one", cells[1], uint64_t{8});
}

namespace {

// A kernel of the planned device that ends only when a thread of the other device has done this.
template <class Call>
bool ends_after(Call&& call) {
    use_plan();
    start();
    Gate gate;
    CUstream stream = make_stream();
    CHECK(launch(standin_function("a", run_gate, 1, 1), stream, {address(&gate)}));
    std::thread([&] {
        second_device();
        call();
        gate.open = true;
    }).join();
    CHECK(cuStreamSynchronize(stream));
    return true;
}

}  // namespace

CASE(other_device_is_waited_for) {
    return ends_after([] { CHECK(cuCtxSynchronize()); });
}

CASE(memory_of_the_other_device_is_freed) {
    return ends_after([] {
        CUdeviceptr memory;
        CHECK(cuMemAlloc_v2(&memory, 8));
        CHECK(cuMemFree_v2(memory));
    });
}

// What a lane still uses is waited for, wherever it is freed.
CASE(memory_of_the_planned_device_is_freed) {
    use_plan();
    start();
    static std::atomic<bool> ended{false};
    auto slow = [](const uint64_t*) {
        usleep(20000);
        ended = true;
    };
    uint64_t* cells = make_cells(1);
    CHECK(launch(standin_function("a", slow, 0, 1), make_stream(), {}));
    std::thread([&] {
        second_device();
        CHECK(cuMemFree_v2(address(cells)));
    }).join();
    return same("whether the kernel had ended", ended.load(), true);
}

namespace {

// A stream of the planned context waits for its default stream, whose work is on a lane.
bool follows_the_default_stream(CUstream blocking) {
    uint64_t* cells = make_cells(2);
    CHECK(cuCtxSetCurrent(primary));
    CHECK(launch(make_add("a"), nullptr, {address(cells), 7, 5000}));
    CHECK(cuMemcpyDtoDAsync_v2(address(cells + 1), address(cells), 8, blocking));
    CHECK(cuStreamSynchronize(blocking));
    CHECK(cuCtxSynchronize());
    return same("what was copied", cells[1], uint64_t{7});
}

// One with the handle of one of another context's, which `end` ends.
template <class End>
bool follows_with_a_handle_that_was_anothers(End&& end) {
    use_plan();
    start();
    uint64_t* cells = make_cells(1);
    CHECK(launch(make_add("a"), nullptr, {address(cells), 1, 0}));
    CHECK(cuCtxSynchronize());
    CUcontext other = private_context(0);
    std::vector<CUstream> gone;
    for (int count = 0; count < 20; ++count) {
        gone.push_back(make_stream(true));
        CHECK(launch(make_add("a"), gone.back(), {address(cells), 1, 0}));
    }
    end(other, gone);
    CHECK(cuCtxSetCurrent(primary));
    int again = 0;
    for (int tries = 0; tries < 100; ++tries) {
        CUstream made = make_stream(true);
        if (std::find(gone.begin(), gone.end(), made) == gone.end()) continue;
        ++again;
        if (!follows_the_default_stream(made)) return false;
    }
    return same("whether handles were given out again", again > 0, true);
}

}  // namespace

CASE(handle_of_another_contexts_stream_that_was_destroyed) {
    return follows_with_a_handle_that_was_anothers(
        [](CUcontext, const std::vector<CUstream>& streams) {
            for (CUstream stream : streams) CHECK(cuStreamDestroy_v2(stream));
        });
}

CASE(handle_of_a_stream_that_went_with_its_context) {
    return follows_with_a_handle_that_was_anothers(
        [](CUcontext context, const std::vector<CUstream>&) { CHECK(cuCtxDestroy_v2(context)); });
}

// Work of a stream from before there were lanes, which another context's call put there.
CASE(call_before_the_planned_context_is_used) {
    setenv("ECLIP_ASK", "never", 1);
    use_plan();
    start();
    uint64_t* cells = make_cells(2);
    CUstream stream = make_stream();
    private_context(0);
    static uint64_t* late = cells;
    CHECK(cuLaunchHostFunc(stream, [](void*) { usleep(20000); late[0] = 7; }, nullptr));
    CHECK(cuCtxSetCurrent(primary));
    auto read = [](const uint64_t*) { late[1] = late[0]; };
    CHECK(launch(standin_function("a", read, 0, 1), stream, {}));
    CHECK(cuStreamSynchronize(stream));
    return same("what the kernel saw", cells[1], uint64_t{7});
}

// A call that names its stream may come while another context is current.
CASE(call_while_another_context_is_current) {
    setenv("ECLIP_ASK", "never", 1);
    use_plan();
    start();
    uint64_t* cells = make_cells(2);
    CUstream blocking = make_stream(true);
    CHECK(launch(make_add("a"), nullptr, {address(cells), 7, 20000}));
    private_context(0);
    CHECK(cuMemcpyDtoDAsync_v2(address(cells + 1), address(cells), 8, blocking));
    CHECK(cuStreamSynchronize(blocking));
    return same("what was copied", cells[1], uint64_t{7});
}

namespace {

// While a blocking stream captures, nothing can be done in the default stream, where others must
// find its work. `enter` comes before the capture.
template <class Enter>
bool is_joined_before_a_capture(Enter&& enter) {
    setenv("ECLIP_ASK", "never", 1);
    use_plan();
    start();
    uint64_t* cells = make_cells(2);
    CUstream captured = make_stream(true), other = make_stream(true);
    CHECK(launch(make_add("a"), nullptr, {address(cells), 7, 20000}));
    enter();
    CHECK(cuStreamBeginCapture_v2(captured, CU_STREAM_CAPTURE_MODE_RELAXED));
    CHECK(cuCtxSetCurrent(primary));
    CHECK(cuMemcpyDtoDAsync_v2(address(cells + 1), address(cells), 8, other));
    CUgraph graph;
    CHECK(cuStreamEndCapture(captured, &graph));
    CHECK(cuStreamSynchronize(other));
    return same("what was copied", cells[1], uint64_t{7});
}

}  // namespace

CASE(capture_begun_while_the_default_stream_is_on_a_lane) {
    return is_joined_before_a_capture([] {});
}
CASE(capture_begun_while_another_context_is_current) {
    return is_joined_before_a_capture([] { private_context(0); });
}

// Contexts of the program's own on the planned device, in turn: the primary one is not made for them.
CASE(private_contexts_in_turn) {
    use_plan();
    CHECK(cuInit(0));
    standin_behave(1, 0);
    uint64_t* cells = make_cells(2);
    CUfunction kernel = make_add("a");
    CUcontext contexts[2];
    CUstream streams[2];
    for (int index : {0, 1}) {
        contexts[index] = private_context(0);
        streams[index] = make_stream();
    }
    for (int time = 0; time < 100; ++time) {
        CHECK(cuCtxSetCurrent(contexts[time % 2]));
        CHECK(launch(kernel, streams[time % 2], {address(cells + time % 2), 1, 0}));
    }
    if (!same("how often it was made", standin_retains(), 0)) return false;
    CUcontext made;  // and if it is there, it is not asked for at every launch
    CHECK(cuDevicePrimaryCtxRetain(&made, 0));
    for (int time = 0; time < 100; ++time) {
        CHECK(cuCtxSetCurrent(contexts[time % 2]));
        CHECK(launch(kernel, streams[time % 2], {address(cells + time % 2), 1, 0}));
    }
    CHECK(cuCtxSynchronize());
    return same("whether it was asked for often", standin_retains() <= 3, true);
}
