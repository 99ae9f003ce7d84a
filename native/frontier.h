// The frontier: which waits the next call on a user's stream needs, decided and not yet carried out.
//
// A user stream is in one order wherever its work runs: every call waits for the stream's previous
// one, by the order of the queue they share or by a barrier. Queues are the streams themselves
// (home) and lanes. A lane serves one stream at a time and passes to another only when it is proven
// empty, so that no call ever waits for work that its own program would not make it wait for.
//
// The legacy default stream and blocking streams order against each other as CUDA says. Work at home
// is ordered by the driver; work on lanes is joined into the legacy stream's home where it matters:
// a call on the legacy stream waits for the lanes that blocking streams used since its last call, and
// the first call on a blocking stream after it waits for its lane. Nothing is done for idle streams.
//
// tests/oracles/frontier.py makes the same decisions; a test drives both with the same programs.
#pragma once

#include <atomic>
#include <cstdint>

namespace eclip {

enum class Kind : int { legacy = 0, blocking = 1, nonblocking = 2 };

constexpr int kDone = -2;    // a tail: nothing is pending
constexpr int kHome = -1;    // a queue: the user's own stream; lanes are 0 and up
constexpr int kFollow = -3;  // a wish: wherever the stream's last work went
constexpr int kWork = -4;    // likewise, but under a cap (cap.h) the stream's lane there
constexpr int kMostLanes = 64;
constexpr uint64_t kNever = ~uint64_t{0};

// Who uses a lane and whether it may hold work: one word, so that claims need no lock.
// From the top: user (32 bits), number of submissions (30), submitting (1), busy (1). Streams are
// numbered without end; those with larger numbers than a word holds get no lanes.
constexpr uint64_t kLastUser = 0xffffffff;
class alignas(64) LaneWord {  // on a cache line of its own: lanes have different users
public:
    struct View {
        uint64_t word;
        uint64_t user() const { return word >> 32; }
        bool submitting() const { return word >> 1 & 1; }
        bool busy() const { return word & 1; }
    };

    View read() const { return {word_.load()}; }

    // Take the lane for one submission, if it is still as seen.
    bool claim(View seen, uint64_t user) {
        uint64_t next = user << 32 | (seen.word & kCount) | 3;
        return word_.compare_exchange_strong(seen.word, next);
    }

    // The submission is in the lane. Counting it makes what others saw before out of date.
    void submitted() {
        uint64_t word = word_.load(std::memory_order_relaxed);
        uint64_t count = (word + 4) & kCount;
        word_.store((word & ~kCount & ~uint64_t{2}) | count, std::memory_order_release);
    }

    // Everything up to what was seen is complete.
    bool emptied(View seen) {
        if (seen.submitting()) return false;
        return word_.compare_exchange_strong(seen.word, seen.word & ~uint64_t{1},
                                             std::memory_order_acq_rel);
    }

private:
    static constexpr uint64_t kCount = ((uint64_t{1} << 30) - 1) << 2;
    std::atomic<uint64_t> word_{0};
};

struct StreamOrder {
    Kind kind = Kind::nonblocking;
    uint64_t id = 0;  // from 1
    int tail = kDone;
    uint64_t seen = 0;  // of the other kind's epoch, when this stream last waited for it
    uint64_t used = 0;  // lanes that may hold work of this stream
    // Queues that work of this stream came into after later work was decided elsewhere.
    uint64_t late = 0;  // lanes
    bool late_home = false;
};

struct SharedOrder {
    LaneWord lanes[kMostLanes];
    alignas(64) StreamOrder legacy{Kind::legacy, 1};
    alignas(64) std::atomic<bool> legacy_strayed{false};  // its tail is a lane
    std::atomic<uint64_t> legacy_epoch{0};    // calls on the legacy stream
    std::atomic<uint64_t> blocking_epoch{0};  // calls on blocking streams
    std::atomic<uint64_t> stray{0};  // lanes that blocking streams used since the last legacy call
};

// Where the stream's last work may still be running.
inline int pending_tail(const StreamOrder& stream, const SharedOrder& shared) {
    if (stream.tail < 0) return stream.tail;
    auto seen = shared.lanes[stream.tail].read();
    return seen.user() == stream.id && seen.busy() ? stream.tail : kDone;
}

// Actions has
//   bool finished(int lane)                              whether it is proven to be empty, if known
//   void barrier(const StreamOrder& home, int from, int to)   `home` is whose stream kHome means
//   void skipped()                                       a barrier was not needed after all
template <class Actions>
class Frontier {
public:
    Frontier(SharedOrder& shared, Actions& actions) : shared_(shared), actions_(actions) {}

