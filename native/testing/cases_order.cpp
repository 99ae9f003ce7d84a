// Cases of order: between streams, threads and contexts.
#include "cases.h"

#include <random>

using namespace cases;

namespace {

void run_nothing(const uint64_t*) {}
void run_read(const uint64_t* arguments) {
    *reinterpret_cast<uint64_t*>(arguments[1]) = *reinterpret_cast<uint64_t*>(arguments[0]);
}

// The default stream decides while the other thread's copy, on a blocking stream, comes into its
// lane: after the lane was waited for, before that is done.
CUstream copying;
Gate copies, decided, copied;
void meet(const char* call, CUstream stream) {
    if (strcmp(call, "copy") == 0) {
        copies.open = true;
        decided.wait();
    }
    if (strcmp(call, "copied") == 0) copied.open = true;
    if (strcmp(call, "wait_event") == 0 && stream == kLegacyStream && !decided.open) {
        decided.open = true;
        copied.wait();
        usleep(2000);  // so that libeclip has gone on with it
    }
}

// Holds a copy up until something else was called.
Gate other_called;
void hold_copy(const char* call, CUstream) {
    if (strcmp(call, "copy") != 0) return;
    copies.open = true;
    other_called.wait();
}

// While one thread's copy is on its way into its queue, another thread calls something.
template <class Copy, class Call>
void call_meanwhile(Copy&& copy, Call&& call,
                    void (*hold_up)(const char*, CUstream) = hold_copy) {
    if (preloaded()) standin_calls(hold_up);
    std::thread other([&] {
        CHECK(cuCtxSetCurrent(primary));
        if (preloaded()) copies.wait();
        call();
        other_called.open = true;
    });
    copy();
    copied.open = true;
    other.join();
}

}  // namespace

CASE(late_copy_of_a_blocking_stream) {
    setenv("ECLIP_ASK", "never", 1);
    use_plan({{0, 1}, {1, 2}}, {{{"a", 0}}, {{"c", 1}}});
    start();
    CUfunction slow = make_add("a");
    CUfunction nothing = standin_function("c", run_nothing, 0, 1);
    CUfunction read = standin_function("c", run_read, 2, 1);
    constexpr size_t kLong = 1 << 23;  // a copy that takes its time; its last cell is read
    uint64_t* cells = make_cells(2);
    uint64_t* target = make_cells(kLong);
    std::vector<uint64_t> source(kLong, 7);
    copying = make_stream(true);
    CHECK(launch(nothing, nullptr, {}));  // the default stream is on its lane
    CHECK(launch(slow, copying, {address(cells + 1), 1, 1000}));
    if (preloaded()) standin_calls(meet);
    std::thread copier([&] {
        CHECK(cuCtxSetCurrent(primary));
        CHECK(cuMemcpyDtoDAsync_v2(address(target), address(source.data()), 8 * kLong, copying));
    });
    if (preloaded()) copies.wait();
    CHECK(launch(nothing, nullptr, {}));
    copier.join();
    CHECK(launch(read, nullptr, {address(target + kLong - 1), address(cells)}));
    CHECK(cuStreamSynchronize(nullptr));
    return same("what the default stream read", cells[0], uint64_t{7});
}

namespace {

// While one thread's copy is on its way into the stream's queue, another thread does something with
// the same stream. What the first launches then must come after its copy.
template <class Meanwhile>
bool copy_comes_first(CUstream stream, void (*hold_up)(const char*, CUstream),
                      Meanwhile&& meanwhile) {
    CUfunction slow = make_add("a"), read = standin_function("b", run_read, 2, 1);
    constexpr size_t kLong = 1 << 23;
    uint64_t* cells = make_cells(2);
    uint64_t* target = make_cells(kLong);
    std::vector<uint64_t> source(kLong, 7);
    CHECK(launch(slow, stream, {address(cells + 1), 1, 1000}));
    call_meanwhile(
        [&] {
            CHECK(cuMemcpyDtoDAsync_v2(address(target), address(source.data()), 8 * kLong, stream));
        },
        [&] { meanwhile(read, cells); }, hold_up);
    CHECK(launch(read, stream, {address(target + kLong - 1), address(cells)}));
    CHECK(cuStreamSynchronize(stream));
    return same("what the stream read", cells[0], uint64_t{7});
}

bool copy_comes_before_a_launch(bool in_default_stream) {
    setenv("ECLIP_ASK", "never", 1);
    use_plan();
    start();
    CUstream stream = in_default_stream ? nullptr : make_stream();
    return copy_comes_first(stream, hold_copy, [&](CUfunction read, uint64_t* cells) {
        CHECK(launch(read, stream, {address(cells), address(cells + 1)}));
    });
}

// The copy comes after what was waited for, and before the waiting thread goes on.
void hold_both(const char* call, CUstream stream) {
    hold_copy(call, stream);
    if (strcmp(call, "waited") != 0 || other_called.open) return;
    other_called.open = true;
    copied.wait();
}

}  // namespace

