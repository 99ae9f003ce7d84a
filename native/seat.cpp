#include "seat.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/limits.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

namespace eclip {
namespace {

constexpr size_t kBytes = sizeof(eclip_board);
constexpr int64_t kBeatNs = 20'000'000;  // a fifth of what counts as stopped
constexpr int kSweepBeats = 5;
constexpr int kAttempts = 5;  // a row that somebody clears is locked for a moment
constexpr int64_t kPauseNs = 2'000'000;
constexpr int kHeader = -1;  // the lock of the board itself, beside those of rows
constexpr int64_t kLockNs = 200'000'000, kLockPauseNs = 100'000;
constexpr size_t kStackBytes = 256 << 10;
constexpr const char* kAdvice = "remove it, or set ECLIP_BOARD to another path";

static_assert(offsetof(eclip_board, row) == sizeof(eclip_board_row));

std::string refused(int number) {
    std::string room = number == ENOSPC ? "; containers get more with --shm-size" : "";
    return std::string(strerror(number)) + room +
           "; set ECLIP_BOARD to a path in shared memory that this user can write";
}

// An empty board. Space is taken first: to write to pages that a full file system cannot give would
// end the process.
int fill(int file) {
    const int64_t header[] = {ECLIP_BOARD_MAGIC, ECLIP_BOARD_VERSION, ECLIP_BOARD_ROWS,
                              ECLIP_BOARD_WORDS};
    if (fchmod(file, 0600) != 0) return errno;
    if (int wrong = posix_fallocate(file, 0, kBytes)) return wrong;
    return pwrite(file, header, sizeof header, 0) == sizeof header ? 0 : EIO;
}

// Put a board there, whole; one that somebody else puts there first stays.
int make_file(const std::string& path) {
    uint64_t random = 0;
    if (getrandom(&random, sizeof random, 0) != sizeof random) return EIO;
    size_t name = path.rfind('/') + 1;  // 0 where there is no folder
    char mark[24];
    snprintf(mark, sizeof mark, ".%016llx", static_cast<unsigned long long>(random));
    std::string draft = path.substr(0, name) + "." + path.substr(name) + mark;
    int file = open(draft.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file < 0) return errno;
    int wrong = fill(file);
    if (wrong == 0 && link(draft.c_str(), path.c_str()) != 0 && errno != EEXIST) wrong = errno;
    unlink(draft.c_str());
    close(file);
    return wrong;
}

// What is not exactly a board of ours is refused, in the words of board.py.
std::string check(int file) {
    struct stat found;
    int64_t header[4] = {};
    if (fstat(file, &found) != 0) return refused(errno);
    if (found.st_uid != geteuid() || (found.st_mode & 077) != 0)
        return std::string("it is open to other users; ") + kAdvice;
    bool whole = S_ISREG(found.st_mode) && pread(file, header, sizeof header, 0) == sizeof header;
    if (!whole || header[0] != ECLIP_BOARD_MAGIC)
        return std::string("it is no board of eclip; ") + kAdvice;
    if (header[1] != ECLIP_BOARD_VERSION)
        return "it is of version " + std::to_string(header[1]) + ", and this eclip's is " +
               std::to_string(ECLIP_BOARD_VERSION) + ": end what uses it and " + kAdvice;
    if (header[2] != ECLIP_BOARD_ROWS || header[3] != ECLIP_BOARD_WORDS ||
        static_cast<size_t>(found.st_size) != kBytes)
        return std::string("it is damaged; ") + kAdvice;
    return "";
}

struct flock bytes_of(int row, short kind) {
    struct flock lock = {};
    lock.l_type = kind;
    lock.l_whence = SEEK_SET;
    lock.l_start = static_cast<off_t>(sizeof(eclip_board_row)) * (row + 1);
    lock.l_len = sizeof(eclip_board_row);
    return lock;
}

void clear(eclip_board_row& row) {
    write_word(row.tier, ECLIP_NOBODY);
    auto words = reinterpret_cast<int64_t*>(&row);
    for (int word = 0; word < ECLIP_BOARD_WORDS; ++word) write_word(words[word], 0);
}

// The program as a person calls it: of an interpreter, the script.
std::string program_name() {
    char line[4096];
    int file = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t got = file < 0 ? -1 : read(file, line, sizeof line - 1);
    if (file >= 0) close(file);
    if (got <= 0) return "";
    line[got] = '\0';
    auto base = [](const char* path) {
        const char* slash = strrchr(path, '/');
        return std::string(slash != nullptr ? slash + 1 : path);
    };
    std::string name = base(line);
    if (!name.starts_with("python")) return name;
    for (const char* word = line + strlen(line) + 1; word < line + got; word += strlen(word) + 1) {
        if (strcmp(word, "-m") == 0) continue;  // a module is named like a script
        if (strcmp(word, "-c") == 0) break;
        if (word[0] != '-' && word[0] != '\0') return base(word);
    }
    return name;
}

}  // namespace

int64_t monotonic_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1'000'000'000) + now.tv_nsec;
}

