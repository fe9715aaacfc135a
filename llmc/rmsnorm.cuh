// RMSNorm, alone and fused with the residual addition before it.
//
//   rstd[n] = 1 / sqrt(mean_c inp[n, c]^2 + eps)        out[n, c] = inp[n, c] * rstd[n] * weight[c]
//   with x = inp * rstd, g = dout * weight:   dinp = rstd * (g - x * mean_c(g x))     dweight[c] = sum_n dout[n, c] x[n, c]
//
// Bytes an element (bf16): forward 2 read + 2 written (fused: 4 + 4), backward 4 + 2 (accumulating: 6 + 2). Requires C a multiple of 8.
// A warp takes a row: one warp sum a row and no barrier; the second look at the row comes from the cache.
#pragma once

#include "llmc/device.cuh"
#include "llmc/reduce.cuh"

inline constexpr int kRmsnormWarps = 4;  // rows of a block

template <bool Residual>
__global__ void __launch_bounds__(kRmsnormWarps* kWarpSize)
    rmsnorm_forward_kernel(floatX* residual, floatX* out, float* rstd, const floatX* inp1, const floatX* inp2, const floatX* weight, int N, int C, float eps) {
    const size_t row = static_cast<size_t>(blockIdx.x) * kRmsnormWarps + threadIdx.x / kWarpSize;
    const int lane = threadIdx.x % kWarpSize;
    if (row >= static_cast<size_t>(N)) return;  // the whole warp
    const floatX* normed = Residual ? residual + row * C : inp1 + row * C;

    Float8 squares = zero8();
    for (int c = lane * kVector; c < C; c += kWarpSize * kVector) {
        if constexpr (Residual) store8(residual + row * C + c, load8(inp1 + row * C + c) + load8(inp2 + row * C + c));
        // The sum as it was rounded: this lane's own stores, so no barrier is needed to read them back.
        const Float8 x = load8(normed + c);
        squares = fma8(x, x, squares);
    }
    const float scale = 1.0f / sqrtf(warp_sum(sum8(squares)) / static_cast<float>(C) + eps);
    for (int c = lane * kVector; c < C; c += kWarpSize * kVector) store8(out + row * C + c, load8(normed + c) * scale * load8(weight + c));
    if (lane == 0) rstd[row] = scale;
}

// out (N, C) =, rstd (N) =; inp (N, C), weight (C)
inline void rmsnorm_forward(floatX* out, float* rstd, const floatX* inp, const floatX* weight, int N, int C, float eps, cudaStream_t stream) {
    NvtxRange range(__func__);
    CHECK(C > 0 && C % kVector == 0, "rmsnorm_forward: %d channels, not a positive multiple of %d", C, kVector);
    if (N == 0) return;
    launch(rmsnorm_forward_kernel<false>, grid_for(N, kRmsnormWarps), kRmsnormWarps * kWarpSize, 0, stream, nullptr, out, rstd, inp, nullptr, weight, N, C, eps);
}

// residual (N, C) = inp1 + inp2, rounded to floatX; out, rstd = the norm of the rounded sum. residual may be inp1 or inp2.
inline void fused_residual_rmsnorm_forward(floatX* residual, floatX* out, float* rstd, const floatX* inp1, const floatX* inp2, const floatX* weight, int N, int C,
                                           float eps, cudaStream_t stream) {
    NvtxRange range(__func__);
    CHECK(C > 0 && C % kVector == 0, "fused_residual_rmsnorm_forward: %d channels, not a positive multiple of %d", C, kVector);
    if (N == 0) return;
    launch(rmsnorm_forward_kernel<true>, grid_for(N, kRmsnormWarps), kRmsnormWarps * kWarpSize, 0, stream, residual, out, rstd, inp1, inp2, weight, N, C, eps);
}

// ---- backward: blocks of one warp; each walks its rows and keeps its share of dweight in shared memory, where every lane has its own columns ----
// More partial rows than this would cost more to add than they save: 1024 warps fill any GPU. Fewer than 8 rows a block would write
// more partial sums (4 bytes an element and block) than the rows themselves hold.
inline constexpr int kRmsnormMaxPartials = 1024;
inline constexpr int kRmsnormMinRows = 8;

inline int rmsnorm_backward_rows(int N) { return std::max(kRmsnormMinRows, ceil_div(N, kRmsnormMaxPartials)); }

// Floats of scratch for rmsnorm_backward. Depends on the sizes only.
inline size_t rmsnorm_backward_scratch_count(int N, int C) { return static_cast<size_t>(ceil_div(N, rmsnorm_backward_rows(N))) * C; }

template <bool Accumulate>
__global__ void __launch_bounds__(kWarpSize)
    rmsnorm_backward_kernel(floatX* dinp, float* partials, const floatX* dout, const floatX* inp, const floatX* weight, const float* rstd, int N, int C, int rows) {
    float* dweight = dynamic_shared<float>();  // (C)
    const int lane = threadIdx.x;
    for (int c = lane * kVector; c < C; c += kWarpSize * kVector) store8(dweight + c, zero8());
    const int first_row = blockIdx.x * rows;
    const int last_row = min(first_row + rows, N);
    for (int row = first_row; row < last_row; row++) {
        const size_t offset = static_cast<size_t>(row) * C;
        const float scale = rstd[row];
        Float8 products = zero8();
        for (int c = lane * kVector; c < C; c += kWarpSize * kVector) {
            const Float8 x = load8(inp + offset + c) * scale, d = load8(dout + offset + c);
            products = fma8(d * load8(weight + c), x, products);
            store8(dweight + c, fma8(d, x, load8(dweight + c)));
        }
        const float mean = warp_sum(sum8(products)) / static_cast<float>(C);
        for (int c = lane * kVector; c < C; c += kWarpSize * kVector) {
            const Float8 x = load8(inp + offset + c) * scale, g = load8(dout + offset + c) * load8(weight + c);
            Float8 d = (g - x * mean) * scale;
            if constexpr (Accumulate) d += load8(dinp + offset + c);
            store8(dinp + offset + c, d);
        }
    }
    for (int c = lane * kVector; c < C; c += kWarpSize * kVector) store8(partials + static_cast<size_t>(blockIdx.x) * C + c, load8(dweight + c));
}

// dinp (N, C) = or (accumulate) +=, dweight (C) =, scratch (rmsnorm_backward_scratch_count); dout, inp (N, C), weight (C), rstd (N).
// dinp may be dout; inp is what was normalised.
inline void rmsnorm_backward(floatX* dinp, floatX* dweight, float* scratch, const floatX* dout, const floatX* inp, const floatX* weight, const float* rstd, int N, int C,
                             bool accumulate, cudaStream_t stream) {
    NvtxRange range(__func__);
    CHECK(C > 0 && C % kVector == 0, "rmsnorm_backward: %d channels, not a positive multiple of %d", C, kVector);
    const size_t smem_bytes = C * sizeof(float);
    CHECK(smem_bytes <= 48 * 1024, "rmsnorm_backward: %d channels; at most %zu fit in shared memory", C, 48 * 1024 / sizeof(float));
    const int rows = rmsnorm_backward_rows(N);
    const int num_partials = ceil_div(N, rows);
    if (N > 0) {
        with_bool(accumulate, [&](auto flag) {
            launch(rmsnorm_backward_kernel<flag.value>, num_partials, kWarpSize, smem_bytes, stream, dinp, scratch, dout, inp, weight, rstd, N, C, rows);
        });
    }
    sum_rows(dweight, scratch, num_partials, C, C, stream);
}
