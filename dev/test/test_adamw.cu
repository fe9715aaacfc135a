// AdamW against PyTorch's formulas in double.
#include "dev/test/kernel_test.cuh"
#include "llmc/adamw.cuh"

namespace {

constexpr double kBeta1 = 0.9, kEps = 1e-8;

template <typename Grad>
void check_adamw(size_t n, size_t first, float clip_factor, double weight_decay, double grad_scale, double beta2 = 0.95) {
    StepState s{};
    s.lr = 3e-3f;
    s.clip_factor = clip_factor;
    s.bias_correction1 = static_cast<float>(1 - std::pow(kBeta1, 3));
    s.bias_correction2 = static_cast<float>(1 - std::pow(beta2, 3));
    const std::vector<double> master = random_values<float>(n, 1), grads = random_values<Grad>(n, 2, grad_scale), m = random_values<float>(n, 3, grad_scale);
    std::vector<double> v = random_values<float>(n, 4, grad_scale * grad_scale);
    for (double& x : v) x = std::abs(x);
    // Every other granule decays.
    std::vector<uint8_t> decay_map(ceil_div(first + n, kDecayGranule));
    for (size_t i = 0; i < decay_map.size(); i++) decay_map[i] = i % 2;

    DeviceBuffer<floatX> params(n);
    DeviceBuffer<float> device_master(to_storage<float>(master)), device_m(to_storage<float>(m)), device_v(to_storage<float>(v));
    DeviceBuffer<Grad> device_grads(to_storage<Grad>(grads));
    DeviceBuffer<uint8_t> map(decay_map);
    DeviceBuffer<StepState> state(std::vector<StepState>{s});
    adamw_update(params, device_master, device_m, device_v, device_grads.get(), map, first, n, state, kBeta1, beta2, kEps, weight_decay, test_stream());

    std::vector<double> new_m(n), new_v(n), new_p(n), m_bound(n), v_bound(n), p_bound(n);
    for (size_t i = 0; i < n; i++) {
        const double g = grads[i] * clip_factor;
        new_m[i] = m[i] + (1 - kBeta1) * (g - m[i]);
        new_v[i] = beta2 * v[i] + (1 - beta2) * g * g;
        const double keep = decay_map[(first + i) / kDecayGranule] ? 1 - static_cast<double>(s.lr) * weight_decay : 1;
        const double denominator = std::sqrt(new_v[i] / s.bias_correction2) + kEps;
        const double step_size = s.lr / s.bias_correction1;
        new_p[i] = master[i] * keep - step_size * new_m[i] / denominator;
        // m: g rounds once (clip), g - m once, the factor 1 - beta1 once, the fused sum once.
        m_bound[i] = kRoundoff32 * ((1 - kBeta1) * (std::abs(g) * 3 + std::abs(m[i]) * 2) + std::abs(new_m[i]));
        // v: all positive: clip twice (g^2), the factors, two products, the fused sum.
        v_bound[i] = 6 * kRoundoff32 * new_v[i];
        // The step: half of v's error under the root, root, its factor (root and reciprocal), sum with eps, step size, product, quotient: 3 + 8; then
        // the decay factor, the product with it and the difference.
        const double step = std::abs(step_size * new_m[i] / denominator);
        p_bound[i] = step_size / denominator * m_bound[i] + 11 * kRoundoff32 * step + kRoundoff32 * (2 * std::abs(master[i]) + std::abs(new_p[i]));
    }
    expect_close("m", device_m.values(), new_m, [&](size_t i) { return m_bound[i] + kTiny<float>; });
    expect_close("v", device_v.values(), new_v, [&](size_t i) { return v_bound[i] + kTiny<float>; });
    expect_close("master", device_master.values(), new_p, [&](size_t i) { return p_bound[i]; });
    // params are the master, rounded.
    expect_same_bits("params", params.download(), to_storage<floatX>(device_master.values()));
}

TEST(AdamW, AwkwardSizes) {
    for (const size_t n : {size_t{8}, size_t{32}, size_t{2048}, size_t{2080}, size_t{5000}}) check_adamw<floatX>(n, 0, 1.0f, 0.1, 1.0);
}
TEST(AdamW, SliceStartsInsideAGranule) {
    for (const size_t first : {size_t{32}, size_t{96}, size_t{128}, size_t{1000}}) check_adamw<floatX>(512, first, 1.0f, 0.1, 1.0);
}
TEST(AdamW, ClipAndNoDecay) {
    check_adamw<floatX>(1024, 0, 0.25f, 0.1, 1.0);
    check_adamw<floatX>(1024, 0, 0.25f, 0.0, 1.0);
}
TEST(AdamW, FloatGradients) { check_adamw<float>(1024, 64, 0.5f, 0.1, 1.0); }
TEST(AdamW, SmallGradients) { check_adamw<floatX>(1024, 0, 1.0f, 0.1, 1e-6); }

// 1 - 0.999f in float is off by 1e-5 of itself, so it must not be made there.
TEST(AdamW, BetaNearOne) { check_adamw<floatX>(1024, 0, 1.0f, 0.1, 1.0, 0.999); }

TEST(AdamW, FirstStepFromZero) {
    // With m = v = 0 the first step is lr in the direction of -g, wherever g is large against eps.
    const size_t n = 64;
    StepState s{};
    s.lr = 0.01f;
    s.clip_factor = 1.0f;
    s.bias_correction1 = 0.1f;
    s.bias_correction2 = 0.05f;
    DeviceBuffer<floatX> params(n), grads(to_storage<floatX>(std::vector<double>(n, -0.5)));
    DeviceBuffer<float> master(std::vector<float>(n, 1.0f)), m(std::vector<float>(n, 0.0f)), v(std::vector<float>(n, 0.0f));
    DeviceBuffer<uint8_t> map(std::vector<uint8_t>(1, 0));
    DeviceBuffer<StepState> state(std::vector<StepState>{s});
    adamw_update(params, master, m, v, grads.get(), map, 0, n, state, kBeta1, 0.95, kEps, 0.1, test_stream());
    // eps and a dozen roundings of the step, one of the sum.
    for (const double value : master.values()) EXPECT_NEAR(value, 1.01, 0.01 * (2e-8 + 15 * kRoundoff32) + kRoundoff32);
    // A gradient of zero everywhere leaves the parameter, and makes no NaN of 0 / 0.
    DeviceBuffer<floatX> zeros(to_storage<floatX>(std::vector<double>(n, 0.0)));
    DeviceBuffer<float> master2(std::vector<float>(n, 1.0f)), m2(std::vector<float>(n, 0.0f)), v2(std::vector<float>(n, 0.0f));
    adamw_update(params, master2, m2, v2, zeros.get(), map, 0, n, state, kBeta1, 0.95, kEps, 0.1, test_stream());
    for (const double value : master2.values()) EXPECT_EQ(value, 1.0);
}

TEST(AdamW, SkipTouchesNothing) {
    const size_t n = 512;
    StepState s{};
    s.skip = 1;
    s.lr = 1.0f;
    s.clip_factor = 1.0f;
    const std::vector<float> master = to_storage<float>(random_values<float>(n, 1)), m = to_storage<float>(random_values<float>(n, 2)), v(n, 1.0f);
    const std::vector<floatX> old_params = to_storage<floatX>(random_values<floatX>(n, 3));
    DeviceBuffer<floatX> params(old_params), grads(to_storage<floatX>(std::vector<double>(n, NAN)));
    DeviceBuffer<float> device_master(master), device_m(m), device_v(v);
    DeviceBuffer<uint8_t> map(std::vector<uint8_t>(4, 1));
    DeviceBuffer<StepState> state(std::vector<StepState>{s});
    adamw_update(params, device_master, device_m, device_v, grads.get(), map, 0, n, state, kBeta1, 0.95, kEps, 0.1, test_stream());
    expect_same_bits("params", params.download(), old_params);
    expect_same_bits("master", device_master.download(), master);
    expect_same_bits("m", device_m.download(), m);
    expect_same_bits("v", device_v.download(), v);
}

}  // namespace
