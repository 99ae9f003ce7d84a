// A cap without a plan: all kernels of the process on some slices of the device, which may change
// while it runs.
//
// Every stream of the program has a lane of its own where the process is, its place, and takes the
// next one when the process moves. No context is bound to a thread. A move is said first; from then on
// launches go to the new place, and the old one is left once no lane there has work. A launch that
// had chosen the old place claims its lane and then looks again where the process is; who waits for
// the old place to be left says the move and then looks at the lanes. One of the two sees the other.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "lanes.h"
#include "stream.h"

namespace eclip {

class Cap {
public:
    explicit Cap(Pool& pool) : pool_(pool) {}

    // Where lanes are claimed; known once, before there is a place.
    void serve(SharedOrder& order) { order_ = &order; }

    bool on() const { return current_.load(std::memory_order_relaxed) >= 0; }

    // Where the calling thread's next work belongs.
    int here() const { return pinned_ >= 0 ? pinned_ : current_.load(); }
    uint64_t slices() const { return pool_.places[current_.load()].slices; }

    // The lane of a stream there; the stream is held. kHome where none is left.
    int lane_for(Stream& stream) {
        int lane = stream.cap_lane;
        bool known = lane >= 0 && is_here(lane) && is_of(lane, stream.order->id);
        return known ? lane : stream.cap_lane = find_lane(stream, here());
    }
    // Still, after it was claimed.
    bool is_here(int lane) const { return pool_.lanes[lane].place == here(); }

    // While it lives, the place of the calling thread stays, and counts as not left.
    class Pin {
    public:
        explicit Pin(Cap& cap);
        ~Pin();
        Pin(const Pin&) = delete;

    private:
        Cap& cap_;
        const int before_;
    };

    // Launches go to these slices from now on. Returns what is wrong, or nothing.
    std::string move(uint64_t slices);
    // Whether nothing of ours runs at any place but the present one.
    bool left_others();

    // The sets of slices that it has been on; known to the thread that moves it.
    int places() const { return place_count_.load(); }
    uint64_t slices_of(int place) const { return pool_.places[place].slices; }

private:
    // Its lane, and not one that a call of it is on the way to: that one may keep the host waiting.
    bool is_of(int lane, uint64_t user) const {
        auto seen = order_->lanes[lane].read();
        return seen.user() == user && !seen.submitting();
    }
    int find_lane(Stream& stream, int place);
    int take_lane(const Stream& stream, int place);
    bool claim(int lane, uint64_t user);
    int add_lane(int place);
    bool rebind(int lane, int place, uint64_t user);
    std::string take_stream(int place, CUstream& stream);
    std::string open(uint64_t slices, int& place);
    bool is_left(int lane);

    static constinit thread_local int pinned_;

    Pool& pool_;
    SharedOrder* order_ = nullptr;
    std::atomic<int> current_{-1};
    std::atomic<int> place_count_{0};
    std::atomic<int> pins_[kMostPlaces]{};
    std::vector<CUstream> unused_[kMostPlaces];  // of lanes that went elsewhere
};

// The slices for so many units: of those that are free as many as fit, at least one. First those that
// are preferred, then the lowest. None: there is no free one.
uint64_t choose_slices(const std::vector<uint32_t>& units, uint32_t wanted, uint64_t free,
                       uint64_t preferred);
uint32_t units_of(const std::vector<uint32_t>& units, uint64_t slices);
uint64_t all_slices(const std::vector<uint32_t>& units);

}  // namespace eclip
