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
// Streams stay here when they are destroyed: their work may still have to be waited for.
class Order {
public:
    enum Kind { legacy, blocking, nonblocking };

    int add_stream(Kind kind, int context) {
        streams_.push_back({kind, context, {}});
        return static_cast<int>(streams_.size()) - 1;
    }
    Kind kind(int stream) const { return streams_[stream].kind; }

    Ops before(int stream) const {
        const Stream& mine = streams_[stream];
        Ops all = mine.known | host_;
        if (mine.kind == nonblocking) return all;
        Kind met = mine.kind == legacy ? blocking : legacy;
        for (const Stream& other : streams_)
            if (other.kind == met && other.context == mine.context) all |= other.known;
        return all;
    }

    // An operation takes place on a stream, after all that; its number is new.
    void happen(int stream, int op) {
        learn(stream, Ops().set(static_cast<size_t>(op)));
    }
    void touch(int stream) { learn(stream, {}); }
    void learn(int stream, const Ops& more) { streams_[stream].known = before(stream) | more; }
    // Exactly that, and nothing that other streams know.
    void add(int stream, const Ops& more) { streams_[stream].known |= more; }
    void host_learns(const Ops& more) { host_ |= more; }
    const Ops& host() const { return host_; }
    const Ops& known(int stream) const { return streams_[stream].known; }
    Ops known_in(int context) const {
        Ops all;
        for (const Stream& stream : streams_)
            if (stream.context == context) all |= stream.known;
        return all;
    }

private:
    struct Stream {
        Kind kind;
        int context;
        Ops known;
    };
    std::vector<Stream> streams_;
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
