// The checking modes of the runtime, each shown to catch a planted fault and to leave correct programs alone. A mode is
// chosen by the environment once per process, so each case runs in a child of its own.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "hostcuda/internal.h"
#include "hostcuda/runtime_api.h"

using hostcuda::DeviceAccess;
using hostcuda::enqueue;

#if defined(__SANITIZE_THREAD__)
#define WITH_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define WITH_TSAN 1
#endif
#endif
#ifndef WITH_TSAN
#define WITH_TSAN 0
#endif

namespace {

using Environment = std::vector<std::pair<const char*, std::string>>;

// In the child of a death test: sets the mode, runs, and exits with 0 if what ran returned true.
template <class F>
[[noreturn]] void run_in(const Environment& environment, F body) {
    for (const auto& [name, value] : environment) setenv(name, value.c_str(), 1);
    exit(body() && !testing::Test::HasFailure() ? 0 : 1);
}
#define EXPECT_TRUE_IN(...) EXPECT_EXIT(run_in(__VA_ARGS__), testing::ExitedWithCode(0), "")   // environment, body
#define EXPECT_STOP_IN(text, ...) EXPECT_EXIT(run_in(__VA_ARGS__), testing::KilledBySignal(SIGABRT), text)

Environment async(uint64_t seed) { return {{"HOSTCUDA_ASYNC", "1"}, {"HOSTCUDA_ASYNC_SEED", std::to_string(seed)}}; }
const Environment kProtect = {{"HOSTCUDA_PROTECT", "1"}};

cudaStream_t new_stream(unsigned flags = cudaStreamNonBlocking) {
    cudaStream_t stream = nullptr;
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream, flags), cudaSuccess);
    return stream;
}
cudaEvent_t new_event() {
    cudaEvent_t event = nullptr;
    EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
    return event;
}
template <class T = int>
T* device(size_t count) {
    T* p = nullptr;
    EXPECT_EQ(cudaMalloc(&p, count * sizeof(T)), cudaSuccess);
    return p;
}
template <class T = int>
T* pinned(size_t count) {
    T* p = nullptr;
    EXPECT_EQ(cudaMallocHost(&p, count * sizeof(T)), cudaSuccess);
    return p;
}
void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// ---- HOSTCUDA_ASYNC -----------------------------------------------------------------------------------------------

// Two streams pass a buffer back and forth as a trainer does between compute and communication: one writes step i,
// the other reads it. `wait_for_data` false forgets the event between them, `wait_for_room` false the one back.
bool pipeline(bool wait_for_data, bool wait_for_room) {
    const int steps = 40;
    cudaStream_t compute = new_stream(), comm = new_stream();
    cudaEvent_t written = new_event(), read = new_event();
    int* buffer = device(1);
    static int seen[steps];
    for (int i = 0; i < steps; i++) {
        if (wait_for_room) cudaStreamWaitEvent(compute, read);   // never recorded the first time: nothing to wait for
        enqueue(compute, "write", [=] { *buffer = i; });
        cudaEventRecord(written, compute);
        if (wait_for_data) cudaStreamWaitEvent(comm, written);
        enqueue(comm, "read", [=] { seen[i] = *buffer; });
        cudaEventRecord(read, comm);
    }
    cudaDeviceSynchronize();
    for (int i = 0; i < steps; i++)
        if (seen[i] != i) return false;
    return true;
}

#if !WITH_TSAN
TEST(AsyncDeathTest, EventsKeepAPipelineRight) {
    for (uint64_t seed = 1; seed <= 5; seed++) EXPECT_TRUE_IN(async(seed), [] { return pipeline(true, true); });
}

