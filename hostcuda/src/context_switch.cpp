// Fresh contexts, and the switch of machines other than x86-64.
#include "context_switch.h"

#include <cstdint>

#if defined(__x86_64__) && !defined(HOSTCUDA_BOOST_CONTEXT)

namespace hostcuda {

Context make_context(char*, char* top, void (*entry)()) {
    // At a function's first instruction rsp is 8 below a multiple of 16 (a call has just pushed the return address); compilers rely on it for
    // aligned vector spills.
    auto* const frame = reinterpret_cast<uint64_t*>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{63}) - 1;
    frame[0] = 0;  // entry's return address: the end of a back trace
    return Context{frame, nullptr, reinterpret_cast<void*>(entry)};
}

}  // namespace hostcuda

#else

#include <boost/context/detail/fcontext.hpp>

namespace hostcuda {
namespace {
using boost::context::detail::transfer_t;

// Whoever arrives anywhere brings the context it left and the place to save it.
void save_origin(transfer_t transfer) { static_cast<Context*>(transfer.data)->stack_pointer = transfer.fctx; }

// Boost's entry function has an argument of its own; this is the one wanted.
thread_local void (*starting)() = nullptr;
}  // namespace

void switch_context(Context& save, const Context& target) {
    // Only a context that has not run yet has an address.
    if (target.address != nullptr) starting = reinterpret_cast<void (*)()>(target.address);
    save.address = nullptr;
    save_origin(boost::context::detail::jump_fcontext(target.stack_pointer, &save));
}

Context make_context(char* bottom, char* top, void (*entry)()) {
    void* const made = boost::context::detail::make_fcontext(top, static_cast<size_t>(top - bottom), [](transfer_t transfer) {
        save_origin(transfer);
        starting();
    });
    return Context{made, nullptr, reinterpret_cast<void*>(entry)};
}

}  // namespace hostcuda

#endif
