// The threads of one random program: one makes the program's calls at a time, or all do at once.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace fuzz {

class Hands {
public:
    using Work = std::function<void()>;

    // The calling thread is hand 0.
    explicit Hands(int others) {
        for (int hand = 0; hand < others; ++hand) others_.push_back(std::make_unique<Other>());
    }
    int count() const { return 1 + static_cast<int>(others_.size()); }

    // What one does is seen by the next.
    void run(int hand, const Work& work) {
        if (hand == 0) return work();
        others_[hand - 1]->start(work);
        others_[hand - 1]->wait();
    }

    // As many as there are works, each its own; they begin as near to each other as possible.
    void run_together(const std::vector<Work>& works) {
        std::atomic<size_t> ready{0};
        auto begin = [&](const Work& work) {
            ++ready;
            while (ready.load() < works.size()) std::this_thread::yield();
            work();
        };
        for (size_t hand = 1; hand < works.size(); ++hand)
            others_[hand - 1]->start([&, hand] { begin(works[hand]); });
        begin(works[0]);
        for (size_t hand = 1; hand < works.size(); ++hand) others_[hand - 1]->wait();
    }

    // It dies, and another thread takes its place. What it has launched may still run.
    void replace(int hand) {
        others_[hand - 1].reset();
        others_[hand - 1] = std::make_unique<Other>();
    }

private:
    class Other {
    public:
        Other() : thread_([this] { serve(); }) {}
        ~Other() {
            start(nullptr);
            thread_.join();
        }
        void start(Work work) {
            std::lock_guard hold(lock_);
            work_ = std::move(work);
            waiting_ = true;
            changed_.notify_all();
        }
        void wait() {
            std::unique_lock hold(lock_);
            changed_.wait(hold, [&] { return !waiting_; });
        }

    private:
        void serve() {
            std::unique_lock hold(lock_);
            for (;;) {
                changed_.wait(hold, [&] { return waiting_; });
                if (work_ == nullptr) return;
                hold.unlock();
                work_();
                hold.lock();
                waiting_ = false;
                changed_.notify_all();
            }
        }

        std::mutex lock_;
        std::condition_variable changed_;
        Work work_;
        bool waiting_ = false;  // for its end
        std::thread thread_;
    };

    std::vector<std::unique_ptr<Other>> others_;
};

}  // namespace fuzz
