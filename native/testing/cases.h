// What the cases share: the driver's interface, small plans, kernels and gates.
//
// A case is a program by itself that passes on the stand-in and must pass with libeclip preloaded.
#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "../cuda_abi.h"

extern "C" {
CUfunction standin_function(const char*, void (*)(const uint64_t*), int, int);
void standin_behave(unsigned seed, int lazy);
int standin_priority();  // of the calling kernel
void standin_mask(uint64_t bits[2]);
int standin_sync_mode();
int standin_retains();
void standin_refuse(CUresult status);
void standin_calls(void (*seen)(const char* call, CUstream stream));

void standin_watch(int64_t* words);

CUresult cuInit(unsigned);
CUresult cuDevicePrimaryCtxRetain(CUcontext*, CUdevice);
CUresult cuCtxCreate_v2(CUcontext*, unsigned, CUdevice);
CUresult cuMemcpyPeer(CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, size_t);
CUresult cuCtxRecordEvent(CUcontext, CUevent);
CUresult cuCtxDestroy_v2(CUcontext);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuCtxSynchronize();
CUresult cuMemAlloc_v2(CUdeviceptr*, size_t);
CUresult cuMemFree_v2(CUdeviceptr);
CUresult cuStreamCreate(CUstream*, unsigned);
CUresult cuStreamDestroy_v2(CUstream);
CUresult cuStreamSynchronize(CUstream);
CUresult cuStreamQuery(CUstream);
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        unsigned, CUstream, void**, void**);
CUresult cuLaunchKernelEx(const CUlaunchConfig*, CUfunction, void**, void**);
CUresult cuLaunchHostFunc(CUstream, void (*)(void*), void*);
CUresult cuEventCreate(CUevent*, unsigned);
CUresult cuEventRecord(CUevent, CUstream);
CUresult cuEventSynchronize(CUevent);
CUresult cuEventQuery(CUevent);
CUresult cuEventDestroy_v2(CUevent);
CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned);
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, size_t, CUstream);
CUresult cuMemcpyDtoHAsync_v2(void*, CUdeviceptr, size_t, CUstream);
CUresult cuMemcpyDtoH_v2(void*, CUdeviceptr, size_t);
CUresult cuMemsetD32Async(CUdeviceptr, unsigned, size_t, CUstream);
CUresult cuStreamBeginCapture_v2(CUstream, int);
CUresult cuStreamEndCapture(CUstream, CUgraph*);
CUresult cuGraphInstantiateWithFlags(CUgraphExec*, CUgraph, unsigned long long);
CUresult cuGraphExecDestroy(CUgraphExec);
CUresult cuGraphCreate(CUgraph*, unsigned);
CUresult cuGraphAddKernelNode_v2(CUgraphNode*, CUgraph, const CUgraphNode*, size_t,
                                 const KernelNodeParams*);
CUresult cuGraphAddChildGraphNode(CUgraphNode*, CUgraph, const CUgraphNode*, size_t, CUgraph);
CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode, CUgraph*);
CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec, CUgraphNode, CUgraph);
CUresult cuGraphAddDependencies_v2(CUgraph, const CUgraphNode*, const CUgraphNode*,
                                   const CUgraphEdgeData*, size_t);
CUresult cuGraphAddEventRecordNode(CUgraphNode*, CUgraph, const CUgraphNode*, size_t, CUevent);
CUresult cuGraphLaunch(CUgraphExec, CUstream);
CUresult cuGraphGetNodes(CUgraph, CUgraphNode*, size_t*);
CUresult cuGraphExecHostNodeSetParams(CUgraphExec, CUgraphNode, const void*);
CUresult cuGraphNodeGetEnabled(CUgraphExec, CUgraphNode, unsigned*);
CUresult cuGraphNodeSetEnabled(CUgraphExec, CUgraphNode, unsigned);
CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec, CUgraphNode, const KernelNodeParams*);
CUresult cuGraphExecUpdate_v2(CUgraphExec, CUgraph, GraphExecUpdateResultInfo*);
CUresult cuMemcpyWithAttributesAsync(CUdeviceptr, CUdeviceptr, size_t, void*, CUstream);
CUresult cuGetProcAddress_v2(const char*, void**, int, uint64_t, int*);
}

namespace cases {

inline void check(CUresult status, const char* what) {
    if (status == CUDA_SUCCESS) return;
    printf("%s returned %d\n", what, status);
    fflush(stdout);
    _exit(1);
}
#define CHECK(call) cases::check(call, #call)

// A case by its name; it says whether all went well.
struct Case {
    const char* name;
    bool (*run)();
    Case* next;
    static Case*& first();
    Case(const char* name, bool (*run)()) : name(name), run(run), next(first()) { first() = this; }
};
#define CASE(name)                                         \
    static bool name##_case();                             \
    static cases::Case name##_entry(#name, name##_case);   \
    static bool name##_case()

template <class T>
bool same(const char* what, T found, T wanted) {
    if (found == wanted) return true;
    printf("%s is %llu, must be %llu\n", what, static_cast<unsigned long long>(found),
           static_cast<unsigned long long>(wanted));
    return false;
}

// Kernels of one block each, in launch order, and the lane of each.
struct Planned {
    const char* kernel;
    uint32_t lane;
};
struct PlannedLane {
    uint32_t worker;
    uint64_t mask;  // 0xffff: of the whole device
    int32_t priority = 0;
};
enum class Use : uint32_t { plan = 0, record = 1 };

// A cap of so many units, on a board of the case's own.
void use_cap(const char* units);
// Background beside nobody: without a plan graphs are cut, as if a kernel took that long.
void use_background(const char* kernel_us);
// Launches of graphs that the driver sees from now on; those of parts count.
class GraphLaunches {
public:
    GraphLaunches() { standin_watch(words_); }
    uint64_t count() const { return static_cast<uint64_t>(words_[0]); }

private:
    int64_t words_[2] = {0, 0};  // room for no line: they are only counted
};

// The plan that libeclip will work from, if it is there; before the first call of the driver.
void use_plan(const std::vector<PlannedLane>& lanes,
              const std::vector<std::vector<Planned>>& workers, Use use = Use::plan);
// One worker: kernel "a" on the first slice, "b" on the second.
void use_plan();

extern CUcontext primary;
void start();  // the primary context of the first device is made and current, work begins at once

CUresult launch(CUfunction function, CUstream stream, std::vector<uint64_t> arguments,
                unsigned shared = 0);
CUcontext second_device();  // its primary context, and now current
CUcontext private_context(CUdevice device);  // likewise, of the program's own
CUstream make_stream(bool blocking = false);

// Kernels. `add`: *a[0] += a[1] after a[2] microseconds.
void run_add(const uint64_t* arguments);
CUfunction make_add(const char* name);
void run_where(const uint64_t* arguments);  // *a[0] = the slices it runs on
constexpr uint64_t kWhole = ~uint64_t{0};    // device
bool preloaded();                            // libeclip is here
uint64_t* make_cells(int count);
void wait_for_cell(const uint64_t* cell, uint64_t wanted);  // without telling the driver
inline uint64_t address(const void* at) { return reinterpret_cast<uint64_t>(at); }

struct Gate {
    std::atomic<bool> open{false};
    void wait() const {
        while (!open.load()) usleep(50);
    }
};
void wait_at_gate(void* gate);              // as a host function
void run_gate(const uint64_t* arguments);   // as a kernel

}  // namespace cases
