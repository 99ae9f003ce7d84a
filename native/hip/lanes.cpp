// Lanes of AMD GPUs: streams with CU masks. The slices, and the bits that each has, are those of
// hip/lanes.py; how many shader engines there are the kernel driver tells, HIP does not.
#include "../lanes.h"

#include <dirent.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <map>

#include "driver.h"
#include "gates.h"

namespace eclip::masks {
namespace {

using Bits = std::vector<unsigned>;
std::vector<Bits> slices;
unsigned unit_count = 0;

constexpr const char kNodes[] = "/sys/class/kfd/kfd/topology/nodes";
constexpr uint64_t kFirstRdna = 100000;  // gfx10, as gfx_target_version has it

using Properties = std::map<std::string, uint64_t>;

Properties read_properties(const std::string& path) {
    Properties found;
    FILE* file = fopen(path.c_str(), "re");
    if (file == nullptr) return found;  // a node that this user or container may not see
    char name[64];
    for (uint64_t value; fscanf(file, "%63s %" SCNu64, name, &value) == 2;) found[name] = value;
    fclose(file);
    return found;
}

// What the kernel driver says of the GPU at this place of the bus; nothing where it is silent.
Properties find_node(const char* place) {
    unsigned domain = 0, bus = 0, device = 0, function = 0;
    if (sscanf(place, "%x:%x:%x.%x", &domain, &bus, &device, &function) != 4) return {};
    const uint64_t location = bus << 8 | device << 3 | function;
    const char* other = secure_getenv("ECLIP_KFD_NODES");  // for tests
    const std::string nodes = other != nullptr ? other : kNodes;
    DIR* folder = opendir(nodes.c_str());
    if (folder == nullptr) return {};
    Properties found;
    while (const dirent* node = readdir(folder)) {
        found = read_properties(nodes + "/" + node->d_name + "/properties");
        if (found["simd_count"] != 0 && found["domain"] == domain && found["location_id"] == location)
            break;
        found.clear();
    }
    closedir(folder);
    return found;
}

// The mask bits of every slice. Where the engines have unequal numbers of units, those beyond the
// last full round are a slice of their own.
std::vector<Bits> share_out(Properties& found) {
    auto get = [&](const char* name) { return static_cast<unsigned>(found[name]); };
    if (get("simd_per_cu") == 0 || get("simd_arrays_per_engine") == 0) return {};
    const unsigned dies = std::max(1u, get("num_xcc"));
    const unsigned engines = std::max(1u, get("array_count") / get("simd_arrays_per_engine") / dies);
    unit_count = get("simd_count") / get("simd_per_cu");
    if (found["gfx_target_version"] >= kFirstRdna) unit_count /= 2;
    const unsigned full = unit_count - unit_count % (dies * engines);
    std::vector<Bits> shared(engines);
    for (unsigned bit = 0; bit < full; ++bit) shared[bit / dies % engines].push_back(bit);
    if (full < unit_count) shared.emplace_back();
    for (unsigned bit = full; bit < unit_count; ++bit) shared.back().push_back(bit);
    return shared;
}

// A stream on the slices of a mask, if HIP gives it exactly these.
std::string make_masked(const uint64_t mask[2], CUstream& stream) {
    const Hip& real = hip();
    std::vector<uint32_t> words((unit_count + 31) / 32), seen(words.size());
    for (size_t index = 0; index < slices.size(); ++index)
        if (mask[index / 64] >> (index % 64) & 1)
            for (unsigned bit : slices[index]) words[bit / 32] |= 1u << bit % 32;
    const auto count = static_cast<uint32_t>(words.size());
    CUresult status = quietly(real.hipExtStreamCreateWithCUMask(&stream, count, words.data()));
    if (status != CUDA_SUCCESS) return failed("hipExtStreamCreateWithCUMask", status);
    status = quietly(real.hipExtStreamGetCUMask(stream, count, seen.data()));
    if (status != CUDA_SUCCESS) return failed("hipExtStreamGetCUMask", status);
    if (seen != words) return "HIP gave a lane other units; is a mask set for the whole process?";
    return "";
}

}  // namespace

std::string open(const Table& table, Pool& pool) {
    const Hip& real = hip();
#define ECLIP_NEED(name) \
    if (real.name == nullptr) return "this HIP has no " #name "; ROCm 5.2 or newer is needed";
    ECLIP_NEED(hipExtStreamCreateWithCUMask)
    ECLIP_NEED(hipExtStreamGetCUMask)
    ECLIP_NEED(hipDeviceGetPCIBusId)
    ECLIP_NEED(hipGetStreamDeviceId)
    ECLIP_NEED(hipStreamGetFlags)
    ECLIP_NEED(hipStreamIsCapturing)
    ECLIP_NEED(hipKernelNameRef)
    ECLIP_NEED(hipKernelNameRefByPtr)
    ECLIP_NEED(hipThreadExchangeStreamCaptureMode)
#undef ECLIP_NEED
    char place[64] = "";
    CUresult status = quietly(real.hipDeviceGetPCIBusId(place, sizeof place, pool.device));
    if (status != CUDA_SUCCESS) return failed("hipDeviceGetPCIBusId", status);
    Properties found = find_node(place);
    slices = share_out(found);
    if (slices.empty()) return "the kernel driver does not tell of this GPU; see docs/amd.md";
    for (const Bits& slice : slices) pool.slice_units.push_back(static_cast<uint32_t>(slice.size()));
    pool.waits_for_host = gates::any;
    if (table.mode == Mode::cap) return "";
    bool same = slices.size() == table.slice_units.size();
    for (size_t index = 0; same && index < slices.size(); ++index)
        same = slices[index].size() == table.slice_units[index];
    char text[160];
    snprintf(text, sizeof text,
             "the plan is for a device of %zu slices, this one has %zu (or other sizes); plan for "
             "this device", table.slice_units.size(), slices.size());
    return same ? "" : text;
}

std::string make(const Pool& pool, const TableLane& wanted, Lane& lane) {
    const Hip& real = hip();
    if (wanted.priority > 0) say("lanes of AMD GPUs have no priorities: the plan's are ignored");
    CUevent event = nullptr;
    CUresult status = quietly(real.hipEventCreateWithFlags(&event, CU_EVENT_DISABLE_TIMING));
    if (status != CUDA_SUCCESS) return failed("hipEventCreateWithFlags", status);
    lane.event = event;
    CUstream stream = nullptr;
    std::string wrong = make_masked(wanted.mask, stream);
    lane.stream = stream;
    lane.context = pool.primary;
    return wrong;
}

std::string open_place(const Pool& pool, CapPlace& place) {
    place.context = pool.primary;
    return "";
}

std::string make_stream(const Pool&, const CapPlace& place, CUstream& stream) {
    const uint64_t mask[2] = {place.slices, 0};
    return make_masked(mask, stream);
}

std::string make_full(const Pool&, const TableLane&, Lane&) {
    say("lanes of AMD GPUs have no priorities: the plan's are ignored");
    return "";
}

}  // namespace eclip::masks
