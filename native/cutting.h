// Graphs in parts: clones of a graph without the nodes of all other parts, launched one after another.
//
// Parts in order in one stream keep every dependency of the graph, because its nodes are in an order
// in which each comes after all it depends on. Branches of a wide graph still run beside each other
// within a part; only between parts they do not.
#pragma once

#include <vector>

#include "sequence.h"
#include "stream.h"

namespace eclip {

struct Part {
    size_t begin, end;  // its nodes, by their places in the sequence
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;
    double ns = 0;  // that it takes, as far as known
    std::vector<Launch> kernels = {};  // when recording
};

// The parts between rising places, the first and the last included; `pieces` are the nodes of each
// place in its part. Child graphs are cut like the graph itself. Nothing is left where that fails.
CUresult cut_graph(const Sequence& sequence, CUgraph graph,
                   const std::vector<CUgraphNode>& handles, const std::vector<size_t>& places,
                   uint64_t flags, std::vector<Part>& parts, std::vector<CUgraphNode>& pieces);

// Those that still run come to their end.
void destroy_parts(std::vector<Part>& parts);

// Where to cut so that a part takes about the grain, from how long each node takes. Where a cut is
// not legal it comes one node later.
std::vector<size_t> choose_cuts(const Sequence& sequence, const std::vector<double>& node_ns,
                                double grain_ns);

}  // namespace eclip
