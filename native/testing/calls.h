// The driver's interface as the random programs call it, and the kernels they launch.
#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>

#include "../cuda_abi.h"
#include "program.h"

extern "C" {
CUfunction standin_function(const char*, void (*)(const uint64_t*), int, int);
void standin_behave(unsigned seed, int lazy);
void standin_refuse(CUresult status);
}

namespace fuzz {

using Random = std::minstd_rand;

inline uint64_t mix(int kernel, uint64_t left, uint64_t right, uint64_t salt) {
    uint64_t value = (left + 0x9e3779b97f4a7c15ull) * (2 * static_cast<uint64_t>(kernel) + 3);
    value ^= (right + salt) * 0xff51afd7ed558ccdull;
    return value ^ value >> 29;
}

// A kernel: reads two cells, takes its time, writes a third.
constexpr int kArguments = 4;
template <int K>
void kernel(const uint64_t* a) {
    auto cell = [](uint64_t address) { return reinterpret_cast<uint64_t*>(address); };
    uint64_t left = *cell(a[1]), right = *cell(a[2]);
    for (uint64_t spin = 0; spin < (a[3] & 63); ++spin) asm volatile("" ::: "memory");
    if ((a[3] & 15) == 0) std::this_thread::yield();
    *cell(a[0]) = mix(K, left, right, a[3]);
}

inline const char* const kNames[kKernels] = {"gemm", "conv", "relu", "add", "norm", "pool", "copy", "cat"};
inline CUfunction functions[kKernels];

template <int... K>
void make_functions(std::integer_sequence<int, K...>) {
    ((functions[K] = standin_function(kNames[K], kernel<K>, kArguments, K != 5)), ...);
}

#ifdef FUZZ_HIP
}  // namespace fuzz
#include "hip_calls.h"
namespace fuzz {
#else
constexpr bool kHasContexts = true;  // of a program's own
inline void describe_device() {}
inline void forget_device() {}

// The interface, found in each of the ways in which programs find it.
struct Api {
#define CALLS(CALL)                                                                               \
    CALL(cuLaunchKernel, 4000, CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned,      \
         unsigned, unsigned, CUstream, void**, void**)                                            \
    CALL(cuLaunchKernelEx, 11060, const CUlaunchConfig*, CUfunction, void**, void**)              \
    CALL(cuStreamWaitEvent, 3020, CUstream, CUevent, unsigned)                                    \
    CALL(cuEventRecord, 2000, CUevent, CUstream)                                                  \
    CALL(cuStreamSynchronize, 2000, CUstream)                                                     \
    CALL(cuStreamQuery, 2000, CUstream)                                                           \
    CALL(cuLaunchHostFunc, 10000, CUstream, void (*)(void*), void*)                               \
    CALL(cuGraphLaunch, 10000, CUgraphExec, CUstream)                                             \
    CALL(cuMemsetD32Async, 3020, CUdeviceptr, unsigned, size_t, CUstream)
#define MEMBER(name, version, ...)                           \
    CUresult (*name)(__VA_ARGS__) = nullptr; /* legacy */    \
    CUresult (*name##_ptsz)(__VA_ARGS__) = nullptr;
    CALLS(MEMBER)
};

extern "C" {
#define DECLARE(name, version, ...)  \
    CUresult name(__VA_ARGS__);      \
    CUresult name##_ptsz(__VA_ARGS__);
CALLS(DECLARE)
CUresult cuInit(unsigned);
CUresult cuDevicePrimaryCtxRetain(CUcontext*, CUdevice);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuCtxCreate_v2(CUcontext*, unsigned, CUdevice);
CUresult cuCtxDestroy_v2(CUcontext);
CUresult cuCtxRecordEvent(CUcontext, CUevent);
CUresult cuCtxSynchronize();
CUresult cuMemAllocHost_v2(void**, size_t);
CUresult cuMemFreeHost(void*);
CUresult cuMemcpyPeer(CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, size_t);
CUresult cuMemAlloc_v2(CUdeviceptr*, size_t);
CUresult cuMemFree_v2(CUdeviceptr);
CUresult cuMemcpyDtoH_v2(void*, CUdeviceptr, size_t);
CUresult cuMemcpyDtoHAsync_v2(void*, CUdeviceptr, size_t, CUstream);
CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, size_t, CUstream);
CUresult cuStreamCreate(CUstream*, unsigned);
CUresult cuStreamDestroy_v2(CUstream);
CUresult cuEventCreate(CUevent*, unsigned);
CUresult cuEventDestroy_v2(CUevent);
CUresult cuEventQuery(CUevent);
CUresult cuEventSynchronize(CUevent);
CUresult cuStreamBeginCapture_v2(CUstream, int);
CUresult cuStreamEndCapture(CUstream, CUgraph*);
CUresult cuGraphCreate(CUgraph*, unsigned);
CUresult cuGraphDestroy(CUgraph);
CUresult cuGraphAddKernelNode_v2(CUgraphNode*, CUgraph, const CUgraphNode*, size_t,
                                 const KernelNodeParams*);
CUresult cuGraphAddEmptyNode(CUgraphNode*, CUgraph, const CUgraphNode*, size_t);
CUresult cuGraphAddChildGraphNode(CUgraphNode*, CUgraph, const CUgraphNode*, size_t, CUgraph);
CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode, CUgraph*);
CUresult cuGraphGetNodes(CUgraph, CUgraphNode*, size_t*);
CUresult cuGraphNodeGetType(CUgraphNode, int*);
CUresult cuGraphInstantiateWithFlags(CUgraphExec*, CUgraph, unsigned long long);
CUresult cuGraphExecDestroy(CUgraphExec);
CUresult cuGraphExecUpdate_v2(CUgraphExec, CUgraph, GraphExecUpdateResultInfo*);
CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec, CUgraphNode, const KernelNodeParams*);
CUresult cuGraphNodeGetEnabled(CUgraphExec, CUgraphNode, unsigned*);
CUresult cuGraphNodeSetEnabled(CUgraphExec, CUgraphNode, unsigned);
CUresult cuGetProcAddress_v2(const char*, void**, int, uint64_t, int*);
}

