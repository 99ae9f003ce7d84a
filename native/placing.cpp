#include "placing.h"

#include <cstdlib>
#include <cstring>
#include <optional>

#include "device.h"

namespace eclip {
namespace {

constexpr uint32_t kLearnEvery = 32;  // how often a lane is asked only to learn how they answer

}  // namespace

Placing::Placing(Setup& setup) : setup_(setup), pool_(setup.pool()), cap_(setup.cap()) {
    cap_.serve(order_);
    order_.legacy.seen = kNever;  // blocking streams may hold work that nobody has seen
    if (const char* asking = secure_getenv("ECLIP_ASK"))
        asking_ = strcmp(asking, "always") == 0 ? 1 : strcmp(asking, "never") == 0 ? -1 : 0;
}

void Placing::Hold::enter_gate() {
    if (stream_.order->kind == Kind::blocking) {
        owner_.gate_.lock_shared();
        gate_ = kShared;
        if (!owner_.order_.legacy_strayed.load(std::memory_order_acquire)) return;
        owner_.gate_.unlock_shared();
    }
    owner_.gate_.lock();
    gate_ = kAlone;
}

void Placing::Hold::leave_gate() {
    if (gate_ == kAlone) owner_.gate_.unlock();
    else owner_.gate_.unlock_shared();
    gate_ = kNone;
}

// Asking pays where lanes are often found empty and an answer costs less than a barrier.
bool Placing::asks(const Stream& stream) const {
    if (asking_ != 0) return asking_ > 0;
    const Answers& answers = stream.answers;
    if (answers.chances % kLearnEvery == 1) return true;
    return answers.asked > 0 &&
           pool_.ask_ns * answers.asked < pool_.barrier_ns * answers.empty;
}

bool Placing::Actions::finished(int lane) {
    Answers& answers = stream.answers;
    ++answers.chances;
    if (!owner.asks(stream)) return false;
    bool empty = device::is_empty(owner.pool_.lanes[lane].stream);
    if (++answers.asked == 1 << 20)  // the past fades
        answers = {answers.chances, 1 << 10, answers.empty >> 10};
    if (empty) ++answers.empty;
    return empty;
}

void Placing::Actions::barrier(const StreamOrder& home, int from, int to) {
    if (status != CUDA_SUCCESS) return;
    CUstream home_stream = stream.home;
    std::optional<PrimaryCurrent> current;
    if (&home != stream.order) {  // a call that names its stream may come from any context
        home_stream = kLegacyStream;
        current.emplace(owner.pool_.primary);
    }
    CUevent event = from >= 0 ? static_cast<CUevent>(owner.pool_.lanes[from].event) : stream.event;
    if (event == nullptr) {
        status = device::make_event(owner.pool_.primary, stream.event);
        event = stream.event;
    }
    if (status == CUDA_SUCCESS)
        status = device::barrier(owner.queue_of(from, home_stream), event,
                                 owner.queue_of(to, home_stream));
    count(counters().barriers);
}

void Placing::join_home(Stream& stream) {
    Hold hold(*this, stream);
    Actions actions{*this, stream};
    Frontier<Actions>(order_, actions).decide(*stream.order, kHome);
    ++stream.calls;
}

CUresult Placing::find_end(Stream& stream, CUstream raw, CUstream& target) {
    // The default stream waits for blocking streams too; that and all that came late is joined.
    if (stream.order->kind == Kind::legacy || Frontier<Actions>::has_late(*stream.order)) {
        Actions actions{*this, stream};
        Frontier<Actions>(order_, actions).decide(*stream.order, kHome);
        return actions.status;
    }
    int tail = pending_tail(*stream.order, order_);
    target = queue_of(tail, raw);
    return CUDA_SUCCESS;
}

void Placing::ended(Stream& stream) {
    Actions actions{*this, stream};
    Frontier<Actions>(order_, actions).drained(*stream.order);
}

size_t Placing::wait_for_lanes(LaneWord::View* seen) {
    size_t lanes = pool_.count;
    for (size_t lane = 0; lane < lanes; ++lane) {
        seen[lane] = order_.lanes[lane].read();
        if (seen[lane].busy()) device::wait_for(pool_.lanes[lane].stream);
    }
    return lanes;
}

// By a stream that has nothing else to do: in the default stream, blocking streams would wait for
// lanes of non-blocking ones.
CUresult Placing::gather_lanes() {
    for (size_t index = 0; index < pool_.count; ++index) {
        const Lane& lane = pool_.lanes[index];
        if (lane.stream == nullptr) continue;
        CUresult status = device::barrier(lane.stream, lane.event, pool_.aside);
        if (status != CUDA_SUCCESS) return status;
    }
    return CUDA_SUCCESS;
}

CUresult Placing::lanes_wait_for(CUevent event) {
    for (size_t index = 0; index < pool_.count; ++index) {
        if (pool_.lanes[index].stream == nullptr) continue;
        CUresult status = device::wait_event(pool_.lanes[index].stream, event);
        if (status != CUDA_SUCCESS) return status;
    }
    return CUDA_SUCCESS;
}

}  // namespace eclip
