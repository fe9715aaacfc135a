// Where gradients are written, accumulated and reduced, whole or as this rank's shard.
//
// A unit's gradients come in addends: one a micro-step, for the head's weight one a chunk of the head. The model always overwrites what it is given. An addend that is
// the first of a step (or, where gradients are reduced on every micro-step, of a micro-step) is written to its place; each later one goes to a staging buffer and is
// added by one kernel, in the gradients' type: floatX with stochastic rounding, or fp32, where every addend goes through the staging buffer because products
// write floatX.
//
//   reduced                 place of a unit's gradients             over micro-steps                  afterwards
//   once a step             the whole gradients                     added there                       this rank's slice of each bucket, in place
//   on every micro-step     one of two buckets in flight            reduced slices added in a shard   the shard
#pragma once

#include <algorithm>
#include <vector>

#include "llmc/accumulate.cuh"
#include "llmc/comm.cuh"
#include "llmc/device_memory.cuh"
#include "llmc/init.cuh"
#include "llmc/order_event.cuh"
#include "llmc/param_table.h"
#include "llmc/schedule.h"
#include "llmc/step_state.cuh"

struct GradientsConfig {
    int micro_steps = 1;    // G
    int lmhead_chunks = 1;  // addends of the head's weight in a micro-step
    bool fp32 = false;      // accumulated and reduced in fp32, not floatX
};

inline size_t gradient_element_bytes(bool fp32) { return fp32 ? sizeof(float) : sizeof(floatX); }

// The memory gradients need. Takes memory, touches none.
struct GradientMemory {
    void* gradients = nullptr;         // (total_count): where they are whole
    void* shard = nullptr;             // (shard_count): reduced slices, where every micro-step is reduced
    void* shard_staging = nullptr;     // (max_slice_count): a later micro-step's reduced slice
    std::vector<void*> in_flight;      // (count) each: between backward and reduction (buckets_in_flight())
    void* apart_in_flight = nullptr;   // (apart_count)
    std::vector<bool> is_apart;        // of each bucket: it uses that one
    floatX* staging = nullptr;         // (largest unit): an addend that is to be added
    floatX* tied_staging = nullptr;    // (embedding unit)

    GradientMemory(const ParamTable& table, const FlatLayout& layout, const Schedule& schedule, const GradientsConfig& config, DeviceMemory& memory) {
        const size_t element_bytes = gradient_element_bytes(config.fp32);
        const auto allocate = [&](const char* category, const char* name, size_t count) -> void* { return memory.allocate<char>(category, name, count * element_bytes); };
        // Stage 0 needs them whole after the reduction too.
        if (!schedule.reduce_every_micro_step || !schedule.sharding.optimizer) gradients = allocate("gradients", "gradients", layout.total_count);
        if (schedule.reduce_every_micro_step) {
            shard = allocate("gradients", "gradient shard", layout.shard_count);
            if (config.micro_steps > 1) shard_staging = allocate("staging", "shard staging", layout.max_slice_count);
            const BucketsInFlight buffers = buckets_in_flight(table, layout);
            in_flight.resize(buffers.in_turn);
            for (void*& buffer : in_flight) buffer = allocate("buffers", "gradient bucket in flight", buffers.count);
            apart_in_flight = allocate("buffers", "gradient bucket of embedding and head in flight", buffers.apart_count);
            is_apart = buffers.apart;
        }
        // Who writes to a staging buffer: every unit, or the one with the head's weight.
        const bool every_unit = widens(config) || (!schedule.reduce_every_micro_step && config.micro_steps > 1), chunks = config.lmhead_chunks > 1;
        size_t largest = 0;
        for (int unit = 0; unit < static_cast<int>(table.units.size()); ++unit) {
            if (table.tied && unit == table.embedding_unit()) continue;
            if (every_unit || (chunks && !table.tied && unit == table.head_unit())) largest = std::max(largest, table.units[unit].count);
        }
        staging = memory.allocate<floatX>("staging", "gradient staging", largest);
        if (!table.tied || !(every_unit || chunks)) return;
        tied_staging = memory.allocate<floatX>("staging", "gradient staging of the tied embedding", table.units[table.embedding_unit()].count);
    }

    // Products write floatX, gradients are kept in fp32.
    static bool widens(const GradientsConfig& config) { return config.fp32 && !std::is_same_v<floatX, float>; }
};

