// NCCL's collectives and point-to-point calls over MPI messages, staged through host memory.
//
// The same file serves hostcuda and, for testing several ranks on one GPU, a GPU build: it uses the public CUDA runtime
// only, and nccl.h is hostcuda's or NVIDIA's. One rank is one MPI process.
//
// Results have the bits of NCCL's ring: the block of rank r starts as rank r+1's values and takes up ranks r+2, ..., r,
// rounded to the wire type at each of the n-1 hops. The messages do not travel in a ring, though: each rank gets the
// other ranks' parts of its block directly and adds them in that order. This moves as many bytes and waits for the
// other ranks once instead of n-1 times, which matters where ranks share cores. AllReduce is a reduce-scatter of n equal
// blocks (the first count % n are one element longer) and an all-gather; Reduce gives one block, the root's.
//
// Large buffers go in slices, so that staging stays small and in the cache. Every message starts with a header that
// says which call, with which arguments, it belongs to. Ranks that make different calls get a stop that names both
// instead of a hang or wrong numbers; only a call that another rank never makes has to wait for it, as with NCCL.
//
// Stream order: on hostcuda a call is a piece of work on its stream. On a GPU the calling thread waits for the stream
// and then does the work itself: CUDA may run host functions of several streams on one thread, where two
// communicators could block one another.
#define OMPI_SKIP_MPICXX 1   // the C interface only
#define MPICH_SKIP_MPICXX 1
#include <cuda_runtime.h>
#include <mpi.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include <unistd.h>

#ifdef HOSTCUDA_NCCL
#include "hostcuda/internal.h"
#endif

