// Giving way between processes without a plan: what hooks tell of launches and waits.
//
// A process that `eclip exec --service` or `--background` started joins the board of its GPU with its
// first launch there. A service says on the board when it is busy (busy.h); background is paced and
// gives way (pacing.h). Launches are delayed, never redirected, so order stays the program's own.
//
// Hooks call these functions around what they do anyway. In a process that has no part in it, all of
// them are one load and a branch.
#pragma once

#include <atomic>
#include <string_view>

#include "device.h"
#include "seat.h"

namespace eclip::giving {

enum State : int { kUnread, kOff, kWaiting, kJoined };
extern std::atomic<int> state;

// Whether calls need any attention; read from the environment when it is first asked.
bool read_state();
inline bool on() {
    int now = state.load(std::memory_order_acquire);  // and what was read with it
    return now != kOff && (now != kUnread || read_state());
}

// What the process's row says: of its tier, or plain where it has none.
Promise promise_of_process();

constexpr double kUnknownTime = 0;
void launch(CUstream stream, Default meaning);
void launch_kernel(CUstream stream, Default meaning, CUfunction function, uint64_t blocks);
void launch_graph(CUstream stream, Default meaning, double ns);
void meet(CUstream stream, Default meaning);
void record(CUevent event, CUstream stream, Default meaning);
void destroy(CUstream stream);
void forget(CUevent event);
void end_contexts();

// Before work is given to the driver; of a graph also how long it takes, if that is known.
inline void launching(CUstream stream, Default meaning) {
    if (on()) launch(stream, meaning);
}
inline void launching_kernel(CUstream stream, Default meaning, CUfunction function, unsigned x,
                             unsigned y, unsigned z) {
    if (on()) launch_kernel(stream, meaning, function, uint64_t{x} * y * z);
}
inline void launching_graph(CUstream stream, Default meaning, double ns = kUnknownTime) {
    if (on()) launch_graph(stream, meaning, ns);
}

// Before a call that takes its place in a stream and is not paced.
inline void taking_place(CUstream stream, Default meaning) {
    if (on()) meet(stream, meaning);
}

// Whether launches of graphs may be cut into parts here, and how long a part should take.
bool cuts_graphs();
double grain();

// While it lives, no other thread's work comes between what the calling thread launches on a stream.
// Granted only where no other thread has launched there so far, nor on a stream that orders itself
// with it: those that come meanwhile wait. Not while anything captures.
struct Line;
class Alone {
public:
    Alone(CUstream stream, Default meaning);
    ~Alone();
    Alone(const Alone&) = delete;
    bool granted() const { return line_ != nullptr; }

private:
    Line* line_ = nullptr;
};

// Before a call that follows its stream: a memset is work, the record of an event is none.
inline void following(CUdeviceptr, CUstream stream, Default meaning) { launching(stream, meaning); }
inline void following(CUevent event, CUstream stream, Default meaning) {
    if (on()) record(event, stream, meaning);
}

inline void forgetting(CUevent event) {
    if (on()) forget(event);
}
inline void destroying(CUstream stream) {
    if (on()) destroy(stream);
}
inline void ending_contexts() {
    if (on()) end_contexts();
}

// What the program has launched before it waits, and when it begins to.
struct Mark {
    int line = -1;
    uint64_t launches = 0;
    int64_t began_ns = 0;
};
constexpr int kAllLines = -2;
Mark mark_stream(CUstream stream, Default meaning);
Mark mark_event(CUevent event);
Mark mark_all();
void waited(const Mark& mark);

template <class Call>
CUresult wait(Mark (*mark)(CUstream, Default), CUstream stream, Default meaning, Call&& call) {
    if (!on()) return call();
    Mark before = mark(stream, meaning);
    CUresult status = call();
    if (status == CUDA_SUCCESS) waited(before);
    return status;
}

// Around a call that waits for a stream, or asks whether it is done.
template <class Call>
CUresult waiting(CUstream stream, Default meaning, Call&& call) {
    return wait(mark_stream, stream, meaning, call);
}
template <class Call>
CUresult waiting_for_all(Call&& call) {
    return wait([](CUstream, Default) { return mark_all(); }, nullptr, Default::legacy, call);
}
template <class Call>
CUresult waiting_for_event(CUevent event, Call&& call) {
    if (!on()) return call();
    Mark before = mark_event(event);
    CUresult status = call();
    if (status == CUDA_SUCCESS) waited(before);
    return status;
}

// Around a call without a stream of its own. Only copies to the host are sure to wait.
constexpr bool copies_to_host(std::string_view symbol) {
    return symbol.find("toH") != std::string_view::npos;
}
template <class Call>
CUresult in_default(bool waits, Default meaning, Call&& call) {
    if (!on()) return call();
    launch(nullptr, meaning);
    return waits ? waiting(nullptr, meaning, call) : call();
}

// Our own hooks, under whatever name a vendor's library has them: calls as the program makes them.
CUresult record_as_program(CUevent event, CUstream stream, Default meaning);
CUresult query_as_program(CUstream stream);

// Around the beginning and the end of a capture. While there is one, nothing of ours asks, records or
// waits: that could break it.
void capture_begins();
void capture_ended();

template <class Call>
CUresult begin_capture(CUstream, Default, Call&& call) {
    if (!on()) return call();
    capture_begins();
    CUresult status = call();
    if (status != CUDA_SUCCESS) capture_ended();
    return status;
}
template <class Call>
CUresult end_capture(CUstream stream, Default meaning, Call&& call) {
    if (!on()) return call();
    stream = explicit_handle(stream, meaning);
    bool before = device::is_capturing(stream);
    CUresult status = call();
    // A capture that failed has ended too; a call from the wrong thread has ended nothing.
    if (before && !device::is_capturing(stream)) capture_ended();
    return status;
}

}  // namespace eclip::giving
