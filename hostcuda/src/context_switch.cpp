// Fresh contexts, and the switch of machines other than x86-64.
#include "context_switch.h"

#include <cstdint>
#include <utility>

#if defined(__x86_64__) && !defined(HOSTCUDA_BOOST_CONTEXT)

namespace hostcuda {

void* make_context(char*, char* top, void (*entry)()) {
    // switch_context pops the address to go to. At a function's first instruction rsp is 8 below a multiple of 16 (a call has just pushed the
    // return address); compilers rely on it for aligned vector spills.
    auto* const frame = reinterpret_cast<uint64_t*>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{63}) - 2;
    frame[0] = reinterpret_cast<uint64_t>(entry);
    frame[1] = 0;  // entry's return address: the end of a back trace
    return frame;
}

}  // namespace hostcuda

#else

#include <boost/context/detail/fcontext.hpp>

namespace hostcuda {
namespace {
using boost::context::detail::transfer_t;

// Whoever arrives anywhere brings the context it left and the place to save it.
void save_origin(transfer_t transfer) { *static_cast<void**>(transfer.data) = transfer.fctx; }

// Boost's entry function has an argument of its own; this is the one wanted.
thread_local void (*starting)() = nullptr;

using First = std::pair<void*, void (*)()>;  // Boost's context and the entry function
}  // namespace

void switch_context(void** save, void* target) {
    // A context that has not run yet is an odd pointer to what make_context kept.
    if (reinterpret_cast<uintptr_t>(target) & 1) {
        const First& first = *reinterpret_cast<const First*>(reinterpret_cast<uintptr_t>(target) - 1);
        starting = first.second;
        target = first.first;
    }
    save_origin(boost::context::detail::jump_fcontext(target, save));
}

void* make_context(char* bottom, char* top, void (*entry)()) {
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
