// How long a stream spends in some stretches of a step: a pair of events around each, added up for the step.
//
// The engine puts pairs where the compute stream may only wait for communication: their distance is the stall. The trainer puts them around the
// phases of a step. Steps are queued ahead of the host, so each slot keeps its own events until the host has read them.
#pragma once

#include <vector>

#include "llmc/device.cuh"

// Steps whose events and host memory may be in use at once: one being read, one running, and the end of the one before, which a duration starts from.
constexpr int kStepSlots = 3;

class SpanTimer {
public:
    explicit SpanTimer(cudaStream_t stream) : stream_(stream) {}
    SpanTimer(const SpanTimer&) = delete;
    SpanTimer& operator=(const SpanTimer&) = delete;
    ~SpanTimer() {
        for (Slot& slot : slots_) {
            for (const cudaEvent_t event : slot.events) cudaEventDestroy(event);
        }
    }

    // From now on pairs belong to this slot, which is emptied.
    void begin_step(int slot) {
        current_ = slot;
        slots_[slot].used = 0;
    }

    // While it lives, time that passes on the stream counts.
    class Section {
    public:
        explicit Section(SpanTimer& timer) : timer_(timer) { timer_.mark(); }
        ~Section() { timer_.mark(); }
        Section(const Section&) = delete;
        Section& operator=(const Section&) = delete;

    private:
        SpanTimer& timer_;
    };

    // The beginning or the end of a stretch, in turn.
    void mark() {
        Slot& slot = slots_[current_];
        if (slot.used == slot.events.size()) {
            cudaEvent_t event = nullptr;
            CUDA_CHECK(cudaEventCreate(&event));
            slot.events.push_back(event);
        }
        CUDA_CHECK(cudaEventRecord(slot.events[slot.used++], stream_));
    }

    // Milliseconds of a slot whose step is complete.
    double total_ms(int slot) const {
        double total = 0;
        const Slot& s = slots_[slot];
        for (size_t i = 0; i + 1 < s.used; i += 2) {
            float ms = 0;
            CUDA_CHECK(cudaEventElapsedTime(&ms, s.events[i], s.events[i + 1]));
            total += ms;
        }
        return total;
    }

private:
    struct Slot {
        std::vector<cudaEvent_t> events;
        size_t used = 0;
    };

    cudaStream_t stream_;
    Slot slots_[kStepSlots];
    int current_ = 0;
};

// Where a step's time goes on the compute stream. Head: final norm, head and loss, forward and backward. Update: the last reductions, the norm, AdamW, and the
// start of the gathers.
struct PhaseTimers {
    explicit PhaseTimers(cudaStream_t stream) : forward(stream), head(stream), backward(stream), update(stream) {}
    void begin_step(int slot) {
        for (SpanTimer* phase : {&forward, &head, &backward, &update}) phase->begin_step(slot);
    }
    // From now on time counts for this phase; nullptr: for none.
    void enter(SpanTimer* phase) {
        if (phase == current_) return;
        if (current_) current_->mark();
        if (phase) phase->mark();
        current_ = phase;
    }

    SpanTimer forward, head, backward, update;

private:
    SpanTimer* current_ = nullptr;
};
