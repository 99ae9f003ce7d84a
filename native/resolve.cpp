#include "resolve.h"

#include <dlfcn.h>
#include <link.h>

#include <cstring>

#include "hook.h"
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

void* present(void* function) { return is_missing(function) ? nullptr : function; }

struct Entry {
    const char* symbol;
    const char* name;
    int since;
    bool threaded;
    void* hook;
    void* (*real)();
};

#define ECLIP_THREADED_none false
#define ECLIP_THREADED_ptsz true
#define ECLIP_THREADED_ptds true
#define ECLIP_ENTRY(symbol, name, since, threaded)                                          \
    {#symbol, #name, since, ECLIP_THREADED_##threaded, reinterpret_cast<void*>(&::symbol), \
     [] { return present(reinterpret_cast<void*>(driver().symbol)); }},

const Entry entries[] = {
#define HOOK(symbol, name, since, threaded, parameters, arguments) \
    ECLIP_ENTRY(symbol, name, since, threaded)
#define ALIAS(name, since, symbol) ECLIP_ENTRY(symbol, name, since, none)
#include "hooks.def"
    ECLIP_ENTRY(cuGetProcAddress, cuGetProcAddress, 11030, none)
    ECLIP_ENTRY(cuGetProcAddress_v2, cuGetProcAddress, 12000, none)
};

const Entry* entry_of_symbol(const char* symbol) {
    for (const Entry& entry : entries)
        if (strcmp(entry.symbol, symbol) == 0) return &entry;
    return nullptr;
}

}  // namespace

void* hook_of_symbol(const char* symbol) {
    if (!Dispatcher::get().on() && !giving::on()) return nullptr;
    const Entry* entry = entry_of_symbol(symbol);
    return entry != nullptr && entry->real() != nullptr ? entry->hook : nullptr;
}

bool is_lacking(const char* symbol) {
    const Entry* entry = entry_of_symbol(symbol);
    return entry != nullptr && entry->real() == nullptr;
}

namespace {

// Objects are met in the order in which the dynamic linker looks through those it began with.
struct Search {
    const void* first;
    const void* second;
    const void* met = nullptr;
};

bool is_in(const dl_phdr_info& object, const void* address) {
    auto at = reinterpret_cast<uintptr_t>(address);
    for (int index = 0; index < object.dlpi_phnum; ++index) {
        const auto& part = object.dlpi_phdr[index];
        uintptr_t begin = object.dlpi_addr + part.p_vaddr;
        if (part.p_type == PT_LOAD && at >= begin && at < begin + part.p_memsz) return true;
    }
    return false;
}

bool comes_after_us(const void* caller) {
    Search search{reinterpret_cast<const void*>(&comes_after_us), caller};
    auto look = [](dl_phdr_info* object, size_t, void* data) {
        auto wanted = static_cast<Search*>(data);
        for (const void* address : {wanted->first, wanted->second})
            if (is_in(*object, address)) wanted->met = address;
        return wanted->met != nullptr ? 1 : 0;
    };
    dl_iterate_phdr(look, &search);
    return search.met == search.first;
}

}  // namespace

bool stands_behind(const void* caller, const char* symbol) {
    Dl_info here, there;
    if (!comes_after_us(caller) || dladdr(caller, &here) == 0) return false;
    void* object = dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (object == nullptr) return false;
    void* own = original_dlsym != nullptr ? original_dlsym(object, symbol) : nullptr;
    dlclose(object);
    return own != nullptr && dladdr(own, &there) != 0 && here.dli_fbase == there.dli_fbase;
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
    bool newer = !is_missing(reinterpret_cast<void*>(real.cuGetProcAddress_v2));
    CUresult status = newer ? real.cuGetProcAddress_v2(name, &answer, version, flags, nullptr)
                            : real.cuGetProcAddress(name, &answer, version, flags);
    return status == CUDA_SUCCESS ? answer : nullptr;
}

}  // namespace

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
