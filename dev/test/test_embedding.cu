// Token embedding, forward and backward.
#include <algorithm>
#include <numeric>

#include "dev/test/kernel_test.cuh"
#include "llmc/embedding.cuh"

namespace {

std::vector<int> sort_positions(const std::vector<int>& tokens) {
    std::vector<int> positions(tokens.size());
    std::iota(positions.begin(), positions.end(), 0);
    std::stable_sort(positions.begin(), positions.end(), [&](int a, int b) { return tokens[a] < tokens[b]; });
    return positions;
}

void check_embedding(const std::vector<int>& tokens, int Vp, int C) {
    const int N = static_cast<int>(tokens.size());
    const std::vector<double> weight = random_values<floatX>(static_cast<size_t>(Vp) * C, 1);
    DeviceBuffer<floatX> device_weight(to_storage<floatX>(weight)), out(static_cast<size_t>(N) * C);
    DeviceBuffer<int> device_tokens(tokens), positions(sort_positions(tokens));
    embedding_forward(out, device_tokens, device_weight, N, C, test_stream());
    std::vector<double> expected(static_cast<size_t>(N) * C);
    for (int n = 0; n < N; n++) std::copy_n(&weight[static_cast<size_t>(tokens[n]) * C], C, &expected[static_cast<size_t>(n) * C]);
    EXPECT_EQ(out.values(), expected);

    const std::vector<double> dout = random_values<floatX>(static_cast<size_t>(N) * C, 2), before = random_values<floatX>(static_cast<size_t>(Vp) * C, 3);
    DeviceBuffer<floatX> dweight(to_storage<floatX>(before)), device_dout(to_storage<floatX>(dout));
    embedding_backward(dweight, device_dout, device_tokens, positions, N, C, test_stream());
    std::vector<double> sum = before, magnitude(before.size());
    std::vector<int> run(Vp);
    for (int n = 0; n < N; n++) {
        run[tokens[n]]++;
        for (int c = 0; c < C; c++) {
            sum[static_cast<size_t>(tokens[n]) * C + c] += dout[static_cast<size_t>(n) * C + c];
            magnitude[static_cast<size_t>(tokens[n]) * C + c] += std::abs(dout[static_cast<size_t>(n) * C + c]);
        }
    }
    // A run is added in fp32 (at most as many additions as it has rows), then added to what was there and rounded once. No row, no change.
    expect_close("dweight", dweight.values(), sum, [&](size_t i) {
        const int rows = run[i / C];
        return rows == 0 ? 0.0 : kRoundoff32 * (rows * magnitude[i] + std::abs(sum[i])) + kRoundoff<floatX> * std::abs(sum[i]) + kTiny<floatX>;
    });
    // The same bits again.
    DeviceBuffer<floatX> again(to_storage<floatX>(before));
    embedding_backward(again, device_dout, device_tokens, positions, N, C, test_stream());
    expect_same_bits("dweight again", again.download(), dweight.download());
}

TEST(Embedding, OneRow) {
    for (const int C : {8, 24, 768}) check_embedding({3}, 5, C);
}
TEST(Embedding, FewTokensLongRuns) {
    for (const int C : {8, 24, 264, 768}) check_embedding(random_ints(500, 4, 0, 6), 8, C);
}
TEST(Embedding, OneTokenOnly) { check_embedding(std::vector<int>(300, 7), 16, 40); }
TEST(Embedding, RunsAroundTheShortLimit) {
    std::vector<int> tokens;
    for (int run = 1; run <= 2 * kEmbeddingShortRun + 2; run++) tokens.insert(tokens.end(), run, run);
    std::shuffle(tokens.begin(), tokens.end(), std::mt19937(5));
    check_embedding(tokens, 32, 72);
}
TEST(Embedding, ManyTokens) { check_embedding(random_ints(200, 6, 0, 49), 64, 1024 + 8); }
TEST(Embedding, SeveralColumnBlocks) { check_embedding(random_ints(40, 6, 0, 3), 4, 2056); }
TEST(Embedding, NothingToDo) {
    embedding_forward(nullptr, nullptr, nullptr, 0, 8, test_stream());
    embedding_backward(nullptr, nullptr, nullptr, nullptr, 0, 8, test_stream());
}

}  // namespace
