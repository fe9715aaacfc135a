// Sums of rows, of lists and of squares.
#include "dev/test/kernel_test.cuh"
#include "llmc/global_norm.cuh"
#include "llmc/reduce.cuh"

namespace {

TEST(SumRows, AwkwardSizes) {
    for (const int P : {0, 1, 3, 8, 9, 100}) {
        for (const int C : {8, 24, 256, 264, 768}) {
            for (const int gap : {0, 16}) {
                const size_t row_stride = C + gap;
                std::vector<double> partials = random_values<float>(P * row_stride, P * 1000 + C);
                std::vector<double> expected(C), magnitude(C);
                for (int p = 0; p < P; p++) {
                    for (int c = 0; c < C; c++) {
                        expected[c] += partials[p * row_stride + c];
                        magnitude[c] += std::abs(partials[p * row_stride + c]);
                    }
                    for (int c = C; c < C + gap; c++) partials[p * row_stride + c] = NAN;  // what lies between rows is not read
                }
                DeviceBuffer<float> in(to_storage<float>(partials));
                DeviceBuffer<floatX> out(C);
                sum_rows(out.get(), in, P, C, row_stride, test_stream());
                // A group adds ceil(P / 8) terms, then eight groups are added; then one rounding.
                const double additions = ceil_div(P, 8) + 8;
                expect_close("sum_rows", out.values(), expected,
                             [&](size_t c) { return additions * kRoundoff32 * magnitude[c] + kRoundoff<floatX> * std::abs(expected[c]) + kTiny<floatX>; });
            }
        }
    }
}

TEST(SumToDouble, OverwritesOrAdds) {
    for (const size_t n : {size_t{0}, size_t{1}, size_t{255}, size_t{256}, size_t{5000}}) {
        const std::vector<double> values = random_values<float>(n, 5);
        double sum = 0, magnitude = 0;
        for (const double value : values) sum += value, magnitude += std::abs(value);
        DeviceBuffer<float> in(to_storage<float>(values));
        DeviceBuffer<double> overwritten(1), added(std::vector<double>{100.0}), partials(values), total(1);
        sum_to_double(overwritten, in, n, false, test_stream());
        sum_to_double(added, in, n, true, test_stream());
        sum_partials(total, partials, n, test_stream());
        // Doubles: n / 256 additions a thread, 5 a warp, 8 warps, one for what was there.
        const double bound = (n / 256 + 15) * 0x1p-53 * (magnitude + 100);
        EXPECT_NEAR(overwritten.values()[0], sum, bound);
        EXPECT_NEAR(added.values()[0], 100 + sum, bound);
        EXPECT_NEAR(total.values()[0], sum, bound);
    }
}

template <typename T>
void check_sum_of_squares(double scale) {
    for (const size_t n : {size_t{8}, size_t{256}, size_t{264}, kNormChunk - 8, kNormChunk, kNormChunk + 8, 5 * kNormChunk + 1016}) {
        const std::vector<double> values = random_values<T>(n, 6, scale);
        DeviceBuffer<T> in(to_storage<T>(values));
        const size_t count = sum_of_squares_count(n);
        ASSERT_EQ(count, (n + kNormChunk - 1) / kNormChunk);
        DeviceBuffer<double> partials(count), total(1);
        sum_of_squares(partials.get(), in.get(), n, test_stream());
        sum_partials(total, partials, count, test_stream());
        std::vector<double> expected(count);
        double sum = 0;
        for (size_t i = 0; i < n; i++) {
            expected[i / kNormChunk] += values[i] * values[i];
            sum += values[i] * values[i];
        }
        // In fp32: eight fused additions, then three over the vector. The rest is double, and every term positive.
        const double relative = 11 * kRoundoff32 + 1e-13;
        expect_close("partials", partials.values(), expected, [&](size_t i) { return relative * expected[i]; });
        EXPECT_NEAR(total.values()[0], sum, relative * sum);
    }
}

TEST(SumOfSquares, StorageType) { check_sum_of_squares<floatX>(1.0); }
TEST(SumOfSquares, Float) { check_sum_of_squares<float>(1.0); }
TEST(SumOfSquares, SmallAndLarge) {
    check_sum_of_squares<floatX>(1e-12);
    check_sum_of_squares<floatX>(1e15);
}

TEST(SumOfSquares, NotFiniteShows) {
    for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
        for (const size_t at : {size_t{0}, kNormChunk + 3, 2 * kNormChunk + 1023}) {
            std::vector<double> values(2 * kNormChunk + 1024, 0.5);
            values[at] = bad;
            DeviceBuffer<floatX> in(to_storage<floatX>(values));
            DeviceBuffer<double> partials(3), total(1);
            sum_of_squares(partials.get(), in.get(), values.size(), test_stream());
            sum_partials(total, partials, 3, test_stream());
            EXPECT_FALSE(std::isfinite(total.values()[0]));
        }
    }
}

TEST(SumOfSquares, NothingToDo) {
    sum_of_squares(static_cast<double*>(nullptr), static_cast<const floatX*>(nullptr), 0, test_stream());
    EXPECT_EQ(sum_of_squares_count(0), 0u);
}

}  // namespace
