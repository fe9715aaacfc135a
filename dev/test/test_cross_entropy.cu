// Cross-entropy and its gradient in place.
#include "dev/test/kernel_test.cuh"
#include "llmc/cross_entropy.cuh"

namespace {

void check_cross_entropy(int N, int V, int Vp, double scale, double offset, float inv_valid) {
    SCOPED_TRACE(testing::Message() << "N " << N << " V " << V << " Vp " << Vp << " scale " << scale << " offset " << offset);
    std::vector<double> logits = random_values<floatX>(static_cast<size_t>(N) * Vp, V, scale);
    for (double& x : logits) x = to_double(to_storage<floatX>(x + offset));
    std::vector<int> targets = random_ints(N, 8, 0, V - 1);
    targets[0] = V - 1;  // the last column, beside the padding
    for (int n = 1; n < N; n += 3) targets[n] = -1;
    // The padding may hold anything.
    for (int n = 0; n < N; n++) {
        for (int v = V; v < Vp; v++) logits[static_cast<size_t>(n) * Vp + v] = v % 2 ? NAN : 3e38;
    }
    const std::vector<floatX> before = to_storage<floatX>(logits);
    DeviceBuffer<floatX> device_logits(before);
    DeviceBuffer<int> device_targets(targets);
    DeviceBuffer<float> inv(std::vector<float>{inv_valid}), losses_only(N), losses(N);
    cross_entropy<false>(losses_only, device_logits, device_targets, nullptr, N, V, Vp, test_stream());
    expect_same_bits("logits without gradients", device_logits.download(), before);
    cross_entropy<true>(losses, device_logits, device_targets, inv, N, V, Vp, test_stream());
    expect_same_bits("losses with and without gradients", losses.download(), losses_only.download());

    const int threads = Vp > kCrossEntropyNarrow ? kCrossEntropyWideThreads : kWarpSize;
    const double u = kRoundoff32;
    // Vectors of a thread, at most one correction of the sum for each; an addition for each, three in the vector, five in the warp, eight over warps.
    const double vectors = std::ceil(static_cast<double>(V) / kVector / threads), additions = vectors + 16;
    std::vector<double> expected(N), bound(N), gradient(logits.size()), gradient_bound(logits.size());
    for (int n = 0; n < N; n++) {
        if (targets[n] < 0) continue;  // loss, gradients and bounds 0
        const double* row = &logits[static_cast<size_t>(n) * Vp];
        double largest = -INFINITY, sum = 0, distance = 0;
        for (int v = 0; v < V; v++) largest = std::max(largest, row[v]);
        for (int v = 0; v < V; v++) {
            const double e = std::exp(row[v] - largest);
            sum += e;
            distance += e * (largest - row[v]);
        }
        distance /= sum;
        expected[n] = (largest - row[targets[n]]) + std::log(sum);
        // The sum, relative: an argument x - max rounds by u |x - max|, in one or several corrections together; weighted by the terms this is u * distance. exp: four
        // roundoffs, and four and a product for each correction (the vectors', the thread's, the block's).
        const double sum_relative = u * (distance + 4 + 5 * (vectors + 2) + additions);
        // The logarithm (within 2 ulp), and the roundings of the difference and the final sum.
        bound[n] = sum_relative + u * (4 * std::abs(std::log(sum)) + (largest - row[targets[n]]) + std::abs(expected[n])) + 1e-300;
        for (int v = 0; v < V; v++) {
            const size_t i = static_cast<size_t>(n) * Vp + v;
            const double p = std::exp(row[v] - largest) / sum, hit = v == targets[n];
            gradient[i] = (p - hit) * inv_valid;
            // p: argument, exp, the sum, reciprocal and product; less one; times inv_valid. Below 2^-126 p is subnormal.
            const double p_error = p * (u * (largest - row[v] + 6) + sum_relative) + 0x1p-149 + (hit != 0 ? u : 0);
            gradient_bound[i] = p_error * inv_valid + (u + kRoundoff<floatX>)*std::abs(gradient[i]) + kTiny<floatX>;
        }
    }
    expect_close("losses", losses.values(), expected, [&](size_t n) { return bound[n]; });
    // Masked rows and padding have bound 0: exactly 0.
    expect_close("dlogits", device_logits.values(), gradient, [&](size_t i) { return gradient_bound[i]; });
}

TEST(CrossEntropy, AwkwardVocabularies) {
    for (const int V : {1, 2, 7, 8, 9, 255, 256, 257, 1000}) check_cross_entropy(5, V, (V + 127) / 128 * 128, 2.0, 0.0, 0.125f);
}
TEST(CrossEntropy, NoPadding) {
    for (const int V : {8, 24, 1024}) check_cross_entropy(3, V, V, 2.0, 0.0, 1.0f);
}
TEST(CrossEntropy, OneRow) { check_cross_entropy(1, 257, 384, 1.0, 0.0, 1.0f); }
TEST(CrossEntropy, WideVocabularies) {
    check_cross_entropy(4, 8185, 8192, 1.0, 0.0, 0.01f);
    check_cross_entropy(4, 8193, 8320, 1.0, 0.0, 0.01f);
    check_cross_entropy(4, 50257, 50304, 1.0, 0.0, 0.01f);
}
TEST(CrossEntropy, LargeLogits) {
    for (const double offset : {-1e4, 1e4, 3e38, -3e38}) check_cross_entropy(4, 300, 384, 1.0, offset, 1.0f);
    check_cross_entropy(4, 300, 384, 1e4, 0.0, 1.0f);
    check_cross_entropy(4, 50257, 50304, 3e3, 0.0, 1.0f);
}
TEST(CrossEntropy, AllMasked) {
    const std::vector<int> targets(3, -1);
    DeviceBuffer<floatX> logits(3 * 128);  // poison: must not reach the result
    DeviceBuffer<int> device_targets(targets);
    DeviceBuffer<float> losses(3), inv(std::vector<float>{0.0f});
    cross_entropy<true>(losses, logits, device_targets, inv, 3, 100, 128, test_stream());
    EXPECT_EQ(losses.values(), std::vector<double>(3, 0.0));
    EXPECT_EQ(logits.values(), std::vector<double>(3 * 128, 0.0));
}
TEST(CrossEntropy, MinusInfinityIsProbabilityZero) {
    std::vector<double> values(128, -INFINITY);
    values[3] = 1.0;
    values[4] = 1.0;
    DeviceBuffer<floatX> logits(to_storage<floatX>(values));
    DeviceBuffer<int> target(std::vector<int>{3});
    DeviceBuffer<float> loss(1), inv(std::vector<float>{1.0f});
    cross_entropy<true>(loss, logits, target, inv, 1, 100, 128, test_stream());
    EXPECT_NEAR(loss.values()[0], std::log(2.0), 8 * kRoundoff32);
    std::vector<double> expected(128, 0.0);
    expected[3] = -0.5;
    expected[4] = 0.5;
    expect_close("dlogits", logits.values(), expected, [&](size_t i) { return 8 * kRoundoff<floatX> * std::abs(expected[i]); });
}
TEST(CrossEntropy, NanShows) {
    std::vector<double> values(128, 1.0);
    values[50] = NAN;
    DeviceBuffer<floatX> logits(to_storage<floatX>(values));
    DeviceBuffer<int> target(std::vector<int>{3});
    DeviceBuffer<float> loss(1), inv(std::vector<float>{1.0f});
    cross_entropy<true>(loss, logits, target, inv, 1, 100, 128, test_stream());
    EXPECT_TRUE(std::isnan(loss.values()[0]));
    EXPECT_TRUE(std::isnan(logits.values()[50]));
}
TEST(CrossEntropy, RefusesBadShapes) {
    cross_entropy<true>(nullptr, nullptr, nullptr, nullptr, 0, 8, 8, test_stream());
    EXPECT_THROW(cross_entropy<true>(nullptr, nullptr, nullptr, nullptr, 1, 9, 8, test_stream()), Error);
    EXPECT_THROW(cross_entropy<true>(nullptr, nullptr, nullptr, nullptr, 1, 8, 12, test_stream()), Error);
}

}  // namespace
