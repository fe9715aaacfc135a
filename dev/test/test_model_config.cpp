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

// The model that a written file is read as.
ModelConfig written_and_read(const ModelConfig& config, const char* dtype = "bfloat16") {
    TempFolder folder;
    write_file(folder.file("config.json"), config_json_text(config, dtype));
    return config_from_json_file(folder.file("config.json"));
}

// tied x qkv_bias x qk_norm x llama3 scaling, of a shape whose heads are not as wide as the model.
std::vector<ModelConfig> variants() {
    std::vector<ModelConfig> all;
    for (int bits = 0; bits < 16; ++bits) {
        ModelConfig config = small_config(bits & 1, bits & 2, bits & 4);
        if (bits & 8) config.rope_scaling = {RopeScaling::Type::Llama3, 8.5, 1.1, 4.3, 8191};
        config.rope_theta = 123456.789;
        all.push_back(config);
    }
    return all;
}

TEST(WrittenConfig, EveryModelIsReadBackAsItself) {
    for (const std::string& name : preset_names()) EXPECT_TRUE(same_model(written_and_read(preset_config(name)), preset_config(name))) << name;
    for (const ModelConfig& config : variants()) {
        for (const char* dtype : {"bfloat16", "float32"}) EXPECT_TRUE(same_model(written_and_read(config, dtype), config)) << config_json_text(config, dtype);
        for (const double theta : {1.0, 1e4, 1e6 / 3, 5e5, 1e15, 1.7e308, std::nextafter(1e4, 2e4)}) {
            ModelConfig other = config;
            other.rope_theta = theta;
            EXPECT_EQ(written_and_read(other).rope_theta, theta);
        }
    }
}

TEST(WrittenConfig, TheEpsilonIsShortAndExact) {
    ModelConfig config = small_config();
    const std::map<float, std::string> texts = {{1e-5f, "1e-05"}, {1e-6f, "1e-06"}, {0.001f, "0.001"}, {1.5e-5f, "1.5e-05"}, {0.1f, "0.1"}};
    for (const auto& [eps, text] : texts) {
        config.norm_eps = eps;
        EXPECT_NE(config_json_text(config, "float32").find("\"rms_norm_eps\": " + text + ",\n"), std::string::npos) << config_json_text(config, "float32");
        EXPECT_EQ(written_and_read(config).norm_eps, eps);
    }
    // Neighbours, the smallest floats, a spread of bit patterns, and 7.038531e-26: of all floats up to 0.1 the only one whose shortest text, read as a double and then
    // rounded, is the float beside it.
    std::vector<float> odd = {7.038531e-26f, std::nextafter(1e-5f, 0.0f), std::nextafter(1e-5f, 1.0f), std::nextafter(0.1f, 0.0f), 0x1p-149f, 0x1p-126f, 1e-40f, 1.0f / 3 * 1e-4f};
    for (uint32_t i = 0; i < 200; ++i) {
        const uint32_t bits = 0x00000001u + i * (0x3dccccccu / 200);
        memcpy(&odd.emplace_back(), &bits, sizeof bits);
    }
    for (const float eps : odd) {
        config.norm_eps = eps;
        EXPECT_EQ(written_and_read(config).norm_eps, eps);
    }
}

