// Users' graphs as we keep them: on lanes, on a clone whose nodes moved to the contexts of their lanes,
// or as they are, with a clone from which parts can be made.
#pragma once

#include "dispatcher.h"
#include "executable.h"

namespace eclip {

// What to instantiate for a graph: its clone on lanes, kernels of child graphs included, with one more
// for every variant of the plan that has other lanes; or the graph itself. None where nothing is to be
// done for it, or where it cannot be, which is then said.
std::unique_ptr<Executable> keep_graph(CUgraph graph);

// A clone of a graph with its nodes on these lanes (kHome: where they are), and the clone's nodes.
CUresult clone_on_lanes(CUgraph graph, const Sequence& sequence,
                        const std::vector<CUgraphNode>& handles, const std::vector<int>& lanes,
                        CUgraph& clone, std::vector<CUgraphNode>& twins);

CUcontext context_of_lane(int lane);  // none: of no lane
bool can_move(int type);              // a node of this type
Launch launch_of(CUgraphNode node, const KernelNodeParams& params);

}  // namespace eclip
