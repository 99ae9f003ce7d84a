// A stand-in for libamdhip64 (and librocm_smi64): HIP's interface over a modelled GPU.
//
// When a kernel runs is known when it is launched: it begins when its stream is free and what that
// waits for has ended, and takes as long as its table says for the units of its mask. So nothing
// runs in the background; only who waits sleeps, until the clock is there. What docs/amd.md
// says of HIP is so here, the inconvenient parts above all: a kernel node keeps pointers to the
// caller's arguments (ROCm 5.2), copies of a capture cannot be read back, and a graph's branches
// leave the mask.
#include "../hip/abi.h"
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kUnits = 104, kEngines = 8;  // as of an MI210
constexpr const char* kPlace = "0000:43:00.0";
constexpr uint64_t kPlaceNumber = 0x4300, kMemory = uint64_t{64} << 30;
enum Status { kSuccess = 0, kInvalidValue = 1, kNotCapturing = 901, kCapturing = 900 };
enum NodeType { kKernel = 1, kMemset = 3, kEmpty = 6, kMemcpy1D = 9 };  // as ROCm 5.2 counts

// What a test plants.
enum Fault { kNone, kMaskOrder, kLostWait, kMaskRefused, kMaskIgnored, kFailingLaunch, kNewerCount };
std::atomic<int> fault{kNone};

std::mutex lock;
std::atomic<int64_t> alive[4];  // streams, events, graphs, executables
enum Kind { kStream, kEvent, kGraph, kExec };

// --- Time ------------------------------------------------------------------------------------
//
// A busy host must not make the GPU slower, nor one worker's thread later than another's. So threads
// that drive workers may take turns: each has a time of its own, only the one with the least runs,
// and the clock is the least of them. It moves when they wait or look at it, by as much as that
// would take, and not while the host does something else. Without such threads it is the host's.

int64_t host_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

constexpr int64_t kLookNs = 1000;  // what it takes to look at the clock
std::mutex turns;
std::condition_variable turned;
std::map<int64_t, int64_t> driving;  // threads by number: their times
int64_t joined = 0;
int64_t ahead_ns = 0;  // of the host's clock, while nobody drives
thread_local int64_t number = 0;

int64_t clock_now() {  // with turns held
    if (driving.empty()) return host_ns() + ahead_ns;
    int64_t least = INT64_MAX;
    for (auto& [who, at_ns] : driving) least = std::min(least, at_ns);
    return least;
}

// Let this thread's time be no less than this, and wait for its turn.
int64_t take_turn(std::unique_lock<std::mutex>& hold, int64_t at_ns) {
    int64_t& mine = driving[number];
    mine = std::max(mine, at_ns);
    turned.notify_all();
    turned.wait(hold, [&] {
        for (auto& [who, other_ns] : driving)
            if (std::pair{other_ns, who} < std::pair{mine, number}) return false;
        return true;
    });
    return mine;
}

int64_t now_ns() {
    std::unique_lock hold(turns);
    return number == 0 ? clock_now() : driving[number];
}

void sleep_until(int64_t at_ns) {
    std::unique_lock hold(turns);
    if (number != 0) {
        take_turn(hold, at_ns);
        return;
    }
    for (int64_t now; (now = clock_now()) < at_ns;)
        turned.wait_for(hold, std::chrono::nanoseconds(driving.empty() ? at_ns - now : 1000000));
}

// --- What is seen of it: a line for every kernel ---------------------------------------------

struct Line {
    int64_t who, stream, begin_ns, end_ns, units, engines;
};
struct Log {
    std::atomic<int64_t> lines;
    int64_t room;
    Line line[];
};
std::atomic<Log*> watched{nullptr};
std::atomic<int64_t> busy_uj{0};
int64_t began_ns = now_ns();

using Mask = std::vector<uint32_t>;
Mask everything() {
    Mask mask((kUnits + 31) / 32, 0);
    for (int bit = 0; bit < kUnits; ++bit) mask[bit / 32] |= 1u << bit % 32;
    return mask;
}

// The hardware's side of a mask: how many units, and in which shader engines.
void place(const Mask& mask, int64_t& units, int64_t& engines) {
    units = engines = 0;
    for (int bit = 0; bit < kUnits; ++bit) {
        if (!(mask[bit / 32] >> bit % 32 & 1)) continue;
        int engine = fault == kMaskOrder ? bit / (kUnits / kEngines) : bit % kEngines;
        engines |= int64_t{1} << engine;
        ++units;
    }
}

// --- Streams and events ----------------------------------------------------------------------

struct Function {
    const char* name;
};

