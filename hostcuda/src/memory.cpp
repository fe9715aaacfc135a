// Device memory, pinned host memory, and the copies between them.
//
// Device memory is a reserved address range. An allocation maps one small poisoned file privately, again and again,
// over its part of the range: every untouched byte then reads as poison, a page costs memory only once it is written,
// and a plan larger than the machine can be allocated. So does a large part that is set to 0: it gets fresh zero pages.
// Layout of one allocation, in pages:
//
//   | no access | redzone, bytes, redzone up to the page's end | no access |
//
// The bytes start 256 after a page's start, so the address has the alignment cudaMalloc promises (256) and no more.
// The redzones are poison nobody has to write; whatever differs from it was written out of bounds.
#include <execinfo.h>
#include <cxxabi.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <ucontext.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <vector>

#include "runtime.h"

#ifdef HOSTCUDA_ASAN
#include <sanitizer/asan_interface.h>
#endif
#ifdef HOSTCUDA_TSAN
extern "C" void __tsan_read_range(void* address, unsigned long size);
extern "C" void __tsan_write_range(void* address, unsigned long size);
#endif

namespace hostcuda {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kAlign = 256;                    // what cudaMalloc promises; also the front redzone
constexpr size_t kBackRedzone = 256;              // at least this much after the bytes, then to the page's end
constexpr size_t kFileBytes = size_t{64} << 20;   // the poisoned file: real memory, so small; 256 mappings for 16 GiB
constexpr size_t kLargestFileBytes = size_t{1} << 30;
constexpr size_t kMargin = size_t{1} << 30;       // never allocated, at both ends of the range: wild indices are named
constexpr size_t kPart = size_t{2} << 20;         // HOSTCUDA_PROTECT opens and closes this much at a time
// From this size on a memset to 0 may give fresh pages instead of writing. Each may add two mappings: a full card of 80 GB
// 10,000 of vm.max_map_count's 65,530. Below it, writing costs 13 ms at most.
constexpr size_t kFreshZeroBytes = size_t{16} << 20;
constexpr int kFrames = 8;

using address_t = uintptr_t;

// What copies and memsets touch, told to ThreadSanitizer: with ignore_noninstrumented_modules=1, which MPI needs, it does not
// look at memcpy and memset.
void tsan_reads([[maybe_unused]] const void* at, [[maybe_unused]] size_t bytes) {
#ifdef HOSTCUDA_TSAN
    __tsan_read_range(const_cast<void*>(at), bytes);
#endif
}
void tsan_writes([[maybe_unused]] void* at, [[maybe_unused]] size_t bytes) {
#ifdef HOSTCUDA_TSAN
    __tsan_write_range(at, bytes);
#endif
}

size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }
address_t address(const void* pointer) { return reinterpret_cast<address_t>(pointer); }

struct Block {
    address_t start = 0;   // first mapped page
    size_t mapped = 0;     // pages, in bytes
    size_t bytes = 0;      // what was asked for
    CallSite site{};
    void* frames[kFrames];
    int num_frames = 0;
    std::vector<bool> open;   // HOSTCUDA_PROTECT: which parts of kPart bytes may be touched now

    address_t user() const { return start + kAlign; }
    address_t end() const { return user() + bytes; }
};

struct Pinned {
    size_t bytes;
    bool registered;   // cudaHostRegister: the program's own memory
};

struct Heap {
    std::mutex mutex;
    address_t base = 0;
    size_t reserve = 0;
    address_t cursor = 0;   // next fit: an address comes back as late as possible, so a stale pointer faults for long
    std::map<address_t, Block> live;    // by start
    std::map<address_t, Block> freed;   // by start, until the addresses are used again
    size_t used = 0;
    int file = -1;
    size_t file_bytes = 0;   // poisoned so far
    size_t file_limit = kFileBytes;
    std::map<address_t, Pinned> pinned;
    std::vector<std::pair<address_t, size_t>> open_parts;   // start of block, part; never grows in the fault handler
    size_t parts = 0;                                       // of all live blocks
};

// Read without the heap's lock: by the fault handler and by place_of on the quick path.
std::atomic<address_t> heap_base{0};
std::atomic<size_t> heap_reserve{0};

// The mappings are made by system calls of our own: sanitizers' mmap would write shadow memory for ranges that may be
// larger than the machine.
void* raw_mmap(address_t at, size_t bytes, int protection, int flags, int file) {
    // Every argument as wide as a register: syscall() does not widen an int.
    return reinterpret_cast<void*>(syscall(SYS_mmap, at, bytes, long{protection}, long{flags}, long{file}, 0L));
}

