// AdamW over a layer's parameters.
#include "dev/cuda/bench.cuh"
#include "llmc/adamw.cuh"

namespace adamw_bench {

constexpr double kBeta1 = 0.9, kBeta2 = 0.95, kEps = 1e-8, kDecay = 0.1;

void update(bench::Case& c, size_t n) {
    const auto grads = c.normal<floatX>(n);
    const auto master = c.normal<float>(n);
    const bench::Buffer<float> m(n), v(n);
    const auto params = c.output<floatX>("params", n);
    std::vector<uint8_t> decay(ceil_div(n, kDecayGranule));
    for (size_t i = 0; i < decay.size(); i++) decay[i] = i % 2;
    const auto decay_map = c.upload(decay);
    StepState host = {};
    host.lr = 3e-4f, host.clip_factor = 0.5f;
    host.bias_correction1 = static_cast<float>(1 - std::pow(kBeta1, 2)), host.bias_correction2 = static_cast<float>(1 - std::pow(kBeta2, 2));
    const auto state = c.upload(std::vector<StepState>{host});
    // The moments begin as a first step leaves them.
    fill(m.get(), n, 0.0f, bench::stream());
    fill(v.get(), n, 0.0f, bench::stream());
    const auto step = [&](cudaStream_t stream) { adamw_update(params, master, m, v, grads.get(), decay_map, 0, n, state, kBeta1, kBeta2, kEps, kDecay, stream); };
    step(bench::stream());

    struct Element {
        size_t i;
        double master, m, v;
    };
    std::vector<Element> before;
    for (const size_t i : bench::sample(n, 256)) before.push_back({i, master.at(i), m.at(i), v.at(i)});
    c.run(step);
    for (const Element& e : before) {
        const double g = grads.at(e.i) * host.clip_factor;
        const double new_m = e.m + (1 - kBeta1) * (g - e.m), new_v = kBeta2 * e.v + (1 - kBeta2) * g * g;
        const double keep = decay[e.i / kDecayGranule] ? 1 - static_cast<double>(host.lr) * kDecay : 1;
        const double denominator = std::sqrt(new_v / host.bias_correction2) + kEps, step_size = host.lr / host.bias_correction1;
        const double step_taken = step_size * new_m / denominator, new_p = e.master * keep - step_taken;
        // m: g rounds once (clip), g - m once, the factor 1 - beta1 once, the fused sum once.
        const double m_error = kRoundoff32 * ((1 - kBeta1) * (std::abs(g) * 3 + std::abs(e.m) * 2) + std::abs(new_m));
        c.expect("m", e.i, m.at(e.i), new_m, m_error + kTiny<float>);
        // v: all positive: clip twice (g^2), the factors, two products, the fused sum.
        c.expect("v", e.i, v.at(e.i), new_v, 6 * kRoundoff32 * new_v + kTiny<float>);
        // The step: half of v's error under the root, root, its factor (root and reciprocal), sum with eps, step size, product, quotient: 3 + 8; then the decay
        // factor, the product with it and the difference.
        const double p_error = step_size / denominator * m_error + 11 * kRoundoff32 * std::abs(step_taken) + kRoundoff32 * (2 * std::abs(e.master) + std::abs(new_p));
        c.expect("master", e.i, master.at(e.i), new_p, p_error);
        c.expect("params", e.i, params.at(e.i), new_p, bench::stored<floatX>(new_p, p_error));
    }
    // Master, m and v are read and written. Clip 1, m 3, v 4, p 7.
    c.time(bench::bytes(grads, params, decay_map) + 2 * bench::bytes(master, m, v), 15.0 * n);
}

const bench::Registration registration([](const bench::Settings& s) {
    for (const ModelConfig& model : s.models) {
        const size_t n = bench::layer_parameters(model);
        bench::add(format("adamw_update/n=%zu", n), [=](bench::Case& c) { update(c, n); });
    }
});

}  // namespace adamw_bench
