// Second stages of sums over blocks, and sums of short lists. The order of addition depends on sizes only, never on the device or
// the number of threads, so a sum has the same bits wherever and whenever it is made.
//
// sum_rows          out[c] = sum_p partials[p, c], fp32, rounded once
// sum_partials      *out (=) sum_i partials[i], double
// sum_to_double     *out (= or +=) sum_i x[i], double accumulation of floats
#pragma once

#include "llmc/device.cuh"

// ---- sum_rows: out (C) = column sums of partials (P, C), rows row_stride apart; reads 4 bytes an element ----
// A block takes 32 vectors of columns; eight groups of threads share the rows (group g takes rows g, g + 8, ...) and are then added
// in order, so that a GPU does not walk a thousand rows one after the other.
inline constexpr int kSumRowsGroups = 8;

template <typename T>
__global__ void sum_rows_kernel(T* out, const float* partials, int P, int C, size_t row_stride) {
    SHARED(Float8, group_sums, kSumRowsGroups * kWarpSize);
    const size_t column = (static_cast<size_t>(blockIdx.x) * kWarpSize + threadIdx.x) * kVector;
    const bool inside = column < static_cast<size_t>(C);
    Float8 sum = zero8();
    if (inside) {
        for (int p = threadIdx.y; p < P; p += kSumRowsGroups) sum += load8(partials + p * row_stride + column);
    }
    group_sums[threadIdx.y * kWarpSize + threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && inside) {
        for (int group = 1; group < kSumRowsGroups; group++) sum += group_sums[group * kWarpSize + threadIdx.x];
        store8(out + column, sum);
    }
}

template <typename T>
inline void sum_rows(T* out, const float* partials, int P, int C, size_t row_stride, cudaStream_t stream) {
    NvtxRange range(__func__);
    CHECK(C % kVector == 0 && row_stride % kVector == 0, "sum_rows: %d columns, rows %zu apart; both must be multiples of %d", C, row_stride, kVector);
    if (C == 0) return;
    launch(sum_rows_kernel<T>, grid_for(C, kWarpSize * kVector), dim3(kWarpSize, kSumRowsGroups), 0, stream, out, partials, P, C,
           row_stride);
}

// ---- one block: thread t adds elements t, t + 256, ... in double, then the block adds its threads ----
inline constexpr int kSumThreads = 256;

template <bool Accumulate, typename T>
__global__ void __launch_bounds__(kSumThreads) sum_to_double_kernel(double* out, const T* x, size_t count) {
    double sum = 0;
#pragma unroll 8
    for (size_t i = threadIdx.x; i < count; i += kSumThreads) sum += static_cast<double>(x[i]);
    sum = block_sum(sum);
    if (threadIdx.x == 0) *out = Accumulate ? *out + sum : sum;
}

// *out = or += the sum of a list of floats short enough for one block (the losses of a micro-batch).
inline void sum_to_double(double* out, const float* x, size_t count, bool accumulate, cudaStream_t stream) {
    NvtxRange range(__func__);
    with_bool(accumulate, [&](auto flag) {
        launch(sum_to_double_kernel<flag.value, float>, 1, kSumThreads, 0, stream, out, x, count);
    });
}

// *out = the sum of the partial sums of an earlier kernel.
inline void sum_partials(double* out, const double* partials, size_t count, cudaStream_t stream) {
    NvtxRange range(__func__);
    launch(sum_to_double_kernel<false, double>, 1, kSumThreads, 0, stream, out, partials, count);
}
