// The C interface: a request's mark for programs that have one to give, and the decisions of the
// frontier and the recorder by themselves, for the test that compares them with Python's.
#define ECLIP_OPTIONAL  // here they are
#include "eclip.h"

#include <memory>
#include <vector>

#include "commands.h"
#include "dispatcher.h"
#include "moving.h"

#define ECLIP_API extern "C" __attribute__((visibility("default")))

using namespace eclip;

// A request begins with this thread's next launch; of this worker of the plan, or -1.
ECLIP_API void eclip_request(int worker) {
    Dispatcher& dispatcher = Dispatcher::get();
    if (dispatcher.on()) dispatcher.workers().begin_request(worker);
}

// Ask for a cap of so many units instead of the one that the process has (eclip exec --sms). A thread
// of libeclip does the rest. 0: asked; -1: the process has no cap, or there is no such number.
ECLIP_API int eclip_sms(int wanted) { return moving::ask(wanted) ? 0 : -1; }
// The units that the process holds now; 0: it has no cap.
ECLIP_API int eclip_sms_held() { return static_cast<int>(moving::held()); }

namespace {

struct Written {
    int32_t* out;
    int at = 0;
    void write(int value) { out[at++] = value; }
};

struct Decisions {
    uint64_t done = 0;
    std::vector<int> barriers;
    int64_t apart = 1;
    int skips = 0;
    bool finished(int lane) { return done >> lane & 1; }
    void barrier(const StreamOrder& home, int from, int to) {
        int stream = static_cast<int>(static_cast<int64_t>(home.id - 1) / apart);
        for (int value : {stream, from, to}) barriers.push_back(value);
    }
    void skipped() { ++skips; }
};

}  // namespace

// Steps of four: what (0 call, 1 drained, 2 device drained), stream, wish, and the lanes that would
// answer that they are empty. For each call `out` gets its queue, how many barriers were not needed,
// how many were, and these: whose home, from, to. Returns the length. Stream 0 is the legacy one.
// `apart` is how far the numbers of two streams lie from each other, as after many others have gone.
ECLIP_API int eclip_frontier(int streams, const int32_t* kinds, int64_t apart, int steps,
                             const int64_t* program, int32_t* out) {
    auto shared = std::make_unique<SharedOrder>();
    std::vector<StreamOrder> orders(static_cast<size_t>(streams));
    for (int stream = 1; stream < streams; ++stream) {
        orders[stream].kind = static_cast<Kind>(kinds[stream]);
        orders[stream].id = static_cast<uint64_t>(stream * apart + 1);
    }
    Written written{out};
    Decisions decisions;
    Frontier<Decisions> frontier(*shared, decisions);
    for (int step = 0; step < steps; ++step) {
        const int64_t* now = program + 4 * step;
        StreamOrder& order = now[1] == 0 ? shared->legacy : orders[now[1]];
        decisions = {static_cast<uint64_t>(now[3]), {}, apart, 0};
        if (now[0] == 0) {
            int queue = frontier.decide(order, static_cast<int>(now[2]));
            if (queue >= 0) shared->lanes[queue].submitted();
            written.write(queue);
            written.write(decisions.skips);
            written.write(static_cast<int>(decisions.barriers.size() / 3));
            for (int value : decisions.barriers) written.write(value);
        } else if (now[0] == 1) {
            frontier.drained(order);
        } else {
            for (LaneWord& lane : shared->lanes) lane.emptied(lane.read());
        }
    }
    return written.at;
}

namespace {

struct Edges {
    Written& to;
    int nodes = 0;
    int add(int command, const std::vector<int>& after, int& made) {
        made = nodes++;
        to.write(command);
        to.write(static_cast<int>(after.size()));
        for (int node : after) to.write(node);
        return 0;
    }
    int command(int command, const std::vector<int>& after, int& made) {
        return add(command, after, made);
    }
    int join(const std::vector<int>& after, int& made) { return add(-1, after, made); }
};

}  // namespace

// A program of commands (0 and up) and barriers (-1). `out` gets every node: its command or -1 for a
// join, how many nodes it depends on, and these.
ECLIP_API int eclip_record(int steps, const int32_t* program, int32_t* out) {
    Written written{out};
    Edges edges{written};
    Recorder<int, Edges> recorder(edges);
    for (int step = 0; step < steps; ++step) {
        int status = program[step] < 0 ? recorder.barrier() : recorder.command(program[step]);
        if (status != 0) return -status;
    }
    return written.at;
}
