#include "llmc/params_plan.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include <nlohmann/json.hpp>

#include "llmc/error.h"
#include "llmc/network.h"
#include "llmc/text_table.h"

namespace {

constexpr double kParameterBytes = 2, kOptimizerBytes = 12, kShareForState = 0.7;
constexpr int kStages = 4;

// A stage, or stage 0 that synchronises after every micro-step.
struct StagePlan {
    int stage;
    bool every_micro_step;
    double bytes_per_parameter, memory_bytes;
    std::vector<double> largest_parameters;  // of each device memory
    double sent_bytes;
    std::vector<double> seconds;             // of each link
};

struct ParamsPlan {
    double parameters;
    int ranks, micro_steps, keep;
    double gradient_bytes;
    double step_seconds, price;              // 0 = not given
    long long steps;                         // 0 = not given
    std::vector<Link> links;
    std::vector<double> device_bytes;        // to name the largest model for
    std::vector<StagePlan> stages;           // 0 to 3, then 0 with every micro-step
    double checkpoint_bytes, disk_bytes;     // the latter while one more than `keep` is there
    double hours, device_hours, cost;        // NaN = something they need was not given
};

ParamsPlan make_plan(const Options& options, int ranks) {
    CHECK(options.params >= 1 && ranks >= 1, "a plan needs parameters and ranks, not %g and %d", options.params, ranks);
    ParamsPlan plan;
    const double P = plan.parameters = options.params, N = plan.ranks = ranks, G = plan.micro_steps = std::max(1, options.grad_accum);
    const double w = kParameterBytes, g = plan.gradient_bytes = options.grad_dtype == "fp32" ? 4 : 2, o = kOptimizerBytes, x = (N - 1) / N;
    plan.keep = options.keep;
    plan.step_seconds = options.step_seconds;
    plan.price = options.price;
    plan.steps = options.given("steps") ? options.steps : 0;  // the default is that of a preset
    plan.links = parse_links(options.link);
    plan.device_bytes = {40e9, 80e9};
    const double given_bytes = static_cast<double>(options.device_memory);
    if (given_bytes > 0 && given_bytes != 40e9 && given_bytes != 80e9) plan.device_bytes.push_back(given_bytes);

    const double state[kStages] = {w + g + o, w + g + o / N, w + (g + o) / N, (w + g + o) / N};
    const double sent[kStages] = {2 * x * g * P, x * g * P + x * w * P, G * x * g * P + x * w * P, G * (2 * x * w * P + x * g * P)};
    for (int stage = 0; stage < kStages; ++stage) plan.stages.push_back({stage, false, state[stage], state[stage] * P, {}, sent[stage], {}});
    plan.stages.push_back({0, true, state[0], state[0] * P, {}, G * sent[0], {}});
    for (StagePlan& stage : plan.stages) {
        for (const double bytes : plan.device_bytes) stage.largest_parameters.push_back(kShareForState * bytes / stage.bytes_per_parameter);
        for (const Link& link : plan.links) stage.seconds.push_back(stage.sent_bytes / link.bytes_per_s);
    }

    plan.checkpoint_bytes = (w + o) * P;
    plan.disk_bytes = (plan.keep + 1.0) * plan.checkpoint_bytes;
    const bool timed = plan.steps > 0 && plan.step_seconds > 0;
    plan.hours = timed ? static_cast<double>(plan.steps) * plan.step_seconds / 3600 : std::nan("");
    plan.device_hours = plan.hours * N;
    plan.cost = plan.price > 0 ? plan.device_hours * plan.price : std::nan("");
    return plan;
}

// As many decimals as asked for, where they tell something: more of a small number, digits and an exponent of a huge one.
std::string decimal(double value, int places) {
    if (value >= 1e9) return format("%.3e", value);
    if (value > 0 && value < 0.5 * std::pow(10.0, -places)) return format("%.2g", value);
    return format("%.*f", places, value);
}

std::string count_text(double count) {
    static constexpr struct { double size; const char* name; } kUnits[] = {{1e12, "T"}, {1e9, "B"}, {1e6, "M"}, {1e3, "k"}};
    for (const auto& unit : kUnits)
        if (count >= unit.size) return decimal(count / unit.size, 2) + " " + unit.name;
    return format("%.0f", std::floor(count));
}

std::string gigabytes(double bytes) { return decimal(bytes / 1e9, 2); }

}  // namespace