// Forty unordered pairs in about nine phases of each stream, a third of them slow: a seed misses the fault with a chance
// of about (2/3)^9, 3 %, and three of five must show it, which fails once in 5000 drawings of the five seeds.
int shown(bool wait_for_data, bool wait_for_room) {
    int count = 0;
    for (uint64_t seed = 1; seed <= 5; seed++) {
        const pid_t child = fork();
        if (child == 0) run_in(async(seed), [&] { return pipeline(wait_for_data, wait_for_room); });
        int status = 0;
        waitpid(child, &status, 0);
        EXPECT_TRUE(WIFEXITED(status));
        count += WEXITSTATUS(status) == 1;
    }
    return count;
}
TEST(AsyncDeathTest, MissingWaitGivesWrongData) {
    EXPECT_GE(shown(false, true), 3);
}
TEST(AsyncDeathTest, MissingWaitForRoomGivesWrongData) {
    EXPECT_GE(shown(true, false), 3);
}
TEST(AsyncDeathTest, WithoutTheModeTheFaultDoesNotShow) {   // which is why the mode exists
    EXPECT_TRUE_IN(Environment{}, [] { return pipeline(false, false); });
}
#else
TEST(AsyncDeathTest, TsanIsSilentOnACorrectPipeline) {
    EXPECT_TRUE_IN(async(1), [] { return pipeline(true, true); });
}
TEST(AsyncDeathTest, TsanReportsTheMissingWait) {
    EXPECT_EXIT(run_in(async(1), [] { pipeline(false, true); return true; }), testing::ExitedWithCode(66), "data race");
    EXPECT_EXIT(run_in(async(1), [] { pipeline(true, false); return true; }), testing::ExitedWithCode(66), "data race");
}
// Only the missing wait is between the two streams here: the host and a third stream must not stand in for it.
TEST(AsyncDeathTest, TsanSeesNoOrderThroughHostcudaItself) {
    EXPECT_EXIT(run_in(async(1), [] {
        cudaStream_t a = new_stream(), b = new_stream();
        int* buffer = device(1);
        enqueue(a, "write", [=] { *buffer = 1; });
        sleep_ms(50);   // really later, but ordered by nothing
        enqueue(a, "more", [] {});
        enqueue(b, "more", [] { hostcuda::is_device_pointer(nullptr); });
        cudaStreamQuery(b);
        enqueue(b, "read", [=] { *buffer = *buffer + 1; });
        cudaDeviceSynchronize();
        return true;
    }), testing::ExitedWithCode(66), "data race");
}
// Copies and memsets count as reads and writes, also a memset that replaces pages.
TEST(AsyncDeathTest, TsanReportsMissingWaitsForCopiesAndMemsets) {
    const size_t bytes = size_t{20} << 20;
    const auto set = [=](char* p, cudaStream_t stream) { cudaMemsetAsync(p, 0, bytes, stream); };
    const auto set_little = [](char* p, cudaStream_t stream) { cudaMemsetAsync(p, 1, 8, stream); };
    const auto copy_in = [](char* p, cudaStream_t stream) { cudaMemcpyAsync(p, pinned<char>(8), 8, cudaMemcpyHostToDevice, stream); };
    const auto copy_out = [](char* p, cudaStream_t stream) { cudaMemcpyAsync(pinned<char>(8), p, 8, cudaMemcpyDeviceToHost, stream); };
    const auto write = [](char* p, cudaStream_t stream) { enqueue(stream, "write", [=] { p[0] = 1; }); };
    const auto last = [=](char* p, cudaStream_t stream) { enqueue(stream, "read", [=] { p[0] = p[bytes - 1]; }); };
    const auto in_turn = [=](auto first, auto second, bool wait) {
        return [=] {
            cudaStream_t a = new_stream(), b = new_stream();
            cudaEvent_t event = new_event();
            char* p = device<char>(bytes);
            first(p, a);
            cudaEventRecord(event, a);
            if (wait) cudaStreamWaitEvent(b, event);
            second(p, b);
            cudaDeviceSynchronize();
            return true;
        };
    };
    const auto check = [=](auto first, auto second) {
        EXPECT_TRUE_IN(async(1), in_turn(first, second, true));
        EXPECT_EXIT(run_in(async(1), in_turn(first, second, false)), testing::ExitedWithCode(66), "data race");
    };
    check(set, last);
    check(set_little, write);
    check(copy_in, write);
    check(copy_out, write);
}
#endif

TEST(AsyncDeathTest, CallsReturnBeforeTheWorkIsDone) {
    EXPECT_TRUE_IN(async(1), [] {
        cudaStream_t stream = new_stream();
        cudaEvent_t event = new_event();
        std::atomic<bool> go{false};
        enqueue(stream, "wait", [&] { while (!go) sleep_ms(1); });
        cudaEventRecord(event, stream);
        EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
        EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
        EXPECT_EQ(cudaGetLastError(), cudaErrorNotReady);
        go = true;
        EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
        EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
        EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess);
        EXPECT_EQ(cudaGetLastError(), cudaSuccess);
        return true;
    });
}

TEST(AsyncDeathTest, AWaitHoldsForTheRecordAsItStood) {
    EXPECT_TRUE_IN(async(1), [] {
        cudaStream_t a = new_stream(), b = new_stream();
        cudaEvent_t event = new_event();
        std::atomic<bool> first{false}, second{false};
        enqueue(a, "first", [&] { while (!first) sleep_ms(1); });
        cudaEventRecord(event, a);
        cudaStreamWaitEvent(b, event);            // waits for the first record,
        enqueue(a, "second", [&] { while (!second) sleep_ms(1); });
        cudaEventRecord(event, a);                // whatever is recorded later,
        std::atomic<bool> reached{false};
        enqueue(b, "reached", [&] { reached = true; });
        sleep_ms(30);
        EXPECT_FALSE(reached);
        first = true;
        EXPECT_EQ(cudaStreamSynchronize(b), cudaSuccess);
        EXPECT_TRUE(reached);
        EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);   // and the event now stands for the second
        EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);       // destroying it does not disturb who waits
        second = true;
        EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        return true;
    });
}

