// The ZeRO engine, stages 0 to 2: who holds which slice of parameters, gradients and optimizer state, and what crosses the wire when.
//
// The model only says "I need unit u's parameters", "where do unit u's gradients go" and "unit u's gradients of this micro-step are complete";
// it always overwrites. Everything else is decided here:
//
//   stage  whole on every rank              sharded               on the wire a step, each rank (N ranks, x = (N-1)/N, G micro-steps)
//   0      parameters, gradients, optimizer nothing               x gradients (reduce-scatter) + x gradients (all-gather)
//   1      parameters, gradients            optimizer             x gradients + x parameters (all-gather)
//   2      parameters                       gradients, optimizer  G x gradients + x parameters
//
// Stages 0 and 1 reduce on the last micro-step only; stage 2 (and --sync-every-micro-step) reduces each bucket on every micro-step into a
// shard accumulator. Accumulation: the first addend overwrites, each later one goes to a staging buffer and is added by one kernel.
//
// Streams: the model computes on `compute`; collectives run on a communication stream of their own (the same one without overlap), ordered by
// events alone. The order of collectives is a function of layout and stage, so it is the same on every rank.
#pragma once

#include <cmath>
#include <vector>

#include "llmc/accumulate.cuh"
#include "llmc/adamw.cuh"
#include "llmc/comm.cuh"
#include "llmc/device_memory.cuh"
#include "llmc/global_norm.cuh"
#include "llmc/init.cuh"
#include "llmc/param_table.h"
#include "llmc/reduce.cuh"
#include "llmc/span_timer.cuh"
#include "llmc/step_state.cuh"

struct ZeroConfig {
    int stage = 1;
    double bucket_mb = 25;  // 10^6 bytes; 0 = one unit a bucket
    bool overlap = true;
    bool sync_every_micro_step = false;
    int micro_steps = 1;  // G, micro-steps a step
    double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;
};

