// Initial values and plain copies of flat buffers.
//
// init_normal: p[i] ~ N(0, std), a function of (seed, parameter, element) only, so every rank and stage makes the same weights.
// fill: p[i] = value.  copy_to_float: out[i] = float(in[i]), for master weights and fp32 gradients.
// All overwrite (=). Bytes moved an element: the buffer's own, once.
#pragma once

#include "llmc/device.cuh"
#include "llmc/random.cuh"

inline constexpr int kFlatThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kFlatThreads) init_normal_kernel(T* p, size_t n, unsigned long long seed, unsigned long long parameter_id, float std) {
    const size_t i = (static_cast<size_t>(blockIdx.x) * kFlatThreads + threadIdx.x) * kVector;
    if (i >= n) return;
    // Four normals a counter.
    uint4 random[2] = {random_counter(RandomPurpose::kInit, i / 4, parameter_id, 0), random_counter(RandomPurpose::kInit, i / 4 + 1, parameter_id, 0)};
    philox(seed, random);
    Float8 value;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float2 first = normal_pair(random[half].x, random[half].y), second = normal_pair(random[half].z, random[half].w);
        value[4 * half] = first.x;
        value[4 * half + 1] = first.y;
        value[4 * half + 2] = second.x;
        value[4 * half + 3] = second.y;
    }
    store8(p + i, value * std);
}

template <typename T>
inline void init_normal(T* p, size_t n, unsigned long long seed, unsigned long long parameter_id, float std, cudaStream_t stream) {
    NvtxRange range(__func__);
    CHECK(n % kVector == 0, "init_normal: %zu elements, not a multiple of %d", n, kVector);
    if (n == 0) return;
    launch(init_normal_kernel<T>, grid_for(n, kFlatThreads * kVector), kFlatThreads, 0, stream, p, n, seed, parameter_id, std);
}

template <typename T>
__global__ void __launch_bounds__(kFlatThreads) fill_kernel(T* p, size_t n, float value) {
    const size_t i = (static_cast<size_t>(blockIdx.x) * kFlatThreads + threadIdx.x) * kVector;
    if (i < n) store8(p + i, set8(value));
}

template <typename T>
inline void fill(T* p, size_t n, float value, cudaStream_t stream) {
    NvtxRange range(__func__);
    CHECK(n % kVector == 0, "fill: %zu elements, not a multiple of %d", n, kVector);
    if (n == 0) return;
    launch(fill_kernel<T>, grid_for(n, kFlatThreads * kVector), kFlatThreads, 0, stream, p, n, value);
}

template <typename T>
__global__ void __launch_bounds__(kFlatThreads) copy_to_float_kernel(float* out, const T* in, size_t n) {
    const size_t i = (static_cast<size_t>(blockIdx.x) * kFlatThreads + threadIdx.x) * kVector;
    if (i < n) store8(out + i, load8(in + i));
}

template <typename T>
inline void copy_to_float(float* out, const T* in, size_t n, cudaStream_t stream) {
    NvtxRange range(__func__);
    CHECK(n % kVector == 0, "copy_to_float: %zu elements, not a multiple of %d", n, kVector);
    if (n == 0) return;
    launch(copy_to_float_kernel<T>, grid_for(n, kFlatThreads * kVector), kFlatThreads, 0, stream, out, in, n);
}