#if defined(__SANITIZE_THREAD__)
#define NCCL_MPI_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define NCCL_MPI_TSAN 1
#endif
#endif
#ifdef NCCL_MPI_TSAN
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace {

// Round each MPI call. A thread in MPI_Test also delivers the messages of other threads, in their buffers, and
// ThreadSanitizer does not see how MPI tells them: in its builds it looks away.
struct InMpi {
#ifdef NCCL_MPI_TSAN
    InMpi() {
        AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
        AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    }
    ~InMpi() {
        AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
        AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
    }
#else
    InMpi() {}
    ~InMpi() {}
#endif
    InMpi(const InMpi&) = delete;
};

constexpr size_t kHeaderBytes = 64;             // keeps what follows aligned for vector loads
// A slice of one rank's block goes in one message: kStagingBytes / ranks, within these limits. Where ranks share cores
// each exchange costs a few changes of process, so slices are as long as staging of 2 * kStagingBytes allows: with 2
// ranks on 2 busy cores 25 MB took 25 ms in slices of 4 MiB and 144 ms in slices of 512 KiB.
constexpr size_t kStagingBytes = 8 << 20;
constexpr size_t kMinSliceBytes = 64 << 10;
// An all-reduce up to this size sends everything to everybody, one exchange instead of two.
constexpr size_t kSmallAllReduceBytes = 8 << 10;
constexpr int kYields = 2000;                   // tries before a waiting rank starts to sleep between them
constexpr int kSleepMicroseconds = 20;
constexpr auto kInitTimeout = std::chrono::minutes(5);
constexpr auto kSlow = std::chrono::seconds(60);   // a longer wait is reported once

// ---- errors -------------------------------------------------------------------------------------------------------

thread_local std::string last_error;

ncclResult_t error(ncclResult_t result, const char* format, ...) __attribute__((format(printf, 2, 3)));
ncclResult_t error(ncclResult_t result, const char* format, ...) {
    char text[512];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    last_error = text;
    return result;
}

[[noreturn]] void stop(const std::string& text) {
    fprintf(stderr, "nccl: %s\n", text.c_str());
    fflush(stderr);
    abort();   // mpirun ends the other ranks
}

// ---- types --------------------------------------------------------------------------------------------------------

struct TypeInfo { size_t bytes; const char* name; };

TypeInfo type_info(ncclDataType_t type) {
    switch (static_cast<int>(type)) {
        case ncclInt8: return {1, "int8"};
        case ncclUint8: return {1, "uint8"};
        case ncclInt32: return {4, "int32"};
        case ncclUint32: return {4, "uint32"};
        case ncclInt64: return {8, "int64"};
        case ncclUint64: return {8, "uint64"};
        case ncclFloat16: return {2, "float16"};
        case ncclFloat32: return {4, "float32"};
        case ncclFloat64: return {8, "float64"};
        case ncclBfloat16: return {2, "bfloat16"};
        default: return {0, "unknown type"};
    }
}

const char* op_name(int op) {
    constexpr const char* names[] = {"sum", "prod", "max", "min", "avg"};
    return op >= 0 && op < 5 ? names[op] : "unknown op";
}

// bf16 with its own conversions, so that they are the same in every build.
struct Bf16 {
    uint16_t bits;
    using Wide = float;
    float wide() const {
        const uint32_t u = static_cast<uint32_t>(bits) << 16;
        float f;
        memcpy(&f, &u, 4);
        return f;
    }
    static Bf16 narrow(float f) {   // to nearest, ties to even
        uint32_t u;
        memcpy(&u, &f, 4);
        const uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
        return {static_cast<uint16_t>((u & 0x7fffffff) > 0x7f800000 ? 0x7fff : rounded)};
    }
};
// Signed integers wrap as they do on a GPU, so they are summed as unsigned ones.
template <typename T>
struct Plain {
    T value;
    using Wide = T;
    T wide() const { return value; }
    static Plain narrow(T x) { return {x}; }
};

template <int Op, typename Wide>
Wide combine(Wide a, Wide b) {
    if constexpr (Op == ncclMax) return a < b ? b : a;
    else if constexpr (Op == ncclMin) return b < a ? b : a;
    else if constexpr (std::is_integral_v<Wide>) {
        using U = std::conditional_t<sizeof(Wide) <= 4, uint32_t, uint64_t>;
        if constexpr (Op == ncclProd) return static_cast<Wide>(static_cast<U>(a) * static_cast<U>(b));
        else return static_cast<Wide>(static_cast<U>(a) + static_cast<U>(b));
    } else {
        if constexpr (Op == ncclProd) return a * b;
        else return a + b;
    }
}

// out = parts[0] op parts[1] op ..., rounded to T at each step. avg: as NCCL does, floating-point parts are multiplied by
// 1/n, both in T, before the sum; integer sums are divided after it.
template <typename T, int Op>
void reduce_parts(char* out_bytes, const char* const* parts, int n, size_t count) {
    using Wide = typename T::Wide;
    constexpr size_t kTile = 512;   // stays in the first-level cache while the parts pass over it
    constexpr bool scale = Op == ncclAvg && !std::is_integral_v<Wide>;
    const Wide factor = scale ? T::narrow(Wide(1) / static_cast<Wide>(n)).wide() : Wide(1);
    T* out = reinterpret_cast<T*>(out_bytes);
    T tile[kTile];
    [[maybe_unused]] T scaled[scale ? kTile : 1];
    for (size_t begin = 0; begin < count; begin += kTile) {
        const size_t length = std::min(kTile, count - begin);
        const T* first = reinterpret_cast<const T*>(parts[0]) + begin;
        for (size_t i = 0; i < length; ++i) tile[i] = scale ? T::narrow(first[i].wide() * factor) : first[i];
        for (int part = 1; part < n; ++part) {
            const T* next = reinterpret_cast<const T*>(parts[part]) + begin;
            if constexpr (scale) {
                // A loop of its own: in one expression with the sum, the compiler would make it a fused multiply-add.
                for (size_t i = 0; i < length; ++i) scaled[i] = T::narrow(next[i].wide() * factor);
                asm volatile("" : : "r"(scaled) : "memory");
                next = scaled;
            }
            for (size_t i = 0; i < length; ++i) tile[i] = T::narrow(combine<Op>(tile[i].wide(), next[i].wide()));
        }
        if constexpr (Op == ncclAvg && std::is_integral_v<Wide>)
            for (size_t i = 0; i < length; ++i) tile[i] = T::narrow(static_cast<Wide>(tile[i].wide() / static_cast<Wide>(n)));
        memcpy(out + begin, tile, length * sizeof(T));
    }
}

template <typename T>
void reduce_parts(int op, char* out, const char* const* parts, int n, size_t count) {
    switch (op) {
        case ncclSum: return reduce_parts<T, ncclSum>(out, parts, n, count);
        case ncclProd: return reduce_parts<T, ncclProd>(out, parts, n, count);
        case ncclMax: return reduce_parts<T, ncclMax>(out, parts, n, count);
        case ncclMin: return reduce_parts<T, ncclMin>(out, parts, n, count);
        default: return reduce_parts<T, ncclAvg>(out, parts, n, count);
    }
}

void reduce_parts(ncclDataType_t type, int op, char* out, const char* const* parts, int n, size_t count) {
    switch (type) {
        case ncclInt8: return reduce_parts<Plain<int8_t>>(op, out, parts, n, count);
        case ncclUint8: return reduce_parts<Plain<uint8_t>>(op, out, parts, n, count);
        case ncclInt32: return reduce_parts<Plain<int32_t>>(op, out, parts, n, count);
        case ncclUint32: return reduce_parts<Plain<uint32_t>>(op, out, parts, n, count);
        case ncclInt64: return reduce_parts<Plain<int64_t>>(op, out, parts, n, count);
        case ncclUint64: return reduce_parts<Plain<uint64_t>>(op, out, parts, n, count);
        case ncclFloat32: return reduce_parts<Plain<float>>(op, out, parts, n, count);
        case ncclFloat64: return reduce_parts<Plain<double>>(op, out, parts, n, count);
        default: return reduce_parts<Bf16>(op, out, parts, n, count);
    }
}

bool reducible(ncclDataType_t type) { return type_info(type).bytes != 0 && type != ncclFloat16; }

// ---- communicators ------------------------------------------------------------------------------------------------

struct State {
    MPI_Comm mpi = MPI_COMM_NULL;
    int rank = 0, ranks = 1, device = 0;
    uint64_t id = 0;
    size_t slice_bytes = kMinSliceBytes;
    int tag_span = 1 << 14;   // collectives use tags below it, point-to-point the ones above
    // Counted when a call is issued, so that calls keep their identity however streams run them.
    std::atomic<uint32_t> collectives{0};
    std::mutex peers_mutex;
    std::map<int, uint32_t> sends, receives;

    std::atomic<bool> aborted{false};
    std::atomic<int> async_error{ncclSuccess};
    std::mutex mutex;
    std::condition_variable idle;
    int running = 0;
    std::vector<std::pair<char*, size_t>> buffers;   // staging that is not in use

    ~State() {
        for (const auto& b : buffers) operator delete(b.first, std::align_val_t{64});
    }
    void started() {
        const std::lock_guard<std::mutex> lock(mutex);
        ++running;
    }
    void finished() {
        const std::lock_guard<std::mutex> lock(mutex);
        if (--running == 0) idle.notify_all();
    }
    void wait_idle() {
        std::unique_lock<std::mutex> lock(mutex);
        idle.wait(lock, [this] { return running == 0; });
    }
};

// Staging for one call: a row of slots, each a header and a slice. Slots are never shorter than a slice, so that the
// message of a different call, which its header gives away, always fits.
class Slots {
public:
    Slots(State& state, size_t count) : state_(state), stride_(kHeaderBytes + state.slice_bytes), bytes_(count * stride_) {
        const std::lock_guard<std::mutex> lock(state.mutex);
        for (size_t i = 0; i < state.buffers.size(); ++i)
            if (state.buffers[i].second >= bytes_) {
                data_ = state.buffers[i].first;
                bytes_ = state.buffers[i].second;
                state.buffers.erase(state.buffers.begin() + static_cast<ptrdiff_t>(i));
                return;
            }
        data_ = static_cast<char*>(operator new(bytes_, std::align_val_t{64}));
    }
    ~Slots() {
        if (lost_) return;
        const std::lock_guard<std::mutex> lock(state_.mutex);
        state_.buffers.emplace_back(data_, bytes_);
    }
    Slots(const Slots&) = delete;
    Slots& operator=(const Slots&) = delete;
    char* header(size_t i) const { return data_ + i * stride_; }
    char* payload(size_t i) const { return header(i) + kHeaderBytes; }
    void lose() { lost_ = true; }   // messages that were given up may still arrive here

private:
    State& state_;
    size_t stride_, bytes_;
    char* data_ = nullptr;
    bool lost_ = false;
};

// ---- calls --------------------------------------------------------------------------------------------------------

enum class Kind : int32_t { all_reduce, reduce_scatter, all_gather, broadcast, reduce, send, recv };

const char* kind_name(Kind kind) {
    constexpr const char* names[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast", "ncclReduce", "ncclSend", "ncclRecv"};
    const int i = static_cast<int>(kind);
    return i >= 0 && i < 7 ? names[i] : "an unknown call";
}
bool point_to_point(Kind kind) { return kind == Kind::send || kind == Kind::recv; }

struct Call {
    Kind kind;
    std::shared_ptr<State> comm;
    const char* send;
    char* recv;
    size_t count;
    ncclDataType_t type;
    int op, root;          // root: the peer of a send or receive
    cudaStream_t stream;
    uint32_t sequence;     // the how-manieth collective of the communicator, or message to or from the peer
};

struct Header {
    uint32_t magic;
    Kind kind;
    int32_t type, op, root, sender;
    uint32_t sequence, slice, phase;
    uint64_t count;
};
static_assert(sizeof(Header) <= kHeaderBytes && std::is_trivially_copyable_v<Header>);
constexpr uint32_t kHeaderMagic = 0x4c43434e;

Header make_header(const Call& call, uint32_t slice, uint32_t phase) {
    Header h{};
    h.magic = kHeaderMagic;
    h.kind = call.kind;
    h.type = call.type;
    h.op = call.op;
    h.root = call.root;
    h.sender = call.comm->rank;
    h.sequence = call.sequence;
    h.slice = slice;
    h.phase = phase;
    h.count = call.count;
    return h;
}

std::string describe(Kind kind, uint64_t count, int type, int op, int root) {
    std::string text = std::string(kind_name(kind)) + "(count " + std::to_string(count) + ", " + type_info(static_cast<ncclDataType_t>(type)).name;
    if (kind == Kind::all_reduce || kind == Kind::reduce_scatter || kind == Kind::reduce) text += std::string(", ") + op_name(op);
    if (kind == Kind::broadcast || kind == Kind::reduce) text += ", root " + std::to_string(root);
    if (kind == Kind::send) text += ", to " + std::to_string(root);
    if (kind == Kind::recv) text += ", from " + std::to_string(root);
    return text + ")";
}
std::string describe(const Call& call) { return describe(call.kind, call.count, call.type, call.op, call.root); }

// What came from a peer must belong to the same call.
void check_header(const Call& call, const char* message, size_t bytes, uint32_t slice, uint32_t phase, int peer, size_t payload) {
    Header h{};
    if (bytes >= kHeaderBytes) memcpy(&h, message, sizeof(h));
    bool same = h.magic == kHeaderMagic && h.slice == slice && h.phase == phase;
    if (call.kind == Kind::recv) {   // as with NCCL, only the bytes count
        same = same && h.kind == Kind::send && h.count * type_info(static_cast<ncclDataType_t>(h.type)).bytes == call.count * type_info(call.type).bytes;
    } else {
        same = same && h.kind == call.kind && h.type == call.type && h.op == call.op && h.root == call.root && h.count == call.count && h.sequence == call.sequence;
    }
    if (same && bytes == kHeaderBytes + payload) return;
    if (call.kind == Kind::recv)
        stop("rank " + std::to_string(call.comm->rank) + " of " + std::to_string(call.comm->ranks) + " waits in " + describe(call) + ", rank " + std::to_string(peer) +
             " sent " + describe(h.kind, h.count, h.type, h.op, h.root) + "; both sides must give the same count");
    stop("collective call " + std::to_string(call.sequence + 1) + " of this communicator differs between ranks: rank " + std::to_string(call.comm->rank) + " of " +
         std::to_string(call.comm->ranks) + " is in " + describe(call) + ", rank " + std::to_string(peer) + " in " + describe(h.kind, h.count, h.type, h.op, h.root) +
         "; every rank must make the same calls in the same order");
}

// Tries until done() is true, letting other threads and ranks have the core. False when the communicator is aborted.
template <typename Done>
bool wait_for(State& comm, Done&& done, const std::function<std::string()>& what) {
    const auto start = std::chrono::steady_clock::now();
    bool reported = false;
    for (long tries = 0; !done(); ++tries) {
        if (comm.aborted.load(std::memory_order_acquire) || comm.async_error.load() != ncclSuccess) return false;
        if (tries < kYields) {
            std::this_thread::yield();
        } else {
            usleep(kSleepMicroseconds);
            if (!reported && tries % 1024 == 0 && std::chrono::steady_clock::now() - start > kSlow) {
                reported = true;
                fprintf(stderr, "nccl: %s\n", what().c_str());
                fflush(stderr);
            }
        }
    }
    return true;
}

// One message of an exchange: the slot's header and `payload` bytes.
struct Message {
    const Call* call;
    int peer;
    char* data;
    size_t payload;
    bool incoming;
    MPI_Request request = MPI_REQUEST_NULL;
    bool done = false;
};

int tag_of(const Call& call) {
    const State& comm = *call.comm;
    const uint32_t span = static_cast<uint32_t>(comm.tag_span);
    return static_cast<int>(call.sequence % span + (point_to_point(call.kind) ? span : 0));
}

// Sends and receives all messages. False when the communicator is aborted or MPI reports an error; then messages may
// still be on their way, and the slots must not be used again.
bool exchange(State& comm, std::vector<Message>& messages, uint32_t slice, uint32_t phase) {
    const auto failed = [&comm](int code) {
        if (code == MPI_SUCCESS) return false;
        char text[MPI_MAX_ERROR_STRING];
        int length = 0;
        MPI_Error_string(code, text, &length);
        fprintf(stderr, "nccl: rank %d: MPI reports: %s\n", comm.rank, text);
        comm.async_error.store(ncclSystemError);
        return true;
    };
    // Receives first: a message that finds its buffer is not copied twice.
    for (const bool incoming : {true, false})
        for (Message& m : messages) {
            if (m.incoming != incoming) continue;
            int code;
            if (incoming) {
                const InMpi mpi;
                code = MPI_Irecv(m.data, static_cast<int>(kHeaderBytes + comm.slice_bytes), MPI_BYTE, m.peer, tag_of(*m.call), comm.mpi, &m.request);
            } else {
                const Header h = make_header(*m.call, slice, phase);
                memcpy(m.data, &h, sizeof(h));
                const InMpi mpi;
                code = MPI_Isend(m.data, static_cast<int>(kHeaderBytes + m.payload), MPI_BYTE, m.peer, tag_of(*m.call), comm.mpi, &m.request);
            }
            if (failed(code)) return false;
        }
    size_t left = messages.size();
    const auto done = [&] {
        for (Message& m : messages) {
            if (m.done) continue;
            int flag = 0;
            MPI_Status status;
            int code;
            {
                const InMpi mpi;
                code = MPI_Test(&m.request, &flag, &status);
            }
            if (failed(code)) return false;
            if (!flag) continue;
            m.done = true;
            --left;
            if (m.incoming) {
                int bytes = 0;
                MPI_Get_count(&status, MPI_BYTE, &bytes);
                check_header(*m.call, m.data, static_cast<size_t>(bytes), slice, phase, m.peer, m.payload);
            }
        }
        return left == 0;
    };
    return wait_for(comm, done, [&] {
        for (const Message& m : messages)
            if (!m.done)
                return "rank " + std::to_string(comm.rank) + " of " + std::to_string(comm.ranks) + " has waited 60 s in " + describe(*m.call) + " for rank " + std::to_string(m.peer);
        return std::string();
    });
}

// Copies between device and staging memory, in the order of the stream that the call is part of.
bool copy(const Call& call, void* to, const void* from, size_t bytes) {
    if (bytes == 0) return true;
#ifdef HOSTCUDA_NCCL
    const cudaError_t result = cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
#else
    cudaError_t result = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, call.stream);
    if (result == cudaSuccess) result = cudaStreamSynchronize(call.stream);
#endif
    if (result == cudaSuccess) return true;
    fprintf(stderr, "nccl: rank %d: a copy of %zu bytes in %s failed: %s\n", call.comm->rank, bytes, describe(call).c_str(), cudaGetErrorString(result));
    call.comm->async_error.store(ncclUnhandledCudaError);
    return false;
}

// Where rank r's block of an all-reduce begins.
size_t block_begin(size_t count, int ranks, int r) {
    const size_t quotient = count / static_cast<size_t>(ranks), remainder = count % static_cast<size_t>(ranks);
    return static_cast<size_t>(r) * quotient + std::min(static_cast<size_t>(r), remainder);
}

// Parts of a block in ring order: rank r+1, ..., r.
void ring_order(std::vector<const char*>& parts, const std::vector<const char*>& by_rank, int block) {
    const int n = static_cast<int>(by_rank.size());
    parts.resize(by_rank.size());
    for (int i = 0; i < n; ++i) parts[static_cast<size_t>(i)] = by_rank[static_cast<size_t>((block + 1 + i) % n)];
}

bool run_small_all_reduce(const Call& call) {
    State& comm = *call.comm;
    const size_t element = type_info(call.type).bytes, bytes = call.count * element, n = static_cast<size_t>(comm.ranks);
    Slots slots(comm, n + 1);
    const size_t own = static_cast<size_t>(comm.rank);
    if (!copy(call, slots.payload(own), call.send, bytes)) return false;
    std::vector<Message> messages;
    for (int peer = 0; peer < comm.ranks; ++peer) {
        if (peer == comm.rank) continue;
        messages.push_back({&call, peer, slots.header(static_cast<size_t>(peer)), bytes, true});
        messages.push_back({&call, peer, slots.header(own), bytes, false});
    }
    if (!exchange(comm, messages, 0, 0)) return slots.lose(), false;
    std::vector<const char*> by_rank(n), parts;
    for (int block = 0; block < comm.ranks; ++block) {
        const size_t begin = block_begin(call.count, comm.ranks, block), count = block_begin(call.count, comm.ranks, block + 1) - begin;
        for (size_t r = 0; r < n; ++r) by_rank[r] = slots.payload(r) + begin * element;
        ring_order(parts, by_rank, block);
        reduce_parts(call.type, call.op, slots.payload(n) + begin * element, parts.data(), comm.ranks, count);
    }
    return copy(call, call.recv, slots.payload(n), bytes);
}

// ReduceScatter, AllGather, AllReduce: blocks one a rank, slice by slice.
bool run_blocks(const Call& call) {
    State& comm = *call.comm;
    const int n = comm.ranks, own = comm.rank;
    const size_t element = type_info(call.type).bytes, per_slice = comm.slice_bytes / element, ranks = static_cast<size_t>(n);
    const bool reduces = call.kind != Kind::all_gather, gathers = call.kind != Kind::reduce_scatter;
    std::vector<size_t> begin(ranks + 1);
    for (size_t r = 0; r <= ranks; ++r) begin[r] = call.kind == Kind::all_reduce ? block_begin(call.count, n, static_cast<int>(r)) : r * call.count;
    const size_t longest = begin[1] - begin[0];
    // Slot r: to or from rank r; slot n + r: rank r's part of my block; slot 2n: my block, reduced.
    Slots slots(comm, 2 * ranks + 1);
    const size_t result = 2 * ranks, self = static_cast<size_t>(own);
    std::vector<const char*> by_rank(ranks), parts;
    for (size_t offset = 0, slice = 0; offset < longest; offset += per_slice, ++slice) {
        const auto length = [&](size_t r) { return std::min(per_slice, begin[r + 1] - begin[r] - std::min(offset, begin[r + 1] - begin[r])); };
        const size_t mine = length(self);
        std::vector<Message> messages;
        if (reduces) {
            for (size_t r = 0; r < ranks; ++r)
                if (!copy(call, slots.payload(r == self ? ranks + self : r), call.send + (begin[r] + offset) * element, length(r) * element)) return false;
            for (size_t r = 0; r < ranks; ++r) {
                if (r == self) continue;
                messages.push_back({&call, static_cast<int>(r), slots.header(ranks + r), mine * element, true});
                messages.push_back({&call, static_cast<int>(r), slots.header(r), length(r) * element, false});
            }
            if (!exchange(comm, messages, static_cast<uint32_t>(slice), 0)) return slots.lose(), false;
            for (size_t r = 0; r < ranks; ++r) by_rank[r] = slots.payload(ranks + r);
            ring_order(parts, by_rank, own);
            reduce_parts(call.type, call.op, slots.payload(result), parts.data(), n, mine);
            messages.clear();
        } else {
            if (!copy(call, slots.payload(result), call.send + offset * element, mine * element)) return false;
        }
        if (gathers) {
            for (size_t r = 0; r < ranks; ++r) {
                if (r == self) continue;
                messages.push_back({&call, static_cast<int>(r), slots.header(r), length(r) * element, true});
                messages.push_back({&call, static_cast<int>(r), slots.header(result), mine * element, false});
            }
            if (!exchange(comm, messages, static_cast<uint32_t>(slice), 1)) return slots.lose(), false;
            for (size_t r = 0; r < ranks; ++r) {
                char* to = call.recv + (begin[r] + offset) * element;
                if (r == self && call.kind == Kind::all_gather && call.send + offset * element == to) continue;   // in place
                if (!copy(call, to, slots.payload(r == self ? result : r), length(r) * element)) return false;
            }
        } else {
            if (!copy(call, call.recv + offset * element, slots.payload(result), mine * element)) return false;
        }
    }
    return true;
}

// Broadcast and Reduce: only the root sends or receives, so a wrong root would not be seen in its messages. With the first
// slice every rank also tells every other one what it does.
void tell_others(std::vector<Message>& messages, const Call& call, const Slots& slots, size_t first_slot) {
    const State& comm = *call.comm;
    for (int peer = 0; peer < comm.ranks; ++peer) {
        if (peer == comm.rank) continue;
        const size_t slot = first_slot + static_cast<size_t>(peer);
        const auto missing = [&](bool incoming) { return std::none_of(messages.begin(), messages.end(), [&](const Message& m) { return m.peer == peer && m.incoming == incoming; }); };
        if (missing(true)) messages.push_back({&call, peer, slots.header(slot), 0, true});
        if (missing(false)) messages.push_back({&call, peer, slots.header(first_slot + static_cast<size_t>(comm.rank)), 0, false});
    }
}

bool run_broadcast(const Call& call) {
    State& comm = *call.comm;
    const size_t bytes = call.count * type_info(call.type).bytes;
    Slots slots(comm, 1 + static_cast<size_t>(comm.ranks));
    for (size_t offset = 0, slice = 0; offset < bytes; offset += comm.slice_bytes, ++slice) {
        const size_t length = std::min(comm.slice_bytes, bytes - offset);
        std::vector<Message> messages;
        const bool root = comm.rank == call.root;
        if (root && !copy(call, slots.payload(0), call.send + offset, length)) return false;
        for (int peer = 0; peer < comm.ranks; ++peer)
            if (peer != comm.rank && (root || peer == call.root)) messages.push_back({&call, peer, slots.header(0), length, !root});
        if (slice == 0) tell_others(messages, call, slots, 1);
        if (!exchange(comm, messages, static_cast<uint32_t>(slice), 0)) return slots.lose(), false;
        if (!(root && call.send == call.recv) && !copy(call, call.recv + offset, slots.payload(0), length)) return false;
    }
    return true;
}

bool run_reduce(const Call& call) {
    State& comm = *call.comm;
    const size_t element = type_info(call.type).bytes, per_slice = comm.slice_bytes / element, ranks = static_cast<size_t>(comm.ranks);
    const size_t self = static_cast<size_t>(comm.rank);
    const bool root = comm.rank == call.root;
    // Slot r: rank r's values; slot n: the result; from slot n + 1 on: what the others say.
    Slots slots(comm, 2 * ranks + 1);
    std::vector<const char*> by_rank(ranks), parts;
    for (size_t offset = 0, slice = 0; offset < call.count; offset += per_slice, ++slice) {
        const size_t length = std::min(per_slice, call.count - offset);
        if (!copy(call, slots.payload(self), call.send + offset * element, length * element)) return false;
        std::vector<Message> messages;
        for (int peer = 0; peer < comm.ranks; ++peer)
            if (peer != comm.rank && (root || peer == call.root))
                messages.push_back({&call, peer, slots.header(root ? static_cast<size_t>(peer) : self), length * element, root});
        if (slice == 0) tell_others(messages, call, slots, ranks + 1);
        if (!exchange(comm, messages, static_cast<uint32_t>(slice), 0)) return slots.lose(), false;
        if (!root) continue;
        for (size_t r = 0; r < ranks; ++r) by_rank[r] = slots.payload(r);
        ring_order(parts, by_rank, call.root);
        reduce_parts(call.type, call.op, slots.payload(ranks), parts.data(), comm.ranks, length);
        if (!copy(call, call.recv + offset * element, slots.payload(ranks), length * element)) return false;
    }
    return true;
}

// All sends and receives of a group at once. Slice i of every message goes in round i, so the rank that is behind never
// waits for one that is ahead.
bool run_messages(State& comm, const std::vector<Call>& calls) {
    Slots slots(comm, calls.size());
    size_t longest = 0;
    for (const Call& c : calls) longest = std::max(longest, c.count * type_info(c.type).bytes);
    for (size_t offset = 0, slice = 0; offset < longest; offset += comm.slice_bytes, ++slice) {
        std::vector<Message> messages;
        const auto length = [&](const Call& c) {
            const size_t bytes = c.count * type_info(c.type).bytes;
            return bytes <= offset ? size_t{0} : std::min(comm.slice_bytes, bytes - offset);
        };
        for (size_t i = 0; i < calls.size(); ++i) {
            const size_t bytes = length(calls[i]);
            if (bytes == 0) continue;
            if (calls[i].kind == Kind::send && !copy(calls[i], slots.payload(i), calls[i].send + offset, bytes)) return false;
            messages.push_back({&calls[i], calls[i].root, slots.header(i), bytes, calls[i].kind == Kind::recv});
        }
        if (!exchange(comm, messages, static_cast<uint32_t>(slice), 0)) return slots.lose(), false;
        for (size_t i = 0; i < calls.size(); ++i)
            if (calls[i].kind == Kind::recv && !copy(calls[i], calls[i].recv + offset, slots.payload(i), length(calls[i]))) return false;
    }
    return true;
}

// A rank alone already has the result: every reduction of one value is that value.
bool run_alone(const Call& call) {
    return call.send == call.recv || copy(call, call.recv, call.send, call.count * type_info(call.type).bytes);
}

bool run_collective(const Call& call) {
    if (call.comm->ranks == 1) return run_alone(call);
    switch (call.kind) {
        case Kind::broadcast: return run_broadcast(call);
        case Kind::reduce: return run_reduce(call);
        case Kind::all_reduce:
            if (call.count * type_info(call.type).bytes <= kSmallAllReduceBytes) return run_small_all_reduce(call);
            return run_blocks(call);
        default: return run_blocks(call);
    }
}

// Puts work on a stream; with hostcuda's own errors in async_error when it fails there.
ncclResult_t on_stream(const std::shared_ptr<State>& comm, cudaStream_t stream, const std::string& name, std::function<bool()> work) {
    comm->started();
    const auto body = [comm, work = std::move(work)] {
        if (comm->aborted.load() || !work()) {
            int none = ncclSuccess;
            comm->async_error.compare_exchange_strong(none, ncclInternalError);
        }
        comm->finished();
    };
#ifdef HOSTCUDA_NCCL
    const cudaError_t result = hostcuda::enqueue(stream, name.c_str(), body);
#else
    const cudaError_t result = cudaStreamSynchronize(stream);
    if (result == cudaSuccess) body();
#endif
    if (result != cudaSuccess) {
        comm->finished();
        return error(ncclUnhandledCudaError, "%s: %s", name.c_str(), cudaGetErrorString(result));
    }
    const int async = comm->async_error.load();
    if (async != ncclSuccess) return error(static_cast<ncclResult_t>(async), "%s: the communicator has failed or was aborted", name.c_str());
    return ncclSuccess;
}

// Makes work on `later` wait for what is on `earlier` now.
cudaError_t order(cudaStream_t earlier, cudaStream_t later) {
    cudaEvent_t event;
    cudaError_t result = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    if (result == cudaSuccess) result = cudaEventRecord(event, earlier);
    if (result == cudaSuccess) result = cudaStreamWaitEvent(later, event, 0);
    cudaEventDestroy(event);
    return result;
}

std::string label(const Call& call) {
    return std::string(kind_name(call.kind)) + " " + std::to_string(call.count) + " " + type_info(call.type).name;
}

// Issues the calls of a group, or a single one.
ncclResult_t issue(std::vector<Call> calls) {
    // NCCL lets the ranks name the communicators of a group in any order; here they go in the order of their ids.
    std::stable_sort(calls.begin(), calls.end(), [](const Call& a, const Call& b) { return a.comm->id < b.comm->id; });
    for (size_t i = 0; i < calls.size(); ++i) {
        Call& call = calls[i];
        ncclResult_t result;
        if (!point_to_point(call.kind)) {
            call.sequence = call.comm->collectives++;
            result = on_stream(call.comm, call.stream, label(call), [call] { return run_collective(call); });
            if (result != ncclSuccess) return result;
            continue;
        }
        // The group's messages on this communicator, all at the place of the first.
        const std::shared_ptr<State> state = call.comm;
        State& comm = *state;
        std::vector<Call> messages;
        std::set<cudaStream_t> others;
        for (size_t j = i; j < calls.size() && calls[j].comm == state;) {
            if (!point_to_point(calls[j].kind)) {
                ++j;
                continue;
            }
            {
                const std::lock_guard<std::mutex> lock(comm.peers_mutex);
                calls[j].sequence = (calls[j].kind == Kind::send ? comm.sends : comm.receives)[calls[j].root]++;
            }
            messages.push_back(calls[j]);
            if (calls[j].stream != messages[0].stream) others.insert(calls[j].stream);
            calls.erase(calls.begin() + static_cast<ptrdiff_t>(j));
        }
        --i;   // the calls were taken out
        const cudaStream_t stream = messages[0].stream;
        for (const cudaStream_t other : others)
            if (order(other, stream) != cudaSuccess) return error(ncclUnhandledCudaError, "a stream of the group is not valid");
        const std::string name = messages.size() == 1 ? label(messages[0]) : "ncclSend/ncclRecv group";
        result = on_stream(state, stream, name, [state, messages] { return run_messages(*state, messages); });
        if (result != ncclSuccess) return result;
        for (const cudaStream_t other : others)
            if (order(stream, other) != cudaSuccess) return error(ncclUnhandledCudaError, "a stream of the group is not valid");
    }
    return ncclSuccess;
}

// ---- groups and handles -------------------------------------------------------------------------------------------

thread_local int group_depth = 0;
thread_local ncclResult_t group_error = ncclSuccess;
thread_local std::vector<Call> group_calls;

std::mutex handles_mutex;
std::set<const ncclComm*>& handles() {
    static std::set<const ncclComm*>& set = *new std::set<const ncclComm*>;
    return set;
}

}  // namespace

