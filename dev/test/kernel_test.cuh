// What kernel tests share: poisoned and guarded device buffers, random inputs, comparison against a double-precision reference.
//
// A buffer starts full of NaN, so an element a kernel forgets shows; the bytes on both sides of it are guarded, so one it should not
// touch shows too, when the buffer goes away. Tests see device memory through copies only, so they run on a GPU as they are.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "dev/test/roundoff.h"
#include "llmc/device.cuh"

// Without a device every test would fail, each in words about the first thing it tried.
class DeviceEnvironment : public testing::Environment {
    void SetUp() override {
        try {
            device_count();
        } catch (const Error& error) {
            fflush(stdout);
            fprintf(stderr, "error: %s\n", error.what());
            exit(1);
        }
    }
};
inline testing::Environment* const kDeviceEnvironment = testing::AddGlobalTestEnvironment(new DeviceEnvironment);

inline cudaStream_t test_stream() {
    static cudaStream_t stream = [] {
        cudaStream_t created;
        CUDA_CHECK(cudaStreamCreateWithFlags(&created, cudaStreamNonBlocking));
        return created;
    }();
    return stream;
}

inline void synchronize() { CUDA_CHECK(cudaStreamSynchronize(test_stream())); }

// ---- storage types on the host, written independently of the code under test ----
inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}
inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}
inline uint16_t bits_of(__nv_bfloat16 x) {
    uint16_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}
inline __nv_bfloat16 bfloat16_of(uint16_t bits) {
    __nv_bfloat16 x;
    memcpy(static_cast<void*>(&x), &bits, sizeof(x));
    return x;
}
// To nearest, ties to even, by comparing with both neighbours.
inline uint16_t round_to_bfloat16(float x) {
    if (std::isnan(x)) return 0x7fff;
    const uint32_t bits = bits_of(x), below = bits & 0xffff0000u, rest = bits & 0xffffu;
    const bool up = rest > 0x8000u || (rest == 0x8000u && (below >> 16 & 1u));
    return static_cast<uint16_t>((below >> 16) + up);
}
template <typename T>
inline T to_storage(double x) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        return bfloat16_of(round_to_bfloat16(static_cast<float>(x)));
    } else {
        return static_cast<T>(x);
    }
}
template <typename T>
inline double to_double(T x) {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        return float_of(static_cast<uint32_t>(bits_of(x)) << 16);
    } else {
        return static_cast<double>(x);
    }
}
template <typename T>
inline std::vector<T> to_storage(const std::vector<double>& values) {
    std::vector<T> result;
    for (const double value : values) result.push_back(to_storage<T>(value));
    return result;
}
template <typename T>
inline std::vector<double> to_double(const std::vector<T>& values) {
    std::vector<double> result;
    for (const T value : values) result.push_back(to_double(value));
    return result;
}

// ---- device buffers ----
template <typename T>
class DeviceBuffer {
public:
    explicit DeviceBuffer(size_t count) : count_(count), bytes_(2 * kGuardBytes + count * sizeof(T)) {
        bytes_ += bytes_ % sizeof(uint16_t);
        CUDA_CHECK(cudaMalloc(&base_, bytes_));
        // 0x7FED is a NaN as bfloat16; twice, as float; four times, as double.
        const std::vector<uint16_t> poison(bytes_ / sizeof(uint16_t), 0x7FED);
        copy(base_, poison.data(), bytes_, cudaMemcpyHostToDevice);
    }
    explicit DeviceBuffer(const std::vector<T>& values) : DeviceBuffer(values.size()) { upload(values); }
    ~DeviceBuffer() {
        check_guards();
        cudaFree(base_);
    }
    DeviceBuffer(const DeviceBuffer&) = delete;
    DeviceBuffer& operator=(const DeviceBuffer&) = delete;

    T* get() const { return reinterpret_cast<T*>(static_cast<unsigned char*>(base_) + kGuardBytes); }
    operator T*() const { return get(); }
    size_t count() const { return count_; }
    void upload(const std::vector<T>& values) {
        CHECK(values.size() == count_, "upload of %zu elements into %zu", values.size(), count_);
        copy(get(), values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice);
    }
    std::vector<T> download() const {
        std::vector<T> values(count_);
        copy(values.data(), get(), count_ * sizeof(T), cudaMemcpyDeviceToHost);
        return values;
    }
    std::vector<double> values() const { return to_double(download()); }

private:
    static constexpr size_t kGuardBytes = 256;  // keeps the alignment of cudaMalloc

    static void copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
        if (bytes == 0) return;
        CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, kind, test_stream()));
        synchronize();
    }
    void check_guards() const {
        std::vector<unsigned char> bytes(bytes_);
        copy(bytes.data(), base_, bytes_, cudaMemcpyDeviceToHost);
        const size_t end = kGuardBytes + count_ * sizeof(T);
        for (size_t i = 0; i < bytes_; i++) {
            if (i == kGuardBytes) i = end;
            if (i >= bytes_) break;
            if (bytes[i] != (i % 2 ? 0x7F : 0xED)) {
                ADD_FAILURE() << "byte " << (i < end ? static_cast<long long>(i) - static_cast<long long>(kGuardBytes) : static_cast<long long>(i - kGuardBytes))
                              << " was written, outside a buffer of " << count_ * sizeof(T) << " bytes";
                return;
            }
        }
    }
    size_t count_, bytes_;
    void* base_ = nullptr;
};

// ---- inputs ----
// N(0, scale), already rounded to T: the reference starts from what the kernel gets.
template <typename T>
inline std::vector<double> random_values(size_t count, unsigned seed, double scale = 1.0) {
    std::mt19937 generator(seed);
    std::normal_distribution<double> normal(0.0, scale);
    std::vector<double> values(count);
    for (double& value : values) value = to_double(to_storage<T>(normal(generator)));
    return values;
}

inline std::vector<int> random_ints(size_t count, unsigned seed, int low, int high) {
    std::mt19937 generator(seed);
    std::uniform_int_distribution<int> uniform(low, high);
    std::vector<int> values(count);
    for (int& value : values) value = uniform(generator);
    return values;
}

// ---- comparison ----
// |actual - expected| <= tolerance(i) for every i; NaN anywhere fails. The tolerance is the bound derived beside the call.
inline void expect_close(const char* what, const std::vector<double>& actual, const std::vector<double>& expected, const std::function<double(size_t)>& tolerance) {
    ASSERT_EQ(actual.size(), expected.size()) << what;
    for (size_t i = 0; i < actual.size(); i++) {
        const double error = std::abs(actual[i] - expected[i]);
        if (!(error <= tolerance(i))) {
            ADD_FAILURE() << what << "[" << i << "] is " << actual[i] << ", expected " << expected[i] << " within " << tolerance(i) << ", off by " << error;
            return;
        }
    }
}

// Bit for bit.
template <typename T>
inline void expect_same_bits(const char* what, const std::vector<T>& actual, const std::vector<T>& expected) {
    ASSERT_EQ(actual.size(), expected.size()) << what;
    for (size_t i = 0; i < actual.size(); i++) {
        if (memcmp(&actual[i], &expected[i], sizeof(T)) != 0) {
            ADD_FAILURE() << what << "[" << i << "] is " << to_double(actual[i]) << ", expected the bits of " << to_double(expected[i]);
            return;
        }
    }
}