CASE(late_copy_of_a_shared_stream) { return copy_comes_before_a_launch(false); }
CASE(late_copy_of_the_default_stream) { return copy_comes_before_a_launch(true); }

CASE(late_copy_of_a_stream_that_was_waited_for) {
    setenv("ECLIP_ASK", "never", 1);
    use_plan();
    start();
    CUstream stream = make_stream();
    return copy_comes_first(stream, hold_copy,
                            [&](CUfunction, uint64_t*) { CHECK(cuStreamSynchronize(stream)); });
}

CASE(late_copy_of_a_stream_that_is_waited_for) {
    setenv("ECLIP_ASK", "never", 1);
    use_plan();
    start();
    CUstream stream = make_stream();
    return copy_comes_first(stream, hold_both,
                            [&](CUfunction, uint64_t*) { CHECK(cuStreamSynchronize(stream)); });
}

// The copy is in a lane that the stream has left, and who waits for the stream waits for it.
CASE(late_copy_on_a_lane_that_was_left) {
    setenv("ECLIP_ASK", "never", 1);
    use_plan();
    start();
    constexpr size_t kLong = 1 << 23;
    uint64_t* cells = make_cells(2);
    uint64_t* target = make_cells(kLong);
    std::vector<uint64_t> source(kLong, 7);
    CUstream stream = make_stream();
    CHECK(launch(make_add("a"), stream, {address(cells), 1, 1000}));
    call_meanwhile(
        [&] {
            CHECK(cuMemcpyDtoDAsync_v2(address(target), address(source.data()), 8 * kLong, stream));
        },
        [&] { CHECK(launch(make_add("b"), stream, {address(cells + 1), 1, 0})); });
    CHECK(cuStreamSynchronize(stream));
    return same("what was copied last", target[kLong - 1], uint64_t{7});
}

// A blocking stream joins the default stream while a copy is on its way there; the next must wait.
CASE(late_copy_of_the_default_stream_before_blocking_ones) {
    setenv("ECLIP_ASK", "never", 1);
    use_plan();
    start();
    constexpr size_t kLong = 1 << 23;
    uint64_t* cells = make_cells(3);
    uint64_t* target = make_cells(kLong);
    std::vector<uint64_t> source(kLong, 7);
    CUfunction read = standin_function("read", run_read, 2, 1);
    CUstream blocking = make_stream(true), other = make_stream(true);
    CHECK(launch(make_add("a"), nullptr, {address(cells + 1), 1, 1000}));
    call_meanwhile(
        [&] {
            CHECK(cuMemcpyDtoDAsync_v2(address(target), address(source.data()), 8 * kLong, nullptr));
        },
        [&] { CHECK(launch(make_add("other"), other, {address(cells + 2), 1, 0})); });
    CHECK(launch(read, blocking, {address(target + kLong - 1), address(cells)}));
    CHECK(cuStreamSynchronize(blocking));
    return same("what the blocking stream read", cells[0], uint64_t{7});
}

namespace {

// A copy comes late into the first lane of the stream, which has gone on to the second. Both are
// done, and libeclip has not been told.
void leave_a_late_copy(CUstream stream) {
    uint64_t* cells = make_cells(4);
    cells[3] = 7;
    CHECK(launch(make_add("a"), stream, {address(cells), 1, 20000}));
    call_meanwhile(
        [&] { CHECK(cuMemcpyDtoDAsync_v2(address(cells + 2), address(cells + 3), 8, stream)); },
        [&] { CHECK(launch(make_add("b"), stream, {address(cells + 1), 1, 0})); });
    wait_for_cell(cells + 1, 1);
    wait_for_cell(cells + 2, 7);
    usleep(1000);
}

}  // namespace

// A lane that a copy came into late may be another's by the time it would be waited for.
CASE(late_copy_on_a_lane_that_was_taken_over) {
    setenv("ECLIP_ASK", "always", 1);
    use_plan();
    start();
    uint64_t* cells = make_cells(1);
    Gate gate;
    CUstream stream = make_stream(), other = make_stream();
    leave_a_late_copy(stream);
    CHECK(launch(standin_function("a", run_gate, 1, 1), other, {address(&gate)}));
    CHECK(launch(make_add("b"), stream, {address(cells), 7, 0}));
    CHECK(cuStreamSynchronize(stream));
    gate.open = true;
    CHECK(cuStreamSynchronize(other));
    return same("the stream's last cell", cells[0], uint64_t{7});
}

// Waiting for it decides for the stream's home, where nothing is called that would wait for others.
CASE(late_copy_that_was_waited_for_before_the_default_stream) {
    setenv("ECLIP_ASK", "always", 1);
    use_plan();
    start();
    uint64_t* cells = make_cells(2);
    CUstream stream = make_stream(true);
    leave_a_late_copy(stream);
    CHECK(launch(make_add("unplanned"), nullptr, {address(cells), 7, 50000}));
    CHECK(cuStreamSynchronize(stream));
    CHECK(launch(standin_function("a", run_read, 2, 1), stream, {address(cells), address(cells + 1)}));
    CHECK(cuStreamSynchronize(stream));
    return same("what the stream read", cells[1], uint64_t{7});
}

