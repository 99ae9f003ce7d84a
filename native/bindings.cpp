#include "bindings.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "dispatcher.h"
#include "names.h"
#include "resolve.h"
#include "unknown.h"

#if defined(__x86_64__)
#define ECLIP_RELOCATION(kind) R_X86_64_##kind
#define ECLIP_ABSOLUTE R_X86_64_64
#else
#define ECLIP_RELOCATION(kind) R_AARCH64_##kind
#define ECLIP_ABSOLUTE R_AARCH64_ABS64
#endif

namespace eclip {

namespace {

struct Object {
    std::string name;
    uintptr_t base = 0, begin = 0, end = 0;  // `base` is what its addresses are relative to
    const ElfW(Dyn)* dynamic = nullptr;
    uintptr_t sealed_begin = 0, sealed_end = 0;  // read-only since it was bound
    bool has(uintptr_t address) const { return address >= begin && address < end; }
};

struct Loaded {
    unsigned long long adds = 0, subs = 0;
    std::vector<Object> objects;
};

int read_counts(dl_phdr_info* info, size_t, void* data) {
    auto loaded = static_cast<Loaded*>(data);
    loaded->adds = info->dlpi_adds;
    loaded->subs = info->dlpi_subs;
    return 1;
}

int read_object(dl_phdr_info* info, size_t, void* data) {
    Object made;
    made.name = info->dlpi_name != nullptr ? info->dlpi_name : "";
    made.base = info->dlpi_addr;
    made.begin = ~uintptr_t{0};
    for (int index = 0; index < info->dlpi_phnum; ++index) {
        const ElfW(Phdr)& part = info->dlpi_phdr[index];
        uintptr_t begin = made.base + part.p_vaddr, end = begin + part.p_memsz;
        if (part.p_type == PT_LOAD) {
            made.begin = begin < made.begin ? begin : made.begin;
            made.end = end > made.end ? end : made.end;
        } else if (part.p_type == PT_DYNAMIC) {
            made.dynamic = reinterpret_cast<const ElfW(Dyn)*>(begin);
        } else if (part.p_type == PT_GNU_RELRO) {
            made.sealed_begin = begin;
            made.sealed_end = end;
        }
    }
    static_cast<Loaded*>(data)->objects.push_back(std::move(made));
    return 0;
}

// What an object asks the dynamic linker for.
struct Wants {
    const ElfW(Sym)* symbols = nullptr;
    const char* strings = nullptr;
    const ElfW(Rela)* plt = nullptr;
    size_t plt_count = 0;
    const ElfW(Rela)* others = nullptr;
    size_t others_count = 0;
};

Wants read_wants(const Object& object) {
    Wants wants;
    size_t relative = 0;
    auto at = [&](ElfW(Addr) value) { return value < object.base ? value + object.base : value; };
    for (const ElfW(Dyn)* entry = object.dynamic; entry->d_tag != DT_NULL; ++entry) {
        const auto value = entry->d_un.d_val;
        switch (entry->d_tag) {
            case DT_SYMTAB: wants.symbols = reinterpret_cast<const ElfW(Sym)*>(at(value)); break;
            case DT_STRTAB: wants.strings = reinterpret_cast<const char*>(at(value)); break;
            case DT_JMPREL: wants.plt = reinterpret_cast<const ElfW(Rela)*>(at(value)); break;
            case DT_PLTRELSZ: wants.plt_count = value / sizeof(ElfW(Rela)); break;
            case DT_RELA: wants.others = reinterpret_cast<const ElfW(Rela)*>(at(value)); break;
            case DT_RELASZ: wants.others_count = value / sizeof(ElfW(Rela)); break;
            case DT_RELACOUNT: relative = value; break;
            default: break;
        }
    }
    if (relative <= wants.others_count && wants.others != nullptr) {  // these come first
        wants.others += relative;
        wants.others_count -= relative;
    }
    return wants;
}

void write_slot(const Object& object, uintptr_t slot, void* target) {
    const auto page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    auto page = reinterpret_cast<void*>(slot & ~(page_bytes - 1));
    bool sealed = slot >= object.sealed_begin && slot < object.sealed_end;
    if (sealed && mprotect(page, page_bytes, PROT_READ | PROT_WRITE) != 0) {
        Dispatcher::get().meet_unknown("the driver past libeclip");
        return;
    }
    __atomic_store_n(reinterpret_cast<void**>(slot), target, __ATOMIC_RELEASE);
    if (sealed) mprotect(page, page_bytes, PROT_READ);
}

// What a call by this name should reach, or nothing where it is left as it is.
void* wanted_target(const char* name, void*& bypassed) {
    if (strcmp(name, "dlsym") == 0) {
        bypassed = original_dlsym(RTLD_NEXT, name);
        return original_dlsym(RTLD_DEFAULT, name);
    }
    if (!is_driver_name(name)) return nullptr;
    bypassed = real_symbol(name);
    if (bypassed == nullptr) return nullptr;
    if (void* hook = hook_of_symbol(name))  // somebody may stand in front of us
        return original_dlsym(RTLD_DEFAULT, name) == hook ? hook : nullptr;
    return is_unknown(name) ? in_front_of_unknown(name, bypassed) : nullptr;
}

void rebind(const Object& object, const Wants& wants, const ElfW(Rela)& entry) {
    const auto kind = ELF64_R_TYPE(entry.r_info);
    const auto index = ELF64_R_SYM(entry.r_info);
    bool call = kind == ECLIP_RELOCATION(JUMP_SLOT) || kind == ECLIP_RELOCATION(GLOB_DAT) ||
                (kind == ECLIP_ABSOLUTE && entry.r_addend == 0);
    if (!call || index == 0 || wants.symbols[index].st_shndx != SHN_UNDEF) return;
    const char* name = wants.strings + wants.symbols[index].st_name;
    void* bypassed = nullptr;
    void* target = wanted_target(name, bypassed);
    if (target == nullptr) return;
    uintptr_t slot = object.base + entry.r_offset;
    void* now = __atomic_load_n(reinterpret_cast<void**>(slot), __ATOMIC_ACQUIRE);
    // Bound to the driver; or not yet bound, which the object's own code will do at the first call.
    bool unbound = kind == ECLIP_RELOCATION(JUMP_SLOT) &&
                   object.has(reinterpret_cast<uintptr_t>(now));
    if (now == bypassed || unbound) write_slot(object, slot, target);
}

bool is_in(const Object& object, const void* address) {
    return address != nullptr && object.has(reinterpret_cast<uintptr_t>(address));
}

// False where the object cannot be looked at yet.
bool rebind_object(const Object& object) {
    // The driver and we ourselves call what we mean to call.
    if (object.dynamic == nullptr || is_in(object, reinterpret_cast<void*>(&rebind_new_objects)) ||
        is_in(object, real_symbol(kFirstCall)))
        return true;
    // Waits until whoever loads it is done, and keeps it.
    void* kept = object.name.empty() ? nullptr
                                     : dlopen(object.name.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (!object.name.empty() && kept == nullptr)  // the kernel's own is no file at all
        return object.name.find('/') == std::string::npos;
    Wants wants = read_wants(object);
    if (wants.symbols != nullptr && wants.strings != nullptr) {
        for (size_t index = 0; index < wants.plt_count; ++index)
            rebind(object, wants, wants.plt[index]);
        for (size_t index = 0; index < wants.others_count; ++index)
            rebind(object, wants, wants.others[index]);
    }
    if (kept != nullptr) dlclose(kept);
    return true;
}

}  // namespace

void rebind_new_objects() {
    static std::mutex lock;
    static unsigned long long adds = 0, subs = 0;
    static std::set<std::pair<uintptr_t, std::string>> looked_at;
    thread_local bool busy = false;  // the functions below may be asked for by name, too
    if (busy) return;
    Loaded now;
    dl_iterate_phdr(read_counts, &now);
    if (__atomic_load_n(&adds, __ATOMIC_ACQUIRE) == now.adds) return;
    busy = true;
    std::unique_lock hold(lock, std::try_to_lock);
    if (hold.owns_lock()) {
        dl_iterate_phdr(read_object, &now);
        if (subs != now.subs) looked_at.clear();  // another may be where one was
        subs = now.subs;
        bool all = true;
        for (const Object& object : now.objects) {
            auto key = std::make_pair(object.base, object.name);
            if (looked_at.contains(key)) continue;
            if (rebind_object(object)) looked_at.insert(key);
            else all = false;
        }
        if (all) __atomic_store_n(&adds, now.adds, __ATOMIC_RELEASE);
    }
    busy = false;
}

}  // namespace eclip
