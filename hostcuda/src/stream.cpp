// Streams and events.
//
// By default work runs at the call, in the calling thread: streams are in order and so is everything else. With
// HOSTCUDA_ASYNC=1 each stream has a worker thread that falls behind at random, so that work which is not ordered by
// an event or a wait really comes out of order.
//
// The workers are ordered by what CUDA orders and by nothing else, also in ThreadSanitizer's eyes. So no lock is
// shared between a stream's worker and anyone else: the host hands work over through a list that only it appends to
// and a semaphore, and a finished event is one flag that the worker sets and others read.
#include <linux/futex.h>
#include <semaphore.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "runtime.h"

namespace hostcuda {
namespace {

using Clock = std::chrono::steady_clock;

// A point in a stream: not reached, then reached. Shared by the stream that reaches it and all who wait.
struct Point {
    std::atomic<int> reached{0};
    std::atomic<int> owners{1};
    Clock::time_point when;

    void futex(long operation, long value) { syscall(SYS_futex, &reached, operation, value, nullptr, nullptr, 0L); }
    void reach() {
        when = Clock::now();
        reached.store(1, std::memory_order_release);
        futex(FUTEX_WAKE_PRIVATE, INT32_MAX);
    }
    bool is_reached() const { return reached.load(std::memory_order_acquire) != 0; }
    void wait() {
        while (!is_reached()) futex(FUTEX_WAIT_PRIVATE, 0);
    }
};

// Counts owners out of TSan's sight: a count both sides decrement would order the waiter before the stream.
class PointRef {
public:
    PointRef() = default;
    explicit PointRef(Point* point) : point_(point) {}
    PointRef(const PointRef& other) : point_(other.point_) {
        TsanIgnore ignore;
        if (point_) point_->owners.fetch_add(1);
    }
    PointRef(PointRef&& other) noexcept : point_(other.point_) { other.point_ = nullptr; }
    PointRef& operator=(PointRef other) noexcept {
        std::swap(point_, other.point_);
        return *this;
    }
    ~PointRef() {
        if (!point_) return;
        TsanIgnore ignore;
        if (point_->owners.fetch_sub(1) == 1) delete point_;
    }
    Point* operator->() const { return point_; }
    explicit operator bool() const { return point_ != nullptr; }

private:
    Point* point_ = nullptr;
};

struct Operation {
    std::function<void()> work;
    std::string name;
    enum Kind { work_item, wait, mark, end } kind = work_item;   // end: the stream was destroyed
    std::atomic<Operation*> next{nullptr};
};

thread_local Inside t_inside = Inside::nothing;

std::atomic<bool> exiting{false};
std::atomic<int> busy_workers{0};   // touched with relaxed order only: it must order nothing

// Delays. A stream is prompt or slow for a few operations on end, so that it falls behind by more than one; a slow one
// waits 10 us to 1 ms before each, short delays as likely as long ones. Now and then a stream stalls for 5 to 20 ms,
// which is longer than most kernels, so that what another stream does several kernels later gets ahead too. The mean
// over all operations is 0.17 ms.
class Delay {
public:
    explicit Delay(uint64_t seed) : state_(seed) {}
    void operator()() {
        if (left_ == 0) {
            slow_ = next() % 3 == 0;
            left_ = 1 + next() % 8;
        }
        left_--;
        const uint64_t draw = next();
        const double fraction = static_cast<double>(draw >> 11) / 0x1p53;
        double us = 0;
        if (draw % 128 == 0) us = 5000 + 15000 * fraction;
        else if (slow_) us = 10 * std::pow(100.0, fraction);
        if (us > 0) std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(us));
    }

private:
    uint64_t next() {   // splitmix64
        uint64_t z = (state_ += 0x9E3779B97F4A7C15ull);
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        return z ^ (z >> 31);
    }
    uint64_t state_;
    bool slow_ = false;
    uint64_t left_ = 0;
};

void run_timed(const char* name, const std::function<void()>& work) {
    const Inside outer = t_inside;
    t_inside = Inside::operation;
    if (profile_mode()) {
        const Clock::time_point start = Clock::now();
        work();
        profile_add(name, std::chrono::duration<double>(Clock::now() - start).count());
    } else {
        work();
    }
    t_inside = outer;
}

}  // namespace
}  // namespace hostcuda

using namespace hostcuda;

