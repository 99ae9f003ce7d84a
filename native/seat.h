// The board in C++: a process's own row on it, its heartbeat, and everybody else's rows to read.
//
// native/board.h has the layout and what every owner keeps to; src/eclip/gpu/board.py makes,
// checks and sweeps the same file. A forked child has no seat: memory of its own takes the place of
// the board, so that nothing it does can be seen there.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "board.h"

namespace eclip {

// Words are read and written one by one, by several processes.
inline int64_t read_word(const int64_t& word) { return __atomic_load_n(&word, __ATOMIC_ACQUIRE); }
inline void write_word(int64_t& word, int64_t value) {
    __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}
inline void add_to_word(int64_t& word, int64_t more) {
    __atomic_fetch_add(&word, more, __ATOMIC_RELAXED);
}

int64_t monotonic_ns();
void nap(int64_t ns);
constexpr int kSlackNs = 1000;  // by which timers of threads that others wait for may be late; usual: 50 us

// A thread of ours: no signal of the program is handled there. False if it could not be started.
bool start_thread(void* (*run)(void*));

// Where the board of this GPU is: ECLIP_BOARD, a file or a folder of such, or the default folder.
std::string board_path(const unsigned char uuid[16]);

struct Promise {
    int64_t tier = ECLIP_NOBODY;
    int64_t bound_ns = 0;
    int64_t none_ns = 0;
};

// Who holds which slices (native/moving.h).
struct Holders {
    uint64_t any = 0;     // of all others
    int count[64] = {};   // of each slice
    uint32_t wanted = 0;  // units, by all others
};

class Seat {
public:
    static Seat& get();

    // Open or make the file and claim a row, if there is none yet. Returns what is wrong, for a
    // person, or nothing.
    std::string take(const std::string& path, const Promise& promise);

    // At the end of the process: nobody's from now on. The lock goes with the process, so that
    // threads that still run write to no other owner's row.
    void leave();

    bool left() const { return left_.load(); }

    // In a forked child.
    void forked();

    // While it is locked nobody else claims slices. False: it could not be, for too long.
    bool lock_slices() const;
    void unlock_slices() const;
    Holders holders(size_t slices);  // as they are; rows whose owners are gone are cleared

    eclip_board_row& mine() { return board_->row[row_]; }
    const eclip_board_row& row(int index) const { return board_->row[index]; }

    // Rows of services, found anew with every heartbeat.
    int services() const { return service_count_.load(std::memory_order_acquire); }
    int service(int index) const { return service_rows_[index].load(std::memory_order_relaxed); }

private:
    std::string join(const std::string& path, const Promise& promise);
    bool clear_if_gone(int row);
    std::string open_file(const std::string& path);
    std::string map_file();
    bool claim(const Promise& promise);
    bool try_lock(int row) const;
    bool is_our_file() const;
    void enter(const Promise& promise);
    void find_services();
    void sweep();
    void beat();

    int file_ = -1;
    uint64_t device_ = 0, inode_ = 0;  // of the file: its number may have come to mean another
    eclip_board* board_ = nullptr;
    int row_ = -1;
    std::atomic<bool> left_{false};
    std::atomic<int> service_count_{0};
    std::atomic<int> service_rows_[ECLIP_BOARD_ROWS]{};
    int64_t launched_before_ = 0;
};

}  // namespace eclip
