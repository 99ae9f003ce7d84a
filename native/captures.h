// How many streams capture, so that streams are asked only while there may be one.
#pragma once

#include <atomic>

#include "device.h"

namespace eclip {

class Captures {
public:
    bool any() const { return count_.load(std::memory_order_relaxed) != 0; }
    bool has(CUstream stream) const { return any() && device::is_capturing(stream); }

    template <class Call>
    CUresult begin(Call&& call) {
        count_.fetch_add(1);
        CUresult status = call();
        if (status != CUDA_SUCCESS) count_.fetch_sub(1);
        return status;
    }

    template <class Call>
    CUresult end(CUstream stream, Call&& call) {
        bool before = device::is_capturing(stream);
        CUresult status = call();
        // A capture that failed has ended too; a call from the wrong thread has ended nothing.
        if (before && !device::is_capturing(stream)) count_.fetch_sub(1);
        return status;
    }

private:
    std::atomic<int> count_{0};
};

}  // namespace eclip
