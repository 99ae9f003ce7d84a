#include "resolve.h"

#include <cstring>

#include "hook.h"
#include "unknown.h"

using namespace eclip;

// The hooks as the linker knows them; their types are those of hooks.def.
#define ECLIP_DECLARE_none(symbol, parameters)
#define ECLIP_DECLARE_ptsz(symbol, parameters) extern "C" CUresult symbol##_ptsz parameters;
#define ECLIP_DECLARE_ptds(symbol, parameters) extern "C" CUresult symbol##_ptds parameters;
#define ECLIP_DECLARE(symbol, name, since, threaded, threaded_since, parameters, arguments) \
    extern "C" CUresult symbol parameters;                                                  \
    ECLIP_DECLARE_##threaded(symbol, parameters)
#define KERNEL ECLIP_DECLARE
#define OWN ECLIP_DECLARE
#define FOLLOW ECLIP_DECLARE
#define COPY ECLIP_DECLARE
#define HOME ECLIP_DECLARE
#define DEFAULT ECLIP_DECLARE
#define EXEC ECLIP_DECLARE
#define EXECNODE ECLIP_DECLARE
#define DRAIN ECLIP_DECLARE
#define END ECLIP_DECLARE
#define ALIAS(name, since, symbol)
#define PASS(symbol)
#include "hooks.def"

ECLIP_HOOK cuGetProcAddress(const char* name, void** function, int version, uint64_t flags);
ECLIP_HOOK cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags,
                               int* found);

namespace eclip {
namespace {

struct Entry {
    const char* symbol;
    const char* name;
    int since;
    bool threaded;
    void* hook;
    void* (*real)();
};

#define ECLIP_ENTRY_FOR(symbol, name, since, threaded)         \
    {#symbol, name, since, threaded, reinterpret_cast<void*>(&symbol), \
     [] { return reinterpret_cast<void*>(driver().symbol); }},
#define ECLIP_ENTRY_none(symbol, name, since)
#define ECLIP_ENTRY_ptsz(symbol, name, since) ECLIP_ENTRY_FOR(symbol##_ptsz, name, since, true)
#define ECLIP_ENTRY_ptds(symbol, name, since) ECLIP_ENTRY_FOR(symbol##_ptds, name, since, true)
#define ECLIP_ENTRY(symbol, name, since, threaded, threaded_since, parameters, arguments) \
    ECLIP_ENTRY_FOR(symbol, #name, since, false)                                          \
    ECLIP_ENTRY_##threaded(symbol, #name, threaded_since)
#undef KERNEL
#undef OWN
#undef FOLLOW
#undef COPY
#undef HOME
#undef DEFAULT
#undef EXEC
#undef EXECNODE
#undef DRAIN
#undef END
#undef ALIAS
#define KERNEL ECLIP_ENTRY
#define OWN ECLIP_ENTRY
#define FOLLOW ECLIP_ENTRY
#define COPY ECLIP_ENTRY
#define HOME ECLIP_ENTRY
#define DEFAULT ECLIP_ENTRY
#define EXEC ECLIP_ENTRY
#define EXECNODE ECLIP_ENTRY
#define DRAIN ECLIP_ENTRY
#define END ECLIP_ENTRY
#define ALIAS(name, since, symbol) ECLIP_ENTRY_FOR(symbol, #name, since, false)

const Entry entries[] = {
#include "hooks.def"
    {"cuGetProcAddress", "cuGetProcAddress", 11030, false,
     reinterpret_cast<void*>(&::cuGetProcAddress),
     [] { return reinterpret_cast<void*>(driver().cuGetProcAddress); }},
    {"cuGetProcAddress_v2", "cuGetProcAddress", 12000, false,
     reinterpret_cast<void*>(&::cuGetProcAddress_v2),
     [] { return reinterpret_cast<void*>(driver().cuGetProcAddress_v2); }},
};

}  // namespace

void* hook_of_symbol(const char* symbol) {
    if (!Dispatcher::get().on() && !giving::on()) return nullptr;
    for (const Entry& entry : entries)
        if (strcmp(entry.symbol, symbol) == 0) return entry.real() != nullptr ? entry.hook : nullptr;
    return nullptr;
}

void* front_of_symbol(const char* symbol) {
    if (void* hook = hook_of_symbol(symbol)) return hook;
    if (!Dispatcher::get().on() || !is_unknown(symbol)) return nullptr;
    void* function = real_symbol(symbol);
    return function != nullptr ? in_front_of_unknown(symbol, function) : nullptr;
}

namespace {

// The entry whose interface this version of a name had when the list was made.
const Entry* entry_of_name(const char* name, int version, bool threaded) {
    const Entry* best = nullptr;
    for (const Entry& entry : entries) {
        if (entry.since > version || strcmp(entry.name, name) != 0 || entry.real() == nullptr)
            continue;
        if (entry.threaded && !threaded) continue;
        bool closer = best == nullptr || entry.threaded > best->threaded ||
                      (entry.threaded == best->threaded && entry.since > best->since);
        if (closer) best = &entry;
    }
    return best;
}

// What the driver answers for a version.
void* ask(const char* name, int version, uint64_t flags) {
    void* answer = nullptr;
    const Driver& real = driver();
    CUresult status = real.cuGetProcAddress_v2 != nullptr
                          ? real.cuGetProcAddress_v2(name, &answer, version, flags, nullptr)
                          : real.cuGetProcAddress(name, &answer, version, flags);
    return status == CUDA_SUCCESS ? answer : nullptr;
}

}  // namespace

void* front_of_answer(const char* name, void* answer, int version, uint64_t flags) {
    bool planned = Dispatcher::get().on();
    if (!planned && !giving::on()) return answer;
    bool threaded = flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    if (const Entry* entry = entry_of_name(name, version, threaded)) {
        // Another function under the same name is a newer interface: not what our hook expects.
        bool ours = answer == entry->real() || answer == ask(name, entry->since, flags);
        if (ours) return entry->hook;
        return planned ? in_front_of_unknown(name, answer) : answer;
    }
    return planned && is_unknown(name) ? in_front_of_unknown(name, answer) : answer;
}

}  // namespace eclip

ECLIP_HOOK cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
    CUresult status = driver().cuGetProcAddress(name, function, version, flags);
    if (status != CUDA_SUCCESS || function == nullptr || *function == nullptr) return status;
    *function = front_of_answer(name, *function, version, flags);
    return status;
}

ECLIP_HOOK cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags,
                               int* found) {
    CUresult status = driver().cuGetProcAddress_v2(name, function, version, flags, found);
    if (status != CUDA_SUCCESS || function == nullptr || *function == nullptr) return status;
    *function = front_of_answer(name, *function, version, flags);
    return status;
}
