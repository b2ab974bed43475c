// The switch between stacks that makes fibers, for Linux on x86-64 and arm64.
#pragma once

namespace host {

// Saves the registers that a call preserves on this stack, its top in *save, and returns on the stack
// whose top is `to`. A new fiber's stack has SAVED_WORDS zeros there, but for its function's address
// as the RETURN_WORD.
extern "C" void host_switch(void** save, void* to);
#if defined(__x86_64__)
asm(R"(
    .text
    .hidden host_switch
    .type host_switch, @function
host_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
    .size host_switch, . - host_switch
)");
constexpr unsigned SAVED_WORDS = 8, RETURN_WORD = 6;  // an unused word keeps stacks aligned
#elif defined(__aarch64__)
asm(R"(
    .text
    .hidden host_switch
    .type host_switch, @function
host_switch:
    sub sp, sp, #160
    stp x19, x20, [sp]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size host_switch, . - host_switch
)");
constexpr unsigned SAVED_WORDS = 20, RETURN_WORD = 11;
#else
#error "no switch of stacks for this processor"
#endif

}  // namespace host
