// NCCL subset: every collective, type and reduction against a reference in ring order, to the bit; rules and faults.
//
// Under mpirun it runs the cases with that many ranks. Run by itself it starts itself under mpirun, with 1 to 5 ranks and
// with planted faults, and sums up.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <mpi.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

namespace {

int g_rank = 0, g_ranks = 1, g_failures = 0;
ncclComm_t g_comm = nullptr;
cudaStream_t g_stream = nullptr;

#define EXPECT(condition)                                                                                       \
    do {                                                                                                        \
        if (!(condition)) {                                                                                     \
            ++g_failures;                                                                                       \
            fprintf(stderr, "rank %d: %s:%d: %s is false (%s)\n", g_rank, __FILE__, __LINE__, #condition, ncclGetLastError(nullptr)); \
        }                                                                                                       \
    } while (0)
#define OK(call) EXPECT((call) == ncclSuccess)
#define CUDA(call) EXPECT((call) == cudaSuccess)

// ---- types and the reference --------------------------------------------------------------------------------------

template <typename T> struct Type;
template <> struct Type<int8_t> { static constexpr ncclDataType_t nccl = ncclInt8; };
template <> struct Type<uint8_t> { static constexpr ncclDataType_t nccl = ncclUint8; };
template <> struct Type<int32_t> { static constexpr ncclDataType_t nccl = ncclInt32; };
template <> struct Type<uint32_t> { static constexpr ncclDataType_t nccl = ncclUint32; };
template <> struct Type<int64_t> { static constexpr ncclDataType_t nccl = ncclInt64; };
template <> struct Type<uint64_t> { static constexpr ncclDataType_t nccl = ncclUint64; };
template <> struct Type<float> { static constexpr ncclDataType_t nccl = ncclFloat32; };
template <> struct Type<double> { static constexpr ncclDataType_t nccl = ncclFloat64; };
template <> struct Type<__nv_bfloat16> { static constexpr ncclDataType_t nccl = ncclBfloat16; };

template <typename T>
T make(std::mt19937& random) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(std::normal_distribution<float>()(random));
    else if constexpr (std::is_integral_v<T>) return static_cast<T>(static_cast<int>(random() % 11) - (std::is_signed_v<T> ? 5 : 0));
    else return static_cast<T>(std::normal_distribution<T>()(random));
}

// Rank r's data, the same on every rank that asks.
template <typename T>
std::vector<T> data_of(int rank, size_t count, unsigned seed) {
    std::mt19937 random(seed * 1000 + static_cast<unsigned>(rank));
    std::vector<T> v(count);
    for (T& x : v) x = make<T>(random);
    return v;
}

// One hop: `partial` arrives, the rank adds its own value and rounds to the wire type.
template <typename T>
T hop(T partial, T own, ncclRedOp_t op) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        const float a = __bfloat162float(partial), b = __bfloat162float(own);
        return __float2bfloat16_rn(op == ncclProd ? a * b : op == ncclMax ? std::max(a, b) : op == ncclMin ? std::min(a, b) : a + b);
    } else {
        return op == ncclProd ? static_cast<T>(partial * own) : op == ncclMax ? std::max(partial, own) : op == ncclMin ? std::min(partial, own) : static_cast<T>(partial + own);
    }
}
template <typename T>
T scaled(T x, int ranks) {   // what ncclAvg does to a floating-point value before the sum
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(__bfloat162float(x) * __bfloat162float(__float2bfloat16_rn(1.0f / static_cast<float>(ranks))));
    else if constexpr (std::is_integral_v<T>) return x;
    else {
        volatile T product = x * (T(1) / static_cast<T>(ranks));   // rounded before it is added, not fused with the sum
        return product;
    }
}
// Element i of the block of rank `block`: starts at rank block+1, ends at rank block.
template <typename T>
T ring(const std::vector<std::vector<T>>& all, size_t i, int block, ncclRedOp_t op) {
    const int n = static_cast<int>(all.size());
    const auto value = [&](int r) { const T x = all[static_cast<size_t>(r % n)][i]; return op == ncclAvg ? scaled(x, n) : x; };
    T partial = value(block + 1);
    for (int k = 2; k <= n; ++k) partial = hop(partial, value(block + k), op);
    if constexpr (std::is_integral_v<T>)
        if (op == ncclAvg) partial = static_cast<T>(partial / static_cast<T>(n));
    return partial;
}

