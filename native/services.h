// Services of other processes, as background sees their rows on the board.
#pragma once

#include "seat.h"

namespace eclip::giving {

// Whether one counts as busy, and is not so quiet that it may be waiting for us.
bool a_service_is_busy(int64_t now);

// The usual answer, without asking for the time: nobody is.
inline bool a_service_may_be_busy() {
    const Seat& seat = Seat::get();
    for (int index = 0, count = seat.services(); index < count; ++index)
        if (read_word(seat.row(seat.service(index)).busy_since) != ECLIP_IDLE) return true;
    return false;
}

// Requests of all of them. A service says that its work is done before it lingers (busy.h).
class Requests {
public:
    // Whether one has ended since this was asked last.
    bool one_ended() {
        const int64_t before = served_;
        served_ = count();
        return served_ != before;
    }

private:
    static int64_t count();
    int64_t served_ = count();
};

}  // namespace eclip::giving