// A copy that keeps its thread waiting keeps no other off the stream; the device may wait for one.
CASE(copy_that_waits_for_another_thread) {
    use_plan();
    start();
    uint64_t* cells = make_cells(1);
    uint64_t out;
    Gate gate;
    CUstream stream = make_stream();
    CHECK(cuLaunchHostFunc(stream, wait_at_gate, &gate));
    std::thread copier([&] {
        CHECK(cuCtxSetCurrent(primary));
        CHECK(cuMemcpyDtoHAsync_v2(&out, address(cells), 8, stream));
    });
    usleep(50000);  // it is in its copy, or will be
    CUresult status = cuStreamQuery(stream);
    gate.open = true;
    copier.join();
    return same("whether the stream is done", status, CUDA_ERROR_NOT_READY);
}

CASE(copy_in_the_default_stream_that_waits_for_another_thread) {
    use_plan({{0, 1}, {0, 2}}, {{{"a", 0}, {"b", 1}}});
    start();
    uint64_t* cells = make_cells(2);
    uint64_t out;
    Gate gate;
    CHECK(cuLaunchHostFunc(nullptr, wait_at_gate, &gate));
    std::thread copier([&] {
        CHECK(cuCtxSetCurrent(primary));
        CHECK(cuMemcpyDtoH_v2(&out, address(cells), 8));
    });
    usleep(50000);
    CHECK(launch(make_add("a"), nullptr, {address(cells + 1), 7, 0}));
    CHECK(launch(make_add("a"), make_stream(true), {address(cells + 1), 7, 0}));
    gate.open = true;
    copier.join();
    CHECK(cuCtxSynchronize());
    return same("the cell", cells[1], uint64_t{14});
}

// An event of all work of a context makes no stream wait for another.
CASE(event_of_a_context) {
    use_plan();
    start();
    Gate gate;
    uint64_t* cells = make_cells(1);
    CUstream other = make_stream(), blocking = make_stream(true);
    CUevent event;
    CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    CHECK(launch(standin_function("a", run_gate, 1, 1), other, {address(&gate)}));
    CHECK(cuCtxRecordEvent(primary, event));
    CHECK(launch(make_add("unplanned"), blocking, {address(cells), 1, 0}));
    CHECK(cuStreamSynchronize(blocking));
    static std::atomic<bool> opened{false};
    std::thread opener([&] {
        usleep(20000);
        opened = true;
        gate.open = true;
    });
    CHECK(cuEventSynchronize(event));
    bool after = opened;
    opener.join();
    return same("whether the event was after the lane's kernel", after, true);
}

namespace {

// One thread's part on a stream that all share: each call needs what the one before it left.
void count_on(CUstream stream, unsigned seed, uint64_t* cells, uint64_t rounds) {
    CHECK(cuCtxSetCurrent(primary));
    CUfunction kernels[] = {make_add("a"), make_add("b"), make_add("c")};
    std::minstd_rand random(seed);
    for (uint64_t round = 0; round < rounds; ++round) {
        CHECK(launch(kernels[random() % 3], stream, {address(cells), 1, random() % 8 == 0 ? 50u : 0u}));
        CHECK(cuMemcpyDtoDAsync_v2(address(cells + 1), address(cells), 8, stream));
        CHECK(launch(kernels[random() % 3], stream, {address(cells + 1), 1, 0}));
        if (random() % 16 == 0) CHECK(cuStreamSynchronize(stream));
        if (random() % 8 == 0) {
            uint64_t seen = 0;
            CHECK(cuMemcpyDtoHAsync_v2(&seen, address(cells + 1), 8, stream));
            if (!same("what was copied to the host", seen, cells[1])) _exit(1);
        }
        CHECK(cuMemcpyDtoDAsync_v2(address(cells), address(cells + 1), 8, stream));
    }
}

}  // namespace

CASE(threads_on_one_stream) {
    use_plan({{0, 1}, {0, 2}, {0, 4}}, {{{"a", 0}, {"b", 1}, {"c", 2}}});
    start();
    constexpr int kThreads = 4;
    constexpr uint64_t kRounds = 150;
    for (CUstream stream : {make_stream(), make_stream(true), CUstream{nullptr}}) {
        uint64_t* cells = make_cells(2 * kThreads);
        std::vector<std::thread> threads;
        for (int index = 0; index < kThreads; ++index)
            threads.emplace_back(count_on, stream, index + 1, cells + 2 * index, kRounds);
        for (std::thread& thread : threads) thread.join();
        CHECK(cuStreamSynchronize(stream));
        for (int index = 0; index < kThreads; ++index)
            if (!same("a thread's count", cells[2 * index], 2 * kRounds)) return false;
    }
    return true;
}
