// Counter-based random numbers: Philox4x32-10, stochastic rounding to bfloat16, normal variates.
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

// Philox4x32 with ten rounds (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3).
__host__ __device__ __forceinline__ uint4 philox(unsigned long long key, uint4 counter) {
    unsigned key_low = static_cast<unsigned>(key), key_high = static_cast<unsigned>(key >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const unsigned long long a = 0xD2511F53ull * counter.x, b = 0xCD9E8D57ull * counter.z;
        counter = make_uint4(static_cast<unsigned>(b >> 32) ^ counter.y ^ key_low, static_cast<unsigned>(b),
                             static_cast<unsigned>(a >> 32) ^ counter.w ^ key_high, static_cast<unsigned>(a));
        key_low += 0x9E3779B9u;
        key_high += 0xBB67AE85u;
    }
    return counter;
}

// The bfloat16 bits of x, rounded up with a probability equal to the part that does not fit: noise is uniform in [0, 65536).
// A value that is a bfloat16 stays what it is, whatever the noise; the mean over the noise is x exactly. Infinities stay, a NaN
// becomes 0x7fff, and a finite value beyond the largest bfloat16 becomes that one rather than an infinity: there alone the mean is off.
__host__ __device__ __forceinline__ unsigned stochastic_round_bits(unsigned float_bits, unsigned noise) {
    const unsigned magnitude = float_bits & 0x7fffffffu;
    unsigned rounded = (magnitude + noise) >> 16;
    if (rounded >= 0x7f80u && magnitude < 0x7f800000u) rounded = 0x7f7fu;
    return magnitude > 0x7f800000u ? 0x7fffu : (float_bits >> 31 << 15 | rounded);
}

// Stores eight elements rounded stochastically with 128 random bits, sixteen each.
__device__ __forceinline__ void store8_stochastic(__nv_bfloat16* address, const Float8& x, uint4 random) {
    const unsigned words[4] = {random.x, random.y, random.z, random.w};
    unsigned packed[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned low = stochastic_round_bits(__float_as_uint(x[2 * i]), words[i] & 0xffffu);
        const unsigned high = stochastic_round_bits(__float_as_uint(x[2 * i + 1]), words[i] >> 16);
        packed[i] = low | high << 16;
    }
    *reinterpret_cast<uint4*>(address) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
}

// Two independent N(0, 1) from two random words (Box-Muller). The first uniform is in (0, 1] in steps of 2^-24, so the logarithm is
// finite and no draw is farther out than 5.77.
__device__ __forceinline__ float2 normal_pair(unsigned a, unsigned b) {
    const float u = static_cast<float>((a >> 8) + 1) * 0x1p-24f;
    const float angle = static_cast<float>(b >> 8) * (6.283185307f * 0x1p-24f);
    const float radius = sqrtf(-2.0f * logf(u));
    return make_float2(radius * cosf(angle), radius * sinf(angle));
}
