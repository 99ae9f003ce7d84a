// Users' graphs on lanes: a clone of a graph whose nodes moved to the contexts of their lanes.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "driver.h"

namespace eclip {

struct Placed {
    CUgraphNode twin;    // by which the executable knows it
    CUgraphNode stored;  // where its newest parameters are kept
    CUcontext context;   // none: where the user put it
    int type;
    bool enabled = true;      // what only executables know: whether it runs,
    CUgraph child = nullptr;  // and what a child graph was replaced by, a clone of ours
};

struct Rehomed {
    int worker = -1;
    CUgraph clone = nullptr;   // what the executable was made from
    CUgraph stored = nullptr;  // what it would be made from now; the same until an update
    CUgraphExec first = nullptr;    // the user's handle, kept until the user destroys it
    CUgraphExec current = nullptr;  // what is launched
    std::vector<CUgraphExec> retired;  // others before it, which may still run
    CUevent launched = nullptr;        // recorded after each launch
    bool was_launched = false;
    bool follows = false;              // the next launch must wait for it: it is another executable
    uint64_t flags = 0;
    bool repeatable = true;  // every update of the executable is stored
    std::vector<CUgraphNode> order;  // the user's nodes in launch order
    std::unordered_map<CUgraphNode, Placed> nodes;  // by the user's nodes

    // The user's node whose clone this is, or none.
    CUgraphNode original(CUgraphNode clone_node) const {
        for (const auto& [node, placed] : nodes)
            if (placed.twin == clone_node) return node;
        return nullptr;
    }

    void release() const {
        for (auto& [node, placed] : nodes)
            if (placed.child != nullptr) driver().cuGraphDestroy(placed.child);
        driver().cuGraphDestroy(clone);
        if (stored != clone) driver().cuGraphDestroy(stored);
        // The driver lets what still runs come to its end.
        for (CUgraphExec exec : retired) driver().cuGraphExecDestroy(exec);
        if (current != first) driver().cuGraphExecDestroy(current);
        if (launched != nullptr) driver().cuEventDestroy_v2(launched);
    }
};

// A clone of the graph with its nodes moved, or none where nothing has to move, or where the graph is
// nobody's or cannot be moved, which is then said. An update's worker is given, so that it goes where the graph went before.
std::unique_ptr<Rehomed> rehome(CUgraph graph, int worker = -1);

}  // namespace eclip
