// The plan of a run, on a bill of memory that is written here: what it extrapolates against whole schedules, which stage it recommends, that its advice fits and says all
// of what it changes, and its limits. That the bill of the real program is the trainer's own is test_plan.py's matter.
#include "llmc/plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <tuple>

#include <nlohmann/json.hpp>

#include "dev/test/host_test.h"
#include "llmc/plan_report.h"

namespace {

constexpr size_t kElementBytes = 2;
constexpr std::array<const char*, 4> kRecompute = {"none", "norm", "ffn", "block"};
constexpr std::array<size_t, 4> kKept = {20, 18, 12, 2};  // channels that a layer keeps of every row, by level of recomputation
constexpr size_t kWorkspaceBytes = 1000;

size_t level_of(const std::string& recompute) { return std::find(kRecompute.begin(), kRecompute.end(), recompute) - kRecompute.begin(); }

// A CountRun: state by the stage's formula, one more layer's activations than are kept, the logits of a chunk, slots, two buckets in flight.
CountedRun count_run(const RunShape& s, const ParamTable& table, int schedule_micro_steps) {
    CountedRun run;
    const size_t gradient_bytes = s.fp32_gradients ? 4 : kElementBytes;
    run.layout = make_flat_layout(table, s.ranks, s.bucket_mb, kElementBytes);
    run.schedule = make_schedule(table, run.layout, {s.stage, schedule_micro_steps, s.sync_every_micro_step, kElementBytes, gradient_bytes});
    const auto share = [&](bool sharded) { return sharded ? run.layout.shard_count : run.layout.total_count; };
    const bool every_micro_step = s.stage >= 2 || s.sync_every_micro_step;
    MemoryBill& bill = run.memory;
    bill.add("workspace", kWorkspaceBytes);
    bill.add("gradients", share(every_micro_step && s.stage >= 1) * gradient_bytes);
    if (every_micro_step) bill.add("buffers", 2 * run.layout.max_bucket_count * gradient_bytes);
    if (s.lmhead_chunks > 1) bill.add("staging", table.units[table.head_unit()].count * kElementBytes);
    bill.add("parameters", share(s.stage == 3) * kElementBytes);
    bill.add("optimizer", share(s.stage >= 1) * 12);
    for (const size_t count : run.schedule.slot_counts) bill.add("buffers", count * kElementBytes);
    const size_t rows = static_cast<size_t>(s.micro_batch) * s.seq_len;
    bill.add("activations", rows * s.config.channels * kElementBytes * (20 + s.config.num_layers * kKept[level_of(s.recompute)]));
    bill.add("activations", rows / s.lmhead_chunks * s.config.padded_vocab() * kElementBytes);
    bill.add("other", 12 * rows * s.micro_steps + 16 * static_cast<size_t>(s.ranks));
    return run;
}

auto settings_of(const RunShape& s) {
    return std::tuple(s.ranks, s.micro_batch, s.seq_len, s.micro_steps, s.stage, s.bucket_mb, s.overlap, s.sync_every_micro_step, s.fp32_gradients, s.recompute, s.lmhead_chunks);
}

// What a shape's bill comes to. Tests that try everything ask for the same ones again and again.
size_t total_bytes(const RunShape& s) {
    static std::map<std::tuple<std::string, long long, decltype(settings_of(s))>, size_t> known;
    const auto [entry, is_new] = known.try_emplace({s.config.name, count_parameters(s.config), settings_of(s)}, 0);
    if (is_new) entry->second = count_run(s, make_param_table(s.config), std::min(s.micro_steps, 2)).memory.total_bytes;
    return entry->second;
}

// Everything fits; nodes of 8.
PlanRequest request_of(const ModelConfig& config, int ranks) {
    PlanRequest request;
    request.shape.config = config;
    request.shape.ranks = ranks;
    request.shape.micro_batch = 4;
    request.shape.seq_len = std::min(64, config.max_seq_len);
    request.device_bytes = size_t{1} << 60;
    request.links = {{"nvlink", 450e9, 0}, {"ib", 50e9, 2e-6}};
    request.flops_per_s = 400e12;
    return request;
}

Plan plan_of(const PlanRequest& request) { return make_plan(request, count_run); }

ModelConfig small(bool tied, int layers, int vocab_size = 300) {
    ModelConfig config = small_config(tied);
    config.name = std::string(tied ? "tied" : "untied") + " of " + std::to_string(layers) + " layers, vocabulary " + std::to_string(vocab_size);
    config.num_layers = layers;
    config.vocab_size = vocab_size;
    return config;
}

std::vector<ModelConfig> models() {
    std::vector<ModelConfig> all;
    for (const std::string& name : preset_names()) all.push_back(preset_config(name));
    for (const bool tied : {false, true}) {
        for (const int layers : {1, 2, 3, 6}) all.push_back(small(tied, layers, layers == 3 ? 600 : 300));
    }
    return all;
}

// ---- many micro-steps --------------------------------------------------------------------------------------------------------------

ComputeCosts costs_of(const PlanRequest& request) {
    const RunShape& s = request.shape;
    return compute_costs(s.config, s.seq_len, static_cast<double>(s.micro_batch) * s.seq_len, request.flops_per_s, s.recompute);
}

// Holds all stages of a plan to schedules with all their micro-steps.
void expect_whole_schedules(const PlanRequest& request) {
    const Plan plan = plan_of(request);
    const ParamTable table = make_param_table(request.shape.config);
    const int ranks = request.shape.ranks;
    const auto seconds_of = [&](CollectiveAlgorithm algorithm) {
        return [&, algorithm](size_t bytes) { return collective_seconds(algorithm, request.network(), ranks, static_cast<double>(bytes) / (ranks - 1)); };
    };
    const auto expect_equal = [](const StepTime& planned, const StepTime& whole) {
        EXPECT_NEAR(planned.seconds, whole.seconds, 1e-9 * whole.seconds);
        EXPECT_NEAR(planned.compute_seconds, whole.compute_seconds, 1e-9 * whole.compute_seconds);
        EXPECT_NEAR(planned.comm_seconds, whole.comm_seconds, 1e-9 * whole.comm_seconds);
    };
    for (const CasePlan& stage : plan.stages) {
        SCOPED_TRACE(testing::Message() << request.shape.config.name << ", stage " << stage.shape.stage << ", " << request.shape.micro_steps << " micro-steps, buckets of "
                                        << request.shape.bucket_mb << " MB" << (request.shape.sync_every_micro_step ? ", all synchronised" : "") << ", "
                                        << request.flops_per_s << " FLOP/s");
        const CountedRun whole = count_run(stage.shape, table, stage.shape.micro_steps);
        EXPECT_EQ(stage.sent_bytes, whole.schedule.step_sent_bytes());
        EXPECT_EQ(stage.memory.total_bytes, whole.memory.total_bytes);
        const CollectiveAlgorithm usual = ranks <= request.ranks_per_node ? CollectiveAlgorithm::kRing : CollectiveAlgorithm::kHierarchical;
        expect_equal(stage.time, simulate_step(whole.schedule, table, whole.layout, costs_of(request), seconds_of(usual), stage.shape.overlap));
        if (stage.shape.stage != plan.chosen().shape.stage) continue;
        const auto row = std::find_if(plan.scaling.begin(), plan.scaling.end(), [&](const ScalingRow& r) { return r.ranks == ranks; });
        ASSERT_NE(row, plan.scaling.end());
        EXPECT_EQ(row->plan.sent_bytes, stage.sent_bytes);
        const CollectiveAlgorithm tree = CollectiveAlgorithm::kTree;
        expect_equal(row->times.at(static_cast<size_t>(tree)), simulate_step(whole.schedule, table, whole.layout, costs_of(request), seconds_of(tree), stage.shape.overlap));
    }
}

// Operations a second at which a step computes `share` times as long as its collectives take in the stage that sends most.
double speed_for(const PlanRequest& request, double share) {
    RunShape shape = request.shape;
    shape.stage = 3;
    const CountedRun run = count_run(shape, make_param_table(shape.config), 8);
    const double comm_seconds = collective_seconds(CollectiveAlgorithm::kRing, request.network(), shape.ranks, run.schedule.step_sent_bytes() / 8.0 / (shape.ranks - 1));
    return flops_per_token(shape.config, shape.seq_len) * shape.micro_batch * shape.seq_len / (share * comm_seconds);
}

TEST(Plan, ManyMicroStepsAreThoseOfTheWholeSchedule) {
    for (const ModelConfig& config : models()) {
        const bool is_small = config.channels == 24;
        for (const double bucket_mb : {0.0, is_small ? 0.025 : 25.0, 1000.0}) {
            for (const bool sync : {false, true}) {
                for (const int micro_steps : {9, 16, 33, 40}) {
                    PlanRequest request = request_of(config, micro_steps == 16 ? 16 : 4);
                    request.shape.bucket_mb = bucket_mb;
                    request.shape.sync_every_micro_step = sync;
                    request.shape.micro_steps = micro_steps;
                    // Neither waits for the other all the time: that is where a step could take long to repeat itself. Small models are quick, so they get more.
                    for (const double share : is_small ? std::vector<double>{0.1, 0.6, 0.9, 1, 1.1, 1.5, 10} : std::vector<double>{micro_steps == 33 ? 0.7 : 1.0}) {
                        request.flops_per_s = speed_for(request, share);
                        expect_whole_schedules(request);
                        if (HasFailure()) return;  // one case says enough
                    }
                }
            }
        }
    }
}

TEST(Plan, ManyMicroStepsWithoutOverlap) {
    for (const bool tied : {false, true}) {
        PlanRequest request = request_of(small(tied, 3), 4);
        request.shape.overlap = false;
        request.shape.micro_steps = 21;
        request.flops_per_s = speed_for(request, 1);
        expect_whole_schedules(request);
    }
}

// ---- which stage -------------------------------------------------------------------------------------------------------------------

// What plan.h promises, from the stages alone.
int stage_to_recommend(const Plan& plan) {
    double shortest = std::numeric_limits<double>::infinity();
    for (const CasePlan& c : plan.stages) shortest = c.fits ? std::min(shortest, c.time.seconds) : shortest;
    using Price = std::tuple<size_t, bool, size_t, int>;  // sent, not the stage asked for, memory, stage
    std::set<Price> prices;
    for (const CasePlan& c : plan.stages) {
        if (c.fits && c.time.seconds <= 1.001 * shortest) prices.insert({c.sent_bytes, c.shape.stage != plan.request.shape.stage, c.memory.total_bytes, c.shape.stage});
    }
    return prices.empty() ? -1 : std::get<3>(*prices.begin());
}

TEST(Plan, TheFastestStageThatFitsIsRecommended) {
    std::map<int, int> how_often;
    for (const ModelConfig& config : {preset_config("124M"), preset_config("qwen2.5-7B"), small(true, 3)}) {
        for (const int ranks : {1, 2, 16}) {
            for (const int micro_steps : {1, 4}) {
                for (const double flops : {1e13, 4e14, 2e15, 1e17}) {
                    for (const bool fp32_gradients : {false, true}) {
                        PlanRequest request = request_of(config, ranks);
                        request.shape.micro_steps = micro_steps;
                        request.shape.fp32_gradients = fp32_gradients;
                        request.shape.bucket_mb = fp32_gradients ? 0 : 200;
                        request.flops_per_s = flops;
                        std::set<size_t> sizes = {0};
                        for (const CasePlan& c : plan_of(request).stages) sizes.insert(c.memory.total_bytes);  // enough for this one exactly
                        for (const size_t size : sizes) {
                            request.device_bytes = size;
                            request.shape.stage = static_cast<int>(size % 4);
                            const Plan plan = plan_of(request);
                            SCOPED_TRACE(testing::Message() << config.name << ", " << ranks << " ranks, " << micro_steps << " micro-steps, " << flops << " FLOP/s, device of "
                                                            << size);
                            for (const CasePlan& c : plan.stages) EXPECT_EQ(c.fits, c.memory.total_bytes <= size);
                            EXPECT_EQ(plan.recommended, stage_to_recommend(plan));
                            EXPECT_EQ(plan.recommended < 0, size == 0 || size < *std::next(sizes.begin()));
                            ++how_often[plan.recommended];
                        }
                    }
                }
            }
        }
    }
    for (int stage = -1; stage <= 3; ++stage) EXPECT_GT(how_often[stage], 0) << stage;  // all answers were seen
}

TEST(Plan, OneRankKeepsTheStageThatWasAskedForWhereNothingDiffers) {
    for (const int stage : {0, 1}) {
        PlanRequest request = request_of(small(false, 3), 1);
        request.shape.stage = stage;
        const Plan plan = plan_of(request);
        EXPECT_EQ(plan.recommended, stage);
        for (const CasePlan& c : plan.stages) EXPECT_EQ(c.sent_bytes, 0u);
        EXPECT_EQ(plan.stages[0].memory.total_bytes, plan.stages[1].memory.total_bytes);
        EXPECT_EQ(plan.stages[0].time.comm_seconds, 0);
    }
}

TEST(Plan, TheReserveCounts) {
    PlanRequest request = request_of(small(false, 3), 2);
    const size_t needed = plan_of(request).asked().memory.total_bytes;
    request.reserve_bytes = 12345;
    const auto fits = [&](size_t device_bytes) {
        request.device_bytes = device_bytes;
        return plan_memory(request, count_run).fits;
    };
    EXPECT_TRUE(fits(needed + 12345));
    EXPECT_FALSE(fits(needed + 12344));
    EXPECT_FALSE(fits(12344));  // less than the reserve
    request.reserve_bytes = 0;
    EXPECT_TRUE(fits(needed));
}

// ---- advice ------------------------------------------------------------------------------------------------------------------------

// The options of an advice, applied to the shape that was asked for as parse_options() and plan_batch() would.
RunShape apply(RunShape shape, const std::string& options) {
    std::istringstream words(options);
    std::string name, value;
    double total_batch = shape.step_tokens();
    std::set<std::string> seen;
    while (words >> name >> value) {
        EXPECT_TRUE(seen.insert(name).second) << name << " twice in " << options;
        if (name == "-np") shape.ranks = std::stoi(value);
        else if (name == "--zero-stage") shape.stage = std::stoi(value);
        else if (name == "--recompute") shape.recompute = value;
        else if (name == "--lmhead-chunks") shape.lmhead_chunks = std::stoi(value);
        else if (name == "--bucket-mb") shape.bucket_mb = std::stod(value);
        else if (name == "--micro-batch") shape.micro_batch = std::stoi(value);
        else if (name == "--total-batch") total_batch = std::stod(value);
        else ADD_FAILURE() << "no option: " << name << " in " << options;
    }
    const double micro_steps = total_batch / shape.ranks / shape.micro_batch / shape.seq_len;
    EXPECT_EQ(micro_steps, std::floor(micro_steps)) << options;
    shape.micro_steps = static_cast<int>(micro_steps);
    EXPECT_EQ(static_cast<long long>(shape.micro_batch) * shape.seq_len % shape.lmhead_chunks, 0) << options;
    return shape;
}

// How many settings differ, other than those that follow from another.
int levers_between(const RunShape& a, const RunShape& b) {
    return (a.ranks != b.ranks) + (a.micro_batch != b.micro_batch) + (a.stage != b.stage) + (a.bucket_mb != b.bucket_mb) + (a.recompute != b.recompute) +
           (a.lmhead_chunks != b.lmhead_chunks);
}

// Everything the program could be told on as many ranks, at least as much of each lever as was asked for. At most 16 chunks.
std::vector<RunShape> everything_on_as_many_ranks(const RunShape& asked) {
    std::vector<RunShape> all;
    for (int stage = 0; stage <= 3; ++stage) {
        for (size_t level = level_of(asked.recompute); level < kRecompute.size(); ++level) {
            for (int micro_batch = 1; micro_batch <= asked.micro_batch; ++micro_batch) {
                for (int chunks = asked.lmhead_chunks; chunks <= std::max(16, asked.lmhead_chunks); chunks *= 2) {
                    for (const double bucket_mb : {asked.bucket_mb, 0.0}) {
                        RunShape shape = asked;
                        if (asked.micro_batch % micro_batch != 0 || micro_batch * asked.seq_len % chunks != 0) continue;
                        shape.stage = stage;
                        shape.recompute = kRecompute[level];
                        shape.micro_batch = micro_batch;
                        shape.micro_steps = asked.micro_steps * (asked.micro_batch / micro_batch);
                        shape.lmhead_chunks = chunks;
                        shape.bucket_mb = bucket_mb;
                        all.push_back(shape);
                    }
                }
            }
        }
    }
    return all;
}

// By the request's network, on at most 8 micro-steps.
double tokens_per_s(const PlanRequest& request, const RunShape& shape) {
    const ParamTable table = make_param_table(shape.config);
    const CountedRun run = count_run(shape, table, shape.micro_steps);
    PlanRequest changed = request;
    changed.shape = shape;
    const CollectiveAlgorithm usual = shape.ranks <= request.ranks_per_node ? CollectiveAlgorithm::kRing : CollectiveAlgorithm::kHierarchical;
    const auto seconds = [&](size_t bytes) { return collective_seconds(usual, request.network(), shape.ranks, static_cast<double>(bytes) / (shape.ranks - 1)); };
    return shape.step_tokens() / simulate_step(run.schedule, table, run.layout, costs_of(changed), seconds, shape.overlap).seconds;
}

// What holds of every plan's advice.
void expect_good_advice(const Plan& plan) {
    const RunShape& asked = plan.request.shape;
    const size_t usable = plan.request.device_bytes - plan.request.reserve_bytes;
    if (plan.asked().fits) {
        EXPECT_TRUE(plan.advice.empty());
        EXPECT_EQ(plan.why_not, "");
        return;
    }
    std::set<std::string> texts;
    bool on_as_many_ranks = false;
    int fewest_ranks = std::numeric_limits<int>::max();
    double best_single = 0, best = 0;
    for (const Advice& advice : plan.advice) {
        const RunShape& shape = advice.result.shape;
        SCOPED_TRACE(advice.options);
        EXPECT_TRUE(texts.insert(advice.options).second) << "twice";
        EXPECT_EQ(settings_of(apply(asked, advice.options)), settings_of(shape));
        EXPECT_GT(levers_between(asked, shape), 0);
        EXPECT_TRUE(advice.result.fits);
        EXPECT_EQ(advice.result.memory.total_bytes, total_bytes(shape));
        EXPECT_LE(total_bytes(shape), usable);
        EXPECT_DOUBLE_EQ(shape.rank_tokens(), asked.rank_tokens());  // the same work on each rank
        if (shape.ranks == asked.ranks) {
            on_as_many_ranks = true;
            best = std::max(best, advice.result.tokens_per_s());
            if (levers_between(asked, shape) == 1) best_single = std::max(best_single, advice.result.tokens_per_s());
        } else {
            RunShape fewer = shape;
            --fewer.ranks;
            const bool minimal = total_bytes(fewer) > usable;
            EXPECT_TRUE(minimal || &advice == &plan.advice[plan.best_advice]) << "fits on one rank fewer";
            if (minimal) fewest_ranks = std::min(fewest_ranks, shape.ranks);
        }
    }
    // Recommended: on as many ranks the fastest, else as many as one can rent from the fewest on.
    ASSERT_EQ(plan.best_advice < 0, plan.advice.empty());
    if (plan.best_advice >= 0) {
        const RunShape& shape = plan.advice[plan.best_advice].result.shape;
        EXPECT_EQ(shape.ranks == asked.ranks, on_as_many_ranks);
        if (on_as_many_ranks && plan.recommended < 0) {
            EXPECT_GE(plan.advice[plan.best_advice].result.tokens_per_s() * 1.0021, best);  // what differs by 0.1 % is equal, at most twice over
        }
        const auto is_rentable = [&](int ranks) { return ranks % plan.request.ranks_per_node == 0 || (ranks < plan.request.ranks_per_node && (ranks & (ranks - 1)) == 0); };
        int rented = fewest_ranks;
        while (!on_as_many_ranks && !is_rentable(rented)) ++rented;
        EXPECT_TRUE(on_as_many_ranks || shape.ranks == rented) << shape.ranks << " ranks, the fewest are " << fewest_ranks;
    }
    if (plan.recommended >= 0) {
        EXPECT_EQ(plan.advice.at(0).options, "--zero-stage " + std::to_string(plan.recommended));
    }
    const std::vector<RunShape> all = everything_on_as_many_ranks(asked);
    // A combination is no slower than one lever, or than a stage and a level of recomputation that are enough.
    if (on_as_many_ranks) {
        EXPECT_GE(best * 1.0011, best_single);
        for (const RunShape& shape : all) {
            if (shape.micro_batch != asked.micro_batch || shape.lmhead_chunks != asked.lmhead_chunks || shape.bucket_mb != asked.bucket_mb || total_bytes(shape) > usable) continue;
            EXPECT_GE(best * 1.0021, tokens_per_s(plan.request, shape)) << "stage " << shape.stage << ", recompute " << shape.recompute;
        }
    }
    EXPECT_EQ(on_as_many_ranks, std::any_of(all.begin(), all.end(), [&](const RunShape& shape) { return total_bytes(shape) <= usable; }));
    EXPECT_EQ(plan.why_not.empty(), on_as_many_ranks) << plan.why_not;
}

TEST(Plan, AdviceFitsAndSaysWhatItChanges) {
    size_t advices = 0, combinations = 0, more_ranks = 0, hopeless = 0;
    for (const ModelConfig& config : {preset_config("tiny"), preset_config("0.5B"), small(true, 6, 600), small(false, 2)}) {
        for (const auto& [ranks, micro_batch, micro_steps, chunks, sync] : {std::tuple(2, 8, 1, 1, false), {3, 6, 4, 2, false}, {1, 4, 2, 1, true}, {8, 12, 1, 3, false}}) {
            PlanRequest request = request_of(config, ranks);
            request.shape.micro_batch = micro_batch;
            request.shape.seq_len = 48;
            request.shape.micro_steps = micro_steps;
            request.shape.lmhead_chunks = chunks;
            request.shape.sync_every_micro_step = sync;
            request.shape.bucket_mb = config.channels == 24 ? 0.025 : 25;
            request.shape.recompute = micro_batch == 6 ? "norm" : "none";
            request.reserve_bytes = 777;
            // Sizes at which something starts to fit.
            std::set<size_t> needs;
            for (const RunShape& shape : everything_on_as_many_ranks(request.shape)) needs.insert(total_bytes(shape) + request.reserve_bytes);
            std::vector<size_t> sizes(needs.begin(), needs.end());
            sizes.insert(sizes.begin(), {needs.empty() ? 0 : *needs.begin() - 1, *needs.begin() / 2, *needs.begin() / 8});
            for (size_t i = 0; i < sizes.size(); i += i < 6 ? 1 : sizes.size() / 7 + 1) {
                for (int stage = static_cast<int>(i % 2); stage <= 3; stage += 2) {
                    request.device_bytes = sizes[i];
                    request.shape.stage = stage;
                    SCOPED_TRACE(testing::Message() << config.name << ", stage " << stage << ", " << ranks << " ranks, micro-batch " << micro_batch << ", device of " << sizes[i]);
                    const Plan plan = plan_of(request);
                    expect_good_advice(plan);
                    if (HasFailure()) {
                        ADD_FAILURE() << plan_text(plan);
                        return;  // one case says enough
                    }
                    advices += plan.advice.size();
                    hopeless += !plan.asked().fits && plan.advice.empty();
                    for (const Advice& advice : plan.advice) {
                        combinations += levers_between(request.shape, advice.result.shape) > 2;
                        more_ranks += advice.result.shape.ranks != ranks;
                    }
                }
            }
        }
    }
    EXPECT_GT(advices, 500u);
    EXPECT_GT(combinations, 50u);
    EXPECT_GT(more_ranks, 50u);
    EXPECT_GT(hopeless, 10u);
}

std::vector<std::string> options_of(const Plan& plan) {
    std::vector<std::string> options;
    for (const Advice& advice : plan.advice) options.push_back(advice.options);
    return options;
}

bool holds(const std::vector<std::string>& all, const std::string& one) { return std::find(all.begin(), all.end(), one) != all.end(); }

TEST(Plan, AnotherStageThatFitsIsTheFirstAdvice) {
    PlanRequest request = request_of(preset_config("124M"), 8);
    request.shape.stage = 0;
    request.device_bytes = total_bytes(request.shape) - 1;
    const Plan plan = plan_of(request);
    EXPECT_FALSE(plan.asked().fits);
    ASSERT_GT(plan.recommended, 0);
    expect_good_advice(plan);
    EXPECT_EQ(plan.chosen().shape.stage, plan.recommended);
    // Every single lever of stage 0 is enough for one byte too.
    for (const char* option : {"--recompute norm", "--lmhead-chunks 2", "--micro-batch 2 --total-batch 2048"}) EXPECT_TRUE(holds(options_of(plan), option)) << option;
    EXPECT_EQ(plan.why_not, "");
}

TEST(Plan, SingleLeversStopAtTheFirstThatIsEnough) {
    PlanRequest request = request_of(preset_config("124M"), 1);  // one rank: no stage helps
    request.shape.micro_steps = 3;
    const auto advice_with = [&](auto&& change) {
        RunShape enough = request.shape;
        change(enough);
        request.device_bytes = total_bytes(enough);
        const Plan plan = plan_of(request);
        EXPECT_EQ(plan.recommended, -1);
        expect_good_advice(plan);
        return options_of(plan);
    };
    EXPECT_TRUE(holds(advice_with([](RunShape& s) { s.recompute = "norm"; }), "--recompute norm"));
    EXPECT_TRUE(holds(advice_with([](RunShape& s) { s.recompute = "ffn"; }), "--recompute ffn"));
    EXPECT_TRUE(holds(advice_with([](RunShape& s) { s.recompute = "block"; }), "--recompute block"));
    const std::vector<std::string> less = advice_with([](RunShape& s) { s.micro_batch = 1, s.micro_steps = 12; });
    EXPECT_TRUE(holds(less, "--micro-batch 1 --total-batch 768"));
    EXPECT_FALSE(holds(less, "--micro-batch 2 --total-batch 768"));
    EXPECT_TRUE(holds(advice_with([](RunShape& s) { s.lmhead_chunks = 2; }), "--lmhead-chunks 2"));
    const std::vector<std::string> chunks = advice_with([](RunShape& s) { s.lmhead_chunks = 8; });
    EXPECT_TRUE(holds(chunks, "--lmhead-chunks 8"));
    EXPECT_FALSE(holds(chunks, "--lmhead-chunks 4"));
    // Where none alone is enough: the largest micro-batch with which several are.
    const std::vector<std::string> several = advice_with([](RunShape& s) { s.recompute = "block", s.micro_batch = 1, s.micro_steps = 12; });
    EXPECT_TRUE(holds(several, "--recompute block --lmhead-chunks 8 --micro-batch 2 --total-batch 768")) << testing::PrintToString(several);
    EXPECT_EQ(several.size(), 2u) << testing::PrintToString(several);  // and more ranks
}

TEST(Plan, MoreRanksAreTheFewestAndEachKeepsItsWork) {
    PlanRequest request = request_of(preset_config("1.5B"), 2);
    request.shape.stage = 3;
    request.shape.micro_steps = 3;
    RunShape enough = request.shape;
    enough.ranks = 13;
    request.device_bytes = total_bytes(enough);
    const Plan plan = plan_of(request);
    expect_good_advice(plan);
    EXPECT_TRUE(holds(options_of(plan), "-np 13 --total-batch " + std::to_string(13 * 4 * 64 * 3))) << testing::PrintToString(options_of(plan));
    for (const Advice& advice : plan.advice) EXPECT_LE(advice.result.shape.ranks, 16);  // whole nodes of 8
}

TEST(Plan, NoStageFitsAndMoreRanksWould) {
    PlanRequest request = request_of(preset_config("qwen2.5-7B"), 2);
    request.device_bytes = 40'000'000'000;
    const Plan plan = plan_of(request);
    EXPECT_EQ(plan.recommended, -1);
    expect_good_advice(plan);
    // 16 bytes of 7.6 billion parameters on two ranks.
    for (const char* word : {"60.92 GB of state", "7.62B parameters x 16 bytes over 2 ranks", "more than the device's 40.00 GB"}) {
        EXPECT_NE(plan.why_not.find(word), std::string::npos) << word << " is not in: " << plan.why_not;
    }
    EXPECT_EQ(plan.why_not.find("More ranks do not help"), std::string::npos);
    ASSERT_EQ(plan.advice.size(), 2u) << testing::PrintToString(options_of(plan));  // stage 3 alone on many ranks, and everything on fewer
    EXPECT_GE(plan.advice[0].result.shape.ranks, plan.advice[1].result.shape.ranks);
    EXPECT_EQ(plan.advice[1].result.shape.ranks, 4);
    request.shape.fp32_gradients = true;
    EXPECT_NE(plan_of(request).why_not.find("x 18 bytes over 2 ranks"), std::string::npos);
}

TEST(Plan, OneLayerThatDoesNotFitNeedsTensorParallelism) {
    ModelConfig config = preset_config("124M");
    config.num_layers = 2;
    config.channels = 16384;
    config.ffn_dim = 65536;
    config.vocab_size = 256;
    PlanRequest request = request_of(config, 8);
    request.device_bytes = 4'000'000'000;
    const Plan plan = plan_of(request);
    expect_good_advice(plan);
    EXPECT_TRUE(plan.advice.empty()) << testing::PrintToString(options_of(plan));
    for (const char* word : {"More ranks do not help", "One layer alone does not fit", "tensor parallelism"}) EXPECT_NE(plan.why_not.find(word), std::string::npos) << plan.why_not;
    EXPECT_EQ(plan.why_not.find("--seq-len"), std::string::npos);
}

TEST(Plan, OneSequenceThatDoesNotFitIsTooLong) {
    ModelConfig config = small(false, 6);
    config.max_seq_len = 1 << 20;
    PlanRequest request = request_of(config, 8);
    request.shape.micro_batch = 1;
    request.shape.seq_len = 1 << 20;
    request.device_bytes = 500'000'000;
    const Plan plan = plan_of(request);
    expect_good_advice(plan);
    EXPECT_TRUE(plan.advice.empty()) << testing::PrintToString(options_of(plan));
    for (const char* word : {"More ranks do not help", "one sequence of 1048576 tokens", "A shorter --seq-len needs less", "context or tensor parallelism"}) {
        EXPECT_NE(plan.why_not.find(word), std::string::npos) << plan.why_not;
    }
    EXPECT_EQ(plan.why_not.find("One layer alone"), std::string::npos);
}

TEST(Plan, WithEveryLeverPulledThereIsNothingToName) {
    PlanRequest request = request_of(small(false, 3), 2);
    RunShape& shape = request.shape;
    shape.stage = 3, shape.recompute = "block", shape.micro_batch = 1, shape.bucket_mb = 0, shape.lmhead_chunks = 16;
    request.device_bytes = 2000;
    const Plan plan = plan_of(request);
    expect_good_advice(plan);
    EXPECT_EQ(plan.why_not.find("()"), std::string::npos) << plan.why_not;
    EXPECT_NE(plan.why_not.find("(as it is)"), std::string::npos) << plan.why_not;
}

// ---- more ranks --------------------------------------------------------------------------------------------------------------------

TEST(Plan, ScalingHoldsTheRanksAskedForAndAHundredThousand) {
    for (const int ranks : {1, 7, 1024, 100000, 1048576}) {
        PlanRequest request = request_of(preset_config("0.5B"), ranks);
        request.shape.micro_steps = 2;
        const Plan plan = plan_of(request);
        std::vector<int> seen;
        for (const ScalingRow& row : plan.scaling) {
            seen.push_back(row.ranks);
            EXPECT_EQ(row.plan.shape.ranks, row.ranks);
            EXPECT_EQ(row.plan.shape.stage, plan.chosen().shape.stage);
            EXPECT_DOUBLE_EQ(row.plan.shape.step_tokens(), plan.request.shape.rank_tokens() * row.ranks);
            EXPECT_EQ(row.plan.memory.total_bytes, total_bytes(row.plan.shape));
            ASSERT_EQ(row.times.size(), 4u);
            const StepTime& usual = row.times[static_cast<size_t>(row.ranks <= 8 ? CollectiveAlgorithm::kRing : CollectiveAlgorithm::kHierarchical)];
            EXPECT_EQ(row.plan.time.seconds, usual.seconds);
        }
        EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()) && std::adjacent_find(seen.begin(), seen.end()) == seen.end());
        EXPECT_EQ(seen.front(), 1);
        for (const int rank : {ranks, 100000}) EXPECT_EQ(std::count(seen.begin(), seen.end(), rank), 1) << rank;
        const auto asked = std::find_if(plan.scaling.begin(), plan.scaling.end(), [&](const ScalingRow& row) { return row.ranks == ranks; });
        EXPECT_EQ(asked->plan.time.seconds, plan.chosen().time.seconds);
        EXPECT_EQ(asked->plan.sent_bytes, plan.chosen().sent_bytes);
    }
}

