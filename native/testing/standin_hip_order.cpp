// A second stand-in for libamdhip64: HIP's names in front of the stand-in for libcuda.so.1, whose
// engine runs work as late and as out of order as the rules allow. What docs/amd.md says of HIP is so
// here: masked streams are blocking ones, a graph runs in the mask of its stream, kinds of nodes are
// counted from 1, a kernel has a function of the host as well as of a module, and whoever fails leaves
// it for hipGetLastError().
#include <dlfcn.h>

#include <cstring>
#include <mutex>
#include <set>
#include <utility>

#include "../hip/abi.h"
#include "standin.h"

using namespace standin;

#define CALLS(CALL)                                                                               \
    CALL(cuInit, (unsigned))                                                                      \
    CALL(cuCtxSetCurrent, (CUcontext))                                                            \
    CALL(cuCtxSynchronize, ())                                                                    \
    CALL(cuDeviceGetUuid, (unsigned char*, CUdevice))                                             \
    CALL(cuMemAlloc_v2, (CUdeviceptr*, size_t))                                                   \
    CALL(cuMemFree_v2, (CUdeviceptr))                                                             \
    CALL(cuMemAllocHost_v2, (void**, size_t))                                                     \
    CALL(cuMemFreeHost, (void*))                                                                  \
    CALL(cuMemcpyPeer, (CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, size_t))                  \
    CALL(cuMemcpyDtoH_v2, (void*, CUdeviceptr, size_t))                                           \
    CALL(cuMemcpyDtoHAsync_v2, (void*, CUdeviceptr, size_t, CUstream))                            \
    CALL(cuMemcpyDtoDAsync_v2, (CUdeviceptr, CUdeviceptr, size_t, CUstream))                      \
    CALL(cuStreamCreate, (CUstream*, unsigned))                                                   \
    CALL(cuStreamDestroy_v2, (CUstream))                                                          \
    CALL(cuStreamGetFlags, (CUstream, unsigned*))                                                 \
    CALL(cuStreamIsCapturing, (CUstream, int*))                                                   \
    CALL(cuStreamBeginCapture_v2, (CUstream, int))                                                \
    CALL(cuStreamBeginCapture_v2_ptsz, (CUstream, int))                                           \
    CALL(cuStreamEndCapture, (CUstream, void*))                                                   \
    CALL(cuStreamEndCapture_ptsz, (CUstream, void*))                                              \
    CALL(cuStreamSynchronize, (CUstream))                                                         \
    CALL(cuStreamSynchronize_ptsz, (CUstream))                                                    \
    CALL(cuStreamQuery, (CUstream))                                                               \
    CALL(cuStreamQuery_ptsz, (CUstream))                                                          \
    CALL(cuStreamWaitEvent, (CUstream, CUevent, unsigned))                                        \
    CALL(cuStreamWaitEvent_ptsz, (CUstream, CUevent, unsigned))                                   \
    CALL(cuThreadExchangeStreamCaptureMode, (int*))                                               \
    CALL(cuEventCreate, (CUevent*, unsigned))                                                     \
    CALL(cuEventDestroy_v2, (CUevent))                                                            \
    CALL(cuEventElapsedTime, (float*, CUevent, CUevent))                                          \
    CALL(cuEventQuery, (CUevent))                                                                 \
    CALL(cuEventRecord, (CUevent, CUstream))                                                      \
    CALL(cuEventRecord_ptsz, (CUevent, CUstream))                                                 \
    CALL(cuEventSynchronize, (CUevent))                                                           \
    CALL(cuLaunchHostFunc, (CUstream, void*, void*))                                              \
    CALL(cuLaunchHostFunc_ptsz, (CUstream, void*, void*))                                         \
    CALL(cuMemsetD32Async, (CUdeviceptr, unsigned, size_t, CUstream))                             \
    CALL(cuLaunchKernel, (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
                          unsigned, CUstream, void*, void*))                                      \
    CALL(cuLaunchKernel_ptsz, (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned,      \
                               unsigned, unsigned, CUstream, void*, void*))                       \
    CALL(cuGraphLaunch, (CUgraphExec, CUstream))                                                  \
    CALL(cuGraphLaunch_ptsz, (CUgraphExec, CUstream))                                             \
    CALL(cuGraphCreate, (CUgraph*, unsigned))                                                     \
    CALL(cuGraphDestroy, (CUgraph))                                                               \
    CALL(cuGraphGetNodes, (CUgraph, CUgraphNode*, size_t*))                                       \
    CALL(cuGraphGetEdges_v2, (CUgraph, CUgraphNode*, CUgraphNode*, void*, size_t*))               \
    CALL(cuGraphNodeGetType, (CUgraphNode, int*))                                                 \
    CALL(cuGraphAddKernelNode_v2,                                                                 \
         (CUgraphNode*, CUgraph, const CUgraphNode*, size_t, const KernelNodeParams*))            \
    CALL(cuGraphAddEmptyNode, (CUgraphNode*, CUgraph, const CUgraphNode*, size_t))                \
    CALL(cuGraphAddChildGraphNode, (CUgraphNode*, CUgraph, const CUgraphNode*, size_t, CUgraph))  \
    CALL(cuGraphChildGraphNodeGetGraph, (CUgraphNode, CUgraph*))                                  \
    CALL(cuGraphInstantiateWithFlags, (void*, CUgraph, uint64_t))                                 \
    CALL(cuGraphExecDestroy, (CUgraphExec))                                                       \
    CALL(cuGraphExecUpdate_v2, (CUgraphExec, CUgraph, void*))                                     \
    CALL(cuGraphExecKernelNodeSetParams_v2, (CUgraphExec, CUgraphNode, const void*))              \
    CALL(cuGraphNodeGetEnabled, (CUgraphExec, CUgraphNode, unsigned*))                            \
    CALL(cuGraphNodeSetEnabled, (CUgraphExec, CUgraphNode, unsigned))
