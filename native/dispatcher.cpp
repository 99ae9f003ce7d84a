#include "dispatcher.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <optional>
#include <utility>

#include "recording.h"

namespace eclip {

// In bindings.cpp, which only a preloaded library has.
__attribute__((weak)) void rebind_new_objects();

namespace {

constexpr int kStreamCache = 8;
constexpr int kNameCache = 256;
constexpr uint32_t kLearnEvery = 32;  // how often a lane is asked only to learn how they answer

struct StreamEntry {
    CUstream raw;
    Stream* stream;
    uint64_t epoch;
};
struct NameEntry {
    CUfunction function;
    uint64_t hash;
    uint64_t epoch;
};

// What a thread remembers. Its own default stream is a stream of its own.
struct ThreadState {
    StreamEntry streams[kStreamCache] = {};
    NameEntry names[kNameCache] = {};
    std::unique_ptr<Stream> own;
    Tracker tracker;
    Followers* followers = nullptr;
    bool marked = false;  // the thread's next launch begins a request
    int marked_worker = kUnplanned;
    ~ThreadState() {
        if (own && own->event != nullptr) driver().cuEventDestroy_v2(own->event);
        if (followers == nullptr) return;
        tracker.leave(*followers);
        if (own) own->tracker.leave(*followers);
    }
};

thread_local bool inside = false;

// On the heap: what is thread-local itself must be small, or a process that is running already
// cannot load the library. The pointer beside the owner is read without asking whether it was made.
ThreadState& make_thread_state();
thread_local ThreadState* mine = nullptr;

inline ThreadState& thread_state() { return mine != nullptr ? *mine : make_thread_state(); }

ThreadState& make_thread_state() {
    struct Owner {
        std::unique_ptr<ThreadState> state;
        ~Owner() { mine = nullptr; }
    };
    thread_local Owner owner;
    if (owner.state == nullptr) owner.state = std::make_unique<ThreadState>();
    mine = owner.state.get();
    return *mine;
}

std::string read_file(const char* path, std::vector<unsigned char>& bytes) {
    FILE* file = fopen(path, "rbe");
    if (file == nullptr) return strerror(errno);
    unsigned char block[1 << 16];
    for (size_t got; (got = fread(block, 1, sizeof block, file)) > 0;)
        bytes.insert(bytes.end(), block, block + got);
    bool failed = ferror(file);
    fclose(file);
    return failed ? "it cannot be read" : "";
}

bool enabled(const char* variable) {
    const char* value = getenv(variable);
    return value != nullptr && *value != '\0' && strcmp(value, "0") != 0;
}

}  // namespace

bool& Dispatcher::Inside::depth() { return inside; }

Dispatcher& Dispatcher::get() {
    // Never destroyed: streams may be used by threads that outlive the process's destructors.
    static Dispatcher& only = *new Dispatcher;
    return only;
}

Dispatcher::Dispatcher() : legacy_(kLegacyStream, order_.legacy) {
    const char* path = getenv("ECLIP_TABLE");
    if (enabled("ECLIP_DISABLE") || path == nullptr) return;
    if (const char* folder = getenv("ECLIP_STATS")) open_counters(folder);
    std::vector<unsigned char> bytes;
    std::string wrong = read_file(path, bytes);
    if (wrong.empty()) wrong = read_table(bytes, table_);
    if (!wrong.empty()) {
        say("the table %s cannot be used: %s; running unplanned", path, wrong.c_str());
        return;
    }
    if (const char* device = getenv("ECLIP_GPU")) wanted_device_ = atoi(device);
    if (const char* asking = getenv("ECLIP_ASK"))
        asking_ = strcmp(asking, "always") == 0 ? 1 : strcmp(asking, "never") == 0 ? -1 : 0;
    next_id_ = 2;  // 1 is the legacy stream
    size_t kernels = 0;
    for (const TableWorker& worker : table_.workers) kernels += worker.kernels.size();
    misfits_ = std::make_unique<std::atomic<bool>[]>(kernels);
    pthread_atfork(nullptr, nullptr, [] { get().forked(); });
    phase_.store(kWaiting);
}

// In the child. It cannot use its parent's context; if there was none yet, it may make its own.
void Dispatcher::forked() {
    if (phase_.load() != kWaiting) phase_.store(kOff);
    new (&setup_) std::mutex;  // a thread that is not here may have held it
    if (const char* folder = getenv("ECLIP_STATS")) open_counters(folder);
}

void Dispatcher::stop(const char* why) {
    if (phase_.exchange(kOff) != kOff) say("%s; running unplanned from here on", why);
}

// From the lane of its last work, by a barrier, as if something had been called there.
void Dispatcher::join_home(Stream& stream) {
    if (!stream.planned || capturing(stream)) return;
    Hold hold(*this, stream);
    Actions actions{*this, stream};
    Frontier<Actions>(order_, actions).decide(*stream.order, kHome);
    ++stream.calls;
}

void Dispatcher::join_all_home() {
    PrimaryCurrent current(pool_.primary);
    {
        std::shared_lock hold(streams_lock_);
        for (auto& [raw, stream] : streams_) join_home(*stream);
    }
    join_home(legacy_);
}

void Dispatcher::meet_unknown(const char* name) {
    if (!on() || inside) return;
    Inside ours;
    {
        std::lock_guard hold(setup_);
        int phase = phase_.load();
        if (phase == kWaiting || phase == kReady) {
            phase_.store(phase == kReady ? kAtHome : kOff);
            say("the program calls %s, which libeclip does not know; running unplanned from here "
                "on", name);
            if (phase == kReady) join_all_home();
        }
    }
    // Another thread's own stream is for that thread to join, when it makes such a call.
    if (phase_.load() != kAtHome || !thread_state().own) return;
    PrimaryCurrent current(pool_.primary);
    join_home(*thread_state().own);
}

bool Dispatcher::ready() {
    int phase = phase_.load(std::memory_order_acquire);
    return phase == kReady || phase == kAtHome || (phase == kWaiting && make_ready());
}

bool Dispatcher::is_foreign(CUcontext context) const {
    for (const auto& known : foreign_)
        if (known.load(std::memory_order_relaxed) == context) return true;
    return false;
}

// Lanes are made when the wanted device's context is first used: that is where a plan begins.
bool Dispatcher::make_ready() {
    if (inside) return false;
    const Driver& real = driver();
    CUcontext current = nullptr;
    CUdevice device = -1;
    if (real.cuCtxGetCurrent == nullptr || real.cuCtxGetDevice == nullptr ||
        real.cuDevicePrimaryCtxRetain == nullptr ||
        real.cuCtxGetCurrent(&current) != CUDA_SUCCESS || current == nullptr ||
        is_foreign(current) || real.cuCtxGetDevice(&device) != CUDA_SUCCESS ||
        device != wanted_device_)
        return false;
    // Nobody has made the primary context: then this is another, and we make none just to see that.
    unsigned flags = 0;
    int active = 1;
    if (real.cuDevicePrimaryCtxGetState != nullptr &&
        real.cuDevicePrimaryCtxGetState(device, &flags, &active) == CUDA_SUCCESS && !active) {
        say("the program has a context of its own; what it does there is not planned");
        return false;
    }
    std::lock_guard hold(setup_);
    int phase = phase_.load();
    if (phase != kWaiting) return phase != kOff;
    CUcontext primary = nullptr;
    if (real.cuDevicePrimaryCtxRetain(&primary, device) != CUDA_SUCCESS) return false;
    if (primary != current) {  // somebody's private context: not what was planned for
        say("the program has a context of its own; what it does there is not planned");
        foreign_[foreign_next_++ % kForeign].store(current);
        real.cuDevicePrimaryCtxRelease_v2(device);
        return false;
    }
    Inside ours;
    // Two processes would each believe the units to be theirs.
    const char* path = getenv("ECLIP_TABLE");
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0 || flock(file, LOCK_EX | LOCK_NB) != 0) {
        stop("another process of this command holds the plan's lanes, and masks of several "
             "processes are not kept apart");
        return false;
    }
    pool_.primary = primary;
    pool_.device = device;
    Relaxed relaxed;
    std::string wrong = make_pool(table_, pool_);
    if (!wrong.empty()) {
        stop(wrong.c_str());
        return false;
    }
    phase_.store(kReady, std::memory_order_release);
    if (rebind_new_objects != nullptr) rebind_new_objects();
    return true;
}

