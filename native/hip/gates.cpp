#include "gates.h"

#include <atomic>
#include <mutex>

#include "../device.h"
#include "../dispatcher.h"
#include "driver.h"

namespace eclip::gates {
namespace {

constexpr int kMostDevices = 64;

// Calls that have begun, those that are in their queue, and of these the ones known to be done.
std::atomic<uint64_t> begun{0}, queued{0}, done{0};
std::mutex lock;
CUevent events[kMostDevices];  // of each device
std::atomic<CUstream> waiting{nullptr};  // a stream that waits for all of them, and does nothing else

bool make_waiting() {
    Dispatcher& dispatcher = Dispatcher::get();
    if (waiting.load() != nullptr) return true;
    if (!dispatcher.setup().ready()) return false;
    PrimaryCurrent current(dispatcher.pool().primary);
    CUstream made = nullptr;
    CUresult status = quietly(hip().hipStreamCreateWithFlags(&made, CU_STREAM_NON_BLOCKING));
    if (status == CUDA_SUCCESS) waiting.store(made);
    return status == CUDA_SUCCESS;
}

CUdevice device_of_call(CUstream stream) {
    if (stream != nullptr && stream != kLegacyStream && stream != kThreadStream)
        return hip().hipGetStreamDeviceId(stream);
    int device = -1;
    return quietly(hip().hipGetDevice(&device)) == CUDA_SUCCESS ? device : -1;
}

bool follow(CUstream stream) {
    CUdevice device = device_of_call(stream);
    std::lock_guard hold(lock);
    Relaxed relaxed;  // somebody else may capture
    if (device < 0 || device >= kMostDevices || !make_waiting()) return false;
    CUevent& event = events[device];
    if (event == nullptr && device::make_event(context_of(device), event) != CUDA_SUCCESS)
        return false;
    return device::barrier(stream, event, waiting.load()) == CUDA_SUCCESS;
}

}  // namespace

void begin() { begun.fetch_add(1); }

void put(CUstream stream, Default meaning, bool taken) {
    stream = explicit_handle(stream, meaning);
    // What is captured does not run; what cannot be followed counts as under way for ever.
    if (!taken || Dispatcher::get().captures(stream, meaning) || follow(stream))
        queued.fetch_add(1);
}

void keep() { begin(); }

bool any() {
    uint64_t in_queues = queued.load(), all = begun.load();
    if (done.load(std::memory_order_relaxed) == all) return false;
    CUstream stream = waiting.load();
    if (in_queues != all || (stream != nullptr && !device::is_empty(stream))) return true;
    for (uint64_t before = done.load(); before < all && !done.compare_exchange_weak(before, all);) {
    }
    return false;
}

}  // namespace eclip::gates