struct Node {
    int type;
    hipKernelNodeParams kernel{};
    hipMemsetParams memset{};
    std::vector<Node*> after{}, followers{};
};
struct Graph {
    std::vector<std::unique_ptr<Node>> nodes;
    Graph() { ++alive[kGraph]; }
    ~Graph() { --alive[kGraph]; }
    Node* add(int type, const std::vector<Node*>& after) {
        nodes.push_back(std::make_unique<Node>());
        nodes.back()->type = type;
        for (Node* one : after) {
            nodes.back()->after.push_back(one);
            one->followers.push_back(nodes.back().get());
        }
        return nodes.back().get();
    }
};

struct Event {
    int64_t at_ns = 0;  // when what was before it on its stream has ended
    Graph* capture = nullptr;
    std::vector<Node*> last;
};

struct Stream {
    Mask mask = everything();
    int64_t free_ns = 0;
    Graph* capture = nullptr;
    std::vector<Node*> last;  // of the capture
};
std::set<Stream*> streams;

// A kernel of the stand-in takes two arguments: its name in the log, and a table of nanoseconds by
// the number of units.
void run_kernel(Stream& stream, const hipKernelNodeParams& params, const Mask& mask) {
    int64_t who, *table, units, engines;
    std::memcpy(&who, params.kernelParams[0], sizeof who);
    std::memcpy(&table, params.kernelParams[1], sizeof table);
    place(fault == kMaskIgnored ? everything() : mask, units, engines);
    int64_t begin = std::max(stream.free_ns, now_ns());
    stream.free_ns = begin + table[units];
    busy_uj += table[units] * units / 500;  // 2 W a unit
    Log* log = watched;
    if (log == nullptr) return;
    int64_t at = log->lines.fetch_add(1);
    if (at < log->room)
        log->line[at] = {who, reinterpret_cast<int64_t>(&stream), begin, stream.free_ns, units, engines};
}

struct Exec {
    std::vector<Node> nodes;       // in an order that respects their edges
    std::vector<bool> in_the_lane; // on the first list, as HIP makes them: the others leave it
    Exec() { ++alive[kExec]; }
    ~Exec() { --alive[kExec]; }
};

void visit(Node* node, std::set<Node*>& seen, std::vector<Node*>& list,
           std::vector<std::vector<Node*>>& lists) {
    seen.insert(node);
    list.push_back(node);
    for (Node* next : node->followers) {
        if (!seen.count(next)) {
            visit(next, seen, list, lists);
            continue;
        }
        for (auto& other : lists)
            if (!other.empty() && other[0] == next) {
                other.insert(other.begin(), list.begin(), list.end());
                list.clear();
            }
    }
    if (!list.empty()) lists.push_back(list);
    list.clear();
}

Exec* instantiate(Graph& graph) {
    std::set<Node*> seen;
    std::vector<Node*> list;
    std::vector<std::vector<Node*>> lists;
    for (auto& node : graph.nodes)
        if (!seen.count(node.get())) visit(node.get(), seen, list, lists);
    std::set<Node*> first(lists[0].begin(), lists[0].end());
    auto* exec = new Exec;
    std::set<Node*> placed;
    while (placed.size() < graph.nodes.size())
        for (auto& node : graph.nodes) {
            bool ready = !placed.count(node.get());
            for (Node* before : node->after) ready = ready && placed.count(before);
            if (!ready) continue;
            placed.insert(node.get());
            exec->nodes.push_back(*node);
            exec->in_the_lane.push_back(first.count(node.get()) > 0);
        }
    return exec;
}

Stream& stream_of(hipStream_t handle) { return *reinterpret_cast<Stream*>(handle); }
Event& event_of(hipEvent_t handle) { return *reinterpret_cast<Event*>(handle); }
Graph& graph_of(hipGraph_t handle) { return *reinterpret_cast<Graph*>(handle); }

thread_local int capture_mode = 0;
std::set<Stream*> capturing;  // in the mode that forbids everybody's waits

int make_stream(hipStream_t* out, Mask mask) {
    std::lock_guard hold(lock);
    auto* stream = new Stream;
    stream->mask = std::move(mask);
    streams.insert(stream);
    ++alive[kStream];
    *out = reinterpret_cast<hipStream_t>(stream);
    return kSuccess;
}

int add(hipGraphNode_t* out, hipGraph_t graph, const hipGraphNode_t* after, size_t count, Node made) {
    std::lock_guard hold(lock);
    std::vector<Node*> before;
    for (size_t index = 0; index < count; ++index)
        before.push_back(reinterpret_cast<Node*>(after[index]));
    Node* node = graph_of(graph).add(made.type, before);
    node->kernel = made.kernel;
    node->memset = made.memset;
    *out = reinterpret_cast<hipGraphNode_t>(node);
    return kSuccess;
}

