// The ZeRO engine, stages 0 to 3: who holds which slice of parameters, gradients and optimizer state, and how the operations of the schedule
// (schedule.h, which says what the stages are) are queued.
//
// The model only says "I need unit u's parameters", "where do unit u's gradients go" and "unit u's gradients of this micro-step are complete"; it always
// overwrites. Whole or sharded, gathered or in place is decided here, for gradients in gradients.cuh.
//
// Streams: the model computes on `compute`; collectives run on a communication stream of their own (the same one without overlap), ordered by
// events alone. The order of collectives is that of the schedule, so it is the same on every rank.
#pragma once

#include <cmath>
#include <vector>

#include "llmc/adamw.cuh"
#include "llmc/checksum.cuh"
#include "llmc/comm.cuh"
#include "llmc/device_memory.cuh"
#include "llmc/global_norm.cuh"
#include "llmc/gradients.cuh"
#include "llmc/init.cuh"
#include "llmc/order_event.cuh"
#include "llmc/param_table.h"
#include "llmc/reduce.cuh"
#include "llmc/schedule.h"
#include "llmc/span_timer.cuh"
#include "llmc/step_state.cuh"

struct ZeroConfig {
    int stage = 1;
    double bucket_mb = 25;  // 10^6 bytes; 0 = one unit a bucket
    bool overlap = true;
    bool sync_every_micro_step = false;
    int micro_steps = 1;          // G, micro-steps a step
    int lmhead_chunks = 1;        // addends of the head's weight in a micro-step
    bool fp32_gradients = false;  // accumulated and reduced in fp32, not floatX
    double beta1 = 0.9, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1;
};

// Layout and schedule of a run, for whoever trains it or plans it.
inline FlatLayout run_layout(const ParamTable& table, int ranks, const ZeroConfig& config) { return make_flat_layout(table, ranks, config.bucket_mb, sizeof(floatX)); }
inline Schedule run_schedule(const ParamTable& table, const FlatLayout& layout, const ZeroConfig& config) {
    return make_schedule(table, layout, ScheduleConfig{config.stage, config.micro_steps, config.sync_every_micro_step, sizeof(floatX), gradient_element_bytes(config.fp32_gradients)});
}

// How many checksums a rank gives of what should be equal on all: one a bucket for every array that is whole on every rank (parameters, then master weights and moments).
inline size_t checksum_count(const FlatLayout& layout, const Sharding& sharding) {
    if (layout.num_ranks == 1 || sharding.parameters) return 0;  // there are no replicas
    return layout.buckets.size() * (sharding.optimizer ? 1 : 4);
}

// The memory of a run's sharded state. Takes memory, touches none.
struct ZeroMemory {
    GradientMemory gradients;
    floatX* params = nullptr;              // (total_count), or where they are sharded (shard_count)
    size_t state_count = 0;
    float *master = nullptr, *m = nullptr, *v = nullptr;  // (state_count)
    std::vector<floatX*> slots;            // (slot_counts): gathered parameters
    uint8_t* decay_map = nullptr;          // (decay_map_count): one byte per kParameterAlign elements of the flat buffer
    size_t partials_count = 0;
    double* partials = nullptr;            // (partials_count): partial sums of squares, bucket by bucket
    double* rank_sums = nullptr;           // (N, kDecisionNumbers) gathered, then this rank's own: sum of squares, sum of losses, requests

    ZeroMemory(const ParamTable& table, const FlatLayout& layout, const Schedule& schedule, const ZeroConfig& config, DeviceMemory& memory)
        : gradients(table, layout, schedule, gradients_config(config), memory) {
        const Sharding& sharded = schedule.sharding;
        params = memory.allocate<floatX>("parameters", sharded.parameters ? "parameter shard" : "parameters", sharded.parameters ? layout.shard_count : layout.total_count);
        state_count = sharded.optimizer ? layout.shard_count : layout.total_count;
        master = memory.allocate<float>("optimizer", "fp32 master weights", state_count);
        m = memory.allocate<float>("optimizer", "first moments", state_count);
        v = memory.allocate<float>("optimizer", "second moments", state_count);
        for (const size_t count : schedule.slot_counts) slots.push_back(memory.allocate<floatX>("buffers", "gathered parameters", count));
        for (const Bucket& bucket : layout.buckets) partials_count += sum_of_squares_count(bucket.slice_count);
        decay_map = memory.allocate<uint8_t>("buffers", "weight decay map", decay_map_count(layout));
        partials = memory.allocate<double>("buffers", "partial sums of the norm", partials_count);
        rank_sums = memory.allocate<double>("buffers", "sums of each rank", kDecisionNumbers * (static_cast<size_t>(layout.num_ranks) + 1));
    }

