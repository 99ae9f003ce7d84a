// HIP's hooks: one function an entry point, made from hooks.def class by class, and those that need
// a hand of their own.
#include "driver.h"
#include "gates.h"

#include "../hook_classes.h"

#define ECLIP_REAL hip()

using namespace eclip;

#define HOOK_GATE(symbol, name, since, threaded, parameters, arguments)        \
    ECLIP_HOOK symbol parameters {                                             \
        giving::taking_place(stream, ECLIP_MEANING_##threaded);                \
        const auto real = hip().symbol;                                        \
        Dispatcher& dispatcher = Dispatcher::get();                            \
        if (!dispatcher.on()) return real arguments;                           \
        const CUstream given = stream;                                         \
        gates::begin();                                                        \
        CUresult status = dispatcher.pass(                                     \
            stream, ECLIP_MEANING_##threaded, kHome, false,                    \
            [&](CUstream target) { stream = target; return real arguments; }); \
        gates::put(given, ECLIP_MEANING_##threaded, status == CUDA_SUCCESS);   \
        return status;                                                         \
    }
#include "hooks.def"

namespace {

// A launch by whatever entry point; what a lane refuses is not for the program to find.
template <class Call>
CUresult launch(CUstream stream, Default meaning, const Launch& launch, Call&& call) {
    giving::launching_kernel(stream, meaning, launch.function, launch.grid[0], launch.grid[1],
                             launch.grid[2]);
    Dispatcher& dispatcher = Dispatcher::get();
    if (!dispatcher.on()) return call(stream);
    return dispatcher.launch(stream, meaning, launch, [&](CUstream target) {
        CUresult status = call(target);
        return target == stream ? status : quietly(status);
    });
}

Launch launch_of(const void* host, const dim3& grid, const dim3& block, size_t shared_bytes) {
    return {function_of(host), {grid.x, grid.y, grid.z}, {block.x, block.y, block.z},
            static_cast<unsigned>(shared_bytes), 1};
}

}  // namespace

ECLIP_HOOK hipModuleLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                 unsigned by, unsigned bz, unsigned shared, CUstream stream,
                                 void* params, void* extra) {
    const Launch made{f, {gx, gy, gz}, {bx, by, bz}, shared, 1};
    return launch(stream, Default::legacy, made, [&](CUstream target) {
        return hip().hipModuleLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, target, params, extra);
    });
}

ECLIP_HOOK hipModuleLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz,
                                            unsigned bx, unsigned by, unsigned bz, unsigned shared,
                                            CUstream stream, void* params) {
    const Launch made{f, {gx, gy, gz}, {bx, by, bz}, shared, 1};
    return launch(stream, Default::legacy, made, [&](CUstream target) {
        return hip().hipModuleLaunchCooperativeKernel(f, gx, gy, gz, bx, by, bz, shared, target,
                                                      params);
    });
}

#define ECLIP_LAUNCH_HOST(symbol, meaning, bytes)                                          \
    ECLIP_HOOK symbol(const void* host, dim3 grid, dim3 block, void* params, bytes shared, \
                      CUstream stream) {                                                   \
        const Launch made = launch_of(host, grid, block, shared);                          \
        return launch(stream, meaning, made, [&](CUstream target) {                        \
            return hip().symbol(host, grid, block, params, shared, target);                \
        });                                                                                \
    }
ECLIP_LAUNCH_HOST(hipLaunchKernel, Default::legacy, size_t)
ECLIP_LAUNCH_HOST(hipLaunchKernel_spt, Default::thread, size_t)
ECLIP_LAUNCH_HOST(hipLaunchCooperativeKernel, Default::legacy, unsigned)
ECLIP_LAUNCH_HOST(hipLaunchCooperativeKernel_spt, Default::thread, unsigned)

// These record events around the kernel, wherever it runs.
ECLIP_HOOK hipExtLaunchKernel(const void* host, dim3 grid, dim3 block, void* params, size_t shared,
                              CUstream stream, CUevent start, CUevent stop, int flags) {
    for (CUevent event : {start, stop})
        if (event != nullptr) forget_event(event);
    const Launch made = launch_of(host, grid, block, shared);
    return launch(stream, Default::legacy, made, [&](CUstream target) {
        return hip().hipExtLaunchKernel(host, grid, block, params, shared, target, start, stop,
                                        flags);
    });
}

namespace {

// The grid in threads, as these have it, in blocks.
unsigned blocks_of(unsigned threads, unsigned of_block) {
    return of_block == 0 ? threads : (threads + of_block - 1) / of_block;
}

}  // namespace

// ROCm 5.2 has them in C++ only; hipHcc… takes no flags.
#define ECLIP_LAUNCH_EXT(symbol, FLAGS, flags)                                                   \
    ECLIP_HOOK symbol(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,          \
                      unsigned by, unsigned bz, size_t shared, CUstream stream, void* params,    \
                      void* extra, CUevent start, CUevent stop FLAGS) {                          \
        for (CUevent event : {start, stop})                                                      \
            if (event != nullptr) forget_event(event);                                           \
        const Launch made{f, {blocks_of(gx, bx), blocks_of(gy, by), blocks_of(gz, bz)},          \
                          {bx, by, bz}, static_cast<unsigned>(shared), 1};                       \
        return launch(stream, Default::legacy, made, [&](CUstream target) {                      \
            return hip().symbol(f, gx, gy, gz, bx, by, bz, shared, target, params, extra, start, \
                                stop flags);                                                     \
        });                                                                                      \
    }
