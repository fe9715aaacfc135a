// The shape of a model: what the Llama family needs to be told, and nothing about training it.
//
// A ModelConfig comes from a preset, from a Hugging Face config.json, or from either with single fields overridden on the command
// line; validate() is the one place that says which shapes the kernels accept.
#pragma once

#include <string>
#include <vector>

// RoPE frequency scaling. None leaves the frequencies alone; Llama3 is Hugging Face's rope_type "llama3".
struct RopeScaling {
    enum class Type { None, Llama3 };
    Type type = Type::None;
    double factor = 1.0;             // long wavelengths are stretched by this
    double low_freq_factor = 1.0;    // wavelengths above original_max_seq_len / low_freq_factor count as long
    double high_freq_factor = 4.0;   // wavelengths below original_max_seq_len / high_freq_factor stay as they are
    int original_max_seq_len = 8192; // the sequence length the model was first trained with
};

struct ModelConfig {
    std::string name;      // preset or file this came from, for the start-up print
    int num_layers = 0;    // L
    int channels = 0;      // C
    int num_heads = 0;     // NH
    int num_kv_heads = 0;  // NKV, divides NH; keys and values are never replicated
    int head_dim = 0;      // HD, free: NH * HD need not be C
    int ffn_dim = 0;       // F, width of the SwiGLU
    int vocab_size = 0;    // V, the ids that exist
    int max_seq_len = 0;   // longest sequence the rotary table covers
    double rope_theta = 10000.0;
    RopeScaling rope_scaling;
    float norm_eps = 1e-5f;
    bool tied = false;      // the head is the embedding
    bool qkv_bias = false;  // Qwen2
    bool qk_norm = false;   // Qwen3

    // Vp: rows of the embedding and the head. 128 keeps every product of the head on full tiles.
    int padded_vocab() const { return (vocab_size + 127) / 128 * 128; }

    // Throws Error naming the field, its value and the nearest fix.
    void validate() const;
};

// The names preset_config() knows, smallest first.
std::vector<std::string> preset_names();

// Throws Error listing the known names.
ModelConfig preset_config(const std::string& name);

// Reads a Hugging Face config.json of model_type llama, qwen2 or qwen3 (missing fields take transformers' defaults for that type), or of config_json_text()'s
// own type `llm.zero`, which has no defaults. What this program does not compute (sliding windows, other activations, other RoPE types, dropout ...) is refused by name.
ModelConfig config_from_json_file(const std::string& path);

// A Hugging Face config.json that config_from_json_file() and transformers read as this model; `dtype`, "bfloat16" or "float32", is that of the weights beside it.
// model_type is llama, qwen2 with qkv_bias, qwen3 with qk_norm. A model with both has no class there: its type is "llm.zero", which transformers refuses by name.
// (transformers 5 also refuses a llama whose channels are no multiple of its heads; earlier versions take it.)
// Throws Error if the shape is not valid.
std::string config_json_text(const ModelConfig& config, const std::string& dtype);

// Parameters that a model of this shape has, padding of the vocabulary not counted.
long long count_parameters(const ModelConfig& config);
