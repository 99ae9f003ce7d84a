// Programs that were once harmed by libeclip, one for each way:
//
//   cases NAME          exit status 0: right; 1: wrong, with a line; 3: it hangs
//   cases --list
#include "cases.h"

#include <csignal>

#include "table_file.h"

namespace cases {

CUcontext primary;

Case*& Case::first() {
    static Case* head = nullptr;
    return head;
}

void use_plan(const std::vector<PlannedLane>& lanes,
              const std::vector<std::vector<Planned>>& workers, Use use) {
    testing::TableFile file;
    uint32_t kernels = 0;
    for (const auto& trace : workers) kernels += static_cast<uint32_t>(trace.size());
    for (uint32_t value : {static_cast<uint32_t>(use), 1u, 8u, 0u, 16u,
                           static_cast<uint32_t>(lanes.size()),
                           static_cast<uint32_t>(workers.size()), kernels, 0u, 0u})
        file.put(value);
    for (int slice = 0; slice < 16; ++slice) file.put(slice < 15 ? 8u : 12u);
    for (const PlannedLane& lane : lanes) {
        file.put(lane.worker);
        file.put(uint32_t{lane.mask == 0xffff});
        file.put(lane.mask);
        file.put(uint64_t{0});
        file.put(lane.priority);
        file.put(uint32_t{0});
    }
    for (const auto& trace : workers) file.put(static_cast<uint32_t>(trace.size()));
    const unsigned one[3] = {1, 1, 1};
    for (const auto& trace : workers)
        for (const Planned& step : trace) {
            file.put(eclip::identity(eclip::hash_bytes(step.kernel, strlen(step.kernel)), one, one));
            file.put(step.lane);
            file.put(uint32_t{0});
        }
    static char path[] = "/tmp/eclip-case-XXXXXX";
    close(mkstemp(path));
    file.save(path);
    setenv("ECLIP_TABLE", path, 1);
    atexit([] { unlink(path); });
}

namespace {

void use_own_board() {
    static char path[] = "/tmp/eclip-case-XXXXXX";
    [[maybe_unused]] const char* folder = mkdtemp(path);
    setenv("ECLIP_BOARD", path, 1);
    atexit([] {
        unlink((std::string(path) + "/eclip-board-" + std::to_string(geteuid()) +
                "-GPU-00010203-0405-0607-0809-0a0b0c0d0e0f").c_str());
        rmdir(path);
    });
}

}  // namespace

void use_background(const char* kernel_us) {
    use_own_board();
    setenv("ECLIP_TIER", "background", 1);
    setenv("ECLIP_KERNEL_US", kernel_us, 1);
}

void use_cap(const char* units) {
    use_own_board();
    setenv("ECLIP_SMS", units, 1);
}

void use_plan() { use_plan({{0, 1}, {0, 2}}, {{{"a", 0}, {"b", 1}}}); }

void start() {
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&primary, 0));
    CHECK(cuCtxSetCurrent(primary));
    standin_behave(1, 0);
}

CUresult launch(CUfunction function, CUstream stream, std::vector<uint64_t> arguments,
                unsigned shared) {
    std::vector<void*> pointers;
    for (uint64_t& argument : arguments) pointers.push_back(&argument);
    return cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, shared, stream, pointers.data(), nullptr);
}

CUcontext second_device() {
    CUcontext made;
    CHECK(cuDevicePrimaryCtxRetain(&made, 1));
    CHECK(cuCtxSetCurrent(made));
    return made;
}

CUcontext private_context(CUdevice device) {
    CUcontext made;
    CHECK(cuCtxCreate_v2(&made, 0, device));
    return made;
}

CUstream make_stream(bool blocking) {
    CUstream made;
    CHECK(cuStreamCreate(&made, blocking ? 0 : CU_STREAM_NON_BLOCKING));
    return made;
}

void run_add(const uint64_t* arguments) {
    usleep(static_cast<useconds_t>(arguments[2]));
    *reinterpret_cast<uint64_t*>(arguments[0]) += arguments[1];
}

CUfunction make_add(const char* name) { return standin_function(name, run_add, 3, 1); }

uint64_t* make_cells(int count) {
    CUdeviceptr memory;
    CHECK(cuMemAlloc_v2(&memory, static_cast<size_t>(count) * 8));
    return reinterpret_cast<uint64_t*>(memory);
}

void wait_for_cell(const uint64_t* cell, uint64_t wanted) {
    while (reinterpret_cast<const std::atomic<uint64_t>*>(cell)->load() != wanted) usleep(50);
}

void run_where(const uint64_t* arguments) {
    uint64_t bits[2];
    standin_mask(bits);
    *reinterpret_cast<uint64_t*>(arguments[0]) = bits[0];
}

bool preloaded() { return dlsym(RTLD_DEFAULT, "eclip_request") != nullptr; }

void wait_at_gate(void* gate) { static_cast<Gate*>(gate)->wait(); }
void run_gate(const uint64_t* arguments) { wait_at_gate(reinterpret_cast<void*>(arguments[0])); }

}  // namespace cases

int main(int count, char** words) {
    std::string wanted = count > 1 ? words[1] : "";
    signal(SIGALRM, [](int) {
        [[maybe_unused]] ssize_t written = write(STDOUT_FILENO, "hangs\n", 6);
        _exit(3);
    });
    alarm(60);
    for (cases::Case* one = cases::Case::first(); one != nullptr; one = one->next) {
        if (wanted == "--list") puts(one->name);
        if (wanted != one->name) continue;
        bool right = one->run();
        puts(right ? "right" : "wrong");
        return right ? 0 : 1;
    }
    return wanted == "--list" ? 0 : 2;
}
