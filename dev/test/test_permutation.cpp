// The computed permutation: a bijection for every n, uniform, different for every seed and epoch, small at 10^9.
#include <cmath>
#include <map>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "llmc/permutation.h"

namespace {

void expect_bijection(uint64_t n, uint64_t seed, uint64_t epoch) {
    const Permutation order(n, seed, epoch);
    std::vector<bool> seen(n, false);
    for (uint64_t x = 0; x < n; ++x) {
        const uint64_t y = order(x);
        ASSERT_LT(y, n) << "n = " << n;
        ASSERT_FALSE(seen[y]) << "n = " << n << ": " << y << " comes twice";
        seen[y] = true;
    }
}

// Chi-square of k + 1 cells under uniform draws exceeds k + 2 sqrt(k t) + 2 t with probability at most exp(-t) (Laurent and Massart
// 2000, lemma 1). t = 16 is one in nine million, for some fifty such checks here.
double chi_square_bound(int cells) { return (cells - 1) + 2.0 * std::sqrt(16.0 * (cells - 1)) + 32.0; }

double chi_square(const std::vector<int>& counts, double expected) {
    double sum = 0.0;
    for (const int count : counts) sum += (count - expected) * (count - expected) / expected;
    return sum;
}

TEST(Permutation, IsABijectionForEverySmallSize) {
    for (uint64_t n = 1; n <= 200; ++n)
        for (uint64_t epoch = 0; epoch < 5; ++epoch) expect_bijection(n, 17, epoch);
    for (const uint64_t n : {1000ull, 4095ull, 4096ull, 4097ull, 65536ull, 100003ull}) expect_bijection(n, 1, 0);
}

TEST(Permutation, SeedsAndEpochsGiveUnrelatedOrders) {
    constexpr uint64_t n = 10000;
    const auto agreements = [](const Permutation& a, const Permutation& b) {
        int count = 0;
        for (uint64_t x = 0; x < n; ++x) count += a(x) == b(x);
        return count;
    };
    const Permutation base(n, 1, 0);
    // Two independent orders agree in Poisson(1) places: more than 12 has probability 1e-10.
    EXPECT_LE(agreements(base, Permutation(n, 1, 1)), 12);
    EXPECT_LE(agreements(base, Permutation(n, 2, 0)), 12);
    EXPECT_LE(agreements(Permutation(n, 1, 1), Permutation(n, 2, 0)), 12);
    EXPECT_LE(agreements(Permutation(n, 0, 1), Permutation(n, 1, 0)), 12);
    EXPECT_EQ(agreements(base, Permutation(n, 1, 0)), static_cast<int>(n));
}

TEST(Permutation, EveryPositionIsUniformOverSeedsAndOverEpochs) {
    constexpr int kDraws = 20000;
    for (const int n : {2, 3, 7, 10, 64}) {
        for (const bool over_epochs : {false, true}) {
            for (const int position : {0, n / 2, n - 1}) {
                std::vector<int> counts(n, 0);
                for (int i = 0; i < kDraws; ++i) ++counts[Permutation(n, over_epochs ? 5 : i, over_epochs ? i : 3)(position)];
                EXPECT_LT(chi_square(counts, double(kDraws) / n), chi_square_bound(n)) << "n = " << n << ", position " << position;
            }
        }
    }
}

TEST(Permutation, AllOrdersOfFourAreEquallyLikely) {
    std::map<std::vector<uint64_t>, int> counts;
    constexpr int kDraws = 24000;
    for (int seed = 0; seed < kDraws; ++seed) {
        const Permutation order(4, seed, 0);
        ++counts[{order(0), order(1), order(2), order(3)}];
    }
    ASSERT_EQ(counts.size(), 24u);
    std::vector<int> values;
    for (const auto& entry : counts) values.push_back(entry.second);
    EXPECT_LT(chi_square(values, kDraws / 24.0), chi_square_bound(24));
}

TEST(Permutation, ABillionWindowsNeedNoTable) {
    EXPECT_LE(sizeof(Permutation), 4096u);
    for (const uint64_t n : {1000000000ull, 1ull << 40}) {
        const Permutation order(n, 1, 0);
        std::set<uint64_t> seen;
        constexpr uint64_t kSample = 20000;
        double sum = 0.0;
        for (uint64_t x = 0; x < kSample; ++x) {
            const uint64_t y = order(x * (n / kSample));
            ASSERT_LT(y, n);
            ASSERT_TRUE(seen.insert(y).second);
            sum += double(y) / double(n);
        }
        // A mean of uniform draws: 1/2, standard deviation 1 / sqrt(12 * kSample); six of them.
        EXPECT_NEAR(sum / kSample, 0.5, 6.0 / std::sqrt(12.0 * kSample));
    }
}

}  // namespace
