// One random program: its calls, made as they are chosen, and what they must come to.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>

#include "../commands.h"
#include "plans.h"

namespace fuzz {

struct HostWork {
    Mix work;
    uint64_t* cells;
};

inline void run_host(void* data) {
    auto host = static_cast<HostWork*>(data);
    uint64_t result = host->work.apply(host->cells);
    host->cells[host->work.target] = result;
}

struct Gate {
    std::atomic<bool> open{false};
};

inline void wait_at_gate(void* data) {
    while (!static_cast<Gate*>(data)->open.load()) std::this_thread::yield();
}

inline uint64_t Mix::apply(const uint64_t* cells) const {
    return mix(kernel, cells[left], cells[right], salt);
}

// A user's graph and the sequential meaning of one launch of it.
struct Captured {
    CUgraph graph = nullptr;
    CUgraphExec exec = nullptr;
    std::vector<Mix> body;
    std::vector<Step> steps;
    std::vector<CUgraphNode> nodes;  // of the body
    bool chain = true;               // each after the last, so that any may touch any cell
    bool nested = false;             // within a child graph
};

struct Target {
    CUstream handle;
    int order;  // its place in the order of streams
    int place;  // in its worker's trace
    int worker;
    int last = -1;  // the cell it wrote last
};

class Program {
public:
    Program(unsigned seed, bool shared_process) : random_(seed), shared_(shared_process) {}

    bool run() {
        api_ = make_api(random_);
        CHECK(cuMemAlloc_v2(&memory_, sizeof expected_));
        cells_ = reinterpret_cast<uint64_t*>(memory_);
        for (int cell = 0; cell < kCells; ++cell) cells_[cell] = expected_[cell] = random_();
        streams_.push_back(make_target(Order::legacy, nullptr));
        streams_.push_back(make_target(Order::blocking, kThreadStream));
        for (unsigned more = 1 + roll(3); more > 0; --more) streams_.push_back(make_stream(roll(2)));
        for (CUevent& event : events_) CHECK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
        int length = 15 + static_cast<int>(roll(35));
        for (int step = 0; step < length && next_ < kMostOps - 16 && same_; ++step) take_step();
        finish();
        return same_;
    }

private:
    unsigned roll(unsigned sides) { return static_cast<unsigned>(random_() >> 4) % sides; }

    Target make_target(Order::Kind kind, CUstream handle) {
        return {handle, order_.add_stream(kind), static_cast<int>(roll(16)),
                static_cast<int>(roll(static_cast<unsigned>(traces.size()))), -1};
    }

    Target make_stream(bool blocking) {
        CUstream made;
        CHECK(cuStreamCreate(&made, blocking ? 0 : CU_STREAM_NON_BLOCKING));
        return make_target(blocking ? Order::blocking : Order::nonblocking, made);
    }

    Target& any_stream() { return streams_[roll(static_cast<unsigned>(streams_.size()))]; }
    Order::Kind kind(const Target& stream) const { return order_.kind(stream.order); }

    // A mix of cells that may be touched after all that, or none.
    // Mostly it reads what was written last: that is where a lost order shows.
    bool choose(const Ops& before, Mix& work, int kernel = -1, int last = -1) {
        work.kernel = kernel >= 0 ? kernel : static_cast<int>(roll(kKernels));
        work.salt = random_();
        for (int attempt = 0; attempt < 12; ++attempt) {
            work.target = static_cast<int>(roll(kCells));
            bool chained = last >= 0 && attempt < 6 && roll(4) != 0;
            work.left = chained ? last : static_cast<int>(roll(kCells));
            work.right = static_cast<int>(roll(kCells));
            if (allowed(before, work)) return true;
        }
        return false;
    }

    bool allowed(const Ops& before, const Mix& work) const {
        return cell_[work.target].writable(before) && cell_[work.left].readable(before) &&
               cell_[work.right].readable(before);
    }