struct CUstream_st {
    unsigned flags = 0;
    int priority = 0;
    // Synchronous mode: keeps the work of several host threads on one stream apart.
    std::recursive_mutex running;
    // Asynchronous mode.
    std::mutex pushing;            // host threads only, never the worker
    Operation* tail = nullptr;     // appended to under `pushing`
    Operation* head = nullptr;     // the worker's; the operation it points at is done
    sem_t available;
    std::atomic<uint64_t> finished{0};   // of the work items and waits, which a query asks about
    uint64_t pushed = 0;                 // the same, under `pushing`
    Delay delay{0};

    bool blocking() const { return !(flags & cudaStreamNonBlocking); }

    void push(Operation* operation) {
        {
            std::lock_guard lock(pushing);
            if (operation->kind != Operation::mark) pushed++;
            tail->next.store(operation, std::memory_order_release);
            tail = operation;
        }
        sem_post(&available);   // the last touch: a worker that finds the end of its stream deletes it
    }
    void push(Operation::Kind kind, std::function<void()> work, const char* name = "") {
        Operation* operation = new Operation;
        operation->work = std::move(work);
        operation->kind = kind;
        operation->name = name;
        push(operation);
    }
    void push_wait(const PointRef& point) {
        push(Operation::wait, [point] { point->wait(); });
    }
    PointRef mark() {
        PointRef point(new Point);
        push(Operation::mark, [point] { point->reach(); });
        return point;
    }
    bool idle() {
        std::lock_guard lock(pushing);
        return finished.load(std::memory_order_acquire) == pushed;
    }

    void start(uint64_t index) {
        head = tail = new Operation;
        sem_init(&available, 0, 0);
        delay = Delay(async_seed() * 1000003 + index);
        std::thread([this] { work_loop(); }).detach();
    }
    void work_loop() {
        for (;;) {
            while (sem_wait(&available) != 0) {}
            Operation* operation = head->next.load(std::memory_order_acquire);
            delete head;
            head = operation;
            if (operation->kind == Operation::end) break;
            busy_workers.fetch_add(1, std::memory_order_relaxed);
            if (operation->kind == Operation::work_item) delay();
            if (operation->kind != Operation::work_item) operation->work();   // also at exit: others wait for them
            else if (!exiting.load(std::memory_order_relaxed)) run_timed(operation->name.c_str(), operation->work);
            operation->work = nullptr;   // what it holds is let go before the stream counts as idle
            busy_workers.fetch_sub(1, std::memory_order_relaxed);
            if (operation->kind != Operation::mark) finished.fetch_add(1, std::memory_order_release);
        }
        delete head;
        sem_destroy(&available);
        delete this;
    }
};

struct CUevent_st {
    unsigned flags = 0;
    std::mutex mutex;   // host threads only
    PointRef last;      // the newest record; none before the first
    PointRef recorded() {
        std::lock_guard lock(mutex);
        return last;
    }
};

