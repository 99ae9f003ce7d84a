// The slots of a CUDA driver.
#include <dlfcn.h>

#include <cstring>

#include "driver.h"

namespace eclip {

bool is_driver_library(const char* soname) { return strcmp(soname, "libcuda.so.1") == 0; }

void* open_driver_library() {
    void* found = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    return found ? found : dlopen("libcuda.so.1", RTLD_LAZY);
}

Driver fill_driver() {
    Driver table{};
#define HOOK(symbol, name, since, threaded, parameters, arguments) \
    table.symbol = reinterpret_cast<decltype(table.symbol)>(next_or_missing(#symbol));
#include "hooks.def"
#define ECLIP_CALL(name, ...) \
    table.name = reinterpret_cast<Driver::name##_f*>(real_symbol(#name));
    ECLIP_DRIVER_CALLS(ECLIP_CALL)
#undef ECLIP_CALL
#define ECLIP_CALL(name, ...) \
    table.name = reinterpret_cast<Driver::name##_f*>(next_or_missing(#name));
    ECLIP_DRIVER_FINDS(ECLIP_CALL)
#undef ECLIP_CALL
    return table;
}

}  // namespace eclip
