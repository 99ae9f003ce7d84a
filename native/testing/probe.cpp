// An unmodified program for the tests of `eclip exec` and `eclip record`: a server of small models
// over the driver's interface, and the ways in which programs go wrong.
//
//   probe serve [--requests N] [--workers N] [--graph 1] [--child 1] [--foreign N] [--block N] [--mark 1]
//               [--delay-us N] [--event 1]
//   probe overlap [--graph 1] | fork | prefork | exec | orphan | many | join
//
// `join` says how many nanoseconds its first launch took and stays until its input ends.
//
// `serve` has a thread and a stream for each worker. It prints a line per worker: the result, then
// the slices (in hexadecimal) that each kernel of the last request ran on. Models may choose other
// kernels while they are captured: with --foreign a graph has N more after each of its kernels. With
// --child the graph's second half is a child graph of it. With --event requests are waited for by events.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <thread>
#include <vector>

#include "../cuda_abi.h"

extern "C" {
CUfunction standin_function(const char*, void (*)(const uint64_t*), int, int);
void standin_behave(unsigned seed, int lazy);
void standin_mask(uint64_t bits[2]);
CUresult cuInit(unsigned);
CUresult cuDevicePrimaryCtxRetain(CUcontext*, CUdevice);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuCtxSynchronize();
CUresult cuStreamCreate(CUstream*, unsigned);
CUresult cuStreamSynchronize(CUstream);
CUresult cuStreamBeginCapture_v2(CUstream, int);
CUresult cuStreamEndCapture(CUstream, CUgraph*);
CUresult cuGraphInstantiateWithFlags(CUgraphExec*, CUgraph, unsigned long long);
CUresult cuGraphLaunch(CUgraphExec, CUstream);
CUresult cuGraphCreate(CUgraph*, unsigned);
CUresult cuGraphAddChildGraphNode(CUgraphNode*, CUgraph, const CUgraphNode*, size_t, CUgraph);
CUresult cuEventCreate(CUevent*, unsigned);
CUresult cuEventRecord(CUevent, CUstream);
CUresult cuEventSynchronize(CUevent);
CUresult cuGetProcAddress_v2(const char*, void**, int, uint64_t, int*);
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        unsigned, CUstream, void**, void**);
}

namespace {

constexpr int kLength = 24;  // kernels of a request
constexpr int kFunctions = 5;
const char* const kNames[kFunctions] = {"conv", "gemm", "norm", "relu", "pool"};
CUfunction functions[kFunctions], foreign_function;
CUcontext context;
unsigned block = 128;  // of every kernel

void check(CUresult status, const char* what) {
    if (status == CUDA_SUCCESS) return;
    fprintf(stderr, "%s returned %d\n", what, status);
    exit(1);
}
#define CHECK(call) check(call, #call)

struct Model {
    uint64_t value = 0;
    uint64_t masks[kLength] = {};
    uint64_t delay_us = 0;
};

// Each kernel needs the one before it: what comes out depends on their order.
void run(const uint64_t* arguments) {
    auto model = reinterpret_cast<Model*>(arguments[0]);
    uint64_t before = model->value;
    if (model->delay_us > 0) usleep(static_cast<useconds_t>(model->delay_us));
    uint64_t bits[2];
    standin_mask(bits);
    model->masks[arguments[1]] = bits[0];
    model->value = before * 6364136223846793005ull + arguments[1] + 1;
}

void run_foreign(const uint64_t* arguments) {
    reinterpret_cast<Model*>(arguments[0])->value += arguments[1];
}

void launch_request(Model& model, int worker, CUstream stream, long foreign, uint64_t from = 0,
                    uint64_t to = kLength) {
    for (uint64_t position = from; position < to; ++position) {
        auto address = reinterpret_cast<uint64_t>(&model);
        void* params[2] = {&address, &position};
        unsigned grid = 1 + static_cast<unsigned>((position * 7 + static_cast<uint64_t>(worker)) % 4);
        CUfunction function = functions[(position + static_cast<uint64_t>(worker)) % kFunctions];
        CHECK(cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, stream, params, nullptr));
        for (long more = 0; more < foreign; ++more)
            CHECK(cuLaunchKernel(foreign_function, 9, 1, 1, 64, 1, 1, 0, stream, params, nullptr));
    }
}