inline Api make_api(Random& random) {
    Api api;
    auto find = [&](const char* name, const char* symbol, int version, bool threaded, void* direct) {
        void* found = direct;
        unsigned way = random() % 3;
        if (way == 1)
            if (cuGetProcAddress_v2(name, &found, threaded ? 12000 : version, threaded ? 2 : 0,
                                    nullptr) != CUDA_SUCCESS)
                abort();
#ifndef FUZZ_LINKED  // where libeclip is linked in, nobody stands in front of dlsym
        static void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
        if (way == 2) found = dlsym(library, symbol);
#else
        (void)symbol;
#endif
        return found;
    };
#define FILL(name, version, ...)                                                                  \
    api.name = reinterpret_cast<decltype(api.name)>(                                              \
        find(#name, #name, version, false, reinterpret_cast<void*>(&fuzz::name)));                    \
    api.name##_ptsz = reinterpret_cast<decltype(api.name)>(                                       \
        find(#name, #name "_ptsz", version, true, reinterpret_cast<void*>(&fuzz::name##_ptsz)));
    CALLS(FILL)
    return api;
}
#endif

inline void check(CUresult status, const char* what) {
    if (status == CUDA_SUCCESS) return;
    fprintf(stderr, "%s returned %d\n", what, status);
    abort();
}
#define CHECK(call) check(call, #call)

// Make a graph the only node of another, as its child graph; the graph within it.
inline CUgraph nest(CUgraph& graph) {
    CUgraph outer, inner;
    CUgraphNode child;
    CHECK(cuGraphCreate(&outer, 0));
    CHECK(cuGraphAddChildGraphNode(&child, outer, nullptr, 0, graph));
    CHECK(cuGraphDestroy(graph));
    CHECK(cuGraphChildGraphNodeGetGraph(child, &inner));
    graph = outer;
    return inner;
}

}  // namespace fuzz
