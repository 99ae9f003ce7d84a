#include "pacing.h"

#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cstdlib>
#include <optional>

#include "device.h"
#include "giving.h"
#include "lines.h"
#include "python_lock.h"
#include "seat.h"

namespace eclip::giving {
namespace {

constexpr int64_t kSpinNs = 50'000, kNapNs = 20'000;
constexpr int64_t kGrainNs = 150'000;
constexpr int64_t kQuietNs = 5'000'000, kLongestQuietNs = 100'000'000;
constexpr int64_t kPatienceNs = 20'000'000, kLongestPatienceNs = 1'000'000'000;
constexpr int64_t kAfterInterruptNs = 1'000'000'000;
constexpr int64_t kBankedNs = 100'000'000;  // as in runtime/reactions.py
constexpr int kMostGivenUp = 3;
constexpr uint32_t kMostLaunches = 512;
constexpr int64_t kUnmeasured = 8;   // launches of which nobody knows anything fill a stretch
constexpr int64_t kLongStretch = 8;  // grains, above which one in flight keeps the device busy

int64_t grain_ns = kGrainNs, patience_ns = kPatienceNs;
uint64_t depth = 2;
// So many launches a stretch, however long they take, a graph as one: what others do, to compare
// with. 0: as many as take the grain.
uint32_t counted = 0;
double floor_part = 0;
std::atomic<uint64_t> epoch{1};
std::atomic<int64_t> interrupted_ns{INT64_MIN / 2};

int64_t number(const char* variable, int64_t least, int64_t most, int64_t otherwise) {
    const char* text = secure_getenv(variable);
    return text == nullptr ? otherwise : std::clamp<int64_t>(atoll(text), least, most);
}

// ---------------------------------------------------------------------------------- interrupts

struct sigaction program_handler;

void note_interrupt(int number, siginfo_t* info, void* context) {
    interrupted_ns.store(monotonic_ns(), std::memory_order_relaxed);
    if (program_handler.sa_flags & SA_SIGINFO) program_handler.sa_sigaction(number, info, context);
    else program_handler.sa_handler(number);
}

// A program that handles Ctrl-C may do so only once its launch returns: Python raises the exception
// between two of its instructions, and autograd's threads launch while the main one waits.
void watch_interrupts() {
    if (sigaction(SIGINT, nullptr, &program_handler) != 0) return;
    bool handled = (program_handler.sa_flags & SA_SIGINFO) != 0 ||
                   (program_handler.sa_handler != SIG_DFL && program_handler.sa_handler != SIG_IGN);
    if (!handled) return;
    struct sigaction ours = program_handler;
    ours.sa_flags |= SA_SIGINFO;
    ours.sa_sigaction = note_interrupt;
    sigaction(SIGINT, &ours, nullptr);
}

bool interrupted(int64_t now) {
    return now - interrupted_ns.load(std::memory_order_relaxed) < kAfterInterruptNs;
}

// --------------------------------------------------------------------------------------- board

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

// As devices/deciding.py has it, for background that yields at any slack.
bool counts_as_busy(const eclip_board_row& row, int64_t now) {
    int64_t since = read_word(row.busy_since), bound = read_word(row.bound_ns);
    if (read_word(row.tier) != ECLIP_SERVICE || since == ECLIP_IDLE) return false;
    if (now - read_word(row.heartbeat) > ECLIP_STOPPED_NS) return false;
    return bound == 0 || now - since <= ECLIP_HUNG_BOUNDS * bound;
}

bool a_service_is_busy(int64_t now) {
    const Seat& seat = Seat::get();
    for (int index = 0, count = seat.services(); index < count; ++index) {
        int row = seat.service(index);
        if (counts_as_busy(seat.row(row), now) && !is_quiet(row, seat.row(row), now)) return true;
    }
    return false;
}

// The usual answer, without asking for the time: nobody is.
bool a_service_may_be_busy() {
    const Seat& seat = Seat::get();
    for (int index = 0, count = seat.services(); index < count; ++index)
        if (read_word(seat.row(seat.service(index)).busy_since) != ECLIP_IDLE) return true;
    return false;
}

// --------------------------------------------------------------------------------------- floor

// What the process is behind its floor, in time of its launches alone: above 0 it does not yield.
class Debt {
public:
    void done(double ns) {
        std::lock_guard hold(lock_);
        owed_ -= ns;
    }
    bool is_owed(int64_t now) {
        if (floor_part <= 0) return false;
        std::lock_guard hold(lock_);
        if (last_ns_ != 0) owed_ += floor_part * static_cast<double>(now - last_ns_);
        last_ns_ = now;
        // Work done beyond the floor counts for a while only, and so does time in which the program
        // had nothing to launch.
        const double most = floor_part * static_cast<double>(kBankedNs);
        owed_ = std::clamp(owed_, -most, most);
        return owed_ > 0;
    }

private:
    std::mutex lock_;
    double owed_ = 0;
    int64_t last_ns_ = 0;
};
Debt debt;

bool must_hold(int64_t now) {
    return a_service_is_busy(now) && !debt.is_owed(now) && !interrupted(now) &&
           capture_count.load() == 0;
}

// ------------------------------------------------------------------------------------- waiting

// The calling thread is kept, and looks every 20 us. It spins at first or, where it is known when that
// should be, around the end of what it waits for. It sleeps no longer than it asks for, which is put
// back as it was.
class Kept {
public:
    explicit Kept(int64_t now, int64_t ends_ns = 0) : ends_ns_(std::max(now, ends_ns)) {}
    ~Kept() {
        if (slack_ > 0) prctl(PR_SET_TIMERSLACK, slack_);
    }
    void look_later(int64_t now) {
        if (std::abs(ends_ns_ - now) < kSpinNs) {
            sched_yield();
            return;
        }
        if (slack_ == 0) {
            slack_ = std::max(prctl(PR_GET_TIMERSLACK), 1);
            prctl(PR_SET_TIMERSLACK, 1000);
        }
        nap(kNapNs);
    }

private:
    int64_t ends_ns_;
    int slack_ = 0;
    LetPythonRun others_;
};

void hold(int64_t now) {
    eclip_board_row& row = Seat::get().mine();
    add_to_word(row.yielded, 1);
    int64_t began = now;
    {
        Kept kept(now);
        for (; must_hold(now); now = monotonic_ns()) kept.look_later(now);
    }
    if (now - began > read_word(row.longest_pause_ns)) write_word(row.longest_pause_ns, now - began);
}

bool is_done(CUevent event) { return driver().cuEventQuery(event) != CUDA_ERROR_NOT_READY; }

// ----------------------------------------------------------------------------------- stretches

// The launches of an open stretch and what they weigh, in one word: 16 and 48 bits.
constexpr uint64_t count_in(Weight weight) { return uint64_t{weight.ns} << 16 | 1; }
constexpr uint32_t launches_in(uint64_t open) { return open & 0xffff; }
constexpr int64_t weight_in(uint64_t open) { return static_cast<int64_t>(open >> 16); }

bool is_full(uint64_t open, Weight next) {
    if (counted != 0) return launches_in(open) >= counted;
    if (launches_in(open) == 0) return false;
    return weight_in(open) + next.ns > grain_ns || launches_in(open) >= kMostLaunches;
}

// Part of the time the device may have waited for the program: between the two nobody knows better.
void learn(const Stretch& stretch, double ns) {
    const auto weighed = static_cast<double>(stretch.expected_ns);
    const double took = std::clamp(weighed, ns - static_cast<double>(stretch.idle_ns), ns);
    if (took != weighed) correct(*stretch.weights, stretch.launches, took - weighed);
}

void retire(Pace& pace, uint64_t number) {
    Stretch& stretch = pace.ring[number % kRing];
    float ms = 0;
    bool measured = false;
    if (number > 0 && pace.recorded - number < kRing && !stretch.apart) {
        Stretch& before = pace.ring[(number - 1) % kRing];
        measured = driver().cuEventElapsedTime(&ms, before.event, stretch.event) == CUDA_SUCCESS;
    }
    if (!measured) return debt.done(static_cast<double>(stretch.expected_ns));
    const double ns = static_cast<double>(ms) * 1e6;
    learn(stretch, ns);
    pace.stretch_ns.store(static_cast<int64_t>(ns));
    debt.done(ns);
}

bool make_events(Pace& pace) {
    if (pace.epoch == epoch.load()) return true;
    Relaxed relaxed;
    pace.recorded = pace.retired = 0;
    pace.retired_ns = 0;
    for (Stretch& stretch : pace.ring) {
        if (driver().cuEventCreate(&stretch.event, 0) != CUDA_SUCCESS) return false;
        if (stretch.weights == nullptr) stretch.weights = new Weights;
    }
    pace.epoch = epoch.load();
    return true;
}

void note(Pace& pace, uint32_t launch, Weight weight) {
    // None before the first stretch has ended, which cannot be measured.
    if (Weights* noted = pace.noted.load()) noted->note(launch, weight);
}

// Under the lock, which `close_stretch` has.
bool record_end(Pace& pace, CUstream stream, Default meaning, uint32_t launches, int64_t weight) {
    if (launches == 0 || !make_events(pace)) return false;
    std::shared_lock quiet(quiet_lock);
    if (capture_count.load() != 0) return false;
    Stretch& next = pace.ring[pace.recorded % kRing];
    // Our own hook: where there is a plan, it follows the stream's work to its lane.
    CUresult status = record_as_program(next.event, stream, meaning);
    if (status != CUDA_SUCCESS) return false;  // the program's own call will say what is wrong
    next.launches = launches;
    next.apart = pace.apart || weight >= kWhole;
    next.expected_ns = weight >= kWhole ? grain_ns : weight;
    next.idle_ns = std::max<int64_t>(monotonic_ns() - pace.at_work_ns.load(), 0);
    ++pace.recorded;
    add_to_word(Seat::get().mine().launched, 1);
    return true;
}

// End the open stretch before a launch, which begins the next.
void close_stretch(Pace& pace, CUstream stream, Default meaning, Weight first, bool apart) {
    std::lock_guard hold(pace.lock);
    const uint64_t open = pace.open.exchange(count_in(first));
    // Another thread may have ended it since this launch was added.
    const uint32_t launches = std::max(launches_in(open), 1u) - 1;
    const int64_t weight = std::max<int64_t>(weight_in(open) - first.ns, 0);
    bool ended = record_end(pace, stream, meaning, launches, weight);
    // Launches that no event has ended are in the time of the next stretch.
    pace.apart = apart || (!ended && (pace.apart || launches > 0));
    pace.noted.store(pace.ring[pace.recorded % kRing].weights);
    note(pace, 0, first);
}

void drop_stretch(Pace& pace, Weight first) {
    std::lock_guard hold(pace.lock);
    pace.open.store(count_in(first));
    pace.apart = true;
    note(pace, 0, first);
}

// The stretch that must be done before another begins; none: it is, or there are too few.
struct Awaited {
    CUevent event = nullptr;
    uint64_t number = 0, newest = 0;
    int64_t expected_ns = 0;
    int64_t ends_ns = 0;  // as expected, by the host's clock; 0: nobody knows
};

Awaited find_awaited(Pace& pace) {
    std::lock_guard hold(pace.lock);
    if (pace.epoch != epoch.load() || pace.recorded == 0) return {};
    const uint64_t newest = pace.recorded - 1;
    bool is_long = counted == 0 && pace.ring[newest % kRing].expected_ns > kLongStretch * grain_ns;
    uint64_t most = is_long ? 1 : depth;
    if (pace.recorded < most) return {};
    uint64_t number = pace.recorded - most;
    if (number < pace.retired) return {};
    int64_t ends_ns = pace.retired_ns;
    for (uint64_t each = pace.retired; each <= number && ends_ns != 0; ++each)
        ends_ns += pace.ring[each % kRing].expected_ns;
    const Stretch& awaited = pace.ring[number % kRing];
    return {awaited.event, number, newest, awaited.expected_ns, ends_ns};
}

enum class Found { done, ended, nothing };  // at once; after a wait; not while we were patient

Found wait_for(Pace& pace, const Awaited& awaited) {
    Relaxed relaxed;
    Found found = Found::done;
    if (!is_done(awaited.event)) {
        found = Found::ended;
        int64_t longest_ns = std::max(pace.stretch_ns.load(), awaited.expected_ns);
        int64_t patience = std::clamp(8 * longest_ns, patience_ns, kLongestPatienceNs);
        int64_t began = monotonic_ns(), now = began;
        Kept kept(began, awaited.ends_ns);
        while (!is_done(awaited.event)) {
            pace.at_work_ns.store(now);
            bool enough = now - began > patience;
            if (enough) pace.given_up.fetch_add(1);
            if (enough || capture_count.load() != 0 || interrupted(now)) return Found::nothing;
            kept.look_later(now);
            now = monotonic_ns();
        }
    }
    pace.given_up.store(0);
    return found;
}

// All up to the awaited one are done: they ended in order.
void retire_until(Pace& pace, const Awaited& awaited, Found found) {
    std::lock_guard hold(pace.lock);
    if (pace.epoch != epoch.load()) return;
    Relaxed relaxed;
    const bool ended = found == Found::ended;
    // When the newest had been launched the device was still at work on one before.
    if (ended && awaited.number < awaited.newest) pace.ring[awaited.newest % kRing].idle_ns = 0;
    for (; pace.retired <= awaited.number && pace.retired < pace.recorded; ++pace.retired)
        retire(pace, pace.retired);
    pace.retired_ns = ended ? monotonic_ns() : 0;
}

void wait_for_depth(Pace& pace) {
    Awaited awaited = find_awaited(pace);
    if (awaited.event == nullptr) return;
    Found found = wait_for(pace, awaited);
    if (found != Found::nothing) retire_until(pace, awaited, found);
}

// Several waits in a row were for nothing: the device waits for what the program does next. Until it
// moves again, which is only asked, no stretch ends.
bool stands_still(Pace& pace) {
    if (pace.given_up.load(std::memory_order_relaxed) < kMostGivenUp) return false;
    Awaited awaited = find_awaited(pace);
    Relaxed relaxed;
    if (awaited.event != nullptr && !is_done(awaited.event)) return true;
    pace.given_up.store(0);
    return false;
}

}  // namespace

void wait_while(const std::atomic<bool>& busy) {
    int64_t now = monotonic_ns();
    Kept kept(now);
    for (; busy.load(); now = monotonic_ns()) kept.look_later(now);
}

int64_t wanted_grain() { return 1000 * number("ECLIP_GRAIN_US", 10, 100'000, kGrainNs / 1000); }

void begin_background(double floor) {
    floor_part = floor;
    grain_ns = wanted_grain();
    depth = static_cast<uint64_t>(number("ECLIP_DEPTH", 1, kRing / 2, 2));
    counted = static_cast<uint32_t>(number("ECLIP_LAUNCHES", 0, kMostLaunches, 0));
    patience_ns = 1000 * number("ECLIP_PATIENCE_US", 1, 1'000'000, kPatienceNs / 1000);
    watch_interrupts();
}

void pace(Line& line, CUstream stream, Default meaning, const Work& work) {
    if (capture_count.load() != 0) return;
    Pace& pace = line.pace;
    const Weight weight = weigh(work, static_cast<uint32_t>(grain_ns / kUnmeasured));
    const uint64_t before = pace.open.fetch_add(count_in(weight));
    note(pace, launches_in(before), weight);
    bool full = is_full(before, weight);
    bool busy = a_service_may_be_busy() && must_hold(monotonic_ns());
    if (!full && !busy) return;
    Inside ours;
    if (stands_still(pace)) {
        drop_stretch(pace, weight);
    } else {
        close_stretch(pace, stream, meaning, weight, busy);
        wait_for_depth(pace);
    }
    int64_t now = monotonic_ns();
    if (!must_hold(now)) return;
    hold(now);
    std::lock_guard again(pace.lock);
    pace.apart = true;
}

void forget_events() { epoch.fetch_add(1); }

}  // namespace eclip::giving
