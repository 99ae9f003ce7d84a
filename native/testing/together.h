// Threads of a random program that make its calls at once, also on the same streams.
//
// Each keeps to cells of its own, and of what the others do it knows nothing, so that whichever call
// comes first gives the same result. What all of them did is known when they are done.
#pragma once

#include "world.h"

namespace fuzz {

class Together {
public:
    explicit Together(World& world) : world_(world) {
        for (const Target& stream : world.streams) {
            base_.push_back(world.order.before(stream.order));
            done_.push_back(world.order.known(stream.order));
        }
    }

    void run() {
        Share share{static_cast<unsigned>(world_.hands.count()), 0};
        std::vector<Hands::Work> works;
        for (; share.part < share.parts; ++share.part) {
            auto calls = plan(share);
            works.push_back([calls] {
                for (const auto& call : calls) call();
            });
        }
        world_.hands.run_together(works);
        world_.order.host_learns(learnt_);
    }

private:
    using Calls = std::vector<std::function<void()>>;

    // What one thread knows: of a stream, once it has called it, and of what it has waited for.
    struct Known {
        std::vector<Ops> streams;
        std::vector<bool> called;
        Ops host;
    };

    Calls plan(Share share) {
        Calls calls;
        Known known{std::vector<Ops>(base_.size()), std::vector<bool>(base_.size()), world_.order.host()};
        for (unsigned more = 2 + world_.roll(4); more > 0; --more) {
            size_t which = world_.roll(static_cast<unsigned>(base_.size()));
            Target& stream = world_.streams[which];
            int hand = static_cast<int>(share.part);
            if (stream.hand >= 0 && stream.hand != hand) continue;
            calls.push_back([this, &stream, hand] { world_.enter(stream.context, hand); });
            calls.push_back(plan_call(stream, which, known, share));
        }
        for (size_t which = 0; which < base_.size(); ++which)
            if (known.called[which])
                world_.order.add(world_.streams[which].order, known.streams[which]);
        learnt_ |= known.host;
        return calls;
    }

    Ops before(const Known& known, size_t which) const {
        return base_[which] | known.streams[which] | known.host;
    }
    void touch(Known& known, size_t which) const {
        known.streams[which] = before(known, which);
        known.called[which] = true;
    }

    std::function<void()> plan_call(Target& stream, size_t which, Known& known, Share share) {
        const unsigned dice = world_.roll(10);
        const CUstream handle = stream.handle;
        World& world = world_;
        if (dice == 0) {
            if (world.kind(stream) == Order::legacy) touch(known, which);
            known.host |= known.called[which] ? known.streams[which] : done_[which];
            return [&world, handle] { CHECK(world.api.cuStreamSynchronize(handle)); };
        }
        if (dice == 1) {  // an event of its own, recorded here and waited for there
            size_t there = world.roll(static_cast<unsigned>(base_.size()));
            Target& waits = world.streams[there];
            int hand = static_cast<int>(share.part);
            if (waits.hand >= 0 && waits.hand != hand) return [] {};
            World::Event& event =
                world.events[stream.context * (World::kEvents + World::kCaptureEvents) + hand];
            touch(known, which);
            event.knows = known.streams[which];
            touch(known, there);
            known.streams[there] |= event.knows;
            return [&world, &waits, &event, handle, hand] {
                CHECK(world.api.cuEventRecord(event.handle, handle));
                world.enter(waits.context, hand);
                CHECK(world.api.cuStreamWaitEvent(waits.handle, event.handle, 0));
            };
        }
        Step step = world.next_step(stream);
        Mix work;
        if (!world.choose(before(known, which), work, step.kernel, -1, share)) return [] {};
        return plan_work(stream, dice, step, work, known, which);
    }

    // A kernel, or a copy, which is not held together with its decision.
    std::function<void()> plan_work(Target& stream, unsigned dice, const Step& step, Mix work,
                                    Known& known, size_t which) {
        World& world = world_;
        const CUstream handle = stream.handle;
        const CUdeviceptr target = world.memory + 8 * work.target, source = world.memory + 8 * work.left;
        touch(known, which);
        known.streams[which].set(static_cast<size_t>(world.next));
        if (dice == 2) {
            uint64_t wanted = world.expected[work.left];
            world.read(work.left, world.next++);
            return [&world, source, handle, wanted] {
                uint64_t seen = 0;
                CHECK(cuMemcpyDtoHAsync_v2(&seen, source, 8, handle));
                if (seen != wanted) world.same = false;
            };
        }
        if (dice < 6) {
            world.read(work.left, world.next);
            world.write(work.target, world.expected[work.left], world.next++);
            return [target, source, handle] { CHECK(cuMemcpyDtoDAsync_v2(target, source, 8, handle)); };
        }
        Way way = world.choose_way(stream, 0);
        world.commit(work, world.next++);
        if (dice == 6) {
            world.host_works.push_back(std::make_unique<HostWork>(HostWork{work, world.cells}));
            return [&world, handle, data = world.host_works.back().get()] {
                CHECK(world.api.cuLaunchHostFunc(handle, run_host, data));
            };
        }
        return [&world, way, step, work, handle] { CHECK(world.launch(handle, way, step, work)); };
    }

    World& world_;
    std::vector<Ops> base_;  // what each stream's next call comes after, as they begin
    std::vector<Ops> done_;  // what its end comes after
    Ops learnt_;
};

}  // namespace fuzz
