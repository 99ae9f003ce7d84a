// Random programs without races: every read and write of a cell is ordered, by CUDA's rules, after
// the writes and reads before it, so that running the program's calls one after another gives the
// only right result.
#pragma once

#include <bitset>
#include <cstdint>
#include <random>
#include <vector>

namespace fuzz {

constexpr int kMostOps = 256;
using Ops = std::bitset<kMostOps>;

constexpr int kCells = 24;
constexpr int kKernels = 8;  // functions; each mixes its cells in its own way

struct Mix {
    int kernel, target, left, right;
    uint64_t salt;
    uint64_t apply(const uint64_t* cells) const;
};

// Who knows of what: which operations are complete before the next one of each stream begins.
class Order {
public:
    enum Kind { legacy, blocking, nonblocking };

    int add_stream(Kind kind) {
        kinds_.push_back(kind);
        known_.emplace_back();
        return static_cast<int>(kinds_.size()) - 1;
    }
    Kind kind(int stream) const { return kinds_[stream]; }

    Ops before(int stream) const {
        Ops all = known_[stream] | host_;
        for (size_t other = 0; other < kinds_.size(); ++other) {
            bool meet = kinds_[stream] == legacy ? kinds_[other] == blocking
                                                 : kinds_[stream] == blocking && kinds_[other] == legacy;
            if (meet) all |= known_[other];
        }
        return all;
    }

    // An operation takes place on a stream, after all that; its number is new.
    void happen(int stream, int op) {
        known_[stream] = before(stream);
        known_[stream].set(op);
    }
    void touch(int stream) { known_[stream] = before(stream); }
    void learn(int stream, const Ops& more) {
        known_[stream] = before(stream) | more;
    }
    void host_learns(const Ops& more) { host_ |= more; }
    const Ops& known(int stream) const { return known_[stream]; }

private:
    std::vector<Kind> kinds_;
    std::vector<Ops> known_;
    Ops host_;
};

struct Cell {
    int writer = -1;
    Ops readers;
    bool readable(const Ops& before) const { return writer < 0 || before.test(writer); }
    bool writable(const Ops& before) const {
        return readable(before) && (readers & ~before).none();
    }
};

}  // namespace fuzz
