#include "llmc/param_table.h"

#include <algorithm>

#include "llmc/error.h"

namespace {

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Builds units one parameter after the other.
class TableBuilder {
public:
    explicit TableBuilder(ParamTable* table) : table_(table) {}

    void begin_unit(const std::string& name) {
        Unit unit;
        unit.name = name;
        unit.first_parameter = unit.end_parameter = static_cast<int>(table_->parameters.size());
        unit.logical_begin = table_->units.empty() ? 0 : table_->units.back().logical_begin + table_->units.back().count;
        table_->units.push_back(unit);
        cursor_ = 0;
    }

    void matrix(const std::string& name, size_t rows, size_t cols, Init init, bool starts_group = true, size_t stored_rows = 0) {
        Parameter p;
        p.name = name;
        p.rows = rows;
        p.cols = cols;
        p.stored_rows = stored_rows ? stored_rows : rows;
        p.is_matrix = p.weight_decay = true;
        p.init = init;
        add(p, starts_group);
    }

    void vector(const std::string& name, size_t count, Init init, bool starts_group = true) {
        Parameter p;
        p.name = name;
        p.rows = p.stored_rows = count;
        p.init = init;
        add(p, starts_group);
    }

    void end_unit() {
        align();
        table_->units.back().count = cursor_;
    }

private:
    void add(Parameter& p, bool starts_group) {
        if (starts_group) align();
        p.unit = static_cast<int>(table_->units.size()) - 1;
        p.offset = cursor_;
        cursor_ += p.stored_count();
        table_->parameters.push_back(p);
        table_->units.back().end_parameter = static_cast<int>(table_->parameters.size());
    }

    void align() {
        const size_t aligned = round_up(cursor_, kParameterAlign);
        if (aligned > cursor_) table_->units.back().gaps.push_back({cursor_, aligned - cursor_});
        cursor_ = aligned;
    }

    ParamTable* table_;
    size_t cursor_ = 0;
};

}  // namespace

ParamTable make_param_table(const ModelConfig& config) {
    const size_t channels = config.channels, head_dim = config.head_dim, ffn_dim = config.ffn_dim;
    const size_t q_rows = static_cast<size_t>(config.num_heads) * head_dim;
    const size_t kv_rows = static_cast<size_t>(config.num_kv_heads) * head_dim;
    ParamTable table;
    table.tied = config.tied;
    TableBuilder builder(&table);

    builder.begin_unit("embedding");
    builder.matrix("model.embed_tokens.weight", config.vocab_size, channels, Init::kNormal, true, config.padded_vocab());
    builder.end_unit();

    for (int layer = 0; layer < config.num_layers; ++layer) {
        const std::string prefix = "model.layers." + std::to_string(layer) + ".";
        builder.begin_unit("layer " + std::to_string(layer));
        builder.vector(prefix + "input_layernorm.weight", channels, Init::kOne);
        builder.matrix(prefix + "self_attn.q_proj.weight", q_rows, channels, Init::kNormal);
        builder.matrix(prefix + "self_attn.k_proj.weight", kv_rows, channels, Init::kNormal, false);
        builder.matrix(prefix + "self_attn.v_proj.weight", kv_rows, channels, Init::kNormal, false);
        if (config.qkv_bias) {
            builder.vector(prefix + "self_attn.q_proj.bias", q_rows, Init::kZero);
            builder.vector(prefix + "self_attn.k_proj.bias", kv_rows, Init::kZero, false);
            builder.vector(prefix + "self_attn.v_proj.bias", kv_rows, Init::kZero, false);
        }
        if (config.qk_norm) {
            builder.vector(prefix + "self_attn.q_norm.weight", head_dim, Init::kOne);
            builder.vector(prefix + "self_attn.k_norm.weight", head_dim, Init::kOne);
        }
        builder.matrix(prefix + "self_attn.o_proj.weight", channels, q_rows, Init::kNormalScaled);
        builder.vector(prefix + "post_attention_layernorm.weight", channels, Init::kOne);
        builder.matrix(prefix + "mlp.gate_proj.weight", ffn_dim, channels, Init::kNormal);
        builder.matrix(prefix + "mlp.up_proj.weight", ffn_dim, channels, Init::kNormal, false);
        builder.matrix(prefix + "mlp.down_proj.weight", channels, ffn_dim, Init::kNormalScaled);
        builder.end_unit();
    }

    builder.begin_unit("head");
    builder.vector("model.norm.weight", channels, Init::kOne);
    if (!config.tied) builder.matrix("lm_head.weight", config.vocab_size, channels, Init::kNormal, true, config.padded_vocab());
    builder.end_unit();
    return table;
}

