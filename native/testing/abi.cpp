// Holds cuda_abi.h against the driver's own header; compiled only where there is one.
#include <cuda.h>

#include <cstddef>
#include <cstdint>

namespace ours {
#include "../cuda_abi.h"
}

#define SAME_SIZE(mine, theirs) static_assert(sizeof(ours::mine) == sizeof(::theirs), #mine)
#define SAME_PLACE(mine, field, theirs, their_field) \
    static_assert(offsetof(ours::mine, field) == offsetof(::theirs, their_field), #mine "." #field)
#define SAME_VALUE(name) static_assert(static_cast<long long>(ours::name) == ::name, #name)

SAME_SIZE(CUlaunchConfig, CUlaunchConfig);
SAME_PLACE(CUlaunchConfig, hStream, CUlaunchConfig, hStream);
SAME_PLACE(CUlaunchConfig, numAttrs, CUlaunchConfig, numAttrs);
SAME_SIZE(CUlaunchAttribute, CUlaunchAttribute);
SAME_PLACE(CUlaunchAttribute, cluster, CUlaunchAttribute, value);
SAME_SIZE(CUmemLocation, CUmemLocation);
SAME_SIZE(CUdevResource, CUdevResource);
SAME_PLACE(CUdevResource, sm, CUdevResource, sm);
SAME_SIZE(KernelNodeParams, CUDA_KERNEL_NODE_PARAMS_v2);
SAME_PLACE(KernelNodeParams, kern, CUDA_KERNEL_NODE_PARAMS_v2, kern);
SAME_PLACE(KernelNodeParams, ctx, CUDA_KERNEL_NODE_PARAMS_v2, ctx);
static_assert(ours::kKernelNodeParamsV1 == sizeof(::CUDA_KERNEL_NODE_PARAMS_v1));
SAME_SIZE(MemsetNodeParams, CUDA_MEMSET_NODE_PARAMS_v2);
SAME_PLACE(MemsetNodeParams, ctx, CUDA_MEMSET_NODE_PARAMS_v2, ctx);
SAME_SIZE(MemcpyNodeParams, CUDA_MEMCPY_NODE_PARAMS);
SAME_PLACE(MemcpyNodeParams, copyCtx, CUDA_MEMCPY_NODE_PARAMS, copyCtx);
SAME_PLACE(MemcpyNodeParams, copy3d, CUDA_MEMCPY_NODE_PARAMS, copyParams);
SAME_SIZE(PeerCopy, CUDA_MEMCPY3D_PEER);
SAME_PLACE(PeerCopy, source.context, CUDA_MEMCPY3D_PEER, srcContext);
SAME_PLACE(PeerCopy, target.context, CUDA_MEMCPY3D_PEER, dstContext);
SAME_SIZE(GraphNodeParams, CUgraphNodeParams);
SAME_PLACE(GraphNodeParams, kernel, CUgraphNodeParams, kernel);
SAME_SIZE(GraphInstantiateParams, CUDA_GRAPH_INSTANTIATE_PARAMS);
SAME_SIZE(GraphExecUpdateResultInfo, CUgraphExecUpdateResultInfo);
SAME_VALUE(CUDA_ERROR_NOT_READY);
SAME_VALUE(CUDA_ERROR_NOT_FOUND);
SAME_VALUE(CUDA_ERROR_INVALID_HANDLE);
SAME_VALUE(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
SAME_VALUE(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES);
SAME_VALUE(CUDA_ERROR_INVALID_CLUSTER_SIZE);
SAME_VALUE(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
SAME_VALUE(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
SAME_VALUE(CU_STREAM_NON_BLOCKING);
SAME_VALUE(CU_EVENT_DISABLE_TIMING);
SAME_VALUE(CU_GREEN_CTX_DEFAULT_STREAM);
SAME_VALUE(CU_DEV_RESOURCE_TYPE_SM);
SAME_VALUE(CU_STREAM_CAPTURE_STATUS_NONE);
SAME_VALUE(CU_STREAM_CAPTURE_MODE_RELAXED);
SAME_VALUE(CU_POINTER_ATTRIBUTE_CONTEXT);
SAME_VALUE(CU_GRAPH_EXEC_UPDATE_SUCCESS);
SAME_VALUE(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
SAME_VALUE(CU_LAUNCH_ATTRIBUTE_PRIORITY);
static_assert(int{ours::kNodeKernel} == int{::CU_GRAPH_NODE_TYPE_KERNEL});
static_assert(int{ours::kNodeMemcpy} == int{::CU_GRAPH_NODE_TYPE_MEMCPY});
static_assert(int{ours::kNodeMemset} == int{::CU_GRAPH_NODE_TYPE_MEMSET});
static_assert(int{ours::kNodeEmpty} == int{::CU_GRAPH_NODE_TYPE_EMPTY});
