// HIP's interface under the names of CUDA's, for the random programs of either (calls.h).
//
// What a program calls again and again it finds in one of the ways there are; a launch that CUDA has
// one entry point for is made by each of those that HIP has.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include "../hip/abi.h"

#define LAUNCH_EXT \
    _Z24hipExtModuleLaunchKernelP18ihipModuleSymbol_tjjjjjjmP12ihipStream_tPPvS4_P11ihipEvent_tS6_j

extern "C" {
void* standin_host(CUfunction);

CUresult hipInit(unsigned);
CUresult hipGetLastError();
CUresult hipSetDevice(int);
CUresult hipDeviceSynchronize();
CUresult hipMalloc(CUdeviceptr*, size_t);
CUresult hipFree(void*);
CUresult hipHostMalloc(void**, size_t, unsigned);
CUresult hipHostFree(void*);
CUresult hipMemcpyPeer(CUdeviceptr, int, CUdeviceptr, int, size_t);
CUresult hipMemcpyDtoH(void*, CUdeviceptr, size_t);
CUresult hipMemcpyDtoHAsync(void*, CUdeviceptr, size_t, CUstream);
CUresult hipMemcpyDtoDAsync(CUdeviceptr, CUdeviceptr, size_t, CUstream);
CUresult hipMemsetD32Async(CUdeviceptr, unsigned, size_t, CUstream);
CUresult hipStreamCreateWithFlags(CUstream*, unsigned);
CUresult hipStreamDestroy(CUstream);
CUresult hipStreamSynchronize(CUstream);
CUresult hipStreamSynchronize_spt(CUstream);
CUresult hipStreamQuery(CUstream);
CUresult hipStreamQuery_spt(CUstream);
CUresult hipStreamWaitEvent(CUstream, CUevent, unsigned);
CUresult hipStreamWaitEvent_spt(CUstream, CUevent, unsigned);
CUresult hipStreamBeginCapture(CUstream, int);
CUresult hipStreamEndCapture(CUstream, CUgraph*);
CUresult hipEventCreateWithFlags(CUevent*, unsigned);
CUresult hipEventDestroy(CUevent);
CUresult hipEventQuery(CUevent);
CUresult hipEventSynchronize(CUevent);
CUresult hipEventRecord(CUevent, CUstream);
CUresult hipEventRecord_spt(CUevent, CUstream);
CUresult hipLaunchHostFunc(CUstream, void (*)(void*), void*);
CUresult hipLaunchHostFunc_spt(CUstream, void (*)(void*), void*);
CUresult hipModuleLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                               unsigned, CUstream, void**, void**);
CUresult hipModuleLaunchCooperativeKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned,
                                          unsigned, unsigned, CUstream, void**);
CUresult hipLaunchKernel(const void*, dim3, dim3, void**, size_t, CUstream);
CUresult hipLaunchKernel_spt(const void*, dim3, dim3, void**, size_t, CUstream);
CUresult hipLaunchCooperativeKernel(const void*, dim3, dim3, void**, unsigned, CUstream);
CUresult hipLaunchCooperativeKernel_spt(const void*, dim3, dim3, void**, unsigned, CUstream);
CUresult hipExtLaunchKernel(const void*, dim3, dim3, void**, size_t, CUstream, CUevent, CUevent, int);
CUresult LAUNCH_EXT(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, size_t,
                    CUstream, void**, void**, CUevent, CUevent, unsigned);
CUresult hipGraphLaunch(CUgraphExec, CUstream);
CUresult hipGraphLaunch_spt(CUgraphExec, CUstream);
CUresult hipGraphCreate(CUgraph*, unsigned);
CUresult hipGraphDestroy(CUgraph);
CUresult hipGraphAddKernelNode(CUgraphNode*, CUgraph, const CUgraphNode*, size_t,
                               const hipKernelNodeParams*);
