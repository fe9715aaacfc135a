#include "llmc/schedule.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "dev/test/schedule_testing.h"

namespace {

using Case = ScheduleCase<3>;
using Made = MadeSchedule<Case>;
// Named here, so that a case can be written as a list of its fields.
Made make(const Case& c, const ModelConfig& config) { return make_case(c, config); }
Made make(const Case& c) { return make_case(c); }

// One unit a bucket; the last layer with a tied head; two layers; a small embedding or an untied small head with a layer, else two layers; a large one with a layer,
// a small one with two, else three; all in one.
const std::vector<double> kBucketMb = {0, 0.012, 0.023, 0.03, 0.042, 1000};

template <class Check>
void for_each_case(Check&& check) {
    for (const int stage : {0, 1, 2, 3}) for (const bool tied : {false, true}) for (const int ranks : {1, 2, 3, 4, 5, 7}) for (const int micro_steps : {1, 2, 4})
    for (const bool sync : {false, true}) for (const double bucket_mb : kBucketMb) for (const int vocab_size : {kSmallVocab, kLargeVocab})
    for (int layers = 1; layers <= 6; ++layers) {
        const Case c{stage, layers, ranks, micro_steps, tied, sync, bucket_mb, vocab_size};
        SCOPED_TRACE(testing::Message() << "stage " << stage << (tied ? ", tied, " : ", untied, ") << layers << " layers, " << ranks << " ranks, " << micro_steps
                                        << " micro-steps" << (sync ? ", all synchronised" : "") << ", buckets of " << bucket_mb << " MB, " << vocab_size << " tokens");
        check(make(c));
        if (testing::Test::HasFailure()) return;  // one case says enough
    }
}

bool is_compute(const ScheduleOp& op) { return op.kind == OpKind::kForward || op.kind == OpKind::kHead || op.kind == OpKind::kBackward; }
bool is_about_slots(const ScheduleOp& op) { return op.kind == OpKind::kDrop || (op.kind == OpKind::kGather && op.slot >= 0); }

std::string text_of(const ScheduleOp& op) {
    static const std::map<OpKind, std::string> names = {
        {OpKind::kCountTargets, "count"}, {OpKind::kGather, "gather"}, {OpKind::kDrop, "drop"}, {OpKind::kForward, "forward"}, {OpKind::kHead, "head"},
        {OpKind::kBackward, "backward"}, {OpKind::kReduce, "reduce"}, {OpKind::kGatherGradients, "gather gradients"}, {OpKind::kDecide, "decide"}, {OpKind::kStep, "step"}};
    std::string text = names.at(op.kind);
    if (op.kind != OpKind::kCountTargets && op.kind != OpKind::kDecide) text += " " + std::to_string(op.index);
    if (op.slot >= 0) text += (op.kind == OpKind::kGather ? " to " : " from ") + std::to_string(op.slot);
    return text;
}

// A line ends with a computation.
std::string text_of(const std::vector<ScheduleOp>& ops) {
    std::string text;
    for (const ScheduleOp& op : ops) text += text_of(op) + (is_compute(op) || &op == &ops.back() ? "\n" : "; ");
    return text;
}

std::string with_details(const ScheduleOp& op) { return text_of(op) + " of micro-step " + std::to_string(op.micro_step) + ", " + std::to_string(op.sent_bytes) + " bytes"; }

std::vector<std::string> details_without_slots(const std::vector<ScheduleOp>& ops) {
    std::vector<std::string> details;
    for (const ScheduleOp& op : ops) {
        if (!is_about_slots(op)) details.push_back(with_details(op));
    }
    return details;
}

// ---- what a step must be, slots apart: that follows from units and buckets alone ----

std::vector<ScheduleOp> expected_forward(const Made& made, int micro_step) {
    std::vector<ScheduleOp> ops;
    for (int unit = 0; unit < made.table.head_unit(); ++unit) ops.push_back({OpKind::kForward, unit, micro_step});
    ops.push_back({OpKind::kHead, made.table.head_unit(), micro_step});
    return ops;
}

std::vector<ScheduleOp> expected_step(const Made& made) {
    const Case& c = made.c;
    const std::vector<Bucket>& buckets = made.layout.buckets;
    const size_t others = c.ranks - 1;
    const int last = c.micro_steps - 1;
    std::vector<ScheduleOp> ops = {{OpKind::kCountTargets, 0, 0, -1, others * 8}};
    for (int micro_step = 0; micro_step < c.micro_steps; ++micro_step) {
        for (const ScheduleOp& op : expected_forward(made, micro_step)) ops.push_back(op);
        const bool reduced = micro_step == last || c.stage >= 2 || c.sync_every_micro_step;
        // Backward goes down the units, so a bucket is complete with its first one; a tied embedding's gradient of the head is there by then.
        for (int unit = made.table.head_unit(); unit >= 0; --unit) {
            if (unit != made.table.head_unit()) ops.push_back({OpKind::kBackward, unit, micro_step});
            for (int b = 0; b < static_cast<int>(buckets.size()); ++b) {
                if (buckets[b].first_unit != unit || !reduced) continue;
                const size_t sent_bytes = others * (buckets[b].count / c.ranks) * c.gradient_bytes;
                ops.push_back({OpKind::kReduce, b, micro_step, -1, sent_bytes});
                if (c.stage == 0) ops.push_back({OpKind::kGatherGradients, b, micro_step, -1, sent_bytes});
            }
        }
    }
    ops.push_back({OpKind::kDecide, 0, last, -1, others * 24});
    for (int b = 0; b < static_cast<int>(buckets.size()); ++b) {
        ops.push_back({OpKind::kStep, b, last});
        if (c.stage == 1 || c.stage == 2) ops.push_back({OpKind::kGather, b, last, -1, others * (buckets[b].count / c.ranks) * c.parameter_bytes});
    }
    return ops;
}

// ---- slots ----

std::set<int> buckets_read_by(const Made& made, const ScheduleOp& op) {
    if (op.kind == OpKind::kBackward && op.index == made.table.embedding_unit()) return {};  // its gradient takes token ids, no weights
    std::set<int> buckets = {made.layout.bucket_of_unit[op.index]};
    if (op.kind == OpKind::kHead && made.table.tied) buckets.insert(made.layout.bucket_of_unit[made.table.embedding_unit()]);
    return buckets;
}

// Slots where the buckets `apart` take turns in the last one and the others in two, or lie in one each if that is enough.
std::vector<size_t> slot_counts_of(const Made& made, const std::set<int>& apart) {
    std::vector<size_t> counts, in_turn;
    for (int b = 0; b < static_cast<int>(made.layout.buckets.size()); ++b) (apart.contains(b) ? in_turn : counts).push_back(made.layout.buckets[b].count);
    if (counts.size() > 2) counts.assign(2, *std::max_element(counts.begin(), counts.end()));
    if (!in_turn.empty()) counts.push_back(*std::max_element(in_turn.begin(), in_turn.end()));
    return counts;
}

size_t sum_of(const std::vector<size_t>& counts) { return std::accumulate(counts.begin(), counts.end(), size_t{0}); }

// Beside two slots that any bucket fits in only a tied model's final norm has one.
std::set<int> apart_when_small(const Made& made) { return made.table.tied ? std::set<int>{made.layout.bucket_of_unit[made.table.head_unit()]} : std::set<int>{}; }

// Embedding and head have a slot apart from the layers', a tied model's embedding for itself; unless others would be smaller or there are no layers' buckets.
std::set<int> set_apart(const Made& made) {
    const int embedding = made.layout.bucket_of_unit[made.table.embedding_unit()], head = made.layout.bucket_of_unit[made.table.head_unit()];
    const std::set<int> small = apart_when_small(made), large = made.table.tied ? std::set<int>{embedding} : std::set<int>{embedding, head};
    return made.layout.buckets.size() > 2 && sum_of(slot_counts_of(made, large)) <= sum_of(slot_counts_of(made, small)) ? large : small;
}

struct Gathered {
    size_t count = 0, bytes = 0;  // bytes sent by a rank
};

// Replays a list of stage 3 and says what is wrong with it.
Gathered walk_slots(const Made& made, const std::vector<ScheduleOp>& ops) {
    const std::vector<Bucket>& buckets = made.layout.buckets;
    const std::vector<size_t>& slot_counts = made.schedule.slot_counts;
    constexpr int kNowhere = -1;
    std::vector<int> slot_of(buckets.size(), kNowhere), in_slot(slot_counts.size(), -1);
    std::vector<size_t> gathered_at(buckets.size());   // number of computations queued before
    std::vector<bool> used(buckets.size());            // since it was gathered
    size_t computations = 0;
    bool decided = false;
    const std::set<int> apart = set_apart(made);
    const int last_slot = static_cast<int>(slot_counts.size()) - 1;
    Gathered gathered;
    SCOPED_TRACE(text_of(ops));
    for (size_t i = 0; i < ops.size(); ++i) {
        const ScheduleOp& op = ops[i];
        SCOPED_TRACE(testing::Message() << "operation " << i << ", " << with_details(op));
        if (testing::Test::HasFailure()) return gathered;
        if (is_about_slots(op) || op.kind == OpKind::kGather) {
            if (op.index < 0 || op.index >= static_cast<int>(buckets.size()) || op.slot < 0 || op.slot >= static_cast<int>(in_slot.size())) {
                ADD_FAILURE() << "there is no such bucket or slot";
                return gathered;
            }
            // With the computation that follows, or after the last one with that.
            const auto next = std::find_if(ops.begin() + i, ops.end(), is_compute);
            EXPECT_EQ(op.micro_step, next != ops.end() ? next->micro_step : std::find_if(ops.rbegin(), ops.rend(), is_compute)->micro_step);
        }
        if (op.kind == OpKind::kGather) {
            EXPECT_EQ(slot_of[op.index], kNowhere) << "is there already";
            EXPECT_EQ(in_slot[op.slot], -1) << "the slot is in use";
            EXPECT_LE(buckets[op.index].count, slot_counts[op.slot]);
            EXPECT_FALSE(decided) << "would hold parameters from before the update, or never be used";
            EXPECT_EQ(op.sent_bytes, (made.c.ranks - 1) * (buckets[op.index].count / made.c.ranks) * made.c.parameter_bytes);
            slot_of[op.index] = op.slot;
            in_slot[op.slot] = op.index;
            gathered_at[op.index] = computations;
            used[op.index] = false;
            ++gathered.count;
            gathered.bytes += op.sent_bytes;
            // So there are at most one of those set apart and two others.
            if (apart.contains(op.index)) { EXPECT_EQ(op.slot, last_slot); }
            else { EXPECT_LT(op.slot, apart.empty() ? 2 : std::min(2, last_slot)); }
        } else if (op.kind == OpKind::kDrop) {
            EXPECT_EQ(in_slot[op.slot], op.index);
            EXPECT_TRUE(used[op.index]) << "was gathered for nothing";
            EXPECT_FALSE(decided);
            EXPECT_EQ(op.sent_bytes, 0u);
            slot_of[op.index] = kNowhere;
            in_slot[op.slot] = -1;
        } else if (is_compute(op)) {
            for (const int bucket : buckets_read_by(made, op)) {
                EXPECT_NE(slot_of[bucket], kNowhere) << "lacks bucket " << bucket;
                // Overlap: a whole computation runs while the bucket is gathered. Nothing runs before the first, so its own must be waited for.
                if (!used[bucket] && computations > 0) { EXPECT_LT(gathered_at[bucket], computations) << "must wait for bucket " << bucket << ", gathered too late"; }
                used[bucket] = true;
            }
            ++computations;
        } else if (op.kind == OpKind::kDecide) {
            for (const int bucket : in_slot) EXPECT_EQ(bucket, -1) << "stays over the update";
            decided = true;
        }
    }
    for (const int bucket : in_slot) EXPECT_EQ(bucket, -1) << "is never dropped";
    return gathered;
}

// The fewest gathers of the buckets that are (or are not) set apart, into num_slots slots, that let every gather overlap: at each computation its buckets and the
// next one's must be there. Tries all ways: the fewest for each set of buckets that may lie in the slots.
size_t fewest_gathers(const Made& made, const std::vector<ScheduleOp>& ops, bool of_apart, size_t num_slots) {
    const std::set<int> apart = set_apart(made);
    std::vector<std::set<int>> read;  // by each computation
    for (const ScheduleOp& op : ops) {
        if (!is_compute(op)) continue;
        read.emplace_back();
        for (const int bucket : buckets_read_by(made, op)) {
            if (apart.contains(bucket) == of_apart) read.back().insert(bucket);
        }
    }
    std::map<std::set<int>, size_t> fewest = {{{}, 0}};
    for (size_t i = 0; i < read.size(); ++i) {
        std::set<int> needed = read[i];
        if (i + 1 < read.size()) needed.insert(read[i + 1].begin(), read[i + 1].end());
        std::map<std::set<int>, size_t> next;
        for (const auto& [there, gathers] : fewest) {
            size_t missing = 0;
            for (const int bucket : needed) missing += !there.contains(bucket);
            std::vector<std::set<int>> choices = {needed};  // what stays besides
            for (const int bucket : there) {
                for (size_t n = choices.size(), k = 0; k < n; ++k) {
                    choices.push_back(choices[k]);
                    choices.back().insert(bucket);
                }
            }
            for (const std::set<int>& choice : choices) {
                if (choice.size() > num_slots) continue;
                const auto [entry, is_new] = next.try_emplace(choice, gathers + missing);
                entry->second = std::min(entry->second, gathers + missing);
            }
        }
        fewest = next;
    }
    size_t best = SIZE_MAX;
    for (const auto& [there, gathers] : fewest) best = std::min(best, gathers);
    return best;
}

size_t fewest_gathers(const Made& made, const std::vector<ScheduleOp>& ops) { return fewest_gathers(made, ops, true, 1) + fewest_gathers(made, ops, false, 2); }

size_t sent_bytes_of(const std::vector<ScheduleOp>& ops, OpKind kind) {
    size_t sum = 0;
    for (const ScheduleOp& op : ops) sum += op.kind == kind ? op.sent_bytes : 0;
    return sum;
}

// All buckets, padding included.
size_t padded_count(const FlatLayout& layout) {
    size_t count = 0;
    for (const Bucket& bucket : layout.buckets) count += bucket.count;
    return count;
}

// ---- every case ----

TEST(Schedule, TheBucketSizesTestedMergeUnitsInDifferentWays) {
    const auto first_units = [](bool tied, int vocab_size) {
        std::string text;
        for (const double bucket_mb : kBucketMb) {
            const Made made = make({.layers = 4, .tied = tied, .bucket_mb = bucket_mb, .vocab_size = vocab_size});
            for (const Bucket& bucket : made.layout.buckets) text += std::to_string(bucket.first_unit);
            text += " ";
        }
        return text;
    };
    EXPECT_EQ(first_units(false, kSmallVocab), "012345 012345 0135 024 03 0 ");
    EXPECT_EQ(first_units(true, kSmallVocab), "012345 01234 013 024 03 0 ");
    EXPECT_EQ(first_units(false, kLargeVocab), "012345 012345 0135 0135 025 0 ");
    EXPECT_EQ(first_units(true, kLargeVocab), "012345 01234 013 013 02 0 ");
}

TEST(Schedule, StepHoldsEveryOperationOnceInOrder) {
    for_each_case([](const Made& made) {
        const Case& c = made.c;
        EXPECT_EQ(details_without_slots(made.schedule.step), details_without_slots(expected_step(made)));
        EXPECT_EQ(made.schedule.reduce_every_micro_step, c.stage >= 2 || c.sync_every_micro_step);
        for (size_t i = 0; i < made.schedule.step.size(); ++i) {
            const ScheduleOp& op = made.schedule.step[i];
            EXPECT_TRUE(c.stage == 3 || !is_about_slots(op)) << text_of(op);
            // At once, not behind the gathers for what comes next: the communication stream takes them in this order.
            if (op.kind != OpKind::kReduce) continue;
            const ScheduleOp& before = made.schedule.step[i - 1];
            EXPECT_TRUE(is_compute(before) && before.index == made.layout.buckets[op.index].first_unit) << text_of(op) << " after " << text_of(before);
        }
    });
}

TEST(Schedule, ForwardIsWithoutBackwardReductionsAndUpdate) {
    for_each_case([](const Made& made) {
        EXPECT_EQ(details_without_slots(made.schedule.forward), details_without_slots(expected_forward(made, 0)));
        if (made.c.stage < 3) {
            EXPECT_EQ(made.schedule.forward.size(), made.table.units.size());
            EXPECT_EQ(made.schedule.forward_sent_bytes(), 0u);
            return;
        }
        const Gathered gathered = walk_slots(made, made.schedule.forward);
        EXPECT_EQ(gathered.bytes, made.schedule.forward_sent_bytes());
        EXPECT_EQ(gathered.count, fewest_gathers(made, made.schedule.forward));
        Case one = made.c;
        one.micro_steps = 1;
        const std::vector<ScheduleOp> forward = make(one).schedule.forward;
        EXPECT_TRUE(std::equal(forward.begin(), forward.end(), made.schedule.forward.begin(), made.schedule.forward.end(),
                               [](const ScheduleOp& x, const ScheduleOp& y) { return with_details(x) == with_details(y); }));
    });
}

TEST(Schedule, ShardedParametersAreThereWhenReadAndGatheredAheadAndNoMoreOftenThanThatTakes) {
    for_each_case([](const Made& made) {
        if (made.c.stage < 3) return;
        const Gathered gathered = walk_slots(made, made.schedule.step);
        EXPECT_EQ(gathered.bytes, sent_bytes_of(made.schedule.step, OpKind::kGather));
        EXPECT_EQ(gathered.count, fewest_gathers(made, made.schedule.step)) << text_of(made.schedule.step);
    });
}

TEST(Schedule, SlotsAreFewAndOnlyForShardedParameters) {
    for_each_case([](const Made& made) {
        const std::vector<size_t>& counts = made.schedule.slot_counts;
        const std::vector<int>& home = made.schedule.home_slot;
        const size_t buckets = made.layout.buckets.size();
        if (made.c.stage < 3) {
            EXPECT_TRUE(counts.empty());
            EXPECT_TRUE(home.empty());
            return;
        }
        const std::set<int> apart = set_apart(made);
        EXPECT_EQ(counts, slot_counts_of(made, apart));
        EXPECT_LE(counts.size(), made.table.tied ? std::min<size_t>(buckets, 3) : buckets <= 3 ? std::min<size_t>(buckets, 2) : 3u);
        EXPECT_LE(sum_of(counts), sum_of(slot_counts_of(made, apart_when_small(made))));
        ASSERT_EQ(home.size(), buckets);
        int other = 0;
        for (int b = 0; b < static_cast<int>(buckets); ++b) {
            const int expected = apart.contains(b) ? static_cast<int>(counts.size()) - 1 : buckets - apart.size() > 2 ? 0 : other++;
            ASSERT_EQ(home[b], expected);
            EXPECT_LE(made.layout.buckets[b].count, counts[home[b]]);
        }
    });
}

TEST(Schedule, ReductionsAndStepsAreThoseOfTheNeighbourStage) {
    for_each_case([](const Made& made) {
        if (made.c.stage != 0 && made.c.stage != 2) return;
        const auto reductions_and_steps = [](const Schedule& schedule) {
            std::vector<std::string> details;
            for (const ScheduleOp& op : schedule.step) {
                if (op.kind == OpKind::kReduce || op.kind == OpKind::kStep) details.push_back(with_details(op));
            }
            return details;
        };
        Case other = made.c;
        ++other.stage;
        EXPECT_EQ(reductions_and_steps(made.schedule), reductions_and_steps(make(other).schedule));
        other.stage = 2 - made.c.stage;
        if (made.c.sync_every_micro_step) { EXPECT_EQ(reductions_and_steps(made.schedule), reductions_and_steps(make(other).schedule)); }
    });
}

TEST(Schedule, SentBytesAreTheFormulas) {
    for_each_case([](const Made& made) {
        const Case& c = made.c;
        const size_t N = c.ranks, G = c.micro_steps, elements = padded_count(made.layout);
        ASSERT_EQ(elements % N, 0u);
        const size_t x_gradients = (N - 1) * (elements / N) * c.gradient_bytes, x_parameters = (N - 1) * (elements / N) * c.parameter_bytes, small = (N - 1) * (8 + 24);
        const size_t times = c.sync_every_micro_step ? G : 1;
        const size_t sent = made.schedule.step_sent_bytes();
        if (c.stage == 0) { EXPECT_EQ(sent, times * 2 * x_gradients + small); }
        if (c.stage == 1) { EXPECT_EQ(sent, times * x_gradients + x_parameters + small); }
        if (c.stage == 2) { EXPECT_EQ(sent, G * x_gradients + x_parameters + small); }
        if (c.stage == 3) {
            const size_t gathered = sent_bytes_of(made.schedule.step, OpKind::kGather);
            EXPECT_EQ(sent, G * x_gradients + gathered + small);
            EXPECT_LE(gathered, G * 2 * x_parameters);
            EXPECT_GE(gathered, x_parameters);
        }
    });
}

// ---- single cases ----

TEST(Schedule, StageZeroSynchronisedOnEveryMicroStepSendsEveryGradientAgain) {
    for (const bool tied : {false, true}) {
        const Made once = make({.stage = 0, .micro_steps = 16, .tied = tied}), always = make({.stage = 0, .micro_steps = 16, .tied = tied, .sync_every_micro_step = true});
        for (const OpKind kind : {OpKind::kReduce, OpKind::kGatherGradients}) {
            EXPECT_GT(sent_bytes_of(once.schedule.step, kind), 0u);
            EXPECT_EQ(sent_bytes_of(always.schedule.step, kind), 16 * sent_bytes_of(once.schedule.step, kind));
        }
    }
}

TEST(Schedule, Fp32GradientsDoubleTheirBytesAndNothingElse) {
    for (const int stage : {0, 1, 2, 3}) {
        const Made bf16 = make({.stage = stage, .ranks = 3, .micro_steps = 2}), fp32 = make({.stage = stage, .ranks = 3, .micro_steps = 2, .gradient_bytes = 4});
        ASSERT_EQ(bf16.schedule.step.size(), fp32.schedule.step.size());
        for (size_t i = 0; i < bf16.schedule.step.size(); ++i) {
            const ScheduleOp &narrow = bf16.schedule.step[i], &wide = fp32.schedule.step[i];
            EXPECT_EQ(text_of(narrow), text_of(wide));
            EXPECT_EQ(wide.sent_bytes, narrow.sent_bytes * (narrow.kind == OpKind::kReduce || narrow.kind == OpKind::kGatherGradients ? 2 : 1)) << text_of(wide);
        }
    }
}

TEST(Schedule, OneRankSendsNothing) {
    for (const int stage : {0, 1, 2, 3}) EXPECT_EQ(make({.stage = stage, .ranks = 1, .micro_steps = 2}).schedule.step_sent_bytes(), 0u);
}

TEST(Schedule, RefusesStagesAndMicroStepsThatDoNotExist) {
    expect_error([] { make({.stage = 4}); }, {"ZeRO stage 4"});
    expect_error([] { make({.stage = -1}); }, {"ZeRO stage -1"});
    expect_error([] { sharding_of_stage(4); }, {"ZeRO stage 4", "0, 1, 2 or 3"});
    expect_error([] { make({.micro_steps = 0}); }, {"0 micro-steps"});
}

TEST(Schedule, SlotSizesByHand) {
    const auto bytes = [](const Case& c) {
        std::vector<size_t> bytes = make(c).schedule.slot_counts;
        for (size_t& count : bytes) count *= 2;
        return bytes;
    };
    using Bytes = std::vector<size_t>;
    const size_t layer = 11008, norm = 256, small = 18432, large = 30720;  // the embedding; an untied head is a norm larger
    EXPECT_EQ(bytes({.vocab_size = kLargeVocab}), (Bytes{layer, layer, large + norm}));
    EXPECT_EQ(bytes({.tied = true, .vocab_size = kLargeVocab}), (Bytes{layer, layer, large}));
    EXPECT_EQ(bytes({.layers = 4, .tied = true, .bucket_mb = 0.012, .vocab_size = kLargeVocab}), (Bytes{layer + norm, layer + norm, large}));
    // Less than two layers, so two slots that fit it are smaller than those.
    EXPECT_EQ(bytes({}), (Bytes{small + norm, small + norm}));
    EXPECT_EQ(bytes({.tied = true}), (Bytes{small, small, norm}));
    EXPECT_EQ(bytes({.layers = 4, .bucket_mb = 0.023, .vocab_size = kLargeVocab}), (Bytes{large + norm, large + norm}));
    // At most two buckets of layers: as many slots.
    EXPECT_EQ(bytes({.layers = 1}), (Bytes{layer, small + norm}));
    EXPECT_EQ(bytes({.layers = 1, .tied = true}), (Bytes{layer, norm, small}));
    EXPECT_EQ(bytes({.layers = 3, .bucket_mb = 0.023, .vocab_size = 2 * kLargeVocab}), (Bytes{2 * layer, layer, 2 * large + norm}));
    EXPECT_EQ(bytes({.layers = 3, .bucket_mb = 0.03}), (Bytes{2 * layer, small + layer}));  // one with the embedding, which is larger than the head
    // At most two buckets of any kind.
    EXPECT_EQ(bytes({.layers = 2, .bucket_mb = 0.03}), (Bytes{small + layer, layer + small + norm}));
    EXPECT_EQ(bytes({.layers = 2, .tied = true, .bucket_mb = 0.042, .vocab_size = kLargeVocab}), (Bytes{large + layer, layer + norm}));
    EXPECT_EQ(bytes({.layers = 2, .tied = true, .bucket_mb = 1000}), (Bytes{small + 2 * layer + norm}));
}

// Their embedding is larger than two layers, so nothing is larger than it must be.
TEST(Schedule, PresetsHaveSlotsForTwoLayersAndTheEmbedding) {
    for (const std::string& name : preset_names()) {
        if (name == "tiny") continue;
        for (const bool tied : {false, true}) for (const double bucket_mb : {0.0, 25.0}) for (const int micro_steps : {1, 3}) {
            SCOPED_TRACE(testing::Message() << name << (tied ? ", tied, " : ", untied, ") << micro_steps << " micro-steps, buckets of " << bucket_mb << " MB");
            ModelConfig config = preset_config(name);
            config.tied = tied;
            const Made made = make({.ranks = 8, .micro_steps = micro_steps, .bucket_mb = bucket_mb}, config);
            size_t largest_layer = 0;
            for (const Bucket& bucket : made.layout.buckets) {
                if (bucket.first_unit > 0 && bucket.first_unit < made.table.head_unit()) largest_layer = std::max(largest_layer, bucket.count);
            }
            const Bucket& largest = tied ? made.layout.buckets.front() : made.layout.buckets.back();
            EXPECT_EQ(made.schedule.slot_counts, (std::vector<size_t>{largest_layer, largest_layer, largest.count}));
            EXPECT_EQ(walk_slots(made, made.schedule.step).count, fewest_gathers(made, made.schedule.step));
            EXPECT_EQ(walk_slots(made, made.schedule.forward).count, made.layout.buckets.size());
        }
    }
}

TEST(Schedule, FiguresOfTheHeader) {
    const auto figures = [](const char* name) {
        const Made made = make({.ranks = 8, .micro_steps = 8}, preset_config(name));
        const size_t slot_bytes = 2 * sum_of(made.schedule.slot_counts), sent_bytes = made.schedule.step_sent_bytes();
        return std::pair{(slot_bytes + 500'000) / 1'000'000, (sent_bytes + 50'000'000) / 100'000'000};  // MB, 0.1 GB
    };
    EXPECT_EQ(figures("0.5B"), (std::pair<size_t, size_t>{326, 173}));
    EXPECT_EQ(figures("qwen2.5-7B"), (std::pair<size_t, size_t>{2022, 2924}));
}

// With one unit a bucket and a small embedding. Each layer is gathered for forward and again for backward, but for the last one, which stays; the first layer stays
// for the next micro-step. The embedding is gathered once, tied (with a layer between) twice.
TEST(Schedule, GathersOfOneUnitABucket) {
    for (size_t layers = 1; layers <= 6; ++layers) {
        for (const size_t micro_steps : {1, 2, 3}) {
            const auto gathers = [&](bool tied) {
                const Made made = make({.layers = static_cast<int>(layers), .micro_steps = static_cast<int>(micro_steps), .tied = tied});
                return walk_slots(made, made.schedule.step).count;
            };
            EXPECT_EQ(gathers(false), 2 * layers + 1 + (micro_steps - 1) * 2 * layers);
            EXPECT_EQ(gathers(true), layers == 1 ? 3 : 2 * layers + 2 + (micro_steps - 1) * 2 * layers);  // one layer: all three stay
        }
    }
}

// With one unit a bucket and a large embedding. Embedding and head do not push out layers, so the last two stay for backward and the first two for the next
// micro-step. Tied: embedding once, and the final norm pushes out the last but one.
TEST(Schedule, GathersOfOneUnitABucketWithALargeEmbedding) {
    for (size_t layers = 1; layers <= 6; ++layers) {
        for (const size_t micro_steps : {1, 2, 3}) {
            const auto gathers = [&](bool tied) {
                const Made made = make({.layers = static_cast<int>(layers), .micro_steps = static_cast<int>(micro_steps), .tied = tied, .vocab_size = kLargeVocab});
                return walk_slots(made, made.schedule.step).count;
            };
            const size_t others = layers > 2 ? layers - 2 : 0;
            EXPECT_EQ(gathers(false), 2 * micro_steps + layers + others + (micro_steps - 1) * 2 * others);
            EXPECT_EQ(gathers(true), layers == 1 ? 3 : 1 + 2 * layers + (micro_steps - 1) * (2 * layers - 2));  // one layer: all three stay
        }
    }
}

// Nothing here may take time that grows with the square of the number of computations.
TEST(Schedule, ALongStepOfADeepModel) {
    for (const double bucket_mb : {0.0, 0.023, 1.09, 1000.0}) for (const int vocab_size : {kSmallVocab, kLargeVocab}) {
        const Made made = make({.layers = 96, .micro_steps = 512, .bucket_mb = bucket_mb, .vocab_size = vocab_size});
        const size_t computations = std::count_if(made.schedule.step.begin(), made.schedule.step.end(), is_compute);
        EXPECT_EQ(computations, 512u * (97 + 1 + 97));
        const size_t buckets = made.layout.buckets.size(), gathers = std::count_if(made.schedule.step.begin(), made.schedule.step.end(), is_about_slots) / 2;
        if (bucket_mb == 0.0) { EXPECT_EQ(gathers, vocab_size == kSmallVocab ? 512u * 2 * 96 + 1 : 512u * (2 + 2 * 94) + 2); }
        if (bucket_mb == 1.09) { EXPECT_EQ(buckets, 2u); }
        if (buckets <= 2) { EXPECT_EQ(gathers, buckets); }
    }
}

// ---- counted by hand ----

void expect_step(const Case& c, const std::string& expected) { EXPECT_EQ("\n" + text_of(make(c).schedule.step), expected); }

TEST(Schedule, HandCountedUntiedWithALargeEmbedding) {
    // Units, and buckets: 0 embedding, 1 to 3 layers, 4 head. Embedding and head take turns in slot 2, layers 2 and 3 stay from forward to backward, layers 1 and 2 from
    // there to the next micro-step. The embedding's backward reads no parameters; the embedding comes back while the first layer's backward runs.
    expect_step({.layers = 3, .micro_steps = 2, .vocab_size = kLargeVocab}, R"(
gather 0 to 2; gather 1 to 0; count; forward 0
gather 2 to 1; forward 1
drop 1 from 0; gather 3 to 0; forward 2
drop 0 from 2; gather 4 to 2; forward 3
head 4
reduce 4; backward 3
reduce 3; drop 3 from 0; gather 1 to 0; backward 2
reduce 2; drop 4 from 2; gather 0 to 2; backward 1
reduce 1; backward 0
reduce 0; forward 0
forward 1
drop 1 from 0; gather 3 to 0; forward 2
drop 0 from 2; gather 4 to 2; forward 3
head 4
reduce 4; backward 3
reduce 3; drop 3 from 0; gather 1 to 0; backward 2
reduce 2; backward 1
reduce 1; backward 0
reduce 0; drop 1 from 0; drop 2 from 1; drop 4 from 2; decide; step 0; step 1; step 2; step 3; step 4
)");
}

TEST(Schedule, HandCountedTiedWithALargeEmbedding) {
    // The embedding has slot 2 for good. The head's bucket 4, the final norm, goes where layer 2 was; when the head is done layer 2 comes back, while layer 3 runs.
    expect_step({.layers = 3, .micro_steps = 2, .tied = true, .vocab_size = kLargeVocab}, R"(
gather 0 to 2; gather 1 to 0; count; forward 0
gather 2 to 1; forward 1
drop 1 from 0; gather 3 to 0; forward 2
drop 2 from 1; gather 4 to 1; forward 3
head 4
reduce 4; drop 4 from 1; gather 2 to 1; backward 3
reduce 3; drop 3 from 0; gather 1 to 0; backward 2
reduce 2; backward 1
reduce 1; backward 0
reduce 0; forward 0
forward 1
drop 1 from 0; gather 3 to 0; forward 2
drop 2 from 1; gather 4 to 1; forward 3
head 4
reduce 4; drop 4 from 1; gather 2 to 1; backward 3
reduce 3; drop 3 from 0; gather 1 to 0; backward 2
reduce 2; backward 1
reduce 1; backward 0
reduce 0; drop 1 from 0; drop 2 from 1; drop 0 from 2; decide; step 0; step 1; step 2; step 3; step 4
)");
}

TEST(Schedule, HandCountedUntied) {
    // The same with a small embedding: two slots for all. The last layer stays in its slot for its backward; the embedding's backward reads no parameters.
    expect_step({.layers = 3}, R"(
gather 0 to 0; gather 1 to 1; count; forward 0
drop 0 from 0; gather 2 to 0; forward 1
drop 1 from 1; gather 3 to 1; forward 2
drop 2 from 0; gather 4 to 0; forward 3
head 4
reduce 4; drop 4 from 0; gather 2 to 0; backward 3
reduce 3; drop 3 from 1; gather 1 to 1; backward 2
reduce 2; backward 1
reduce 1; backward 0
reduce 0; drop 2 from 0; drop 1 from 1; decide; step 0; step 1; step 2; step 3; step 4
)");
}

TEST(Schedule, HandCountedTied) {
    // A small embedding: two slots for all but the final norm, bucket 4, which has slot 2. The head needs the embedding's bucket too, so during the head itself both
    // shared slots are read or about to be.
    expect_step({.layers = 3, .tied = true}, R"(
gather 0 to 0; gather 1 to 1; count; forward 0
drop 0 from 0; gather 2 to 0; forward 1
drop 1 from 1; gather 3 to 1; forward 2
gather 4 to 2; drop 2 from 0; gather 0 to 0; forward 3
head 4
reduce 4; drop 0 from 0; gather 2 to 0; backward 3
reduce 3; drop 3 from 1; gather 1 to 1; backward 2
reduce 2; backward 1
reduce 1; backward 0
reduce 0; drop 2 from 0; drop 1 from 1; drop 4 from 2; decide; step 0; step 1; step 2; step 3; step 4
)");
}

TEST(Schedule, HandCountedTwoMicroSteps) {
    // Over the end of a micro-step the first layer stays, and the embedding is gathered during that layer's backward.
    expect_step({.layers = 2, .micro_steps = 2}, R"(
gather 0 to 0; gather 1 to 1; count; forward 0
drop 0 from 0; gather 2 to 0; forward 1
drop 1 from 1; gather 3 to 1; forward 2
head 3
reduce 3; drop 3 from 1; gather 1 to 1; backward 2
reduce 2; drop 2 from 0; gather 0 to 0; backward 1
reduce 1; backward 0
reduce 0; forward 0
drop 0 from 0; gather 2 to 0; forward 1
drop 1 from 1; gather 3 to 1; forward 2
head 3
reduce 3; drop 3 from 1; gather 1 to 1; backward 2
reduce 2; backward 1
reduce 1; backward 0
reduce 0; drop 2 from 0; drop 1 from 1; decide; step 0; step 1; step 2; step 3
)");
}

TEST(Schedule, HandCountedTwoBuckets) {
    // The embedding with layer 0, layer 1 with the head: both stay for the whole step.
    expect_step({.layers = 2, .micro_steps = 2, .bucket_mb = 0.03}, R"(
gather 0 to 0; gather 1 to 1; count; forward 0
forward 1
forward 2
head 3
backward 2
reduce 1; backward 1
backward 0
reduce 0; forward 0
forward 1
forward 2
head 3
backward 2
reduce 1; backward 1
backward 0
reduce 0; drop 0 from 0; drop 1 from 1; decide; step 0; step 1
)");
}

TEST(Schedule, HandCountedOneBucket) {
    for (const bool tied : {false, true}) {
        expect_step({.layers = 2, .tied = tied, .bucket_mb = 1000}, R"(
gather 0 to 0; count; forward 0
forward 1
forward 2
head 3
backward 2
backward 1
backward 0
reduce 0; drop 0 from 0; decide; step 0
)");
    }
}

TEST(Schedule, HandCountedStagesThatShardNoParameters) {
    expect_step({.stage = 0, .layers = 1, .micro_steps = 2}, R"(
count; forward 0
forward 1
head 2
backward 1
backward 0
forward 0
forward 1
head 2
reduce 2; gather gradients 2; backward 1
reduce 1; gather gradients 1; backward 0
reduce 0; gather gradients 0; decide; step 0; step 1; step 2
)");
    expect_step({.stage = 2, .layers = 1}, R"(
count; forward 0
forward 1
head 2
reduce 2; backward 1
reduce 1; backward 0
reduce 0; decide; step 0; gather 0; step 1; gather 1; step 2; gather 2
)");
}

}  // namespace
