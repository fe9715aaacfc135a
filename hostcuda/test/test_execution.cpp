// Kernels on the CPU: indices, barriers, warp collectives, atomics, shared memory, launches that CUDA refuses.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "execution_helpers.h"

namespace {

// ---- indices and the grid ------------------------------------------------------------------------------------------------------
__global__ void index_kernel(unsigned* seen, unsigned* wrong) {
    const size_t block = blockIdx.x + static_cast<size_t>(gridDim.x) * (blockIdx.y + static_cast<size_t>(gridDim.y) * blockIdx.z);
    const size_t threads = static_cast<size_t>(blockDim.x) * blockDim.y * blockDim.z;
    const size_t thread = threadIdx.x + static_cast<size_t>(blockDim.x) * (threadIdx.y + static_cast<size_t>(blockDim.y) * threadIdx.z);
    if (threadIdx.x >= blockDim.x || threadIdx.y >= blockDim.y || threadIdx.z >= blockDim.z) atomicAdd(wrong, 1u);
    atomicAdd(&seen[block * threads + thread], 1u);
}

TEST(Execution, EveryThreadRunsOnceWithItsOwnIndices) {
    for (const auto& [grid, block] : std::vector<std::pair<dim3, dim3>>{{1, 1}, {1000, 1}, {3, 1024}, {dim3(2, 3, 4), dim3(5, 6, 7)}, {7, dim3(1, 1, 64)}}) {
        const size_t count = static_cast<size_t>(grid.x) * grid.y * grid.z * block.x * block.y * block.z;
        Device<unsigned> seen(count), wrong(1);
        seen.fill(0);
        wrong.fill(0);
        ASSERT_EQ(launch(index_kernel, grid, block, 0, seen.data, wrong.data), cudaSuccess);
        for (const unsigned n : seen.host()) ASSERT_EQ(n, 1u);
        ASSERT_EQ(wrong.host()[0], 0u);
    }
}

__global__ void conversion_kernel(double* out, long long a, float b, const int* null) { *out = static_cast<double>(a) + b + (null == nullptr); }

TEST(Execution, ArgumentsAreConvertedAndCopied) {
    Device<double> out(1);
    ASSERT_EQ(launch(conversion_kernel, 1, 1, 0, out.data, 3, 0.5, nullptr), cudaSuccess);
    EXPECT_EQ(out.host()[0], 4.5);
}

__global__ void change_parameter_kernel(int* out, int value) {
    value += static_cast<int>(threadIdx.x);
    __syncthreads();
    out[threadIdx.x] = value;
}

TEST(Execution, AParameterIsEachThreadsOwn) {
    Device<int> out(64);
    ASSERT_EQ(launch(change_parameter_kernel, 1, 64, 0, out.data, 100), cudaSuccess);
    for (int i = 0; i < 64; i++) EXPECT_EQ(out.host()[i], 100 + i);
}

// ---- barriers ------------------------------------------------------------------------------------------------------------------
__global__ void tree_sum_kernel(int* out, const int* in) {
    SHARED(int, buffer, 1024);
    const unsigned t = threadIdx.x;
    buffer[t] = in[blockIdx.x * blockDim.x + t];
    __syncthreads();
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
        if (t < half) buffer[t] += buffer[t + half];
        __syncthreads();
    }
    if (t == 0) out[blockIdx.x] = buffer[0];
}

TEST(Execution, TreeReductionOverAThousandBlocks) {
    for (const unsigned threads : {1u, 2u, 32u, 64u, 256u, 1024u}) {
        const unsigned blocks = HOSTCUDA_SLOW_BUILD ? (threads < 512 ? 20 : 2) : (threads < 512 ? 1000 : 100);
        std::vector<int> values(static_cast<size_t>(blocks) * threads);
        std::iota(values.begin(), values.end(), 1);
        Device<int> in(values), out(blocks);
        ASSERT_EQ(launch(tree_sum_kernel, blocks, threads, 0, out.data, in.data), cudaSuccess);
        const std::vector<int> sums = out.host();
        for (unsigned b = 0; b < blocks; b++) {
            const auto begin = values.begin() + static_cast<ptrdiff_t>(b) * threads;
            ASSERT_EQ(sums[b], std::accumulate(begin, begin + threads, 0)) << "block " << b << " of " << threads << " threads";
        }
    }
}

