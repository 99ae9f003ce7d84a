#include "driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <mutex>

#include "symbols.h"

namespace eclip {

namespace {

// In the place of functions that the driver does not have: who calls one regardless is told.
CUresult missing() { return CUDA_ERROR_NOT_SUPPORTED; }

}  // namespace

void* next_or_missing(const char* name) {
    void* found = next_symbol(name);
    return found != nullptr ? found : reinterpret_cast<void*>(&missing);
}

namespace {

// While the slots are filled in a program whose calls nobody else watches: the driver's own table of
// symbols is enough, and the dynamic linker may be locked by who waits for us.
thread_local const Symbols* filled_from = nullptr;
std::atomic<bool> others_behind{false};

}  // namespace

void others_stand_behind() { others_behind.store(true); }

void* real_symbol(const char* name) {
    if (filled_from != nullptr) return filled_from->find(name);
    static void* handle = open_driver_library();
    if (handle == nullptr) return nullptr;
    return original_dlsym != nullptr ? original_dlsym(handle, name) : dlsym(handle, name);
}

// Others may be preloaded behind us to see the same calls.
void* next_symbol(const char* name) {
    void* own = real_symbol(name);
    if (own == nullptr || original_dlsym == nullptr || filled_from != nullptr) return own;
    void* next = original_dlsym(RTLD_NEXT, name);
    return next != nullptr ? next : own;
}

bool is_missing(void* function) { return function == reinterpret_cast<void*>(&missing); }

constinit std::atomic<const Driver*> loaded_driver{nullptr};

const Driver& load_driver() {
    static const Driver table = [] {
        auto is_driver = [](const Symbols& object) { return is_driver_library(object.name()); };
        Symbols loaded = others_behind.load() ? Symbols() : find_object(is_driver);
        filled_from = loaded.usable() ? &loaded : nullptr;
        Driver filled = fill_driver();
        filled_from = nullptr;
        return filled;
    }();
    loaded_driver.store(&table, std::memory_order_release);
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
