#include "llmc/plan.h"

#include <algorithm>
#include <array>
#include <limits>
#include <tuple>

#include "llmc/checkpoint_tensors.h"
#include "llmc/error.h"
#include "llmc/units.h"

namespace {

constexpr int kMostRanks = 1 << 20;
// A schedule repeats itself in the middle: past this many micro-steps each adds what the last of them added. A test holds that against whole schedules.
constexpr int kScheduledMicroSteps = 8;
constexpr std::array<const char*, 4> kRecompute = {"none", "norm", "ffn", "block"};
constexpr std::array<CollectiveAlgorithm, 4> kAlgorithms = {CollectiveAlgorithm::kRing, CollectiveAlgorithm::kTree, CollectiveAlgorithm::kHierarchical,
                                                            CollectiveAlgorithm::kParameterServer};

int recompute_level(const std::string& name) { return static_cast<int>(std::find(kRecompute.begin(), kRecompute.end(), name) - kRecompute.begin()); }

size_t extrapolate(size_t before_last, size_t last, size_t more) {
    size_t added = 0, sum = 0;
    CHECK(!__builtin_mul_overflow(last - before_last, more, &added) && !__builtin_add_overflow(last, added, &sum),
          "the bytes a rank sends in a step are more than 64 bits hold; use a smaller model or fewer micro-steps");
    return sum;
}

double extrapolate(double before_last, double last, size_t more) { return last + (last - before_last) * static_cast<double>(more); }

// Speeds that differ by less than this differ by nothing that the model of the network knows.
constexpr double kEqual = 1e-3;

// Of two on as many ranks: faster, or as fast and sends less.
bool is_better(const CasePlan& a, const CasePlan& b) {
    const double ratio = a.tokens_per_s() / b.tokens_per_s();
    return ratio > 1 + kEqual || (ratio > 1 / (1 + kEqual) && a.sent_bytes < b.sent_bytes);
}

class Planner {
public:
    Planner(const PlanRequest& request, const CountRun& count_run) : request_(request), count_run_(count_run), table_(make_param_table(request.shape.config)) {}

    const ParamTable& table() const { return table_; }

    CasePlan memory_of(const RunShape& shape) const {
        CasePlan plan;
        plan.shape = shape;
        plan.memory = count_run_(shape, table_, std::min(shape.micro_steps, 2)).memory;
        plan.fits = request_.reserve_bytes <= request_.device_bytes && plan.memory.total_bytes <= request_.device_bytes - request_.reserve_bytes;
        return plan;
    }

    CollectiveAlgorithm usual_algorithm(int ranks) const { return ranks <= request_.ranks_per_node ? CollectiveAlgorithm::kRing : CollectiveAlgorithm::kHierarchical; }

    CasePlan case_of(const RunShape& shape) const {
        CasePlan plan = memory_of(shape);
        add_times(plan, {usual_algorithm(shape.ranks)});
        return plan;
    }

    // Adds bytes sent, and the time with the first algorithm; returns the time with each.
    std::vector<StepTime> add_times(CasePlan& plan, const std::vector<CollectiveAlgorithm>& algorithms) const {
        const RunShape& shape = plan.shape;
        const ComputeCosts costs = compute_costs(shape.config, shape.seq_len, static_cast<double>(shape.micro_batch) * shape.seq_len, request_.flops_per_s, shape.recompute);
        const auto times_of = [&](const CountedRun& run) {
            std::vector<StepTime> times;
            for (const CollectiveAlgorithm algorithm : algorithms) {
                times.push_back(simulate_step(run.schedule, table_, run.layout, costs, [&](size_t sent_bytes) {
                    return collective_seconds(algorithm, request_.network(), shape.ranks, static_cast<double>(sent_bytes) / std::max(1, shape.ranks - 1));
                }, shape.overlap));
            }
            return times;
        };
        const int scheduled = std::min(shape.micro_steps, kScheduledMicroSteps);
        const CountedRun run = count_run_(shape, table_, scheduled);
        plan.sent_bytes = run.schedule.step_sent_bytes();
        std::vector<StepTime> times = times_of(run);
        if (scheduled < shape.micro_steps) {
            const size_t more = shape.micro_steps - scheduled;
            const CountedRun shorter = count_run_(shape, table_, scheduled - 1);
            const std::vector<StepTime> shorter_times = times_of(shorter);
            plan.sent_bytes = extrapolate(shorter.schedule.step_sent_bytes(), plan.sent_bytes, more);
            for (size_t i = 0; i < times.size(); ++i) {
                times[i].seconds = extrapolate(shorter_times[i].seconds, times[i].seconds, more);
                times[i].compute_seconds = extrapolate(shorter_times[i].compute_seconds, times[i].compute_seconds, more);
                times[i].comm_seconds = extrapolate(shorter_times[i].comm_seconds, times[i].comm_seconds, more);
            }
        }
        plan.time = times[0];
        return times;
    }

