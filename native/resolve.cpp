#include "resolve.h"

#include <dlfcn.h>
#include <link.h>

#include <cstring>

#include "dispatcher.h"
#include "giving.h"
#include "names.h"
#include "unknown.h"

namespace eclip {
namespace {

const Entry* entry_of_symbol(const char* symbol) {
    for (const Entry& entry : entries())
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

}  // namespace eclip
