// cp.async: a thread's own asynchronous copies from global to shared memory, and the groups in which it waits for them.
//
// PTX ISA, "Data Movement and Conversion Instructions: Asynchronous Copy", of which it is the part "Non-bulk copy": cp.async,
// cp.async.commit_group and cp.async.wait_group. What a program may count on:
// - a copy has landed, and is visible to the thread that issued it, after a wait that covers its group; no barrier and no other
//   thread's wait makes it land. Other threads need a barrier after that wait.
// - two copies have no order before that wait, and a copy that was never committed is in no group.
// - a group may be empty, and counts.
//
// By default a copy is done at its call. With HOSTCUDA_ASYNC=1 it is as late as it may be: the destination is poison from the call on, and
// the source is read, and the data land, at the wait that covers the copy, in order of issue. So a missing or too weak wait shows as NaN.
#pragma once
#include "hostcuda/execution.h"

namespace hostcuda {

// Where copies are done at their call: the block's shared memory. Empty outside kernels, and with HOSTCUDA_ASYNC=1.
struct AsyncCopySpace {
    uintptr_t begin;
    size_t bytes;
};
HOSTCUDA_THREAD_LOCAL AsyncCopySpace async_copy_space;

HOSTCUDA_UNCHECKED inline bool copies_at_once() { return async_copy_space.bytes != 0; }
HOSTCUDA_UNCHECKED inline bool copies_at_once_to(uintptr_t shared) { return shared - async_copy_space.begin < async_copy_space.bytes; }

// `bytes` (4, 8 or 16) between addresses that are aligned to them: one load and one store. Not a memcpy, which ThreadSanitizer may not see: g++
// expands one of unknown size without telling it, clang calls the library for 16 bytes.
typedef uint32_t CopiedWord4 __attribute__((may_alias));
typedef uint64_t CopiedWord8 __attribute__((may_alias));
typedef uint64_t CopiedWord16 __attribute__((vector_size(16), may_alias));
__forceinline__ void copy_word(void* to, const void* from, unsigned bytes) {
    if (bytes == 16) {
        *static_cast<CopiedWord16*>(to) = *static_cast<const CopiedWord16*>(from);
    } else if (bytes == 8) {
        *static_cast<CopiedWord8*>(to) = *static_cast<const CopiedWord8*>(from);
    } else {
        *static_cast<CopiedWord4*>(to) = *static_cast<const CopiedWord4*>(from);
    }
}

void async_copy_slow(void* shared, const void* global, unsigned bytes, unsigned source_bytes);
void async_copy_commit_slow();
void async_copy_wait_slow(unsigned pending);

// `bytes` (4, 8 or 16) at `shared`, of which the first `source_bytes` come from `global` and the rest are zero. Both are aligned to `bytes`.
// With no source_bytes the source is not read: any aligned pointer will do, a null one too.
__forceinline__ void async_copy(void* shared, const void* global, unsigned bytes, unsigned source_bytes) {
    const uintptr_t to = reinterpret_cast<uintptr_t>(shared), from = reinterpret_cast<uintptr_t>(global);
    const bool possible = (bytes == 4 || bytes == 8 || bytes == 16) && ((to | from) & (bytes - 1)) == 0;
    if (__builtin_expect(!possible || source_bytes != bytes || !copies_at_once_to(to), 0)) {
        async_copy_slow(shared, global, bytes, source_bytes);
    } else {
        copy_word(shared, global, bytes);
    }
}

// cp.async.commit_group: what this thread issued since its last commit is one group.
__forceinline__ void async_copy_commit() {
    if (__builtin_expect(!copies_at_once(), 0)) async_copy_commit_slow();
}

// cp.async.wait_group: all but this thread's latest `pending` groups have landed, and are visible to this thread.
__forceinline__ void async_copy_wait(unsigned pending) {
    if (__builtin_expect(!copies_at_once(), 0)) async_copy_wait_slow(pending);
}

}  // namespace hostcuda
