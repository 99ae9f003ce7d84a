// The part of the CUDA driver's binary interface that libeclip touches, declared here so that
// building it needs no CUDA toolkit. tests/native holds sizes and offsets against the real header
// wherever one is found.
#pragma once

#include <cstddef>
#include <cstdint>

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;

#define ECLIP_HANDLE(name) using name = struct name##_handle*
ECLIP_HANDLE(CUcontext);
ECLIP_HANDLE(CUgreenCtx);
ECLIP_HANDLE(CUstream);
ECLIP_HANDLE(CUevent);
ECLIP_HANDLE(CUfunction);
ECLIP_HANDLE(CUkernel);
ECLIP_HANDLE(CUmodule);
ECLIP_HANDLE(CUlibrary);
ECLIP_HANDLE(CUarray);
ECLIP_HANDLE(CUmipmappedArray);
ECLIP_HANDLE(CUmemoryPool);
ECLIP_HANDLE(CUgraph);
ECLIP_HANDLE(CUgraphNode);
ECLIP_HANDLE(CUgraphExec);
ECLIP_HANDLE(CUdevResourceDesc);
#undef ECLIP_HANDLE

struct CUipcEventHandle {
    char reserved[64];
};

struct CUmemLocation {
    int type;
    int id;
};

constexpr CUresult CUDA_SUCCESS = 0;
constexpr CUresult CUDA_ERROR_INVALID_VALUE = 1;
constexpr CUresult CUDA_ERROR_NOT_INITIALIZED = 3;
constexpr CUresult CUDA_ERROR_INVALID_CONTEXT = 201;
constexpr CUresult CUDA_ERROR_INVALID_HANDLE = 400;
constexpr CUresult CUDA_ERROR_NOT_FOUND = 500;
constexpr CUresult CUDA_ERROR_NOT_READY = 600;
constexpr CUresult CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701;
constexpr CUresult CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE = 720;
constexpr CUresult CUDA_ERROR_NOT_SUPPORTED = 801;
constexpr CUresult CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900;
constexpr CUresult CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906;
constexpr CUresult CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE = 910;
constexpr CUresult CUDA_ERROR_INVALID_CLUSTER_SIZE = 912;

constexpr unsigned CU_STREAM_NON_BLOCKING = 1;
constexpr unsigned CU_EVENT_DISABLE_TIMING = 2;
constexpr unsigned CU_GREEN_CTX_DEFAULT_STREAM = 1;
constexpr int CU_DEV_RESOURCE_TYPE_SM = 1;
constexpr int CU_STREAM_CAPTURE_STATUS_NONE = 0;
constexpr int CU_STREAM_CAPTURE_MODE_RELAXED = 2;
constexpr uint64_t CU_GET_PROC_ADDRESS_LEGACY_STREAM = 1;
constexpr uint64_t CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM = 2;
constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75;
constexpr int CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76;
constexpr int CU_GRAPH_EXEC_UPDATE_SUCCESS = 0;
constexpr int CU_POINTER_ATTRIBUTE_CONTEXT = 1;
constexpr int CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION = 4;
constexpr int CU_LAUNCH_ATTRIBUTE_PRIORITY = 8;

inline const CUstream kLegacyStream = reinterpret_cast<CUstream>(uintptr_t{1});
inline const CUstream kThreadStream = reinterpret_cast<CUstream>(uintptr_t{2});

enum CUgraphNodeType : int {
    kNodeKernel = 0,
    kNodeMemcpy = 1,
    kNodeMemset = 2,
    kNodeHost = 3,
    kNodeChild = 4,
    kNodeEmpty = 5,
    kNodeEventWait = 6,
    kNodeEventRecord = 7,
    kNodeAllocate = 10,
    kNodeFree = 11,
    kNodeConditional = 13,
};

struct CUgraphEdgeData {
    unsigned char from_port;
    unsigned char to_port;
    unsigned char type;  // 0: the usual one, 1: programmatic
    unsigned char reserved[5];
};

struct CUlaunchAttribute {
    int id;
    char pad[4];
    union {
        unsigned cluster[3];
        int priority;
        char bytes[64];
    };
};

struct CUlaunchConfig {
    unsigned grid[3];
    unsigned block[3];
    unsigned sharedMemBytes;
    CUstream hStream;
    CUlaunchAttribute* attrs;
    unsigned numAttrs;
};

struct CUdevResource {
    int type;
    unsigned char internal[92];
    union {
        struct {
            unsigned smCount;
            unsigned minSmPartitionSize;
            unsigned smCoscheduledAlignment;
        } sm;
        unsigned char oversize[48];
    };
};

// What cuGraphKernelNodeGetParams_v2 fills in; version 1 lacks the last two fields.
struct KernelNodeParams {
    CUfunction func;
    unsigned grid[3];
    unsigned block[3];
    unsigned sharedMemBytes;
    void** kernelParams;
    void** extra;
    CUkernel kern;
    CUcontext ctx;
};
constexpr size_t kKernelNodeParamsV1 = offsetof(KernelNodeParams, kern);

struct MemsetNodeParams {  // version 1 lacks the context
    CUdeviceptr dst;
    size_t pitch;
    unsigned value;
    unsigned elementSize;
    size_t width;
    size_t height;
    CUcontext ctx;
};

// What cuMemcpy3DPeer is given, as far as the contexts.
struct PeerCopyHalf {
    size_t x, y, z, lod;
    int memory_type;
    void* host;
    CUdeviceptr device;
    CUarray array;
    CUcontext context;
    size_t pitch, height;
};
struct PeerCopy {
    PeerCopyHalf source, target;
    size_t width, height, depth;
};

struct MemcpyNodeParams {
    int flags;
    int reserved;
    CUcontext copyCtx;
    unsigned char copy3d[200];
};

struct GraphNodeParams {
    int type;
    int reserved0[3];
    union {
        long long reserved1[29];
        KernelNodeParams kernel;
        MemcpyNodeParams memcpy;
        MemsetNodeParams memset;
    };
    long long reserved2;
};

struct GraphInstantiateParams {
    uint64_t flags;
    CUstream hUploadStream;
    CUgraphNode hErrNode_out;
    int result_out;
};

struct GraphExecUpdateResultInfo {
    int result;
    CUgraphNode errorNode;
    CUgraphNode errorFromNode;
};
