// cp.async: the copies that are not done at once. With HOSTCUDA_ASYNC=1 those are all; else the ones with a zeroed rest, and the mistakes.
//
// The lists of pending copies belong to hostcuda, not to the program: ThreadSanitizer, to which each CUDA thread is a thread, does not see
// them. It sees what the program asked for, by the thread that asked: the destination is written at the call and again when the data land,
// which is when the source is read.
#include "hostcuda/async_copy.h"

#include <vector>

#include "async_copy.h"
#include "runtime.h"
#include "shared_memory.h"

namespace hostcuda {

constinit thread_local AsyncCopySpace async_copy_space{};

namespace {

struct PendingCopy {
    void* shared;
    const void* global;
    unsigned group;                    // how many groups its thread had committed before it
    uint8_t bytes, source_bytes;
};

struct ThreadCopies {
    std::vector<PendingCopy> copies;   // that have not landed, in order of issue
    unsigned groups = 0;               // committed so far
};

// By thread of the block. They keep their memory from block to block.
using BlockCopies = std::vector<ThreadCopies>;

// A plain pointer, as for shared memory: TSan would watch the flag of an object with a constructor.
thread_local constinit BlockCopies* block_copies = nullptr;
thread_local struct BlockCopiesOwner {
    ~BlockCopiesOwner() {
        delete block_copies;
        block_copies = nullptr;
    }
} block_copies_owner;

// Under TsanIgnore, as all that touches the lists.
ThreadCopies& running_thread() { return (*block_copies)[block_progress.thread]; }

void copy(void* shared, const void* global, unsigned bytes, unsigned source_bytes) {
    if (source_bytes == bytes) {
        copy_word(shared, global, bytes);
        return;
    }
    alignas(16) char word[16] = {};
    for (unsigned i = 0; i < source_bytes; i++) word[i] = static_cast<const char*>(global)[i];
    copy_word(shared, word, bytes);
}

HOSTCUDA_UNCHECKED bool is_shared(const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) - reinterpret_cast<uintptr_t>(shared_memory_begin()) < kSharedMemoryBytes;
}

HOSTCUDA_UNCHECKED void check_in_kernel(const char* call) {
    if (block_progress.count == 0) stop("%s is called outside a kernel", call);
}

}  // namespace

void begin_block_async_copies(unsigned threads) {
    TsanIgnore ignore;
    if (!async_mode()) {
        async_copy_space = {reinterpret_cast<uintptr_t>(shared_memory_begin()), kSharedMemoryBytes};
        return;
    }
    if (block_copies == nullptr) {
        (void)&block_copies_owner;   // so that its destructor runs when the OS thread ends
        block_copies = new BlockCopies;
    }
    if (block_copies->size() < threads) block_copies->resize(threads);
    for (ThreadCopies& thread : *block_copies) {
        thread.copies.clear();
        thread.groups = 0;
    }
}

HOSTCUDA_UNCHECKED void end_block_async_copies() { async_copy_space = {}; }

void async_copy_slow(void* shared, const void* global, unsigned bytes, unsigned source_bytes) {
    check_in_kernel("async_copy");
    if (bytes != 4 && bytes != 8 && bytes != 16) stop("async_copy of %u bytes; cp.async copies 4, 8 or 16", bytes);
    if (source_bytes > bytes) stop("async_copy of %u bytes, %u of them from the source; that is more than all", bytes, source_bytes);
    check_aligned(shared, bytes);
    check_aligned(global, bytes);
    if (!is_shared(shared)) stop("async_copy to %p, which is not shared memory of this block; cp.async writes nothing else", shared);
    if (source_bytes != 0 && is_shared(global)) stop("async_copy from %p, which is shared memory; cp.async reads global memory only", global);
    if (!async_mode()) {
        copy(shared, global, bytes, source_bytes);
        return;
    }
    {
        TsanIgnore ignore;
        ThreadCopies& thread = running_thread();
        thread.copies.push_back({shared, global, thread.groups, static_cast<uint8_t>(bytes), static_cast<uint8_t>(source_bytes)});
    }
    alignas(16) const uint32_t poison[4] = {kPoison32, kPoison32, kPoison32, kPoison32};
    copy_word(shared, poison, bytes);
}

void async_copy_commit_slow() {
    check_in_kernel("async_copy_commit");
    TsanIgnore ignore;
    running_thread().groups++;
}

void async_copy_wait_slow(unsigned pending) {
    check_in_kernel("async_copy_wait");
    for (size_t landed = 0;; landed++) {
        PendingCopy next;
        {
            TsanIgnore ignore;
            ThreadCopies& thread = running_thread();
            if (landed == thread.copies.size() || thread.copies[landed].group + size_t{pending} >= thread.groups) {
                thread.copies.erase(thread.copies.begin(), thread.copies.begin() + static_cast<ptrdiff_t>(landed));
                return;
            }
            next = thread.copies[landed];
        }
        copy(next.shared, next.global, next.bytes, next.source_bytes);
    }
}

}  // namespace hostcuda