Stream* Dispatcher::attend(CUstream raw, Default meaning) {
    if (!on() || inside || !ready()) return nullptr;
    Stream* stream = find(raw, meaning);
    return stream != nullptr && stream->planned ? stream : nullptr;
}

Stream* Dispatcher::find(CUstream raw, Default meaning) {
    if (raw == nullptr) raw = meaning == Default::thread ? kThreadStream : kLegacyStream;
    if (raw == kLegacyStream || raw == kThreadStream) {
        if (!is_primary_current()) return nullptr;
        if (raw == kLegacyStream) return &legacy_;
        if (!thread_state().own) {
            thread_state().own = std::make_unique<Stream>(kThreadStream);
            thread_state().own->own.kind = Kind::blocking;
            thread_state().own->own.id = next_id_.fetch_add(1);
            thread_state().followers = &followers_;
        }
        return thread_state().own.get();
    }
    uint64_t epoch = streams_epoch_.load(std::memory_order_acquire);
    StreamEntry& entry = thread_state().streams[reinterpret_cast<uintptr_t>(raw) >> 4 & (kStreamCache - 1)];
    if (entry.raw != raw || entry.epoch != epoch || entry.stream == nullptr)
        entry = {raw, look_up(raw), epoch};
    return entry.stream;
}

Stream* Dispatcher::look_up(CUstream raw) {
    {
        std::shared_lock hold(streams_lock_);
        auto known = streams_.find(raw);
        if (known != streams_.end() && known->second->planned) return known->second.get();
    }
    const Driver& real = driver();
    CUcontext context = nullptr;
    unsigned flags = 0;
    if (real.cuStreamGetCtx(raw, &context) != CUDA_SUCCESS ||
        real.cuStreamGetFlags(raw, &flags) != CUDA_SUCCESS)
        return nullptr;  // no stream at all: the driver will say so itself
    auto made = std::make_unique<Stream>(raw);
    made->own.kind = flags & CU_STREAM_NON_BLOCKING ? Kind::nonblocking : Kind::blocking;
    made->own.id = next_id_.fetch_add(1);
    made->planned = context == pool_.primary;
    std::lock_guard hold(streams_lock_);
    // One of another context may have gone with it, unseen; then nobody uses what we knew of it.
    auto& known = streams_[raw];
    if (known == nullptr || (made->planned && !known->planned)) known = std::move(made);
    return known.get();
}

