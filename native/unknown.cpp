#include "unknown.h"

#include <atomic>
#include <cstddef>
#include <cstring>
#include <mutex>

#include "dispatcher.h"
#include "names.h"

#define ECLIP_STUBS 256
#define ECLIP_TEXT_OF(value) #value
#define ECLIP_TEXT(value) ECLIP_TEXT_OF(value)

namespace eclip {
namespace {

constexpr size_t kStubs = ECLIP_STUBS;
constexpr size_t kStubBytes = 16;

struct Unknown {
    char name[64];
    void* function;
};
Unknown unknowns[kStubs];
std::atomic<size_t> unknown_count{0};
std::mutex unknown_lock;

}  // namespace

bool is_unknown(const char* name) { return is_driver_name(name) && !is_known_name(name); }

}  // namespace eclip

extern "C" __attribute__((visibility("hidden"))) const char eclip_stubs[];
extern "C" __attribute__((visibility("hidden"), used)) void* eclip_unknown_called(size_t index) {
    const eclip::Unknown& unknown = eclip::unknowns[index];
    eclip::Dispatcher::get().meet_unknown(unknown.name);
    return unknown.function;
}

void* eclip::in_front_of_unknown(const char* name, void* function) {
    std::lock_guard hold(unknown_lock);
    size_t count = unknown_count.load();
    for (size_t index = 0; index < count; ++index)
        if (unknowns[index].function == function)
            return const_cast<char*>(eclip_stubs + index * kStubBytes);
    if (count == kStubs) {
        Dispatcher::get().meet_unknown(name);
        return function;
    }
    Unknown& made = unknowns[count];
    strncpy(made.name, name, sizeof made.name - 1);
    made.function = function;
    unknown_count.store(count + 1);
    return const_cast<char*>(eclip_stubs + count * kStubBytes);
}

// A stub knows its number and nothing of the arguments: all that can carry one is kept, and the
// function is jumped to, so that arguments on the stack are where it looks for them.
#if defined(__x86_64__)
asm(R"(
    .text
    .balign 16
    .hidden eclip_stubs
    .globl eclip_stubs
eclip_stubs:
    .set eclip_stub_index, 0
    .rept )" ECLIP_TEXT(ECLIP_STUBS) R"(
    .balign 16
    endbr64
    .byte 0x68  # push, with four bytes even for small numbers: all stubs are alike
    .long eclip_stub_index
    jmp 1f
    .set eclip_stub_index, eclip_stub_index + 1
    .endr
    .balign 16
1:  pop %r11
    push %rdi
    push %rsi
    push %rdx
    push %rcx
    push %r8
    push %r9
    push %rax
    push %r10
    sub $136, %rsp
    movups %xmm0, (%rsp)
    movups %xmm1, 16(%rsp)
    movups %xmm2, 32(%rsp)
    movups %xmm3, 48(%rsp)
    movups %xmm4, 64(%rsp)
    movups %xmm5, 80(%rsp)
    movups %xmm6, 96(%rsp)
    movups %xmm7, 112(%rsp)
    mov %r11, %rdi
    call eclip_unknown_called
    mov %rax, %r11
    movups (%rsp), %xmm0
    movups 16(%rsp), %xmm1
    movups 32(%rsp), %xmm2
    movups 48(%rsp), %xmm3
    movups 64(%rsp), %xmm4
    movups 80(%rsp), %xmm5
    movups 96(%rsp), %xmm6
    movups 112(%rsp), %xmm7
    add $136, %rsp
    pop %r10
    pop %rax
    pop %r9
    pop %r8
    pop %rcx
    pop %rdx
    pop %rsi
    pop %rdi
    jmp *%r11
)");
#elif defined(__aarch64__)
asm(R"(
    .text
    .balign 16
    .hidden eclip_stubs
    .globl eclip_stubs
eclip_stubs:
    .set eclip_stub_index, 0
    .rept )" ECLIP_TEXT(ECLIP_STUBS) R"(
    .balign 16
    hint #34
    mov x16, #eclip_stub_index
    b 1f
    .set eclip_stub_index, eclip_stub_index + 1
    .endr
    .balign 16
1:  stp x29, x30, [sp, #-224]!
    stp x0, x1, [sp, #16]
    stp x2, x3, [sp, #32]
    stp x4, x5, [sp, #48]
    stp x6, x7, [sp, #64]
    str x8, [sp, #80]
    stp q0, q1, [sp, #96]
    stp q2, q3, [sp, #128]
    stp q4, q5, [sp, #160]
    stp q6, q7, [sp, #192]
    mov x0, x16
    bl eclip_unknown_called
    mov x16, x0
    ldp x0, x1, [sp, #16]
    ldp x2, x3, [sp, #32]
    ldp x4, x5, [sp, #48]
    ldp x6, x7, [sp, #64]
    ldr x8, [sp, #80]
    ldp q0, q1, [sp, #96]
    ldp q2, q3, [sp, #128]
    ldp q4, q5, [sp, #160]
    ldp q6, q7, [sp, #192]
    ldp x29, x30, [sp], #224
    br x16
)");
#endif