#define DECLARE(name, parameters) extern "C" CUresult name parameters;
CALLS(DECLARE)

namespace {

constexpr unsigned kEngines = 15, kFullUnits = 120, kUnits = 132;  // as the random plans have it
constexpr int kFirstKind = 1;

thread_local CUresult last_error = CUDA_SUCCESS;
CUresult noted(CUresult status) {
    if (status != CUDA_SUCCESS) last_error = status;
    return status;
}

CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(&primaries[device]); }

// A function of the host stands for a function of a module.
std::mutex hosts_lock;
std::set<const void*> hosts;
void* host_of(CUfunction function) {
    std::lock_guard hold(hosts_lock);
    void* host = &reinterpret_cast<Function*>(function)->run;
    hosts.insert(host);
    return host;
}
CUfunction function_of(const void* host) {
    auto address = static_cast<const char*>(host) - offsetof(Function, run);
    return reinterpret_cast<CUfunction>(const_cast<char*>(address));
}
bool is_host(const void* address) {
    std::lock_guard hold(hosts_lock);
    return hosts.contains(address);
}

KernelNodeParams params_of(const hipKernelNodeParams& given) {
    auto function = is_host(given.func) ? function_of(given.func) : static_cast<CUfunction>(given.func);
    return {function, {given.gridDim.x, given.gridDim.y, given.gridDim.z},
            {given.blockDim.x, given.blockDim.y, given.blockDim.z}, given.sharedMemBytes,
            given.kernelParams, given.extra, nullptr, nullptr};
}