CUresult Dispatcher::destroy(CUstream raw, CUresult (*call)(CUstream)) {
    Stream* stream = attend(raw, Default::legacy);
    if (stream == nullptr || stream->home != raw) {
        forget_streams();
        return call(raw);
    }
    // Joined back, so that whoever must wait for this stream's work finds it where it looks.
    if (!capturing(*stream)) {
        auto nothing = [](CUstream) { return CUDA_SUCCESS; };
        pass(raw, Default::legacy, kHome, true, nothing);
    }
    {
        std::lock_guard hold(streams_lock_);
        auto known = streams_.find(raw);
        if (known != streams_.end()) {
            known->second->tracker.leave(followers_);
            if (known->second->event != nullptr) driver().cuEventDestroy_v2(known->second->event);
            streams_.erase(known);
        }
        forget_streams();
    }
    return call(raw);
}

Dispatcher::Hold::Hold(Dispatcher& owner, Stream& stream) : owner_(owner), stream_(stream) {
    take();
}

void Dispatcher::Hold::take() {
    if (taken_) return;
    taken_ = true;
    stream_.lock.lock();
    if (stream_.order->kind == Kind::nonblocking) return;
    if (stream_.order->kind == Kind::blocking) {
        owner_.gate_.lock_shared();
        gate_ = kShared;
        if (!owner_.order_.legacy_strayed.load(std::memory_order_acquire)) return;
        owner_.gate_.unlock_shared();
    }
    owner_.gate_.lock();
    gate_ = kAlone;
}

void Dispatcher::Hold::release() {
    if (!taken_) return;
    if (gate_ == kAlone) owner_.gate_.unlock();
    if (gate_ == kShared) owner_.gate_.unlock_shared();
    gate_ = kNone;
    stream_.lock.unlock();
    taken_ = false;
}