    static GradientsConfig gradients_config(const ZeroConfig& config) { return {config.micro_steps, config.lmhead_chunks, config.fp32_gradients}; }
};

class ZeroEngine {
public:
    ZeroEngine(const ParamTable& table, const FlatLayout& layout, const Schedule& schedule, const Communicator& comm, const ZeroConfig& config, const ZeroMemory& memory,
               cudaStream_t compute)
        : table_(table), layout_(layout), schedule_(schedule), comm_(comm), config_(config), compute_(compute), buf_(memory),
          gradients_(table, layout, schedule, comm, ZeroMemory::gradients_config(config), memory.gradients, compute), buckets_(layout.buckets.size()),
          slots_(memory.slots.size()), stalls_(compute) {
        communicate_ = compute_;
        if (config.overlap) {
            // First in line: a collective's few blocks start when any block of the product beside them ends, not after all of them.
            int lowest = 0, highest = 0;
            CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
            CUDA_CHECK(cudaStreamCreateWithPriority(&own_stream_, cudaStreamNonBlocking, highest));
            communicate_ = own_stream_;
        }
        start_state();
        CUDA_CHECK(cudaStreamSynchronize(compute_));
    }
    ZeroEngine(const ZeroEngine&) = delete;
    ZeroEngine& operator=(const ZeroEngine&) = delete;
    ~ZeroEngine() {
        if (own_stream_) cudaStreamDestroy(own_stream_);
    }

    const FlatLayout& layout() const { return layout_; }
    const ZeroConfig& config() const { return config_; }
    const Schedule& schedule() const { return schedule_; }
    const Sharding& sharding() const { return schedule_.sharding; }
    Gradients& gradients() { return gradients_; }
    const Gradients& gradients() const { return gradients_; }
    // Where the compute stream waits for communication; begin_step() and total_ms() are the trainer's.
    SpanTimer& stalls() { return stalls_; }

    // ---- operations of the schedule -------------------------------------------------------------------------------------------
    // Queues one that is not a computation. `state` is read and written by what is queued.
    void queue(const ScheduleOp& op, StepState* state) {
        switch (op.kind) {
            case OpKind::kGather: gather(op.index, op.slot); break;
            case OpKind::kDrop: drop(op.index, op.slot); break;
            case OpKind::kReduce: reduce(op.index, op.micro_step); break;
            case OpKind::kGatherGradients: gather_gradients(op.index); break;
            case OpKind::kDecide: decide(state); break;
            case OpKind::kStep: step(op.index, state); break;
            case OpKind::kCountTargets: case OpKind::kForward: case OpKind::kHead: case OpKind::kBackward: fail("operation %d is not the engine's", static_cast<int>(op.kind));
        }
    }

    // ---- parameters -----------------------------------------------------------------------------------------------------------
    // First element of the unit's parameters, usable by work queued on the compute stream from now until they are dropped.
    const floatX* params(int unit) {
        const int b = layout_.bucket_of_unit[unit];
        BucketState& bucket = buckets_[b];
        CHECK(bucket.params, "the parameters of %s are needed and not gathered: the schedule lacks a gather", table_.units[unit].name.c_str());
        if (bucket.gather_pending) {
            const SpanTimer::Section stall(stalls_);
            bucket.gathered.wait(compute_);
            bucket.gather_pending = false;
        }
        return bucket.params + (layout_.unit_begin[unit] - layout_.buckets[b].begin);
    }

    // Calls fill(parameter, address) for every parameter, to queue on the compute stream what writes it: stored_count() elements, 0 until then. Afterwards every
    // rank holds what it is to hold. Then start_optimizer(). Not inside a step.
    template <class Fill>
    void write_params(Fill&& fill) {
        synchronize();
        for (size_t b = 0; b < layout_.buckets.size(); ++b) {
            const Bucket& bucket = layout_.buckets[b];
            floatX* whole = sharding().parameters ? home_of(b) : buf_.params + bucket.begin;
            CUDA_CHECK(cudaMemsetAsync(whole, 0, bucket.count * sizeof(floatX), compute_));  // padding and gaps stay 0
            for_each_parameter(b, [&](const Parameter& p) { fill(p, whole + offset_in_bucket(p)); });
            if (!sharding().parameters) continue;
            CUDA_CHECK(cudaMemcpyAsync(buf_.params + bucket.slice_begin, whole + comm_.rank() * bucket.slice_count, bucket.slice_count * sizeof(floatX), cudaMemcpyDeviceToDevice,
                                       compute_));
        }
        order(compute_, communicate_);
    }

