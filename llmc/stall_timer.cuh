// How long the compute stream stood still for communication: pairs of events around every place where it may wait.
//
// Between the two events of a pair only waiting (or queueing) happens on the compute stream, so their distance is the stall. Steps are queued
// ahead of the host, so each slot keeps its own events until the host has read them.
#pragma once

#include <vector>

#include "llmc/device.cuh"

// Steps whose events and host memory may be in use at once: one being read, one running, and the end of the one before, which a duration starts from.
constexpr int kStepSlots = 3;

class StallTimer {
public:
    explicit StallTimer(cudaStream_t stream) : stream_(stream) {}
    StallTimer(const StallTimer&) = delete;
    StallTimer& operator=(const StallTimer&) = delete;
    ~StallTimer() {
        for (Slot& slot : slots_) {
            for (const cudaEvent_t event : slot.events) cudaEventDestroy(event);
        }
    }

    // From now on pairs belong to this slot, which is emptied.
    void begin_step(int slot) {
        current_ = slot;
        slots_[slot].used = 0;
    }

    // While it lives, time that passes on the stream counts as stalled.
    class Section {
    public:
        explicit Section(StallTimer& timer) : timer_(timer) { timer_.mark(); }
        ~Section() { timer_.mark(); }
        Section(const Section&) = delete;
        Section& operator=(const Section&) = delete;

    private:
        StallTimer& timer_;
    };

    // Stalled milliseconds of a slot whose step is complete.
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

    void mark() {
        Slot& slot = slots_[current_];
        if (slot.used == slot.events.size()) {
            cudaEvent_t event = nullptr;
            CUDA_CHECK(cudaEventCreate(&event));
            slot.events.push_back(event);
        }
        CUDA_CHECK(cudaEventRecord(slot.events[slot.used++], stream_));
    }

    cudaStream_t stream_;
    Slot slots_[kStepSlots];
    int current_ = 0;
};