__global__ void barrier_vote_kernel(int* out, int first_true, int last_true) {
    const int predicate = static_cast<int>(threadIdx.x) >= first_true && static_cast<int>(threadIdx.x) <= last_true ? 5 : 0;
    int* const row = out + threadIdx.x * 6;
    // Back to back, so that a late thread must still get the earlier result.
    row[0] = __syncthreads_count(predicate);
    row[1] = __syncthreads_and(predicate);
    row[2] = __syncthreads_or(predicate);
    row[3] = __syncthreads_count(!predicate);
    row[4] = __syncthreads_and(1);
    row[5] = __syncthreads_or(0);
}

TEST(Execution, BarriersCountAndVote) {
    const int threads = 96;
    for (const auto& [first, last] : {std::pair{0, 95}, std::pair{1, 0}, std::pair{40, 41}, std::pair{1, 95}}) {
        Device<int> out(threads * 6);
        ASSERT_EQ(launch(barrier_vote_kernel, 1, threads, 0, out.data, first, last), cudaSuccess);
        const int count = last - first + 1;
        const std::vector<int> rows = out.host();
        for (int t = 0; t < threads; t++) {
            const int* const row = &rows[static_cast<size_t>(t) * 6];
            ASSERT_EQ(row[0], count);
            ASSERT_EQ(row[1] != 0, count == threads);
            ASSERT_EQ(row[2] != 0, count != 0);
            ASSERT_EQ(row[3], threads - count);
            ASSERT_NE(row[4], 0);
            ASSERT_EQ(row[5], 0);
        }
    }
}

// Much on the stack, and floating-point values that live across the switch.
__global__ void deep_kernel(double* out, int rounds) {
    double local[64];
    double x = threadIdx.x * 0.5 + 1;
    for (int i = 0; i < 64; i++) local[i] = x + i;
    for (int r = 0; r < rounds; r++) {
        x = x * 1.25 - local[(r * 7 + static_cast<int>(threadIdx.x)) % 64];
        __syncthreads();
        local[r % 64] += x;
    }
    out[threadIdx.x] = x;
}

TEST(Execution, ValuesSurviveABarrier) {
    const int rounds = 20;
    Device<double> out(128);
    ASSERT_EQ(launch(deep_kernel, 1, 128, 0, out.data, rounds), cudaSuccess);
    const std::vector<double> got = out.host();
    for (int t = 0; t < 128; t++) {
        double local[64], x = t * 0.5 + 1;
        for (int i = 0; i < 64; i++) local[i] = x + i;
        for (int r = 0; r < rounds; r++) {
            x = x * 1.25 - local[(r * 7 + t) % 64];
            local[r % 64] += x;
        }
        // The compiler may fuse a multiplication with the subtraction in one place and not in the other: one rounding a round,
        // each carried on by factors of at most 1.25.
        double bound = 0;
        for (int r = 0; r < rounds; r++) bound = bound * 2.25 + 1e-16 * 1e3;
        ASSERT_NEAR(got[t], x, bound + std::fabs(x) * 1e-13);
    }
}

// ---- warp collectives ----------------------------------------------------------------------------------------------------------
// The definition of the four shuffles in the CUDA programming guide, for each lane by itself.
enum class Shuffle { index, up, down, exclusive_or };

int expected_source(Shuffle kind, int lane, int argument, int width) {
    const int segment = lane / width * width, within = lane % width;
    switch (kind) {
        case Shuffle::index: return segment + ((argument % width) + width) % width;
        case Shuffle::up: return within - argument < 0 ? lane : lane - argument;
        case Shuffle::down: return within + argument >= width ? lane : lane + argument;
        case Shuffle::exclusive_or: {
            const int source = lane ^ argument;
            return source >= segment + width ? lane : source;  // an earlier segment may be read, a later one may not
        }
    }
    return -1;
}

