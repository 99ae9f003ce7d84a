#include "moving.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <cstdlib>
#include <utility>

#include "device.h"
#include "giving.h"
#include "thread.h"

namespace eclip::moving {
namespace {

constexpr int64_t kLookNs = 20'000'000;      // between looks at the board
constexpr int64_t kLeaveNs = 200'000;        // between looks whether the old slices are left
constexpr int64_t kWaitNs = 1'000'000;       // likewise, whether others have left theirs
constexpr int64_t kPatienceNs = 2'000'000'000;  // for slices that others are leaving
constexpr int64_t kStartLookNs = 2'000'000;

// Everything here belongs to the thread that moves the process, but for the start.
struct Mover {
    Cap* cap = nullptr;
    std::vector<uint32_t> units;
    int64_t wanted = 0;
    uint64_t held = 0;    // slices that may have work of ours
    uint64_t target = 0;  // where launches go
    int64_t asked_ns = 0;
    int64_t seen = 0;     // of the row's word, what was asked last
    bool open = false;    // others have what is wanted, or share it
    bool waits = false;   // others are leaving it
};

Mover& mover() {
    static Mover& only = *new Mover;  // its thread never ends
    return only;
}

eclip_board_row& row() { return Seat::get().mine(); }

// What can be had of so many units.
int64_t in_slices(const std::vector<uint32_t>& units, int64_t wanted) {
    const uint64_t all = all_slices(units);
    const int64_t least = std::clamp<int64_t>(wanted, 1, units_of(units, all));
    return units_of(units, choose_slices(units, static_cast<uint32_t>(least), all, 0));
}

void show(const Mover& own) {
    write_word(row().units_wanted, own.wanted);
    write_word(row().slices_wanted[0], static_cast<int64_t>(own.target));
    write_word(row().slices_held[0], static_cast<int64_t>(own.held));
    write_word(row().units_held, units_of(own.units, own.held));
}

// What to have now. All that is wanted and free; where it could never be free, slices of others too,
// those first that fewest have.
struct Choice {
    uint64_t slices = 0;
    bool shared = false;  // some are also another's
    bool waits = false;   // others are leaving what is missing
};

// Of what is free, a set for what is wanted: one that the process has been on already, since each other
// takes a green context that the driver never gives back.
uint64_t pick(const Mover& own, uint64_t free) {
    const uint64_t made = choose_slices(own.units, static_cast<uint32_t>(own.wanted), free, own.target);
    const uint32_t goal = units_of(own.units, made);
    const bool full = own.cap->places() == kMostPlaces;
    uint64_t best = 0;
    auto rank = [&](uint64_t slices) {
        return std::pair(units_of(own.units, slices), std::popcount(slices & own.target));
    };
    for (int place = 0; place < own.cap->places(); ++place) {
        const uint64_t known = own.cap->slices_of(place);
        const uint32_t units = units_of(own.units, known);
        const bool fits = (known & ~free) == 0 && (full ? units <= goal : units == goal);
        if (fits && rank(known) > rank(best)) best = known;
    }
    return best != 0 || full ? best : made;
}

Choice choose(const Mover& own, const Holders& others) {
    const auto wanted = static_cast<uint32_t>(own.wanted);
    const uint64_t all = all_slices(own.units);
    Choice choice;
    uint64_t free = all & ~others.any;
    const bool fits = others.wanted + wanted <= units_of(own.units, all);
    if (free != 0) choice.slices = pick(own, free);
    const bool enough = choice.slices != 0 && units_of(own.units, choice.slices) >= wanted;
    if (enough) return choice;
    choice.waits = fits;
    if (fits && choice.slices != 0) return choice;
    for (int most = 1; units_of(own.units, choice.slices) < wanted && most <= ECLIP_BOARD_ROWS; ++most) {
        uint64_t more = 0;
        for (size_t slice = 0; slice < own.units.size() && slice < 64; ++slice)
            if (others.count[slice] <= most) more |= uint64_t{1} << slice;
        choice.slices = choose_slices(own.units, wanted, more & all, choice.slices | own.target);
    }
    if (own.cap->places() == kMostPlaces) {  // no new set can be made
        const uint64_t known = pick(own, all);
        choice.slices = known != 0 ? known : own.target;
    }
    choice.shared = (choice.slices & others.any) != 0;
    return choice;
}

// Claim what is chosen. Until the old slices are left both are ours.
Choice claim(Mover& own) {
    Seat& seat = Seat::get();
    const bool locked = seat.lock_slices();
    Choice choice = choose(own, seat.holders(own.units.size()));
    if (choice.slices != own.target) {
        own.target = choice.slices;
        own.held |= choice.slices;
    }
    show(own);
    if (locked) seat.unlock_slices();
    return choice;
}

void leave_old(Mover& own) {
    if (own.held == own.target || !own.cap->left_others()) return;
    own.held = own.target;
    show(own);
    write_word(row().leave_ns, monotonic_ns() - own.asked_ns);
    add_to_word(row().changes, 1);
}

void go(Mover& own) {
    const uint64_t before = own.cap->slices();
    if (own.target == before) return;
    std::string wrong = own.cap->move(own.target);
    if (!wrong.empty()) {
        say("%s", wrong.c_str());
        own.target = before;
        own.wanted = units_of(own.units, before);
        show(own);
    }
    write_word(row().move_ns, monotonic_ns() - own.asked_ns);
}

// Until somebody asks for something else, or for so long.
void sleep(int64_t seen, int64_t ns) {
    auto word = reinterpret_cast<uint32_t*>(&row().asked);  // its lower half counts
    timespec span = {ns / 1'000'000'000, ns % 1'000'000'000};
    syscall(SYS_futex, word, FUTEX_WAIT, static_cast<uint32_t>(seen), &span, nullptr, 0);
}

void* live(void*) {
    Mover& own = mover();
    Inside ours;
    while (!Seat::get().left()) {
        const bool soon = own.waits && monotonic_ns() - own.asked_ns < kPatienceNs;
        sleep(own.seen, own.held != own.target ? kLeaveNs : soon ? kWaitNs : kLookNs);
        if (Seat::get().left()) break;
        const int64_t asked = read_word(row().asked);
        const bool asks = asked != own.seen;
        if (asks) {
            own.seen = asked;
            own.wanted = in_slices(own.units, asked >> 32);
            own.asked_ns = monotonic_ns();
        }
        if (asks || own.open) {
            Choice choice = claim(own);
            own.open = choice.waits || choice.shared;
            own.waits = choice.waits;
            go(own);
            if (asks && own.held == own.target) {  // nothing is left
                write_word(row().leave_ns, 0);
                add_to_word(row().changes, 1);
            }
        }
        leave_old(own);
    }
    return nullptr;
}

}  // namespace

std::string begin(Cap& cap, const std::vector<uint32_t>& units, uint32_t wanted, CUdevice device) {
    unsigned char uuid[16] = {};
    auto ask_uuid = driver().cuDeviceGetUuid;
    if (ask_uuid == nullptr || ask_uuid(uuid, device) != CUDA_SUCCESS)
        return "the driver does not say which GPU it is";
    std::string path = board_path(uuid);
    std::string wrong = Seat::get().take(path, giving::promise_of_process());
    if (!wrong.empty()) return "the board " + path + " cannot be used: " + wrong;
    Mover& own = mover();
    own.cap = &cap;
    own.units = units;
    own.wanted = in_slices(units, wanted);
    if (own.wanted != wanted)
        say("%u SMs are %lld in slices of this GPU, which has %u", wanted,
            static_cast<long long>(own.wanted), units_of(units, all_slices(units)));
    own.asked_ns = monotonic_ns();
    const int64_t until = own.asked_ns + kPatienceNs;
    Choice choice = claim(own);
    while (choice.shared && choice.waits && monotonic_ns() < until) {
        own.target = own.held = 0;
        show(own);
        nap(kStartLookNs);
        choice = claim(own);
    }
    if (choice.shared)
        say("%lld SMs do not fit beside what others hold: some are shared until there is room",
            static_cast<long long>(own.wanted));
    wrong = cap.move(own.target);
    if (!wrong.empty()) return wrong;
    own.held = own.target;
    own.open = choice.waits || choice.shared;
    show(own);
    write_word(row().changes, 1);
    atexit([] { Seat::get().leave(); });
    return start_thread(live) ? "" : "no thread could be started to move this process";
}

int64_t held() {
    const bool any = mover().cap != nullptr && !Seat::get().left();
    return any ? read_word(row().units_held) : 0;
}

bool ask(int64_t wanted) {
    Mover& own = mover();
    if (own.cap == nullptr || wanted <= 0 || wanted > INT32_MAX || Seat::get().left()) return false;
    int64_t seen = read_word(row().asked), next = 0;
    do next = wanted << 32 | ((seen + 1) & UINT32_MAX);
    while (!__atomic_compare_exchange_n(&row().asked, &seen, next, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE));
    syscall(SYS_futex, &row().asked, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    return true;
}

}  // namespace eclip::moving
