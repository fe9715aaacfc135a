// One block on one OS thread: fibers, the order of threads, barriers and warp meetings.
//
// A fiber is a stack. It runs the block's threads one after another as a loop (KernelCall::run_threads) until one has to wait. Then it keeps
// that thread and the OS thread goes on with another fiber: one whose thread may go on, or else an idle one, which starts threads that
// have not run yet. Only when no thread can go on is something wrong: a barrier that not all reach, a warp collective without some of its
// lanes.
//
// Three orders of threads:
// - plain: threads that may go on first, lowest warp and lane first, then new threads. Few stacks are in use, and they stay in the cache.
// - HOSTCUDA_SCHEDULE=<seed>: each warp has a random priority, and the highest one that can run runs; now and then a running warp drops below all
//   others. This is what finds a missing barrier, since some warps run far ahead of others. Lanes and blocks come in random order.
// - TSan: plain, but each CUDA thread has a stack, and a TSan fiber, of its own, since TSan would take two threads on one stack for a race.
#include "block_executor.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "async_copy.h"
#include "context_switch.h"
#include "hostcuda/internal.h"
#include "sanitizers.h"
#include "schedule.h"
#include "shared_memory.h"

constinit thread_local uint3 threadIdx{};
constinit thread_local uint3 blockIdx{};
constinit thread_local dim3 blockDim{};
constinit thread_local dim3 gridDim{};

namespace hostcuda {

constinit thread_local BlockProgress block_progress{};

namespace {

constexpr unsigned kMaxThreads = 1024;
constexpr unsigned kMaxWarps = kMaxThreads / 32;
constexpr unsigned kNone = ~0u;

// ---- fibers --------------------------------------------------------------------------------------------------------------------
struct Fiber {
    Context context;    // where it goes on when it is idle
    char* stack;
    size_t stack_bytes;
    Fiber* next_idle;
    void* tsan;
    void* asan_fake_stack;
};

size_t stack_bytes() {
    static const size_t bytes = [] {
        const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
        const size_t wanted = env_bytes("HOSTCUDA_STACK", kAsan ? 256 * 1024 : kTsan ? 128 * 1024 : 64 * 1024);
        if (wanted < 16 * 1024) stop("HOSTCUDA_STACK=%zu is too small; a CUDA thread's stack needs at least 16KiB", wanted);
        return (wanted + page - 1) / page * page;
    }();
    return bytes;
}

// ---- the block -----------------------------------------------------------------------------------------------------------------
// Lanes on their way through one collective. Several may be open in a warp at a time, under different masks: lanes of one half may
// already wait for the whole warp while the other half meets among itself.
struct Meeting {
    unsigned mask;
    unsigned arrived;
    WarpCompute compute;
    const char* name;
    const char* sync;  // TSan's name for this meeting
};

struct Warp {
    unsigned ready;      // lanes that waited and may go on
    unsigned waiting;    // lanes at a barrier or in a meeting that is not complete
    unsigned unstarted;  // lanes that have not run (kept when the scheduler decides)
    unsigned priority;
    unsigned open;       // meetings[0 .. open): some lanes have come, some have not
    void* lane_args[32];
    Meeting meetings[32];
};

struct BarrierState {
    unsigned arrived;
    unsigned first_thread;
    Barrier kind;
    int line;
    const char* file;
    int count;        // threads with a true predicate
    int result[2];    // by parity: a thread may still have to read the last result while others meet at the next barrier
    unsigned parity;
    const char* sync;
};

// Where a thread was suspended last. Kept by thread and not in its fiber: threads go on in order, so this is read in order.
struct Suspended {
    Context context;
    Fiber* fiber;
};

// Everything an OS thread needs to run blocks; made when it runs its first one.
struct Executor {
    Launch* launch = nullptr;
    RunThreads run_threads = nullptr;
    const void* call = nullptr;

    Fiber* running = nullptr;      // null: the OS thread's own stack
    Fiber* idle = nullptr;
    unsigned warps = 0;
    bool scheduled = false;        // HOSTCUDA_SCHEDULE or TSan
    unsigned chosen = kNone;       // scheduled: the new thread that the fiber we switch to shall start
    unsigned rotation = 0;         // TSan: thread t runs on fiber (t + rotation) % fiber_count
    Suspended suspended[kMaxThreads];
    Warp warp[kMaxWarps];
    BarrierState barrier;
    WarpSchedule schedule;
    uint64_t blocks_run = 0;