TEST(Plan, EfficiencyFallsAndCollectivesRank) {
    for (const char* name : {"124M", "4B"}) {
        for (const int stage : {1, 3}) {
            PlanRequest request = request_of(preset_config(name), 64);
            request.shape.stage = stage;
            const Plan plan = plan_of(request);
            const ScalingRow* before = nullptr;
            for (const ScalingRow& row : plan.scaling) {
                SCOPED_TRACE(testing::Message() << name << " on " << row.ranks << " ranks");
                const auto seconds = [&](CollectiveAlgorithm algorithm) { return row.times[static_cast<size_t>(algorithm)].seconds; };
                if (before) {
                    EXPECT_LT(row.plan.tokens_per_s() / row.ranks, before->plan.tokens_per_s() / before->ranks * (1 + 1e-9));
                    EXPECT_GT(row.plan.tokens_per_s(), before->plan.tokens_per_s());
                }
                EXPECT_LE(seconds(CollectiveAlgorithm::kTree), seconds(CollectiveAlgorithm::kRing));
                EXPECT_LE(seconds(CollectiveAlgorithm::kRing), seconds(CollectiveAlgorithm::kParameterServer) * (1 + 1e-9));
                if (row.ranks > 8) {
                    EXPECT_LT(seconds(CollectiveAlgorithm::kHierarchical), seconds(CollectiveAlgorithm::kRing));
                }
                before = &row;
            }
        }
    }
}