template <class T>
__global__ void shuffle_kernel(T* out, const T* in, Shuffle kind, int argument, int width) {
    const T x = in[threadIdx.x];
    switch (kind) {
        case Shuffle::index: out[threadIdx.x] = __shfl_sync(0xffffffffu, x, argument, width); break;
        case Shuffle::up: out[threadIdx.x] = __shfl_up_sync(0xffffffffu, x, static_cast<unsigned>(argument), width); break;
        case Shuffle::down: out[threadIdx.x] = __shfl_down_sync(0xffffffffu, x, static_cast<unsigned>(argument), width); break;
        case Shuffle::exclusive_or: out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, x, argument, width); break;
    }
}

template <class T>
struct ShuffleTest : testing::Test {};
using ShuffleTypes = testing::Types<int, unsigned, long, unsigned long, long long, unsigned long long, float, double>;
TYPED_TEST_SUITE(ShuffleTest, ShuffleTypes);

TYPED_TEST(ShuffleTest, FollowsTheDefinition) {
    using T = TypeParam;
    std::vector<T> values(64);
    for (int i = 0; i < 64; i++) values[i] = static_cast<T>(sizeof(T) == 8 ? (1LL << 40) * (i + 1) + i : 1000 * i + 7);
    Device<T> in(values), out(64);
    for (const Shuffle kind : {Shuffle::index, Shuffle::up, Shuffle::down, Shuffle::exclusive_or}) {
        for (const int width : {1, 2, 4, 8, 16, 32}) {
            for (const int argument : {0, 1, 2, 3, 5, 8, 15, 16, 17, 31}) {
                ASSERT_EQ(launch(shuffle_kernel<T>, 1, 64, 0, out.data, in.data, kind, argument, width), cudaSuccess);
                const std::vector<T> got = out.host();
                for (int t = 0; t < 64; t++) {
                    const int source = t / 32 * 32 + expected_source(kind, t % 32, argument, width);
                    ASSERT_EQ(got[t], values[source]) << "kind " << static_cast<int>(kind) << " width " << width << " argument " << argument << " thread " << t;
                }
            }
        }
    }
}

__global__ void vote_kernel(unsigned* out, unsigned bits) {
    const unsigned lane = threadIdx.x % 32;
    const int predicate = static_cast<int>(bits >> lane & 1) * 8;
    unsigned* const row = out + threadIdx.x * 4;
    row[0] = __ballot_sync(0xffffffffu, predicate);
    row[1] = static_cast<unsigned>(__any_sync(0xffffffffu, predicate));
    row[2] = static_cast<unsigned>(__all_sync(0xffffffffu, predicate));
    row[3] = __match_any_sync(0xffffffffu, static_cast<int>(lane % 5));
}

TEST(Execution, Votes) {
    for (const unsigned bits : {0u, ~0u, 0x80000001u, 0x00ff00f0u}) {
        Device<unsigned> out(64 * 4);
        ASSERT_EQ(launch(vote_kernel, 1, 64, 0, out.data, bits), cudaSuccess);
        const std::vector<unsigned> rows = out.host();
        for (unsigned t = 0; t < 64; t++) {
            unsigned same = 0;
            for (unsigned lane = 0; lane < 32; lane++) same |= (lane % 5 == t % 32 % 5 ? 1u : 0u) << lane;
            ASSERT_EQ(rows[t * 4], bits);
            ASSERT_EQ(rows[t * 4 + 1], bits != 0 ? 1u : 0u);
            ASSERT_EQ(rows[t * 4 + 2], bits == ~0u ? 1u : 0u);
            ASSERT_EQ(rows[t * 4 + 3], same);
        }
    }
}

// Two groups of lanes meet under disjoint masks, at different times and in different collectives.
__global__ void group_kernel(int* out) {
    const int lane = static_cast<int>(threadIdx.x);
    int result;
    if (lane % 2 == 0) {
        result = __reduce_add_sync(0x55555555u, lane);
        __syncwarp(0x55555555u);
        result += __reduce_max_sync(0x55555555u, lane) * 1000;
    } else {
        result = __reduce_min_sync(0xaaaaaaaau, -lane);
        result = __shfl_sync(0xaaaaaaaau, result + lane, 31);
    }
    __syncwarp();
    out[lane] = result;
}

