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

// Under a cap a graph's kernels have no lane but a place of the process (cap.h): numbers from here on.
constexpr int kFirstPlace = kMostLanes;
CUcontext context_of_lane(int lane);  // none: of no lane

// Of a clone with its nodes on these lanes; none where the driver refuses, which is then said.
std::unique_ptr<Executable> make_on_lanes(CUgraph graph, const Sequence& sequence,
                                          const std::vector<CUgraphNode>& handles, int worker,
                                          const std::vector<int>& lanes);
// A clone of what a child graph is to be replaced by, on the lanes of what it replaces; none where
// the driver refuses that.
CUgraph place_child(const Executable& exec, const Placed& placed, CUgraph child);
// Whether a kernel's clusters can be resident on a lane; without clusters it always fits.
bool fits(CUgraphNode node, const KernelNodeParams& params, CUstream lane);

// Under a cap: a graph where the process is. In placed_graphs.cpp.
std::unique_ptr<Executable> keep_placed(CUgraph graph, const Sequence& sequence);
// Under a cap: what to launch where the process is. Made when first needed, from what the executable
// would be made from now; the main one where that cannot be, and this is said.
Executable& find_placed(Executable& main, int place);

bool can_move(int type);              // a node of this type
Launch launch_of(CUgraphNode node, const KernelNodeParams& params);

}  // namespace eclip
