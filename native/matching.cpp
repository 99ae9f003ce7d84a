#include "matching.h"

#include <algorithm>
#include <atomic>

#include "dispatcher.h"

namespace eclip {
namespace {

Match match(const TableWorker& worker, const std::vector<uint64_t>& identities) {
    Match found;
    uint32_t place = 0;
    found.positions.assign(identities.size(), -1);
    std::vector<bool> seen(worker.kernels.size());
    for (size_t index = 0; index < identities.size(); ++index) {
        if (worker.kernels[place].identity != identities[index]) {
            auto known = worker.positions.find(identities[index]);
            if (known == worker.positions.end()) continue;
            auto next = std::lower_bound(known->second.begin(), known->second.end(), place);
            place = next == known->second.end() ? known->second.front() : *next;
        } else {
            ++found.in_place;
        }
        if (!seen[place]) ++found.covered;
        seen[place] = true;
        found.positions[index] = static_cast<int>(place);
        place = (place + 1) % static_cast<uint32_t>(worker.kernels.size());
    }
    return found;
}

}  // namespace

int choose_worker(const std::vector<uint64_t>& identities, Match& chosen) {
    const Table& table = Dispatcher::get().table();
    static std::atomic<int> graphs_of[kMostWorkers];
    int best = -1;
    for (int worker = 0; worker < static_cast<int>(table.workers.size()); ++worker) {
        Match found = match(table.workers[worker], identities);
        bool better = best < 0 || found.in_place > chosen.in_place ||
                      (found.in_place == chosen.in_place && graphs_of[worker] < graphs_of[best]);
        if (!better) continue;
        best = worker;
        chosen = std::move(found);
    }
    if (best < 0) return best;
    if (!chosen.is_of(table.workers[best])) {
        say("a graph of %zu kernels is not in the plan (%zu of them are) and runs on the whole device",
            identities.size(), chosen.covered);
        count(counters().foreign_graphs);
        return -1;
    }
    ++graphs_of[best];
    return best;
}

}  // namespace eclip
