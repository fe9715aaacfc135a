// Vectors of eight, conversions, exp8 and the warp and block reductions of device.cuh.
#include "dev/test/kernel_test.cuh"

namespace {

template <typename From, typename To>
__global__ void convert_kernel(To* out, const From* in, size_t n) {
    const size_t i = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kVector;
    if (i < n) store8(out + i, load8(in + i));
}

// Bit patterns of every exponent and sign with random and with telling fractions: ties, almost ties, all ones.
std::vector<float> float_patterns() {
    std::mt19937 generator(1);
    std::vector<float> values;
    for (uint32_t exponent = 0; exponent < 512; exponent++) {
        for (const uint32_t fraction : {0u, 1u, 0x8000u, 0x18000u, 0x7fffu, 0x8001u, 0x7f8000u, 0x7fffffu}) values.push_back(float_of(exponent << 23 | fraction));
        for (int i = 0; i < 24; i++) values.push_back(float_of(exponent << 23 | (generator() & 0x7fffffu)));
    }
    return values;
}

TEST(Vectors, StoreRoundsToNearestEven) {
    const std::vector<float> values = float_patterns();
    DeviceBuffer<float> in(values);
    DeviceBuffer<__nv_bfloat16> out(values.size());
    launch(convert_kernel<float, __nv_bfloat16>, grid_for(values.size(), 64 * kVector), 64, 0, test_stream(), out, in, values.size());
    std::vector<__nv_bfloat16> expected;
    for (const float value : values) expected.push_back(bfloat16_of(round_to_bfloat16(value)));
    expect_same_bits("bfloat16", out.download(), expected);
}

TEST(Vectors, LoadIsExact) {
    std::vector<__nv_bfloat16> values;
    for (unsigned bits = 0; bits < 65536; bits++) values.push_back(bfloat16_of(static_cast<uint16_t>(bits)));
    DeviceBuffer<__nv_bfloat16> in(values);
    DeviceBuffer<float> out(values.size());
    launch(convert_kernel<__nv_bfloat16, float>, grid_for(values.size(), 64 * kVector), 64, 0, test_stream(), out, in, values.size());
    const std::vector<float> actual = out.download();
    for (unsigned bits = 0; bits < 65536; bits++) ASSERT_EQ(bits_of(actual[bits]), bits << 16);
}

__global__ void operators_kernel(float* out, const float* a, const float* b) {
    const Float8 x = load8(a), y = load8(b);
    Float8 element = x;
    element[3] = 42.0f;
    Float8 compound = x;
    compound += y;
    compound *= 2.0f;
    const Float8 results[] = {x + y, x - y, x * y, x / y, -x, 2.0f - x, x + 2.0f, 1.0f / y, fma8(x, y, x), max8(x, y), sqrt8(x * x), set8(7.0f), zero8(), element, compound,
                              first8(x, 3, 9.0f), first8(x, 8, 9.0f), first8(x, 0, 9.0f), one_hot8(5), one_hot8(-1), one_hot8(8)};
    int row = 0;
    for (const Float8& result : results) store8(out + 8 * row++, result);
    store8(out + 8 * row, set8(sum8(x)));
    store8(out + 8 * row + 8, set8(largest8(x)));
}

TEST(Vectors, Operators) {
    const std::vector<float> a = {1, -2, 3, -4, 5, -6, 7, -8}, b = {8, 7, 6, 5, -4, -3, -2, -1};
    DeviceBuffer<float> da(a), db(b), out(23 * 8);
    launch(operators_kernel, 1, 1, 0, test_stream(), out, da, db);
    const std::vector<float> actual = out.download();
    for (int i = 0; i < 8; i++) {
        const float x = a[i], y = b[i];
        // Small integers: everything but the divisions is exact, and those round once on every device.
        const float expected[] = {x + y, x - y, x * y, x / y, -x, 2 - x, x + 2, 1 / y, x * y + x, std::max(x, y), std::abs(x), 7, 0, i == 3 ? 42 : x, (x + y) * 2,
                                  i < 3 ? x : 9, x, 9, i == 5 ? 1.0f : 0.0f, 0, 0, -4, 7};
        for (int row = 0; row < 23; row++) EXPECT_EQ(actual[8 * row + i], expected[row]) << "row " << row << " element " << i;
    }
}

__global__ void exp_kernel(float* out, const float* in, size_t n) {
    const size_t i = (static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x) * kVector;
    if (i < n) store8(out + i, exp8(load8(in + i)));
}

TEST(Vectors, ExpWithinTwoUlp) {
    std::vector<float> values;
    for (double x = -110; x <= 95; x += 1.0 / 2048) values.push_back(static_cast<float>(x));
    for (const float value : float_patterns()) values.push_back(value);
    for (const float edge : {88.722839f, 88.72284f, -87.336544f, -87.33655f, -103.27893f, -103.97208f, -104.0f, -150.0f, 1e30f, -1e30f}) values.push_back(edge);
    while (values.size() % kVector != 0) values.push_back(0.0f);
    DeviceBuffer<float> in(values), out(values.size());
    launch(exp_kernel, grid_for(values.size(), 128 * kVector), 128, 0, test_stream(), out, in, values.size());
    const std::vector<float> actual = out.download();
    double worst = 0;
    for (size_t i = 0; i < values.size(); i++) {
        const double expected = std::exp(static_cast<double>(values[i]));
        if (std::isnan(values[i])) {
            EXPECT_TRUE(std::isnan(actual[i]));
            continue;
        }
        const float rounded = static_cast<float>(expected);
        if (std::isinf(rounded) || rounded >= 3.4028233e38f) {  // where infinity is within two ulp
            EXPECT_GE(actual[i], 3.4028233e38f) << values[i];
            continue;
        }
        const double ulp = std::nextafter(rounded, INFINITY) - rounded;
        const double error = std::abs(actual[i] - expected) / ulp;
        ASSERT_LE(error, 2.0) << "exp(" << values[i] << ") is " << actual[i] << ", expected " << expected;
        worst = std::max(worst, error);
    }
    RecordProperty("worst_ulp_times_1000", static_cast<int>(worst * 1000));
}

__global__ void warp_reductions_kernel(float* sums, double* double_sums, float* largest, float* group_sums, const float* in) {
    const float x = in[threadIdx.x];
    sums[threadIdx.x] = warp_sum(x);
    double_sums[threadIdx.x] = warp_sum(static_cast<double>(x));
    largest[threadIdx.x] = warp_max(x);
    for (int lanes = 1, row = 0; lanes <= 32; lanes *= 2, row++) group_sums[row * blockDim.x + threadIdx.x] = group_sum(x, lanes);
}

TEST(Reductions, Warp) {
    constexpr int kThreads = 96;
    const std::vector<double> values = random_values<float>(kThreads, 3);
    DeviceBuffer<float> in(to_storage<float>(values)), sums(kThreads), largest(kThreads), groups(6 * kThreads);
    DeviceBuffer<double> double_sums(kThreads);
    launch(warp_reductions_kernel, 1, kThreads, 0, test_stream(), sums, double_sums, largest, groups, in);
    const auto group = [&](int thread, int lanes, auto&& visit) {
        for (int i = thread / lanes * lanes; i < thread / lanes * lanes + lanes; i++) visit(values[i]);
    };
    const auto check = [&](const char* what, const std::vector<double>& actual, size_t first, int lanes, double roundoff) {
        for (int thread = 0; thread < kThreads; thread++) {
            double sum = 0, magnitude = 0;
            group(thread, lanes, [&](double x) { sum += x, magnitude += std::abs(x); });
            // A tree of log2(lanes) <= 5 additions above each term.
            ASSERT_NEAR(actual[first + thread], sum, 5 * roundoff * magnitude) << what << " thread " << thread;
            // The same bits in every lane of the group.
            ASSERT_EQ(actual[first + thread], actual[first + thread / lanes * lanes]) << what << " thread " << thread;
        }
    };
    check("warp_sum", sums.values(), 0, 32, kRoundoff32);
    check("warp_sum of double", double_sums.values(), 0, 32, 0x1p-52);
    for (int lanes = 1, row = 0; lanes <= 32; lanes *= 2, row++) check("group_sum", groups.values(), row * kThreads, lanes, kRoundoff32);
    for (int thread = 0; thread < kThreads; thread++) {
        double expected = -INFINITY;
        group(thread, 32, [&](double x) { expected = std::max(expected, x); });
        ASSERT_EQ(largest.values()[thread], expected);
    }
}

__global__ void block_reductions_kernel(float* sums, double* double_sums, float* largest, const float* in) {
    const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    // Twice each, at once: the second must not disturb the first.
    sums[i] = block_sum(in[i]) + 0.0f * block_sum(1.0f);
    double_sums[i] = block_sum(static_cast<double>(in[i]));
    largest[i] = block_max(in[i]) + 0.0f * block_max(5.0f);
}

TEST(Reductions, Block) {
    for (const int threads : {32, 64, 96, 256, 1024}) {
        constexpr int kBlocks = 3;
        // Negative only: a maximum that starts at zero shows.
        std::vector<double> values = random_values<float>(kBlocks * threads, threads);
        for (double& value : values) value = -std::abs(value) - 1;
        values = to_double(to_storage<float>(values));
        DeviceBuffer<float> in(to_storage<float>(values)), sums(values.size()), largest(values.size());
        DeviceBuffer<double> double_sums(values.size());
        launch(block_reductions_kernel, kBlocks, threads, 0, test_stream(), sums, double_sums, largest, in);
        for (size_t i = 0; i < values.size(); i++) {
            const size_t first = i / threads * threads;
            double sum = 0, maximum = -INFINITY;
            for (int j = 0; j < threads; j++) sum += values[first + j], maximum = std::max(maximum, values[first + j]);
            // Five additions in the warp, then at most 31 over the warps; the terms have one sign.
            ASSERT_NEAR(sums.values()[i], sum, 36 * kRoundoff32 * -sum) << threads << " threads";
            ASSERT_NEAR(double_sums.values()[i], sum, 36 * 0x1p-52 * -sum) << threads << " threads";
            ASSERT_EQ(largest.values()[i], maximum) << threads << " threads";
            if (i % threads != 0 && i > 3) i += threads / 7;  // every thread of the first few, then samples
        }
    }
}

}  // namespace
