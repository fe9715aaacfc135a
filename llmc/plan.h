// A run before it runs: bytes on each rank, bytes on the wire, time, and what would make it fit.
//
// Nothing here knows how a run allocates or communicates. Bytes of memory are what the trainer's own allocation code adds up to (memory_plan.cuh), bytes sent are
// those of its schedule (schedule.h), times come from walking that schedule (step_time.h) over a network (network.h). plan_report.h prints it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "llmc/memory_bill.h"
#include "llmc/model_config.h"
#include "llmc/network.h"
#include "llmc/param_table.h"
#include "llmc/schedule.h"
#include "llmc/step_time.h"

// All that memory, bytes sent and time depend on.
struct RunShape {
    ModelConfig config;
    int ranks = 1;
    int micro_batch = 1, seq_len = 1, micro_steps = 1;
    int stage = 1;
    double bucket_mb = 25;
    bool overlap = true, sync_every_micro_step = false, fp32_gradients = false;
    std::string recompute = "none";
    int lmhead_chunks = 1;

    double rank_tokens() const { return static_cast<double>(micro_batch) * seq_len * micro_steps; }  // of a step, on each rank
    double step_tokens() const { return rank_tokens() * ranks; }
};

// Layout, schedule and memory of a run as the trainer makes them. The schedule may be made with fewer micro-steps than the run has (at least 2 where that has several):
// memory does not depend on it.
struct CountedRun {
    FlatLayout layout;
    Schedule schedule;
    MemoryBill memory;
};
using CountRun = std::function<CountedRun(const RunShape& shape, const ParamTable& table, int schedule_micro_steps)>;

struct PlanRequest {
    RunShape shape;
    size_t element_bytes = 2;        // of a parameter
    size_t device_bytes = 0;         // memory of a rank's device
    std::string device_text;         // where that comes from, to print after it
    size_t reserve_bytes = 0;        // of it, for what lies outside the trainer's allocations
    std::vector<Link> links;         // the first joins the ranks of a node, the last the nodes
    int ranks_per_node = 8;
    double flops_per_s = 0;          // that a rank's computation reaches
    std::string flops_text;          // where that comes from
    bool speed_known = true;         // false: speeds are good to compare settings with and no more
    long long steps = 0;             // of the run; 0 = not known
    double price = 0;                // of a device-hour; 0 = not given
    int keep = 3;                    // checkpoints
    std::string folder;              // where they would go
    size_t free_disk_bytes = 0;      // there

    Network network() const { return {links.front(), links.back(), ranks_per_node}; }
};

// One combination of settings, planned.
struct CasePlan {
    RunShape shape;
    MemoryBill memory;               // without the reserve
    bool fits = false;
    size_t sent_bytes = 0;           // by each rank in a step
    StepTime time;                   // over the request's network: the ring of a node, or of several nodes the hierarchical algorithm
    double tokens_per_s() const { return shape.step_tokens() / time.seconds; }
};

// A change that makes the run fit.
struct Advice {
    std::string options;             // what to give: "--recompute block"
    CasePlan result;
};

struct ScalingRow {
    int ranks = 0;
    CasePlan plan;
    std::vector<StepTime> times;     // by algorithm, in the order of CollectiveAlgorithm
};

struct Plan {
    PlanRequest request;
    ParamTable table;
    std::vector<CasePlan> stages;    // 0 to 3
    int recommended = -1;            // the stage that fits with the shortest step, of equals the one that sends least, then the one asked for, then the one that takes least; -1 = none
    std::vector<Advice> advice;      // where the stage asked for does not fit: single changes, nearest first, then the fastest combination on as many ranks
    int best_advice = -1;            // of advice: the recommended stage, else the fastest on as many ranks, else on the fewest that one can rent (whole nodes); -1 = none
    std::string why_not;             // where no change on as many ranks makes it fit: what is in the way
    std::vector<ScalingRow> scaling; // of chosen(), with the same work on each rank
    double checkpoint_bytes = 0;     // of one: parameters, and fp32 master weights and two moments
    size_t async_save_bytes = 0;     // host memory of the rank that --save-mode async takes most on

    const CasePlan& asked() const { return stages[request.shape.stage]; }
    // What is recommended, or where nothing fits the stage asked for: what hours, price and scaling are of.
    const CasePlan& chosen() const { return recommended >= 0 ? stages[recommended] : best_advice >= 0 ? advice[best_advice].result : asked(); }
};

// Everything; a fraction of a second. Throws Error for what no 64 bits hold.
Plan make_plan(const PlanRequest& request, const CountRun& count_run);

// Memory of the case asked for, and whether it fits: what a run checks before it allocates.
CasePlan plan_memory(const PlanRequest& request, const CountRun& count_run);
