// The switch itself: x86-64 by hand, other machines through Boost.Context.
//
// A switch is a function call, so only the registers a callee must keep are saved: rbx, rbp, r12-r15, and the control words of SSE and
// x87. Loading control words is slow and they hardly ever differ, so they are compared first.
#include "context_switch.h"

#include <cstdint>

#if defined(__x86_64__) && !defined(HOSTCUDA_BOOST_CONTEXT)

extern "C" void hostcuda_switch_context(void** save, void* target);

// The frame, from low to high addresses: mxcsr, x87 control word, r15, r14, r13, r12, rbx, rbp, return address.
// The jump through a register instead of `ret` keeps the processor's return predictor out of it: the return address was never called.
asm(R"(
        .text
        .p2align 4
        .globl hostcuda_switch_context
        .hidden hostcuda_switch_context
        .type hostcuda_switch_context, @function
hostcuda_switch_context:
        pushq %rbp
        pushq %rbx
        pushq %r12
        pushq %r13
        pushq %r14
        pushq %r15
        subq $8, %rsp
        stmxcsr (%rsp)
        fnstcw 4(%rsp)
        movl (%rsp), %eax
        movzwl 4(%rsp), %ecx
        movq %rsp, (%rdi)
        movq %rsi, %rsp
        cmpl %eax, (%rsp)
        jne 2f
1:      cmpw %cx, 4(%rsp)
        jne 3f
4:      addq $8, %rsp
        popq %r15
        popq %r14
        popq %r13
        popq %r12
        popq %rbx
        popq %rbp
        popq %rdx
        jmpq *%rdx
2:      ldmxcsr (%rsp)
        jmp 1b
3:      fldcw 4(%rsp)
        jmp 4b
        .size hostcuda_switch_context, .-hostcuda_switch_context
)");

namespace hostcuda {

void switch_context(void** save, void* target) { hostcuda_switch_context(save, target); }

void* make_context(char*, char* top, void (*entry)()) {
    // At a function's first instruction rsp is 8 below a multiple of 16 (a call has just pushed the return address); compilers rely on it
    // for aligned vector spills.
    auto* const frame = reinterpret_cast<uint64_t*>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{63}) - 16;
    for (int i = 0; i < 16; i++) frame[i] = 0;  // among them the "return address" of entry: the end of a back trace
    uint32_t mxcsr;
    uint16_t control_word;
    asm volatile("stmxcsr %0" : "=m"(mxcsr));
    asm volatile("fnstcw %0" : "=m"(control_word));
    frame[1] = mxcsr | static_cast<uint64_t>(control_word) << 32;
    frame[8] = reinterpret_cast<uint64_t>(entry);
    return frame + 1;  // after the jump rsp is frame + 9: 8 modulo 16
}

}  // namespace hostcuda

#else

#include <boost/context/detail/fcontext.hpp>

namespace hostcuda {
namespace {
using boost::context::detail::transfer_t;

// Whoever arrives anywhere brings the context it left and the place to save it.
void save_origin(transfer_t transfer) { *static_cast<void**>(transfer.data) = transfer.fctx; }

// Boost's entry function has an argument; the wanted one is kept at the top of the stack until its first run.
struct Start {
    void (*entry)();
};
thread_local void (*starting)() = nullptr;
}  // namespace

void switch_context(void** save, void* target) {
    // An unstarted context is marked by an odd pointer to its Start.
    if (reinterpret_cast<uintptr_t>(target) & 1) {
        auto* const start = reinterpret_cast<std::pair<void*, void (*)()>*>(reinterpret_cast<uintptr_t>(target) - 1);
        starting = start->second;
        target = start->first;
    }
    save_origin(boost::context::detail::jump_fcontext(target, save));
}

void* make_context(char* bottom, char* top, void (*entry)()) {
    using First = std::pair<void*, void (*)()>;
    auto* const start = reinterpret_cast<First*>((reinterpret_cast<uintptr_t>(top) & ~uintptr_t{63}) - 64);
    char* const stack_top = reinterpret_cast<char*>(start);
    start->first = boost::context::detail::make_fcontext(stack_top, static_cast<size_t>(stack_top - bottom), [](transfer_t transfer) {
        save_origin(transfer);
        starting();
    });
    start->second = entry;
    return reinterpret_cast<char*>(start) + 1;
}

}  // namespace hostcuda

#endif