// Asking pays where lanes are often found empty and an answer costs less than a barrier.
bool Dispatcher::asks(bool learning) {
    if (asking_ != 0) return asking_ > 0;
    if (learning) return true;
    uint32_t asked = asked_.load(std::memory_order_relaxed);
    double share = asked > 0 ? double(answered_done_.load(std::memory_order_relaxed)) / asked : 0;
    return pool_.ask_ns < share * pool_.barrier_ns;
}

bool Dispatcher::Actions::finished(int lane) {
    bool learning = owner.chances_.fetch_add(1, std::memory_order_relaxed) % kLearnEvery == 0;
    if (!owner.asks(learning)) return false;
    Relaxed relaxed;
    bool done = driver().cuStreamQuery(owner.pool_.lanes[lane].stream) == CUDA_SUCCESS;
    if (owner.asked_.fetch_add(1) == 1 << 20) {  // the past fades
        owner.asked_ = 1 << 10;
        owner.answered_done_ = owner.answered_done_ >> 10;
    }
    if (done) owner.answered_done_.fetch_add(1);
    return done;
}

void Dispatcher::Actions::barrier(const StreamOrder& home, int from, int to) {
    if (status != CUDA_SUCCESS) return;
    const Driver& real = driver();
    CUstream home_stream = stream.home;
    std::optional<PrimaryCurrent> current;
    if (&home != stream.order) {  // a call that names its stream may come from any context
        home_stream = kLegacyStream;
        current.emplace(owner.pool_.primary);
    }
    CUevent event = from >= 0 ? owner.pool_.lanes[from].event : stream.event;
    if (event == nullptr) {
        current.emplace(owner.pool_.primary);
        status = real.cuEventCreate(&stream.event, CU_EVENT_DISABLE_TIMING);
        event = stream.event;
    }
    // A wait keeps what it has seen of an event, which may be recorded anew at once.
    if (status == CUDA_SUCCESS)
        status = real.cuEventRecord(
            event, from >= 0 ? owner.pool_.lanes[from].stream : home_stream);
    if (status == CUDA_SUCCESS)
        status = real.cuStreamWaitEvent(to >= 0 ? owner.pool_.lanes[to].stream : home_stream,
                                        event, 0);
    count(counters().barriers);
}

