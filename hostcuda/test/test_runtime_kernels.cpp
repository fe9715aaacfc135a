// The runtime's checks as a program meets them: through kernels that are launched.
#include <algorithm>
#include <csignal>
#include <string>

#include <unistd.h>

#include <cuda_bf16.h>

#include "execution_helpers.h"

namespace {

// Launches start a pool of threads, which a fork leaves behind; so each case runs in a fresh process.
struct FreshProcess : testing::Environment {
    void SetUp() override { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};
[[maybe_unused]] testing::Environment* const fresh_process = testing::AddGlobalTestEnvironment(new FreshProcess);

template <class F>
[[noreturn]] void run_in(std::vector<std::pair<const char*, const char*>> environment, F body) {
    for (const auto& [name, value] : environment) setenv(name, value, 1);
    exit(body() ? 0 : 1);
}
#define EXPECT_TRUE_IN(...) EXPECT_EXIT(run_in(__VA_ARGS__), testing::ExitedWithCode(0), "")   // environment, body
#define EXPECT_STOP_IN(text, ...) EXPECT_EXIT(run_in(__VA_ARGS__), testing::KilledBySignal(SIGABRT), text)

template <class... Params, class... Args>
cudaError_t launch_on(cudaStream_t stream, void (*kernel)(Params...), dim3 grid, dim3 block, Args&&... args) {
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

__global__ void write_kernel(float* out, long index) {
    if (blockIdx.x == 1 && threadIdx.x == 5) *const_cast<volatile float*>(out + index) = 1;
}
__global__ void copy_kernel(float* out, const float* in, int n) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) out[i] = in[i];
}
__global__ void set_kernel(int* out, int value) { out[threadIdx.x] = value; }
__global__ void read_kernel(int* out, const int* in) { out[threadIdx.x] = in[threadIdx.x]; }

float* floats(size_t count) {
    float* p = nullptr;
    if (cudaMalloc(&p, count * sizeof(float)) != cudaSuccess) abort();
    return p;
}

TEST(KernelMemoryDeathTest, FarOutOfBoundsNamesKernelBlockAndThread) {
    EXPECT_STOP_IN("out of bounds at .*past the end of the allocation of 400 bytes made at .*test_runtime_kernels.cpp.*in floats.*"
                   "write_kernel.*block \\(1,0,0\\).*thread \\(5,0,0\\)", {}, [] {
        launch(write_kernel, 2, 32, 0, floats(100), 1L << 20);
        return true;
    });
}

TEST(KernelMemoryDeathTest, ByOneIsFoundAfterwards) {
    const auto fault = [] {
        launch(write_kernel, 2, 32, 0, floats(100), 100L);
        cudaDeviceSynchronize();
        return true;
    };
#if HOSTCUDA_ASAN_BUILD
    EXPECT_DEATH(run_in({}, fault), "AddressSanitizer: use-after-poison");
#else
    EXPECT_STOP_IN("written out of bounds, 0 bytes past its end: allocation of 400 bytes", {}, fault);
#endif
}

TEST(KernelMemoryDeathTest, UseAfterFree) {
    EXPECT_STOP_IN("byte 8 of freed memory: the allocation of 400 bytes.*write_kernel", {}, [] {
        float* p = floats(100);
        cudaFree(p);
        launch(write_kernel, 2, 32, 0, p, 2L);
        return true;
    });
}

TEST(KernelMemoryDeathTest, UninitialisedMemoryReadsAsNan) {
    Device<float> in(70), out(70);
    ASSERT_EQ(launch(copy_kernel, 3, 32, 0, out.data, in.data, 70), cudaSuccess);
    for (float value : out.host()) EXPECT_NE(value, value);
}

#if !HOSTCUDA_ASAN_BUILD && !HOSTCUDA_TSAN_BUILD   // they report it in their own words
__attribute__((noinline)) int use_stack(int depth) {
    volatile char frame[512];
    frame[0] = static_cast<char>(depth);
    return depth == 0 ? 0 : use_stack(depth - 1) + frame[0];
}
__global__ void deep_kernel(int* out, int depth) {
    *out = use_stack(depth);
    __syncthreads();
}

TEST(KernelMemoryDeathTest, StackOverflow) {
    EXPECT_STOP_IN("the stack of a CUDA thread overflows.*HOSTCUDA_STACK.*deep_kernel", {}, [] {
        Device<int> out(1);
        launch(deep_kernel, 1, 32, 0, out.data, 100000);
        return true;
    });
}
#endif

TEST(KernelStreamDeathTest, DefaultStreamIsRefused) {
    EXPECT_STOP_IN("on the default stream", {}, [] {
        launch_on(nullptr, copy_kernel, 1, 32, floats(1), floats(1), 1);
        return true;
    });
}

TEST(KernelProtectDeathTest, HostPointersAreRefusedAtTheLaunch) {
    EXPECT_STOP_IN("argument 1 of kernel .*copy_kernel.* is 0x.*ordinary host memory", {{"HOSTCUDA_PROTECT", "1"}}, [] {
        std::vector<float> host(32);
        launch(copy_kernel, 1, 32, 0, floats(32), host.data(), 32);
        return true;
    });
    EXPECT_TRUE_IN({{"HOSTCUDA_PROTECT", "1"}}, [] {
        float* pinned = nullptr;
        cudaMallocHost(&pinned, 128);
        for (int i = 0; i < 32; i++) pinned[i] = static_cast<float>(i);
        Device<float> device(64);
        if (launch(copy_kernel, 1, 32, 0, device.data + 32, pinned, 32) != cudaSuccess) return false;
        return device.host()[63] == 31;
    });
}

TEST(KernelProtectDeathTest, HostTouchStopsAfterAndBetweenKernels) {
    EXPECT_STOP_IN("host code touched device memory at", {{"HOSTCUDA_PROTECT", "1"}}, [] {
        Device<float> in(32), out(32);
        in.fill(1);
        launch(copy_kernel, 1, 32, 0, out.data, in.data, 32);
        return out.data[0] == 1;
    });
}

// Compute and communication streams handing a buffer over, as in test_runtime_modes.cpp, with kernels.
bool hand_over(bool wait) {
    cudaStream_t compute, comm;
    cudaStreamCreateWithFlags(&compute, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&comm, cudaStreamNonBlocking);
    cudaEvent_t written, read;
    cudaEventCreateWithFlags(&written, cudaEventDisableTiming);
    cudaEventCreateWithFlags(&read, cudaEventDisableTiming);
    Device<int> buffer(8), seen(8 * 40);
    for (int i = 0; i < 40; i++) {
        cudaStreamWaitEvent(compute, read);
        launch_on(compute, set_kernel, 1, 8, buffer.data, i);
        cudaEventRecord(written, compute);
        if (wait) cudaStreamWaitEvent(comm, written);
        launch_on(comm, read_kernel, 1, 8, seen.data + i * 8, buffer.data);
        cudaEventRecord(read, comm);
    }
    cudaDeviceSynchronize();
    const std::vector<int> values = seen.host();
    for (int i = 0; i < 8 * 40; i++)
        if (values[static_cast<size_t>(i)] != i / 8) return false;
    return true;
}

TEST(KernelAsyncDeathTest, EventsOrderKernels) {
    for (const char* seed : {"1", "2", "3"})
        for (const char* protect : {"0", "1"})
            EXPECT_TRUE_IN({{"HOSTCUDA_ASYNC", "1"}, {"HOSTCUDA_ASYNC_SEED", seed}, {"HOSTCUDA_PROTECT", protect}},
                           [] { return hand_over(true); });
}

TEST(KernelAsyncDeathTest, MissingEventShows) {
#if HOSTCUDA_TSAN_BUILD
    EXPECT_EXIT(run_in({{"HOSTCUDA_ASYNC", "1"}}, [] { return hand_over(false), true; }), testing::ExitedWithCode(66), "data race");
#else
    // A seed misses it with a chance of 3 % (see test_runtime_modes.cpp), so these two are kept as they are.
    for (const char* seed : {"1", "2"})
        EXPECT_TRUE_IN({{"HOSTCUDA_ASYNC", "1"}, {"HOSTCUDA_ASYNC_SEED", seed}}, [] { return !hand_over(false); });
#endif
}

TEST(KernelProfileDeathTest, KernelsAreInTheTable) {
    EXPECT_EXIT(run_in({{"HOSTCUDA_PROFILE", "1"}}, [] {
        Device<int> p(8);
        for (int i = 0; i < 3; i++) launch(set_kernel, 1, 8, 0, p.data, i);
        return true;
    }), testing::ExitedWithCode(0), "hostcuda profile.*\n +3 .*set_kernel");
}

// ---- HOSTCUDA_FAULT -----------------------------------------------------------------------------------------------

__global__ void set_kernel_too(int* out, int value) { out[threadIdx.x] = value; }
template <class T>
__global__ void fill_kernel(T* out, T value) {
    out[threadIdx.x] = value;
}
inline namespace deeper {   // its name is looked for without what it is in
__global__ void pointers_kernel(float* out, int n, const float* in, const float* more) {
    if (static_cast<int>(threadIdx.x) < n) out[threadIdx.x] = in[threadIdx.x] + (more ? more[threadIdx.x] : 0);
}
}  // namespace deeper

// The whole of what a process says when its fault is planted: one line.
std::string planted(const std::string& what) { return "^hostcuda: fault planted: " + what + "\n$"; }
#define EXPECT_PLANTED(text, ...) EXPECT_EXIT(run_in(__VA_ARGS__), testing::ExitedWithCode(0), planted(text))

// Launches `set_kernel` with 0, 1, 2, ... on arrays of their own, others in between, and says what the arrays hold if launch `hit` has `value` at
// element `at` instead. All are launched before any is looked at, so that streams of their own get the time to fall behind.
bool only_wrong(int hit, int at, int value) {
    const int count = 5;
    std::vector<int*> arrays;
    for (int i = 0; i < 2 * count; i++) {
        arrays.push_back(nullptr);
        cudaMalloc(&arrays.back(), 8 * sizeof(int));
        launch_on(test_stream(), i % 2 == 0 ? set_kernel : set_kernel_too, 1, 8, arrays.back(), i / 2);
    }
    cudaStreamSynchronize(test_stream());
    bool right = true;
    for (int i = 0; i < 2 * count; i++) {
        int host[8];
        cudaMemcpy(host, arrays[static_cast<size_t>(i)], sizeof host, cudaMemcpyDeviceToHost);
        for (int j = 0; j < 8; j++) right &= host[j] == (i == 2 * hit && j == at ? value : i / 2);
    }
    return right;
}

TEST(KernelFaultDeathTest, ComesAtItsLaunchAndNowhereElse) {
    EXPECT_PLANTED("launch 3 of kernel [^\n]*set_kernel, argument 0, byte 20: 03 00 00 00 -> ff ff ff 7f",
                   {{"HOSTCUDA_FAULT", "kernel=set_kernel,launch=3,argument=0,byte=20,do=nan32"}}, [] { return only_wrong(3, 5, 0x7fffffff); });
    EXPECT_PLANTED("launch 0 of kernel [^\n]*set_kernel, argument 0, byte 0: 00 00 -> ff 7f",
                   {{"HOSTCUDA_FAULT", "do=nan16,byte=0,argument=0,launch=0,kernel=set_kernel"}}, [] { return only_wrong(0, 0, 0x7fff); });
    EXPECT_EXIT(run_in({}, [] { return only_wrong(-1, 0, 0); }), testing::ExitedWithCode(0), "^$");
    EXPECT_EXIT(run_in({{"HOSTCUDA_FAULT", ""}}, [] { return only_wrong(-1, 0, 0); }), testing::ExitedWithCode(0), "^$");
}

TEST(KernelFaultDeathTest, FlipsOneBit) {
    EXPECT_PLANTED("launch 2 of [^\n]*, byte 29: 00 -> 01", {{"HOSTCUDA_FAULT", "kernel=set_kernel,launch=2,argument=0,byte=29,do=flip"}},
                   [] { return only_wrong(2, 7, 2 + 0x100); });
    EXPECT_PLANTED("launch 2 of [^\n]*, byte 28: 02 -> 00", {{"HOSTCUDA_FAULT", "kernel=set_kernel,launch=2,argument=0,byte=28,do=flip,bit=1"}},
                   [] { return only_wrong(2, 7, 0); });
    EXPECT_PLANTED("launch 2 of [^\n]*, byte 31: 00 -> 80", {{"HOSTCUDA_FAULT", "kernel=set_kernel,launch=2,argument=0,byte=31,do=flip,bit=7"}},
                   [] { return only_wrong(2, 7, static_cast<int>(2 + 0x80000000u)); });
}

TEST(KernelFaultDeathTest, NansAreNans) {
    EXPECT_PLANTED("[^\n]*", {{"HOSTCUDA_FAULT", "kernel=fill_kernel,launch=0,argument=0,byte=4,do=nan32"}}, [] {
        Device<float> p(3);
        launch(fill_kernel<float>, 1, 3, 0, p.data, 1.0f);
        const std::vector<float> now = p.host();
        return now[0] == 1 && now[1] != now[1] && now[2] == 1;
    });
    EXPECT_PLANTED("[^\n]*", {{"HOSTCUDA_FAULT", "kernel=fill_kernel,launch=0,argument=0,byte=12,do=nan32"}}, [] {
        Device<double> p(3);
        launch(fill_kernel<double>, 1, 3, 0, p.data, 1.0);   // the upper half
        const std::vector<double> now = p.host();
        return now[0] == 1 && now[1] != now[1] && now[2] == 1;
    });
    EXPECT_PLANTED("[^\n]*", {{"HOSTCUDA_FAULT", "kernel=fill_kernel,launch=0,argument=0,byte=2,do=nan16"}}, [] {
        Device<__nv_bfloat16> p(3);
        launch(fill_kernel<__nv_bfloat16>, 1, 3, 0, p.data, __float2bfloat16(1));
        const std::vector<__nv_bfloat16> now = p.host();
        return __bfloat162float(now[0]) == 1 && __bfloat162float(now[1]) != __bfloat162float(now[1]) && __bfloat162float(now[2]) == 1;
    });
}

TEST(KernelFaultDeathTest, ATemplatesLaunchesCountTogether) {
    EXPECT_PLANTED("launch 1 of kernel [^\n]*fill_kernel<float>, argument 0, byte 0: [^\n]*",
                   {{"HOSTCUDA_FAULT", "kernel=fill_kernel,launch=1,argument=0,byte=0,do=flip"}}, [] {
        Device<int> a(8), c(8);
        Device<float> b(8);
        launch(fill_kernel<int>, 1, 8, 0, a.data, 0);
        launch(fill_kernel<float>, 1, 8, 0, b.data, 0.0f);
        launch(fill_kernel<int>, 1, 8, 0, c.data, 0);
        return a.host()[0] == 0 && b.host()[0] != 0 && c.host()[0] == 0;
    });
}

TEST(KernelFaultDeathTest, RefusedLaunchesDoNotCount) {
    EXPECT_EXIT(run_in({{"HOSTCUDA_FAULT", "kernel=set_kernel,launch=0,argument=0,byte=0,do=flip"}}, [] {
        Device<int> p(8);
        return launch(set_kernel, 0, 8, 0, p.data, 0) != cudaSuccess && only_wrong(0, 0, 1);
    }), testing::ExitedWithCode(0), "empty grid[^\n]*\nhostcuda: fault planted: launch 0 of [^\n]*\n$");
}

// The grid has written its values, and what comes later on the stream sees the fault, however late the stream runs.
TEST(KernelFaultDeathTest, ComesInTheStreamsOrder) {
    const auto in_order = [] {
        Device<int> buffer(8), seen(8 * 3);
        for (int i = 0; i < 3; i++) {
            launch_on(test_stream(), set_kernel, 1, 8, buffer.data, i);
            launch_on(test_stream(), read_kernel, 1, 8, seen.data + i * 8, buffer.data);
        }
        cudaStreamSynchronize(test_stream());
        const std::vector<int> host = seen.host();
        for (int i = 0; i < 24; i++)
            if (host[static_cast<size_t>(i)] != (i == 8 + 4 ? 1 ^ 0x10 : i / 8)) return false;
        return true;
    };
    const char* const fault = "kernel=set_kernel,launch=1,argument=0,byte=16,do=flip,bit=4";
    for (const char* async : {"0", "1"})
        for (const char* seed : {"1", "2", "3"})
            for (const char* protect : {"0", "1"})
                EXPECT_PLANTED("launch 1 of kernel [^\n]*, argument 0, byte 16: 01 -> 11",
                               {{"HOSTCUDA_ASYNC", async}, {"HOSTCUDA_ASYNC_SEED", seed}, {"HOSTCUDA_PROTECT", protect}, {"HOSTCUDA_FAULT", fault}}, in_order);
}

// Also what a kernel only reads can go bad: a weight, after its use.
TEST(KernelFaultDeathTest, ConstArgumentsToo) {
    EXPECT_PLANTED("launch 0 of kernel [^\n]*pointers_kernel, argument 2, byte 124: [^\n]*",
                   {{"HOSTCUDA_PROTECT", "1"}, {"HOSTCUDA_FAULT", "kernel=pointers_kernel,launch=0,argument=2,byte=124,do=nan32"}}, [] {
        Device<float> in(32), out(32);
        in.fill(1);
        launch(pointers_kernel, 1, 32, 0, out.data, 32, in.data, static_cast<const float*>(nullptr));
        return out.host()[31] == 1 && in.host()[31] != 1 && in.host()[30] == 1;
    });
}

TEST(KernelFaultDeathTest, ArgumentsThatCannotBeDamagedStop) {
    const struct {
        const char *fault, *text;
    } cases[] = {
        {"kernel=pointers_kernel,launch=0,argument=1,byte=0,do=nan32", "argument 1 of kernel .*pointers_kernel is not a pointer; its pointers are 0, 2, 3"},
        {"kernel=pointers_kernel,launch=0,argument=4,byte=0,do=nan32", "argument=4: kernel .*pointers_kernel has 4 parameters, counted from 0"},
        {"kernel=pointers_kernel,launch=0,argument=3,byte=0,do=nan32", "argument 3 of kernel .*pointers_kernel is null in launch 0"},
        {"kernel=pointers_kernel,launch=0,argument=2,byte=0,do=nan32", "argument 2 of kernel .*pointers_kernel is 0x[0-9a-f]* in launch 0, which is not in device memory"},
        {"kernel=pointers_kernel,launch=0,argument=0,byte=128,do=nan32", "byte=128 is past the end of the allocation that argument 0 of kernel .*pointers_kernel points into"},
        {"kernel=pointers_kernel,launch=0,argument=0,byte=1125899906842624,do=nan32", "byte=1125899906842624 is past the end"},
    };
    for (const auto& c : cases)
        EXPECT_STOP_IN(std::string("hostcuda: HOSTCUDA_FAULT=") + c.fault + ": " + c.text, {{"HOSTCUDA_FAULT", c.fault}}, [] {
            float* pinned = nullptr;
            cudaMallocHost(&pinned, 128);
            std::fill(pinned, pinned + 32, 1.0f);
            launch(pointers_kernel, 1, 32, 0, floats(32), 32, pinned, static_cast<const float*>(nullptr));
            return true;
        });
    // The last bytes of the allocation are still its own.
    EXPECT_PLANTED("[^\n]*byte 124: [^\n]*", {{"HOSTCUDA_FAULT", "kernel=set_kernel,launch=0,argument=0,byte=124,do=nan32"}}, [] {
        Device<int> p(32);
        return launch(set_kernel, 1, 32, 0, p.data, 1) == cudaSuccess && p.host()[31] == 0x7fffffff;
    });
}

TEST(KernelFaultDeathTest, NonsenseStopsBeforeTheFirstLaunch) {
    const struct {
        const char *fault, *text;
    } cases[] = {
        {"1", "'1' is not one of its keys with a value; write kernel=NAME,launch=K,argument=A,byte=B,do=nan32.nan16.flip.,bit=0..7"},
        {"kernel", "'kernel' is not one of its keys with a value"},
        {"kernel=k,launch=0,argument=0,byte=0,do=flip,", "'' is not one of its keys"},
        {"kernel=k,launch=0,argument=0,byte=0,do=flip,rank=1", "'rank=1' is not one of its keys"},
        {"kernel=k,launch=0,argument=0,byte=0,do=flip,byte=0", "byte is given twice"},
        {"launch=0,argument=0,byte=0,do=flip", "kernel is missing; write kernel=NAME,"},
        {"kernel=k,argument=0,byte=0,do=flip", "launch is missing"},
        {"kernel=k,launch=0,byte=0,do=flip", "argument is missing"},
        {"kernel=k,launch=0,argument=0,do=flip", "byte is missing"},
        {"kernel=k,launch=0,argument=0,byte=0", "do is missing"},
        {"kernel=k<float>,launch=0,argument=0,byte=0,do=flip", "kernel=k<float> is not a function's plain name; leave out namespaces, template arguments"},
        {"kernel=,launch=0,argument=0,byte=0,do=flip", "kernel= is not a function's plain name"},
        {"kernel=k,launch=-1,argument=0,byte=0,do=flip", "launch=-1 is not a whole number from 0 to 2147483647"},
        {"kernel=k,launch=,argument=0,byte=0,do=flip", "launch= is not a whole number"},
        {"kernel=k,launch=0,argument=out,byte=0,do=flip", "argument=out is not a whole number"},
        {"kernel=k,launch=0,argument=0,byte=0x10,do=flip", "byte=0x10 is not a whole number"},
        {"kernel=k,launch=0,argument=0,byte=99999999999999999999999,do=flip", "byte=99999999999999999999999 is not a whole number"},
        {"kernel=k,launch=0,argument=0,byte=0,do=nan", "do=nan is not nan32, nan16 or flip"},
        {"kernel=k,launch=0,argument=0,byte=2,do=nan32", "byte=2 is not a multiple of 4, so do=nan32 would damage two numbers"},
        {"kernel=k,launch=0,argument=0,byte=3,do=nan16", "byte=3 is not a multiple of 2"},
        {"kernel=k,launch=0,argument=0,byte=0,do=flip,bit=8", "bit=8 is not a whole number from 0 to 7"},
        {"kernel=k,launch=0,argument=0,byte=0,do=nan16,bit=0", "bit=0 is for do=flip only"},
    };
    for (const auto& c : cases)
        EXPECT_STOP_IN(std::string("hostcuda: HOSTCUDA_FAULT=") + c.fault + ": " + c.text, {{"HOSTCUDA_FAULT", c.fault}}, [] {
            floats(1);
            _exit(0);   // not a stop at exit
            return true;
        });
}

TEST(KernelFaultDeathTest, AFaultThatNeverHappenedIsSaid) {
    EXPECT_EXIT(run_in({{"HOSTCUDA_FAULT", "kernel=set_kernel,launch=5,argument=0,byte=0,do=flip"}}, [] { return only_wrong(-1, 0, 0); }),
                testing::ExitedWithCode(0),
                "^hostcuda: no fault was planted: HOSTCUDA_FAULT=kernel=set_kernel,launch=5,argument=0,byte=0,do=flip: kernel set_kernel was launched 5 times, and "
                "launches count from 0\n$");
    EXPECT_EXIT(run_in({{"HOSTCUDA_FAULT", "kernel=set,launch=0,argument=0,byte=0,do=flip"}}, [] { return only_wrong(-1, 0, 0); }),
                testing::ExitedWithCode(0), "^hostcuda: no fault was planted: [^\n]*: no kernel set was launched; HOSTCUDA_PROFILE=1 prints the names\n$");
    // The process ends while the launch is still queued.
    EXPECT_EXIT(run_in({{"HOSTCUDA_ASYNC", "1"}, {"HOSTCUDA_FAULT", "kernel=set_kernel,launch=0,argument=0,byte=0,do=flip"}}, [] {
        int* p = nullptr;
        cudaMalloc(&p, 32);
        cudaLaunchHostFunc(test_stream(), [](void*) { usleep(100000); }, nullptr);
        return launch_on(test_stream(), set_kernel, 1, 8, p, 1) == cudaSuccess;
    }), testing::ExitedWithCode(0), "^hostcuda: no fault was planted: [^\n]*: launch 0 of kernel set_kernel had not run when the process ended\n$");
}

}  // namespace
