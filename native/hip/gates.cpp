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

// A stream that waits for all of them and does nothing else; none before there are lanes.
CUstream aside() {
    Dispatcher& dispatcher = Dispatcher::get();
    return dispatcher.setup().ready() ? dispatcher.pool().aside : nullptr;
}

CUdevice device_of_call(CUstream stream) {
    if (stream != nullptr && stream != kLegacyStream && stream != kThreadStream)
        return hip().hipGetStreamDeviceId(stream);
    int device = -1;
    return quietly(hip().hipGetDevice(&device)) == CUDA_SUCCESS ? device : -1;
}

bool wait_aside(CUstream stream) {
    CUdevice device = device_of_call(stream);
    CUstream waits = aside();
    if (device < 0 || device >= kMostDevices || waits == nullptr) return false;
    std::lock_guard hold(lock);
    CUevent& event = events[device];
    if (event == nullptr && device::make_event(context_of(device), event) != CUDA_SUCCESS)
        return false;
    return device::barrier(stream, event, waits) == CUDA_SUCCESS;
}

}  // namespace

void begin() { begun.fetch_add(1); }

void put(CUstream stream, Default meaning, bool taken) {
    if (stream == nullptr && meaning == Default::thread) stream = kThreadStream;
    // What is captured does not run; what cannot be followed counts as under way for ever.
    if (!taken || Dispatcher::get().captures(stream, meaning) || wait_aside(stream))
        queued.fetch_add(1);
}

void keep() { begin(); }

bool any() {
    uint64_t in_queues = queued.load(), all = begun.load();
    if (done.load(std::memory_order_relaxed) == all) return false;
    CUstream waits = aside();
    if (in_queues != all || waits == nullptr || !device::is_empty(waits)) return true;
    for (uint64_t before = done.load(); before < all && !done.compare_exchange_weak(before, all);) {
    }
    return false;
}

}  // namespace eclip::gates