void nap(int64_t ns) {
    timespec span = {ns / 1'000'000'000, ns % 1'000'000'000};
    nanosleep(&span, nullptr);
}

bool start_thread(void* (*run)(void*)) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t kind;
    pthread_attr_init(&kind);
    pthread_attr_setdetachstate(&kind, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&kind, kStackBytes);
    pthread_t made;
    int wrong = pthread_create(&made, &kind, run, nullptr);
    // What is thread-local in the program may need more room than that.
    if (wrong == EINVAL) {
        pthread_attr_setstacksize(&kind, 64 * kStackBytes);
        wrong = pthread_create(&made, &kind, run, nullptr);
    }
    pthread_attr_destroy(&kind);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return wrong == 0;
}

std::string board_path(const unsigned char uuid[16]) {
    const char* chosen = secure_getenv("ECLIP_BOARD");
    std::string place = chosen != nullptr && *chosen != '\0' ? chosen : "/dev/shm";
    struct stat found;
    if (stat(place.c_str(), &found) != 0 || !S_ISDIR(found.st_mode)) return place;
    char name[96];
    int at = snprintf(name, sizeof name, "/eclip-board-%u-GPU-", geteuid());
    for (int index = 0; index < 16; ++index) {
        bool dash = index == 4 || index == 6 || index == 8 || index == 10;
        at += snprintf(name + at, sizeof name - static_cast<size_t>(at), dash ? "-%02x" : "%02x",
                       uuid[index]);
    }
    return place + name;
}

Seat& Seat::get() {
    static Seat& only = *new Seat;  // threads write to it until the process ends
    return only;
}

std::string Seat::take(const std::string& path, const Promise& promise) {
    static std::mutex& lock = *new std::mutex;
    std::lock_guard hold(lock);
    return row_ >= 0 ? "" : join(path, promise);
}

std::string Seat::join(const std::string& path, const Promise& promise) {
    std::string wrong = open_file(path);
    if (wrong.empty()) wrong = check(file_);
    if (wrong.empty()) wrong = map_file();
    if (wrong.empty() && !claim(promise))
        wrong = "it is full: " + std::to_string(ECLIP_BOARD_ROWS) +
                " workers share this GPU already; end some of them";
    if (wrong.empty()) {
        find_services();
        auto live = [](void*) -> void* {
            get().beat();
            return nullptr;
        };
        if (!start_thread(live)) {
            leave();
            wrong = "no thread could be started to say that this process runs";
        }
    }
    if (!wrong.empty() && file_ >= 0) {
        close(file_);
        file_ = -1;
    }
    return wrong;
}

std::string Seat::open_file(const std::string& path) {
    const int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW;
    file_ = open(path.c_str(), flags);
    if (file_ < 0 && errno == ENOENT) {
        if (int wrong = make_file(path)) return refused(wrong);
        file_ = open(path.c_str(), flags);
    }
    return file_ < 0 ? refused(errno) : "";
}

std::string Seat::map_file() {
    // Also if somebody copied it with holes.
    if (int wrong = posix_fallocate(file_, 0, kBytes)) return refused(wrong);
    struct stat found;
    fstat(file_, &found);
    device_ = found.st_dev;
    inode_ = found.st_ino;
    void* mapped = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (mapped == MAP_FAILED) return refused(errno);
    board_ = static_cast<eclip_board*>(mapped);
    return "";
}

bool Seat::try_lock(int row) const {
    struct flock lock = bytes_of(row, F_WRLCK);
    return fcntl(file_, F_OFD_SETLK, &lock) == 0;
}

bool Seat::claim(const Promise& promise) {
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
        int64_t now = monotonic_ns();
        for (int row = 0; row < ECLIP_BOARD_ROWS; ++row) {
            // Whoever beats holds the lock: two hundred that come at once need not ask for it.
            const eclip_board_row& seen = board_->row[row];
            bool lives = read_word(seen.tier) != ECLIP_NOBODY &&
                         llabs(now - read_word(seen.heartbeat)) <= ECLIP_STOPPED_NS;
            if (lives || !try_lock(row)) continue;
            row_ = row;
            enter(promise);
            return true;
        }
        nap(kPauseNs);
    }
    return false;
}