void install_fault_handler();

size_t max_mappings() {
    std::ifstream file("/proc/sys/vm/max_map_count");
    size_t count;
    return file >> count ? count : 65530;
}

Heap& heap() {
    static Heap& instance = [&]() -> Heap& {
        Heap& h = *new Heap;   // never destroyed: stream workers may outlive static objects
        const size_t limit = device_memory_limit();
        while (limit / h.file_limit > max_mappings() / 2) h.file_limit *= 2;
        if (h.file_limit > kLargestFileBytes)
            stop("a device of %s needs more mappings than vm.max_map_count=%zu allows; set a smaller HOSTCUDA_MEMORY",
                 describe_size(limit).c_str(), max_mappings());
        // Twice the device's size, because address ranges are used again as late as possible; less where that does not
        // fit the process (ThreadSanitizer leaves about 1.5 TiB).
        void* base = MAP_FAILED;
        for (const size_t spare : {limit + (size_t{64} << 30), limit / 8}) {
            h.reserve = round_up(limit + spare + 2 * kMargin, size_t{2} << 20);
            base = raw_mmap(0, h.reserve, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
            if (base != MAP_FAILED) break;
        }
        if (base == MAP_FAILED)
            stop("cannot reserve %s of address space for device memory: %s; raise ulimit -v or set a smaller HOSTCUDA_MEMORY",
                 describe_size(h.reserve).c_str(), strerror(errno));
        h.base = address(base);
        h.cursor = h.base + kMargin;
        h.file = static_cast<int>(syscall(SYS_memfd_create, "hostcuda poison", 1u /*close on exec*/));
        if (h.file < 0) stop("memfd_create failed: %s", strerror(errno));
        heap_base = h.base;
        heap_reserve = h.reserve;
        install_fault_handler();
        prepare_exit();
        return h;
    }();
    return instance;
}

// The heap's lock. TSan does not see it: see TsanIgnore.
struct HeapLock {
    TsanIgnore ignore;
    Heap& h = heap();
    std::lock_guard<std::mutex> lock{h.mutex};
};

// Poisons the file up to `bytes`, so that a program with small allocations does not pay for 64 MiB.
void grow_file(Heap& h, size_t bytes) {
    size_t want = std::max<size_t>(h.file_bytes, size_t{64} << 10);
    while (want < std::min(bytes, h.file_limit)) want *= 2;
    want = std::min(want, h.file_limit);
    if (want == h.file_bytes) return;
    std::vector<uint32_t> chunk(std::min(want, size_t{1} << 20) / 4, kPoison32);
    for (size_t at = h.file_bytes; at < want;) {
        const ssize_t n = pwrite(h.file, chunk.data(), std::min(chunk.size() * 4, want - at), static_cast<off_t>(at));
        if (n <= 0) stop("cannot make %zu MiB of poisoned memory: %s", want >> 20, strerror(errno));
        at += static_cast<size_t>(n);
    }
    h.file_bytes = want;
}

// ---- protection ---------------------------------------------------------------------------------------------------

// Device memory is closed as a rule. While somebody has access it is opened part by part, at the fault of the first touch:
// a kernel touches little of it, and opening and closing all of it at each launch costs the length of its page tables.

int access_count = 0;   // threads with access; guarded by the heap's lock
thread_local int access_depth = 0;

int new_protection() { return protect_mode() ? PROT_NONE : PROT_READ | PROT_WRITE; }

// The caller holds the heap's lock.
void set_part(Block& block, size_t part, bool open) {
    const address_t at = block.start + part * kPart;
    const size_t bytes = std::min(kPart, block.start + block.mapped - at);
    if (syscall(SYS_mprotect, at, bytes, open ? long{PROT_READ | PROT_WRITE} : long{PROT_NONE}) != 0)
        stop("mprotect of device memory failed: %s; vm.max_map_count is %zu", strerror(errno), max_mappings());
    block.open[part] = open;
}
void open_at(Heap& h, Block& block, address_t at) {
    const size_t part = (at - block.start) / kPart;
    if (!protect_mode() || block.open[part]) return;   // another thread's fault may have opened it
    set_part(block, part, true);
    h.open_parts.push_back({block.start, part});
}
void close_all(Heap& h) {
    for (const auto& [start, part] : h.open_parts) {
        const auto block = h.live.find(start);
        if (block != h.live.end() && part < block->second.open.size()) set_part(block->second, part, false);
    }
    h.open_parts.clear();
}

// ---- messages -----------------------------------------------------------------------------------------------------

std::string function_name(void* frame) {
    Dl_info info;
    if (!dladdr(frame, &info) || !info.dli_sname) return "";
    int status = 0;
    char* plain = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
    std::string name = status == 0 && plain ? plain : info.dli_sname;
    free(plain);
    // The name without its arguments is enough to find it.
    const size_t open = name.find('(', 1);
    return open == std::string::npos ? name : name.substr(0, open);
}

std::string describe(const Block& block) {
    std::string text = "allocation of " + describe_size(block.bytes) + " made at " + block.site.file + ":" +
                       std::to_string(block.site.line) + " in " + block.site.function;
    std::string callers;
    for (int i = 0; i < block.num_frames; i++) {
        const std::string name = function_name(block.frames[i]);
        if (name.empty() || name.rfind("hostcuda::device_malloc", 0) == 0 || name.rfind("cudaMalloc", 0) == 0) continue;
        if (name == "__libc_start_main" || name == "_start") continue;
        callers += (callers.empty() ? " (called from " : " < ") + name;
    }
    return text + (callers.empty() ? "" : callers + ")");
}

const Block* block_at(const std::map<address_t, Block>& blocks, address_t at) {
    auto next = blocks.upper_bound(at);
    if (next == blocks.begin()) return nullptr;
    const Block& block = std::prev(next)->second;
    return at < block.start + block.mapped ? &block : nullptr;
}

std::string describe_address(const Heap& h, address_t at) {
    char text[96];
    if (const Block* block = block_at(h.live, at)) {
        if (at < block->user()) snprintf(text, sizeof text, "%zu bytes before the start of the ", size_t(block->user() - at));
        else if (at < block->end()) snprintf(text, sizeof text, "byte %zu of the ", size_t(at - block->user()));
        else snprintf(text, sizeof text, "%zu bytes past the end of the ", size_t(at - block->end()));
        return text + describe(*block);
    }
    if (const Block* block = block_at(h.freed, at)) {
        snprintf(text, sizeof text, "byte %lld of freed memory: the ",
                 static_cast<long long>(at) - static_cast<long long>(block->user()));
        return text + describe(*block);
    }
    // A wild index lands between allocations: name the nearest one below.
    auto next = h.live.upper_bound(at);
    if (next != h.live.begin()) {
        const Block& block = std::prev(next)->second;
        snprintf(text, sizeof text, "in no allocation, %zu bytes past the end of the ", size_t(at - block.end()));
        return text + describe(block);
    }
    if (next != h.live.end()) {
        snprintf(text, sizeof text, "in no allocation, %zu bytes before the start of the ", size_t(next->second.user() - at));
        return text + describe(next->second);
    }
    return "in no allocation";
}

// ---- faults -------------------------------------------------------------------------------------------------------

struct sigaction previous_handler;
constexpr size_t kStackReach = 64 << 10;   // how far from the stack pointer an overflow may touch

// The stack pointer at the fault, or 0 where it is not known.
address_t stack_pointer([[maybe_unused]] void* context) {
#if defined(__x86_64__)
    return static_cast<address_t>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RSP]);
