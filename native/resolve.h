// Names to hooks, for those who ask for entry points at run time.
#pragma once

namespace eclip {

// What stands in front of the symbol of the driver library, or nothing if we leave it alone or the
// driver does not have it.
void* hook_of_symbol(const char* symbol);

// Likewise, and a stub for one that is unknown.
void* front_of_symbol(const char* symbol);

// Whether we have a hook for what this driver does not have.
bool is_lacking(const char* symbol);

// Whether the object of this code has a function of the name and comes after us: then it was
// preloaded to stand in front of the driver, too, and asks for what comes next.
bool stands_behind(const void* caller, const char* symbol);

}  // namespace eclip
