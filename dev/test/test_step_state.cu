// The step's numbers: valid tokens, loss, norm, clip factor, skip, bias corrections.
#include "dev/test/kernel_test.cuh"
#include "llmc/step_state.cuh"

namespace {

StepState get(const DeviceBuffer<StepState>& state) { return state.download()[0]; }

TEST(ValidTokens, CountAndInverse) {
    for (const size_t n : {size_t{0}, size_t{1}, size_t{31}, size_t{4096}, size_t{4097}, size_t{100000}}) {
        for (const int low : {-1, 0, -3}) {
            std::vector<int> targets = random_ints(n, 4, low, 1);
            if (low == -3) targets.assign(n, -1);  // all masked
            unsigned long long expected = 0;
            for (const int target : targets) expected += target >= 0;
            DeviceBuffer<int> device_targets(targets);
            DeviceBuffer<unsigned long long> count(1);
            DeviceBuffer<StepState> state(1);
            count_valid_targets(count, device_targets, n, test_stream());
            EXPECT_EQ(count.download()[0], expected);
            set_inv_valid(state, count, 1, test_stream());
            EXPECT_EQ(get(state).valid_tokens, expected);
            EXPECT_EQ(get(state).inv_valid_tokens, expected == 0 ? 0.0f : static_cast<float>(1.0 / expected));
        }
    }
}

TEST(ValidTokens, SumOfRanks) {
    // Ranks without any; one rank has them all; beyond 32 bits; a count that no float holds.
    const std::vector<std::vector<unsigned long long>> cases = {{7}, {0}, {0, 0, 0}, {3, 0, 5}, {0, 0, 0, 4096, 0}, {0xffffffffull, 1, 0xffffffffull}, {1ull << 24, 1},
                                                                std::vector<unsigned long long>(1000, 8191)};
    for (const std::vector<unsigned long long>& counts : cases) {
        unsigned long long expected = 0;
        for (const unsigned long long count : counts) expected += count;
        DeviceBuffer<unsigned long long> rank_counts(counts);
        DeviceBuffer<StepState> state(1);  // poisoned: both are overwritten
        set_inv_valid(state, rank_counts, static_cast<int>(counts.size()), test_stream());
        EXPECT_EQ(get(state).valid_tokens, expected);
        // Divided in double, rounded once.
        EXPECT_EQ(get(state).inv_valid_tokens, expected == 0 ? 0.0f : static_cast<float>(1.0 / static_cast<double>(expected)));
    }
    EXPECT_THROW(set_inv_valid(nullptr, nullptr, 0, test_stream()), Error);
}

struct Decision {
    StepState before{};
    std::vector<double> rank_sums;
    StepState run() const {
        DeviceBuffer<StepState> state(std::vector<StepState>{before});
        DeviceBuffer<double> sums(rank_sums);
        decide_step(state, sums, static_cast<int>(rank_sums.size() / kDecisionNumbers), 0.9, 0.95, test_stream());
        return get(state);
    }
};

TEST(Decide, SumsRanksAndClips) {
    Decision d;
    d.before.valid_tokens = 10;
    d.before.max_norm = 1.0f;
    d.rank_sums = {4.0, 7.0, 0, 3.0, 8.0, 0, 2.0, 5.0, 0};
    const StepState s = d.run();
    EXPECT_EQ(s.loss_sum, 20.0);
    EXPECT_EQ(s.loss, 2.0f);
    EXPECT_EQ(s.grad_norm, 3.0f);
    // torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6)
    EXPECT_EQ(s.clip_factor, static_cast<float>(1.0 / (3.0 + 1e-6)));
    EXPECT_EQ(s.skip, 0);
    EXPECT_EQ(s.applied_steps, 1u);
    EXPECT_EQ(s.skipped_total, 0u);
}

TEST(Decide, NoClipBelowOrWhenOff) {
    Decision d;
    d.before.valid_tokens = 1;
    d.rank_sums = {9.0, 0.0, 0};
    d.before.max_norm = 0.0f;
    EXPECT_EQ(d.run().clip_factor, 1.0f);
    d.before.max_norm = 3.5f;
    EXPECT_EQ(d.run().clip_factor, 1.0f);
    // Just above the norm, within the 1e-6: torch's factor is below one only if max_norm < norm + 1e-6.
    d.before.max_norm = 3.0f;
    EXPECT_LT(d.run().clip_factor, 1.0f);
    d.rank_sums = {0.0, 0.0, 0};
    EXPECT_EQ(d.run().clip_factor, 1.0f);
    EXPECT_EQ(d.run().skip, 0);
}

TEST(Decide, NoValidTokensIsLossZero) {
    Decision d;
    d.rank_sums = {0.0, 0.0, 0};
    EXPECT_EQ(d.run().loss, 0.0f);
}

TEST(Decide, RequestsOfSomeRankAndOfAll) {
    Decision d;
    d.rank_sums = {1.0, 1.0, kRequestSave | kSaveWritten, 1.0, 1.0, kSaveWritten, 1.0, 1.0, kRequestStop | kSaveWritten};
    EXPECT_EQ(d.run().requests_any, kRequestSave | kRequestStop | kSaveWritten);
    EXPECT_EQ(d.run().requests_all, kSaveWritten);
    // Also in a step that is skipped: a run of NaNs can be stopped.
    d.rank_sums = {std::nan(""), 1.0, kRequestStop};
    EXPECT_EQ(d.run().requests_any, kRequestStop);
    EXPECT_EQ(d.run().requests_all, kRequestStop);
    d.rank_sums = {1.0, 1.0, 0, 1.0, 1.0, kRequestStop};
    EXPECT_EQ(d.run().requests_any, kRequestStop);
    EXPECT_EQ(d.run().requests_all, 0u);
}

TEST(Decide, BiasCorrections) {
    Decision d;
    d.rank_sums = {1.0, 1.0, 0};
    for (const unsigned long long steps : {0ull, 1ull, 9ull, 999ull, 100000ull}) {
        d.before.applied_steps = steps;
        const StepState s = d.run();
        EXPECT_EQ(s.applied_steps, steps + 1);
        // Computed in double, rounded once; pow may be an ulp of double off, which moves the float by one ulp at most.
        const double expected1 = 1 - std::pow(0.9, steps + 1.0), expected2 = 1 - std::pow(0.95, steps + 1.0);
        EXPECT_NEAR(s.bias_correction1, expected1, 1.5 * kRoundoff32 * expected1);
        EXPECT_NEAR(s.bias_correction2, expected2, 1.5 * kRoundoff32 * expected2);
    }
}

TEST(Decide, NonFiniteNormSkips) {
    // NaN, infinity, and a sum whose root no float holds.
    for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity(), 1e80}) {
        Decision d;
        d.before.valid_tokens = 4;
        d.before.max_norm = 1.0f;
        d.before.applied_steps = 5;
        d.before.bias_correction1 = 0.25f;
        d.before.bias_correction2 = 0.125f;
        d.before.skipped_total = 7;
        d.before.skipped_in_row = 2;
        d.rank_sums = {1.0, 2.0, 0, bad, 2.0, 0};
        StepState s = d.run();
        EXPECT_EQ(s.skip, 1);
        EXPECT_FALSE(std::isfinite(s.grad_norm));
        EXPECT_EQ(s.clip_factor, 1.0f);
        EXPECT_EQ(s.applied_steps, 5u);
        EXPECT_EQ(s.bias_correction1, 0.25f);
        EXPECT_EQ(s.bias_correction2, 0.125f);
        EXPECT_EQ(s.skipped_total, 8u);
        EXPECT_EQ(s.skipped_in_row, 3u);
        // A good step ends the row, not the total.
        d.before = s;
        d.rank_sums = {1.0, 2.0, 0};
        s = d.run();
        EXPECT_EQ(s.skip, 0);
        EXPECT_EQ(s.skipped_total, 8u);
        EXPECT_EQ(s.skipped_in_row, 0u);
        EXPECT_EQ(s.applied_steps, 6u);
    }
}

}  // namespace
