#include "registry.h"

#include <mutex>

#include "device.h"

namespace eclip {

Stream* Registry::find_default(CUstream raw, Default meaning, CUcontext ours) {
    if (raw == nullptr) raw = meaning == Default::thread ? kThreadStream : kLegacyStream;
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

void Registry::look_up(CUstream raw, CUcontext ours, StreamEntry& entry) {
    entry = {raw, nullptr, epoch_.load(std::memory_order_acquire)};
    {
        std::shared_lock hold(lock_);
        auto known = streams_.find(raw);
        if (known != streams_.end() && known->second->planned) entry.stream = known->second.get();
    }
    if (entry.stream == nullptr) {
        auto description = device::describe(raw);
        if (!description) {
            entry.raw = nullptr;  // it may be one the next time
            return;
        }
        auto made = std::make_unique<Stream>(raw);
        made->own.kind = description->blocking ? Kind::blocking : Kind::nonblocking;
        made->own.id = next_id_.fetch_add(1);
        made->planned = description->context == ours;
        if (setup_.missed_calls()) made->own.tail = kHome;
        std::lock_guard hold(lock_);
        // One of another context may have gone with it, unseen; then nobody uses what we knew of it.
        auto& known = streams_[raw];
        if (known == nullptr || (made->planned && !known->planned)) known = std::move(made);
        entry.stream = known.get();
    }
    if (!entry.stream->planned) entry.stream = nullptr;
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
