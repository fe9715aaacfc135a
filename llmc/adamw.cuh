// AdamW with fp32 master weights (PyTorch's definition).
//
//   g = clip_factor * grad                    p = p * (1 - lr * weight_decay)   where the decay map says so
//   m = m + (1 - beta1) * (g - m)             v = beta2 * v + (1 - beta2) * g^2
//   p = p - lr / bias_correction1 * m / (sqrt(v / bias_correction2) + eps)
//
// p is the fp32 master; params is p rounded to nearest. Everything is updated in place; with state->skip nothing is touched.
// Bytes moved an element (bf16): 2 gradient, 2 parameter, 3 x 8 master, m, v = 28. One vector a thread: on a GPU eight 16-byte
// requests are in flight in each, on a CPU neighbouring threads walk each array in order.
#pragma once

#include "llmc/device.cuh"
#include "llmc/step_state.cuh"

inline constexpr int kAdamwThreads = 256;

// Elements one byte of the decay map speaks for; parameters start on 256 bytes, which is 128 bf16.
inline constexpr size_t kDecayGranule = 128;

template <typename Grad>
__global__ void __launch_bounds__(kAdamwThreads)
    adamw_update_kernel(floatX* params, float* master, float* m, float* v, const Grad* grads, const uint8_t* decay_map, size_t first, size_t n, const StepState* state,
                        float one_minus_beta1, float beta2, float one_minus_beta2, float eps, float weight_decay) {
    const size_t i = (static_cast<size_t>(blockIdx.x) * kAdamwThreads + threadIdx.x) * kVector;
    if (i >= n || state->skip) return;
    const float lr = state->lr;
    const float step_size = lr / state->bias_correction1;
    const float inv_sqrt_correction2 = 1.0f / sqrtf(state->bias_correction2);
    const float keep = decay_map[(first + i) / kDecayGranule] ? fmaf(-lr, weight_decay, 1.0f) : 1.0f;

    const Float8 g = load8(grads + i) * state->clip_factor;
    Float8 moment1 = load8(m + i), moment2 = load8(v + i), p = load8(master + i);
    moment1 = fma8(g - moment1, set8(one_minus_beta1), moment1);
    moment2 = fma8(g * one_minus_beta2, g, moment2 * beta2);
    p = p * keep - step_size * moment1 / (sqrt8(moment2) * inv_sqrt_correction2 + eps);
    store8(m + i, moment1);
    store8(v + i, moment2);
    store8(master + i, p);
    store8(params + i, p);
}

// All arrays (n), n a multiple of 8. decay_map: one byte per 128 elements of the space in which the slice's first element is `first`.
template <typename Grad>
inline void adamw_update(floatX* params, float* master, float* m, float* v, const Grad* grads, const uint8_t* decay_map, size_t first, size_t n, const StepState* state,
                         double beta1, double beta2, double eps, double weight_decay, cudaStream_t stream) {
    NvtxRange range(__func__);
    CHECK(n % kVector == 0 && first % kVector == 0, "adamw_update: %zu elements from %zu; both must be multiples of %d", n, first, kVector);
    if (n == 0) return;
    // 1 - beta in double: in float 1 - 0.999f would be off by 1e-5 of itself.
    launch(adamw_update_kernel<Grad>, grid_for(n, kAdamwThreads * kVector), kAdamwThreads, 0, stream, params, master, m, v, grads, decay_map, first, n, state,
           static_cast<float>(1.0 - beta1), static_cast<float>(beta2), static_cast<float>(1.0 - beta2), static_cast<float>(eps), static_cast<float>(weight_decay));
}
