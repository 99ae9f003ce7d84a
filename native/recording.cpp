#include "recording.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <vector>

#include "device.h"

namespace eclip {
namespace {

constexpr size_t kManyPending = 4096;  // launches after which it is worth looking what has ended

struct Pair {
    CUevent begin = nullptr;
    CUevent end = nullptr;
};

struct Timed {  // without events: a mark
    Pair pair;
    uint32_t worker;
    std::vector<Launch> launches;
};

int blocks_per_unit(const Launch& launch);

class Log {
public:
    static Log& get() {
        static Log& only = *new Log;  // never destroyed: written to until the process ends
        return only;
    }

    Pair take() {
        std::lock_guard hold(lock_);
        if (!unused_.empty()) {
            Pair pair = unused_.back();
            unused_.pop_back();
            return pair;
        }
        Pair pair;
        driver().cuEventCreate(&pair.begin, 0);
        driver().cuEventCreate(&pair.end, 0);
        return pair;
    }

    void give_back(const Pair& pair) {
        std::lock_guard hold(lock_);
        unused_.push_back(pair);
    }

    void add(const Timed& timed) {
        std::lock_guard hold(lock_);
        pending_.push_back(timed);
        if (pending_.size() < look_at_) return;
        // No waiting here: the driver itself lets a program run ahead only so far.
        write_pending();
        look_at_ = 2 * pending_.size() + kManyPending;
    }

    void mark(uint32_t worker) {
        std::lock_guard hold(lock_);
        bool again = !pending_.empty() && pending_.back().pair.end == nullptr &&
                     pending_.back().worker == worker;
        if (!again) pending_.push_back({{}, worker, {}});
        write_pending();
        look_at_ = kManyPending;
        if (file_ != nullptr) fflush(file_);
    }

    void calibrate(CUstream stream) {
        Pair pair = take();
        long long least = -1;
        for (int trial = 0; trial < 5; ++trial) {
            driver().cuEventRecord(pair.begin, stream);
            driver().cuEventRecord(pair.end, stream);
            driver().cuStreamSynchronize(stream);
            long long found = elapsed_ns(pair.begin, pair.end);
            if (least < 0 || found < least) least = found;
        }
        std::lock_guard hold(lock_);
        if (file_ != nullptr) fprintf(file_, "C %lld\n", least);
        unused_.push_back(pair);
    }

private:
    Log() {
        const char* path = secure_getenv("ECLIP_RECORD");
        if (path == nullptr) return;
        file_ = fopen(path, "ae");
        if (file_ == nullptr) say("cannot write %s: nothing is recorded", path);
    }

    static long long elapsed_ns(CUevent from, CUevent to) {
        float ms = 0;
        CUresult status = driver().cuEventElapsedTime(&ms, from, to);
        if (status == CUDA_ERROR_NOT_READY) return -1;
        return static_cast<long long>(ms * 1e6f);
    }

    // In order of launch, as far as kernels have ended. A worker's last pair is kept back, because
    // the next gap begins at its end.
    void write_pending() {
        Relaxed relaxed;
        size_t done = 0;
        for (; done < pending_.size(); ++done) {
            Timed& timed = pending_[done];
            if (timed.pair.end == nullptr) {
                if (file_ == nullptr) continue;
                if (timed.worker == kAllWorkers) fputs("S\n", file_);
                else fprintf(file_, "S %u\n", timed.worker);
                continue;
            }
            long long busy = elapsed_ns(timed.pair.begin, timed.pair.end);
            if (busy < 0) break;
            Pair& last = last_[timed.worker];
            long long gap = last.end != nullptr ? elapsed_ns(last.end, timed.pair.begin) : 0;
            if (last.end != nullptr) unused_.push_back(last);
            last = timed.pair;
            if (file_ == nullptr) continue;
            busy /= static_cast<long long>(timed.launches.size());
            for (const Launch& launch : timed.launches) {
                write_kernel(timed.worker, busy, gap < 0 ? 0 : gap, launch);
                gap = 0;
            }
        }
        pending_.erase(pending_.begin(), pending_.begin() + static_cast<long>(done));
    }

    void write_kernel(uint32_t worker, long long busy, long long gap, const Launch& launch) {
        fprintf(file_, "K %u %lld %lld %u %u %u %u %u %u %u %u %d %s\n", worker, busy, gap,
                launch.grid[0], launch.grid[1], launch.grid[2], launch.block[0], launch.block[1],
                launch.block[2], launch.shared_bytes, launch.cluster, blocks_per_unit(launch),
                name_function(launch.function).name);
    }

    std::mutex lock_;
    FILE* file_ = nullptr;
    std::vector<Timed> pending_;
    size_t look_at_ = kManyPending;
    std::vector<Pair> unused_;
    std::map<uint32_t, Pair> last_;
};

int blocks_per_unit(const Launch& launch) {
    auto ask = driver().cuOccupancyMaxActiveBlocksPerMultiprocessor;
    int blocks = 0;
    int threads = static_cast<int>(launch.block[0] * launch.block[1] * launch.block[2]);
    if (ask == nullptr || ask(&blocks, launch.function, threads, launch.shared_bytes) != CUDA_SUCCESS)
        return 1;
    return blocks;
}

}  // namespace

uint32_t thread_number() {
    static std::atomic<uint32_t> next{1};
    thread_local uint32_t mine = next.fetch_add(1);
    return mine;
}

void mark_record(uint32_t worker) { Log::get().mark(worker); }

uint32_t recorded_worker(const Table& table, const Stream& stream) {
    return table.workers_by == WorkersBy::stream ? static_cast<uint32_t>(stream.order->id)
                                                 : thread_number();
}

void open_record_lane(const Table& table, Pool& pool, Stream& stream) {
    stream.record_ready = true;
    const TableLane& wanted = table.lanes[0];
    CUstream timed = pool.aside;  // not the user's: that may wait for the program
    Relaxed relaxed;              // somebody else may capture
    PrimaryCurrent current(pool.primary);
    if (!wanted.full) {
        std::string wrong = add_lane(pool, wanted, stream.record_lane);
        if (!wrong.empty()) say("a stream is recorded on the whole device: %s", wrong.c_str());
        // Nor one that orders itself with the default stream, which may wait for it, too.
        if (stream.record_lane >= 0 && pool.waits_for_host == nullptr)
            timed = pool.lanes[stream.record_lane].stream;
    }
    Log::get().calibrate(timed);
}

Timing begin_timing(CUstream target) {
    Pair pair = Log::get().take();
    driver().cuEventRecord(pair.begin, target);
    return {pair.begin, pair.end};
}

void drop_timing(const Timing& timing) { Log::get().give_back({timing.begin, timing.end}); }

void end_timing(const Timing& timing, CUstream target, uint32_t worker,
                const std::vector<Launch>& launches, bool marked) {
    driver().cuEventRecord(timing.end, target);
    if (marked) Log::get().mark(worker);
    Log::get().add({{timing.begin, timing.end}, worker, launches});
}

}  // namespace eclip