TEST(Execution, DisjointMasksMeetApart) {
    Device<int> out(32);
    ASSERT_EQ(launch(group_kernel, 1, 32, 0, out.data), cudaSuccess);
    for (int lane = 0; lane < 32; lane++) ASSERT_EQ(out.host()[lane], lane % 2 == 0 ? 240 + 30000 : 0);
}

__global__ void reduce_kernel(int* out, unsigned* unsigned_out) {
    const int lane = static_cast<int>(threadIdx.x);
    out[0] = __reduce_add_sync(0xffffffffu, lane - 40);
    out[1] = __reduce_min_sync(0xffffffffu, lane - 10);
    out[2] = __reduce_max_sync(0xffffffffu, lane - 10);
    unsigned_out[0] = __reduce_or_sync(0xffffffffu, 1u << lane);
    unsigned_out[1] = __reduce_and_sync(0xffffffffu, ~(1u << lane));
    unsigned_out[2] = __reduce_xor_sync(0xffffffffu, static_cast<unsigned>(lane));
    unsigned_out[3] = __activemask() >> lane & 1;
}

TEST(Execution, Reductions) {
    Device<int> out(3);
    Device<unsigned> unsigned_out(4);
    if (HOSTCUDA_TSAN_BUILD) GTEST_SKIP() << "every lane writes the same value to the same place";
    ASSERT_EQ(launch(reduce_kernel, 1, 32, 0, out.data, unsigned_out.data), cudaSuccess);
    EXPECT_EQ(out.host(), (std::vector<int>{496 - 32 * 40, -10, 21}));
    EXPECT_EQ(unsigned_out.host(), (std::vector<unsigned>{~0u, 0u, 0u, 1u}));
}

// A meeting with a function of one's own: what matrix instructions are made of.
struct PrefixArgs {
    int value;
    int sum;
};
__global__ void prefix_kernel(int* out) {
    PrefixArgs args{static_cast<int>(threadIdx.x) * 3, 0};
    hostcuda::warp_collective(
        0xffffffffu, &args,
        [](void** lanes, unsigned) {
            int sum = 0;
            for (int lane = 0; lane < 32; lane++) {
                auto& lane_args = *static_cast<PrefixArgs*>(lanes[lane]);
                lane_args.sum = sum += lane_args.value;
            }
        },
        "prefix");
    out[threadIdx.x] = args.sum;
}

TEST(Execution, AWarpMeetsForAnyFunction) {
    Device<int> out(32);
    ASSERT_EQ(launch(prefix_kernel, 1, 32, 0, out.data), cudaSuccess);
    for (int lane = 0, sum = 0; lane < 32; lane++) ASSERT_EQ(out.host()[lane], sum += lane * 3);
}

// ---- atomics -------------------------------------------------------------------------------------------------------------------
template <class T>
__global__ void atomic_kernel(T* cells) {
    const T i = static_cast<T>(blockIdx.x * blockDim.x + threadIdx.x);
    atomicAdd(&cells[0], i);
    atomicMax(&cells[1], i);
    atomicMin(&cells[2], i);
    atomicOr(&cells[3], static_cast<T>(i & 0xff));
    atomicAnd(&cells[4], static_cast<T>(~(i & 0xf0)));
    atomicXor(&cells[5], i);
    for (T old = 0, seen; (seen = atomicCAS(&cells[6], old, static_cast<T>(old + 2))) != old;) old = seen;
    atomicExch(&cells[7], static_cast<T>(99));
    atomicSub(&cells[8], static_cast<T>(1));
}

template <class T>
void check_atomics() {
    const unsigned count = 64 * 96;
    Device<T> cells(std::vector<T>{0, 0, 1000, 0, static_cast<T>(~T{0}), 0, 0, 0, static_cast<T>(count)});
    ASSERT_EQ(launch(atomic_kernel<T>, 64, 96, 0, cells.data), cudaSuccess);
    T exclusive = 0;
    for (unsigned i = 0; i < count; i++) exclusive ^= static_cast<T>(i);
    const std::vector<T> expected{static_cast<T>(count * (count - 1) / 2), static_cast<T>(count - 1), 0, 0xff, static_cast<T>(~T{0xf0}), exclusive,
                                  static_cast<T>(2 * count), 99, 0};
    EXPECT_EQ(cells.host(), expected);
}

