// The flat table: a plan as the dispatcher reads it, (worker, position) → identity and lane.
//
// programs/table.py writes it; all integers are little endian. A file that is cut, changed or of
// another version is refused as a whole.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace eclip {

constexpr uint32_t kTableVersion = 4;
constexpr int kMainVariant = -1;
constexpr int kMostWorkers = 32;

enum class Mode : uint32_t { plan = 0, record = 1, cap = 2 };  // cap: never in a file
enum class WorkersBy : uint32_t { thread = 0, stream = 1 };

struct TableLane {
    int32_t worker;
    uint32_t full;  // all slices: the user's own stream is this lane
    uint64_t mask[2];
    int32_t priority;  // from 0, the lowest
    uint32_t reserved;
};

struct TableKernel {
    uint64_t identity;
    int32_t lane;    // while every worker is active
    uint32_t joint;  // 1: its worker may give way before it
};

// Other lanes while only some workers are active; the fewest workers first.
struct TableVariant {
    uint32_t active = 0;         // a bit a worker
    std::vector<int32_t> lanes;  // of all kernels, worker after worker; -1 for the others'
};

struct TableWorker {
    size_t first = 0;  // of its kernels among those of all workers
    std::vector<TableKernel> kernels;
    // Where each identity stands in the trace, rising: how a worker that lost its place finds it.
    std::unordered_map<uint64_t, std::vector<uint32_t>> positions;
};

struct Table {
    Mode mode = Mode::plan;
    WorkersBy workers_by = WorkersBy::stream;
    uint32_t split_units = 0;
    uint32_t split_flags = 0;
    std::vector<uint32_t> slice_units;
    std::vector<TableLane> lanes;
    std::vector<TableWorker> workers;
    std::vector<TableVariant> variants;
    uint64_t heads = 0;  // a bit by the last bits of every identity that begins a trace
};

// What is wrong with the bytes, or nothing and the table.
std::string read_table(const std::vector<unsigned char>& bytes, Table& table);

// Of one launch: name, grid and block. FNV-1a, so that Python computes the same.
uint64_t hash_bytes(const void* data, size_t size, uint64_t seed = 0xcbf29ce484222325ull);
uint64_t identity(uint64_t name_hash, const unsigned grid[3], const unsigned block[3]);

}  // namespace eclip