// An event that orders two streams and carries no time.
class OrderEvent {
public:
    OrderEvent() { CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
    OrderEvent(const OrderEvent&) = delete;
    OrderEvent& operator=(const OrderEvent&) = delete;
    ~OrderEvent() { cudaEventDestroy(event_); }
    void record(cudaStream_t stream) { CUDA_CHECK(cudaEventRecord(event_, stream)); }
    void wait(cudaStream_t stream) { CUDA_CHECK(cudaStreamWaitEvent(stream, event_, 0)); }  // no-op if never recorded

private:
    cudaEvent_t event_ = nullptr;
};

class ZeroEngine {
public:
    ZeroEngine(const ParamTable& table, const Communicator& comm, const ZeroConfig& config, DeviceMemory& memory, cudaStream_t compute)
        : table_(table), comm_(comm), config_(config), compute_(compute),
          layout_(make_flat_layout(table, comm.size(), config.bucket_mb, sizeof(floatX))),
          reduce_every_micro_step_(config.stage >= 2 || config.sync_every_micro_step),
          gather_events_(layout_.buckets.size()), buffer_events_(kRotatingBuffers), bucket_buffer_(layout_.buckets.size()),
          units_left_(layout_.buckets.size()), gather_pending_(layout_.buckets.size(), false), stalls_(compute) {
        CHECK(config.stage >= 0 && config.stage <= 2, "ZeRO stage %d is not available; use 0, 1 or 2", config.stage);
        communicate_ = compute_;
        if (config.overlap) {
            CUDA_CHECK(cudaStreamCreateWithFlags(&own_stream_, cudaStreamNonBlocking));
            communicate_ = own_stream_;
        }
        const bool accumulates = config.micro_steps > 1;
        const size_t embedding_count = table.units[table.embedding_unit()].count;

        params_ = memory.allocate<floatX>("parameters", "parameters", layout_.total_count);
        CUDA_CHECK(cudaMemsetAsync(params_, 0, layout_.total_count * sizeof(floatX), compute_));  // padding and gaps stay 0
        const std::vector<uint8_t> decay_map = make_decay_map(table, layout_);
        decay_map_ = memory.allocate<uint8_t>("optimizer", "weight decay map", decay_map.size());
        CUDA_CHECK(cudaMemcpyAsync(decay_map_, decay_map.data(), decay_map.size(), cudaMemcpyHostToDevice, compute_));

        state_count_ = config.stage == 0 ? layout_.total_count : layout_.shard_count;
        master_ = memory.allocate<float>("optimizer", "fp32 master weights", state_count_);
        m_ = memory.allocate<float>("optimizer", "first moments", state_count_);
        v_ = memory.allocate<float>("optimizer", "second moments", state_count_);

        const bool whole_gradients = config.stage == 0 || !reduce_every_micro_step_;
        if (whole_gradients) {
            gradients_ = memory.allocate<floatX>("gradients", "gradients", layout_.total_count);
            CUDA_CHECK(cudaMemsetAsync(gradients_, 0, layout_.total_count * sizeof(floatX), compute_));
        }
        if (reduce_every_micro_step_) {
            shard_ = memory.allocate<floatX>("gradients", "gradient shard", layout_.shard_count);
            if (accumulates) shard_staging_ = memory.allocate<floatX>("gradients", "shard staging", layout_.max_slice_count);
            for (floatX*& buffer : rotating_) buffer = memory.allocate<floatX>("gradients", "bucket in flight", layout_.max_bucket_count);
            if (table.tied) tied_buffer_ = memory.allocate<floatX>("gradients", "bucket of the tied embedding", layout_.buckets[0].count);
        } else if (accumulates) {
            staging_ = memory.allocate<floatX>("gradients", "micro-step staging", layout_.max_unit_count);
            if (table.tied) tied_staging_ = memory.allocate<floatX>("gradients", "tied embedding staging", embedding_count);
        }

        size_t partials = 0;
        for (const Bucket& bucket : layout_.buckets) {
            partials_begin_.push_back(partials);
            partials += sum_of_squares_count(bucket.slice_count);
        }
        partials_count_ = partials;
        partials_ = memory.allocate<double>("optimizer", "partial sums of the norm", partials);
        rank_sums_ = memory.allocate<double>("optimizer", "sums of each rank", 2 * (comm.size() + 1));
        CUDA_CHECK(cudaStreamSynchronize(compute_));  // decay_map leaves scope
    }
    ZeroEngine(const ZeroEngine&) = delete;
    ZeroEngine& operator=(const ZeroEngine&) = delete;
    ~ZeroEngine() {
        if (own_stream_) cudaStreamDestroy(own_stream_);
    }

    const FlatLayout& layout() const { return layout_; }
    const ZeroConfig& config() const { return config_; }
    // Where the compute stream waits for communication; begin_step() and total_ms() are the trainer's.
    SpanTimer& stalls() { return stalls_; }

    // ---- parameters -----------------------------------------------------------------------------------------------------------
    // First element of the unit's parameters, usable by work queued on the compute stream from now on.
    const floatX* acquire_params(int unit) {
        const int b = layout_.bucket_of_unit[unit];
        if (gather_pending_[b]) {
            const SpanTimer::Section stall(stalls_);
            gather_events_[b].wait(compute_);
            gather_pending_[b] = false;
        }
        return params_ + layout_.unit_begin[unit];
    }

    // The unit's parameters are not needed until the next acquire. Stages 0 to 2 keep them.
    void release_params(int) {}

    // Where the parameter lies, for filling it before start_optimizer() and for reading it after the streams are idle.
    floatX* parameter_address(const Parameter& p) const { return params_ + layout_.unit_begin[p.unit] + p.offset; }

    // Random initialisation of every parameter, by the table: depends on (seed, parameter, element) only.
    void init_params(unsigned long long seed, int num_layers) {
        for (size_t i = 0; i < table_.parameters.size(); ++i) {
            const Parameter& p = table_.parameters[i];
            floatX* address = parameter_address(p);
            const float scaled = 0.02f / std::sqrt(2.0f * num_layers);
            switch (p.init) {
                case Init::kNormal: init_normal(address, p.count(), seed, i, 0.02f, compute_); break;
                case Init::kNormalScaled: init_normal(address, p.count(), seed, i, scaled, compute_); break;
                case Init::kOne: fill(address, p.count(), 1.0f, compute_); break;
                case Init::kZero: fill(address, p.count(), 0.0f, compute_); break;
            }
        }
    }

