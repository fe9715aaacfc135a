// What kernels call: barriers, warp collectives, asynchronous copies, atomics, arithmetic.
#pragma once
#include "hostcuda/async_copy.h"
#include "hostcuda/atomics.h"
#include "hostcuda/device_math.h"
#include "hostcuda/execution.h"
#include "hostcuda/warp.h"

// The barriers' last arguments take the place of the call, for messages; nobody passes them.
__forceinline__ void __syncthreads(int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
    hostcuda::block_barrier(hostcuda::Barrier::plain, 0, line, file);
}
__forceinline__ int __syncthreads_count(int predicate, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
    return hostcuda::block_barrier(hostcuda::Barrier::count, predicate, line, file);
}
__forceinline__ int __syncthreads_and(int predicate, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
    return hostcuda::block_barrier(hostcuda::Barrier::all, predicate, line, file);
}
__forceinline__ int __syncthreads_or(int predicate, int line = __builtin_LINE(), const char* file = __builtin_FILE()) {
    return hostcuda::block_barrier(hostcuda::Barrier::any, predicate, line, file);
}

inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
[[noreturn]] inline void __trap() { hostcuda::trap(); }
