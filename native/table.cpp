#include "table.h"

#include "frontier.h"

#include <cstring>

namespace eclip {
namespace {

constexpr char kMagic[8] = {'E', 'C', 'L', 'I', 'P', 'T', 'B', 'L'};
constexpr uint32_t kMostSlices = 128;
constexpr uint32_t kMostKernels = 1 << 24;
constexpr uint32_t kMostVariants = 1 << 10;

struct Header {
    char magic[8];
    uint32_t version;
    uint32_t bytes;  // of the whole file
    uint64_t digest;  // of everything after this field
    uint32_t mode, workers_by, split_units, split_flags;
    uint32_t slices, lanes, workers, kernels;
    uint32_t variants, reserved;
};

class Reader {
public:
    explicit Reader(const std::vector<unsigned char>& bytes) : bytes_(bytes) {}
    template <class T>
    bool take(T& value) {
        if (bytes_.size() - at_ < sizeof(T)) return false;
        std::memcpy(&value, bytes_.data() + at_, sizeof(T));
        at_ += sizeof(T);
        return true;
    }
    bool ended() const { return at_ == bytes_.size(); }

private:
    const std::vector<unsigned char>& bytes_;
    size_t at_ = 0;
};

}  // namespace

uint64_t hash_bytes(const void* data, size_t size, uint64_t seed) {
    auto bytes = static_cast<const unsigned char*>(data);
    for (size_t index = 0; index < size; ++index) seed = (seed ^ bytes[index]) * 0x100000001b3ull;
    return seed;
}

uint64_t identity(uint64_t name_hash, const unsigned grid[3], const unsigned block[3]) {
    // Six words a launch, once each: folding whole words keeps this within a few nanoseconds.
    uint64_t hash = name_hash;
    for (int axis = 0; axis < 3; ++axis) hash = (hash ^ grid[axis]) * 0x100000001b3ull;
    for (int axis = 0; axis < 3; ++axis) hash = (hash ^ block[axis]) * 0x100000001b3ull;
    return hash;
}

std::string read_table(const std::vector<unsigned char>& bytes, Table& table) {
    Reader reader(bytes);
    Header header;
    if (!reader.take(header) || std::memcmp(header.magic, kMagic, sizeof kMagic) != 0)
        return "it is not an eclip table";
    if (header.version != kTableVersion) return "it was written by another version of eclip";
    size_t covered = offsetof(Header, mode);
    if (header.bytes != bytes.size() ||
        header.digest != hash_bytes(bytes.data() + covered, bytes.size() - covered))
        return "it is cut short or damaged";
    if (header.mode > 1 || header.workers_by > 1 || header.slices == 0 ||
        header.slices > kMostSlices || header.lanes > kMostLanes || header.kernels > kMostKernels ||
        header.workers > kMostWorkers || header.variants > kMostVariants)
        return "it asks for what no device has";
    table = Table{};
    table.mode = static_cast<Mode>(header.mode);
    table.workers_by = static_cast<WorkersBy>(header.workers_by);
    table.split_units = header.split_units;
    table.split_flags = header.split_flags;
    table.slice_units.resize(header.slices);
    for (uint32_t& units : table.slice_units)
        if (!reader.take(units)) return "it is cut short";
    if (table.mode == Mode::record && header.lanes == 0) return "it records on no lane";
    table.lanes.resize(header.lanes);
    for (TableLane& lane : table.lanes) {
        if (!reader.take(lane)) return "it is cut short";
        bool known = lane.worker >= 0 && static_cast<uint32_t>(lane.worker) < header.workers;
        if (!known && table.mode == Mode::plan) return "a lane belongs to a worker it does not have";
        if (lane.priority < 0) return "a lane has a priority below the lowest";
    }
    std::vector<uint32_t> counts(header.workers);
    uint64_t total = 0;
    for (uint32_t& count : counts) {
        if (!reader.take(count)) return "it is cut short";
        total += count;
    }
    if (total != header.kernels) return "its workers do not add up";
    size_t first = 0;
    for (uint32_t worker = 0; worker < header.workers; ++worker) {
        TableWorker& made = table.workers.emplace_back();
        made.first = first;
        first += counts[worker];
        made.kernels.resize(counts[worker]);
        for (uint32_t position = 0; position < counts[worker]; ++position) {
            TableKernel& kernel = made.kernels[position];
            if (!reader.take(kernel)) return "it is cut short";
            bool known = kernel.lane >= 0 && static_cast<uint32_t>(kernel.lane) < header.lanes;
            if (!known || table.lanes[kernel.lane].worker != static_cast<int32_t>(worker))
                return "a kernel is sent to a lane that is not its worker's";
            if (kernel.joint > 1) return "a kernel is neither a joint nor none";
            made.positions[kernel.identity].push_back(position);
        }
        if (made.kernels.empty()) return "a worker has no kernels";
        table.heads |= uint64_t{1} << made.kernels[0].identity % 64;
    }
    table.variants.resize(header.variants);
    for (TableVariant& variant : table.variants) {
        if (!reader.take(variant.active)) return "it is cut short";
        variant.lanes.resize(header.kernels);
        for (uint32_t worker = 0; worker < header.workers; ++worker)
            for (uint32_t position = 0; position < counts[worker]; ++position) {
                int32_t& lane = variant.lanes[table.workers[worker].first + position];
                if (!reader.take(lane)) return "it is cut short";
                bool known = lane >= 0 && static_cast<uint32_t>(lane) < header.lanes &&
                             table.lanes[lane].worker == static_cast<int32_t>(worker);
                if (variant.active >> worker & 1 ? !known : lane != -1)
                    return "a variant sends a kernel to a lane that is not its worker's";
            }
    }
    return reader.ended() ? "" : "it has a tail";
}

}  // namespace eclip
