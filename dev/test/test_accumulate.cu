// Gradient accumulation, stochastic in bf16 and plain in fp32, and the copy to fp32 that its first addend is.
#include "dev/test/kernel_test.cuh"
#include "llmc/accumulate.cuh"
#include "llmc/init.cuh"

namespace {

StepState make_state(unsigned long long seed, unsigned long long step) {
    StepState state{};
    state.seed = seed;
    state.step = step;
    return state;
}

template <typename Acc, typename Addend>
std::vector<Acc> accumulate_bits(const std::vector<Acc>& acc, const std::vector<Addend>& addend, unsigned long long first, unsigned addend_index,
                                 unsigned long long seed, unsigned long long step) {
    DeviceBuffer<Acc> device_acc(acc);
    DeviceBuffer<Addend> device_addend(addend);
    DeviceBuffer<StepState> state(std::vector<StepState>{make_state(seed, step)});
    accumulate_gradient(device_acc.get(), device_addend.get(), acc.size(), first, addend_index, state, test_stream());
    expect_same_bits("addend", device_addend.download(), addend);
    return device_acc.download();
}

template <typename Acc, typename Addend = floatX>
std::vector<Acc> accumulate(const std::vector<double>& acc, const std::vector<double>& addend, unsigned long long first, unsigned addend_index, unsigned long long seed,
                            unsigned long long step) {
    return accumulate_bits(to_storage<Acc>(acc), to_storage<Addend>(addend), first, addend_index, seed, step);
}

template <typename Acc, typename Addend>
void check_sum() {
    for (const size_t n : {size_t{8}, size_t{24}, size_t{1024}, size_t{8192}, size_t{8200}, size_t{20008}}) {
        const std::vector<double> acc = random_values<Acc>(n, 1), addend = random_values<Addend>(n, 2);
        std::vector<double> expected(n);
        for (size_t i = 0; i < n; i++) expected[i] = acc[i] + addend[i];
        // The fp32 sum rounds to nearest; stochastic rounding then goes to one of both neighbours, up to two roundoffs away.
        const double relative = (std::is_same_v<Acc, float> ? 0 : 2 * kRoundoff<Acc>) + kRoundoff32;
        expect_close("acc", to_double(accumulate<Acc, Addend>(acc, addend, 0, 0, 3, 4)), expected,
                     [&](size_t i) { return relative * std::abs(expected[i]) + 2 * kTiny<Acc>; });
    }
    accumulate_gradient(static_cast<Acc*>(nullptr), static_cast<const Addend*>(nullptr), 0, 0, 0, nullptr, test_stream());  // nothing to do
}

TEST(Accumulate, WithinOneUlpAtAwkwardSizes) {
    check_sum<floatX, floatX>();
    check_sum<floatX, float>();
    check_sum<float, floatX>();
    check_sum<float, float>();
}

template <typename Addend>
void check_plain() {
    for (const size_t n : {size_t{8}, size_t{8200}}) {
        const std::vector<double> acc = random_values<float>(n, 1), addend = random_values<Addend>(n, 2);
        const std::vector<float> actual = accumulate<float, Addend>(acc, addend, 0, 0, 3, 4);
        for (size_t i = 0; i < n; i++) ASSERT_EQ(actual[i], static_cast<float>(acc[i]) + static_cast<float>(addend[i]));
    }
}

TEST(Accumulate, FloatIsPlain) {
    check_plain<floatX>();
    check_plain<float>();
}

// What is not finite stays so, in every lane and whatever the noise, or the norm would not see it and the step would not be skipped.
template <typename Acc, typename Addend>
void check_not_finite() {
    constexpr double kNaN = std::numeric_limits<double>::quiet_NaN(), kInf = std::numeric_limits<double>::infinity();
    // The largest bfloat16, and half an ulp of it: their sum is a float, which the noise must not carry into infinity.
    const double largest = 0x1.FEp127, half_ulp = 0x1p119;
    const std::vector<double> terms = {kNaN, -kNaN, kInf, -kInf, 0.0, -0.0, 1.0, -0x1.02p-20, 0x1p-133, half_ulp, -half_ulp, largest, -largest};
    const size_t pairs = terms.size() * terms.size(), n = pairs * kVector;
    // Each pair stands in one vector; the noise of its eight lanes is of eight elements.
    std::vector<double> acc, addend;
    for (const double a : terms) {
        for (const double b : terms) {
            acc.insert(acc.end(), kVector, a);
            addend.insert(addend.end(), kVector, b);
        }
    }
    for (unsigned index = 0; index < 64; index++) {
        const std::vector<double> actual = to_double(accumulate<Acc, Addend>(acc, addend, 0, index, 5, 6));
        for (size_t i = 0; i < n; i++) {
            const double exact = acc[i] + addend[i];
            if (std::isnan(exact)) {
                ASSERT_TRUE(std::isnan(actual[i])) << acc[i] << " + " << addend[i] << " gave " << actual[i];
            } else if (std::isinf(exact) || std::abs(exact) > 0x1.FFFFFEp127) {
                ASSERT_EQ(actual[i], exact > 0 ? kInf : -kInf) << acc[i] << " + " << addend[i];
            } else {
                ASSERT_TRUE(std::isfinite(actual[i])) << acc[i] << " + " << addend[i] << " gave " << actual[i];
            }
        }
    }
}

// NaN of any payload: a bit pattern whose payload does not survive the cut to 16 bits, or is carried out of by the noise, would come out as an infinity.
template <typename Acc, typename Addend>
void check_every_nan() {
    const auto patterns = [](auto zero) {
        using T = decltype(zero);
        std::vector<T> nans;
        for (const uint32_t sign : {0u, 0x8000u}) {
            for (uint32_t payload = 1; payload < 128; payload++) {
                if constexpr (std::is_same_v<T, float>) {
                    nans.push_back(float_of((sign | 0x7f80u) << 16 | payload));               // the low end only
                    nans.push_back(float_of((sign | 0x7f80u | payload) << 16));               // the upper half only
                    nans.push_back(float_of((sign | 0x7f80u | payload) << 16 | 0xffffu));
                } else {
                    nans.push_back(bfloat16_of(static_cast<uint16_t>(sign | 0x7f80u | payload)));
                }
            }
        }
        while (nans.size() % kVector != 0) nans.push_back(nans.back());
        return nans;
    };
    const std::vector<Acc> accs = patterns(Acc());
    const std::vector<Addend> addends = patterns(Addend());
    for (unsigned index = 0; index < 16; index++) {
        for (const Acc value : accumulate_bits(accs, std::vector<Addend>(accs.size(), to_storage<Addend>(1.0)), 0, index, 5, 6)) ASSERT_TRUE(std::isnan(to_double(value)));
        for (const Acc value : accumulate_bits(std::vector<Acc>(addends.size(), to_storage<Acc>(1.0)), addends, 0, index, 5, 6)) ASSERT_TRUE(std::isnan(to_double(value)));
    }
}

TEST(Accumulate, NotFiniteStays) {
    check_not_finite<floatX, floatX>();
    check_not_finite<floatX, float>();
    check_not_finite<float, floatX>();
    check_not_finite<float, float>();
    check_every_nan<floatX, floatX>();
    check_every_nan<floatX, float>();
    check_every_nan<float, floatX>();
    check_every_nan<float, float>();
}

// The first addend of fp32 gradients overwrites: every bit of it arrives, whatever it is, and nothing of what was there.
TEST(Accumulate, FirstAddendOfFloatIsACopy) {
    std::vector<floatX> values;
    std::vector<float> expected;
    for (uint32_t bits = 0; bits < 65536; bits++) {
        expected.push_back(float_of(bits << 16));
        if constexpr (std::is_same_v<floatX, float>) {
            values.push_back(expected.back());
        } else {
            values.push_back(bfloat16_of(static_cast<uint16_t>(bits)));
        }
    }
    for (const size_t n : {size_t{8}, size_t{2048}, size_t{2056}, size_t{65536}}) {
        // The last ones, so that the NaN of both ends are among them.
        DeviceBuffer<floatX> in(std::vector<floatX>(values.end() - n, values.end()));
        DeviceBuffer<float> acc(n);
        copy_to_float(acc.get(), in.get(), n, test_stream());
        expect_same_bits("acc", acc.download(), std::vector<float>(expected.end() - n, expected.end()));
    }
    copy_to_float(static_cast<float*>(nullptr), static_cast<const floatX*>(nullptr), 0, test_stream());  // nothing to do
    EXPECT_THROW(copy_to_float(static_cast<float*>(nullptr), static_cast<const floatX*>(nullptr), 12, test_stream()), Error);
}

#ifndef PRECISION_FP32

size_t count_different(const std::vector<floatX>& a, size_t first_a, const std::vector<floatX>& b, size_t first_b, size_t n) {
    size_t different = 0;
    for (size_t i = 0; i < n; i++) different += bits_of(a[first_a + i]) != bits_of(b[first_b + i]);
    return different;
}

TEST(Accumulate, NoiseIsKeyed) {
    // Halfway between two numbers: each choice has probability 1/2.
    const size_t n = 16384;
    const std::vector<double> acc(n, 1.0), addend(n, 0x1p-8);
    const std::vector<floatX> base = accumulate<floatX>(acc, addend, 0, 0, 1, 2);
    EXPECT_EQ(count_different(base, 0, accumulate<floatX>(acc, addend, 0, 0, 1, 2), 0, n), 0u);
    // Independent choices differ in half of the elements: 8192 within 5 sigma = 5 * 64.
    const auto independent = [&](const char* what, const std::vector<floatX>& other, size_t first_base, size_t first_other, size_t count) {
        EXPECT_NEAR(static_cast<double>(count_different(base, first_base, other, first_other, count)), count / 2.0, 5 * std::sqrt(count / 4.0)) << what;
    };
    independent("seed", accumulate<floatX>(acc, addend, 0, 0, 5, 2), 0, 0, n);
    independent("step", accumulate<floatX>(acc, addend, 0, 0, 1, 3), 0, 0, n);
    independent("addend", accumulate<floatX>(acc, addend, 0, 1, 1, 2), 0, 0, n);
    independent("element", accumulate<floatX>(acc, addend, 1ull << 33, 0, 1, 2), 0, 0, n);
    independent("neighbour", base, 0, 1, n - 1);
    independent("next vector", base, 0, 8, n - 8);
    // A slice of the buffer gets the noise of its logical elements, wherever it lies.
    const std::vector<double> short_acc(1000, 1.0), short_addend(1000, 0x1p-8);
    EXPECT_EQ(count_different(base, 4096, accumulate<floatX>(short_acc, short_addend, 4096, 0, 1, 2), 0, 1000), 0u);
}

TEST(Accumulate, Unbiased) {
    // A quarter of the way from 1 to its neighbour. Rounding to nearest would lose it always.
    const size_t n = 65536;
    const std::vector<floatX> result = accumulate<floatX>(std::vector<double>(n, 1.0), std::vector<double>(n, 0x1p-9), 0, 0, 7, 8);
    double sum = 0;
    for (const floatX value : result) sum += to_double(value);
    const double sigma = 0x1p-7 * std::sqrt(0.25 * 0.75 / n);
    EXPECT_NEAR(sum / n, 1 + 0x1p-9, 5 * sigma);
}

TEST(Accumulate, ManySmallAddendsAddUp) {
    // 256 addends of 2^-9 onto 1 give 1.5; rounded to nearest they give 1. Each error is independent and at most one ulp, 2^-7, with
    // variance at most a quarter of it squared.
    const size_t n = 4096;
    DeviceBuffer<floatX> acc(to_storage<floatX>(std::vector<double>(n, 1.0))), addend(to_storage<floatX>(std::vector<double>(n, 0x1p-9)));
    DeviceBuffer<StepState> state(std::vector<StepState>{make_state(11, 12)});
    for (unsigned i = 0; i < 256; i++) accumulate_gradient(acc.get(), addend.get(), n, 0, i, state, test_stream());
    double mean = 0;
    for (const double value : acc.values()) mean += value / n;
    EXPECT_NEAR(mean, 1.5, 5 * 0x1p-7 * std::sqrt(256 * 0.25 / n));
}

#endif

TEST(Accumulate, RefusesWhatItCannotKey) {
    floatX* const acc = nullptr;
    const floatX* const addend = nullptr;
    EXPECT_THROW(accumulate_gradient(acc, addend, 12, 0, 0, nullptr, test_stream()), Error);
    EXPECT_THROW(accumulate_gradient(acc, addend, 8, 4, 0, nullptr, test_stream()), Error);
    EXPECT_THROW(accumulate_gradient(acc, addend, 8, 0, 1u << 28, nullptr, test_stream()), Error);
}

}  // namespace