TEST(WrittenConfig, TheTypeIsTheOneOfTransformers) {
    const auto written = [](bool bias, bool qk_norm) { return json::parse(config_json_text(small_config(false, bias, qk_norm), "bfloat16")); };
    EXPECT_EQ(written(false, false)["model_type"], "llama");
    EXPECT_EQ(written(false, false)["architectures"], json::array({"LlamaForCausalLM"}));
    EXPECT_EQ(written(true, false)["model_type"], "qwen2");
    EXPECT_EQ(written(true, false)["architectures"], json::array({"Qwen2ForCausalLM"}));
    EXPECT_EQ(written(false, true)["model_type"], "qwen3");
    EXPECT_EQ(written(false, true)["architectures"], json::array({"Qwen3ForCausalLM"}));
    EXPECT_EQ(written(true, true)["model_type"], "llm.zero");
    EXPECT_FALSE(written(true, true).contains("architectures"));
    EXPECT_EQ(written(true, false)["torch_dtype"], "bfloat16");
    EXPECT_EQ(json::parse(config_json_text(small_config(), "float32"))["torch_dtype"], "float32");
    // Not left out: llama's defaults are 1 and 2, which are bytes of ours.
    EXPECT_TRUE(written(false, false).contains("bos_token_id") && written(false, false)["bos_token_id"].is_null());
    EXPECT_TRUE(written(false, false).contains("eos_token_id") && written(false, false)["eos_token_id"].is_null());
    expect_error([] { config_json_text(small_config(), "float16"); }, {"`float16`", "bfloat16"});
    ModelConfig broken = small_config();
    broken.head_dim = 7;
    expect_error([&] { config_json_text(broken, "float32"); }, {"head_dim is 7"});
}

TEST(WrittenConfig, ItsFieldsAreThoseThatTransformersWrites) {
    if (!std::filesystem::exists("dev/reference/llama/config.json")) GTEST_SKIP() << "not at the root of the repository";
    // In no file of dev/reference, and why they are written.
    const std::map<std::string, std::string> added = {
        {"torch_dtype", "a model that was built and not loaded has none; loading takes the weights' type from it"},
        {"qwen2.head_dim", "Qwen2's attention and rotary table use it where it is there; needed where it is not hidden_size / num_attention_heads"},
        {"qwen2.bos_token_id", "the default, said: the id is not known"}, {"qwen2.eos_token_id", "the same"},
        {"qwen3.bos_token_id", "the same"},                               {"qwen3.eos_token_id", "the same"}};
    // In the files there, and why they are not written.
    const std::map<std::string, std::string> left_out = {
        {"attention_dropout", "0 by default, and a matter of training"},
        {"initializer_range", "a matter of training"},
        {"pretraining_tp", "1 by default, and gone from newer versions"},
        {"layer_types", "made from use_sliding_window where it is missing"},
        {"max_window_layers", "means nothing without a window"},
        {"sliding_window", "the same"},
        {"transformers_version", "it did not write this file"}};
    for (const std::string type : {"llama", "qwen2", "qwen3"}) {
        SCOPED_TRACE(type);
        ModelConfig config = small_config(false, type == "qwen2", type == "qwen3");
        if (type == "llama") config.rope_scaling = {RopeScaling::Type::Llama3, 8, 1, 4, 16};
        const json ours = json::parse(config_json_text(config, "bfloat16")), theirs = json::parse(read_file("dev/reference/" + type + "/config.json"));
        ASSERT_EQ(ours["model_type"], type);
        for (const auto& item : ours.items()) {
            const std::string& field = item.key();
            const bool listed = added.count(field) || added.count(type + "." + field);
            EXPECT_NE(theirs.contains(field), listed) << field << (listed ? " is listed and in the file" : " is neither in the file nor listed");
            if (theirs.contains(field)) { EXPECT_STREQ(theirs[field].type_name(), item.value().type_name()) << field; }
            if (theirs.contains(field)) { EXPECT_EQ(theirs[field].is_number_float(), item.value().is_number_float()) << field; }
        }
        for (const auto& item : theirs.items()) EXPECT_NE(ours.contains(item.key()), left_out.count(item.key()) != 0) << item.key();
        for (const char* field : {"architectures", "model_type", "hidden_act", "use_cache", "attention_bias", "mlp_bias", "use_sliding_window", "bos_token_id", "eos_token_id"})
            if (theirs.contains(field)) { EXPECT_EQ(ours.value(field, json("missing")), theirs[field]) << field; }
    }
    const json rope = json::parse(read_file("dev/reference/llama/config.json"))["rope_scaling"];
    ModelConfig config = small_config();
    config.rope_scaling = {RopeScaling::Type::Llama3, 8, 1, 4, 16};
    EXPECT_EQ(json::parse(config_json_text(config, "bfloat16"))["rope_scaling"].dump(), rope.dump());  // as text: 8.0 stays a float
}