struct ncclComm { std::shared_ptr<State> state; };

namespace {

std::shared_ptr<State> state_of(const ncclComm* comm) {
    const std::lock_guard<std::mutex> lock(handles_mutex);
    return comm && handles().count(comm) ? comm->state : nullptr;
}

// Device memory, from the first to the last byte, or pinned memory, which a GPU can reach as well.
bool reachable(const void* pointer, size_t bytes) {
    for (const char* p : {static_cast<const char*>(pointer), static_cast<const char*>(pointer) + bytes - 1}) {
        cudaPointerAttributes attributes{};
        if (cudaPointerGetAttributes(&attributes, p) != cudaSuccess) {
            (void)cudaGetLastError();
            return false;
        }
        if (attributes.type == cudaMemoryTypeUnregistered) return false;
    }
    return true;
}

ncclResult_t check_call(const Call& call) {
    const State& comm = *call.comm;
    const char* name = kind_name(call.kind);
    const TypeInfo type = type_info(call.type);
    if (type.bytes == 0) return error(ncclInvalidArgument, "%s: unknown data type %d", name, static_cast<int>(call.type));
    const bool reduces = call.kind == Kind::all_reduce || call.kind == Kind::reduce_scatter || call.kind == Kind::reduce;
    if (reduces && (call.op < 0 || call.op > ncclAvg)) return error(ncclInvalidArgument, "%s: unknown reduction %d", name, call.op);
    if (reduces && !reducible(call.type)) return error(ncclInvalidArgument, "%s: %s is moved here but not reduced; use float32 or bfloat16", name, type.name);
    if (call.root < 0 || call.root >= comm.ranks)
        return error(ncclInvalidArgument, "%s: root or peer %d is not a rank of this communicator of %d", name, call.root, comm.ranks);
    if (call.count == 0) return ncclSuccess;
    const size_t ranks = static_cast<size_t>(comm.ranks);
    if (call.count > SIZE_MAX / type.bytes / ranks) return error(ncclInvalidArgument, "%s: count %zu is too large (a negative number?)", name, call.count);
    const size_t bytes = call.count * type.bytes;
    const bool uses_send = call.kind != Kind::recv && !(call.kind == Kind::broadcast && comm.rank != call.root);
    const bool uses_recv = call.kind != Kind::send && !(call.kind == Kind::reduce && comm.rank != call.root);
    const size_t send_bytes = call.kind == Kind::reduce_scatter ? bytes * ranks : bytes, recv_bytes = call.kind == Kind::all_gather ? bytes * ranks : bytes;
    if ((uses_send && !call.send) || (uses_recv && !call.recv)) return error(ncclInvalidArgument, "%s: a buffer is null", name);
    if (uses_send && !reachable(call.send, send_bytes)) return error(ncclInvalidArgument, "%s: the send buffer of %zu bytes at %p is not in device memory", name, send_bytes, static_cast<const void*>(call.send));
    if (uses_recv && !reachable(call.recv, recv_bytes)) return error(ncclInvalidArgument, "%s: the receive buffer of %zu bytes at %p is not in device memory", name, recv_bytes, static_cast<void*>(call.recv));
    if (uses_send && uses_recv) {
        const size_t offset = bytes * static_cast<size_t>(comm.rank);
        const char* in_place = call.kind == Kind::reduce_scatter ? call.send + offset : call.kind == Kind::all_gather ? call.recv + offset : call.send;
        const char* actual = call.kind == Kind::all_gather ? call.send : call.recv;
        const bool overlap = call.send < call.recv + recv_bytes && call.recv < call.send + send_bytes;
        if (overlap && actual != in_place)
            return error(ncclInvalidArgument, "%s: send and receive buffers overlap, and not as an in-place call (rank %d: %s)", name, comm.rank,
                         call.kind == Kind::reduce_scatter ? "receive buffer = send buffer + rank * count"
                         : call.kind == Kind::all_gather   ? "send buffer = receive buffer + rank * count"
                                                           : "the same pointer");
    }
    return ncclSuccess;
}

ncclResult_t submit(Kind kind, const void* send, void* recv, size_t count, ncclDataType_t type, int op, int root, ncclComm_t comm, cudaStream_t stream) {
    Call call{kind, state_of(comm), static_cast<const char*>(send), static_cast<char*>(recv), count, type, op, root, stream, 0};
    ncclResult_t result = call.comm ? check_call(call) : error(ncclInvalidArgument, "%s: the communicator is null or was destroyed", kind_name(kind));
    if (result == ncclSuccess && call.comm->async_error.load() != ncclSuccess)
        result = error(static_cast<ncclResult_t>(call.comm->async_error.load()), "%s: the communicator has failed", kind_name(kind));
    if (group_depth > 0) {
        if (result != ncclSuccess) {
            if (group_error == ncclSuccess) group_error = result;
        } else if (count > 0) {
            group_calls.push_back(std::move(call));
        }
        return result;
    }
    if (result != ncclSuccess || count == 0) return result;
    std::vector<Call> calls;
    calls.push_back(std::move(call));
    return issue(std::move(calls));
}

// ---- start-up -----------------------------------------------------------------------------------------------------

struct UniqueId {
    uint64_t magic, value;
    int32_t world_rank;
};
static_assert(sizeof(UniqueId) <= sizeof(ncclUniqueId));
constexpr uint64_t kIdMagic = 0x4449206c63636e20;

ncclResult_t check_mpi(const char* call) {
    int initialized = 0, finalized = 0, level = 0;
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    if (!initialized || finalized) return error(ncclInvalidUsage, "%s: MPI is not running; call MPI_Init_thread(..., MPI_THREAD_MULTIPLE, ...) first", call);
    MPI_Query_thread(&level);
    if (level != MPI_THREAD_MULTIPLE)
        return error(ncclInvalidUsage, "%s: MPI gives thread level %d and MPI_THREAD_MULTIPLE (%d) is needed; ask MPI_Init_thread for it, with an MPI that has it", call, level, MPI_THREAD_MULTIPLE);
    return ncclSuccess;
}

// Waits for one message during start-up.
bool finish(MPI_Request& request, std::chrono::steady_clock::time_point deadline) {
    for (int tries = 0, flag = 0;; ++tries) {
        if (MPI_Test(&request, &flag, MPI_STATUS_IGNORE) != MPI_SUCCESS) return false;
        if (flag) return true;
        if (tries < kYields) std::this_thread::yield();
        else usleep(kSleepMicroseconds);
        if (tries > kYields && std::chrono::steady_clock::now() > deadline) return false;
    }
}

// The maker of the id gathers who is which rank and tells all; world_ranks is then the table of ranks.
ncclResult_t meet(const UniqueId& id, int ranks, int rank, int tag, std::vector<int32_t>& world_ranks) {
    int world_rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    const auto deadline = std::chrono::steady_clock::now() + kInitTimeout;
    const auto late = [&] { return error(ncclSystemError, "ncclCommInitRank: the %d ranks did not all come within 5 minutes", ranks); };
    int32_t card[3] = {rank, world_rank, ranks};
    std::vector<int32_t> table(static_cast<size_t>(ranks) + 1);   // the last entry says whether the ranks fit
    if (world_rank != id.world_rank) {
        MPI_Request request;
        MPI_Isend(card, 3, MPI_INT32_T, id.world_rank, tag, MPI_COMM_WORLD, &request);
        if (!finish(request, deadline)) return late();
        MPI_Irecv(table.data(), ranks + 1, MPI_INT32_T, id.world_rank, tag, MPI_COMM_WORLD, &request);
        if (!finish(request, deadline)) return late();
    } else {
        std::vector<int32_t> others;
        std::fill(table.begin(), table.end(), -1);
        bool fit = true;
        for (int i = 0; i < ranks; ++i) {
            if (i > 0) {
                MPI_Request request;
                MPI_Irecv(card, 3, MPI_INT32_T, MPI_ANY_SOURCE, tag, MPI_COMM_WORLD, &request);
                if (!finish(request, deadline)) return late();
                others.push_back(card[1]);
            }
            if (card[2] != ranks || table[static_cast<size_t>(card[0])] != -1) fit = false;
            else table[static_cast<size_t>(card[0])] = card[1];
        }
        table.back() = fit;
        for (const int32_t other : others) {
            MPI_Request request;
            MPI_Isend(table.data(), ranks + 1, MPI_INT32_T, other, tag, MPI_COMM_WORLD, &request);
            if (!finish(request, deadline)) return late();
        }
    }
    if (table.back() != 1) return error(ncclInvalidArgument, "ncclCommInitRank: two ranks gave the same rank or different numbers of ranks");
    table.pop_back();
    world_ranks = table;
    return ncclSuccess;
}

}  // namespace

