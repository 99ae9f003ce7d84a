#include "driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <mutex>

namespace eclip {

namespace {

void* library() {
    static void* handle = [] {
        void* found = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
        return found ? found : dlopen("libcuda.so.1", RTLD_LAZY);
    }();
    return handle;
}

Driver load() {
    Driver table{};
#define ECLIP_FILL_none(symbol)
#define ECLIP_FILL_ptsz(symbol) \
    table.symbol##_ptsz = reinterpret_cast<symbol##_t*>(real_symbol(#symbol "_ptsz"));
#define ECLIP_FILL_ptds(symbol) \
    table.symbol##_ptds = reinterpret_cast<symbol##_t*>(real_symbol(#symbol "_ptds"));
#define ECLIP_FILL(symbol, name, since, threaded, threaded_since, parameters, arguments) \
    table.symbol = reinterpret_cast<symbol##_t*>(real_symbol(#symbol));                 \
    ECLIP_FILL_##threaded(symbol)
#define KERNEL ECLIP_FILL
#define OWN ECLIP_FILL
#define FOLLOW ECLIP_FILL
#define COPY ECLIP_FILL
#define HOME ECLIP_FILL
#define DEFAULT ECLIP_FILL
#define EXEC ECLIP_FILL
#define EXECNODE ECLIP_FILL
#define DRAIN ECLIP_FILL
#define END ECLIP_FILL
#define ALIAS(name, since, symbol)
#define PASS(symbol)
#include "hooks.def"
#define ECLIP_CALL(name, ...) \
    table.name = reinterpret_cast<Driver::name##_f*>(real_symbol(#name));
    ECLIP_DRIVER_CALLS(ECLIP_CALL)
#undef ECLIP_CALL
    return table;
}

}  // namespace

void* real_symbol(const char* name) {
    void* handle = library();
    if (handle == nullptr) return nullptr;
    return original_dlsym != nullptr ? original_dlsym(handle, name) : dlsym(handle, name);
}

const Driver& driver() {
    static const Driver table = load();
    return table;
}

void say(const char* format, ...) {
    static std::mutex lock;
    static const char* said[64];
    static int count = 0;
    {
        std::lock_guard hold(lock);
        for (int index = 0; index < count; ++index)
            if (said[index] == format) return;
        if (count == 64) return;
        said[count++] = format;
    }
    char line[512];
    int start = snprintf(line, sizeof line, "eclip: ");
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line + start, sizeof line - start - 1, format, arguments);
    va_end(arguments);
    if (length < 0) return;
    size_t end = start + static_cast<size_t>(length);
    if (end > sizeof line - 2) end = sizeof line - 2;
    line[end] = '\n';
    // One write, so that lines of several processes do not mix; nobody is left to tell of failure.
    [[maybe_unused]] ssize_t written = write(STDERR_FILENO, line, end + 1);
}

}  // namespace eclip
