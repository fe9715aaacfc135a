// RMSNorm, alone and fused with the residual addition before it.
//
//   rstd[n] = 1 / sqrt(mean_c inp[n, c]^2 + eps)        out[n, c] = inp[n, c] * rstd[n] * weight[c]
//   with x = inp * rstd, g = dout * weight:   dinp = rstd * (g - x * mean_c(g x))     dweight[c] = sum_n dout[n, c] x[n, c]
//
// Bytes an element (bf16): forward 2 read + 2 written (fused: 4 + 4), backward 4 + 2 (accumulating: 6 + 2). Requires C a multiple of 8.
// A group of 1, 2, 4 ... 32 lanes takes a row: one group sum a row and no barrier; the second look at the row comes from the cache.
#pragma once

#include "llmc/device.cuh"
#include "llmc/reduce.cuh"

inline constexpr int kRmsnormThreads = 128;
inline constexpr int kRmsnormVectors = 12;  // a lane: 768 channels are 8 lanes, which read 128 bytes side by side

template <bool Residual>
__global__ void __launch_bounds__(kRmsnormThreads)
    rmsnorm_forward_kernel(floatX* residual, floatX* out, float* rstd, const floatX* inp1, const floatX* inp2, const floatX* weight, int N, int C, int lanes, float eps) {
    const size_t row = (static_cast<size_t>(blockIdx.x) * kRmsnormThreads + threadIdx.x) / lanes;
    const int first = threadIdx.x % lanes * kVector, stride = lanes * kVector;
    const bool active = row < static_cast<size_t>(N);  // idle groups still take part in the warp's sums
    const floatX* normed = Residual ? residual + row * C : inp1 + row * C;

    Float8 squares = zero8();
    if (active) {
        for (int c = first; c < C; c += stride) {
            if constexpr (Residual) store8(residual + row * C + c, load8(inp1 + row * C + c) + load8(inp2 + row * C + c));
            // The sum as it was rounded: this lane's own stores, so no barrier is needed to read them back.
            const Float8 x = load8(normed + c);
            squares = fma8(x, x, squares);
        }
    }
    const float scale = 1.0f / sqrtf(group_sum(sum8(squares), lanes) / static_cast<float>(C) + eps);
    if (!active) return;
    for (int c = first; c < C; c += stride) store8(out + row * C + c, load8(normed + c) * scale * load8(weight + c));
    if (first == 0) rstd[row] = scale;
}

// out (N, C) =, rstd (N) =; inp (N, C), weight (C)
inline void rmsnorm_forward(floatX* out, float* rstd, const floatX* inp, const floatX* weight, int N, int C, float eps, cudaStream_t stream) {
    NvtxRange range(__func__);
    CHECK(C > 0 && C % kVector == 0, "rmsnorm_forward: %d channels, not a positive multiple of %d", C, kVector);
    if (N == 0) return;
    const int lanes = row_lanes(C, kRmsnormVectors);
    launch(rmsnorm_forward_kernel<false>, grid_for(N, kRmsnormThreads / lanes), kRmsnormThreads, 0, stream, nullptr, out, rstd, inp, nullptr, weight, N, C, lanes, eps);
}

// residual (N, C) = inp1 + inp2, rounded to floatX; out, rstd = the norm of the rounded sum. residual may be inp1 or inp2.
inline void fused_residual_rmsnorm_forward(floatX* residual, floatX* out, float* rstd, const floatX* inp1, const floatX* inp2, const floatX* weight, int N, int C,
                                           float eps, cudaStream_t stream) {
    NvtxRange range(__func__);
    CHECK(C > 0 && C % kVector == 0, "fused_residual_rmsnorm_forward: %d channels, not a positive multiple of %d", C, kVector);
    if (N == 0) return;
    const int lanes = row_lanes(C, kRmsnormVectors);
    launch(rmsnorm_forward_kernel<true>, grid_for(N, kRmsnormThreads / lanes), kRmsnormThreads, 0, stream, residual, out, rstd, inp1, inp2, weight, N, C, lanes, eps);
}

