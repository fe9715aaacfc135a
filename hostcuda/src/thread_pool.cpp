#include "thread_pool.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include <pthread.h>

#include "hostcuda/execution.h"
#include "hostcuda/internal.h"
#include "sanitizers.h"

namespace hostcuda {
namespace {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
}

// Two streams' kernels come one after the other here, by chance; to TSan that must not look like an order that the program asked for. So it
// ignores the pool's locks; what a launch or a parallel_for really orders is told apart.
#if HOSTCUDA_TSAN
extern "C" void AnnotateIgnoreSyncBegin(const char* file, int line);
extern "C" void AnnotateIgnoreSyncEnd(const char* file, int line);
struct NoOrder {
    NoOrder() { AnnotateIgnoreSyncBegin(__FILE__, __LINE__); }
    ~NoOrder() { AnnotateIgnoreSyncEnd(__FILE__, __LINE__); }
};
#else
struct NoOrder {
    NoOrder() {}
};
#endif

// Launches follow one another within microseconds, so both sides look a moment before they sleep; longer would take the core from
// other ranks.
constexpr int kSpins = 1000;

class Pool {
public:
    explicit Pool(int workers) {
        for (int i = 0; i < workers; i++) threads_.emplace_back([this] { work(); });
    }

    ~Pool() {
        {
            std::lock_guard lock(mutex_);
            stopping_ = true;
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

    HOSTCUDA_UNCHECKED void run(size_t count, void (*run)(void*, size_t), void* context) {
        begin(count, run, context);
        take_pieces();
        wait_for_workers();
    }

private:
    HOSTCUDA_UNCHECKED void begin(size_t count, void (*run)(void*, size_t), void* context) {
        const NoOrder no_order;
        const size_t threads = threads_.size() + 1;
        count_ = count;
        // Several pieces a thread, so that uneven blocks even out; each piece costs one atomic add.
        piece_ = std::max<size_t>(1, count / (threads * 16));
        run_ = run;
        context_ = context;
        next_.store(0, std::memory_order_relaxed);
        working_.store(static_cast<int>(threads_.size()), std::memory_order_relaxed);
        {
            std::lock_guard lock(mutex_);
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
    }

    HOSTCUDA_UNCHECKED void wait_for_workers() {
        const NoOrder no_order;
        for (int spin = 0; working_.load(std::memory_order_acquire) != 0 && spin < kSpins; spin++) relax();
        if (working_.load(std::memory_order_acquire) != 0) {
            std::unique_lock lock(mutex_);
            done_.wait(lock, [this] { return working_.load(std::memory_order_acquire) == 0; });
        }
    }

    HOSTCUDA_UNCHECKED void take_pieces() {
        for (;;) {
            const size_t begin = next_.fetch_add(piece_, std::memory_order_relaxed);
            if (begin >= count_) return;
            const size_t end = std::min(count_, begin + piece_);
            for (size_t i = begin; i < end; i++) run_(context_, i);
        }
    }

    HOSTCUDA_UNCHECKED bool wait_for_work(unsigned& seen) {
        const NoOrder no_order;
        for (int spin = 0; generation_.load(std::memory_order_acquire) == seen && spin < kSpins; spin++) relax();
        if (generation_.load(std::memory_order_acquire) == seen) {
            std::unique_lock lock(mutex_);
            wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
        }
        seen = generation_.load(std::memory_order_acquire);
        return !stopping_;
    }

    HOSTCUDA_UNCHECKED void end_work() {
        const NoOrder no_order;
        if (working_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
            std::lock_guard lock(mutex_);
            done_.notify_one();
        }
    }

    HOSTCUDA_UNCHECKED void work() {
        unsigned seen = 0;
        while (wait_for_work(seen)) {
            take_pieces();
            end_work();
        }
    }

    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::atomic<unsigned> generation_{0};
    std::atomic<int> working_{0};
    std::atomic<size_t> next_{0};
    size_t count_ = 0, piece_ = 1;
    void (*run_)(void*, size_t) = nullptr;
    void* context_ = nullptr;
    bool stopping_ = false;
};

std::mutex pool_in_use;
thread_local bool inside_pool = false;

// A forked child (a death test) has none of the workers: it runs its blocks alone.
bool workers_lost = false;
[[maybe_unused]] const int at_fork = pthread_atfork(nullptr, nullptr, [] { workers_lost = true; });

// TSan knows about 8000 threads at most, and each OS thread here has up to 1024 CUDA threads.
int worker_count() { return (kTsan ? std::min(num_threads(), 4) : num_threads()) - 1; }

}  // namespace

namespace {
bool take_pool() {
    const NoOrder no_order;
    return pool_in_use.try_lock();
}
void return_pool() {
    const NoOrder no_order;
    pool_in_use.unlock();
}
}  // namespace

void parallel_for_unordered(size_t count, void (*run)(void*, size_t), void* context) {
    static const int workers = worker_count();
    if (workers > 0 && count > 1 && !inside_pool && !workers_lost && take_pool()) {
        static Pool pool(workers);
        inside_pool = true;
        pool.run(count, run, context);
        inside_pool = false;
        return_pool();
        return;
    }
    for (size_t i = 0; i < count; i++) run(context, i);
}

void parallel_for(size_t count, void (*run)(void*, size_t), void* context) {
#if HOSTCUDA_TSAN
    struct Ordered {
        void (*run)(void*, size_t);
        void* context;
        char began, ended;
        HOSTCUDA_UNCHECKED static void run_one(void* opaque, size_t index) {
            Ordered& ordered = *static_cast<Ordered*>(opaque);
            __tsan_acquire(&ordered.began);
            ordered.run(ordered.context, index);
            __tsan_release(&ordered.ended);
        }
    } ordered{run, context, 0, 0};
    __tsan_release(&ordered.began);
    parallel_for_unordered(count, Ordered::run_one, &ordered);
    __tsan_acquire(&ordered.ended);
#else
    parallel_for_unordered(count, run, context);
#endif
}

}  // namespace hostcuda
