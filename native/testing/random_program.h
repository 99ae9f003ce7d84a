// One random program: its calls, made as they are chosen, and what they must come to.
#pragma once

#include <dlfcn.h>

#include "random_graphs.h"
#include "together.h"

namespace fuzz {

// Whether programs change their cap, where libeclip is: any number of units, most of them soon again.
inline bool moving_caps = false;
inline void change_cap(unsigned units) {
    static auto ask = reinterpret_cast<int (*)(int)>(dlsym(RTLD_DEFAULT, "eclip_sms"));
    if (ask != nullptr) ask(static_cast<int>(units));
}

struct Gate {
    std::atomic<bool> open{false};
};

inline void wait_at_gate(void* data) {
    while (!static_cast<Gate*>(data)->open.load()) std::this_thread::yield();
}

class Program {
public:
    Program(unsigned seed, bool shared_process, bool misfits, const Contexts& contexts)
        : world_(seed, shared_process, misfits, contexts), graphs_(world_) {}

    bool run() {
        int length = 15 + static_cast<int>(world_.roll(35));
        for (int step = 0; step < length && world_.next < kMostOps - 24 && world_.same; ++step)
            take_step();
        world_.hand = 0;
        world_.synchronise_all();
        return world_.same && memcmp(world_.cells, world_.expected, sizeof world_.expected) == 0;
    }

private:
    // By the stream's own thread, or mostly the one that made the last.
    void take_step() {
        if (moving_caps && world_.roll(6) == 0) change_cap(1 + world_.roll(140));
        unsigned hands = static_cast<unsigned>(world_.hands.count());
        if (hands > 1 && world_.roll(12) == 0) return world_.roll(3) == 0 ? end_thread() : at_once();
        Target& stream = world_.streams[world_.roll(static_cast<unsigned>(world_.streams.size()))];
        if (stream.hand >= 0) world_.hand = stream.hand;
        else if (world_.roll(3) == 0) world_.hand = static_cast<int>(world_.roll(hands));
        world_.hands.run(world_.hand, [&] { call(stream); });
        if (world_.hand != 0 && world_.roll(2)) world_.hand = 0;
    }

    void call(Target& stream) {
        switch (world_.roll(27)) {
            default:
                for (unsigned burst = 1 + world_.roll(4); burst > 0; --burst) world_.kernel_on(stream);
                break;
            case 10: case 11: record(stream); break;
            case 12: case 13: wait(stream); break;
            case 14: world_.synchronise(stream); break;
            case 15: copy_or_set(stream); break;
            case 16: host_work(stream); break;
            case 17: read_back(stream); break;
            case 18: synchronise_else(stream); break;
            case 19: world_.roll(3) == 0 ? graphs_.build() : graphs_.capture(stream); break;
            case 8: case 9: case 20: graphs_.launch(stream); break;
            case 7: case 21: graphs_.update(stream); break;
            case 22: gate(stream); break;
            case 23: replace(stream); break;
            case 24: free_memory(stream); break;
            case 25: be_refused(stream); break;
            case 26: copy_between(); break;
        }
    }

    void record(Target& stream) {
        World::Event& event = world_.any_event(stream.context);
        if (kHasContexts && world_.roll(6) == 0) {  // all of the context
            CHECK(cuCtxRecordEvent(world_.contexts[stream.context], event.handle));
            event.knows = world_.order.known_in(stream.context);
            return;
        }
        world_.visit(stream);
        CHECK(world_.api.cuEventRecord(event.handle, stream.handle));
        world_.order.touch(stream.order);
        event.knows = world_.order.known(stream.order);
    }

    World::Event& any_event() {
        return world_.any_event(static_cast<int>(world_.roll(static_cast<unsigned>(world_.contexts.size()))));
    }

    void wait(Target& stream) {
        World::Event& event = any_event();
        world_.visit(stream);
        CHECK(world_.api.cuStreamWaitEvent(stream.handle, event.handle, 0));
        world_.order.learn(stream.order, event.knows);
    }

