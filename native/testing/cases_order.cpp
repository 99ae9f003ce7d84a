// Cases of order: between streams, threads and contexts.
#include "cases.h"

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
    if (strcmp(call, "wait_event") == 0 && stream == kLegacyStream && !decided.open) {
        decided.open = true;
        copied.wait();
    }
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
        copied.open = true;
    });
    if (preloaded()) copies.wait();
    CHECK(launch(nothing, nullptr, {}));
    copier.join();
    CHECK(launch(read, nullptr, {address(target + kLong - 1), address(cells)}));
    CHECK(cuStreamSynchronize(nullptr));
    return same("what the default stream read", cells[0], uint64_t{7});
}
