#include "names.h"

#include <cstring>

#include "driver.h"
#include "table.h"
#include "thread.h"

namespace eclip {

uint64_t Names::hash_of(CUfunction function) {
    uint64_t epoch = epoch_.load(std::memory_order_relaxed) + 1;
    NameEntry& entry =
        thread_state().names[reinterpret_cast<uintptr_t>(function) >> 4 & (kNameCache - 1)];
    if (entry.function != function || entry.epoch != epoch) {
        const char* name = function_name(function);
        entry = {function, hash_bytes(name, strlen(name)), epoch};
    }
    return entry.hash;
}

const char* function_name(CUfunction function) {
    const Driver& real = driver();
    const char* name = nullptr;
    if (function == nullptr) return "";  // the driver will say so itself
    if (real.cuFuncGetName != nullptr && real.cuFuncGetName(&name, function) == CUDA_SUCCESS && name)
        return name;
    // Launches take kernels as well as functions, by the same argument.
    if (real.cuKernelGetName != nullptr &&
        real.cuKernelGetName(&name, reinterpret_cast<CUkernel>(function)) == CUDA_SUCCESS && name)
        return name;
    return "";
}

}  // namespace eclip
