// The hooks: one function a driver entry point, made from hooks.def class by class, and those that
// need a hand of their own.
#include <cstring>

#include "hook_classes.h"

#define ECLIP_REAL driver()

using namespace eclip;

#define HOOK_EXEC(symbol, name, since, threaded, parameters, arguments) \
    ECLIP_HOOK symbol parameters {                                      \
        a1 = translate(a1);                                             \
        return driver().symbol arguments;                               \
    }
#define HOOK_DRAIN(symbol, name, since, threaded, parameters, arguments)            \
    ECLIP_HOOK symbol parameters {                                                  \
        const auto real = driver().symbol;                                          \
        Dispatcher& dispatcher = Dispatcher::get();                                 \
        if (!dispatcher.on()) return real arguments;                                \
        forget_functions(dispatcher, a1);                                           \
        CUcontext context = Drained{dispatcher} arguments;                          \
        return dispatcher.drain(context, [&] { return real arguments; });           \
    }
#define HOOK_END(symbol, name, since, threaded, parameters, arguments)      \
    ECLIP_HOOK symbol parameters {                                          \
        giving::ending_contexts();                                          \
        const auto real = driver().symbol;                                  \
        Dispatcher& dispatcher = Dispatcher::get();                         \
        if (!dispatcher.on()) return real arguments;                        \
        bool ours = is_ours(dispatcher, a1);                                \
        if (!ours) {                                                        \
            dispatcher.forget_contexts();                                   \
            return real arguments;                                          \
        }                                                                   \
        CUresult status = dispatcher.drain(dispatcher.pool().primary,       \
                                           [&] { return real arguments; }); \
        dispatcher.setup().stop("the context was destroyed");                       \
        return status;                                                      \
    }

namespace {

bool is_ours(Dispatcher& dispatcher, CUcontext context) {
    return context != nullptr && context == dispatcher.pool().primary;
}
bool is_ours(Dispatcher& dispatcher, int device) { return device == dispatcher.pool().device; }

// Functions go with their module or library, and with nothing else that is freed.
void forget_functions(Dispatcher& dispatcher, CUmodule module) {
    dispatcher.workers().identities().forget(module);
}
void forget_functions(Dispatcher& dispatcher, CUlibrary library) {
    dispatcher.workers().identities().forget(library);
}
template <class Freed>
void forget_functions(Dispatcher&, const Freed&) {}

// Whose work may still use what a call frees, by what it is given; none: the current context's.
struct Drained {
    Dispatcher& dispatcher;

    CUcontext operator()(CUdeviceptr memory) const {
        CUcontext owner = nullptr;
        auto ask = driver().cuPointerGetAttribute;
        bool known = ask != nullptr &&
                     ask(&owner, CU_POINTER_ATTRIBUTE_CONTEXT, memory) == CUDA_SUCCESS;
        return known ? owner : nullptr;
    }
    CUcontext operator()(CUdeviceptr memory, size_t) const { return (*this)(memory); }
    CUcontext operator()(void* memory) const {
        return (*this)(reinterpret_cast<CUdeviceptr>(memory));
    }
    CUcontext operator()(uint32_t) const { return nullptr; }
    CUcontext operator()(CUarray) const { return nullptr; }
    CUcontext operator()(CUmipmappedArray) const { return nullptr; }
    CUcontext operator()(CUmodule) const { return nullptr; }
    CUcontext operator()(CUmemoryPool) const { return nullptr; }
    // A library is in all contexts; these launches are on several devices.
    CUcontext operator()(CUlibrary) const { return dispatcher.pool().primary; }
    CUcontext operator()(void*, unsigned, unsigned) const { return dispatcher.pool().primary; }
    CUcontext operator()(int device) const {
        return is_ours(dispatcher, device) ? dispatcher.pool().primary : kNobodys;
    }
    static inline const CUcontext kNobodys = reinterpret_cast<CUcontext>(~uintptr_t{0});
};

}  // namespace

#include "hooks.def"

#define ECLIP_LAUNCH_KERNEL(symbol, meaning)                                                     \
    ECLIP_HOOK symbol(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,          \
                      unsigned by, unsigned bz, unsigned shared, CUstream stream, void* params,  \
                      void* extra) {                                                             \
        const auto real = driver().symbol;                                                       \
        giving::launching_kernel(stream, meaning, f, gx, gy, gz);                                \
        Dispatcher& dispatcher = Dispatcher::get();                                              \
        if (!dispatcher.on())                                                                    \
            return real(f, gx, gy, gz, bx, by, bz, shared, stream, params, extra);               \
        Launch launch{f, {gx, gy, gz}, {bx, by, bz}, shared, 1};                                 \
        return dispatcher.launch(stream, meaning, launch, [&](CUstream target) {                 \
            return real(f, gx, gy, gz, bx, by, bz, shared, target, params, extra);               \
        });                                                                                      \
    }
