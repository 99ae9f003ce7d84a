// Cases of `eclip record`.
#include "cases.h"

using namespace cases;

namespace {

void use_recording() {
    use_plan({{0, 1}}, {}, Use::record);
    setenv("ECLIP_RECORD", "/dev/null", 1);
}

// What one thread captures must not be broken by what another launches.
template <class Body>
bool ends_well(CUstream captured, int mode, Body&& body) {
    uint64_t* cells = make_cells(1);
    CHECK(cuStreamBeginCapture_v2(captured, mode));
    CHECK(launch(make_add("a"), captured, {address(cells), 1, 0}));
    std::thread([&] {
        CHECK(cuCtxSetCurrent(primary));
        body();
    }).join();
    CUgraph graph;
    return same("how the capture ends", cuStreamEndCapture(captured, &graph), CUDA_SUCCESS);
}

}  // namespace

CASE(recording_of_a_new_stream_while_another_is_captured) {
    use_recording();
    start();
    uint64_t* cells = make_cells(1);
    return ends_well(make_stream(), 0, [&] {
        CHECK(launch(make_add("a"), make_stream(), {address(cells), 1, 0}));
    });
}

CASE(recording_of_many_launches_while_a_blocking_stream_is_captured) {
    use_recording();
    start();
    uint64_t* cells = make_cells(1);
    CUstream blocking = make_stream(true), other = make_stream();
    for (CUstream stream : {blocking, other}) {
        CHECK(launch(make_add("a"), stream, {address(cells), 1, 0}));
        CHECK(cuStreamSynchronize(stream));
    }
    return ends_well(blocking, 1, [&] {
        for (int more = 0; more < 5000; ++more)
            CHECK(launch(make_add("a"), other, {address(cells), 1, 0}));
    });
}

// The recorder's own measuring waits for nothing of the program's.
CASE(recording_of_a_stream_that_waits_for_the_host) {
    use_plan({{0, 0xffff}}, {}, Use::record);
    start();
    uint64_t* cells = make_cells(1);
    Gate gate;
    CUstream stream = make_stream();
    CHECK(cuLaunchHostFunc(stream, wait_at_gate, &gate));
    CHECK(launch(make_add("a"), stream, {address(cells), 7, 0}));
    gate.open = true;
    CHECK(cuStreamSynchronize(stream));
    return same("the cell", cells[0], uint64_t{7});
}

CASE(recording_without_lanes) {
    use_plan({}, {}, Use::record);
    start();
    uint64_t* cells = make_cells(1);
    CUstream stream = make_stream();
    CHECK(launch(make_add("a"), stream, {address(cells), 7, 0}));
    CHECK(cuStreamSynchronize(stream));
    return same("the cell", cells[0], uint64_t{7});
}
