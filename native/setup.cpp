#include "setup.h"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "device.h"
#include "moving.h"
#include "seat.h"
#include "stats.h"
#include "thread.h"

namespace eclip {

// In bindings.cpp, which only a preloaded library has.
__attribute__((weak)) void rebind_new_objects();

namespace {

constexpr CUdevice kAnyDevice = -1;
constexpr uint32_t kCapSplit = 8;  // units of a slice: as SMs schedule together
constexpr const char kPrivate[] =
    "the program has a context of its own; what it does there is not planned";

std::string read_file(const char* path, std::vector<unsigned char>& bytes) {
    FILE* file = fopen(path, "rbe");
    if (file == nullptr) return strerror(errno);
    unsigned char block[1 << 16];
    for (size_t got; (got = fread(block, 1, sizeof block, file)) > 0;)
        bytes.insert(bytes.end(), block, block + got);
    bool failed = ferror(file);
    fclose(file);
    return failed ? "it cannot be read" : "";
}

}  // namespace

bool is_disabled() {
    const char* value = secure_getenv("ECLIP_DISABLE");
    return value != nullptr && *value != '\0' && strcmp(value, "0") != 0;
}

Setup::Setup() {
    const char* path = secure_getenv("ECLIP_TABLE");
    const bool capped = path == nullptr && read_cap();
    if (is_disabled() || (path == nullptr && !capped)) return;
    if (const char* folder = secure_getenv("ECLIP_STATS")) open_counters(folder);
    if (capped) wanted_device_ = kAnyDevice;
    if (const char* device = secure_getenv("ECLIP_GPU")) wanted_device_ = atoi(device);
    if (capped) {
        table_.mode = Mode::cap;
        table_.split_units = kCapSplit;
        phase_.store(kWaiting);
        return;
    }
    std::vector<unsigned char> bytes;
    std::string wrong = read_file(path, bytes);
    if (wrong.empty()) wrong = read_table(bytes, table_);
    if (!wrong.empty()) {
        say("the table %s cannot be used: %s; running unplanned", path, wrong.c_str());
        return;
    }
    phase_.store(kWaiting);
}

// What `eclip exec --sms` and `--share` leave for us.
bool Setup::read_cap() {
    if (const char* units = secure_getenv("ECLIP_SMS"))
        wanted_units_ = static_cast<uint32_t>(std::clamp(atol(units), 0L, 1L << 20));
    if (const char* share = secure_getenv("ECLIP_SHARE")) wanted_share_ = atof(share);
    return wanted_units_ > 0 || (wanted_share_ > 0 && wanted_share_ <= 1);
}

// It cannot use its parent's context; if there was none yet, it may make its own.
void Setup::forked() {
    if (phase_.load() != kWaiting) phase_.store(kOff);
    new (&lock_) std::mutex;  // a thread that is not here may have held it
    if (cap_.on()) Seat::get().forked();
    if (const char* folder = secure_getenv("ECLIP_STATS")) open_counters(folder);
}

void Setup::stop(const char* why) {
    if (phase_.exchange(kOff) != kOff) say("%s; running %s from here on", why, without());
}

bool Setup::is_foreign(CUcontext context) const {
    for (const auto& known : foreign_)
        if (known.load(std::memory_order_relaxed) == context) return true;
    return false;
}

// Two processes would each believe the units to be theirs.
std::string Setup::hold_table() const {
    const char* path = secure_getenv("ECLIP_TABLE");
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file >= 0 && flock(file, LOCK_EX | LOCK_NB) == 0) return "";
    return "another process of this command holds the plan's lanes, and masks of several processes "
           "are not kept apart";
}

std::string Setup::make_lanes() {
    std::string wrong = make_pool(table_, pool_);
    if (!wrong.empty() || table_.mode != Mode::cap) return wrong;
    const uint32_t all = units_of(pool_.slice_units, all_slices(pool_.slice_units));
    uint32_t wanted = wanted_units_ > 0 ? wanted_units_ : static_cast<uint32_t>(wanted_share_ * all);
    return moving::begin(cap_, pool_.slice_units, std::max(wanted, 1u), pool_.device);
}

bool Setup::make_ready() {
    if (Inside::now()) return false;
    bool missed = missed_calls_.exchange(true);
    CUcontext current = device::current_context();
    if (current == nullptr || is_foreign(current)) return false;
    // Under a cap without a GPU's number: that of the first call.
    if (wanted_device_ < 0) wanted_device_ = device::current_device();
    if (!device::is_current(wanted_device_)) return false;
    // Nobody has made the primary context: then this is another, and we make none just to see that.
    if (!device::has_primary(wanted_device_)) {
        say(kPrivate);
        return false;
    }
    std::lock_guard hold(lock_);
    int phase = phase_.load();
    if (phase != kWaiting) return phase != kOff;
    CUcontext primary = device::retain_primary(wanted_device_);
    if (primary == nullptr) return false;
    if (primary != current) {  // somebody's private context: not what was planned for
        say(kPrivate);
        foreign_[foreign_next_++ % kForeign].store(current);
        device::release_primary(wanted_device_);
        return false;
    }
    Inside ours;
    pool_.primary = primary;
    pool_.device = wanted_device_;
    Relaxed relaxed;
    std::string wrong = table_.mode == Mode::cap ? "" : hold_table();
    if (wrong.empty()) wrong = make_lanes();
    if (!wrong.empty()) {
        stop(wrong.c_str());
        return false;
    }
    missed_calls_.store(missed);  // this call is the first that is seen
    phase_.store(kReady, std::memory_order_release);
    if (rebind_new_objects != nullptr) rebind_new_objects();
    return true;
}

}  // namespace eclip
