// A stand-in for libcuda.so.1: the driver's interface over a device of host threads. Here are streams,
// events, captures and launches; contexts and graphs have files of their own.
//
// It has what libeclip and its tests call, with the rules of the real one, the inconvenient ones
// above all: a wait keeps what it saw of an event, a capture is broken by an unsafe call, an
// executable graph cannot move its nodes. -DSTANDIN_OLD leaves out what came with green contexts.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <set>

#include "standin.h"
#include "watch.h"

using namespace standin;

bool standin::nodes_have_contexts = true;

namespace {

constexpr CUresult kCapturedEvent = 907, kIsolation = 905, kUnmatched = 903, kInvalidated = 901, kUnjoined = 904;
int last_sync_mode = -1;  // of a host function, as newer interfaces have it
constexpr unsigned kMostShared = 227 << 10;  // bytes of a block, on any device

thread_local int thread_mode = 0;  // of calls that are unsafe in a capture
// A thread's own default streams: their work outlives the thread and may still be waited for.
struct ThreadStreams : std::map<Context*, Stream*> {
    ~ThreadStreams();
};
thread_local ThreadStreams thread_streams;
std::set<Capture*> captures;
std::atomic<CUresult> refusal{CUDA_SUCCESS};  // what lanes say to kernels and memsets
std::atomic<void (*)(const char*, CUstream)> on_call{nullptr};

// Before the call does anything, or after all: a test may hold it up here.
void called(const char* call, CUstream stream) {
    if (auto seen = on_call.load()) seen(call, stream);
}

// Never given out twice, unlike the system's.
uint64_t thread_id() {
    static std::atomic<uint64_t> next{1};
    thread_local uint64_t mine = next++;
    return mine;
}

Stream* stream_of(CUstream handle, bool threaded) {
    if (handle == nullptr) handle = threaded ? kThreadStream : kLegacyStream;
    Engine& engine = Engine::get();
    Context& context = current_context();
    if (handle == kLegacyStream) return &context.legacy;
    if (handle == kThreadStream) {
        Stream*& mine = thread_streams[&context];
        if (mine == nullptr) {
            mine = new Stream;
            mine->context = &context;
            engine.streams.push_back(mine);
        }
        return mine;
    }
    return reinterpret_cast<Stream*>(handle);
}

// A stream goes, what it holds stays until it is done.
void retire(Stream* stream) {
    auto& all = Engine::get().streams;
    auto& orphans = Engine::get().orphans;
    std::erase_if(orphans, [](const Stream& one) { return one.last == nullptr || one.last->done; });
    orphans.push_back(*stream);
    all.erase(std::find(all.begin(), all.end(), stream));
}

ThreadStreams::~ThreadStreams() {
    Hold hold = held();
    for (auto& [context, stream] : *this) {
        retire(stream);
        delete stream;
    }
}

void invalidate_all() {
    for (Capture* capture : captures) capture->invalid = true;
}

}  // namespace

Hold standin::held() { return Hold(Engine::get().lock); }

