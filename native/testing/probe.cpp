// An unmodified program for the tests of `eclip exec` and `eclip record`: a server of small models
// over the driver's interface, and the ways in which programs go wrong.
//
//   probe serve [--requests N] [--workers N] [--graph 1] [--foreign N] [--block N] [--mark 1] [--delay-us N]
//   probe overlap | fork | prefork | exec | orphan | many | join
//
// `join` says how many nanoseconds its first launch took and stays until its input ends.
//
// `serve` has a thread and a stream for each worker. It prints a line per worker: the result, then
// the slices (in hexadecimal) that each kernel of the last request ran on. Models may choose other
// kernels while they are captured: with --foreign a graph has N more after each of its kernels.
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

void launch_request(Model& model, int worker, CUstream stream, long foreign) {
    for (uint64_t position = 0; position < kLength; ++position) {
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

void serve(int worker, long requests, bool graph, long foreign, bool mark, Model& model) {
    CHECK(cuCtxSetCurrent(context));
    // What eclip.request() calls, where libeclip is in the process.
    auto request = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "eclip_request"));
    CUstream stream;
    CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CUgraphExec exec = nullptr;
    if (graph) {
        CUgraph captured;
        CHECK(cuStreamBeginCapture_v2(stream, 2));
        launch_request(model, worker, stream, foreign);
        CHECK(cuStreamEndCapture(stream, &captured));
        CHECK(cuGraphInstantiateWithFlags(&exec, captured, 0));
    }
    for (long index = 0; index < requests; ++index) {
        if (mark && request != nullptr) request(worker);
        if (graph)
            CHECK(cuGraphLaunch(exec, stream));
        else
            launch_request(model, worker, stream, 0);
        CHECK(cuStreamSynchronize(stream));
    }
}

int serve_all(int count, char** words) {
    long workers = option(count, words, "--workers", 1);
    block = static_cast<unsigned>(option(count, words, "--block", block));
    std::vector<Model> models(static_cast<size_t>(workers));
    std::vector<std::thread> threads;
    for (long worker = 0; worker < workers; ++worker) {
        Model& model = models[static_cast<size_t>(worker)];
        model.delay_us = static_cast<uint64_t>(option(count, words, "--delay-us", 0));
        threads.emplace_back(serve, static_cast<int>(worker), option(count, words, "--requests", 10),
                             option(count, words, "--graph", 0) != 0,
                             option(count, words, "--foreign", 0),
                             option(count, words, "--mark", 0) != 0, std::ref(model));
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
int overlap() {
    CUstream streams[2];
    Model models[2];
    auto show = [&](int worker) {
        CHECK(cuStreamSynchronize(streams[worker]));
        for (uint64_t& mask : models[worker].masks) printf("%" PRIx64 " ", mask & 0xffff);
        printf("\n");
    };
    for (CUstream& stream : streams) CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (int worker : {0, 1}) launch_request(models[worker], worker, streams[worker], 0);
    for (int worker : {0, 1}) show(worker);
    for (int worker : {1, 0}) {
        launch_request(models[worker], worker, streams[worker], 0);
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
    if (what == "overlap") return overlap();
    if (what == "fork") return fork_and_serve(count, words);
    if (what == "prefork") return serve_in_child(count, words);
    if (what == "orphan") return leave_capture(count, words);
    if (what == "join") return join();
    if (what == "many") return serve_twice(count, words, words[0]);
    fprintf(stderr, "probe: what?\n");
    return 2;
}
