// QK-norm of packed rows, forward and backward, on every model's heads whether it has a QK-norm or not.
#include "dev/cuda/bench.cuh"
#include "llmc/qk_norm.cuh"

namespace qk_norm_bench {

constexpr float kEps = 1e-6f;

void forward(bench::Case& c, int N, int NH, int NKV, int HD) {
    const int heads = NH + NKV, row = (NH + 2 * NKV) * HD;
    const auto qkv = c.normal<floatX>(N, row), q_weight = c.normal<floatX>(HD), k_weight = c.normal<floatX>(HD);
    const auto out = c.output<floatX>("out", N, heads, HD);
    const auto rstd = c.output<float>("rstd", N, heads);
    c.run([&](cudaStream_t stream) { qk_norm_forward(out, rstd, qkv, q_weight, k_weight, N, NH, NKV, HD, kEps, stream); });
    const std::vector<double> wq = q_weight.fetch(0, HD), wk = k_weight.fetch(0, HD);
    for (const size_t n : bench::sample(N, 8)) {
        const std::vector<double> x = qkv.fetch(n * row, heads * HD), got = out.fetch(n * heads * HD, heads * HD), scales = rstd.fetch(n * heads, heads);
        for (int head = 0; head < heads; head++) {
            double squares = 0;
            for (int d = 0; d < HD; d++) squares += x[head * HD + d] * x[head * HD + d];
            // Half the sum's error goes through the root; mean, eps, root and reciprocal round once each; then two products.
            const double scale = 1 / std::sqrt(squares / HD + kEps), relative = bench::sum_error(HD) / 2 + 4 * kRoundoff32;
            c.expect("rstd", n * heads + head, scales[head], scale, relative * scale);
            for (int d = 0; d < HD; d++) {
                const double want = x[head * HD + d] * scale * (head < NH ? wq : wk)[d];
                c.expect("out", (n * heads + head) * HD + d, got[head * HD + d], want, bench::stored<floatX>(want, (relative + 2 * kRoundoff32) * std::abs(want)));
            }
        }
    }
    const double elements = static_cast<double>(N) * heads * HD;
    c.time(elements * sizeof(floatX) + bench::bytes(q_weight, k_weight, out, rstd), 4 * elements);  // square, sum, two products
}

void backward(bench::Case& c, int N, int NH, int NKV, int HD) {
    const int heads = NH + NKV, row = (NH + 2 * NKV) * HD;
    const auto qkv = c.normal<floatX>(N, row), dout = c.normal<floatX>(N, heads, HD), q_weight = c.normal<floatX>(HD), k_weight = c.normal<floatX>(HD);
    const auto dqkv = c.normal<floatX>(N, row);  // its v part must stay
    const auto dq_weight = c.output<floatX>("dq_weight", HD), dk_weight = c.output<floatX>("dk_weight", HD);
    const bench::Buffer<float> rstd(static_cast<size_t>(N) * heads);
    const auto scratch = c.scratch<float>(qk_norm_backward_scratch_count(N, HD));
    {
        const bench::Buffer<floatX> unused(dout.count());
        qk_norm_forward(unused, rstd, qkv, q_weight, k_weight, N, NH, NKV, HD, kEps, bench::stream());  // for rstd
        bench::synchronize();
    }
    const std::vector<size_t> rows = bench::sample(N, 8);
    std::vector<std::vector<double>> before;
    for (const size_t n : rows) before.push_back(dqkv.fetch(n * row, row));
    c.run([&](cudaStream_t stream) { qk_norm_backward(dqkv, dq_weight, dk_weight, scratch, dout, qkv, q_weight, k_weight, rstd, N, NH, NKV, HD, stream); });

    const std::vector<double> wq = q_weight.fetch(0, HD), wk = k_weight.fetch(0, HD);
    for (size_t index = 0; index < rows.size(); index++) {
        const size_t n = rows[index];
        const std::vector<double> x = qkv.fetch(n * row, row), d = dout.fetch(n * heads * HD, heads * HD), scales = rstd.fetch(n * heads, heads);
        const std::vector<double> got = dqkv.fetch(n * row, row);
        for (int head = 0; head < heads; head++) {
            const std::vector<double>& w = head < NH ? wq : wk;
            const double scale = scales[head];
            double mean = 0, mean_magnitude = 0;
            for (int i = 0; i < HD; i++) {
                const double product = d[head * HD + i] * w[i] * x[head * HD + i] * scale / HD;
                mean += product;
                mean_magnitude += std::abs(product);
            }
            const double mean_error = (bench::sum_error(HD) + 4 * kRoundoff32) * mean_magnitude;  // x, g and their product round, the mean once more
            for (int i = 0; i < HD; i++) {
                const double g = d[head * HD + i] * w[i], normed = x[head * HD + i] * scale, want = scale * (g - normed * mean);
                // g rounds once; x, its product with the mean, and the mean's error; the difference and its product with rstd.
                const double error = scale * (kRoundoff32 * std::abs(g) + std::abs(normed) * (2 * kRoundoff32 * std::abs(mean) + mean_error)) +
                                     2 * kRoundoff32 * std::abs(want);
                c.expect("dqkv", n * row + head * HD + i, got[head * HD + i], want, bench::stored<floatX>(want, error));
            }
        }
        for (int i = heads * HD; i < row; i++) c.expect("v part of dqkv", n * row + i, got[i], before[index][i], 0);
    }
    const std::vector<double> scales = rstd.fetch(0, rstd.count());
    for (const size_t i : bench::sample(HD, 4)) {
        for (const bool key : {false, true}) {
            double want = 0, magnitude = 0;
            for (int head = key ? NH : 0; head < (key ? heads : NH); head++) {
                const std::vector<double> x = qkv.fetch(head * HD + i, N, row), d = dout.fetch(head * HD + i, N, heads * HD);
                for (int n = 0; n < N; n++) {
                    const double product = d[n] * x[n] * scales[static_cast<size_t>(n) * heads + head];
                    want += product;
                    magnitude += std::abs(product);
                }
            }
            const double error = (bench::sum_error(static_cast<double>(N) * (key ? NKV : NH)) + 2 * kRoundoff32) * magnitude;
            c.expect(key ? "dk_weight" : "dq_weight", i, (key ? dk_weight : dq_weight).at(i), want, bench::stored<floatX>(want, error));
        }
    }
    const double elements = static_cast<double>(N) * heads * HD;
    // q and k of qkv read and their gradients written; operations as in RMSNorm.
    c.time(2 * elements * sizeof(floatX) + bench::bytes(dout, q_weight, k_weight, rstd, dq_weight, dk_weight), 9 * elements);
}

const bench::Registration registration([](const bench::Settings& s) {
    for (const ModelConfig& model : s.models) {
        const int N = s.N, NH = model.num_heads, NKV = model.num_kv_heads, HD = model.head_dim;
        bench::add(format("qk_norm_forward/N=%d/NH=%d/NKV=%d/HD=%d", N, NH, NKV, HD), [=](bench::Case& c) { forward(c, N, NH, NKV, HD); });
        bench::add(format("qk_norm_backward/N=%d/NH=%d/NKV=%d/HD=%d", N, NH, NKV, HD), [=](bench::Case& c) { backward(c, N, NH, NKV, HD); });
    }
});

}  // namespace qk_norm_bench