CUresult launch(const void* host, dim3 grid, dim3 block, void* params, size_t shared, CUstream stream,
                decltype(cuLaunchKernel)* call) {
    if (!is_host(host)) return noted(CUDA_ERROR_INVALID_HANDLE);
    return noted(call(function_of(host), grid.x, grid.y, grid.z, block.x, block.y, block.z,
                      static_cast<unsigned>(shared), stream, params, nullptr));
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void* standin_host(CUfunction function) {
    return host_of(function);
}

// --- Devices and memory ----------------------------------------------------------------------

API hipInit(unsigned flags) {
    nodes_have_contexts = false;
    return noted(cuInit(flags));
}
API hipGetLastError() { return std::exchange(last_error, CUDA_SUCCESS); }
API hipPeekAtLastError() { return last_error; }
API hipGetDevice(int* device) {
    *device = current_context().device;
    return CUDA_SUCCESS;
}
API hipSetDevice(int device) { return noted(cuCtxSetCurrent(context_of(device))); }
API hipGetDeviceCount(int* count) {
    *count = kDevices;
    return CUDA_SUCCESS;
}
API hipDeviceGetUuid(unsigned char* uuid, int device) { return cuDeviceGetUuid(uuid, device); }
API hipDeviceGetPCIBusId(char* place, int bytes, int device) {
    snprintf(place, static_cast<size_t>(bytes), "0000:%02x:00.0", 0x43 + device);
    return CUDA_SUCCESS;
}
API hipDeviceSynchronize() { return noted(cuCtxSynchronize()); }
API hipMalloc(CUdeviceptr* memory, size_t bytes) { return noted(cuMemAlloc_v2(memory, bytes)); }
API hipFree(void* memory) { return noted(cuMemFree_v2(reinterpret_cast<CUdeviceptr>(memory))); }
API hipHostMalloc(void** memory, size_t bytes, unsigned) {
    return noted(cuMemAllocHost_v2(memory, bytes));
}
API hipHostFree(void* memory) { return noted(cuMemFreeHost(memory)); }
API hipMemcpyPeer(CUdeviceptr target, int there, CUdeviceptr source, int here, size_t bytes) {
    return noted(cuMemcpyPeer(target, context_of(there), source, context_of(here), bytes));
}
API hipMemcpyDtoH(void* target, CUdeviceptr source, size_t bytes) {
    return noted(cuMemcpyDtoH_v2(target, source, bytes));
}
API hipMemcpyDtoHAsync(void* target, CUdeviceptr source, size_t bytes, CUstream stream) {
    return noted(cuMemcpyDtoHAsync_v2(target, source, bytes, stream));
}
API hipMemcpyDtoDAsync(CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream stream) {
    return noted(cuMemcpyDtoDAsync_v2(target, source, bytes, stream));
}
API hipMemsetD32Async(CUdeviceptr target, unsigned value, size_t count, CUstream stream) {
    return noted(cuMemsetD32Async(target, value, count, stream));
}

// --- Streams and events ----------------------------------------------------------------------

API hipStreamCreateWithFlags(CUstream* stream, unsigned flags) {
    return noted(cuStreamCreate(stream, flags));
}
API hipExtStreamCreateWithCUMask(CUstream* handle, uint32_t words, const uint32_t* bits) {
    if (CUresult status = noted(cuStreamCreate(handle, 0))) return status;
    Hold hold = held();
    Stream& stream = *reinterpret_cast<Stream*>(*handle);
    stream.masked = true;
    stream.mask = {};
    for (unsigned bit = 0; bit < kUnits && bit / 32 < words; ++bit)
        if (bits[bit / 32] >> bit % 32 & 1)
            stream.mask.bits[0] |= uint64_t{1} << (bit < kFullUnits ? bit % kEngines : kEngines);
    return CUDA_SUCCESS;
}
API hipExtStreamGetCUMask(CUstream handle, uint32_t words, uint32_t* bits) {
    Hold hold = held();
    const Mask& mask = reinterpret_cast<Stream*>(handle)->mask;
    memset(bits, 0, words * sizeof *bits);
    for (unsigned bit = 0; bit < kUnits; ++bit)
        if (mask.bits[0] >> (bit < kFullUnits ? bit % kEngines : kEngines) & 1)
            bits[bit / 32] |= 1u << bit % 32;
    return CUDA_SUCCESS;
}
extern "C" __attribute__((visibility("default"))) int hipGetStreamDeviceId(CUstream stream) {
    return reinterpret_cast<Stream*>(stream)->context->device;
}
API hipStreamGetFlags(CUstream stream, unsigned* flags) { return cuStreamGetFlags(stream, flags); }
API hipStreamDestroy(CUstream stream) { return noted(cuStreamDestroy_v2(stream)); }
API hipStreamIsCapturing(CUstream stream, int* status) {
    return noted(cuStreamIsCapturing(stream, status));
}
API hipThreadExchangeStreamCaptureMode(int* mode) { return cuThreadExchangeStreamCaptureMode(mode); }
API hipEventCreateWithFlags(CUevent* event, unsigned flags) { return noted(cuEventCreate(event, flags)); }
API hipEventDestroy(CUevent event) { return noted(cuEventDestroy_v2(event)); }
API hipEventElapsedTime(float* ms, CUevent from, CUevent to) {
    return noted(cuEventElapsedTime(ms, from, to));
}
API hipEventQuery(CUevent event) { return noted(cuEventQuery(event)); }
API hipEventSynchronize(CUevent event) { return noted(cuEventSynchronize(event)); }

// Both meanings of the default stream.
#define BOTH(name, real, parameters, arguments)           \
    API name parameters { return noted(real arguments); } \
    API name##_spt parameters { return noted(real##_ptsz arguments); }
BOTH(hipEventRecord, cuEventRecord, (CUevent event, CUstream stream), (event, stream))
BOTH(hipStreamWaitEvent, cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags),
     (stream, event, flags))
