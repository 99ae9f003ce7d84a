#include "lanes.h"

#include <time.h>

#include <algorithm>
#include <cstdio>

#include "driver.h"

namespace eclip {
namespace {

constexpr int kTrials = 15;

std::string failed(const char* call, CUresult status) {
    char text[128];
    snprintf(text, sizeof text, "%s failed with status %d", call, status);
    return text;
}

double now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e9 + now.tv_nsec;
}

// The slices, in the order of the plan's masks.
std::string split(const Table& table, CUdevice device, std::vector<CUdevResource>& slices) {
    const Driver& real = driver();
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

// What asking and what a barrier costs here; the frontier does the cheaper.
void measure(Pool& pool) {
    const Driver& real = driver();
    std::vector<const Lane*> made;
    for (size_t lane = 0; lane < pool.count; ++lane)
        if (pool.lanes[lane].stream != nullptr) made.push_back(&pool.lanes[lane]);
    if (made.size() < 2) return;
    std::vector<double> asking, barring;
    for (int trial = 0; trial < kTrials; ++trial) {
        double start = now_ns();
        real.cuStreamQuery(made[0]->stream);
        double asked = now_ns();
        real.cuEventRecord(made[0]->event, made[0]->stream);
        real.cuStreamWaitEvent(made[1]->stream, made[0]->event, 0);
        barring.push_back(now_ns() - asked);
        asking.push_back(asked - start);
    }
    std::nth_element(asking.begin(), asking.begin() + kTrials / 2, asking.end());
    std::nth_element(barring.begin(), barring.begin() + kTrials / 2, barring.end());
    pool.ask_ns = asking[kTrials / 2];
    pool.barrier_ns = barring[kTrials / 2];
}

std::string make_lane(const Pool& pool, const TableLane& wanted, Lane& lane) {
    const Driver& real = driver();
    lane.priority = cuda_priority(wanted.priority);
    CUresult status = real.cuEventCreate(&lane.event, CU_EVENT_DISABLE_TIMING);
    if (status != CUDA_SUCCESS) return failed("cuEventCreate", status);
    std::vector<CUdevResource> chosen;
    for (size_t index = 0; index < pool.slices.size(); ++index)
        if (wanted.mask[index / 64] >> (index % 64) & 1) chosen.push_back(pool.slices[index]);
    CUdevResourceDesc description = nullptr;
    status = real.cuDevResourceGenerateDesc(&description, chosen.data(),
                                            static_cast<unsigned>(chosen.size()));
    if (status != CUDA_SUCCESS) return failed("cuDevResourceGenerateDesc", status);
    CUgreenCtx green = nullptr;
    status = real.cuGreenCtxCreate(&green, description, pool.device, CU_GREEN_CTX_DEFAULT_STREAM);
    if (status != CUDA_SUCCESS) return failed("cuGreenCtxCreate", status);
    status = real.cuCtxFromGreenCtx(&lane.context, green);
    if (status != CUDA_SUCCESS) return failed("cuCtxFromGreenCtx", status);
    status = real.cuGreenCtxStreamCreate(&lane.stream, green, CU_STREAM_NON_BLOCKING,
                                         lane.priority);
    if (status != CUDA_SUCCESS) return failed("cuGreenCtxStreamCreate", status);
    return "";
}

}  // namespace

std::string add_lane(Pool& pool, const TableLane& wanted, int& number) {
    std::lock_guard hold(pool.growing);
    if (pool.count == kMostLanes) return "";
    Lane lane;
    std::string wrong = make_lane(pool, wanted, lane);
    if (!wrong.empty()) return wrong;
    number = static_cast<int>(pool.count.load());
    pool.lanes[number] = lane;
    pool.count.fetch_add(1);
    return "";
}

std::string make_pool(const Table& table, Pool& pool) {
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
    std::string wrong = split(table, pool.device, pool.slices);
    if (!wrong.empty()) return wrong;
    for (const TableLane& wanted : table.lanes) {
        Lane lane;
        if (!wanted.full) wrong = make_lane(pool, wanted, lane);
        if (wanted.full && wanted.priority > 0)
            say("a lane of the whole device is the program's own stream: its priority in the plan is "
                "ignored");
        if (!wrong.empty()) return wrong;
        pool.any |= lane.stream != nullptr;
        pool.lanes[pool.count++] = lane;
    }
    CUresult status = real.cuStreamCreate(&pool.aside, CU_STREAM_NON_BLOCKING);
    if (status != CUDA_SUCCESS) return failed("cuStreamCreate", status);
    measure(pool);
    return "";
}

}  // namespace eclip
