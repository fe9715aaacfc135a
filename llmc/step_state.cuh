// The numbers that change from step to step, in device memory, and the small kernels that compute them there.
//
// The host writes the inputs before it queues a step and reads the results one step later; inside a step it never waits. Everything a
// kernel of the step needs (learning rate, 1 / valid tokens, clip factor, skip flag, bias corrections) it reads from here.
#pragma once

#include "llmc/device.cuh"
#include "llmc/schedule.h"

// What a rank asks all ranks for between steps: a signal reaches the ranks at different steps, a clock reads differently on each, so whatever they do about it
// is decided from the requests of all, which travel with the sums of a step.
enum StepRequest : unsigned {
    kRequestStop = 1,   // this rank was told to save and end
    kRequestSave = 2,   // it is time for a checkpoint
    kSaveWritten = 4,   // this rank has written its part of the checkpoint under way
};

struct StepState {
    // Inputs, written by the host.
    float lr;                  // learning rate of this step
    float max_norm;            // clip the gradient to this norm; 0 = off
    unsigned long long step;   // key of the step's random numbers
    unsigned long long seed;   // key of the run's random numbers
    double requests;           // StepRequest bits of this rank

    // Computed on the device.
    unsigned long long valid_tokens;     // targets that count in the global batch
    float inv_valid_tokens;              // 1 / valid_tokens, 0 if there are none
    float loss;                          // mean over the valid tokens, 0 if there are none
    double loss_sum;                     // sum over the valid tokens
    float grad_norm;                     // of the averaged gradient, before clipping
    float clip_factor;                   // what the gradient is multiplied by
    unsigned requests_any, requests_all; // StepRequest bits that some rank has set, and that all have
    int skip;                            // 1: the norm is not finite, the update leaves everything as it is
    float bias_correction1;              // 1 - beta1^applied_steps
    float bias_correction2;              // 1 - beta2^applied_steps
    unsigned long long applied_steps;    // updates made since the beginning of training
    unsigned long long skipped_total;    // updates skipped since then
    unsigned long long skipped_in_row;   // of these, the last ones without an update between
};

// ---- *count = number of targets >= 0 ----
inline constexpr int kCountThreads = 256;
inline constexpr int kCountPerThread = 16;

__global__ void __launch_bounds__(kCountThreads) count_valid_targets_kernel(unsigned long long* count, const int* targets, size_t n) {
    int valid = 0;
#pragma unroll
    for (int j = 0; j < kCountPerThread; j++) {
        const size_t i = (static_cast<size_t>(blockIdx.x) * kCountPerThread + j) * kCountThreads + threadIdx.x;
        if (i < n) valid += targets[i] >= 0;
    }
    // At most 512 a warp: exact in a float. Integer atomics: exact in any order.
    const float total = warp_sum(static_cast<float>(valid));
    if (threadIdx.x % kWarpSize == 0) atomicAdd(count, static_cast<unsigned long long>(total));
}

// targets (n): every target of all micro-steps of this rank. The ranks' counts are then gathered, and added by set_inv_valid.
inline void count_valid_targets(unsigned long long* count, const int* targets, size_t n, cudaStream_t stream) {
    NvtxRange range(__func__);
    CUDA_CHECK(cudaMemsetAsync(count, 0, sizeof(*count), stream));
    if (n == 0) return;
    launch(count_valid_targets_kernel, grid_for(n, kCountThreads * kCountPerThread), kCountThreads, 0, stream, count, targets, n);
}

// ---- valid_tokens (=) sum of the ranks' counts (N), inv_valid_tokens (=) 1 / valid_tokens, 0 if there are none ----
__global__ void set_inv_valid_kernel(StepState* state, const unsigned long long* rank_counts, int N) {
    unsigned long long valid = 0;
    for (int rank = 0; rank < N; rank++) valid += rank_counts[rank];
    state->valid_tokens = valid;
    state->inv_valid_tokens = valid == 0 ? 0.0f : static_cast<float>(1.0 / static_cast<double>(valid));
}

inline void set_inv_valid(StepState* state, const unsigned long long* rank_counts, int N, cudaStream_t stream) {
    NvtxRange range(__func__);
    CHECK(N >= 1, "set_inv_valid: counts of %d ranks; at least one is needed", N);
    launch(set_inv_valid_kernel, 1, 1, 0, stream, state, rank_counts, N);
}

// ---- what the step does, from the ranks' numbers: (N, kDecisionNumbers) squared norm of the rank's slices, loss sum of its tokens, requests; added in rank order ----
__global__ void decide_step_kernel(StepState* state, const double* rank_sums, int N, double beta1, double beta2) {
    double squares = 0, loss_sum = 0;
    unsigned requests_any = 0, requests_all = ~0u;
    for (int rank = 0; rank < N; rank++) {
        const double* numbers = rank_sums + kDecisionNumbers * rank;
        squares += numbers[0];
        loss_sum += numbers[1];
        requests_any |= static_cast<unsigned>(numbers[2]);
        requests_all &= static_cast<unsigned>(numbers[2]);
    }
    state->requests_any = requests_any;
    state->requests_all = requests_all;
    state->loss_sum = loss_sum;
    state->loss = state->valid_tokens == 0 ? 0.0f : static_cast<float>(loss_sum / static_cast<double>(state->valid_tokens));
    const double norm = sqrt(squares);
    // Also false for a NaN.
    const bool finite = norm <= static_cast<double>(kFloatMax);
    state->grad_norm = static_cast<float>(norm);
    state->skip = !finite;
    // torch.nn.utils.clip_grad_norm_: the 1e-6 is its own.
    const double clip = static_cast<double>(state->max_norm) / (norm + 1e-6);
    state->clip_factor = finite && state->max_norm > 0 && clip < 1 ? static_cast<float>(clip) : 1.0f;
    if (!finite) {
        state->skipped_total++;
        state->skipped_in_row++;
        return;
    }
    state->applied_steps++;
    state->skipped_in_row = 0;
    state->bias_correction1 = static_cast<float>(1.0 - pow(beta1, static_cast<double>(state->applied_steps)));
    state->bias_correction2 = static_cast<float>(1.0 - pow(beta2, static_cast<double>(state->applied_steps)));
}

inline void decide_step(StepState* state, const double* rank_sums, int N, double beta1, double beta2, cudaStream_t stream) {
    NvtxRange range(__func__);
    CHECK(N >= 1, "decide_step: sums of %d ranks; at least one is needed", N);
    launch(decide_step_kernel, 1, 1, 0, stream, state, rank_sums, N, beta1, beta2);
}
