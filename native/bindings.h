// Calls of objects that the dynamic linker has bound past libeclip.
#pragma once

namespace eclip {

// Look at what was loaded since the last time: calls bound straight to the driver (RTLD_DEEPBIND) go
// to our hooks, and calls of unknown entry points to their stubs. Cheap where nothing was loaded.
void rebind_new_objects();

}  // namespace eclip