int captured(Stream& stream, Node made) {
    Node* node = stream.capture->add(made.type, stream.last);
    node->kernel = made.kernel;
    node->memset = made.memset;
    stream.last = {node};
    return kSuccess;
}

}  // namespace

// --- For tests -------------------------------------------------------------------------------

API void standin_hip_plant(int what) { fault = what; }
API int64_t standin_hip_alive(int kind) { return alive[kind]; }
API void standin_hip_watch(int64_t* words) { watched = reinterpret_cast<Log*>(words); }
API void* standin_hip_function(const char* name) { return new Function{name}; }

// A number for a thread that will take turns: it counts from now on, so all of a run's threads are
// there before the first of them begins.
API int64_t standin_hip_expect() {
    std::lock_guard hold(turns);
    int64_t now = clock_now();
    driving[++joined] = now;
    return joined;
}
API void standin_hip_begin(int64_t mine) { number = mine; }
API void standin_hip_leave(int64_t mine) {
    std::lock_guard hold(turns);
    int64_t last = driving[mine];
    driving.erase(mine);
    if (driving.empty()) ahead_ns = last - host_ns();
    if (number == mine) number = 0;
    turned.notify_all();
}
API int64_t standin_hip_now() { return now_ns(); }
// In place of the C library's, for the loop.
API int standin_clock_gettime(int, timespec* now) {
    std::unique_lock hold(turns);
    int64_t at_ns = number == 0 ? clock_now() : take_turn(hold, driving[number] + kLookNs);
    *now = {at_ns / 1000000000, at_ns % 1000000000};
    return 0;
}
API int standin_usleep(unsigned micros) {
    sleep_until(now_ns() + int64_t{1000} * micros);
    return 0;
}
API int standin_poll(void*, uint64_t, int milliseconds) {  // nobody rings here
    sleep_until(now_ns() + int64_t{1000000} * milliseconds);
    return 0;
}

// --- HIP -------------------------------------------------------------------------------------

API int hipInit(unsigned) { return kSuccess; }
API int hipRuntimeGetVersion(int* version) { *version = 50221153; return kSuccess; }
API const char* hipGetErrorName(int status) { return status ? "hipErrorOfTheStandIn" : "hipSuccess"; }
API const char* hipGetErrorString(int status) { return status ? "as the test wants" : "no error"; }
API int hipGetDeviceCount(int* count) { *count = 1; return kSuccess; }
API int hipSetDevice(int device) { return device == 0 ? kSuccess : kInvalidValue; }
API int hipDeviceGetName(char* name, int length, int) {
    snprintf(name, length, "AMD Instinct Stand-in");
    return kSuccess;
}
API int hipDeviceGetUuid(hipUUID* uuid, int) {
    std::memcpy(uuid->bytes, "eclip's stand-in", 16);
    return kSuccess;
}
API int hipDeviceGetPCIBusId(char* place, int length, int) {
    snprintf(place, length, "%s", kPlace);
    return kSuccess;
}
API int hipDeviceTotalMem(size_t* bytes, int) { *bytes = kMemory; return kSuccess; }
API int hipMemGetInfo(size_t* free_bytes, size_t* total) {
    *total = kMemory;
    *free_bytes = kMemory - static_cast<size_t>(alive[kExec]) * 4096;
    return kSuccess;
}
API const char* hipKernelNameRef(void* function) { return static_cast<Function*>(function)->name; }
API const char* hipKernelNameRefByPtr(const void*, hipStream_t) { return nullptr; }

