// The stand-in's interface, what needs no stream: devices, contexts, memory and libraries.
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>

#include "standin.h"

using namespace standin;

Context standin::primaries[kDevices];

namespace {

constexpr int kDriverVersion = 13000;
thread_local Context* current = nullptr;
std::map<CUdeviceptr, Context*> allocated;
std::atomic<int> retains{0}, users[kDevices];  // of primary contexts

}  // namespace

Context& standin::current_context() { return current != nullptr ? *current : primaries[0]; }

// Green contexts are left out: the promise that they are waited for too is not relied upon.
std::vector<WorkPtr> standin::work_of_all(const Context& context) {
    Engine& engine = Engine::get();
    std::vector<WorkPtr> all;
    for (Stream* stream : engine.streams)
        if (stream->context == &context) all.push_back(stream->last);
    for (const Stream& stream : engine.orphans)
        if (stream.context == &context) all.push_back(stream.last);
    return all;
}

namespace {

void wait_for(const Context& context, Hold& hold) {
    for (const WorkPtr& work : work_of_all(context)) Engine::get().wait(hold, work);
}

CUdeviceptr allocate(size_t bytes) {
    Hold hold = held();
    auto memory = reinterpret_cast<CUdeviceptr>(calloc(1, bytes));
    allocated[memory] = &current_context();
    return memory;
}

// What is freed too early shows at once: it holds something else.
CUresult deallocate(CUdeviceptr memory) {
    Hold hold = held();
    auto known = allocated.find(memory);
    wait_for(known != allocated.end() ? *known->second : current_context(), hold);
    if (known != allocated.end()) allocated.erase(known);
    auto bytes = reinterpret_cast<void*>(memory);
    memset(bytes, 0xdd, malloc_usable_size(bytes));
    free(bytes);
    return CUDA_SUCCESS;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int standin_retains() { return retains; }

API cuInit(unsigned) {
    Hold hold = held();
    for (int device = 0; device < kDevices; ++device) Engine::get().open(primaries[device], device);
    return CUDA_SUCCESS;
}
API cuDriverGetVersion(int* version) { *version = kDriverVersion; return CUDA_SUCCESS; }
API cuDeviceGetCount(int* count) { *count = 1; return CUDA_SUCCESS; }
API cuDeviceGet(CUdevice* device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
API cuDeviceGetUuid(unsigned char* uuid, CUdevice device) {
    for (int index = 0; index < 16; ++index) uuid[index] = static_cast<unsigned char>(16 * device + index);
    return CUDA_SUCCESS;
}
API cuDeviceGetAttribute(int* value, int, CUdevice) { *value = 0; return CUDA_SUCCESS; }
API cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    ++retains;
    ++users[device];
    *context = reinterpret_cast<CUcontext>(&primaries[device]);
    return CUDA_SUCCESS;
}
API cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    --users[device];
    return CUDA_SUCCESS;
}
API cuDevicePrimaryCtxReset_v2(CUdevice) { return CUDA_SUCCESS; }
API cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
    *flags = 0;
    *active = users[device] > 0;
    return CUDA_SUCCESS;
}
API cuCtxCreate_v2(CUcontext* context, unsigned, CUdevice device) {
    Hold hold = held();
    current = new Context;
    Engine::get().open(*current, device);
    *context = reinterpret_cast<CUcontext>(current);
    return CUDA_SUCCESS;
}
API cuCtxDestroy_v2(CUcontext handle) {
    Hold hold = held();
    auto context = reinterpret_cast<Context*>(handle);
    wait_for(*context, hold);
    // With its streams, but for the default one, which is part of it.
    std::erase_if(Engine::get().streams, [&](Stream* stream) {
        if (stream->context != context) return false;
        if (!stream->legacy) delete stream;
        return true;
    });
    if (current == context) current = nullptr;
    delete context;
    return CUDA_SUCCESS;
}
API cuCtxSetCurrent(CUcontext context) {
    current = reinterpret_cast<Context*>(context);
    return CUDA_SUCCESS;
}
API cuCtxGetCurrent(CUcontext* context) {
    *context = reinterpret_cast<CUcontext>(current);
    return CUDA_SUCCESS;
}
API cuCtxGetDevice(CUdevice* device) {
    *device = current_context().device;
    return current != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
API cuCtxSynchronize() {
    Hold hold = held();
    if (CUresult status = unsafe()) return status;
    wait_for(current_context(), hold);
    return CUDA_SUCCESS;
}
API cuMemAlloc_v2(CUdeviceptr* target, size_t bytes) {
    *target = allocate(bytes);
    return CUDA_SUCCESS;
}
API cuMemAllocHost_v2(void** target, size_t bytes) {
    *target = reinterpret_cast<void*>(allocate(bytes));
    return CUDA_SUCCESS;
}
API cuMemFree_v2(CUdeviceptr target) { return deallocate(target); }
API cuMemFreeHost(void* target) { return deallocate(reinterpret_cast<CUdeviceptr>(target)); }
API cuPointerGetAttribute(void* out, int attribute, CUdeviceptr pointer) {
    Hold hold = held();
    auto known = allocated.find(pointer);
    if (attribute != 1 || known == allocated.end()) return CUDA_ERROR_INVALID_VALUE;
    *static_cast<Context**>(out) = known->second;
    return CUDA_SUCCESS;
}
// Any kernel of any library: it does nothing, under the name that was asked for.
API cuLibraryLoadData(CUlibrary* library, const void*, void*, void*, unsigned, void*, void*,
                      unsigned) {
    *library = reinterpret_cast<CUlibrary>(new char);
    return CUDA_SUCCESS;
}
API cuLibraryUnload(CUlibrary) { return CUDA_SUCCESS; }
API cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char* name) {
    *kernel = reinterpret_cast<CUkernel>(
        new Function{strdup(name), [](const uint64_t*) {}, 0, true, library});
    return CUDA_SUCCESS;
}
API cuKernelGetLibrary(CUlibrary* library, CUkernel kernel) {
    *library = reinterpret_cast<Function*>(kernel)->owner;
    return CUDA_SUCCESS;
}
API cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
    *function = reinterpret_cast<CUfunction>(kernel);
    return CUDA_SUCCESS;
}
API cuFuncGetName(const char** name, CUfunction function) {
    auto known = reinterpret_cast<Function*>(function);
    if (known->library) return CUDA_ERROR_INVALID_HANDLE;
    *name = known->name;
    return CUDA_SUCCESS;
}
static std::atomic<int> names_asked{0};
extern "C" __attribute__((visibility("default"))) int standin_names_asked() { return names_asked; }
API cuKernelGetName(const char** name, CUkernel kernel) {
    ++names_asked;
    *name = reinterpret_cast<Function*>(kernel)->name;
    return CUDA_SUCCESS;
}
