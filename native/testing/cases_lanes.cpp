// Cases of lanes that change hands, and of threads that meet there.
#include <utility>

#include "cases.h"

using namespace cases;

CASE(lane_that_was_waited_for_serves_another_stream) {
    setenv("ECLIP_ASK", "never", 1);
    use_plan({{0, 1}}, {{{"a", 0}}});
    start();
    uint64_t* cells = make_cells(2);
    CUfunction where = standin_function("a", run_where, 1, 1);
    for (int time : {0, 1}) {
        CUstream stream = make_stream();
        CHECK(launch(where, stream, {address(cells + time)}));
        CHECK(cuStreamSynchronize(stream));
    }
    uint64_t wanted = preloaded() ? 1 : kWhole;
    return same("the first one's slices", cells[0], wanted) &&
           same("the second one's slices", cells[1], wanted);
}

// The default stream waits for lanes of blocking streams, not for who has them after that.
CASE(lane_that_a_non_blocking_stream_took_over) {
    setenv("ECLIP_ASK", "always", 1);
    use_plan({{0, 1}}, {{{"a", 0}}});
    start();
    uint64_t* cells = make_cells(1);
    Gate gate;
    CHECK(launch(make_add("a"), make_stream(true), {address(cells), 7, 0}));
    wait_for_cell(cells, 7);
    usleep(1000);
    CUstream other = make_stream();
    CHECK(launch(standin_function("a", run_gate, 1, 1), other, {address(&gate)}));
    CHECK(cuStreamSynchronize(nullptr));
    gate.open = true;
    CHECK(cuStreamSynchronize(other));
    return true;
}

// Likewise where its last call was a copy, in whose queue libeclip sees it only when it returns.
CASE(lane_that_a_non_blocking_stream_took_over_after_a_copy) {
    setenv("ECLIP_ASK", "always", 1);
    use_plan({{0, 1}}, {{{"a", 0}}});
    start();
    uint64_t* cells = make_cells(3);
    cells[2] = 7;
    Gate gate;
    CUstream blocking = make_stream(true), other = make_stream();
    CHECK(launch(make_add("a"), blocking, {address(cells), 1, 10000}));
    std::thread taker([&] {
        CHECK(cuCtxSetCurrent(primary));
        wait_for_cell(cells + 1, 7);
        usleep(2000);
        CHECK(launch(standin_function("a", run_gate, 1, 1), other, {address(&gate)}));
    });
    CHECK(cuMemcpyDtoDAsync_v2(address(cells + 1), address(cells + 2), 8, blocking));
    taker.join();
    CHECK(cuStreamSynchronize(nullptr));
    gate.open = true;
    CHECK(cuStreamSynchronize(other));
    return true;
}

namespace {

// While one stream's wish for a lane is looked at, another takes the lane that its last work is on.
struct Takeover {
    CUfunction kernel;
    CUstream stream;
    Gate gate;
    bool done = false;
} takeover;
void take_over(const char* call, CUstream) {
    if (strcmp(call, "query") != 0 || takeover.done) return;
    takeover.done = true;
    std::thread([] {
        CHECK(cuCtxSetCurrent(primary));
        CHECK(launch(takeover.kernel, takeover.stream, {address(&takeover.gate)}));
    }).join();
}

}  // namespace

CASE(lane_that_is_taken_while_another_is_asked_for) {
    setenv("ECLIP_ASK", "always", 1);
    use_plan({{0, 1}, {0, 2}}, {{{"a", 0}, {"b", 1}, {"c", 1}, {"d", 0}}});
    start();
    uint64_t* cells = make_cells(3);
    Gate gate;
    CUstream first = make_stream(), second = make_stream(), third = make_stream();
    for (CUstream stream : {second, third}) {  // they are the plan's worker
        CHECK(launch(make_add("a"), stream, {address(cells), 1, 0}));
        CHECK(cuStreamSynchronize(stream));
    }
    CHECK(launch(standin_function("c", run_gate, 1, 1), second, {address(&gate)}));
    CHECK(launch(make_add("a"), first, {address(cells + 1), 7, 0}));
    wait_for_cell(cells + 1, 7);
    usleep(1000);
    takeover.kernel = standin_function("d", run_gate, 1, 1);
    takeover.stream = third;
    standin_calls(take_over);
    CHECK(launch(make_add("b"), first, {address(cells + 2), 7, 0}));
    CHECK(cuStreamSynchronize(first));
    gate.open = takeover.gate.open = true;
    CHECK(cuCtxSynchronize());
    return same("the first stream's last cell", cells[2], uint64_t{7});
}

namespace {

// One thread's launch leaves its lane for another; meanwhile a second thread calls the same stream.
Gate leaving;
void leave_slowly(const char* call, CUstream) {
    if (strcmp(call, "wait_event") != 0 || leaving.open) return;
    leaving.open = true;
    usleep(20000);
}

}  // namespace

CASE(threads_that_meet_on_one_stream) {
    setenv("ECLIP_ASK", "never", 1);
    use_plan();
    start();
    uint64_t* cells = make_cells(3);
    CUstream stream = make_stream();
    CHECK(launch(make_add("a"), stream, {address(cells), 1, 1000}));
    if (preloaded()) standin_calls(leave_slowly);
    std::thread other([&] {
        CHECK(cuCtxSetCurrent(primary));
        if (preloaded()) leaving.wait();
        CHECK(launch(make_add("a"), stream, {address(cells + 1), 7, 50000}));
    });
    CHECK(launch(make_add("b"), stream, {address(cells), 1, 0}));
    other.join();
    CHECK(cuMemcpyDtoDAsync_v2(address(cells + 2), address(cells + 1), 8, stream));
    CHECK(cuStreamSynchronize(stream));
    return same("what the other thread's kernel left", cells[2], uint64_t{7});
}

namespace {

// While one thread waits for the context, another launches on a lane that it has just waited for.
void (*launch_again)() = nullptr;
void launch_after_wait(const char* call, CUstream) {
    if (strcmp(call, "waited") == 0 && launch_again != nullptr) std::exchange(launch_again, nullptr)();
}
CUstream launched_again;
uint64_t* again_cells;

}  // namespace

CASE(launch_on_a_lane_that_was_just_waited_for) {
    setenv("ECLIP_ASK", "never", 1);
    use_plan();
    start();
    again_cells = make_cells(3);
    launched_again = make_stream();
    CHECK(launch(make_add("a"), launched_again, {address(again_cells), 1, 1000}));
    launch_again = [] {
        std::thread([] {
            CHECK(cuCtxSetCurrent(primary));
            CHECK(launch(make_add("a"), launched_again, {address(again_cells + 1), 7, 50000}));
        }).join();
    };
    if (preloaded()) standin_calls(launch_after_wait);
    CHECK(cuCtxSynchronize());
    if (!preloaded()) launch_again();
    CHECK(cuLaunchHostFunc(launched_again, [](void*) { again_cells[2] = again_cells[1]; }, nullptr));
    CHECK(cuStreamSynchronize(launched_again));
    return same("what the host function saw", again_cells[2], uint64_t{7});
}
