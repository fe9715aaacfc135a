#include "llmc/replicas.h"

#include <algorithm>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "dev/test/host_test.h"
#include "llmc/hash.h"

namespace {

// Buckets: 0 embedding with layer 0, 1 layers 1 and 2, 2 head. So three checksums of each rank for each array.
struct Model {
    ParamTable table;
    FlatLayout layout;

    explicit Model(int ranks) {
        table = make_param_table(small_config());
        layout = make_flat_layout(table, ranks, 0.0296, 2);
    }
    std::string difference(const std::vector<unsigned long long>& checksums) const { return replica_difference(checksums, table, layout); }
};

TEST(Replicas, TheModelHasTheBucketsSaidAbove) {
    std::vector<int> ends;
    for (const Bucket& bucket : Model(3).layout.buckets) ends.push_back(bucket.end_unit);
    EXPECT_EQ(ends, (std::vector<int>{2, 4, 5}));
}

TEST(Replicas, EqualOnesDoNotDiffer) {
    // Buckets differ from each other, ranks do not.
    EXPECT_EQ(Model(1).difference({7, 8, 9}), "");
    EXPECT_EQ(Model(2).difference({7, 8, 9, 7, 8, 9}), "");
    EXPECT_EQ(Model(3).difference({0, 8, ~0ull, 0, 8, ~0ull, 0, 8, ~0ull}), "");
}

TEST(Replicas, TheOddRankAndItsBucketAreNamed) {
    const std::vector<std::string> buckets = {"bucket 0 (embedding to layer 0)", "bucket 1 (layer 1 to layer 2)", "bucket 2 (head)"};
    for (int odd = 0; odd < 3; ++odd) {
        for (int b = 0; b < 3; ++b) {
            for (const unsigned long long wrong : {1ull, 8ull, 1ull << 63}) {
                std::vector<unsigned long long> checksums(9, 7);
                checksums[odd * 3 + b] = wrong;
                EXPECT_EQ(Model(3).difference(checksums), "rank " + std::to_string(odd) + " does not hold the same weights in " + buckets[b] + " as the others");
            }
        }
    }
}

TEST(Replicas, SeveralOddRanksAreNamedWhetherAlikeOrNot) {
    for (const unsigned long long other : {1ull, 2ull}) {
        std::vector<unsigned long long> checksums(15, 7);
        checksums[1 * 3 + 1] = 1;
        checksums[4 * 3 + 1] = other;
        const std::string difference = Model(5).difference(checksums);
        EXPECT_NE(difference.find("1, 4 "), std::string::npos) << difference;
        EXPECT_NE(difference.find("weights in bucket 1 (layer 1 to layer 2)"), std::string::npos) << difference;
    }
}

TEST(Replicas, WithoutAMajorityNobodyIsBlamed) {
    const auto expect_no_majority = [](int ranks, const std::vector<unsigned long long>& of_bucket_0) {
        std::vector<unsigned long long> checksums(ranks * 3, 7);
        for (int rank = 0; rank < ranks; ++rank) checksums[rank * 3] = of_bucket_0[rank];
        EXPECT_EQ(Model(ranks).difference(checksums), "the ranks do not hold the same weights in bucket 0 (embedding to layer 0), and no majority says which is right");
    };
    expect_no_majority(2, {1, 2});
    expect_no_majority(3, {1, 2, 3});
    expect_no_majority(4, {1, 2, 2, 1});
    expect_no_majority(4, {1, 2, 2, 3});  // two of four are not most
}

TEST(Replicas, TheFirstBucketThatDiffersIsNamed) {
    std::vector<unsigned long long> checksums(9, 7);
    checksums[0 * 3 + 2] = 1;  // rank 0's last bucket
    checksums[2 * 3 + 1] = 1;  // rank 2's before it
    EXPECT_EQ(Model(3).difference(checksums), "rank 2 does not hold the same weights in bucket 1 (layer 1 to layer 2) as the others");
}

TEST(Replicas, TheArrayThatDiffersIsNamedWeightsFirst) {
    const std::vector<std::string> arrays = {"weights", "fp32 master weights", "first moments", "second moments"};
    EXPECT_EQ(Model(3).difference(std::vector<unsigned long long>(36, 7)), "");
    std::vector<unsigned long long> checksums(36, 7);
    for (int array = 3; array >= 0; --array) {
        for (int b = 2; b >= 0; --b) {  // each comes before the ones of the rounds before
            checksums[1 * 12 + array * 3 + b] = 1;
            const std::string difference = Model(3).difference(checksums);
            EXPECT_EQ(difference.find("rank 1 does not hold the same " + arrays[array] + " in bucket " + std::to_string(b)), 0u) << difference;
        }
    }
}

TEST(Replicas, AWrongNumberOfChecksumsIsRefused) {
    for (const size_t count : {1, 3, 8, 10, 12, 35, 45}) {  // 45: five arrays
        expect_error([&] { Model(3).difference(std::vector<unsigned long long>(count, 7)); }, {std::to_string(count) + " checksums", "3 ranks", "3 buckets"});
    }
}

TEST(ProgramHash, IsTheHashOfThisProgramsFile) {
    const std::string hash = program_hash();
    EXPECT_EQ(hash.size(), 16u);
    EXPECT_TRUE(std::all_of(hash.begin(), hash.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); })) << hash;
    EXPECT_EQ(program_hash(), hash);
    const std::string bytes = read_file("/proc/self/exe");
    ASSERT_GT(bytes.size(), 10000u);
    EXPECT_EQ(bytes.substr(1, 3), "ELF");
    Hash64 whole, all_but_one;
    whole.add(bytes.data(), bytes.size());
    all_but_one.add(bytes.data(), bytes.size() - 1);
    EXPECT_EQ(whole.hex(), hash);
    EXPECT_NE(all_but_one.hex(), hash);
}

}  // namespace