class Gradients {
public:
    // All work but the reductions is queued on `compute`.
    Gradients(const ParamTable& table, const FlatLayout& layout, const Schedule& schedule, const Communicator& comm, const GradientsConfig& config, const GradientMemory& memory,
              cudaStream_t compute)
        : table_(table), layout_(layout), comm_(comm), config_(config), buf_(memory), fp32_(config.fp32 || std::is_same_v<floatX, float>),
          reduce_every_micro_step_(schedule.reduce_every_micro_step), whole_(!schedule.sharding.optimizer), compute_(compute), in_flight_(memory.in_flight.size()),
          bucket_in_flight_(layout.buckets.size()), units_(table.units.size()) {
        for (size_t i = 0; i < in_flight_.size(); ++i) in_flight_[i].data = memory.in_flight[i];
        apart_in_flight_.data = memory.apart_in_flight;
        if (buf_.gradients) CUDA_CHECK(cudaMemsetAsync(buf_.gradients, 0, layout.total_count * element_bytes(), compute));
    }
    Gradients(const Gradients&) = delete;
    Gradients& operator=(const Gradients&) = delete;

    // function(T*) with the type gradients are kept in.
    template <class Function>
    void with_type(Function&& function) const {
        fp32_ ? function(static_cast<float*>(nullptr)) : function(static_cast<floatX*>(nullptr));
    }

    // ---- the model writes ------------------------------------------------------------------------------------------------------
    // Starts micro-step `micro_step`; `state` gives the random numbers their step.
    void begin_micro_step(int micro_step, const StepState* state) {
        micro_step_ = micro_step;
        state_ = state;
        for (Buffer*& buffer : bucket_in_flight_) buffer = nullptr;
        if (micro_step > 0 && !reduce_every_micro_step_) return;
        for (UnitState& unit : units_) unit.started = false;
    }

    // Where the unit's next addend is to be written (overwritten). Units come in the order of backward; a tied embedding may be begun with the head and
    // ended last. A micro-step's gradients are one addend, or `addends` of them, of which this is number `addend`: each but the last may hold a part of the unit
    // only, which is ended with end_part().
    floatX* begin(int unit, int addend = 0, int addends = 1) {
        const Unit& u = table_.units[unit];
        UnitState& state = units_[unit];
        // Independent rounding errors on every rank, micro-step and chunk.
        state.addend = static_cast<unsigned>((micro_step_ * comm_.size() + comm_.rank()) * addends + addend);
        if (addends > 1 && !state.started) {  // which part comes first is not known here: all are added to 0
            CUDA_CHECK(cudaMemsetAsync(place_of(unit), 0, u.count * element_bytes(), compute_));
            state.started = true;
        }
        const bool direct = !state.started && !widens();
        state.open = direct ? static_cast<floatX*>(place_of(unit)) : is_tied_embedding(unit) ? buf_.tied_staging : buf_.staging;
        if (direct && !reduce_every_micro_step_) return state.open;  // its gaps were set to 0 once
        for (const Unit::Gap& gap : u.gaps) CUDA_CHECK(cudaMemsetAsync(state.open + gap.offset, 0, gap.count * sizeof(floatX), compute_));
        return state.open;
    }

    // Where the addend that was begun last is being written.
    floatX* open(int unit) const { return units_[unit].open; }

    // The elements [offset, offset + count) of an addend that is not the micro-step's last are queued: adds them.
    void end_part(int unit, size_t offset, size_t count) { add_open_addend(unit, offset, count); }

    // The last addend of this micro-step is queued.
    void end(int unit) {
        UnitState& state = units_[unit];
        if (state.started) {
            add_open_addend(unit, 0, table_.units[unit].count);
        } else if (widens()) {
            copy_to_float(static_cast<float*>(place_of(unit)), state.open, table_.units[unit].count, compute_);
        }
        state.started = true;
        state.open = nullptr;
    }

    // ---- over the ranks, on the stream of communication ---------------------------------------------------------------------------
    // The bucket's gradients of this micro-step are complete where `stream` is now: sums them over ranks into this rank's slice.
    void reduce(int b, int micro_step, cudaStream_t stream) {
        const Bucket& bucket = layout_.buckets[b];
        with_type([&](auto* typed) {
            using T = std::remove_pointer_t<decltype(typed)>;
            if (!reduce_every_micro_step_) {
                comm_.reduce_scatter_in_place(static_cast<T*>(at(buf_.gradients, bucket.begin)), bucket.slice_count, stream);
                return;
            }
            T* shard = static_cast<T*>(at(buf_.shard, bucket.slice_begin));
            T* sum = micro_step == 0 ? shard : static_cast<T*>(buf_.shard_staging);
            Buffer& in_flight = *bucket_in_flight_[b];
            comm_.reduce_scatter(sum, static_cast<const T*>(in_flight.data), bucket.slice_count, stream);
            in_flight.reduced.record(stream);
            if (micro_step == 0) return;
            accumulate_gradient(shard, static_cast<const T*>(sum), bucket.slice_count, bucket.logical_begin + comm_.rank() * bucket.slice_count,
                                first_shard_addend() + micro_step, state_, stream);
        });
    }