TEST(Execution, Atomics) {
    check_atomics<int>();
    check_atomics<unsigned>();
    check_atomics<unsigned long long>();
}

// ---- shared memory -------------------------------------------------------------------------------------------------------------
__global__ void fresh_shared_kernel(unsigned* stale, unsigned* misplaced, unsigned dynamic_words) {
    SHARED(float, first, 33);
    SHARED(double, second, 5);
    float* const dynamic = static_cast<float*>(hostcuda::dynamic_shared());
    if (threadIdx.x == 0) {
        for (int i = 0; i < 33; i++) *stale += !std::isnan(first[i]);
        for (int i = 0; i < 5; i++) *stale += !std::isnan(second[i]);
        for (unsigned i = 0; i < dynamic_words; i++) *stale += !std::isnan(dynamic[i]);
        const auto address = [](const void* p) { return reinterpret_cast<uintptr_t>(p); };
        *misplaced += address(second) % alignof(double) != 0;
        *misplaced += address(dynamic) % 16 != 0;
        *misplaced += address(dynamic) % 32 == 0;  // more than was declared
    }
    __syncthreads();
    first[threadIdx.x] = 1;
    if (threadIdx.x < 5) second[threadIdx.x] = 2;
    for (unsigned i = threadIdx.x; i < dynamic_words; i += blockDim.x) dynamic[i] = 3;
}

TEST(Execution, SharedMemoryIsPoisonedForEachBlock) {
    if (HOSTCUDA_TSAN_BUILD) GTEST_SKIP() << "blocks count into one place";
    Device<unsigned> stale(1), misplaced(1);
    stale.fill(0);
    misplaced.fill(0);
    ASSERT_EQ(launch(fresh_shared_kernel, 1, 32, 1001 * sizeof(float), stale.data, misplaced.data, 1001), cudaSuccess);
    ASSERT_EQ(launch(fresh_shared_kernel, 1, 32, 1001 * sizeof(float), stale.data, misplaced.data, 1001), cudaSuccess);
    EXPECT_EQ(stale.host()[0], 0u);
    EXPECT_EQ(misplaced.host()[0], 0u);
}

__global__ void big_dynamic_kernel(float* out, unsigned words) {
    float* const buffer = static_cast<float*>(hostcuda::dynamic_shared());
    for (unsigned i = threadIdx.x; i < words; i += blockDim.x) buffer[i] = static_cast<float>(i);
    __syncthreads();
    if (threadIdx.x == 0) out[blockIdx.x] = buffer[words - 1];
}

TEST(Execution, LargeDynamicSharedMemoryMustBeAskedFor) {
    cudaDeviceProp properties;
    ASSERT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
    const size_t largest = properties.sharedMemPerBlockOptin;
    Device<float> out(2);
    const auto words = [](size_t bytes) { return static_cast<unsigned>(bytes / sizeof(float)); };
    EXPECT_EQ(launch(big_dynamic_kernel, 1, 64, 48 * 1024, out.data, words(48 * 1024)), cudaSuccess);
    testing::internal::CaptureStderr();
    EXPECT_EQ(launch(big_dynamic_kernel, 1, 64, 48 * 1024 + 4, out.data, 1u), cudaErrorInvalidValue);
    const std::string message = testing::internal::GetCapturedStderr();
    EXPECT_NE(message.find("big_dynamic_kernel"), std::string::npos) << message;
    EXPECT_NE(message.find("49156 bytes of dynamic shared memory"), std::string::npos) << message;
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
    EXPECT_EQ(cudaFuncSetAttribute(big_dynamic_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(largest + 1)), cudaErrorInvalidValue);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
    ASSERT_EQ(cudaFuncSetAttribute(big_dynamic_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(largest)), cudaSuccess);
    cudaFuncAttributes attributes;
    ASSERT_EQ(cudaFuncGetAttributes(&attributes, big_dynamic_kernel), cudaSuccess);
    EXPECT_EQ(static_cast<size_t>(attributes.maxDynamicSharedSizeBytes), largest);
    ASSERT_EQ(launch(big_dynamic_kernel, 2, 64, largest, out.data, words(largest)), cudaSuccess);
    for (const float last : out.host()) EXPECT_EQ(last, static_cast<float>(words(largest) - 1));
    EXPECT_EQ(launch(big_dynamic_kernel, 1, 64, largest + 4, out.data, 1u), cudaErrorInvalidValue);
}

