// Gradient accumulation: acc (+=) addend.
//
// In bf16 the sum is rounded stochastically: rounding to nearest would drop every addend below half an ulp of the sum, always, and
// a sum of many micro-steps would stall. The noise is keyed by (seed, step, logical element, addend), so it does not depend on who holds the
// element, and different addends get independent errors. In fp32 the sum is plain. A NaN in either stays a NaN and an infinity an infinity, or a NaN beside
// its opposite, so the norm sees them and the step is skipped. Bytes moved an element: acc twice, addend once (all in bf16: 2 + 2 read, 2 written).
#pragma once

#include "llmc/device.cuh"
#include "llmc/random.cuh"
#include "llmc/step_state.cuh"

inline constexpr int kAccumulateThreads = 128;
inline constexpr int kAccumulateVectors = 8;  // counters that philox works on at once

template <typename Acc, typename Addend>
__global__ void __launch_bounds__(kAccumulateThreads)
    accumulate_gradient_kernel(Acc* acc, const Addend* addend, size_t n, unsigned long long first_logical, unsigned addend_index, const StepState* state) {
    const size_t first = (static_cast<size_t>(blockIdx.x) * kAccumulateVectors * kAccumulateThreads + threadIdx.x) * kVector;
    constexpr size_t kStride = kAccumulateThreads * kVector;
    uint4 random[kAccumulateVectors];
    if constexpr (!std::is_same_v<Acc, float>) {
#pragma unroll
        for (int j = 0; j < kAccumulateVectors; j++) {
            random[j] = random_counter(RandomPurpose::kStochasticRounding, (first_logical + first + j * kStride) / kVector, state->step, addend_index);
        }
        philox(state->seed, random);
    }
#pragma unroll
    for (int j = 0; j < kAccumulateVectors; j++) {
        const size_t i = first + j * kStride;
        if (i >= n) break;
        const Float8 sum = load8(acc + i) + load8(addend + i);
        if constexpr (std::is_same_v<Acc, float>) {
            store8(acc + i, sum);
        } else {
            store8_stochastic(acc + i, sum, random[j]);
        }
    }
}

// acc, addend (n), each floatX, or float for fp32 gradients; element 0 is logical element first_logical of the flat buffer.
template <typename Acc, typename Addend>
inline void accumulate_gradient(Acc* acc, const Addend* addend, size_t n, unsigned long long first_logical, unsigned addend_index, const StepState* state,
                                cudaStream_t stream) {
    NvtxRange range(__func__);
    CHECK(n % kVector == 0 && first_logical % kVector == 0, "accumulate_gradient: %zu elements from %llu; both must be multiples of %d", n, first_logical, kVector);
    CHECK(addend_index < 1u << 28, "accumulate_gradient: addend %u; at most %u micro-steps x ranks a step; use a larger micro-batch", addend_index, 1u << 28);
    if (n == 0) return;
    launch(accumulate_gradient_kernel<Acc, Addend>, grid_for(n, static_cast<size_t>(kAccumulateThreads) * kAccumulateVectors * kVector), kAccumulateThreads, 0, stream,
           acc, addend, n, first_logical, addend_index, state);
}