#elif defined(__aarch64__)
    return static_cast<address_t>(static_cast<ucontext_t*>(context)->uc_mcontext.sp);
#else
    return 0;
#endif
}

void on_fault(int number, siginfo_t* info, void* context) {
    const address_t at = address(info->si_addr);
    if (at - heap_base.load() < heap_reserve.load()) {
        Heap& h = heap();
        char caller[1024];
        const bool in_kernel = describe_caller && describe_caller(caller, sizeof caller);
        std::string where;
        bool closed;
        {
            // No thread faults while it holds the lock: check_block opens what it reads.
            TsanIgnore ignore;
            std::lock_guard lock(h.mutex);
            const auto next = h.live.upper_bound(at);
            const bool mapped = block_at(h.live, at) != nullptr;
            // Threads of the block pool are in a kernel, all others that may touch it hold a DeviceAccess themselves.
            if (mapped && protect_mode() && access_count > 0 && (access_depth > 0 || in_kernel)) {
                open_at(h, std::prev(next)->second, at);
                return;
            }
            where = describe_address(h, at);
            closed = mapped && at >= std::prev(next)->second.user() && at < std::prev(next)->second.end();
        }
        if (closed && !in_kernel)
            stop("host code touched device memory at %p, %s; copy it with cudaMemcpyAsync instead", info->si_addr, where.c_str());
        stop("access to device memory out of bounds at %p, %s", info->si_addr, where.c_str());
    }
    // A frame that does not fit reaches below the stack, close to where the stack pointer stands.
    const address_t top = stack_pointer(context);
    char caller[1024];
    if (top != 0 && at + kStackReach > top && at < top + kStackReach && describe_caller && describe_caller(caller, sizeof caller))
        stop("the stack of a CUDA thread overflows at %p; use smaller local arrays, or set HOSTCUDA_STACK (in bytes) higher", info->si_addr);
    // Not ours: hand on to whoever was there before (a sanitizer, the program), or die of it as usual.
    if (previous_handler.sa_flags & SA_SIGINFO) {
        if (previous_handler.sa_sigaction) return previous_handler.sa_sigaction(number, info, context);
    } else if (previous_handler.sa_handler != SIG_DFL && previous_handler.sa_handler != SIG_IGN) {
        return previous_handler.sa_handler(number);
    }
    signal(number, SIG_DFL);   // the access is repeated on return and ends the program
}