namespace hostcuda {
namespace {

// Tables of what is alive. Host threads only, except that work on a stream may make calls (and then skips the checks).
struct Registry {
    std::mutex mutex;
    std::set<cudaStream_t> streams;
    std::set<cudaEvent_t> events;
    std::vector<PointRef> destroyed;   // ends of destroyed streams that may still have work
    uint64_t streams_made = 0;
    cudaStream_t legacy = nullptr;     // cudaMemcpy and cudaMemset in asynchronous mode
    PointRef legacy_end;
};
Registry& registry() {
    static Registry& instance = *new Registry;   // never destroyed: workers may outlive static objects
    return instance;
}

bool alive(cudaStream_t stream) {
    if (t_inside == Inside::operation) return true;
    std::lock_guard lock(registry().mutex);
    return registry().streams.count(stream) != 0;
}
bool alive(cudaEvent_t event) {
    if (!event) return false;
    if (t_inside == Inside::operation) return true;
    std::lock_guard lock(registry().mutex);
    return registry().events.count(event) != 0;
}

// A blocking stream's later work waits for an earlier cudaMemcpy or cudaMemset.
void order_after_legacy(cudaStream_t stream) {
    if (!stream->blocking()) return;
    PointRef end;
    {
        std::lock_guard lock(registry().mutex);
        end = registry().legacy_end;
    }
    if (end && !end->is_reached()) stream->push_wait(end);
}

}  // namespace

Inside inside() { return t_inside; }

cudaError_t check_stream(cudaStream_t stream, const char* call) {
    if (t_inside == Inside::host_function) return set_error(cudaErrorNotPermitted);
    if (!stream || stream == cudaStreamLegacy || stream == cudaStreamPerThread)
        stop("%s on the default stream, which hostcuda refuses because it waits for other streams behind the program's "
             "back; make one with cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) and pass it", call);
    if (!alive(stream)) return set_error(cudaErrorInvalidResourceHandle);
    return cudaSuccess;
}

cudaError_t enqueue(cudaStream_t stream, const char* what, std::function<void()> work) {
    if (const cudaError_t error = check_stream(stream, what)) return error;
    if (t_inside == Inside::operation) {
        work();   // part of the work that is running, which is timed as a whole
        return cudaSuccess;
    }
    if (!async_mode()) {
        std::lock_guard lock(stream->running);
        run_timed(what, work);
        return cudaSuccess;
    }
    order_after_legacy(stream);
    stream->push(Operation::work_item, std::move(work), what);
    return cudaSuccess;
}

void wait_for_legacy(const char* what, std::function<void()> work, bool host_waits) {
    if (t_inside == Inside::operation) {
        work();
        return;
    }
    if (!async_mode()) {
        run_timed(what, work);
        return;
    }
    PointRef end;
    {
        Registry& r = registry();
        std::lock_guard lock(r.mutex);
        if (!r.legacy) {
            r.legacy = new CUstream_st;
            r.legacy->start(r.streams_made++);
        }
        for (cudaStream_t stream : r.streams) {
            if (!stream->blocking() || stream->idle()) continue;
            r.legacy->push_wait(stream->mark());
        }
        r.legacy->push(Operation::work_item, std::move(work), what);
        end = r.legacy_end = r.legacy->mark();
    }
    if (host_waits) end->wait();
}

bool wait_for_all_streams() {
    if (!async_mode()) return true;
    if (t_inside != Inside::nothing) return false;
    std::vector<PointRef> ends;
    {
        Registry& r = registry();
        std::lock_guard lock(r.mutex);
        ends.swap(r.destroyed);
        for (cudaStream_t stream : r.streams) ends.push_back(stream->mark());
        if (r.legacy) ends.push_back(r.legacy->mark());
    }
    for (const PointRef& end : ends) end->wait();
    return true;
}

void settle_streams_at_exit() {
    if (!async_mode()) return;
    exiting = true;
    // Work that waits for another process may never end; then what needs quiet streams is left out.
    for (int i = 0; i < 200 && !streams_are_quiet(); i++) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}
bool streams_are_quiet() { return busy_workers.load() == 0; }

}  // namespace hostcuda

// ---- streams ------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* pStream, unsigned flags, int priority) {
    if (inside() == Inside::host_function) return set_error(cudaErrorNotPermitted);
    if (!pStream || (flags & ~cudaStreamNonBlocking)) return set_error(cudaErrorInvalidValue);
    cudaStream_t stream = new CUstream_st;
    stream->flags = flags;
    stream->priority = std::clamp(priority, -5, 0);
    prepare_exit();
    std::lock_guard lock(registry().mutex);
    if (async_mode()) stream->start(registry().streams_made++);
    registry().streams.insert(stream);
    *pStream = stream;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* pStream, unsigned flags) {
    return cudaStreamCreateWithPriority(pStream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* pStream) { return cudaStreamCreateWithPriority(pStream, cudaStreamDefault, 0); }

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
    if (const cudaError_t error = check_stream(stream, "cudaStreamGetFlags")) return error;
    if (!flags) return set_error(cudaErrorInvalidValue);
    *flags = stream->flags;
    return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
    if (const cudaError_t error = check_stream(stream, "cudaStreamGetPriority")) return error;
    if (!priority) return set_error(cudaErrorInvalidValue);
    *priority = stream->priority;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    if (const cudaError_t error = check_stream(stream, "cudaStreamDestroy")) return error;
    std::lock_guard lock(registry().mutex);
    registry().streams.erase(stream);
    if (!async_mode()) {
        delete stream;
        return cudaSuccess;
    }
    // What is queued is still done; the worker goes away after it.
    auto& destroyed = registry().destroyed;
    destroyed.erase(std::remove_if(destroyed.begin(), destroyed.end(), [](const PointRef& end) { return end->is_reached(); }),
                    destroyed.end());
    destroyed.push_back(stream->mark());
    stream->push(Operation::end, nullptr);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (const cudaError_t error = check_stream(stream, "cudaStreamSynchronize")) return error;
    if (async_mode() && inside() == Inside::nothing) stream->mark()->wait();
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    if (const cudaError_t error = check_stream(stream, "cudaStreamQuery")) return error;
    if (!async_mode() || inside() != Inside::nothing || stream->idle()) return cudaSuccess;
    return set_error(cudaErrorNotReady);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    if (const cudaError_t error = check_stream(stream, "cudaStreamWaitEvent")) return error;
    if (!alive(event)) return set_error(cudaErrorInvalidResourceHandle);
    if (!async_mode() || inside() == Inside::operation) return cudaSuccess;
    // The record as it stands now: a later one changes nothing, and a missing one is nothing to wait for.
    if (const PointRef point = event->recorded()) stream->push_wait(point);
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t fn, void* userData) {
    if (const cudaError_t error = check_stream(stream, "cudaLaunchHostFunc")) return error;
    if (!fn) return set_error(cudaErrorInvalidValue);
    return enqueue(stream, "host function", [fn, userData] {
        const Inside outer = t_inside;
        t_inside = Inside::host_function;   // it may make no CUDA calls
        fn(userData);
        t_inside = outer;
    });
}