TEST(AsyncDeathTest, ElapsedTimeIsNotReadyThenReal) {
    EXPECT_TRUE_IN(async(1), [] {
        cudaStream_t stream = new_stream();
        cudaEvent_t start, end;
        cudaEventCreate(&start);
        cudaEventCreate(&end);
        cudaEventRecord(start, stream);
        std::atomic<bool> go{false};
        enqueue(stream, "sleep", [&] { while (!go) sleep_ms(1); sleep_ms(20); });
        cudaEventRecord(end, stream);
        float ms = 0;
        EXPECT_EQ(cudaEventElapsedTime(&ms, start, end), cudaErrorNotReady);
        go = true;
        EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        EXPECT_EQ(cudaEventElapsedTime(&ms, start, end), cudaSuccess);
        return ms >= 20;
    });
}

// A copy from pinned memory reads it when it runs, one from pageable memory before the call returns.
TEST(AsyncDeathTest, PinnedIsReadLaterPageableAtTheCall) {
    if (WITH_TSAN) GTEST_SKIP() << "changing pinned memory under a copy is a data race, on purpose";
    EXPECT_TRUE_IN(async(1), [] {
        cudaStream_t stream = new_stream();
        int *from_pinned = device(1), *from_pageable = device(1), *source = pinned(1), pageable = 1;
        *source = 1;
        std::atomic<bool> go{false};
        enqueue(stream, "wait", [&] { while (!go) sleep_ms(1); });
        cudaMemcpyAsync(from_pinned, source, 4, cudaMemcpyHostToDevice, stream);
        cudaMemcpyAsync(from_pageable, &pageable, 4, cudaMemcpyHostToDevice, stream);
        *source = 2;
        pageable = 2;
        go = true;
        int back[2];
        // To pageable memory the call waits by itself.
        cudaMemcpyAsync(&back[0], from_pinned, 4, cudaMemcpyDeviceToHost, stream);
        cudaMemcpyAsync(&back[1], from_pageable, 4, cudaMemcpyDeviceToHost, stream);
        return back[0] == 2 && back[1] == 1;
    });
}

TEST(AsyncDeathTest, PinnedDestinationIsWrittenLater) {
    EXPECT_TRUE_IN(async(1), [] {
        cudaStream_t stream = new_stream();
        int *source = device(1), *destination = pinned(1);
        cudaMemsetAsync(source, 0, 4, stream);
        std::atomic<bool> go{false};
        enqueue(stream, "wait", [&] { while (!go) sleep_ms(1); });
        *destination = 5;
        cudaMemcpyAsync(destination, source, 4, cudaMemcpyDeviceToHost, stream);
        EXPECT_EQ(*destination, 5);
        go = true;
        EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        return *destination == 0;
    });
}

TEST(AsyncDeathTest, CudaMemsetIsNotOrderedBeforeANonBlockingStream) {
    if (WITH_TSAN) GTEST_SKIP() << "the planted fault is a data race";
    // Some run of the 50 sees the old value on the non-blocking stream; a blocking stream never does.
    const auto stale = [](unsigned flags) {
        cudaStream_t stream = new_stream(flags);
        int *value = device(1), *back = pinned(1);
        bool seen = false;
        for (int i = 1; i <= 50; i++) {
            cudaMemset(value, i, 4);
            cudaMemcpyAsync(back, value, 4, cudaMemcpyDeviceToHost, stream);
            cudaStreamSynchronize(stream);
            seen |= *back != i * 0x01010101;
            cudaDeviceSynchronize();
        }
        return seen;
    };
    EXPECT_TRUE_IN(async(1), [&] { return stale(cudaStreamNonBlocking); });
    EXPECT_TRUE_IN(async(1), [&] { return !stale(cudaStreamDefault); });
}

TEST(AsyncDeathTest, CudaMemcpyWaitsForBlockingStreams) {
    EXPECT_TRUE_IN(async(1), [] {
        cudaStream_t stream = new_stream(cudaStreamDefault);
        int *value = device(1), back = 0;
        for (int i = 0; i < 30; i++) {
            enqueue(stream, "write", [=] { *value = i; });
            cudaMemcpy(&back, value, 4, cudaMemcpyDeviceToHost);
            if (back != i) return false;
        }
        return true;
    });
}

TEST(AsyncDeathTest, DestroyedStreamFinishesItsWork) {
    EXPECT_TRUE_IN(async(1), [] {
        static std::atomic<int> done{0};
        for (int i = 0; i < 20; i++) {
            cudaStream_t stream = new_stream();
            enqueue(stream, "slow", [] { sleep_ms(2); done++; });
            cudaStreamDestroy(stream);
        }
        cudaDeviceSynchronize();
        return done == 20;
    });
}

TEST(AsyncDeathTest, FreeWaitsForWorkQueuedBefore) {
    EXPECT_TRUE_IN(async(1), [] {
        cudaStream_t stream = new_stream();
        int *p = device(1), *host = pinned(1);
        enqueue(stream, "late", [=] { sleep_ms(20); *p = 1; *host = 1; });
        cudaFree(p);
        cudaFreeHost(host);
        return true;
    });
}