API int hipExtStreamCreateWithCUMask(hipStream_t* out, uint32_t words, const uint32_t* mask) {
    if (words == 0) return kInvalidValue;
    Mask wanted(mask, mask + words), all = everything();
    wanted.resize(all.size(), 0);
    for (size_t index = 0; index < all.size(); ++index) wanted[index] &= all[index];
    return make_stream(out, fault == kMaskRefused ? all : wanted);
}
API int hipExtStreamGetCUMask(hipStream_t stream, uint32_t words, uint32_t* mask) {
    if (words < everything().size()) return kInvalidValue;
    std::lock_guard hold(lock);
    std::memcpy(mask, stream_of(stream).mask.data(), everything().size() * sizeof(uint32_t));
    return kSuccess;
}
API int hipStreamCreateWithFlags(hipStream_t* out, unsigned) { return make_stream(out, everything()); }
API int hipStreamDestroy(hipStream_t handle) {
    std::lock_guard hold(lock);
    if (!streams.erase(&stream_of(handle))) return kInvalidValue;
    delete &stream_of(handle);
    --alive[kStream];
    return kSuccess;
}
API int hipStreamSynchronize(hipStream_t handle) {
    std::unique_lock hold(lock);
    if (!capturing.empty() && capture_mode == 0) return kCapturing;
    int64_t until = stream_of(handle).free_ns;
    hold.unlock();
    sleep_until(until);
    return kSuccess;
}
API int hipStreamWaitEvent(hipStream_t handle, hipEvent_t event, unsigned) {
    std::lock_guard hold(lock);
    Stream& stream = stream_of(handle);
    if (Graph* graph = event_of(event).capture) {
        stream.capture = graph;
        stream.last.insert(stream.last.end(), event_of(event).last.begin(), event_of(event).last.end());
        return kSuccess;
    }
    if (fault != kLostWait) stream.free_ns = std::max(stream.free_ns, event_of(event).at_ns);
    return kSuccess;
}
API int hipEventCreateWithFlags(hipEvent_t* out, unsigned) {
    ++alive[kEvent];
    *out = reinterpret_cast<hipEvent_t>(new Event);
    return kSuccess;
}
API int hipEventDestroy(hipEvent_t event) {
    --alive[kEvent];
    delete &event_of(event);
    return kSuccess;
}
API int hipEventRecord(hipEvent_t event, hipStream_t handle) {
    std::lock_guard hold(lock);
    Stream& stream = stream_of(handle);
    if (stream.capture != nullptr) {
        event_of(event).capture = stream.capture;
        event_of(event).last = stream.last;
        return kSuccess;
    }
    event_of(event).at_ns = stream.free_ns;
    return kSuccess;
}
API int hipEventSynchronize(hipEvent_t event) {
    std::unique_lock hold(lock);
    int64_t until = event_of(event).at_ns;
    hold.unlock();
    sleep_until(until);
    return kSuccess;
}
API int hipEventElapsedTime(float* milliseconds, hipEvent_t begin, hipEvent_t end) {
    std::lock_guard hold(lock);
    *milliseconds = static_cast<float>(event_of(end).at_ns - event_of(begin).at_ns) / 1e6f;
    return kSuccess;
}
API int hipThreadExchangeStreamCaptureMode(int* mode) {
    std::swap(*mode, capture_mode);
    return kSuccess;
}

API int hipStreamBeginCapture(hipStream_t stream, int mode) {
    std::lock_guard hold(lock);
    stream_of(stream).capture = new Graph;
    stream_of(stream).last.clear();
    if (mode == 0) capturing.insert(&stream_of(stream));
    return kSuccess;
}
API int hipStreamEndCapture(hipStream_t stream, hipGraph_t* out) {
    std::lock_guard hold(lock);
    Graph* graph = stream_of(stream).capture;
    if (graph == nullptr) return kNotCapturing;
    for (Stream* one : streams)
        if (one->capture == graph) {
            one->capture = nullptr;
            one->last.clear();
        }
    capturing.erase(&stream_of(stream));
    *out = reinterpret_cast<hipGraph_t>(graph);
    return kSuccess;
}
API int hipModuleLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                              unsigned by, unsigned bz, unsigned shared, hipStream_t handle,
                              void** arguments, void**) {
    std::lock_guard hold(lock);
    Stream& stream = stream_of(handle);
    Node node{kKernel};
    node.kernel = {{bx, by, bz}, nullptr, function, {gx, gy, gz}, arguments, shared};
    if (stream.capture != nullptr) return captured(stream, node);
    run_kernel(stream, node.kernel, stream.mask);
    return kSuccess;
}
API int hipMemsetAsync(void* target, int value, size_t bytes, hipStream_t handle) {
    std::lock_guard hold(lock);
    if (stream_of(handle).capture == nullptr) return kNotCapturing;
    Node node{kMemset};
    node.memset = {target, 1, 1, bytes, static_cast<unsigned>(value), bytes};
    return captured(stream_of(handle), node);
}
API int hipMemcpyAsync(void*, const void*, size_t, int, hipStream_t handle) {
    std::lock_guard hold(lock);
    if (stream_of(handle).capture == nullptr) return kNotCapturing;
    return captured(stream_of(handle), Node{kMemcpy1D});
}

