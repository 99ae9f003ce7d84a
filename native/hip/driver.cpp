// The slots that the dispatcher and all behind it use, filled with HIP's functions.
#include "driver.h"

#include <dlfcn.h>

#include <initializer_list>

namespace eclip {
namespace {

// Newest first. What the process has loaded counts.
constexpr const char* kLibraries[] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5",
                                      "libamdhip64.so"};

// Older versions have no handle of the default stream but none.
CUstream plain(CUstream stream) { return stream == kLegacyStream ? nullptr : stream; }

CUresult get_current(CUcontext* context) {
    int device = -1;
    CUresult status = quietly(hip().hipGetDevice(&device));
    *context = status == CUDA_SUCCESS ? context_of(device) : nullptr;
    return status;
}

CUresult set_current(CUcontext context) {
    return quietly(hip().hipSetDevice(device_of(context)));
}

CUresult get_state(CUdevice, unsigned* flags, int* active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

CUresult retain(CUcontext* context, CUdevice device) {
    *context = context_of(device);
    return CUDA_SUCCESS;
}

CUresult get_stream_context(CUstream stream, CUcontext* context) {
    int device = hip().hipGetStreamDeviceId(stream);
    *context = device >= 0 ? context_of(device) : nullptr;
    return device >= 0 ? CUDA_SUCCESS : quietly(CUDA_ERROR_INVALID_HANDLE);
}

CUresult get_name(const char** name, CUfunction function) {
    auto address = reinterpret_cast<uintptr_t>(function);
    *name = address & kOfHost
                ? hip().hipKernelNameRefByPtr(reinterpret_cast<void*>(address & ~kOfHost), nullptr)
                : hip().hipKernelNameRef(function);
    return *name != nullptr ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult get_blocks(int* blocks, CUfunction function, int threads, size_t shared_bytes) {
    auto address = reinterpret_cast<uintptr_t>(function);
    auto of_host = hip().hipOccupancyMaxActiveBlocksPerMultiprocessor;
    auto of_module = hip().hipModuleOccupancyMaxActiveBlocksPerMultiprocessor;
    if (of_host == nullptr || of_module == nullptr) return CUDA_ERROR_NOT_SUPPORTED;
    return quietly(address & kOfHost ? of_host(blocks, reinterpret_cast<void*>(address & ~kOfHost),
                                               threads, shared_bytes)
                                     : of_module(blocks, function, threads, shared_bytes));
}

Hip load() {
    Hip table{};
#define HOOK(symbol, name, since, threaded, parameters, arguments) \
    table.symbol = reinterpret_cast<decltype(table.symbol)>(next_or_missing(#symbol));
#include "hooks.def"
#define ECLIP_CALL(name, ...) table.name = reinterpret_cast<Hip::name##_f*>(real_symbol(#name));
    ECLIP_HIP_CALLS(ECLIP_CALL)
#undef ECLIP_CALL
#define ECLIP_CALL(name, ...) table.name = reinterpret_cast<Hip::name##_f*>(next_or_missing(#name));
    ECLIP_HIP_FINDS(ECLIP_CALL)
#undef ECLIP_CALL
    return table;
}

}  // namespace

constinit std::atomic<const Hip*> loaded_hip{nullptr};

const Hip& load_hip() {
    static const Hip table = load();
    loaded_hip.store(&table, std::memory_order_release);
    return table;
}

bool is_driver_library(const char*) { return false; }  // a name has several versions there

void* open_driver_library() {
    for (int flags : {RTLD_LAZY | RTLD_NOLOAD, RTLD_LAZY})
        for (const char* name : kLibraries)
            if (void* found = dlopen(name, flags)) return found;
    return nullptr;
}

// Graphs' slots stay empty: hip/graphs.cpp asks HIP itself.
Driver fill_driver() {
    Driver table{};
    const Hip& real = hip();
    if (real.hipGetDevice == nullptr) return table;
    table.cuCtxGetCurrent = get_current;
    table.cuCtxSetCurrent = set_current;
    table.cuCtxGetDevice = [](CUdevice* device) { return quietly(hip().hipGetDevice(device)); };
    table.cuDevicePrimaryCtxGetState = get_state;
    table.cuDevicePrimaryCtxRetain = retain;
    table.cuDevicePrimaryCtxRelease_v2 = [](CUdevice) { return CUDA_SUCCESS; };
    table.cuDeviceGetUuid = real.hipDeviceGetUuid;
    table.cuStreamCreate = real.hipStreamCreateWithFlags;
    table.cuStreamGetCtx = get_stream_context;
    table.cuStreamGetFlags = real.hipStreamGetFlags;
    table.cuStreamIsCapturing = [](CUstream stream, int* status) {
        return quietly(hip().hipStreamIsCapturing(plain(stream), status));
    };
    table.cuThreadExchangeStreamCaptureMode = real.hipThreadExchangeStreamCaptureMode;
    table.cuStreamQuery = [](CUstream stream) {
        return quietly(hip().hipStreamQuery(plain(stream)));
    };
    table.cuStreamSynchronize = [](CUstream stream) {
        return quietly(hip().hipStreamSynchronize(plain(stream)));
    };
    table.cuStreamWaitEvent = [](CUstream stream, CUevent event, unsigned flags) {
        return quietly(hip().hipStreamWaitEvent(plain(stream), event, flags));
    };
    table.cuEventCreate = real.hipEventCreateWithFlags;
    table.cuEventDestroy_v2 = real.hipEventDestroy;
    table.cuEventElapsedTime = [](float* ms, CUevent from, CUevent to) {
        return quietly(hip().hipEventElapsedTime(ms, from, to));
    };
    table.cuEventQuery = [](CUevent event) { return quietly(hip().hipEventQuery(event)); };
    table.cuEventRecord = [](CUevent event, CUstream stream) {
        return quietly(hip().hipEventRecord(event, plain(stream)));
    };
    table.cuFuncGetName = get_name;
    table.cuOccupancyMaxActiveBlocksPerMultiprocessor = get_blocks;
    return table;
}

}  // namespace eclip
