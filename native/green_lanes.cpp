// Lanes of NVIDIA GPUs: green contexts of the plan's masks and a stream in each.
//
// The split is that of cuda/lanes.py: the groups of one call and the remainder after them.
// Contexts live until the process ends, because destroying one leaves device memory taken.
#include <algorithm>
#include <cstdio>
#include <vector>

#include "driver.h"
#include "lanes.h"

namespace eclip::masks {
namespace {

std::vector<CUdevResource> slices;  // of one split call, whose groups may be combined

// The slices, in the order of the plan's masks.
std::string split(const Table& table, Pool& pool) {
    const Driver& real = driver();
    const CUdevice device = pool.device;
    CUdevResource whole{};
    CUresult status = real.cuDeviceGetDevResource(device, &whole, CU_DEV_RESOURCE_TYPE_SM);
    if (status != CUDA_SUCCESS) return failed("cuDeviceGetDevResource", status);
    unsigned groups = table.split_units > 0 ? whole.sm.smCount / table.split_units : 0;
    CUdevResource rest{};
    if (groups > 0) {
        slices.resize(groups);
        status = real.cuDevSmResourceSplitByCount(slices.data(), &groups, &whole, &rest,
                                                  table.split_flags, table.split_units);
        if (status != CUDA_SUCCESS) return failed("cuDevSmResourceSplitByCount", status);
        slices.resize(groups);
    }
    if (rest.sm.smCount > 0) slices.push_back(rest);
    for (const CUdevResource& slice : slices) pool.slice_units.push_back(slice.sm.smCount);
    if (table.mode == Mode::cap) return "";
    bool same = slices.size() == table.slice_units.size();
    for (size_t index = 0; same && index < slices.size(); ++index)
        same = slices[index].sm.smCount == table.slice_units[index];
    if (same) return "";
    char text[160];
    snprintf(text, sizeof text,
             "the plan is for a device of %zu slices, this one has %zu (or other sizes); plan for "
             "this device", table.slice_units.size(), slices.size());
    return text;
}

// A green context of the slices of a mask, and the same as a context.
std::string make_context(const Pool& pool, const uint64_t mask[2], CUgreenCtx& green,
                         CUcontext& context) {
    const Driver& real = driver();
    std::vector<CUdevResource> chosen;
    for (size_t index = 0; index < slices.size(); ++index)
        if (mask[index / 64] >> (index % 64) & 1) chosen.push_back(slices[index]);
    CUdevResourceDesc description = nullptr;
    CUresult status = real.cuDevResourceGenerateDesc(&description, chosen.data(),
                                                     static_cast<unsigned>(chosen.size()));
    if (status != CUDA_SUCCESS) return failed("cuDevResourceGenerateDesc", status);
    status = real.cuGreenCtxCreate(&green, description, pool.device, CU_GREEN_CTX_DEFAULT_STREAM);
    if (status != CUDA_SUCCESS) return failed("cuGreenCtxCreate", status);
    status = real.cuCtxFromGreenCtx(&context, green);
    return status == CUDA_SUCCESS ? "" : failed("cuCtxFromGreenCtx", status);
}

// CUDA's number for a plan's priority, in the current context.
int cuda_priority(int wanted) {
    auto ask = driver().cuCtxGetStreamPriorityRange;
    int least = 0, greatest = 0;
    if (wanted == 0 || ask == nullptr || ask(&least, &greatest) != CUDA_SUCCESS) least = greatest = 0;
    if (least - wanted < greatest)
        say("the plan asks for priority %d, but streams here have %d: it is lowered", wanted,
            least - greatest + 1);
    return std::max(least - wanted, greatest);
}

}  // namespace

std::string open(const Table& table, Pool& pool) {
    const Driver& real = driver();
#define ECLIP_NEED(name) \
    if (real.name == nullptr) return "this driver has no " #name "; CUDA 12.4 or newer is needed";
    ECLIP_NEED(cuDeviceGetDevResource)
    ECLIP_NEED(cuDevSmResourceSplitByCount)
    ECLIP_NEED(cuDevResourceGenerateDesc)
    ECLIP_NEED(cuGreenCtxCreate)
    ECLIP_NEED(cuGreenCtxStreamCreate)
    ECLIP_NEED(cuCtxFromGreenCtx)
    ECLIP_NEED(cuCtxSetCurrent)
    ECLIP_NEED(cuStreamCreate)
    ECLIP_NEED(cuStreamGetCtx)
    ECLIP_NEED(cuStreamGetFlags)
    ECLIP_NEED(cuStreamIsCapturing)
    if (real.cuFuncGetName == nullptr && real.cuKernelGetName == nullptr)
        return "this driver has no cuFuncGetName; CUDA 12.3 or newer is needed";
#undef ECLIP_NEED
    return split(table, pool);
}

std::string make(const Pool& pool, const TableLane& wanted, Lane& lane) {
    const Driver& real = driver();
    lane.priority = cuda_priority(wanted.priority);
    CUevent event = nullptr;
    CUresult status = real.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
    if (status != CUDA_SUCCESS) return failed("cuEventCreate", status);
    lane.event = event;
    CUgreenCtx green = nullptr;
    CUcontext context = nullptr;
    std::string wrong = make_context(pool, wanted.mask, green, context);
    if (!wrong.empty()) return wrong;
    lane.context = context;
    CUstream stream = nullptr;
    status = real.cuGreenCtxStreamCreate(&stream, green, CU_STREAM_NON_BLOCKING, lane.priority);
    if (status != CUDA_SUCCESS) return failed("cuGreenCtxStreamCreate", status);
    lane.stream = stream;
    return "";
}

std::string open_place(const Pool& pool, CapPlace& place) {
    const uint64_t mask[2] = {place.slices, 0};
    return make_context(pool, mask, place.green, place.context);
}

std::string make_stream(const Pool&, const CapPlace& place, CUstream& stream) {
    CUresult status =
        driver().cuGreenCtxStreamCreate(&stream, place.green, CU_STREAM_NON_BLOCKING, 0);
    return status == CUDA_SUCCESS ? "" : failed("cuGreenCtxStreamCreate", status);
}

// Of all slices, and yet with a priority that the program's own streams do not have.
std::string make_full(const Pool& pool, const TableLane& wanted, Lane& lane) {
    const Driver& real = driver();
    int priority = cuda_priority(wanted.priority);
    if (priority == 0 || real.cuStreamCreateWithPriority == nullptr) {
        say("streams here have no priorities: the plan's are ignored");
        return "";
    }
    CUevent event = nullptr;
    CUresult status = real.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
    if (status != CUDA_SUCCESS) return failed("cuEventCreate", status);
    lane.event = event;
    CUstream stream = nullptr;
    status = real.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, priority);
    if (status != CUDA_SUCCESS) return failed("cuStreamCreateWithPriority", status);
    lane.stream = stream;
    lane.priority = priority;
    lane.context = pool.primary;
    return "";
}

}  // namespace eclip::masks
