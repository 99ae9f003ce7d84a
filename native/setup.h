// From the environment to lanes: whether this process is planned, since when, and until when.
#pragma once

#include <atomic>
#include <mutex>

#include "driver.h"
#include "cap.h"
#include "lanes.h"
#include "table.h"

namespace eclip {

bool is_disabled();  // ECLIP_DISABLE says so

class Setup {
public:
    Setup();  // reads the table that the environment names; off where there is none

    // Whether calls need any attention; the one thing an unplanned process pays for.
    bool on() const { return phase_.load(std::memory_order_relaxed) != kOff; }

    // Whether there are lanes. They are made when the device's context is first used.
    bool ready() {
        return is_ready() || (phase_.load(std::memory_order_relaxed) == kWaiting && make_ready());
    }
    // Without making it so: until then another thread may be writing what `pool` gives.
    bool is_ready() const {
        int phase = phase_.load(std::memory_order_acquire);
        return phase == kReady || phase == kAtHome;
    }
    bool planning() { return ready() && phase_.load(std::memory_order_relaxed) == kReady; }
    // Lanes there are, but nothing goes there any more.
    bool at_home() const { return phase_.load(std::memory_order_relaxed) == kAtHome; }

    // Planning is over, because the program calls this. Whoever calls it goes on after `join` has
    // joined all lanes back.
    template <class Join>
    void end_planning(const char* name, Join&& join) {
        std::lock_guard hold(lock_);
        int phase = phase_.load();
        if (phase != kWaiting && phase != kReady) return;
        phase_.store(phase == kReady ? kAtHome : kOff);
        say("the program calls %s, which libeclip does not know; running %s from here on", name,
            without());
        if (phase == kReady) join();
    }

    // Whether calls went by before there were lanes: streams of ours may have been named while
    // another context was current, and hold work that nobody has seen.
    bool missed_calls() const { return missed_calls_.load(std::memory_order_relaxed); }

    void stop(const char* why);
    void forked();  // in the child
    void forget_contexts() {
        for (auto& known : foreign_) known.store(nullptr);
    }

    const Table& table() const { return table_; }
    Pool& pool() { return pool_; }
    Cap& cap() { return cap_; }

private:
    enum Phase : int { kOff, kWaiting, kReady, kAtHome };

    // How the program runs when we do nothing for it.
    const char* without() const { return table_.mode == Mode::cap ? "without a cap" : "unplanned"; }
    bool read_cap();
    bool make_ready();
    std::string hold_table() const;
    std::string make_lanes();
    bool is_foreign(CUcontext context) const;

    std::atomic<int> phase_{kOff};
    std::atomic<bool> missed_calls_{false};
    std::mutex lock_;
    Table table_;
    Pool pool_;
    Cap cap_{pool_};
    double wanted_share_ = 0;  // of the device's units,
    uint32_t wanted_units_ = 0;  // or so many
    std::atomic<CUdevice> wanted_device_{0};
    static constexpr size_t kForeign = 8;
    std::atomic<CUcontext> foreign_[kForeign]{};  // known not to be the device's primary one
    std::atomic<size_t> foreign_next_{0};
};

}  // namespace eclip