void Seat::enter(const Promise& promise) {
    eclip_board_row& row = mine();
    clear(row);
    std::string name = program_name().substr(0, ECLIP_BOARD_NAME_BYTES);
    memcpy(row.name, name.data(), name.size());
    write_word(row.pid, getpid());
    write_word(row.busy_since, ECLIP_IDLE);
    write_word(row.heartbeat, monotonic_ns());
    write_word(row.bound_ns, promise.bound_ns);
    write_word(row.some_ns, promise.none_ns);
    write_word(row.none_ns, promise.none_ns);
    write_word(row.tier, promise.tier);  // last: others may read meanwhile
}

void Seat::leave() {
    if (row_ < 0 || left_.exchange(true)) return;
    clear(mine());
}

void Seat::forked() {
    left_.store(true);
    if (board_ == nullptr) return;
    // Descriptor and mapping keep the parent's lock: a data loader could keep a dead service's row.
    mmap(board_, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (is_our_file()) close(file_);
    file_ = -1;
    service_count_.store(0);
}

// Programs close descriptors that they do not know, and the number comes to mean another file.
bool Seat::is_our_file() const {
    struct stat found;
    return file_ >= 0 && fstat(file_, &found) == 0 && found.st_dev == device_ &&
           found.st_ino == inode_;
}

void Seat::find_services() {
    int count = 0;
    for (int row = 0; row < ECLIP_BOARD_ROWS; ++row)
        if (row != row_ && read_word(board_->row[row].tier) == ECLIP_SERVICE)
            service_rows_[count++].store(row, std::memory_order_relaxed);
    service_count_.store(count, std::memory_order_release);
}

// Its lock is free: it was asked for first, where the owner was seen to run.
bool Seat::clear_if_gone(int row) {
    if (!is_our_file() || !try_lock(row)) return false;
    clear(board_->row[row]);
    struct flock lock = bytes_of(row, F_UNLCK);
    fcntl(file_, F_OFD_SETLK, &lock);
    return true;
}

bool Seat::lock_slices() const {
    for (int64_t until = monotonic_ns() + kLockNs; monotonic_ns() < until; nap(kLockPauseNs)) {
        if (!is_our_file()) return false;
        if (try_lock(kHeader)) return true;
    }
    return false;
}

void Seat::unlock_slices() const {
    struct flock lock = bytes_of(kHeader, F_UNLCK);
    if (is_our_file()) fcntl(file_, F_OFD_SETLK, &lock);
}

Holders Seat::holders(size_t slices) {
    Holders found;
    for (int index = 0; index < ECLIP_BOARD_ROWS; ++index) {
        const eclip_board_row& row = board_->row[index];
        if (index == row_ || read_word(row.tier) == ECLIP_NOBODY) continue;
        auto held = static_cast<uint64_t>(read_word(row.slices_held[0]));
        // One that is gone held them until now. One that is stopped may still run kernels there.
        bool silent = llabs(monotonic_ns() - read_word(row.heartbeat)) > ECLIP_STOPPED_NS;
        if (held == 0 || (silent && clear_if_gone(index))) continue;
        found.any |= held;
        found.wanted += static_cast<uint32_t>(read_word(row.units_wanted));
        for (size_t slice = 0; slice < std::min<size_t>(slices, 64); ++slice)
            found.count[slice] += static_cast<int>(held >> slice & 1);
    }
    return found;
}

// Clear rows whose owners are gone.
void Seat::sweep() {
    int64_t now = monotonic_ns();
    for (int row = 0; row < ECLIP_BOARD_ROWS; ++row) {
        eclip_board_row& seen = board_->row[row];
        // A heartbeat ahead of our clock is from before the machine was started.
        bool silent = llabs(now - read_word(seen.heartbeat)) > ECLIP_STOPPED_NS;
        if (row == row_ || !silent || read_word(seen.tier) == ECLIP_NOBODY) continue;
        clear_if_gone(row);
    }
}

void Seat::beat() {
    for (unsigned beats = 1; !left_.load(); ++beats) {
        nap(kBeatNs);
        if (left_.load()) return;
        write_word(mine().heartbeat, monotonic_ns());
        find_services();
        // Of background it is only shown whether it runs; nobody decides by it.
        if (read_word(mine().tier) == ECLIP_BACKGROUND) {
            int64_t launched = read_word(mine().launched);
            bool busy = launched != launched_before_;
            launched_before_ = launched;
            if (!busy) write_word(mine().busy_since, ECLIP_IDLE);
            else if (read_word(mine().busy_since) == ECLIP_IDLE)
                write_word(mine().busy_since, monotonic_ns());
        }
        if (beats % kSweepBeats == 0) sweep();
    }
}

}  // namespace eclip
