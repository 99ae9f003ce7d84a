// HIP's types as the stand-in needs them; tests/native/test_hip_headers.py holds their sizes against
// the real ones through the table in devices/hip/api.py.
#pragma once

#include <cstddef>
#include <cstdint>

using hipStream_t = struct ihipStream_t*;
using hipEvent_t = struct ihipEvent_t*;
using hipGraph_t = struct ihipGraph*;
using hipGraphNode_t = struct hipGraphNode*;
using hipGraphExec_t = struct hipGraphExec*;

struct dim3 {
    uint32_t x, y, z;
};
struct hipUUID {
    char bytes[16];
};
struct hipKernelNodeParams {
    dim3 blockDim;
    void** extra;
    void* func;
    dim3 gridDim;
    void** kernelParams;
    unsigned sharedMemBytes;
};
struct hipMemsetParams {
    void* dst;
    unsigned elementSize;
    size_t height, pitch;
    unsigned value;
    size_t width;
};
static_assert(sizeof(hipKernelNodeParams) == 64 && sizeof(hipMemsetParams) == 48);
