// A pseudo-random permutation of [0, n) that is computed, not stored: 10^9 windows take no more memory than ten.
//
// The method is the swap-or-not shuffle (Hoang, Morris, Rogaway 2012). Round r pairs every x with x' = K_r - x (mod n) and swaps
// the two or not, as one random bit of the pair says. Each round is its own inverse, so the whole is a bijection of exactly [0, n)
// for any n: no power of two to round up to, no cycle walking, and the same time for every argument.
#pragma once

#include <cstddef>
#include <cstdint>

// Finaliser of the splitmix64 generator: every output bit depends on every input bit.
inline uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

class Permutation {
public:
    Permutation() = default;

    // n >= 1. The order depends on (n, seed, epoch) and on nothing else: no rank, no machine.
    Permutation(uint64_t n, uint64_t seed, uint64_t epoch) : n_(n) {
        int bits = 0;
        while (bits < 63 && (uint64_t{1} << bits) < n) ++bits;
        // A uniform order needs a few times log2(n) rounds; the constant serves small n.
        rounds_ = kMinRounds + 4 * bits;
        if (rounds_ > kMaxRounds) rounds_ = kMaxRounds;
        key_ = mix64(mix64(seed + kGolden) ^ (epoch * kGolden + 0x632be59bd9b4e019ull));
        for (int r = 0; r < rounds_; ++r) {
            const uint64_t random = mix64(key_ + static_cast<uint64_t>(r + 1) * kGolden);
            pivot_[r] = static_cast<uint64_t>((static_cast<unsigned __int128>(random) * n) >> 64);
        }
    }

    uint64_t size() const { return n_; }

    // The element at position x of the order, x < n.
    uint64_t operator()(uint64_t x) const {
        for (int r = 0; r < rounds_; ++r) {
            const uint64_t partner = pivot_[r] >= x ? pivot_[r] - x : pivot_[r] + n_ - x;
            const uint64_t pair = x > partner ? x : partner;  // one name for the pair, so both halves read the same bit
            const uint64_t bit = mix64(key_ ^ ((pair + 1) * kGolden + static_cast<uint64_t>(r) * 0xd1b54a32d192ed03ull)) >> 63;
            x = bit ? partner : x;
        }
        return x;
    }

private:
    static constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;
    static constexpr int kMinRounds = 32, kMaxRounds = 32 + 4 * 63;
    uint64_t n_ = 1, key_ = 0;
    uint64_t pivot_[kMaxRounds];
    int rounds_ = 0;
};