ECLIP_LAUNCH_KERNEL(cuLaunchKernel, Default::legacy)
ECLIP_LAUNCH_KERNEL(cuLaunchKernel_ptsz, Default::thread)

#define ECLIP_LAUNCH_COOPERATIVE(symbol, meaning)                                                 \
    ECLIP_HOOK symbol(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,           \
                      unsigned by, unsigned bz, unsigned shared, CUstream stream, void* params) { \
        const auto real = driver().symbol;                                                        \
        giving::launching_kernel(stream, meaning, f, gx, gy, gz);                                 \
        Dispatcher& dispatcher = Dispatcher::get();                                               \
        if (!dispatcher.on()) return real(f, gx, gy, gz, bx, by, bz, shared, stream, params);     \
        Launch launch{f, {gx, gy, gz}, {bx, by, bz}, shared, 1};                                  \
        return dispatcher.launch(stream, meaning, launch, [&](CUstream target) {                  \
            return real(f, gx, gy, gz, bx, by, bz, shared, target, params);                       \
        });                                                                                       \
    }
ECLIP_LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel, Default::legacy)
ECLIP_LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel_ptsz, Default::thread)

namespace {

unsigned cluster_of(const CUlaunchConfig& config) {
    if (config.attrs == nullptr) return 1;  // for the driver to say what it thinks of it
    for (unsigned index = 0; index < config.numAttrs; ++index) {
        const CUlaunchAttribute& attribute = config.attrs[index];
        if (attribute.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
            return attribute.cluster[0] * attribute.cluster[1] * attribute.cluster[2];
    }
    return 1;
}

}  // namespace

#define ECLIP_LAUNCH_EX(symbol, meaning)                                                      \
    ECLIP_HOOK symbol(const void* config, CUfunction f, void* params, void* extra) {          \
        const auto real = driver().symbol;                                                    \
        Dispatcher& dispatcher = Dispatcher::get();                                           \
        if (config == nullptr) return real(config, f, params, extra);                         \
        CUlaunchConfig given = *static_cast<const CUlaunchConfig*>(config);                   \
        giving::launching_kernel(given.hStream, meaning, f, given.grid[0], given.grid[1],     \
                                 given.grid[2]);                                              \
        if (!dispatcher.on()) return real(config, f, params, extra);                          \
        Launch launch{f, {given.grid[0], given.grid[1], given.grid[2]},                       \
                      {given.block[0], given.block[1], given.block[2]},                       \
                      given.sharedMemBytes, cluster_of(given)};                               \
        return dispatcher.launch(given.hStream, meaning, launch, [&](CUstream target) {       \
            CUlaunchConfig moved = given;                                                     \
            moved.hStream = target;                                                           \
            return real(&moved, f, params, extra);                                            \
        });                                                                                   \
    }
ECLIP_LAUNCH_EX(cuLaunchKernelEx, Default::legacy)
ECLIP_LAUNCH_EX(cuLaunchKernelEx_ptsz, Default::thread)

ECLIP_WAIT_EVENT(cuStreamWaitEvent, Default::legacy)
ECLIP_WAIT_EVENT(cuStreamWaitEvent_ptsz, Default::thread)

ECLIP_WAIT(cuStreamSynchronize, Default::legacy)
ECLIP_WAIT(cuStreamSynchronize_ptsz, Default::thread)
ECLIP_WAIT(cuStreamQuery, Default::legacy)
ECLIP_WAIT(cuStreamQuery_ptsz, Default::thread)

ECLIP_EVENT_WAIT(cuEventSynchronize)
ECLIP_EVENT_WAIT(cuEventQuery)

ECLIP_EVENT_CHANGE(cuEventDestroy, event, (CUevent event), (event))
ECLIP_EVENT_CHANGE(cuEventDestroy_v2, event, (CUevent event), (event))
ECLIP_EVENT_CHANGE(cuGreenCtxRecordEvent, event, (CUgreenCtx context, CUevent event),
                   (context, event))

// Other processes record it, too.
ECLIP_HOOK cuIpcGetEventHandle(void* handle, CUevent event) {
    Dispatcher::get().distrust_events();
    return driver().cuIpcGetEventHandle(handle, event);
}

ECLIP_HOOK cuIpcOpenEventHandle(void* event, CUipcEventHandle handle) {
    Dispatcher::get().distrust_events();
    return driver().cuIpcOpenEventHandle(event, handle);
}

ECLIP_HOOK cuCtxSynchronize() {
    return giving::waiting_for_all([] {
        Dispatcher& dispatcher = Dispatcher::get();
        if (!dispatcher.on()) return driver().cuCtxSynchronize();
        return dispatcher.drain(nullptr, [] { return driver().cuCtxSynchronize(); });
    });
}

ECLIP_HOOK cuCtxSynchronize_v2(CUcontext context) {
    return giving::waiting_for_all([&] {
        Dispatcher& dispatcher = Dispatcher::get();
        if (!dispatcher.on()) return driver().cuCtxSynchronize_v2(context);
        return dispatcher.drain(context, [&] { return driver().cuCtxSynchronize_v2(context); });
    });
}

#define ECLIP_PEER(symbol, meaning)                                                             \
    ECLIP_HOOK symbol(CUdeviceptr target, CUcontext target_context, CUdeviceptr source,         \
                      CUcontext source_context, size_t bytes) {                                 \
        const auto real = driver().symbol;                                                      \
        return Dispatcher::get().copy_between(target_context, source_context, meaning, [&] {    \
            return real(target, target_context, source, source_context, bytes);                 \
        });                                                                                     \
    }
ECLIP_PEER(cuMemcpyPeer, Default::legacy)
ECLIP_PEER(cuMemcpyPeer_ptds, Default::thread)

#define ECLIP_PEER_3D(symbol, meaning)                                                          \
    ECLIP_HOOK symbol(const void* params) {                                                     \
        const auto real = driver().symbol;                                                      \
        if (params == nullptr) return real(params);                                             \
        auto copy = static_cast<const PeerCopy*>(params);                                       \
        return Dispatcher::get().copy_between(copy->target.context, copy->source.context,       \
                                              meaning, [&] { return real(params); });           \
    }
ECLIP_PEER_3D(cuMemcpy3DPeer, Default::legacy)
ECLIP_PEER_3D(cuMemcpy3DPeer_ptds, Default::thread)

ECLIP_HOOK cuCtxRecordEvent(CUcontext context, CUevent event) {
    forget_event(event);
    return Dispatcher::get().context_event(
        context, event, false, [&] { return driver().cuCtxRecordEvent(context, event); });
}

ECLIP_HOOK cuCtxWaitEvent(CUcontext context, CUevent event) {
    return Dispatcher::get().context_event(
        context, event, true, [&] { return driver().cuCtxWaitEvent(context, event); });
}

ECLIP_HOOK cuStreamDestroy(CUstream stream) {
    giving::destroying(stream);
    return Dispatcher::get().destroy(stream, driver().cuStreamDestroy);
}

ECLIP_HOOK cuStreamDestroy_v2(CUstream stream) {
    giving::destroying(stream);
    return Dispatcher::get().destroy(stream, driver().cuStreamDestroy_v2);
}

#define ECLIP_CAPTURE_BOTH(way, symbol, parameters, arguments)                         \
    ECLIP_CAPTURE(way, symbol, Default::legacy, parameters, arguments)                 \
    ECLIP_CAPTURE(way, symbol##_ptsz, Default::thread, parameters, arguments)
ECLIP_CAPTURE_BOTH(begin_capture, cuStreamBeginCapture, (CUstream stream), (stream))
ECLIP_CAPTURE_BOTH(begin_capture, cuStreamBeginCapture_v2, (CUstream stream, int mode),
                   (stream, mode))
ECLIP_CAPTURE_BOTH(begin_capture, cuStreamBeginCaptureToGraph,
                   (CUstream stream, CUgraph graph, const void* nodes, const void* data,
                    size_t count, int mode),
                   (stream, graph, nodes, data, count, mode))
ECLIP_CAPTURE_BOTH(end_capture, cuStreamEndCapture, (CUstream stream, void* graph), (stream, graph))

CUresult giving::record_as_program(CUevent event, CUstream stream, Default meaning) {
    return meaning == Default::thread ? ::cuEventRecord_ptsz(event, stream)
                                      : ::cuEventRecord(event, stream);
}

CUresult giving::query_as_program(CUstream stream) { return ::cuStreamQuery(stream); }
