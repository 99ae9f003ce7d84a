// Names to hooks, for those who ask for entry points at run time.
#pragma once

#include <cstdint>

namespace eclip {

// What stands in front of the symbol of the driver library, or nothing if we leave it alone or the
// driver does not have it.
void* hook_of_symbol(const char* symbol);

// Likewise, and a stub for one that is unknown.
void* front_of_symbol(const char* symbol);

// What to answer where cuGetProcAddress has answered for this name, version and flags: the hook if
// that is the very function it stands in front of.
void* front_of_answer(const char* name, void* answer, int version, uint64_t flags);

}  // namespace eclip