void install_fault_handler() {
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    sigaction(SIGSEGV, &action, &previous_handler);
}

// ---- redzones -----------------------------------------------------------------------------------------------------

// Reads bytes that AddressSanitizer has poisoned and that a faulty kernel of another thread may be writing.
#if defined(__clang__)
#define UNCHECKED __attribute__((no_sanitize("address", "thread", "undefined"), noinline))
#else
#define UNCHECKED __attribute__((no_sanitize_address, no_sanitize_thread, noinline))
#endif
// First byte in [begin, end) that is not poison, else end.
UNCHECKED address_t first_damage(address_t begin, address_t end) {
    for (address_t at = begin; at < end; at++) {
        const uint8_t expected = static_cast<uint8_t>(kPoison32 >> (at % 4 * 8));
        if (*reinterpret_cast<const volatile uint8_t*>(at) != expected) return at;
    }
    return end;
}

// The caller holds the heap's lock and a DeviceAccess.
void check_block(Heap& h, Block& block, const char* when) {
    open_at(h, block, block.start);
    open_at(h, block, block.end());
    open_at(h, block, block.start + block.mapped - 1);
    const address_t before = first_damage(block.start, block.user());
    const address_t mapped_end = block.start + block.mapped;
    const address_t after = first_damage(block.end(), mapped_end);
    if (before == block.user() && after == mapped_end) return;
    const address_t at = before != block.user() ? before : after;
    char text[96];
    if (at < block.user()) snprintf(text, sizeof text, "%zu bytes before its start", size_t(block.user() - at));
    else snprintf(text, sizeof text, "%zu bytes past its end", size_t(at - block.end()));
    stop("device memory was written out of bounds, %s: %s; found at %s (make ASAN=1 finds the write itself)", text,
         describe(block).c_str(), when);
}

void redzones_for_asan([[maybe_unused]] const Block& block, [[maybe_unused]] bool poison) {
#ifdef HOSTCUDA_ASAN
    void* front = reinterpret_cast<void*>(block.start);
    void* back = reinterpret_cast<void*>(block.end());
    const size_t back_bytes = block.start + block.mapped - block.end();
    if (poison) {
        ASAN_POISON_MEMORY_REGION(front, kAlign);
        ASAN_POISON_MEMORY_REGION(back, back_bytes);
    } else {
        ASAN_UNPOISON_MEMORY_REGION(front, kAlign);
        ASAN_UNPOISON_MEMORY_REGION(back, back_bytes);
    }
#endif
}

// A gap of `need` bytes at or after the cursor, wrapping round once; 0 if there is none.
address_t find_gap(const Heap& h, size_t need) {
    for (int round = 0; round < 2; round++) {
        address_t at = round == 0 ? h.cursor : h.base + kMargin;
        while (at + need <= h.base + h.reserve - kMargin) {
            auto next = h.live.upper_bound(at);
            if (next != h.live.begin()) {
                const Block& below = std::prev(next)->second;
                if (below.start + below.mapped + kPage > at) {
                    at = below.start + below.mapped + kPage;
                    continue;
                }
            }
            if (next == h.live.end() || at + need <= next->second.start) return at;
            at = next->second.start + next->second.mapped + kPage;
        }
    }
    return 0;
}

void unmap(address_t start, size_t bytes) {
    if (raw_mmap(start, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1) == MAP_FAILED)
        stop("cannot unmap device memory: %s", strerror(errno));
}

// ---- setting to zero ------------------------------------------------------------------------------------------------