TEST(Plan, ASingleLinkJoinsRanksAndNodes) {
    PlanRequest request = request_of(preset_config("124M"), 16);
    request.links = {{"ethernet", 3e9, 20e-6}};
    const Plan plan = plan_of(request);
    PlanRequest twice = request;
    twice.links.push_back(twice.links[0]);
    const Plan same = plan_of(twice);
    for (size_t i = 0; i < plan.scaling.size(); ++i) EXPECT_EQ(plan.scaling[i].plan.time.seconds, same.scaling[i].plan.time.seconds);
    EXPECT_GT(plan.chosen().time.comm_seconds, plan.chosen().sent_bytes / 3e9);
}

// ---- limits ------------------------------------------------------------------------------------------------------------------------

TEST(Plan, WhatSixtyFourBitsDoNotHoldIsAnError) {
    ModelConfig config = small(false, 512);
    config.channels = 262144;
    config.num_heads = config.num_kv_heads = 1024;
    config.head_dim = 256;
    config.ffn_dim = 1048576;
    config.vocab_size = 1 << 24;
    PlanRequest request = request_of(config, 2);
    request.shape.micro_batch = request.shape.seq_len = 1;
    request.shape.bucket_mb = 1000;
    request.shape.micro_steps = 1 << 30;
    expect_error([&] { plan_of(request); }, {"64 bits", "fewer micro-steps"});
    // With fewer of them it is large, and right: what is sent grows by the same for each, up to the largest number.
    RunShape shape = request.shape;
    shape.stage = 2;
    const ParamTable table = make_param_table(config);
    const size_t two = count_run(shape, table, 2).schedule.step_sent_bytes(), three = count_run(shape, table, 3).schedule.step_sent_bytes();
    request.shape.micro_steps = static_cast<int>((std::numeric_limits<size_t>::max() - two) / (three - two) / 3);  // stage 3 sends up to three times as much
    const Plan plan = plan_of(request);
    EXPECT_EQ(plan.stages[2].sent_bytes, two + (three - two) * (request.shape.micro_steps - 2));
    EXPECT_GT(plan.stages[2].sent_bytes, size_t{1} << 61);
}

