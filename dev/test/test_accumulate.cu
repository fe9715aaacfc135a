// Gradient accumulation, stochastic in bf16 and plain in fp32.
#include "dev/test/kernel_test.cuh"
#include "llmc/accumulate.cuh"

namespace {

StepState make_state(unsigned long long seed, unsigned long long step) {
    StepState state{};
    state.seed = seed;
    state.step = step;
    return state;
}

template <typename Acc>
std::vector<Acc> accumulate(const std::vector<double>& acc, const std::vector<double>& addend, unsigned long long first, unsigned addend_index, unsigned long long seed,
                            unsigned long long step) {
    DeviceBuffer<Acc> device_acc(to_storage<Acc>(acc));
    DeviceBuffer<floatX> device_addend(to_storage<floatX>(addend));
    DeviceBuffer<StepState> state(std::vector<StepState>{make_state(seed, step)});
    accumulate_gradient(device_acc.get(), device_addend, acc.size(), first, addend_index, state, test_stream());
    return device_acc.download();
}

TEST(Accumulate, WithinOneUlpAtAwkwardSizes) {
    for (const size_t n : {size_t{8}, size_t{24}, size_t{1024}, size_t{8192}, size_t{8200}, size_t{20008}}) {
        const std::vector<double> acc = random_values<floatX>(n, 1), addend = random_values<floatX>(n, 2);
        std::vector<double> expected(n);
        for (size_t i = 0; i < n; i++) expected[i] = acc[i] + addend[i];
        // The fp32 sum rounds to nearest; stochastic rounding then goes to one of both neighbours, up to two roundoffs away.
        const double relative = (std::is_same_v<floatX, float> ? 0 : 2 * kRoundoff<floatX>) + kRoundoff32;
        expect_close("acc", to_double(accumulate<floatX>(acc, addend, 0, 0, 3, 4)), expected, [&](size_t i) { return relative * std::abs(expected[i]) + 2 * kTiny<floatX>; });
    }
    accumulate_gradient(static_cast<floatX*>(nullptr), nullptr, 0, 0, 0, nullptr, test_stream());  // nothing to do
}

TEST(Accumulate, FloatIsPlain) {
    for (const size_t n : {size_t{8}, size_t{8200}}) {
        const std::vector<double> acc = random_values<float>(n, 1), addend = random_values<floatX>(n, 2);
        const std::vector<float> actual = accumulate<float>(acc, addend, 0, 0, 3, 4);
        for (size_t i = 0; i < n; i++) ASSERT_EQ(actual[i], static_cast<float>(acc[i]) + static_cast<float>(addend[i]));
    }
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
    for (unsigned i = 0; i < 256; i++) accumulate_gradient(acc.get(), addend, n, 0, i, state, test_stream());
    double mean = 0;
    for (const double value : acc.values()) mean += value / n;
    EXPECT_NEAR(mean, 1.5, 5 * 0x1p-7 * std::sqrt(256 * 0.25 / n));
}

#endif

TEST(Accumulate, RefusesWhatItCannotKey) {
    EXPECT_THROW(accumulate_gradient(static_cast<floatX*>(nullptr), nullptr, 12, 0, 0, nullptr, test_stream()), Error);
    EXPECT_THROW(accumulate_gradient(static_cast<floatX*>(nullptr), nullptr, 8, 4, 0, nullptr, test_stream()), Error);
    EXPECT_THROW(accumulate_gradient(static_cast<floatX*>(nullptr), nullptr, 8, 0, 1u << 28, nullptr, test_stream()), Error);
}

}  // namespace
