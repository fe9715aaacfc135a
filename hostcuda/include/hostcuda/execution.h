// What a kernel and the block executor say to one another: indices, the loop that runs threads, barriers, warp meetings, shared memory.
//
// One OS thread runs one block at a time. Its CUDA threads run one after another on one stack, as a loop, until one of them has to wait;
// see "How a kernel runs" in hostcuda/README.md. So everything about "the running thread" is a thread_local variable here.
#pragma once
#include "hostcuda/types.h"

// In a TSan build each CUDA thread is a thread of its own to TSan, and they all run the executor's code on one OS thread without locks.
// That code is not what is checked.
#define HOSTCUDA_UNCHECKED __attribute__((no_sanitize("thread")))

// hostcuda is always linked into the executable, so thread-local variables are one segment-relative load.
#define HOSTCUDA_THREAD_LOCAL extern constinit thread_local __attribute__((tls_model("local-exec")))

HOSTCUDA_THREAD_LOCAL uint3 threadIdx;
HOSTCUDA_THREAD_LOCAL uint3 blockIdx;
HOSTCUDA_THREAD_LOCAL dim3 blockDim;
HOSTCUDA_THREAD_LOCAL dim3 gridDim;
inline constexpr int warpSize = 32;

namespace hostcuda {

// ---- the loop over a block's threads -------------------------------------------------------------------------------------------
struct BlockProgress {
    unsigned thread;       // linear index of the thread that runs
    unsigned next;         // first thread that has not been started
    unsigned direct_end;   // threads below it may be started by the plain loop; 0 when the scheduler decides (schedule seeds, TSan)
    unsigned ready_warps;  // warps with lanes that waited and may go on
    unsigned count;        // threads in the block; 0 outside kernels
    unsigned next_x, next_y, next_z;  // threadIdx of `next`
};
HOSTCUDA_THREAD_LOCAL BlockProgress block_progress;

bool begin_thread_slow();

// Ends the thread that ran, if any, and starts another one on this stack; false when this stack has no more to run.
HOSTCUDA_UNCHECKED inline bool begin_thread() {
    BlockProgress& progress = block_progress;
    if (progress.next >= progress.direct_end || progress.ready_warps != 0) return begin_thread_slow();
    // Relaxed atomics are plain loads and stores that the compiler may not merge with their neighbours: a load that spans a counter just stored
    // and something else has to wait for the store to reach the cache, three times the cost of the whole loop otherwise.
    const unsigned next = __atomic_load_n(&progress.next, __ATOMIC_RELAXED);
    const unsigned x = __atomic_load_n(&progress.next_x, __ATOMIC_RELAXED);
    progress.thread = next;
    __atomic_store_n(&progress.next, next + 1, __ATOMIC_RELAXED);
    threadIdx = uint3{x, progress.next_y, progress.next_z};
    __atomic_store_n(&progress.next_x, x + 1, __ATOMIC_RELAXED);
    if (x + 1 == blockDim.x) {
        progress.next_x = 0;
        if (++progress.next_y == blockDim.y) {
            progress.next_y = 0;
            ++progress.next_z;
        }
    }
    return true;
}

// ---- barriers ------------------------------------------------------------------------------------------------------------------
enum class Barrier { plain, count, all, any };
int block_barrier(Barrier kind, int predicate, int line, const char* file);

// ---- warp meetings -------------------------------------------------------------------------------------------------------------
// Computes for all lanes named in mask; lane_args[i] is what lane i brought. Runs once, in the lane that came last.
using WarpCompute = void (*)(void** lane_args, unsigned mask);

// Meets the lanes named in mask (the caller among them), each with arguments of its own, which it may also get results in.
// All must bring the same function. `name` is for messages.
void warp_collective(unsigned mask, void* args, WarpCompute compute, const char* name = "warp_collective");

// The lane whose results are being computed reads from a lane that is not there: a stop that names both.
[[noreturn]] void stop_missing_source(const char* name, unsigned mask, unsigned lane, unsigned source);

unsigned active_lanes();

// ---- shared memory -------------------------------------------------------------------------------------------------------------
// Static shared memory: the same pointer for every thread of a block that brings the same key. New for each block, poisoned with NaN
// patterns, with guarded bytes on both sides. It has the alignment asked for and no more.
struct SharedTable {
    static constexpr unsigned kMaxArrays = 64;
    unsigned count;
    const void* key[kMaxArrays];
    void* base[kMaxArrays];
    void* dynamic_base;
};
HOSTCUDA_THREAD_LOCAL SharedTable shared_table;

void* shared_array_slow(const void* key, size_t bytes, size_t align);

HOSTCUDA_UNCHECKED inline void* shared_array(const void* key, size_t bytes, size_t align) {
    const SharedTable& table = shared_table;
    for (unsigned i = 0; i < table.count; i++) {
        if (table.key[i] == key) return table.base[i];
    }
    return shared_array_slow(key, bytes, align);
}

// The bytes the launch gave: a multiple of 16, and of nothing larger.
[[noreturn]] void stop_no_dynamic_shared();
HOSTCUDA_UNCHECKED inline void* dynamic_shared() {
    void* const base = shared_table.dynamic_base;
    if (__builtin_expect(base == nullptr, 0)) stop_no_dynamic_shared();
    return base;
}

// ---- vector accesses -----------------------------------------------------------------------------------------------------------
[[noreturn]] void stop_unaligned(const void* address, size_t bytes);

// A vector access of `bytes` (a power of two) at `address`: not aligned is a stop, as it is a fault on a GPU.
inline void check_aligned(const void* address, size_t bytes) {
    if (__builtin_expect((reinterpret_cast<uintptr_t>(address) & (bytes - 1)) != 0, 0)) stop_unaligned(address, bytes);
}

[[noreturn]] void trap();

}  // namespace hostcuda
