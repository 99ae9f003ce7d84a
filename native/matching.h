// Whose graph it is: a graph's kernels, held against the workers' traces.
#pragma once

#include <cstdint>
#include <vector>

#include "table.h"

namespace eclip {

// How a graph's kernels agree with a worker's trace.
struct Match {
    std::vector<int> positions;  // of every kernel in the trace, -1 where it has none
    size_t in_place = 0;         // kernels that the trace has right after the one before
    size_t covered = 0;          // of the trace's kernels, how many the graph has

    // Half of the graph, or nearly all of the trace: while they are captured, libraries choose other
    // kernels and add some (transformers' BERT has 413 then, 154 otherwise, 140 of them the same).
    bool is_of(const TableWorker& worker) const {
        return 2 * in_place >= positions.size() || 4 * covered >= 3 * worker.kernels.size();
    }
};

// By its kernels' identities in launch order. Whose graph it is, or -1: nobody's. Workers alike take
// turns.
int choose_worker(const std::vector<uint64_t>& identities, Match& chosen);

}  // namespace eclip
