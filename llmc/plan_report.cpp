#include "llmc/plan_report.h"

#include <algorithm>
#include <cmath>

#include <nlohmann/json.hpp>

#include "llmc/error.h"
#include "llmc/text_table.h"
#include "llmc/units.h"

namespace {

// What the bytes of a plan are shown in: GB, or for a small model MB.
struct ByteUnit {
    const char* name;
    double bytes;
    // Two decimals, or of what is too small for them two digits.
    std::string of(double value) const {
        const double amount = value / bytes;
        return format(amount != 0 && std::fabs(amount) < 0.005 ? "%.2g" : "%.2f", amount);
    }
};

ByteUnit unit_of(const Plan& plan) {
    constexpr ByteUnit kGb = {"GB", 1e9}, kMb = {"MB", 1e6};
    size_t most = 0;
    for (const CasePlan& c : plan.stages) most = std::max(most, c.memory.total_bytes);
    return most < 1'000'000'000 ? kMb : kGb;
}

// As many decimals as tell something.
std::string milliseconds(double seconds) {
    const double ms = seconds * 1e3;
    return ms == 0 ? "0" : ms < 0.1 ? format("%.2g", ms) : ms < 100 ? format("%.2f", ms) : ms < 1e7 ? format("%.0f", ms) : format("%.3g", ms);
}

std::string shape_text(const RunShape& s) {
    return format("%d rank%s, micro-batch %d x seq-len %d x %d micro-step%s, %s tokens a step%s%s%s%s", s.ranks, s.ranks == 1 ? "" : "s", s.micro_batch, s.seq_len, s.micro_steps,
                  s.micro_steps == 1 ? "" : "s", format_count(s.step_tokens()).c_str(), s.recompute == "none" ? "" : (", recompute " + s.recompute).c_str(),
                  s.lmhead_chunks == 1 ? "" : format(", head in %d chunks", s.lmhead_chunks).c_str(), s.fp32_gradients ? ", fp32 gradients" : "",
                  s.sync_every_micro_step ? ", stages 0 and 1 synchronise every micro-step" : "");
}

// Categories of any of the bills: state first, then what comes with a batch, then the rest.
std::vector<std::string> categories_of(const std::vector<const MemoryBill*>& bills) {
    std::vector<std::string> names;
    for (const char* name : {"parameters", "gradients", "optimizer", "activations", "buffers", "staging", "workspace"}) {
        if (std::any_of(bills.begin(), bills.end(), [&](const MemoryBill* bill) { return bill->bytes_of(name) > 0; })) names.push_back(name);
    }
    for (const MemoryBill* bill : bills) {
        for (const auto& entry : bill->categories) {
            if (std::find(names.begin(), names.end(), entry.first) == names.end()) names.push_back(entry.first);
        }
    }
    return names;
}

void add_stage_heading(TextTable& table, const Plan& plan, const std::string& label) {
    table.row(label, plan.stages, [&](const CasePlan& c) { return format("%sstage %d", c.shape.stage == plan.request.shape.stage ? "*" : "", c.shape.stage); });
}

void add_memory_rows(TextTable& table, const Plan& plan) {
    const PlanRequest& request = plan.request;
    const ByteUnit unit = unit_of(plan);
    std::vector<const MemoryBill*> bills;
    for (const CasePlan& c : plan.stages) bills.push_back(&c.memory);
    for (const std::string& category : categories_of(bills)) {
        table.row("  " + category, plan.stages, [&](const CasePlan& c) { return unit.of(c.memory.bytes_of(category)); });
    }
    table.row("  allocated", plan.stages, [&](const CasePlan& c) { return unit.of(c.memory.total_bytes); });
    table.row("  reserve", plan.stages, [&](const CasePlan&) { return unit.of(request.reserve_bytes); });
    table.row("  left of " + format_bytes(request.device_bytes), plan.stages,
              [&](const CasePlan& c) { return unit.of(static_cast<double>(request.device_bytes) - request.reserve_bytes - c.memory.total_bytes); });
    table.row("  fits", plan.stages, [&](const CasePlan& c) { return std::string(c.fits ? "yes" : "NO"); });
}

std::string memory_text(const Plan& plan) {
    TextTable table;
    add_stage_heading(table, plan, format("memory of a rank, %s", unit_of(plan).name));
    add_memory_rows(table, plan);
    return table.text();
}

bool has_cost(const Plan& plan) { return plan.request.speed_known && plan.request.steps > 0 && plan.request.price > 0; }

// What a change costs, beside the run that was asked for, whether that fits or not.
void add_price_row(TextTable& table, const Plan& plan, const std::string& label, const CasePlan& changed) {
    const double before = plan.asked().tokens_per_s() / plan.asked().shape.ranks, after = changed.tokens_per_s() / changed.shape.ranks, change = 100 * (after / before - 1);
    const ByteUnit unit = unit_of(plan);
    std::vector<std::string> cells = {unit.of(changed.memory.total_bytes), unit.of(changed.sent_bytes), std::fabs(change) < 0.05 ? "the same" : format("%+.1f %%", change)};
    if (plan.request.speed_known) cells.push_back(format_count(changed.tokens_per_s()));
    if (has_cost(plan)) {
        const double tokens = plan.request.steps * plan.asked().shape.step_tokens(), device_hours = tokens / changed.tokens_per_s() / 3600 * changed.shape.ranks;
        cells.push_back(format("%.6g", device_hours * plan.request.price));
    }
    table.row("  " + label, cells);
}

void add_price_heading(TextTable& table, const Plan& plan, const std::string& label) {
    const char* unit = unit_of(plan).name;
    std::vector<std::string> cells = {format("%s of a rank", unit), format("%s sent", unit), "a rank's speed"};
    if (plan.request.speed_known) cells.push_back("tokens/s");
    if (has_cost(plan)) cells.push_back("cost of as many tokens");
    table.row(label, cells);
}

// What is recommended, and what else would make it fit.
std::string advice_text(const Plan& plan) {
    const RunShape& asked = plan.request.shape;
    TextTable table;
    if (plan.asked().fits) {
        if (plan.recommended == asked.stage) return format("recommended: --zero-stage %d, as it is\n", asked.stage);
        add_price_heading(table, plan, format("recommended: --zero-stage %d in place of %d", plan.recommended, asked.stage));
        add_price_row(table, plan, format("stage %d", asked.stage), plan.asked());
        add_price_row(table, plan, format("stage %d", plan.recommended), plan.stages[plan.recommended]);
        return table.text();
    }
    std::string text = format("stage %d does not fit: %s and %s of reserve are more than %s.\n", asked.stage, format_bytes(plan.asked().memory.total_bytes).c_str(),
                              format_bytes(plan.request.reserve_bytes).c_str(), format_bytes(plan.request.device_bytes).c_str());
    add_price_heading(table, plan, "what makes it fit, and its price");
    add_price_row(table, plan, "(as asked)", plan.asked());
    for (const Advice& advice : plan.advice) add_price_row(table, plan, advice.options, advice.result);
    if (!plan.advice.empty()) text += table.text();
    if (!plan.why_not.empty()) text += plan.why_not + "\n";
    if (plan.best_advice >= 0) text += "recommended: " + plan.advice[plan.best_advice].options + "\n";
    return text;
}

std::string time_text(const Plan& plan) {
    const PlanRequest& request = plan.request;
    const ByteUnit unit = unit_of(plan);
    TextTable table;
    add_stage_heading(table, plan, "sent by each rank in a step");
    table.row(format("  %s", unit.name), plan.stages, [&](const CasePlan& c) { return unit.of(c.sent_bytes); });
    for (const Link& link : request.links) {
        table.row(format("  at least, over %s at %.6g GB/s, ms", link.name.c_str(), link.bytes_per_s / 1e9), plan.stages, [&](const CasePlan& c) { return milliseconds(c.sent_bytes / link.bytes_per_s); });
    }
    table.heading("a step, predicted");
    table.row("  computation, ms", plan.stages, [](const CasePlan& c) { return milliseconds(c.time.compute_seconds); });
    table.row("  communication, ms", plan.stages, [](const CasePlan& c) { return milliseconds(c.time.comm_seconds); });
    table.row("  of it not hidden, ms", plan.stages, [](const CasePlan& c) { return milliseconds(c.time.exposed_comm_seconds()); });
    table.row("  step, ms", plan.stages, [](const CasePlan& c) { return milliseconds(c.time.seconds); });
    table.row("  tokens/s", plan.stages, [](const CasePlan& c) { return format_count(c.tokens_per_s()); });
    return table.text();
}

std::string network_text(const PlanRequest& request) {
    const Network network = request.network();
    const auto link = [](const Link& l) { return format("%s at %.6g GB/s%s", l.name.c_str(), l.bytes_per_s / 1e9, l.latency_s > 0 ? format(" and %.3g us", l.latency_s * 1e6).c_str() : ""); };
    return format("%d ranks a node, joined by %s; nodes by %s", network.ranks_per_node, link(network.inside).c_str(), link(network.between).c_str());
}

std::string scaling_text(const Plan& plan) {
    TextTable table;
    const ByteUnit unit = unit_of(plan);
    std::vector<std::string> headings = {format("%s of a rank", unit.name)};
    for (size_t i = 0; i < plan.scaling[0].times.size(); ++i) headings.push_back(format("%s, ms", algorithm_name(static_cast<CollectiveAlgorithm>(i))));
    headings.insert(headings.end(), {"tokens/s", "of linear"});
    table.row("  ranks", headings);
    const double alone = plan.scaling[0].plan.tokens_per_s() / plan.scaling[0].ranks;
    for (const ScalingRow& row : plan.scaling) {
        std::vector<std::string> cells = {unit.of(row.plan.memory.total_bytes) + (row.plan.fits ? "" : " (too much)")};
        for (const StepTime& time : row.times) cells.push_back(milliseconds(time.seconds));
        cells.push_back(format_count(row.plan.tokens_per_s()));
        cells.push_back(format("%.1f %%", 100 * row.plan.tokens_per_s() / row.ranks / alone));
        table.row("  " + std::to_string(row.ranks), cells);
    }
    return format("a step on more ranks: stage %d%s, the same work on each rank; tokens/s with the ring in one node, else hierarchical\n(%s)\n", plan.chosen().shape.stage,
                  plan.chosen().shape.stage == plan.request.shape.stage && plan.best_advice < 0 ? "" : " as recommended", network_text(plan.request).c_str()) + table.text();
}

// "3.2 hours", or minutes of a short run.
std::string duration(double seconds) { return seconds < 3600 ? format("%.3g minutes", seconds / 60) : format("%.4g hours", seconds / 3600); }

std::string run_text(const Plan& plan) {
    const PlanRequest& request = plan.request;
    const CasePlan& c = plan.chosen();
    if (request.steps == 0) return "run:  --steps, or --epochs and data that is there, give hours and price\n";
    if (!c.fits) return "run:  it does not fit\n";
    const double seconds = request.steps * c.time.seconds, device_hours = seconds / 3600 * c.shape.ranks;
    std::string text = format("run:  stage %d on %d rank%s%s, %lld steps, %s tokens: %s, %.4g device-hours", c.shape.stage, c.shape.ranks, c.shape.ranks == 1 ? "" : "s",
                              plan.best_advice >= 0 ? " as recommended" : "", request.steps, format_count(request.steps * c.shape.step_tokens()).c_str(), duration(seconds).c_str(), device_hours);
    text += request.price > 0 ? format(", cost %.6g at %.6g each\n", device_hours * request.price, request.price) : "; --price gives their cost\n";
    return text;
}

std::string disk_text(const Plan& plan) {
    const PlanRequest& request = plan.request;
    const double together = plan.checkpoint_bytes * (request.keep + 1.0);
    const bool enough = together <= static_cast<double>(request.free_disk_bytes);
    return format("disk: %s a checkpoint (weights, fp32 master weights, two moments), %s with --keep %d while the next one is written; %s are free in %s%s\n",
                  format_bytes(plan.checkpoint_bytes).c_str(), format_bytes(together).c_str(), request.keep, format_bytes(request.free_disk_bytes).c_str(), request.folder.c_str(),
                  enough ? "" : ": NOT ENOUGH") +
           format("host memory: up to %s of a rank where --save-mode async copies what it saves; stream needs none\n", format_bytes(plan.async_save_bytes).c_str());
}

constexpr const char* kFormulas =
    "Memory is what the trainer's own code allocates. The reserve (--memory-reserve) is for what others take: CUDA context, libraries, NCCL.\n"
    "Sent is the sum over the step's schedule. At least: sent / speed. Predicted: the schedule walked with a clock for computation and one for\n"
    "communication (--no-overlap: one clock). A collective of N slices of s bytes, latency a and speed b of a link, g ranks a node, n nodes:\n"
    "ring (N-1)(a + s/b), tree ceil(log2 N) a + (N-1) s/b, hierarchical (g-1)(a1 + n s/b1) + (n-1)(a2 + s/b2), parameter server a + N s N/b.\n"
    "Ring and tree run over the first link within a node, else over the last. Computation: 6 flops a weight and token, causal attention\n"
    "at half of T x T, and what --recompute adds, at the rate above; AdamW and other memory-bound kernels are in that rate.\n";

}  // namespace

