// A cap on the memory that the process may allocate on its GPUs: eclip exec --memory.
//
// Each call that allocates is counted before the driver sees it, and refused with the driver's own
// status where it would go beyond the cap. What is freed counts no more. Contexts, modules and memory
// nodes of graphs are the driver's own business and are not counted.
#pragma once

#include <atomic>
#include <cstdint>

#include "cuda_abi.h"

namespace eclip::memory {

// What a handle is: numbers of one kind may be those of another.
enum class Kind : int { address, array, mipmapped, physical };

extern std::atomic<int64_t> cap;  // bytes; 0: none; below 0: not read yet
int64_t read_cap();
inline bool on() {
    const int64_t now = cap.load(std::memory_order_relaxed);
    return now > 0 || (now < 0 && read_cap() > 0);
}

bool reserve(uint64_t bytes);  // false: it would be too much, which is said
void give_back(uint64_t bytes);
void note(Kind kind, uint64_t handle, uint64_t bytes);  // of what was reserved
uint64_t forget(Kind kind, uint64_t handle);            // what was noted, or 0

// Around a call that allocates; `handle()` is what it gave.
template <class Call, class Handle>
CUresult allocating(Kind kind, uint64_t bytes, Call&& call, Handle&& handle) {
    if (!on()) return call();
    if (!reserve(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    const CUresult status = call();
    if (status == CUDA_SUCCESS) note(kind, handle(), bytes);
    else give_back(bytes);
    return status;
}

// Around a call that frees. Another thread may be given the same handle before it returns.
template <class Call>
CUresult freeing(Kind kind, uint64_t handle, Call&& call) {
    if (!on() || handle == 0) return call();
    const uint64_t bytes = forget(kind, handle);
    const CUresult status = call();
    if (bytes == 0) return status;
    if (status == CUDA_SUCCESS) give_back(bytes);
    else note(kind, handle, bytes);
    return status;
}

// What the driver says of its memory, as far as the process may use it.
void limit(size_t* free, size_t* total);

// By what a call that drains is given: most free nothing that counts.
template <class Call>
CUresult freeing_any(CUdeviceptr address, Call&& call) {
    return freeing(Kind::address, address, call);
}
template <class Call>
CUresult freeing_any(CUarray array, Call&& call) {
    return freeing(Kind::array, reinterpret_cast<uint64_t>(array), call);
}
template <class Call>
CUresult freeing_any(CUmipmappedArray array, Call&& call) {
    return freeing(Kind::mipmapped, reinterpret_cast<uint64_t>(array), call);
}
template <class Freed, class Call>
CUresult freeing_any(const Freed&, Call&& call) {
    return call();
}

}  // namespace eclip::memory
