#include "llmc/step_time.h"

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "dev/test/schedule_testing.h"
#include "llmc/network.h"

namespace {

using Case = ScheduleCase<2>;
using Made = MadeSchedule<Case>;
// Named here, so that a case can be written as a list of its fields.
Made make(const Case& c, const ModelConfig& config) { return make_case(c, config); }
Made make(const Case& c) { return make_case(c); }

using Collective = std::function<double(size_t)>;

StepTime simulate(const Made& made, const ComputeCosts& costs, const Collective& collective, bool overlap = true) {
    return simulate_step(made.schedule, made.table, made.layout, costs, collective, overlap);
}

const Collective kNoTime = [](size_t) { return 0.0; };

// Every combination that buckets, slots and buffers depend on. As in test_schedule.cpp: one unit a bucket, then ever more of them in one, at last all.
template <class Check>
void for_each_case(Check&& check) {
    for (const int stage : {0, 1, 2, 3}) for (const bool tied : {false, true}) for (const int ranks : {2, 3}) for (const int micro_steps : {1, 2, 3})
    for (const bool sync : {false, true}) for (const double bucket_mb : {0.0, 0.012, 0.023, 0.03, 0.042, 1000.0}) for (const int vocab_size : {kSmallVocab, kLargeVocab})
    for (const int layers : {1, 2, 3, 5}) {
        const Case c{stage, layers, ranks, micro_steps, tied, sync, bucket_mb, vocab_size};
        SCOPED_TRACE(testing::Message() << "stage " << stage << (tied ? ", tied, " : ", untied, ") << layers << " layers, " << ranks << " ranks, " << micro_steps
                                        << " micro-steps" << (sync ? ", all synchronised" : "") << ", buckets of " << bucket_mb << " MB, " << vocab_size << " tokens");
        check(make(c));
        if (testing::Test::HasFailure()) return;  // one case says enough
    }
}

// Different for every unit and for forward and backward; eighths, so that sums are exact in any order.
ComputeCosts uneven_costs(const Made& made, double scale) {
    const size_t units = made.table.units.size();
    ComputeCosts costs{std::vector<double>(units), std::vector<double>(units), 37 * scale / 8};
    for (size_t unit = 0; unit + 1 < units; ++unit) {
        costs.forward[unit] = (7 + unit * 13 % 29) * scale / 8;
        costs.backward[unit] = (5 + unit * 11 % 31) * scale / 8;
    }
    return costs;
}

double uneven_collective(size_t sent_bytes) { return (1 + sent_bytes / 8 % 61) / 8.0; }

// ---- floating-point operations ----

TEST(Flops, CountedByHand) {
    // C 24, NH HD 32, NKV HD 16, F 40, V 300, T 64. Two a weight: q, k, v 24 x 64 -> 3072; attention 2 x 32 x 64 = 4096; its output 32 x 24 -> 1536;
    // gate and up 24 x 80 -> 3840; down 40 x 24 -> 1920. The head 24 x 300 -> 14400.
    const ModelConfig config = small_config();
    const double layer = 3072 + 4096 + 1536 + 3840 + 1920;
    EXPECT_EQ(forward_flops(config, 64), (std::vector<double>{0, layer, layer, layer, 14400}));
    EXPECT_EQ(forward_flops(config, 32)[1], layer - 2048);
    EXPECT_EQ(recompute_flops(config, 64, "none"), 0);
    EXPECT_EQ(recompute_flops(config, 64, "norm"), 0);
    EXPECT_EQ(recompute_flops(config, 64, "ffn"), 3840);
    EXPECT_EQ(recompute_flops(config, 64, "block"), layer - 1920);
    expect_error([&] { recompute_flops(config, 64, "all"); }, {"'all'", "none, norm, ffn, block"});
}

// 6 a weight of every matrix product and 6 L NH HD T for attention.
TEST(Flops, OfATrainedTokenOfEveryPreset) {
    for (const std::string& name : preset_names()) {
        const ModelConfig config = preset_config(name);
        for (const int seq_len : {1, 128, 4096}) {
            const double width = config.num_heads * config.head_dim, kv_width = config.num_kv_heads * config.head_dim, C = config.channels;
            double weights = C * config.vocab_size;  // the head's; the embedding is looked up
            for (int layer = 0; layer < config.num_layers; ++layer) weights += C * width + 2 * C * kv_width + width * C + 3 * C * config.ffn_dim;
            EXPECT_EQ(flops_per_token(config, seq_len), 6 * weights + 6.0 * config.num_layers * width * seq_len) << name << ", " << seq_len;  // whole numbers below 2^53
        }
    }
}

TEST(Costs, AreFlopsOverSpeed) {
    const ModelConfig config = small_config();
    // 8 tokens at 2^20 a second: 2^-17 s an operation, exactly.
    const double s = 0x1p-17, layer = 14464, head = 14400;
    const ComputeCosts none = compute_costs(config, 64, 8, 0x1p20, "none");
    EXPECT_EQ(none.forward, (std::vector<double>{0, layer * s, layer * s, layer * s, 0}));
    EXPECT_EQ(none.backward, (std::vector<double>{0, 2 * layer * s, 2 * layer * s, 2 * layer * s, 0}));
    EXPECT_EQ(none.head, 3 * head * s);
    // The last layer's activations are still there.
    const ComputeCosts ffn = compute_costs(config, 64, 8, 0x1p20, "ffn");
    EXPECT_EQ(ffn.forward, none.forward);
    EXPECT_EQ(ffn.backward, (std::vector<double>{0, (2 * layer + 3840) * s, (2 * layer + 3840) * s, 2 * layer * s, 0}));
    EXPECT_EQ(ffn.head, none.head);
    const ComputeCosts block = compute_costs(config, 64, 8, 0x1p20, "block");
    EXPECT_EQ(block.backward, (std::vector<double>{0, (3 * layer - 1920) * s, (3 * layer - 1920) * s, 2 * layer * s, 0}));
    ModelConfig one_layer = config;
    one_layer.num_layers = 1;
    EXPECT_EQ(compute_costs(one_layer, 64, 8, 0x1p20, "block").backward, (std::vector<double>{0, 2 * layer * s, 0}));
    expect_error([&] { compute_costs(config, 64, 8, 0, "none"); }, {"8 tokens at 0 operations"});
    expect_error([&] { compute_costs(config, 64, 0, 1, "none"); }, {"0 tokens at 1 operations"});
}

// ---- drawn by hand ----
//
// F forward, H head, B backward; G gather, R reduce, A gather of gradients; #targets. A line is an operation, its time, and where it does not start as soon as its stream
// is there, what it waits for.

// Seconds by bucket, of the embedding, any layer, the head; by `scale` of two small ones beside.
Collective by_bucket(const Made& made, double embedding, double layer, double head, double count = 0.5, double scale = 1) {
    std::map<size_t, double> seconds = {{(made.c.ranks - 1) * 8, count * scale}, {(made.c.ranks - 1) * 24, 0.25 * scale}};
    for (const Bucket& bucket : made.layout.buckets) {
        const double value = bucket.first_unit == 0 ? embedding : bucket.end_unit == static_cast<int>(made.table.units.size()) ? head : layer;
        seconds[(made.c.ranks - 1) * bucket.slice_count * 2] = value * scale;
    }
    EXPECT_EQ(seconds.size(), 5u) << "two have the same bytes";
    return [seconds](size_t sent_bytes) { return seconds.at(sent_bytes); };
}

// Embedding, layers, head.
ComputeCosts by_unit(const Made& made, double embedding = 1, double layer_forward = 2, double layer_backward = 4, double head = 6) {
    ComputeCosts costs{std::vector<double>(made.table.units.size(), layer_forward), std::vector<double>(made.table.units.size(), layer_backward), head};
    costs.forward.front() = embedding;
    costs.backward.front() = 1;
    return costs;
}

void expect_time(const StepTime& time, double seconds, double compute_seconds, double comm_seconds) {
    EXPECT_EQ(time.seconds, seconds);
    EXPECT_EQ(time.compute_seconds, compute_seconds);
    EXPECT_EQ(time.comm_seconds, comm_seconds);
    EXPECT_EQ(time.exposed_comm_seconds(), seconds - compute_seconds);
}

TEST(StepTime, StageZeroByHand) {
    const Made made = make({.stage = 0});
    // computation: F0 0-1, F1 -3, F2 -5, H -11, B2 -15, B1 -19, B0 -20
    // collectives: # 0-0.5, R3 11-15 (H), A3 -19, R2 -22, A2 -25, R1 -28, A1 -31, R0 -33, A0 -35, decide -35.25
    expect_time(simulate(made, by_unit(made), by_bucket(made, 2, 3, 4)), 35.25, 20, 24.75);
    expect_time(simulate(made, by_unit(made), by_bucket(made, 2, 3, 4), false), 44.75, 20, 24.75);
    // Four times as fast.
    // collectives: # 0-0.125, R3 11-12 (H), A3 -13, R2 15-15.75 (B2), A2 -16.5, R1 19-19.75 (B1), A1 -20.5, R0 -21, A0 -21.5, decide -21.5625
    expect_time(simulate(made, by_unit(made), by_bucket(made, 2, 3, 4, 0.5, 0.25)), 21.5625, 20, 6.1875);
    // Counting takes 8, and the head 8-14 waits for it: 3 later.
    expect_time(simulate(made, by_unit(made), by_bucket(made, 2, 3, 4, 8)), 38.25, 20, 32.25);
}

TEST(StepTime, StageOneByHand) {
    const Made made = make({.stage = 1});
    // collectives: G0 0-2, G1 -5, G2 -8, G3 -12, # -12.5
    // computation: F0 2-3 (G0), F1 5-7 (G1), F2 8-10 (G2), H 12.5-18.5 (#), B2 -22.5, B1 -26.5, B0 -27.5
    // collectives: R3 18.5-22.5 (H), R2 -25.5, R1 26.5-29.5 (B1), R0 -31.5, decide -31.75
    expect_time(simulate(made, by_unit(made), by_bucket(made, 2, 3, 4)), 31.75, 20, 24.75);
    expect_time(simulate(made, by_unit(made), by_bucket(made, 2, 3, 4), false), 44.75, 20, 24.75);
}

TEST(StepTime, StageTwoByHand) {
    const Made made = make({.stage = 2, .micro_steps = 2});
    // All twice as slow: embedding 4, layer 6, head 8, # 1, decide 0.5. Two buffers of gradients, a and b, in turn.
    // collectives: G0 0-4, G1 -10, G2 -16, G3 -24, # -25
    // computation: F0 4-5, F1 10-12, F2 16-18, H 25-31 to a, B2 -35 to b, B1 39-43 to a (R3), B0 45-46 to b (R2)
    // collectives: R3 31-39 of a, R2 -45 of b, R1 -51 of a, R0 -55 of b
    // computation: F0 46-47, F1 -49, F2 -51, H -57 to a, B2 -61 to b, B1 65-69 to a (R3), B0 71-72 to b (R2)
    // collectives: R3 57-65 of a (H), R2 -71 of b, R1 -77 of a, R0 -81 of b, decide -81.5
    expect_time(simulate(made, by_unit(made), by_bucket(made, 2, 3, 4, 0.5, 2)), 81.5, 40, 73.5);
}

TEST(StepTime, StageTwoWithABufferForEmbeddingAndHeadByHand) {
    const Made made = make({.stage = 2, .micro_steps = 2, .vocab_size = kLargeVocab});
    // The same, but embedding and head take turns in a buffer c.
    // computation: F0 4-5, F1 10-12, F2 16-18, H 25-31 to c, B2 -35 to a, B1 -39 to b, B0 -40 to c (R3, at 39)
    // collectives: R3 31-39 of c, R2 -45 of a, R1 -51 of b, R0 -55 of c
    // computation: F0 40-41, F1 -43, F2 -45, H 55-61 to c (R0), B2 -65 to a, B1 -69 to b, B0 -70 to c (R3, at 69)
    // collectives: R3 61-69 of c, R2 -75 of a, R1 -81 of b, R0 -85 of c, decide -85.5
    expect_time(simulate(made, by_unit(made), by_bucket(made, 2, 3, 4, 0.5, 2)), 85.5, 40, 73.5);
}

TEST(StepTime, StageThreeByHand) {
    const Made made = make({.stage = 3});
    // Two slots of parameters, x and y, and two buffers of gradients, a and b, for all.
    // collectives: G0 0-2 to x, G1 -5 to y, # -5.5, G2 -8.5 to x, G3 -12.5 to y
    // computation: F0 2-3 (G0), F1 5-7 (G1), F2 8.5-10.5 (G2), H 12.5-18.5 (G3) to a, B2 -22.5 to b
    // collectives: R3 18.5-22.5, G1 -25.5 to y, R2 -28.5
    // computation: B1 25.5-29.5 (G1) to a, B0 -30.5 to b
    // collectives: R1 29.5-32.5 (B1), R0 -34.5, decide -34.75
    expect_time(simulate(made, by_unit(made), by_bucket(made, 2, 3, 4)), 34.75, 20, 27.75);
    // The embedding takes 10, layers 0.25 forward, so layer 2 waits for slot x.
    // collectives: G0 0-2, G1 -5, # -5.5, G2 12-15 (F0, dropped), G3 -19
    // computation: F0 2-12 (G0), F1 -12.25, F2 15-15.25 (G2), H 19-25 (G3), B2 -29
    // collectives: R3 25-29 (H), G1 -32, R2 -35
    // computation: B1 32-36 (G1), B0 -37
    // collectives: R1 36-39 (B1), R0 -41, decide -41.25
    expect_time(simulate(made, by_unit(made, 10, 0.25), by_bucket(made, 2, 3, 4)), 41.25, 25.5, 27.75);
    // Four times as fast: only the embedding's gather 0-0.5, its reduction 20.5-21 and the decision 21-21.0625 are exposed.
    expect_time(simulate(made, by_unit(made), by_bucket(made, 2, 3, 4, 0.5, 0.25)), 21.0625, 20, 6.9375);
}

TEST(StepTime, StageThreeTiedByHand) {
    const Made made = make({.layers = 3, .tied = true});
    // The embedding 6, a layer 1, the head's bucket (a norm) 0.5. Its weight is the embedding, which is gathered again. Gradients: the embedding has a buffer to itself
    // from the head on, the others take turns in a and b.
    // collectives: G0 0-6, G1 -7, # -7.5, G2 -8.5 (dropped at 7), G3 -10 (dropped at 9), G4 -10.5, G0 11-17 (dropped at 11)
    // computation: F0 6-7 (G0), F1 -9, F2 -11, F3 -13, H 17-23 (G0) to a, B3 -27 to b, B2 -31 to a, B1 -35 to b, B0 -36
    // collectives: R4 23-23.5 (H), G2 -24.5, R3 27-28 (B3), G1 -29, R2 31-32 (B2), R1 35-36 (B1), R0 -42, decide -42.25
    expect_time(simulate(made, by_unit(made), by_bucket(made, 6, 1, 0.5)), 42.25, 26, 27.75);
}

// The next micro-step's embedding is gathered while the first layer's backward runs. The embedding's backward needs no parameters and does not wait for it.
TEST(StepTime, TheEmbeddingsBackwardWaitsForNoGather) {
    const Made made = make({.layers = 1, .micro_steps = 2, .vocab_size = kLargeVocab});
    // Embedding and head share a slot of parameters, and a buffer of gradients. The embedding takes 20, the layer 1, the head 1.5; the embedding's backward 3.
    // collectives: G0 0-20, G1 -21, # -21.5, G2 -23
    // computation: F0 20-21 (G0), F1 -23, H -29, B1 -33, B0 -36
    // collectives: R2 29-30.5 (H), G0 -50.5, R1 -51.5, R0 -71.5, G2 -73
    // computation: F0 50.5-51.5 (G0), F1 -53.5, H 73-79 (G2), B1 -83, B0 -86
    // collectives: R2 79-80.5 (H), R1 83-84 (B1), R0 86-106 (B0), decide -106.25
    ComputeCosts costs = by_unit(made);
    costs.backward.front() = 3;
    expect_time(simulate(made, costs, by_bucket(made, 20, 1, 1.5)), 106.25, 32, 89.75);
}

// Operations whose waits are hidden by others in the schedules that are made: moved to where they are not.
TEST(StepTime, DecisionAndCountsWaitForComputations) {
    Made made = make({.stage = 0});
    const auto find = [&](OpKind kind, int index) {
        return std::find_if(made.schedule.step.begin(), made.schedule.step.end(), [&](const ScheduleOp& op) { return op.kind == kind && op.index == index; });
    };
    // As by hand above, four times as fast, without R0 and A0: the decision at 20.5, after A1. With a backward of the embedding that takes 3 it is after that, at 22.
    made.schedule.step.erase(find(OpKind::kReduce, 0));
    made.schedule.step.erase(find(OpKind::kGatherGradients, 0));
    ComputeCosts costs = by_unit(made);
    expect_time(simulate(made, costs, by_bucket(made, 2, 3, 4, 0.5, 0.25)), 20.5625, 20, 5.1875);
    costs.backward.front() = 3;
    expect_time(simulate(made, costs, by_bucket(made, 2, 3, 4, 0.5, 0.25)), 22.0625, 22, 5.1875);
    // Counted after the last layer, at 5: the head at 5.125 instead of 5.
    const ScheduleOp count = *find(OpKind::kCountTargets, 0);
    made.schedule.step.erase(find(OpKind::kCountTargets, 0));
    made.schedule.step.insert(find(OpKind::kForward, 2) + 1, count);
    expect_time(simulate(made, costs, by_bucket(made, 2, 3, 4, 0.5, 0.25)), 22.1875, 22, 5.1875);
}

// ---- against a graph of what waits for what ----

bool is_on_compute(const ScheduleOp& op) {
    return op.kind == OpKind::kForward || op.kind == OpKind::kHead || op.kind == OpKind::kBackward || op.kind == OpKind::kDrop || op.kind == OpKind::kStep;
}

bool is_backward(const ScheduleOp& op) { return op.kind == OpKind::kHead || op.kind == OpKind::kBackward; }

double cost_of(const ScheduleOp& op, const ComputeCosts& costs, const Collective& collective) {
    switch (op.kind) {
        case OpKind::kForward: return costs.forward[op.index];
        case OpKind::kBackward: return costs.backward[op.index];
        case OpKind::kHead: return costs.head;
        case OpKind::kDrop: case OpKind::kStep: return 0;
        default: return collective(op.sent_bytes);
    }
}

// When each step of `num_steps` ends, each operation being done when the last of those it depends on is done, and its own time later. What it depends on is looked for
// among all operations before it.
std::vector<double> ends_of_steps(const Made& made, const ComputeCosts& costs, const Collective& collective, int num_steps) {
    const FlatLayout& layout = made.layout;
    const int head = made.table.head_unit(), num_buckets = static_cast<int>(layout.buckets.size());
    const bool tied = made.table.tied, reduced_always = made.c.stage >= 2 || made.c.sync_every_micro_step;
    std::vector<ScheduleOp> ops;
    for (int step = 0; step < num_steps; ++step) ops.insert(ops.end(), made.schedule.step.begin(), made.schedule.step.end());

    // Buffers of gradients: the third bucket waits for the first, the fourth for the second, and so on. Those of embedding and untied head wait for each other,
    // if one buffer for them and two for the layers take less memory than two for any.
    std::set<int> ends = {layout.bucket_of_unit[0]};
    if (!tied) ends.insert(layout.bucket_of_unit[head]);
    size_t largest_end = 0, largest_layer = 0;
    for (int b = 0; b < num_buckets; ++b) (ends.contains(b) ? largest_end : largest_layer) = std::max(ends.contains(b) ? largest_end : largest_layer, layout.buckets[b].count);
    const size_t num_others = num_buckets - ends.size(), apart_count = largest_end + std::min<size_t>(2, num_others) * largest_layer;
    const bool apart = tied || (num_others > 0 && apart_count < 2 * std::max(largest_end, largest_layer));
    struct Written {
        int bucket;
        size_t begin;  // number of the first operation that writes to it
    };
    std::vector<Written> in_turn, of_ends;

    std::vector<double> done(ops.size());
    std::vector<double> result;
    for (size_t i = 0; i < ops.size(); ++i) {
        const ScheduleOp& op = ops[i];
        double start = 0;
        // The last operation before this one that fits, if there is one.
        const auto after_last = [&](auto&& fits) {
            for (size_t j = i; j-- > 0;) {
                if (!fits(ops[j])) continue;
                start = std::max(start, done[j]);
                return;
            }
        };
        const bool computes = is_on_compute(op);
        after_last([&](const ScheduleOp& other) { return is_on_compute(other) == computes; });
        if (computes) after_last([&](const ScheduleOp& other) { return other.kind == OpKind::kDecide; });
        if (op.kind == OpKind::kReduce || op.kind == OpKind::kCountTargets || op.kind == OpKind::kDecide) after_last(is_on_compute);
        if (op.kind == OpKind::kGather) {
            after_last([&](const ScheduleOp& other) { return other.kind == OpKind::kStep && other.index == op.index; });
            if (op.slot >= 0) after_last([&](const ScheduleOp& other) { return other.kind == OpKind::kDrop && other.slot == op.slot; });
        }
        if (op.kind == OpKind::kHead && op.micro_step == 0) after_last([&](const ScheduleOp& other) { return other.kind == OpKind::kCountTargets; });

        std::set<int> read;
        if (op.kind == OpKind::kForward || op.kind == OpKind::kHead || (op.kind == OpKind::kBackward && op.index > 0)) read.insert(layout.bucket_of_unit[op.index]);
        if (op.kind == OpKind::kHead && tied) read.insert(layout.bucket_of_unit[0]);
        for (const int bucket : read) after_last([&](const ScheduleOp& other) { return other.kind == OpKind::kGather && other.index == bucket; });

        std::vector<int> written;
        if (reduced_always && is_backward(op)) written.push_back(layout.bucket_of_unit[op.index]);
        if (reduced_always && op.kind == OpKind::kHead && tied && written[0] != layout.bucket_of_unit[0]) written.push_back(layout.bucket_of_unit[0]);
        for (const int bucket : written) {
            std::vector<Written>& turns = apart && ends.contains(bucket) ? of_ends : in_turn;
            const auto reduced_after = [&](const Written& other) {
                return std::find_if(ops.begin() + other.begin, ops.begin() + i, [&](const ScheduleOp& o) { return o.kind == OpKind::kReduce && o.index == other.bucket; });
            };
            const auto last = std::find_if(turns.rbegin(), turns.rend(), [&](const Written& other) { return other.bucket == bucket; });
            if (last != turns.rend() && reduced_after(*last) == ops.begin() + i) continue;  // it holds a part of the bucket
            turns.push_back({bucket, i});
            const size_t buffers = &turns == &of_ends ? 1 : std::min<size_t>(2, apart ? num_others : num_buckets);
            if (turns.size() <= buffers) continue;
            const auto reduced = reduced_after(turns[turns.size() - 1 - buffers]);
            if (reduced == ops.begin() + i) {
                ADD_FAILURE() << "the buffer is written again before it has been reduced";
                return {};
            }
            start = std::max(start, done[reduced - ops.begin()]);
        }
        done[i] = start + cost_of(op, costs, collective);
        if (op.kind == OpKind::kStep && op.index == num_buckets - 1) result.push_back(done[i]);
    }
    return result;
}

TEST(StepTime, IsThatOfEveryStepButTheFirstInALongRun) {
    for_each_case([](const Made& made) {
        for (const double scale : {1 / 16.0, 1 / 4.0, 1.0, 4.0, 16.0}) {
            const ComputeCosts costs = uneven_costs(made, scale);
            const std::vector<double> ends = ends_of_steps(made, costs, uneven_collective, 4);
            ASSERT_EQ(ends.size(), 4u);
            const double seconds = simulate(made, costs, uneven_collective).seconds;
            for (size_t step = 1; step < ends.size(); ++step) ASSERT_EQ(ends[step] - ends[step - 1], seconds) << "step " << step << ", computations by " << scale;
        }
    });
}

// ---- what must hold of any ----

TEST(StepTime, LiesBetweenTheLongerOfBothAndTheirSumWhichItIsWithoutOverlap) {
    for_each_case([](const Made& made) {
        for (const double scale : {1 / 16.0, 1.0, 16.0}) {
            const ComputeCosts costs = uneven_costs(made, scale);
            double compute = 0, comm = 0;
            for (const ScheduleOp& op : made.schedule.step) (is_on_compute(op) ? compute : comm) += cost_of(op, costs, uneven_collective);
            const StepTime overlapped = simulate(made, costs, uneven_collective), alone = simulate(made, costs, uneven_collective, false);
            for (const StepTime& time : {overlapped, alone}) {
                EXPECT_EQ(time.compute_seconds, compute);
                EXPECT_EQ(time.comm_seconds, comm);
            }
            EXPECT_EQ(alone.seconds, compute + comm);
            EXPECT_GE(overlapped.seconds, std::max(compute, comm));
            EXPECT_LT(overlapped.seconds, compute + comm);
        }
    });
}

TEST(StepTime, IsOneOfBothWhereTheOtherTakesNone) {
    for_each_case([](const Made& made) {
        for (const bool overlap : {true, false}) {
            const StepTime no_comm = simulate(made, uneven_costs(made, 1), kNoTime, overlap);
            EXPECT_EQ(no_comm.seconds, no_comm.compute_seconds);
            EXPECT_EQ(no_comm.comm_seconds, 0);
            const StepTime no_compute = simulate(made, uneven_costs(made, 0), uneven_collective, overlap);
            EXPECT_EQ(no_compute.seconds, no_compute.comm_seconds);
            EXPECT_EQ(no_compute.compute_seconds, 0);
        }
    });
}

TEST(StepTime, OneRankAsksForNoCollective) {
    for (const int stage : {0, 1, 2, 3}) {
        const Made made = make({.stage = stage, .ranks = 1, .micro_steps = 2});
        const StepTime time = simulate(made, uneven_costs(made, 1), [](size_t sent_bytes) {
            ADD_FAILURE() << "asked for " << sent_bytes << " bytes";
            return 1.0;
        });
        EXPECT_EQ(time.seconds, time.compute_seconds);
        EXPECT_EQ(time.comm_seconds, 0);
    }
}

// Everything but what begins and ends a step hides: the bucket with the embedding is gathered first and reduced last.
TEST(StepTime, ComputationThatDominatesLeavesTheEmbeddingsBucketExposed) {
    for_each_case([](const Made& made) {
        ComputeCosts costs = uneven_costs(made, 1);
        for (std::vector<double>* of_units : {&costs.forward, &costs.backward}) for (double& seconds : *of_units) seconds += 1e6;
        const double bucket = uneven_collective((made.c.ranks - 1) * made.layout.buckets[0].slice_count * 2), decide = uneven_collective((made.c.ranks - 1) * 24);
        EXPECT_EQ(simulate(made, costs, uneven_collective).exposed_comm_seconds(), 2 * bucket + decide);
    });
}

TEST(StepTime, FallsWithTheSpeedOfTheLinks) {
    const ModelConfig config = preset_config("0.5B");
    const ComputeCosts costs = compute_costs(config, 1024, 4096, 4e14, "none");
    for (const int stage : {0, 1, 2, 3}) for (const bool overlap : {true, false}) for (const int ranks : {8, 64}) {
        const Made made = make({.stage = stage, .ranks = ranks, .micro_steps = 4, .bucket_mb = 25}, config);
        const auto seconds = [&](double bytes_per_s, double latency_s) {
            const Network network = {{"inside", 9 * bytes_per_s, latency_s}, {"between", bytes_per_s, latency_s}, 8};
            const auto collective = [&](size_t sent_bytes) {
                return collective_seconds(CollectiveAlgorithm::kHierarchical, network, ranks, static_cast<double>(sent_bytes) / (ranks - 1));
            };
            const StepTime time = simulate(made, costs, collective, overlap);
            EXPECT_GE(time.exposed_comm_seconds(), 0);  // rounded as they are
            EXPECT_GE(time.seconds, time.comm_seconds);
            return time.seconds;
        };
        for (double bytes_per_s = 1e8; bytes_per_s < 1e13; bytes_per_s *= 2) EXPECT_GT(seconds(bytes_per_s, 5e-6), seconds(2 * bytes_per_s, 5e-6));
        for (double latency_s = 1e-7; latency_s < 1e-2; latency_s *= 2) EXPECT_LT(seconds(5e10, latency_s), seconds(5e10, 2 * latency_s));
    }
}

TEST(StepTime, ALongStepOfALargeModel) {
    const ModelConfig config = preset_config("4B");
    const Made made = make({.stage = 3, .ranks = 8, .micro_steps = 4096, .bucket_mb = 25}, config);
    const StepTime time = simulate(made, compute_costs(config, 4096, 4096, 4e14, "none"), [](size_t sent_bytes) { return sent_bytes / 450e9; });
    EXPECT_NEAR(time.compute_seconds, 4096 * 4096 * flops_per_token(config, 4096) / 4e14, 1e-9 * time.compute_seconds);
    EXPECT_NEAR(time.comm_seconds, made.schedule.step_sent_bytes() / 450e9, 1e-9 * time.comm_seconds);
    EXPECT_LT(time.seconds, time.compute_seconds + time.comm_seconds);
}

TEST(StepTime, RefusesWhatIsNotAStep) {
    Made made = make({});
    const ComputeCosts costs = uneven_costs(made, 1);
    expect_error([&] { simulate(make({.layers = 3}), costs, kNoTime); }, {"costs of 4 and 4 units for a model of 5"});
    made.schedule.step = made.schedule.forward;
    expect_error([&] { simulate(made, costs, kNoTime); }, {"without a decision"});
}

}  // namespace