BOTH(hipStreamSynchronize, cuStreamSynchronize, (CUstream stream), (stream))
BOTH(hipStreamQuery, cuStreamQuery, (CUstream stream), (stream))
BOTH(hipStreamBeginCapture, cuStreamBeginCapture_v2, (CUstream stream, int mode), (stream, mode))
BOTH(hipStreamEndCapture, cuStreamEndCapture, (CUstream stream, void* graph), (stream, graph))
BOTH(hipLaunchHostFunc, cuLaunchHostFunc, (CUstream stream, void* function, void* data),
     (stream, function, data))
BOTH(hipGraphLaunch, cuGraphLaunch, (CUgraphExec exec, CUstream stream), (exec, stream))

// --- Kernels ---------------------------------------------------------------------------------

extern "C" __attribute__((visibility("default"))) const char* hipKernelNameRef(CUfunction function) {
    return reinterpret_cast<Function*>(function)->name;
}
extern "C" __attribute__((visibility("default"))) const char* hipKernelNameRefByPtr(const void* host,
                                                                                    CUstream) {
    return is_host(host) ? hipKernelNameRef(function_of(host)) : nullptr;
}
API hipModuleLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                          unsigned bz, unsigned shared, CUstream stream, void* params, void* extra) {
    return noted(cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, stream, params, extra));
}
API hipModuleLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                     unsigned by, unsigned bz, unsigned shared, CUstream stream,
                                     void* params) {
    return noted(cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, stream, params, nullptr));
}
#define LAUNCH(name, bytes, call)                                                                    \
    API name(const void* host, dim3 grid, dim3 block, void* params, bytes shared, CUstream stream) { \
        return launch(host, grid, block, params, shared, stream, call);                              \
    }
LAUNCH(hipLaunchKernel, size_t, cuLaunchKernel)
LAUNCH(hipLaunchKernel_spt, size_t, cuLaunchKernel_ptsz)
LAUNCH(hipLaunchCooperativeKernel, unsigned, cuLaunchKernel)
LAUNCH(hipLaunchCooperativeKernel_spt, unsigned, cuLaunchKernel_ptsz)
API hipExtLaunchKernel(const void* host, dim3 grid, dim3 block, void* params, size_t shared,
                       CUstream stream, CUevent start, CUevent stop, int) {
    if (start != nullptr) cuEventRecord(start, stream);
    CUresult status = launch(host, grid, block, params, shared, stream, cuLaunchKernel);
    if (stop != nullptr && status == CUDA_SUCCESS) cuEventRecord(stop, stream);
    return status;
}
// In C++, and in threads instead of blocks.
API _Z24hipExtModuleLaunchKernelP18ihipModuleSymbol_tjjjjjjmP12ihipStream_tPPvS4_P11ihipEvent_tS6_j(
    CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
    size_t shared, CUstream stream, void* params, void* extra, CUevent start, CUevent stop, unsigned) {
    if (start != nullptr) cuEventRecord(start, stream);
    CUresult status = cuLaunchKernel(f, gx / bx, gy / by, gz / bz, bx, by, bz,
                                     static_cast<unsigned>(shared), stream, params, extra);
    if (stop != nullptr && status == CUDA_SUCCESS) cuEventRecord(stop, stream);
    return noted(status);
}
// Newer than hip/hooks.def.
API hipLeapAsync(CUdeviceptr target, CUdeviceptr source, size_t bytes, CUstream stream) {
    return noted(cuMemcpyDtoDAsync_v2(target, source, bytes, stream));
}

