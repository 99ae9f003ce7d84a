// The user's streams by their handles.
#pragma once

#include <atomic>
#include <memory>
#include <shared_mutex>
#include <unordered_map>

#include "driver.h"
#include "setup.h"
#include "stream.h"
#include "thread.h"

namespace eclip {

class Registry {
public:
    Registry(StreamOrder& legacy, Followers& followers, const Setup& setup)
        : legacy_(kLegacyStream, legacy), followers_(followers), setup_(setup) {}

    // The stream of a call, or none: of another context than ours, or no stream at all, which the
    // driver will say itself.
    Stream* find(CUstream raw, Default meaning, CUcontext ours) {
        if (is_default(raw)) return find_default(raw, meaning, ours);
        StreamEntry& entry = remembered(raw);
        if (entry.raw != raw || entry.epoch != epoch_.load(std::memory_order_acquire))
            look_up(raw, ours, entry);
        return entry.stream;
    }

    // It is destroyed: another may have its handle next.
    void forget(CUstream raw);
    // Likewise some of other contexts, of which nothing need be forgotten: threads look again.
    void look_again() { epoch_.fetch_add(1, std::memory_order_release); }

    Stream& legacy() { return legacy_; }

    // All but other threads' own ones.
    template <class Visit>
    void visit(Visit&& visit) {
        {
            std::shared_lock hold(lock_);
            for (auto& [raw, stream] : streams_) visit(*stream);
        }
        visit(legacy_);
    }

    // The one with this number, if it still is and may be seen by the calling thread.
    template <class Visit>
    void visit_one(CUstream raw, uint64_t id, Visit&& visit) {
        if (raw == kLegacyStream) return visit(legacy_);
        if (raw == kThreadStream) {
            Stream* own = thread_state().own.get();
            if (own != nullptr && own->order->id == id) visit(*own);
            return;
        }
        std::shared_lock hold(lock_);
        auto known = streams_.find(raw);
        if (known != streams_.end() && known->second->order->id == id) visit(*known->second);
    }

private:
    static bool is_default(CUstream raw) {
        return reinterpret_cast<uintptr_t>(raw) <= reinterpret_cast<uintptr_t>(kThreadStream);
    }
    static StreamEntry& remembered(CUstream raw) {
        StreamEntry* cache = thread_state().streams;
        size_t first = reinterpret_cast<uint64_t>(raw) * 0x9e3779b97f4a7c15ull >> kStreamShift;
        for (size_t next = 0; next < kStreamProbes; ++next) {
            StreamEntry& entry = cache[(first + next) % kStreamCache];
            if (entry.raw == raw || entry.raw == nullptr) return entry;
        }
        return cache[first];
    }
    Stream* find_default(CUstream raw, Default meaning, CUcontext ours);
    void look_up(CUstream raw, CUcontext ours, StreamEntry& entry);

    Stream legacy_;
    Followers& followers_;
    const Setup& setup_;
    std::atomic<uint64_t> next_id_{2};  // 1 is the legacy stream
    std::atomic<uint64_t> epoch_{0};    // what threads remember is of this one, or out of date
    std::shared_mutex lock_;
    std::unordered_map<CUstream, std::unique_ptr<Stream>> streams_;
};

}  // namespace eclip
