// What stands behind a user's handle of an executable graph: the executable that is launched, the
// parts it is cut into, and a clone of the graph from which either can be made anew.
//
// The user keeps its graph and its handle. CUDA leaves it to the program that no two threads use an
// executable at once, so nothing here has a lock.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "cutting.h"
#include "sequence.h"

namespace eclip {

struct Placed {
    CUgraphNode twin = nullptr;    // by which the executable knows it
    CUgraphNode stored = nullptr;  // where its newest parameters are kept
    int lane = -1;                 // -1: where the user put it
    bool enabled = true;      // what only executables know: whether it runs,
    CUgraph child = nullptr;  // and what a child graph was replaced by, a clone of ours
    CUgraphNode piece = nullptr;  // by which its part knows it
};

// How long an executable's parts take, measured by a pair of events around each.
struct Timings {
    struct Pair {
        CUevent begin = nullptr, end = nullptr;
    };
    std::vector<Pair> pairs;      // of the parts, or of the whole
    std::vector<double> least_ns;  // of this round's launches, of which the first is slow
    bool pending = false;          // recorded and not yet read
    int round = 0;                 // launches measured in this round
    int wait = 1;                  // launches before the next is measured
};

constexpr int kNotRecorded = -2;  // beside lanes and kHome

struct Executable {
    int worker = -1;
    bool moved = false;  // to lanes: it was made from the clone, not from the user's graph
    int place = -1;      // under a cap: where its kernels run
    Sequence sequence;   // of the user's graph
    std::unordered_map<CUgraphNode, size_t> places;  // of the user's nodes in it
    std::vector<Placed> nodes;                       // by their places
    CUgraph clone = nullptr;   // what a moved executable was made from
    CUgraph stored = nullptr;  // what it would be made from now; the same until an update
    CUgraphExec first = nullptr;    // the user's handle, kept until the user destroys it
    CUgraphExec current = nullptr;  // what is launched
    std::vector<CUgraphExec> retired;  // others before it, which may still run
    CUevent launched = nullptr;        // recorded after each launch
    bool was_launched = false;
    CUgraphExec last = nullptr;  // what was launched last; none: parts of it
    uint64_t flags = 0;
    bool repeatable = true;  // every update of the executable is stored

    std::vector<Part> parts;  // none: it is launched whole
    int cuts = 0;             // times that it was cut
    Timings timings;
    std::vector<double> node_ns;  // how long each takes, as far as known
    std::vector<size_t> joints;   // the plan's, by places

    int recorded_on = kNotRecorded;  // the lane that it was cut for

    // Other lanes while only some workers are active, by the plan's variants. Under a cap: at other
    // places, the last one used at the end.
    std::unordered_map<int, size_t> variant_of;  // which of the following; without one: this
    std::vector<std::unique_ptr<Executable>> variants;

    Executable() = default;
    Executable(const Executable&) = delete;
    ~Executable();

    Placed* find(CUgraphNode node);
    CUgraphNode original(CUgraphNode clone_node) const;  // the user's, or none
    std::vector<CUgraphNode> stored_handles() const;
    CUresult repeat_updates(CUgraphExec made) const;  // what only executables know, said to a new one
    void keep_whole(const char* why);  // from now on
    void drop_parts();
};

// What stands behind a user's handle, or nothing. In graphs.cpp.
Executable* find_executable(CUgraphExec exec);

}  // namespace eclip
