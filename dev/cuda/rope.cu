// Rotary position embedding in place, forward and backward, on the q and k part of packed rows.
#include "dev/cuda/bench.cuh"
#include "llmc/rope.cuh"

namespace rope_bench {

void rotate(bench::Case& c, int B, int T, int num_heads, int HD, int row, double theta, const RopeScaling& scaling, bool backward) {
    const size_t N = static_cast<size_t>(B) * T;
    // The table is an input here; what stands in it is tested elsewhere.
    const std::vector<float> angles = rope_table(T, HD, theta, scaling);
    const auto table = c.upload(angles);
    const auto x = c.normal<floatX>(N, row);
    const std::vector<size_t> tokens = bench::sample(N, 16);
    std::vector<std::vector<double>> before;
    for (const size_t token : tokens) before.push_back(x.fetch(token * row, row));
    c.run([&](cudaStream_t stream) { (backward ? rope_backward : rope_forward)(x, table, nullptr, B, T, num_heads, HD, row, stream); });
    const int half = HD / 2;
    for (size_t index = 0; index < tokens.size(); index++) {
        const std::vector<double> got = x.fetch(tokens[index] * row, row);
        const float* const cosines = &angles[tokens[index] % T * HD];
        for (int i = 0; i < row; i++) {
            const int head = i / HD, pair = i % half;
            double want = before[index][i], bound = 0;  // behind the heads: untouched
            if (head < num_heads) {
                const double a = before[index][head * HD + pair], b = before[index][head * HD + half + pair];
                const double cosine = cosines[pair], sine = (backward ? -1.0 : 1.0) * cosines[half + pair];
                want = i % HD < half ? a * cosine - b * sine : b * cosine + a * sine;
                bound = bench::stored<floatX>(want, 2 * kRoundoff32 * (std::abs(a) + std::abs(b)));  // two products and their sum
            }
            c.expect("x", tokens[index] * row + i, got[i], want, bound);
        }
    }
    // Each timed run turns further; lengths stay, so the values do too. Three operations an element.
    const double turned = static_cast<double>(N) * num_heads * HD;
    c.time(bench::bytes(table) + 2 * turned * sizeof(floatX), 3.0 * turned);
}

const bench::Registration registration([](const bench::Settings& s) {
    for (const ModelConfig& model : s.models) {
        const double theta = model.rope_theta;
        const RopeScaling scaling = model.rope_scaling;
        const int B = s.N / s.T, T = s.T, heads = model.num_heads + model.num_kv_heads, HD = model.head_dim, row = (heads + model.num_kv_heads) * HD;
        for (const bool backward : {false, true}) {
            bench::add(format("rope_%s/B=%d/T=%d/heads=%d/HD=%d/row=%d", backward ? "backward" : "forward", B, T, heads, HD, row),
                       [=](bench::Case& c) { rotate(c, B, T, heads, HD, row, theta, scaling, backward); });
        }
    }
});

}  // namespace rope_bench