TEST(AsyncDeathTest, FreedTooEarlyFaults) {
    EXPECT_STOP_IN("byte 0 of freed memory: the allocation of 4 bytes",
                   async(1), [] {
        int* p = device(1);
        cudaStream_t stream = new_stream();
        cudaFree(p);
        enqueue(stream, "late", [=] { *p = 1; });
        cudaStreamSynchronize(stream);
        return true;
    });
}

TEST(AsyncDeathTest, HostFunctionsAndManyHostThreads) {
    EXPECT_TRUE_IN(async(2), [] {
        cudaStream_t stream = new_stream();
        static int counter = 0;   // touched by one stream's work only
        std::vector<std::thread> threads;
        for (int t = 0; t < 3; t++)
            threads.emplace_back([=] { for (int i = 0; i < 100; i++) cudaLaunchHostFunc(stream, [](void*) { counter++; }, nullptr); });
        for (auto& thread : threads) thread.join();
        cudaStreamSynchronize(stream);
        return counter == 300;
    });
}

TEST(AsyncDeathTest, ExitWithWorkUnderWayIsQuiet) {
    EXPECT_TRUE_IN(async(1), [] {
        int* p = device(1000);
        for (int s = 0; s < 4; s++) {
            cudaStream_t stream = new_stream();
            for (int i = 0; i < 200; i++) enqueue(stream, "work", [=] { p[s] = i; });
        }
        return true;
    });
}

// ---- HOSTCUDA_PROTECT ---------------------------------------------------------------------------------------------

TEST(ProtectDeathTest, HostDereferenceStops) {
    EXPECT_STOP_IN("hostcuda: host code touched device memory at .*, byte 12 of the allocation of 40 bytes made at .*test_runtime_modes.cpp",
                   kProtect, [] {
        float* p = device<float>(10);
        return p[3] == 0;
    });
    EXPECT_STOP_IN("host code touched device memory",
                   kProtect, [] {
        char* p = device<char>(1 << 20);
        { DeviceAccess access; p[5000] = 1; }
        memset(p, 0, 10000);   // closed again, also where it was touched before
        return true;
    });
}

TEST(ProtectDeathTest, HostDereferenceBesideARunningKernelStops) {
    EXPECT_STOP_IN("host code touched device memory at .*allocation of 40 bytes",
                   Environment{{"HOSTCUDA_PROTECT", "1"}, {"HOSTCUDA_ASYNC", "1"}}, [] {
        cudaStream_t stream = new_stream();
        float *used = device<float>(20), *other = device<float>(10);
        std::atomic<bool> running{false};
        enqueue(stream, "kernel", [&running, used] {
            DeviceAccess access;
            used[0] = 1;
            running = true;
            sleep_ms(1000);
        });
        while (!running) sleep_ms(1);
        return other[0] == 0;
    });
}

TEST(ProtectDeathTest, LargeAllocationsOpenWhereTouched) {
    EXPECT_TRUE_IN(kProtect, [] {
        cudaStream_t stream = new_stream();
        const size_t bytes = size_t{100} << 20;
        char *a = device<char>(bytes), *b = device<char>(bytes);
        std::vector<char> back(bytes);
        for (int i = 0; i < 3; i++) {
            cudaMemsetAsync(a, i, bytes, stream);
            cudaMemcpyAsync(b, a, bytes, cudaMemcpyDeviceToDevice, stream);
            cudaMemcpyAsync(back.data(), b, bytes, cudaMemcpyDeviceToHost, stream);
            for (size_t at = 0; at < bytes; at += 4095)
                if (back[at] != i) return false;
        }
        return true;
    });
}

TEST(ProtectDeathTest, RuntimeCallsAndKernelsMayTouchIt) {
    for (const char* mode : {"0", "1"}) {
        const Environment environment = {{"HOSTCUDA_PROTECT", "1"}, {"HOSTCUDA_ASYNC", mode}};
        EXPECT_TRUE_IN(environment, [] {
            cudaStream_t stream = new_stream(), second = new_stream();
            int *a = device(100), *b = device(100), *other = device(100), *host = pinned(100);
            cudaMemsetAsync(a, 1, 400, stream);
            enqueue(stream, "kernel", [=] {
                DeviceAccess access;
                int* c = device(4);   // made while memory is open
                c[0] = a[7];
                DeviceAccess nested;
                b[7] = c[0] + 1;
            });
            for (int i = 0; i < 20; i++) enqueue(second, "other", [=] { DeviceAccess access; other[8] = i; });
            cudaMemcpyAsync(host, b, 400, cudaMemcpyDeviceToHost, stream);
            cudaStreamSynchronize(stream);
            EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
            EXPECT_EQ(cudaFree(a), cudaSuccess);
            return host[7] == 0x01010102;
        });
    }
}

TEST(ProtectDeathTest, OverrunsAreStillFound) {
    EXPECT_STOP_IN("written out of bounds, 0 bytes past its end",
                   kProtect, [] {
        char* p = device<char>(10);
        { DeviceAccess access; __asm__ volatile("movb $1, (%0)" : : "r"(p + 10) : "memory"); }   // unseen by ASan
        cudaDeviceSynchronize();
        return true;
    });
}

