// Single cases of libeclip on HIP: `cases NAME`, with libeclip preloaded or without; `cases --list`.
//
// One worker: kernel "a" on the first slice, "b" on the second. A kernel leaves where it ran.
#include <cstring>
#include <string>

#include "calls.h"
#include "table_file.h"

extern "C" {
void standin_mask(uint64_t bits[2]);
CUresult hipLeapAsync(CUdeviceptr, CUdeviceptr, size_t, CUstream);
}

using namespace fuzz;

namespace {

constexpr uint64_t kWhole = ~uint64_t{0};
uint64_t* cells = nullptr;
CUfunction kernel_a, kernel_b;

void run_where(const uint64_t* arguments) {
    uint64_t bits[2];
    standin_mask(bits);
    *reinterpret_cast<uint64_t*>(arguments[0]) = bits[0];
}

void write_plan(const char* path) {
    testing::TableFile file;
    for (uint32_t value : {0u, 1u, 8u, 0u, 16u, 2u, 1u, 2u, 0u, 0u}) file.put(value);
    for (int slice = 0; slice < 16; ++slice) file.put(slice < 15 ? 8u : 12u);
    for (uint64_t mask : {1, 2}) {
        file.put(int32_t{0});
        file.put(uint32_t{0});
        for (uint64_t word : {mask, uint64_t{0}, uint64_t{0}}) file.put(word);  // the last: priority
    }
    file.put(uint32_t{2});
    int32_t lane = 0;
    for (const char* name : {"a", "b"}) {
        unsigned grid[3] = {1, 1, 1}, block[3] = {32, 1, 1};
        file.put(eclip::identity(eclip::hash_bytes(name, strlen(name)), grid, block));
        file.put(lane++);
        file.put(uint32_t{0});
    }
    file.save(path);
}

void start() {
    char path[] = "/tmp/eclip-case-XXXXXX";
    close(mkstemp(path));
    write_plan(path);
    setenv("ECLIP_TABLE", path, 1);
    describe_device();
    CHECK(hipInit(0));
    CUdeviceptr memory = 0;
    CHECK(hipMalloc(&memory, 16 * sizeof *cells));
    cells = reinterpret_cast<uint64_t*>(memory);
    kernel_a = standin_function("a", run_where, kArguments, 1);
    kernel_b = standin_function("b", run_where, kArguments, 1);
}

bool preloaded() { return dlsym(RTLD_DEFAULT, "eclip_request") != nullptr; }

CUstream make_stream(unsigned flags = CU_STREAM_NON_BLOCKING) {
    CUstream stream = nullptr;
    CHECK(hipStreamCreateWithFlags(&stream, flags));
    return stream;
}

struct Arguments {
    uint64_t values[kArguments];
    void* pointers[kArguments];
    explicit Arguments(int cell) : values{reinterpret_cast<uint64_t>(cells + cell)} {
        for (int index = 0; index < kArguments; ++index) pointers[index] = &values[index];
    }
};

void launch(CUfunction function, int cell, CUstream stream) {
    Arguments given(cell);
    CHECK(hipModuleLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, given.pointers, nullptr));
}

bool ran_on(int cell, uint64_t wanted) {
    if (!preloaded()) wanted = kWhole;
    if (cells[cell] == wanted) return true;
    printf("cell %d is %llx, must be %llx\n", cell, static_cast<unsigned long long>(cells[cell]),
           static_cast<unsigned long long>(wanted));
    return false;
}

bool every_launch_goes_to_its_lane() {
    CUstream stream = make_stream();
    const dim3 grid{1, 1, 1}, block{32, 1, 1};
    void* a = standin_host(kernel_a);
    Arguments at[6] = {Arguments(0), Arguments(1), Arguments(2), Arguments(3), Arguments(4), Arguments(5)};
    CHECK(hipModuleLaunchKernel(kernel_a, 1, 1, 1, 32, 1, 1, 0, stream, at[0].pointers, nullptr));
    CHECK(hipLaunchKernel(a, grid, block, at[1].pointers, 0, stream));
    CHECK(hipLaunchCooperativeKernel(a, grid, block, at[2].pointers, 0, stream));
    CHECK(hipModuleLaunchCooperativeKernel(kernel_a, 1, 1, 1, 32, 1, 1, 0, stream, at[3].pointers));
    CHECK(hipExtLaunchKernel(a, grid, block, at[4].pointers, 0, stream, nullptr, nullptr, 0));
    CHECK(LAUNCH_EXT(kernel_a, 32, 1, 1, 32, 1, 1, 0, stream, at[5].pointers, nullptr, nullptr, nullptr, 0));
    launch(kernel_b, 6, stream);
    CHECK(hipStreamSynchronize(stream));
    for (int cell = 0; cell < 6; ++cell)
        if (!ran_on(cell, 1)) return false;
    return ran_on(6, 2);
}