TEST(WrittenConfig, TheReferencesAreWrittenAsTheyWere) {
    if (!std::filesystem::exists("dev/reference/llama/config.json")) GTEST_SKIP() << "not at the root of the repository";
    for (const std::string family : {"llama", "llama64", "qwen2", "qwen3"}) {
        const std::string path = "dev/reference/" + family + "/config.json";
        const json ours = json::parse(config_json_text(config_from_json_file(path), "float32")), theirs = json::parse(read_file(path));
        for (const auto& item : ours.items())
            if (theirs.contains(item.key())) { EXPECT_EQ(theirs[item.key()].dump(), item.value().dump()) << family << " " << item.key(); }
    }
}

TEST_F(ConfigJson, OurOwnTypeHasNoDefaults) {
    const json whole = json::parse(config_json_text(small_config(true, true, true), "bfloat16"));
    EXPECT_TRUE(same_model(read(whole), small_config(true, true, true)));
    for (const char* field : {"num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size",
                              "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "qkv_bias", "qk_norm"}) {
        json root = whole;
        ASSERT_EQ(root.erase(field), 1u) << field;
        expect_error([&] { read(root); }, {path(), field, "llm.zero"});
    }
    refused(whole, {{"qkv_bias", 1}}, {"qkv_bias", "true or false"});
    refused(whole, {{"attention_bias", true}}, {"attention_bias"});
    refused(whole, {{"mlp_bias", true}}, {"mlp_bias"});
}

TEST(SameModel, EveryFieldCountsButTheName) {
    const ModelConfig base = variants().back();
    EXPECT_TRUE(same_model(base, base));
    const std::vector<void (*)(ModelConfig&)> changes = {
        [](ModelConfig& c) { c.num_layers += 1; }, [](ModelConfig& c) { c.channels += 8; }, [](ModelConfig& c) { c.num_heads += 1; }, [](ModelConfig& c) { c.num_kv_heads += 1; },
        [](ModelConfig& c) { c.head_dim += 8; }, [](ModelConfig& c) { c.ffn_dim += 8; }, [](ModelConfig& c) { c.vocab_size += 1; }, [](ModelConfig& c) { c.max_seq_len += 1; },
        [](ModelConfig& c) { c.rope_theta += 1; }, [](ModelConfig& c) { c.norm_eps *= 2; }, [](ModelConfig& c) { c.tied = !c.tied; },
        [](ModelConfig& c) { c.qkv_bias = !c.qkv_bias; }, [](ModelConfig& c) { c.qk_norm = !c.qk_norm; }, [](ModelConfig& c) { c.rope_scaling.type = RopeScaling::Type::None; },
        [](ModelConfig& c) { c.rope_scaling.factor += 1; }, [](ModelConfig& c) { c.rope_scaling.low_freq_factor += 1; },
        [](ModelConfig& c) { c.rope_scaling.high_freq_factor += 1; }, [](ModelConfig& c) { c.rope_scaling.original_max_seq_len += 1; }};
    for (size_t i = 0; i < changes.size(); ++i) {
        ModelConfig other = base;
        changes[i](other);
        EXPECT_FALSE(same_model(base, other)) << i;
        EXPECT_FALSE(same_model(other, base)) << i;
    }
    ModelConfig other = base;
    other.name = "other";
    EXPECT_TRUE(same_model(base, other));
    ModelConfig off = small_config(), also_off = small_config();
    also_off.rope_scaling.factor = 7;  // of a scaling that is not used
    EXPECT_TRUE(same_model(off, also_off));
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