TEST(ProtectDeathTest, LaunchChecksPointers) {
    EXPECT_TRUE_IN(kProtect, [] {
        char *d = device<char>(1000), *h = pinned<char>(1000);
        for (char* good : {d, d + 500, d + 1000, h, h + 999, static_cast<char*>(nullptr)})
            hostcuda::check_device_pointer(good, "kernel", 0);
        return true;
    });
    EXPECT_STOP_IN("argument 2 of kernel my_kernel is 0x.*ordinary host memory",
                   kProtect, [] {
        int on_stack = 0;
        hostcuda::check_device_pointer(&on_stack, "my_kernel", 2);
        return true;
    });
    EXPECT_STOP_IN("argument 0 of kernel my_kernel is 0x.*ordinary host memory",
                   kProtect, [] {
        std::vector<int> heap(10);
        hostcuda::check_device_pointer(heap.data(), "my_kernel", 0);
        return true;
    });
    EXPECT_STOP_IN("argument 1 of kernel my_kernel is 0x.*freed memory: the allocation of 40 bytes",
                   kProtect, [] {
        int* p = device(10);
        cudaFree(p);
        hostcuda::check_device_pointer(p, "my_kernel", 1);
        return true;
    });
}

// ---- HOSTCUDA_MEMORY ----------------------------------------------------------------------------------------------

TEST(MemoryDeathTest, LimitIsKept) {
    const Environment small = {{"HOSTCUDA_MEMORY", "1MB"}};
    EXPECT_TRUE_IN(small, [] {
        size_t free, total;
        cudaMemGetInfo(&free, &total);
        EXPECT_EQ(total, 1000000u);
        EXPECT_EQ(free, total);
        char *a = nullptr, *b = nullptr;
        EXPECT_EQ(cudaMalloc(&a, 1000001), cudaErrorMemoryAllocation);
        EXPECT_EQ(a, nullptr);
        EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
        EXPECT_EQ(cudaMalloc(&a, 600000), cudaSuccess);
        EXPECT_EQ(cudaMalloc(&b, 600000), cudaErrorMemoryAllocation);
        EXPECT_EQ(cudaMalloc(&b, 390000), cudaSuccess);
        EXPECT_EQ(cudaFree(a), cudaSuccess);
        EXPECT_EQ(cudaMalloc(&a, 600000), cudaSuccess);
        EXPECT_EQ(cudaMalloc(&b, SIZE_MAX - 100), cudaErrorMemoryAllocation);
        return true;
    });
}

TEST(MemoryDeathTest, APlanLargerThanTheMachineCanBeAllocated) {
    const Environment large = {{"HOSTCUDA_MEMORY", WITH_TSAN ? "600GiB" : "2TiB"}};
    EXPECT_TRUE_IN(large, [] {
        const size_t bytes = WITH_TSAN ? size_t{500} << 30 : size_t{1} << 40;
        char* p = nullptr;
        EXPECT_EQ(cudaMalloc(&p, bytes), cudaSuccess);
        p[bytes - 1] = 1;
        float value;
        memcpy(&value, p + bytes / 2, 4);
        EXPECT_NE(value, value);
        EXPECT_EQ(cudaFree(p), cudaSuccess);
        return true;
    });
}

// ---- setting to zero ----------------------------------------------------------------------------------------------
// A large memset to 0 takes no memory for what was never written. In each mode, since protection and threads take part.

constexpr size_t kMiB = size_t{1} << 20;
using Bytes = std::vector<unsigned char>;

std::vector<Environment> zero_modes() {
    std::vector<Environment> modes;
    for (const char* protect : {"0", "1"})
        for (const char* async : {"0", "1"}) modes.push_back({{"HOSTCUDA_MEMORY", "5GB"}, {"HOSTCUDA_PROTECT", protect}, {"HOSTCUDA_ASYNC", async}});
    return modes;
}

