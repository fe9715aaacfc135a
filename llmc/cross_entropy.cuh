// Cross-entropy fused with softmax; the gradient takes the logits' place.
//
//   loss[n] = log sum_v exp(logits[n, v]) - logits[n, target]          dlogits[n, v] = (softmax(logits[n])[v] - [v == target]) * inv_valid
//
// Over v < V; columns V .. Vp-1 of the padding are never read as logits and get a gradient of 0. A target of -1 is ignored: loss 0,
// gradient 0. losses =; logits: dlogits = with WriteGradients, else untouched.
// Bytes an element (bf16): 2 read for the loss, 2 read (from the cache, if it holds a row) + 2 written for the gradient.
// Requires V <= Vp, Vp a multiple of 8, targets < V.
#pragma once

#include "llmc/device.cuh"

// One block a row. A warp alone, which needs no barrier, serves vocabularies of bytes; beyond 8192 columns a GPU needs more threads
// to keep a row's loads in flight, and the barriers are small against the row.
inline constexpr int kCrossEntropyWideThreads = 256;
inline constexpr int kCrossEntropyNarrow = 8192;

template <bool WriteGradients, int Threads>
__global__ void __launch_bounds__(Threads) cross_entropy_kernel(float* losses, floatX* logits, const int* targets, const float* inv_valid, int V, int Vp) {
    floatX* row = logits + static_cast<size_t>(blockIdx.x) * Vp;
    const int target = targets[blockIdx.x];
    if (target < 0) {  // the whole block
        if (threadIdx.x == 0) losses[blockIdx.x] = 0.0f;
        if constexpr (WriteGradients) {
            for (int c = threadIdx.x * kVector; c < Vp; c += Threads * kVector) store8(row + c, zero8());
        }
        return;
    }
    // Read before anyone overwrites it: the reductions below hold barriers.
    const float target_logit = to_float(row[target]);

    // Online: the largest logit so far and the sum of exp(logit - largest), in each of the eight lanes of a thread. Four vectors at a time share
    // one correction of the sum, so 1.25 exponentials an element. The start is finite: minus infinity less itself would be NaN.
    Float8 largest = set8(-kFloatMax), sum = zero8();
    constexpr int kTurn = 4, kStride = Threads * kVector;
    int c = threadIdx.x * kVector;
    for (; c + (kTurn - 1) * kStride + kVector <= V; c += kTurn * kStride) {
        const Float8 x0 = load8(row + c), x1 = load8(row + c + kStride), x2 = load8(row + c + 2 * kStride), x3 = load8(row + c + 3 * kStride);
        const Float8 turn_largest = max8(largest, max8(max8(x0, x1), max8(x2, x3)));
        sum = sum * exp8(largest - turn_largest) + ((exp8(x0 - turn_largest) + exp8(x1 - turn_largest)) + (exp8(x2 - turn_largest) + exp8(x3 - turn_largest)));
        largest = turn_largest;
    }
    for (; c < V; c += kStride) {
        // Columns of the padding count as minus infinity, whatever is there.
        const Float8 x = first8(load8(row + c), V - c, -kInfinity);
        const Float8 turn_largest = max8(largest, x);
        sum = sum * exp8(largest - turn_largest) + exp8(x - turn_largest);
        largest = turn_largest;
    }
    const float thread_largest = largest8(largest);
    const float thread_sum = sum8(sum * exp8(largest - thread_largest));
    const float row_largest = block_max(thread_largest);
    const float row_sum = block_sum(thread_sum * expf(thread_largest - row_largest));
    // (largest - logit) first: it is exact or nearly so, where largest + log(sum) would round at the size of the logits.
    if (threadIdx.x == 0) losses[blockIdx.x] = (row_largest - target_logit) + logf(row_sum);

    if constexpr (WriteGradients) {
        const float scale = *inv_valid, inv_sum = 1.0f / row_sum;
        for (c = threadIdx.x * kVector; c < Vp; c += kStride) {
            Float8 gradient = exp8(load8(row + c) - row_largest) * inv_sum;
            if (target >= c && target < c + kVector) gradient -= one_hot8(target - c);
            if (c + kVector > V) gradient = first8(gradient, V - c, 0.0f);
            store8(row + c, gradient * scale);
        }
    }
}

// losses (N) =; logits (N, Vp); targets (N); inv_valid: one float on the device, read with WriteGradients only (else nullptr will do)
template <bool WriteGradients>
inline void cross_entropy(float* losses, floatX* logits, const int* targets, const float* inv_valid, int N, int V, int Vp, cudaStream_t stream) {
    NvtxRange range(__func__);
    CHECK(V > 0 && V <= Vp && Vp % kVector == 0, "cross_entropy: vocabulary %d, padded %d; the padded one must be a multiple of %d and not smaller", V, Vp, kVector);
    if (N == 0) return;
    with_bool(Vp > kCrossEntropyNarrow, [&](auto wide) {
        constexpr int kThreads = wide.value ? kCrossEntropyWideThreads : kWarpSize;
        launch(cross_entropy_kernel<WriteGradients, kThreads>, N, kThreads, 0, stream, losses, logits, targets, inv_valid, V, Vp);
    });
}