// ---- launches that CUDA refuses ------------------------------------------------------------------------------------------------
__global__ void nothing_kernel() {}

TEST(Execution, ImpossibleLaunchesAreRefusedByName) {
    struct Case {
        dim3 grid, block;
        cudaError_t error;
        const char* text;
    };
    const Case cases[] = {
        {1, 1025, cudaErrorInvalidConfiguration, "block \\(1025,1,1\\) has 1025 threads"},
        {1, dim3(32, 33), cudaErrorInvalidConfiguration, "has 1056 threads"},
        {1, dim3(1, 1, 65), cudaErrorInvalidConfiguration, "block.z is 65"},
        {1, 0, cudaErrorInvalidConfiguration, "empty block"},
        {0, 32, cudaErrorInvalidConfiguration, "empty grid \\(0,1,1\\)"},
        {dim3(1, 0), 32, cudaErrorInvalidConfiguration, "empty grid"},
        {dim3(1, 65536), 32, cudaErrorInvalidConfiguration, "the largest y and z are 65535"},
        {dim3(1, 1, 65536), 32, cudaErrorInvalidConfiguration, "the largest y and z are 65535"},
        {0x80000000u, 32, cudaErrorInvalidConfiguration, "grid.x is 2147483648"},
    };
    for (const Case& c : cases) {
        testing::internal::CaptureStderr();
        EXPECT_EQ(launch(nothing_kernel, c.grid, c.block, 0), c.error) << c.text;
        const std::string message = testing::internal::GetCapturedStderr();
        EXPECT_TRUE(testing::internal::RE::PartialMatch(message, testing::internal::RE(c.text))) << message;
        EXPECT_NE(message.find("nothing_kernel"), std::string::npos) << message;
        EXPECT_EQ(cudaGetLastError(), c.error);
    }
    EXPECT_EQ(launch(nothing_kernel, dim3(1, 65535), 1, 0), cudaSuccess);
    EXPECT_EQ(launch(nothing_kernel, 1, dim3(16, 1, 64), 0), cudaSuccess);
}

// ---- integer intrinsics --------------------------------------------------------------------------------------------------------
TEST(Math, BitIntrinsics) {
    EXPECT_EQ(__umulhi(0xffffffffu, 0xffffffffu), 0xfffffffeu);
    EXPECT_EQ(__umul64hi(~0ull, ~0ull), ~0ull - 1);
    EXPECT_EQ(__mulhi(-1, 1), -1);
    EXPECT_EQ(__popc(0xf0f0u), 8);
    EXPECT_EQ(__clz(0), 32);
    EXPECT_EQ(__clz(1), 31);
    EXPECT_EQ(__clzll(1), 63);
    EXPECT_EQ(__ffs(0), 0);
    EXPECT_EQ(__ffs(8), 4);
    EXPECT_EQ(__brev(1u), 0x80000000u);
    EXPECT_EQ(__brev(0x12345678u), 0x1e6a2c48u);
    EXPECT_EQ(__funnelshift_l(0x80000000u, 1u, 1), 3u);
    EXPECT_EQ(__funnelshift_r(1u, 1u, 1), 0x80000000u);
    EXPECT_EQ(__float2int_rn(2.5f), 2);
    EXPECT_EQ(__float2int_rd(-1.5f), -2);
    EXPECT_EQ(__saturatef(NAN), 0.0f);
}