CUresult standin::unsafe() {
    if (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
    for (Capture* capture : captures)
        if (capture->mode == 0 || (capture->mode == 1 && capture->thread == thread_id())) {
            capture->invalid = true;
            return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    return CUDA_SUCCESS;
}

namespace {

// The legacy stream would have to wait for a blocking stream that captures.
CUresult implicit(const Stream& stream) {
    if (!stream.legacy) return CUDA_SUCCESS;
    for (Stream* other : Engine::get().streams)
        if (other->blocking && other->context == stream.context && other->capture != nullptr) {
            invalidate_all();
            return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
    return CUDA_SUCCESS;
}

// Whose events its streams may record.
Context& owner_of(Context& context) { return context.green ? primaries[context.device] : context; }

bool is_lane(const Stream& stream) { return stream.context->green || stream.masked; }

// Work on a stream, or a node of the graph that it captures.
CUresult put(Stream& stream, const Node& what) {
    if (CUresult status = implicit(stream)) return status;
    if (stream.capture != nullptr) {
        if (stream.capture->invalid) return kInvalidated;
        Node* node = stream.capture->graph->add(what.type, stream.capture_after);
        std::vector<Node*> after = node->after;
        *node = what;
        node->after = after;
        for (size_t index = 0; index < node->kernel.values.size(); ++index)
            node->kernel.pointers[index] = &node->kernel.values[index];
        if (nodes_have_contexts && node->type == kNodeKernel && node->kernel.context == nullptr)
            node->kernel.context = stream.context;
        stream.capture_after = {node};
        return CUDA_SUCCESS;
    }
    Engine::get().submit(stream, work_of(what, mask_of(stream)));
    return CUDA_SUCCESS;
}

CUresult launch_kernel(CUfunction f, const unsigned grid[3], const unsigned block[3],
                       unsigned shared, CUstream handle, void* params, bool threaded) {
    if (f == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    Hold hold = held();
    Node node;
    node.type = kNodeKernel;
    KernelNodeParams shape{};
    std::copy(grid, grid + 3, shape.grid);
    std::copy(block, block + 3, shape.block);
    shape.sharedMemBytes = shared;
    shape.kernelParams = static_cast<void**>(params);
    node.kernel = make_kernel(shape, f);
    Stream& stream = *stream_of(handle, threaded);
    if (shared > kMostShared) return CUDA_ERROR_INVALID_VALUE;
    if (is_lane(stream) && refusal != CUDA_SUCCESS) return refusal;
    // Shared memory stands for a kernel that needs a large part of the device.
    unsigned lanes_units = 8 * static_cast<unsigned>(__builtin_popcountll(mask_of(stream).bits[0]));
    if (is_lane(stream) && shared > lanes_units)
        return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
    return put(stream, node);
}

CUresult memset32(CUdeviceptr target, unsigned value, size_t count, CUstream handle, bool threaded) {
    Hold hold = held();
    Node node;
    node.type = kNodeMemset;
    node.memset = {target, 0, value, 4, count, 1, nullptr};
    Stream& stream = *stream_of(handle, threaded);
    if (is_lane(stream) && refusal != CUDA_SUCCESS) return refusal;
    return put(stream, node);
}

CUresult copy(void* target, const void* source, size_t bytes, CUstream handle, bool threaded,
              bool wait) {
    called("copy", handle);
    Hold hold = held();
    Stream& stream = *stream_of(handle, threaded);
    if (wait)
        if (CUresult status = unsafe()) return status;
    Node node;
    node.type = kNodeMemcpy;
    uint64_t words[3] = {reinterpret_cast<uint64_t>(target), reinterpret_cast<uint64_t>(source),
                         bytes};
    std::memcpy(node.memcpy.copy3d, words, sizeof words);
    CUresult status = put(stream, node);
    if (status == CUDA_SUCCESS && wait) Engine::get().wait(hold, stream.last);
    hold.unlock();
    called("copied", handle);
    return status;
}

CUresult wait_event(CUstream handle, CUevent event_handle, bool threaded) {
    called("wait_event", handle);
    Hold hold = held();
    Stream& stream = *stream_of(handle, threaded);
    auto& event = *reinterpret_cast<Event*>(event_handle);
    if (CUresult status = implicit(stream)) return status;
    if (event.capture != nullptr) {
        if (stream.capture != nullptr && stream.capture != event.capture) return kIsolation;
        if (stream.legacy) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        stream.capture = event.capture;
        for (Node* node : event.capture_after) stream.capture_after.push_back(node);
        return CUDA_SUCCESS;
    }
    if (stream.capture != nullptr) {
        stream.capture->invalid = true;
        return kIsolation;
    }
    Engine::get().submit(stream, nullptr, {event.work});
    return CUDA_SUCCESS;
}

CUresult record_event(CUevent event_handle, CUstream handle, bool threaded) {
    called("record", handle);
    Hold hold = held();
    Stream& stream = *stream_of(handle, threaded);
    auto& event = *reinterpret_cast<Event*>(event_handle);
    if (event.context != &owner_of(*stream.context)) return CUDA_ERROR_INVALID_HANDLE;
    if (CUresult status = implicit(stream)) return status;
    event = Event{event.context, {}, {}, {}};
    if (stream.capture != nullptr) {
        event.capture = stream.capture;
        event.capture_after = stream.capture_after;
    } else {
        event.work = Engine::get().submit(stream, nullptr);
    }
    return CUDA_SUCCESS;
}

CUresult wait_stream(CUstream handle, bool threaded) {
    Hold hold = held();
    if (CUresult status = unsafe()) return status;
    Stream& stream = *stream_of(handle, threaded);
    if (CUresult status = implicit(stream)) return status;
    if (stream.legacy) Engine::get().submit(stream, nullptr);
    Engine::get().wait(hold, stream.last);
    hold.unlock();
    called("waited", handle);
    return CUDA_SUCCESS;
}

CUresult query_stream(CUstream handle, bool threaded) {
    called("query", handle);
    Hold hold = held();
    if (CUresult status = unsafe()) return status;
    Stream& stream = *stream_of(handle, threaded);
    if (CUresult status = implicit(stream)) return status;
    bool done = stream.last == nullptr || stream.last->done;
    return done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult begin_capture(CUstream handle, int mode, bool threaded) {
    Hold hold = held();
    Stream& stream = *stream_of(handle, threaded);
    if (stream.legacy || stream.capture != nullptr) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    stream.capture = std::make_shared<Capture>();
    *stream.capture = {new Graph, &stream, mode, thread_id(), false};
    captures.insert(stream.capture.get());
    stream.capture_after.clear();
    return CUDA_SUCCESS;
}

CUresult end_capture(CUstream handle, void* graph_out, bool threaded) {
    Hold hold = held();
    Stream& stream = *stream_of(handle, threaded);
    std::shared_ptr<Capture> capture = stream.capture;
    if (capture == nullptr) return CUDA_ERROR_INVALID_VALUE;
    if (capture->origin != &stream) return kUnmatched;
    std::set<Node*> reached;
    std::vector<Node*> open = stream.capture_after;
    while (!open.empty()) {
        Node* node = open.back();
        open.pop_back();
        if (reached.insert(node).second) open.insert(open.end(), node->after.begin(), node->after.end());
    }
    bool joined = reached.size() == capture->graph->nodes.size();
    for (Stream* other : Engine::get().streams)
        if (other->capture == capture) {
            other->capture = nullptr;
            other->capture_after.clear();
        }
    captures.erase(capture.get());
    *static_cast<Graph**>(graph_out) = nullptr;
    if (capture->invalid || !joined) {
        delete capture->graph;
        return capture->invalid ? kInvalidated : kUnjoined;
    }
    *static_cast<Graph**>(graph_out) = capture->graph;
    return CUDA_SUCCESS;
}

CUresult is_capturing(CUstream handle, int* status_out, bool threaded) {
    Hold hold = held();
    Stream& stream = *stream_of(handle, threaded);
    if (stream.legacy)
        for (Stream* other : Engine::get().streams)
            if (other->blocking && other->context == stream.context && other->capture != nullptr)
                return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    *status_out = stream.capture == nullptr ? 0 : stream.capture->invalid ? 2 : 1;
    return CUDA_SUCCESS;
}

CUresult host_function(CUstream handle, void* function, void* data, bool threaded) {
    Hold hold = held();
    Node node;
    node.type = kNodeHost;
    node.host = reinterpret_cast<void (*)(void*)>(function);
    node.host_data = data;
    return put(*stream_of(handle, threaded), node);
}

CUresult launch_graph(CUgraphExec exec, CUstream handle, bool threaded) {
    Hold hold = held();
    Stream& stream = *stream_of(handle, threaded);
    if (CUresult status = implicit(stream)) return status;
    if (stream.capture != nullptr) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    watch_launch(exec, handle);
    return launch(*reinterpret_cast<Exec*>(exec), stream);
}

}  // namespace

// Tests make their kernels with this, and choose how the device behaves.
extern "C" __attribute__((visibility("default"))) CUfunction standin_function(
    const char* name, void (*run)(const uint64_t*), int arguments, int library) {
    return reinterpret_cast<CUfunction>(new Function{name, run, arguments, library != 0});
}
extern "C" __attribute__((visibility("default"))) void standin_behave(unsigned seed, int lazy) {
    Hold hold = held();
    Engine::get().random.seed(seed + 1);
    Engine::get().lazy = lazy != 0;
}
extern "C" __attribute__((visibility("default"))) void standin_refuse(CUresult status) {
    refusal = status;
}
extern "C" __attribute__((visibility("default"))) void standin_calls(
    void (*seen)(const char* call, CUstream stream)) {
    on_call = seen;
}

API cuStreamCreate(CUstream* handle, unsigned flags) {
    Hold hold = held();
    auto stream = new Stream;
    stream->context = &current_context();
    stream->blocking = (flags & CU_STREAM_NON_BLOCKING) == 0;
    Engine::get().streams.push_back(stream);
    *handle = reinterpret_cast<CUstream>(stream);
    return CUDA_SUCCESS;
}
API cuStreamCreateWithPriority(CUstream* handle, unsigned flags, int priority) {
    CUresult status = cuStreamCreate(handle, flags);
    reinterpret_cast<Stream*>(*handle)->priority = priority;
    return status;
}
API cuStreamDestroy_v2(CUstream handle) {
    Hold hold = held();
    auto stream = reinterpret_cast<Stream*>(handle);
    retire(stream);
    delete stream;
    return CUDA_SUCCESS;
}
API cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return CUDA_SUCCESS;
}
API cuStreamGetFlags(CUstream handle, unsigned* flags) {
    *flags = reinterpret_cast<Stream*>(handle)->blocking ? 0 : CU_STREAM_NON_BLOCKING;
    return CUDA_SUCCESS;
}
API cuStreamGetCtx(CUstream handle, CUcontext* context) {
    *context = reinterpret_cast<CUcontext>(reinterpret_cast<Stream*>(handle)->context);
    return CUDA_SUCCESS;
}
API cuThreadExchangeStreamCaptureMode(int* mode) {
    std::swap(*mode, thread_mode);
    return CUDA_SUCCESS;
}
API cuEventCreate(CUevent* event, unsigned) {
    *event = reinterpret_cast<CUevent>(new Event{&current_context(), {}, {}, {}});
    return CUDA_SUCCESS;
}
API cuEventDestroy_v2(CUevent event) {
    Hold hold = held();
    delete reinterpret_cast<Event*>(event);
    return CUDA_SUCCESS;
}
// Whoever asks for an event that a capture has recorded breaks that capture, in any mode.
static CUresult captured(CUevent event) {
    auto& capture = reinterpret_cast<Event*>(event)->capture;
    if (capture == nullptr) return CUDA_SUCCESS;
    capture->invalid = true;
    return kCapturedEvent;
}
API cuEventQuery(CUevent event) {
    Hold hold = held();
    if (CUresult status = unsafe()) return status;
    if (CUresult status = captured(event)) return status;
    auto& work = reinterpret_cast<Event*>(event)->work;
    if (work == nullptr || work->done) return CUDA_SUCCESS;
    Engine::get().nudge();
    return CUDA_ERROR_NOT_READY;
}
API cuEventSynchronize(CUevent event) {
    Hold hold = held();
    if (CUresult status = unsafe()) return status;
    if (CUresult status = captured(event)) return status;
    WorkPtr work = reinterpret_cast<Event*>(event)->work;
    Engine::get().wait(hold, work);
    return CUDA_SUCCESS;
}
API cuEventElapsedTime(float* ms, CUevent from, CUevent to) {
    Hold hold = held();
    auto& first = reinterpret_cast<Event*>(from)->work;
    auto& last = reinterpret_cast<Event*>(to)->work;
    if (first == nullptr || last == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (!first->done || !last->done) return CUDA_ERROR_NOT_READY;
    *ms = static_cast<float>((last->ended_ns - first->ended_ns) / 1e6);
    return CUDA_SUCCESS;
}

// Both meanings of the default stream.
#define BOTH(make) make(, false) make(_ptsz, true)
#define STREAM_CALLS(suffix, threaded)                                                            \
    API cuLaunchKernel##suffix(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx,  \
                               unsigned by, unsigned bz, unsigned shared, CUstream stream,        \
                               void* params, void*) {                                             \
        unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};                                 \
        return launch_kernel(f, grid, block, shared, stream, params, threaded);                   \
    }                                                                                             \
    API cuLaunchCooperativeKernel##suffix(CUfunction f, unsigned gx, unsigned gy, unsigned gz,    \
                                          unsigned bx, unsigned by, unsigned bz, unsigned shared, \
                                          CUstream stream, void* params) {                        \
        unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};                                 \
        return launch_kernel(f, grid, block, shared, stream, params, threaded);                   \
    }                                                                                             \
    API cuLaunchKernelEx##suffix(const CUlaunchConfig* config, CUfunction f, void* params,        \
                                 void*) {                                                         \
        return launch_kernel(f, config->grid, config->block, config->sharedMemBytes,              \
                             config->hStream, params, threaded);                                  \
    }                                                                                             \
    API cuStreamWaitEvent##suffix(CUstream stream, CUevent event, unsigned) {                     \
        return wait_event(stream, event, threaded);                                               \
    }                                                                                             \
    API cuEventRecord##suffix(CUevent event, CUstream stream) {                                   \
        return record_event(event, stream, threaded);                                             \
    }                                                                                             \
    API cuStreamSynchronize##suffix(CUstream stream) { return wait_stream(stream, threaded); }    \
    API cuStreamQuery##suffix(CUstream stream) { return query_stream(stream, threaded); }         \
    API cuStreamIsCapturing##suffix(CUstream stream, int* status) {                               \
        return is_capturing(stream, status, threaded);                                            \
    }                                                                                             \
    API cuStreamBeginCapture_v2##suffix(CUstream stream, int mode) {                              \
        return begin_capture(stream, mode, threaded);                                             \
    }                                                                                             \
    API cuStreamEndCapture##suffix(CUstream stream, void* graph) {                                \
        return end_capture(stream, graph, threaded);                                              \
    }                                                                                             \
    API cuLaunchHostFunc##suffix(CUstream stream, void* function, void* data) {                   \
        return host_function(stream, function, data, threaded);                                   \
    }                                                                                             \
    API cuMemsetD32Async##suffix(CUdeviceptr target, unsigned value, size_t count,                \
                                 CUstream stream) {                                               \
        return memset32(target, value, count, stream, threaded);                                  \
    }                                                                                             \
    API cuMemcpyDtoDAsync_v2##suffix(CUdeviceptr target, CUdeviceptr source, size_t bytes,        \
                                     CUstream stream) {                                           \
        return copy(reinterpret_cast<void*>(target), reinterpret_cast<void*>(source), bytes,      \
                    stream, threaded, false);                                                     \
    }                                                                                             \
    API cuMemcpyDtoHAsync_v2##suffix(void* target, CUdeviceptr source, size_t bytes,              \
                                     CUstream stream) {                                           \
        return copy(target, reinterpret_cast<void*>(source), bytes, stream, threaded, true);      \
    }                                                                                             \
    API cuGraphLaunch##suffix(CUgraphExec exec, CUstream stream) {                                \
        return launch_graph(exec, stream, threaded);                                              \
    }
