// What only a preloaded library does: stand in front of dlsym.
//
// The C library finds out who asks by the return address (RTLD_NEXT means "after the caller"), so a
// call that is not ours must jump to the original and leave no frame behind.
#include <dlfcn.h>

#include <cstdint>

#include "bindings.h"
#include "names.h"
#include "resolve.h"

#if defined(__x86_64__)
#define ECLIP_DLSYM_VERSION "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define ECLIP_DLSYM_VERSION "GLIBC_2.17"
#else
#error "libeclip is preloaded on x86-64 and aarch64 only"
#endif

extern "C" {
__attribute__((visibility("hidden"))) void* (*eclip_original_dlsym)(void*, const char*) = nullptr;
__attribute__((visibility("hidden"), used)) void* eclip_replace_symbol(void*, const char* name,
                                                                          const void* caller);
}

// An answer: there is no such function, whatever we ourselves export.
static void* const kAbsent = reinterpret_cast<void*>(uintptr_t{1});

namespace eclip {

void* original_dlsym(void* handle, const char* name) {
    if (eclip_original_dlsym == nullptr)
        eclip_original_dlsym = reinterpret_cast<void* (*)(void*, const char*)>(
            dlvsym(RTLD_NEXT, "dlsym", ECLIP_DLSYM_VERSION));
    return eclip_original_dlsym(handle, name);
}

}  // namespace eclip

// Libraries preloaded behind us are there from the start, and only the dynamic linker knows who comes
// next. Where the driver is there, too, it is asked now: later it may be locked by who waits for the
// first call.
__attribute__((constructor)) static void look_behind() {
    using namespace eclip;
    const bool has_driver = original_dlsym(RTLD_NEXT, kFirstCall) != nullptr;
    bool has_others = has_driver;
    for (const Entry& entry : entries())
        has_others = has_others || original_dlsym(RTLD_NEXT, entry.symbol) != nullptr;
    if (has_others) others_stand_behind();
    if (has_driver) load_driver();
}

// The hook for a driver symbol, nothing, or kAbsent; afterwards the original is known.
void* eclip_replace_symbol(void* handle, const char* name, const void* caller) {
    if (eclip_original_dlsym == nullptr) eclip::original_dlsym(RTLD_DEFAULT, "dlsym");
    if (name == nullptr) return nullptr;
    // Asking for a function of an object is how a program gets into one that it has just loaded.
    eclip::rebind_new_objects();
    if (!eclip::is_driver_name(name)) return nullptr;
    void* hook = eclip::hook_of_symbol(name);
    if (hook != nullptr) {
        // The C library knows who comes after the caller: we or, if it stands behind us, another.
        return handle == RTLD_NEXT || eclip::stands_behind(caller, name) ? nullptr : hook;
    }
    if (eclip::is_lacking(name)) {
        eclip::real_symbol(name);  // leaves the message for dlerror()
        return kAbsent;
    }
    return eclip::front_of_symbol(name);
}

#if defined(__x86_64__)
asm(R"(
    .text
    .globl dlsym
    .type dlsym, @function
dlsym:
    endbr64
    mov (%rsp), %rdx
    push %rdi
    push %rsi
    sub $8, %rsp
    call eclip_replace_symbol
    add $8, %rsp
    pop %rsi
    pop %rdi
    cmp $1, %rax
    ja 1f
    je 2f
    jmp *eclip_original_dlsym(%rip)
2:  xor %eax, %eax
1:  ret
    .size dlsym, .-dlsym
)");
#else
asm(R"(
    .text
    .globl dlsym
    .type dlsym, %function
dlsym:
    stp x0, x1, [sp, #-32]!
    str x30, [sp, #16]
    mov x2, x30
    bl eclip_replace_symbol
    mov x2, x0
    ldr x30, [sp, #16]
    ldp x0, x1, [sp], #32
    cbz x2, 1f
    cmp x2, #1
    csel x0, xzr, x2, eq
    ret
1:  adrp x2, eclip_original_dlsym
    ldr x2, [x2, :lo12:eclip_original_dlsym]
    br x2
    .size dlsym, .-dlsym
)");
#endif
