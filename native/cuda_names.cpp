// CUDA's entry points by name, and how programs ask the driver for them.
#include "names.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <iterator>
#include <string>

#include "hook.h"
#include "resolve.h"
#include "unknown.h"

using namespace eclip;

// The hooks as the linker knows them; their types are those of hooks.def.
#define HOOK(symbol, name, since, threaded, parameters, arguments) \
    extern "C" CUresult symbol parameters;
#include "hooks.def"

ECLIP_HOOK cuGetProcAddress(const char* name, void** function, int version, uint64_t flags);
ECLIP_HOOK cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags,
                               int* found);

namespace eclip {
namespace {

#define ECLIP_THREADED_none false
#define ECLIP_THREADED_ptsz true
#define ECLIP_THREADED_ptds true

const Entry all[] = {
#define HOOK(symbol, name, since, threaded, parameters, arguments) \
    ECLIP_ENTRY(driver, symbol, name, since, ECLIP_THREADED_##threaded)
#define ALIAS(name, since, symbol) ECLIP_ENTRY(driver, symbol, name, since, false)
#include "hooks.def"
    ECLIP_ENTRY(driver, cuGetProcAddress, cuGetProcAddress, 11030, false)
    ECLIP_ENTRY(driver, cuGetProcAddress_v2, cuGetProcAddress, 12000, false)
};

const char* const known_names[] = {
#define KNOWN(name) #name,
#include "known.def"
#undef KNOWN
};

// Without _v2 and the like, and without the mark of a thread's own default stream.
std::string without_version(std::string name) {
    for (const char* suffix : {"_ptsz", "_ptds"})
        if (name.ends_with(suffix)) name.resize(name.size() - strlen(suffix));
    size_t at = name.size();
    while (at > 0 && isdigit(static_cast<unsigned char>(name[at - 1]))) --at;
    if (at < name.size() && at >= 2 && name.compare(at - 2, 2, "_v") == 0) name.resize(at - 2);
    return name;
}

}  // namespace

const char* const kFirstCall = "cuInit";

std::span<const Entry> entries() { return all; }

bool is_driver_name(const char* name) {
    return strncmp(name, "cu", 2) == 0 && isupper(static_cast<unsigned char>(name[2]));
}

bool is_known_name(const char* name) {
    std::string base = without_version(name);
    auto same = [&](const char* known) { return base == known; };
    return std::any_of(std::begin(known_names), std::end(known_names), same);
}

namespace {

// The entry whose interface this version of a name had when the list was made.
const Entry* entry_of_name(const char* name, int version, bool threaded) {
    const Entry* best = nullptr;
    for (const Entry& entry : all) {
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
    bool newer = !is_missing(reinterpret_cast<void*>(real.cuGetProcAddress_v2));
    CUresult status = newer ? real.cuGetProcAddress_v2(name, &answer, version, flags, nullptr)
                            : real.cuGetProcAddress(name, &answer, version, flags);
    return status == CUDA_SUCCESS ? answer : nullptr;
}

// What to answer where cuGetProcAddress has answered for this name, version and flags: the hook if
// that is the very function it stands in front of, and the caller does not stand there itself.
void* front_of_answer(const char* name, void* answer, int version, uint64_t flags,
                      const void* caller) {
    bool planned = Dispatcher::get().on();
    if (!planned && !giving::on()) return answer;
    bool threaded = flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    if (const Entry* entry = entry_of_name(name, version, threaded)) {
        // Another function under the same name is a newer interface: not what our hook expects.
        if (stands_behind(caller, entry->symbol)) return answer;
        bool ours = answer == entry->real() || answer == ask(name, entry->since, flags);
        if (ours) return entry->hook;
        return planned ? in_front_of_unknown(name, answer) : answer;
    }
    return planned && is_unknown(name) ? in_front_of_unknown(name, answer) : answer;
}

}  // namespace
}  // namespace eclip

ECLIP_HOOK cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
    CUresult status = driver().cuGetProcAddress(name, function, version, flags);
    if (status != CUDA_SUCCESS || function == nullptr || *function == nullptr) return status;
    *function = front_of_answer(name, *function, version, flags, __builtin_return_address(0));
    return status;
}

ECLIP_HOOK cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags,
                               int* found) {
    CUresult status = driver().cuGetProcAddress_v2(name, function, version, flags, found);
    if (status != CUDA_SUCCESS || function == nullptr || *function == nullptr) return status;
    *function = front_of_answer(name, *function, version, flags, __builtin_return_address(0));
    return status;
}