BOTH(STREAM_CALLS)

API cuMemcpyDtoH_v2(void* target, CUdeviceptr source, size_t bytes) {
    return copy(target, reinterpret_cast<void*>(source), bytes, nullptr, false, true);
}
API cuMemcpyDtoH_v2_ptds(void* target, CUdeviceptr source, size_t bytes) {
    return copy(target, reinterpret_cast<void*>(source), bytes, nullptr, true, true);
}
API cuMemsetD32_v2(CUdeviceptr target, unsigned value, size_t count) {
    return memset32(target, value, count, nullptr, false);
}
API cuMemsetD32_v2_ptds(CUdeviceptr target, unsigned value, size_t count) {
    return memset32(target, value, count, nullptr, true);
}

// Interfaces that are newer than hooks.def.
API cuMemcpyWithAttributesAsync(CUdeviceptr target, CUdeviceptr source, size_t bytes, void*,
                                CUstream stream) {
    return copy(reinterpret_cast<void*>(target), reinterpret_cast<void*>(source), bytes, stream,
                false, false);
}
// Many arguments: some of them on the stack.
API cuLeapAsync(CUdeviceptr target, uint64_t a, uint64_t b, double half, uint64_t c, uint64_t d,
                uint64_t e, uint64_t f, uint64_t g, CUstream stream) {
    uint64_t* sum = reinterpret_cast<uint64_t*>(target);
    auto words = new uint64_t(a + b + c + d + e + f + g + static_cast<uint64_t>(2 * half) + *sum);
    return copy(sum, words, sizeof *words, stream, false, false);
}
API cuLaunchHostFunc_v2(CUstream stream, void* function, void* data, unsigned sync_mode) {
    last_sync_mode = static_cast<int>(sync_mode);
    return host_function(stream, function, data, false);
}
extern "C" __attribute__((visibility("default"))) int standin_sync_mode() { return last_sync_mode; }