// A bill near 2^64 that the reserve would push over it: nothing wraps around into a small number.
TEST(Plan, AnEnormousBillDoesNotFit) {
    PlanRequest request = request_of(small(false, 3), 2);
    request.device_bytes = 80'000'000'000;
    request.reserve_bytes = 2'000'000'000;
    const CountRun enormous = [](const RunShape& shape, const ParamTable& table, int micro_steps) {
        CountedRun run = count_run(shape, table, micro_steps);
        run.memory.add("other", std::numeric_limits<size_t>::max() - run.memory.total_bytes - 1000);
        return run;
    };
    EXPECT_FALSE(plan_memory(request, enormous).fits);
    const Plan plan = make_plan(request, enormous);
    EXPECT_EQ(plan.recommended, -1);
    EXPECT_TRUE(plan.advice.empty());
    EXPECT_NE(plan.why_not.find("More ranks do not help"), std::string::npos);
}

TEST(Plan, ACheckpointHoldsWeightsMasterWeightsAndMoments) {
    PlanRequest request = request_of(preset_config("124M"), 4);
    const Plan plan = plan_of(request);
    EXPECT_EQ(plan.checkpoint_bytes, 14.0 * count_parameters(request.shape.config));
    request.element_bytes = 4;
    EXPECT_EQ(plan_of(request).checkpoint_bytes, 16.0 * count_parameters(request.shape.config));
}

TEST(Plan, ANameThatIsNoTextStillMakesJson) {
    PlanRequest request = request_of(small(false, 3), 2);
    request.links[0].name = request.shape.config.name = "\xff";
    EXPECT_EQ(nlohmann::json::parse(plan_json(plan_of(request)))["stages"].size(), 4u);
}

}  // namespace