// How many of the pages have memory of their own: they were written since they were mapped (or read, where they are zero).
// 0 if the system does not say.
size_t count_written_pages(address_t begin, address_t end) {
    const int file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    constexpr uint64_t kPresent = uint64_t{1} << 63, kSwapped = uint64_t{1} << 62, kOfAFile = uint64_t{1} << 61;
    size_t count = 0;
    uint64_t entries[512];
    for (address_t at = begin; at < end;) {
        const size_t want = std::min((end - at) / kPage, std::size(entries)) * sizeof(uint64_t);
        const ssize_t n = pread(file, entries, want, static_cast<off_t>(at / kPage * sizeof(uint64_t)));
        if (n <= 0) break;
        const size_t got = static_cast<size_t>(n) / sizeof(uint64_t);
        for (size_t i = 0; i < got; i++) count += (entries[i] & (kPresent | kSwapped)) && !(entries[i] & kOfAFile);
        at += got * kPage;
    }
    close(file);
    return count;
}

// Replaces the pages by fresh ones, which read as 0 and cost memory once they are written. False: not all of them were.
bool map_zero_pages(address_t begin, address_t end) {
    HeapLock lock;   // nobody opens or closes the pages meanwhile
    const Block* block = block_at(lock.h.live, begin);
    if (!block || begin < block->user() || end > block->end()) return false;   // freed meanwhile: writing will tell
    const auto is_open = [&](address_t at) { return !protect_mode() || block->open[(at - block->start) / kPart]; };
    for (address_t at = begin; at < end;) {
        // As far as the protection is the same: it stays as it is.
        address_t to = protect_mode() ? at : end;
        while (to < end && is_open(to) == is_open(at)) to = std::min(end, to + kPart - (to - block->start) % kPart);
        // Where vm.max_map_count is reached it fails, and leaves what was there.
        if (raw_mmap(at, to - at, is_open(at) ? PROT_READ | PROT_WRITE : PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1) == MAP_FAILED)
            return false;
        at = to;
    }
    return true;
}

// A program that zeroes its gradients must not need the memory for them before it computes some. The caller has a
// DeviceAccess. Redzones lie in no whole page of the range, so they stay.
void set_to_zero(char* pointer, size_t bytes) {
    const address_t begin = round_up(address(pointer), kPage), end = (address(pointer) + bytes) / kPage * kPage;
    // Memory in use is written, since it will be again: zeros over what is there cost 0.03 to 0.06 ms a MiB, the first
    // writes of fresh pages 0.7. Memory never written costs 0.8 ms a MiB to write, and nothing to replace.
    if (bytes < kFreshZeroBytes || count_written_pages(begin, end) > (end - begin) / kPage / 2 || !map_zero_pages(begin, end)) {
        memset(pointer, 0, bytes);
        return;
    }
    memset(pointer, 0, begin - address(pointer));
    memset(reinterpret_cast<char*>(end), 0, address(pointer) + bytes - end);
}

}  // namespace

void use_fault_stack() {
    struct FaultStack {
        std::vector<char> memory = std::vector<char>(64 << 10);
        FaultStack() {
            stack_t stack{};
            if (sigaltstack(nullptr, &stack) == 0 && !(stack.ss_flags & SS_DISABLE)) return;   // a sanitizer's, say
            stack = {};
            stack.ss_sp = memory.data();
            stack.ss_size = memory.size();
            sigaltstack(&stack, nullptr);
            ours = true;
        }
        ~FaultStack() {
            if (!ours) return;
            stack_t stack{};
            stack.ss_flags = SS_DISABLE;
            sigaltstack(&stack, nullptr);
        }
        bool ours = false;
    };
    static thread_local FaultStack stack;
    heap();   // installs the handler
}

// ---- what the rest of hostcuda uses -------------------------------------------------------------------------------

DeviceAccess::DeviceAccess() {
    if (!protect_mode() || access_depth++ > 0) return;
    // oneDNN's generated code keeps data below the stack pointer, which a handler on the same stack would overwrite.
    use_fault_stack();
    HeapLock lock;
    access_count++;
}
DeviceAccess::~DeviceAccess() {
    if (!protect_mode() || --access_depth > 0) return;
    HeapLock lock;
    if (--access_count == 0) close_all(lock.h);
}

Place place_of(const void* pointer, size_t bytes) {
    const address_t at = address(pointer);
    if (at - heap_base.load(std::memory_order_relaxed) < heap_reserve.load(std::memory_order_relaxed)) {
        HeapLock lock;
        const Block* block = block_at(lock.h.live, at);
        if (!block || at < block->user() || at > block->end() || bytes > block->end() - at) return Place::bad_device;
        return Place::device;
    }
    HeapLock lock;
    auto next = lock.h.pinned.upper_bound(at);
    if (next == lock.h.pinned.begin()) return Place::pageable;
    const auto& [start, range] = *std::prev(next);
    return at + bytes <= start + range.bytes ? Place::pinned : Place::pageable;
}