    // Calls read(parameter, address) for every parameter, to queue on the compute stream what reads it (stored_count() elements). Collective: where parameters
    // are sharded, they are gathered a bucket at a time. Not inside a step.
    template <class Read>
    void read_params(Read&& read) {
        synchronize();
        for (size_t b = 0; b < layout_.buckets.size(); ++b) {
            const Bucket& bucket = layout_.buckets[b];
            const floatX* whole = buf_.params + bucket.begin;
            if (sharding().parameters) {
                order(compute_, communicate_);  // the slot has been read
                comm_.all_gather(home_of(b), buf_.params + bucket.slice_begin, bucket.slice_count, communicate_);
                order(communicate_, compute_);
                whole = home_of(b);
            }
            for_each_parameter(b, [&](const Parameter& p) { read(p, whole + offset_in_bucket(p)); });
        }
        order(compute_, communicate_);
    }

    // Random initialisation of every parameter, by the table: depends on (seed, parameter, element) only.
    void init_params(unsigned long long seed, int num_layers) {
        write_params([&](const Parameter& p, floatX* address) {
            const size_t index = &p - table_.parameters.data();
            const float scaled = 0.02f / std::sqrt(2.0f * num_layers);
            switch (p.init) {
                case Init::kNormal: init_normal(address, p.count(), seed, index, 0.02f, compute_); break;
                case Init::kNormalScaled: init_normal(address, p.count(), seed, index, scaled, compute_); break;
                case Init::kOne: fill(address, p.count(), 1.0f, compute_); break;
                case Init::kZero: fill(address, p.count(), 0.0f, compute_); break;
            }
        });
    }

    // Master weights from the parameters as they are now, moments 0.
    void start_optimizer() {
        for (size_t b = 0; b < layout_.buckets.size(); ++b) {
            const Owned owned = owned_by_this_rank(b);
            copy_to_float(buf_.master + owned.state_begin, owned.params, owned.count, compute_);
            buckets_[b].stepped.record(compute_);
        }
        CUDA_CHECK(cudaMemsetAsync(buf_.m, 0, buf_.state_count * sizeof(float), compute_));
        CUDA_CHECK(cudaMemsetAsync(buf_.v, 0, buf_.state_count * sizeof(float), compute_));
    }

    // Where a piece of what this rank steps is to be written.
    struct StateAddresses {
        floatX* params;
        float *master, *m, *v;
    };
    // In place of write_params() and start_optimizer(), from saved state: calls fill(piece, addresses) for every piece of a parameter that this rank steps, to queue on the compute
    // stream what writes it; 0 elsewhere. Afterwards every rank holds what it is to hold. Collective where the optimizer is sharded and parameters are not. Not inside a step.
    template <class Fill>
    void write_state(Fill&& fill) {
        synchronize();
        CUDA_CHECK(cudaMemsetAsync(buf_.params, 0, (sharding().parameters ? layout_.shard_count : layout_.total_count) * sizeof(floatX), compute_));
        for (float* array : {buf_.master, buf_.m, buf_.v}) CUDA_CHECK(cudaMemsetAsync(array, 0, buf_.state_count * sizeof(float), compute_));
        for (size_t b = 0; b < layout_.buckets.size(); ++b) {
            const Owned owned = owned_by_this_rank(b);
            for (const ParameterPiece& piece : parameter_pieces(table_, layout_, b, owned.begin, owned.count)) {
                const size_t at = owned.state_begin + piece.in_range;
                fill(piece, StateAddresses{owned.params + piece.in_range, buf_.master + at, buf_.m + at, buf_.v + at});
            }
            if (sharding().optimizer && !sharding().parameters) {
                order(compute_, communicate_);
                comm_.all_gather_in_place(buf_.params + layout_.buckets[b].begin, layout_.buckets[b].slice_count, communicate_);
                order(communicate_, compute_);
            }
            buckets_[b].stepped.record(compute_);
        }
    }

    // Calls read(piece, first element) for every piece of this rank's slices in one of master, m and v, bucket by bucket: slices, in every stage, so that each element is saved by
    // one rank. Not inside a step.
    template <class Read>
    void read_state_slices(const float* array, Read&& read) const {
        for (size_t b = 0; b < layout_.buckets.size(); ++b) {
            const Bucket& bucket = layout_.buckets[b];
            const size_t in_bucket = comm_.rank() * bucket.slice_count;
            const float* slice = array + (sharding().optimizer ? bucket.slice_begin : bucket.begin + in_bucket);
            for (const ParameterPiece& piece : parameter_pieces(table_, layout_, b, bucket.begin + in_bucket, bucket.slice_count)) read(piece, slice + piece.in_range);
        }
    }

