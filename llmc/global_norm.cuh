// The squared L2 norm of a gradient buffer.
//
// sum_of_squares writes one double per chunk of 16384 elements; sum_partials (reduce.cuh) adds them. Several buffers may write
// their partials behind each other and be added at once. Chunks depend on the buffer's length only, so the bits depend on the bucket
// layout and on nothing else. Reads 2 (bf16) or 4 (fp32) bytes an element.
//
// Squares are made in fp32 and leave it after eight additions: a finite element above 1.8e19 already counts as infinite, which
// skips the step, as a gradient of that size should.
#pragma once

#include "llmc/device.cuh"
#include "llmc/reduce.cuh"

// A warp takes a chunk: 64 vectors a lane hide the one warp sum, on a CPU too, and a 7-million-element layer still spreads over 400 warps.
inline constexpr size_t kNormVectorsPerLane = 64;
inline constexpr size_t kNormChunk = kNormVectorsPerLane * kWarpSize * kVector;
inline constexpr int kNormWarps = 4;

// Partials sum_of_squares writes for n elements.
inline size_t sum_of_squares_count(size_t n) { return ceil_div(n, kNormChunk); }

template <typename T>
__global__ void __launch_bounds__(kNormWarps* kWarpSize) sum_of_squares_kernel(double* partials, const T* x, size_t n, size_t num_chunks) {
    const size_t chunk = static_cast<size_t>(blockIdx.x) * kNormWarps + threadIdx.x / kWarpSize;
    if (chunk >= num_chunks) return;  // the whole warp
    double total = 0;
    size_t i = chunk * kNormChunk + threadIdx.x % kWarpSize * kVector;
    const size_t end = chunk * kNormChunk + kNormChunk < n ? chunk * kNormChunk + kNormChunk : n;
    while (i < end) {
        Float8 sum = zero8();
#pragma unroll
        for (int j = 0; j < 8; j++, i += kWarpSize * kVector) {
            if (i < end) {
                const Float8 value = load8(x + i);
                sum = fma8(value, value, sum);
            }
        }
        total += static_cast<double>(sum8(sum));
    }
    total = warp_sum(total);
    if (threadIdx.x % kWarpSize == 0) partials[chunk] = total;
}

// partials (sum_of_squares_count(n)) = squared norm of each chunk of x (n).
template <typename T>
inline void sum_of_squares(double* partials, const T* x, size_t n, cudaStream_t stream) {
    NvtxRange range(__func__);
    CHECK(n % kVector == 0, "sum_of_squares: %zu elements, not a multiple of %d", n, kVector);
    if (n == 0) return;
    const size_t num_chunks = sum_of_squares_count(n);
    launch(sum_of_squares_kernel<T>, grid_for(num_chunks, kNormWarps), kNormWarps * kWarpSize, 0, stream, partials, x, n, num_chunks);
}
