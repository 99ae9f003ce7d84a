// The real driver: a slot for every entry point, found at run time, and words for a person.
//
// Slots are filled once, before the first call goes through. A function that this driver does not
// have is an empty slot, or, where users' calls go through it, one that says so.
//
// The dispatcher and all behind it speak CUDA's words: its names, and its types, which are handles.
// HIP's statuses and default streams have the same numbers, so hip/driver.cpp fills the slots that
// they use with HIP's functions, and the same objects serve both libraries.
#pragma once

#include <atomic>

#include "cuda_abi.h"

namespace eclip {

// How the default stream of a call is meant: the process's or the calling thread's.
enum class Default { legacy, thread };

// The same stream by a handle that means it in any call. The process's default stream stays none: not
// every HIP knows another handle of it.
inline CUstream explicit_handle(CUstream stream, Default meaning) {
    return stream == nullptr && meaning == Default::thread ? kThreadStream : stream;
}

// Entry points that libeclip calls for itself and nobody's call passes through.
#define ECLIP_DRIVER_CALLS(CALL)                                                              \
    CALL(cuCtxGetCurrent, CUresult(CUcontext*))                                               \
    CALL(cuCtxGetDevice, CUresult(CUdevice*))                                                 \
    CALL(cuCtxSetCurrent, CUresult(CUcontext))                                                \
    CALL(cuCtxFromGreenCtx, CUresult(CUcontext*, CUgreenCtx))                                 \
    CALL(cuCtxGetStreamPriorityRange, CUresult(int*, int*))                                   \
    CALL(cuDevicePrimaryCtxGetState, CUresult(CUdevice, unsigned*, int*))                     \
    CALL(cuDevicePrimaryCtxRetain, CUresult(CUcontext*, CUdevice))                            \
    CALL(cuDeviceGetUuid, CUresult(unsigned char*, CUdevice))                                 \
    CALL(cuDeviceGetDevResource, CUresult(CUdevice, CUdevResource*, int))                     \
    CALL(cuDevSmResourceSplitByCount,                                                         \
         CUresult(CUdevResource*, unsigned*, const CUdevResource*, CUdevResource*, unsigned,  \
                  unsigned))                                                                  \
    CALL(cuDevResourceGenerateDesc, CUresult(CUdevResourceDesc*, CUdevResource*, unsigned))   \
    CALL(cuGreenCtxCreate, CUresult(CUgreenCtx*, CUdevResourceDesc, CUdevice, unsigned))      \
    CALL(cuGreenCtxStreamCreate, CUresult(CUstream*, CUgreenCtx, unsigned, int))              \
    CALL(cuPointerGetAttribute, CUresult(void*, int, CUdeviceptr))                            \
    CALL(cuStreamCreate, CUresult(CUstream*, unsigned))                                       \
    CALL(cuStreamCreateWithPriority, CUresult(CUstream*, unsigned, int))                      \
    CALL(cuStreamGetFlags, CUresult(CUstream, unsigned*))                                     \
    CALL(cuStreamGetCtx, CUresult(CUstream, CUcontext*))                                      \
    CALL(cuStreamIsCapturing, CUresult(CUstream, int*))                                       \
    CALL(cuThreadExchangeStreamCaptureMode, CUresult(int*))                                   \
    CALL(cuEventCreate, CUresult(CUevent*, unsigned))                                         \
    CALL(cuEventElapsedTime, CUresult(float*, CUevent, CUevent))                              \
    CALL(cuOccupancyMaxActiveBlocksPerMultiprocessor, CUresult(int*, CUfunction, int, size_t)) \
    CALL(cuOccupancyMaxActiveClusters, CUresult(int*, CUfunction, const CUlaunchConfig*))     \
    CALL(cuKernelGetFunction, CUresult(CUfunction*, CUkernel))                                \
    CALL(cuGraphKernelNodeGetAttribute, CUresult(CUgraphNode, int, void*))                    \
    CALL(cuGraphKernelNodeSetAttribute, CUresult(CUgraphNode, int, const void*))              \
    CALL(cuFuncGetModule, CUresult(CUmodule*, CUfunction))                                    \
    CALL(cuFuncGetName, CUresult(const char**, CUfunction))                                   \
    CALL(cuKernelGetLibrary, CUresult(CUlibrary*, CUkernel))                                  \
    CALL(cuKernelGetName, CUresult(const char**, CUkernel))                                   \
    CALL(cuGraphChildGraphNodeGetGraph, CUresult(CUgraphNode, CUgraph*))                      \
    CALL(cuGraphClone, CUresult(CUgraph*, CUgraph))                                           \
    CALL(cuGraphDestroyNode, CUresult(CUgraphNode))                                           \
    CALL(cuGraphDestroy, CUresult(CUgraph))                                                   \
    CALL(cuGraphGetNodes, CUresult(CUgraph, CUgraphNode*, size_t*))                           \
    CALL(cuGraphGetEdges_v2, CUresult(CUgraph, CUgraphNode*, CUgraphNode*, void*, size_t*))   \
    CALL(cuGraphNodeFindInClone, CUresult(CUgraphNode*, CUgraphNode, CUgraph))                \
    CALL(cuGraphNodeGetType, CUresult(CUgraphNode, int*))                                     \
    CALL(cuGraphBatchMemOpNodeSetParams, CUresult(CUgraphNode, const void*))                  \
    CALL(cuGraphEventRecordNodeSetEvent, CUresult(CUgraphNode, CUevent))                      \
    CALL(cuGraphEventWaitNodeSetEvent, CUresult(CUgraphNode, CUevent))                        \
    CALL(cuGraphExternalSemaphoresSignalNodeSetParams, CUresult(CUgraphNode, const void*))    \
    CALL(cuGraphExternalSemaphoresWaitNodeSetParams, CUresult(CUgraphNode, const void*))      \
    CALL(cuGraphHostNodeSetParams, CUresult(CUgraphNode, const void*))                        \
    CALL(cuGraphNodeSetParams, CUresult(CUgraphNode, GraphNodeParams*))                       \
    CALL(cuGraphKernelNodeGetParams_v2, CUresult(CUgraphNode, KernelNodeParams*))             \
    CALL(cuGraphKernelNodeSetParams_v2, CUresult(CUgraphNode, const KernelNodeParams*))       \
    CALL(cuGraphMemsetNodeGetParams, CUresult(CUgraphNode, MemsetNodeParams*))                \
    CALL(cuGraphMemcpyNodeGetParams, CUresult(CUgraphNode, void*))

// How users ask for entry points by version.
#define ECLIP_DRIVER_FINDS(CALL)                                         \
    CALL(cuGetProcAddress, CUresult(const char*, void**, int, uint64_t)) \
    CALL(cuGetProcAddress_v2, CUresult(const char*, void**, int, uint64_t, int*))

struct Driver {
#define HOOK(symbol, name, since, threaded, parameters, arguments) CUresult(*symbol) parameters;
#include "hooks.def"
#define ECLIP_CALL(name, ...)   \
    using name##_f = __VA_ARGS__; \
    name##_f* name;
    ECLIP_DRIVER_CALLS(ECLIP_CALL)
    ECLIP_DRIVER_FINDS(ECLIP_CALL)
#undef ECLIP_CALL
};

// The slots, filled on the first call. Empty throughout where there is no driver library.
extern constinit std::atomic<const Driver*> loaded_driver;
const Driver& load_driver();
void others_stand_behind();  // other libraries may come before the driver: the linker is asked
inline const Driver& driver() {
    const Driver* loaded = loaded_driver.load(std::memory_order_acquire);
    return loaded != nullptr ? *loaded : load_driver();
}

// A vendor's part: cuda_driver.cpp or hip/driver.cpp.
void* open_driver_library();  // as the process has it, or none
bool is_driver_library(const char* soname);  // whose own table of symbols has every function
Driver fill_driver();

// The library's own function of this name, whatever we put in front of it.
void* real_symbol(const char* name);

// What comes after us: another library preloaded to see the call, or the driver's function.
void* next_symbol(const char* name);
void* next_or_missing(const char* name);  // or one that says that there is none

// Whether a slot is for a function that this driver does not have.
bool is_missing(void* function);

// preload.cpp replaces dlsym; where it is linked in it also says where the original is.
__attribute__((weak)) void* original_dlsym(void* handle, const char* name);

// One line on standard error, `eclip: …`; said once for each place that says it.
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace eclip