    // Master weights from the parameters as they are now, moments 0.
    void start_optimizer() {
        for (size_t b = 0; b < layout_.buckets.size(); ++b) {
            const Owned owned = owned_by_this_rank(b);
            copy_to_float(master_ + owned.state_begin, params_ + owned.begin, owned.count, compute_);
        }
        CUDA_CHECK(cudaMemsetAsync(m_, 0, state_count_ * sizeof(float), compute_));
        CUDA_CHECK(cudaMemsetAsync(v_, 0, state_count_ * sizeof(float), compute_));
    }

    // ---- gradients ------------------------------------------------------------------------------------------------------------
    // Starts micro-step `micro_step` of config().micro_steps; `state` gives the random numbers their step.
    void begin_micro_step(int micro_step, const StepState* state) {
        micro_step_ = micro_step;
        state_ = state;
        for (size_t b = 0; b < layout_.buckets.size(); ++b) {
            units_left_[b] = layout_.buckets[b].end_unit - layout_.buckets[b].first_unit;
            bucket_buffer_[b] = nullptr;
        }
    }

    // Where the unit's gradients of this micro-step are to be written (overwritten). Units come in the order of backward; a tied embedding may be
    // begun with the head and ended last.
    floatX* begin_gradients(int unit) {
        floatX* address = gradient_address(unit);
        if (address == gradients_ + layout_.unit_begin[unit] && gradients_) return address;  // its gaps were set to 0 once
        for (const Unit::Gap& gap : table_.units[unit].gaps) CUDA_CHECK(cudaMemsetAsync(address + gap.offset, 0, gap.count * sizeof(floatX), compute_));
        return address;
    }

    // The unit's gradients of this micro-step are queued; reduces its bucket when that was the bucket's last unit.
    void end_gradients(int unit) {
        if (!reduce_every_micro_step_ && micro_step_ > 0) {
            const unsigned addend = static_cast<unsigned>(micro_step_ * comm_.size() + comm_.rank());  // independent rounding errors on every rank
            accumulate_gradient(gradients_ + layout_.unit_begin[unit], staging_address(unit), table_.units[unit].count, table_.units[unit].logical_begin, addend,
                                state_, compute_);
        }
        const int b = layout_.bucket_of_unit[unit];
        if (--units_left_[b] == 0 && (reduce_every_micro_step_ || last_micro_step())) reduce_bucket(b);
    }

    // ---- the step ---------------------------------------------------------------------------------------------------------------
    // After the last micro-step: norm of the averaged gradient, clip or skip, AdamW on what this rank owns, parameters to everybody.
    // state->loss_sum holds this rank's sum of losses; afterwards state->loss is the global mean.
    void update(StepState* state) {
        {
            const SpanTimer::Section stall(stalls_);
            order(compute_, communicate_);  // loss_sum is complete
            double* own = rank_sums_ + 2 * comm_.size();
            sum_partials(own, partials_, partials_count_, communicate_);
            CUDA_CHECK(cudaMemcpyAsync(own + 1, &state->loss_sum, sizeof(double), cudaMemcpyDeviceToDevice, communicate_));
            comm_.all_gather(rank_sums_, own, 2, communicate_);
            decide_step(state, rank_sums_, comm_.size(), config_.beta1, config_.beta2, communicate_);
            order(communicate_, compute_);
        }
        for (size_t b = 0; b < layout_.buckets.size(); ++b) {  // in the order the next forward needs them
            const Bucket& bucket = layout_.buckets[b];
            const Owned owned = owned_by_this_rank(b);
            adamw_update(params_ + owned.begin, master_ + owned.state_begin, m_ + owned.state_begin, v_ + owned.state_begin, owned.gradients, decay_map_, owned.begin,
                         owned.count, state, config_.beta1, config_.beta2, config_.eps, config_.weight_decay, compute_);
            if (config_.stage == 0) continue;  // every rank updated everything
            const SpanTimer::Section stall(stalls_);
            order(compute_, communicate_);
            comm_.all_gather_in_place(params_ + bucket.begin, bucket.slice_count, communicate_);
            gather_events_[b].record(communicate_);
            gather_pending_[b] = true;
        }
    }

