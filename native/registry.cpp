#include "registry.h"

#include <mutex>

#include "device.h"

namespace eclip {

Stream* Registry::find(CUstream raw, Default meaning, CUcontext ours) {
    if (raw == nullptr) raw = meaning == Default::thread ? kThreadStream : kLegacyStream;
    if (raw == kLegacyStream || raw == kThreadStream) return find_default(raw, ours);
    uint64_t epoch = epoch_.load(std::memory_order_acquire);
    StreamEntry& entry =
        thread_state().streams[reinterpret_cast<uintptr_t>(raw) >> 4 & (kStreamCache - 1)];
    if (entry.raw != raw || entry.epoch != epoch || entry.stream == nullptr)
        entry = {raw, look_up(raw, ours), epoch};
    return entry.stream != nullptr && entry.stream->planned ? entry.stream : nullptr;
}

Stream* Registry::find_default(CUstream raw, CUcontext ours) {
    if (device::current_context() != ours) return nullptr;
    if (raw == kLegacyStream) return &legacy_;
    ThreadState& thread = thread_state();
    if (!thread.own) {
        thread.own = std::make_unique<Stream>(kThreadStream);
        thread.own->own.kind = Kind::blocking;
        thread.own->own.id = next_id_.fetch_add(1);
        thread.followers = &followers_;
    }
    return thread.own.get();
}

Stream* Registry::look_up(CUstream raw, CUcontext ours) {
    {
        std::shared_lock hold(lock_);
        auto known = streams_.find(raw);
        if (known != streams_.end() && known->second->planned) return known->second.get();
    }
    auto description = device::describe(raw);
    if (!description) return nullptr;
    auto made = std::make_unique<Stream>(raw);
    made->own.kind = description->blocking ? Kind::blocking : Kind::nonblocking;
    made->own.id = next_id_.fetch_add(1);
    made->planned = description->context == ours;
    if (setup_.missed_calls()) made->own.tail = kHome;
    std::lock_guard hold(lock_);
    // One of another context may have gone with it, unseen; then nobody uses what we knew of it.
    auto& known = streams_[raw];
    if (known == nullptr || (made->planned && !known->planned)) known = std::move(made);
    return known.get();
}

void Registry::forget(CUstream raw) {
    std::lock_guard hold(lock_);
    auto known = streams_.find(raw);
    if (known != streams_.end()) {
        known->second->tracker.leave(followers_);
        if (known->second->event != nullptr) device::destroy_event(known->second->event);
        streams_.erase(known);
    }
    look_again();
}

}  // namespace eclip
