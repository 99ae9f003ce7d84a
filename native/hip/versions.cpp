// Standing in front of dlvsym: HIP's symbols have versions, by which programs may ask for them.
//
// As in ../preload.cpp, a call that is not for us jumps to the original and leaves no frame behind.
#include <dlfcn.h>
#include "../names.h"
#include "../resolve.h"
#include "../symbols.h"

extern "C" {
__attribute__((visibility("hidden"))) void* (*eclip_original_dlvsym)(void*, const char*,
                                                                     const char*) = nullptr;
__attribute__((visibility("hidden"), used)) void* eclip_replace_version(void*, const char* name,
                                                                        const char* version,
                                                                        const void* caller);
}

namespace eclip {
namespace {

// By its own table of symbols: dlsym and dlvsym are ours here, and either would be needed to find the
// other.
void* find_in(const char* library, const char* name) {
    auto object = static_cast<const link_map*>(dlopen(library, RTLD_LAZY | RTLD_NOLOAD));
    return object != nullptr ? Symbols(object->l_addr, object->l_ld).find(name) : nullptr;
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