std::string params_plan_text(const Options& options, int ranks) {
    static constexpr const char* kSharded[kStages] = {"nothing", "optimizer", "+ gradients", "+ parameters"};
    const ParamsPlan plan = make_plan(options, ranks);
    const std::vector<StagePlan>& stages = plan.stages;
    const std::string step = format("%.6g s", plan.step_seconds);
    TextTable table;  // one cell a stage
    table.row("", stages, [](const StagePlan& s) { return format("stage %d%s", s.stage, s.every_micro_step ? " *" : ""); });
    table.row("sharded over the ranks", stages, [&](const StagePlan& s) { return std::string(kSharded[s.stage]); });
    table.heading("parameters, gradients and optimizer state of a rank");
    table.row("  bytes a parameter", stages, [](const StagePlan& s) { return format("%.4g", s.bytes_per_parameter); });
    table.row("  memory, GB", stages, [](const StagePlan& s) { return gigabytes(s.memory_bytes); });
    table.heading("largest model, in parameters, with 30 % of a device kept for activations and all else");
    for (size_t i = 0; i < plan.device_bytes.size(); ++i)
        table.row(format("  on %.4g GB", plan.device_bytes[i] / 1e9), stages, [i](const StagePlan& s) { return count_text(s.largest_parameters[i]); });
    table.heading("communication of a rank in a step, and the least time it takes if all of it goes over one link");
    table.row("  sent, GB", stages, [](const StagePlan& s) { return gigabytes(s.sent_bytes); });
    for (size_t i = 0; i < plan.links.size(); ++i) {
        const Link& link = plan.links[i];
        table.row(format("  %s at %.6g GB/s, ms", link.name.c_str(), link.bytes_per_s / 1e9), stages, [i](const StagePlan& s) { return decimal(s.seconds[i] * 1e3, 1); });
        if (plan.step_seconds == 0) continue;
        table.row(format("  %s, %% of a step of %s", link.name.c_str(), step.c_str()), stages, [&](const StagePlan& s) { return decimal(100 * s.seconds[i] / plan.step_seconds, 2); });
    }

    std::string text = format("plan for %s parameters on %d rank%s, %d micro-step%s a step (GB = 10^9 bytes)\n\n", count_text(plan.parameters).c_str(), plan.ranks,
                              plan.ranks == 1 ? "" : "s", plan.micro_steps, plan.micro_steps == 1 ? "" : "s");
    text += table.text();
    text += "* gradients synchronised after every micro-step, not only after the last (--sync-every-micro-step)\n\n";
    text += format("disk: %s GB a checkpoint, %s GB with --keep %d while the next one is written\n", gigabytes(plan.checkpoint_bytes).c_str(),
                   gigabytes(plan.disk_bytes).c_str(), plan.keep);
    if (std::isnan(plan.hours)) {
        text += format("run:  hours %sneed --steps and --step-seconds\n", plan.price > 0 ? "and cost " : "");
    } else {
        text += format("run:  %s hours of computation: %lld steps of %s; communication that it does not hide comes on top\n", decimal(plan.hours, 2).c_str(), plan.steps, step.c_str());
        text += format("      %s device-hours", decimal(plan.device_hours, 2).c_str());
        text += std::isnan(plan.cost) ? "; --price gives their cost\n" : format(", cost %s at %.6g each\n", decimal(plan.cost, 2).c_str(), plan.price);
    }
    const bool latency = std::any_of(plan.links.begin(), plan.links.end(), [](const Link& link) { return link.latency_s > 0; });
    text += format("\nFormulas: P parameters, N ranks, x = (N-1)/N, G micro-steps a step; w = 2 bytes of a parameter (bf16), g = %.0f of its\n"
                   "gradient (--grad-dtype %s), 12 of its optimizer state (master, m and v in fp32).\n"
                   "           bytes a parameter  sent\n"
                   "  stage 0  w + g + 12         2x g P (*: G 2x g P)\n"
                   "  stage 1  w + g + 12/N       x g P + x w P\n"
                   "  stage 2  w + (g + 12)/N     G x g P + x w P\n"
                   "  stage 3  (w + g + 12)/N     G (2x w P + x g P), less where a gather is reused\n"
                   "Time: sent / speed, %s: how many collectives there are depends on the model. Largest model:\n"
                   "0.7 x the device's bytes / bytes a parameter. A checkpoint: (w + 12) P. Activations, buffers, padding and what stage 3\n"
                   "gathers depend on the model: --preset or --from-config in place of --params plan them.\n",
                   plan.gradient_bytes, options.grad_dtype.c_str(), latency ? "without the latency in --link" : "without latency");
    return text;
}

