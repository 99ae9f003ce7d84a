#include "device.h"

namespace eclip::device {

std::optional<Description> describe(CUstream stream) {
    const Driver& real = driver();
    CUcontext context = nullptr;
    unsigned flags = 0;
    if (real.cuStreamGetCtx(stream, &context) != CUDA_SUCCESS ||
        real.cuStreamGetFlags(stream, &flags) != CUDA_SUCCESS)
        return std::nullopt;
    return Description{context, (flags & CU_STREAM_NON_BLOCKING) == 0};
}

bool is_capturing(CUstream stream) {
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    auto ask = driver().cuStreamIsCapturing;
    return ask != nullptr &&
           (ask(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE);
}

bool is_empty(CUstream stream) {
    Relaxed relaxed;
    return driver().cuStreamQuery(stream) == CUDA_SUCCESS;
}

void wait_for(CUstream stream) {
    Relaxed relaxed;
    driver().cuStreamSynchronize(stream);
}

CUresult barrier(CUstream from, CUevent event, CUstream to) {
    CUresult status = driver().cuEventRecord(event, from);
    return status == CUDA_SUCCESS ? wait_event(to, event) : status;
}

CUresult wait_event(CUstream stream, CUevent event) {
    return driver().cuStreamWaitEvent(stream, event, 0);
}

CUresult make_event(CUcontext context, CUevent& event) {
    PrimaryCurrent current(context);
    return driver().cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
}

void destroy_event(CUevent event) { driver().cuEventDestroy_v2(event); }

CUcontext current_context() {
    auto ask = driver().cuCtxGetCurrent;
    CUcontext current = nullptr;
    return ask != nullptr && ask(&current) == CUDA_SUCCESS ? current : nullptr;
}

bool is_current(CUdevice device) { return device >= 0 && current_device() == device; }

CUdevice current_device() {
    auto ask = driver().cuCtxGetDevice;
    CUdevice current = -1;
    return ask != nullptr && ask(&current) == CUDA_SUCCESS ? current : -1;
}

bool has_primary(CUdevice device) {
    auto ask = driver().cuDevicePrimaryCtxGetState;
    unsigned flags = 0;
    int active = 1;
    return ask == nullptr || ask(device, &flags, &active) != CUDA_SUCCESS || active != 0;
}

CUcontext retain_primary(CUdevice device) {
    auto retain = driver().cuDevicePrimaryCtxRetain;
    CUcontext primary = nullptr;
    return retain != nullptr && retain(&primary, device) == CUDA_SUCCESS ? primary : nullptr;
}

void release_primary(CUdevice device) { driver().cuDevicePrimaryCtxRelease_v2(device); }

}  // namespace eclip::device