bool Dispatcher::is_capturing(CUstream stream) const {
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    auto ask = driver().cuStreamIsCapturing;
    return ask != nullptr &&
           (ask(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE);
}

// An event of all work of the context takes in the lanes by a stream that has nothing else to do: in
// the default stream, blocking streams would wait for lanes of non-blocking ones.
CUresult Dispatcher::context_event(CUcontext context, CUevent event, bool waits) {
    const Driver& real = driver();
    if (on() && ready() && context == pool_.primary) {
        for (size_t index = 0; index < pool_.count; ++index) {
            const Lane& lane = pool_.lanes[index];
            if (lane.stream == nullptr) continue;
            CUresult status = waits ? real.cuStreamWaitEvent(lane.stream, event, 0)
                                    : real.cuEventRecord(lane.event, lane.stream);
            if (status == CUDA_SUCCESS && !waits)
                status = real.cuStreamWaitEvent(pool_.aside, lane.event, 0);
            if (status != CUDA_SUCCESS) return status;
        }
    }
    return waits ? real.cuCtxWaitEvent(context, event) : real.cuCtxRecordEvent(context, event);
}

uint64_t Dispatcher::identify(const Launch& launch) {
    uint64_t epoch = names_epoch_.load(std::memory_order_relaxed) + 1;
    NameEntry& entry =
        thread_state().names[reinterpret_cast<uintptr_t>(launch.function) >> 4 & (kNameCache - 1)];
    if (entry.function != launch.function || entry.epoch != epoch) {
        const char* name = function_name(launch.function);
        entry = {launch.function, hash_bytes(name, strlen(name)), epoch};
    }
    return identity(entry.hash, launch.grid, launch.block);
}

Tracker& Dispatcher::track(Stream& stream) {
    bool by_stream = table_.workers_by == WorkersBy::stream;
    ThreadState& thread = thread_state();
    Tracker& tracker = by_stream ? stream.tracker : thread.tracker;
    thread.followers = &followers_;
    if (thread.marked) {
        thread.marked = false;
        tracker.begin_request(table_, thread.marked_worker, followers_);
    }
    return tracker;
}

void Dispatcher::begin_request(int worker) {
    if (!on()) return;
    thread_state().marked = true;
    thread_state().marked_worker = worker;
}

bool Dispatcher::take_mark() { return std::exchange(thread_state().marked, false); }

// Who is active now, this worker among them.
uint32_t Dispatcher::begin_serving(Stream& stream, int worker) {
    uint32_t bit = 1u << worker;
    stream.serves.fetch_or(bit, std::memory_order_relaxed);
    return active_.fetch_or(bit) | bit;
}

// At a request's first kernel: the variant for the fewest workers that holds all who are active.
void Dispatcher::choose_variant(Stream& stream, Tracker& tracker, const Tracker::Step& step) {
    uint32_t bit = 1u << step.worker;
    if (step.begins_request) {
        uint32_t active = begin_serving(stream, step.worker);
        in_request_.fetch_or(bit);
        tracker.variant = kMainVariant;
        for (size_t index = 0; index < table_.variants.size(); ++index)
            if ((active & ~table_.variants[index].active) == 0) {
                tracker.variant = static_cast<int>(index);
                break;
            }
    }
    if (step.position + 1 == table_.workers[step.worker].kernels.size()) in_request_.fetch_and(~bit);
}

void Dispatcher::begin_graph(CUstream raw, Default meaning, int worker) {
    if (table_.variants.empty()) return;
    if (Stream* stream = attend(raw, meaning)) begin_serving(*stream, worker);
}

int Dispatcher::lane_of(const Tracker::Step& step, int variant) const {
    const TableWorker& worker = table_.workers[step.worker];
    int lane = variant == kMainVariant ? worker.kernels[step.position].lane
                                       : table_.variants[variant].lanes[worker.first + step.position];
    // A worker that was taken up in the middle of a request has another's variant.
    if (lane < 0) lane = worker.kernels[step.position].lane;
    if (pool_.lanes[lane].stream == nullptr) return kHome;
    bool misfit = misfits_[worker.first + step.position].load();
    return misfit ? kHome : lane;
}

void Dispatcher::mark_misfit(const Tracker::Step& step) {
    misfits_[table_.workers[step.worker].first + step.position].store(true);
    count(counters().misfits);
    say("a kernel of worker %d is refused on its lane and runs on the whole device", step.worker);
}

CUresult Dispatcher::find_end(Stream& stream, CUstream raw, CUstream& target) {
    // The default stream waits for blocking streams too; that and all that came late is joined.
    if (stream.order->kind == Kind::legacy || Frontier<Actions>::has_late(*stream.order)) {
        Actions actions{*this, stream};
        Frontier<Actions>(order_, actions).decide(*stream.order, kHome);
        return actions.status;
    }
    int tail = pending_tail(*stream.order, order_);
    target = tail >= 0 ? pool_.lanes[tail].stream : raw;
    return CUDA_SUCCESS;
}

void Dispatcher::ended(Stream& stream, uint64_t calls) {
    if (table_.mode == Mode::record)
        mark_record(stream.order->kind == Kind::legacy ? kAllWorkers : recorded_worker(stream));
    Hold hold(*this, stream);
    if (stream.calls != calls) return;  // another thread went on meanwhile
    active_.fetch_and(~(stream.serves.exchange(0, std::memory_order_relaxed) & ~in_request_.load()));
    Actions actions{*this, stream};
    Frontier<Actions>(order_, actions).drained(*stream.order);
}

size_t Dispatcher::wait_for_lanes(LaneWord::View* seen) {
    size_t lanes = pool_.count;
    Relaxed relaxed;
    for (size_t lane = 0; lane < lanes; ++lane) {
        seen[lane] = order_.lanes[lane].read();
        if (seen[lane].busy()) driver().cuStreamSynchronize(pool_.lanes[lane].stream);
    }
    if (table_.mode == Mode::record) mark_record(kAllWorkers);
    return lanes;
}

}  // namespace eclip