std::string params_plan_json(const Options& options, int ranks) {
    using nlohmann::ordered_json;
    const ParamsPlan plan = make_plan(options, ranks);
    // Whole numbers without an exponent as far as a double holds them, null for what is not known.
    const auto whole = [](double value) { return value < 9e15 ? ordered_json(std::llround(value)) : ordered_json(value); };
    const auto known = [](double value) { return std::isnan(value) || value == 0 ? ordered_json() : ordered_json(value); };
    const auto stage_json = [&](const StagePlan& stage) {
        ordered_json json = {{"stage", stage.stage}, {"bytes_per_parameter", stage.bytes_per_parameter}, {"memory_bytes", whole(stage.memory_bytes)}};
        json["largest_models"] = ordered_json::array();
        for (size_t i = 0; i < plan.device_bytes.size(); ++i)
            json["largest_models"].push_back({{"device_memory_bytes", whole(plan.device_bytes[i])}, {"parameters", whole(stage.largest_parameters[i])}});
        json["sent_bytes_per_step"] = whole(stage.sent_bytes);
        json["links"] = ordered_json::array();
        for (size_t i = 0; i < plan.links.size(); ++i) {
            json["links"].push_back({{"name", plan.links[i].name}, {"bytes_per_s", plan.links[i].bytes_per_s}, {"seconds", stage.seconds[i]},
                                     {"share_of_step", plan.step_seconds > 0 ? ordered_json(stage.seconds[i] / plan.step_seconds) : ordered_json()}});
        }
        return json;
    };
    ordered_json json = {{"parameters", whole(plan.parameters)},
                         {"ranks", plan.ranks},
                         {"micro_steps", plan.micro_steps},
                         {"parameter_bytes", kParameterBytes},
                         {"gradient_bytes", plan.gradient_bytes},
                         {"optimizer_bytes", kOptimizerBytes},
                         {"step_seconds", known(plan.step_seconds)}};
    json["stages"] = ordered_json::array();
    for (const StagePlan& stage : plan.stages) {
        if (stage.every_micro_step) json["stage_0_every_micro_step"] = stage_json(stage);
        else json["stages"].push_back(stage_json(stage));
    }
    json["checkpoint_bytes"] = whole(plan.checkpoint_bytes);
    json["keep"] = plan.keep;
    json["disk_bytes"] = whole(plan.disk_bytes);
    json["steps"] = plan.steps > 0 ? ordered_json(plan.steps) : ordered_json();
    json["hours"] = known(plan.hours);
    json["device_hours"] = known(plan.device_hours);
    json["price"] = known(plan.price);
    json["cost"] = known(plan.cost);
    return json.dump(2, ' ', false, ordered_json::error_handler_t::replace) + "\n";  // a link's name may be any bytes
}