    // Starts the sum over ranks of whole numbers, in place, behind what the communication stream is doing (the parameters' gathers); the compute stream goes
    // on with the forward pass and takes the result with finish_count_reduction().
    void start_count_reduction(unsigned long long* counts, size_t count) {
        order(compute_, communicate_);
        comm_.all_reduce_counts(counts, count, communicate_);
        counts_event_.record(communicate_);
    }
    void finish_count_reduction() {
        const SpanTimer::Section stall(stalls_);
        counts_event_.wait(compute_);
    }

    // Gathers `count` doubles of every rank into out (N, count), ordered after and before work on the compute stream.
    void all_gather_doubles(double* out, const double* inp, size_t count) {
        order(compute_, communicate_);
        comm_.all_gather(out, inp, count, communicate_);
        order(communicate_, compute_);
    }

    // ---- for tests and checkpoints ------------------------------------------------------------------------------------------------
    // What this rank steps in a bucket: its slice, or in stage 0 all of it.
    struct Owned {
        size_t begin, count;        // elements of the flat buffer
        size_t state_begin;         // elements of master, m, v
        const floatX* gradients;    // reduced, after the last micro-step
    };
    Owned owned_by_this_rank(size_t b) const {
        const Bucket& bucket = layout_.buckets[b];
        const size_t slice = bucket.begin + comm_.rank() * bucket.slice_count;
        if (config_.stage == 0) return {bucket.begin, bucket.count, bucket.begin, gradients_ + bucket.begin};
        return {slice, bucket.slice_count, bucket.slice_begin, reduced_slice(b)};
    }
    const floatX* params() const { return params_; }
    const float* master() const { return master_; }
    const float* first_moments() const { return m_; }
    const float* second_moments() const { return v_; }

    // Waits for both streams (not inside a step).
    void synchronize() const {
        CUDA_CHECK(cudaStreamSynchronize(compute_));
        CUDA_CHECK(cudaStreamSynchronize(communicate_));
    }

private:
    static constexpr int kRotatingBuffers = 2;  // one is written by backward while the other is reduced

    bool last_micro_step() const { return micro_step_ == config_.micro_steps - 1; }
    bool is_tied_embedding(int unit) const { return table_.tied && unit == table_.embedding_unit(); }
    floatX* staging_address(int unit) const { return is_tied_embedding(unit) ? tied_staging_ : staging_; }

    floatX* gradient_address(int unit) {
        if (!reduce_every_micro_step_) return micro_step_ == 0 ? gradients_ + layout_.unit_begin[unit] : staging_address(unit);
        const int b = layout_.bucket_of_unit[unit];
        const Bucket& bucket = layout_.buckets[b];
        if (!bucket_buffer_[b]) {
            if (table_.tied && b == 0) {
                tied_buffer_event_.wait(compute_);
                bucket_buffer_[b] = tied_buffer_;
            } else {
                next_rotating_ = (next_rotating_ + 1) % kRotatingBuffers;
                buffer_events_[next_rotating_].wait(compute_);  // its last reduction must have read it
                bucket_buffer_[b] = rotating_[next_rotating_];
            }
            if (bucket.count > bucket.unit_count) {
                CUDA_CHECK(cudaMemsetAsync(bucket_buffer_[b] + bucket.unit_count, 0, (bucket.count - bucket.unit_count) * sizeof(floatX), compute_));
            }
        }
        return bucket_buffer_[b] + (layout_.unit_begin[unit] - bucket.begin);
    }