CUresult hipGraphAddEmptyNode(CUgraphNode*, CUgraph, const CUgraphNode*, size_t);
CUresult hipGraphAddChildGraphNode(CUgraphNode*, CUgraph, const CUgraphNode*, size_t, CUgraph);
CUresult hipGraphChildGraphNodeGetGraph(CUgraphNode, CUgraph*);
CUresult hipGraphGetNodes(CUgraph, CUgraphNode*, size_t*);
CUresult hipGraphNodeGetType(CUgraphNode, int*);
CUresult hipGraphInstantiateWithFlags(CUgraphExec*, CUgraph, unsigned long long);
CUresult hipGraphExecDestroy(CUgraphExec);
CUresult hipGraphExecUpdate(CUgraphExec, CUgraph, CUgraphNode*, int*);
CUresult hipGraphExecKernelNodeSetParams(CUgraphExec, CUgraphNode, const hipKernelNodeParams*);
CUresult hipGraphNodeGetEnabled(CUgraphExec, CUgraphNode, unsigned*);
CUresult hipGraphNodeSetEnabled(CUgraphExec, CUgraphNode, unsigned);
CUresult hipGetProcAddress(const char*, void**, int, uint64_t, int*);
}

namespace fuzz {

constexpr bool kHasContexts = false;  // of a program's own, besides one of each device

// The same function under another name.
#define SAME(mine, theirs, parameters, arguments) \
    inline CUresult mine parameters { return theirs arguments; }
SAME(cuInit, hipInit, (unsigned flags), (flags))
SAME(cuCtxSynchronize, hipDeviceSynchronize, (), ())
SAME(cuMemAlloc_v2, hipMalloc, (CUdeviceptr * memory, size_t bytes), (memory, bytes))
SAME(cuMemFree_v2, hipFree, (CUdeviceptr memory), (reinterpret_cast<void*>(memory)))
SAME(cuMemAllocHost_v2, hipHostMalloc, (void** memory, size_t bytes), (memory, bytes, 0))
SAME(cuMemFreeHost, hipHostFree, (void* memory), (memory))
SAME(cuMemcpyDtoH_v2, hipMemcpyDtoH, (void* target, CUdeviceptr source, size_t bytes),
     (target, source, bytes))
SAME(cuMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync,
     (void* target, CUdeviceptr source, size_t bytes, CUstream stream),
     (target, source, bytes, stream))
SAME(cuMemcpyDtoDAsync_v2, hipMemcpyDtoDAsync,
     (CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream stream),
     (target, source, bytes, stream))
SAME(cuStreamCreate, hipStreamCreateWithFlags, (CUstream * stream, unsigned flags), (stream, flags))
SAME(cuStreamDestroy_v2, hipStreamDestroy, (CUstream stream), (stream))
SAME(cuStreamWaitEvent, hipStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags),
     (stream, event, flags))
SAME(cuStreamBeginCapture_v2, hipStreamBeginCapture, (CUstream stream, int mode), (stream, mode))
SAME(cuStreamEndCapture, hipStreamEndCapture, (CUstream stream, CUgraph* graph), (stream, graph))
SAME(cuEventCreate, hipEventCreateWithFlags, (CUevent * event, unsigned flags), (event, flags))
SAME(cuEventDestroy_v2, hipEventDestroy, (CUevent event), (event))
SAME(cuEventQuery, hipEventQuery, (CUevent event), (event))
SAME(cuEventSynchronize, hipEventSynchronize, (CUevent event), (event))
SAME(cuEventRecord, hipEventRecord, (CUevent event, CUstream stream), (event, stream))
SAME(cuGraphCreate, hipGraphCreate, (CUgraph * graph, unsigned flags), (graph, flags))
SAME(cuGraphDestroy, hipGraphDestroy, (CUgraph graph), (graph))
SAME(cuGraphAddEmptyNode, hipGraphAddEmptyNode,
     (CUgraphNode * node, CUgraph graph, const CUgraphNode* after, size_t count),
     (node, graph, after, count))
SAME(cuGraphAddChildGraphNode, hipGraphAddChildGraphNode,
     (CUgraphNode * node, CUgraph graph, const CUgraphNode* after, size_t count, CUgraph child),
     (node, graph, after, count, child))
SAME(cuGraphChildGraphNodeGetGraph, hipGraphChildGraphNodeGetGraph, (CUgraphNode node, CUgraph* graph),
     (node, graph))
SAME(cuGraphGetNodes, hipGraphGetNodes, (CUgraph graph, CUgraphNode* nodes, size_t* count),
     (graph, nodes, count))
SAME(cuGraphInstantiateWithFlags, hipGraphInstantiateWithFlags,
     (CUgraphExec * exec, CUgraph graph, unsigned long long flags), (exec, graph, flags))
