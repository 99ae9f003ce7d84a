#include "services.h"

#include <algorithm>
#include <atomic>

namespace eclip::giving {
namespace {

constexpr int64_t kQuietNs = 5'000'000, kLongestQuietNs = 100'000'000;

// What a row of a service last showed, and since when it shows that.
struct Shown {
    std::atomic<int64_t> launched{-1}, since{0}, changed_ns{0};
};
Shown shown[ECLIP_BOARD_ROWS];

// A service that launches nothing may be waiting for us. One whose requests are long may not.
bool is_quiet(int index, const eclip_board_row& row, int64_t now) {
    Shown& last = shown[index];
    int64_t launched = read_word(row.launched), since = read_word(row.busy_since);
    if (launched != last.launched.load() || since != last.since.load()) {
        last.launched.store(launched);
        last.since.store(since);
        last.changed_ns.store(now);
        return false;
    }
    int64_t limit = std::clamp(2 * read_word(row.tail_ns), kQuietNs, kLongestQuietNs);
    return now - last.changed_ns.load() > limit;
}

// As core/decide.py has it, for background that yields at any slack.
bool counts_as_busy(const eclip_board_row& row, int64_t now) {
    int64_t since = read_word(row.busy_since), bound = read_word(row.bound_ns);
    if (read_word(row.tier) != ECLIP_SERVICE || since == ECLIP_IDLE) return false;
    if (now - read_word(row.heartbeat) > ECLIP_STOPPED_NS) return false;
    return bound == 0 || now - since <= ECLIP_HUNG_BOUNDS * bound;
}

}  // namespace

bool a_service_is_busy(int64_t now) {
    const Seat& seat = Seat::get();
    for (int index = 0, count = seat.services(); index < count; ++index) {
        int row = seat.service(index);
        if (counts_as_busy(seat.row(row), now) && !is_quiet(row, seat.row(row), now)) return true;
    }
    return false;
}

int64_t Requests::count() {
    const Seat& seat = Seat::get();
    int64_t served = 0;
    for (int index = 0, count = seat.services(); index < count; ++index)
        served += read_word(seat.row(seat.service(index)).served);
    return served;
}

}  // namespace eclip::giving