    // ---- small collectives ----------------------------------------------------------------------------------------------------
    // Gathers `count` numbers of every rank into out (N, count), behind what the communication stream is doing; the compute stream goes on and takes the result
    // with finish_gather(). T: unsigned long long or double.
    template <class T>
    void start_gather(T* out, const T* inp, size_t count) {
        order(compute_, communicate_);
        comm_.all_gather(out, inp, count, communicate_);
        numbers_gathered_.record(communicate_);
    }
    void finish_gather() {
        const SpanTimer::Section stall(stalls_);
        numbers_gathered_.wait(compute_);
    }

    // ---- are replicas equal? ----------------------------------------------------------------------------------------------------
    size_t checksum_count() const { return ::checksum_count(layout_, sharding()); }

    // Queues the checksums of every rank's replicas into out (N, checksum_count()); own (checksum_count()) is scratch. Collective.
    void queue_checksums(unsigned long long* out, unsigned long long* own) {
        if (checksum_count() == 0) return;
        unsigned long long* next = own;
        for (const Bucket& bucket : layout_.buckets) checksum(next++, params(bucket.first_unit), bucket.count, compute_);
        if (!sharding().optimizer) {
            for (const float* array : {buf_.master, buf_.m, buf_.v}) {
                for (const Bucket& bucket : layout_.buckets) checksum(next++, array + bucket.begin, bucket.count, compute_);
            }
        }
        start_gather(out, own, checksum_count());
        finish_gather();
    }

    // ---- for tests and checkpoints ------------------------------------------------------------------------------------------------
    // What this rank steps in a bucket: its slice, or where the optimizer is not sharded all of it.
    struct Owned {
        size_t begin, count;        // elements of the flat buffer
        size_t state_begin;         // elements of master, m, v
        floatX* params;             // first of them
        const void* gradients;      // reduced, after the last micro-step; of the type that gradients().with_type() gives
    };
    Owned owned_by_this_rank(size_t b) const {
        const Bucket& bucket = layout_.buckets[b];
        if (!sharding().optimizer) return {bucket.begin, bucket.count, bucket.begin, buf_.params + bucket.begin, gradients_.stepped(b)};
        const size_t slice = bucket.begin + comm_.rank() * bucket.slice_count;
        return {slice, bucket.slice_count, bucket.slice_begin, buf_.params + (sharding().parameters ? bucket.slice_begin : slice), gradients_.stepped(b)};
    }
    const float* master() const { return buf_.master; }
    const float* first_moments() const { return buf_.m; }
    const float* second_moments() const { return buf_.v; }
    const floatX* any_params() const { return buf_.params; }

    // Waits for both streams (not inside a step).
    void synchronize() const {
        CUDA_CHECK(cudaStreamSynchronize(compute_));
        CUDA_CHECK(cudaStreamSynchronize(communicate_));
    }

private:
    struct BucketState {
        floatX* params = nullptr;     // (bucket count) where they are whole; nullptr while they are not
        bool gather_pending = false;  // the compute stream has not yet waited for `gathered`
        OrderEvent gathered;          // its parameters are whole
        OrderEvent stepped;           // this rank's part was updated
        size_t partials_begin = 0;    // its partial sums of squares
    };
    struct Slot {
        floatX* params = nullptr;
        OrderEvent dropped;  // what used them has run
    };

    // ---- memory ----
    floatX* home_of(size_t b) const { return slots_[schedule_.home_slot[b]].params; }
    size_t offset_in_bucket(const Parameter& p) const { return layout_.unit_begin[p.unit] - layout_.buckets[layout_.bucket_of_unit[p.unit]].begin + p.offset; }

    template <class Function>
    void for_each_parameter(size_t b, Function&& function) const {
        for (int unit = layout_.buckets[b].first_unit; unit < layout_.buckets[b].end_unit; ++unit) {
            for (int i = table_.units[unit].first_parameter; i < table_.units[unit].end_parameter; ++i) function(table_.parameters[i]);
        }
    }

    void start_state() {
        for (size_t slot = 0; slot < slots_.size(); ++slot) slots_[slot].params = buf_.slots[slot];
        size_t partials = 0;
        for (size_t b = 0; b < buckets_.size(); ++b) {
            if (!sharding().parameters) buckets_[b].params = buf_.params + layout_.buckets[b].begin;
            buckets_[b].partials_begin = partials;
            partials += sum_of_squares_count(layout_.buckets[b].slice_count);
        }
        const std::vector<uint8_t> decay_map = make_decay_map(table_, layout_);
        CUDA_CHECK(cudaMemcpyAsync(buf_.decay_map, decay_map.data(), decay_map.size(), cudaMemcpyHostToDevice, compute_));
        CUDA_CHECK(cudaStreamSynchronize(compute_));  // decay_map leaves scope
    }

