// Counter-based random numbers: Philox4x32-10, normal variates.
//
// A number is a pure function of (seed, purpose, what it is for), so it depends on no order, no thread and no rank, and nothing
// has to be stored for a run to resume with the same numbers. The key is the seed; the counter says what the number is for.
#pragma once

#include "llmc/device.cuh"

// Keeps counters of different uses apart; sits in the top four bits of the counter's last word.
enum class RandomPurpose : unsigned { kStochasticRounding = 1, kInit = 2 };

// The counter of one draw of four words. `item` up to 2^64, `major` (a step, a parameter) is taken modulo 2^32, `minor` below 2^28.
__host__ __device__ __forceinline__ uint4 random_counter(RandomPurpose purpose, unsigned long long item, unsigned long long major,
                                                         unsigned minor) {
    return make_uint4(static_cast<unsigned>(item), static_cast<unsigned>(item >> 32), static_cast<unsigned>(major),
                      static_cast<unsigned>(purpose) << 28 | minor);
}

// Philox4x32 with ten rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3), in place on several counters
// at once: one is a chain of ten multiplications, several keep the multipliers busy (on a CPU the inner loop becomes SIMD).
template <int Count>
__device__ __forceinline__ void philox(unsigned long long key, uint4 (&counters)[Count]) {
    unsigned x[Count], y[Count], z[Count], w[Count];
#pragma unroll
    for (int i = 0; i < Count; i++) {
        x[i] = counters[i].x;
        y[i] = counters[i].y;
        z[i] = counters[i].z;
        w[i] = counters[i].w;
    }
    unsigned key_low = static_cast<unsigned>(key), key_high = static_cast<unsigned>(key >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
#pragma unroll
        for (int i = 0; i < Count; i++) {
            const unsigned long long a = 0xD2511F53ull * x[i], b = 0xCD9E8D57ull * z[i];
            x[i] = static_cast<unsigned>(b >> 32) ^ y[i] ^ key_low;
            y[i] = static_cast<unsigned>(b);
            z[i] = static_cast<unsigned>(a >> 32) ^ w[i] ^ key_high;
            w[i] = static_cast<unsigned>(a);
        }
        key_low += 0x9E3779B9u;
        key_high += 0xBB67AE85u;
    }
#pragma unroll
    for (int i = 0; i < Count; i++) counters[i] = make_uint4(x[i], y[i], z[i], w[i]);
}

// Two independent N(0, 1) from two random words (Box-Muller). The first uniform is in (0, 1] in steps of 2^-24, so the logarithm is
// finite and no draw is farther out than 5.77.
__device__ __forceinline__ float2 normal_pair(unsigned a, unsigned b) {
    const float u = static_cast<float>((a >> 8) + 1) * 0x1p-24f;
    const float angle = static_cast<float>(b >> 8) * (6.283185307f * 0x1p-24f);
    const float radius = sqrtf(-2.0f * logf(u));
    return make_float2(radius * cosf(angle), radius * sinf(angle));
}
