// RMSNorm forward, fused with the residual, and backward.
#include "dev/test/kernel_test.cuh"
#include "llmc/rmsnorm.cuh"

namespace {

constexpr float kRmsnormEpsilon = 1e-5f;

double reference_rstd(const double* x, int C) {
    double squares = 0;
    for (int c = 0; c < C; c++) squares += x[c] * x[c];
    return 1 / std::sqrt(squares / C + kRmsnormEpsilon);
}

// Relative error of rstd: fp32 additions above a term are the lane's vectors, three in the vector and five in the warp, all terms positive; half of it goes
// through the root; mean, eps, root and reciprocal round once each.
double rstd_relative(int C, int vectors) {
    const int lanes = row_lanes(C, vectors);
    return kRoundoff32 * ((ceil_div(C, lanes * kVector) + 8) / 2.0 + 4);
}

void check_forward(int N, int C, bool residual, double scale) {
    const size_t count = static_cast<size_t>(N) * C;
    const std::vector<double> inp1 = random_values<floatX>(count, 1, scale), inp2 = random_values<floatX>(count, 2, scale), weight = random_values<floatX>(C, 3);
    DeviceBuffer<floatX> device_inp1(to_storage<floatX>(inp1)), device_inp2(to_storage<floatX>(inp2)), device_weight(to_storage<floatX>(weight)), sum(count), out(count);
    DeviceBuffer<float> rstd(N);
    std::vector<double> x = inp1;
    if (residual) {
        fused_residual_rmsnorm_forward(sum, out, rstd, device_inp1, device_inp2, device_weight, N, C, kRmsnormEpsilon, test_stream());
        for (size_t i = 0; i < count; i++) x[i] = to_double(to_storage<floatX>(static_cast<float>(inp1[i]) + static_cast<float>(inp2[i])));
        EXPECT_EQ(sum.values(), x);
    } else {
        rmsnorm_forward(out, rstd, device_inp1, device_weight, N, C, kRmsnormEpsilon, test_stream());
    }
    std::vector<double> expected(count), expected_rstd(N);
    for (int n = 0; n < N; n++) {
        expected_rstd[n] = reference_rstd(&x[static_cast<size_t>(n) * C], C);
        for (int c = 0; c < C; c++) expected[static_cast<size_t>(n) * C + c] = x[static_cast<size_t>(n) * C + c] * expected_rstd[n] * weight[c];
    }
    const double relative = rstd_relative(C, kRmsnormVectors);
    expect_close("rstd", rstd.values(), expected_rstd, [&](size_t n) { return relative * expected_rstd[n]; });
    // Two more products, then the rounding to storage.
    expect_close("out", out.values(), expected, [&](size_t i) { return (relative + 2 * kRoundoff32 + kRoundoff<floatX>)*std::abs(expected[i]) + kTiny<floatX>; });
}

TEST(RmsnormForward, AwkwardSizes) {
    for (const int N : {1, 3, 17, 130}) {
        for (const int C : {8, 24, 96, 104, 768, 3080}) check_forward(N, C, false, 1.0);
    }
}
TEST(RmsnormForward, FusedResidual) {
    for (const int N : {1, 3, 17, 130}) {
        for (const int C : {8, 24, 96, 104, 768, 3080}) check_forward(N, C, true, 1.0);
    }
}
TEST(RmsnormForward, EpsilonCounts) {
    // Mean squares of 1e-6 and 0 against an eps of 1e-5.
    check_forward(3, 64, false, 1e-3);
    check_forward(3, 64, true, 1e-3);
    check_forward(3, 64, false, 0.0);
}
TEST(RmsnormForward, ResidualInPlace) {
    const int N = 5, C = 40;
    const std::vector<double> inp1 = random_values<floatX>(N * C, 1), inp2 = random_values<floatX>(N * C, 2);
    DeviceBuffer<floatX> a(to_storage<floatX>(inp1)), b(to_storage<floatX>(inp2)), weight(to_storage<floatX>(std::vector<double>(C, 1.0))), apart(N * C), out(N * C), out2(N * C);
    DeviceBuffer<float> rstd(N);
    fused_residual_rmsnorm_forward(apart, out, rstd, a, b, weight, N, C, kRmsnormEpsilon, test_stream());
    fused_residual_rmsnorm_forward(a, out2, rstd, a, b, weight, N, C, kRmsnormEpsilon, test_stream());
    expect_same_bits("residual", a.download(), apart.download());
    expect_same_bits("out", out2.download(), out.download());
}

void check_backward(int N, int C, bool accumulate) {
    const size_t count = static_cast<size_t>(N) * C;
    const std::vector<double> inp = random_values<floatX>(count, 1), dout = random_values<floatX>(count, 2), weight = random_values<floatX>(C, 3), before = random_values<floatX>(count, 4);
    std::vector<double> rstd(N);
    // The same float for the kernel and the reference: forward's error is not backward's.
    for (int n = 0; n < N; n++) rstd[n] = static_cast<float>(reference_rstd(&inp[static_cast<size_t>(n) * C], C));
    DeviceBuffer<floatX> device_inp(to_storage<floatX>(inp)), device_dout(to_storage<floatX>(dout)), device_weight(to_storage<floatX>(weight)), dinp(count), dweight(C);
    DeviceBuffer<float> device_rstd(to_storage<float>(rstd)), scratch(rmsnorm_backward_scratch_count(N, C));
    if (accumulate) dinp.upload(to_storage<floatX>(before));
    rmsnorm_backward(dinp, dweight, scratch, device_dout, device_inp, device_weight, device_rstd, N, C, accumulate, test_stream());

    const int lanes = row_lanes(C, kRmsnormBackwardVectors);
    // Roundings of a product g x (x, g, and the fused sum's), the lane's vectors, three in the vector, five in the warp, one for the mean.
    const double dot_roundings = 3 + ceil_div(C, lanes * kVector) + 8 + 1;
    std::vector<double> expected(count), bound(count), expected_dweight(C), magnitude(C);
    for (int n = 0; n < N; n++) {
        const size_t row = static_cast<size_t>(n) * C;
        double mean = 0, mean_magnitude = 0;
        for (int c = 0; c < C; c++) {
            const double product = dout[row + c] * weight[c] * inp[row + c] * rstd[n] / C;
            mean += product;
            mean_magnitude += std::abs(product);
        }
        for (int c = 0; c < C; c++) {
            const double x = inp[row + c] * rstd[n], g = dout[row + c] * weight[c];
            const double d = rstd[n] * (g - x * mean);
            expected[row + c] = d + (accumulate ? before[row + c] : 0);
            // g rounds once; x, its product with the mean, and the mean's error; the difference and its product with rstd; the sum with what was there.
            bound[row + c] = kRoundoff32 * (rstd[n] * (std::abs(g) + std::abs(x) * (2 * std::abs(mean) + dot_roundings * mean_magnitude)) + 2 * std::abs(d) + std::abs(expected[row + c])) +
                             kRoundoff<floatX> * std::abs(expected[row + c]) + kTiny<floatX>;
            expected_dweight[c] += dout[row + c] * x;
            magnitude[c] += std::abs(dout[row + c] * x);
        }
    }
    expect_close("dinp", dinp.values(), expected, [&](size_t i) { return bound[i]; });
    // A group adds its rows, sum_rows a part of the groups, then eight parts; x rounds once.
    const int rows = rmsnorm_backward_rows(N);
    const double additions = rows + ceil_div(ceil_div(N, rows), kSumRowsGroups) + kSumRowsGroups + 1;
    expect_close("dweight", dweight.values(), expected_dweight,
                 [&](size_t c) { return additions * kRoundoff32 * magnitude[c] + kRoundoff<floatX> * std::abs(expected_dweight[c]) + kTiny<floatX>; });
}

TEST(RmsnormBackward, AwkwardSizes) {
    for (const int N : {1, 3, 17, 130}) {
        for (const int C : {8, 24, 96, 104, 768, 3080}) check_backward(N, C, false);
    }
}
TEST(RmsnormBackward, Accumulates) {
    for (const int N : {1, 3, 17, 130}) {
        for (const int C : {8, 24, 96, 104, 768, 3080}) check_backward(N, C, true);
    }
}
TEST(RmsnormBackward, MoreRowsThanPartials) { check_backward(kRmsnormMaxPartials * kRmsnormMinRows + 5, 8, false); }
TEST(Rmsnorm, NothingToDo) {
    rmsnorm_forward(nullptr, nullptr, nullptr, nullptr, 0, 8, kRmsnormEpsilon, test_stream());
    fused_residual_rmsnorm_forward(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 0, 8, kRmsnormEpsilon, test_stream());
    // No rows: the weight's gradient is still written.
    DeviceBuffer<floatX> dweight(8);
    rmsnorm_backward(nullptr, dweight, nullptr, nullptr, nullptr, nullptr, nullptr, 0, 8, false, test_stream());
    EXPECT_EQ(dweight.values(), std::vector<double>(8, 0.0));
}
TEST(Rmsnorm, RefusesRaggedRows) {
    EXPECT_THROW(rmsnorm_forward(nullptr, nullptr, nullptr, nullptr, 1, 12, kRmsnormEpsilon, test_stream()), Error);
    EXPECT_THROW(rmsnorm_backward(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 1, 16384, false, test_stream()), Error);
}

}  // namespace
