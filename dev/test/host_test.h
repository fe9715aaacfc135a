// Shared by the tests of the host parts: temporary folders, small files, and errors by their words.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include "llmc/error.h"
#include "llmc/model_config.h"

// A folder that is removed with everything in it.
class TempFolder {
public:
    TempFolder() {
        std::string name = (std::filesystem::temp_directory_path() / "llm_zero_test_XXXXXX").string();
        if (!mkdtemp(name.data())) std::abort();
        path_ = name;
    }
    ~TempFolder() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    const std::string& path() const { return path_; }
    std::string file(const std::string& name) const { return path_ + "/" + name; }

private:
    std::string path_;
};

// Three small layers in five units.
inline ModelConfig small_config(bool tied = false, bool bias = false, bool qk_norm = false) {
    ModelConfig config;
    config.num_layers = 3;
    config.channels = 24;  // rows that are no multiple of 128 elements leave gaps
    config.num_heads = 4;
    config.num_kv_heads = 2;
    config.head_dim = 8;
    config.ffn_dim = 40;
    config.vocab_size = 300;
    config.max_seq_len = 64;
    config.tied = tied;
    config.qkv_bias = bias;
    config.qk_norm = qk_norm;
    return config;
}

inline void write_file(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

inline std::string read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
}

template <typename T>
std::string bytes_of(const T& value) { return std::string(reinterpret_cast<const char*>(&value), sizeof value); }

// The bytes of a token shard of 2- or 4-byte tokens.
inline std::string shard_bytes(const std::vector<uint32_t>& tokens, int token_bytes = 2) {
    std::vector<int32_t> header(256, 0);
    header[0] = token_bytes == 2 ? 20240520 : 20240801;
    header[1] = token_bytes == 2 ? 1 : 7;
    header[2] = static_cast<int32_t>(tokens.size());
    std::string bytes(reinterpret_cast<const char*>(header.data()), 1024);
    for (const uint32_t token : tokens) bytes += token_bytes == 2 ? bytes_of(static_cast<uint16_t>(token)) : bytes_of(token);
    return bytes;
}

// Runs `call`, which must throw exactly E, with a message that holds every one of `words`.
template <typename E = Error, typename Call>
void expect_error(Call call, const std::vector<std::string>& words) {
    std::string message;
    try {
        call();
        ADD_FAILURE() << "no error; expected one that names `" << words.front() << "`";
        return;
    } catch (const E& error) {
        message = error.what();
        EXPECT_TRUE(typeid(error) == typeid(E)) << "wrong kind of error: " << message;
    }
    for (const std::string& word : words) EXPECT_NE(message.find(word), std::string::npos) << "`" << word << "` is not in: " << message;
}

// Are these one model? Everything counts but the name, and of a rope scaling that is off nothing but that.
inline bool same_model(const ModelConfig& a, const ModelConfig& b) {
    const auto shape = [](const ModelConfig& c) {
        return std::tie(c.num_layers, c.channels, c.num_heads, c.num_kv_heads, c.head_dim, c.ffn_dim, c.vocab_size, c.max_seq_len, c.rope_theta, c.norm_eps, c.tied,
                        c.qkv_bias, c.qk_norm, c.rope_scaling.type);
    };
    const auto scaling = [](const RopeScaling& s) { return std::tie(s.factor, s.low_freq_factor, s.high_freq_factor, s.original_max_seq_len); };
    return shape(a) == shape(b) && (a.rope_scaling.type == RopeScaling::Type::None || scaling(a.rope_scaling) == scaling(b.rope_scaling));
}