    // ---- what would make it fit --------------------------------------------------------------------------------------------------------
    // The first of `shapes` that fits; those that cannot be are left out by whoever lists them.
    bool first_that_fits(const std::vector<RunShape>& shapes, RunShape* found) const {
        for (const RunShape& shape : shapes) {
            if (!memory_of(shape).fits) continue;
            *found = shape;
            return true;
        }
        return false;
    }

    std::vector<RunShape> with_more_recompute(const RunShape& shape) const {
        std::vector<RunShape> shapes;
        for (size_t level = recompute_level(shape.recompute) + 1; level < kRecompute.size(); ++level) {
            shapes.push_back(shape);
            shapes.back().recompute = kRecompute[level];
        }
        return shapes;
    }

    // The same tokens a step, in more and smaller micro-batches.
    std::vector<RunShape> with_smaller_micro_batch(const RunShape& shape) const {
        std::vector<RunShape> shapes;
        for (int micro_batch = shape.micro_batch - 1; micro_batch >= 1; --micro_batch) {
            const long long rows = static_cast<long long>(micro_batch) * shape.seq_len, micro_steps = static_cast<long long>(shape.micro_steps) * (shape.micro_batch / micro_batch);
            if (shape.micro_batch % micro_batch != 0 || rows % shape.lmhead_chunks != 0 || micro_steps > 1 << 30) continue;
            shapes.push_back(shape);
            shapes.back().micro_batch = micro_batch;
            shapes.back().micro_steps = static_cast<int>(micro_steps);
        }
        return shapes;
    }

    std::vector<RunShape> with_more_chunks(const RunShape& shape) const {
        const long long rows = static_cast<long long>(shape.micro_batch) * shape.seq_len;
        std::vector<RunShape> shapes;
        for (long long chunks = 2LL * shape.lmhead_chunks; chunks <= 16 && rows % chunks == 0; chunks *= 2) {
            shapes.push_back(shape);
            shapes.back().lmhead_chunks = static_cast<int>(chunks);
        }
        return shapes;
    }

    // The fewest ranks, each with the same work, on which `shape` fits.
    bool enough_ranks(RunShape shape, RunShape* found) const {
        const auto fits_on = [&](int ranks) {
            shape.ranks = ranks;
            return memory_of(shape).fits;
        };
        int below = shape.ranks, above = shape.ranks;
        do {
            if (above >= kMostRanks) return false;
            below = above;
            above = std::min(2 * above, kMostRanks);
        } while (!fits_on(above));
        while (above - below > 1) {
            const int middle = below + (above - below) / 2;
            (fits_on(middle) ? above : below) = middle;
        }
        shape.ranks = above;
        *found = shape;
        return true;
    }

    // Every lever pulled that makes it smaller.
    RunShape smallest(RunShape shape) const {
        shape.stage = 3;
        shape.recompute = "block";
        RunShape layer_by_layer = shape;
        layer_by_layer.bucket_mb = 0;
        if (memory_of(layer_by_layer).memory.total_bytes < memory_of(shape).memory.total_bytes) shape = layer_by_layer;
        const std::vector<RunShape> smaller = with_smaller_micro_batch(shape);
        if (!smaller.empty()) shape = smaller.back();
        const std::vector<RunShape> chunked = with_more_chunks(shape);
        // Chunks cost a staging buffer, so more of them are not always less.
        for (const RunShape& chunks : chunked) {
            if (memory_of(chunks).memory.total_bytes < memory_of(shape).memory.total_bytes) shape = chunks;
        }
        return shape;
    }

