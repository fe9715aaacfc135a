// Model shapes: presets, every rule of validate(), and Hugging Face's config.json with all that must be refused.
#include <cmath>
#include <map>

#include <nlohmann/json.hpp>

#include "dev/test/host_test.h"
#include "llmc/model_config.h"

using nlohmann::json;

namespace {

TEST(Presets, AreValidAndHaveTheirSize) {
    // The Qwen2.5 figures are the published parameter counts to the last one, the 4B and 124M ones follow from the shape by hand.
    const std::map<std::string, long long> exact = {{"qwen2.5-0.5B", 494032768},  {"qwen2.5-1.5B", 1543714304}, {"qwen2.5-3B", 3085938688},
                                                    {"qwen2.5-7B", 7615616512},   {"4B", 4009430016},           {"124M", 123551232}};
    const std::map<std::string, double> about = {{"0.5B", 0.5e9}, {"1.5B", 1.5e9}, {"3B", 3.0e9}, {"4B", 4.0e9}, {"124M", 124e6}};
    for (const std::string& name : preset_names()) {
        const ModelConfig config = preset_config(name);
        EXPECT_NO_THROW(config.validate()) << name;
        EXPECT_EQ(config.name, name);
        EXPECT_EQ(config.padded_vocab() % 128, 0);
        EXPECT_GE(config.padded_vocab(), config.vocab_size);
        if (exact.count(name)) { EXPECT_EQ(count_parameters(config), exact.at(name)) << name; }
        if (about.count(name)) { EXPECT_NEAR(count_parameters(config) / about.at(name), 1.0, 0.08) << name; }
    }
    EXPECT_EQ(preset_config("124M").padded_vocab(), 50304);
    EXPECT_EQ(preset_config("tiny").padded_vocab(), 384);
    expect_error([] { preset_config("5B"); }, {"`5B`", "tiny", "qwen2.5-7B"});
}

TEST(Validate, NamesFieldValueAndFix) {
    const auto refused = [](auto change, const std::vector<std::string>& words) {
        ModelConfig config = preset_config("tiny");
        change(config);
        expect_error([&] { config.validate(); }, words);
    };
    refused([](ModelConfig& c) { c.num_heads = 12; c.num_kv_heads = 5; }, {"num_heads 12", "num_kv_heads 5", "4 or 6"});
    refused([](ModelConfig& c) { c.num_kv_heads = 8; }, {"num_heads 4", "num_kv_heads 8", "4 or 4"});
    refused([](ModelConfig& c) { c.head_dim = 33; }, {"head_dim is 33", "odd", "32 or 40"});
    refused([](ModelConfig& c) { c.head_dim = 36; }, {"head_dim is 36", "multiple of 8", "32 or 40"});
    refused([](ModelConfig& c) { c.channels = 130; }, {"channels is 130", "128 or 136"});
    refused([](ModelConfig& c) { c.ffn_dim = 383; }, {"ffn_dim is 383", "376 or 384"});
    refused([](ModelConfig& c) { c.head_dim = 264; }, {"head_dim is 264", "256"});
    refused([](ModelConfig& c) { c.vocab_size = 1; }, {"vocab_size is 1"});
    refused([](ModelConfig& c) { c.num_layers = 0; }, {"num_layers is 0"});
    refused([](ModelConfig& c) { c.num_kv_heads = 0; }, {"num_kv_heads is 0"});
    refused([](ModelConfig& c) { c.channels = -8; }, {"channels is -8"});
    refused([](ModelConfig& c) { c.max_seq_len = 0; }, {"max_seq_len is 0"});
    refused([](ModelConfig& c) { c.num_heads = 2048; c.num_kv_heads = 2; c.head_dim = 256; }, {"num_heads 2048 x head_dim 256"});
    refused([](ModelConfig& c) { c.rope_theta = 0; }, {"rope_theta is 0"});
    refused([](ModelConfig& c) { c.rope_theta = NAN; }, {"rope_theta is nan"});
    refused([](ModelConfig& c) { c.norm_eps = 0; }, {"norm_eps is 0"});
    refused([](ModelConfig& c) { c.rope_scaling = {RopeScaling::Type::Llama3, 0.5, 1, 4, 8192}; }, {"factor is 0.5"});
    refused([](ModelConfig& c) { c.rope_scaling = {RopeScaling::Type::Llama3, 8, 4, 4, 8192}; }, {"high_freq_factor is 4"});
}

json llama() {
    return {{"model_type", "llama"}, {"hidden_size", 2048}, {"num_hidden_layers", 16}, {"num_attention_heads", 32}, {"num_key_value_heads", 8}, {"head_dim", 64},
            {"intermediate_size", 8192}, {"vocab_size", 128256}, {"max_position_embeddings", 131072}, {"rms_norm_eps", 1e-5}, {"rope_theta", 500000.0},
            {"tie_word_embeddings", true}, {"hidden_act", "silu"}, {"attention_bias", false}, {"mlp_bias", false}, {"attention_dropout", 0.0}, {"pretraining_tp", 1},
            {"rope_scaling", {{"factor", 32.0}, {"high_freq_factor", 4.0}, {"low_freq_factor", 1.0}, {"original_max_position_embeddings", 8192}, {"rope_type", "llama3"}}}};
}

class ConfigJson : public testing::Test {
protected:
    ModelConfig read(const json& root) {
        write_file(path(), root.dump());
        return config_from_json_file(path());
    }
    void refused(json root, const json& patch, const std::vector<std::string>& words) {
        root.update(patch);
        expect_error([&] { read(root); }, words);
    }
    std::string path() const { return folder_.file("config.json"); }
    TempFolder folder_;
};

TEST_F(ConfigJson, LlamaWithEverything) {
    const ModelConfig c = read(llama());
    EXPECT_EQ(c.channels, 2048);
    EXPECT_EQ(c.num_layers, 16);
    EXPECT_EQ(c.num_heads, 32);
    EXPECT_EQ(c.num_kv_heads, 8);
    EXPECT_EQ(c.head_dim, 64);
    EXPECT_EQ(c.ffn_dim, 8192);
    EXPECT_EQ(c.vocab_size, 128256);
    EXPECT_EQ(c.max_seq_len, 131072);
    EXPECT_EQ(c.rope_theta, 500000.0);
    EXPECT_FLOAT_EQ(c.norm_eps, 1e-5f);
    EXPECT_TRUE(c.tied);
    EXPECT_FALSE(c.qkv_bias);
    EXPECT_FALSE(c.qk_norm);
    EXPECT_EQ(c.rope_scaling.type, RopeScaling::Type::Llama3);
    EXPECT_EQ(c.rope_scaling.factor, 32.0);
    EXPECT_EQ(c.rope_scaling.original_max_seq_len, 8192);
}

TEST_F(ConfigJson, MissingFieldsTakeTheDefaultsOfTransformers) {
    const ModelConfig a = read({{"model_type", "llama"}});
    EXPECT_EQ(a.vocab_size, 32000);
    EXPECT_EQ(a.channels, 4096);
    EXPECT_EQ(a.ffn_dim, 11008);
    EXPECT_EQ(a.num_layers, 32);
    EXPECT_EQ(a.num_heads, 32);
    EXPECT_EQ(a.num_kv_heads, 32);
    EXPECT_EQ(a.head_dim, 128);
    EXPECT_EQ(a.max_seq_len, 2048);
    EXPECT_FLOAT_EQ(a.norm_eps, 1e-6f);
    EXPECT_EQ(a.rope_theta, 10000.0);
    EXPECT_FALSE(a.tied);
    EXPECT_EQ(a.rope_scaling.type, RopeScaling::Type::None);
    EXPECT_EQ(read({{"model_type", "llama"}, {"num_attention_heads", 16}}).num_kv_heads, 16);
    const ModelConfig b = read({{"model_type", "qwen2"}});
    EXPECT_EQ(b.vocab_size, 151936);
    EXPECT_EQ(b.ffn_dim, 22016);
    EXPECT_EQ(b.max_seq_len, 32768);
    EXPECT_EQ(b.num_kv_heads, 32);
    EXPECT_TRUE(b.qkv_bias);
    EXPECT_EQ(read({{"model_type", "qwen2"}, {"num_attention_heads", 64}, {"num_key_value_heads", nullptr}}).num_kv_heads, 64);
    const ModelConfig c = read({{"model_type", "qwen3"}, {"hidden_size", 1024}});
    EXPECT_EQ(c.head_dim, 128);  // free of hidden_size
    EXPECT_TRUE(c.qk_norm);
    EXPECT_FALSE(c.qkv_bias);
}

TEST_F(ConfigJson, TheNewerRopeParametersAreRead) {
    json root = llama();
    root["rope_parameters"] = root["rope_scaling"];
    root["rope_parameters"]["rope_theta"] = 123456.0;
    root.erase("rope_scaling");
    root.erase("rope_theta");
    const ModelConfig c = read(root);
    EXPECT_EQ(c.rope_theta, 123456.0);
    EXPECT_EQ(c.rope_scaling.factor, 32.0);
    root["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 777.0}};
    EXPECT_EQ(read(root).rope_scaling.type, RopeScaling::Type::None);
    EXPECT_EQ(read(root).rope_theta, 777.0);
}

TEST_F(ConfigJson, WhatIsNotComputedIsRefusedByName) {
    refused(llama(), {{"model_type", "mixtral"}}, {path(), "`mixtral`", "llama, qwen2 and qwen3"});
    refused({{"hidden_size", 64}}, json::object(), {"model_type is ``"});
    refused(llama(), {{"hidden_act", "gelu"}}, {"hidden_act", "gelu", "silu"});
    refused(llama(), {{"attention_bias", true}}, {"attention_bias"});
    refused(llama(), {{"mlp_bias", true}}, {"mlp_bias"});
    refused(llama(), {{"attention_dropout", 0.1}}, {"attention_dropout", "0.1"});
    refused(llama(), {{"pretraining_tp", 2}}, {"pretraining_tp"});
    refused(llama(), {{"partial_rotary_factor", 0.5}}, {"partial_rotary_factor"});
    refused(llama(), {{"quantization_config", {{"bits", 4}}}}, {"quantization_config"});
    const json qwen2 = {{"model_type", "qwen2"}};
    refused(qwen2, {{"use_sliding_window", true}}, {"use_sliding_window"});
    refused(qwen2, {{"use_mrope", true}}, {"use_mrope"});
    refused(qwen2, {{"layer_types", {"full_attention", "sliding_attention"}}}, {"layer_types", "sliding_attention"});
    refused(qwen2, {{"rope_scaling", {{"type", "mrope"}, {"mrope_section", {16, 24, 24}}}}}, {"rope_scaling", "mrope"});
    refused({{"model_type", "qwen3"}}, {{"attention_bias", true}}, {"attention_bias"});
    for (const char* type : {"linear", "dynamic", "yarn", "longrope"}) refused(llama(), {{"rope_scaling", {{"rope_type", type}, {"factor", 2.0}}}}, {"rope_scaling", type, "llama3"});
    refused(llama(), {{"rope_scaling", {{"type", "linear"}, {"factor", 2.0}}}}, {"rope_scaling", "linear"});
    refused(llama(), {{"rope_scaling", {{"rope_type", "llama3"}, {"factor", 2.0}}}}, {"low_freq_factor"});
    // Harmless company of a window that is off.
    EXPECT_NO_THROW(read({{"model_type", "qwen2"}, {"use_sliding_window", false}, {"sliding_window", 4096}, {"max_window_layers", 21}, {"layer_types", {"full_attention"}}}));
}

TEST_F(ConfigJson, BrokenFilesAndValuesAreRefusedAndNamed) {
    expect_error([&] { config_from_json_file(folder_.file("none.json")); }, {"none.json", "No such file"});
    expect_error([&] { config_from_json_file(folder_.path()); }, {folder_.path(), "regular file"});
    for (const char* text : {"", "{", "[]", "null", "{\"model_type\": \"llama\"", "\x01\x02"}) {
        write_file(path(), text);
        expect_error([&] { config_from_json_file(path()); }, {path()});
    }
    refused(llama(), {{"hidden_size", "big"}}, {path(), "hidden_size", "big"});
    refused(llama(), {{"hidden_size", 12.5}}, {"hidden_size", "12.5"});
    refused(llama(), {{"hidden_size", -8}}, {"hidden_size", "-8"});
    refused(llama(), {{"vocab_size", 99999999999ll}}, {"vocab_size", "99999999999"});
    refused(llama(), {{"tie_word_embeddings", 1}}, {"tie_word_embeddings"});
    refused(llama(), {{"num_key_value_heads", 5}}, {path(), "num_heads 32", "num_kv_heads 5"});
    refused(llama(), {{"head_dim", 65}}, {"head_dim is 65", "odd"});
    refused(llama(), {{"head_dim", nullptr}, {"hidden_size", 2040}}, {"hidden_size 2040", "32"});
    refused(llama(), {{"rms_norm_eps", 0}}, {"norm_eps"});
    refused(llama(), {{"model_type", 7}}, {"model_type"});
}

TEST(ReferenceConfigs, AreRead) {
    // The committed dumps; the test runs at the root of the repository.
    if (!std::filesystem::exists("dev/reference/llama/config.json")) GTEST_SKIP() << "not at the root of the repository";
    const ModelConfig a = config_from_json_file("dev/reference/llama/config.json");
    EXPECT_EQ(a.rope_scaling.type, RopeScaling::Type::Llama3);
    EXPECT_FALSE(a.tied);
    const ModelConfig b = config_from_json_file("dev/reference/qwen2/config.json");
    EXPECT_TRUE(b.qkv_bias && b.tied);
    const ModelConfig c = config_from_json_file("dev/reference/qwen3/config.json");
    EXPECT_TRUE(c.qk_norm);
    EXPECT_NE(c.num_heads * c.head_dim, c.channels);
    // The one that takes test_gpt through attention on tensor cores.
    EXPECT_EQ(config_from_json_file("dev/reference/llama64/config.json").head_dim, 64);
}

TEST(PeerConfigs, AreThePresets) {
    // What PyTorch trains beside us on a GPU: a file that differs from the preset in one field would compare two models.
    if (!std::filesystem::exists("dev/gpu/models/qwen2.5-0.5b.json")) GTEST_SKIP() << "not at the root of the repository";
    const std::map<std::string, std::string> files = {{"qwen2.5-0.5B", "qwen2.5-0.5b"}, {"qwen2.5-1.5B", "qwen2.5-1.5b"}, {"qwen2.5-3B", "qwen2.5-3b"}};
    for (const auto& [preset, file] : files) {
        SCOPED_TRACE(preset);
        const ModelConfig a = preset_config(preset), b = config_from_json_file("dev/gpu/models/" + file + ".json");
        EXPECT_EQ(a.num_layers, b.num_layers);
        EXPECT_EQ(a.channels, b.channels);
        EXPECT_EQ(a.num_heads, b.num_heads);
        EXPECT_EQ(a.num_kv_heads, b.num_kv_heads);
        EXPECT_EQ(a.head_dim, b.head_dim);
        EXPECT_EQ(a.ffn_dim, b.ffn_dim);
        EXPECT_EQ(a.vocab_size, b.vocab_size);
        EXPECT_EQ(a.max_seq_len, b.max_seq_len);
        EXPECT_EQ(a.rope_theta, b.rope_theta);
        EXPECT_EQ(a.rope_scaling.type, b.rope_scaling.type);
        EXPECT_EQ(a.norm_eps, b.norm_eps);
        EXPECT_EQ(a.tied, b.tied);
        EXPECT_EQ(a.qkv_bias, b.qkv_bias);
        EXPECT_EQ(a.qk_norm, b.qk_norm);
        EXPECT_EQ(count_parameters(a), count_parameters(b));
    }
}

}  // namespace
