// Named device allocations with a budget: every byte the program takes has a category and a name in the start-up table.
#pragma once

#include <string>
#include <vector>

#include "llmc/device.cuh"

class DeviceMemory {
public:
    // limit_bytes: what --device-memory allows (0 = all of the device).
    explicit DeviceMemory(size_t limit_bytes = 0) : limit_bytes_(limit_bytes) {}
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;
    ~DeviceMemory() {
        for (const Allocation& allocation : allocations_) cudaFree(allocation.address);
    }

    // `count` elements of T, not initialised; nullptr for 0. Throws Error past the limit or the device, saying what was asked and what is taken already.
    template <class T>
    T* allocate(const char* category, const char* name, size_t count) {
        if (count == 0) return nullptr;
        const size_t bytes = count * sizeof(T);
        CHECK(bytes / sizeof(T) == count, "%s: %zu elements overflow a size", name, count);
        CHECK(limit_bytes_ == 0 || total_bytes_ + bytes <= limit_bytes_,
              "out of device memory: %s needs %.3f GB, but %.3f of the %.3f GB that --device-memory allows are taken; %s", name, bytes / 1e9, total_bytes_ / 1e9, limit_bytes_ / 1e9,
              kAdvice);
        void* address = nullptr;
        const cudaError_t status = cudaMalloc(&address, bytes);
        if (status == cudaErrorMemoryAllocation) {
            cudaGetLastError();  // not sticky: clear it
            size_t free_bytes = 0, device_bytes = 0;
            CUDA_CHECK(cudaMemGetInfo(&free_bytes, &device_bytes));
            fail("out of device memory: %s needs %.3f GB, this program has taken %.3f GB already, and %.3f of the device's %.3f GB are free; %s", name, bytes / 1e9, total_bytes_ / 1e9,
                 free_bytes / 1e9, device_bytes / 1e9, kAdvice);
        }
        CUDA_CHECK(status);
        total_bytes_ += bytes;
        allocations_.push_back({category, name, bytes, address});
        return static_cast<T*>(address);
    }

    size_t total_bytes() const { return total_bytes_; }

    // Category and bytes, in the order the categories were first used.
    std::vector<std::pair<std::string, size_t>> bytes_by_category() const {
        std::vector<std::pair<std::string, size_t>> categories;
        for (const Allocation& allocation : allocations_) {
            auto found = categories.begin();
            while (found != categories.end() && found->first != allocation.category) ++found;
            if (found == categories.end()) found = categories.insert(found, {allocation.category, 0});
            found->second += allocation.bytes;
        }
        return categories;
    }

private:
    static constexpr const char* kAdvice = "use a higher --zero-stage, --recompute block, more --lmhead-chunks, a smaller --micro-batch, or more ranks";

    struct Allocation {
        std::string category, name;
        size_t bytes;
        void* address;
    };

    size_t limit_bytes_;
    size_t total_bytes_ = 0;
    std::vector<Allocation> allocations_;
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
