// What the multi-rank tests of the ZeRO engine share: the trainer itself, checks that all ranks agree on, state and gradients independent of who holds them.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>

#include "dev/test/roundoff.h"
#include "llmc/device_setup.cuh"
#include "llmc/evaluate.cuh"
#include "llmc/weights.cuh"

// A few layers of awkward sizes; the two kinds of head, bias and QK-norm.
inline ModelConfig small_model(bool tied, int num_layers, int vocab_size) {
    ModelConfig config;
    config.name = "small";
    config.num_layers = num_layers;
    config.channels = 40;
    config.num_heads = 4;
    config.num_kv_heads = 2;
    config.head_dim = 8;
    config.ffn_dim = 56;
    config.vocab_size = vocab_size;
    config.max_seq_len = 32;
    config.tied = tied;
    config.qkv_bias = tied;
    config.qk_norm = !tied;
    config.validate();
    return config;
}

// Logical elements of the model: positions that depend on neither ranks nor buckets.
inline size_t logical_count(const ParamTable& table) { return table.units.back().logical_begin + table.units.back().count; }

struct Check {
    const Process& process;
    int passed = 0, failed = 0;

    // All ranks must agree that it holds.
    void expect(bool fine, const std::string& what) {
        int all = fine;
        MPI_Allreduce(MPI_IN_PLACE, &all, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
        (all ? passed : failed)++;
        if (process.rank == 0) printf("%s %s\n", all ? "ok    " : "FAILED", what.c_str());
        if (!fine && process.rank != 0) printf("       (rank %d) %s\n", process.rank, what.c_str());
    }
};

// Elements of a rank's own slices put at their logical positions, zero elsewhere, then merged over ranks: the whole state, independent of stage. owned_values(owned)
// gives the first element of what this rank owns of a bucket.
template <class OwnedValues>
inline std::vector<uint32_t> gather_bits(const Trainer& trainer, OwnedValues&& owned_values) {
    std::vector<uint32_t> bits(logical_count(trainer.table), 0);
    for (size_t b = 0; b < trainer.zero.layout().buckets.size(); ++b) {
        const Bucket& bucket = trainer.zero.layout().buckets[b];
        const ZeroEngine::Owned owned = trainer.zero.owned_by_this_rank(b);
        const auto* values = owned_values(owned);
        using T = std::remove_cv_t<std::remove_pointer_t<decltype(values)>>;
        std::vector<T> own(owned.count);
        CUDA_CHECK(cudaMemcpyAsync(own.data(), values, owned.count * sizeof(T), cudaMemcpyDeviceToHost, trainer.stream));
        CUDA_CHECK(cudaStreamSynchronize(trainer.stream));
        for (size_t i = 0; i < owned.count; ++i) {
            const size_t in_bucket = owned.begin - bucket.begin + i;
            if (in_bucket >= bucket.unit_count) continue;  // padding
            uint32_t word = 0;
            memcpy(&word, &own[i], sizeof(T));
            bits[bucket.logical_begin + in_bucket] = word;
        }
    }
    MPI_Allreduce(MPI_IN_PLACE, bits.data(), static_cast<int>(bits.size()), MPI_UINT32_T, MPI_BOR, MPI_COMM_WORLD);
    return bits;
}

// The number of valid targets of the global batch, as if this trainer had counted it.
inline void set_valid_tokens(Trainer& trainer, unsigned long long valid) {
    const float inv_valid = static_cast<float>(1.0 / static_cast<double>(valid));
    CUDA_CHECK(cudaMemcpyAsync(&trainer.state->inv_valid_tokens, &inv_valid, sizeof(float), cudaMemcpyHostToDevice, trainer.stream));
}

inline const Parameter& head_weight(const Trainer& trainer) { return trainer.table.find(trainer.table.tied ? "model.embed_tokens.weight" : "lm_head.weight"); }

// The gradients of the head's weight in the place where they are accumulated; one-rank trainer, stage 0.
inline std::vector<float> read_head_weight_gradient(const Trainer& trainer) {
    const Parameter& p = head_weight(trainer);
    const FlatLayout& layout = trainer.zero.layout();
    const int b = layout.bucket_of_unit[p.unit];
    return trainer.zero.gradients().read(b, trainer.table.units[p.unit].logical_begin + p.offset - layout.buckets[b].logical_begin, p.stored_count());
}

// Forward and head of one micro-batch as Trainer::queue does it, with the number of valid targets that set_valid_tokens() gave.
inline void queue_forward_and_head(Trainer& trainer, const BatchBuffers& batch) {
    trainer.copy_ids(batch, static_cast<size_t>(trainer.B) * trainer.T);
    trainer.phases.begin_step(0);
    for (const ScheduleOp& op : trainer.zero.schedule().step) {
        if (op.kind == OpKind::kForward) trainer.queue(op);
    }
    trainer.model.head_forward_backward(trainer.zero, trainer.targets, &trainer.state->inv_valid_tokens);
    trainer.phases.enter(nullptr);
}

// One micro-batch on a one-rank trainer of stage 0 and one micro-step: adds its gradients and their magnitudes, in double, by logical position. Returns its sum of
// losses.
// The magnitude of the head's weight is that of its addends, one for each chunk of the head. In chunks the trainer has fp32 gradients, which hold every addend as
// it is and their sum but for chunks - 1 fp32 roundings, and as many chunks as the run that is judged: a product of other rows may add in another order, and what
// that does to a gradient that cancels has no bound in its size.
inline double add_micro_batch_gradients(Trainer& trainer, const BatchBuffers& batch, std::vector<double>* sum, std::vector<double>* magnitude) {
    queue_forward_and_head(trainer, batch);
    const size_t count = static_cast<size_t>(trainer.B) * trainer.T;
    double loss_sum = 0;
    for (const float loss : read_floats(trainer.model.losses(), count, trainer.stream)) loss_sum += loss;
    for (const ScheduleOp& op : trainer.zero.schedule().step) {
        if (op.kind == OpKind::kBackward || op.kind == OpKind::kReduce || op.kind == OpKind::kGatherGradients) trainer.queue(op);
    }
    trainer.phases.enter(nullptr);
    const Parameter& head = head_weight(trainer);
    const size_t head_begin = trainer.table.units[head.unit].logical_begin + head.offset;
    std::vector<double> last(head.stored_count());  // addend of the head's weight
    for (size_t b = 0; b < trainer.zero.layout().buckets.size(); ++b) {
        const Bucket& bucket = trainer.zero.layout().buckets[b];
        const std::vector<float> own = trainer.zero.gradients().read(b, 0, bucket.unit_count);
        for (size_t i = 0; i < own.size(); ++i) {
            const size_t position = bucket.logical_begin + i;
            (*sum)[position] += own[i];
            if (position >= head_begin && position - head_begin < last.size()) {
                last[position - head_begin] = own[i];
            } else {
                (*magnitude)[position] += std::fabs(own[i]);
            }
        }
    }
    // Where only one chunk's targets count, the other chunks' addends are 0. The last addend is what is left: a tied embedding's own part, which comes after the
    // head, goes into it.
    const int chunks = trainer.zero.config().lmhead_chunks;
    const size_t rows = count / chunks;
    const std::vector<int> targets(batch.targets, batch.targets + count);
    for (int chunk = 0; chunk + 1 < chunks; ++chunk) {
        for (size_t row = 0; row < count; ++row) batch.targets[row] = row / rows == static_cast<size_t>(chunk) ? targets[row] : -1;
        queue_forward_and_head(trainer, batch);
        const std::vector<float> addend = read_head_weight_gradient(trainer);
        for (size_t i = 0; i < last.size(); ++i) {
            (*magnitude)[head_begin + i] += std::fabs(addend[i]);
            last[i] -= addend[i];
        }
    }
    std::copy(targets.begin(), targets.end(), batch.targets);
    for (size_t i = 0; i < last.size(); ++i) (*magnitude)[head_begin + i] += std::fabs(last[i]);
    return loss_sum;
}

// This rank's reduced gradients and the logged norm against the sum of every micro-batch's own gradients.
inline void check_gradients(Check& check, const Trainer& trainer, float grad_norm, const std::vector<double>& sum, const std::vector<double>& magnitude,
                     const std::string& what) {
    // On its way an addend meets at most micro_steps * chunks - 1 stochastic roundings (twice the roundoff each) and N - 1 hops of the ring, in either order;
    // every partial sum is at most the sum of magnitudes, grown by the roundings so far. In fp32 the roundings are fp32's.
    const ZeroConfig& config = trainer.zero.config();
    const double u = config.fp32_gradients ? kRoundoff<float> : kRoundoff<floatX>;
    const double roundings = 2.0 * (trainer.micro_steps * config.lmhead_chunks - 1) + (trainer.comm.size() - 1);
    // The expected sum has roundings of its own: add_micro_batch_gradients().
    const double factor = std::expm1(roundings * std::log1p(u) + (config.lmhead_chunks - 1) * std::log1p(kRoundoff32));
    size_t wrong = 0, compared = 0;
    double largest = 0;
    for (size_t b = 0; b < trainer.zero.layout().buckets.size(); ++b) {
        const Bucket& bucket = trainer.zero.layout().buckets[b];
        const ZeroEngine::Owned owned = trainer.zero.owned_by_this_rank(b);
        const std::vector<float> own = trainer.zero.gradients().read(b, 0, owned.count);
        for (size_t i = 0; i < own.size(); ++i) {
            const size_t in_bucket = owned.begin - bucket.begin + i;
            const bool padding = in_bucket >= bucket.unit_count;
            const double expected = padding ? 0 : sum[bucket.logical_begin + in_bucket];
            // The smallest subnormal covers results that underflow.
            const double allowed = padding ? 0 : factor * magnitude[bucket.logical_begin + in_bucket] + 1e-40;
            const double error = std::fabs(own[i] - expected);
            if (!(error <= allowed)) ++wrong;
            if (allowed > 0) largest = std::max(largest, error / allowed);
            ++compared;
        }
    }
    check.expect(wrong == 0 && compared > 0, format("%s: %zu gradients against the sum of every micro-batch's own, largest error %.2f of the bound", what.c_str(), compared, largest));
    double squares = 0, magnitude_squares = 0;
    for (size_t i = 0; i < sum.size(); ++i) {
        squares += sum[i] * sum[i];
        magnitude_squares += magnitude[i] * magnitude[i];
    }
    // |‖a‖ - ‖b‖| <= ‖a - b‖, plus the norm's own fp32 arithmetic: chunks of eight squares, a rounding of the result.
    const double allowed = factor * std::sqrt(magnitude_squares) + 8 * 0x1p-24 * std::sqrt(squares);
    check.expect(std::fabs(grad_norm - std::sqrt(squares)) <= allowed,
                 format("%s: gradient norm %.7g, expected %.7g within %.1e", what.c_str(), grad_norm, std::sqrt(squares), allowed));
}