    // ---- parameters ----
    void gather(int b, int slot) {
        const Bucket& bucket = layout_.buckets[b];
        BucketState& state = buckets_[b];
        const SpanTimer::Section stall(stalls_);
        state.stepped.wait(communicate_);
        if (slot < 0) {
            comm_.all_gather_in_place(buf_.params + bucket.begin, bucket.slice_count, communicate_);
        } else {
            slots_[slot].dropped.wait(communicate_);
            comm_.all_gather(slots_[slot].params, buf_.params + bucket.slice_begin, bucket.slice_count, communicate_);
            state.params = slots_[slot].params;
        }
        state.gathered.record(communicate_);
        state.gather_pending = true;
    }

    void drop(int b, int slot) {
        slots_[slot].dropped.record(compute_);
        buckets_[b].params = nullptr;
    }

    // ---- gradients ----
    // The bucket's gradients of this micro-step are queued on the compute stream: sums them over ranks, and on the last micro-step squares this
    // rank's slice for the norm.
    void reduce(int b, int micro_step) {
        const SpanTimer::Section stall(stalls_);
        order(compute_, communicate_);
        gradients_.reduce(b, micro_step, communicate_);
        if (micro_step < config_.micro_steps - 1) return;
        gradients_.with_type([&](auto* typed) {
            using Gradient = std::remove_pointer_t<decltype(typed)>;
            sum_of_squares(buf_.partials + buckets_[b].partials_begin, static_cast<const Gradient*>(gradients_.reduced_slice(b)), layout_.buckets[b].slice_count, communicate_);
        });
    }

    void gather_gradients(int b) {
        const SpanTimer::Section stall(stalls_);
        gradients_.gather(b, communicate_);
    }

    // ---- the update -------------------------------------------------------------------------------------------------------------
    // After the last micro-step: norm of the averaged gradient, clip or skip, what the ranks ask for. state->loss_sum holds this rank's sum of losses; afterwards state->loss is
    // the global mean.
    void decide(StepState* state) {
        const SpanTimer::Section stall(stalls_);
        order(compute_, communicate_);  // loss_sum is complete
        double* own = buf_.rank_sums + kDecisionNumbers * comm_.size();
        sum_partials(own, buf_.partials, buf_.partials_count, communicate_);
        CUDA_CHECK(cudaMemcpyAsync(own + 1, &state->loss_sum, sizeof(double), cudaMemcpyDeviceToDevice, communicate_));
        CUDA_CHECK(cudaMemcpyAsync(own + 2, &state->requests, sizeof(double), cudaMemcpyDeviceToDevice, communicate_));
        comm_.all_gather(buf_.rank_sums, own, kDecisionNumbers, communicate_);
        decide_step(state, buf_.rank_sums, comm_.size(), config_.beta1, config_.beta2, communicate_);
        order(communicate_, compute_);
    }

    void step(int b, const StepState* state) {
        const Owned owned = owned_by_this_rank(b);
        gradients_.with_type([&](auto* typed) {
            using Gradient = std::remove_pointer_t<decltype(typed)>;
            adamw_update(owned.params, buf_.master + owned.state_begin, buf_.m + owned.state_begin, buf_.v + owned.state_begin, static_cast<const Gradient*>(owned.gradients), buf_.decay_map,
                         owned.begin, owned.count, state, config_.beta1, config_.beta2, config_.eps, config_.weight_decay, compute_);
        });
        buckets_[b].stepped.record(compute_);
    }

    // ---- streams ----
    // Work queued on `later` from now on starts after all that is queued on `earlier`.
    void order(cudaStream_t earlier, cudaStream_t later) {
        if (earlier == later) return;
        order_event_.record(earlier);
        order_event_.wait(later);
    }

    const ParamTable& table_;
    const FlatLayout& layout_;
    const Schedule& schedule_;
    const Communicator& comm_;
    const ZeroConfig config_;
    cudaStream_t compute_, communicate_ = nullptr, own_stream_ = nullptr;
    const ZeroMemory buf_;
    Gradients gradients_;
    std::vector<BucketState> buckets_;
    std::vector<Slot> slots_;

    OrderEvent numbers_gathered_, order_event_;
    SpanTimer stalls_;
};
