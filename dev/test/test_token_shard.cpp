// Token shards: both widths, masks, every broken header and size, globs.
#include <sys/stat.h>

#include "dev/test/host_test.h"
#include "llmc/token_shard.h"

namespace {

std::string with_field(std::string bytes, int index, int32_t value) {
    memcpy(bytes.data() + 4 * index, &value, sizeof value);
    return bytes;
}

TEST(TokenShard, ReadsBothWidths) {
    TempFolder folder;
    write_file(folder.file("a.bin"), shard_bytes({0, 1, 65535}, 2));
    write_file(folder.file("b.bin"), shard_bytes({0, 70000, 4294967295u}, 4));
    const TokenShard a(folder.file("a.bin")), b(folder.file("b.bin"));
    EXPECT_EQ(a.count(), 3u);
    EXPECT_EQ(a.token_bytes(), 2);
    EXPECT_EQ(a.token(2), 65535u);
    EXPECT_EQ(a.offset_bytes(2), 1028u);
    EXPECT_EQ(b.token_bytes(), 4);
    EXPECT_EQ(b.token(1), 70000u);  // would wrap to 4464 in 16 bits
    EXPECT_EQ(b.token(2), 4294967295u);
    EXPECT_FALSE(a.has_mask());
    EXPECT_TRUE(a.counts_as_target(1));
}

TEST(TokenShard, EveryFlippedHeaderFieldIsRefused) {
    TempFolder folder;
    const std::string path = folder.file("s.bin");
    for (const int width : {2, 4}) {
        const std::string good = shard_bytes({1, 2, 3, 4, 5}, width);
        const auto refused = [&](int index, int32_t value, const std::vector<std::string>& words) {
            write_file(path, with_field(good, index, value));
            expect_error([&] { TokenShard shard(path); }, words);
        };
        int32_t magic, version;
        memcpy(&magic, good.data(), 4);
        memcpy(&version, good.data() + 4, 4);
        for (int bit = 0; bit < 32; ++bit) {
            refused(0, magic ^ static_cast<int32_t>(1u << bit), {path, "offset 0"});
            refused(1, version ^ static_cast<int32_t>(1u << bit), {path, "offset 4"});
            refused(2, 5 ^ static_cast<int32_t>(1u << bit), {path, "offset 8"});
        }
        refused(0, width == 2 ? 20240801 : 20240520, {path, "version"});  // the other width's magic
        refused(2, 2147483647, {path, "truncated"});
        refused(2, -1, {path, "negative"});
    }
}

TEST(TokenShard, EveryTruncationAndEveryTailIsRefused) {
    TempFolder folder;
    const std::string path = folder.file("s.bin");
    const std::string good = shard_bytes({1, 2, 3}, 2);
    for (size_t size = 0; size < good.size(); size += size < 1016 ? 127 : 1) {
        write_file(path, good.substr(0, size));
        expect_error([&] { TokenShard shard(path); }, {path, "truncated"});
    }
    write_file(path, good + "x");
    expect_error([&] { TokenShard shard(path); }, {path, "longer"});
}

TEST(TokenShard, WhatIsNoFileIsRefusedAndNamed) {
    TempFolder folder;
    expect_error([&] { TokenShard shard(folder.file("missing.bin")); }, {"missing.bin", "No such file"});
    expect_error([&] { TokenShard shard(folder.path()); }, {folder.path(), "regular file"});
    std::filesystem::create_symlink("nowhere", folder.file("gone_000.bin"));
    expect_error([&] { open_shards(folder.file("gone_*.bin")); }, {"gone_000.bin", "No such file"});
    ASSERT_EQ(mkfifo(folder.file("pipe.bin").c_str(), 0600), 0);
    expect_error([&] { TokenShard shard(folder.file("pipe.bin")); }, {"pipe.bin", "regular file"});  // and does not hang
}

TEST(TokenShard, MaskBitsAreLowestFirst) {
    TempFolder folder;
    const std::string path = folder.file("s.bin");
    write_file(path, shard_bytes(std::vector<uint32_t>(11, 7)));
    write_file(path + ".mask", std::string("\x05\x04", 2));
    const TokenShard shard(path);
    ASSERT_TRUE(shard.has_mask());
    for (size_t i = 0; i < 11; ++i) EXPECT_EQ(shard.counts_as_target(i), i == 0 || i == 2 || i == 10) << i;
}

TEST(TokenShard, AMaskOfTheWrongSizeIsRefused) {
    TempFolder folder;
    const std::string path = folder.file("s.bin");
    write_file(path, shard_bytes(std::vector<uint32_t>(16, 7)));
    for (const size_t size : {0, 1, 3}) {
        write_file(path + ".mask", std::string(size, '\xff'));
        expect_error([&] { TokenShard shard(path); }, {path + ".mask", "16 tokens", "has 2"});
    }
}

TEST(ShardSet, SortsBytewiseAndLeavesMasksOut) {
    TempFolder folder;
    for (const char* name : {"train_10.bin", "train_2.bin", "train_A.bin", "train_a.bin", "train_\xc3\xa4.bin", "other.bin"}) write_file(folder.file(name), shard_bytes({1, 2}));
    write_file(folder.file("train_2.bin.mask"), "\xff");
    const ShardSet set = open_shards(folder.file("train_*"));
    std::vector<std::string> names;
    for (const TokenShard& shard : set.shards) names.push_back(shard.path().substr(folder.path().size() + 1));
    EXPECT_EQ(names, (std::vector<std::string>{"train_10.bin", "train_2.bin", "train_A.bin", "train_a.bin", "train_\xc3\xa4.bin"}));
    EXPECT_EQ(set.count, 10u);
    EXPECT_TRUE(set.shards[1].has_mask());
    EXPECT_TRUE(set.warnings.empty());
}

TEST(ShardSet, NoMatchNamesThePattern) {
    TempFolder folder;
    expect_error([&] { open_shards(folder.file("train_*.bin")); }, {folder.file("train_*.bin"), "no file matches"});
    expect_error([&] { open_shards(""); }, {"empty"});
    write_file(folder.file("train_0.bin.mask"), "x");
    expect_error([&] { open_shards(folder.file("train_*")); }, {"no file matches"});
}

TEST(ShardSet, EmptyShardsAreWarnedAboutAndSkipped) {
    TempFolder folder;
    write_file(folder.file("t_0.bin"), shard_bytes({}));
    write_file(folder.file("t_1.bin"), shard_bytes({4, 5, 6}));
    const ShardSet set = open_shards(folder.file("t_*.bin"));
    ASSERT_EQ(set.shards.size(), 1u);
    EXPECT_EQ(set.shards[0].token(0), 4u);
    ASSERT_EQ(set.warnings.size(), 1u);
    EXPECT_NE(set.warnings[0].find("t_0.bin"), std::string::npos);
    write_file(folder.file("t_1.bin"), shard_bytes({}));
    expect_error([&] { open_shards(folder.file("t_*.bin")); }, {"all 2 files", "empty"});
}

}  // namespace
