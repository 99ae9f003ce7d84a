// A capped program on the stand-in that changes its cap all the time: two threads that launch, a graph
// that is replayed, and a mark on every slice where a kernel runs, which other processes see.
//
//   moves CHANGES MOST_UNITS SEED MARKS
//
// CHANGES below 0: it changes nothing and runs until it is killed. MARKS is a file of 64 words that all processes map. Results are compared with what the same kernels
// give one after another. Exit status 0: all right; 1: wrong, with a line; 3: it hangs. Prints what
// changes took.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <random>

#include "cases.h"

namespace {

// Of each slice: who runs there, and how many kernels.
struct Marks {
    std::atomic<uint64_t> slice[64];
};
Marks* marks = nullptr;
std::atomic<int> meetings{0};
constexpr uint64_t kCounts = 0xffffffff;

double now_us() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
}

void mark(uint64_t slices, bool enters) {
    const auto mine = static_cast<uint64_t>(getpid()) << 32;
    for (; slices != 0; slices &= slices - 1) {
        auto& word = marks->slice[__builtin_ctzll(slices)];
        uint64_t seen = word.load(), next = 0;
        do {
            const uint64_t count = seen & kCounts;
            if (enters && count != 0 && (seen & ~kCounts) != mine) {
                ++meetings;
                return;
            }
            next = enters ? mine | (count + 1) : mine | (count - 1);
        } while (!word.compare_exchange_weak(seen, next));
    }
}

uint64_t step(uint64_t value, uint64_t salt) { return (value ^ salt) * 0x9e3779b97f4a7c15ull + 1; }

void run_step(const uint64_t* arguments) {
    uint64_t bits[2];
    standin_mask(bits);
    const uint64_t slices = bits[0] & 0xffff;
    mark(slices, true);
    auto cell = reinterpret_cast<uint64_t*>(arguments[0]);
    *cell = step(*cell, arguments[1]);
    mark(slices, false);
}

std::atomic<bool> ended{false};
std::atomic<int> wrong{0};

// Launches in one stream, in order, and looks at the result now and then.
void launch_on(CUfunction kernel, uint64_t* cell) {
    CHECK(cuCtxSetCurrent(cases::primary));
    CUstream stream = cases::make_stream();
    uint64_t expected = *cell, salt = 0;
    while (!ended) {
        for (int launch = 0; launch < 16; ++launch) {
            CHECK(cases::launch(kernel, stream, {cases::address(cell), ++salt}));
            expected = step(expected, salt);
        }
        CHECK(cuStreamSynchronize(stream));
        if (*cell != expected) ++wrong;
    }
}

void replay(CUfunction kernel, uint64_t* cell) {
    CHECK(cuCtxSetCurrent(cases::primary));
    CUstream stream = cases::make_stream();
    CHECK(cuStreamBeginCapture_v2(stream, 1));
    for (uint64_t salt = 1; salt <= 3; ++salt)
        CHECK(cases::launch(kernel, stream, {cases::address(cell), salt}));
    CUgraph graph;
    CUgraphExec exec;
    CHECK(cuStreamEndCapture(stream, &graph));
    CHECK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    uint64_t expected = *cell;
    while (!ended) {
        for (int launch = 0; launch < 4; ++launch) {
            CHECK(cuGraphLaunch(exec, stream));
            for (uint64_t salt = 1; salt <= 3; ++salt) expected = step(expected, salt);
        }
        CHECK(cuStreamSynchronize(stream));
        if (*cell != expected) ++wrong;
    }
}

template <class Function>
Function* find(const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

}  // namespace

int main(int count, char** words) {
    if (count < 5) return 2;
    const int changes = atoi(words[1]), most = atoi(words[2]) / 8;
    std::minstd_rand random(static_cast<unsigned>(atoi(words[3])));
    signal(SIGALRM, [](int) { _exit(3); });
    alarm(550);
    int file = open(words[4], O_RDWR);
    marks = static_cast<Marks*>(mmap(nullptr, sizeof(Marks), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    cases::start();
    CUfunction kernel = standin_function("step", run_step, 2, 1);
    uint64_t* cells = cases::make_cells(3);
    auto ask = find<int(int)>("eclip_sms");
    auto held = find<int()>("eclip_sms_held");
    std::thread threads[] = {std::thread(launch_on, kernel, cells),
                             std::thread(launch_on, kernel, cells + 1),
                             std::thread(replay, kernel, cells + 2)};
    while (held != nullptr && held() == 0) usleep(100);
    std::vector<double> took;
    int late = 0;
    while (changes < 0) usleep(1000);  // until it is killed
    for (int change = 0; change < changes && ask != nullptr; ++change) {
        const int units = 8 * (1 + static_cast<int>(random() % static_cast<unsigned>(most)));
        const double begin = now_us();
        if (ask(units) != 0) ++wrong;
        while (held() != units && now_us() - begin < 60e6) usleep(20);
        if (held() != units) ++late;
        took.push_back(now_us() - begin);
    }
    ended = true;
    for (std::thread& thread : threads) thread.join();
    std::sort(took.begin(), took.end());
    auto at = [&](double part) {
        return took.empty() ? 0.0 : took[static_cast<size_t>(part * static_cast<double>(took.size() - 1))];
    };
    printf("%zu changes, us p50 %.0f p99 %.0f most %.0f, late %d, wrong %d, meetings %d\n", took.size(),
           at(0.5), at(0.99), at(1), late, wrong.load(), meetings.load());
    fflush(stdout);
    _exit(wrong == 0 && meetings == 0 ? 0 : 1);
}

// What cases.cpp has for them.
namespace cases {
CUcontext primary;
void start() {
    CHECK(cuInit(0));
    CHECK(cuDevicePrimaryCtxRetain(&primary, 0));
    CHECK(cuCtxSetCurrent(primary));
    standin_behave(1, 0);
}
CUresult launch(CUfunction function, CUstream stream, std::vector<uint64_t> arguments, unsigned shared) {
    std::vector<void*> pointers;
    for (uint64_t& argument : arguments) pointers.push_back(&argument);
    return cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, shared, stream, pointers.data(), nullptr);
}
CUstream make_stream(bool blocking) {
    CUstream made;
    CHECK(cuStreamCreate(&made, blocking ? 0 : CU_STREAM_NON_BLOCKING));
    return made;
}
uint64_t* make_cells(int count) {
    CUdeviceptr memory;
    CHECK(cuMemAlloc_v2(&memory, static_cast<size_t>(count) * 8));
    return reinterpret_cast<uint64_t*>(memory);
}
}  // namespace cases
