// QK-norm (Qwen3): RMSNorm of every query and key head before RoPE, one weight (HD) for all query heads, one for all key heads.
//
// Formulas as in rmsnorm.cuh with HD for C. out holds queries and keys only; values stay where they are in qkv.
// Bytes an element of q and k (bf16): forward 2 read + 2 written, backward 4 + 2. Requires HD a multiple of 8.
// Groups of 1, 2, 4 ... 32 lanes take a head each.
#pragma once

#include "llmc/device.cuh"
#include "llmc/reduce.cuh"

inline constexpr int kQkNormThreads = 128;
inline constexpr int kQkNormVectors = 4;  // a lane: a head of 128 is 4 lanes, which read 64 bytes side by side

__global__ void __launch_bounds__(kQkNormThreads)
    qk_norm_forward_kernel(floatX* out, float* rstd, const floatX* qkv, const floatX* q_weight, const floatX* k_weight, size_t num_items, int NH, int NKV, int HD,
                           int lanes, float eps) {
    const size_t item = (static_cast<size_t>(blockIdx.x) * kQkNormThreads + threadIdx.x) / lanes;  // row * (NH + NKV) + head
    const int lane = threadIdx.x % lanes;
    const bool active = item < num_items;  // idle groups still take part in the warp's sum
    const size_t row = item / (NH + NKV);
    const int head = static_cast<int>(item - row * (NH + NKV));
    const floatX* inp = qkv + (row * (NH + 2 * NKV) + head) * HD;
    const floatX* weight = head < NH ? q_weight : k_weight;
    Float8 squares = zero8();
    if (active) {
        for (int c = lane * kVector; c < HD; c += lanes * kVector) {
            const Float8 x = load8(inp + c);
            squares = fma8(x, x, squares);
        }
    }
    const float scale = 1.0f / sqrtf(group_sum(sum8(squares), lanes) / static_cast<float>(HD) + eps);
    if (!active) return;
    for (int c = lane * kVector; c < HD; c += lanes * kVector) store8(out + item * HD + c, load8(inp + c) * scale * load8(weight + c));
    if (lane == 0) rstd[item] = scale;
}

// out (N, (NH + NKV) * HD) =, rstd (N, NH + NKV) =; qkv (N, (NH + 2 NKV) * HD), q_weight, k_weight (HD)
inline void qk_norm_forward(floatX* out, float* rstd, const floatX* qkv, const floatX* q_weight, const floatX* k_weight, int N, int NH, int NKV, int HD, float eps,
                            cudaStream_t stream) {
    NvtxRange range(__func__);
    CHECK(HD > 0 && HD % kVector == 0, "qk_norm_forward: head_dim %d, not a positive multiple of %d", HD, kVector);
    if (N == 0) return;
    const int lanes = row_lanes(HD, kQkNormVectors);
    const size_t num_items = static_cast<size_t>(N) * (NH + NKV);
    launch(qk_norm_forward_kernel, grid_for(num_items, kQkNormThreads / lanes), kQkNormThreads, 0, stream, out, rstd, qkv, q_weight, k_weight,
           num_items, NH, NKV, HD, lanes, eps);
}

// ---- backward: blocks of one warp, each walks the heads of its rows; every group keeps its share of both weights' gradients ----
inline constexpr int kQkNormMaxBlocks = 1024;

inline int qk_norm_backward_rows(int N) { return std::max(1, ceil_div(N, kQkNormMaxBlocks)); }

inline int qk_norm_backward_partials(int N, int HD) { return ceil_div(N, qk_norm_backward_rows(N)) * (kWarpSize / row_lanes(HD, kQkNormVectors)); }

// Floats of scratch for qk_norm_backward. Depends on the sizes only.
inline size_t qk_norm_backward_scratch_count(int N, int HD) { return static_cast<size_t>(qk_norm_backward_partials(N, HD)) * 2 * HD; }

