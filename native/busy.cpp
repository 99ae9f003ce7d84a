#include "busy.h"

#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

#include "device.h"
#include "giving.h"
#include "seat.h"

namespace eclip::giving {
namespace {

constexpr int64_t kLookNs = 1'000'000;        // how long nothing was launched before streams are asked
constexpr int64_t kLongestLookNs = 5'000'000;
constexpr int64_t kRestNs = 20'000'000;       // between looks while nothing is under way
constexpr int64_t kForgetNs = 100'000'000;    // after which what cannot be asked counts as done

int64_t bound = 0;
std::atomic<int> outstanding{0};     // lines that have work nobody has waited for
std::atomic<int64_t> idle_at{0};     // since when there is none
std::atomic<uint32_t> wake_up{0};
std::atomic<bool> asleep{false};
std::atomic<bool> ended{false};

eclip_board_row& row() { return Seat::get().mine(); }

void publish(int64_t now) {
    write_word(row().deadline, now + bound);
    write_word(row().heartbeat, now);
    write_word(row().busy_since, now);
}

// Unless it was woken since `seen` was read, which is before it looked for something to do.
void sleep_until_woken(uint32_t seen, int64_t ns) {
    asleep.store(true);
    timespec span = {ns / 1'000'000'000, ns % 1'000'000'000};
    syscall(SYS_futex, &wake_up, FUTEX_WAIT_PRIVATE, seen, &span, nullptr, 0);
    asleep.store(false);
}

void wake_poller() {
    wake_up.fetch_add(1);
    if (!asleep.load()) return;
    syscall(SYS_futex, &wake_up, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

// About the p99 of how long the service was busy: one in a hundred pushes it up by what the others
// let it sink.
void learn_tail(int64_t took) {
    int64_t tail = read_word(row().tail_ns);
    int64_t step = (took > tail ? took - tail : tail - took) / 8;
    write_word(row().tail_ns, took > tail ? tail + step : tail - step / 99);
}

void became_idle() {
    int64_t now = monotonic_ns();
    int64_t since = read_word(row().busy_since);
    add_to_word(row().served, 1);
    if (since != ECLIP_IDLE) learn_tail(now - since);
    idle_at.store(now);
    wake_poller();
}

// Others are under way: busy since the oldest of them.
void show_oldest() {
    int64_t oldest = INT64_MAX;
    for (int index = 0, count = lines_used(); index < count; ++index) {
        int64_t since = line_at(index).since.load();
        if (since != 0 && since < oldest) oldest = since;
    }
    if (oldest == INT64_MAX || oldest <= read_word(row().busy_since)) return;
    write_word(row().deadline, oldest + bound);
    write_word(row().busy_since, oldest);
}

// A launch that comes meanwhile writes another time, so that it is not taken for idle.
void end_linger() {
    int64_t seen = read_word(row().busy_since);
    if (seen == ECLIP_IDLE || outstanding.load() != 0) return;
    __atomic_compare_exchange_n(&row().busy_since, &seen, ECLIP_IDLE, false, __ATOMIC_ACQ_REL,
                                __ATOMIC_ACQUIRE);
}

// Whether a stream that the program does not wait for has run empty. False where it cannot be asked.
bool is_done(const Line& line) {
    std::shared_lock hold(quiet_lock);
    CUstream stream = line.stream.load();
    if (ended.load() || capture_count.load() != 0 || stream == nullptr) return false;
    Inside ours;
    PrimaryCurrent current(line.context.load());
    Relaxed relaxed;
    // By way of the dispatcher, where there is a plan: the work may be on a lane.
    return query_as_program(stream) != CUDA_ERROR_NOT_READY;
}

void ask_lines() {
    int64_t now = monotonic_ns();
    for (int index = 0, count = lines_used(); index < count; ++index) {
        Line& line = line_at(index);
        int64_t since = line.since.load();
        if (since == 0) continue;
        uint64_t launches = line.launches.load();
        bool forgotten = line.stream.load() == nullptr && now - since > kForgetNs;
        if (forgotten || is_done(line)) clear_busy(line, launches);
    }
}

void* poll(void*) {
    int64_t launched = 0, look = kLookNs;
    prctl(PR_SET_TIMERSLACK, kSlackNs);  // or background waits for 150 us where 100 are meant
    while (!ended.load()) {
        const uint32_t seen = wake_up.load();
        if (outstanding.load() != 0) {
            sleep_until_woken(seen, look);
            int64_t now_launched = read_word(row().launched);
            bool quiet = now_launched == launched;
            launched = now_launched;
            look = quiet ? kLookNs : std::min(2 * look, kLongestLookNs);
            if (quiet && outstanding.load() != 0) ask_lines();
        } else if (read_word(row().busy_since) == ECLIP_IDLE) {
            sleep_until_woken(seen, kRestNs);
        } else {
            int64_t left = idle_at.load() + kLingerNs - monotonic_ns();
            if (left > 0) nap(left);
            else end_linger();
        }
    }
    return nullptr;
}

}  // namespace

void begin_service(int64_t bound_ns) {
    bound = bound_ns;
    // Without it busy ends when the process does, or when others see that nothing is launched.
    if (!start_thread(poll)) say("no thread could be started to say when this service is idle");
}

void raise_busy(Line& line) {
    line.launches.fetch_add(1);
    add_to_word(row().launched, 1);
    if (line.since.load() != 0) return;
    int64_t now = monotonic_ns(), none = 0;
    if (!line.since.compare_exchange_strong(none, now)) return;
    if (outstanding.fetch_add(1) == 0) publish(now);
}

void clear_busy(Line& line, uint64_t launches) {
    if (line.since.exchange(0) == 0) return;
    // A launch that came since the look at the count may have found the line busy still.
    int64_t none = 0;
    if (line.launches.load() != launches && line.since.compare_exchange_strong(none, monotonic_ns()))
        return;
    if (outstanding.fetch_sub(1) == 1) became_idle();
    else show_oldest();
}

void postpone_busy(Line& line, int64_t began_ns) {
    int64_t since = line.since.load();
    if (since == 0 || since >= began_ns) return;
    if (line.since.compare_exchange_strong(since, began_ns)) show_oldest();
}

void end_service() {
    std::lock_guard hold(quiet_lock);
    ended.store(true);
}

}  // namespace eclip::giving
