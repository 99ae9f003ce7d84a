#include "engine.h"

#include <time.h>

#include <thread>

namespace standin {
namespace {

constexpr int kThreads = 3;

}  // namespace

double now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) * 1e9 + static_cast<double>(now.tv_nsec);
}

Engine& Engine::get() {
    static Engine& only = *new Engine;  // its threads never end
    return only;
}

void Engine::open(Context& context, CUdevice device) {
    context.device = device;
    context.mask = {{~uint64_t{0}, ~uint64_t{0}}};
    if (context.legacy.legacy) return;
    context.legacy.legacy = true;
    context.legacy.context = &context;
    streams.push_back(&context.legacy);
}

WorkPtr Engine::add(std::function<void()> run, const std::vector<WorkPtr>& after) {
    // With the first work, so that a process may fork before.
    for (; threads_ < kThreads; ++threads_) std::thread([this] { serve(); }).detach();
    auto work = std::make_shared<Work>();
    work->run = std::move(run);
    for (const WorkPtr& before : after) {
        if (before == nullptr || before->done) continue;
        before->after.push_back(work);
        ++work->waits;
    }
    ++unfinished_;
    if (work->waits == 0) {
        ready_.push_back(work);
        if (!lazy || waiting_ > 0) changed_.notify_one();
    }
    return work;
}

WorkPtr Engine::submit(Stream& stream, std::function<void()> run,
                       const std::vector<WorkPtr>& extra) {
    std::vector<WorkPtr> after = extra;
    after.push_back(stream.last);
    if (stream.legacy) {
        for (Stream* other : streams)
            if (other->blocking && other->context == stream.context) after.push_back(other->last);
        for (const Stream& other : orphans)
            if (other.blocking && other.context == stream.context) after.push_back(other.last);
    } else if (stream.blocking) {
        after.push_back(stream.context->legacy.last);
    }
    stream.last = add(std::move(run), after);
    return stream.last;
}

void Engine::finish(const WorkPtr& work) {
    work->done = true;
    work->ended_ns = now_ns();
    work->run = nullptr;
    for (const WorkPtr& next : work->after)
        if (--next->waits == 0) ready_.push_back(next);
    work->after.clear();
    --unfinished_;
    changed_.notify_all();
}

void Engine::serve() {
    std::unique_lock hold(lock);
    for (;;) {
        changed_.wait(hold,
                      [&] { return !ready_.empty() && (!lazy || waiting_ > 0 || nudges_ > 0); });
        if (nudges_ > 0) --nudges_;
        size_t chosen = random() % ready_.size();
        WorkPtr work = ready_[chosen];
        ready_[chosen] = ready_.back();
        ready_.pop_back();
        unsigned dice = random();
        hold.unlock();
        if (dice % 8 == 0) std::this_thread::yield();
        if (work->run) work->run();
        if (dice % 16 == 1) std::this_thread::yield();
        hold.lock();
        finish(work);
    }
}

void Engine::wait(std::unique_lock<std::mutex>& hold, const WorkPtr& work) {
    if (work == nullptr) return;
    ++waiting_;
    changed_.notify_all();
    changed_.wait(hold, [&] { return work->done; });
    --waiting_;
}

void Engine::nudge() {
    if (nudges_ < kThreads) ++nudges_;
    changed_.notify_one();
}

void Engine::wait_all(std::unique_lock<std::mutex>& hold) {
    ++waiting_;
    changed_.notify_all();
    changed_.wait(hold, [&] { return unfinished_ == 0; });
    --waiting_;
}

}  // namespace standin
