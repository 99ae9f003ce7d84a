// Notes about events: what each was last recorded behind.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <optional>

#include "cuda_abi.h"

namespace eclip {

// Where two events share a place the later has it, and of the other nothing is known.
template <class Value>
class EventNotes {
public:
    void note(CUevent event, const Value& value) {
        Place& place = place_of(event);
        std::lock_guard hold(place.lock);
        place.event = event;
        place.value = value;
    }

    std::optional<Value> find(CUevent event) {
        if (stopped_.load(std::memory_order_relaxed)) return std::nullopt;
        Place& place = place_of(event);
        std::lock_guard hold(place.lock);
        return place.event == event && event != nullptr ? std::optional<Value>(place.value)
                                                         : std::nullopt;
    }

    void forget(CUevent event) {
        Place& place = place_of(event);
        std::lock_guard hold(place.lock);
        if (place.event == event) place.event = nullptr;
    }

    void stop() { stopped_.store(true); }  // nothing is known of any, from now on

private:
    struct Place {
        std::mutex lock;
        CUevent event = nullptr;
        Value value{};
    };
    static constexpr uint64_t kPlaces = 1024;

    Place& place_of(CUevent event) {
        uint64_t word = reinterpret_cast<uint64_t>(event);
        word = (word ^ word >> 32) * 0x9e3779b97f4a7c15ull;
        return places_[(word ^ word >> 29) % kPlaces];
    }

    Place places_[kPlaces];
    std::atomic<bool> stopped_{false};
};

}  // namespace eclip
