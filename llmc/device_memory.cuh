// Named device allocations with a budget: every byte the program takes has a category and a name in the start-up table.
#pragma once

#include <string>
#include <vector>

#include "llmc/device.cuh"
#include "llmc/memory_bill.h"
#include "llmc/units.h"

// An allocation that did not fit. `taken` is what there was before it.
struct OutOfDeviceMemory : Error {
    OutOfDeviceMemory(const std::string& message, const MemoryBill& taken) : Error(message), taken(taken) {}
    MemoryBill taken;
};

class DeviceMemory {
public:
    // limit_bytes: what --device-memory allows (0 = all of the device).
    explicit DeviceMemory(size_t limit_bytes = 0) : limit_bytes_(limit_bytes) {}
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;
    ~DeviceMemory() {
        for (void* address : addresses_) cudaFree(address);
    }

    // One that takes nothing and needs no device: it only adds up what is asked for. Nothing lies at its addresses.
    struct OnlyCount {};
    explicit DeviceMemory(OnlyCount) : only_count_(true) {}

    // `count` elements of T, not initialised; nullptr for 0. Throws OutOfDeviceMemory past the limit or the device, saying what was asked and what is taken already.
    template <class T>
    T* allocate(const char* category, const char* name, size_t count) {
        if (count == 0) return nullptr;
        size_t bytes = 0, total_bytes = 0;
        CHECK(!__builtin_mul_overflow(count, sizeof(T), &bytes) && !__builtin_add_overflow(bill_.total_bytes, bytes, &total_bytes),
              "%s: %zu elements of %zu bytes are more than 64 bits hold; use a smaller model or batch", name, count, sizeof(T));
        if (limit_bytes_ != 0 && total_bytes > limit_bytes_) {
            throw OutOfDeviceMemory(format("out of device memory: %s needs %s, but %s of the %s that --device-memory allows are taken", name, format_bytes(bytes).c_str(),
                                           format_bytes(bill_.total_bytes).c_str(), format_bytes(limit_bytes_).c_str()), bill_);
        }
        void* const address = only_count_ ? reinterpret_cast<void*>(kNowhere) : take(name, bytes);
        bill_.add(category, bytes);
        return static_cast<T*>(address);
    }

    const MemoryBill& bill() const { return bill_; }
    size_t total_bytes() const { return bill_.total_bytes; }

private:
    static constexpr uintptr_t kNowhere = 4096;  // not null, since that stands for what is not allocated; aligned for every type

    void* take(const char* name, size_t bytes) {
        void* address = nullptr;
        const cudaError_t status = cudaMalloc(&address, bytes);
        if (status == cudaErrorMemoryAllocation) {
            cudaGetLastError();  // not sticky: clear it
            size_t free_bytes = 0, device_bytes = 0;
            CUDA_CHECK(cudaMemGetInfo(&free_bytes, &device_bytes));
            throw OutOfDeviceMemory(format("out of device memory: %s needs %s, this program has taken %s already, and %s of the device's %s are free", name, format_bytes(bytes).c_str(),
                                           format_bytes(bill_.total_bytes).c_str(), format_bytes(free_bytes).c_str(), format_bytes(device_bytes).c_str()), bill_);
        }
        CUDA_CHECK(status);
        addresses_.push_back(address);
        return address;
    }

    size_t limit_bytes_ = 0;
    const bool only_count_ = false;
    MemoryBill bill_;
    std::vector<void*> addresses_;
};

// Pinned host memory, freed with its owner: the only host memory asynchronous copies touch.
template <class T>
class PinnedArray {
public:
    explicit PinnedArray(size_t count) {
        const cudaError_t status = cudaMallocHost(reinterpret_cast<void**>(&data_), count * sizeof(T));
        CHECK(status == cudaSuccess, "cannot pin %.3f GB of host memory (%s); use a smaller --total-batch, or raise the limit of locked memory (ulimit -l)",
              count * sizeof(T) / 1e9, cudaGetErrorString(status));
    }
    PinnedArray(const PinnedArray&) = delete;
    PinnedArray& operator=(const PinnedArray&) = delete;
    ~PinnedArray() { cudaFreeHost(data_); }
    T* data() { return data_; }
    T& operator[](size_t i) { return data_[i]; }

private:
    T* data_ = nullptr;
};

// `count` elements of device memory as floats on the host; waits for the stream.
template <class T>
std::vector<float> read_floats(const T* address, size_t count, cudaStream_t stream) {
    std::vector<T> raw(count);
    CUDA_CHECK(cudaMemcpyAsync(raw.data(), address, count * sizeof(T), cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    std::vector<float> values(count);
    for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(raw[i]);
    return values;
}