size_t ParamTable::parameter_count() const {
    size_t count = 0;
    for (const Parameter& p : parameters) count += p.count();
    return count;
}

const Parameter& ParamTable::find(const std::string& name) const {
    for (const Parameter& p : parameters) {
        if (p.name == name) return p;
    }
    fail("the model has no parameter named '%s'", name.c_str());
}

FlatLayout make_flat_layout(const ParamTable& table, int num_ranks, double bucket_mb, size_t element_bytes) {
    CHECK(num_ranks >= 1, "a layout needs at least one rank, not %d", num_ranks);
    const double limit_bytes = bucket_mb * 1e6;
    FlatLayout layout;
    layout.num_ranks = num_ranks;
    const int num_units = static_cast<int>(table.units.size());
    for (int unit = 0; unit < num_units; ++unit) {
        const size_t count = table.units[unit].count;
        const bool merge = !layout.buckets.empty() && static_cast<double>((layout.buckets.back().unit_count + count) * element_bytes) <= limit_bytes;
        if (!merge) {
            Bucket bucket;
            bucket.first_unit = unit;
            bucket.logical_begin = table.units[unit].logical_begin;
            layout.buckets.push_back(bucket);
        }
        layout.buckets.back().unit_count += count;
        layout.buckets.back().end_unit = unit + 1;
        layout.bucket_of_unit.push_back(static_cast<int>(layout.buckets.size()) - 1);
        layout.max_unit_count = std::max(layout.max_unit_count, count);
    }
    layout.unit_begin.resize(num_units);
    for (Bucket& bucket : layout.buckets) {
        bucket.begin = round_up(layout.total_count, kParameterAlign);
        bucket.count = round_up(bucket.unit_count, num_ranks * kSliceAlign);
        bucket.slice_count = bucket.count / num_ranks;
        bucket.slice_begin = layout.shard_count;
        layout.total_count = bucket.begin + bucket.count;
        layout.shard_count += bucket.slice_count;
        layout.max_bucket_count = std::max(layout.max_bucket_count, bucket.count);
        layout.max_slice_count = std::max(layout.max_slice_count, bucket.slice_count);
        size_t cursor = bucket.begin;
        for (int unit = bucket.first_unit; unit < bucket.end_unit; ++unit) {
            layout.unit_begin[unit] = cursor;
            cursor += table.units[unit].count;
        }
    }
    return layout;
}

std::vector<ParameterPiece> parameter_pieces(const ParamTable& table, const FlatLayout& layout, size_t bucket, size_t begin, size_t count) {
    std::vector<ParameterPiece> pieces;
    for (int unit = layout.buckets[bucket].first_unit; unit < layout.buckets[bucket].end_unit; ++unit) {
        for (int i = table.units[unit].first_parameter; i < table.units[unit].end_parameter; ++i) {
            const Parameter& p = table.parameters[i];
            const size_t at = layout.unit_begin[unit] + p.offset;
            const size_t first = std::max(begin, at), end = std::min(begin + count, at + p.count());
            if (first < end) pieces.push_back({i, first - at, end - first, first - begin});
        }
    }
    return pieces;
}

size_t decay_map_count(const FlatLayout& layout) { return round_up(layout.total_count, kParameterAlign) / kParameterAlign; }

std::vector<uint8_t> make_decay_map(const ParamTable& table, const FlatLayout& layout) {
    std::vector<uint8_t> map(decay_map_count(layout), 0);
    for (const Parameter& p : table.parameters) {
        if (!p.weight_decay) continue;
        const size_t begin = layout.unit_begin[p.unit] + p.offset;
        // A group is decayed as a whole, so a block shared by two of its members has one answer.
        for (size_t i = begin / kParameterAlign; i <= (begin + p.stored_count() - 1) / kParameterAlign; ++i) map[i] = 1;
    }
    return map;
}
