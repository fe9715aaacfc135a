// The data loader: each window once an epoch on any number of ranks, shard ends, masks, errors, resuming, reading ahead.
#include <algorithm>
#include <chrono>
#include <memory>
#include <numeric>
#include <set>
#include <thread>

#include "dev/test/host_test.h"
#include "llmc/data_loader.h"

namespace {

std::vector<uint32_t> ramp(uint32_t first, size_t count) {
    std::vector<uint32_t> tokens(count);
    std::iota(tokens.begin(), tokens.end(), first);
    return tokens;
}

LoaderSettings settings(int B, int T, int G, int rank, int ranks, int vocab = 1 << 20) {
    LoaderSettings s;
    s.micro_batch = B;
    s.seq_len = T;
    s.grad_accum = G;
    s.rank = rank;
    s.ranks = ranks;
    s.vocab_size = vocab;
    s.seed = 42;
    return s;
}

std::vector<int> copy(const int* p, size_t count) { return std::vector<int>(p, p + count); }

// The rows of one global batch in global order, as (inputs, targets) pairs, collected from all ranks.
using Rows = std::vector<std::pair<std::vector<int>, std::vector<int>>>;

class AllRanks {
public:
    AllRanks(const std::string& pattern, int B, int T, int G, int ranks, long long consumed = 0, uint64_t seed = 42) : B_(B), T_(T), G_(G) {
        for (int r = 0; r < ranks; ++r) {
            LoaderSettings s = settings(B, T, G, r, ranks);
            s.windows_consumed = consumed;
            s.seed = seed;
            loaders_.push_back(std::make_unique<DataLoader>(pattern, s));
        }
    }
    Rows next() {
        Rows rows(static_cast<size_t>(G_) * loaders_.size() * B_);
        for (size_t r = 0; r < loaders_.size(); ++r) {
            const StepBatch& batch = loaders_[r]->next();
            for (int m = 0; m < G_; ++m)
                for (int b = 0; b < B_; ++b) {
                    const size_t at = (static_cast<size_t>(m) * B_ + b) * T_;
                    rows[(m * loaders_.size() + r) * B_ + b] = {copy(batch.buffers.inputs + at, T_), copy(batch.buffers.targets + at, T_)};
                }
        }
        return rows;
    }
    DataLoader& rank(int r) { return *loaders_[r]; }

private:
    int B_, T_, G_;
    std::vector<std::unique_ptr<DataLoader>> loaders_;
};

TEST(DataLoader, FiveShardsFourRanksEachWindowOnceAnEpoch) {
    TempFolder folder;
    constexpr int T = 8;
    // Shard i holds tokens 1000 i, 1000 i + 1, ...: a window's first token names it. 17 + 5 + 9 + 1 + 8 = 40 windows.
    const size_t windows[] = {17, 5, 9, 1, 8};
    std::set<int> all;
    for (int i = 0; i < 5; ++i) {
        write_file(folder.file("t_" + std::to_string(i) + ".bin"), shard_bytes(ramp(1000 * i, windows[i] * T + 1 + i), 4));
        for (size_t w = 0; w < windows[i]; ++w) all.insert(static_cast<int>(1000 * i + w * T));
    }
    AllRanks ranks(folder.file("t_*.bin"), 2, T, 1, 4);  // 8 windows a step, 5 steps an epoch
    EXPECT_EQ(ranks.rank(0).windows(), 40);
    EXPECT_EQ(ranks.rank(0).dropped_tokens(), 0 + 1 + 2 + 3 + 4);
    std::vector<std::vector<int>> orders;
    for (int epoch = 0; epoch < 3; ++epoch) {
        std::set<int> seen;
        orders.emplace_back();
        for (int step = 0; step < 5; ++step)
            for (const auto& [inputs, targets] : ranks.next()) {
                for (int t = 0; t < T; ++t) {
                    EXPECT_EQ(inputs[t], inputs[0] + t);
                    EXPECT_EQ(targets[t], inputs[0] + t + 1);
                }
                EXPECT_TRUE(seen.insert(inputs[0]).second) << "window " << inputs[0] << " twice in epoch " << epoch;
                orders.back().push_back(inputs[0]);
            }
        EXPECT_EQ(seen, all);
    }
    EXPECT_NE(orders[0], orders[1]);
    EXPECT_NE(orders[1], orders[2]);
}

TEST(DataLoader, LengthsAroundAWholeNumberOfBatches) {
    // A read past the last token would show in the targets: the ramp goes on by one. The buffers' ends are ASan's business.
    constexpr int B = 2, T = 16, W = 2;
    for (const int k : {1, 3})
        for (const int extra : {-1, 0, 1, 2}) {
            TempFolder folder;
            const size_t count = static_cast<size_t>(k) * B * T * W + extra;
            write_file(folder.file("a.bin"), shard_bytes(ramp(0, count), 4));
            const long long windows = (static_cast<long long>(count) - 1) / T;
            const auto make = [&] { return std::make_unique<AllRanks>(folder.file("*.bin"), B, T, 1, W); };
            if (windows < B * W) {
                expect_error([&] { make(); }, {"fewer than the 4 of one global batch", std::to_string(windows) + " windows"});
                continue;
            }
            auto ranks = make();
            EXPECT_EQ(ranks->rank(0).windows(), windows);
            EXPECT_EQ(ranks->rank(0).dropped_tokens(), static_cast<long long>(count) - windows * T - 1);
            std::multiset<int> seen;
            for (int step = 0; step < 2 * windows; ++step)
                for (const auto& row : ranks->next()) {
                    EXPECT_EQ(row.second[T - 1], row.first[0] + T);
                    seen.insert(row.first[0]);
                }
            // 2 * windows steps of 4 windows are 8 epochs.
            for (long long w = 0; w < windows; ++w) EXPECT_EQ(seen.count(static_cast<int>(w * T)), 8u);
        }
}

TEST(DataLoader, AShardThatEndsAtAPageIsNotReadBeyond) {
    // The file fills its last page, so no zeros of the page follow the last token: a read beyond leaves the mapping.
    TempFolder folder;
    write_file(folder.file("a.bin"), shard_bytes(ramp(0, (8192 - 1024) / 2), 2));
    LoaderSettings s = settings(1, 1, 1, 0, 1);
    DataLoader loader(folder.file("a.bin"), s);
    for (long long i = 0; i < loader.windows(); ++i) loader.next();
}

TEST(DataLoader, ABatchDoesNotDependOnTheNumberOfRanks) {
    TempFolder folder;
    write_file(folder.file("a.bin"), shard_bytes(ramp(0, 1000), 4));
    write_file(folder.file("b.bin"), shard_bytes(ramp(5000, 777), 4));
    constexpr int T = 5;
    // 12 windows a step: ranks x micro-steps x micro-batch.
    AllRanks reference(folder.file("*.bin"), 12, T, 1, 1);
    std::vector<std::unique_ptr<AllRanks>> splits;
    const int shapes[][3] = {{1, 12, 1}, {3, 4, 1}, {3, 2, 2}, {2, 2, 3}, {1, 3, 4}, {3, 1, 4}};  // B, G, ranks
    for (const auto& shape : shapes) splits.push_back(std::make_unique<AllRanks>(folder.file("*.bin"), shape[0], T, shape[1], shape[2]));
    for (int step = 0; step < 40; ++step) {
        const Rows expected = reference.next();
        for (auto& split : splits) ASSERT_EQ(split->next(), expected) << "step " << step;
    }
}

TEST(DataLoader, ContinuesFromTheWindowsConsumed) {
    TempFolder folder;
    write_file(folder.file("a.bin"), shard_bytes(ramp(0, 203), 4));
    AllRanks whole(folder.file("*.bin"), 2, 4, 2, 2);
    for (int step = 0; step < 23; ++step) {
        AllRanks resumed(folder.file("*.bin"), 2, 4, 2, 2, 8 * step);
        EXPECT_EQ(resumed.next(), whole.next()) << step;
    }
    DataLoader loader(folder.file("*.bin"), settings(2, 4, 2, 0, 2));
    loader.next();
    const StepBatch& second = loader.next();
    EXPECT_EQ(second.windows_consumed, 16);
    EXPECT_EQ(second.index, 1);
    EXPECT_DOUBLE_EQ(second.epoch, 16.0 / 50.0);
}

TEST(DataLoader, TheSeedChangesTheOrder) {
    TempFolder folder;
    write_file(folder.file("a.bin"), shard_bytes(ramp(0, 2001), 4));
    AllRanks one(folder.file("*.bin"), 8, 4, 1, 1, 0, 1), two(folder.file("*.bin"), 8, 4, 1, 1, 0, 2);
    EXPECT_NE(one.next(), two.next());
}

TEST(DataLoader, DescribeSaysWhatTheRanksRead) {
    TempFolder folder;
    write_file(folder.file("a.bin"), shard_bytes(ramp(0, 50), 4));
    write_file(folder.file("b.bin"), shard_bytes(ramp(1000, 70), 4));
    AllRanks ranks(folder.file("*.bin"), 2, 4, 3, 2);
    for (int step = 0; step < 7; ++step) {
        const std::vector<WindowOrigin> origins = ranks.rank(0).describe(step);
        const Rows rows = ranks.next();
        ASSERT_EQ(origins.size(), rows.size());
        for (size_t i = 0; i < rows.size(); ++i) {
            const WindowOrigin& o = origins[i];
            const int first = static_cast<int>(o.first_token) + (o.shard == folder.file("b.bin") ? 1000 : 0);
            EXPECT_EQ(first, rows[i].first[0]);
            EXPECT_EQ(o.position, step * 12 + static_cast<long long>(i));
            EXPECT_EQ(o.epoch, o.position / (12 + 17));
            EXPECT_EQ(static_cast<size_t>((o.micro_step * 2 + o.rank) * 2 + o.row), i);
        }
    }
    expect_error([&] { ranks.rank(0).describe(-1); }, {"step -1"});
}

TEST(DataLoader, MaskedTargetsAreMinusOneAndNotCounted) {
    TempFolder folder;
    const std::string path = folder.file("a.bin");
    constexpr int T = 4;
    write_file(path, shard_bytes(ramp(0, 8 * T + 1)));
    std::string mask(5, '\0');
    for (const int counted : {1, 4, 5, 9, 30, 32}) mask[counted / 8] |= static_cast<char>(1 << counted % 8);
    write_file(path + ".mask", mask);
    DataLoader loader(path, settings(8, T, 1, 0, 1));
    const StepBatch& batch = loader.next();
    EXPECT_EQ(batch.valid_targets, 6);
    std::set<int> counted;
    for (int i = 0; i < 8 * T; ++i) {
        if (batch.buffers.targets[i] == -1) continue;
        EXPECT_EQ(batch.buffers.targets[i], batch.buffers.inputs[i] + 1);
        counted.insert(batch.buffers.targets[i]);
    }
    EXPECT_EQ(counted, (std::set<int>{1, 4, 5, 9, 30, 32}));
}

TEST(DataLoader, PositionsAreSortedStablyByToken) {
    TempFolder folder;
    std::vector<uint32_t> tokens;
    for (int i = 0; i < 400; ++i) tokens.push_back((i * i * 7 + i / 3) % 11);
    write_file(folder.file("a.bin"), shard_bytes(tokens));
    constexpr int B = 3, T = 13, G = 2;
    for (const int vocab : {11, 100000}) {  // counted, and compared
        for (int step = 0; step < 4; ++step) {
            LoaderSettings s = settings(B, T, G, 1, 2, vocab);
            s.windows_consumed = 12 * step;
            DataLoader loader(folder.file("a.bin"), s);
            const StepBatch& batch = loader.next();
            for (int m = 0; m < G; ++m) {
                const int* inputs = batch.buffers.inputs + m * B * T;
                std::vector<int> expected(B * T);
                std::iota(expected.begin(), expected.end(), 0);
                std::stable_sort(expected.begin(), expected.end(), [&](int a, int b) { return inputs[a] < inputs[b]; });
                EXPECT_EQ(copy(batch.buffers.sorted_positions + m * B * T, B * T), expected);
            }
        }
    }
}

TEST(DataLoader, AnIdOutsideTheVocabularyNamesFileAndOffset) {
    for (const int width : {2, 4}) {
        TempFolder folder;
        std::vector<uint32_t> tokens(101, 3);
        tokens[57] = 300;
        write_file(folder.file("a.bin"), shard_bytes(tokens, width));
        DataLoader loader(folder.file("a.bin"), settings(5, 4, 1, 0, 1, 300));
        const std::string offset = "offset " + std::to_string(1024 + 57 * width);
        expect_error([&] { for (int i = 0; i < 5; ++i) loader.next(); }, {folder.file("a.bin"), offset, "is 300", "vocabulary of 300"});
        expect_error([&] { loader.next(); }, {offset});  // it stays that way
        DataLoader fits(folder.file("a.bin"), settings(5, 4, 1, 0, 1, 301));
        for (int i = 0; i < 5; ++i) fits.next();
    }
}

TEST(DataLoader, ALastTargetOutsideTheVocabularyIsFoundToo) {
    TempFolder folder;
    std::vector<uint32_t> tokens(9, 3);
    tokens[8] = 4000000000u;  // negative as an int
    write_file(folder.file("a.bin"), shard_bytes(tokens, 4));
    DataLoader loader(folder.file("a.bin"), settings(1, 8, 1, 0, 1, 300));
    expect_error([&] { loader.next(); }, {"4000000000", "offset 1056"});
}

TEST(DataLoader, AnErrorWhileReadingAheadComesWithItsBatchAndNotBefore) {
    TempFolder folder;
    constexpr int T = 4;
    std::vector<uint32_t> tokens(12 * T + 1, 3);
    write_file(folder.file("a.bin"), shard_bytes(tokens));
    // Find the window the third batch reads, then spoil it.
    const size_t bad = DataLoader(folder.file("a.bin"), settings(1, T, 1, 0, 1)).describe(2)[0].first_token + 1;
    tokens[bad] = 9;
    write_file(folder.file("a.bin"), shard_bytes(tokens));
    for (const int num_slots : {2, 3, 6}) {  // with three, the reader meets it before the first batch is taken
        std::vector<int> memory(num_slots * 3 * T);
        std::vector<BatchBuffers> slots;
        for (int i = 0; i < num_slots; ++i) slots.push_back({&memory[3 * i * T], &memory[(3 * i + 1) * T], &memory[(3 * i + 2) * T]});
        DataLoader loader(folder.file("a.bin"), settings(1, T, 1, 0, 1, 9), slots);
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        EXPECT_NO_THROW(loader.next());
        const StepBatch& second = loader.next();
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        expect_error([&] { loader.next(); }, {"is 9"});
        EXPECT_EQ(second.buffers.inputs[0], 3);  // still the caller's
    }
}

TEST(DataLoader, TheCallersBuffersStayUntilTheNextCall) {
    TempFolder folder;
    write_file(folder.file("a.bin"), shard_bytes(ramp(0, 4001), 4));
    constexpr int B = 2, T = 4;
    for (const int num_slots : {2, 3, 5}) {
        std::vector<int> memory(num_slots * 3 * B * T, -7);
        std::vector<BatchBuffers> slots;
        for (int i = 0; i < num_slots; ++i) slots.push_back({&memory[(3 * i) * B * T], &memory[(3 * i + 1) * B * T], &memory[(3 * i + 2) * B * T]});
        DataLoader loader(folder.file("a.bin"), settings(B, T, 1, 0, 1), slots), control(folder.file("a.bin"), settings(B, T, 1, 0, 1));
        for (int step = 0; step < 20; ++step) {
            const StepBatch& batch = loader.next();
            std::this_thread::sleep_for(std::chrono::milliseconds(1));  // lets the reader run as far ahead as it may
            const StepBatch& expected = control.next();
            EXPECT_EQ(copy(batch.buffers.inputs, B * T), copy(expected.buffers.inputs, B * T));
            EXPECT_EQ(copy(batch.buffers.targets, B * T), copy(expected.buffers.targets, B * T));
            EXPECT_EQ(copy(batch.buffers.sorted_positions, B * T), copy(expected.buffers.sorted_positions, B * T));
        }
    }
    std::vector<int> one(3 * B * T);
    expect_error([&] { DataLoader(folder.file("a.bin"), settings(B, T, 1, 0, 1), {{&one[0], &one[B * T], &one[2 * B * T]}}); }, {"at least 2"});
}

TEST(DataLoader, TooLittleDataSaysHowMuchIsNeeded) {
    TempFolder folder;
    write_file(folder.file("a.bin"), shard_bytes(ramp(0, 7 * 4 + 1)));
    expect_error([&] { DataLoader(folder.file("a.bin"), settings(2, 4, 2, 0, 2)); }, {folder.file("a.bin"), "7 windows", "8 of one global batch", "--total-batch"});
    DataLoader(folder.file("a.bin"), settings(7, 4, 1, 0, 1)).next();
    // A shard shorter than a window is legal beside others, and all of it counts as dropped.
    write_file(folder.file("b.bin"), shard_bytes({1, 2, 3}));
    DataLoader loader(folder.file("*.bin"), settings(7, 4, 1, 0, 1));
    EXPECT_EQ(loader.windows(), 7);
    EXPECT_EQ(loader.dropped_tokens(), 3);
}

TEST(DataLoader, EmptyShardsAreSkipped) {
    TempFolder folder;
    write_file(folder.file("a.bin"), shard_bytes({}));
    write_file(folder.file("b.bin"), shard_bytes(ramp(0, 9)));
    DataLoader loader(folder.file("*.bin"), settings(2, 4, 1, 0, 1));
    EXPECT_EQ(loader.shards().warnings.size(), 1u);
    EXPECT_EQ(loader.windows(), 2);
    loader.next();
}

TEST(DataLoader, EndsWithoutBeingReadFrom) {
    TempFolder folder;
    write_file(folder.file("a.bin"), shard_bytes(ramp(0, 100)));
    for (int i = 0; i < 50; ++i) DataLoader(folder.file("a.bin"), settings(2, 4, 1, 0, 1));
}

TEST(DataFingerprint, FollowsNamesCountsAndHeadersButNotTheFolder) {
    TempFolder one, two;
    for (const TempFolder* folder : {&one, &two}) {
        write_file(folder->file("a.bin"), shard_bytes(ramp(0, 100)));
        write_file(folder->file("b.bin"), shard_bytes(ramp(0, 50)));
    }
    const auto print = [](const TempFolder& folder) { return data_fingerprint(open_shards(folder.file("*.bin"))); };
    const std::string base = print(one);
    EXPECT_EQ(base.size(), 16u);
    EXPECT_EQ(print(two), base);
    std::set<std::string> seen = {base};
    write_file(two.file("b.bin"), shard_bytes(ramp(0, 51)));
    EXPECT_TRUE(seen.insert(print(two)).second) << "count";
    write_file(two.file("b.bin"), shard_bytes(ramp(0, 50), 4));
    EXPECT_TRUE(seen.insert(print(two)).second) << "width";
    write_file(two.file("b.bin"), shard_bytes(ramp(0, 50)));
    write_file(two.file("b.bin.mask"), std::string(7, '\xff'));
    EXPECT_TRUE(seen.insert(print(two)).second) << "mask";
    std::filesystem::remove(two.file("b.bin.mask"));
    EXPECT_EQ(print(two), base);
    std::filesystem::rename(two.file("b.bin"), two.file("c.bin"));
    EXPECT_TRUE(seen.insert(print(two)).second) << "name";
    std::filesystem::remove(two.file("c.bin"));
    EXPECT_TRUE(seen.insert(print(two)).second) << "a shard less, as for a rank that cannot see one";
}

TEST(ValLoader, CoversTheFirstWindowsOnceOnAnyNumberOfRanks) {
    TempFolder folder;
    constexpr int T = 4;
    write_file(folder.file("v_0.bin"), shard_bytes(ramp(0, 9 * T + 3), 4));
    write_file(folder.file("v_1.bin"), shard_bytes(ramp(1000, 14 * T + 1), 4));
    for (int ranks = 1; ranks <= 5; ++ranks)
        for (int B = 1; B <= 4; ++B)
            for (const long long asked : {0, 1, 7, 22, 23}) {
                const long long expected = asked == 0 ? 23 : asked;
                std::vector<int> starts;
                long long valid = 0, steps = -1;
                for (int r = 0; r < ranks; ++r) {
                    const ValLoader loader(folder.file("v_*.bin"), settings(B, T, 1, r, ranks), asked);
                    EXPECT_EQ(loader.num_windows(), expected);
                    if (steps >= 0) { EXPECT_EQ(loader.num_steps(), steps); }
                    steps = loader.num_steps();
                    std::vector<int> inputs(B * T, -9), targets(B * T, -9);
                    for (long long step = 0; step < steps; ++step) {
                        valid += loader.fill(step, inputs.data(), targets.data());
                        for (int b = 0; b < B; ++b) {
                            if (targets[b * T] != -1) starts.push_back(inputs[b * T]);
                            for (int t = 0; t < T; ++t) EXPECT_EQ(targets[b * T + t], targets[b * T] == -1 ? -1 : inputs[b * T] + t + 1);
                            if (targets[b * T] == -1) { EXPECT_EQ(inputs[b * T], 0); }
                        }
                    }
                    EXPECT_LT((steps - 1) * ranks * B, expected) << "a step too many";
                }
                EXPECT_EQ(valid, expected * T);
                std::sort(starts.begin(), starts.end());
                std::vector<int> wanted;
                for (long long w = 0; w < expected; ++w) wanted.push_back(static_cast<int>(w < 9 ? w * T : 1000 + (w - 9) * T));
                EXPECT_EQ(starts, wanted) << ranks << " ranks, micro-batch " << B << ", asked " << asked;
            }
}

TEST(ValLoader, AskingForMoreThanThereIsAndNoWindowAtAllAreRefused) {
    TempFolder folder;
    write_file(folder.file("v.bin"), shard_bytes(ramp(0, 33)));
    expect_error([&] { ValLoader(folder.file("v.bin"), settings(2, 4, 1, 0, 1), 9); }, {"9 validation sequences", "holds 8", "--val-batches 4"});
    expect_error([&] { ValLoader(folder.file("v.bin"), settings(2, 33, 1, 0, 1), 0); }, {"no window", "33"});
    expect_error([&] { ValLoader(folder.file("w.bin"), settings(2, 4, 1, 0, 1), 0); }, {"no file matches", "w.bin"});
}

TEST(ValLoader, ChecksIdsAndMasks) {
    TempFolder folder;
    write_file(folder.file("v.bin"), shard_bytes({1, 2, 3, 4, 5}));
    write_file(folder.file("v.bin.mask"), std::string(1, '\x14'));
    const ValLoader loader(folder.file("v.bin"), settings(1, 4, 1, 0, 1, 6), 0);
    int inputs[4], targets[4];
    EXPECT_EQ(loader.fill(0, inputs, targets), 2);
    EXPECT_EQ(copy(targets, 4), (std::vector<int>{-1, 3, -1, 5}));
    const ValLoader small(folder.file("v.bin"), settings(1, 4, 1, 0, 1, 5), 0);
    expect_error([&] { small.fill(0, inputs, targets); }, {"v.bin", "offset 1032", "is 5"});
}

}  // namespace
