// HIP's entry points by name, and how programs ask HIP for them.
#include "../names.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <iterator>

#include "../hook.h"
#include "../resolve.h"
#include "../unknown.h"
#include "driver.h"

using namespace eclip;

#define HOOK(symbol, name, since, threaded, parameters, arguments) \
    extern "C" CUresult symbol parameters;
#include "hooks.def"

ECLIP_HOOK hipGetProcAddress(const char* name, void** function, int version, uint64_t flags,
                             int* found);

namespace eclip {
namespace {

#define ECLIP_THREADED_none false
#define ECLIP_THREADED_spt true

const Entry all[] = {
#define HOOK(symbol, name, since, threaded, parameters, arguments) \
    ECLIP_ENTRY(hip, symbol, name, since, ECLIP_THREADED_##threaded)
#include "hooks.def"
    ECLIP_ENTRY(hip, hipGetProcAddress, hipGetProcAddress, 601, false)
};

const char* const known_names[] = {
#define KNOWN(name) #name,
#include "known.def"
#undef KNOWN
};

}  // namespace

const char* const kFirstCall = "hipInit";

std::span<const Entry> entries() { return all; }

// hipMalloc, not hiprtcVersion; and in C++ _Z24hipExt…, or what is in hip_impl.
bool is_driver_name(const char* name) {
    if (strncmp(name, "_Z", 2) == 0) {
        if (strncmp(name, "_ZN8hip_impl", 12) == 0) return true;
        for (name += 2; isdigit(static_cast<unsigned char>(*name));) ++name;
    }
    return strncmp(name, "hip", 3) == 0 && isupper(static_cast<unsigned char>(name[3]));
}

bool is_known_name(const char* name) {
    auto same = [&](const char* known) { return strcmp(name, known) == 0; };
    return std::any_of(std::begin(known_names), std::end(known_names), same);
}

}  // namespace eclip

// HIP looks for the name in its own library, by whatever dlsym the process has.
ECLIP_HOOK hipGetProcAddress(const char* name, void** function, int version, uint64_t flags,
                             int* found) {
    CUresult status = hip().hipGetProcAddress(name, function, version, flags, found);
    if (status != CUDA_SUCCESS || *function == nullptr) return status;
    if (stands_behind(__builtin_return_address(0), name)) return status;
    if (void* front = front_of_symbol(name); front != nullptr && *function != front) {
        // Another function under the same name is a newer interface: not what our hook expects.
        bool same = *function == real_symbol(name);
        *function = same ? front : in_front_of_unknown(name, *function);
    }
    return status;
}