std::string plan_text(const Plan& plan) {
    const PlanRequest& request = plan.request;
    const RunShape& shape = request.shape;
    std::string text = format("plan of %s: %s parameters in %s; %s\n", shape.config.name.c_str(), format_count(plan.table.parameter_count()).c_str(), request.element_bytes == 2 ? "bf16" : "fp32",
                              shape_text(shape).c_str());
    text += format("device memory %s%s; computation at %.4g TFLOP/s (%s); GB = 10^9 bytes, * = asked for\n\n", format_bytes(request.device_bytes).c_str(), request.device_text.c_str(),
                   request.flops_per_s / 1e12, request.flops_text.c_str());
    text += memory_text(plan) + time_text(plan) + "\n" + advice_text(plan) + "\n" + scaling_text(plan) + "\n" + run_text(plan) + disk_text(plan) + "\n" + kFormulas;
    return text;
}

std::string plan_json(const Plan& plan) {
    using nlohmann::ordered_json;
    const PlanRequest& request = plan.request;
    const RunShape& shape = request.shape;
    const auto case_json = [&](const CasePlan& c) {
        ordered_json json = {{"stage", c.shape.stage}};
        for (const auto& [category, bytes] : c.memory.categories) json["memory_bytes"][category] = bytes;
        json["total_bytes"] = c.memory.total_bytes;
        json["fits"] = c.fits;
        json["sent_bytes_per_step"] = c.sent_bytes;
        json["links"] = ordered_json::array();
        for (const Link& link : request.links) json["links"].push_back({{"name", link.name}, {"bytes_per_s", link.bytes_per_s}, {"seconds", c.sent_bytes / link.bytes_per_s}});
        json["step_seconds"] = c.time.seconds;
        json["compute_seconds"] = c.time.compute_seconds;
        json["comm_seconds"] = c.time.comm_seconds;
        json["exposed_comm_seconds"] = c.time.exposed_comm_seconds();
        json["tokens_per_s"] = c.tokens_per_s();
        return json;
    };
    ordered_json json = {{"model", shape.config.name}, {"parameters", plan.table.parameter_count()}, {"ranks", shape.ranks}, {"device_memory_bytes", request.device_bytes},
                         {"reserve_bytes", request.reserve_bytes}, {"micro_batch", shape.micro_batch}, {"seq_len", shape.seq_len}, {"micro_steps", shape.micro_steps},
                         {"tokens_per_step", std::llround(shape.step_tokens())}, {"flops_per_s", request.flops_per_s}};
    json["stages"] = ordered_json::array();
    for (const CasePlan& c : plan.stages) json["stages"].push_back(case_json(c));
    json["chosen_stage"] = shape.stage;
    json["recommended_stage"] = plan.recommended >= 0 ? ordered_json(plan.recommended) : ordered_json();
    json["advice"] = ordered_json::array();
    for (const Advice& advice : plan.advice) json["advice"].push_back({{"options", advice.options}, {"ranks", advice.result.shape.ranks}, {"result", case_json(advice.result)}});
    json["recommended_options"] = plan.best_advice >= 0 ? ordered_json(plan.advice[plan.best_advice].options) : ordered_json();
    json["why_not"] = plan.why_not;
    json["scaling"] = ordered_json::array();
    for (const ScalingRow& row : plan.scaling) {
        ordered_json entry = {{"ranks", row.ranks}, {"total_bytes", row.plan.memory.total_bytes}, {"fits", row.plan.fits}, {"tokens_per_s", row.plan.tokens_per_s()}};
        for (size_t i = 0; i < row.times.size(); ++i) entry["step_seconds"][algorithm_name(static_cast<CollectiveAlgorithm>(i))] = row.times[i].seconds;
        json["scaling"].push_back(entry);
    }
    json["steps"] = request.steps > 0 ? ordered_json(request.steps) : ordered_json();
    json["hours"] = request.steps > 0 && plan.chosen().fits ? ordered_json(request.steps * plan.chosen().time.seconds / 3600) : ordered_json();
    json["checkpoint_bytes"] = plan.checkpoint_bytes;
    json["async_save_host_bytes"] = plan.async_save_bytes;
    json["free_disk_bytes"] = request.free_disk_bytes;
    return json.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";  // a name that is no UTF-8 is no reason to fail
}

std::string refusal_text(const Plan& plan) {
    return format("this run does not fit %s of device memory%s: %s on %s\n%s%s--plan prints the whole plan, --ignore-plan starts a run that does not fit", format_bytes(plan.request.device_bytes).c_str(),
                  plan.request.device_text.c_str(), plan.request.shape.config.name.c_str(), shape_text(plan.request.shape).c_str(), memory_text(plan).c_str(), advice_text(plan).c_str());
}

std::string failed_allocation_text(const Plan& plan, const MemoryBill& taken) {
    const MemoryBill& planned = plan.asked().memory;
    const ByteUnit unit = unit_of(plan);
    TextTable table;
    table.row(format("memory of a rank, %s", unit.name), {"planned", "taken when it failed"});
    for (const std::string& category : categories_of({&planned, &taken})) table.row("  " + category, {unit.of(planned.bytes_of(category)), unit.of(taken.bytes_of(category))});
    table.row("  allocated", {unit.of(planned.total_bytes), unit.of(taken.total_bytes)});
    return table.text() + (plan.asked().fits ? "the plan says that it fits: somebody else has memory of this device (on a GPU nvidia-smi names the processes)\n" : advice_text(plan));
}
