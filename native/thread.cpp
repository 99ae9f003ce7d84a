#include "thread.h"

#include "device.h"

namespace eclip {

constinit thread_local bool Inside::inside_ = false;
constinit thread_local ThreadState* state_of_thread = nullptr;

ThreadState::~ThreadState() {
    if (own && own->event != nullptr) device::destroy_event(own->event);
    if (followers == nullptr) return;
    tracker.leave(*followers);
    if (own) own->tracker.leave(*followers);
}

ThreadState& make_thread_state() {
    struct Owner {
        std::unique_ptr<ThreadState> state;
        ~Owner() { state_of_thread = nullptr; }
    };
    thread_local Owner owner;
    if (owner.state == nullptr) owner.state = std::make_unique<ThreadState>();
    state_of_thread = owner.state.get();
    return *state_of_thread;
}

}  // namespace eclip
