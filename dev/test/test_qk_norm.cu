// QK-norm, forward and backward.
#include "dev/test/kernel_test.cuh"
#include "llmc/qk_norm.cuh"

namespace {

constexpr float kEpsilon = 1e-6f;

struct QkNormShape {
    int N, NH, NKV, HD;
    int heads() const { return NH + NKV; }
    size_t qkv_row() const { return static_cast<size_t>(NH + 2 * NKV) * HD; }
    size_t out_count() const { return static_cast<size_t>(N) * heads() * HD; }
};

void check_qk_norm(const QkNormShape& s) {
    SCOPED_TRACE(testing::Message() << "N " << s.N << " NH " << s.NH << " NKV " << s.NKV << " HD " << s.HD);
    std::vector<double> qkv = random_values<floatX>(s.N * s.qkv_row(), 1);
    // Values are neither read nor written.
    for (int n = 0; n < s.N; n++) {
        for (int c = s.heads() * s.HD; c < static_cast<int>(s.qkv_row()); c++) qkv[n * s.qkv_row() + c] = NAN;
    }
    const std::vector<double> q_weight = random_values<floatX>(s.HD, 2), k_weight = random_values<floatX>(s.HD, 3), dout = random_values<floatX>(s.out_count(), 4);
    DeviceBuffer<floatX> device_qkv(to_storage<floatX>(qkv)), device_q(to_storage<floatX>(q_weight)), device_k(to_storage<floatX>(k_weight)), out(s.out_count());
    DeviceBuffer<float> rstd(static_cast<size_t>(s.N) * s.heads());
    qk_norm_forward(out, rstd, device_qkv, device_q, device_k, s.N, s.NH, s.NKV, s.HD, kEpsilon, test_stream());

    std::vector<double> expected(s.out_count()), expected_rstd(static_cast<size_t>(s.N) * s.heads());
    const auto for_each_head = [&](auto&& visit) {
        for (int n = 0; n < s.N; n++) {
            for (int h = 0; h < s.heads(); h++) visit(static_cast<size_t>(n) * s.heads() + h, n * s.qkv_row() + static_cast<size_t>(h) * s.HD, h < s.NH);
        }
    };
    for_each_head([&](size_t item, size_t offset, bool is_query) {
        double squares = 0;
        for (int c = 0; c < s.HD; c++) squares += qkv[offset + c] * qkv[offset + c];
        expected_rstd[item] = 1 / std::sqrt(squares / s.HD + kEpsilon);
        for (int c = 0; c < s.HD; c++) expected[item * s.HD + c] = qkv[offset + c] * expected_rstd[item] * (is_query ? q_weight : k_weight)[c];
    });
    // As in RMSNorm: additions above a term (the lane's vectors, three in the vector, five over the lanes) halved by the root, four roundings; then two products.
    const int vectors = ceil_div(s.HD, row_lanes(s.HD, kQkNormVectors) * kVector);
    const double relative = kRoundoff32 * ((vectors + 8) / 2.0 + 4);
    expect_close("rstd", rstd.values(), expected_rstd, [&](size_t i) { return relative * expected_rstd[i]; });
    expect_close("out", out.values(), expected, [&](size_t i) { return (relative + 2 * kRoundoff32 + kRoundoff<floatX>)*std::abs(expected[i]) + kTiny<floatX>; });

    // Backward from the same float rstd.
    const std::vector<double> used_rstd = rstd.values();
    DeviceBuffer<floatX> device_dout(to_storage<floatX>(dout)), dqkv(s.N * s.qkv_row()), dq_weight(s.HD), dk_weight(s.HD);
    DeviceBuffer<float> scratch(qk_norm_backward_scratch_count(s.N, s.HD));
    const std::vector<floatX> poisoned = dqkv.download();
    qk_norm_backward(dqkv, dq_weight, dk_weight, scratch, device_dout, device_qkv, device_q, device_k, rstd, s.N, s.NH, s.NKV, s.HD, test_stream());
    const std::vector<floatX> actual_bits = dqkv.download();
    std::vector<double> actual, wanted, bound, dweight[2], magnitude[2];
    for (int side = 0; side < 2; side++) dweight[side].resize(s.HD), magnitude[side].resize(s.HD);
    for_each_head([&](size_t item, size_t offset, bool is_query) {
        const std::vector<double>& weight = is_query ? q_weight : k_weight;
        const double r = used_rstd[item];
        double mean = 0, mean_magnitude = 0;
        for (int c = 0; c < s.HD; c++) {
            const double product = dout[item * s.HD + c] * weight[c] * qkv[offset + c] * r / s.HD;
            mean += product;
            mean_magnitude += std::abs(product);
        }
        for (int c = 0; c < s.HD; c++) {
            const double x = qkv[offset + c] * r, g = dout[item * s.HD + c] * weight[c], d = r * (g - x * mean);
            actual.push_back(to_double(actual_bits[offset + c]));
            wanted.push_back(d);
            // The terms of rmsnorm's bound: three roundings of a product, the additions above it, one for the mean.
            bound.push_back(kRoundoff32 * (r * (std::abs(g) + std::abs(x) * (2 * std::abs(mean) + (vectors + 12) * mean_magnitude)) + 2 * std::abs(d)) + kRoundoff<floatX> * std::abs(d) +
                            kTiny<floatX>);
            dweight[!is_query][c] += dout[item * s.HD + c] * x;
            magnitude[!is_query][c] += std::abs(dout[item * s.HD + c] * x);
        }
    });
    expect_close("dqkv", actual, wanted, [&](size_t i) { return bound[i]; });
    for (int n = 0; n < s.N; n++) {
        for (size_t c = static_cast<size_t>(s.heads()) * s.HD; c < s.qkv_row(); c++) ASSERT_EQ(bits_of(actual_bits[n * s.qkv_row() + c]), bits_of(poisoned[n * s.qkv_row() + c])) << "a value's gradient was written";
    }
    // A group adds at most all heads of its rows, sum_rows a part of the groups and eight parts; x rounds once.
    const double additions = static_cast<double>(qk_norm_backward_rows(s.N)) * s.heads() + ceil_div(qk_norm_backward_partials(s.N, s.HD), kSumRowsGroups) + kSumRowsGroups + 1;
    for (int side = 0; side < 2; side++) {
        expect_close(side == 0 ? "dq_weight" : "dk_weight", (side == 0 ? dq_weight : dk_weight).values(), dweight[side], [&](size_t c) {
            return additions * kRoundoff32 * magnitude[side][c] + kRoundoff<floatX> * std::abs(dweight[side][c]) + kTiny<floatX>;
        });
    }
}

TEST(QkNorm, HeadDims) {
    for (const int HD : {8, 24, 64, 80, 96, 128, 256, 264, 1032}) check_qk_norm({5, 3, 3, HD});
}
TEST(QkNorm, GroupedHeads) {
    for (const int NKV : {1, 2}) {
        for (const int ratio : {1, 2, 7}) check_qk_norm({3, NKV * ratio, NKV, 64});
    }
}
TEST(QkNorm, OneRowAndMany) {
    check_qk_norm({1, 1, 1, 8});
    check_qk_norm({1, 4, 2, 128});
    check_qk_norm({kQkNormMaxBlocks + 3, 1, 1, 8});
}
TEST(QkNorm, NothingToDo) {
    qk_norm_forward(nullptr, nullptr, nullptr, nullptr, nullptr, 0, 1, 1, 8, kEpsilon, test_stream());
    DeviceBuffer<floatX> dq(8), dk(8);
    qk_norm_backward(nullptr, dq, dk, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, 0, 1, 1, 8, test_stream());
    EXPECT_EQ(dq.values(), std::vector<double>(8, 0.0));
    EXPECT_EQ(dk.values(), std::vector<double>(8, 0.0));
}

}  // namespace