// Takes its place in the default streams of both contexts, whichever is current.
API cuMemcpyPeer(CUdeviceptr target, CUcontext target_context, CUdeviceptr source,
                 CUcontext source_context, size_t bytes) {
    Hold hold = held();
    if (CUresult status = unsafe()) return status;
    Stream& there = reinterpret_cast<Context*>(source_context)->legacy;
    Stream& here = reinterpret_cast<Context*>(target_context)->legacy;
    for (Stream* stream : {&there, &here})
        if (CUresult status = implicit(*stream)) return status;
    WorkPtr before = Engine::get().submit(there, nullptr);
    WorkPtr done = Engine::get().submit(
        here, [=] { std::memcpy(reinterpret_cast<void*>(target), reinterpret_cast<void*>(source), bytes); },
        {before});
    Engine::get().submit(there, nullptr, {done});
    Engine::get().wait(hold, done);
    return CUDA_SUCCESS;
}
// All work of the context so far.
API cuCtxRecordEvent(CUcontext context, CUevent event) {
    Hold hold = held();
    auto& recorded = *reinterpret_cast<Event*>(event);
    if (recorded.context != reinterpret_cast<Context*>(context)) return CUDA_ERROR_INVALID_HANDLE;
    recorded = Event{recorded.context, {}, {}, {}};
    recorded.work = Engine::get().add(nullptr, work_of_all(*recorded.context));
    return CUDA_SUCCESS;
}
