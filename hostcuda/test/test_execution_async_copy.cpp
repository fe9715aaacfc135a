// cp.async: what lands, and when. By default a copy is done at its call, with HOSTCUDA_ASYNC=1 at the wait that covers it; a correct kernel gives
// the same in both, and one whose wait or commit is missing shows in the second.
#include <algorithm>
#include <cmath>
#include <csignal>
#include <string>

#include "execution_helpers.h"

namespace {

// A mode is read once, so each case runs in a fresh process.
struct FreshProcess : testing::Environment {
    void SetUp() override { testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};
[[maybe_unused]] testing::Environment* const fresh_process = testing::AddGlobalTestEnvironment(new FreshProcess);

// One OS thread unless it says more, so that the blocks of a grid follow one another on it.
struct Mode {
    const char* async;
    const char* schedule = "0";
    const char* threads = "1";
};
constexpr Mode kAtOnce{"0"}, kAtTheWait{"1"};

template <class F>
[[noreturn]] void run_in(Mode mode, F body) {
    setenv("HOSTCUDA_ASYNC", mode.async, 1);
    setenv("HOSTCUDA_SCHEDULE", mode.schedule, 1);
    setenv("HOSTCUDA_THREADS", mode.threads, 1);
    body();
    exit(testing::Test::HasFailure() ? 1 : 0);
}
#define EXPECT_RIGHT_IN(mode, ...) EXPECT_EXIT(run_in(mode, __VA_ARGS__), testing::ExitedWithCode(0), "")
#define EXPECT_STOP_IN(mode, text, ...) EXPECT_EXIT(run_in(mode, __VA_ARGS__), testing::KilledBySignal(SIGABRT), text)

using hostcuda::async_copy;
using hostcuda::async_copy_commit;
using hostcuda::async_copy_wait;
using hostcuda::kPoison32;

// ---- what lands ----------------------------------------------------------------------------------------------------------------
// Thread t copies t % (Bytes + 1) bytes, the rest is zero; without any the source is null. Its mirror image reads them.
template <unsigned Bytes>
__global__ void sizes_kernel(unsigned char* out, const unsigned char* in) {
    SHARED(uint4, tile, 64);
    const unsigned t = threadIdx.x, last = blockDim.x - 1;
    const unsigned source_bytes = t % (Bytes + 1);
    auto* const bytes = reinterpret_cast<unsigned char*>(tile);
    async_copy(bytes + t * Bytes, source_bytes != 0 ? in + t * Bytes : nullptr, Bytes, source_bytes);
    async_copy_commit();
    async_copy_wait(0);
    __syncthreads();
    for (unsigned i = 0; i < Bytes; i++) out[(last - t) * Bytes + i] = bytes[(last - t) * Bytes + i];
}

template <unsigned Bytes>
void expect_sizes() {
    const unsigned threads = 51;   // 17 * 3: every source_bytes of 16 three times
    std::vector<unsigned char> values(threads * Bytes);
    for (unsigned i = 0; i < values.size(); i++) values[i] = static_cast<unsigned char>(i % 251 + 1);
    Device<unsigned char> in(values), out(values.size());
    EXPECT_EQ(launch(sizes_kernel<Bytes>, 1, threads, 0, out.data, in.data), cudaSuccess);
    const std::vector<unsigned char> seen = out.host();
    for (unsigned i = 0; i < values.size(); i++) {
        EXPECT_EQ(seen[i], i % Bytes < i / Bytes % (Bytes + 1) ? values[i] : 0) << "byte " << i << " in copies of " << Bytes;
    }
}

// A pipeline over tiles as kernels write it: kStages buffers, kStages - 1 tiles under way, one group a tile, empty groups at the end. The one
// barrier a tile is for the tile that has landed as well as for the buffer that is free then.
enum Fault { none, weak_wait, no_wait, no_commit, no_barrier, reused_too_early };
constexpr int kStages = 3, kTiles = 10;
constexpr unsigned kThreads = 64;

template <Fault Planted>
__global__ void pipeline_kernel(float* out, const float* in) {
    auto* const tiles = static_cast<float4*>(hostcuda::dynamic_shared());   // (kStages, kThreads)
    const unsigned t = threadIdx.x;
    const auto issue = [&](int tile) {
        if (tile < kTiles) async_copy(&tiles[tile % kStages * kThreads + t], in + (tile * kThreads + t) * 4, 16, 16);
        if (Planted != no_commit) async_copy_commit();
    };
    for (int tile = 0; tile < kStages - 1; tile++) issue(tile);
    float sum = 0;
    for (int tile = 0; tile < kTiles; tile++) {
        if (Planted == reused_too_early) issue(tile + kStages - 1);
        if (Planted != no_wait) async_copy_wait(Planted == weak_wait || Planted == reused_too_early ? kStages - 1 : kStages - 2);
        if (Planted != no_barrier) __syncthreads();
        if (Planted != reused_too_early) issue(tile + kStages - 1);
        const float4 mirrored = tiles[tile % kStages * kThreads + kThreads - 1 - t];
        sum += mirrored.x + 2 * mirrored.y + 3 * mirrored.z + 4 * mirrored.w;
    }
    out[blockIdx.x * kThreads + t] = sum;
}

// How many of the sums are wrong; and whether all that are wrong are NaN.
struct Wrong {
    int count = 0;
    bool all_nan = true;
};
template <Fault Planted>
Wrong run_pipeline() {
    const unsigned blocks = 5;
    std::vector<float> values(kTiles * kThreads * 4), expected(kThreads);
    for (unsigned i = 0; i < values.size(); i++) values[i] = static_cast<float>(i % 1009);
    for (unsigned i = 0; i < values.size(); i++) expected[kThreads - 1 - i / 4 % kThreads] += static_cast<float>(i % 4 + 1) * values[i];
    Device<float> in(values), out(blocks * kThreads);
    EXPECT_EQ(launch(pipeline_kernel<Planted>, blocks, kThreads, kStages * kThreads * 16, out.data, in.data), cudaSuccess);
    Wrong wrong;
    const std::vector<float> sums = out.host();
    for (unsigned i = 0; i < sums.size(); i++) {
        if (sums[i] == expected[i % kThreads]) continue;
        wrong.count++;
        wrong.all_nan &= std::isnan(sums[i]);
    }
    return wrong;
}

// Blocks 0, 2, ... leave with copies that nobody waits for. What they left must not land in the next block, whose shared memory is at the same place.
__global__ void leaving_kernel(unsigned* out, const unsigned* in) {
    SHARED(unsigned, value, kThreads);
    const unsigned t = threadIdx.x;
    if (blockIdx.x % 2 == 0) {
        async_copy(&value[t], &in[t], 4, 4);
        if (t % 2 == 0) async_copy_commit();
        return;
    }
    async_copy_commit();
    async_copy_wait(0);
    out[blockIdx.x * blockDim.x + t] = value[t];
}
void expect_leaving() {
    for (const unsigned threads : {64u, 32u, 50u}) {
        const unsigned blocks = 6;
        Device<unsigned> in(std::vector<unsigned>(threads, 1)), out(blocks * threads);
        EXPECT_EQ(launch(leaving_kernel, blocks, threads, 0, out.data, in.data), cudaSuccess);
        for (const unsigned value : out.host()) EXPECT_EQ(value, kPoison32);
    }
}

TEST(AsyncCopyDeathTest, CorrectKernelsAreRightInEveryMode) {
    for (const Mode mode : {kAtOnce, kAtTheWait, Mode{"0", "1"}, Mode{"1", "1"}, Mode{"1", "2"}, Mode{"0", "0", "3"}, Mode{"1", "0", "3"}}) {
        SCOPED_TRACE(std::string("HOSTCUDA_ASYNC=") + mode.async + " HOSTCUDA_SCHEDULE=" + mode.schedule + " HOSTCUDA_THREADS=" + mode.threads);
        EXPECT_RIGHT_IN(mode, [] {
            expect_sizes<4>();
            expect_sizes<8>();
            expect_sizes<16>();
            EXPECT_EQ(run_pipeline<none>().count, 0);
            expect_leaving();
        });
    }
}

// ---- when it lands -------------------------------------------------------------------------------------------------------------
// What one thread sees of four words, step by step: letters that came from `in`, 0 for zero, P for poison.
using Steps = std::vector<std::string>;
constexpr unsigned kWidth = 4;

struct Recorder {
    unsigned* out;
    const unsigned* value;
    unsigned step = 0;
    void operator()() {
        for (unsigned i = 0; i < kWidth; i++) out[step * kWidth + i] = value[i];
        step++;
    }
};

Steps steps_of(void (*kernel)(unsigned*, unsigned*), unsigned threads, size_t count) {
    Device<unsigned> in(std::vector<unsigned>{'A', 'B', 'C', 'D', 'E', 'F', 'G', 'H'}), out(count * kWidth);
    EXPECT_EQ(launch(kernel, 1, threads, 0, out.data, in.data), cudaSuccess);
    const std::vector<unsigned> seen = out.host();
    Steps steps(count);
    for (size_t i = 0; i < seen.size(); i++) steps[i / kWidth] += seen[i] == kPoison32 ? 'P' : seen[i] == 0 ? '0' : static_cast<char>(seen[i]);
    return steps;
}
void expect_steps(void (*kernel)(unsigned*, unsigned*), unsigned threads, const Steps& at_once, const Steps& at_the_wait) {
    EXPECT_RIGHT_IN(kAtOnce, [&] { EXPECT_EQ(steps_of(kernel, threads, at_once.size()), at_once); });
    EXPECT_RIGHT_IN(kAtTheWait, [&] { EXPECT_EQ(steps_of(kernel, threads, at_the_wait.size()), at_the_wait); });
}

__global__ void groups_kernel(unsigned* out, unsigned* in) {
    SHARED(unsigned, value, kWidth);
    Recorder record{out, value};
    record();
    for (unsigned i = 0; i < 2; i++) {   // a group each
        async_copy(&value[i], &in[i], 4, 4);
        async_copy_commit();
    }
    async_copy_commit();                 // an empty one
    async_copy(&value[2], &in[2], 4, 4); // these are in none yet
    async_copy(&value[3], nullptr, 4, 0);
    record();
    for (const unsigned pending : {~0u, 3u, 2u, 1u, 0u}) {
        async_copy_wait(pending);
        record();
    }
    async_copy_commit();
    async_copy_wait(1);
    record();
    async_copy_wait(0);
    record();
}
TEST(AsyncCopyDeathTest, AWaitCoversAllButTheLatestGroups) {
    expect_steps(groups_kernel, 1, {"PPPP", "ABC0", "ABC0", "ABC0", "ABC0", "ABC0", "ABC0", "ABC0", "ABC0"},
                 {"PPPP", "PPPP", "PPPP", "PPPP", "APPP", "ABPP", "ABPP", "ABPP", "ABC0"});
}

__global__ void order_kernel(unsigned* out, unsigned* in) {
    SHARED(unsigned, value, kWidth);
    Recorder record{out, value};
    for (unsigned i = 0; i < 4; i++) {
        async_copy(&value[0], &in[i], 4, 4);       // in one group
        async_copy(&value[1 + i / 2], &in[4 + i], 4, 4);
    }
    async_copy_commit();
    async_copy(&value[2], &in[0], 4, 4);           // and in the next
    async_copy_commit();
    async_copy_wait(1);
    record();
    async_copy_wait(0);
    record();
}
TEST(AsyncCopyDeathTest, CopiesLandInOrderOfIssue) { expect_steps(order_kernel, 1, {"DFAP", "DFAP"}, {"DFHP", "DFAP"}); }

// The source is read when the copy is done.
__global__ void source_kernel(unsigned* out, unsigned* in) {
    SHARED(unsigned, value, kWidth);
    Recorder record{out, value};
    async_copy(&value[0], &in[0], 4, 4);
    async_copy_commit();
    in[0] = 'Z';
    async_copy_wait(0);
    record();
}
TEST(AsyncCopyDeathTest, TheSourceIsReadWhenTheCopyIsDone) { expect_steps(source_kernel, 1, {"APPP"}, {"ZPPP"}); }

// Neither a barrier nor another thread's wait makes a copy land.
__global__ void others_kernel(unsigned* out, unsigned* in) {
    SHARED(unsigned, value, kWidth);
    Recorder record{out, value};
    const unsigned t = threadIdx.x;
    if (t == 0) {
        async_copy(&value[0], &in[0], 4, 4);
        async_copy_commit();
    }
    __syncthreads();
    if (t == 1) {
        record();
        async_copy(&value[1], &in[1], 4, 4);
        async_copy_commit();
        async_copy_wait(0);
        record();
    }
    __syncthreads();
    if (t == 0) async_copy_wait(0);
    __syncthreads();
    if (t == 1) record();
}
TEST(AsyncCopyDeathTest, OnlyTheThreadsOwnWaitCounts) { expect_steps(others_kernel, 64, {"APPP", "ABPP", "ABPP"}, {"PPPP", "PBPP", "ABPP"}); }

// ---- planted faults ------------------------------------------------------------------------------------------------------------
template <Fault Planted>
void expect_nan_at_the_wait() {
    EXPECT_RIGHT_IN(kAtOnce, [] { EXPECT_EQ(run_pipeline<Planted>().count, 0); });   // which is why the mode exists
    for (const char* const seed : {"0", "1"}) {
        EXPECT_RIGHT_IN((Mode{"1", seed}), [] {
            const Wrong wrong = run_pipeline<Planted>();
            EXPECT_GT(wrong.count, 0);
            EXPECT_TRUE(wrong.all_nan);
        });
    }
}
#if !HOSTCUDA_TSAN_BUILD   // there it is a race as well: the data land after the barrier
TEST(AsyncCopyDeathTest, AWaitThatIsTooWeakGivesNan) { expect_nan_at_the_wait<weak_wait>(); }
#endif
TEST(AsyncCopyDeathTest, AMissingWaitGivesNan) { expect_nan_at_the_wait<no_wait>(); }
TEST(AsyncCopyDeathTest, AMissingCommitGivesNan) { expect_nan_at_the_wait<no_commit>(); }

// ThreadSanitizer sees the write at the call, and the one when the data land.
#if HOSTCUDA_TSAN_BUILD
template <Fault Planted>
void expect_race(Mode mode) {
    EXPECT_EXIT(run_in(mode, [] { run_pipeline<Planted>(); }), testing::ExitedWithCode(66), "data race");
}
TEST(AsyncCopyDeathTest, TsanReportsAMissingBarrierAndAWeakWait) {
    for (const Mode mode : {kAtOnce, kAtTheWait}) {
        expect_race<no_barrier>(mode);
        expect_race<reused_too_early>(mode);
    }
    expect_race<weak_wait>(kAtTheWait);
}
#else
template <Fault Planted>
void expect_seeds_to_find() {
    EXPECT_RIGHT_IN((Mode{"0", "1"}), [] { EXPECT_GT(run_pipeline<Planted>().count, 0); });
    EXPECT_RIGHT_IN((Mode{"1", "1"}), [] { EXPECT_GT(run_pipeline<Planted>().count, 0); });
}
TEST(AsyncCopyDeathTest, AScheduleFindsAMissingBarrier) {
    expect_seeds_to_find<no_barrier>();
    expect_seeds_to_find<reused_too_early>();
}
#endif

// ---- stops ---------------------------------------------------------------------------------------------------------------------
enum class To { shared, global };
__global__ void one_copy_kernel(unsigned char* global, To to, unsigned to_offset, To from, unsigned from_offset, unsigned bytes,
                                unsigned source_bytes) {
    SHARED(uint4, tile, 2);
    auto* const shared = reinterpret_cast<unsigned char*>(tile);
    if (threadIdx.x != 3) return;
    async_copy((to == To::shared ? shared : global) + to_offset, (from == To::shared ? shared : global) + from_offset, bytes, source_bytes);
    async_copy_commit();
    async_copy_wait(0);
}
template <class... Args>
void one_copy(Args... args) {
    Device<unsigned char> global(64);
    launch(one_copy_kernel, 1, 32, 0, global.data, args...);
}
constexpr To S = To::shared, G = To::global;

TEST(AsyncCopyDeathTest, Stops) {
    for (const Mode mode : {kAtOnce, kAtTheWait}) {
        SCOPED_TRACE(mode.async);
        EXPECT_RIGHT_IN(mode, [] { one_copy(S, 16u, G, 48u, 16u, 16u); });
        for (const unsigned bytes : {4u, 8u, 16u}) {
            const std::string text = "unaligned vector access: " + std::to_string(bytes) + " bytes at .*" + std::to_string(bytes / 2) +
                                     " past .*one_copy_kernel.*thread \\(3,0,0\\)";
            EXPECT_STOP_IN(mode, text, [=] { one_copy(S, bytes / 2, G, 0u, bytes, bytes); });
            EXPECT_STOP_IN(mode, text, [=] { one_copy(S, 0u, G, bytes / 2, bytes, bytes); });
        }
        EXPECT_STOP_IN(mode, "unaligned vector access: 16 bytes", [] { one_copy(S, 0u, G, 8u, 16u, 0u); });
        EXPECT_STOP_IN(mode, "async_copy of 12 bytes; cp.async copies 4, 8 or 16", [] { one_copy(S, 0u, G, 0u, 12u, 12u); });
        EXPECT_STOP_IN(mode, "async_copy of 8 bytes, 16 of them from the source", [] { one_copy(S, 0u, G, 0u, 8u, 16u); });
        EXPECT_STOP_IN(mode, "async_copy to .*, which is not shared memory .*one_copy_kernel", [] { one_copy(G, 0u, G, 16u, 16u, 16u); });
        EXPECT_STOP_IN(mode, "async_copy is called outside a kernel", [] {
            alignas(16) char values[32] = {};
            async_copy(values, values + 16, 16, 16);
        });
        EXPECT_STOP_IN(mode, "async_copy_commit is called outside a kernel", [] {
            one_copy(S, 0u, G, 0u, 16u, 16u);   // also after one
            async_copy_commit();
        });
        EXPECT_STOP_IN(mode, "async_copy_wait is called outside a kernel", [] { async_copy_wait(0); });
    }
    // This one costs too much where the copy is done at once.
    EXPECT_STOP_IN(kAtTheWait, "async_copy from .*, which is shared memory", [] { one_copy(S, 0u, S, 16u, 16u, 16u); });
}

#if HOSTCUDA_ASAN_BUILD
#define EXPECT_ASAN_IN(mode, text, ...) EXPECT_EXIT(run_in(mode, __VA_ARGS__), testing::ExitedWithCode(1), "AddressSanitizer: .*(\n.*)*" text)
TEST(AsyncCopyDeathTest, AsanSeesCopiesOutOfBounds) {
    for (const Mode mode : {kAtOnce, kAtTheWait}) {
        for (const unsigned source_bytes : {0u, 5u, 16u}) {
            EXPECT_ASAN_IN(mode, "WRITE of size 16", [=] { one_copy(S, 32u, G, 0u, 16u, source_bytes); });
        }
        EXPECT_ASAN_IN(mode, "READ of size 16", [] { one_copy(S, 0u, G, 64u, 16u, 16u); });
        EXPECT_ASAN_IN(mode, "READ of size 1", [] { one_copy(S, 0u, G, 64u, 16u, 5u); });
        EXPECT_RIGHT_IN(mode, [] { one_copy(S, 0u, G, 64u, 16u, 0u); });   // nothing is read
    }
}
#endif

}  // namespace
