// A driver that does nothing: every call is a return, so that what is left is what libeclip costs.
//
// It has one device of 16 slices, one context, and as many streams, events and functions as asked for.
#include <cstdint>
#include <cstring>

#include "../cuda_abi.h"

// Weak: clocked.cpp has some of them itself.
#define API extern "C" __attribute__((visibility("default"), weak)) CUresult

namespace {

template <class Handle>
CUresult hand_out(Handle* handle) {
    *handle = reinterpret_cast<Handle>(new char[64]);
    return CUDA_SUCCESS;
}

char context;
const CUcontext kContext = reinterpret_cast<CUcontext>(&context);

}  // namespace

// What hooks stand in front of.
#define HOOK(symbol, name, since, threaded, parameters, arguments) \
    _Pragma("GCC diagnostic ignored \"-Wunused-parameter\"")       \
    API symbol parameters { return CUDA_SUCCESS; }
#include "../hooks.def"

// The launch itself, past whatever stands in front of it.
extern "C" __attribute__((visibility("default"))) void* nothing_launch() {
    return reinterpret_cast<void*>(&cuLaunchKernel);
}

API cuInit(unsigned) { return CUDA_SUCCESS; }
API cuDevicePrimaryCtxRetain(CUcontext* made, CUdevice) { return *made = kContext, CUDA_SUCCESS; }
API cuDeviceGetUuid(unsigned char* uuid, CUdevice) { return memset(uuid, 1, 16), CUDA_SUCCESS; }
API cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}
API cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
API cuCtxGetCurrent(CUcontext* current) { return *current = kContext, CUDA_SUCCESS; }
API cuCtxGetDevice(CUdevice* device) { return *device = 0, CUDA_SUCCESS; }
API cuCtxFromGreenCtx(CUcontext* made, CUgreenCtx) { return hand_out(made); }
API cuDeviceGetDevResource(CUdevice, CUdevResource* whole, int) {
    *whole = {};
    whole->sm.smCount = 132;
    return CUDA_SUCCESS;
}
API cuDevSmResourceSplitByCount(CUdevResource* parts, unsigned* count, const CUdevResource* whole,
                                CUdevResource* rest, unsigned, unsigned units) {
    *count = 15;
    for (unsigned index = 0; index < *count; ++index) {
        parts[index] = *whole;
        parts[index].sm.smCount = units;
    }
    *rest = *whole;
    rest->sm.smCount = whole->sm.smCount - *count * units;
    return CUDA_SUCCESS;
}
API cuDevResourceGenerateDesc(CUdevResourceDesc* made, CUdevResource*, unsigned) {
    return hand_out(made);
}
API cuGreenCtxCreate(CUgreenCtx* made, CUdevResourceDesc, CUdevice, unsigned) {
    return hand_out(made);
}
API cuGreenCtxStreamCreate(CUstream* made, CUgreenCtx, unsigned, int) { return hand_out(made); }
API cuStreamCreate(CUstream* made, unsigned flags) {
    CUresult status = hand_out(made);
    memcpy(*made, &flags, sizeof flags);
    return status;
}
API cuStreamGetFlags(CUstream stream, unsigned* flags) {
    memcpy(flags, stream, sizeof *flags);
    return CUDA_SUCCESS;
}
API cuStreamGetCtx(CUstream, CUcontext* of) { return *of = kContext, CUDA_SUCCESS; }
API cuStreamIsCapturing(CUstream, int* status) { return *status = 0, CUDA_SUCCESS; }
API cuThreadExchangeStreamCaptureMode(int*) { return CUDA_SUCCESS; }
API cuEventCreate(CUevent* made, unsigned) { return hand_out(made); }
API cuEventElapsedTime(float* ms, CUevent, CUevent) { return *ms = 0, CUDA_SUCCESS; }
// A function's handle is its name.
API cuFuncGetName(const char** name, CUfunction function) {
    *name = reinterpret_cast<const char*>(function);
    return CUDA_SUCCESS;
}
API cuMemAlloc_v2(CUdeviceptr* made, size_t) { return *made = 64, CUDA_SUCCESS; }
API cuPointerGetAttribute(void* out, int, CUdeviceptr) {
    memcpy(out, &kContext, sizeof kContext);
    return CUDA_SUCCESS;
}