// ---- backward: blocks of one warp, whose groups walk their rows and keep a share of dweight in shared memory, each lane its own columns ----
// More partial rows than this would cost more to add than they save: 1024 groups fill any GPU. Fewer than 8 rows a group would write
// more partial sums (4 bytes an element and group) than the rows themselves hold.
inline constexpr int kRmsnormMaxPartials = 1024;
inline constexpr int kRmsnormMinRows = 8;
inline constexpr int kRmsnormBackwardVectors = 4;  // a lane: from 520 channels on a row has a whole warp

inline int rmsnorm_backward_rows(int N) { return std::max(kRmsnormMinRows, ceil_div(N, kRmsnormMaxPartials)); }

// Floats of scratch for rmsnorm_backward. Depends on the sizes only.
inline size_t rmsnorm_backward_scratch_count(int N, int C) { return static_cast<size_t>(ceil_div(N, rmsnorm_backward_rows(N))) * C; }

template <bool Accumulate>
__global__ void __launch_bounds__(kWarpSize)
    rmsnorm_backward_kernel(floatX* dinp, float* partials, const floatX* dout, const floatX* inp, const floatX* weight, const float* rstd, int N, int C, int lanes, int rows) {
    const int group = threadIdx.x / lanes, first = threadIdx.x % lanes * kVector, stride = lanes * kVector;
    float* dweight = dynamic_shared<float>() + static_cast<size_t>(group) * C;  // (groups, C)
    for (int c = first; c < C; c += stride) store8(dweight + c, zero8());
    const size_t partial = static_cast<size_t>(blockIdx.x) * (kWarpSize / lanes) + group;
    // Every group of the warp takes as many turns, the last ones idle, since all meet in group_sum.
    for (int turn = 0; turn < rows; turn++) {
        const size_t row = partial * rows + turn;
        const bool active = row < static_cast<size_t>(N);
        const size_t offset = row * C;
        const float scale = active ? rstd[row] : 0.0f;
        Float8 products = zero8();
        if (active) {
            for (int c = first; c < C; c += stride) {
                const Float8 x = load8(inp + offset + c) * scale, d = load8(dout + offset + c);
                products = fma8(d * load8(weight + c), x, products);
                store8(dweight + c, fma8(d, x, load8(dweight + c)));
            }
        }
        const float mean = group_sum(sum8(products), lanes) / static_cast<float>(C);
        if (!active) continue;
        for (int c = first; c < C; c += stride) {
            const Float8 x = load8(inp + offset + c) * scale, g = load8(dout + offset + c) * load8(weight + c);
            Float8 d = (g - x * mean) * scale;
            if constexpr (Accumulate) d += load8(dinp + offset + c);
            store8(dinp + offset + c, d);
        }
    }
    if (partial * rows >= static_cast<size_t>(N)) return;
    for (int c = first; c < C; c += stride) store8(partials + partial * C + c, load8(dweight + c));
}

// dinp (N, C) = or (accumulate) +=, dweight (C) =, scratch (rmsnorm_backward_scratch_count); dout, inp (N, C), weight (C), rstd (N).
// dinp may be dout without accumulate; inp is what was normalised.
inline void rmsnorm_backward(floatX* dinp, floatX* dweight, float* scratch, const floatX* dout, const floatX* inp, const floatX* weight, const float* rstd, int N, int C,
                             bool accumulate, cudaStream_t stream) {
    NvtxRange range(__func__);
    CHECK(C > 0 && C % kVector == 0, "rmsnorm_backward: %d channels, not a positive multiple of %d", C, kVector);
    const int lanes = row_lanes(C, kRmsnormBackwardVectors), groups = kWarpSize / lanes;
    const size_t smem_bytes = static_cast<size_t>(groups) * C * sizeof(float);
    CHECK(smem_bytes <= 48 * 1024, "rmsnorm_backward: %d channels; at most %zu fit in shared memory", C, 48 * 1024 / sizeof(float));
    const int rows = rmsnorm_backward_rows(N);
    const int num_partials = ceil_div(N, rows);
    if (N > 0) {
        with_bool(accumulate, [&](auto flag) {
            launch(rmsnorm_backward_kernel<flag.value>, grid_for(num_partials, groups), kWarpSize, smem_bytes, stream, dinp, scratch, dout, inp, weight, rstd, N, C, lanes, rows);
        });
    }
    sum_rows(dweight, scratch, num_partials, C, C, stream);
}