SAME(cuGraphExecDestroy, hipGraphExecDestroy, (CUgraphExec exec), (exec))
SAME(cuGraphNodeGetEnabled, hipGraphNodeGetEnabled,
     (CUgraphExec exec, CUgraphNode node, unsigned* enabled), (exec, node, enabled))
SAME(cuGraphNodeSetEnabled, hipGraphNodeSetEnabled,
     (CUgraphExec exec, CUgraphNode node, unsigned enabled), (exec, node, enabled))

// A context is a device's, by its number from 1.
inline int device_of(CUcontext context) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1;
}
inline CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    *context = reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device) + 1);
    return CUDA_SUCCESS;
}
inline CUresult cuCtxSetCurrent(CUcontext context) { return hipSetDevice(device_of(context)); }
inline CUresult cuCtxCreate_v2(CUcontext*, unsigned, CUdevice) { return CUDA_ERROR_NOT_SUPPORTED; }
inline CUresult cuCtxDestroy_v2(CUcontext) { return CUDA_ERROR_NOT_SUPPORTED; }
inline CUresult cuCtxRecordEvent(CUcontext, CUevent) { return CUDA_ERROR_NOT_SUPPORTED; }
inline CUresult cuMemcpyPeer(CUdeviceptr target, CUcontext there, CUdeviceptr source, CUcontext here,
                             size_t bytes) {
    return hipMemcpyPeer(target, device_of(there), source, device_of(here), bytes);
}

inline CUresult cuGraphNodeGetType(CUgraphNode node, int* type) {
    CUresult status = hipGraphNodeGetType(node, type);
    --*type;
    return status;
}
inline CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, GraphExecUpdateResultInfo* info) {
    return hipGraphExecUpdate(exec, graph, &info->errorNode, &info->result);
}
inline hipKernelNodeParams params_of(const KernelNodeParams& given) {
    return {{given.block[0], given.block[1], given.block[2]}, nullptr, standin_host(given.func),
            {given.grid[0], given.grid[1], given.grid[2]}, given.kernelParams, given.sharedMemBytes};
}
inline CUresult cuGraphAddKernelNode_v2(CUgraphNode* node, CUgraph graph, const CUgraphNode* after,
                                        size_t count, const KernelNodeParams* given) {
    hipKernelNodeParams params = params_of(*given);
    return hipGraphAddKernelNode(node, graph, after, count, &params);
}
inline CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node,
                                                  const KernelNodeParams* given) {
    hipKernelNodeParams params = params_of(*given);
    return hipGraphExecKernelNodeSetParams(exec, node, &params);
}

// Launches. A status that is none of the program's must not be found after them.
inline CUresult told(CUresult status) {
    return hipGetLastError() == status ? status : CUDA_ERROR_NOT_FOUND;
}
inline uint64_t salt_of(void** params) { return *static_cast<uint64_t*>(params[3]); }

inline CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction f, void** params, void**) {
    const dim3 grid{config->grid[0], config->grid[1], config->grid[2]};
    const dim3 block{config->block[0], config->block[1], config->block[2]};
    const unsigned shared = config->sharedMemBytes;
    const CUstream stream = config->hStream;
    hipGetLastError();
    switch (salt_of(params) % 5) {
        case 0: return told(hipLaunchKernel(standin_host(f), grid, block, params, shared, stream));
        case 1:
            return told(hipExtLaunchKernel(standin_host(f), grid, block, params, shared, stream,
                                           nullptr, nullptr, 0));
        case 2:
            return told(LAUNCH_EXT(f, grid.x * block.x, grid.y * block.y, grid.z * block.z, block.x,
                                   block.y, block.z, shared, stream, params, nullptr, nullptr, nullptr,
                                   0));
        case 3:
            return told(hipModuleLaunchCooperativeKernel(f, grid.x, grid.y, grid.z, block.x, block.y,
                                                         block.z, shared, stream, params));
        default:
            return told(hipLaunchCooperativeKernel(standin_host(f), grid, block, params, shared, stream));
    }
}
inline CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig* config, CUfunction f, void** params, void**) {
    const dim3 grid{config->grid[0], config->grid[1], config->grid[2]};
    const dim3 block{config->block[0], config->block[1], config->block[2]};
    return hipLaunchCooperativeKernel_spt(standin_host(f), grid, block, params, config->sharedMemBytes,
                                          config->hStream);
}
inline CUresult cuLaunchKernel_ptsz(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                    unsigned by, unsigned bz, unsigned shared, CUstream stream,
                                    void** params, void**) {
    return hipLaunchKernel_spt(standin_host(f), {gx, gy, gz}, {bx, by, bz}, params, shared, stream);
}
inline CUresult cuMemsetD32Async_ptsz(CUdeviceptr target, unsigned value, size_t count,
                                      CUstream stream) {
    return hipMemsetD32Async(target, value, count, stream != nullptr ? stream : kThreadStream);
}

