// Rotary position embedding: the table and both directions.
#include "dev/test/kernel_test.cuh"
#include "llmc/rope.cuh"

namespace {

TEST(RopeTable, MatchesFormula) {
    const int max_T = 300, HD = 24;
    const std::vector<float> table = rope_table(max_T, HD, 10000.0, RopeScaling{});
    ASSERT_EQ(table.size(), static_cast<size_t>(max_T) * HD);
    for (int t = 0; t < max_T; t++) {
        for (int i = 0; i < HD / 2; i++) {
            const double angle = t * std::pow(10000.0, -2.0 * i / HD);
            // The angle is float32: exponent, power, reciprocal and product round, the exponent's error times ln(theta) = 9.3.
            const double bound = angle * (3 + 9.3) * kRoundoff32 + kRoundoff32;
            ASSERT_NEAR(table[static_cast<size_t>(t) * HD + i], std::cos(angle), bound);
            ASSERT_NEAR(table[static_cast<size_t>(t) * HD + HD / 2 + i], std::sin(angle), bound);
        }
    }
}

TEST(RopeTable, Llama3Scaling) {
    RopeScaling scaling;
    scaling.type = RopeScaling::Type::Llama3;
    scaling.factor = 8.0;
    scaling.low_freq_factor = 1.0;
    scaling.high_freq_factor = 4.0;
    scaling.original_max_seq_len = 8192;
    const int HD = 128;
    // Position 1 shows the frequencies themselves: sin(f) for f <= 1 determines f.
    const std::vector<float> table = rope_table(2, HD, 500000.0, scaling);
    int kept = 0, stretched = 0, blended = 0;
    for (int i = 0; i < HD / 2; i++) {
        const double plain = std::pow(500000.0, -2.0 * i / HD), wavelength = 2 * M_PI / plain;
        double expected = plain;
        if (wavelength > 8192.0) {
            expected = plain / 8;
            stretched++;
        } else if (wavelength > 8192.0 / 4) {
            const double blend = (8192.0 / wavelength - 1) / 3;
            expected = (1 - blend) * plain / 8 + blend * plain;
            blended++;
        } else {
            kept++;
        }
        // ln(theta) = 13.1 times the exponent's rounding, a dozen for the rest.
        ASSERT_NEAR(std::asin(static_cast<double>(table[HD + HD / 2 + i])), expected, 26 * kRoundoff32 * expected / std::cos(expected)) << i;
    }
    // Every branch was seen.
    EXPECT_GT(kept, 0);
    EXPECT_GT(stretched, 0);
    EXPECT_GT(blended, 0);
}

TEST(RopeTable, OddHeadDimIsRefused) { EXPECT_THROW(rope_table(4, 7, 10000.0, RopeScaling{}), Error); }

void check_rope(int B, int T, int num_heads, int HD, int gap, bool with_positions) {
    SCOPED_TRACE(testing::Message() << "B " << B << " T " << T << " heads " << num_heads << " HD " << HD << " gap " << gap);
    const int max_T = T + 5, half = HD / 2;
    const size_t row_stride = static_cast<size_t>(num_heads) * HD + gap;
    const std::vector<float> table = rope_table(max_T, HD, 10000.0, RopeScaling{});
    const std::vector<double> before = random_values<floatX>(B * T * row_stride, HD);
    const std::vector<int> positions = random_ints(B * T, 9, 0, max_T - 1);
    DeviceBuffer<float> device_table(table);
    DeviceBuffer<int> device_positions(positions);
    for (const bool backward : {false, true}) {
        DeviceBuffer<floatX> x(to_storage<floatX>(before));
        (backward ? rope_backward : rope_forward)(x, device_table, with_positions ? device_positions.get() : nullptr, B, T, num_heads, HD, row_stride, test_stream());
        std::vector<double> expected = before, bound(before.size());
        for (int token = 0; token < B * T; token++) {
            const size_t position = with_positions ? positions[token] : token % T;
            for (int h = 0; h < num_heads; h++) {
                for (int i = 0; i < half; i++) {
                    const size_t a = token * row_stride + static_cast<size_t>(h) * HD + i, b = a + half;
                    const double c = table[position * HD + i], s = (backward ? -1.0 : 1.0) * table[position * HD + half + i];
                    expected[a] = before[a] * c - before[b] * s;
                    expected[b] = before[b] * c + before[a] * s;
                    // Two products and their sum in fp32, then storage.
                    const double magnitude = std::abs(before[a]) + std::abs(before[b]);
                    for (const size_t k : {a, b}) bound[k] = 2 * kRoundoff32 * magnitude + kRoundoff<floatX> * std::abs(expected[k]) + kTiny<floatX>;
                }
            }
        }
        // What lies behind the heads of a row has bound 0: untouched.
        expect_close(backward ? "backward" : "forward", x.values(), expected, [&](size_t i) { return bound[i]; });
    }
}

TEST(Rope, HeadDims) {
    for (const int HD : {2, 8, 24, 64, 80, 96, 128}) check_rope(2, 5, 3, HD, HD, false);
}
TEST(Rope, ValuesBehindTheHeadsStay) { check_rope(2, 3, 4, 16, 48, false); }
TEST(Rope, UnalignedRows) { check_rope(2, 3, 1, 16, 4, false); }
TEST(Rope, GivenPositions) {
    check_rope(2, 7, 2, 32, 0, true);
    check_rope(2, 7, 2, 24, 0, true);
}
TEST(Rope, OneRowAndManyHeads) {
    check_rope(1, 1, 1, 8, 0, false);
    check_rope(1, 2, 40, 128, 0, false);
}
TEST(Rope, NothingToDo) { rope_forward(nullptr, nullptr, nullptr, 0, 4, 1, 8, 8, test_stream()); }
TEST(Rope, RefusesBadShapes) {
    EXPECT_THROW(rope_forward(nullptr, nullptr, nullptr, 1, 1, 1, 7, 8, test_stream()), Error);
    EXPECT_THROW(rope_forward(nullptr, nullptr, nullptr, 1, 1, 2, 8, 8, test_stream()), Error);
}

}  // namespace