bool launches_in_a_threads_default_stream() {
    Arguments one(0), other(1);
    void* a = standin_host(kernel_a);
    CHECK(hipLaunchKernel_spt(a, {1, 1, 1}, {32, 1, 1}, one.pointers, 0, nullptr));
    CHECK(hipLaunchKernel(a, {1, 1, 1}, {32, 1, 1}, other.pointers, 0, kThreadStream));
    CHECK(hipStreamSynchronize_spt(nullptr));
    return ran_on(0, 1) && ran_on(1, 1);
}

CUgraphExec capture(CUstream stream, bool branches) {
    CUstream other = make_stream();
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;
    CUevent forked, joined;
    CHECK(hipEventCreateWithFlags(&forked, CU_EVENT_DISABLE_TIMING));
    CHECK(hipEventCreateWithFlags(&joined, CU_EVENT_DISABLE_TIMING));
    CHECK(hipStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    launch(kernel_a, 0, stream);
    if (branches) {
        CHECK(hipEventRecord(forked, stream));
        CHECK(hipStreamWaitEvent(other, forked, 0));
        launch(kernel_b, 2, other);
        CHECK(hipEventRecord(joined, other));
    }
    launch(kernel_a, 1, stream);
    if (branches) CHECK(hipStreamWaitEvent(stream, joined, 0));
    CHECK(hipStreamEndCapture(stream, &graph));
    CHECK(hipGraphInstantiateWithFlags(&exec, graph, 0));
    return exec;
}

bool a_linear_graph_goes_to_its_lane() {
    CUstream stream = make_stream();
    CUgraphExec exec = capture(stream, false);
    CHECK(hipGraphLaunch(exec, stream));
    CHECK(hipStreamSynchronize(stream));
    return ran_on(0, 1) && ran_on(1, 1);
}

bool a_graph_with_branches_stays_at_home() {
    CUstream stream = make_stream();
    CUgraphExec exec = capture(stream, true);
    CHECK(hipGraphLaunch(exec, stream));
    CHECK(hipStreamSynchronize(stream));
    return ran_on(0, kWhole) && ran_on(1, kWhole) && ran_on(2, kWhole);
}

// The copy must find what was written on a lane, and nothing goes there any more.
bool an_unknown_call_ends_planning() {
    CUstream stream = make_stream();
    standin_behave(1, 1);
    launch(kernel_a, 0, stream);
    CHECK(hipLeapAsync(reinterpret_cast<CUdeviceptr>(cells + 1), reinterpret_cast<CUdeviceptr>(cells), 8,
                       stream));
    launch(kernel_a, 2, stream);
    CHECK(hipStreamSynchronize(stream));
    return ran_on(1, 1) && ran_on(2, kWhole);
}

bool symbols_are_found_by_their_versions() {
    void* library = dlopen("libamdhip64.so.5", RTLD_LAZY | RTLD_NOLOAD);
    void* called = dlvsym(library, "hipModuleLaunchKernel", "hip_4.2");
    bool same = called == dlsym(library, "hipModuleLaunchKernel") &&
                called == dlvsym(RTLD_DEFAULT, "hipModuleLaunchKernel", "hip_4.2");
    void* asked = nullptr;
    CHECK(hipGetProcAddress("hipModuleLaunchKernel", &asked, 60100000, 0, nullptr));
    Dl_info where;
    bool ours = dladdr(called, &where) != 0 && strstr(where.dli_fname, "libeclip") != nullptr;
    return same && asked == called && ours == preloaded() &&
           dlvsym(library, "hipModuleLaunchKernel", "hip_9.9") == nullptr &&
           dlvsym(library, "hipLaunchKernel_spt", "hip_5.2") != nullptr &&
           dlvsym(library, "hipLaunchKernel_spt", "hip_4.2") == nullptr &&
           dlvsym(library, "hipNoSuchFunction", "hip_4.2") == nullptr;
}

// A lane waits for the default stream and the default stream for it; a non-blocking stream does not.
bool work_that_waits_for_the_host_stays_off_lanes() {
    CUstream stream = make_stream();
    std::atomic<bool> open{false};
    auto wait = [](void* gate) {
        while (!static_cast<std::atomic<bool>*>(gate)->load()) usleep(50);
    };
    launch(kernel_a, 0, stream);
    CHECK(hipLaunchHostFunc(stream, wait, &open));
    launch(kernel_a, 1, stream);
    uint64_t seen = 0;
    CHECK(hipMemcpyDtoH(&seen, reinterpret_cast<CUdeviceptr>(cells + 2), 8));
    open.store(true);
    // Of all streams: one of libeclip's own sees the end of what waited a moment later than this one.
    CHECK(hipDeviceSynchronize());
    launch(kernel_a, 2, stream);
    CHECK(hipStreamSynchronize(stream));
    return ran_on(0, 1) && ran_on(1, kWhole) && ran_on(2, 1);
}

bool graphs_that_wait_for_the_host_count_too() {
    CUstream stream = make_stream();
    std::atomic<bool> open{false};
    auto wait = [](void* gate) {
        while (!static_cast<std::atomic<bool>*>(gate)->load()) usleep(50);
    };
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;
    CHECK(hipStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    CHECK(hipLaunchHostFunc(stream, wait, &open));
    CHECK(hipStreamEndCapture(stream, &graph));
    CHECK(hipGraphInstantiateWithFlags(&exec, graph, 0));
    launch(kernel_a, 0, stream);
    CHECK(hipGraphLaunch(exec, stream));
    launch(kernel_a, 1, stream);
    uint64_t seen = 0;
    CHECK(hipMemcpyDtoH(&seen, reinterpret_cast<CUdeviceptr>(cells + 2), 8));
    open.store(true);
    CHECK(hipStreamSynchronize(stream));
    return ran_on(0, 1) && ran_on(1, kWhole);
}

bool events_of_a_launch_are_where_it_ran() {
    CUstream stream = make_stream(), other = make_stream();
    CUevent stop;
    Arguments first(0);
    CHECK(hipEventCreateWithFlags(&stop, 0));
    standin_behave(1, 1);
    CHECK(hipExtLaunchKernel(standin_host(kernel_a), {1, 1, 1}, {32, 1, 1}, first.pointers, 0, stream,
                             nullptr, stop, 0));
    CHECK(hipStreamWaitEvent(other, stop, 0));
    CHECK(hipMemcpyDtoDAsync(reinterpret_cast<CUdeviceptr>(cells + 1),
                             reinterpret_cast<CUdeviceptr>(cells), 8, other));
    CHECK(hipStreamSynchronize(other));
    return ran_on(1, 1);
}

// One error is the program's, the others are none of its business.
bool a_lanes_refusal_is_no_error_of_the_program() {
    CUstream stream = make_stream();
    standin_refuse(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
    launch(kernel_a, 0, stream);
    standin_refuse(CUDA_SUCCESS);
    if (hipGetLastError() != CUDA_SUCCESS) return false;
    CHECK(hipStreamSynchronize(stream));
    return hipGetLastError() == CUDA_SUCCESS && ran_on(0, kWhole);
}

bool another_device_runs_unplanned() {
    setenv("ECLIP_KFD_NODES", "/nowhere", 1);
    CUstream stream = make_stream();
    launch(kernel_a, 0, stream);
    CHECK(hipStreamSynchronize(stream));
    return ran_on(0, kWhole);
}

struct Case {
    const char* name;
    bool (*run)();
};
#define CASE(name) {#name, name}
const Case all[] = {
    CASE(every_launch_goes_to_its_lane),
    CASE(launches_in_a_threads_default_stream),
    CASE(a_linear_graph_goes_to_its_lane),
    CASE(a_graph_with_branches_stays_at_home),
    CASE(an_unknown_call_ends_planning),
    CASE(symbols_are_found_by_their_versions),
    CASE(work_that_waits_for_the_host_stays_off_lanes),
    CASE(graphs_that_wait_for_the_host_count_too),
    CASE(events_of_a_launch_are_where_it_ran),
    CASE(a_lanes_refusal_is_no_error_of_the_program),
    CASE(another_device_runs_unplanned),
};

}  // namespace

int main(int count, char** words) {
    for (const Case& one : all) {
        if (count > 1 && strcmp(words[1], "--list") == 0) puts(one.name);
        if (count < 2 || strcmp(words[1], one.name) != 0) continue;
        start();
        alarm(20);
        bool well = one.run();
        unlink(getenv("ECLIP_TABLE"));
        if (strcmp(getenv("ECLIP_KFD_NODES"), "/nowhere") != 0) forget_device();
        fflush(stdout);
        _exit(well ? 0 : 1);  // the stand-in's threads never end
    }
    return count > 1 ? 0 : 2;
}