size_t resident_bytes() {
    size_t all = 0, resident = 0;
    std::ifstream("/proc/self/statm") >> all >> resident;
    EXPECT_GT(resident, 0u);
    return resident * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

Bytes read_device(const unsigned char* p, size_t count, cudaStream_t stream) {
    Bytes bytes(count);
    EXPECT_EQ(cudaMemcpyAsync(bytes.data(), p, count, cudaMemcpyDeviceToHost, stream), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    return bytes;
}
bool all_are(const Bytes& bytes, unsigned char value) {
    return std::all_of(bytes.begin(), bytes.end(), [=](unsigned char byte) { return byte == value; });
}

bool is_poison(const Bytes& bytes, size_t at = 0) {   // `at`: where in the allocation
    for (size_t i = 0; i < bytes.size(); i++)
        if (bytes[i] != static_cast<unsigned char>(hostcuda::kPoison32 >> ((at + i) % 4 * 8))) return false;
    return true;
}

TEST(ZeroDeathTest, ALargeMemsetTakesNoMemory) {
    if (WITH_TSAN) GTEST_SKIP() << "ThreadSanitizer takes memory of its own for what is set";
    for (const Environment& mode : zero_modes())
        EXPECT_TRUE_IN(mode, [] {
            cudaStream_t stream = new_stream();
            const size_t bytes = 2048 * kMiB, begin = 54321, end = bytes - 12345;
            unsigned char* p = device<unsigned char>(bytes);
            // The range's borders lie within bytes that hold 7, 100 on each side.
            for (const size_t at : {begin, end}) cudaMemsetAsync(p + at - 100, 7, 200, stream);
            cudaStreamSynchronize(stream);
            const size_t before = resident_bytes();
            EXPECT_EQ(cudaMemsetAsync(p + begin, 0, end - begin, stream), cudaSuccess);
            cudaStreamSynchronize(stream);
            EXPECT_LT(resident_bytes(), before + 8 * kMiB);

            EXPECT_TRUE(is_poison(read_device(p, begin - 100, stream)));
            EXPECT_TRUE(all_are(read_device(p + begin - 100, 100, stream), 7));
            EXPECT_TRUE(all_are(read_device(p + begin, 3 * kMiB, stream), 0));
            EXPECT_TRUE(all_are(read_device(p + bytes / 2 - kMiB, 2 * kMiB, stream), 0));
            EXPECT_TRUE(all_are(read_device(p + end - 3 * kMiB, 3 * kMiB, stream), 0));
            EXPECT_TRUE(all_are(read_device(p + end, 100, stream), 7));
            EXPECT_TRUE(is_poison(read_device(p + end + 100, bytes - end - 100, stream), end + 100));

            enqueue(stream, "kernel", [=] { DeviceAccess access; p[bytes / 2] = 9; });   // it is memory like any other
            EXPECT_EQ(read_device(p + bytes / 2 - 1, 3, stream), (Bytes{0, 9, 0}));
            EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);   // the redzones are whole
            EXPECT_EQ(cudaFree(p), cudaSuccess);
            return true;
        });
}

TEST(ZeroDeathTest, AllWaysOfAskingForIt) {
    if (WITH_TSAN) GTEST_SKIP() << "ThreadSanitizer takes memory of its own for what is set";
    EXPECT_TRUE_IN(Environment{}, [] {
        cudaStream_t stream = new_stream();
        const size_t bytes = 64 * kMiB;
        for (const int value : {0, 0x100, -0x100}) {   // a byte is set, whatever else the int holds
            unsigned char* p = device<unsigned char>(bytes);
            const size_t before = resident_bytes();
            EXPECT_EQ(cudaMemset(p, value, bytes), cudaSuccess);
            EXPECT_LT(resident_bytes(), before + 8 * kMiB) << value;
            EXPECT_TRUE(all_are(read_device(p, bytes, stream), 0)) << value;
            EXPECT_EQ(cudaFree(p), cudaSuccess);
        }
        unsigned char* p = device<unsigned char>(bytes);
        EXPECT_EQ(cudaMemset(p, 0x101, bytes), cudaSuccess);
        EXPECT_TRUE(all_are(read_device(p, bytes, stream), 1));
        // Pinned memory is the program's own and must stay the memory it is.
        unsigned char* host = pinned<unsigned char>(bytes);
        EXPECT_EQ(cudaMemset(host, 0, bytes), cudaSuccess);
        EXPECT_TRUE(all_are(Bytes(host, host + bytes), 0));
        return true;
    });
}

// Fresh pages are slow at their next write, so what is mostly in use is written; what is mostly not gives its memory back.
TEST(ZeroDeathTest, MemoryInUseStays) {
    if (WITH_TSAN) GTEST_SKIP() << "ThreadSanitizer takes memory of its own for what is set";
    for (const Environment& mode : zero_modes())
        EXPECT_TRUE_IN(mode, [] {
            cudaStream_t stream = new_stream();
            const size_t bytes = 48 * kMiB;
            const auto change = [&](size_t written) {   // of resident memory, by setting to 0 what was written so far
                unsigned char* p = device<unsigned char>(bytes);
                cudaMemsetAsync(p + kMiB, 3, written, stream);
                cudaStreamSynchronize(stream);
                const size_t before = resident_bytes();
                cudaMemsetAsync(p, 0, bytes, stream);
                cudaStreamSynchronize(stream);
                const size_t after = resident_bytes();
                EXPECT_TRUE(all_are(read_device(p, bytes, stream), 0));
                cudaFree(p);
                return static_cast<long>(after) - static_cast<long>(before);
            };
            EXPECT_LT(change(20 * kMiB), -18 * static_cast<long>(kMiB));
            EXPECT_GT(change(30 * kMiB), -static_cast<long>(kMiB));
            return true;
        });
}

TEST(ZeroDeathTest, FreedMemoryComesBackPoisoned) {
    for (const Environment& mode : zero_modes())
        EXPECT_TRUE_IN(mode, [] {
            cudaStream_t stream = new_stream();
            const size_t bytes = WITH_TSAN ? 20 * kMiB : 2048 * kMiB;
            std::set<unsigned char*> seen;
            for (int i = 0; i < (WITH_TSAN ? 4 : 80); i++) {
                unsigned char* p = device<unsigned char>(bytes);
                seen.insert(p);
                for (const size_t at : {size_t{0}, bytes / 2, bytes - 100}) EXPECT_TRUE(is_poison(read_device(p + at, 100, stream))) << i;
                cudaMemset(p, 0, bytes);
                EXPECT_EQ(cudaFree(p), cudaSuccess);
            }
            return WITH_TSAN || seen.size() < 60;   // addresses were used again
        });
}

// Whoever writes the bytes right beside the range meanwhile, in the same pages, loses nothing.
TEST(ZeroDeathTest, NeighboursMayBeWrittenMeanwhile) {
    for (const Environment& mode : zero_modes())
        EXPECT_TRUE_IN(mode, [] {
            cudaStream_t stream = new_stream();
            const size_t bytes = 20 * kMiB, begin = 4096 + 512, end = bytes - 4096 - 512;
            unsigned char* p = device<unsigned char>(bytes);
            std::atomic<bool> done{false}, started{false};
            uint64_t count = 0;
            std::thread writer([&] {
                DeviceAccess access;
                auto *below = reinterpret_cast<volatile uint64_t*>(p + begin) - 1, *above = reinterpret_cast<volatile uint64_t*>(p + end);
                *below = 0;
                *above = 0;
                for (; !done; started = true) {
                    count++;
                    *below = *below + 1;
                    *above = *above + 1;
                }
                EXPECT_EQ(*below, count);
                EXPECT_EQ(*above, count);
            });
            while (!started) sleep_ms(1);
            for (int i = 0; i < (WITH_TSAN ? 5 : 50); i++) cudaMemsetAsync(p + begin, 0, end - begin, stream);
            cudaStreamSynchronize(stream);
            done = true;
            writer.join();
            return all_are(read_device(p + begin, end - begin, stream), 0);
        });
}

TEST(ZeroDeathTest, ProtectionStaysAsItIs) {
    const auto open_and_zero = [](unsigned char* p, cudaStream_t stream) {
        enqueue(stream, "kernel", [=] {
            DeviceAccess access;
            p[5 * kMiB] = 1;   // this part is open when it is set to 0, the others are not
            cudaMemsetAsync(p, 0, 64 * kMiB, stream);
            EXPECT_EQ(p[5 * kMiB] + p[40 * kMiB], 0);
            p[5 * kMiB] = 2, p[40 * kMiB] = 3;
        });
    };
    EXPECT_TRUE_IN(kProtect, [&] {
        cudaStream_t stream = new_stream();
        unsigned char* p = device<unsigned char>(64 * kMiB);
        open_and_zero(p, stream);
        return read_device(p + 5 * kMiB, 2, stream) == (Bytes{2, 0}) && read_device(p + 40 * kMiB, 2, stream) == (Bytes{3, 0});
    });
    for (const size_t at : {5 * kMiB, 20 * kMiB, 40 * kMiB})
        EXPECT_STOP_IN("host code touched device memory at .*, byte " + std::to_string(at) + " of the allocation of 67108864 bytes", kProtect, [&] {
            unsigned char* p = device<unsigned char>(64 * kMiB);
            open_and_zero(p, new_stream());
            return *const_cast<volatile unsigned char*>(p + at) == 0;
        });
}

// A process may have so many mappings; when none is left a memset writes, as it did before.
TEST(ZeroDeathTest, NoMappingsLeft) {
    if (WITH_TSAN) GTEST_SKIP() << "ThreadSanitizer needs mappings itself";
    EXPECT_TRUE_IN(Environment{}, [] {
        cudaStream_t stream = new_stream();
        const size_t bytes = 32 * kMiB, page = static_cast<size_t>(sysconf(_SC_PAGESIZE)), most = 200000;   // the middle of one mapping
        unsigned char* p = device<unsigned char>(bytes);
        Bytes back(bytes);
        char* ours = static_cast<char*>(mmap(nullptr, 2 * most * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        size_t i = 0;
        while (i < most && mprotect(ours + 2 * i * page, page, PROT_READ) == 0) i++;
        cudaMemsetAsync(p, 0, bytes, stream);
        cudaMemcpyAsync(back.data(), p, bytes, cudaMemcpyDeviceToHost, stream);
        munmap(ours, 2 * most * page);
        if (i == most) printf("vm.max_map_count is above %zu: not reached\n", most);
        return all_are(back, 0);
    });
}

// ---- HOSTCUDA_PROFILE ---------------------------------------------------------------------------------------------

TEST(ProfileDeathTest, TableIsSortedAndCounts) {
    EXPECT_EXIT(run_in({{"HOSTCUDA_PROFILE", "1"}}, [] {
        cudaStream_t stream = new_stream();
        for (int i = 0; i < 3; i++) enqueue(stream, "short_kernel", [] {});
        enqueue(stream, "long_kernel", [] { sleep_ms(20); });
        return true;
    }), testing::ExitedWithCode(0), "hostcuda profile.*calls +total ms.*\n +1 .*long_kernel\n +3 .*short_kernel");
}

// ---- the environment ----------------------------------------------------------------------------------------------

TEST(EnvironmentDeathTest, NonsenseStops) {
    const struct {
        const char *name, *value, *text;
    } cases[] = {
        {"HOSTCUDA_ASYNC", "yes", "HOSTCUDA_ASYNC=yes is neither 0 nor 1"},
        {"HOSTCUDA_PROTECT", "2", "HOSTCUDA_PROTECT=2 is neither"},
        {"HOSTCUDA_PROFILE", " 1", "HOSTCUDA_PROFILE= 1 is neither"},
        {"HOSTCUDA_ASYNC_SEED", "-1", "HOSTCUDA_ASYNC_SEED=-1 is not a whole number from 0"},
        {"HOSTCUDA_ASYNC_SEED", "1x", "HOSTCUDA_ASYNC_SEED=1x is not"},
        {"HOSTCUDA_MEMORY", "80gb", "HOSTCUDA_MEMORY=80gb is not a size; write for example 80GB"},
        {"HOSTCUDA_MEMORY", "-5GB", "is not a size"},
        {"HOSTCUDA_MEMORY", "0", "is not a size"},
        {"HOSTCUDA_MEMORY", "GB", "is not a size"},
        {"HOSTCUDA_MEMORY", "nan", "is not a size"},
        {"HOSTCUDA_ARCH", "70", "HOSTCUDA_ARCH=70 is not a whole number from 80 to 90"},
        {"HOSTCUDA_ARCH", "85", "HOSTCUDA_ARCH=85 is not 80, 89 or 90"},
        {"HOSTCUDA_THREADS", "0", "HOSTCUDA_THREADS=0 is not a whole number from 1"},
        {"HOSTCUDA_ASYNK", "1", "unknown environment variable HOSTCUDA_ASYNK; hostcuda knows HOSTCUDA_ARCH, HOSTCUDA_ASYNC"},
    };
    for (const auto& c : cases)
        EXPECT_STOP_IN(c.text,
                   (Environment{{c.name, c.value}}), [] {
            cudaDeviceProp prop;
            cudaGetDeviceProperties(&prop, 0);
            hostcuda::async_mode(), hostcuda::async_seed(), hostcuda::protect_mode(), hostcuda::profile_mode();
            return true;
        });
}

TEST(EnvironmentDeathTest, ValuesAreTaken) {
    const Environment all = {{"HOSTCUDA_ARCH", "89"}, {"HOSTCUDA_THREADS", "3"}, {"HOSTCUDA_MEMORY", "1.5GiB"}, {"HOSTCUDA_ASYNC", ""}};
    EXPECT_TRUE_IN(all, [] {
        cudaDeviceProp prop;
        EXPECT_EQ(cudaGetDeviceProperties(&prop, 0), cudaSuccess);
        EXPECT_EQ(prop.major * 10 + prop.minor, 89);
        EXPECT_EQ(prop.sharedMemPerBlockOptin, 99u * 1024);
        EXPECT_EQ(prop.multiProcessorCount, 3);
        EXPECT_EQ(prop.totalGlobalMem, size_t{3} << 29);
        return !hostcuda::async_mode();
    });
    const Environment omp = {{"HOSTCUDA_THREADS", ""}, {"OMP_NUM_THREADS", "5"}};
    EXPECT_TRUE_IN(omp, [] { return hostcuda::num_threads() == 5; });
}

// mpirun binds a rank to one core; its threads must not all land there.
TEST(EnvironmentDeathTest, MpirunBindingIsWidened) {
    if (std::thread::hardware_concurrency() < 2) GTEST_SKIP() << "one CPU";
    const auto cpus_when = [](const char* threads) {
        setenv("HOSTCUDA_THREADS", threads, 1);
        cpu_set_t one;
        sched_getaffinity(0, sizeof one, &one);
        int first = 0;
        while (!CPU_ISSET(first, &one)) first++;
        CPU_ZERO(&one);
        CPU_SET(first, &one);
        sched_setaffinity(0, sizeof one, &one);
        hostcuda::num_threads();
        cpu_set_t now;
        sched_getaffinity(0, sizeof now, &now);
        return CPU_COUNT(&now);
    };
    const Environment mpi = {{"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}};
    EXPECT_TRUE_IN(mpi, [&] { return cpus_when("2") >= 2; });
    EXPECT_TRUE_IN(mpi, [&] { return cpus_when("1") == 1; });            // wide enough as it is
    EXPECT_TRUE_IN(Environment{}, [&] { return cpus_when("2") == 1; });  // the user's own binding stays
}

}  // namespace