    // It happened as operation `op`: what the cells hold now, and who touched them.
    void commit(const Mix& work, int op) {
        expected_[work.target] = work.apply(expected_);
        cell_[work.left].readers.set(op);
        cell_[work.right].readers.set(op);
        cell_[work.target].writer = op;
        cell_[work.target].readers.reset();
        cell_[work.target].readers.set(op);
    }

    // The trace's next kernel, mostly.
    Step next_step(Target& stream) {
        const auto& trace = traces[stream.worker];
        if (roll(8) == 0) return {static_cast<int>(roll(kKernels)), 1 + roll(4)};
        if (roll(12) == 0) stream.place += static_cast<int>(roll(3));
        return trace[static_cast<size_t>(stream.place++) % trace.size()];
    }

    void launch(const Target& stream, const Step& step, const Mix& work, unsigned shared) {
        uint64_t values[5];
        void* params[5];
        fill(work, values, params);
        CUstream handle = stream.handle;
        // A thread's own stream by its handle, or as the default of the other interface.
        bool threaded = handle == kThreadStream && roll(2);
        if (threaded && roll(2)) handle = nullptr;
        if (roll(3) == 0) {
            CUlaunchConfig config{{step.grid, 1, 1}, {32, 1, 1}, shared, handle, nullptr, 0};
            auto call = threaded ? api_.cuLaunchKernelEx_ptsz : api_.cuLaunchKernelEx;
            CHECK(call(&config, functions[work.kernel], params, nullptr));
        } else {
            auto call = threaded ? api_.cuLaunchKernel_ptsz : api_.cuLaunchKernel;
            CHECK(call(functions[work.kernel], step.grid, 1, 1, 32, 1, 1, shared, handle, params,
                       nullptr));
        }
    }

    void fill(const Mix& work, uint64_t values[5], void* params[5]) {
        values[0] = reinterpret_cast<uint64_t>(cells_);
        values[1] = static_cast<uint64_t>(work.target);
        values[2] = static_cast<uint64_t>(work.left);
        values[3] = static_cast<uint64_t>(work.right);
        values[4] = work.salt;
        for (int index = 0; index < 5; ++index) params[index] = &values[index];
    }

    void kernel_on(Target& stream) {
        Step step = next_step(stream);
        Mix work;
        if (!choose(order_.before(stream.order), work, step.kernel, stream.last)) return;
        stream.last = work.target;
        // Some ask for more than a small lane has, and must end up on the whole device.
        launch(stream, step, work, roll(10) == 0 ? 80 : 0);
        commit(work, next_);
        order_.happen(stream.order, next_++);
    }

    void take_step() {
        Target& stream = any_stream();
        switch (roll(24)) {
            default:
                for (unsigned burst = 1 + roll(4); burst > 0; --burst) kernel_on(stream);
                break;
            case 10: case 11: record(stream); break;
            case 12: case 13: wait(stream); break;
            case 14: synchronise(stream); break;
            case 15: copy_or_set(stream); break;
            case 16: host_work(stream); break;
            case 17: read_back(stream); break;
            case 18: synchronise_else(stream); break;
            case 19: roll(3) == 0 ? build_recorded() : capture(stream); break;
            case 8: case 9: case 20: launch_graph(stream); break;
            case 7: case 21: update_graph(stream); break;
            case 22: gate(stream); break;
            case 23: replace(stream); break;
        }
    }

    void record(Target& stream) {
        unsigned which = roll(kEvents);
        CHECK(api_.cuEventRecord(events_[which], stream.handle));
        order_.touch(stream.order);
        event_knows_[which] = order_.known(stream.order);
    }

    void wait(Target& stream) {
        unsigned which = roll(kEvents);
        CHECK(api_.cuStreamWaitEvent(stream.handle, events_[which], 0));
        order_.learn(stream.order, event_knows_[which]);
    }

    void synchronise(Target& stream) {
        if (kind(stream) == Order::legacy) order_.touch(stream.order);
        CHECK(api_.cuStreamSynchronize(stream.handle));
        order_.host_learns(order_.known(stream.order));
    }

