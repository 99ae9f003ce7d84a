// The driver library's entry points as libeclip knows them, by name. The list is a vendor's: that of
// hooks.def (cuda_names.cpp) or of hip/hooks.def (hip/names.cpp).
#pragma once

#include <span>

#include "driver.h"

namespace eclip {

struct Entry {
    const char* symbol;
    const char* name;  // by which cuGetProcAddress gives it out, since that version
    int since;
    bool threaded;
    void* hook;
    void* (*real)();  // none where the driver does not have it
};

std::span<const Entry> entries();

// Whether a name is of the kind that the driver library gives its functions.
bool is_driver_name(const char* name);
// Whether it needs nothing from us.
bool is_known_name(const char* name);
extern const char* const kFirstCall;  // of every program: where it is, the driver is

inline void* present(void* function) { return is_missing(function) ? nullptr : function; }

#define ECLIP_ENTRY(table, symbol, name, since, threaded)                 \
    {#symbol, #name, since, threaded, reinterpret_cast<void*>(&::symbol), \
     [] { return present(reinterpret_cast<void*>(table().symbol)); }},

}  // namespace eclip