// ---- the interface ------------------------------------------------------------------------------------------------

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
    if (!version) return error(ncclInvalidArgument, "ncclGetVersion: null");
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
        case ncclSuccess: return "no error";
        case ncclUnhandledCudaError: return "a CUDA call failed";
        case ncclSystemError: return "a system or MPI call failed";
        case ncclInternalError: return "the communicator failed or was aborted";
        case ncclInvalidArgument: return "invalid argument";
        case ncclInvalidUsage: return "invalid usage";
        case ncclRemoteError: return "another rank failed";
        case ncclInProgress: return "in progress";
        default: return "unknown result code";
    }
}

const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }

ncclResult_t ncclGetUniqueId(ncclUniqueId* out) {
    if (!out) return error(ncclInvalidArgument, "ncclGetUniqueId: null");
    const ncclResult_t result = check_mpi("ncclGetUniqueId");
    if (result != ncclSuccess) return result;
    static std::atomic<uint64_t> counter{0};
    UniqueId id{};
    id.magic = kIdMagic;
    MPI_Comm_rank(MPI_COMM_WORLD, &id.world_rank);
    // Unique in this MPI job, which is all that is needed.
    id.value = ++counter << 24 | static_cast<uint64_t>(id.world_rank & 0xffffff);
    memset(out, 0, sizeof(*out));
    memcpy(out, &id, sizeof(id));
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId unique, int rank) {
    UniqueId id;
    memcpy(&id, &unique, sizeof(id));
    if (!comm) return error(ncclInvalidArgument, "ncclCommInitRank: null");
    *comm = nullptr;
    ncclResult_t result = check_mpi("ncclCommInitRank");
    if (result != ncclSuccess) return result;
    if (id.magic != kIdMagic) return error(ncclInvalidArgument, "ncclCommInitRank: the id was not made by ncclGetUniqueId, or was not sent to this rank");
    if (ranks < 1 || rank < 0 || rank >= ranks) return error(ncclInvalidArgument, "ncclCommInitRank: rank %d of %d", rank, ranks);
    int world = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    if (ranks > world) return error(ncclInvalidUsage, "ncclCommInitRank: %d ranks, and MPI runs %d processes; one process is one rank here", ranks, world);

    auto state = std::make_shared<State>();
    state->rank = rank;
    state->ranks = ranks;
    state->id = id.value;
    state->slice_bytes = std::max(kMinSliceBytes, kStagingBytes / static_cast<size_t>(ranks) / kHeaderBytes * kHeaderBytes);
    // For tests of many slices; it must be the same on all ranks.
    if (const char* text = getenv("NCCL_MPI_SLICE_BYTES")) {
        const long value = strtol(text, nullptr, 10);
        if (value < static_cast<long>(kSmallAllReduceBytes) || value > (1L << 30) || value % static_cast<long>(kHeaderBytes) != 0)
            return error(ncclInvalidUsage, "NCCL_MPI_SLICE_BYTES=%s is not a multiple of %zu from %zu to 2^30", text, kHeaderBytes, kSmallAllReduceBytes);
        state->slice_bytes = static_cast<size_t>(value);
    }
    if (cudaGetDevice(&state->device) != cudaSuccess) return error(ncclUnhandledCudaError, "ncclCommInitRank: no device");
    int* upper = nullptr;
    int found = 0;
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &upper, &found);
    const int tags = found ? *upper : 32767;
    state->tag_span = tags / 2;

    const int tag = static_cast<int>((id.value ^ id.value >> 20) % static_cast<uint64_t>(tags));
    std::vector<int32_t> world_ranks;
    result = meet(id, ranks, rank, tag, world_ranks);
    if (result != ncclSuccess) return result;
    MPI_Group everybody, members;
    const std::vector<int> list(world_ranks.begin(), world_ranks.end());
    int code = MPI_Comm_group(MPI_COMM_WORLD, &everybody);
    if (code == MPI_SUCCESS) code = MPI_Group_incl(everybody, ranks, list.data(), &members);
    if (code == MPI_SUCCESS) code = MPI_Comm_create_group(MPI_COMM_WORLD, members, tag, &state->mpi);
    if (code != MPI_SUCCESS || state->mpi == MPI_COMM_NULL) return error(ncclSystemError, "ncclCommInitRank: MPI_Comm_create_group failed with %d", code);
    MPI_Group_free(&members);
    MPI_Group_free(&everybody);
    MPI_Comm_set_errhandler(state->mpi, MPI_ERRORS_RETURN);

    auto* handle = new ncclComm{state};
    const std::lock_guard<std::mutex> lock(handles_mutex);
    handles().insert(handle);
    *comm = handle;
    return ncclSuccess;
}

