// HIP's own functions: a slot for every entry point that is hooked, and for those that libeclip
// calls itself. A function that this HIP does not have is an empty slot or one that says so, as in
// ../driver.h.
#pragma once

#include "../driver.h"
#include "abi.h"

namespace eclip {

#define ECLIP_HIP_CALLS(CALL)                                                                    \
    CALL(hipDeviceGetPCIBusId, CUresult(char*, int, int))                                        \
    CALL(hipDeviceGetUuid, CUresult(unsigned char*, CUdevice))                                   \
    CALL(hipEventCreateWithFlags, CUresult(CUevent*, unsigned))                                  \
    CALL(hipEventElapsedTime, CUresult(float*, CUevent, CUevent))                                \
    CALL(hipExtStreamCreateWithCUMask, CUresult(CUstream*, uint32_t, const uint32_t*))           \
    CALL(hipExtStreamGetCUMask, CUresult(CUstream, uint32_t, uint32_t*))                         \
    CALL(hipGetDevice, CUresult(int*))                                                           \
    CALL(hipGetLastError, CUresult())                                                            \
    CALL(hipGetStreamDeviceId, int(CUstream))                                                    \
    CALL(hipGraphAddEmptyNode, CUresult(CUgraphNode*, CUgraph, const CUgraphNode*, size_t))      \
    CALL(hipGraphChildGraphNodeGetGraph, CUresult(CUgraphNode, CUgraph*))                        \
    CALL(hipGraphCreate, CUresult(CUgraph*, unsigned))                                           \
    CALL(hipGraphDestroy, CUresult(CUgraph))                                                     \
    CALL(hipGraphGetEdges, CUresult(CUgraph, CUgraphNode*, CUgraphNode*, size_t*))               \
    CALL(hipGraphGetNodes, CUresult(CUgraph, CUgraphNode*, size_t*))                             \
    CALL(hipGraphKernelNodeGetParams, CUresult(CUgraphNode, hipKernelNodeParams*))               \
    CALL(hipGraphNodeGetType, CUresult(CUgraphNode, int*))                                       \
    CALL(hipKernelNameRef, const char*(CUfunction))                                              \
    CALL(hipKernelNameRefByPtr, const char*(const void*, CUstream))                              \
    CALL(hipModuleOccupancyMaxActiveBlocksPerMultiprocessor,                                     \
         CUresult(int*, CUfunction, int, size_t))                                                \
    CALL(hipOccupancyMaxActiveBlocksPerMultiprocessor, CUresult(int*, const void*, int, size_t)) \
    CALL(hipSetDevice, CUresult(int))                                                            \
    CALL(hipStreamCreateWithFlags, CUresult(CUstream*, unsigned))                                \
    CALL(hipStreamGetFlags, CUresult(CUstream, unsigned*))                                       \
    CALL(hipStreamIsCapturing, CUresult(CUstream, int*))                                         \
    CALL(hipThreadExchangeStreamCaptureMode, CUresult(int*))

// How users ask for entry points.
#define ECLIP_HIP_FINDS(CALL) \
    CALL(hipGetProcAddress, CUresult(const char*, void**, int, uint64_t, int*))

struct Hip {
#define HOOK(symbol, name, since, threaded, parameters, arguments) CUresult(*symbol) parameters;
#include "hooks.def"
#define ECLIP_CALL(name, ...)     \
    using name##_f = __VA_ARGS__; \
    name##_f* name;
    ECLIP_HIP_CALLS(ECLIP_CALL)
    ECLIP_HIP_FINDS(ECLIP_CALL)
#undef ECLIP_CALL
};

extern constinit std::atomic<const Hip*> loaded_hip;
const Hip& load_hip();
inline const Hip& hip() {
    const Hip* loaded = loaded_hip.load(std::memory_order_acquire);
    return loaded != nullptr ? *loaded : load_hip();
}

// A device has one context, which HIP does not show: we number them from 1.
inline CUcontext context_of(CUdevice device) {
    return reinterpret_cast<CUcontext>(uintptr_t(device) + 1);
}
inline CUdevice device_of(CUcontext context) {
    return static_cast<CUdevice>(reinterpret_cast<uintptr_t>(context)) - 1;
}

// A kernel is launched by its module's function, or by the address of its function of the host. In
// the place of a function, such an address is marked: no address of a program has the highest bit.
constexpr uintptr_t kOfHost = uintptr_t{1} << 63;
inline CUfunction function_of(const void* host) {
    return reinterpret_cast<CUfunction>(reinterpret_cast<uintptr_t>(host) | kOfHost);
}

// What we asked in vain is not for the program to find with hipGetLastError().
inline void forget_refusal() { hip().hipGetLastError(); }
inline CUresult quietly(CUresult status) {
    if (status != CUDA_SUCCESS) forget_refusal();
    return status;
}

}  // namespace eclip
