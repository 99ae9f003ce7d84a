// What dispatching asks of a device's driver: queues, events and contexts.
//
// This, lanes.cpp and the hooks are all that know whose driver it is. The rest (dispatcher, placing,
// frontier, streams, workers) has handles, and no call of its own.
#pragma once

#include <optional>

#include "driver.h"

namespace eclip {

// While it lives, what the calling thread asks the driver breaks nobody's capture. Without it a
// question of ours could end a capture that another thread has just begun.
class Relaxed {
public:
    Relaxed() { exchange(); }
    ~Relaxed() { exchange(); }
    Relaxed(const Relaxed&) = delete;

private:
    void exchange() {
        auto call = driver().cuThreadExchangeStreamCaptureMode;
        if (call != nullptr) call(&mode_);
    }
    int mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// While it lives the context is the calling thread's current one: the default streams are those of
// the current context, and new events belong to it.
class PrimaryCurrent {
public:
    explicit PrimaryCurrent(CUcontext wanted) {
        if (driver().cuCtxGetCurrent(&before_) != CUDA_SUCCESS || before_ == wanted) return;
        changed_ = driver().cuCtxSetCurrent(wanted) == CUDA_SUCCESS;
    }
    ~PrimaryCurrent() { restore(); }
    PrimaryCurrent(const PrimaryCurrent&) = delete;
    void restore() {
        if (changed_) driver().cuCtxSetCurrent(before_);
        changed_ = false;
    }

private:
    CUcontext before_ = nullptr;
    bool changed_ = false;
};

namespace device {

struct Description {
    CUcontext context;
    bool blocking;  // orders against the legacy default stream
};
std::optional<Description> describe(CUstream stream);  // none: there is no such stream

bool is_capturing(CUstream stream);  // also where the driver will not say
bool is_empty(CUstream stream);
void wait_for(CUstream stream);

// What is called on `to` from now on waits for what was called on `from`. A wait keeps what it has
// seen of an event, which may be recorded anew at once.
CUresult barrier(CUstream from, CUevent event, CUstream to);
CUresult wait_event(CUstream stream, CUevent event);
CUresult make_event(CUcontext context, CUevent& event);
void destroy_event(CUevent event);

CUcontext current_context();  // the calling thread's, or none
bool is_current(CUdevice device);
CUdevice current_device();  // or -1
bool has_primary(CUdevice device);  // somebody has made its primary context
CUcontext retain_primary(CUdevice device);
void release_primary(CUdevice device);

}  // namespace device
}  // namespace eclip