static std::shared_ptr<State> take(ncclComm_t comm) {
    const std::lock_guard<std::mutex> lock(handles_mutex);
    if (!comm || handles().erase(comm) == 0) return nullptr;
    auto state = comm->state;
    delete comm;
    return state;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    const auto state = state_of(comm);
    if (!state) return error(ncclInvalidArgument, "ncclCommFinalize: the communicator is null or was destroyed");
    state->wait_idle();
    return static_cast<ncclResult_t>(state->async_error.load());
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    const auto state = take(comm);
    if (!state) return error(ncclInvalidArgument, "ncclCommDestroy: the communicator is null or was destroyed already");
    state->wait_idle();
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (!finalized && state->async_error.load() == ncclSuccess) MPI_Comm_free(&state->mpi);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    const auto state = take(comm);
    if (!state) return error(ncclInvalidArgument, "ncclCommAbort: the communicator is null or was destroyed already");
    state->aborted.store(true, std::memory_order_release);
    state->wait_idle();
    // Messages that were given up may still be under way, so the MPI communicator and its buffers stay.
    return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
    const auto state = state_of(comm);
    if (!state || !result) return error(ncclInvalidArgument, "ncclCommGetAsyncError: null or destroyed");
    *result = static_cast<ncclResult_t>(state->async_error.load());
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
    const auto state = state_of(comm);
    if (!state || !count) return error(ncclInvalidArgument, "ncclCommCount: null or destroyed");
    *count = state->ranks;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
    const auto state = state_of(comm);
    if (!state || !rank) return error(ncclInvalidArgument, "ncclCommUserRank: null or destroyed");
    *rank = state->rank;
    return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
    const auto state = state_of(comm);
    if (!state || !device) return error(ncclInvalidArgument, "ncclCommCuDevice: null or destroyed");
    *device = state->device;
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return submit(Kind::all_reduce, sendbuff, recvbuff, count, type, op, 0, comm, stream);
}
ncclResult_t ncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return submit(Kind::reduce_scatter, sendbuff, recvbuff, recvcount, type, op, 0, comm, stream);
}
ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    return submit(Kind::all_gather, sendbuff, recvbuff, sendcount, type, 0, 0, comm, stream);
}
ncclResult_t ncclBroadcast(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return submit(Kind::broadcast, sendbuff, recvbuff, count, type, 0, root, comm, stream);
}
ncclResult_t ncclReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
    return submit(Kind::reduce, sendbuff, recvbuff, count, type, op, root, comm, stream);
}
ncclResult_t ncclSend(const void* sendbuff, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return submit(Kind::send, sendbuff, nullptr, count, type, 0, peer, comm, stream);
}
ncclResult_t ncclRecv(void* recvbuff, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return submit(Kind::recv, nullptr, recvbuff, count, type, 0, peer, comm, stream);
}

ncclResult_t ncclGroupStart() {
    if (group_depth++ == 0) {
        group_error = ncclSuccess;
        group_calls.clear();
    }
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
    if (group_depth == 0) return error(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--group_depth > 0) return group_error;
    std::vector<Call> calls = std::move(group_calls);
    group_calls.clear();
    if (group_error != ncclSuccess) return group_error;   // nothing of the group is done
    return issue(std::move(calls));
}

}  // extern "C"
