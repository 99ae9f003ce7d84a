// What a random program works on: cells, contexts, streams, threads, and what is known of them.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>

#include "hands.h"
#include "plans.h"

namespace fuzz {

inline uint64_t Mix::apply(const uint64_t* cells) const {
    return mix(kernel, cells[left], cells[right], salt);
}

// Which cells may be chosen: one part of so many, so that threads keep off each other's.
struct Share {
    unsigned parts = 1, part = 0;
};

// The two contexts that live as long as the process; the first is the planned one.
struct Contexts {
    CUcontext planned, other_device;
};

struct Target {
    CUstream handle;
    int order;    // its place in the order of streams
    int context;  // its place in the program's contexts
    int hand;     // the only thread that may use it, or -1
    int place;    // in its worker's trace
    int worker;
    int last = -1;  // the cell it wrote last
    bool is_default() const { return handle == nullptr || handle == kThreadStream; }
};

// In which of the ways there are a kernel is launched.
struct Way {
    bool extended, threaded, unnamed;
    unsigned shared;
};

struct HostWork {
    Mix work;
    uint64_t* cells;
};

inline void run_host(void* data) {
    auto host = static_cast<HostWork*>(data);
    host->cells[host->work.target] = host->work.apply(host->cells);
}

class World {
public:
    static constexpr int kEvents = 4;       // of a context
    static constexpr int kCaptureEvents = 2;  // of a context, besides
    struct Event {
        CUevent handle;
        Ops knows;
    };

    World(unsigned seed, bool shared_process, bool misfits, const Contexts& contexts);
    ~World();

    unsigned roll(unsigned sides) { return static_cast<unsigned>(random() >> 4) % sides; }
    bool usable(const Target& stream) const { return stream.hand < 0 || stream.hand == hand; }
    Target& any_stream();  // that the running thread may use
    Order::Kind kind(const Target& stream) const { return order.kind(stream.order); }
    Event& any_event(int context) { return events[context * (kEvents + kCaptureEvents) + roll(kEvents)]; }
    CUevent capture_event(int context, int which) const {
        return events[context * (kEvents + kCaptureEvents) + kEvents + which].handle;
    }
    Target make_target(Order::Kind kind, CUstream handle, int context, int hand = -1);
    Target make_stream(bool blocking, int context);

    // The calling thread makes it current: `wanted`, or any for calls that do not ask.
    void enter(int wanted, int hand_of_call);
    void enter(const Target& stream) { enter(stream.context, hand); }
    void visit(const Target& stream);

    // A mix of cells that may be touched after all that, or none.
    bool choose(const Ops& before, Mix& work, int kernel = -1, int last = -1, Share share = {});
    bool allowed(const Ops& before, const Mix& work) const;
    // It happened as operation `op`: what the cells hold now, and who touched them.
    void commit(const Mix& work, int op);
    void read(int cell, int op) { cell_[cell].readers.set(static_cast<size_t>(op)); }
    void write(int cell, uint64_t value, int op);
    bool readable(int cell, const Ops& before) const { return cell_[cell].readable(before); }

    Step next_step(Target& stream);
    Way choose_way(const Target& stream, unsigned shared);
    CUresult launch(CUstream handle, const Way& way, const Step& step, const Mix& work) const;
    void kernel_on(Target& stream);
    void synchronise(Target& stream);
    void synchronise_all();
    void fill(const Mix& work, uint64_t values[kArguments], void* params[kArguments]) const;