    // Of each stage and level of recomputation the least change that fits; of these the best.
    bool fastest_combination(const RunShape& asked, CasePlan* best) const {
        bool found = false;
        for (int turn = 0; turn <= 3; ++turn) {
            const int stage = (asked.stage + turn) % 4;  // the stage asked for first: it stays where another is no faster
            for (size_t level = recompute_level(asked.recompute); level < kRecompute.size(); ++level) {
                RunShape shape = asked;
                shape.stage = stage;
                shape.recompute = kRecompute[level];
                std::vector<RunShape> tries = {shape};
                for (const RunShape& smaller : with_smaller_micro_batch(shape)) tries.push_back(smaller);
                std::vector<RunShape> all;
                for (RunShape try_shape : tries) {
                    for (const double bucket_mb : {shape.bucket_mb, 0.0}) {  // the least there is must be among them: it decides whether anything fits
                        try_shape.bucket_mb = bucket_mb;
                        all.push_back(try_shape);
                        for (const RunShape& chunked : with_more_chunks(try_shape)) all.push_back(chunked);
                        if (bucket_mb == 0 || (stage < 2 && !shape.sync_every_micro_step)) break;  // no buffer has a bucket's size
                    }
                }
                if (!first_that_fits(all, &shape)) continue;
                const CasePlan plan = case_of(shape);
                if (found && !is_better(plan, *best)) continue;
                *best = plan;
                found = true;
            }
        }
        return found;
    }

private:
    const PlanRequest& request_;
    const CountRun& count_run_;
    const ParamTable table_;
};

// Options that lead from one shape to the other, but for the tokens of a step.
std::string options_between(const RunShape& from, const RunShape& to) {
    std::string text;
    const auto add = [&](const std::string& option) { text += (text.empty() ? "" : " ") + option; };
    if (to.ranks != from.ranks) add(format("-np %d", to.ranks));
    if (to.stage != from.stage) add(format("--zero-stage %d", to.stage));
    if (to.recompute != from.recompute) add("--recompute " + to.recompute);
    if (to.lmhead_chunks != from.lmhead_chunks) add(format("--lmhead-chunks %d", to.lmhead_chunks));
    if (to.bucket_mb != from.bucket_mb) add(format("--bucket-mb %g", to.bucket_mb));
    if (to.micro_batch != from.micro_batch) add(format("--micro-batch %d", to.micro_batch));
    return text;
}

// As many devices as one can rent who needs so many: a part of a node, or whole nodes.
int rentable(int ranks, int ranks_per_node) {
    int part = 1;
    while (part < ranks) part *= 2;
    return part < ranks_per_node ? part : (ranks + ranks_per_node - 1) / ranks_per_node * ranks_per_node;
}

void add_advice(Plan& plan, const Planner& planner) {
    const RunShape& asked = plan.request.shape;
    // Returns its number.
    const auto add = [&](const RunShape& shape) -> int {
        std::string options = options_between(asked, shape);
        // With other ranks or micro-batches as many micro-steps need another total, or one where none was given.
        if (shape.ranks != asked.ranks || shape.micro_batch != asked.micro_batch) options += format(" --total-batch %.0f", shape.step_tokens());
        for (size_t i = 0; i < plan.advice.size(); ++i) {
            if (plan.advice[i].options == options) return static_cast<int>(i);
        }
        plan.advice.push_back({options, planner.case_of(shape)});
        return static_cast<int>(plan.advice.size()) - 1;
    };
    if (plan.recommended >= 0) plan.best_advice = add(plan.stages[plan.recommended].shape);
    // One lever at a time, at the stage asked for; where no stage fits as it is, at the first one that a single lever is enough for.
    using Lever = std::vector<RunShape> (Planner::*)(const RunShape&) const;
    RunShape found;
    for (const Lever lever : {&Planner::with_more_recompute, &Planner::with_more_chunks, &Planner::with_smaller_micro_batch}) {
        for (int stage = asked.stage; stage <= (plan.recommended >= 0 ? asked.stage : 3); ++stage) {
            if (!planner.first_that_fits((planner.*lever)(plan.stages[stage].shape), &found)) continue;
            add(found);
            break;
        }
    }
    // More ranks and nothing else: at the stage that needs fewest.
    RunShape fewest;
    for (int stage = asked.stage; stage <= (plan.recommended >= 0 ? asked.stage : 3); ++stage) {
        if (planner.enough_ranks(plan.stages[stage].shape, &found) && (fewest.ranks <= asked.ranks || found.ranks < fewest.ranks)) fewest = found;
    }
    if (fewest.ranks > asked.ranks) add(fewest);
    CasePlan fastest;
    if (planner.fastest_combination(asked, &fastest)) {
        add(fastest.shape);
        for (size_t i = 0; plan.recommended < 0 && i < plan.advice.size(); ++i) {  // of equals the first, which changes least
            const CasePlan& result = plan.advice[i].result;
            if (result.shape.ranks == asked.ranks && (plan.best_advice < 0 || is_better(result, plan.advice[plan.best_advice].result))) plan.best_advice = static_cast<int>(i);
        }
        return;
    }
    // Nothing on as many ranks. What is left at the least setting says why, and more ranks share the state alone.
    const RunShape smallest = planner.smallest(asked);
    const CasePlan least = planner.memory_of(smallest);
    const MemoryBill& bill = least.memory;
    const auto state_of = [](const MemoryBill& memory) { return memory.bytes_of("parameters") + memory.bytes_of("gradients") + memory.bytes_of("optimizer"); };
    const size_t state = state_of(bill);
    const std::string levers = options_between(asked, smallest);
    const size_t gradient_bytes = asked.fp32_gradients ? sizeof(float) : plan.request.element_bytes;
    plan.why_not = format("With everything this program has for saving memory (%s) a rank still needs %s: %s of state (%s parameters x %zu bytes over %d rank%s), %s of activations, %s of buffers; "
                          "with the reserve that is more than the device's %s.",
                          levers.empty() ? "as it is" : levers.c_str(), format_bytes(bill.total_bytes).c_str(), format_bytes(state).c_str(), format_count(plan.table.parameter_count()).c_str(),
                          plan.request.element_bytes + gradient_bytes + 3 * sizeof(float), asked.ranks, asked.ranks == 1 ? "" : "s",
                          format_bytes(bill.bytes_of("activations")).c_str(),
                          format_bytes(bill.bytes_of("buffers") + bill.bytes_of("staging")).c_str(), format_bytes(plan.request.device_bytes).c_str());
    if (planner.enough_ranks(smallest, &found)) {
        plan.best_advice = add(found);
        RunShape rented = asked;
        rented.ranks = rentable(found.ranks, plan.request.ranks_per_node);
        if (planner.fastest_combination(rented, &fastest)) plan.best_advice = add(fastest.shape);
        return;
    }
    RunShape many = smallest;
    many.ranks = 4096;  // the state's share is next to nothing, and so is the padding
    const MemoryBill left = planner.memory_of(many).memory;
    const size_t layer = left.bytes_of("buffers") + left.bytes_of("staging"), sequence = left.bytes_of("activations"), fixed = left.bytes_of("workspace") + left.bytes_of("other");
    plan.why_not += format(" More ranks do not help: whatever their number, each needs %s for one layer's gathered parameters and gradients, %s of activations of one sequence of %d tokens, and %s of "
                           "workspace and tables.", format_bytes(layer).c_str(), format_bytes(sequence).c_str(), smallest.seq_len, format_bytes(fixed).c_str());
    if (static_cast<double>(layer) + fixed + plan.request.reserve_bytes > plan.request.device_bytes && layer > fixed) {
        plan.why_not += " One layer alone does not fit: such layers need tensor parallelism, which this program does not have.";
    } else if (sequence > layer && sequence > fixed) {
        plan.why_not += " A shorter --seq-len needs less; long sequences need context or tensor parallelism, which this program does not have.";
    }
}

// From one rank to 100,000, and the number asked for.
std::vector<int> scaling_ranks(int asked) {
    std::vector<int> ranks = {1, 2, 4, 8, 16, 64, 256, 1024, 4096, 16384, 100000, asked};
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    return ranks;
}

}  // namespace

