// What a run prints: the start-up table and step lines.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "llmc/data_loader.h"
#include "llmc/memory_bill.h"
#include "llmc/metrics.h"
#include "llmc/model_config.h"
#include "llmc/options.h"
#include "llmc/param_table.h"
#include "llmc/schedule.h"
#include "llmc/units.h"

// Dense bf16 peak of a GPU by its datasheet in FLOP/s, from the name CUDA gives it; 0 if it is not in the table (every CPU).
double datasheet_flops(const std::string& device_name);

// What the start-up table shows.
struct StartInfo {
    const Options& options;
    const ModelConfig& config;
    const BatchPlan& batch;
    long long steps;
    const std::vector<std::string>& ranks;  // host, process and device of each
    const ParamTable& table;
    const FlatLayout& layout;
    const Schedule& schedule;
    const DataLoader& train;
    const ValLoader* val;                   // nullptr = no evaluation
    const MemoryBill& memory;               // on this rank's device
    const std::vector<std::pair<std::string, std::string>>& checkpoints;  // name and text of each row on them
    double product_flops;                   // measured, FLOP/s
    double link_bytes_per_s;                // measured; 0 on one rank
    size_t element_bytes;                   // of a parameter
};

// Every setting, who runs where, model, batch, sharding, data, memory by category.
std::string start_report(const StartInfo& info);

// One line a step: loss, norm, learning rate, time, tokens/s, utilisation, memory, and where the time went.
std::string step_line(const TrainMetrics& metrics, long long total_steps);