bool is_device_pointer(const void* pointer) { return place_of(pointer, 1) == Place::device; }
bool is_pinned_pointer(const void* pointer) { return place_of(pointer, 1) == Place::pinned; }

void check_device_pointer(const void* pointer, const char* kernel, int argument) {
    if (!protect_mode() || !pointer) return;
    // One past the end is a fair value for an empty or finished range.
    switch (place_of(pointer, 0)) {
        case Place::device:
        case Place::pinned: return;
        case Place::bad_device: {
            HeapLock lock;
            stop("argument %d of kernel %s is %p, %s", argument, kernel, pointer, describe_address(lock.h, address(pointer)).c_str());
        }
        case Place::pageable:
            stop("argument %d of kernel %s is %p, which is ordinary host memory; a kernel needs memory of cudaMalloc or "
                 "pinned memory of cudaMallocHost", argument, kernel, pointer);
    }
}

void check_canaries(const char* when) {
    if (heap_base.load() == 0) return;
    DeviceAccess access;
    HeapLock lock;
    for (auto& [start, block] : lock.h.live) check_block(lock.h, block, when);
}

cudaError_t device_malloc(void** pointer, size_t bytes, CallSite site) {
    if (inside() == Inside::host_function) return set_error(cudaErrorNotPermitted);
    if (!pointer) return set_error(cudaErrorInvalidValue);
    *pointer = nullptr;
    if (bytes == 0) return cudaSuccess;
    Block block;
    block.bytes = bytes;
    block.site = site;
    block.num_frames = backtrace(block.frames, kFrames);

    HeapLock lock;
    Heap& h = lock.h;
    const size_t limit = device_memory_limit();
    if (bytes > limit || round_up(bytes, kAlign) > limit - h.used) return set_error(cudaErrorMemoryAllocation);
    block.mapped = round_up(kAlign + bytes + kBackRedzone, kPage);
    const address_t gap = find_gap(h, block.mapped + 2 * kPage);
    if (gap == 0) return set_error(cudaErrorMemoryAllocation);
    block.start = gap + kPage;
    grow_file(h, block.mapped);
    for (size_t at = 0; at < block.mapped; at += h.file_bytes) {
        const size_t n = std::min(h.file_bytes, block.mapped - at);
        if (raw_mmap(block.start + at, n, new_protection(), MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, h.file) == MAP_FAILED)
            stop("cannot map device memory: %s; %zu allocations are alive, raise vm.max_map_count (now %zu)",
                 strerror(errno), h.live.size(), max_mappings());
    }
    // Whatever was freed in this range is forgotten now.
    for (auto old = h.freed.lower_bound(block.start); old != h.freed.end() && old->first < block.start + block.mapped;)
        old = h.freed.erase(old);
    if (const Block* old = block_at(h.freed, block.start)) h.freed.erase(old->start);
    redzones_for_asan(block, true);
    h.cursor = block.start + block.mapped;
    h.used += round_up(bytes, kAlign);
    if (protect_mode()) {
        block.open.resize((block.mapped + kPart - 1) / kPart);
        h.parts += block.open.size();
        h.open_parts.reserve(h.parts);
    }
    h.live[block.start] = block;
    *pointer = reinterpret_cast<void*>(block.user());
    return cudaSuccess;
}

cudaError_t host_malloc(void** pointer, size_t bytes, unsigned flags, CallSite) {
    if (inside() == Inside::host_function) return set_error(cudaErrorNotPermitted);
    if (!pointer || flags > 7) return set_error(cudaErrorInvalidValue);
    *pointer = nullptr;
    if (bytes == 0) return cudaSuccess;
    void* memory = nullptr;
    if (posix_memalign(&memory, kPage, bytes) != 0) return set_error(cudaErrorMemoryAllocation);
    // Real pinned memory holds whatever was there; poison shows a read that came too early.
    for (size_t at = 0; at + 4 <= bytes; at += 4) memcpy(static_cast<char*>(memory) + at, &kPoison32, 4);
    HeapLock lock;
    lock.h.pinned[address(memory)] = {bytes, false};
    *pointer = memory;
    return cudaSuccess;
}

}  // namespace hostcuda

using namespace hostcuda;

