// What the execution tests share: a stream, device arrays, launches, shared arrays.
#pragma once
#include <cuda_runtime.h>

#include <gtest/gtest.h>

#include <cstdlib>
#include <utility>
#include <vector>

#if defined(__has_feature)
#define HOSTCUDA_TEST_FEATURE(name) __has_feature(name)
#else
#define HOSTCUDA_TEST_FEATURE(name) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || HOSTCUDA_TEST_FEATURE(address_sanitizer)
#define HOSTCUDA_ASAN_BUILD 1
#else
#define HOSTCUDA_ASAN_BUILD 0
#endif
#if defined(__SANITIZE_THREAD__) || HOSTCUDA_TEST_FEATURE(thread_sanitizer)
#define HOSTCUDA_TSAN_BUILD 1
#else
#define HOSTCUDA_TSAN_BUILD 0
#endif
#define HOSTCUDA_SLOW_BUILD (HOSTCUDA_ASAN_BUILD || HOSTCUDA_TSAN_BUILD)

// As programs declare shared arrays (hostcuda itself has no macro for it).
#define SHARED(type, name, count)  \
    static const char name##_key{}; \
    type* const name = static_cast<type*>(hostcuda::shared_array(&name##_key, sizeof(type) * (count), alignof(type)))

inline cudaStream_t test_stream() {
    static cudaStream_t stream = [] {
        cudaStream_t made;
        if (cudaStreamCreate(&made) != cudaSuccess) abort();
        return made;
    }();
    return stream;
}

// Launches and waits.
template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t dynamic_bytes, Args&&... args) {
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = dynamic_bytes;
    config.stream = test_stream();
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
    const cudaError_t wait_error = cudaStreamSynchronize(test_stream());
    return error != cudaSuccess ? error : wait_error;
}

template <class T>
struct Device {
    T* data = nullptr;
    size_t count;

    explicit Device(size_t count_) : count(count_) {
        if (cudaMalloc(&data, count * sizeof(T)) != cudaSuccess) abort();
    }
    explicit Device(const std::vector<T>& values) : Device(values.size()) { copy(values); }
    ~Device() { cudaFree(data); }
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    void copy(const std::vector<T>& values) {
        if (cudaMemcpy(data, values.data(), count * sizeof(T), cudaMemcpyHostToDevice) != cudaSuccess) abort();
    }
    void fill(T value) { copy(std::vector<T>(count, value)); }
    std::vector<T> host() const {
        std::vector<T> values(count);
        if (cudaMemcpy(values.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost) != cudaSuccess) abort();
        return values;
    }
};
