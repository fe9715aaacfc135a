// SwiGLU, forward and backward.
#include "dev/test/kernel_test.cuh"
#include "llmc/swiglu.cuh"

namespace {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

void check_swiglu(int N, int F, double scale, bool in_place) {
    SCOPED_TRACE(testing::Message() << "N " << N << " F " << F << " scale " << scale);
    const std::vector<double> gate_up = random_values<floatX>(static_cast<size_t>(N) * 2 * F, 1, scale), dout = random_values<floatX>(static_cast<size_t>(N) * F, 2);
    DeviceBuffer<floatX> device_gate_up(to_storage<floatX>(gate_up)), device_dout(to_storage<floatX>(dout)), out(dout.size()), apart(gate_up.size());
    swiglu_forward(out, device_gate_up, N, F, test_stream());
    swiglu_backward(in_place ? device_gate_up : apart, device_dout, device_gate_up, N, F, test_stream());

    // exp is within two ulp (four roundoffs), relative; sum, quotient: sigmoid within 6.
    const double u = kRoundoff32;
    // Where exp(-gate) overflows, sigmoid is below 2^-128 and becomes 0.
    const double underflow = 0x1p-120;
    std::vector<double> expected(dout.size()), bound(dout.size()), dexpected(gate_up.size()), dbound(gate_up.size());
    for (int n = 0; n < N; n++) {
        for (int f = 0; f < F; f++) {
            const size_t i = static_cast<size_t>(n) * F + f, gate_at = static_cast<size_t>(n) * 2 * F + f, up_at = gate_at + F;
            const double gate = gate_up[gate_at], up = gate_up[up_at], d = dout[i], s = sigmoid(gate);
            const auto stored = [&](double value, double error) { return error + kRoundoff<floatX> * std::abs(value) + kTiny<floatX>; };
            expected[i] = gate * s * up;
            bound[i] = stored(expected[i], 8 * u * std::abs(expected[i]) + underflow * std::abs(up));  // the product with up
            const double slope = 1 + gate * (1 - s);
            dexpected[gate_at] = d * up * s * slope;
            // slope: 1 - s carries the error of s and its own, times gate; product and sum round. Then the factors before it: 6 + 4.
            const double slope_error = std::abs(gate) * (6 * u * s + 2 * u * (1 - s)) + u * std::abs(slope);
            dbound[gate_at] = stored(dexpected[gate_at], std::abs(d * up) * (s * slope_error + 10 * u * s * std::abs(slope) + underflow * (1 + std::abs(gate))));
            dexpected[up_at] = d * gate * s;
            dbound[up_at] = stored(dexpected[up_at], 8 * u * std::abs(dexpected[up_at]) + underflow * std::abs(d));
        }
    }
    expect_close("out", out.values(), expected, [&](size_t i) { return bound[i]; });
    expect_close("dgate_up", (in_place ? device_gate_up : apart).values(), dexpected, [&](size_t i) { return dbound[i]; });
}

TEST(Swiglu, AwkwardSizes) {
    for (const int N : {1, 3, 50}) {
        for (const int F : {8, 24, 768, 1024, 1032}) check_swiglu(N, F, 2.0, false);
    }
}
TEST(Swiglu, InPlaceGradient) { check_swiglu(3, 1032, 2.0, true); }
TEST(Swiglu, LargeAndSmallGates) {
    for (const double scale : {1e-30, 1e-3, 30.0, 1e4}) check_swiglu(3, 264, scale, false);
}
TEST(Swiglu, NotFiniteShows) {
    // A NaN or infinity in gate or up reaches the output.
    for (const int at : {0, 8}) {
        std::vector<double> gate_up(16, 1.0);
        gate_up[at] = NAN;
        gate_up[at + 1] = INFINITY;
        DeviceBuffer<floatX> device_gate_up(to_storage<floatX>(gate_up)), out(8);
        swiglu_forward(out, device_gate_up, 1, 8, test_stream());
        const std::vector<double> actual = out.values();
        EXPECT_TRUE(std::isnan(actual[0]));
        EXPECT_EQ(actual[1], INFINITY);
        EXPECT_TRUE(std::isfinite(actual[2]));
    }
}
TEST(Swiglu, NothingToDo) {
    swiglu_forward(nullptr, nullptr, 0, 8, test_stream());
    swiglu_backward(nullptr, nullptr, nullptr, 0, 8, test_stream());
}

}  // namespace
