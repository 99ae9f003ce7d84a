// HIP's types as libeclip and the stand-in need them; tests/native/test_hip_headers.py holds them
// against the real ones.
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
struct hipPitchedPtr {
    void* ptr;
    size_t pitch, xsize, ysize;
};
struct hipExtent {
    size_t width, height, depth;
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