    void synchronise_else(Target& stream) {
        World::Event& event = any_event();
        switch (world_.roll(4)) {
            case 0:
                world_.visit(stream);
                if (world_.api.cuStreamQuery(stream.handle) == CUDA_SUCCESS)
                    world_.order.host_learns(world_.order.known(stream.order));
                break;
            case 1:
                CHECK(cuEventSynchronize(event.handle));
                world_.order.host_learns(event.knows);
                break;
            case 2:
                if (cuEventQuery(event.handle) == CUDA_SUCCESS) world_.order.host_learns(event.knows);
                break;
            default:
                world_.enter(stream);
                CHECK(cuCtxSynchronize());
                world_.order.host_learns(world_.order.known_in(stream.context));
        }
    }

    CUdeviceptr address(int cell) const { return world_.memory + 8 * static_cast<CUdeviceptr>(cell); }

    void copy_or_set(Target& stream) {
        Mix work;
        if (!world_.choose(world_.order.before(stream.order), work)) return;
        world_.visit(stream);
        if (world_.roll(2)) {
            CHECK(world_.api.cuMemsetD32Async(address(work.target), 7, 2, stream.handle));
            world_.write(work.target, 7 | uint64_t{7} << 32, world_.next);
        } else {
            CHECK(cuMemcpyDtoDAsync_v2(address(work.target), address(work.left), 8, stream.handle));
            world_.read(work.left, world_.next);
            world_.write(work.target, world_.expected[work.left], world_.next);
        }
        world_.order.happen(stream.order, world_.next++);
    }

    void host_work(Target& stream) {
        Mix work;
        if (!world_.choose(world_.order.before(stream.order), work)) return;
        world_.visit(stream);
        world_.host_works.push_back(std::make_unique<HostWork>(HostWork{work, world_.cells}));
        CHECK(world_.api.cuLaunchHostFunc(stream.handle, run_host, world_.host_works.back().get()));
        world_.commit(work, world_.next);
        world_.order.happen(stream.order, world_.next++);
    }

    // A copy to the host, which waits: what it brings must be right at once.
    void read_back(Target& stream) {
        bool by_stream = world_.roll(2);
        Target& target = by_stream ? stream : legacy(stream.context);
        int cell = static_cast<int>(world_.roll(kCells));
        if (!world_.readable(cell, world_.order.before(target.order))) return;
        uint64_t seen = 0;
        world_.enter(target);
        if (by_stream)
            CHECK(cuMemcpyDtoHAsync_v2(&seen, address(cell), 8, stream.handle));
        else
            CHECK(cuMemcpyDtoH_v2(&seen, address(cell), 8));
        world_.order.touch(target.order);
        world_.order.host_learns(world_.order.known(target.order));
        if (seen != world_.expected[cell]) world_.same = false;
    }

    Target& legacy(int context) {
        for (Target& stream : world_.streams)
            if (stream.handle == nullptr && stream.context == context) return stream;
        abort();
    }

    // Work of one stream must not come to stand behind another's that waits for the host.
    void gate(Target& stream) {
        Target& other = world_.any_stream();
        if (world_.shared || world_.kind(stream) != Order::nonblocking ||
            other.handle == stream.handle || world_.kind(other) == Order::legacy)
            return;
        gates_.push_back(std::make_unique<Gate>());
        CHECK(world_.api.cuLaunchHostFunc(stream.handle, wait_at_gate, gates_.back().get()));
        world_.kernel_on(stream);
        world_.kernel_on(other);
        world_.kernel_on(other);
        world_.visit(other);
        CHECK(world_.api.cuStreamSynchronize(other.handle));
        world_.order.host_learns(world_.order.known(other.order));
        gates_.back()->open.store(true);
    }

    void replace(Target& stream) {
        if (stream.is_default()) return;
        world_.visit(stream);
        CHECK(cuStreamDestroy_v2(stream.handle));
        stream = world_.make_stream(world_.kind(stream) == Order::blocking, stream.context);
    }