__global__ void __launch_bounds__(kWarpSize)
    qk_norm_backward_kernel(floatX* dqkv, float* partials /*(blocks, groups, 2, HD)*/, const floatX* dout, const floatX* qkv, const floatX* q_weight,
                            const floatX* k_weight, const float* rstd, int N, int NH, int NKV, int HD, int lanes, int rows) {
    const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes, groups = kWarpSize / lanes;
    float* dweights = dynamic_shared<float>() + static_cast<size_t>(group) * 2 * HD;  // (groups, 2, HD): each lane has its own columns
    for (int c = lane * kVector; c < HD; c += lanes * kVector) {
        store8(dweights + c, zero8());
        store8(dweights + HD + c, zero8());
    }
    const size_t first_item = static_cast<size_t>(blockIdx.x) * rows * (NH + NKV);
    const size_t last_item = static_cast<size_t>(min(static_cast<int>(blockIdx.x + 1) * rows, N)) * (NH + NKV);
    for (size_t turn = first_item; turn < last_item; turn += groups) {
        const size_t item = turn + group;
        const bool active = item < last_item;
        const size_t row = item / (NH + NKV);
        const int head = static_cast<int>(item - row * (NH + NKV));
        const size_t offset = (row * (NH + 2 * NKV) + head) * HD;
        const floatX* weight = head < NH ? q_weight : k_weight;
        float* dweight = head < NH ? dweights : dweights + HD;
        const float scale = active ? rstd[item] : 0.0f;
        Float8 products = zero8();
        if (active) {
            for (int c = lane * kVector; c < HD; c += lanes * kVector) {
                const Float8 x = load8(qkv + offset + c) * scale, d = load8(dout + item * HD + c);
                products = fma8(d * load8(weight + c), x, products);
                store8(dweight + c, fma8(d, x, load8(dweight + c)));
            }
        }
        const float mean = group_sum(sum8(products), lanes) / static_cast<float>(HD);
        if (!active) continue;
        for (int c = lane * kVector; c < HD; c += lanes * kVector) {
            const Float8 x = load8(qkv + offset + c) * scale, g = load8(dout + item * HD + c) * load8(weight + c);
            store8(dqkv + offset + c, (g - x * mean) * scale);
        }
    }
    float* target = partials + (static_cast<size_t>(blockIdx.x) * groups + group) * 2 * HD;
    for (int c = lane * kVector; c < HD; c += lanes * kVector) {
        store8(target + c, load8(dweights + c));
        store8(target + HD + c, load8(dweights + HD + c));
    }
}

// dqkv (N, (NH + 2 NKV) * HD): the q and k parts =, the v part untouched; dq_weight, dk_weight (HD) =; scratch
// (qk_norm_backward_scratch_count); dout (N, (NH + NKV) * HD), qkv as in forward, rstd (N, NH + NKV)
inline void qk_norm_backward(floatX* dqkv, floatX* dq_weight, floatX* dk_weight, float* scratch, const floatX* dout, const floatX* qkv, const floatX* q_weight,
                             const floatX* k_weight, const float* rstd, int N, int NH, int NKV, int HD, cudaStream_t stream) {
    NvtxRange range(__func__);
    CHECK(HD > 0 && HD % kVector == 0, "qk_norm_backward: head_dim %d, not a positive multiple of %d", HD, kVector);
    const int lanes = row_lanes(HD, kQkNormVectors);
    const int rows = qk_norm_backward_rows(N);
    const int num_partials = qk_norm_backward_partials(N, HD);
    const size_t smem_bytes = static_cast<size_t>(kWarpSize / lanes) * 2 * HD * sizeof(float);
    if (N > 0) {
        launch(qk_norm_backward_kernel, ceil_div(N, rows), kWarpSize, smem_bytes, stream, dqkv, scratch, dout, qkv, q_weight, k_weight, rstd, N, NH, NKV, HD, lanes, rows);
    }
    sum_rows(dq_weight, scratch, num_partials, HD, 2 * static_cast<size_t>(HD), stream);
    sum_rows(dk_weight, N > 0 ? scratch + HD : scratch, num_partials, HD, 2 * static_cast<size_t>(HD), stream);
}
