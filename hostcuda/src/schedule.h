// HOSTCUDA_SCHEDULE=<seed>: who runs first.
//
// Barriers are the only places where threads change, so a missing one is found when a warp runs far ahead of another one that it should
// have waited for. A fresh random choice at every switch hardly ever lets one warp run far: it missed write-after-read races 20 times of 20
// in a trial. Random priorities, with a drop to the bottom now and then (as in probabilistic concurrency testing), found them 29 times of 30.
#pragma once
#include <cstddef>
#include <cstdint>

#include "hostcuda/execution.h"

namespace hostcuda {

// The seed, or 0 when threads run in plain order (HOSTCUDA_SCHEDULE unset or 0).
uint64_t schedule_seed();

// The i-th block to run, of `blocks`, in launch number `serial`: a random cyclic order, or i itself in plain order.
size_t scheduled_block(size_t i, size_t blocks, uint64_t serial);

// splitmix64: one multiplication-based step, good enough for choices.
HOSTCUDA_UNCHECKED inline uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// The choices within one block; they depend on seed, launch and block only, not on which OS thread runs it.
struct WarpSchedule {
    bool enabled = false;
    uint64_t state = 0;
    unsigned lowest = 0;

    HOSTCUDA_UNCHECKED void begin_block(uint64_t serial, size_t block) {
        const uint64_t seed = schedule_seed();
        enabled = seed != 0;
        state = mix(mix(seed ^ mix(serial)) ^ block);
        lowest = 1u << 20;
    }
    HOSTCUDA_UNCHECKED uint64_t random() { return state = mix(state); }
    // Priorities at the start lie above all that a drop gives.
    HOSTCUDA_UNCHECKED unsigned first_priority() { return (1u << 20) + static_cast<unsigned>(random() >> 40); }
    HOSTCUDA_UNCHECKED unsigned next_lowest() { return --lowest; }
    HOSTCUDA_UNCHECKED bool change_now() { return random() % 64 == 0; }
    HOSTCUDA_UNCHECKED unsigned pick_lane(unsigned lanes) {
        unsigned skip = static_cast<unsigned>(random() % static_cast<unsigned>(__builtin_popcount(lanes)));
        for (; skip != 0; skip--) lanes &= lanes - 1;
        return static_cast<unsigned>(__builtin_ctz(lanes));
    }
};

}  // namespace hostcuda