    void synchronise_else(Target& stream) {
        unsigned which = roll(kEvents);
        switch (roll(3)) {
            case 0:
                if (api_.cuStreamQuery(stream.handle) == CUDA_SUCCESS)
                    order_.host_learns(order_.known(stream.order));
                break;
            case 1:
                CHECK(cuEventSynchronize(events_[which]));
                order_.host_learns(event_knows_[which]);
                break;
            default: synchronise_all();
        }
    }

    void synchronise_all() {
        CHECK(cuCtxSynchronize());
        for (int op = 0; op < next_; ++op) order_.host_learns(Ops().set(op));
    }

    void copy_or_set(Target& stream) {
        Mix work;
        if (!choose(order_.before(stream.order), work)) return;
        if (roll(2)) {
            CHECK(api_.cuMemsetD32Async(memory_ + 8 * work.target, 7, 2, stream.handle));
            expected_[work.target] = 7 | uint64_t{7} << 32;
        } else {
            CHECK(cuMemcpyDtoDAsync_v2(memory_ + 8 * work.target, memory_ + 8 * work.left, 8,
                                       stream.handle));
            expected_[work.target] = expected_[work.left];
            cell_[work.left].readers.set(next_);
        }
        cell_[work.target].writer = next_;
        cell_[work.target].readers.reset();
        order_.happen(stream.order, next_++);
    }

    void host_work(Target& stream) {
        Mix work;
        if (!choose(order_.before(stream.order), work)) return;
        host_works_.push_back(std::make_unique<HostWork>(HostWork{work, cells_}));
        CHECK(api_.cuLaunchHostFunc(stream.handle, run_host, host_works_.back().get()));
        commit(work, next_);
        order_.happen(stream.order, next_++);
    }

    // A copy to the host, which waits: what it brings must be right at once.
    void read_back(Target& stream) {
        bool by_stream = roll(2);
        int order = by_stream ? stream.order : streams_[0].order;
        unsigned cell = roll(kCells);
        if (!cell_[cell].readable(order_.before(order))) return;
        uint64_t seen = 0;
        if (by_stream)
            CHECK(cuMemcpyDtoHAsync_v2(&seen, memory_ + 8 * cell, 8, stream.handle));
        else
            CHECK(cuMemcpyDtoH_v2(&seen, memory_ + 8 * cell, 8));
        order_.touch(order);
        order_.host_learns(order_.known(order));
        if (seen != expected_[cell]) same_ = false;
    }

    // Work of one stream must not come to stand behind another's that waits for the host.
    void gate(Target& stream) {
        Target& other = any_stream();
        if (shared_ || kind(stream) != Order::nonblocking || other.handle == stream.handle ||
            kind(other) == Order::legacy)
            return;
        gates_.push_back(std::make_unique<Gate>());
        CHECK(api_.cuLaunchHostFunc(stream.handle, wait_at_gate, gates_.back().get()));
        kernel_on(stream);
        kernel_on(other);
        kernel_on(other);
        CHECK(api_.cuStreamSynchronize(other.handle));
        order_.host_learns(order_.known(other.order));
        gates_.back()->open.store(true);
    }

    void replace(Target& stream) {
        if (stream.handle == nullptr || stream.handle == kThreadStream) return;
        // The old one's work stays in the order: others may still have to wait for it.
        CHECK(cuStreamDestroy_v2(stream.handle));
        stream = make_stream(kind(stream) == Order::blocking);
    }