#define ECLIP_COMMA ,
ECLIP_LAUNCH_EXT(hipExtModuleLaunchKernel, ECLIP_COMMA unsigned flags, ECLIP_COMMA flags)
ECLIP_LAUNCH_EXT(
    _Z24hipExtModuleLaunchKernelP18ihipModuleSymbol_tjjjjjjmP12ihipStream_tPPvS4_P11ihipEvent_tS6_j,
    ECLIP_COMMA unsigned flags, ECLIP_COMMA flags)
ECLIP_LAUNCH_EXT(
    _Z24hipHccModuleLaunchKernelP18ihipModuleSymbol_tjjjjjjmP12ihipStream_tPPvS4_P11ihipEvent_tS6_, , )

ECLIP_WAIT_EVENT(hipStreamWaitEvent, Default::legacy)
ECLIP_WAIT_EVENT(hipStreamWaitEvent_spt, Default::thread)
ECLIP_WAIT(hipStreamSynchronize, Default::legacy)
ECLIP_WAIT(hipStreamSynchronize_spt, Default::thread)
ECLIP_WAIT(hipStreamQuery, Default::legacy)
ECLIP_WAIT(hipStreamQuery_spt, Default::thread)
ECLIP_EVENT_WAIT(hipEventSynchronize)
ECLIP_EVENT_WAIT(hipEventQuery)
ECLIP_EVENT_CHANGE(hipEventDestroy, event, (CUevent event), (event))

// Other processes record it, too, and may be what a stream waits for.
ECLIP_HOOK hipIpcGetEventHandle(void* handle, CUevent event) {
    Dispatcher::get().distrust_events();
    gates::keep();
    return hip().hipIpcGetEventHandle(handle, event);
}

ECLIP_HOOK hipIpcOpenEventHandle(void* event, CUipcEventHandle handle) {
    Dispatcher::get().distrust_events();
    gates::keep();
    return hip().hipIpcOpenEventHandle(event, handle);
}

#define ECLIP_WAIT_FOR_ALL(symbol)                                           \
    ECLIP_HOOK symbol() {                                                    \
        return giving::waiting_for_all([] {                                  \
            Dispatcher& dispatcher = Dispatcher::get();                      \
            if (!dispatcher.on()) return hip().symbol();                     \
            return dispatcher.drain(nullptr, [] { return hip().symbol(); }); \
        });                                                                  \
    }
ECLIP_WAIT_FOR_ALL(hipDeviceSynchronize)
ECLIP_WAIT_FOR_ALL(hipCtxSynchronize)

ECLIP_HOOK hipMemcpyPeer(void* target, int target_device, const void* source, int source_device,
                         size_t bytes) {
    return Dispatcher::get().copy_between(
        context_of(target_device), context_of(source_device), Default::legacy, [&] {
            return hip().hipMemcpyPeer(target, target_device, source, source_device, bytes);
        });
}

ECLIP_HOOK hipModuleUnload(CUmodule module) {
    Dispatcher& dispatcher = Dispatcher::get();
    if (dispatcher.on()) dispatcher.workers().identities().forget(module);
    return hip().hipModuleUnload(module);
}

namespace {

// All of a device goes, its streams and our lanes, too.
template <class Call>
CUresult reset(CUdevice device, Call&& call) {
    giving::ending_contexts();
    Dispatcher& dispatcher = Dispatcher::get();
    if (!dispatcher.on()) return call();
    if (device != dispatcher.pool().device) {
        dispatcher.forget_contexts();
        return call();
    }
    CUresult status = dispatcher.drain(dispatcher.pool().primary, call);
    dispatcher.setup().stop("the device was reset");
    return status;
}

}  // namespace

ECLIP_HOOK hipDeviceReset() {
    int device = -1;
    quietly(hip().hipGetDevice(&device));
    return reset(device, [] { return hip().hipDeviceReset(); });
}

ECLIP_HOOK hipDevicePrimaryCtxReset(int device) {
    return reset(device, [&] { return hip().hipDevicePrimaryCtxReset(device); });
}

ECLIP_HOOK hipStreamDestroy(CUstream stream) {
    giving::destroying(stream);
    return Dispatcher::get().destroy(stream, hip().hipStreamDestroy);
}

ECLIP_CAPTURE(begin_capture, hipStreamBeginCapture, Default::legacy, (CUstream stream, int mode),
              (stream, mode))
ECLIP_CAPTURE(begin_capture, hipStreamBeginCapture_spt, Default::thread, (CUstream stream, int mode),
              (stream, mode))
ECLIP_CAPTURE(begin_capture, hipStreamBeginCaptureToGraph, Default::legacy,
              (CUstream stream, CUgraph graph, const void* nodes, const void* data, size_t count,
               int mode),
              (stream, graph, nodes, data, count, mode))
ECLIP_CAPTURE(end_capture, hipStreamEndCapture, Default::legacy, (CUstream stream, void* graph),
              (stream, graph))
ECLIP_CAPTURE(end_capture, hipStreamEndCapture_spt, Default::thread, (CUstream stream, void* graph),
              (stream, graph))

CUresult giving::record_as_program(CUevent event, CUstream stream, Default meaning) {
    return ::hipEventRecord(event, explicit_handle(stream, meaning));
}

CUresult giving::query_as_program(CUstream stream) { return ::hipStreamQuery(stream); }