// --- Graphs ----------------------------------------------------------------------------------

API hipGraphCreate(CUgraph* graph, unsigned flags) { return noted(cuGraphCreate(graph, flags)); }
API hipGraphDestroy(CUgraph graph) { return noted(cuGraphDestroy(graph)); }
API hipGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
    return noted(cuGraphGetNodes(graph, nodes, count));
}
API hipGraphGetEdges(CUgraph graph, CUgraphNode* from, CUgraphNode* to, size_t* count) {
    std::vector<CUgraphEdgeData> data(from != nullptr ? *count : 0);
    return noted(cuGraphGetEdges_v2(graph, from, to, data.data(), count));
}
API hipGraphNodeGetType(CUgraphNode node, int* type) {
    CUresult status = noted(cuGraphNodeGetType(node, type));
    *type += kFirstKind;
    return status;
}
API hipGraphKernelNodeGetParams(CUgraphNode handle, hipKernelNodeParams* params) {
    Hold hold = held();
    const Kernel& kernel = reinterpret_cast<Node*>(handle)->kernel;
    auto function = reinterpret_cast<CUfunction>(kernel.function);
    const KernelNodeParams& shape = kernel.shape;
    *params = {{shape.block[0], shape.block[1], shape.block[2]}, nullptr,
               kernel.function->library ? host_of(function) : static_cast<void*>(function),
               {shape.grid[0], shape.grid[1], shape.grid[2]},
               const_cast<void**>(kernel.pointers.data()), shape.sharedMemBytes};
    return CUDA_SUCCESS;
}
API hipGraphAddKernelNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after, size_t count,
                          const hipKernelNodeParams* given) {
    KernelNodeParams params = params_of(*given);
    return noted(cuGraphAddKernelNode_v2(node, graph, after, count, &params));
}
API hipGraphAddEmptyNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after, size_t count) {
    return noted(cuGraphAddEmptyNode(node, graph, after, count));
}
API hipGraphAddChildGraphNode(CUgraphNode* node, CUgraph graph, const CUgraphNode* after, size_t count,
                              CUgraph child) {
    return noted(cuGraphAddChildGraphNode(node, graph, after, count, child));
}
API hipGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph* graph) {
    return noted(cuGraphChildGraphNodeGetGraph(node, graph));
}
API hipGraphInstantiateWithFlags(CUgraphExec* exec, CUgraph graph, unsigned long long flags) {
    return noted(cuGraphInstantiateWithFlags(exec, graph, flags));
}
API hipGraphExecDestroy(CUgraphExec exec) { return noted(cuGraphExecDestroy(exec)); }
API hipGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode* wrong, int* result) {
    GraphExecUpdateResultInfo info{};
    CUresult status = noted(cuGraphExecUpdate_v2(exec, graph, &info));
    *wrong = info.errorNode;
    *result = info.result;
    return status;
}
API hipGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node,
                                    const hipKernelNodeParams* given) {
    KernelNodeParams params = params_of(*given);
    return noted(cuGraphExecKernelNodeSetParams_v2(exec, node, &params));
}
API hipGraphNodeGetEnabled(CUgraphExec exec, CUgraphNode node, unsigned* enabled) {
    return noted(cuGraphNodeGetEnabled(exec, node, enabled));
}
API hipGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode node, unsigned enabled) {
    return noted(cuGraphNodeSetEnabled(exec, node, enabled));
}

// By the process's dlsym, as the real one does.
API hipGetProcAddress(const char* name, void** function, int, uint64_t, int* found) {
    static void* self = dlopen("libamdhip64.so.5", RTLD_LAZY | RTLD_NOLOAD);
    *function = dlsym(self, name);
    if (found != nullptr) *found = *function != nullptr ? 0 : 1;
    return noted(*function != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}
