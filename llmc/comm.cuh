// Collectives of the training step: a thin, typed layer over NCCL that takes a communicator, never "the world".
//
// Everything is queued on a stream; nothing here waits on the host except construction. Bits: an all-reduce of gradients is never asked for as
// such but as reduce-scatter + all-gather, so that every ZeRO stage adds in the same order (NCCL_ALGO=Ring unless the user sets it).
#pragma once

#include <mpi.h>
#include <nccl.h>
#include <sched.h>

#include <chrono>
#include <cstdlib>
#include <vector>

#include "llmc/device.cuh"
#include "llmc/process.h"

#define NCCL_CHECK(call)                                                                                                          \
    do {                                                                                                                          \
        const ncclResult_t nccl_check_status = (call);                                                                            \
        if (nccl_check_status != ncclSuccess) {                                                                                   \
            fail("%s:%d: %s: %s (%s)", __FILE__, __LINE__, #call, ncclGetErrorString(nccl_check_status), ncclGetLastError(nullptr)); \
        }                                                                                                                         \
    } while (0)

template <class T>
constexpr ncclDataType_t nccl_type() {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return ncclBfloat16;
    else if constexpr (std::is_same_v<T, float>) return ncclFloat32;
    else if constexpr (std::is_same_v<T, double>) return ncclFloat64;
    else {
        static_assert(std::is_same_v<T, unsigned long long>, "no NCCL type for T");
        return ncclUint64;
    }
}

class Communicator {
public:
    // Collective over all ranks of the job; a process that says it is one of one makes a communicator with itself.
    explicit Communicator(const Process& process) : rank_(process.rank), size_(process.ranks) {
        setenv("NCCL_ALGO", "Ring", 0);  // one summation order; a value the user set stays
        std::vector<unsigned char> id(sizeof(ncclUniqueId));
        if (rank_ == 0) NCCL_CHECK(ncclGetUniqueId(reinterpret_cast<ncclUniqueId*>(id.data())));
        if (size_ > 1) broadcast_bytes(process, &id);
        NCCL_CHECK(ncclCommInitRank(&comm_, size_, *reinterpret_cast<ncclUniqueId*>(id.data()), rank_));
    }
    Communicator(const Communicator&) = delete;
    Communicator& operator=(const Communicator&) = delete;
    ~Communicator() { ncclCommDestroy(comm_); }

    int rank() const { return rank_; }
    int size() const { return size_; }

    // buffer (size() * slice_count): afterwards slice rank() holds the sum over ranks; the other slices are undefined.
    template <class T>
    void reduce_scatter_in_place(T* buffer, size_t slice_count, cudaStream_t stream) const {
        reduce_scatter(buffer + rank_ * slice_count, buffer, slice_count, stream);
    }

    // out (slice_count) = the sum over ranks of slice rank() of inp (size() * slice_count).
    template <class T>
    void reduce_scatter(T* out, const T* inp, size_t slice_count, cudaStream_t stream) const {
        count_sent(slice_count * sizeof(T));
        NCCL_CHECK(ncclReduceScatter(inp, out, slice_count, nccl_type<T>(), ncclSum, comm_, stream));
    }

    // buffer (size() * slice_count): every rank gives slice rank() and gets all.
    template <class T>
    void all_gather_in_place(T* buffer, size_t slice_count, cudaStream_t stream) const {
        all_gather(buffer, buffer + rank_ * slice_count, slice_count, stream);
    }

    // out (size(), count) = inp (count) of every rank, in rank order.
    template <class T>
    void all_gather(T* out, const T* inp, size_t count, cudaStream_t stream) const {
        count_sent(count * sizeof(T));
        NCCL_CHECK(ncclAllGather(inp, out, count, nccl_type<T>(), comm_, stream));
    }

    // Bytes this rank has been asked to send since the communicator was made. In a ring every rank passes on all slices but one.
    unsigned long long sent_bytes() const { return sent_bytes_; }

    // Throws if a peer or the network broke the communicator.
    void check_async_error() const {
        ncclResult_t state = ncclSuccess;
        NCCL_CHECK(ncclCommGetAsyncError(comm_, &state));
        CHECK(state == ncclSuccess || state == ncclInProgress, "a collective failed: %s (%s)", ncclGetErrorString(state), ncclGetLastError(comm_));
    }

private:
    void count_sent(size_t slice_bytes) const { sent_bytes_ += static_cast<unsigned long long>(size_ - 1) * slice_bytes; }

    ncclComm_t comm_ = nullptr;
    int rank_, size_;
    mutable unsigned long long sent_bytes_ = 0;
};

// The one place where the host waits for the device: polls `event` with a deadline, so that a peer that hangs ends this rank with a message.
// timeout_seconds 0 = wait for ever. `what` says in the error what was waited for.
inline void wait_for_event(cudaEvent_t event, const Communicator& comm, double timeout_seconds, const char* what) {
    const auto start = std::chrono::steady_clock::now();
    for (int polls = 0;; ++polls) {
        const cudaError_t status = cudaEventQuery(event);
        if (status == cudaSuccess) return;
        if (status != cudaErrorNotReady) CUDA_CHECK(status);
        if (polls % 64 == 63) {
            comm.check_async_error();
            const double waited = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
            CHECK(timeout_seconds <= 0 || waited < timeout_seconds,
                  "waited %.0f s for %s, longer than --comm-timeout %.0f; a peer is slow, stuck or gone: look at its log.rankN, or raise the limit", waited, what,
                  timeout_seconds);
        }
        sched_yield();
    }
}
