// Token embedding: out[n, :] = weight[tokens[n], :].
//
// Forward (=) moves 2 + 2 bytes an element. Backward (+=): dweight[token, :] += sum of dout[n, :] over the positions n of the token.
// It is deterministic without atomics: the caller hands the positions sorted by token (stably), the head of each run of equal tokens
// sums the run in fp32 in a fixed order and rounds once. Rows of tokens that do not occur are not touched.
// Requires: C a multiple of 8, 0 <= token < rows of weight (the data loader checks ids as it reads them).
#pragma once

#include "llmc/device.cuh"

inline constexpr int kEmbeddingThreads = 128;

__global__ void __launch_bounds__(kEmbeddingThreads) embedding_forward_kernel(floatX* out, const int* tokens, const floatX* weight, int C) {
    const floatX* row = weight + static_cast<size_t>(tokens[blockIdx.x]) * C;
    floatX* out_row = out + static_cast<size_t>(blockIdx.x) * C;
    for (int c = threadIdx.x * kVector; c < C; c += kEmbeddingThreads * kVector) store8(out_row + c, load8(row + c));
}

// out (N, C) =, tokens (N), weight (Vp, C)
inline void embedding_forward(floatX* out, const int* tokens, const floatX* weight, int N, int C, cudaStream_t stream) {
    NvtxRange range(__func__);
    CHECK(C % kVector == 0, "embedding_forward: %d channels, not a multiple of %d", C, kVector);
    if (N == 0 || C == 0) return;
    launch(embedding_forward_kernel, N, kEmbeddingThreads, 0, stream, out, tokens, weight, C);
}

// One block a sorted position; only heads of runs stay. With a vocabulary of bytes a run has hundreds of rows, so four groups of 32
// threads share a long one (group g takes rows g, g + 4, ...); a short one, the usual case with a large vocabulary, needs no barrier.
inline constexpr int kEmbeddingGroups = 4;
inline constexpr int kEmbeddingShortRun = 8;
inline constexpr int kEmbeddingColumns = 1024;  // a block walks these in four turns: a non-head block must not cost more than its look

__global__ void __launch_bounds__(kEmbeddingGroups* kWarpSize)
    embedding_backward_kernel(floatX* dweight, const floatX* dout, const int* tokens, const int* sorted_positions, int N, int C) {
    SHARED(Float8, group_sums, kEmbeddingGroups * kWarpSize);
    const int head = blockIdx.x;
    const int token = tokens[sorted_positions[head]];
    if (head > 0 && tokens[sorted_positions[head - 1]] == token) return;
    // Whether the run has more rows than a short one is known from one look, the run being sorted.
    const bool is_long = head + kEmbeddingShortRun < N && tokens[sorted_positions[head + kEmbeddingShortRun]] == token;
    if (!is_long && threadIdx.y > 0) return;
    const int stride = is_long ? kEmbeddingGroups : 1;

    for (int turn = 0; turn < kEmbeddingColumns; turn += kWarpSize * kVector) {
        const int column = blockIdx.y * kEmbeddingColumns + turn + threadIdx.x * kVector;
        const bool inside = column < C;
        Float8 sum = zero8();
        if (inside) {
            for (int i = head + threadIdx.y; i < N; i += stride) {
                const int position = sorted_positions[i];
                if (tokens[position] != token) break;
                sum += load8(dout + static_cast<size_t>(position) * C + column);
            }
        }
        if (is_long) {
            group_sums[threadIdx.y * kWarpSize + threadIdx.x] = sum;
            __syncthreads();
            if (threadIdx.y == 0) {
                for (int group = 1; group < kEmbeddingGroups; group++) sum += group_sums[group * kWarpSize + threadIdx.x];
            }
            __syncthreads();  // the next turn writes group_sums
        }
        if (inside && threadIdx.y == 0) {
            floatX* target = dweight + static_cast<size_t>(token) * C + column;
            store8(target, load8(target) + sum);
        }
    }
}

// dweight (Vp, C) +=, dout (N, C), tokens (N), sorted_positions (N): 0 .. N-1 sorted stably by their token
inline void embedding_backward(floatX* dweight, const floatX* dout, const int* tokens, const int* sorted_positions, int N, int C, cudaStream_t stream) {
    NvtxRange range(__func__);
    CHECK(C % kVector == 0, "embedding_backward: %d channels, not a multiple of %d", C, kVector);
    if (N == 0 || C == 0) return;
    const dim3 grid(N, ceil_div(C, kEmbeddingColumns));
    launch(embedding_backward_kernel, grid, dim3(kWarpSize, kEmbeddingGroups), 0, stream, dweight, dout, tokens, sorted_positions, N, C);
}