cudaError_t cudaFree(void* devPtr) {
    if (inside() == Inside::host_function) return set_error(cudaErrorNotPermitted);
    if (!devPtr) return cudaSuccess;
    wait_for_all_streams();   // as the real one does; what is queued after this call and uses the memory faults
    DeviceAccess access;
    HeapLock lock;
    auto found = lock.h.live.find(address(devPtr) - kAlign);
    if (found == lock.h.live.end()) return set_error(cudaErrorInvalidValue);
    check_block(lock.h, found->second, "cudaFree");
    const Block block = found->second;
    redzones_for_asan(block, false);
    unmap(block.start, block.mapped);
    lock.h.used -= round_up(block.bytes, kAlign);
    lock.h.parts -= block.open.size();
    lock.h.live.erase(found);
    lock.h.freed[block.start] = block;
    return cudaSuccess;
}

cudaError_t cudaFreeHost(void* ptr) {
    if (inside() == Inside::host_function) return set_error(cudaErrorNotPermitted);
    if (!ptr) return cudaSuccess;
    wait_for_all_streams();
    {
        HeapLock lock;
        auto found = lock.h.pinned.find(address(ptr));
        if (found == lock.h.pinned.end() || found->second.registered) return set_error(cudaErrorInvalidValue);
        lock.h.pinned.erase(found);
    }
    free(ptr);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void* ptr, size_t size, unsigned) {
    if (!ptr || size == 0) return set_error(cudaErrorInvalidValue);
    if (place_of(ptr, 1) != Place::pageable || place_of(static_cast<char*>(ptr) + size - 1, 1) != Place::pageable)
        return set_error(cudaErrorHostMemoryAlreadyRegistered);
    HeapLock lock;
    lock.h.pinned[address(ptr)] = {size, true};
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* ptr) {
    wait_for_all_streams();
    HeapLock lock;
    auto found = lock.h.pinned.find(address(ptr));
    if (found == lock.h.pinned.end() || !found->second.registered) return set_error(cudaErrorHostMemoryNotRegistered);
    lock.h.pinned.erase(found);
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* ptr) {
    if (!attributes) return set_error(cudaErrorInvalidValue);
    void* const pointer = const_cast<void*>(ptr);
    switch (place_of(ptr, 1)) {
        case Place::device: *attributes = {cudaMemoryTypeDevice, 0, pointer, nullptr}; break;
        case Place::pinned: *attributes = {cudaMemoryTypeHost, 0, pointer, pointer}; break;
        case Place::bad_device:
        case Place::pageable: *attributes = {cudaMemoryTypeUnregistered, -2, nullptr, pointer}; break;
    }
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
    if (!free || !total) return set_error(cudaErrorInvalidValue);
    HeapLock lock;
    *total = device_memory_limit();
    *free = *total - lock.h.used;
    return cudaSuccess;
}

// ---- copies -------------------------------------------------------------------------------------------------------

namespace {

// One plane of `height` rows; a plain copy has one row.
struct Copy {
    char* dst;
    size_t dpitch;
    const char* src;
    size_t spitch;
    size_t width;
    size_t height;

    size_t dst_span() const { return (height - 1) * dpitch + width; }
    size_t src_span() const { return (height - 1) * spitch + width; }
    void run() const {
        if (dpitch == width && spitch == width) return copy(dst, src, width * height);
        for (size_t row = 0; row < height; row++) copy(dst + row * dpitch, src + row * spitch, width);
    }
    static void copy(char* dst, const char* src, size_t bytes) {
        tsan_reads(src, bytes);
        tsan_writes(dst, bytes);
        memcpy(dst, src, bytes);
    }
};

// Whether the kind fits the pointers, and where they are.
cudaError_t classify(const Copy& copy, cudaMemcpyKind kind, Place* dst, Place* src) {
    if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) return cudaErrorInvalidMemcpyDirection;
    if (!copy.dst || !copy.src) return cudaErrorInvalidValue;
    *dst = place_of(copy.dst, copy.dst_span());
    *src = place_of(copy.src, copy.src_span());
    if (*dst == Place::bad_device || *src == Place::bad_device) return cudaErrorInvalidValue;
    if (kind == cudaMemcpyDefault) return cudaSuccess;
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (to_device != (*dst == Place::device) || from_device != (*src == Place::device)) return cudaErrorInvalidValue;
    return cudaSuccess;
}

const char* copy_name(Place dst, Place src) {
    if (dst == Place::device) return src == Place::device ? "cudaMemcpy device to device" : "cudaMemcpy host to device";
    return src == Place::device ? "cudaMemcpy device to host" : "cudaMemcpy host to host";
}

void check_overlap(const Copy& copy) {
    const address_t dst = address(copy.dst), src = address(copy.src);
    if (dst < src + copy.src_span() && src < dst + copy.dst_span() && copy.height == 1)
        stop("cudaMemcpy between overlapping ranges %p and %p of %zu bytes: the result is undefined on a GPU", copy.dst,
             copy.src, copy.width);
}