cudaError_t cudaDeviceSynchronize() {
    if (inside() == Inside::host_function) return set_error(cudaErrorNotPermitted);
    if (wait_for_all_streams()) check_canaries("cudaDeviceSynchronize");
    return cudaSuccess;
}
cudaError_t cudaDeviceReset() { return cudaDeviceSynchronize(); }

// ---- events -------------------------------------------------------------------------------------------------------

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    if (inside() == Inside::host_function) return set_error(cudaErrorNotPermitted);
    if (!event || (flags & ~(cudaEventBlockingSync | cudaEventDisableTiming))) return set_error(cudaErrorInvalidValue);
    cudaEvent_t made = new CUevent_st;
    made->flags = flags;
    std::lock_guard lock(registry().mutex);
    registry().events.insert(made);
    *event = made;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventCreate(cudaEvent_t* event, unsigned flags) { return cudaEventCreateWithFlags(event, flags); }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    if (const cudaError_t error = check_stream(stream, "cudaEventRecord")) return error;
    if (!alive(event)) return set_error(cudaErrorInvalidResourceHandle);
    PointRef point;
    if (async_mode() && inside() == Inside::nothing) {
        order_after_legacy(stream);
        point = stream->mark();
    } else {
        point = PointRef(new Point);
        point->reach();
    }
    std::lock_guard lock(event->mutex);
    event->last = std::move(point);
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (inside() == Inside::host_function) return set_error(cudaErrorNotPermitted);
    if (!alive(event)) return set_error(cudaErrorInvalidResourceHandle);
    if (const PointRef point = event->recorded()) point->wait();
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (inside() == Inside::host_function) return set_error(cudaErrorNotPermitted);
    if (!alive(event)) return set_error(cudaErrorInvalidResourceHandle);
    const PointRef point = event->recorded();
    return set_error(!point || point->is_reached() ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
    if (inside() == Inside::host_function) return set_error(cudaErrorNotPermitted);
    if (!ms) return set_error(cudaErrorInvalidValue);
    for (cudaEvent_t event : {start, end})
        if (!alive(event) || (event->flags & cudaEventDisableTiming)) return set_error(cudaErrorInvalidResourceHandle);
    const PointRef from = start->recorded(), to = end->recorded();
    if (!from || !to) return set_error(cudaErrorInvalidResourceHandle);
    if (!from->is_reached() || !to->is_reached()) return set_error(cudaErrorNotReady);
    *ms = std::chrono::duration<float, std::milli>(to->when - from->when).count();
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    if (inside() == Inside::host_function) return set_error(cudaErrorNotPermitted);
    if (!alive(event)) return set_error(cudaErrorInvalidResourceHandle);
    {
        std::lock_guard lock(registry().mutex);
        registry().events.erase(event);
    }
    delete event;   // whoever waits holds the record itself
    return cudaSuccess;
}