long option(int count, char** words, const char* name, long otherwise) {
    for (int index = 2; index + 1 < count; ++index)
        if (strcmp(words[index], name) == 0) return atol(words[index + 1]);
    return otherwise;
}

CUgraph capture(Model& model, int worker, CUstream stream, long foreign, uint64_t from, uint64_t to) {
    CUgraph captured;
    CHECK(cuStreamBeginCapture_v2(stream, 2));
    launch_request(model, worker, stream, foreign, from, to);
    CHECK(cuStreamEndCapture(stream, &captured));
    return captured;
}

CUgraphExec make_graph(Model& model, int worker, CUstream stream, long foreign, bool child) {
    CUgraph captured;
    if (child) {
        CUgraphNode first, second;
        CHECK(cuGraphCreate(&captured, 0));
        CUgraph halves[2] = {capture(model, worker, stream, foreign, 0, kLength / 2),
                             capture(model, worker, stream, foreign, kLength / 2, kLength)};
        CHECK(cuGraphAddChildGraphNode(&first, captured, nullptr, 0, halves[0]));
        CHECK(cuGraphAddChildGraphNode(&second, captured, &first, 1, halves[1]));
    } else {
        captured = capture(model, worker, stream, foreign, 0, kLength);
    }
    CUgraphExec exec;
    CHECK(cuGraphInstantiateWithFlags(&exec, captured, 0));
    return exec;
}

struct Serving {
    long requests, foreign;
    bool graph, child, mark, event;
};

void serve(int worker, const Serving& wanted, Model& model) {
    CHECK(cuCtxSetCurrent(context));
    // What eclip.request() calls, where libeclip is in the process.
    auto request = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "eclip_request"));
    CUstream stream;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CUgraphExec exec = nullptr;
    CUevent event;
    CHECK(cuEventCreate(&event, 2));
    if (wanted.graph) exec = make_graph(model, worker, stream, wanted.foreign, wanted.child);
    for (long index = 0; index < wanted.requests; ++index) {
        if (wanted.mark && request != nullptr) request(worker);
        if (wanted.graph)
            CHECK(cuGraphLaunch(exec, stream));
        else
            launch_request(model, worker, stream, 0);
        if (wanted.event) {
            CHECK(cuEventRecord(event, stream));
            CHECK(cuEventSynchronize(event));
        } else {
            CHECK(cuStreamSynchronize(stream));
        }
    }
}

int serve_all(int count, char** words) {
    long workers = option(count, words, "--workers", 1);
    block = static_cast<unsigned>(option(count, words, "--block", block));
    const Serving wanted{option(count, words, "--requests", 10),
                         option(count, words, "--foreign", 0),
                         option(count, words, "--graph", 0) != 0,
                         option(count, words, "--child", 0) != 0,
                         option(count, words, "--mark", 0) != 0,
                         option(count, words, "--event", 0) != 0};
    std::vector<Model> models(static_cast<size_t>(workers));
    std::vector<std::thread> threads;
    for (long worker = 0; worker < workers; ++worker) {
        Model& model = models[static_cast<size_t>(worker)];
        model.delay_us = static_cast<uint64_t>(option(count, words, "--delay-us", 0));
        threads.emplace_back(serve, static_cast<int>(worker), wanted, std::ref(model));
        // So that workers are met in their order.
        if (option(count, words, "--together", 0) == 0) threads.back().join();
    }
    for (std::thread& thread : threads)
        if (thread.joinable()) thread.join();
    for (const Model& model : models) {
        printf("%016" PRIx64, model.value);
        for (uint64_t mask : model.masks) printf(" %" PRIx64, mask & 0xffff);
        printf("\n");
    }
    return 0;
}