API int hipGraphCreate(hipGraph_t* out, unsigned) {
    *out = reinterpret_cast<hipGraph_t>(new Graph);
    return kSuccess;
}
API int hipGraphDestroy(hipGraph_t graph) {
    delete &graph_of(graph);
    return kSuccess;
}
API int hipGraphGetNodes(hipGraph_t graph, hipGraphNode_t* out, size_t* count) {
    std::lock_guard hold(lock);
    size_t index = 0;
    for (auto& node : graph_of(graph).nodes)
        if (out != nullptr && index < *count) out[index++] = reinterpret_cast<hipGraphNode_t>(node.get());
    *count = graph_of(graph).nodes.size();
    return kSuccess;
}
API int hipGraphGetEdges(hipGraph_t graph, hipGraphNode_t* from, hipGraphNode_t* to, size_t* count) {
    std::lock_guard hold(lock);
    size_t edges = 0;
    for (auto& node : graph_of(graph).nodes)
        for (Node* before : node->after) {
            if (from != nullptr && edges < *count) {
                from[edges] = reinterpret_cast<hipGraphNode_t>(before);
                to[edges] = reinterpret_cast<hipGraphNode_t>(node.get());
            }
            ++edges;
        }
    *count = edges;
    return kSuccess;
}
API int hipGraphNodeGetType(hipGraphNode_t node, int* type) {
    *type = reinterpret_cast<Node*>(node)->type - (fault == kNewerCount);
    return kSuccess;
}
API int hipGraphKernelNodeGetParams(hipGraphNode_t node, hipKernelNodeParams* params) {
    *params = reinterpret_cast<Node*>(node)->kernel;
    return kSuccess;
}
API int hipGraphMemsetNodeGetParams(hipGraphNode_t node, hipMemsetParams* params) {
    *params = reinterpret_cast<Node*>(node)->memset;
    return kSuccess;
}
API int hipGraphAddKernelNode(hipGraphNode_t* out, hipGraph_t graph, const hipGraphNode_t* after,
                              size_t count, const hipKernelNodeParams* params) {
    Node node{kKernel};
    node.kernel = *params;
    return add(out, graph, after, count, node);
}
API int hipGraphAddMemsetNode(hipGraphNode_t* out, hipGraph_t graph, const hipGraphNode_t* after,
                              size_t count, const hipMemsetParams* params) {
    Node node{kMemset};
    node.memset = *params;
    return add(out, graph, after, count, node);
}
API int hipGraphAddEmptyNode(hipGraphNode_t* out, hipGraph_t graph, const hipGraphNode_t* after,
                             size_t count) {
    return add(out, graph, after, count, Node{kEmpty});
}
API int hipGraphInstantiateWithFlags(hipGraphExec_t* out, hipGraph_t graph, unsigned long long) {
    std::lock_guard hold(lock);
    if (graph_of(graph).nodes.empty()) return kInvalidValue;
    *out = reinterpret_cast<hipGraphExec_t>(instantiate(graph_of(graph)));
    return kSuccess;
}
API int hipGraphExecDestroy(hipGraphExec_t exec) {
    delete reinterpret_cast<Exec*>(exec);
    return kSuccess;
}
API int hipGraphLaunch(hipGraphExec_t handle, hipStream_t stream_handle) {
    if (fault == kFailingLaunch) return kInvalidValue;
    std::lock_guard hold(lock);
    Exec& exec = *reinterpret_cast<Exec*>(handle);
    Stream& stream = stream_of(stream_handle);
    for (size_t index = 0; index < exec.nodes.size(); ++index) {
        const Node& node = exec.nodes[index];
        if (node.type == kMemset)
            std::memset(node.memset.dst, static_cast<int>(node.memset.value), node.memset.width);
        if (node.type == kKernel)
            run_kernel(stream, node.kernel, exec.in_the_lane[index] ? stream.mask : everything());
    }
    return kSuccess;
}

// --- rocm-smi --------------------------------------------------------------------------------

API int rsmi_init(uint64_t) { return kSuccess; }
API int rsmi_shut_down() { return kSuccess; }
API int rsmi_num_monitor_devices(uint32_t* count) { *count = 1; return kSuccess; }
API int rsmi_dev_pci_id_get(uint32_t, uint64_t* place) { *place = kPlaceNumber; return kSuccess; }
API int rsmi_dev_energy_count_get(uint32_t, uint64_t* count, float* resolution_uj, uint64_t* at) {
    *resolution_uj = 1000;
    *count = static_cast<uint64_t>((now_ns() - began_ns) / 20 + busy_uj) / 1000;  // 50 W when idle
    *at = static_cast<uint64_t>(now_ns());
    return kSuccess;
}
API int rsmi_dev_power_ave_get(uint32_t, uint32_t, uint64_t* power_uw) {
    *power_uw = 50000000;
    return kSuccess;
}
