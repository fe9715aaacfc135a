#include "llmc/report.h"

#include <cmath>
#include <cstdarg>
#include <cstdlib>

#include "llmc/error.h"

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

namespace {

// "name  value" lines in one column, under titles.
class Table {
public:
    void title(const std::string& text) { text_ += text + "\n"; }
    __attribute__((format(printf, 3, 4))) void row(const std::string& name, const char* format, ...) {
        va_list args;
        va_start(args, format);
        const std::string value = format_va(format, args);
        va_end(args);
        std::string label = "  " + name;
        label.resize(std::max<size_t>(label.size() + 1, 26), ' ');
        text_ += label + value + "\n";
    }
    const std::string& text() const { return text_; }

private:
    std::string text_;
};

}  // namespace

std::string start_report(const StartInfo& info) {
    static const char* const kSharded[] = {"stage 0: nothing", "stage 1: optimizer state", "stage 2: gradients and optimizer state", "stage 3: parameters, gradients and optimizer state"};
    const Options& options = info.options;
    const ModelConfig& c = info.config;
    Table table;
    table.title("llm.zero");
    std::string group, line;
    for (const OptionRow& option : option_rows(options)) {
        if (option.group != group && !line.empty()) table.row(group, "%s", line.c_str());
        if (option.group != group) line.clear();
        group = option.group;
        line += (line.empty() ? "" : "  ") + option.name + "=" + option.value;
    }
    if (!line.empty()) table.row(group, "%s", line.c_str());

    table.title("ranks");
    for (size_t rank = 0; rank < info.ranks.size(); ++rank) table.row("rank " + std::to_string(rank), "%s", info.ranks[rank].c_str());
    const char* algorithm = getenv("NCCL_ALGO");
    const std::string speed = info.link_bytes_per_s > 0 ? format(", %.3g GB/s measured on this rank", info.link_bytes_per_s / 1e9) : "";
    table.row("collectives", "NCCL_ALGO=%s, %s%s", algorithm ? algorithm : "unset", options.overlap() ? "beside the computation" : "between computations", speed.c_str());

    table.title("model");
    table.row("shape", "%s: %d layers, %d channels, %d heads, %d KV heads, head_dim %d, ffn %d, vocabulary %d (padded %d)%s%s%s", c.name.c_str(), c.num_layers, c.channels, c.num_heads,
              c.num_kv_heads, c.head_dim, c.ffn_dim, c.vocab_size, c.padded_vocab(), c.tied ? ", tied head" : "", c.qkv_bias ? ", QKV bias" : "", c.qk_norm ? ", QK-norm" : "");
    table.row("parameters", "%s (%zu) in %s, %zu units, %zu bucket(s) of up to %s", format_count(info.table.parameter_count()).c_str(), info.table.parameter_count(),
              info.element_bytes == 2 ? "bf16" : "fp32", info.table.units.size(), info.layout.buckets.size(),
              format_bytes(info.layout.max_bucket_count * info.element_bytes).c_str());
    table.row("sharded", "%s", kSharded[options.zero_stage]);
    if (info.schedule.sharding.parameters) {
        size_t gathered = 0;
        for (const size_t count : info.schedule.slot_counts) gathered += count;
        // A small model is few buckets, and then much of it is whole at once.
        table.row("gathered at once", "%s of %s of parameters%s", format_bytes(gathered * info.element_bytes).c_str(), format_bytes(info.layout.total_count * info.element_bytes).c_str(),
                  options.bucket_mb > 0 && 2 * gathered > info.layout.total_count ? "; a smaller --bucket-mb (0: a layer at a time) holds less" : "");
    }
    table.row("sent", "%s a step by each rank", format_bytes(info.schedule.step_sent_bytes()).c_str());

    table.title("batch");
    table.row("tokens a step", "%lld = micro-batch %d x seq-len %d x %d micro-step(s) x %zu rank(s)", info.batch.tokens_per_step, options.micro_batch, options.seq_len,
              info.batch.grad_accum, info.ranks.size());
    table.row("steps", "%lld (%.2f epochs)", info.steps, static_cast<double>(info.steps) * info.train.windows_per_step() / info.train.windows());

    table.title("data");
    table.row("training", "%zu tokens in %zu shard(s), %lld windows an epoch, %lld tokens dropped at shard ends, fingerprint %s", info.train.shards().count,
              info.train.shards().shards.size(), info.train.windows(), info.train.dropped_tokens(), data_fingerprint(info.train.shards()).c_str());
    if (info.val) {
        table.row("validation", "%zu tokens in %zu shard(s), %lld of %lld windows", info.val->shards().count, info.val->shards().shards.size(), info.val->num_windows(),
                  info.val->windows());
    }

    table.title("checkpoints");
    for (const auto& [name, text] : info.checkpoints) table.row(name, "%s", text.c_str());

    table.title("device memory of a rank");
    for (const auto& [category, bytes] : info.memory.categories) table.row(category, "%s", format_bytes(bytes).c_str());
    table.row("together", "%s", format_bytes(info.memory.total_bytes).c_str());
    table.row("matrix products", "%.1f GFLOP/s measured on this rank", info.product_flops / 1e9);
    return table.text();
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
