// Philox against its published values, stochastic rounding, normal variates and the initial weights made of them.
#include "dev/test/kernel_test.cuh"
#include "llmc/init.cuh"
#include "llmc/random.cuh"

namespace {

// Eight lanes at once; lane i has i added to the first word of the counter.
__global__ void philox_kernel(unsigned* out, unsigned long long key, uint4 counter) {
    uint4 counters[8];
    for (unsigned lane = 0; lane < 8; lane++) counters[lane] = make_uint4(counter.x + lane, counter.y, counter.z, counter.w);
    philox(key, counters);
    for (unsigned lane = 0; lane < 8; lane++) {
        const unsigned words[4] = {counters[lane].x, counters[lane].y, counters[lane].z, counters[lane].w};
        for (int word = 0; word < 4; word++) out[4 * lane + word] = words[word];
    }
}

std::vector<unsigned> philox_on_device(const uint32_t (&key)[2], uint32_t x, const uint32_t (&counter)[4]) {
    DeviceBuffer<unsigned> out(32);
    launch(philox_kernel, 1, 1, 0, test_stream(), out, static_cast<unsigned long long>(key[1]) << 32 | key[0], make_uint4(x, counter[1], counter[2], counter[3]));
    return out.download();
}

TEST(Philox, KnownAnswers) {
    struct Case {
        uint32_t counter[4];
        uint32_t key[2];
        uint32_t expected[4];
    };
    // Known-answer vectors of Random123, philox4x32 with 10 rounds.
    const Case cases[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}, {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (const Case& c : cases) {
        const std::vector<unsigned> actual = philox_on_device(c.key, c.counter[0], c.counter);
        for (int word = 0; word < 4; word++) EXPECT_EQ(actual[word], c.expected[word]);
        // The other lanes are what they would be alone.
        for (unsigned lane = 1; lane < 8; lane++) {
            const std::vector<unsigned> alone = philox_on_device(c.key, c.counter[0] + lane, c.counter);
            for (int word = 0; word < 4; word++) EXPECT_EQ(actual[4 * lane + word], alone[word]);
        }
    }
}

TEST(Philox, CountersOfDifferentUsesDiffer) {
    const auto words = [](uint4 c) { return std::vector<unsigned>{c.x, c.y, c.z, c.w}; };
    const auto base = words(random_counter(RandomPurpose::kInit, 5, 6, 7));
    EXPECT_NE(base, words(random_counter(RandomPurpose::kStochasticRounding, 5, 6, 7)));
    EXPECT_NE(base, words(random_counter(RandomPurpose::kInit, 5 + (1ull << 32), 6, 7)));
    EXPECT_NE(base, words(random_counter(RandomPurpose::kInit, 5, 7, 7)));
    EXPECT_NE(base, words(random_counter(RandomPurpose::kInit, 5, 6, 8)));
}

// Rounds every value with every noise on the device: vector v takes value v / noises and the noise v % noises in all eight lanes.
__global__ void round_kernel(__nv_bfloat16* out, const float* values, size_t num_values, unsigned first_noise, unsigned num_noises) {
    const size_t vector = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (vector >= num_values * num_noises) return;
    const unsigned noise = (first_noise + static_cast<unsigned>(vector % num_noises)) * 0x10001u;
    store8_stochastic(out + vector * kVector, set8(values[vector / num_noises]), make_uint4(noise, noise, noise, noise));
}

// (values, noises): the first lane, after checking that all eight agree
std::vector<uint16_t> round_all(const std::vector<float>& values, unsigned first_noise, unsigned num_noises) {
    const size_t vectors = values.size() * num_noises;
    DeviceBuffer<float> in(values);
    DeviceBuffer<__nv_bfloat16> out(vectors * kVector);
    launch(round_kernel, grid_for(vectors, 256), 256, 0, test_stream(), out, in, values.size(), first_noise, num_noises);
    const std::vector<__nv_bfloat16> all = out.download();
    std::vector<uint16_t> result;
    for (size_t vector = 0; vector < vectors; vector++) {
        result.push_back(bits_of(all[vector * kVector]));
        for (int lane = 1; lane < kVector; lane++) EXPECT_EQ(bits_of(all[vector * kVector + lane]), result.back());
    }
    return result;
}

TEST(StochasticRounding, ExactValuesStay) {
    std::vector<float> values;
    for (uint32_t bits = 0; bits < 65536; bits++) values.push_back(float_of(bits << 16));
    for (const unsigned noise : {0u, 1u, 0x7fffu, 0x8000u, 0xffffu}) {
        const std::vector<uint16_t> actual = round_all(values, noise, 1);
        for (uint32_t bits = 0; bits < 65536; bits++) ASSERT_EQ(actual[bits], (bits & 0x7fff) > 0x7f80 ? 0x7fff : bits);
    }
}

TEST(StochasticRounding, NoNoiseMakesFiniteInfinite) {
    // The last two are NaN whose payload is in the lower half, or everywhere: they must not become infinities.
    const std::vector<uint32_t> patterns = {0x7f7f0001u, 0x7f7fffffu, 0xff7f0001u, 0xff7fffffu, 0x7f800001u, 0xffffffffu};
    std::vector<float> values;
    for (const uint32_t bits : patterns) values.push_back(float_of(bits));
    for (const unsigned noise : {0u, 1u, 0xffffu}) {
        const std::vector<uint16_t> actual = round_all(values, noise, 1);
        for (size_t i = 0; i < values.size(); i++) EXPECT_EQ(actual[i], i < 4 ? patterns[i] >> 16 : 0x7fffu);
    }
}

TEST(StochasticRounding, MeanOverAllNoiseIsExact) {
    std::mt19937 generator(2);
    std::vector<float> values;
    // Any sign, any finite magnitude below the largest bfloat16, subnormals too.
    for (int i = 0; i < 16; i++) values.push_back(float_of((generator() & 0x80000000u) | generator() % 0x7f7f0000u));
    for (const float value : values) {
        const std::vector<uint16_t> actual = round_all({value}, 0, 65536);
        double sum = 0;
        for (const uint16_t bits : actual) sum += float_of(static_cast<uint32_t>(bits) << 16);
        // Two neighbouring 8-bit numbers, 2^16 times: exact in double.
        ASSERT_EQ(sum / 65536, static_cast<double>(value));
    }
}

__global__ void stochastic_store_kernel(__nv_bfloat16* out, const float* in, unsigned long long seed) {
    const size_t vector = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    uint4 random[1] = {random_counter(RandomPurpose::kStochasticRounding, vector, 0, 0)};
    philox(seed, random);
    store8_stochastic(out + vector * kVector, load8(in), random[0]);
}

TEST(StochasticRounding, UnbiasedInEveryLane) {
    constexpr int kDraws = 65536;
    // One ulp of a bfloat16 near 1 is 2^-7; the fractions of it below are the probabilities of rounding up.
    const double fractions[8] = {0.5, 0.25, 0.001, 0.999, 0.1, 0.9, 1.0 / 3, 0.0};
    std::vector<float> values;
    for (int lane = 0; lane < 8; lane++) values.push_back(static_cast<float>((lane % 2 ? -1 : 1) * (1 + fractions[lane] * 0x1p-7)));
    DeviceBuffer<float> in(values);
    DeviceBuffer<__nv_bfloat16> out(static_cast<size_t>(kDraws) * 8);
    launch(stochastic_store_kernel, kDraws / 256, 256, 0, test_stream(), out, in, 99ull);
    const std::vector<double> actual = out.values();
    for (int lane = 0; lane < 8; lane++) {
        double sum = 0;
        for (int draw = 0; draw < kDraws; draw++) sum += actual[static_cast<size_t>(draw) * 8 + lane];
        const double sigma = 0x1p-7 * std::sqrt(fractions[lane] * (1 - fractions[lane]) / kDraws);
        EXPECT_NEAR(sum / kDraws, values[lane], 5 * sigma) << "lane " << lane;
    }
}

TEST(Init, NormalMoments) {
    constexpr size_t kCount = 1 << 19;
    const float std_dev = 0.02f;
    DeviceBuffer<float> out(kCount);
    init_normal(out.get(), kCount, 1234, 5, std_dev, test_stream());
    const std::vector<double> values = out.values();
    double moments[5] = {}, lagged[17] = {};
    size_t beyond[4] = {};
    for (size_t i = 0; i < kCount; i++) {
        const double z = values[i] / std_dev;
        for (int power = 1; power <= 4; power++) moments[power] += std::pow(z, power) / kCount;
        for (size_t lag = 1; lag <= 16 && lag <= i; lag++) lagged[lag] += z * values[i - lag] / std_dev / kCount;
        for (int k = 1; k < 4; k++) beyond[k] += std::abs(z) > k;
        ASSERT_LE(std::abs(z), 5.78);
    }
    // Five standard errors of each: the variance of z^k over the sample is (2k-1)!! - mean^2.
    const double n = std::sqrt(static_cast<double>(kCount));
    EXPECT_NEAR(moments[1], 0, 5 * 1 / n);
    EXPECT_NEAR(moments[2], 1, 5 * std::sqrt(2.0) / n);
    EXPECT_NEAR(moments[3], 0, 5 * std::sqrt(15.0) / n);
    EXPECT_NEAR(moments[4], 3, 5 * std::sqrt(96.0) / n);
    // Elements of one draw, one vector, one thread and its neighbours are independent.
    for (int lag = 1; lag <= 16; lag++) EXPECT_NEAR(lagged[lag], 0, 5 * 1 / n) << "lag " << lag;
    for (int k = 1; k < 4; k++) {
        const double p = std::erfc(k / std::sqrt(2.0));
        EXPECT_NEAR(static_cast<double>(beyond[k]) / kCount, p, 5 * std::sqrt(p * (1 - p)) / n) << k << " sigma";
    }
}

TEST(Init, DependsOnSeedParameterAndElementOnly) {
    const auto make = [](size_t n, unsigned long long seed, unsigned long long parameter) {
        DeviceBuffer<floatX> out(n);
        init_normal(out.get(), n, seed, parameter, 0.02f, test_stream());
        return out.download();
    };
    const auto different = [](const std::vector<floatX>& a, const std::vector<floatX>& b) {
        size_t count = 0;
        for (size_t i = 0; i < b.size(); i++) count += to_double(a[i]) != to_double(b[i]);
        return count;
    };
    const std::vector<floatX> base = make(4104, 1, 2);
    EXPECT_EQ(different(base, make(4104, 1, 2)), 0u);
    EXPECT_EQ(different(base, make(8, 1, 2)), 0u);  // a shorter parameter begins alike
    // Two bfloat16 draws agree by chance in under 2 % of the elements.
    EXPECT_GT(different(base, make(4104, 2, 2)), 3900u);
    EXPECT_GT(different(base, make(4104, 1, 3)), 3900u);
    EXPECT_GT(different(base, make(4104, 1 + (1ull << 32), 2)), 3900u);
}

TEST(Init, FillAndCopy) {
    for (const size_t n : {size_t{8}, size_t{24}, size_t{2048}, size_t{2056}}) {
        DeviceBuffer<floatX> out(n);
        fill(out.get(), n, 1.5f, test_stream());
        for (const double value : out.values()) ASSERT_EQ(value, 1.5);
        const std::vector<double> source = random_values<floatX>(n, 7);
        DeviceBuffer<floatX> in(to_storage<floatX>(source));
        DeviceBuffer<float> copied(n);
        copy_to_float(copied.get(), in.get(), n, test_stream());
        EXPECT_EQ(copied.values(), source);
    }
    fill(static_cast<floatX*>(nullptr), 0, 1.0f, test_stream());  // nothing to do, nothing launched
}

}  // namespace
