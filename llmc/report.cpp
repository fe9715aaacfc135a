#include "llmc/report.h"

#include <cmath>
#include <cstdarg>

#include "llmc/error.h"

double flops_per_token(const ModelConfig& config, int seq_len) {
    const double C = config.channels, L = config.num_layers, width = static_cast<double>(config.num_heads) * config.head_dim;
    const double kv_width = static_cast<double>(config.num_kv_heads) * config.head_dim;
    const double weights = L * (C * (width + 2 * kv_width) + width * C + 3 * C * config.ffn_dim) + C * config.vocab_size;
    return 6 * weights + 6 * L * width * seq_len;
}

double datasheet_flops(const std::string& device_name) {
    // NVIDIA's datasheets, dense bf16 with fp32 accumulation, TFLOP/s. The first entry whose text occurs in the name counts.
    static const struct {
        const char* text;
        double teraflops;
    } kTable[] = {
        {"B200", 2250},    {"H200", 989.4},    {"GH200", 989.4},   {"H100 PCIe", 756}, {"H100 NVL", 835}, {"H100", 989.4},     {"H800", 989.4},
        {"A100", 311.9},   {"A800", 311.9},    {"L40S", 362.1},    {"L40", 181.1},     {"L4", 121},       {"A10G", 70},        {"A10", 125},
        {"A30", 165},      {"A40", 149.7},     {"RTX A6000", 154.8}, {"RTX 6000 Ada", 364.2}, {"RTX 5090", 209.5}, {"RTX 4090", 165.2}, {"RTX 4080", 97.5},
        {"RTX 3090", 71},
    };
    for (const auto& entry : kTable) {
        if (device_name.find(entry.text) != std::string::npos) return entry.teraflops * 1e12;
    }
    return 0;
}

std::string format_bytes(double bytes) {
    if (bytes >= 1e9) return format("%.2f GB", bytes / 1e9);
    if (bytes >= 1e6) return format("%.2f MB", bytes / 1e6);
    if (bytes >= 1e3) return format("%.2f kB", bytes / 1e3);
    return format("%.0f B", bytes);
}

std::string format_count(double count) {
    if (count >= 1e9) return format("%.2fB", count / 1e9);
    if (count >= 1e6) return format("%.2fM", count / 1e6);
    if (count >= 1e4) return format("%.1fk", count / 1e3);
    return format("%.0f", count);
}

void Report::title(const std::string& text) { text_ += text + "\n"; }

void Report::row(const char* name, const char* format, ...) {
    va_list args;
    va_start(args, format);
    const std::string value = format_va(format, args);
    va_end(args);
    std::string label = std::string("  ") + name;
    label.resize(std::max<size_t>(label.size() + 1, 26), ' ');
    text_ += label + value + "\n";
}

std::string step_line(const TrainMetrics& m, long long total_steps) {
    const auto share = [&](double ms) { return m.step_ms > 0 ? 100 * ms / m.step_ms : 0.0; };
    const double compute_ms = std::max(0.0, m.step_ms - m.data_ms - m.exposed_comm_ms);
    const std::string mfu = std::isnan(m.mfu) ? "-" : format("%.1f%%", 100 * m.mfu);
    std::string line = format("step %lld/%lld | loss %.4f | norm %.3f | lr %.2e | %.1f ms | %s tok/s | mfu %s of datasheet, %.1f%% of products | %s | data %.0f%% compute %.0f%% comm %.0f%%",
                              m.step + 1, total_steps, m.loss, m.grad_norm, m.lr, m.step_ms, format_count(m.tokens_per_s).c_str(), mfu.c_str(), 100 * m.mfu_measured,
                              format_bytes(m.mem_bytes).c_str(), share(m.data_ms), share(compute_ms), share(m.exposed_comm_ms));
    if (m.skipped > 0) line += format(" | skipped %lld", m.skipped);
    return line;
}
