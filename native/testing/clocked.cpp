// A driver whose device takes time by a clock of its own, so that what background leaves idle is the same
// on every machine, however busy that is.
//
// Time passes where the thread that began the clock looks at it, sleeps, yields or calls the driver: so
// much for each. The C library's functions for this are here; other threads get the real ones. There is
// one queue. A kernel takes as many nanoseconds as it has blocks, and the device may be taken away for a
// while. What is not here is nothing.cpp's.
#include "clocked.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <deque>

#include "../cuda_abi.h"

#define API extern "C" __attribute__((visibility("default")))

namespace {

// What a thread of the host needs for each, in nanoseconds. Assumed: the order of what servers show.
constexpr int64_t kLook = 30, kYield = 300, kSwitch = 5'000;
constexpr int64_t kLaunch = 2'500, kRecord = 1'500, kQuestion = 700;
constexpr int64_t kForget = 100'000'000;

thread_local bool clocked = false;
int64_t clock_ns = 0, slack_ns = 50'000;
void (*on_tick)(int64_t) = nullptr;

// Times at which the device was taken away, the last of them; before, it was for `lost_before`.
struct Taken {
    int64_t from, to;
};
std::deque<Taken> all_taken;
int64_t lost_before = 0;
int64_t records = 0;         // of events
int64_t launched_until = 0;  // in the device's own time, which stands still while it is taken away

int64_t own_time(int64_t at) {
    int64_t lost = lost_before;
    for (const Taken& taken : all_taken)
        lost += std::clamp<int64_t>(at - taken.from, 0, taken.to - taken.from);
    return at - lost;
}

int64_t when(int64_t own) {
    int64_t at = own + lost_before;
    for (const Taken& taken : all_taken)
        if (taken.from < at) at += taken.to - taken.from;
    return at;
}

void pass(int64_t ns) {
    clock_ns += ns;
    if (on_tick != nullptr) on_tick(clock_ns);
}

int64_t& time_of(CUevent event) { return *reinterpret_cast<int64_t*>(event); }

template <class Function>
Function* next(const char* name) {
    return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

API void clocked_begin(void (*tick)(int64_t)) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    clock_ns = now.tv_sec * INT64_C(1'000'000'000) + now.tv_nsec;
    on_tick = tick;
    clocked = true;
}
API void clocked_pass(int64_t ns) { pass(ns); }
API void clocked_take(int64_t from, int64_t to) {
    for (; !all_taken.empty() && all_taken.front().to < clock_ns - kForget; all_taken.pop_front())
        lost_before += all_taken.front().to - all_taken.front().from;
    all_taken.push_back({from, to});
}
API int64_t clocked_queued() {
    return std::max<int64_t>(launched_until - own_time(clock_ns), 0);
}

API int64_t clocked_records() { return records; }

API int clock_gettime(clockid_t which, timespec* now) {
    static const auto real = next<int(clockid_t, timespec*)>("clock_gettime");
    if (!clocked || which != CLOCK_MONOTONIC) return real(which, now);
    pass(kLook);
    *now = {clock_ns / 1'000'000'000, clock_ns % 1'000'000'000};
    return 0;
}
API int nanosleep(const timespec* span, timespec* left) {
    static const auto real = next<int(const timespec*, timespec*)>("nanosleep");
    if (!clocked) return real(span, left);
    pass(span->tv_sec * 1'000'000'000 + span->tv_nsec + slack_ns + kSwitch);
    return 0;
}
API int sched_yield() noexcept {
    static const auto real = next<int()>("sched_yield");
    if (!clocked) return real();
    pass(kYield);
    return 0;
}
API int prctl(int what, ...) {
    static const auto real = next<int(int, ...)>("prctl");
    va_list arguments;
    va_start(arguments, what);
    long value = what == PR_GET_TIMERSLACK ? 0 : va_arg(arguments, long);
    va_end(arguments);
    if (!clocked) return real(what, value);
    pass(kYield);
    if (what == PR_SET_TIMERSLACK) slack_ns = static_cast<int>(value);
    return what == PR_GET_TIMERSLACK ? static_cast<int>(slack_ns) : 0;
}

API CUresult cuLaunchKernel(CUfunction, unsigned blocks, unsigned, unsigned, unsigned, unsigned, unsigned,
                            unsigned, CUstream, void**, void**) {
    pass(kLaunch);
    launched_until = std::max(launched_until, own_time(clock_ns)) + blocks;
    return CUDA_SUCCESS;
}
API CUresult cuStreamSynchronize(CUstream) {
    pass(std::max<int64_t>(when(launched_until) - clock_ns, 0) + kQuestion);
    return CUDA_SUCCESS;
}
API CUresult cuEventRecord(CUevent event, CUstream) {
    pass(kRecord);
    ++records;
    time_of(event) = std::max(launched_until, own_time(clock_ns));
    return CUDA_SUCCESS;
}
API CUresult cuEventQuery(CUevent event) {
    pass(kQuestion);
    return own_time(clock_ns) >= time_of(event) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
API CUresult cuEventElapsedTime(float* ms, CUevent from, CUevent to) {
    pass(kQuestion);
    *ms = static_cast<float>(when(time_of(to)) - when(time_of(from))) / 1e6f;
    return CUDA_SUCCESS;
}
