#include "giving.h"

#include <pthread.h>

#include <cstdlib>
#include <cstring>
#include <new>

#include "busy.h"
#include "events.h"
#include "identities.h"
#include "lines.h"
#include "pacing.h"
#include "seat.h"
#include "setup.h"

namespace eclip::giving {

std::atomic<int> state{kUnread};
std::atomic<int> capture_count{0};
std::shared_mutex quiet_lock;
thread_local bool inside = false;

namespace {

constexpr int kNoDevice = -1;
constexpr int kFunctions = 4096;

Promise promise;
double promised_floor = 0;
std::mutex setup_lock;
std::atomic<int> our_device{kNoDevice};  // none: that of the first launch
std::atomic<bool> paced{true};

// A service whose bound is no time of its own has no slack from the beginning; of the others none is
// promised either, since nobody knows how long a request of an unmodified program still needs.
int read_role() {
    const char* tier = secure_getenv("ECLIP_TIER");
    if (tier == nullptr || is_disabled()) return kOff;
    if (strcmp(tier, "service") == 0) promise.tier = ECLIP_SERVICE;
    else if (strcmp(tier, "background") == 0) promise.tier = ECLIP_BACKGROUND;
    else return kOff;
    if (const char* bound = secure_getenv("ECLIP_BOUND_NS")) promise.bound_ns = atoll(bound);
    if (const char* floor = secure_getenv("ECLIP_FLOOR")) promised_floor = atof(floor);
    if (const char* device = secure_getenv("ECLIP_GPU")) our_device = atoi(device);
    if (promise.tier == ECLIP_SERVICE) promise.none_ns = promise.bound_ns + 1;
    return kWaiting;
}

// In the child. It cannot use its parent's context; if there was none yet, it may join by itself.
void forked() {
    new (&setup_lock) std::mutex;  // threads that are not here may have held them
    new (&quiet_lock) std::shared_mutex;
    if (state.load() != kJoined) return;
    state.store(kOff);
    Seat::get().forked();
}

void at_exit() {
    end_service();
    state.store(kOff);
    Seat::get().leave();
}

// The row is claimed where the process first launches: that is where it begins to share a GPU.
bool join(CUdevice device) {
    std::lock_guard hold(setup_lock);
    if (state.load() != kWaiting) return state.load() == kJoined;
    unsigned char uuid[16] = {};
    auto ask = driver().cuDeviceGetUuid;
    std::string path;
    std::string wrong = "the driver does not say which GPU it is";
    if (ask != nullptr && ask(uuid, device) == CUDA_SUCCESS) {
        path = board_path(uuid);
        wrong = Seat::get().take(path, promise);
    }
    if (!wrong.empty()) {
        state.store(kOff);
        say("the board %s cannot be used: %s; nobody gives way to this process, nor does it to others",
            path.c_str(), wrong.c_str());
        return false;
    }
    our_device.store(device);
    if (promise.tier == ECLIP_SERVICE) begin_service(promise.bound_ns);
    else begin_background(promised_floor);
    atexit(at_exit);  // before the driver's own, which was there first
    state.store(kJoined);
    return true;
}

// What is current in the calling thread, if it is of our device and the process has its row.
CUcontext attend() {
    CUcontext current = nullptr;
    if (driver().cuCtxGetCurrent(&current) != CUDA_SUCCESS || current == nullptr) return nullptr;
    thread_local CUcontext known = nullptr;
    thread_local bool ours = false;
    bool joined = state.load(std::memory_order_acquire) == kJoined;
    if (joined && current == known) return ours ? current : nullptr;
    CUdevice device = kNoDevice;
    if (driver().cuCtxGetDevice(&device) != CUDA_SUCCESS) return nullptr;
    int wanted = our_device.load();
    if (!joined && (wanted == kNoDevice || wanted == device)) joined = join(device);
    if (!joined) return nullptr;
    known = current;
    ours = device == our_device.load();
    return ours ? current : nullptr;
}

// ----------------------------------------------------------------------------------------- lines

Line all_lines[kLines + 1];
std::atomic<int> used{0};

uint64_t mix(uint64_t value) {
    value = (value ^ value >> 32) * 0x9e3779b97f4a7c15ull;
    return value ^ value >> 29;
}

uint64_t this_thread() {
    static std::atomic<uint64_t> next{2};
    thread_local uint64_t number = next.fetch_add(2);  // no address, and none of the others
    return number;
}

uint64_t key_of(CUstream stream, Default meaning, CUcontext context) {
    if (stream == nullptr) stream = meaning == Default::thread ? kThreadStream : kLegacyStream;
    if (stream == kThreadStream) return mix(this_thread()) | 1;
    auto word = reinterpret_cast<uint64_t>(stream);
    return mix(stream == kLegacyStream ? mix(reinterpret_cast<uint64_t>(context)) : word) | 1;
}

void note_used(int index) {
    int seen = used.load();
    while (seen <= index && !used.compare_exchange_weak(seen, index + 1)) {
    }
}

int line_of(uint64_t key, bool make) {
    for (uint64_t step = 0; step < kLines; ++step) {
        int index = static_cast<int>((key / 2 + step) % kLines);
        uint64_t found = all_lines[index].key.load(std::memory_order_acquire);
        if (found == 0 && !make) return -1;
        if (found == 0 && all_lines[index].key.compare_exchange_strong(found, key)) {
            note_used(index);
            return index;
        }
        if (found == key) return index;
    }
    note_used(kSharedLine);
    return make ? kSharedLine : -1;
}

int meeting_of(CUstream stream, CUcontext context, int own) {
    unsigned flags = 0;
    bool apart = stream != nullptr && stream != kLegacyStream &&
                 driver().cuStreamGetFlags != nullptr &&
                 driver().cuStreamGetFlags(stream, &flags) == CUDA_SUCCESS &&
                 (flags & CU_STREAM_NON_BLOCKING) != 0;
    return apart ? own : line_of(key_of(kLegacyStream, Default::legacy, context), true);
}

// --------------------------------------------------------------------------------------- threads

Line& meeting_place(const Line& line) { return all_lines[line.meeting.load()]; }

// A thread that launches where only another has launched so far says so first and then looks whether
// that one is within a graph's parts, which says so first and then looks for others: one of them sees
// the other.
thread_local const Line* alone_at = nullptr;

void meet_others(Line& place) {
    if (alone_at == &place) return;
    uint64_t seen = place.thread.load(std::memory_order_relaxed), mine = this_thread();
    if (seen == mine || (seen == 0 && place.thread.compare_exchange_strong(seen, mine))) return;
    if (seen == mine) return;
    place.thread.store(kSeveralThreads);
    if (place.in_parts.load()) wait_while(place.in_parts);
}

// ------------------------------------------------------------------------------------------ NCCL

// One rank that waits keeps all others waiting, whose services wait with them.
void meet_function(CUfunction function) {
    static std::atomic<CUfunction> seen[kFunctions];
    if (function == nullptr) return;
    auto& slot = seen[mix(reinterpret_cast<uint64_t>(function)) % kFunctions];
    if (slot.load(std::memory_order_relaxed) == function) return;
    slot.store(function, std::memory_order_relaxed);
    if (strncasecmp(name_function(function).name, "nccl", 4) != 0) return;
    paced.store(false);
    say("this program launches kernels of NCCL: its ranks wait for each other, so no bound is "
        "promised, and it does not give way");
}

bool captures(CUstream stream, Default meaning) {
    return capture_count.load() != 0 && device::is_capturing(explicit_handle(stream, meaning));
}

// -------------------------------------------------------------------------------------- launches

void attend_to(CUstream stream, Default meaning, const Work& work) {
    if (inside) return;
    CUcontext context = attend();
    if (context == nullptr) return;
    if (work.kind == Work::kernel) meet_function(work.function);
    if (captures(stream, meaning)) return;
    Line& line = line_at(find_line(stream, meaning, context));
    if (promise.tier == ECLIP_SERVICE) {
        raise_busy(line);
        return;
    }
    meet_others(meeting_place(line));
    if (paced.load(std::memory_order_relaxed)) pace(line, stream, meaning, work);
}

// ---------------------------------------------------------------------------------------- events

EventNotes<Mark>& recorded() {
    static EventNotes<Mark>& only = *new EventNotes<Mark>;
    return only;
}

}  // namespace

Line& line_at(int index) { return all_lines[index]; }
int lines_used() { return used.load(); }

int find_line(CUstream stream, Default meaning, CUcontext context) {
    int index = line_of(key_of(stream, meaning, context), true);
    Line& line = all_lines[index];
    if (explicit_handle(stream, meaning) == kThreadStream || index == kSharedLine) {
        if (line.meeting.load(std::memory_order_relaxed) < 0)
            line.meeting.store(line_of(key_of(kLegacyStream, meaning, context), true));
        return index;
    }
    if (line.stream.load(std::memory_order_relaxed) != nullptr) return index;
    line.meeting.store(meeting_of(stream, context, index));
    line.context.store(context);
    line.stream.store(stream != nullptr ? stream : kLegacyStream);
    return index;
}

Promise promise_of_process() {
    read_state();
    Promise made = promise;
    if (made.tier == ECLIP_NOBODY) made.tier = ECLIP_PLAIN;
    return made;
}

bool read_state() {
    std::lock_guard hold(setup_lock);
    if (state.load() == kUnread) {
        int role = read_role();
        if (role != kOff) pthread_atfork(nullptr, nullptr, forked);
        state.store(role);
    }
    return state.load() != kOff;
}

void launch(CUstream stream, Default meaning) { attend_to(stream, meaning, {}); }

void launch_kernel(CUstream stream, Default meaning, CUfunction function, uint64_t blocks) {
    attend_to(stream, meaning, {Work::kernel, function, blocks});
}

void launch_graph(CUstream stream, Default meaning, double ns) {
    attend_to(stream, meaning, {Work::graph, nullptr, 0, ns});
}

void meet(CUstream stream, Default meaning) {
    if (inside || promise.tier != ECLIP_BACKGROUND || state.load() != kJoined) return;
    CUcontext context = attend();
    if (context == nullptr || captures(stream, meaning)) return;
    meet_others(meeting_place(line_at(find_line(stream, meaning, context))));
}

bool cuts_graphs() { return on() && promise.tier == ECLIP_BACKGROUND; }
double grain() { return static_cast<double>(wanted_grain()); }

Alone::Alone(CUstream stream, Default meaning) {
    if (inside || !cuts_graphs() || !paced.load()) return;
    CUcontext context = attend();
    if (context == nullptr || capture_count.load() != 0) return;
    int index = find_line(stream, meaning, context);
    Line& place = meeting_place(line_at(index));
    // Two kinds of thread meet there that cannot be told apart.
    if (index == kSharedLine || &place == &line_at(kSharedLine)) return;
    meet_others(place);
    place.in_parts.store(true);
    if (place.thread.load() == this_thread()) alone_at = line_ = &place;
    else place.in_parts.store(false);
}

Alone::~Alone() {
    if (line_ == nullptr) return;
    alone_at = nullptr;
    line_->in_parts.store(false);
}

void record(CUevent event, CUstream stream, Default meaning) {
    if (inside || promise.tier != ECLIP_SERVICE || state.load() != kJoined) return;
    CUcontext context = attend();
    if (context == nullptr) return;
    int line = find_line(stream, meaning, context);
    recorded().note(event, {line, line_at(line).launches.load(), 0});
}

void forget(CUevent event) { recorded().forget(event); }

Mark mark_stream(CUstream stream, Default meaning) {
    if (inside || promise.tier != ECLIP_SERVICE || state.load() != kJoined) return {};
    CUcontext context = attend();
    if (context == nullptr) return {};
    int line = line_of(key_of(stream, meaning, context), false);
    if (line < 0) return {};
    return {line, line_at(line).launches.load(), monotonic_ns()};
}

Mark mark_event(CUevent event) {
    if (inside || promise.tier != ECLIP_SERVICE || state.load() != kJoined) return {};
    return recorded().find(event).value_or(Mark{});
}

Mark mark_all() {
    if (inside || promise.tier != ECLIP_SERVICE || state.load() != kJoined) return {};
    return {kAllLines, static_cast<uint64_t>(read_word(Seat::get().mine().launched)),
            monotonic_ns()};
}

void waited(const Mark& mark) {
    if (mark.line == kAllLines) {
        for (int index = 0, count = lines_used(); index < count; ++index) {
            Line& line = line_at(index);
            uint64_t launches = line.launches.load();
            bool same = static_cast<uint64_t>(read_word(Seat::get().mine().launched)) == mark.launches;
            if (same) clear_busy(line, launches);
            else postpone_busy(line, mark.began_ns);
        }
    } else if (mark.line >= 0) {
        Line& line = line_at(mark.line);
        if (line.launches.load() == mark.launches) clear_busy(line, mark.launches);
        else postpone_busy(line, mark.began_ns);
    }
}

void destroy(CUstream stream) {
    if (inside || state.load() != kJoined || stream == nullptr) return;
    int index = line_of(key_of(stream, Default::legacy, nullptr), false);
    if (index < 0) return;
    Line& line = line_at(index);
    {
        std::lock_guard hold(quiet_lock);  // nobody asks it from here on
        line.stream.store(nullptr);
    }
    if (promise.tier == ECLIP_SERVICE) clear_busy(line, line.launches.load());
}

void end_contexts() {
    if (state.load() != kJoined) return;
    std::lock_guard hold(quiet_lock);
    for (int index = 0, count = lines_used(); index < count; ++index)
        line_at(index).stream.store(nullptr);
    forget_events();
}

void capture_begins() {
    std::lock_guard hold(quiet_lock);
    capture_count.fetch_add(1);
}

void capture_ended() { capture_count.fetch_sub(1); }

}  // namespace eclip::giving