    Fiber* fibers[kMaxThreads];
    unsigned fiber_count = 0;

    Context home_context{};        // of the OS thread's own stack, while a fiber runs
    void* home_fake_stack = nullptr;
    const void* home_stack = nullptr;
    size_t home_stack_bytes = 0;
    void* home_tsan = nullptr;

    unsigned sync_index = 0;
    char sync_names[4096];         // addresses that TSan's happens-before edges hang on, used in turn

    Executor();
    ~Executor();
};

thread_local constinit Executor* executor = nullptr;
thread_local struct ExecutorOwner {
    ~ExecutorOwner() {
        delete executor;
        executor = nullptr;
    }
} executor_owner;

HOSTCUDA_UNCHECKED const char* next_sync_name(Executor& e) { return &e.sync_names[e.sync_index++ % sizeof(e.sync_names)]; }

HOSTCUDA_UNCHECKED void happens_before_release([[maybe_unused]] const char* name) {
#if HOSTCUDA_TSAN
    __tsan_release(const_cast<char*>(name));
#endif
}
HOSTCUDA_UNCHECKED void happens_before_acquire([[maybe_unused]] const char* name) {
#if HOSTCUDA_TSAN
    __tsan_acquire(const_cast<char*>(name));
#endif
}

// ---- switching -----------------------------------------------------------------------------------------------------------------
// Where to go: a fiber (null: the OS thread's own stack) and the place on it.
struct Target {
    Fiber* fiber;
    const Context* context;
};

HOSTCUDA_UNCHECKED __attribute__((always_inline)) inline void switch_to(Executor& e, Context& save, const Target& target) {
    [[maybe_unused]] Fiber* const from = e.running;
    Fiber* const to = target.fiber;
    e.running = to;
#if HOSTCUDA_TSAN
    constexpr unsigned kNoSync = 1;  // a switch orders nothing: that is the point
    __tsan_switch_to_fiber(to != nullptr ? to->tsan : e.home_tsan, kNoSync);
#endif
#if HOSTCUDA_ASAN
    void** const fake_stack = from != nullptr ? &from->asan_fake_stack : &e.home_fake_stack;
    __sanitizer_start_switch_fiber(fake_stack, to != nullptr ? to->stack : e.home_stack, to != nullptr ? to->stack_bytes : e.home_stack_bytes);
#endif
    switch_context(save, *target.context);
#if HOSTCUDA_ASAN
    __sanitizer_finish_switch_fiber(*fake_stack, nullptr, nullptr);
#endif
}

// The bottom of every fiber's stack. A fiber is never unwound: an idle one waits inside run_threads' last begin_thread().
HOSTCUDA_UNCHECKED void fiber_main() {
    Executor& e = *executor;
#if HOSTCUDA_ASAN
    // The first switch of all comes from the OS thread's own stack; this is how its bounds are learnt.
    const void* from_stack;
    size_t from_bytes;
    __sanitizer_finish_switch_fiber(nullptr, &from_stack, &from_bytes);
    if (e.home_stack == nullptr) {
        e.home_stack = from_stack;
        e.home_stack_bytes = from_bytes;
    }
#endif
    for (;;) e.run_threads(e.call);
}

[[gnu::noinline]] Fiber* new_fiber(Executor& e) {
    if (e.fiber_count == kMaxThreads) stop("hostcuda's own fault: more fibers than threads");
    const size_t guard = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t bytes = stack_bytes();
    // The page below a stack is never accessible: an overflow is a fault at once, not a changed neighbour.
    void* const mapped = mmap(nullptr, guard + bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (mapped == MAP_FAILED || mprotect(static_cast<char*>(mapped) + guard, bytes, PROT_READ | PROT_WRITE) != 0) {
        stop("no memory for the stack of CUDA thread %u of a block (%zu bytes); use fewer HOSTCUDA_THREADS, a smaller HOSTCUDA_STACK, or a larger "
             "vm.max_map_count",
             e.fiber_count, bytes);
    }
    Fiber* const fiber = new Fiber{};
    fiber->stack = static_cast<char*>(mapped) + guard;
    fiber->stack_bytes = bytes;
    // Stacks lie a power of two apart, so their tops would all compete for the same few cache sets; start each a few lines lower.
    const size_t colour = e.fiber_count * 5 % 64 * 64;
    fiber->context = make_context(fiber->stack, fiber->stack + bytes - colour, fiber_main);
#if HOSTCUDA_TSAN
    fiber->tsan = __tsan_create_fiber(0);
#endif
    e.fibers[e.fiber_count++] = fiber;
    return fiber;
}

Executor::Executor() {
    use_fault_stack();
    memset(suspended, 0, sizeof(suspended));
    memset(warp, 0, sizeof(warp));
    memset(&barrier, 0, sizeof(barrier));
#if HOSTCUDA_TSAN
    home_tsan = __tsan_get_current_fiber();
#endif
    (void)&executor_owner;  // so that its destructor runs when the OS thread ends
}

Executor::~Executor() {
    const size_t guard = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    for (unsigned i = 0; i < fiber_count; i++) {
#if HOSTCUDA_TSAN
        __tsan_destroy_fiber(fibers[i]->tsan);
#endif
#if HOSTCUDA_ASAN
        __asan_unpoison_memory_region(fibers[i]->stack, fibers[i]->stack_bytes);  // the frames of fiber_main are left as they stand
#endif
        munmap(fibers[i]->stack - guard, fibers[i]->stack_bytes + guard);
        delete fibers[i];
    }
}

HOSTCUDA_UNCHECKED inline Fiber* take_idle(Executor& e) {
    Fiber* const fiber = e.idle;
    if (fiber == nullptr) return new_fiber(e);
    e.idle = fiber->next_idle;
    return fiber;
}

HOSTCUDA_UNCHECKED inline void put_idle(Executor& e, Fiber* fiber) {
    fiber->next_idle = e.idle;
    e.idle = fiber;
}

// ---- messages ------------------------------------------------------------------------------------------------------------------
HOSTCUDA_UNCHECKED uint3 index_of(unsigned thread) {
    const unsigned x = thread % blockDim.x, rest = thread / blockDim.x;
    return uint3{x, rest % blockDim.y, rest / blockDim.y};
}

// For hostcuda::stop: may be called in a signal handler, so it only formats numbers and a name that is already known.
bool describe_running_thread(char* text, size_t size) {
    if (block_progress.count == 0 || executor == nullptr || executor->launch == nullptr) return false;
    int length = snprintf(text, size, "kernel %s, block (%u,%u,%u)", executor->launch->grid.name, blockIdx.x, blockIdx.y, blockIdx.z);
    if (block_progress.thread != kNone && length > 0 && static_cast<size_t>(length) < size) {
        snprintf(text + length, size - static_cast<size_t>(length), ", thread (%u,%u,%u)", threadIdx.x, threadIdx.y, threadIdx.z);
    }
    return true;
}
[[maybe_unused]] const bool hooked = (describe_caller = describe_running_thread, true);

HOSTCUDA_UNCHECKED bool is_waiting(const Executor& e, unsigned thread) { return (e.warp[thread / 32].waiting >> thread % 32 & 1) != 0; }

HOSTCUDA_UNCHECKED bool has_returned(const Executor& e, unsigned thread) {
    const bool started = e.scheduled ? (e.warp[thread / 32].unstarted >> thread % 32 & 1) == 0 : thread < block_progress.next;
    const bool ready = (e.warp[thread / 32].ready >> thread % 32 & 1) != 0;
    return started && !ready && !is_waiting(e, thread) && thread != block_progress.thread;
}

// The meeting a waiting thread is in; null when it waits at the barrier.
const Meeting* meeting_of(const Executor& e, unsigned thread) {
    const Warp& warp = e.warp[thread / 32];
    for (unsigned m = 0; m < warp.open; m++) {
        const Meeting& meeting = warp.meetings[m];
        if ((meeting.arrived >> thread % 32 & 1) != 0) return &meeting;
    }
    return nullptr;
}

const char* barrier_name(Barrier kind) {
    static constexpr const char* names[] = {"__syncthreads", "__syncthreads_count", "__syncthreads_and", "__syncthreads_or"};
    return names[static_cast<int>(kind)];
}

// "thread (1,0,0) waits at __syncthreads in a.cu:12" into text.
void describe_thread(const Executor& e, unsigned thread, char* text, size_t size) {
    const uint3 index = index_of(thread);
    char state[512];
    const Meeting* const meeting = meeting_of(e, thread);
    if (meeting != nullptr) {
        snprintf(state, sizeof(state), "waits at %s with mask 0x%08x", meeting->name, meeting->mask);
    } else if (is_waiting(e, thread)) {
        snprintf(state, sizeof(state), "waits at %s in %s:%d", barrier_name(e.barrier.kind), e.barrier.file, e.barrier.line);
    } else {
        snprintf(state, sizeof(state), "%s", has_returned(e, thread) ? "has returned" : "is elsewhere");
    }
    snprintf(text, size, "thread (%u,%u,%u) %s", index.x, index.y, index.z, state);
}

// Makes `thread` the one a stop names.
void blame(unsigned thread) {
    block_progress.thread = thread;
    threadIdx = index_of(thread);
}

// All threads that have not returned wait, and nobody can come.
[[noreturn, gnu::noinline]] void stop_no_progress(Executor& e) {
    const unsigned count = block_progress.count;
    char other[640];
    // A collective whose lanes cannot all come is the closer cause, also where others wait at a barrier for its lanes.
    for (unsigned thread = 0; thread < count; thread++) {
        const Meeting* const meeting = meeting_of(e, thread);
        if (meeting == nullptr) continue;
        const unsigned missing = meeting->mask & ~meeting->arrived;
        const unsigned lane = static_cast<unsigned>(__builtin_ctz(missing)), other_thread = (thread & ~31u) + lane;
        if (other_thread < count) {
            describe_thread(e, other_thread, other, sizeof(other));
        } else {
            snprintf(other, sizeof(other), "the block has no such thread (it has %u)", count);
        }
        blame(thread);
        stop("missing lanes: %s with mask 0x%08x waits for lanes 0x%08x that never come; lane %u: %s; every lane named in the mask must make the call",
             meeting->name, meeting->mask, missing, lane, other);
    }
    for (unsigned missing = 0; missing < count; missing++) {
        if (is_waiting(e, missing)) continue;
        describe_thread(e, missing, other, sizeof(other));
        blame(e.barrier.first_thread);
        stop("divergent barrier: %s in %s:%d is reached by %u of %u threads; %s; every thread of the block must reach it", barrier_name(e.barrier.kind),
             e.barrier.file, e.barrier.line, e.barrier.arrived, count, other);
    }
    stop_block("hostcuda's own fault: no thread can go on");
}

[[noreturn, gnu::noinline]] void stop_other_barrier(const Executor& e, const char* name, int line, const char* file) {
    char other[640];
    describe_thread(e, e.barrier.first_thread, other, sizeof(other));
    stop("divergent barrier: this thread is at %s in %s:%d, %s; all threads of the block must reach the same barrier", name, file, line, other);
}

[[noreturn, gnu::noinline]] void stop_other_meeting(const Executor& e, const Meeting& meeting, unsigned warp, unsigned mask, const char* name) {
    char other[640];
    describe_thread(e, warp * 32 + static_cast<unsigned>(__builtin_ctz(meeting.arrived)), other, sizeof(other));
    stop("missing lanes: this lane is at %s with mask 0x%08x, %s (another type or another collective); every lane named in the mask must make the "
         "same call",
         name, mask, other);
}

// ---- the order of threads ------------------------------------------------------------------------------------------------------
struct Choice {
    unsigned thread;  // kNone when none can run
    bool is_new;
};

// Scheduled orders: the thread to run next, taken off its warp's lists.
HOSTCUDA_UNCHECKED Choice choose_thread(Executor& e) {
    unsigned best = kNone;
    if (!e.schedule.enabled) {
        if (block_progress.ready_warps != 0) {
            best = static_cast<unsigned>(__builtin_ctz(block_progress.ready_warps));
        } else {
            for (unsigned w = 0; w < e.warps && best == kNone; w++) {
                if (e.warp[w].unstarted != 0) best = w;
            }
        }
    } else {
        for (unsigned w = 0; w < e.warps; w++) {
            if ((e.warp[w].ready | e.warp[w].unstarted) == 0) continue;
            if (best == kNone || e.warp[w].priority > e.warp[best].priority) best = w;
        }
        // A change point: the warp that would go on falls behind all others.
        if (best != kNone && e.schedule.change_now()) {
            e.warp[best].priority = e.schedule.next_lowest();
            for (unsigned w = 0; w < e.warps; w++) {
                if ((e.warp[w].ready | e.warp[w].unstarted) != 0 && e.warp[w].priority > e.warp[best].priority) best = w;
            }
        }
    }
    if (best == kNone) return {kNone, false};
    Warp& warp = e.warp[best];
    const unsigned lanes = e.schedule.enabled || warp.ready == 0 ? warp.ready | warp.unstarted : warp.ready;
    const unsigned lane = e.schedule.enabled ? e.schedule.pick_lane(lanes) : static_cast<unsigned>(__builtin_ctz(lanes));
    const bool is_new = (warp.unstarted >> lane & 1) != 0;
    warp.ready &= ~(1u << lane);
    warp.unstarted &= ~(1u << lane);
    if (warp.ready == 0) block_progress.ready_warps &= ~(1u << best);
    return {best * 32 + lane, is_new};
}

HOSTCUDA_UNCHECKED inline Target suspended_thread(Executor& e, unsigned thread) {
    const Suspended& suspended = e.suspended[thread];
    return {suspended.fiber, &suspended.context};
}

HOSTCUDA_UNCHECKED inline Target fiber_for_new_thread(Executor& e, unsigned thread) {
    e.chosen = thread;
    Fiber* const fiber = kTsan ? e.fibers[(thread + e.rotation) % e.fiber_count] : take_idle(e);
    return {fiber, &fiber->context};
}

// Where to go on when the running thread has to wait.
HOSTCUDA_UNCHECKED inline Target next_target(Executor& e) {
    if (e.scheduled) {
        const Choice choice = choose_thread(e);
        if (choice.thread == kNone) stop_no_progress(e);
        return choice.is_new ? fiber_for_new_thread(e, choice.thread) : suspended_thread(e, choice.thread);
    }
    BlockProgress& progress = block_progress;
    if (progress.ready_warps != 0) {
        const unsigned w = static_cast<unsigned>(__builtin_ctz(progress.ready_warps));
        Warp& warp = e.warp[w];
        const unsigned lane = static_cast<unsigned>(__builtin_ctz(warp.ready));
        warp.ready &= warp.ready - 1;
        if (warp.ready == 0) progress.ready_warps &= progress.ready_warps - 1;
        return suspended_thread(e, w * 32 + lane);
    }
    if (progress.next < progress.direct_end) {
        Fiber* const fiber = take_idle(e);
        return {fiber, &fiber->context};
    }
    stop_no_progress(e);
}

// Puts the running thread to sleep until someone makes it ready. Inlined, like the switch itself.
HOSTCUDA_UNCHECKED __attribute__((always_inline)) inline void suspend(Executor& e) {
    const unsigned thread = block_progress.thread;
    const uint3 index = threadIdx;
    e.suspended[thread].fiber = e.running;
    const Target next = next_target(e);
    if (next.fiber != e.running) switch_to(e, e.suspended[thread].context, next);
    block_progress.thread = thread;
    threadIdx = index;
}

HOSTCUDA_UNCHECKED inline void make_ready(Executor& e, unsigned warp, unsigned lanes) {
    if (lanes == 0) return;
    e.warp[warp].ready |= lanes;
    e.warp[warp].waiting &= ~lanes;
    block_progress.ready_warps |= 1u << warp;
}

HOSTCUDA_UNCHECKED inline unsigned lanes_of_warp(unsigned warp) {
    const unsigned rest = block_progress.count - warp * 32;
    return rest >= 32 ? ~0u : (1u << rest) - 1;
}

HOSTCUDA_UNCHECKED inline void start_thread(Executor& e, unsigned thread) {
    block_progress.thread = thread;
    threadIdx = index_of(thread);
    happens_before_acquire(&e.launch->happens_before[0]);
}

}  // namespace

// The plain loop cannot go on: threads that waited are ready, the block is at its end, or the scheduler decides.
HOSTCUDA_UNCHECKED bool begin_thread_slow() {
    Executor& e = *executor;
    BlockProgress& progress = block_progress;
    if (e.chosen != kNone) {  // this fiber was woken to start it
        const unsigned thread = e.chosen;
        e.chosen = kNone;
        start_thread(e, thread);
        return true;
    }
    if (progress.thread != kNone) {
        happens_before_release(&e.launch->happens_before[1]);
        progress.thread = kNone;
    }
    Target next{nullptr, &e.home_context};
    if (e.scheduled) {
        const Choice choice = choose_thread(e);
        if (choice.is_new && !kTsan) {
            start_thread(e, choice.thread);
            return true;
        }
        if (choice.thread != kNone) next = choice.is_new ? fiber_for_new_thread(e, choice.thread) : suspended_thread(e, choice.thread);
    } else if (progress.ready_warps != 0) {
        next = next_target(e);
    }
    if (next.fiber == nullptr) {  // the block is done
        for (unsigned w = 0; w < e.warps; w++) {
            if (e.warp[w].waiting != 0) stop_no_progress(e);
        }
    }
    Fiber* const self = e.running;
    if (next.fiber != self) {
        if (!kTsan) put_idle(e, self);
        switch_to(e, self->context, next);
    }
    return false;  // woken: for a new thread, maybe of another kernel
}

HOSTCUDA_UNCHECKED int block_barrier(Barrier kind, int predicate, int line, const char* file) {
    if (block_progress.count == 0) stop("%s is called outside a kernel (%s:%d)", barrier_name(kind), file, line);
    Executor& e = *executor;
    BarrierState& b = e.barrier;
    if (b.arrived == 0) {
        b.kind = kind;
        b.line = line;
        b.file = file;
        b.first_thread = block_progress.thread;
        b.count = 0;
        if (kTsan) b.sync = next_sync_name(e);
    } else if (b.kind != kind || b.line != line || (b.file != file && strcmp(b.file, file) != 0)) {
        stop_other_barrier(e, barrier_name(kind), line, file);
    }
    b.arrived++;
    b.count += predicate != 0;
    const unsigned parity = b.parity;
    const char* const sync = b.sync;
    happens_before_release(sync);
    if (b.arrived == block_progress.count) {
        switch (kind) {
            case Barrier::plain: b.result[parity] = 0; break;
            case Barrier::count: b.result[parity] = b.count; break;
            case Barrier::all: b.result[parity] = b.count == static_cast<int>(block_progress.count); break;
            case Barrier::any: b.result[parity] = b.count != 0; break;
        }
        b.arrived = 0;
        b.parity ^= 1;
        const unsigned self_warp = block_progress.thread / 32, self_lane = block_progress.thread % 32;
        for (unsigned w = 0; w < e.warps; w++) make_ready(e, w, w == self_warp ? lanes_of_warp(w) & ~(1u << self_lane) : lanes_of_warp(w));
        if (e.schedule.enabled) {  // the last one to come need not be the first one to go
            make_ready(e, self_warp, 1u << self_lane);
            suspend(e);
        }
    } else {
        e.warp[block_progress.thread / 32].waiting |= 1u << block_progress.thread % 32;
        suspend(e);
    }
    happens_before_acquire(sync);
    return b.result[parity];
}

HOSTCUDA_UNCHECKED void warp_collective(unsigned mask, void* args, WarpCompute compute, const char* name) {
    if (block_progress.count == 0) stop("%s is called outside a kernel", name);
    Executor& e = *executor;
    const unsigned w = block_progress.thread / 32, lane = block_progress.thread % 32;
    if ((mask >> lane & 1) == 0) stop("missing lanes: lane %u calls %s with mask 0x%08x, which does not name it", lane, name, mask);
    Warp& warp = e.warp[w];
    unsigned m = 0;
    while (m < warp.open && warp.meetings[m].mask != mask) m++;
    Meeting& meeting = warp.meetings[m];
    if (m == warp.open) {
        warp.open++;
        meeting.mask = mask;
        meeting.arrived = 0;
        meeting.compute = compute;
        meeting.name = name;
        if (kTsan) meeting.sync = next_sync_name(e);
    } else if (meeting.compute != compute) {
        stop_other_meeting(e, meeting, w, mask, name);
    }
    meeting.arrived |= 1u << lane;
    warp.lane_args[lane] = args;
    const char* const sync = meeting.sync;
    happens_before_release(sync);
    if (meeting.arrived == mask) {
        if (m != --warp.open) meeting = warp.meetings[warp.open];
        happens_before_acquire(sync);
        compute(warp.lane_args, mask);
        happens_before_release(sync);  // the others read what was computed
        make_ready(e, w, mask & ~(1u << lane));
        if (e.schedule.enabled) {
            make_ready(e, w, 1u << lane);
            suspend(e);
        }
    } else {
        warp.waiting |= 1u << lane;
        suspend(e);
    }
    happens_before_acquire(sync);
}

HOSTCUDA_UNCHECKED unsigned active_lanes() {
    if (block_progress.count == 0) stop("__activemask is called outside a kernel");
    const Executor& e = *executor;
    const unsigned first = block_progress.thread & ~31u;
    unsigned lanes = 0;
    for (unsigned lane = 0; lane < 32 && first + lane < block_progress.count; lane++) {
        const unsigned thread = first + lane;
        if (!has_returned(e, thread)) lanes |= 1u << lane;
    }
    return lanes;
}

void stop_missing_source(const char* name, unsigned mask, unsigned lane, unsigned source) {
    blame((block_progress.thread & ~31u) + lane);
    stop("missing lanes: lane %u reads from lane %u in %s, which the mask 0x%08x does not name; its value is undefined", lane, source, name, mask);
}

void stop_unaligned(const void* address, size_t bytes) {
    stop("unaligned vector access: %zu bytes at %p, which is %zu past a multiple of %zu; align the row or use single elements", bytes, address,
         reinterpret_cast<uintptr_t>(address) % bytes, bytes);
}

void stop_no_dynamic_shared() {
    stop("dynamic shared memory is used, but the launch gave none (or the caller is not in a kernel); pass its bytes to the launch");
}

HOSTCUDA_UNCHECKED const Grid& running_grid() { return executor->launch->grid; }

void trap() { stop("__trap was called"); }

void stop_block(const char* format, ...) {
    block_progress.thread = kNone;
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    stop("%s", text);
}

HOSTCUDA_UNCHECKED void run_block(Launch& launch, size_t block_index) {
    if (executor == nullptr) executor = new Executor;
    Executor& e = *executor;
    const Grid& grid = launch.grid;
    e.launch = &launch;
    e.run_threads = grid.run_threads;
    e.call = grid.call;
    gridDim = grid.grid;
    blockDim = grid.block;
    blockIdx.x = static_cast<unsigned>(block_index % grid.grid.x);
    blockIdx.y = static_cast<unsigned>(block_index / grid.grid.x % grid.grid.y);
    blockIdx.z = static_cast<unsigned>(block_index / grid.grid.x / grid.grid.y);

    BlockProgress& progress = block_progress;
    progress.count = grid.block.x * grid.block.y * grid.block.z;
    progress.thread = kNone;
    progress.next = 0;
    progress.next_x = progress.next_y = progress.next_z = 0;
    progress.ready_warps = 0;
    e.warps = (progress.count + 31) / 32;
    e.schedule.begin_block(launch.serial, block_index);
    e.scheduled = kTsan || e.schedule.enabled;
    progress.direct_end = e.scheduled ? 0 : progress.count;
    if (e.scheduled) {
        for (unsigned w = 0; w < e.warps; w++) {
            e.warp[w].unstarted = lanes_of_warp(w);
            e.warp[w].priority = e.schedule.enabled ? e.schedule.first_priority() : 0;
        }
    }
    if (kTsan) {
        // A thread of the next block shall not look like the same thread of this one, or a race between blocks would go unseen.
        while (e.fiber_count < std::min(kMaxThreads, 2 * progress.count)) new_fiber(e);
        e.rotation = static_cast<unsigned>(e.blocks_run++ * 37 % e.fiber_count);
    }

    begin_block_shared_memory(grid.dynamic_bytes);
    begin_block_async_copies(progress.count);
    happens_before_release(&launch.happens_before[0]);  // shared memory is fresh to all its threads
    switch_to(e, e.home_context, e.scheduled ? fiber_for_new_thread(e, choose_thread(e).thread) : next_target(e));
    end_block_async_copies();
    end_block_shared_memory();
    progress.count = 0;
    progress.thread = kNone;
    shared_table.count = 0;
    shared_table.dynamic_base = nullptr;
    e.launch = nullptr;
}

}  // namespace hostcuda