    Random random;
    const bool shared;   // with other programs of the process
    const bool misfits;  // some kernels ask for more than a small lane has
    std::atomic<bool> same{true};
    Api api;
    Hands hands;
    int hand = 0;  // the one that runs
    std::vector<int> current;  // context of each hand
    CUdeviceptr memory = 0;
    uint64_t* cells = nullptr;
    uint64_t expected[kCells];
    Order order;
    int next = 0;  // operation
    std::vector<CUcontext> contexts;  // the planned one first
    bool has_private = false;         // the last one
    std::vector<Target> streams;
    std::vector<Event> events;
    std::vector<std::unique_ptr<HostWork>> host_works;

private:
    Cell cell_[kCells];
};

inline World::World(unsigned seed, bool shared_process, bool misfits, const Contexts& given)
    : random(seed), shared(shared_process), misfits(misfits),
      hands(roll(3) == 0 ? 1 + static_cast<int>(roll(2)) : 0),
      current(static_cast<size_t>(hands.count()), -1), contexts{given.planned} {
    enter(0, 0);
    api = make_api(random);
    CHECK(cuMemAlloc_v2(&memory, sizeof expected));
    cells = reinterpret_cast<uint64_t*>(memory);
    for (int cell = 0; cell < kCells; ++cell) cells[cell] = expected[cell] = random();
    if (roll(4) == 0) contexts.push_back(given.other_device);
    if (kHasContexts && roll(4) == 0) {
        has_private = true;
        contexts.emplace_back();
        CHECK(cuCtxCreate_v2(&contexts.back(), 0, 0));
        current[0] = static_cast<int>(contexts.size()) - 1;
    }
    for (int context = 0; context < static_cast<int>(contexts.size()); ++context) {
        enter(context, 0);
        for (int event = 0; event < kEvents + kCaptureEvents; ++event) {
            events.emplace_back();
            CHECK(cuEventCreate(&events.back().handle, CU_EVENT_DISABLE_TIMING));
        }
        streams.push_back(make_target(Order::legacy, nullptr, context));
        for (unsigned more = 1 + roll(context == 0 ? 3 : 2); more > 0; --more)
            streams.push_back(make_stream(roll(2), context));
    }
    for (int owner = 0; owner < hands.count(); ++owner)
        streams.push_back(make_target(Order::blocking, kThreadStream, 0, owner));
    if (contexts.size() > 1 && contexts[1] == given.other_device)
        streams.push_back(make_target(Order::blocking, kThreadStream, 1, 0));
}

inline World::~World() {
    int last = static_cast<int>(contexts.size()) - 1;
    bool with_streams = has_private && roll(2);  // the context takes its streams along
    for (Target& stream : streams)
        if (!stream.is_default() && !(with_streams && stream.context == last))
            CHECK(cuStreamDestroy_v2(stream.handle));
    for (Event& event : events) CHECK(cuEventDestroy_v2(event.handle));
    enter(0, 0);
    CHECK(cuMemFree_v2(memory));
    for (int other = 1; other < hands.count(); ++other)
        hands.run(other, [&] { enter(0, other); });
    if (has_private) CHECK(cuCtxDestroy_v2(contexts.back()));
}

inline Target& World::any_stream() {
    for (;;) {
        Target& stream = streams[roll(static_cast<unsigned>(streams.size()))];
        if (usable(stream)) return stream;
    }
}

inline Target World::make_target(Order::Kind kind, CUstream handle, int context, int owner) {
    return {handle, order.add_stream(kind, context), context, owner, static_cast<int>(roll(16)),
            static_cast<int>(roll(static_cast<unsigned>(traces.size())))};
}

inline Target World::make_stream(bool blocking, int context) {
    CUstream made;
    enter(context, hand);
    CHECK(cuStreamCreate(&made, blocking ? 0 : CU_STREAM_NON_BLOCKING));
    return make_target(blocking ? Order::blocking : Order::nonblocking, made, context);
}

inline void World::enter(int wanted, int hand_of_call) {
    if (current[hand_of_call] == wanted) return;
    CHECK(cuCtxSetCurrent(contexts[wanted]));
    current[hand_of_call] = wanted;
}

inline void World::visit(const Target& stream) {
    bool any = !stream.is_default() && roll(2);
    enter(any ? static_cast<int>(roll(static_cast<unsigned>(contexts.size()))) : stream.context, hand);
}

// Mostly it reads what was written last: that is where a lost order shows.
inline bool World::choose(const Ops& before, Mix& work, int kernel, int last, Share share) {
    auto any_cell = [&] { return static_cast<int>(share.part + share.parts * roll(kCells / share.parts)); };
    work.kernel = kernel >= 0 ? kernel : static_cast<int>(roll(kKernels));
    work.salt = random();
    for (int attempt = 0; attempt < 12; ++attempt) {
        work.target = any_cell();
        bool chained = last >= 0 && attempt < 6 && roll(4) != 0;
        work.left = chained ? last : any_cell();
        work.right = any_cell();
        if (allowed(before, work)) return true;
    }
    return false;
}

inline bool World::allowed(const Ops& before, const Mix& work) const {
    return cell_[work.target].writable(before) && cell_[work.left].readable(before) &&
           cell_[work.right].readable(before);
}

inline void World::commit(const Mix& work, int op) {
    uint64_t value = work.apply(expected);
    read(work.left, op);
    read(work.right, op);
    write(work.target, value, op);
}

inline void World::write(int cell, uint64_t value, int op) {
    expected[cell] = value;
    cell_[cell].writer = op;
    cell_[cell].readers = Ops().set(static_cast<size_t>(op));
}

// The trace's next kernel, mostly.
inline Step World::next_step(Target& stream) {
    const auto& trace = traces[stream.worker];
    if (roll(8) == 0) return {static_cast<int>(roll(kKernels)), 1 + roll(4)};
    if (roll(12) == 0) stream.place += static_cast<int>(roll(3));
    return trace[static_cast<size_t>(stream.place++) % trace.size()];
}

// A thread's own stream by its handle, or as the default of the other interface.
inline Way World::choose_way(const Target& stream, unsigned shared_bytes) {
    bool threaded = stream.handle == kThreadStream && roll(2);
    return {roll(3) == 0, threaded, threaded && roll(2), shared_bytes};
}

inline CUresult World::launch(CUstream handle, const Way& way, const Step& step,
                              const Mix& work) const {
    uint64_t values[kArguments];
    void* params[kArguments];
    fill(work, values, params);
    if (way.unnamed) handle = nullptr;
    if (way.extended) {
        CUlaunchConfig config{{step.grid, 1, 1}, {32, 1, 1}, way.shared, handle, nullptr, 0};
        auto call = way.threaded ? api.cuLaunchKernelEx_ptsz : api.cuLaunchKernelEx;
        return call(&config, functions[work.kernel], params, nullptr);
    }
    auto call = way.threaded ? api.cuLaunchKernel_ptsz : api.cuLaunchKernel;
    return call(functions[work.kernel], step.grid, 1, 1, 32, 1, 1, way.shared, handle, params, nullptr);
}

inline void World::fill(const Mix& work, uint64_t values[kArguments], void* params[kArguments]) const {
    int index = 0;
    for (int cell : {work.target, work.left, work.right})
        values[index++] = reinterpret_cast<uint64_t>(cells + cell);
    values[index] = work.salt;
    for (index = 0; index < kArguments; ++index) params[index] = &values[index];
}

inline void World::kernel_on(Target& stream) {
    Step step = next_step(stream);
    Mix work;
    if (!choose(order.before(stream.order), work, step.kernel, stream.last)) return;
    stream.last = work.target;
    enter(stream);
    // Some ask for more than a small lane has, and must end up on the whole device.
    Way way = choose_way(stream, misfits && roll(10) == 0 ? 80 : 0);
    CHECK(launch(stream.handle, way, step, work));
    commit(work, next);
    order.happen(stream.order, next++);
}

inline void World::synchronise(Target& stream) {
    visit(stream);
    if (kind(stream) == Order::legacy) order.touch(stream.order);
    CHECK(api.cuStreamSynchronize(stream.handle));
    order.host_learns(order.known(stream.order));
}

inline void World::synchronise_all() {
    for (int context = 0; context < static_cast<int>(contexts.size()); ++context) {
        enter(context, hand);
        CHECK(cuCtxSynchronize());
        order.host_learns(order.known_in(context));
    }
}

}  // namespace fuzz
