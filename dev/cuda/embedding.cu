// Token embedding, forward and backward, over tokens as unequal as those of a text.
#include <map>
#include <numeric>

#include "dev/cuda/bench.cuh"
#include "llmc/embedding.cuh"

namespace embedding_bench {

// Token t has a probability of about 1 / (t + 1), as words of a text have by their rank (Zipf).
std::vector<int> zipf_tokens(int N, int V) {
    std::mt19937 generator(5);
    std::uniform_real_distribution<double> uniform;
    std::vector<int> tokens(N);
    for (int& token : tokens) token = std::min(V - 1, static_cast<int>(std::exp(uniform(generator) * std::log(V + 1.0)) - 1));
    return tokens;
}

void forward(bench::Case& c, int N, int C, int V, int Vp) {
    const std::vector<int> host_tokens = zipf_tokens(N, V);
    const std::set<int> distinct(host_tokens.begin(), host_tokens.end());
    const auto tokens = c.upload(host_tokens);
    const auto weight = c.normal<floatX>(Vp, C), out = c.output<floatX>("out", N, C);
    c.run([&](cudaStream_t stream) { embedding_forward(out, tokens, weight, N, C, stream); });
    for (const size_t row : bench::sample(N, 32)) {
        const std::vector<double> got = out.fetch(row * C, C), want = weight.fetch(static_cast<size_t>(host_tokens[row]) * C, C);
        for (int i = 0; i < C; i++) c.expect("out", row * C + i, got[i], want[i], 0);
    }
    c.time(bench::bytes(tokens, out) + sizeof(floatX) * static_cast<double>(C) * distinct.size(), 0);
}

void backward(bench::Case& c, int N, int C, int V, int Vp) {
    const std::vector<int> host_tokens = zipf_tokens(N, V);
    std::vector<int> sorted(N);
    std::iota(sorted.begin(), sorted.end(), 0);
    std::stable_sort(sorted.begin(), sorted.end(), [&](int a, int b) { return host_tokens[a] < host_tokens[b]; });
    std::map<int, std::vector<int>> positions;
    for (int n = 0; n < N; n++) positions[host_tokens[n]].push_back(n);

    const auto tokens = c.upload(host_tokens), sorted_positions = c.upload(sorted);
    const auto dweight = c.normal<floatX>(Vp, C), dout = c.normal<floatX>(N, C);
    // The most frequent tokens, random ones, the last one and rows that no token names.
    std::set<int> checked = {0, 1, host_tokens[0], host_tokens[N / 2], positions.rbegin()->first, Vp - 1};
    for (int token = 0; token < Vp; token++) {
        if (positions.count(token) == 0) {
            checked.insert(token);
            break;
        }
    }
    std::map<int, std::vector<double>> before;
    for (const int token : checked) before[token] = dweight.fetch(static_cast<size_t>(token) * C, C);
    c.run([&](cudaStream_t stream) { embedding_backward(dweight, dout, tokens, sorted_positions, N, C, stream); });
    for (const int token : checked) {
        std::vector<double> want = before[token], magnitude(C);
        const std::vector<int>& rows = positions[token];
        for (const int n : rows) {
            const std::vector<double> d = dout.fetch(static_cast<size_t>(n) * C, C);
            for (int i = 0; i < C; i++) {
                want[i] += d[i];
                magnitude[i] += std::abs(d[i]);
            }
        }
        const std::vector<double> got = dweight.fetch(static_cast<size_t>(token) * C, C);
        for (int i = 0; i < C; i++) {
            // A run of rows is added in fp32, then to what was there, and rounds once. No row, no change.
            const double error = bench::sum_error(rows.size()) * magnitude[i] + kRoundoff32 * std::abs(want[i]);
            c.expect("dweight", static_cast<size_t>(token) * C + i, got[i], want[i], rows.empty() ? 0 : bench::stored<floatX>(want[i], error));
        }
        positions.erase(token);  // the look above may have made an empty one
    }
    const std::set<int> distinct(host_tokens.begin(), host_tokens.end());
    // Rows of the weight's gradient that occur are read and written.
    c.time(bench::bytes(tokens, sorted_positions, dout) + 2.0 * sizeof(floatX) * C * distinct.size(), 1.0 * N * C);
}

const bench::Registration registration([](const bench::Settings& s) {
    for (const ModelConfig& model : s.models) {
        const int N = s.N, C = model.channels, V = model.vocab_size, Vp = model.padded_vocab();
        bench::add(format("embedding_forward/N=%d/C=%d/V=%d", N, C, V), [=](bench::Case& c) { forward(c, N, C, V, Vp); });
        bench::add(format("embedding_backward/N=%d/C=%d/V=%d", N, C, V), [=](bench::Case& c) { backward(c, N, C, V, Vp); });
    }
});

}  // namespace embedding_bench
