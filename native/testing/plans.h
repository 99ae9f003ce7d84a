// Random plans for the random programs, as the tables that libeclip reads.
#pragma once

#include <cstring>
#include <string>

#include "calls.h"
#include "table_file.h"

namespace fuzz {

// The plan that libeclip works from: random traces over the kernels, random lanes.
struct Step {
    int kernel;
    unsigned grid;
};
inline std::vector<std::vector<Step>> traces;
constexpr uint32_t kVariants = 3;

struct PlanKind {
    bool by_thread;  // a worker is a thread, not a stream
    bool record;     // every stream is recorded on a lane of its own
};

inline void write_table(const std::string& path, Random& random, PlanKind kind) {
    testing::TableFile file;
    auto put = [&](auto value) { file.put(value); };
    int workers = 3, lanes = 0;
    struct Mask {
        int worker;
        bool full;
        uint64_t bits;
    };
    std::vector<Mask> masks;
    std::vector<std::vector<int>> lane_of(workers);
    for (int worker = 0; worker < workers; ++worker) {
        int mine = 2 + static_cast<int>(random() % 3);
        for (int lane = 0; lane < mine; ++lane, ++lanes)
            masks.push_back({worker, lane == 0 && random() % 2 == 0, 1 + random() % 0xffff});
        traces.emplace_back(4 + random() % 8);
        for (Step& step : traces.back()) {
            step = {static_cast<int>(random() % kKernels), 1 + static_cast<unsigned>(random() % 3)};
            lane_of[worker].push_back(lanes - 1 - static_cast<int>(random() % mine));
        }
    }
    uint32_t kernels = 0;
    for (auto& trace : traces) kernels += static_cast<uint32_t>(trace.size());
    for (uint32_t value : {kind.record ? 1u : 0u, kind.by_thread ? 0u : 1u, 8u, 0u, 16u, static_cast<uint32_t>(lanes),
                           static_cast<uint32_t>(workers), kernels, kVariants, 0u})
        put(value);
    for (int slice = 0; slice < 16; ++slice) put(slice < 15 ? 8u : 12u);
    for (const Mask& mask : masks) {
        put(int32_t{mask.worker});
        put(uint32_t{mask.full});
        put(mask.full ? uint64_t{0xffff} : mask.bits);
        put(uint64_t{0});
        put(int32_t{0});
        put(uint32_t{0});
    }
    for (auto& trace : traces) put(static_cast<uint32_t>(trace.size()));
    for (int worker = 0; worker < workers; ++worker)
        for (size_t position = 0; position < traces[worker].size(); ++position) {
            const Step& step = traces[worker][position];
            unsigned grid[3] = {step.grid, 1, 1}, block[3] = {32, 1, 1};
            const char* name = kNames[step.kernel];
            put(eclip::identity(eclip::hash_bytes(name, strlen(name)), grid, block));
            put(int32_t{lane_of[worker][position]});
            put(uint32_t{position % 3 == 1});  // joints, where graphs are cut
        }
    for (uint32_t active : {1u, 4u, 6u}) {  // kVariants of them
        put(active);
        for (int worker = 0, last = 0; worker < workers; ++worker) {
            int mine = 0;
            for (const Mask& mask : masks) mine += mask.worker == worker;
            last += mine;
            for (size_t position = 0; position < traces[worker].size(); ++position)
                put(active >> worker & 1 ? int32_t(last - 1 - static_cast<int>(random() % mine)) : -1);
        }
    }
    file.save(path);
}

}  // namespace fuzz