    floatX* reduced_slice(size_t b) const {
        const Bucket& bucket = layout_.buckets[b];
        if (reduce_every_micro_step_) return shard_ + bucket.slice_begin;
        return gradients_ + bucket.begin + comm_.rank() * bucket.slice_count;
    }

    // The bucket's gradients of this micro-step are queued on the compute stream: sum them over ranks, and on the last micro-step square this
    // rank's slice for the norm.
    void reduce_bucket(int b) {
        const Bucket& bucket = layout_.buckets[b];
        const SpanTimer::Section stall(stalls_);
        order(compute_, communicate_);
        if (reduce_every_micro_step_) {
            floatX* slice = micro_step_ == 0 ? reduced_slice(b) : shard_staging_;
            comm_.reduce_scatter(slice, bucket_buffer_[b], bucket.slice_count, communicate_);
            if (bucket_buffer_[b] == tied_buffer_) {
                tied_buffer_event_.record(communicate_);
            } else {
                buffer_events_[bucket_buffer_[b] == rotating_[0] ? 0 : 1].record(communicate_);
            }
            if (micro_step_ > 0) {
                accumulate_gradient(reduced_slice(b), slice, bucket.slice_count, bucket.logical_begin + comm_.rank() * bucket.slice_count,
                                    static_cast<unsigned>(micro_step_), state_, communicate_);
            }
        } else {
            comm_.reduce_scatter_in_place(gradients_ + bucket.begin, bucket.slice_count, communicate_);
        }
        if (!last_micro_step()) return;
        sum_of_squares(partials_ + partials_begin_[b], reduced_slice(b), bucket.slice_count, communicate_);
        if (config_.stage == 0) comm_.all_gather(gradients_ + bucket.begin, reduced_slice(b), bucket.slice_count, communicate_);
    }

    // Work queued on `later` from now on starts after all that is queued on `earlier`.
    void order(cudaStream_t earlier, cudaStream_t later) {
        if (earlier == later) return;
        order_event_.record(earlier);
        order_event_.wait(later);
    }

    const ParamTable& table_;
    const Communicator& comm_;
    ZeroConfig config_;
    cudaStream_t compute_, communicate_ = nullptr, own_stream_ = nullptr;
    FlatLayout layout_;
    bool reduce_every_micro_step_;

    floatX* params_ = nullptr;         // (total_count)
    floatX* gradients_ = nullptr;      // (total_count): whole gradients, stages 0 and 1
    floatX* staging_ = nullptr;        // (max_unit_count): later micro-steps of stages 0 and 1
    floatX* tied_staging_ = nullptr;   // (embedding unit)
    floatX* shard_ = nullptr;          // (shard_count): reduced slices, stage 2
    floatX* shard_staging_ = nullptr;  // (max_slice_count): a later micro-step's reduced slice
    floatX* rotating_[kRotatingBuffers] = {};  // (max_bucket_count) each: buckets between backward and reduction
    floatX* tied_buffer_ = nullptr;    // (bucket 0): a tied embedding's gradient lives from head to end of backward
    float *master_ = nullptr, *m_ = nullptr, *v_ = nullptr;  // (state_count_)
    uint8_t* decay_map_ = nullptr;     // one byte per kParameterAlign elements of the flat buffer
    double* partials_ = nullptr;       // partial sums of squares, bucket by bucket
    double* rank_sums_ = nullptr;      // (N, 2) gathered, then this rank's own 2: sum of squares, sum of losses
    size_t state_count_ = 0, partials_count_ = 0;
    std::vector<size_t> partials_begin_;

    std::vector<OrderEvent> gather_events_;  // bucket's parameters are whole again
    std::vector<OrderEvent> buffer_events_;  // rotating buffer has been read
    OrderEvent tied_buffer_event_, counts_event_, order_event_;
    std::vector<floatX*> bucket_buffer_;     // this micro-step's buffer of a bucket
    std::vector<int> units_left_;
    std::vector<bool> gather_pending_;       // the compute stream has not yet waited for the bucket's gather
    SpanTimer stalls_;
    int next_rotating_ = 0, micro_step_ = 0;
    const StepState* state_ = nullptr;
};