    // A kernel leaves something in memory of its own, another takes it from there, and at once the
    // memory is freed, by whichever context: that waits for all work of the memory's own.
    void free_memory(Target& stream) {
        Mix work;
        if (!world_.choose(world_.order.before(stream.order), work)) return;
        bool on_host = world_.roll(2);
        world_.enter(stream);
        CUdeviceptr memory = 0;
        void* host_memory = nullptr;
        if (on_host) CHECK(cuMemAllocHost_v2(&host_memory, 8));
        else CHECK(cuMemAlloc_v2(&memory, 8));
        uint64_t between = on_host ? reinterpret_cast<uint64_t>(host_memory) : memory;
        Step first = world_.next_step(stream), second = world_.next_step(stream);
        put(stream, first, {between, address(work.left), address(work.right), work.salt});
        put(stream, second, {address(work.target), between, address(work.right), work.salt});
        uint64_t middle =
            mix(first.kernel, world_.expected[work.left], world_.expected[work.right], work.salt);
        uint64_t value = mix(second.kernel, middle, world_.expected[work.right], work.salt);
        world_.read(work.left, world_.next);
        world_.read(work.right, world_.next);
        world_.write(work.target, value, world_.next);
        world_.order.happen(stream.order, world_.next++);
        world_.visit(stream);
        if (on_host) CHECK(cuMemFreeHost(host_memory));
        else CHECK(cuMemFree_v2(memory));
        world_.order.host_learns(world_.order.known_in(stream.context));
    }

    void put(const Target& stream, const Step& step, std::vector<uint64_t> values) {
        void* params[kArguments];
        for (int index = 0; index < kArguments; ++index) params[index] = &values[index];
        CHECK(world_.api.cuLaunchKernel(functions[step.kernel], step.grid, 1, 1, 32, 1, 1, 0,
                                        stream.handle, params, nullptr));
    }

    // By lanes only: then the program sees nothing of it. Or by every device: then it is told, and
    // nothing has happened.
    void be_refused(Target& stream) {
        if (world_.misfits && world_.roll(2)) {
            const CUresult reasons[] = {CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
                                        CUDA_ERROR_NOT_SUPPORTED};
            standin_refuse(reasons[world_.roll(3)]);
            if (world_.roll(3) == 0) copy_or_set(stream);
            else world_.kernel_on(stream);
            standin_refuse(CUDA_SUCCESS);
            return;
        }
        constexpr unsigned kTooMuch = 1 << 20;
        Step step = world_.next_step(stream);
        Mix work{step.kernel, 0, 0, 0, 0};
        world_.enter(stream);
        Way way = world_.choose_way(stream, kTooMuch);
        if (world_.launch(stream.handle, way, step, work) != CUDA_ERROR_INVALID_VALUE)
            world_.same = false;
    }

    // In the default streams of both contexts, whichever is current.
    void copy_between() {
        unsigned contexts = static_cast<unsigned>(world_.contexts.size());
        if (contexts == 1) return;
        Target& here = legacy(static_cast<int>(world_.roll(contexts)));
        Target& there = legacy(static_cast<int>(world_.roll(contexts)));
        Order& order = world_.order;
        Ops before = order.before(here.order) | order.before(there.order);
        Mix work;
        if (!world_.choose(before, work)) return;
        world_.enter(static_cast<int>(world_.roll(contexts)), world_.hand);
        CHECK(cuMemcpyPeer(address(work.target), world_.contexts[here.context], address(work.left),
                           world_.contexts[there.context], 8));
        world_.read(work.left, world_.next);
        world_.write(work.target, world_.expected[work.left], world_.next);
        before.set(static_cast<size_t>(world_.next++));
        order.learn(here.order, before);
        order.learn(there.order, before);
        order.host_learns(before);
    }

    void at_once() {
        world_.hand = 0;
        Together(world_).run();
    }

    // With its own default stream, whose work goes on.
    void end_thread() {
        int hand = 1 + static_cast<int>(world_.roll(static_cast<unsigned>(world_.hands.count()) - 1));
        for (Target& stream : world_.streams)
            if (stream.hand == hand)
                stream = world_.make_target(Order::blocking, kThreadStream, stream.context, hand);
        world_.hands.replace(hand);
        world_.current[hand] = -1;
        world_.hand = 0;
    }

    World world_;
    Graphs graphs_;
    std::vector<std::unique_ptr<Gate>> gates_;
};

}  // namespace fuzz