CasePlan plan_memory(const PlanRequest& request, const CountRun& count_run) { return Planner(request, count_run).memory_of(request.shape); }

Plan make_plan(const PlanRequest& request, const CountRun& count_run) {
    const Planner planner(request, count_run);
    Plan plan;
    plan.request = request;
    plan.table = planner.table();
    for (int stage = 0; stage <= 3; ++stage) {
        RunShape shape = request.shape;
        shape.stage = stage;
        plan.stages.push_back(planner.case_of(shape));
    }
    double shortest = std::numeric_limits<double>::infinity();
    for (const CasePlan& candidate : plan.stages) {
        if (candidate.fits) shortest = std::min(shortest, candidate.time.seconds);
    }
    // The stage asked for is as good as one that only takes less memory.
    const auto price = [&](int stage) { return std::tuple(plan.stages[stage].sent_bytes, stage != request.shape.stage, plan.stages[stage].memory.total_bytes); };
    for (int stage = 0; stage <= 3; ++stage) {
        if (!plan.stages[stage].fits || plan.stages[stage].time.seconds > shortest * (1 + kEqual)) continue;
        if (plan.recommended < 0 || price(stage) < price(plan.recommended)) plan.recommended = stage;
    }
    if (!plan.asked().fits) add_advice(plan, planner);
    for (const int ranks : scaling_ranks(plan.chosen().shape.ranks)) {
        ScalingRow row;
        row.ranks = ranks;
        RunShape shape = plan.chosen().shape;
        shape.ranks = ranks;
        row.plan = planner.memory_of(shape);
        row.times = planner.add_times(row.plan, {kAlgorithms.begin(), kAlgorithms.end()});
        row.plan.time = row.times[static_cast<int>(planner.usual_algorithm(ranks))];
        plan.scaling.push_back(row);
    }
    plan.checkpoint_bytes = static_cast<double>(checkpoint_data_bytes(plan.table, request.element_bytes));
    const RunShape& shape = plan.chosen().shape;
    plan.async_save_bytes = largest_share_bytes(make_flat_layout(plan.table, shape.ranks, shape.bucket_mb, request.element_bytes), weights_files(plan.table, request.element_bytes));
    return plan;
}
