// RMSNorm: forward alone and fused with the residual, backward overwriting and accumulating.
#include "dev/cuda/bench.cuh"
#include "llmc/rmsnorm.cuh"

namespace rmsnorm_bench {

constexpr float kEps = 1e-6f;

double reference_rstd(const std::vector<double>& x) {
    double squares = 0;
    for (const double value : x) squares += value * value;
    return 1 / std::sqrt(squares / x.size() + kEps);
}

// Relative error of rstd: half the sum's goes through the root; mean, eps, root and reciprocal round once each.
double rstd_relative(int C) { return bench::sum_error(C) / 2 + 4 * kRoundoff32; }

void forward(bench::Case& c, int N, int C, bool residual) {
    const auto inp1 = c.normal<floatX>(N, C), inp2 = c.normal<floatX>(residual ? N : 0, C), weight = c.normal<floatX>(C);
    const auto sum = c.output<floatX>("residual", residual ? N : 0, C), out = c.output<floatX>("out", N, C);
    const auto rstd = c.output<float>("rstd", N);
    c.run([&](cudaStream_t stream) {
        if (residual) {
            fused_residual_rmsnorm_forward(sum, out, rstd, inp1, inp2, weight, N, C, kEps, stream);
        } else {
            rmsnorm_forward(out, rstd, inp1, weight, N, C, kEps, stream);
        }
    });
    const std::vector<double> w = weight.fetch(0, C);
    for (const size_t row : bench::sample(N, 16)) {
        std::vector<double> x = inp1.fetch(row * C, C);
        if (residual) {
            // The norm is of the sum as it was rounded.
            const std::vector<double> a = x, b = inp2.fetch(row * C, C);
            x = sum.fetch(row * C, C);
            for (int i = 0; i < C; i++) c.expect("residual", row * C + i, x[i], a[i] + b[i], bench::stored<floatX>(a[i] + b[i], kRoundoff32 * std::abs(a[i] + b[i])));
        }
        const double scale = reference_rstd(x), relative = rstd_relative(C);
        c.expect("rstd", row, rstd.at(row), scale, relative * scale);
        const std::vector<double> got = out.fetch(row * C, C);
        for (int i = 0; i < C; i++) {
            const double want = x[i] * scale * w[i];
            c.expect("out", row * C + i, got[i], want, bench::stored<floatX>(want, (relative + 2 * kRoundoff32) * std::abs(want)));  // two more products
        }
    }
    // Square, sum, two products; the residual's addition.
    c.time(bench::bytes(inp1, inp2, weight, sum, out, rstd), (residual ? 5.0 : 4.0) * N * C);
}

void backward(bench::Case& c, int N, int C, bool accumulate) {
    const auto inp = c.normal<floatX>(N, C), dout = c.normal<floatX>(N, C), weight = c.normal<floatX>(C);
    const auto before = c.normal<floatX>(accumulate ? N : 0, C);  // what dinp holds when the gradient is added to it
    const auto dinp = accumulate ? c.normal<floatX>(N, C) : c.output<floatX>("dinp", N, C);
    const auto dweight = c.output<floatX>("dweight", C);
    const auto rstd = bench::Buffer<float>(N);
    const auto scratch = c.scratch<float>(rmsnorm_backward_scratch_count(N, C));
    rmsnorm_forward(dinp, rstd, inp, weight, N, C, kEps, bench::stream());  // for rstd
    if (accumulate) CUDA_CHECK(cudaMemcpyAsync(dinp, before, before.bytes(), cudaMemcpyDeviceToDevice, bench::stream()));
    c.run([&](cudaStream_t stream) { rmsnorm_backward(dinp, dweight, scratch, dout, inp, weight, rstd, N, C, accumulate, stream); });

    const std::vector<double> w = weight.fetch(0, C), scales = rstd.fetch(0, N);
    for (const size_t row : bench::sample(N, 8)) {
        const std::vector<double> x = inp.fetch(row * C, C), d = dout.fetch(row * C, C), got = dinp.fetch(row * C, C);
        const std::vector<double> old = accumulate ? before.fetch(row * C, C) : std::vector<double>(C);
        const double scale = scales[row];
        double mean = 0, mean_magnitude = 0;
        for (int i = 0; i < C; i++) {
            const double product = d[i] * w[i] * x[i] * scale / C;
            mean += product;
            mean_magnitude += std::abs(product);
        }
        const double mean_error = (bench::sum_error(C) + 4 * kRoundoff32) * mean_magnitude;  // x, g and their product round, the mean once more
        for (int i = 0; i < C; i++) {
            const double g = d[i] * w[i], gradient = scale * (g - x[i] * scale * mean), want = gradient + old[i];
            // g rounds once; x, its product with the mean, and the mean's error; the difference and its product with rstd; the sum with what was there.
            const double error = scale * (kRoundoff32 * std::abs(g) + std::abs(x[i] * scale) * (2 * kRoundoff32 * std::abs(mean) + mean_error)) +
                                 kRoundoff32 * (2 * std::abs(gradient) + std::abs(want));
            c.expect("dinp", row * C + i, got[i], want, bench::stored<floatX>(want, error));
        }
    }
    for (const size_t column : bench::sample(C, 8)) {
        const std::vector<double> x = inp.fetch(column, N, C), d = dout.fetch(column, N, C);
        double want = 0, magnitude = 0;
        for (int n = 0; n < N; n++) {
            want += d[n] * x[n] * scales[n];
            magnitude += std::abs(d[n] * x[n] * scales[n]);
        }
        c.expect("dweight", column, dweight.at(column), want, bench::stored<floatX>(want, (bench::sum_error(N) + 2 * kRoundoff32) * magnitude));
    }
    // x, g, g x and its sum, d x and its sum, x mean, the difference, times rstd; what was there.
    c.time(bench::bytes(inp, dout, weight, rstd, before, dinp, dweight), (accumulate ? 10.0 : 9.0) * N * C);
}

const bench::Registration registration([](const bench::Settings& s) {
    for (const ModelConfig& model : s.models) {
        const int N = s.N, C = model.channels;
        bench::add(format("rmsnorm_forward/N=%d/C=%d", N, C), [=](bench::Case& c) { forward(c, N, C, false); });
        bench::add(format("fused_residual_rmsnorm_forward/N=%d/C=%d", N, C), [=](bench::Case& c) { forward(c, N, C, true); });
        for (const bool accumulate : {false, true}) {
            bench::add(format("rmsnorm_backward/N=%d/C=%d/accumulate=%d", N, C, accumulate), [=](bench::Case& c) { backward(c, N, C, accumulate); });
        }
    }
});

}  // namespace rmsnorm_bench
