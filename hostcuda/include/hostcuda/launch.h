// Kernel launches: cudaLaunchKernelEx, and the attributes of kernels. There is no <<<>>>.
#pragma once
#include <functional>
#include <initializer_list>
#include <tuple>
#include <type_traits>
#include <utility>

#include "hostcuda/execution.h"
#include "hostcuda/internal.h"

namespace hostcuda {

// Runs threads of the current block on the calling fiber until none is left for it.
using RunThreads = void (*)(const void* call);

struct Grid {
    const void* kernel;
    const char* name;   // demangled
    dim3 grid, block;
    size_t dynamic_bytes;
    RunThreads run_threads;
    const void* call;   // kernel pointer and arguments, for run_threads
};

// The demangled name of a kernel; lives as long as the program.
const char* kernel_name(const void* kernel);

// Refuses what CUDA refuses, with CUDA's error and a line on stderr that names kernel, value and fix.
cudaError_t check_launch(const cudaLaunchConfig_t* config, const void* kernel);

// Runs all blocks; returns when they are done.
void run_grid(const Grid& grid);

template <class... Params>
struct KernelCall {
    void (*kernel)(Params...);
    std::tuple<Params...> args;

    HOSTCUDA_UNCHECKED static void run_threads(const void* opaque) {
        const KernelCall& call = *static_cast<const KernelCall*>(opaque);
        void (*const kernel)(Params...) = call.kernel;
        // The arguments are handed over by value at each call, so a thread that changes its parameters changes its own.
        std::apply(
            [kernel](const Params&... args) {
                while (begin_thread()) kernel(args...);
            },
            call.args);
    }
};

template <class... Params>
inline void check_pointer_args(const char* name, const Params&... args) {
    int index = 0;
    auto check = [&](const auto& arg) {
        if constexpr (std::is_pointer_v<std::decay_t<decltype(arg)>>) check_device_pointer(arg, name, index);
        index++;
    };
    (check(args), ...);
    (void)check;
}

// An argument as HOSTCUDA_FAULT sees it.
struct Argument {
    bool is_pointer;
    const void* pointer;
};
template <class T>
Argument argument_of([[maybe_unused]] const T& arg) {
    if constexpr (std::is_pointer_v<T>) return {true, arg};
    else return {false, nullptr};
}

// HOSTCUDA_FAULT (src/fault.cpp): if this launch is the one it names, the work with the fault right after it; else the work as it is.
std::function<void()> with_planted_fault(const char* kernel, std::initializer_list<Argument> arguments, std::function<void()> work);

template <class... Params>
cudaError_t launch_kernel(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Params... args) {
    static_assert((std::is_trivially_copyable_v<Params> && ...), "kernel parameters are copied as bytes");
    static_assert((sizeof(Params) + ... + 0) <= 4096, "a kernel's parameters hold 4096 bytes at most");
    const void* const address = reinterpret_cast<const void*>(kernel);
    if (const cudaError_t error = check_launch(config, address); error != cudaSuccess) return set_error(error);
    const char* const name = kernel_name(address);
    if (protect_mode()) check_pointer_args(name, args...);
    const KernelCall<Params...> call{kernel, std::tuple<Params...>(args...)};
    const dim3 grid = config->gridDim, block = config->blockDim;
    const size_t dynamic_bytes = config->dynamicSmemBytes;
    std::function<void()> work = [=] {
        run_grid(Grid{address, name, grid, block, dynamic_bytes, KernelCall<Params...>::run_threads, &call});
    };
    if (fault_mode()) work = with_planted_fault(name, {argument_of(args)...}, std::move(work));
    return set_error(enqueue(config->stream, name, std::move(work)));
}

cudaError_t set_function_attribute(const void* kernel, cudaFuncAttribute attribute, int value);
cudaError_t get_function_attributes(cudaFuncAttributes* attributes, const void* kernel);

}  // namespace hostcuda

// Arguments are converted to the kernel's parameter types, then copied.
template <class... Params, class... Args>
inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args&&... args) {
    return hostcuda::launch_kernel<Params...>(config, kernel, static_cast<Args&&>(args)...);
}

template <class Function>
inline cudaError_t cudaFuncSetAttribute(Function* kernel, cudaFuncAttribute attribute, int value) {
    return hostcuda::set_function_attribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

template <class Function>
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Function* kernel) {
    return hostcuda::get_function_attributes(attributes, reinterpret_cast<const void*>(kernel));
}
