// What a launch costs under libeclip, in nanoseconds of CPU time, on the driver that does nothing.
//
//   cost [--place home|lane|switch] [--kind legacy|blocking|own] [--streams N] [--lanes N]
//        [--kernels N] [--threads N] [--free 1] [--tier service|background] [--bursts N]
//
// Run with libeclip preloaded, and ECLIP_TABLE naming a file that it may write. It writes a plan there
// and launches what the plan says: kernels that are in no trace (home), all in one lane (lane), or each
// in another lane than the one before (switch). Every thread uses its part of the streams, one after
// the other, and a burst without libeclip is timed after every burst with it. Prints one line, over
// all bursts: the median with libeclip, without, of the difference, and its tenth percentile, which
// a busy machine disturbs least.
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "../cuda_abi.h"
#include "table_file.h"

extern "C" {
void* nothing_launch();
CUresult cuInit(unsigned);
CUresult cuStreamCreate(CUstream*, unsigned);
CUresult cuMemFree_v2(CUdeviceptr);
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        unsigned, CUstream, void*, void*);
}

namespace {

constexpr int kBurst = 1000;  // launches, between two looks at the clock
constexpr int kWarm = 2;      // bursts that do not count

using LaunchCall = decltype(&cuLaunchKernel);

struct Options {
    std::string place = "switch", kind = "own";
    int streams = 1, lanes = 2, kernels = 24, threads = 1, bursts = 300;
    bool free = false;
};

struct Sample {
    double with, without;
};

std::string name_of(int kernel) { return "a_kernel_with_a_name_of_usual_length_" + std::to_string(kernel); }

unsigned grid_of(int kernel) { return 1 + static_cast<unsigned>(kernel) % 7; }

// A worker for each thread; it has its part of the lanes, and they overlap.
void write_plan(const std::string& path, const Options& options) {
    testing::TableFile file;
    auto put = [&](auto value) { file.put(value); };
    auto workers = static_cast<uint32_t>(std::min(options.threads, eclip::kMostWorkers));
    auto lanes = static_cast<uint32_t>(options.lanes), kernels = static_cast<uint32_t>(options.kernels);
    for (uint32_t value : {0u, 0u, 8u, 0u, 16u, lanes * workers, workers, kernels * workers, 0u, 0u})
        put(value);
    for (int slice = 0; slice < 16; ++slice) put(slice < 15 ? 8u : 12u);
    for (uint32_t lane = 0; lane < lanes * workers; ++lane) {
        put(static_cast<int32_t>(lane / lanes));
        put(uint32_t{0});
        put(uint64_t{1} << lane % 15);
        put(uint64_t{0});
        put(int32_t{0});
        put(uint32_t{0});
    }
    for (uint32_t worker = 0; worker < workers; ++worker) put(kernels);
    for (uint32_t worker = 0; worker < workers; ++worker)
        for (int kernel = 0; kernel < options.kernels; ++kernel) {
            std::string name = options.place == "home" ? "another" : name_of(kernel);
            unsigned grid[3] = {grid_of(kernel), 1, 1}, block[3] = {128, 1, 1};
            put(eclip::identity(eclip::hash_bytes(name.data(), name.size()), grid, block));
            int lane = options.place == "lane" ? 0 : kernel % options.lanes;
            put(static_cast<int32_t>(worker * lanes) + lane);
            put(uint32_t{0});
        }
    file.save(path);
}

double thread_ns() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

class Program {
public:
    explicit Program(const Options& options) : options_(options) {
        for (int kernel = 0; kernel < options.kernels; ++kernel) names_.push_back(name_of(kernel));
        unsigned flags = options.kind == "own" ? CU_STREAM_NON_BLOCKING : 0;
        streams_.resize(static_cast<size_t>(std::max(options.streams, options.threads)));
        if (options.kind != "legacy")
            for (CUstream& stream : streams_) cuStreamCreate(&stream, flags);
    }

