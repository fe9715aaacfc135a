// SwiGLU, forward and backward.
#include "dev/cuda/bench.cuh"
#include "llmc/swiglu.cuh"

namespace swiglu_bench {

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// The exponential is within two ulp, four roundoffs; sum and quotient round: sigmoid is within 6 roundoffs.
void forward(bench::Case& c, int N, int F) {
    const auto gate_up = c.normal<floatX>(N, 2, F);
    const auto out = c.output<floatX>("out", N, F);
    c.run([&](cudaStream_t stream) { swiglu_forward(out, gate_up, N, F, stream); });
    for (const size_t row : bench::sample(N, 8)) {
        const std::vector<double> x = gate_up.fetch(row * 2 * F, 2 * F), got = out.fetch(row * F, F);
        for (int i = 0; i < F; i++) {
            const double want = x[i] * sigmoid(x[i]) * x[F + i];
            c.expect("out", row * F + i, got[i], want, bench::stored<floatX>(want, 8 * kRoundoff32 * std::abs(want)));  // two products
        }
    }
    // Exponential, sum, quotient, two products.
    c.time(bench::bytes(gate_up, out), 5.0 * N * F);
}

void backward(bench::Case& c, int N, int F) {
    const auto gate_up = c.normal<floatX>(N, 2, F), dout = c.normal<floatX>(N, F);
    const auto dgate_up = c.output<floatX>("dgate_up", N, 2, F);
    c.run([&](cudaStream_t stream) { swiglu_backward(dgate_up, dout, gate_up, N, F, stream); });
    for (const size_t row : bench::sample(N, 8)) {
        const std::vector<double> x = gate_up.fetch(row * 2 * F, 2 * F), d = dout.fetch(row * F, F), got = dgate_up.fetch(row * 2 * F, 2 * F);
        for (int i = 0; i < F; i++) {
            const double gate = x[i], up = x[F + i], s = sigmoid(gate), slope = 1 + gate * (1 - s);
            // slope: 1 - s carries the error of s and its own, times gate; product and sum round. Then the factors before it: 6 + 4.
            const double slope_error = std::abs(gate) * kRoundoff32 * (6 * s + 2 * (1 - s)) + kRoundoff32 * std::abs(slope);
            const double dgate = d[i] * up * s * slope, dup = d[i] * gate * s;
            const double dgate_error = std::abs(d[i] * up) * s * (slope_error + 10 * kRoundoff32 * std::abs(slope));
            c.expect("dgate", row * 2 * F + i, got[i], dgate, bench::stored<floatX>(dgate, dgate_error));
            c.expect("dup", row * 2 * F + F + i, got[F + i], dup, bench::stored<floatX>(dup, 8 * kRoundoff32 * std::abs(dup)));
        }
    }
    // Sigmoid 3, dgate 6, dup 2.
    c.time(bench::bytes(gate_up, dout, dgate_up), 11.0 * N * F);
}

const bench::Registration registration([](const bench::Settings& s) {
    for (const ModelConfig& model : s.models) {
        const int N = s.N, F = model.ffn_dim;
        bench::add(format("swiglu_forward/N=%d/F=%d", N, F), [=](bench::Case& c) { forward(c, N, F); });
        bench::add(format("swiglu_backward/N=%d/F=%d", N, F), [=](bench::Case& c) { backward(c, N, F); });
    }
});

}  // namespace swiglu_bench
