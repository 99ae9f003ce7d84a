#include "graph_pacing.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>

#include "device.h"
#include "giving.h"
#include "stats.h"

namespace eclip {
namespace {

constexpr int kRound = 2;        // launches that a measurement takes the least of
constexpr int kLongestWait = 64;  // launches between two measurements
constexpr int kMostCuts = 6;     // of one executable: cutting takes the host some microseconds a node
constexpr double kLong = 2;      // grains of a part that is cut again
constexpr double kShort = 0.25;  // grains of the parts on average, below which there are too many

size_t launches_of(const Executable& exec) { return std::max<size_t>(exec.parts.size(), 1); }

Part whole(const Executable& exec) { return {0, exec.sequence.size()}; }

// What was measured of parts, shared out to their nodes: kernels alike, other nodes only where a part
// has no kernels.
void share_out(Executable& exec) {
    exec.node_ns.assign(exec.sequence.size(), 0);
    for (size_t index = 0; index < launches_of(exec); ++index) {
        const Part part = exec.parts.empty() ? whole(exec) : exec.parts[index];
        auto takes_time = [&](size_t place, bool any) {
            return any ? exec.sequence.is_leaf(place) : exec.sequence.nodes[place].type == kNodeKernel;
        };
        for (bool any : {false, true}) {
            size_t count = 0;
            for (size_t place = part.begin; place < part.end; ++place) count += takes_time(place, any);
            if (count == 0) continue;
            for (size_t place = part.begin; place < part.end; ++place)
                if (takes_time(place, any))
                    exec.node_ns[place] = exec.timings.least_ns[index] / static_cast<double>(count);
            break;
        }
    }
}

bool has_joint(const Executable& exec, const Part& part) {
    for (size_t place = part.begin + 1; place < part.end; ++place)
        if (exec.sequence.nodes[place].joint) return true;
    return false;
}

bool should_cut(const Executable& exec) {
    const double grain_ns = giving::grain();
    double total_ns = 0;
    bool long_part = false;
    for (size_t index = 0; index < launches_of(exec); ++index) {
        const Part part = exec.parts.empty() ? whole(exec) : exec.parts[index];
        double ns = exec.timings.least_ns[index];
        total_ns += ns;
        long_part |= ns > kLong * grain_ns && has_joint(exec, part);
    }
    bool too_many = exec.parts.size() > 1 && exec.joints.empty() &&
                    total_ns < kShort * grain_ns * static_cast<double>(exec.parts.size());
    return long_part || too_many;
}

void cut(Executable& exec, const std::vector<size_t>& places) {
    exec.drop_parts();
    ++exec.cuts;
    if (places.size() < 3) return;  // one part
    Relaxed relaxed;
    std::vector<CUgraphNode> pieces;
    CUresult status = cut_graph(exec.sequence, exec.stored, exec.stored_handles(), places, exec.flags,
                                exec.parts, pieces);
    for (size_t place = 0; place < pieces.size() && status == CUDA_SUCCESS; ++place) {
        exec.nodes[place].piece = pieces[place];
        if (exec.nodes[place].enabled || pieces[place] == nullptr) continue;
        auto part = std::find_if(exec.parts.begin(), exec.parts.end(),
                                 [&](const Part& one) { return place < one.end; });
        status = driver().cuGraphNodeSetEnabled(part->exec, pieces[place], 0);
    }
    if (status != CUDA_SUCCESS) {
        exec.keep_whole("the driver refuses its parts");
        count(counters().whole_graphs);
        return;
    }
    for (Part& part : exec.parts)
        for (size_t place = part.begin; place < part.end && !exec.node_ns.empty(); ++place)
            part.ns += exec.node_ns[place];
    count(counters().cut_graphs);
}

double assumed_kernel_ns() {
    static const char* given = secure_getenv("ECLIP_KERNEL_US");
    return given != nullptr ? 1000 * atof(given) : 0;
}

std::atomic<bool> forbidden{false};

bool may_cut(const Executable& exec) {
    return !forbidden.load() && exec.sequence.whole == nullptr && exec.repeatable && exec.stored != nullptr &&
           exec.cuts < kMostCuts;
}

}  // namespace

void forbid_cutting() { forbidden.store(true); }
bool may_launch_parts() { return !forbidden.load(std::memory_order_relaxed); }

void steer_parts(Executable& exec) {
    Timings& timings = exec.timings;
    if (!timings.pending) return;
    const Driver& real = driver();
    const size_t count = launches_of(exec);
    Relaxed relaxed;
    if (real.cuEventQuery(timings.pairs[count - 1].end) != CUDA_SUCCESS) return;
    timings.pending = false;
    if (timings.round == 0) timings.least_ns.assign(count, HUGE_VAL);
    for (size_t index = 0; index < count; ++index) {
        float ms = 0;
        if (real.cuEventElapsedTime(&ms, timings.pairs[index].begin, timings.pairs[index].end) !=
            CUDA_SUCCESS)
            return;
        timings.least_ns[index] = std::min(timings.least_ns[index], static_cast<double>(ms) * 1e6);
    }
    if (++timings.round < kRound) return;
    timings.round = 0;
    timings.wait = kLongestWait;
    share_out(exec);
    for (size_t index = 0; index < exec.parts.size(); ++index)
        exec.parts[index].ns = timings.least_ns[index];
    if (should_cut(exec) && may_cut(exec))
        cut(exec, choose_cuts(exec.sequence, exec.node_ns, giving::grain()));
}

void cut_new(Executable& exec) {
    if (!may_cut(exec)) return;
    if (exec.joints.empty()) {
        if (assumed_kernel_ns() <= 0) return;
        for (const Sequence::Node& node : exec.sequence.nodes)
            exec.node_ns.push_back(node.type == kNodeKernel ? assumed_kernel_ns() : 0);
        return cut(exec, choose_cuts(exec.sequence, exec.node_ns, giving::grain()));
    }
    std::vector<size_t> places{0};
    for (size_t place : exec.joints) {
        while (place < exec.sequence.size() && !exec.sequence.nodes[place].joint) ++place;
        if (place > places.back() && place < exec.sequence.size()) places.push_back(place);
    }
    places.push_back(exec.sequence.size());
    cut(exec, places);
}

bool begin_measuring(Executable& exec, bool cut) {
    Timings& timings = exec.timings;
    if (cut == exec.parts.empty() || timings.pending || timings.wait-- > 0) return false;
    timings.wait = 0;
    while (timings.pairs.size() < launches_of(exec)) {
        Timings::Pair pair;
        if (driver().cuEventCreate(&pair.begin, 0) != CUDA_SUCCESS ||
            driver().cuEventCreate(&pair.end, 0) != CUDA_SUCCESS)
            return false;
        timings.pairs.push_back(pair);
    }
    timings.pending = true;
    return true;
}

void measure_begin(const Executable& exec, size_t part, CUstream queue) {
    driver().cuEventRecord(exec.timings.pairs[part].begin, queue);
}

void measure_end(const Executable& exec, size_t part, CUstream queue) {
    driver().cuEventRecord(exec.timings.pairs[part].end, queue);
}

double part_ns(const Executable& exec, bool cut, size_t part) {
    if (exec.node_ns.empty()) return 0;
    if (cut) return std::max(1.0, exec.parts[part].ns);
    double total_ns = 0;
    for (double ns : exec.node_ns) total_ns += ns;
    return std::max(1.0, total_ns);
}

}  // namespace eclip
