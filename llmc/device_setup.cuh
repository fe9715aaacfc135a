// Choosing this rank's device before anything is allocated, and measuring what its matrix products and its link to the other ranks can reach.
#pragma once

#include <string>

#include "llmc/comm.cuh"
#include "llmc/device.cuh"
#include "llmc/device_memory.cuh"
#include "llmc/init.cuh"
#include "llmc/matmul.cuh"
#include "llmc/process.h"

struct Device {
    std::string name;
    std::string bus_id;       // identifies a GPU on its host, also where CUDA_VISIBLE_DEVICES renumbers them
    int multiprocessors = 0;  // threads on a CPU
};

// Whether several ranks may use one device: collectives over MPI can (hostcuda, or a GPU build with NCCL=mpi), NCCL's own cannot.
#ifdef HOSTCUDA_NCCL
constexpr bool kRanksMayShareDevice = true;
#else
constexpr bool kRanksMayShareDevice = false;
#endif

// Takes device (local rank modulo number of devices). Throws Error when there is none or when it is older than sm_80.
inline Device select_device(const Process& process) {
    const int device = process.local_rank % device_count();
    CUDA_CHECK(cudaSetDevice(device));
    cudaDeviceProp properties;
    CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    CHECK(properties.major >= 8, "device %d is a %s (sm_%d%d): bf16 and asynchronous copies need sm_80 (A100, RTX 30xx) or newer", device, properties.name, properties.major,
          properties.minor);
    char bus_id[32] = "";
    CUDA_CHECK(cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), device));
    return {properties.name, bus_id, properties.multiProcessorCount};
}

// FLOP/s of square products of random floatX matrices on this device as it is now (zeros take less power and run faster); grows the size until one takes
// 5 ms, so that it costs little anywhere.
// Takes and returns its own memory, so call it before the model takes its.
inline double measure_product_flops() {
    DeviceMemory workspace;
    MatmulContext matmuls(workspace.allocate<unsigned char>("other", "the workspace of products", kMatmulWorkspaceBytes));
    cudaStream_t stream;
    cudaEvent_t start, stop;
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    double best = 0;
    for (int n = 512; n <= 8192; n *= 2) {
        DeviceMemory memory;
        const size_t count = static_cast<size_t>(n) * n;
        size_t free_bytes = 0, device_bytes = 0;
        CUDA_CHECK(cudaMemGetInfo(&free_bytes, &device_bytes));
        if (n > 512 && 3 * count * sizeof(floatX) > free_bytes / 2) break;  // a small device, or one that others use
        floatX* matrices = memory.allocate<floatX>("other", "matrices of the speed measurement", 3 * count);
        init_normal(matrices, 3 * count, 0, 0, 1.0f, stream);
        float ms = 0;
        for (int repetition = 0; repetition < 3; ++repetition) {  // the first one warms up
            CUDA_CHECK(cudaEventRecord(start, stream));
            matmul_forward(matmuls, matrices, matrices + count, matrices + 2 * count, nullptr, n, n, n, stream);
            CUDA_CHECK(cudaEventRecord(stop, stream));
            CUDA_CHECK(cudaStreamSynchronize(stream));
            CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
            if (repetition > 0 && ms > 0) best = std::max(best, 2.0 * n * n * n / (ms * 1e-3));
        }
        if (ms > 5) break;
    }
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(stop));
    CUDA_CHECK(cudaStreamDestroy(stream));
    return best;
}

// Bytes a second that this rank sends in a ring all-gather, the best of three: what --link wants to know. 0 on one rank. Collective.
// Takes and returns its own memory, so call it before the model takes its.
inline double measure_link(const Communicator& comm, double timeout_seconds) {
    if (comm.size() == 1) return 0;
    // Large enough for the speed to count and not the latency, small enough to cost nothing.
    const size_t slice_count = (kDeviceIsCpu ? size_t{8} << 20 : size_t{64} << 20) / sizeof(double) / comm.size();
    DeviceMemory memory;
    double* const buffer = memory.allocate<double>("other", "the buffer of the link measurement", slice_count * comm.size());
    cudaStream_t stream;
    cudaEvent_t start, stop;
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&stop));
    CUDA_CHECK(cudaMemsetAsync(buffer, 0, slice_count * comm.size() * sizeof(double), stream));
    double best = 0;
    for (int repetition = 0; repetition < 4; ++repetition) {  // the first one makes connections
        const unsigned long long before = comm.sent_bytes();
        CUDA_CHECK(cudaEventRecord(start, stream));
        comm.all_gather_in_place(buffer, slice_count, stream);
        CUDA_CHECK(cudaEventRecord(stop, stream));
        wait_for_event(stop, comm, timeout_seconds, "the measurement of the link");
        float ms = 0;
        CUDA_CHECK(cudaEventElapsedTime(&ms, start, stop));
        if (repetition > 0 && ms > 0) best = std::max(best, static_cast<double>(comm.sent_bytes() - before) / (ms * 1e-3));
    }
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(stop));
    CUDA_CHECK(cudaStreamDestroy(stream));
    return best;
}