// What the kernel driver would tell of the stand-in's first device.
inline void describe_device() {
    static char folder[] = "/tmp/eclip-nodes-XXXXXX";
    if (mkdtemp(folder) == nullptr) abort();
    std::string node = std::string(folder) + "/1";
    mkdir(node.c_str(), 0700);
    FILE* file = fopen((node + "/properties").c_str(), "w");
    fputs("simd_count 528\nsimd_per_cu 4\narray_count 15\nsimd_arrays_per_engine 1\nnum_xcc 1\n"
          "gfx_target_version 90006\ndomain 0\nlocation_id 17152\n", file);
    fclose(file);
    setenv("ECLIP_KFD_NODES", folder, 1);
}
inline void forget_device() {
    const std::string folder = getenv("ECLIP_KFD_NODES");
    for (const char* one : {"/1/properties", "/1", ""}) remove((folder + one).c_str());
}

// The interface, found in each of the ways in which programs find it.
struct Api {
#define CALLS(CALL)                                                     \
    CALL(cuLaunchKernel, hipModuleLaunchKernel, "hip_4.2")              \
    CALL(cuStreamWaitEvent, hipStreamWaitEvent, "hip_4.2")              \
    CALL(cuStreamWaitEvent_ptsz, hipStreamWaitEvent_spt, "hip_5.2")     \
    CALL(cuEventRecord, hipEventRecord, "hip_4.2")                      \
    CALL(cuEventRecord_ptsz, hipEventRecord_spt, "hip_5.2")             \
    CALL(cuStreamSynchronize, hipStreamSynchronize, "hip_4.2")          \
    CALL(cuStreamSynchronize_ptsz, hipStreamSynchronize_spt, "hip_5.2") \
    CALL(cuStreamQuery, hipStreamQuery, "hip_4.2")                      \
    CALL(cuStreamQuery_ptsz, hipStreamQuery_spt, "hip_5.2")             \
    CALL(cuLaunchHostFunc, hipLaunchHostFunc, "hip_4.2")                \
    CALL(cuLaunchHostFunc_ptsz, hipLaunchHostFunc_spt, "hip_5.2")       \
    CALL(cuGraphLaunch, hipGraphLaunch, "hip_4.2")                      \
    CALL(cuGraphLaunch_ptsz, hipGraphLaunch_spt, "hip_5.2")             \
    CALL(cuMemsetD32Async, hipMemsetD32Async, "hip_4.2")
#define MEMBER(mine, theirs, version) decltype(&::theirs) mine = nullptr;
    CALLS(MEMBER)
#define FIXED(mine) decltype(&fuzz::mine) mine = fuzz::mine;
    FIXED(cuLaunchKernel_ptsz)
    FIXED(cuLaunchKernelEx)
    FIXED(cuLaunchKernelEx_ptsz)
    FIXED(cuMemsetD32Async_ptsz)
};

inline Api make_api(Random& random) {
    Api api;
    auto find = [&](const char* name, const char* version, void* direct) {
        void* found = direct;
        unsigned way = random() % 4;
        if (way == 1 && hipGetProcAddress(name, &found, 60100000, 0, nullptr) != CUDA_SUCCESS) abort();
        static void* library = dlopen("libamdhip64.so.5", RTLD_LAZY | RTLD_NOLOAD);
        if (way == 2) found = dlsym(library, name);
        if (way == 3) found = dlvsym(library, name, version);
        if (found == nullptr) abort();
        return found;
    };
#define FILL(mine, theirs, version)                  \
    api.mine = reinterpret_cast<decltype(api.mine)>( \
        find(#theirs, version, reinterpret_cast<void*>(&::theirs)));
    CALLS(FILL)
    return api;
}

}  // namespace fuzz
