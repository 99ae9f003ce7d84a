// The graphs of a random program: captured or built by hand, launched, updated, partly disabled.
#pragma once

#include "../commands.h"
#include "world.h"

namespace fuzz {

// A user's graph and the sequential meaning of one launch of it.
struct Captured {
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;
    int context = 0;
    std::vector<Mix> body;
    std::vector<Step> steps;
    std::vector<CUgraphNode> nodes;  // of the body
    std::vector<bool> enabled;       // of the body
    bool chain = true;               // each after the last, so that any may touch any cell
    bool nested = false;             // within a child graph
};

class Graphs {
public:
    explicit Graphs(World& world) : world_(world) {}
    ~Graphs() {
        for (Captured& one : all_) {
            CHECK(cuGraphExecDestroy(one.exec));
            CHECK(cuGraphDestroy(one.graph));
        }
    }

    void capture(Target& stream) {
        if (!may_capture(stream)) return;
        Captured made;
        size_t length = 2 + world_.roll(6);
        bool planned = world_.roll(4) != 0;  // a worker's whole trace, or anything
        if (planned) {
            made.steps = any_trace();
        } else {
            for (size_t index = 0; index < length; ++index)
                made.steps.push_back({static_cast<int>(world_.roll(kKernels)), 1 + world_.roll(4)});
        }
        unsigned steps = static_cast<unsigned>(made.steps.size());
        int fork_at = world_.roll(3) == 0 ? static_cast<int>(world_.roll(steps)) : -1;
        capture_body(stream, fork_at, made);
        keep(std::move(made));
    }

    // By hand, with the recorder: between two barriers no cell is written twice or read and written.
    void build() {
        Captured made;
        made.chain = false;
        made.steps = any_trace();
        world_.enter(0, world_.hand);
        CHECK(cuGraphCreate(&made.graph, 0));
        Sink sink{world_, made};
        eclip::Recorder<CUgraphNode, Sink> recorder(sink);
        uint32_t written = 0, read = 0;
        for (size_t index = 0; index < made.steps.size(); ++index) {
            Mix work;
            world_.choose(Ops().set(), work, made.steps[index].kernel);
            uint32_t writes = 1u << work.target, reads = 1u << work.left | 1u << work.right;
            bool conflict = (writes & (written | read)) != 0 || (reads & written) != 0;
            if (conflict || world_.roll(6) == 0) {
                CHECK(recorder.barrier());
                if (world_.roll(4) == 0) CHECK(recorder.barrier());  // changes nothing
                written = read = 0;
            }
            written |= writes;
            read |= reads;
            made.body.push_back(work);
            CHECK(recorder.command(static_cast<int>(index)));
        }
        keep(std::move(made));
    }

    void launch(Target& stream) {
        Captured* one = any();
        if (one == nullptr || one->context != stream.context) return;
        auto fits = [&] {
            Ops before = world_.order.before(stream.order);
            for (const Mix& work : one->body)
                if (!world_.allowed(before, work)) return false;
            return true;
        };
        if (!fits()) {
            world_.synchronise(world_.any_stream());
            if (!fits()) world_.synchronise_all();
        }
        world_.enter(stream);
        CHECK(world_.api.cuGraphLaunch(one->exec, stream.handle));
        for (size_t index = 0; index < one->body.size(); ++index)
            if (one->enabled[index]) world_.commit(one->body[index], world_.next);
        world_.order.happen(stream.order, world_.next++);
    }

    void update(Target& stream) {
        Captured* one = any();
        if (one == nullptr) return;
        if (world_.roll(4) == 0) return toggle(*one);
        if (one->chain && world_.roll(3) == 0 && one->context == stream.context && may_capture(stream))
            return update_all(stream, *one);
        update_node(*one);
    }

private:
    struct Sink {
        World& world;
        Captured& made;
        int command(int index, const std::vector<CUgraphNode>& after, CUgraphNode& node) {
            uint64_t values[kArguments];
            void* params[kArguments];
            KernelNodeParams shape = shape_of(world, made, index, values, params);
            return cuGraphAddKernelNode_v2(&node, made.graph, after.data(), after.size(), &shape);
        }
        int join(const std::vector<CUgraphNode>& after, CUgraphNode& node) {
            return cuGraphAddEmptyNode(&node, made.graph, after.data(), after.size());
        }
    };

    static KernelNodeParams shape_of(const World& world, const Captured& one, size_t index,
                                     uint64_t values[kArguments], void* params[kArguments]) {
        const Mix& work = one.body[index];
        world.fill(work, values, params);
        return {functions[work.kernel], {one.steps[index].grid, 1, 1}, {32, 1, 1}, 0, params,
                nullptr, nullptr, nullptr};
    }

    Captured* any() {
        return all_.empty() ? nullptr : &all_[world_.roll(static_cast<unsigned>(all_.size()))];
    }
    const std::vector<Step>& any_trace() {
        return traces[world_.roll(static_cast<unsigned>(traces.size()))];
    }
    // Where others may call the default stream at any time, a blocking stream may not.
    bool may_capture(const Target& stream) const {
        return world_.kind(stream) == Order::nonblocking ||
               (world_.kind(stream) == Order::blocking && !world_.shared);
    }

