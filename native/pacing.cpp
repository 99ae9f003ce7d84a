#include "pacing.h"

#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "busy.h"
#include "device.h"
#include "giving.h"
#include "lines.h"
#include "python_lock.h"
#include "seat.h"
#include "services.h"

namespace eclip::giving {
namespace {

constexpr int64_t kSpinNs = 50'000, kNapNs = 20'000;
constexpr int64_t kGrainNs = 150'000;
constexpr int64_t kPatienceNs = 20'000'000, kLongestPatienceNs = 1'000'000'000;
constexpr int64_t kAfterInterruptNs = 1'000'000'000;
constexpr int64_t kBankedNs = 100'000'000;  // as in core/rules.py
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

// The calling thread is kept, and looks every 20 us. It spins at first or, once it is known when that
// should be, around the end of what it waits for. It sleeps no longer than it asks for, which is put
// back as it was.
class Kept {
public:
    explicit Kept(int64_t now, int64_t ends_ns = 0) : ends_ns_(std::max(now, ends_ns)) {}
    ~Kept() {
        if (slack_ > 0) prctl(PR_SET_TIMERSLACK, slack_);
    }
    void expect_end(int64_t ends_ns) { ends_ns_ = ends_ns; }
    void look_later(int64_t now) {
        if (std::abs(ends_ns_ - now) < kSpinNs) {
            sched_yield();
            return;
        }
        if (slack_ == 0) {
            slack_ = std::max(prctl(PR_GET_TIMERSLACK), 1);
            prctl(PR_SET_TIMERSLACK, kSlackNs);
        }
        nap(kNapNs);
    }

private:
    int64_t ends_ns_;
    int slack_ = 0;
    LetPythonRun others_;
};

bool is_done(CUevent event) { return driver().cuEventQuery(event) != CUDA_ERROR_NOT_READY; }

// Returns how long what is in flight, up to that event, may have waited for services on the device: until
// the last request that ended before it did.
int64_t hold(int64_t now, CUevent newest) {
    eclip_board_row& row = Seat::get().mine();
    add_to_word(row.yielded, 1);
    int64_t began = now, others_ns = 0;
    {
        Relaxed relaxed;
        Kept kept(now);
        Requests requests;
        for (bool in_flight = newest != nullptr;; now = monotonic_ns()) {
            if (requests.one_ended()) {
                kept.expect_end(now + kLingerNs);
                if (in_flight) others_ns = now - began;
            }
            if (!must_hold(now)) break;
            in_flight = in_flight && !is_done(newest);
            kept.look_later(now);
        }
    }
    if (now - began > read_word(row.longest_pause_ns)) write_word(row.longest_pause_ns, now - began);
    return others_ns;
}

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

void retire(Pace& pace, uint64_t number) {
    Stretch& stretch = pace.ring[number % kRing];
    float ms = 0;
    bool measured = false;
    if (number > 0 && pace.recorded - number < kRing && !stretch.apart) {
        Stretch& before = pace.ring[(number - 1) % kRing];
        measured = driver().cuEventElapsedTime(&ms, before.event, stretch.event) == CUDA_SUCCESS;
    }
    const auto weighed = static_cast<double>(stretch.expected_ns);
    if (!measured) return debt.done(weighed);
    // Part of the time the device may have waited for the program, or worked for a service: between the
    // two nobody knows better.
    const double ns = static_cast<double>(ms) * 1e6;
    const double took = std::clamp(weighed, ns - static_cast<double>(stretch.idle_ns), ns);
    if (took != weighed) correct(*stretch.weights, stretch.launches, took - weighed);
    pace.stretch_ns.store(static_cast<int64_t>(took));
    debt.done(took);
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

struct Wait {
    enum { done, ended, nothing } found = done;  // at once; after a wait; not while we were patient
    int64_t others_ns = 0;                       // of it, for requests that ended meanwhile
};

Wait wait_for(Pace& pace, const Awaited& awaited) {
    Relaxed relaxed;
    Wait wait;
    if (!is_done(awaited.event)) {
        wait.found = Wait::ended;
        int64_t longest_ns = std::max(pace.stretch_ns.load(), awaited.expected_ns);
        int64_t patience = std::clamp(8 * longest_ns, patience_ns, kLongestPatienceNs);
        int64_t began = monotonic_ns(), now = began, undisturbed_ns = began;
        Kept kept(began, awaited.ends_ns);
        Requests requests;
        while (!is_done(awaited.event)) {
            pace.at_work_ns.store(now);
            bool enough = now - began > patience;
            if (enough) pace.given_up.fetch_add(1);
            if (enough || capture_count.load() != 0 || interrupted(now)) return {Wait::nothing};
            kept.look_later(now);
            now = monotonic_ns();
            if (requests.one_ended()) wait.others_ns += now - std::exchange(undisturbed_ns, now);
            if (!a_service_may_be_busy()) undisturbed_ns = now;
        }
    }
    pace.given_up.store(0);
    return wait;
}

// All up to the awaited one are done: they ended in order.
void retire_until(Pace& pace, const Awaited& awaited, const Wait& wait) {
    std::lock_guard hold(pace.lock);
    if (pace.epoch != epoch.load()) return;
    Relaxed relaxed;
    const bool ended = wait.found == Wait::ended;
    // When the newest had been launched the device was still at work on one before.
    if (ended && awaited.number < awaited.newest) pace.ring[awaited.newest % kRing].idle_ns = 0;
    for (; pace.retired <= awaited.number && pace.retired < pace.recorded; ++pace.retired) {
        pace.ring[pace.retired % kRing].idle_ns += wait.others_ns;
        retire(pace, pace.retired);
    }
    pace.retired_ns = ended ? monotonic_ns() : 0;
}

void wait_for_depth(Pace& pace) {
    Awaited awaited = find_awaited(pace);
    if (awaited.event == nullptr) return;
    const Wait wait = wait_for(pace, awaited);
    if (wait.found != Wait::nothing) retire_until(pace, awaited, wait);
}

CUevent newest_event(Pace& pace) {
    std::lock_guard hold(pace.lock);
    if (pace.epoch != epoch.load() || pace.recorded == 0) return nullptr;
    return pace.ring[(pace.recorded - 1) % kRing].event;
}

// The open stretch is behind a hold, in which those in flight have waited for others.
void set_apart(Pace& pace, int64_t others_ns) {
    std::lock_guard hold(pace.lock);
    for (Stretch& stretch : pace.ring) stretch.idle_ns += others_ns;
    pace.apart = true;
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
    if (must_hold(now)) set_apart(pace, hold(now, newest_event(pace)));
}

void forget_events() { epoch.fetch_add(1); }

}  // namespace eclip::giving
