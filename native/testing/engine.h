// The stand-in's device: queues of work that real threads run, as late and as out of order as the
// rules allow.
//
// Work waits for the work before it in its queue and for what CUDA says besides; among all that may
// run, a random piece is taken by one of several threads. While lazy, nothing runs until somebody
// waits for it, so that whatever is not ordered shows.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

#include "../cuda_abi.h"

namespace standin {

struct Work {
    std::function<void()> run;
    int waits = 0;
    bool done = false;
    double ended_ns = 0;
    std::vector<std::shared_ptr<Work>> after;
};
using WorkPtr = std::shared_ptr<Work>;

struct Mask {
    uint64_t bits[2] = {0, 0};
    int priority = 0;  // of what runs there
};

struct Capture;
struct Node;

struct Context;

struct Stream {
    Context* context = nullptr;
    bool blocking = true;
    bool legacy = false;
    int priority = 0;
    bool masked = false;  // HIP's lanes: of the context, and yet with a mask of their own
    Mask mask;
    WorkPtr last;
    std::shared_ptr<Capture> capture;
    std::vector<Node*> capture_after;
};

struct Context {
    bool green = false;
    Mask mask;
    CUdevice device = 0;
    Stream legacy;  // its default stream; green ones have none
};

struct Event {
    Context* context = nullptr;  // whose streams may record it
    WorkPtr work;  // none: never recorded, so complete
    std::shared_ptr<Capture> capture;
    std::vector<Node*> capture_after;
};

class Engine {
public:
    static Engine& get();

    // All of this under the lock.
    std::mutex lock;
    WorkPtr submit(Stream& stream, std::function<void()> run,
                   const std::vector<WorkPtr>& after = {});
    WorkPtr add(std::function<void()> run, const std::vector<WorkPtr>& after);
    void wait(std::unique_lock<std::mutex>& hold, const WorkPtr& work);
    void nudge();  // who asks again and again lets one piece run, however lazy the device is
    void wait_all(std::unique_lock<std::mutex>& hold);

    void open(Context& context, CUdevice device);  // with its default stream
    std::vector<Stream*> streams;
    std::vector<Stream> orphans;  // destroyed ones, while they may hold work
    std::minstd_rand random{1};
    bool lazy = false;

private:
    Engine() = default;
    void serve();
    void finish(const WorkPtr& work);

    std::condition_variable changed_;
    std::vector<WorkPtr> ready_;
    int threads_ = 0;
    int unfinished_ = 0;
    int waiting_ = 0;  // threads that wait for something
    int nudges_ = 0;   // pieces that may run although nobody waits
};

double now_ns();

}  // namespace standin