    // Kernels on the stream, and some on another that is drawn in and let go again.
    void capture_body(Target& stream, int fork_at, Captured& made) {
        Target* other = nullptr;
        if (fork_at >= 0)
            for (Target& one : world_.streams)
                if (one.handle != stream.handle && one.context == stream.context &&
                    world_.usable(one) && may_capture(one))
                    other = &one;
        made.chain = other == nullptr;
        made.context = stream.context;
        world_.visit(stream);
        unsigned mode = world_.shared ? 1 + world_.roll(2) : world_.roll(3);
        CHECK(cuStreamBeginCapture_v2(stream.handle, static_cast<int>(mode)));
        world_.enter(stream);
        CUevent forked = world_.capture_event(stream.context, 0);
        CUevent joined = world_.capture_event(stream.context, 1);
        for (size_t index = 0; index < made.steps.size(); ++index) {
            bool forks = other != nullptr && static_cast<int>(index) == fork_at;
            if (forks) {
                CHECK(cuEventRecord(forked, stream.handle));
                CHECK(cuStreamWaitEvent(other->handle, forked, 0));
            }
            Mix work;
            world_.choose(Ops().set(), work, made.steps[index].kernel);
            if (other != nullptr) {  // the two branches share no cell
                for (int* cell : {&work.target, &work.left, &work.right})
                    *cell = (*cell & ~1) | static_cast<int>(index == static_cast<size_t>(fork_at));
            }
            Target& target = forks ? *other : stream;
            CHECK(world_.launch(target.handle, world_.choose_way(target, 0), made.steps[index], work));
            made.body.push_back(work);
            if (forks) CHECK(cuEventRecord(joined, other->handle));
            if (world_.roll(3) == 0) others_go_on(stream, other);
        }
        if (other != nullptr) CHECK(cuStreamWaitEvent(stream.handle, joined, 0));
        CHECK(cuStreamEndCapture(stream.handle, &made.graph));
    }

    // Meanwhile: on a stream that has nothing to do with the capture, old or new, by any thread.
    void others_go_on(const Target& stream, const Target* other) {
        size_t which = world_.roll(static_cast<unsigned>(world_.streams.size()));
        Target& bystander = world_.streams[which];
        if (world_.kind(bystander) != Order::nonblocking || bystander.handle == stream.handle ||
            &bystander == other)
            return;
        int hand = static_cast<int>(world_.roll(static_cast<unsigned>(world_.hands.count())));
        if (hand == 0) hand = world_.hand;  // the first one is here, or waits for who is here
        const int before = std::exchange(world_.hand, hand);
        auto work = [&] {
            if (world_.roll(4) == 0) {
                CHECK(cuStreamDestroy_v2(bystander.handle));
                bystander = world_.make_stream(false, bystander.context);
            }
            world_.kernel_on(bystander);
        };
        if (hand == before) work();
        else world_.hands.run(hand, work);
        world_.hand = before;
        world_.enter(stream);
    }

    void keep(Captured&& made) {
        size_t count = 0;
        made.nested = world_.roll(4) == 0;
        CUgraph level = made.nested ? nest(made.graph) : made.graph;
        CHECK(cuGraphGetNodes(level, nullptr, &count));
        std::vector<CUgraphNode> nodes(count);
        CHECK(cuGraphGetNodes(level, nodes.data(), &count));
        for (CUgraphNode node : nodes) {
            int type = -1;
            CHECK(cuGraphNodeGetType(node, &type));
            if (type == kNodeKernel) made.nodes.push_back(node);
        }
        made.enabled.assign(made.nodes.size(), true);
        CHECK(cuGraphInstantiateWithFlags(&made.exec, made.graph, 0));
        all_.push_back(std::move(made));
    }

    // Whether a node runs is kept by the executable, whatever is updated.
    void toggle(Captured& one) {
        size_t index = world_.roll(static_cast<unsigned>(one.nodes.size()));
        unsigned enabled = 2;
        CHECK(cuGraphNodeGetEnabled(one.exec, one.nodes[index], &enabled));
        if (enabled != one.enabled[index]) world_.same = false;
        one.enabled[index] = !one.enabled[index];
        CHECK(cuGraphNodeSetEnabled(one.exec, one.nodes[index], one.enabled[index]));
    }

    void update_all(Target& stream, Captured& one) {
        Captured other;
        other.steps = one.steps;
        capture_body(stream, -1, other);
        if (one.nested) nest(other.graph);
        GraphExecUpdateResultInfo info;
        CHECK(cuGraphExecUpdate_v2(one.exec, other.graph, &info));
        one.body = other.body;
        CHECK(cuGraphDestroy(other.graph));
    }

    void update_node(Captured& one) {
        size_t index = world_.roll(static_cast<unsigned>(one.body.size()));
        Mix& work = one.body[index];
        if (one.chain) {
            // Mostly new arguments of the same kernel; another kernel is refused on a lane.
            int kernel = world_.roll(4) == 0 ? static_cast<int>(world_.roll(kKernels)) : work.kernel;
            world_.choose(Ops().set(), work, kernel);
        } else {
            work.salt = world_.random();
        }
        one.steps[index].kernel = work.kernel;
        uint64_t values[kArguments];
        void* params[kArguments];
        world_.enter(one.context, world_.hand);
        KernelNodeParams shape = shape_of(world_, one, index, values, params);
        CHECK(cuGraphExecKernelNodeSetParams_v2(one.exec, one.nodes[index], &shape));
    }

    World& world_;
    std::vector<Captured> all_;
};

}  // namespace fuzz
