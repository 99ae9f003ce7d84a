// Standing in front of dlvsym: HIP's symbols have versions, by which programs may ask for them.
//
// As in ../preload.cpp, a call that is not for us jumps to the original and leaves no frame behind.
#include <dlfcn.h>
#include <elf.h>
#include <link.h>

#include <cstring>

#include "../names.h"
#include "../resolve.h"

extern "C" {
__attribute__((visibility("hidden"))) void* (*eclip_original_dlvsym)(void*, const char*,
                                                                     const char*) = nullptr;
__attribute__((visibility("hidden"), used)) void* eclip_replace_version(void*, const char* name,
                                                                        const char* version,
                                                                        const void* caller);
}

namespace eclip {
namespace {

// Where an object of the C library has a function, by its own table of symbols: dlsym and dlvsym are
// ours here, and either would be needed to find the other.
void* find_in(const char* library, const char* name) {
    auto object = static_cast<const link_map*>(dlopen(library, RTLD_LAZY | RTLD_NOLOAD));
    if (object == nullptr) return nullptr;
    const ElfW(Sym)* symbols = nullptr;
    const char* strings = nullptr;
    const uint32_t* table = nullptr;
    for (const ElfW(Dyn)* entry = object->l_ld; entry->d_tag != DT_NULL; ++entry) {
        auto value = entry->d_un.d_ptr;
        auto at = reinterpret_cast<const void*>(value < object->l_addr ? value + object->l_addr : value);
        if (entry->d_tag == DT_SYMTAB) symbols = static_cast<const ElfW(Sym)*>(at);
        if (entry->d_tag == DT_STRTAB) strings = static_cast<const char*>(at);
        if (entry->d_tag == DT_GNU_HASH) table = static_cast<const uint32_t*>(at);
    }
    if (symbols == nullptr || strings == nullptr || table == nullptr) return nullptr;
    uint32_t hash = 5381;
    for (const char* letter = name; *letter != '\0'; ++letter)
        hash = hash * 33 + static_cast<unsigned char>(*letter);
    const uint32_t bucket_count = table[0], first = table[1], words = table[2];
    const uint32_t* buckets = table + 4 + words * sizeof(ElfW(Addr)) / sizeof(uint32_t);
    const uint32_t* chain = buckets + bucket_count;
    for (uint32_t index = buckets[hash % bucket_count]; index >= first; ++index) {
        const uint32_t link = chain[index - first];
        const ElfW(Sym)& symbol = symbols[index];
        if ((link | 1) == (hash | 1) && strcmp(strings + symbol.st_name, name) == 0)
            return reinterpret_cast<void*>(object->l_addr + symbol.st_value);
        if (link & 1) break;
    }
    return nullptr;
}

void find_original() {
    void* found = find_in("libc.so.6", "dlvsym");
    if (found == nullptr) found = find_in("libdl.so.2", "dlvsym");  // before glibc 2.34
    eclip_original_dlvsym = reinterpret_cast<void* (*)(void*, const char*, const char*)>(found);
}

}  // namespace
}  // namespace eclip

// The hook for a symbol that HIP has in this version, or nothing.
void* eclip_replace_version(void* handle, const char* name, const char* version,
                            const void* caller) {
    using namespace eclip;
    if (eclip_original_dlvsym == nullptr) find_original();
    if (name == nullptr || version == nullptr || handle == RTLD_NEXT || !is_driver_name(name))
        return nullptr;
    void* real = real_symbol(name);
    void* object = real != nullptr ? open_driver_library() : nullptr;
    if (object == nullptr || stands_behind(caller, name)) return nullptr;
    return eclip_original_dlvsym(object, name, version) == real ? front_of_symbol(name) : nullptr;
}

#if defined(__x86_64__)
asm(R"(
    .text
    .globl dlvsym
    .type dlvsym, @function
dlvsym:
    endbr64
    mov (%rsp), %rcx
    push %rdi
    push %rsi
    push %rdx
    call eclip_replace_version
    pop %rdx
    pop %rsi
    pop %rdi
    test %rax, %rax
    jnz 1f
    jmp *eclip_original_dlvsym(%rip)
1:  ret
    .size dlvsym, .-dlvsym
)");
#else
asm(R"(
    .text
    .globl dlvsym
    .type dlvsym, %function
dlvsym:
    stp x0, x1, [sp, #-32]!
    stp x2, x30, [sp, #16]
    mov x3, x30
    bl eclip_replace_version
    mov x4, x0
    ldp x2, x30, [sp, #16]
    ldp x0, x1, [sp], #32
    cbz x4, 1f
    mov x0, x4
    ret
1:  adrp x4, eclip_original_dlvsym
    ldr x4, [x4, :lo12:eclip_original_dlvsym]
    br x4
    .size dlvsym, .-dlvsym
)");
#endif
