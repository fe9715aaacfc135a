// What a run is, agreed by all ranks before anything is allocated on the device, and what follows from that: its loaders' and its engine's settings, what its plan is asked, what
// its checkpoints say.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "llmc/data_loader.h"
#include "llmc/device_setup.cuh"
#include "llmc/memory_plan.cuh"
#include "llmc/plan.h"
#include "llmc/plan_report.h"
#include "llmc/plan_request.h"
#include "llmc/report.h"
#include "llmc/resume.h"
#include "llmc/trainer.cuh"

struct RunPlan {
    Options options;
    ModelConfig config;
    BatchPlan batch;
    long long steps = 0;
    LrSchedule schedule;
    ZeroConfig zero;
    std::unique_ptr<ValLoader> val_loader;
    std::optional<ResumePoint> resume;    // where it goes on from
    bool in_place = false;                // that lies in this run's own folder, so what is there is the same run's
    std::vector<std::string> changes;     // that --allow-change let pass

    long long first_step() const { return resume ? resume->info.step : 0; }
    long long tokens_after(long long step) const { return (resume ? resume->info.tokens : 0) + (step + 1 - first_step()) * batch.tokens_per_step; }
};

inline LoaderSettings loader_settings(const RunPlan& plan, const Process& process) {
    LoaderSettings settings;
    settings.micro_batch = plan.options.micro_batch;
    settings.seq_len = plan.options.seq_len;
    settings.grad_accum = plan.batch.grad_accum;
    settings.rank = process.rank;
    settings.ranks = process.ranks;
    settings.vocab_size = plan.config.vocab_size;
    settings.seed = plan.options.seed;
    if (plan.resume) settings.windows_consumed = plan.resume->info.windows_consumed;
    return settings;
}

inline ZeroConfig zero_config(const Options& options, const RunShape& shape) {
    ZeroConfig config = zero_config(shape);
    config.beta1 = options.beta1;
    config.beta2 = options.beta2;
    config.eps = options.eps;
    config.weight_decay = options.weight_decay;
    return config;
}

// What the plan of this run is asked, with its own device in the place of a usual one.
inline PlanRequest request_of_run(const RunPlan& plan, const Device& device, int ranks) {
    PlanRequest request = plan_request(plan.options, run_shape(plan.options, plan.config, plan.batch.grad_accum, ranks), sizeof(floatX));
    request.speed_known = datasheet_flops(device.name) > 0;
    if (request.speed_known) request.flops_per_s = datasheet_flops(device.name) * plan.options.mfu;
    size_t free_bytes = 0, device_bytes = 0;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &device_bytes));
    const bool limited = plan.options.device_memory > 0 && static_cast<size_t>(plan.options.device_memory) < device_bytes;
    if (!limited) request.device_bytes = device_bytes;
    request.device_text = limited ? " (--device-memory)" : " (all of this device)";
    if (kDeviceIsCpu && plan.options.memory_reserve < 0) request.reserve_bytes = 0;  // nothing lies outside our own allocations
    return request;
}

// Throws Error with the table of memory and what would help, where this run cannot fit.
inline void check_fit(const RunPlan& plan, const Device& device, int ranks) {
    const PlanRequest request = request_of_run(plan, device, ranks);
    const CasePlan memory = plan_memory(request, count_run);
    if (!memory.fits) fail("%s", refusal_text(make_plan(request, count_run)).c_str());
    size_t free_bytes = 0, device_bytes = 0;
    CUDA_CHECK(cudaMemGetInfo(&free_bytes, &device_bytes));
    CHECK(memory.memory.total_bytes <= free_bytes, "this run needs %s of device memory, and of this device's %s only %s are free: another process holds the rest; end it, or use another device",
          format_bytes(memory.memory.total_bytes).c_str(), format_bytes(device_bytes).c_str(), format_bytes(free_bytes).c_str());
}

inline constexpr const char* kPrecision = sizeof(floatX) == 2 ? "bf16" : "fp32";

// What the run would have to be for the checkpoint to be of it.
inline RunMeaning meaning_of(const RunPlan& plan, const DataLoader& loader) {
    return {kept_options(plan.options, plan.batch, plan.schedule), data_fingerprint(loader.shards()), kPrecision, plan.config};
}

// The run after `step`, as a checkpoint says it; `state` is that step's.
inline CheckpointInfo checkpoint_info(const RunPlan& plan, const Process& process, const DataLoader& loader, const StepState& state, long long step, long long windows_consumed) {
    const RunMeaning meaning = meaning_of(plan, loader);
    CheckpointInfo info;
    info.step = step + 1;
    info.steps = plan.steps;
    info.tokens = plan.tokens_after(step);
    info.windows_consumed = windows_consumed;
    info.data_fingerprint = meaning.data;
    info.precision = meaning.precision;
    info.applied_steps = state.applied_steps;
    info.skipped_total = state.skipped_total;
    info.skipped_in_row = state.skipped_in_row;
    info.ranks = process.ranks;
    info.stage = plan.options.zero_stage;
    info.options = meaning.options;
    return info;
}

// Rows of the start-up table on where the run goes on from.
inline std::vector<std::pair<std::string, std::string>> resume_rows(const RunPlan& plan) {
    if (!plan.resume) return {};
    const CheckpointInfo& info = plan.resume->info;
    std::vector<std::pair<std::string, std::string>> rows = {
        {"resumed", format("%s: step %lld of %lld, written by %d rank(s) in stage %d", plan.resume->folder.c_str(), info.step, info.steps, info.ranks, info.stage)}};
    for (const std::string& change : plan.changes) rows.push_back({"changed", change});
    return rows;
}
