#include "cap.h"

#include <algorithm>
#include <mutex>

#include "device.h"
#include "stats.h"

namespace eclip {
namespace {

constexpr int kEasyLanes = 8;  // of a place, before streams take those of others that are idle
constexpr uint32_t kMostCapSlices = 64;

}  // namespace

constinit thread_local int Cap::pinned_ = -1;

Cap::Pin::Pin(Cap& cap) : cap_(cap), before_(pinned_) {
    while (before_ < 0) {
        int place = cap_.current_.load();
        cap_.pins_[place].fetch_add(1);
        pinned_ = place;
        if (cap_.current_.load() == place) return;
        cap_.pins_[place].fetch_sub(1);
    }
}

Cap::Pin::~Pin() {
    if (before_ >= 0) return;
    cap_.pins_[pinned_].fetch_sub(1);
    pinned_ = -1;
}

std::string Cap::move(uint64_t slices) {
    int place = -1;
    std::string wrong = open(slices, place);
    if (wrong.empty()) current_.store(place);
    return wrong;
}

// By one thread at a time.
std::string Cap::open(uint64_t slices, int& place) {
    for (place = 0; place < place_count_.load(); ++place)
        if (pool_.places[place].slices == slices) return "";
    if (place == kMostPlaces)
        return "this process has been on " + std::to_string(kMostPlaces) +
               " sets of SMs, and the driver takes none back";
    CapPlace made;
    made.slices = slices;
    Relaxed relaxed;
    PrimaryCurrent current(pool_.primary);
    std::string wrong = masks::open_place(pool_, made);
    if (wrong.empty()) wrong = masks::make_stream(pool_, made, made.first);
    if (!wrong.empty()) return wrong;
    pool_.places[place] = made;
    unused_[place].push_back(made.first);
    place_count_.fetch_add(1);
    return "";
}

bool Cap::left_others() {
    const int here = current_.load();
    for (int place = 0; place < place_count_.load(); ++place)
        if (place != here && pins_[place].load() != 0) return false;
    for (size_t lane = 0; lane < pool_.count; ++lane)
        if (pool_.lanes[lane].place != here && !is_left(static_cast<int>(lane))) return false;
    return true;
}

bool Cap::is_left(int lane) {
    auto seen = order_->lanes[lane].read();
    if (seen.submitting()) return false;
    if (!seen.busy()) return true;
    return device::is_empty(pool_.lanes[lane].stream) && order_->lanes[lane].emptied(seen);
}

int Cap::find_lane(Stream& stream, int place) {
    std::lock_guard hold(pool_.growing);
    int lane = stream.order->id > kLastUser ? kHome : take_lane(stream, place);
    if (lane >= 0) return lane;
    say("more than %d streams have work at once: those beyond run on the whole device", kMostLanes);
    count(counters().contended);
    return kHome;
}

int Cap::take_lane(const Stream& stream, int place) {
    const int count = static_cast<int>(pool_.count.load());
    const uint64_t user = stream.order->id;
    auto is_at = [&](int lane) { return pool_.lanes[lane].place == place; };
    int there = 0;
    for (int lane = 0; lane < count; ++lane) {
        there += is_at(lane);
        if (is_at(lane) && is_of(lane, user)) return lane;
    }
    for (int lane = 0; lane < count; ++lane)
        if (is_at(lane) && is_of(lane, 0) && claim(lane, user)) return lane;
    int made = there < kEasyLanes ? add_lane(place) : -1;
    if (made >= 0 && claim(made, user)) return made;
    for (int lane = 0; lane < count; ++lane)
        if (is_at(lane) && is_left(lane) && claim(lane, user)) return lane;
    made = there < kEasyLanes ? -1 : add_lane(place);
    if (made >= 0 && claim(made, user)) return made;
    for (int lane = 0; lane < count; ++lane)
        if (!is_at(lane) && is_left(lane) && rebind(lane, place, user)) return lane;
    return -1;
}

// For a stream, which finds it there until another has it.
bool Cap::claim(int lane, uint64_t user) {
    LaneWord& word = order_->lanes[lane];
    auto seen = word.read();
    if (seen.busy() || seen.submitting() || !word.claim(seen, user)) return false;
    order_->stray.fetch_and(~(uint64_t{1} << lane), std::memory_order_acq_rel);
    word.submitted();
    return true;
}

int Cap::add_lane(int place) {
    const int number = static_cast<int>(pool_.count.load());
    CUstream stream = nullptr;
    CUevent event = nullptr;
    if (number == kMostLanes || device::make_event(pool_.primary, event) != CUDA_SUCCESS) return -1;
    if (!take_stream(place, stream).empty()) {
        device::destroy_event(event);
        return -1;
    }
    Lane& lane = pool_.lanes[number];
    lane.stream = stream;
    lane.event = event;
    lane.context = pool_.places[place].context;
    lane.place = place;
    pool_.count.fetch_add(1);
    return number;
}

// An empty lane of another place.
bool Cap::rebind(int lane, int place, uint64_t user) {
    LaneWord& word = order_->lanes[lane];
    auto seen = word.read();
    CUstream stream = nullptr;
    if (seen.busy() || seen.submitting() || !take_stream(place, stream).empty()) return false;
    if (!word.claim(seen, user)) {
        unused_[place].push_back(stream);
        return false;
    }
    order_->stray.fetch_and(~(uint64_t{1} << lane), std::memory_order_acq_rel);
    Lane& moved = pool_.lanes[lane];
    unused_[moved.place].push_back(moved.stream);
    moved.stream = stream;
    moved.context = pool_.places[place].context;
    moved.place = place;
    word.submitted();
    return true;
}

std::string Cap::take_stream(int place, CUstream& stream) {
    if (unused_[place].empty()) {
        Relaxed relaxed;
        return masks::make_stream(pool_, pool_.places[place], stream);
    }
    stream = unused_[place].back();
    unused_[place].pop_back();
    return "";
}

uint64_t all_slices(const std::vector<uint32_t>& units) {
    size_t count = std::min<size_t>(units.size(), kMostCapSlices);
    return count == kMostCapSlices ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
}

uint32_t units_of(const std::vector<uint32_t>& units, uint64_t slices) {
    uint32_t sum = 0;
    for (; slices != 0; slices &= slices - 1) sum += units[__builtin_ctzll(slices)];
    return sum;
}

uint64_t choose_slices(const std::vector<uint32_t>& units, uint32_t wanted, uint64_t free,
                       uint64_t preferred) {
    uint64_t chosen = 0;
    free &= all_slices(units);
    for (uint64_t from : {free & preferred, free & ~preferred})
        for (; from != 0; from &= from - 1) {
            const uint64_t slice = from & -from;
            const uint32_t sum = units_of(units, chosen | slice);
            if (sum <= wanted || chosen == 0) chosen |= slice;
        }
    return chosen;
}

}  // namespace eclip
