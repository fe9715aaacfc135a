#include "llmc/param_table.h"

#include <gtest/gtest.h>

#include "dev/test/host_test.h"
#include "llmc/error.h"

namespace {

class ParamTableTest : public testing::TestWithParam<std::tuple<bool, bool, bool>> {};

TEST_P(ParamTableTest, ParametersAndGapsTileEveryUnit) {
    const auto [tied, bias, qk_norm] = GetParam();
    const ParamTable table = make_param_table(small_config(tied, bias, qk_norm));
    EXPECT_EQ(table.units.size(), 5u);
    size_t logical = 0;
    for (size_t u = 0; u < table.units.size(); ++u) {
        const Unit& unit = table.units[u];
        std::vector<int> owners(unit.count, 0);
        for (int i = unit.first_parameter; i < unit.end_parameter; ++i) {
            const Parameter& p = table.parameters[i];
            EXPECT_EQ(p.unit, static_cast<int>(u));
            for (size_t j = 0; j < p.stored_count(); ++j) owners.at(p.offset + j)++;
        }
        for (const Unit::Gap& gap : unit.gaps) {
            for (size_t j = 0; j < gap.count; ++j) owners.at(gap.offset + j)++;
        }
        for (const int count : owners) ASSERT_EQ(count, 1) << unit.name;
        EXPECT_EQ(unit.count % kParameterAlign, 0u);
        EXPECT_EQ(unit.logical_begin, logical);
        logical += unit.count;
    }
    EXPECT_EQ(table.parameter_count(), static_cast<size_t>(count_parameters(small_config(tied, bias, qk_norm))));
}

TEST_P(ParamTableTest, MembersOfOneProductAreContiguousAndAligned) {
    const auto [tied, bias, qk_norm] = GetParam();
    const ParamTable table = make_param_table(small_config(tied, bias, qk_norm));
    const std::string prefix = "model.layers.1.";
    const auto follows = [&](const std::string& a, const std::string& b) {
        EXPECT_EQ(table.find(prefix + a).offset + table.find(prefix + a).stored_count(), table.find(prefix + b).offset) << a << " " << b;
    };
    follows("self_attn.q_proj.weight", "self_attn.k_proj.weight");
    follows("self_attn.k_proj.weight", "self_attn.v_proj.weight");
    follows("mlp.gate_proj.weight", "mlp.up_proj.weight");
    if (bias) follows("self_attn.q_proj.bias", "self_attn.k_proj.bias");
    for (const char* first : {"input_layernorm.weight", "self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.down_proj.weight"}) {
        EXPECT_EQ(table.offset_in_unit(prefix + first) % kParameterAlign, 0u) << first;
    }
}

TEST_P(ParamTableTest, DecayIsOnMatricesOnly) {
    const auto [tied, bias, qk_norm] = GetParam();
    const ParamTable table = make_param_table(small_config(tied, bias, qk_norm));
    const FlatLayout layout = make_flat_layout(table, 3, 0, 2);
    const std::vector<uint8_t> map = make_decay_map(table, layout);
    for (const Parameter& p : table.parameters) {
        const size_t begin = layout.unit_begin[p.unit] + p.offset;
        for (size_t i = begin; i < begin + p.stored_count(); ++i) ASSERT_EQ(map.at(i / kParameterAlign), p.cols > 1 ? 1 : 0) << p.name;
    }
}

TEST_P(ParamTableTest, BucketsCoverEveryUnitOnceAndSlicesAreEqual) {
    const auto [tied, bias, qk_norm] = GetParam();
    const ParamTable table = make_param_table(small_config(tied, bias, qk_norm));
    for (const int ranks : {1, 2, 3, 5, 7}) {
        for (const double bucket_mb : {0.0, 0.02, 25.0}) {
            const FlatLayout layout = make_flat_layout(table, ranks, bucket_mb, 2);
            int unit = 0;
            size_t end = 0, slices = 0;
            for (const Bucket& bucket : layout.buckets) {
                EXPECT_EQ(bucket.first_unit, unit);
                EXPECT_GE(bucket.begin, end);
                EXPECT_EQ(bucket.begin % kParameterAlign, 0u);
                EXPECT_EQ(bucket.slice_count * ranks, bucket.count);
                EXPECT_EQ(bucket.slice_count % kSliceAlign, 0u);
                EXPECT_EQ(bucket.slice_begin, slices);
                EXPECT_LT(bucket.count - bucket.unit_count, ranks * kSliceAlign);
                size_t cursor = bucket.begin;
                for (; unit < bucket.end_unit; ++unit) {
                    EXPECT_EQ(layout.unit_begin[unit], cursor);
                    cursor += table.units[unit].count;
                }
                EXPECT_EQ(cursor, bucket.begin + bucket.unit_count);
                if (bucket_mb == 0.0) { EXPECT_EQ(bucket.end_unit, bucket.first_unit + 1); }
                if (bucket.end_unit > bucket.first_unit + 1) { EXPECT_LE(bucket.unit_count * 2, bucket_mb * 1e6); }
                end = bucket.begin + bucket.count;
                slices += bucket.slice_count;
            }
            EXPECT_EQ(unit, static_cast<int>(table.units.size()));
            EXPECT_EQ(layout.total_count, end);
            EXPECT_EQ(layout.shard_count, slices);
            if (bucket_mb == 25.0) { EXPECT_EQ(layout.buckets.size(), 1u); }
        }
    }
}

TEST_P(ParamTableTest, PiecesOfARangeAreItsElementsInOrder) {
    const auto [tied, bias, qk_norm] = GetParam();
    const ParamTable table = make_param_table(small_config(tied, bias, qk_norm));
    for (const int ranks : {1, 2, 3, 7}) {
        for (const double bucket_mb : {0.0, 0.02, 25.0}) {
            const FlatLayout layout = make_flat_layout(table, ranks, bucket_mb, 2);
            // Of every element of the flat buffer its parameter and which element of it; -1: padding or gap.
            std::vector<std::pair<int, size_t>> owners(layout.total_count, {-1, 0});
            for (size_t i = 0; i < table.parameters.size(); ++i) {
                const Parameter& p = table.parameters[i];
                for (size_t element = 0; element < p.count(); ++element) owners.at(layout.unit_begin[p.unit] + p.offset + element) = {static_cast<int>(i), element};
            }
            for (size_t b = 0; b < layout.buckets.size(); ++b) {
                const Bucket& bucket = layout.buckets[b];
                const auto check = [&](size_t begin, size_t count) {
                    size_t at = 0;  // of the range
                    const auto nobodys = [&](size_t end) {
                        for (; at < end; ++at) ASSERT_EQ(owners.at(begin + at).first, -1) << begin << " + " << at;
                    };
                    for (const ParameterPiece& piece : parameter_pieces(table, layout, b, begin, count)) {
                        ASSERT_GE(piece.in_range, at);
                        ASSERT_GT(piece.count, 0u);
                        nobodys(piece.in_range);
                        for (size_t i = 0; i < piece.count; ++i, ++at) ASSERT_EQ(owners.at(begin + at), std::make_pair(piece.parameter, piece.first + i)) << begin << " + " << at;
                    }
                    nobodys(count);
                    ASSERT_EQ(at, count);
                };
                check(bucket.begin, bucket.count);
                for (int rank = 0; rank < ranks; ++rank) check(bucket.begin + rank * bucket.slice_count, bucket.slice_count);
                // Ranges that begin and end anywhere, some of one element and some of none.
                for (size_t begin = 0; begin < bucket.count; begin += 1 + bucket.count / 31) {
                    for (const size_t count : {size_t{0}, size_t{1}, size_t{37}, size_t{1000}}) check(bucket.begin + begin, std::min(count, bucket.count - begin));
                }
                if (HasFatalFailure()) return;
            }
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Shapes, ParamTableTest, testing::Combine(testing::Bool(), testing::Bool(), testing::Bool()));

TEST(ParamTable, HeadIsAbsentWhenTied) {
    EXPECT_NO_THROW(make_param_table(small_config(false, false, false)).find("lm_head.weight"));
    EXPECT_THROW(make_param_table(small_config(true, false, false)).find("lm_head.weight"), Error);
}

}  // namespace
