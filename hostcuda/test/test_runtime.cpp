// The runtime calls in hostcuda's default mode: memory, copies, streams, events, errors, the device. The checking modes
// are in test_runtime_modes.cpp.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "hostcuda/internal.h"
#include "hostcuda/runtime_api.h"

using hostcuda::enqueue;

namespace {

cudaStream_t new_stream() {
    cudaStream_t stream = nullptr;
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    return stream;
}

float bf16_value(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

TEST(Malloc, AddressHasTheAlignmentCudaPromisesAndNoMore) {
    for (size_t bytes : {1, 3, 255, 256, 4096, 5000000}) {
        char* p = nullptr;
        ASSERT_EQ(cudaMalloc(&p, bytes), cudaSuccess);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(p) % 256, 0u);
        EXPECT_NE(reinterpret_cast<uintptr_t>(p) % 512, 0u);
        EXPECT_EQ(cudaFree(p), cudaSuccess);
    }
}

TEST(Malloc, ZeroBytesNullAndBadPointers) {
    char* p = reinterpret_cast<char*>(1);
    EXPECT_EQ(cudaMalloc(&p, 0), cudaSuccess);
    EXPECT_EQ(p, nullptr);
    EXPECT_EQ(cudaFree(nullptr), cudaSuccess);
    EXPECT_EQ(cudaFreeHost(nullptr), cudaSuccess);
    int on_stack;
    EXPECT_EQ(cudaFree(&on_stack), cudaErrorInvalidValue);
    EXPECT_EQ(cudaFreeHost(&on_stack), cudaErrorInvalidValue);
    ASSERT_EQ(cudaMalloc(&p, 1000), cudaSuccess);
    EXPECT_EQ(cudaFree(p + 256), cudaErrorInvalidValue);   // the middle of an allocation
    EXPECT_EQ(cudaFree(p), cudaSuccess);
    EXPECT_EQ(cudaFree(p), cudaErrorInvalidValue);         // twice
    EXPECT_EQ(hostcuda::device_malloc(nullptr, 4, {"", 0, ""}), cudaErrorInvalidValue);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

// Every untouched element is a NaN or an impossible index, in whatever type it is read and however far in.
TEST(Malloc, UntouchedMemoryIsPoison) {
    const size_t bytes = (size_t{150} << 20) + 12;   // over two ends of the 64 MiB file
    char* p = nullptr;
    ASSERT_EQ(cudaMalloc(&p, bytes), cudaSuccess);
    for (size_t at = 0; at + 8 <= bytes; at += at < 4096 ? 4 : 999996) {
        uint16_t half;
        float single;
        double wide;
        int index;
        uint64_t big;
        memcpy(&half, p + at + 2, 2);
        memcpy(&single, p + at, 4);
        memcpy(&wide, p + at, 8);
        memcpy(&index, p + at, 4);
        memcpy(&big, p + at, 8);
        ASSERT_TRUE(std::isnan(bf16_value(half)) && std::isnan(single) && std::isnan(wide)) << at;
        ASSERT_GT(index, 1 << 30) << at;
        ASSERT_GT(big, uint64_t{1} << 62) << at;
    }
    p[bytes - 1] = 1;   // the last byte is there
    EXPECT_EQ(cudaFree(p), cudaSuccess);
}

TEST(Malloc, MemoryIsNotSharedBetweenAllocationsOrTiles) {
    const size_t tile = size_t{64} << 20;
    char *a = nullptr, *b = nullptr;
    ASSERT_EQ(cudaMalloc(&a, 2 * tile), cudaSuccess);
    ASSERT_EQ(cudaMalloc(&b, 2 * tile), cudaSuccess);
    a[0] = 1, a[tile] = 2, b[0] = 3, b[tile] = 4;   // same place in the poisoned file
    EXPECT_EQ(a[0] * 1000 + a[tile] * 100 + b[0] * 10 + b[tile], 1234);
    EXPECT_EQ(cudaFree(a), cudaSuccess);
    EXPECT_EQ(cudaFree(b), cudaSuccess);
}

TEST(Malloc, FreedMemoryComesBackPoisoned) {
    for (int i = 0; i < 2000; i++) {   // far more than the address range would hold if nothing came back
        char* p = nullptr;
        ASSERT_EQ(cudaMalloc(&p, size_t{256} << 20), cudaSuccess);
        float value;
        memcpy(&value, p + 128, 4);
        ASSERT_TRUE(std::isnan(value));
        memset(p + 128, 0, 4);
        ASSERT_EQ(cudaFree(p), cudaSuccess);
    }
}

TEST(Malloc, InfoCountsWhatIsAllocated) {
    size_t before, total, now;
    ASSERT_EQ(cudaMemGetInfo(&before, &total), cudaSuccess);
    char* p = nullptr;
    ASSERT_EQ(cudaMalloc(&p, 1000), cudaSuccess);
    ASSERT_EQ(cudaMemGetInfo(&now, &total), cudaSuccess);
    EXPECT_EQ(before - now, 1024u);   // rounded up to 256
    EXPECT_EQ(cudaFree(p), cudaSuccess);
    ASSERT_EQ(cudaMemGetInfo(&now, &total), cudaSuccess);
    EXPECT_EQ(before, now);
    EXPECT_LE(now, total);
    cudaDeviceProp prop;
    ASSERT_EQ(cudaGetDeviceProperties(&prop, 0), cudaSuccess);
    EXPECT_EQ(prop.totalGlobalMem, total);
}

TEST(Malloc, PinnedMemoryIsPoisonedAndRecognised) {
    float* p = nullptr;
    ASSERT_EQ(cudaMallocHost(&p, 1000), cudaSuccess);
    EXPECT_TRUE(std::isnan(p[0]) && std::isnan(p[249]));
    EXPECT_TRUE(hostcuda::is_pinned_pointer(p + 249));
    EXPECT_FALSE(hostcuda::is_pinned_pointer(p + 250));
    EXPECT_FALSE(hostcuda::is_device_pointer(p));
    EXPECT_EQ(cudaFreeHost(p), cudaSuccess);
    EXPECT_FALSE(hostcuda::is_pinned_pointer(p));
    ASSERT_EQ(cudaHostAlloc(&p, 64, cudaHostAllocPortable), cudaSuccess);
    EXPECT_EQ(cudaFreeHost(p), cudaSuccess);
    EXPECT_EQ(cudaHostAlloc(&p, 64, 64u), cudaErrorInvalidValue);

    std::vector<char> own(4096);
    EXPECT_EQ(cudaHostRegister(own.data(), own.size(), cudaHostRegisterDefault), cudaSuccess);
    EXPECT_TRUE(hostcuda::is_pinned_pointer(own.data() + 4095));
    EXPECT_EQ(cudaHostRegister(own.data() + 100, 8, cudaHostRegisterDefault), cudaErrorHostMemoryAlreadyRegistered);
    EXPECT_EQ(cudaHostUnregister(own.data()), cudaSuccess);
    EXPECT_EQ(cudaHostUnregister(own.data()), cudaErrorHostMemoryNotRegistered);
    cudaGetLastError();
}

TEST(Malloc, PointerAttributes) {
    char *device = nullptr, *pinned = nullptr, on_stack;
    ASSERT_EQ(cudaMalloc(&device, 100), cudaSuccess);
    ASSERT_EQ(cudaMallocHost(&pinned, 100), cudaSuccess);
    cudaPointerAttributes attributes;
    ASSERT_EQ(cudaPointerGetAttributes(&attributes, device + 99), cudaSuccess);
    EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
    EXPECT_EQ(attributes.devicePointer, device + 99);
    ASSERT_EQ(cudaPointerGetAttributes(&attributes, pinned + 1), cudaSuccess);
    EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
    ASSERT_EQ(cudaPointerGetAttributes(&attributes, &on_stack), cudaSuccess);
    EXPECT_EQ(attributes.type, cudaMemoryTypeUnregistered);
    EXPECT_EQ(cudaFree(device), cudaSuccess);
    ASSERT_EQ(cudaPointerGetAttributes(&attributes, device), cudaSuccess);
    EXPECT_EQ(attributes.type, cudaMemoryTypeUnregistered);
    EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
}

// ---- copies -------------------------------------------------------------------------------------------------------

struct CopyTest : testing::Test {
    char *device = nullptr, *other = nullptr, *pinned = nullptr;
    char pageable[64];
    cudaStream_t stream = new_stream();
    void SetUp() override {
        ASSERT_EQ(cudaMalloc(&device, 64), cudaSuccess);
        ASSERT_EQ(cudaMalloc(&other, 64), cudaSuccess);
        ASSERT_EQ(cudaMallocHost(&pinned, 64), cudaSuccess);
        for (int i = 0; i < 64; i++) pageable[i] = static_cast<char>(i);
    }
    void TearDown() override {
        cudaGetLastError();
        EXPECT_EQ(cudaFree(device), cudaSuccess);
        EXPECT_EQ(cudaFree(other), cudaSuccess);
        EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
        EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    }
};

TEST_F(CopyTest, RoundTripThroughEveryKind) {
    char back[64] = {};
    EXPECT_EQ(cudaMemcpyAsync(pinned, pageable, 64, cudaMemcpyHostToHost, stream), cudaSuccess);
    EXPECT_EQ(cudaMemcpyAsync(device, pinned, 64, cudaMemcpyHostToDevice, stream), cudaSuccess);
    EXPECT_EQ(cudaMemcpyAsync(other, device, 64, cudaMemcpyDeviceToDevice, stream), cudaSuccess);
    EXPECT_EQ(cudaMemcpyAsync(back, other, 64, cudaMemcpyDeviceToHost, stream), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(memcmp(back, pageable, 64), 0);
    EXPECT_EQ(cudaMemset(device, 0x5A, 64), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(back, device, 64, cudaMemcpyDefault), cudaSuccess);
    for (char c : back) EXPECT_EQ(c, 0x5A);
    EXPECT_EQ(cudaMemsetAsync(device + 1, 7, 3, stream), cudaSuccess);
    EXPECT_EQ(cudaMemcpyAsync(back, device, 5, cudaMemcpyDefault, stream), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(memcmp(back, "\x5A\7\7\7\x5A", 5), 0);
}

TEST_F(CopyTest, KindMustFitThePointers) {
    const cudaMemcpyKind kinds[] = {cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost,
                                    cudaMemcpyDeviceToDevice};
    for (int dst = 0; dst < 3; dst++)
        for (int src = 0; src < 3; src++)
            for (cudaMemcpyKind kind : kinds) {
                char* from[] = {pageable, pinned, device};
                char* to[] = {pageable + 32, pinned + 32, device + 32};
                const bool fits = (dst == 2) == (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice) &&
                                  (src == 2) == (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice);
                EXPECT_EQ(cudaMemcpyAsync(to[dst], from[src], 8, kind, stream), fits ? cudaSuccess : cudaErrorInvalidValue)
                    << dst << src << kind;
                EXPECT_EQ(cudaMemcpy(to[dst], from[src], 8, kind), fits ? cudaSuccess : cudaErrorInvalidValue);
            }
    EXPECT_EQ(cudaMemcpy(device, pinned, 8, static_cast<cudaMemcpyKind>(9)), cudaErrorInvalidMemcpyDirection);
}

TEST_F(CopyTest, RangesMustLieInsideOneAllocation) {
    EXPECT_EQ(cudaMemcpyAsync(device, pinned, 65, cudaMemcpyHostToDevice, stream), cudaErrorInvalidValue);
    EXPECT_EQ(cudaMemcpyAsync(device + 60, pinned, 5, cudaMemcpyHostToDevice, stream), cudaErrorInvalidValue);
    EXPECT_EQ(cudaMemcpyAsync(device - 1, pinned, 1, cudaMemcpyHostToDevice, stream), cudaErrorInvalidValue);
    EXPECT_EQ(cudaMemsetAsync(device, 0, 65, stream), cudaErrorInvalidValue);
    EXPECT_EQ(cudaMemsetAsync(pageable, 0, 4, stream), cudaErrorInvalidValue);
    EXPECT_EQ(cudaMemsetAsync(pinned, 0, 4, stream), cudaSuccess);
    EXPECT_EQ(cudaMemcpyAsync(nullptr, pinned, 1, cudaMemcpyDefault, stream), cudaErrorInvalidValue);
    EXPECT_EQ(cudaMemcpyAsync(nullptr, nullptr, 0, cudaMemcpyDefault, stream), cudaSuccess);
    char* freed = nullptr;
    ASSERT_EQ(cudaMalloc(&freed, 64), cudaSuccess);
    ASSERT_EQ(cudaFree(freed), cudaSuccess);
    EXPECT_EQ(cudaMemcpyAsync(freed, pinned, 8, cudaMemcpyHostToDevice, stream), cudaErrorInvalidValue);
}

TEST_F(CopyTest, Planes) {
    EXPECT_EQ(cudaMemset(device, 0, 64), cudaSuccess);
    EXPECT_EQ(cudaMemcpy2DAsync(device, 8, pageable, 16, 4, 4, cudaMemcpyHostToDevice, stream), cudaSuccess);
    char back[32];
    EXPECT_EQ(cudaMemcpyAsync(back, device, 32, cudaMemcpyDeviceToHost, stream), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    for (int row = 0; row < 4; row++)
        for (int column = 0; column < 8; column++) EXPECT_EQ(back[row * 8 + column], column < 4 ? row * 16 + column : 0);
    EXPECT_EQ(cudaMemcpy2DAsync(device, 8, pageable, 16, 9, 1, cudaMemcpyHostToDevice, stream), cudaErrorInvalidPitchValue);
    EXPECT_EQ(cudaMemcpy2DAsync(device, 8, pageable, 8, 8, 9, cudaMemcpyHostToDevice, stream), cudaErrorInvalidValue);
}

TEST_F(CopyTest, OverlapDeathTest) {
    EXPECT_DEATH(cudaMemcpyAsync(device + 4, device, 8, cudaMemcpyDeviceToDevice, stream), "hostcuda: .*overlapping ranges");
}

// ---- out of bounds ------------------------------------------------------------------------------------------------

// What a kernel would do; the optimizer must not see through it. noinline keeps it a plain store.
__attribute__((noinline)) void write_float(float* p, long index) { *const_cast<volatile float*>(p + index) = 1; }
__attribute__((noinline)) float read_float(float* p, long index) { return *const_cast<volatile float*>(p + index); }

float* allocate_floats(size_t count) {
    float* p = nullptr;
    if (cudaMalloc(&p, count * sizeof(float)) != cudaSuccess) abort();
    return p;
}

#if defined(__SANITIZE_ADDRESS__)
#define OR_ASAN(text) "AddressSanitizer: use-after-poison"
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define OR_ASAN(text) "AddressSanitizer: use-after-poison"
#endif
#endif
#ifdef OR_ASAN
#define WITH_ASAN 1
#else
#define OR_ASAN(text) text
#define WITH_ASAN 0
#endif

TEST(OutOfBoundsDeathTest, OverrunByOneFoundAtFree) {
    EXPECT_DEATH({
        float* p = allocate_floats(100);
        write_float(p, 100);
        cudaFree(p);
    }, OR_ASAN("written out of bounds, 0 bytes past its end: allocation of 400 bytes made at .*test_runtime.cpp:[0-9]+ in "
               "allocate_floats.*found at cudaFree"));
}

TEST(OutOfBoundsDeathTest, OverrunOfOneByteFoundAtDeviceSynchronize) {
    EXPECT_DEATH({
        char* p = nullptr;
        cudaMalloc(&p, 7);
        *const_cast<volatile char*>(p + 7) = 0;
        cudaDeviceSynchronize();
    }, OR_ASAN("0 bytes past its end: allocation of 7 bytes .*found at cudaDeviceSynchronize"));
}

TEST(OutOfBoundsDeathTest, UnderrunFoundAtExit) {
    EXPECT_DEATH({
        float* p = allocate_floats(100);
        write_float(p, -1);
        exit(0);
    }, OR_ASAN("4 bytes before its start: allocation of 400 bytes .*found at exit"));
}

TEST(OutOfBoundsDeathTest, FarOverrunFaults) {
    EXPECT_DEATH({
        float* p = allocate_floats(100);
        write_float(p, 1 << 20);
    }, "hostcuda: access to device memory out of bounds at .*past the end of the allocation of 400 bytes");
    EXPECT_DEATH({
        float* p = allocate_floats(100);
        read_float(p, -1200);
    }, "hostcuda: access to device memory out of bounds at .*before the start of the allocation of 400 bytes");
}

TEST(OutOfBoundsDeathTest, UseAfterFreeFaults) {
    EXPECT_DEATH({
        float* p = allocate_floats(100);
        cudaFree(p);
        read_float(p, 3);
    }, "hostcuda: access to device memory out of bounds at .*byte 12 of freed memory: the allocation of 400 bytes made at");
}

TEST(OutOfBoundsDeathTest, OtherFaultsAreNotOurs) {
    allocate_floats(1);
    EXPECT_DEATH(write_float(reinterpret_cast<float*>(8), 0), WITH_ASAN ? "AddressSanitizer" : "");
}

#if WITH_ASAN
TEST(OutOfBoundsDeathTest, ReadPastTheEndUnderAsan) {
    EXPECT_DEATH({
        float* p = allocate_floats(5);
        read_float(p, 5);
    }, "AddressSanitizer: use-after-poison");
}
#endif

// ---- streams and events -------------------------------------------------------------------------------------------

TEST(DefaultStreamDeathTest, IsRefusedEverywhere) {
    char *device = nullptr, *pinned = nullptr;
    ASSERT_EQ(cudaMalloc(&device, 64), cudaSuccess);
    ASSERT_EQ(cudaMallocHost(&pinned, 64), cudaSuccess);
    cudaEvent_t event;
    ASSERT_EQ(cudaEventCreate(&event), cudaSuccess);
    EXPECT_DEATH(cudaMemcpyAsync(device, pinned, 64, cudaMemcpyDefault), "cudaMemcpyAsync on the default stream");
    EXPECT_DEATH(cudaMemcpy2DAsync(device, 8, pinned, 8, 8, 8, cudaMemcpyDefault), "cudaMemcpy2DAsync on the default stream");
    EXPECT_DEATH(cudaMemsetAsync(device, 0, 64), "cudaMemsetAsync on the default stream");
    EXPECT_DEATH(cudaMemsetAsync(device, 0, 64, cudaStreamPerThread), "cudaMemsetAsync on the default stream");
    EXPECT_DEATH(cudaEventRecord(event), "cudaEventRecord on the default stream");
    EXPECT_DEATH(cudaStreamWaitEvent(cudaStreamLegacy, event), "cudaStreamWaitEvent on the default stream");
    EXPECT_DEATH(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize on the default stream");
    EXPECT_DEATH(enqueue(nullptr, "some_kernel", [] {}), "some_kernel on the default stream");
    EXPECT_EQ(cudaFree(device), cudaSuccess);
    EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
    EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
}

TEST(Stream, CallsAndErrors) {
    cudaStream_t stream = nullptr;
    EXPECT_EQ(cudaStreamCreateWithFlags(nullptr, 0), cudaErrorInvalidValue);
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream, 8), cudaErrorInvalidValue);
    ASSERT_EQ(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, -100), cudaSuccess);
    int priority, least, greatest;
    unsigned flags;
    EXPECT_EQ(cudaDeviceGetStreamPriorityRange(&least, &greatest), cudaSuccess);
    EXPECT_EQ(cudaStreamGetPriority(stream, &priority), cudaSuccess);
    EXPECT_EQ(priority, greatest);   // clamped, as CUDA does
    EXPECT_EQ(cudaStreamGetFlags(stream, &flags), cudaSuccess);
    EXPECT_EQ(flags, cudaStreamNonBlocking);
    EXPECT_EQ(cudaStreamQuery(stream), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(cudaStreamQuery(stream), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(enqueue(stream, "kernel", [] { FAIL(); }), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
    ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

TEST(Stream, WorkOfSeveralHostThreadsOnOneStreamIsKeptApart) {
    cudaStream_t stream = new_stream();
    int counter = 0;
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; t++)
        threads.emplace_back([&] {
            for (int i = 0; i < 200; i++) enqueue(stream, "count", [&] { counter++; });
        });
    for (auto& thread : threads) thread.join();
    cudaStreamSynchronize(stream);
    EXPECT_EQ(counter, 800);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

TEST(Stream, HostFunctionRunsAndMayNotCallCuda) {
    cudaStream_t stream = new_stream();
    static cudaError_t seen[6];
    auto function = [](void* data) {
        char* p = nullptr;
        seen[0] = cudaMalloc(&p, 8);
        seen[1] = cudaDeviceSynchronize();
        seen[2] = cudaStreamSynchronize(*static_cast<cudaStream_t*>(data));
        seen[3] = cudaMemcpy(p, p, 8, cudaMemcpyDefault);
        seen[4] = cudaFree(nullptr);
        cudaEvent_t event;
        seen[5] = cudaEventCreate(&event);
    };
    EXPECT_EQ(cudaLaunchHostFunc(stream, nullptr, nullptr), cudaErrorInvalidValue);
    EXPECT_EQ(cudaLaunchHostFunc(stream, function, &stream), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    for (cudaError_t error : seen) EXPECT_EQ(error, cudaErrorNotPermitted);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    cudaGetLastError();
}

TEST(Stream, CallsMadeByWorkRunAtOnce) {
    cudaStream_t stream = new_stream();
    char* p = nullptr;
    ASSERT_EQ(cudaMalloc(&p, 4), cudaSuccess);
    char back[4] = {};
    enqueue(stream, "outer", [&] {
        EXPECT_EQ(cudaMemsetAsync(p, 3, 4, stream), cudaSuccess);
        EXPECT_EQ(cudaMemcpy(back, p, 4, cudaMemcpyDeviceToHost), cudaSuccess);
        EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        EXPECT_EQ(back[3], 3);
    });
    cudaStreamSynchronize(stream);
    EXPECT_EQ(back[0], 3);
    EXPECT_EQ(cudaFree(p), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

TEST(Event, CallsAndErrors) {
    cudaStream_t stream = new_stream();
    cudaEvent_t timed, untimed, never;
    EXPECT_EQ(cudaEventCreateWithFlags(&timed, cudaEventInterprocess), cudaErrorInvalidValue);
    ASSERT_EQ(cudaEventCreate(&timed), cudaSuccess);
    ASSERT_EQ(cudaEventCreate(&never), cudaSuccess);
    ASSERT_EQ(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming), cudaSuccess);
    EXPECT_EQ(cudaEventQuery(never), cudaSuccess);
    EXPECT_EQ(cudaEventSynchronize(never), cudaSuccess);
    EXPECT_EQ(cudaStreamWaitEvent(stream, never), cudaSuccess);
    float ms;
    EXPECT_EQ(cudaEventRecord(timed, stream), cudaSuccess);
    EXPECT_EQ(cudaEventRecord(untimed, stream), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_EQ(cudaEventElapsedTime(&ms, timed, never), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(cudaEventElapsedTime(&ms, timed, untimed), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(cudaEventElapsedTime(nullptr, timed, timed), cudaErrorInvalidValue);
    EXPECT_EQ(cudaEventElapsedTime(&ms, timed, timed), cudaSuccess);
    EXPECT_EQ(ms, 0.0f);
    for (cudaEvent_t event : {timed, untimed, never}) EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
    EXPECT_EQ(cudaEventQuery(timed), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(cudaEventRecord(timed, stream), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(cudaStreamWaitEvent(stream, timed), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(cudaEventDestroy(nullptr), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    cudaGetLastError();
}

TEST(Event, ElapsedTimeIsReal) {
    cudaStream_t stream = new_stream();
    cudaEvent_t start, end;
    ASSERT_EQ(cudaEventCreate(&start), cudaSuccess);
    ASSERT_EQ(cudaEventCreate(&end, cudaEventBlockingSync), cudaSuccess);
    cudaEventRecord(start, stream);
    enqueue(stream, "sleep", [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
    cudaEventRecord(end, stream);
    EXPECT_EQ(cudaEventSynchronize(end), cudaSuccess);
    float ms = 0;
    EXPECT_EQ(cudaEventElapsedTime(&ms, start, end), cudaSuccess);
    EXPECT_GE(ms, 20.0f);      // a sleep is never shorter than asked for
    EXPECT_LT(ms, 20000.0f);   // but may be as long as a busy machine likes
    EXPECT_EQ(cudaEventDestroy(start), cudaSuccess);
    EXPECT_EQ(cudaEventDestroy(end), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

// ---- errors and the device ----------------------------------------------------------------------------------------

TEST(Error, LastErrorStaysUntilReadAndIsPerThread) {
    cudaGetLastError();
    EXPECT_EQ(cudaSetDevice(3), cudaErrorInvalidDevice);
    int device;
    EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);   // a success does not clear it
    EXPECT_EQ(cudaPeekAtLastError(), cudaErrorInvalidDevice);
    std::thread([] { EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess); }).join();
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST(Error, NamesAndTexts) {
    EXPECT_STREQ(cudaGetErrorName(cudaErrorMemoryAllocation), "cudaErrorMemoryAllocation");
    EXPECT_STREQ(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory");
    EXPECT_STREQ(cudaGetErrorString(cudaSuccess), "no error");
    EXPECT_STREQ(cudaGetErrorString(static_cast<cudaError_t>(12345)), "unrecognized error code");
}

TEST(Device, Properties) {
    int count = 0, device = -1, value = 0, version = 0;
    EXPECT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
    EXPECT_EQ(count, 1);
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
    EXPECT_EQ(device, 0);
    cudaDeviceProp prop;
    EXPECT_EQ(cudaGetDeviceProperties(&prop, 1), cudaErrorInvalidDevice);
    ASSERT_EQ(cudaGetDeviceProperties(&prop, 0), cudaSuccess);
    EXPECT_EQ(strncmp(prop.name, "hostcuda (", 10), 0);
    EXPECT_EQ(prop.major * 10 + prop.minor, hostcuda::device_arch());
    EXPECT_EQ(prop.multiProcessorCount, hostcuda::num_threads());
    EXPECT_EQ(prop.sharedMemPerBlockOptin, hostcuda::max_shared_memory());
    for (int attr = 0; attr < 120; attr++) {
        const cudaError_t error = cudaDeviceGetAttribute(&value, static_cast<cudaDeviceAttr>(attr), 0);
        EXPECT_TRUE(error == cudaSuccess || error == cudaErrorInvalidValue) << attr;
    }
    EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrMaxThreadsPerBlock, 0), cudaSuccess);
    EXPECT_EQ(value, 1024);
    EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
    EXPECT_EQ(value, prop.major);
    EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrWarpSize, 7), cudaErrorInvalidDevice);
    EXPECT_EQ(cudaDriverGetVersion(&version), cudaSuccess);
    EXPECT_GE(version, 12000);
    EXPECT_EQ(cudaRuntimeGetVersion(&version), cudaSuccess);
    EXPECT_EQ(cudaProfilerStart(), cudaSuccess);
    EXPECT_EQ(cudaProfilerStop(), cudaSuccess);
    char bus[16];
    EXPECT_EQ(cudaDeviceGetPCIBusId(bus, sizeof bus, 0), cudaSuccess);
    cudaGetLastError();
}

}  // namespace