// stream null: cudaMemcpy.
cudaError_t copy_on_stream(Copy copy, cudaMemcpyKind kind, cudaStream_t stream, bool has_stream, const char* call) {
    if (inside() == Inside::host_function) return set_error(cudaErrorNotPermitted);
    if (has_stream)
        if (const cudaError_t error = check_stream(stream, call)) return error;
    if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) return set_error(cudaErrorInvalidMemcpyDirection);
    if (copy.width == 0 || copy.height == 0) return cudaSuccess;
    Place dst, src;
    if (const cudaError_t error = classify(copy, kind, &dst, &src)) return set_error(error);
    check_overlap(copy);
    const char* name = copy_name(dst, src);
    const bool staged = async_mode() && inside() == Inside::nothing && src == Place::pageable && dst == Place::device;
    std::function<void()> work;
    if (staged) {
        // The source may be changed as soon as the call returns, so it is read now.
        auto* stage = new std::vector<char>(copy.width * copy.height);
        Copy{stage->data(), copy.width, copy.src, copy.spitch, copy.width, copy.height}.run();
        work = [copy, stage] {
            DeviceAccess access;
            Copy{copy.dst, copy.dpitch, stage->data(), copy.width, copy.width, copy.height}.run();
            delete stage;
        };
    } else {
        work = [copy] {
            DeviceAccess access;
            copy.run();
        };
    }
    if (!has_stream) {
        // Only a copy inside the device or from a staged source may be under way when cudaMemcpy returns.
        const bool host_waits = !(dst == Place::device && (src == Place::device || staged));
        wait_for_legacy(name, std::move(work), host_waits);
        return cudaSuccess;
    }
    if (const cudaError_t error = enqueue(stream, name, std::move(work))) return error;
    // Pageable memory cannot be written behind the program's back: the call waits.
    const bool pageable_destination = dst == Place::pageable || (dst == Place::pinned && src == Place::pageable);
    if (async_mode() && pageable_destination) return cudaStreamSynchronize(stream);
    return cudaSuccess;
}

cudaError_t set_on_stream(void* devPtr, int value, size_t count, cudaStream_t stream, bool has_stream, const char* call) {
    if (inside() == Inside::host_function) return set_error(cudaErrorNotPermitted);
    if (has_stream)
        if (const cudaError_t error = check_stream(stream, call)) return error;
    if (count == 0) return cudaSuccess;
    const Place place = place_of(devPtr, count);
    if (place != Place::device && place != Place::pinned) return set_error(cudaErrorInvalidValue);
    auto work = [=] {
        DeviceAccess access;
        tsan_writes(devPtr, count);
        if (place == Place::device && value % 256 == 0) set_to_zero(static_cast<char*>(devPtr), count);
        else memset(devPtr, value, count);
    };
    if (has_stream) return enqueue(stream, "cudaMemset", work);
    wait_for_legacy("cudaMemset", work, place == Place::pinned);
    return cudaSuccess;
}

}  // namespace

cudaError_t cudaMemcpy(void* dst, const void* src, size_t count, cudaMemcpyKind kind) {
    return copy_on_stream({static_cast<char*>(dst), count, static_cast<const char*>(src), count, count, 1}, kind, nullptr,
                          false, "cudaMemcpy");
}
cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t count, cudaMemcpyKind kind, cudaStream_t stream) {
    return copy_on_stream({static_cast<char*>(dst), count, static_cast<const char*>(src), count, count, 1}, kind, stream,
                          true, "cudaMemcpyAsync");
}
cudaError_t cudaMemcpy2DAsync(void* dst, size_t dpitch, const void* src, size_t spitch, size_t width, size_t height,
                              cudaMemcpyKind kind, cudaStream_t stream) {
    if (const cudaError_t error = check_stream(stream, "cudaMemcpy2DAsync")) return error;
    if (width > dpitch || width > spitch) return set_error(cudaErrorInvalidPitchValue);
    return copy_on_stream({static_cast<char*>(dst), dpitch, static_cast<const char*>(src), spitch, width, height}, kind,
                          stream, true, "cudaMemcpy2DAsync");
}
cudaError_t cudaMemset(void* devPtr, int value, size_t count) {
    return set_on_stream(devPtr, value, count, nullptr, false, "cudaMemset");
}
cudaError_t cudaMemsetAsync(void* devPtr, int value, size_t count, cudaStream_t stream) {
    return set_on_stream(devPtr, value, count, stream, true, "cudaMemsetAsync");
}
