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
    Stream* find(CUstream raw, Default meaning, CUcontext ours);

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
    Stream* find_default(CUstream raw, CUcontext ours);
    Stream* look_up(CUstream raw, CUcontext ours);

    Stream legacy_;
    Followers& followers_;
    const Setup& setup_;
    std::atomic<uint64_t> next_id_{2};  // 1 is the legacy stream
    std::atomic<uint64_t> epoch_{0};    // what threads remember is of this one, or out of date
    std::shared_mutex lock_;
    std::unordered_map<CUstream, std::unique_ptr<Stream>> streams_;
};

}  // namespace eclip