    // Kernels on the stream, and some on another that is drawn in and let go again.
    bool capture_body(Target& stream, const std::vector<Step>& steps, int fork_at, Captured& made) {
        Target* other = nullptr;
        if (fork_at >= 0)
            for (Target& one : streams_)
                if (one.handle != stream.handle && kind(one) != Order::legacy &&
                    (!shared_ || kind(one) == Order::nonblocking))
                    other = &one;
        made.chain = other == nullptr;
        CHECK(cuStreamBeginCapture_v2(stream.handle, shared_ ? 1 + roll(2) : roll(3)));
        for (size_t index = 0; index < steps.size(); ++index) {
            bool forks = other != nullptr && static_cast<int>(index) == fork_at;
            if (forks) {
                CHECK(cuEventRecord(events_[kEvents], stream.handle));
                CHECK(cuStreamWaitEvent(other->handle, events_[kEvents], 0));
            }
            Mix work;
            choose(Ops().set(), work, steps[index].kernel);
            if (other != nullptr) {  // the two branches share no cell
                for (int* cell : {&work.target, &work.left, &work.right})
                    *cell = (*cell & ~1) | static_cast<int>(index == static_cast<size_t>(fork_at));
            }
            launch(forks ? *other : stream, steps[index], work, 0);
            made.body.push_back(work);
            if (forks) CHECK(cuEventRecord(events_[kEvents + 1], other->handle));
            // Others go on meanwhile.
            Target& bystander = any_stream();
            if (roll(3) == 0 && kind(bystander) == Order::nonblocking &&
                bystander.handle != stream.handle && &bystander != other)
                kernel_on(bystander);
        }
        if (other != nullptr) CHECK(cuStreamWaitEvent(stream.handle, events_[kEvents + 1], 0));
        CHECK(cuStreamEndCapture(stream.handle, &made.graph));
        return true;
    }

    void capture(Target& stream) {
        if (kind(stream) == Order::legacy || (shared_ && kind(stream) == Order::blocking)) return;
        Captured made;
        size_t length = 2 + roll(6);
        bool planned = roll(4) != 0;  // a worker's whole trace, or anything
        if (planned) {
            made.steps = traces[roll(static_cast<unsigned>(traces.size()))];
        } else {
            for (size_t index = 0; index < length; ++index)
                made.steps.push_back({static_cast<int>(roll(kKernels)), 1 + roll(4)});
        }
        fork_ = roll(3) == 0 ? static_cast<int>(roll(static_cast<unsigned>(made.steps.size()))) : -1;
        capture_body(stream, made.steps, fork_, made);
        keep(std::move(made));
    }

    // By hand, with the recorder: between two barriers no cell is written twice or read and written.
    void build_recorded() {
        struct Sink {
            Program& program;
            Captured& made;
            int command(int index, const std::vector<CUgraphNode>& after, CUgraphNode& node) {
                uint64_t values[5];
                void* params[5];
                program.fill(made.body[index], values, params);
                KernelNodeParams shape{functions[made.body[index].kernel],
                                       {made.steps[index].grid, 1, 1},
                                       {32, 1, 1}, 0, params, nullptr, nullptr, nullptr};
                return cuGraphAddKernelNode_v2(&node, made.graph, after.data(), after.size(), &shape);
            }
            int join(const std::vector<CUgraphNode>& after, CUgraphNode& node) {
                return cuGraphAddEmptyNode(&node, made.graph, after.data(), after.size());
            }
        };
        Captured made;
        made.chain = false;
        made.steps = traces[roll(static_cast<unsigned>(traces.size()))];
        CHECK(cuGraphCreate(&made.graph, 0));
        Sink sink{*this, made};
        eclip::Recorder<CUgraphNode, Sink> recorder(sink);
        uint32_t written = 0, read = 0;
        for (size_t index = 0; index < made.steps.size(); ++index) {
            Mix work;
            choose(Ops().set(), work, made.steps[index].kernel);
            uint32_t writes = 1u << work.target, reads = 1u << work.left | 1u << work.right;
            bool conflict = (writes & (written | read)) != 0 || (reads & written) != 0;
            if (conflict || roll(6) == 0) {
                CHECK(recorder.barrier());
                if (roll(4) == 0) CHECK(recorder.barrier());  // changes nothing
                written = read = 0;
            }
            written |= writes;
            read |= reads;
            made.body.push_back(work);
            CHECK(recorder.command(static_cast<int>(index)));
        }
        keep(std::move(made));
    }

