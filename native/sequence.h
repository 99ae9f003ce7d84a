// A graph as a sequence: its nodes in an order in which they could be launched one after another, and
// where that may be cut in two.
//
// Nodes come after all they depend on, otherwise as they were added: one of several legal orders. A
// child graph stands before its own nodes, which follow it in the same way.
#pragma once

#include <vector>

#include "driver.h"

namespace eclip {

struct Sequence {
    struct Node {
        int type;
        int parent;  // the child graph it is in, by its place; -1: none
        size_t end;  // one past it and, of a child graph, its nodes
        bool joint;  // a cut before it is legal
    };
    std::vector<Node> nodes;
    std::vector<CUgraphNode> handles;  // of the graph that was read
    // Why it is launched as a whole; none: it may be cut at joints.
    const char* whole = nullptr;
    bool records_events = false;

    size_t size() const { return nodes.size(); }
    bool is_leaf(size_t index) const { return nodes[index].end == index + 1; }
    // Whether a node, or one of a child graph's, is between two places.
    bool is_within(size_t index, size_t begin, size_t end) const;
    bool is_like(const Sequence& other) const;  // the same nodes, whatever they do
};

// Read a graph; `nested`: what child graphs hold, too. Not successful where the driver does not say.
CUresult read_sequence(CUgraph graph, bool nested, Sequence& sequence);

// The clone's nodes in the same order; none where there was none.
CUresult find_in_clone(const Sequence& sequence, const std::vector<CUgraphNode>& handles,
                       CUgraph clone, std::vector<CUgraphNode>& twins);

}  // namespace eclip
