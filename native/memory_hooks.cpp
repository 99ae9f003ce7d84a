// Hooks of calls that allocate memory of the GPU, and of what asks how much there is.
#include <cstring>

#include "hook.h"
#include "memory.h"

using namespace eclip;

namespace {

uint64_t pointed(const void* out) { return *static_cast<const uint64_t*>(out); }

// The product, or more than any cap where there is no such number.
uint64_t times(uint64_t one, uint64_t other) {
    uint64_t product = 0;
    return __builtin_mul_overflow(one, other, &product) ? UINT64_MAX : product;
}

// Of an element of an array: by its format, 4 where that is new.
uint64_t element_bytes(unsigned format, unsigned channels) {
    const bool byte = format == 0x01 || format == 0x08, half = format == 0x02 || format == 0x09 ||
                                                                format == 0x10;
    return (byte ? 1 : half ? 2 : 4) * uint64_t{channels > 0 ? channels : 1};
}

struct ArrayShape {
    size_t width, height;
    unsigned format, channels;
};
struct Array3DShape {
    size_t width, height, depth;
    unsigned format, channels, flags;
};

uint64_t bytes_of(const ArrayShape& shape) {
    const uint64_t plane = times(shape.width, shape.height > 0 ? shape.height : 1);
    return times(plane, element_bytes(shape.format, shape.channels));
}
uint64_t bytes_of(const Array3DShape& shape) {
    const uint64_t plane = times(shape.width, shape.height > 0 ? shape.height : 1);
    return times(times(plane, shape.depth > 0 ? shape.depth : 1),
                 element_bytes(shape.format, shape.channels));
}

template <class Call>
CUresult allocate(void* out, uint64_t bytes, Call&& call) {
    return memory::allocating(memory::Kind::address, bytes, call, [&] { return pointed(out); });
}

}  // namespace

ECLIP_HOOK cuMemAlloc_v2(void* out, size_t bytes) {
    return allocate(out, bytes, [&] { return driver().cuMemAlloc_v2(out, bytes); });
}

ECLIP_HOOK cuMemAllocManaged(void* out, size_t bytes, unsigned flags) {
    return allocate(out, bytes, [&] { return driver().cuMemAllocManaged(out, bytes, flags); });
}

// Rows may be longer in the end than what is asked for: at most by 512 bytes.
ECLIP_HOOK cuMemAllocPitch_v2(void* out, void* pitch, size_t width, size_t height, unsigned element) {
    const uint64_t row = width <= UINT64_MAX - 511 ? (width + 511) / 512 * 512 : UINT64_MAX;
    return allocate(out, times(row, height), [&] {
        return driver().cuMemAllocPitch_v2(out, pitch, width, height, element);
    });
}

#define ECLIP_ALLOC_ASYNC(symbol, meaning)                                                       \
    ECLIP_HOOK symbol(void* out, size_t bytes, CUstream stream) {                                \
        giving::taking_place(stream, meaning);                                                   \
        return allocate(out, bytes, [&] {                                                        \
            const auto real = driver().symbol;                                                   \
            return Dispatcher::get().pass(stream, meaning, kHome, false, [&](CUstream target) {  \
                return real(out, bytes, target);                                                 \
            });                                                                                  \
        });                                                                                      \
    }
ECLIP_ALLOC_ASYNC(cuMemAllocAsync, Default::legacy)
ECLIP_ALLOC_ASYNC(cuMemAllocAsync_ptsz, Default::thread)

#define ECLIP_ALLOC_FROM_POOL(symbol, meaning)                                                   \
    ECLIP_HOOK symbol(void* out, size_t bytes, void* pool, CUstream stream) {                    \
        giving::taking_place(stream, meaning);                                                   \
        return allocate(out, bytes, [&] {                                                        \
            const auto real = driver().symbol;                                                   \
            return Dispatcher::get().pass(stream, meaning, kHome, false, [&](CUstream target) {  \
                return real(out, bytes, pool, target);                                           \
            });                                                                                  \
        });                                                                                      \
    }
ECLIP_ALLOC_FROM_POOL(cuMemAllocFromPoolAsync, Default::legacy)
ECLIP_ALLOC_FROM_POOL(cuMemAllocFromPoolAsync_ptsz, Default::thread)

#define ECLIP_FREE_ASYNC(symbol, meaning)                                                        \
    ECLIP_HOOK symbol(CUdeviceptr address, CUstream stream) {                                    \
        giving::taking_place(stream, meaning);                                                   \
        return memory::freeing(memory::Kind::address, address, [&] {                             \
            const auto real = driver().symbol;                                                   \
            return Dispatcher::get().pass(stream, meaning, kHome, false, [&](CUstream target) {  \
                return real(address, target);                                                    \
            });                                                                                  \
        });                                                                                      \
    }
ECLIP_FREE_ASYNC(cuMemFreeAsync, Default::legacy)
ECLIP_FREE_ASYNC(cuMemFreeAsync_ptsz, Default::thread)

// Memory without an address, which is mapped and unmapped; it is there until it is released.
ECLIP_HOOK cuMemCreate(void* out, size_t bytes, const void* properties, uint64_t flags) {
    return memory::allocating(
        memory::Kind::physical, bytes,
        [&] { return driver().cuMemCreate(out, bytes, properties, flags); },
        [&] { return pointed(out); });
}

ECLIP_HOOK cuMemRelease(uint64_t handle) {
    return memory::freeing(memory::Kind::physical, handle,
                           [&] { return driver().cuMemRelease(handle); });
}

ECLIP_HOOK cuArrayCreate_v2(void* out, const void* shape) {
    const auto call = [&] { return driver().cuArrayCreate_v2(out, shape); };
    if (shape == nullptr) return call();
    return memory::allocating(memory::Kind::array, bytes_of(*static_cast<const ArrayShape*>(shape)),
                              call, [&] { return pointed(out); });
}

ECLIP_HOOK cuArray3DCreate_v2(void* out, const void* shape) {
    const auto call = [&] { return driver().cuArray3DCreate_v2(out, shape); };
    if (shape == nullptr) return call();
    return memory::allocating(memory::Kind::array,
                              bytes_of(*static_cast<const Array3DShape*>(shape)), call,
                              [&] { return pointed(out); });
}

// All levels together take at most two times the first.
ECLIP_HOOK cuMipmappedArrayCreate(void* out, const void* shape, unsigned levels) {
    const auto call = [&] { return driver().cuMipmappedArrayCreate(out, shape, levels); };
    if (shape == nullptr) return call();
    const uint64_t first = bytes_of(*static_cast<const Array3DShape*>(shape));
    return memory::allocating(memory::Kind::mipmapped, levels > 1 ? times(first, 2) : first, call,
                              [&] { return pointed(out); });
}

ECLIP_HOOK cuMemGetInfo_v2(size_t* free, size_t* total) {
    const CUresult status = driver().cuMemGetInfo_v2(free, total);
    if (status == CUDA_SUCCESS && memory::on()) memory::limit(free, total);
    return status;
}
