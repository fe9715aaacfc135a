// SwiGLU: out = silu(gate) * up, silu(x) = x * sigmoid(x), with gate and up side by side in one row.
//
//   dup = dout * silu(gate)        dgate = dout * up * s * (1 + gate * (1 - s)),  s = sigmoid(gate)
//
// All outputs =. Bytes an element of out (bf16): forward 4 read + 2 written, backward 6 + 4. Requires F a multiple of 8.
#pragma once

#include "llmc/device.cuh"

inline constexpr int kSwigluThreads = 128;  // one block a row: no division by F in the threads

__global__ void __launch_bounds__(kSwigluThreads) swiglu_forward_kernel(floatX* out, const floatX* gate_up, int F) {
    const size_t row = blockIdx.x;
    for (int c = threadIdx.x * kVector; c < F; c += kSwigluThreads * kVector) {
        const Float8 gate = load8(gate_up + row * 2 * F + c), up = load8(gate_up + row * 2 * F + F + c);
        store8(out + row * F + c, gate / (1.0f + exp8(-gate)) * up);
    }
}

// out (N, F) =, gate_up (N, 2 F): gate, then up
inline void swiglu_forward(floatX* out, const floatX* gate_up, int N, int F, cudaStream_t stream) {
    NvtxRange range(__func__);
    CHECK(F % kVector == 0, "swiglu_forward: ffn_dim %d, not a multiple of %d", F, kVector);
    if (N == 0 || F == 0) return;
    launch(swiglu_forward_kernel, N, kSwigluThreads, 0, stream, out, gate_up, F);
}

__global__ void __launch_bounds__(kSwigluThreads) swiglu_backward_kernel(floatX* dgate_up, const floatX* dout, const floatX* gate_up, int F) {
    const size_t row = blockIdx.x;
    for (int c = threadIdx.x * kVector; c < F; c += kSwigluThreads * kVector) {
        const Float8 gate = load8(gate_up + row * 2 * F + c), up = load8(gate_up + row * 2 * F + F + c), d = load8(dout + row * F + c);
        const Float8 sigmoid = 1.0f / (1.0f + exp8(-gate));
        store8(dgate_up + row * 2 * F + c, d * up * sigmoid * (1.0f + gate * (1.0f - sigmoid)));
        store8(dgate_up + row * 2 * F + F + c, d * gate * sigmoid);
    }
}

// dgate_up (N, 2 F) =; dout (N, F), gate_up (N, 2 F). dgate_up may be gate_up: each thread reads what it overwrites.
inline void swiglu_backward(floatX* dgate_up, const floatX* dout, const floatX* gate_up, int N, int F, cudaStream_t stream) {
    NvtxRange range(__func__);
    CHECK(F % kVector == 0, "swiglu_backward: ffn_dim %d, not a multiple of %d", F, kVector);
    if (N == 0 || F == 0) return;
    launch(swiglu_backward_kernel, N, kSwigluThreads, 0, stream, dgate_up, dout, gate_up, F);
}