    // Of one thread. Workers are met in the order of threads.
    std::vector<Sample> run(int thread, std::atomic<int>& turn) {
        std::vector<Sample> samples;
        auto native = reinterpret_cast<LaunchCall>(nothing_launch());
        size_t part = streams_.size() / static_cast<size_t>(options_.threads);
        size_t first = part * static_cast<size_t>(thread);
        while (turn.load() != thread) std::this_thread::yield();
        burst(cuLaunchKernel, first, part);
        turn.fetch_add(1);
        while (turn.load() < options_.threads) std::this_thread::yield();
        for (int index = 0; index < options_.bursts + kWarm; ++index) {
            Sample sample{burst(cuLaunchKernel, first, part), burst(native, first, part)};
            if (index >= kWarm) samples.push_back(sample);
        }
        return samples;
    }

private:
    double burst(LaunchCall launch, size_t first, size_t part) {
        int launches = std::max(kBurst, 2 * options_.kernels) / options_.kernels * options_.kernels;
        size_t stream = 0;
        double start = thread_ns();
        for (int index = 0, kernel = 0; index < launches; ++index) {
            auto function = reinterpret_cast<CUfunction>(names_[static_cast<size_t>(kernel)].data());
            launch(function, grid_of(kernel), 1, 1, 128, 1, 1, 0, streams_[first + stream], nullptr,
                   nullptr);
            if (options_.free && launch == &cuLaunchKernel) cuMemFree_v2(64);
            if (++kernel == options_.kernels) kernel = 0;
            if (++stream == part) stream = 0;
        }
        return (thread_ns() - start) / launches;
    }

    const Options& options_;
    std::vector<std::string> names_;  // their addresses are the functions
    std::vector<CUstream> streams_;
};

double quantile(std::vector<double> values, double part) {
    auto place = values.begin() + static_cast<long>(part * static_cast<double>(values.size()));
    std::nth_element(values.begin(), place, values.end());
    return *place;
}

}  // namespace

int main(int count, char** words) {
    Options options;
    for (int index = 1; index + 1 < count; index += 2) {
        std::string name = words[index], value = words[index + 1];
        if (name == "--place") options.place = value;
        else if (name == "--kind") options.kind = value;
        else if (name == "--streams") options.streams = atoi(value.c_str());
        else if (name == "--lanes") options.lanes = atoi(value.c_str());
        else if (name == "--kernels") options.kernels = atoi(value.c_str());
        else if (name == "--threads") options.threads = atoi(value.c_str());
        else if (name == "--bursts") options.bursts = atoi(value.c_str());
        else if (name == "--free") options.free = value == "1";
        else if (name == "--tier") setenv("ECLIP_TIER", value.c_str(), 1);
        else return fprintf(stderr, "cost: what is %s?\n", words[index]), 2;
    }
    const char* table = getenv("ECLIP_TABLE");
    if (table == nullptr) return fprintf(stderr, "cost: set ECLIP_TABLE\n"), 2;
    write_plan(table, options);
    cuInit(0);
    Program program(options);
    std::vector<std::vector<Sample>> samples(static_cast<size_t>(options.threads));
    std::atomic<int> turn{0};
    std::vector<std::thread> threads;
    for (int thread = 0; thread < options.threads; ++thread)
        threads.emplace_back([&, thread] {
            samples[static_cast<size_t>(thread)] = program.run(thread, turn);
        });
    for (std::thread& thread : threads) thread.join();
    std::vector<double> with, without, more;
    for (const auto& thread : samples)
        for (const Sample& sample : thread) {
            with.push_back(sample.with);
            without.push_back(sample.without);
            more.push_back(sample.with - sample.without);
        }
    printf("%.1f %.1f %.1f %.1f\n", quantile(with, 0.5), quantile(without, 0.5), quantile(more, 0.5),
           quantile(more, 0.1));
    return 0;
}
