// What background leaves idle while it is paced and gives way, on the driver that has a clock of its own.
//
//   idle [--seconds N] [--host-ns N] [--rate N] [--request-ns N] [--linger-ns N] [--beside 1] KERNEL_NS...
//
// It launches these kernels over and over, as an eager program does: each launch takes the host `host-ns`,
// and after every eight rounds it waits for the device. Random requests of a service come `rate` times a
// second. Each takes the device for `request-ns`, or with --beside runs next to background, and counts as
// busy for `linger-ns` more. ECLIP_BOARD names a board, on which the service has the first row.
//
// Prints a line of JSON. Parts of the time: in which background worked, and in which the service was busy.
// Means in microseconds: work between two events, what a request found queued, and how long after a service
// became idle a launch that was held reached the driver.
#include <fcntl.h>
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "../board.h"
#include "../cuda_abi.h"
#include "clocked.h"

extern "C" {
CUresult cuInit(unsigned);
CUresult cuStreamCreate(CUstream*, unsigned);
CUresult cuStreamSynchronize(CUstream);
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        CUstream, void**, void**);
}

namespace {

constexpr int kInFlight = 8;          // rounds, as in lab/gpu/apps/loops.py
constexpr double kWarmUpSeconds = 0.2;  // until weights are known

struct Options {
    double seconds = 5, rate = 0;
    int64_t host_ns = 8'000, request_ns = 1'000'000, linger_ns = 100'000;
    bool beside = false;
} options;

int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1'000'000'000) + now.tv_nsec;
}

struct Mean {
    double sum = 0;
    int64_t count = 0;
    void add(int64_t ns) {
        sum += static_cast<double>(ns) / 1e3;
        ++count;
    }
    double us() const { return count == 0 ? 0 : sum / static_cast<double>(count); }
};

class Service {
public:
    void take_row(const char* path) {
        int file = open(path, O_RDWR);
        void* mapped = mmap(nullptr, sizeof(eclip_board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (file < 0 || mapped == MAP_FAILED) perror("idle: ECLIP_BOARD"), exit(2);
        struct flock lock = {};
        lock.l_type = F_WRLCK;
        lock.l_start = lock.l_len = sizeof(eclip_board_row);
        fcntl(file, F_OFD_SETLK, &lock);  // or it would be cleared: heartbeats are of another clock
        row_ = static_cast<eclip_board*>(mapped)->row;
        row_->busy_since = ECLIP_IDLE;
        row_->tail_ns = 100'000'000;  // it launches once in a request, and is not quiet for that
        row_->tier = ECLIP_SERVICE;
    }
    void await_request(int64_t after) {
        std::exponential_distribution<double> gap(options.rate / 1e9);
        begins_ = after + static_cast<int64_t>(gap(random_));
    }
    void tick(int64_t now) {
        if (now < begins_) return;
        row_->heartbeat = now;
        if (row_->busy_since == ECLIP_IDLE) begin();
        if (now >= done_) row_->served = queued.count;
        if (now < idle_) return;
        row_->busy_since = ECLIP_IDLE;
        busy_ns += idle_ - begins_;
        await_request(last_idle = idle_);
    }

    Mean queued;
    int64_t busy_ns = 0, last_idle = 0;

private:
    void begin() {
        done_ = begins_ + options.request_ns;
        idle_ = done_ + options.linger_ns;
        queued.add(clocked_queued());
        if (!options.beside) clocked_take(begins_, done_);
        ++row_->launched;
        row_->busy_since = begins_;
    }

    eclip_board_row* row_ = nullptr;
    std::minstd_rand random_{1};
    int64_t begins_ = INT64_MAX, done_ = 0, idle_ = 0;  // of its next request, or of that under way
} service;

class Background {
public:
    explicit Background(std::vector<unsigned> kernels) : kernels_(std::move(kernels)) {
        cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING);
    }
    // Which part of the time the device worked.
    double run(double seconds) {
        const int64_t begin = now_ns();
        int64_t work = 0;
        for (int round = 1; static_cast<double>(now_ns() - begin) < seconds * 1e9; ++round) {
            for (unsigned ns : kernels_) launch(ns);
            for (unsigned ns : kernels_) work += ns;
            if (round % kInFlight == 0) cuStreamSynchronize(stream_);
        }
        cuStreamSynchronize(stream_);
        return static_cast<double>(work) / static_cast<double>(now_ns() - begin);
    }
    Mean resumed;

private:
    void launch(unsigned ns) {
        static char name[] = "kernel";
        clocked_pass(options.host_ns);
        const int64_t begin = now_ns();
        cuLaunchKernel(reinterpret_cast<CUfunction>(name), ns, 1, 1, 1, 1, 1, 0, stream_, nullptr, nullptr);
        if (begin < service.last_idle) resumed.add(now_ns() - service.last_idle);
    }

    std::vector<unsigned> kernels_;
    CUstream stream_ = nullptr;
};

}  // namespace

int main(int count, char** words) {
    std::vector<unsigned> kernels;
    for (int index = 1; index < count; ++index) {
        const std::string name = words[index];
        if (!name.starts_with("--")) {
            kernels.push_back(static_cast<unsigned>(atoi(words[index])));
            continue;
        }
        const double value = ++index < count ? atof(words[index]) : 0;
        if (name == "--seconds") options.seconds = value;
        else if (name == "--rate") options.rate = value;
        else if (name == "--host-ns") options.host_ns = static_cast<int64_t>(value);
        else if (name == "--request-ns") options.request_ns = static_cast<int64_t>(value);
        else if (name == "--linger-ns") options.linger_ns = static_cast<int64_t>(value);
        else if (name == "--beside") options.beside = value != 0;
        else return fprintf(stderr, "idle: what is %s?\n", name.c_str()), 2;
    }
    const char* board = getenv("ECLIP_BOARD");
    if (board == nullptr || kernels.empty())
        return fprintf(stderr, "idle: set ECLIP_BOARD and name the times of kernels\n"), 2;
    service.take_row(board);
    cuInit(0);
    Background background(kernels);
    clocked_begin([](int64_t now) { service.tick(now); });
    background.run(kWarmUpSeconds);
    if (options.rate > 0) service.await_request(now_ns());
    const int64_t begin = now_ns(), before = clocked_records();
    const double worked = background.run(options.seconds);
    const auto took = static_cast<double>(now_ns() - begin);
    const auto stretches = static_cast<double>(std::max<int64_t>(clocked_records() - before, 1));
    printf("{\"worked\": %.4f, \"busy\": %.4f, \"stretch_us\": %.1f, \"queued_us\": %.1f, \"resumed_us\": %.2f}\n",
           worked, static_cast<double>(service.busy_ns) / took, worked * took / 1e3 / stretches,
           service.queued.us(), background.resumed.us());
    return 0;
}
