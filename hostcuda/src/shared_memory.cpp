// Shared arrays: poison, guards, alignment.
//
// Each OS thread has one arena; static arrays are laid out in the order in which the block's threads first name them, the dynamic array has
// a part of its own. Round each array lie guarded bytes: ASan refuses any access to them; a plain build finds a write to them when the
// block ends. In a TSan build the arena is mapped anew for every block, since to TSan two blocks' uses of the same bytes would be a race.
#include "shared_memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstring>

#include "block_executor.h"
#include "hostcuda/execution.h"
#include "hostcuda/internal.h"
#include "sanitizers.h"
#include "symbols.h"

namespace hostcuda {

constinit thread_local SharedTable shared_table{};

namespace {

constexpr size_t kGuardBytes = 64;
constexpr unsigned char kGuardByte = 0xC9;
// Static arrays may use 48 KiB, dynamic ones up to 227 KiB; the rest is room for guards.
constexpr size_t kStaticArena = 128 * 1024;
constexpr size_t kDynamicArena = 256 * 1024;
constexpr size_t kArena = kStaticArena + kDynamicArena;
static_assert(kArena == kSharedMemoryBytes);
// ASan can only tell apart eight-byte groups that are used from their start.
constexpr size_t kMinAlign = kAsan ? 8 : 1;

struct Extent {
    char* guard;       // guarded bytes before the array begin here
    char* base;
    size_t bytes;
    char* guard_end;   // guarded bytes after it end here
};

struct Arena {
    char* memory = nullptr;
    char* next_static = nullptr;
    size_t static_bytes = 0;
    Extent dynamic{};
    Extent arrays[SharedTable::kMaxArrays];

    Arena() {
        void* const mapped = mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped == MAP_FAILED) stop("no memory for a block's shared memory (%zu bytes)", kArena);
        memory = static_cast<char*>(mapped);
    }
    ~Arena() {
#if HOSTCUDA_ASAN
        __asan_unpoison_memory_region(memory, kArena);
#endif
        munmap(memory, kArena);
    }
};

// A plain pointer, since a thread_local object with a constructor is guarded by a flag that TSan would watch.
thread_local constinit Arena* arena = nullptr;
thread_local struct ArenaOwner {
    ~ArenaOwner() {
        delete arena;
        arena = nullptr;
    }
} arena_owner;

// The smallest address from `from` on that is a multiple of align and not of 2 * align: code that needs more than it declared shows.
char* place(char* from, size_t align) {
    const uintptr_t wanted = (reinterpret_cast<uintptr_t>(from) + 2 * align - 1) / (2 * align) * (2 * align);
    const uintptr_t odd = wanted - align >= reinterpret_cast<uintptr_t>(from) ? wanted - align : wanted + align;
    return reinterpret_cast<char*>(odd);
}

HOSTCUDA_UNCHECKED void fill_poison(char* base, size_t bytes) {
    // By 16-bit words; an odd last byte gets the pattern's first one.
    const uint16_t word = kPoison16;
    size_t i = 0;
    for (; i + 2 <= bytes; i += 2) __builtin_memcpy(base + i, &word, 2);
    if (i < bytes) __builtin_memcpy(base + i, &word, 1);
}

HOSTCUDA_UNCHECKED void arm(const Extent& extent) {
    fill_poison(extent.base, extent.bytes);
    char* const end = extent.base + extent.bytes;
#if HOSTCUDA_ASAN
    __asan_poison_memory_region(extent.guard, static_cast<size_t>(extent.base - extent.guard));
    __asan_poison_memory_region(end, static_cast<size_t>(extent.guard_end - end));
#else
    memset(extent.guard, kGuardByte, static_cast<size_t>(extent.base - extent.guard));
    memset(end, kGuardByte, static_cast<size_t>(extent.guard_end - end));
#endif
}

HOSTCUDA_UNCHECKED void check_guard(const Extent& extent, const void* key) {
    for (const char* p = extent.guard; p < extent.guard_end; p++) {
        if (p == extent.base) {
            p += extent.bytes;
            if (p == extent.guard_end) break;
        }
        if (static_cast<unsigned char>(*p) == kGuardByte) continue;
        const long long offset = p - extent.base;
        if (key == nullptr) {
            stop_block("out of bounds: a write to byte %lld of the dynamic shared array of %zu bytes", offset, extent.bytes);
        }
        char name[256];
        symbol_name(key, name, sizeof(name));
        stop_block("out of bounds: a write to byte %lld of the shared array of %zu bytes named by %s", offset, extent.bytes, name);
    }
}

}  // namespace

HOSTCUDA_UNCHECKED char* shared_memory_begin() { return arena->memory; }

HOSTCUDA_UNCHECKED void begin_block_shared_memory(size_t dynamic_bytes) {
    if (arena == nullptr) {
        (void)&arena_owner;  // so that its destructor runs when the OS thread ends
        arena = new Arena;
    }
    Arena& a = *arena;
#if HOSTCUDA_ASAN
    __asan_unpoison_memory_region(a.memory, kArena);
#endif
#if HOSTCUDA_TSAN
    if (mmap(a.memory, kArena, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) {
        stop("no memory for a block's shared memory (%zu bytes)", kArena);
    }
#endif
    shared_table.count = 0;
    shared_table.dynamic_base = nullptr;
    a.next_static = a.memory;
    a.static_bytes = 0;
    a.dynamic = {};
    if (dynamic_bytes != 0) {
        // 16 is what `extern __shared__ __align__(16)` promises; 128 times something plus 16 is what it may well get.
        char* const guard = a.memory + kStaticArena;
        char* const base = guard + 128 + 16;
        a.dynamic = {base - kGuardBytes, base, dynamic_bytes, base + dynamic_bytes + kGuardBytes};
        arm(a.dynamic);
        shared_table.dynamic_base = base;
    }
}

HOSTCUDA_UNCHECKED void end_block_shared_memory() {
    if (kAsan) return;
    const Arena& a = *arena;
    if (a.dynamic.base != nullptr) check_guard(a.dynamic, nullptr);
    for (unsigned i = 0; i < shared_table.count; i++) check_guard(a.arrays[i], shared_table.key[i]);
}

HOSTCUDA_UNCHECKED void* shared_array_slow(const void* key, size_t bytes, size_t align) {
    if (block_progress.count == 0) stop("a shared array is used outside a kernel");
    Arena& a = *arena;
    SharedTable& table = shared_table;
    if (table.count == SharedTable::kMaxArrays) stop("a kernel has more than %u shared arrays; merge some", SharedTable::kMaxArrays);
    a.static_bytes += bytes;
    check_shared_limit(running_grid(), a.static_bytes);
    char* const guard = a.next_static;
    char* const base = place(guard + kGuardBytes, align < kMinAlign ? kMinAlign : align);
    char* const guard_end = base + bytes + kGuardBytes;
    if (guard_end > a.memory + kStaticArena) stop("too many guarded bytes for static shared arrays; merge some");
    a.arrays[table.count] = {guard, base, bytes, guard_end};
    a.next_static = guard_end;
    arm(a.arrays[table.count]);
    table.key[table.count] = key;
    table.base[table.count] = base;
    table.count++;
    return base;
}

}  // namespace hostcuda
