#include "lanes.h"

#include <time.h>

#include <algorithm>
#include <cstdio>

#include "driver.h"

namespace eclip {
namespace {

constexpr int kTrials = 15;

double now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e9 + now.tv_nsec;
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

}  // namespace

std::string failed(const char* call, CUresult status) {
    char text[128];
    snprintf(text, sizeof text, "%s failed with status %d", call, status);
    return text;
}

std::string add_lane(Pool& pool, const TableLane& wanted, int& number) {
    std::lock_guard hold(pool.growing);
    if (pool.count == kMostLanes) return "";
    Lane lane;
    std::string wrong = masks::make(pool, wanted, lane);
    if (!wrong.empty()) return wrong;
    number = static_cast<int>(pool.count.load());
    pool.lanes[number] = lane;
    pool.count.fetch_add(1);
    return "";
}

std::string make_pool(const Table& table, Pool& pool) {
    const Driver& real = driver();
    std::string wrong = masks::open(table, pool);
    if (!wrong.empty()) return wrong;
    for (const TableLane& wanted : table.lanes) {
        Lane lane;
        if (!wanted.full) wrong = masks::make(pool, wanted, lane);
        if (wanted.full && wanted.priority > 0) wrong = masks::make_full(pool, wanted, lane);
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
