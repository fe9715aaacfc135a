// Cross-entropy with and without gradients, on the logits of a micro-batch: at Qwen2.5's vocabulary and 16384 tokens 2.5 x 10^9 elements, beyond what 32
// bits can index.
#include "dev/cuda/bench.cuh"
#include "llmc/cross_entropy.cuh"

namespace cross_entropy_bench {

void run(bench::Case& c, int N, int V, int Vp, bool gradients) {
    const auto logits = c.normal<floatX>(N, Vp);
    std::vector<int> host_targets = bench::random_ints(N, 8, 0, V - 1);
    host_targets[N / 2] = -1;
    const auto targets = c.upload(host_targets);
    const auto losses = c.output<float>("losses", N);
    const float scale = 1.0f / N;
    const auto inv_valid = c.upload(std::vector<float>{scale});
    std::vector<size_t> rows = bench::sample(N, 6);
    rows.push_back(N / 2);
    std::vector<std::vector<double>> before;
    for (const size_t row : rows) before.push_back(logits.fetch(row * Vp, Vp));
    c.run([&](cudaStream_t stream) {
        if (gradients) {
            cross_entropy<true>(losses, logits, targets, inv_valid, N, V, Vp, stream);
        } else {
            cross_entropy<false>(losses, logits, targets, nullptr, N, V, Vp, stream);
        }
    });
    for (size_t index = 0; index < rows.size(); index++) {
        const size_t row = rows[index];
        const std::vector<double>&x = before[index], got = logits.fetch(row * Vp, Vp);
        const int target = host_targets[row];
        double largest = -INFINITY, sum = 0, distance = 0;
        for (int v = 0; v < V; v++) largest = std::max(largest, x[v]);
        for (int v = 0; v < V; v++) {
            const double e = std::exp(x[v] - largest);
            sum += e;
            distance += e * (largest - x[v]);
        }
        distance /= sum;
        // The sum, relative: an argument x - largest rounds by u |x - largest|, weighted by the terms u * distance; an exponential is within 4 roundoffs;
        // where the maximum of a part of the row grows, the part is corrected by one more exponential and product, at most once every 8 elements.
        const double sum_relative = kRoundoff32 * (distance + 4) + bench::sum_error(V) + 5 * bench::sum_error(V / 8.0);
        const double loss = target < 0 ? 0 : largest - x[target] + std::log(sum);
        // The logarithm is within 2 ulp; difference and final sum round.
        const double loss_bound = target < 0 ? 0 : sum_relative + kRoundoff32 * (4 * std::log(sum) + (largest - x[target]) + loss);
        c.expect("losses", row, losses.at(row), loss, loss_bound);
        for (int v = 0; v < Vp; v++) {
            double want = x[v], bound = 0;  // without gradients the logits stay
            if (gradients) {
                const bool counts = v < V && target >= 0, hit = v == target;
                const double p = counts ? std::exp(x[v] - largest) / sum : 0;
                want = (p - hit) * scale;
                // p: argument, exponential, reciprocal of the sum and product; less one; times inv_valid. A masked row and the padding are 0 exactly.
                const double error = scale * (p * (kRoundoff32 * (largest - x[v] + 6) + sum_relative) + (hit ? kRoundoff32 : 0)) + kRoundoff32 * std::abs(want);
                bound = counts ? bench::stored<floatX>(want, error) : 0;
            }
            c.expect(gradients ? "dlogits" : "logits", row * Vp + v, got[v], want, bound);
        }
    }
    // From the second run on the logits are gradients; the time does not depend on their values. Forward: largest, difference, exponential, sum.
    const double columns = static_cast<double>(N) * V;
    c.time(bench::bytes(targets, losses) + columns * sizeof(floatX) + (gradients ? bench::bytes(logits) : 0), (gradients ? 8 : 4) * columns);
}

const bench::Registration registration([](const bench::Settings& s) {
    for (const ModelConfig& model : s.models) {
        const int N = s.N, V = model.vocab_size, Vp = model.padded_vocab();
        bench::add(format("cross_entropy_forward/N=%d/V=%d/Vp=%d", N, V, Vp), [=](bench::Case& c) { run(c, N, V, Vp, false); });
        bench::add(format("cross_entropy_forward_backward/N=%d/V=%d/Vp=%d", N, V, Vp), [=](bench::Case& c) { run(c, N, V, Vp, true); });
    }
});

}  // namespace cross_entropy_bench