// Requests of two workers: the second's begins before the first's is waited for, and again after;
// last, the first's. A line each.
int overlap(bool graph) {
    CUstream streams[2];
    CUgraphExec execs[2];
    Model models[2];
    auto begin = [&](int worker) {
        if (graph)
            CHECK(cuGraphLaunch(execs[worker], streams[worker]));
        else
            launch_request(models[worker], worker, streams[worker], 0);
    };
    auto show = [&](int worker) {
        CHECK(cuStreamSynchronize(streams[worker]));
        for (uint64_t& mask : models[worker].masks) printf("%" PRIx64 " ", mask & 0xffff);
        printf("\n");
    };
    for (CUstream& stream : streams) CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (int worker : {0, 1})
        if (graph) execs[worker] = make_graph(models[worker], worker, streams[worker], 0, false);
    for (int worker : {0, 1}) begin(worker);
    for (int worker : {0, 1}) show(worker);
    for (int worker : {1, 0}) {
        begin(worker);
        show(worker);
    }
    return 0;
}

// The parent uses the device, forks, and goes on; the child must not be harmed by what it inherits.
int fork_and_serve(int count, char** words) {
    serve_all(count, words);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) _exit(cuCtxSynchronize() == CUDA_SUCCESS ? 7 : 8);
    int status = 0;
    waitpid(child, &status, 0);
    printf("child %d\n", WEXITSTATUS(status));
    return serve_all(count, words);
}

// Servers that fork before they use the device: the parent has only looked for the driver.
int serve_in_child(int count, char** words) {
    void* found = nullptr;
    CHECK(cuGetProcAddress_v2("cuLaunchKernel", &found, 12000, 0, nullptr));
    if (fork() == 0) {
        serve_all(count, words);
        fflush(stdout);
        _exit(0);
    }
    int status = 0;
    wait(&status);
    return WEXITSTATUS(status);
}

// A thread that begins a capture and ends without ending it.
int leave_capture(int count, char** words) {
    serve_all(count, words);
    std::thread([] {
        CHECK(cuCtxSetCurrent(context));
        CUstream stream;
        CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        CHECK(cuStreamBeginCapture_v2(stream, 1));
    }).join();
    return serve_all(count, words);
}

// Two processes at once: only one may have the lanes.
int serve_twice(int count, char** words, const char* self) {
    serve_all(count, words);
    fflush(stdout);
    if (fork() == 0) {
        execl(self, self, "serve", nullptr);
        _exit(9);
    }
    int status = 0;
    wait(&status);
    return WEXITSTATUS(status);
}

// One of many processes that begin to use the device at once.
int join() {
    Model model;
    timespec before, after;
    clock_gettime(CLOCK_MONOTONIC, &before);
    launch_request(model, 0, nullptr, 0);
    clock_gettime(CLOCK_MONOTONIC, &after);
    printf("%ld\n", (after.tv_sec - before.tv_sec) * 1000000000L + after.tv_nsec - before.tv_nsec);
    fflush(stdout);
    CHECK(cuCtxSynchronize());
    return getchar() == EOF ? 0 : 1;
}

}  // namespace

int main(int count, char** words) {
    std::string what = count > 1 ? words[1] : "";
    if (what == "exec") {  // into itself, before anything was done
        words[1] = const_cast<char*>("serve");
        execv(words[0], words);
        return 9;
    }
    CHECK(cuInit(0));
    for (int index = 0; index < kFunctions; ++index)
        functions[index] = standin_function(kNames[index], run, 2, 1);
    foreign_function = standin_function("mask", run_foreign, 2, 1);
    CHECK(cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cuCtxSetCurrent(context));
    if (what == "serve") return serve_all(count, words);
    if (what == "overlap") return overlap(option(count, words, "--graph", 0) != 0);
    if (what == "fork") return fork_and_serve(count, words);
    if (what == "prefork") return serve_in_child(count, words);
    if (what == "orphan") return leave_capture(count, words);
    if (what == "join") return join();
    if (what == "many") return serve_twice(count, words, words[0]);
    fprintf(stderr, "probe: what?\n");
    return 2;
}