    // Every rank's reduced slice of the bucket to every rank.
    void gather(int b, cudaStream_t stream) {
        const Bucket& bucket = layout_.buckets[b];
        with_type([&](auto* typed) {
            using T = std::remove_pointer_t<decltype(typed)>;
            comm_.all_gather(static_cast<T*>(at(buf_.gradients, bucket.begin)), static_cast<const T*>(reduced_slice(b)), bucket.slice_count, stream);
        });
    }

    // This rank's slice of the bucket after the reduction (slice_count).
    const void* reduced_slice(size_t b) const {
        const Bucket& bucket = layout_.buckets[b];
        if (reduce_every_micro_step_) return at(buf_.shard, bucket.slice_begin);
        return at(buf_.gradients, bucket.begin + comm_.rank() * bucket.slice_count);
    }

    // What this rank steps the bucket with: its slice, or where the optimizer is not sharded all of it.
    const void* stepped(size_t b) const { return whole_ ? at(buf_.gradients, layout_.buckets[b].begin) : reduced_slice(b); }

    // `count` of stepped(b) from number `first` on, on the host; waits.
    std::vector<float> read(size_t b, size_t first, size_t count) const {
        const void* address = at(stepped(b), first);
        return fp32_ ? read_floats(static_cast<const float*>(address), count, compute_) : read_floats(static_cast<const floatX*>(address), count, compute_);
    }

private:
    struct Buffer {
        void* data = nullptr;
        OrderEvent reduced;  // has been read
    };
    struct UnitState {
        bool started = false;   // its place holds an addend
        unsigned addend = 0;    // key of the open addend's rounding
        floatX* open = nullptr;
    };

    size_t element_bytes() const { return gradient_element_bytes(fp32_); }
    bool widens() const { return GradientMemory::widens(config_); }
    bool is_tied_embedding(int unit) const { return table_.tied && unit == table_.embedding_unit(); }
    void* at(const void* base, size_t element) const { return static_cast<char*>(const_cast<void*>(base)) + element * element_bytes(); }

    // Where the unit's gradients are accumulated.
    void* place_of(int unit) {
        if (!reduce_every_micro_step_) return at(buf_.gradients, layout_.unit_begin[unit]);
        const int b = layout_.bucket_of_unit[unit];
        const Bucket& bucket = layout_.buckets[b];
        Buffer*& buffer = bucket_in_flight_[b];
        if (!buffer) {
            buffer = buf_.is_apart[b] ? &apart_in_flight_ : &in_flight_[next_in_flight_++ % in_flight_.size()];
            buffer->reduced.wait(compute_);
            const size_t padding = bucket.count - bucket.unit_count;
            if (padding > 0) CUDA_CHECK(cudaMemsetAsync(at(buffer->data, bucket.unit_count), 0, padding * element_bytes(), compute_));
        }
        return at(buffer->data, layout_.unit_begin[unit] - bucket.begin);
    }

    void add_open_addend(int unit, size_t offset, size_t count) {
        const UnitState& state = units_[unit];
        with_type([&](auto* typed) {
            using T = std::remove_pointer_t<decltype(typed)>;
            accumulate_gradient(static_cast<T*>(at(place_of(unit), offset)), static_cast<const floatX*>(state.open + offset), count, table_.units[unit].logical_begin + offset,
                                state.addend, state_, compute_);
        });
    }

    // A chunked head's addends have taken the keys below.
    unsigned first_shard_addend() const {
        return config_.lmhead_chunks == 1 ? 0 : static_cast<unsigned>(config_.micro_steps) * comm_.size() * config_.lmhead_chunks;
    }

    const ParamTable& table_;
    const FlatLayout& layout_;
    const Communicator& comm_;
    const GradientsConfig config_;
    const GradientMemory buf_;
    const bool fp32_;                      // the gradients' type is float
    const bool reduce_every_micro_step_;   // else once a step
    const bool whole_;                     // this rank steps whole buckets
    cudaStream_t compute_;

    std::vector<Buffer> in_flight_;
    Buffer apart_in_flight_;
    std::vector<Buffer*> bucket_in_flight_;  // of this micro-step
    std::vector<UnitState> units_;
    size_t next_in_flight_ = 0;
    int micro_step_ = 0;
    const StepState* state_ = nullptr;
};