// ---- bfloat16 ------------------------------------------------------------------------------------------------------------------
// Round to nearest even by comparing distances in double: no bit tricks in common with the header.
unsigned short reference_bf16(float x) {
    if (std::isnan(x)) return 0x7fff;
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t low = bits >> 16;
    const auto value = [](uint32_t upper) {
        // One above the largest finite value stands for 2^128 here, where infinity begins to be nearer.
        if ((upper & 0x7fff) == 0x7f80) return (upper & 0x8000 ? -1.0 : 1.0) * std::ldexp(1.0, 128);
        const uint32_t b = upper << 16;
        float f;
        memcpy(&f, &b, 4);
        return static_cast<double>(f);
    };
    if (std::isinf(x)) return static_cast<unsigned short>(low);
    const double below = std::fabs(x - value(low)), above = std::fabs(value(low + 1) - x);
    if (below != above) return static_cast<unsigned short>(below < above ? low : low + 1);
    return static_cast<unsigned short>(low % 2 == 0 ? low : low + 1);
}

TEST(Bf16, AllValuesThereAndBack) {
    for (unsigned bits = 0; bits < 65536; bits++) {
        const __nv_bfloat16 x = __ushort_as_bfloat16(static_cast<unsigned short>(bits));
        const float f = __bfloat162float(x);
        uint32_t float_bits;
        memcpy(&float_bits, &f, 4);
        ASSERT_EQ(float_bits, bits << 16);
        const unsigned short back = __bfloat16_as_ushort(__float2bfloat16_rn(f));
        ASSERT_EQ(back, std::isnan(f) ? 0x7fff : bits);
    }
}

TEST(Bf16, RoundsToNearestEven) {
    std::mt19937 random(1);
    for (int i = 0; i < 2000000; i++) {
        uint32_t bits = random();
        if (i % 4 == 1) bits = (bits & 0xffff0000u) | 0x8000u;            // ties
        if (i % 4 == 2) bits = (bits & 0xffff0000u) | (0x7fffu + i % 3);  // and their neighbours
        if (i % 4 == 3) bits |= 0x7f000000u;                              // huge, infinite, NaN
        float f;
        memcpy(&f, &bits, 4);
        ASSERT_EQ(__bfloat16_as_ushort(__float2bfloat16_rn(f)), reference_bf16(f)) << std::hex << bits;
    }
}

TEST(Bf16, DoublesAreRoundedOnce) {
    // 1 + 2^-8 is a tie between 1 and 1 + 2^-7; a little more must round up, though the float nearest to it is the tie itself.
    EXPECT_EQ(__bfloat16_as_ushort(__double2bfloat16(1.0 + std::ldexp(1.0, -8) + std::ldexp(1.0, -40))), 0x3f81);
    EXPECT_EQ(__bfloat16_as_ushort(__double2bfloat16(1.0 + std::ldexp(1.0, -8) - std::ldexp(1.0, -40))), 0x3f80);
    EXPECT_EQ(__bfloat16_as_ushort(__double2bfloat16(1.0 + std::ldexp(1.0, -8))), 0x3f80);
    EXPECT_EQ(__bfloat16_as_ushort(__double2bfloat16(-1.0 - std::ldexp(1.0, -8) - std::ldexp(1.0, -40))), 0xbf81);
    EXPECT_EQ(__bfloat16_as_ushort(__double2bfloat16(1e300)), 0x7f80);
    EXPECT_EQ(__bfloat16_as_ushort(__double2bfloat16(0.0)), 0);
    EXPECT_EQ(__bfloat16_as_ushort(__double2bfloat16(1e-320)), 0);
    EXPECT_EQ(__bfloat16_as_ushort(__double2bfloat16(NAN)), 0x7fff);
    EXPECT_EQ(__bfloat16_as_ushort(__nv_bfloat16(16777217)), 0x4b80);
}

TEST(Bf16, PairsAndArithmetic) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(1.5f, -2.0f);
    EXPECT_EQ(__low2float(pair), 1.5f);
    EXPECT_EQ(__high2float(pair), -2.0f);
    uint32_t word;
    memcpy(&word, &pair, 4);
    EXPECT_EQ(word, 0xc0003fc0u);  // x in the low half
    EXPECT_EQ(float(__nv_bfloat16(1.0f) + __nv_bfloat16(2.0f)), 3.0f);
    EXPECT_EQ(float(__hneg(__nv_bfloat16(1.0f))), -1.0f);
}

}  // namespace
