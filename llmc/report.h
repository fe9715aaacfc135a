// What a run prints: the start-up table, step lines, and the arithmetic behind utilisation figures.
#pragma once

#include <string>
#include <vector>

#include "llmc/metrics.h"
#include "llmc/model_config.h"

// Floating-point operations of one trained token (forward and backward): 6 a weight of every matrix product, the head included and the
// embedding lookup not, plus attention at half of T x T, since it is causal: 6 * L * NH * HD * T.
double flops_per_token(const ModelConfig& config, int seq_len);

// Dense bf16 peak of a GPU by its datasheet in FLOP/s, from the name CUDA gives it; 0 if it is not in the table (every CPU).
double datasheet_flops(const std::string& device_name);

std::string format_bytes(double bytes);   // "1.50 GB" (10^9), "12.3 MB", "512 B"
std::string format_count(double count);   // "124.5M", "12.3k", "17"

// "name  value" lines in one column, under titles.
class Report {
public:
    void title(const std::string& text);
    __attribute__((format(printf, 3, 4))) void row(const char* name, const char* format, ...);
    std::string text() const { return text_; }

private:
    std::string text_;
};

// One line a step: loss, norm, learning rate, time, tokens/s, utilisation, memory, and where the time went.
std::string step_line(const TrainMetrics& metrics, long long total_steps);
