// The recorder: a linear list of commands and barriers becomes a graph in one pass.
//
// Only the open nodes are kept: the last barrier, and the nodes since. A command depends on the last
// barrier. A barrier with one open node is that node; with several it is one empty node that joins
// them; with none it changes nothing. gpu/commands.py is its twin.
#pragma once

#include <vector>

namespace eclip {

// Sink has
//   int command(int command, const std::vector<Node>& after, Node& made)    a status, 0 for success
//   int join(const std::vector<Node>& after, Node& made)
template <class Node, class Sink>
class Recorder {
public:
    explicit Recorder(Sink& sink) : sink_(sink) {}

    int command(int command) {
        Node made{};
        int status = sink_.command(command, barrier_, made);
        if (status == 0) open_.push_back(made);
        return status;
    }

    int barrier() {
        if (open_.empty()) return 0;
        if (open_.size() > 1) {
            Node made{};
            int status = sink_.join(open_, made);
            if (status != 0) return status;
            open_ = {made};
        }
        barrier_.swap(open_);
        open_.clear();
        return 0;
    }

private:
    Sink& sink_;
    std::vector<Node> barrier_;  // none or one
    std::vector<Node> open_;
};

}  // namespace eclip