template <typename T>
struct Buffer {   // device memory
    T* data = nullptr;
    size_t count;
    explicit Buffer(size_t n) : count(n) { CUDA(cudaMalloc(reinterpret_cast<void**>(&data), std::max<size_t>(n, 1) * sizeof(T))); }
    Buffer(const std::vector<T>& v) : Buffer(v.size()) { set(v); }
    ~Buffer() { cudaFree(data); }
    Buffer(const Buffer&) = delete;
    void set(const std::vector<T>& v, size_t at = 0) {
        if (v.empty()) return;
        CUDA(cudaMemcpy(data + at, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
        CUDA(cudaDeviceSynchronize());
    }
    std::vector<T> get() const {
        std::vector<T> v(count);
        if (count) CUDA(cudaMemcpy(v.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
};

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) { return a.size() == b.size() && (a.empty() || memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0); }

template <typename T>
std::vector<std::vector<T>> everyone(size_t count, unsigned seed) {
    std::vector<std::vector<T>> all;
    for (int r = 0; r < g_ranks; ++r) all.push_back(data_of<T>(r, count, seed));
    return all;
}
void sync() { CUDA(cudaStreamSynchronize(g_stream)); }

// ---- collectives --------------------------------------------------------------------------------------------------

template <typename T>
void all_reduce(size_t count, ncclRedOp_t op, bool in_place) {
    const auto all = everyone<T>(count, static_cast<unsigned>(count) + op);
    std::vector<T> want(count);
    const size_t n = static_cast<size_t>(g_ranks), q = count / n, rest = count % n;
    for (size_t block = 0, i = 0; block < n; ++block)
        for (const size_t end = i + q + (block < rest ? 1 : 0); i < end; ++i) want[i] = ring(all, i, static_cast<int>(block), op);
    const auto& mine = all[static_cast<size_t>(g_rank)];
    Buffer<T> send(mine), recv(count);
    OK(ncclAllReduce(send.data, in_place ? send.data : recv.data, count, Type<T>::nccl, op, g_comm, g_stream));
    sync();
    EXPECT(same_bits(in_place ? send.get() : recv.get(), want) || count == 0);
    if (!in_place) EXPECT(same_bits(send.get(), mine));
}

template <typename T>
void reduce_scatter(size_t count, ncclRedOp_t op, bool in_place) {
    const size_t n = static_cast<size_t>(g_ranks), begin = static_cast<size_t>(g_rank) * count;
    const auto all = everyone<T>(count * n, static_cast<unsigned>(count) + 7 + op);
    std::vector<T> want(count);
    for (size_t i = 0; i < count; ++i) want[i] = ring(all, begin + i, g_rank, op);
    const auto& mine = all[static_cast<size_t>(g_rank)];
    Buffer<T> send(mine), recv(count);
    OK(ncclReduceScatter(send.data, in_place ? send.data + begin : recv.data, count, Type<T>::nccl, op, g_comm, g_stream));
    sync();
    if (in_place) {   // the rest of the buffer stays as it was
        std::vector<T> expected = mine;
        std::copy(want.begin(), want.end(), expected.begin() + static_cast<ptrdiff_t>(begin));
        EXPECT(same_bits(send.get(), expected));
    } else {
        EXPECT(same_bits(recv.get(), want) || count == 0);
        EXPECT(same_bits(send.get(), mine));
    }
}

template <typename T>
void reduce(size_t count, ncclRedOp_t op, bool in_place, int root) {
    const auto all = everyone<T>(count, static_cast<unsigned>(count) + 3 + op);
    std::vector<T> want(count);
    for (size_t i = 0; i < count; ++i) want[i] = ring(all, i, root, op);
    const auto& mine = all[static_cast<size_t>(g_rank)];
    Buffer<T> send(mine), recv(count);
    // Ranks other than the root need no receive buffer.
    OK(ncclReduce(send.data, g_rank != root ? nullptr : in_place ? send.data : recv.data, count, Type<T>::nccl, op, root, g_comm, g_stream));
    sync();
    if (g_rank == root) EXPECT(same_bits(in_place ? send.get() : recv.get(), want) || count == 0);
    else EXPECT(same_bits(send.get(), mine));
}

template <typename T>
void all_gather(size_t count, bool in_place) {
    const size_t n = static_cast<size_t>(g_ranks), begin = static_cast<size_t>(g_rank) * count;
    const auto all = everyone<T>(count, static_cast<unsigned>(count) + 5);
    std::vector<T> want;
    for (const auto& v : all) want.insert(want.end(), v.begin(), v.end());
    Buffer<T> send(all[static_cast<size_t>(g_rank)]), recv(count * n);
    if (in_place) recv.set(all[static_cast<size_t>(g_rank)], begin);
    OK(ncclAllGather(in_place ? recv.data + begin : send.data, recv.data, count, Type<T>::nccl, g_comm, g_stream));
    sync();
    EXPECT(same_bits(recv.get(), want) || count == 0);
}

template <typename T>
void broadcast(size_t count, bool in_place, int root) {
    const auto want = data_of<T>(root, count, static_cast<unsigned>(count) + 9);
    Buffer<T> send(data_of<T>(g_rank, count, static_cast<unsigned>(count) + 9)), recv(count);
    // Ranks other than the root need no send buffer.
    OK(ncclBroadcast(in_place ? send.data : g_rank == root ? send.data : nullptr, in_place ? send.data : recv.data, count, Type<T>::nccl, root, g_comm, g_stream));
    sync();
    EXPECT(same_bits(in_place ? send.get() : recv.get(), want) || count == 0);
}

// 50001 elements are several of the short slices that worker() asks for, and no multiple of anything.
const size_t kCounts[] = {0, 1, 3, 17, 1000, 50001};

template <typename T>
void every_collective() {
    constexpr bool all_counts = std::is_same_v<T, float> || std::is_same_v<T, __nv_bfloat16>;
    for (const size_t count : kCounts)
        for (const bool in_place : {false, true}) {
            if (!all_counts && count != 17 && (count != 50001 || in_place)) continue;
            for (const ncclRedOp_t op : {ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg}) {
                if (count != 17 && op != ncclSum && op != ncclAvg) continue;
                all_reduce<T>(count, op, in_place);
                reduce_scatter<T>(count, op, in_place);
                reduce<T>(count, op, in_place, g_ranks - 1);
            }
            all_gather<T>(count, in_place);
            broadcast<T>(count, in_place, g_ranks / 2);
        }
}

void large() {   // slices of the usual length
    all_reduce<__nv_bfloat16>(4500003, ncclSum, false);
    reduce_scatter<__nv_bfloat16>(2200003, ncclSum, true);
    all_gather<__nv_bfloat16>(2200003, true);
}

void order_of_additions() {
    // 1 + 2^-8 rounds to 1 in bf16, so the order shows: with rank 0 holding 1 and the others 2^-8, the block that starts
    // at rank 0 (the last rank's) loses all the small ones, the block of rank 0 adds them up first.
    if (g_ranks < 3) return;
    const size_t n = static_cast<size_t>(g_ranks);
    Buffer<__nv_bfloat16> send(std::vector<__nv_bfloat16>(n, __float2bfloat16_rn(g_rank == 0 ? 1.0f : 0x1p-8f))), recv(1);
    OK(ncclReduceScatter(send.data, recv.data, 1, ncclBfloat16, ncclSum, g_comm, g_stream));
    sync();
    const float got = __bfloat162float(recv.get()[0]);
    if (g_rank == 0) EXPECT(got == __bfloat162float(__float2bfloat16_rn(1.0f + static_cast<float>(g_ranks - 1) * 0x1p-8f)));
    if (g_rank == g_ranks - 1) EXPECT(got == 1.0f);
}

void messages() {
    for (const size_t count : {size_t{1}, size_t{1000}, size_t{700001}}) {
        // Round the ring both ways at once, and one to myself.
        const int next = (g_rank + 1) % g_ranks, before = (g_rank + g_ranks - 1) % g_ranks;
        const auto mine = data_of<float>(g_rank, count, 21);
        Buffer<float> send(mine), from_before(count), from_next(count), from_me(count);
        OK(ncclGroupStart());
        OK(ncclSend(send.data, count, ncclFloat32, next, g_comm, g_stream));
        OK(ncclSend(send.data, count, ncclFloat32, before, g_comm, g_stream));
        OK(ncclRecv(from_before.data, count, ncclFloat32, before, g_comm, g_stream));
        OK(ncclRecv(from_next.data, count, ncclFloat32, next, g_comm, g_stream));
        OK(ncclSend(send.data, count, ncclFloat32, g_rank, g_comm, g_stream));
        OK(ncclRecv(from_me.data, count, ncclFloat32, g_rank, g_comm, g_stream));
        OK(ncclGroupEnd());
        sync();
        EXPECT(same_bits(from_before.get(), data_of<float>(before, count, 21)));
        EXPECT(same_bits(from_next.get(), data_of<float>(next, count, 21)));
        EXPECT(same_bits(from_me.get(), mine));
    }
    // Unequal lengths to everybody, and no group: from rank 0 on.
    for (int to = 1; to < g_ranks; ++to) {
        const size_t count = static_cast<size_t>(to) * 200000;
        const auto want = data_of<uint8_t>(0, count, 22);
        if (g_rank == 0) {
            Buffer<uint8_t> send(want);
            OK(ncclSend(send.data, count, ncclUint8, to, g_comm, g_stream));
            sync();
        } else if (g_rank == to) {
            Buffer<uint8_t> recv(count);
            OK(ncclRecv(recv.data, count, ncclUint8, 0, g_comm, g_stream));
            sync();
            EXPECT(same_bits(recv.get(), want));
        }
    }
}

void groups() {
    const size_t n = static_cast<size_t>(g_ranks), count = 1001;
    const auto all = everyone<float>(count * n, 31);
    Buffer<float> send(all[static_cast<size_t>(g_rank)]), scattered(count), gathered(count * n), summed(count * n), moved(count), received(count);
    moved.set(data_of<float>(g_rank, count, 33));
    OK(ncclGroupStart());
    OK(ncclReduceScatter(send.data, scattered.data, count, ncclFloat32, ncclSum, g_comm, g_stream));
    OK(ncclGroupStart());   // nested: nothing happens at the inner end
    OK(ncclSend(moved.data, count, ncclFloat32, (g_rank + 1) % g_ranks, g_comm, g_stream));
    OK(ncclAllReduce(send.data, summed.data, count * n, ncclFloat32, ncclSum, g_comm, g_stream));
    OK(ncclGroupEnd());
    OK(ncclRecv(received.data, count, ncclFloat32, (g_rank + g_ranks - 1) % g_ranks, g_comm, g_stream));
    OK(ncclGroupEnd());
    OK(ncclAllGather(scattered.data, gathered.data, count, ncclFloat32, g_comm, g_stream));
    sync();
    // A reduce-scatter and an all-gather are an all-reduce, to the bit: the blocks are the same.
    EXPECT(same_bits(gathered.get(), summed.get()));
    EXPECT(same_bits(received.get(), data_of<float>((g_rank + g_ranks - 1) % g_ranks, count, 33)));

    // A wrong call spoils its group: reported at the call and at the end, and nothing is done.
    const auto before = summed.get();
    OK(ncclGroupStart());
    OK(ncclAllReduce(send.data, summed.data, count, ncclFloat32, ncclMax, g_comm, g_stream));
    EXPECT(ncclAllReduce(nullptr, summed.data, count, ncclFloat32, ncclSum, g_comm, g_stream) == ncclInvalidArgument);
    EXPECT(ncclGroupEnd() == ncclInvalidArgument);
    sync();
    EXPECT(same_bits(summed.get(), before));
    EXPECT(ncclGroupEnd() == ncclInvalidUsage);
    OK(ncclGroupStart());
    OK(ncclGroupEnd());
}

ncclComm_t make_comm(int ranks, int rank, int maker) {   // maker: world rank that makes the id
    ncclUniqueId id;
    if (g_rank == maker) OK(ncclGetUniqueId(&id));
    MPI_Bcast(&id, sizeof(id), MPI_BYTE, maker, MPI_COMM_WORLD);
    ncclComm_t comm = nullptr;
    if (rank >= 0) OK(ncclCommInitRank(&comm, ranks, id, rank));
    return comm;
}

void two_communicators() {
    ncclComm_t second = make_comm(g_ranks, g_ranks - 1 - g_rank, 0);   // ranks the other way round
    cudaStream_t other;
    CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    int rank = -1, count = -1, device = -1;
    OK(ncclCommUserRank(second, &rank));
    OK(ncclCommCount(second, &count));
    OK(ncclCommCuDevice(second, &device));
    EXPECT(rank == g_ranks - 1 - g_rank && count == g_ranks && device == 0);
    const size_t length = 200001;
    const auto mine = data_of<int32_t>(g_rank, length, 41);
    std::vector<int32_t> sum(length, 0);
    for (const auto& v : everyone<int32_t>(length, 41))
        for (size_t i = 0; i < length; ++i) sum[i] += v[i];
    Buffer<int32_t> a(mine), b(mine), a_out(length), b_out(length);
    for (int repeat = 0; repeat < 4; ++repeat) {
        OK(ncclAllReduce(a.data, a_out.data, length, ncclInt32, ncclSum, g_comm, g_stream));
        OK(ncclAllReduce(b.data, b_out.data, length, ncclInt32, ncclSum, second, other));
        // The same communicator on the other stream, behind an event.
        cudaEvent_t event;
        CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
        CUDA(cudaEventRecord(event, g_stream));
        CUDA(cudaStreamWaitEvent(other, event, 0));
        OK(ncclBroadcast(a_out.data, a_out.data, length, ncclInt32, 0, g_comm, other));
        CUDA(cudaStreamSynchronize(other));
        CUDA(cudaEventDestroy(event));
        EXPECT(same_bits(a_out.get(), sum));
        EXPECT(same_bits(b_out.get(), sum));
    }
    // A group over both, named in different orders.
    OK(ncclGroupStart());
    const auto one = [&] { OK(ncclAllReduce(a.data, a_out.data, length, ncclInt32, ncclMax, g_comm, g_stream)); };
    const auto two = [&] { OK(ncclAllReduce(b.data, b_out.data, length, ncclInt32, ncclMax, second, other)); };
    if (g_rank % 2) two(), one();
    else one(), two();
    OK(ncclGroupEnd());
    sync();
    CUDA(cudaStreamSynchronize(other));
    EXPECT(same_bits(a_out.get(), b_out.get()));
    OK(ncclCommFinalize(second));
    OK(ncclCommDestroy(second));
    EXPECT(ncclCommDestroy(second) == ncclInvalidArgument);
    EXPECT(ncclAllReduce(b.data, b_out.data, 1, ncclInt32, ncclSum, second, other) == ncclInvalidArgument);
    CUDA(cudaStreamDestroy(other));
}

void part_of_the_world() {   // even and odd ranks, each their own communicator
    const int color = g_rank % 2, size = (g_ranks + 1 - color) / 2;
    ncclComm_t even = make_comm((g_ranks + 1) / 2, color == 0 ? g_rank / 2 : -1, 0);
    ncclComm_t odd = g_ranks > 1 ? make_comm(g_ranks / 2, color == 1 ? g_rank / 2 : -1, 1) : nullptr;
    ncclComm_t mine = color ? odd : even;
    Buffer<int32_t> value(std::vector<int32_t>{g_rank}), out(static_cast<size_t>(size));
    OK(ncclAllGather(value.data, out.data, 1, ncclInt32, mine, g_stream));
    sync();
    const auto got = out.get();
    for (int i = 0; i < size; ++i) EXPECT(got[static_cast<size_t>(i)] == 2 * i + color);
    OK(ncclCommDestroy(mine));
}

void refusals() {
    const size_t n = static_cast<size_t>(g_ranks);
    Buffer<float> buffer(100 * n + 100);
    float* const d = buffer.data;
    std::vector<float> host(100 * n + 100);
    const auto wrong = [](ncclResult_t result) { return result == ncclInvalidArgument; };
    EXPECT(wrong(ncclAllReduce(nullptr, d, 10, ncclFloat32, ncclSum, g_comm, g_stream)));
    EXPECT(wrong(ncclAllReduce(d, nullptr, 10, ncclFloat32, ncclSum, g_comm, g_stream)));
    EXPECT(wrong(ncclAllReduce(d, d, 10, ncclFloat32, ncclSum, nullptr, g_stream)));
    EXPECT(wrong(ncclAllReduce(d, d, static_cast<size_t>(-1), ncclFloat32, ncclSum, g_comm, g_stream)));
    EXPECT(wrong(ncclAllReduce(d, d, 10, static_cast<ncclDataType_t>(99), ncclSum, g_comm, g_stream)));
    EXPECT(wrong(ncclAllReduce(d, d, 10, ncclFloat16, ncclSum, g_comm, g_stream)));
    EXPECT(wrong(ncclAllReduce(d, d, 10, ncclFloat32, static_cast<ncclRedOp_t>(17), g_comm, g_stream)));
    EXPECT(wrong(ncclAllReduce(d, d + 1, 10, ncclFloat32, ncclSum, g_comm, g_stream)));   // overlap
    EXPECT(wrong(ncclAllReduce(host.data(), d, 10, ncclFloat32, ncclSum, g_comm, g_stream)));
    EXPECT(wrong(ncclAllReduce(d, host.data(), 10, ncclFloat32, ncclSum, g_comm, g_stream)));
    EXPECT(wrong(ncclBroadcast(d, d, 10, ncclFloat32, g_ranks, g_comm, g_stream)));
    EXPECT(wrong(ncclBroadcast(d, d, 10, ncclFloat32, -1, g_comm, g_stream)));
    EXPECT(wrong(ncclReduce(d, d, 10, ncclFloat32, ncclSum, g_ranks, g_comm, g_stream)));
    EXPECT(wrong(ncclSend(d, 10, ncclFloat32, g_ranks, g_comm, g_stream)));
    EXPECT(wrong(ncclRecv(nullptr, 10, ncclFloat32, 0, g_comm, g_stream)));
    EXPECT(wrong(ncclReduceScatter(d, d + 100 * g_rank + 1, 100, ncclFloat32, ncclSum, g_comm, g_stream)));   // not quite in place
    EXPECT(wrong(ncclAllGather(d + 100 * g_rank + 1, d, 100, ncclFloat32, g_comm, g_stream)));
    EXPECT(wrong(ncclReduceScatter(d, d + 100 * g_rank, 1000, ncclFloat32, ncclSum, g_comm, g_stream)));      // past the end
    OK(ncclAllReduce(nullptr, nullptr, 0, ncclFloat32, ncclSum, g_comm, g_stream));
    ncclComm_t comm = g_comm;
    ncclUniqueId id{};
    EXPECT(wrong(ncclCommInitRank(&comm, g_ranks, id, g_rank)));   // an id that nobody made
    EXPECT(comm == nullptr);
    OK(ncclGetUniqueId(&id));
    EXPECT(wrong(ncclCommInitRank(&comm, g_ranks, id, g_ranks)));
    EXPECT(wrong(ncclCommInitRank(&comm, 0, id, 0)));
    EXPECT(ncclCommInitRank(&comm, g_ranks + 1, id, 0) == ncclInvalidUsage);
    EXPECT(wrong(ncclGetUniqueId(nullptr)));
    EXPECT(wrong(ncclCommCount(g_comm, nullptr)));
    int version = 0;
    OK(ncclGetVersion(&version));
    EXPECT(version == NCCL_VERSION_CODE);
    ncclResult_t async = ncclInternalError;
    OK(ncclCommGetAsyncError(g_comm, &async));
    EXPECT(async == ncclSuccess);
    EXPECT(std::string(ncclGetErrorString(ncclInvalidUsage)) == "invalid usage");
}

void abort_unblocks() {   // rank 0 waits for ranks that never come
    ncclComm_t comm = make_comm(g_ranks, g_rank, 0);
    if (g_ranks > 1 && g_rank == 0) {
        Buffer<float> buffer(1000);
        std::atomic<bool> left{false};
        std::thread waiter([&] {
            const ncclResult_t result = ncclAllReduce(buffer.data, buffer.data, 1000, ncclFloat32, ncclSum, comm, g_stream);
            if (!getenv("HOSTCUDA_ASYNC")) EXPECT(result != ncclSuccess);
            left = true;
        });
        usleep(200000);
        if (!getenv("HOSTCUDA_ASYNC")) EXPECT(!left);
        OK(ncclCommAbort(comm));
        waiter.join();
        sync();
    } else {
        OK(ncclCommAbort(comm));
    }
    MPI_Barrier(MPI_COMM_WORLD);
}

struct Case { const char* name; void (*run)(); };
const Case kCases[] = {
    {"every collective, int8", every_collective<int8_t>},     {"every collective, uint8", every_collective<uint8_t>},
    {"every collective, int32", every_collective<int32_t>},   {"every collective, uint32", every_collective<uint32_t>},
    {"every collective, int64", every_collective<int64_t>},   {"every collective, uint64", every_collective<uint64_t>},
    {"every collective, float32", every_collective<float>},   {"every collective, float64", every_collective<double>},
    {"every collective, bfloat16", every_collective<__nv_bfloat16>},
    {"order of additions", order_of_additions},
    {"sends and receives", messages},
    {"groups", groups},
    {"two communicators on two streams", two_communicators},
    {"part of the world", part_of_the_world},
    {"refusals", refusals},
    {"abort unblocks", abort_unblocks},
};
const Case kLargeCases[] = {{"buffers of several megabytes", large}};

// ---- planted faults, one a run ------------------------------------------------------------------------------------

void fault(const std::string& name) {
    Buffer<float> a(4000), b(4000 * static_cast<size_t>(g_ranks));
    const bool odd = g_rank == 1;
    if (name == "count") {
        (void)ncclAllReduce(a.data, a.data, odd ? 3001 : 3000, ncclFloat32, ncclSum, g_comm, g_stream);
    } else if (name == "type") {
        (void)ncclAllReduce(a.data, a.data, 1000, odd ? ncclInt32 : ncclFloat32, ncclSum, g_comm, g_stream);
    } else if (name == "op") {
        (void)ncclAllReduce(a.data, a.data, 3000, ncclFloat32, odd ? ncclMax : ncclSum, g_comm, g_stream);
    } else if (name == "root") {
        (void)ncclBroadcast(a.data, a.data, 1000, ncclFloat32, odd ? 1 : 0, g_comm, g_stream);
    } else if (name == "collective") {
        if (odd) (void)ncclAllGather(a.data, b.data, 1000, ncclFloat32, g_comm, g_stream);
        else (void)ncclReduceScatter(b.data, a.data, 1000, ncclFloat32, ncclSum, g_comm, g_stream);
    } else if (name == "skipped") {   // rank 1 leaves out the first of two calls
        if (!odd) (void)ncclAllReduce(a.data, a.data, 1000, ncclFloat32, ncclSum, g_comm, g_stream);
        (void)ncclAllGather(a.data, b.data, 1000, ncclFloat32, g_comm, g_stream);
    } else if (name == "message") {
        if (odd) (void)ncclRecv(a.data, 999, ncclFloat32, 0, g_comm, g_stream);
        else if (g_rank == 0) (void)ncclSend(a.data, 1000, ncclFloat32, 1, g_comm, g_stream);
    }
    sync();
}

int worker(int argc, char** argv) {
    const std::string planted = argc > 2 ? argv[2] : "";
    int level = 0;
    if (planted.empty()) setenv("NCCL_MPI_SLICE_BYTES", "16384", 0);
    MPI_Init_thread(&argc, &argv, planted == "threads" ? MPI_THREAD_FUNNELED : MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &g_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &g_ranks);
    if (planted == "threads") {
        ncclUniqueId id;
        const ncclResult_t result = ncclGetUniqueId(&id);
        printf("result %d: %s\n", static_cast<int>(result), ncclGetLastError(nullptr));
        MPI_Finalize();
        return result == ncclInvalidUsage ? 3 : 0;
    }
    CUDA(cudaStreamCreateWithFlags(&g_stream, cudaStreamNonBlocking));
    g_comm = make_comm(g_ranks, g_rank, 0);
    int passed = 0, failed = 0;
    if (!planted.empty() && planted != "large") {
        fault(planted);
        printf("rank %d went on\n", g_rank);
    } else {
        for (const Case& c : planted.empty() ? std::vector<Case>(std::begin(kCases), std::end(kCases)) : std::vector<Case>(std::begin(kLargeCases), std::end(kLargeCases))) {
            g_failures = 0;
            const auto start = std::chrono::steady_clock::now();
            c.run();
            int worst = 0;
            MPI_Allreduce(&g_failures, &worst, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
            (worst ? failed : passed)++;
            if (g_rank == 0) {
                printf("%s  %d ranks: %s (%.2f s)\n", worst ? "FAILED" : "ok    ", g_ranks, c.name, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
                fflush(stdout);
            }
        }
    }
    (void)ncclCommDestroy(g_comm);
    CUDA(cudaStreamDestroy(g_stream));
    MPI_Finalize();
    if (passed + failed > 0 && g_rank == 0) printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}

// ---- the run that starts the others -------------------------------------------------------------------------------

struct Outcome { int status; std::string text; };

Outcome run(const std::string& self, int ranks, const std::string& arguments) {
    const std::string command = "timeout -k 5 240 mpirun --allow-run-as-root --oversubscribe -np " + std::to_string(ranks) + " '" + self + "' --worker " + arguments + " 2>&1";
    FILE* pipe = popen(command.c_str(), "r");
    if (!pipe) return {-1, "popen failed"};
    Outcome out{0, ""};
    char line[4096];
    while (fgets(line, sizeof(line), pipe)) out.text += line;
    const int status = pclose(pipe);
    out.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return out;
}

}  // namespace

int main(int argc, char** argv) {
    if (getenv("OMPI_COMM_WORLD_SIZE") || (argc > 1 && strcmp(argv[1], "--worker") == 0)) return worker(argc, argv);
    char path[4096];
    const ssize_t length = readlink("/proc/self/exe", path, sizeof(path) - 1);
    if (length <= 0) return 1;
    const std::string self(path, static_cast<size_t>(length));
    int passed = 0, failed = 0;
    const struct { int ranks; const char* arguments; } runs[] = {{1, ""}, {2, ""}, {3, ""}, {4, ""}, {5, ""}, {2, "large"}};
    for (const auto& r : runs) {
        const Outcome out = run(self, r.ranks, r.arguments);
        fputs(out.text.c_str(), stdout);
        int good = 0, bad = 0;
        const size_t at = out.text.rfind(" passed, "), line = at == std::string::npos ? at : out.text.rfind('\n', at);
        if (line == std::string::npos || sscanf(out.text.c_str() + line + 1, "%d passed, %d failed", &good, &bad) != 2 || (out.status != 0 && bad == 0)) {
            printf("FAILED  %d ranks ended with status %d\n", r.ranks, out.status);
            ++bad;
        }
        passed += good;
        failed += bad;
        fflush(stdout);
    }
    const struct { const char* name; const char* message; } faults[] = {
        {"count", "ncclAllReduce(count 3000, float32, sum)"}, {"type", "ncclAllReduce(count 1000, int32, sum)"}, {"op", "float32, max)"}, {"root", "root 1"},
        {"collective", "ncclAllGather(count 1000, float32)"}, {"skipped", "collective call 1 of this communicator differs between ranks"},
        {"message", "both sides must give the same count"}, {"threads", "MPI_THREAD_MULTIPLE"}};
    for (const auto& f : faults) {
        const Outcome out = run(self, f.name == std::string("threads") ? 1 : 2, f.name);
        const bool found = out.text.find(f.message) != std::string::npos;
        // 124 is the time limit: a hang is what must not happen.
        const bool good = out.status != 0 && out.status != 124 && out.status != 137 && found;
        (good ? passed : failed)++;
        printf("%s  fault found: %s\n", good ? "ok    " : "FAILED", f.name);
        if (!good) printf("status %d\n%s", out.status, out.text.c_str());
        fflush(stdout);
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