    void keep(Captured&& made) {
        size_t count = 0;
        made.nested = roll(4) == 0;
        CUgraph level = made.nested ? nest(made.graph) : made.graph;
        CHECK(cuGraphGetNodes(level, nullptr, &count));
        std::vector<CUgraphNode> nodes(count);
        CHECK(cuGraphGetNodes(level, nodes.data(), &count));
        for (CUgraphNode node : nodes) {
            int type = -1;
            CHECK(cuGraphNodeGetType(node, &type));
            if (type == kNodeKernel) made.nodes.push_back(node);
        }
        CHECK(cuGraphInstantiateWithFlags(&made.exec, made.graph, 0));
        graphs_.push_back(std::move(made));
    }

    void launch_graph(Target& stream) {
        if (graphs_.empty()) return;
        Captured& one = graphs_[roll(static_cast<unsigned>(graphs_.size()))];
        auto fits = [&] {
            Ops before = order_.before(stream.order);
            for (const Mix& work : one.body)
                if (!allowed(before, work)) return false;
            return true;
        };
        if (!fits()) {
            synchronise(any_stream());
            if (!fits()) synchronise_all();
        }
        CHECK(api_.cuGraphLaunch(one.exec, stream.handle));
        for (const Mix& work : one.body) commit(work, next_);
        order_.happen(stream.order, next_++);
    }

    void update_graph(Target& stream) {
        if (graphs_.empty()) return;
        Captured& one = graphs_[roll(static_cast<unsigned>(graphs_.size()))];
        if (one.chain && roll(3) == 0 && kind(stream) != Order::legacy &&
            !(shared_ && kind(stream) == Order::blocking)) {
            Captured other;
            capture_body(stream, one.steps, -1, other);
            if (one.nested) nest(other.graph);
            GraphExecUpdateResultInfo info;
            CHECK(cuGraphExecUpdate_v2(one.exec, other.graph, &info));
            one.body = other.body;
            CHECK(cuGraphDestroy(other.graph));
            return;
        }
        size_t index = roll(static_cast<unsigned>(one.body.size()));
        Mix work = one.body[index];
        if (one.chain) {
            // Mostly new arguments of the same kernel; another kernel is refused on a lane.
            int kernel = roll(4) == 0 ? static_cast<int>(roll(kKernels)) : work.kernel;
            choose(Ops().set(), work, kernel);
        } else {
            work.salt = random_();
        }
        uint64_t values[5];
        void* params[5];
        fill(work, values, params);
        KernelNodeParams shape{functions[work.kernel], {one.steps[index].grid, 1, 1}, {32, 1, 1},
                               0, params, nullptr, nullptr, nullptr};
        CHECK(cuGraphExecKernelNodeSetParams_v2(one.exec, one.nodes[index], &shape));
        one.body[index] = work;
        one.steps[index].kernel = work.kernel;
    }

    void finish() {
        CHECK(cuCtxSynchronize());
        for (Captured& one : graphs_) {
            CHECK(cuGraphExecDestroy(one.exec));
            CHECK(cuGraphDestroy(one.graph));
        }
        if (memcmp(cells_, expected_, sizeof expected_) != 0) same_ = false;
        for (Target& stream : streams_)
            if (stream.handle != nullptr && stream.handle != kThreadStream)
                CHECK(cuStreamDestroy_v2(stream.handle));
        for (CUevent event : events_) CHECK(cuEventDestroy_v2(event));
        CHECK(cuMemFree_v2(memory_));
    }

    static constexpr int kEvents = 4;
    Random random_;
    const bool shared_;  // with other threads of the process
    bool same_ = true;
    Api api_;
    CUdeviceptr memory_ = 0;
    uint64_t* cells_ = nullptr;
    uint64_t expected_[kCells];
    Cell cell_[kCells];
    Order order_;
    int next_ = 0;
    int fork_ = -1;
    std::vector<Target> streams_;
    CUevent events_[kEvents + 2];
    Ops event_knows_[kEvents];
    std::vector<std::unique_ptr<HostWork>> host_works_;
    std::vector<std::unique_ptr<Gate>> gates_;
    std::vector<Captured> graphs_;
};

}  // namespace fuzz
