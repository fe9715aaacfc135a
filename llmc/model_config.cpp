#include "llmc/model_config.h"

#include <charconv>
#include <cmath>
#include <cstdlib>

#include <nlohmann/json.hpp>

#include "llmc/error.h"
#include "llmc/mapped_file.h"

using nlohmann::json;

namespace {

struct Shape {
    const char* name;
    int num_layers, channels, num_heads, num_kv_heads, head_dim, ffn_dim, vocab_size, max_seq_len;
    double rope_theta;
    float norm_eps;
    bool tied, qkv_bias;
};

// L, C, NH, NKV, HD, F, V, longest sequence, theta, eps, tied, qkv_bias. The comment is the number of parameters.
constexpr Shape kPresets[] = {
    {"tiny", 4, 128, 4, 2, 32, 384, 257, 512, 1e4, 1e-5f, false, false},                       // 0.85 M: bytes + end of text
    {"124M", 12, 768, 12, 12, 64, 2048, 50257, 1024, 1e4, 1e-5f, true, false},                 // 123.6 M: GPT-2's vocabulary
    {"0.5B", 24, 1024, 16, 8, 64, 4096, 128256, 4096, 5e5, 1e-5f, true, false},                // 0.51 B: Llama 3's vocabulary
    {"1.5B", 24, 2048, 16, 8, 128, 6144, 128256, 4096, 5e5, 1e-5f, true, false},               // 1.47 B
    {"3B", 28, 3072, 24, 8, 128, 8192, 128256, 4096, 5e5, 1e-5f, true, false},                 // 3.21 B
    {"4B", 32, 3072, 24, 8, 128, 8192, 128256, 4096, 5e5, 1e-5f, false, false},                // 4.01 B
    {"qwen2.5-0.5B", 24, 896, 14, 2, 64, 4864, 151936, 32768, 1e6, 1e-6f, true, true},         // 0.49 B
    {"qwen2.5-1.5B", 28, 1536, 12, 2, 128, 8960, 151936, 32768, 1e6, 1e-6f, true, true},       // 1.54 B
    {"qwen2.5-3B", 36, 2048, 16, 2, 128, 11008, 151936, 32768, 1e6, 1e-6f, true, true},        // 3.09 B
    {"qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064, 32768, 1e6, 1e-6f, false, true},       // 7.62 B
};

// "384 or 392", the multiples of 8 around a value, for messages.
std::string nearest_multiples_of_8(int value) {
    const int below = value / 8 * 8;
    return below > 0 ? format("%d or %d", below, below + 8) : format("%d", below + 8);
}

// One config.json being read; every access names the file and the field when something is wrong.
class ConfigReader {
public:
    explicit ConfigReader(const std::string& path) : path_(path) {
        const MappedFile file(path);
        root_ = json::parse(file.data(), file.data() + file.size(), nullptr, false);
        if (root_.is_discarded() || !root_.is_object()) fail("%s: is not a JSON object; give a Hugging Face config.json", path.c_str());
    }

    const json* find(const json& object, const char* field) const {
        const auto it = object.find(field);
        return it == object.end() || it->is_null() ? nullptr : &*it;
    }
    const json* find(const char* field) const { return find(root_, field); }

    // An integer of at least 1. A missing or null field gives `missing`; 0 there means the field is required.
    int integer(const json& object, const char* field, int missing) const {
        const json* value = find(object, field);
        if (!value && missing == 0) fail("%s: has no field `%s`", path_.c_str(), field);
        if (!value) return missing;
        if (!value->is_number_integer() && !(value->is_number_float() && value->get<double>() == std::floor(value->get<double>())))
            fail("%s: `%s` is %s; it must be a whole number", path_.c_str(), field, value->dump().c_str());
        const double number = value->get<double>();
        if (!(number >= 1 && number <= 2147483647.0))
            fail("%s: `%s` is %s; it must be between 1 and 2147483647", path_.c_str(), field, value->dump().c_str());
        return static_cast<int>(number);
    }
    int integer(const char* field, int missing) const { return integer(root_, field, missing); }

    double number(const json& object, const char* field, double missing) const {
        const json* value = find(object, field);
        if (!value) return missing;
        if (!value->is_number()) fail("%s: `%s` is %s; it must be a number", path_.c_str(), field, value->dump().c_str());
        return value->get<double>();
    }
    double number(const char* field, double missing) const { return number(root_, field, missing); }

    bool flag(const char* field, bool missing) const {
        const json* value = find(field);
        if (!value) return missing;
        if (!value->is_boolean()) fail("%s: `%s` is %s; it must be true or false", path_.c_str(), field, value->dump().c_str());
        return value->get<bool>();
    }

    std::string text(const json& object, const char* field, const char* missing) const {
        const json* value = find(object, field);
        if (!value) return missing;
        if (!value->is_string()) fail("%s: `%s` is %s; it must be a string", path_.c_str(), field, value->dump().c_str());
        return value->get<std::string>();
    }

    const json& root() const { return root_; }

    // The model asks for something this program does not compute.
    [[noreturn]] void refuse(const char* field, const json& value, const char* only) const {
        fail("%s: `%s` is %s, which is not supported; only %s is", path_.c_str(), field, value.dump().c_str(), only);
    }

private:
    std::string path_;
    json root_;
};

// Fields whose only accepted value is the one that changes nothing. Ignoring them would train another model than the file describes.
void refuse_unsupported(const ConfigReader& reader, const std::string& type) {
    static constexpr struct { const char* field; bool qwen2, llama_qwen3; } kFalseOnly[] = {
        {"attention_bias", false, true},  // in transformers this also gives o_proj a bias; Qwen2 ignores the field
        {"mlp_bias", false, true},
        {"use_sliding_window", true, true},
        {"use_mrope", true, true},
    };
    for (const auto& row : kFalseOnly) {
        if (!(type == "qwen2" ? row.qwen2 : row.llama_qwen3)) continue;
        if (reader.flag(row.field, false)) reader.refuse(row.field, *reader.find(row.field), "false");
    }
    if (reader.text(reader.root(), "hidden_act", "silu") != "silu") reader.refuse("hidden_act", *reader.find("hidden_act"), "\"silu\" (SwiGLU)");
    for (const char* field : {"attention_dropout", "hidden_dropout", "residual_dropout"})
        if (reader.number(field, 0.0) != 0.0) reader.refuse(field, *reader.find(field), "0 (no dropout)");
    for (const char* field : {"partial_rotary_factor", "pretraining_tp"})
        if (reader.number(field, 1.0) != 1.0) reader.refuse(field, *reader.find(field), "1");
    if (const json* layers = reader.find("layer_types")) {
        if (!layers->is_array()) reader.refuse("layer_types", *layers, "a list of \"full_attention\"");
        for (const json& layer : *layers)
            if (layer != "full_attention") reader.refuse("layer_types", layer, "\"full_attention\" in every layer");
    }
    if (const json* quantized = reader.find("quantization_config")) reader.refuse("quantization_config", *quantized, "an unquantized model");
}

void read_rope(const ConfigReader& reader, ModelConfig& config) {
    config.rope_theta = reader.number("rope_theta", 10000.0);
    // Older files say rope_scaling, with the base beside it; newer ones rope_parameters, with the base inside.
    const char* field = reader.find("rope_parameters") ? "rope_parameters" : "rope_scaling";
    const json* rope = reader.find(field);
    if (!rope) return;
    if (!rope->is_object()) reader.refuse(field, *rope, "an object");
    config.rope_theta = reader.number(*rope, "rope_theta", config.rope_theta);
    if (reader.number(*rope, "partial_rotary_factor", 1.0) != 1.0) reader.refuse(field, *rope, "partial_rotary_factor 1");
    if (reader.find(*rope, "mrope_section")) reader.refuse(field, *rope, "rope_type \"default\" or \"llama3\" without mrope_section");
    const std::string type = reader.text(*rope, reader.find(*rope, "rope_type") ? "rope_type" : "type", "default");
    if (type == "default") return;
    if (type != "llama3") reader.refuse(field, *rope, "rope_type \"default\" or \"llama3\"");
    for (const char* key : {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"})
        if (!reader.find(*rope, key)) reader.refuse(field, *rope, format("rope_type \"llama3\" with `%s`", key).c_str());
    config.rope_scaling.type = RopeScaling::Type::Llama3;
    config.rope_scaling.factor = reader.number(*rope, "factor", 1.0);
    config.rope_scaling.low_freq_factor = reader.number(*rope, "low_freq_factor", 1.0);
    config.rope_scaling.high_freq_factor = reader.number(*rope, "high_freq_factor", 4.0);
    config.rope_scaling.original_max_seq_len = reader.integer(*rope, "original_max_position_embeddings", 8192);
}

constexpr char kOwnType[] = "llm.zero";  // model_type of what transformers has no class for

// The shortest decimal number that reads back as this float: 1e-05, where the float itself is 9.999999747378752e-06.
double shortest(float value) {
    char text[64];
    *std::to_chars(text, text + sizeof text - 1, value).ptr = '\0';
    const double number = std::strtod(text, nullptr);
    return static_cast<float>(number) == value ? number : value;  // readers go through double, and rounding twice can end one float beside
}

}  // namespace

std::vector<std::string> preset_names() {
    std::vector<std::string> names;
    for (const Shape& shape : kPresets) names.push_back(shape.name);
    return names;
}

ModelConfig preset_config(const std::string& name) {
    for (const Shape& s : kPresets) {
        if (name != s.name) continue;
        ModelConfig config;
        config.name = s.name;
        config.num_layers = s.num_layers;
        config.channels = s.channels;
        config.num_heads = s.num_heads;
        config.num_kv_heads = s.num_kv_heads;
        config.head_dim = s.head_dim;
        config.ffn_dim = s.ffn_dim;
        config.vocab_size = s.vocab_size;
        config.max_seq_len = s.max_seq_len;
        config.rope_theta = s.rope_theta;
        config.norm_eps = s.norm_eps;
        config.tied = s.tied;
        config.qkv_bias = s.qkv_bias;
        return config;
    }
    std::string known;
    for (const Shape& shape : kPresets) known += (known.empty() ? "" : ", ") + std::string(shape.name);
    fail("there is no preset `%s`; the presets are %s", name.c_str(), known.c_str());
}

ModelConfig config_from_json_file(const std::string& path) {
    const ConfigReader reader(path);
    const std::string type = reader.text(reader.root(), "model_type", "");
    const bool own = type == kOwnType;
    if (type != "llama" && type != "qwen2" && type != "qwen3" && !own)
        fail("%s: model_type is `%s`; only llama, qwen2 and qwen3 models are supported, and this program's own `%s`", path.c_str(), type.c_str(), kOwnType);
    refuse_unsupported(reader, type);

    // transformers leaves a field out of the file when it has the type's default, so the defaults are part of the format. Our own type has none.
    const bool llama = type == "llama";
    if (own)
        for (const char* field : {"num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size",
                                  "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "qkv_bias", "qk_norm"})
            if (!reader.find(field)) fail("%s: has no field `%s`, and model_type `%s` has no default for it", path.c_str(), field, kOwnType);
    ModelConfig config;
    config.name = path;
    config.num_layers = reader.integer("num_hidden_layers", 32);
    config.channels = reader.integer("hidden_size", 4096);
    config.num_heads = reader.integer("num_attention_heads", 32);
    // An absent field has the type's default, an explicit null means one KV head per head.
    const bool null_kv_heads = reader.root().contains("num_key_value_heads") && !reader.find("num_key_value_heads");
    config.num_kv_heads = reader.integer("num_key_value_heads", llama || null_kv_heads ? config.num_heads : 32);
    if (!reader.find("head_dim") && type != "qwen3" && config.channels % config.num_heads != 0)
        fail("%s: hidden_size %d does not divide by num_attention_heads %d, and there is no `head_dim`; add one", path.c_str(),
             config.channels, config.num_heads);
    config.head_dim = reader.integer("head_dim", type == "qwen3" ? 128 : config.channels / config.num_heads);
    config.ffn_dim = reader.integer("intermediate_size", llama ? 11008 : 22016);
    config.vocab_size = reader.integer("vocab_size", llama ? 32000 : 151936);
    config.max_seq_len = reader.integer("max_position_embeddings", llama ? 2048 : 32768);
    config.norm_eps = static_cast<float>(reader.number("rms_norm_eps", 1e-6));
    config.tied = reader.flag("tie_word_embeddings", false);
    config.qkv_bias = own ? reader.flag("qkv_bias", false) : type == "qwen2";
    config.qk_norm = own ? reader.flag("qk_norm", false) : type == "qwen3";
    read_rope(reader, config);
    try {
        config.validate();
    } catch (const Error& error) {
        fail("%s: %s", path.c_str(), error.what());
    }
    return config;
}

std::string config_json_text(const ModelConfig& config, const std::string& dtype) {
    config.validate();
    CHECK(dtype == "bfloat16" || dtype == "float32", "the weights' dtype is `%s`; a config.json of ours says bfloat16 or float32", dtype.c_str());
    const std::string type = config.qkv_bias && config.qk_norm ? kOwnType : config.qkv_bias ? "qwen2" : config.qk_norm ? "qwen3" : "llama";
    json root = {{"model_type", type}, {"torch_dtype", dtype}, {"use_cache", true}, {"hidden_act", "silu"},
                 {"num_hidden_layers", config.num_layers}, {"hidden_size", config.channels}, {"num_attention_heads", config.num_heads},
                 {"num_key_value_heads", config.num_kv_heads}, {"head_dim", config.head_dim}, {"intermediate_size", config.ffn_dim}, {"vocab_size", config.vocab_size},
                 {"max_position_embeddings", config.max_seq_len}, {"rms_norm_eps", shortest(config.norm_eps)}, {"tie_word_embeddings", config.tied},
                 // Not known here, and llama's defaults are another tokenizer's.
                 {"bos_token_id", nullptr}, {"eos_token_id", nullptr},
                 // The older way to say it, which old and new versions of transformers read; old ones ignore rope_parameters and compute with 10000.
                 {"rope_theta", config.rope_theta}, {"rope_scaling", nullptr}};
    const RopeScaling& scaling = config.rope_scaling;
    if (scaling.type == RopeScaling::Type::Llama3)
        root["rope_scaling"] = {{"rope_type", "llama3"}, {"factor", scaling.factor}, {"low_freq_factor", scaling.low_freq_factor}, {"high_freq_factor", scaling.high_freq_factor},
                                {"original_max_position_embeddings", scaling.original_max_seq_len}};
    if (type == "llama") root.update({{"architectures", json::array({"LlamaForCausalLM"})}, {"attention_bias", false}, {"mlp_bias", false}});
    if (type == "qwen2") root.update({{"architectures", json::array({"Qwen2ForCausalLM"})}, {"use_sliding_window", false}});
    if (type == "qwen3") root.update({{"architectures", json::array({"Qwen3ForCausalLM"})}, {"attention_bias", false}, {"use_sliding_window", false}});
    if (type == kOwnType) root.update({{"qkv_bias", config.qkv_bias}, {"qk_norm", config.qk_norm}});
    return root.dump(2) + "\n";
}

void ModelConfig::validate() const {
    const struct { const char* name; int value, least, most; } ranges[] = {
        {"num_layers", num_layers, 1, 4096},      {"channels", channels, 8, 1 << 18},        {"num_heads", num_heads, 1, 8192},
        {"num_kv_heads", num_kv_heads, 1, 8192},  {"head_dim", head_dim, 8, 256},            {"ffn_dim", ffn_dim, 8, 1 << 20},
        {"vocab_size", vocab_size, 2, 1 << 24},   {"max_seq_len", max_seq_len, 1, 1 << 22},
    };
    for (const auto& range : ranges)
        CHECK(range.value >= range.least && range.value <= range.most, "%s is %d; it must be between %d and %d", range.name, range.value,
              range.least, range.most);
    if (num_heads % num_kv_heads != 0) {
        // Name the divisors on both sides: the user wants the nearest legal value, not the rule alone.
        int below = num_kv_heads, above = num_kv_heads;
        while (below > 1 && num_heads % below != 0) --below;
        while (above < num_heads && num_heads % above != 0) ++above;
        if (above > num_heads) above = num_heads;
        fail("num_heads %d does not divide by num_kv_heads %d; try num_kv_heads %d or %d", num_heads, num_kv_heads, below, above);
    }
    CHECK(head_dim % 2 == 0, "head_dim is %d, which is odd; rotary embedding turns pairs of elements, try %s", head_dim,
          nearest_multiples_of_8(head_dim).c_str());
    const struct { const char* name; int value; } eights[] = {{"head_dim", head_dim}, {"channels", channels}, {"ffn_dim", ffn_dim}};
    for (const auto& eight : eights)
        CHECK(eight.value % 8 == 0, "%s is %d, not a multiple of 8 (rows are read 16 bytes at a time); try %s", eight.name, eight.value,
              nearest_multiples_of_8(eight.value).c_str());
    CHECK(static_cast<long long>(num_heads) * head_dim <= (1 << 18), "num_heads %d x head_dim %d = %lld is more than %d; use fewer heads",
          num_heads, head_dim, static_cast<long long>(num_heads) * head_dim, 1 << 18);
    CHECK(std::isfinite(rope_theta) && rope_theta >= 1.0, "rope_theta is %g; it must be a finite number of at least 1 (usual: 10000)", rope_theta);
    CHECK(std::isfinite(norm_eps) && norm_eps > 0.0f && norm_eps <= 0.1f, "norm_eps is %g; it must be above 0 and at most 0.1 (usual: 1e-5)", norm_eps);
    if (rope_scaling.type == RopeScaling::Type::Llama3) {
        const RopeScaling& s = rope_scaling;
        CHECK(std::isfinite(s.factor) && s.factor >= 1.0, "the rope scaling's factor is %g; it must be at least 1", s.factor);
        CHECK(std::isfinite(s.low_freq_factor) && s.low_freq_factor > 0.0, "the rope scaling's low_freq_factor is %g; it must be above 0", s.low_freq_factor);
        CHECK(std::isfinite(s.high_freq_factor) && s.high_freq_factor > s.low_freq_factor,
              "the rope scaling's high_freq_factor is %g; it must be above low_freq_factor %g", s.high_freq_factor, s.low_freq_factor);
        CHECK(s.original_max_seq_len >= 1, "the rope scaling's original sequence length is %d; it must be at least 1", s.original_max_seq_len);
    }
}

long long count_parameters(const ModelConfig& c) {
    const long long C = c.channels, F = c.ffn_dim, HD = c.head_dim, V = c.vocab_size;
    const long long q = c.num_heads * HD, kv = c.num_kv_heads * HD;
    long long layer = C * (q + 2 * kv) + q * C + 3 * C * F + 2 * C;
    if (c.qkv_bias) layer += q + 2 * kv;
    if (c.qk_norm) layer += 2 * HD;
    return layer * c.num_layers + V * C * (c.tied ? 1 : 2) + C;
}