    // Where the next call on the stream runs. If that is a lane it is claimed, and submitted() must
    // follow. `wish` is a lane, kHome or kFollow; a lane that another stream holds becomes kHome.
    int decide(StreamOrder& stream, int wish) {
        int tail = pending_tail(stream, shared_);
        int queue = wish == kFollow ? (tail >= 0 ? tail : kHome) : wish;
        if (queue >= 0 && !claim(queue, stream)) {
            queue = kHome;
            tail = pending_tail(stream, shared_);  // whoever took our lane proved it empty
        }
        if (has_late(stream)) order_late(stream, queue);
        switch (stream.kind) {
            case Kind::nonblocking:
                if (tail != kDone && tail != queue) barrier(stream, tail, queue);
                break;
            case Kind::blocking: {
                join_legacy();
                uint64_t epoch = shared_.legacy_epoch.load(std::memory_order_relaxed);
                bool behind = stream.seen != epoch && shared_.legacy.tail != kDone;
                order(stream, tail, queue, behind);
                stream.seen = epoch;
                touched(stream, queue);
                break;
            }
            case Kind::legacy: {
                // Before the lanes: what comes after this is waited for the next time, at worst
                // once too often. The other way round it could be counted and never waited for.
                uint64_t epoch = shared_.blocking_epoch.load(std::memory_order_acquire);
                uint64_t lanes = shared_.stray.exchange(0, std::memory_order_acq_rel);
                for (; lanes != 0; lanes &= lanes - 1) {
                    int lane = __builtin_ctzll(lanes);
                    if (shared_.lanes[lane].read().busy()) barrier(stream, lane, kHome);
                }
                order(stream, tail, queue, stream.seen != epoch);
                stream.seen = epoch;
                touched(stream, queue);
                break;
            }
        }
        stream.tail = queue;
        if (queue >= 0) stream.used |= uint64_t{1} << queue;
        if (stream.kind == Kind::legacy)
            shared_.legacy_strayed.store(queue >= 0, std::memory_order_release);
        return queue;
    }

    // A call that was not held together with its decision (it may block the host) is in its queue
    // now. Who decided in between did not wait for it, and must the next time.
    void arrived(StreamOrder& stream, int queue) {
        touched(stream, queue);
        if (queue >= 0) stream.used |= uint64_t{1} << queue;
        if (stream.tail == queue) return;
        if (stream.tail == kDone)
            stream.tail = queue;
        else if (queue >= 0)
            stream.late |= uint64_t{1} << queue;
        else
            stream.late_home = true;
    }

    static bool has_late(const StreamOrder& stream) { return stream.late != 0 || stream.late_home; }

    void touched(const StreamOrder& stream, int queue) {
        if (stream.kind == Kind::legacy) shared_.legacy_epoch.fetch_add(1);
        if (stream.kind != Kind::blocking) return;
        // Set already in most cases. Who takes it away in between waits for what came before. The
        // lane goes first: who sees the new epoch must see the lane, too.
        uint64_t lane = queue >= 0 ? uint64_t{1} << queue : 0;
        if ((~shared_.stray.load(std::memory_order_acquire) & lane) != 0)
            shared_.stray.fetch_or(lane, std::memory_order_acq_rel);
        shared_.blocking_epoch.fetch_add(1);
    }

    // Everything that was called on the stream is complete.
    void drained(StreamOrder& stream) {
        for (uint64_t lanes = stream.used; lanes != 0; lanes &= lanes - 1) {
            LaneWord& lane = shared_.lanes[__builtin_ctzll(lanes)];
            auto seen = lane.read();
            if (seen.user() == stream.id) lane.emptied(seen);
        }
        stream.used = stream.late = 0;
        stream.late_home = false;
        stream.tail = kDone;
        stream.seen = kNever;  // its home may have been decided for without being called
        if (stream.kind == Kind::legacy)
            shared_.legacy_strayed.store(false, std::memory_order_release);
    }

private:
    bool claim(int index, const StreamOrder& stream) {
        if (stream.id > kLastUser) return false;
        LaneWord& lane = shared_.lanes[index];
        auto seen = lane.read();
        if (seen.submitting()) return false;  // by another stream: ours has its own lock
        if (seen.user() != stream.id && seen.busy() && !actions_.finished(index)) return false;
        if (!lane.claim(seen, stream.id)) return false;
        if (seen.user() != stream.id)
            shared_.stray.fetch_and(~(uint64_t{1} << index), std::memory_order_acq_rel);
        return true;
    }

    void order_late(StreamOrder& stream, int queue) {
        for (uint64_t lanes = stream.late; lanes != 0; lanes &= lanes - 1) {
            int lane = __builtin_ctzll(lanes);
            auto seen = shared_.lanes[lane].read();
            if (lane != queue && seen.user() == stream.id && seen.busy())
                barrier(stream, lane, queue);
        }
        if (stream.late_home && queue != kHome) barrier(stream, kHome, queue);
        stream.late = 0;
        stream.late_home = false;
    }

    void join_legacy() {
        // Several blocking streams may be here at once; only with the legacy
        // stream on a lane is anything changed, and for that the caller holds all others off.
        if (!shared_.legacy_strayed.load(std::memory_order_acquire)) return;
        StreamOrder& legacy = shared_.legacy;
        int tail = pending_tail(legacy, shared_);
        if (tail >= 0) {
            barrier(legacy, tail, kHome);
            legacy.tail = kHome;
        } else {
            legacy.tail = kDone;
        }
        shared_.legacy_strayed.store(false, std::memory_order_release);
    }

    // `behind`: the other kind of stream was called since, which only our home waits for.
    void order(const StreamOrder& stream, int tail, int queue, bool behind) {
        if (queue == kHome) {
            if (tail >= 0) barrier(stream, tail, kHome);
            return;
        }
        if (tail == kHome || behind) barrier(stream, kHome, queue);
        if (tail >= 0 && tail != queue) barrier(stream, tail, queue);
    }

    void barrier(const StreamOrder& home, int from, int to) {
        if (from >= 0) {
            auto seen = shared_.lanes[from].read();
            if (actions_.finished(from)) {
                shared_.lanes[from].emptied(seen);
                actions_.skipped();
                return;
            }
        }
        actions_.barrier(home, from, to);
    }

    SharedOrder& shared_;
    Actions& actions_;
};

}  // namespace eclip
