#include "llmc/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "llmc/error.h"

namespace {

const std::vector<float> kLogits = {1.0f, 3.0f, 2.0f, -std::numeric_limits<float>::infinity(), 3.0f};

TEST(Sampler, ZeroTemperatureTakesTheMostLikelyAndBreaksTiesByTheLowerId) {
    SamplerConfig config;
    config.temperature = 0;
    EXPECT_EQ(sample_token(kLogits, config, 0.99), 1);
}

TEST(Sampler, DrawsInProportionToTheSoftmax) {
    SamplerConfig config;
    config.temperature = 1.0;
    const int draws = 100000;
    std::vector<int> counts(kLogits.size());
    for (int i = 0; i < draws; ++i) counts[sample_token(kLogits, config, uniform_from_keys(1, 2, i))]++;
    double total = 0;
    for (const float logit : kLogits) total += std::exp(logit);
    for (size_t id = 0; id < kLogits.size(); ++id) {
        const double p = std::exp(kLogits[id]) / total;
        // Five standard deviations of a binomial count.
        EXPECT_NEAR(counts[id], draws * p, 5 * std::sqrt(draws * p * (1 - p)) + 1e-9) << id;
    }
}

TEST(Sampler, TopKAndTopPKeepOnlyTheMostLikely) {
    SamplerConfig config;
    config.temperature = 1.0;
    config.top_k = 2;
    for (int i = 0; i < 1000; ++i) {
        const int id = sample_token(kLogits, config, uniform_from_keys(3, 4, i));
        EXPECT_TRUE(id == 1 || id == 4);
    }
    config.top_k = 0;
    config.top_p = 0.1;  // the first token alone has more
    for (int i = 0; i < 1000; ++i) EXPECT_EQ(sample_token(kLogits, config, uniform_from_keys(3, 4, i)), 1);
}

TEST(Sampler, RefusesLogitsWithoutAFiniteNumber) {
    const std::vector<float> nan(4, std::numeric_limits<float>::quiet_NaN());
    EXPECT_THROW(sample_token(nan, SamplerConfig(), 0.5), Error);
}

TEST(Sampler, UniformNumbersAreSpreadOverTheUnitInterval) {
    const int draws = 100000;
    std::vector<int> bins(10);
    for (int i = 0; i < draws; ++i) {
        const double u = uniform_from_keys(7, i % 3, i);
        ASSERT_GE(u, 0.0);
        ASSERT_LT(u, 1.0);
        bins[static_cast<int>(u * 10)]++;
    }
    for (const int count : bins) EXPECT_NEAR(count, draws / 10, 5 * std::sqrt(draws * 0.1 * 0.9));
}

}  // namespace
