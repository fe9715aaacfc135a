// The tensors of a checkpoint: the files of any number of ranks hold every element once, any reader finds it again, and what is not this model's is refused by file and tensor.
//
// What is in the files comes from a map of the flat buffer made here, element by element, not from the pieces that the code under test cuts.
#include <functional>
#include <random>

#include <nlohmann/json.hpp>

#include "dev/test/host_test.h"
#include "llmc/checkpoint_tensors.h"
#include "llmc/durable_file.h"

namespace {

using Names = std::vector<std::string>;
constexpr const char* kSuffixes[] = {".master", ".exp_avg", ".exp_avg_sq"};

// Elements of all parameters before each.
std::vector<size_t> starts_of(const ParamTable& table) {
    std::vector<size_t> starts = {0};
    for (const Parameter& p : table.parameters) starts.push_back(starts.back() + p.count());
    return starts;
}

// Every element's value is its own: exact in fp32, and below 65536 for the bits of a weight.
float state_value(const std::vector<size_t>& starts, StateArray array, int parameter, size_t element) { return static_cast<float>((static_cast<size_t>(array) << 20) + starts[parameter] + element); }
uint16_t weight_bits(const std::vector<size_t>& starts, int parameter, size_t element) { return static_cast<uint16_t>(starts[parameter] + element); }

// Of every element of the flat buffer the parameter and its element; parameter -1: gap or padding.
std::vector<std::pair<int, size_t>> owners_of(const ParamTable& table, const FlatLayout& layout) {
    std::vector<std::pair<int, size_t>> owners(layout.total_count, {-1, 0});
    for (size_t i = 0; i < table.parameters.size(); ++i) {
        const Parameter& p = table.parameters[i];
        for (size_t element = 0; element < p.count(); ++element) owners.at(layout.unit_begin[p.unit] + p.offset + element) = {static_cast<int>(i), element};
    }
    return owners;
}

// Writes what every rank would; returns the names.
Names write_state(const std::string& folder, const ParamTable& table, const FlatLayout& layout) {
    const std::vector<size_t> starts = starts_of(table);
    const auto owners = owners_of(table, layout);
    Names names;
    for (int rank = 0; rank < layout.num_ranks; ++rank) {
        const StateFile file = optimizer_file(table, layout, rank);
        std::vector<float> values;
        for (const StateArray array : kStateArrays) {
            for (const Bucket& bucket : layout.buckets) {
                for (size_t i = 0; i < bucket.slice_count; ++i) {
                    const auto [parameter, element] = owners[bucket.begin + rank * bucket.slice_count + i];
                    if (parameter >= 0) values.push_back(state_value(starts, array, parameter, element));
                }
            }
        }
        EXPECT_EQ(file.data_bytes, values.size() * sizeof(float));
        EXPECT_EQ(file.header.size() % 8, 0u);
        DurableFile out(folder + "/" + file.name);
        out.write(file.header.data(), file.header.size());
        out.write(values.data(), values.size() * sizeof(float));
        EXPECT_EQ(out.finish().bytes, file.bytes());
        names.push_back(file.name);
    }
    return names;
}

Names write_weights(const std::string& folder, const ParamTable& table, size_t max_file_bytes = kMaxWeightsFileBytes) {
    const std::vector<size_t> starts = starts_of(table);
    Names names;
    for (const WeightsFile& weights : weights_files(table, 2, max_file_bytes)) {
        DurableFile out(folder + "/" + weights.file.name);
        out.write(weights.file.header.data(), weights.file.header.size());
        for (int i = weights.first_parameter; i < weights.end_parameter; ++i) {
            std::vector<uint16_t> bits;
            for (size_t element = 0; element < table.parameters[i].count(); ++element) bits.push_back(weight_bits(starts, i, element));
            out.write(bits.data(), bits.size() * 2);
        }
        EXPECT_EQ(out.finish().bytes, weights.file.bytes());
        names.push_back(weights.file.name);
    }
    return names;
}

// Reads [first, first + count) of a parameter, everything of it, and says where it is not the right value.
void expect_values(const CheckpointTensors& tensors, const std::vector<size_t>& starts, int parameter, size_t first, size_t count) {
    std::vector<uint16_t> bits(count + 1, 0xDEAD);
    tensors.read_weights(parameter, first, count, bits.data());
    for (size_t i = 0; i < count; ++i) ASSERT_EQ(bits[i], weight_bits(starts, parameter, first + i)) << parameter << " " << first << " + " << i;
    ASSERT_EQ(bits[count], 0xDEAD);
    for (const StateArray array : kStateArrays) {
        std::vector<float> values(count + 1, -1.0f);
        tensors.read_state(array, parameter, first, count, values.data());
        for (size_t i = 0; i < count; ++i) ASSERT_EQ(values[i], state_value(starts, array, parameter, first + i)) << parameter << " " << first << " + " << i;
        ASSERT_EQ(values[count], -1.0f);
    }
}

class CheckpointTensorsTest : public testing::TestWithParam<std::tuple<bool, bool, bool>> {};

TEST_P(CheckpointTensorsTest, WhatAnyRanksWriteIsReadInAnyRanges) {
    const auto [tied, bias, qk_norm] = GetParam();
    const ParamTable table = make_param_table(small_config(tied, bias, qk_norm));
    const std::vector<size_t> starts = starts_of(table);
    std::mt19937 random(7);
    for (int ranks = 1; ranks <= 7; ++ranks) {
        for (const double bucket_mb : {0.0, 0.02, 25.0}) {
            SCOPED_TRACE(format("%d ranks, buckets of %g MB", ranks, bucket_mb));
            const TempFolder folder;
            const FlatLayout layout = make_flat_layout(table, ranks, bucket_mb, 2);
            Names names = write_state(folder.path(), table, layout);
            // The files say themselves that they hold each element of each array once.
            std::map<std::string, std::vector<int>> seen;
            for (size_t rank = 0; rank < names.size(); ++rank) {
                EXPECT_EQ(names[rank], format("optimizer-%05zu-of-%05d.safetensors", rank, ranks));
                const SafetensorsFile file(folder.file(names[rank]));
                for (const auto& [name, tensor] : file.tensors()) {
                    ASSERT_EQ(tensor.shape.size(), 1u);
                    EXPECT_EQ(tensor.type, TensorType::F32);
                    const std::string parameter = name.substr(0, name.find(name.find(".exp_avg") != std::string::npos ? ".exp_avg" : ".master"));
                    const size_t first = std::stoull(file.metadata().at("offset:" + parameter));
                    std::vector<int>& counts = seen[name];
                    counts.resize(table.find(parameter).count(), 0);
                    for (size_t i = 0; i < tensor.count; ++i) counts.at(first + i)++;
                }
            }
            EXPECT_EQ(seen.size(), 3 * table.parameters.size());
            for (const auto& [name, counts] : seen) EXPECT_EQ(std::count(counts.begin(), counts.end(), 1), static_cast<long>(counts.size())) << name;

            for (const std::string& name : write_weights(folder.path(), table, bucket_mb > 0 ? 20000 : kMaxWeightsFileBytes)) names.push_back(name);
            std::shuffle(names.begin(), names.end(), random);
            for (const char* other : {"config.json", "product_choices.bin", "model.safetensors.index.json", "trainer.json", "model", "model123456"}) names.push_back(other);  // not opened
            const CheckpointTensors tensors(folder.path(), names, table, TensorType::BF16);
            for (size_t i = 0; i < table.parameters.size(); ++i) {
                const size_t count = table.parameters[i].count();
                expect_values(tensors, starts, static_cast<int>(i), 0, count);
                expect_values(tensors, starts, static_cast<int>(i), count - 1, 1);
                expect_values(tensors, starts, static_cast<int>(i), count / 2, 0);
                for (int draw = 0; draw < 8; ++draw) {
                    const size_t first = random() % count;
                    expect_values(tensors, starts, static_cast<int>(i), first, random() % (count - first) + 1);
                }
                if (HasFatalFailure()) return;
            }
        }
    }
}

TEST_P(CheckpointTensorsTest, FilesOfWeightsKeepToTheirLimit) {
    const auto [tied, bias, qk_norm] = GetParam();
    const ParamTable table = make_param_table(small_config(tied, bias, qk_norm));
    for (const size_t element_bytes : {2, 4}) {
        for (const size_t limit : {size_t{1}, size_t{1536}, size_t{14399}, size_t{14400}, size_t{20000}, size_t{33333}, table.parameter_count() * element_bytes - 1, table.parameter_count() * element_bytes,
                                   kMaxWeightsFileBytes}) {
            SCOPED_TRACE(format("limit %zu", limit));
            const TempFolder folder;
            const std::vector<WeightsFile> files = weights_files(table, element_bytes, limit);
            nlohmann::json map;
            int next = 0;
            size_t total = 0;
            for (size_t f = 0; f < files.size(); ++f) {
                const WeightsFile& weights = files[f];
                EXPECT_EQ(weights.file.name, files.size() == 1 ? std::string("model.safetensors") : format("model-%05zu-of-%05zu.safetensors", f + 1, files.size()));
                EXPECT_EQ(weights.first_parameter, next);
                ASSERT_GT(weights.end_parameter, weights.first_parameter);
                next = weights.end_parameter;
                total += weights.file.data_bytes;
                if (weights.file.data_bytes > limit) { EXPECT_EQ(weights.end_parameter, weights.first_parameter + 1); }
                // No file is begun before the one before it is full.
                if (f > 0) { EXPECT_GT(files[f - 1].file.data_bytes + table.parameters[weights.first_parameter].count() * element_bytes, limit); }
                write_file(folder.file(weights.file.name), weights.file.header + std::string(weights.file.data_bytes, '\0'));
                const SafetensorsFile file(folder.file(weights.file.name));
                EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"format", "pt"}}));
                EXPECT_EQ(file.tensors().size(), static_cast<size_t>(weights.end_parameter - weights.first_parameter));
                const unsigned char* at = nullptr;
                for (int i = weights.first_parameter; i < weights.end_parameter; ++i) {
                    const Parameter& p = table.parameters[i];
                    const SafetensorsTensor& tensor = file.get(p.name, p.is_matrix ? std::vector<size_t>{p.rows, p.cols} : std::vector<size_t>{p.rows});
                    EXPECT_EQ(tensor.type, element_bytes == 2 ? TensorType::BF16 : TensorType::F32);
                    if (at) { EXPECT_EQ(tensor.data, at) << p.name; }  // in the table's order
                    at = tensor.data + p.count() * element_bytes;
                    map[p.name] = weights.file.name;
                }
            }
            EXPECT_EQ(next, static_cast<int>(table.parameters.size()));
            EXPECT_EQ(total, table.parameter_count() * element_bytes);
            const std::string index = weights_index(table, files, element_bytes);
            EXPECT_EQ(files.size() == 1, limit >= total);
            EXPECT_EQ(index.empty(), files.size() == 1);
            if (index.empty()) continue;
            const nlohmann::json parsed = nlohmann::json::parse(index);
            EXPECT_EQ(parsed.at("weight_map"), map);
            EXPECT_EQ(parsed.at("metadata").at("total_size").get<size_t>(), total);
        }
    }
}

TEST_P(CheckpointTensorsTest, NoRankHoldsMoreThanTheLargestShare) {
    const auto [tied, bias, qk_norm] = GetParam();
    const ParamTable table = make_param_table(small_config(tied, bias, qk_norm));
    for (int ranks = 1; ranks <= 7; ++ranks) {
        for (const size_t limit : {size_t{3000}, size_t{20000}, kMaxWeightsFileBytes}) {
            const FlatLayout layout = make_flat_layout(table, ranks, 0.02, 2);
            const std::vector<WeightsFile> files = weights_files(table, 2, limit);
            size_t largest = 0;
            for (int rank = 0; rank < ranks; ++rank) {
                size_t bytes = optimizer_file(table, layout, rank).data_bytes;
                for (size_t f = rank; f < files.size(); f += ranks) bytes += files[f].file.data_bytes;
                largest = std::max(largest, bytes);
            }
            EXPECT_GE(largest_share_bytes(layout, files), largest);
            EXPECT_LE(largest_share_bytes(layout, files), largest + table.parameter_count() * 2 + layout.shard_count * 12);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Shapes, CheckpointTensorsTest, testing::Combine(testing::Bool(), testing::Bool(), testing::Bool()));

TEST(LargestShare, ByHand) {
    // 35072 elements of the flat buffer in one bucket, 30120 parameters; 20000 bytes cut the weights into files of 19104, 19344, 7392 and 14400 bytes.
    const ParamTable table = make_param_table(small_config());
    const std::vector<WeightsFile> one = weights_files(table, 2), four = weights_files(table, 2, 20000);
    ASSERT_EQ(four.size(), 4u);
    for (const auto& [f, bytes] : std::map<int, size_t>{{0, 19104}, {1, 19344}, {2, 7392}, {3, 14400}}) EXPECT_EQ(four[f].file.data_bytes, bytes);
    const auto share = [&](int ranks, const std::vector<WeightsFile>& files) { return largest_share_bytes(make_flat_layout(table, ranks, 25.0, 2), files); };
    EXPECT_EQ(share(1, one), 35072u * 12 + 60240);
    EXPECT_EQ(share(2, one), 17536u * 12 + 60240);
    EXPECT_EQ(share(1, four), 35072u * 12 + 60240);
    EXPECT_EQ(share(2, four), 17536u * 12 + 19344 + 14400);
    EXPECT_EQ(share(3, four), 11712u * 12 + 19104 + 14400);  // 183 x 64 elements
    EXPECT_EQ(share(5, four), 7040u * 12 + 19344);           // 110 x 64
}

TEST(LargestShare, MemoryThatIsNotThereIsSaid) {
    EXPECT_NO_THROW(check_host_memory(1, 1, "a copy"));
    expect_error([] { check_host_memory(size_t{1} << 60, 1, "a copy of the state"); }, {"a copy of the state needs", "1 rank(s)", "--save-mode stream"});
    // What one process can take, a million together cannot.
    EXPECT_NO_THROW(check_host_memory(1 << 20, 1, "a copy"));
    expect_error([] { check_host_memory(1 << 20, 100'000'000, "a copy"); }, {"100000000 rank(s)"});
}

// ---- refusals ----

// A safetensors file in parts, to be written again with something else in it.
struct Parts {
    struct Tensor { SafetensorsEntry entry; std::string data; };
    std::vector<Tensor> tensors;
    std::map<std::string, std::string> metadata;

    Tensor& get(const std::string& name) {
        for (Tensor& tensor : tensors)
            if (tensor.entry.name == name) return tensor;
        throw std::runtime_error("the test has no tensor " + name);
    }
    void erase(const std::string& name) {
        get(name);
        std::erase_if(tensors, [&](const Tensor& tensor) { return tensor.entry.name == name; });
    }
};

Parts read_parts(const std::string& path) {
    const SafetensorsFile file(path);
    Parts parts;
    parts.metadata = file.metadata();
    for (const auto& [name, tensor] : file.tensors())
        parts.tensors.push_back({{name, tensor.type, tensor.shape}, std::string(reinterpret_cast<const char*>(tensor.data), tensor.count * tensor_type_bytes(tensor.type))});
    return parts;
}

void write_parts(const std::string& path, const Parts& parts) {
    std::vector<SafetensorsEntry> entries;
    std::string data;
    for (const Parts::Tensor& tensor : parts.tensors) {
        entries.push_back(tensor.entry);
        data += tensor.data;
    }
    write_file(path, safetensors_header(entries, parts.metadata) + data);
}

// Two ranks' files of a small model. Rank 0's ends and rank 1's begins in the middle of kCut in the one bucket there is.
class CheckpointTensorsRefusals : public testing::Test {
protected:
    const ParamTable table = make_param_table(small_config());
    const std::string kFirst = "optimizer-00000-of-00002.safetensors", kSecond = "optimizer-00001-of-00002.safetensors", kWeights = "model.safetensors";
    TempFolder folder;
    Names names;
    std::string cut;    // the parameter that both hold a part of
    size_t cut_at = 0;  // first element of rank 1's part

    void SetUp() override {
        names = write_state(folder.path(), table, make_flat_layout(table, 2, 25.0, 2));
        for (const std::string& name : write_weights(folder.path(), table)) names.push_back(name);
        for (const auto& [key, value] : read_parts(folder.file(kSecond)).metadata) {
            if (key == "format" || value == "0") continue;
            cut = key.substr(strlen("offset:"));
            cut_at = std::stoull(value);
        }
        ASSERT_GT(cut_at, 0u);
        ASSERT_NO_THROW(open());
    }

    void open() { CheckpointTensors tensors(folder.path(), names, table, TensorType::BF16); }

    // With file `name` changed the checkpoint is refused with these words; afterwards it is as it was.
    void refused(const std::string& name, const std::function<void(Parts&)>& change, const Names& words) {
        const std::string before = read_file(folder.file(name));
        Parts parts = read_parts(folder.file(name));
        change(parts);
        write_parts(folder.file(name), parts);
        expect_error([&] { open(); }, words);
        write_file(folder.file(name), before);
    }
    void without(const std::string& name, const Names& words) {
        const Names all = names;
        std::erase(names, name);
        ASSERT_EQ(names.size() + 1, all.size());
        expect_error([&] { open(); }, words);
        names = all;
    }
};

TEST_F(CheckpointTensorsRefusals, AFileThatIsMissingOrThereTwice) {
    without(kFirst, {"the master of `model.embed_tokens.weight` from element 0 of 7200", "in no file of the checkpoint"});
    without(kSecond, {"the master of", "in no file of the checkpoint"});
    without(kWeights, {"the weights of `model.embed_tokens.weight` from element 0 of 7200", "in no file of the checkpoint"});
    for (const std::string& name : {kFirst, kSecond, kWeights}) {
        const std::string twin = "optimizer-00002-of-00002.safetensors", copy = name == kWeights ? "model-2.safetensors" : twin;
        write_file(folder.file(copy), read_file(folder.file(name)));
        names.push_back(copy);
        expect_error([&] { open(); }, {".safetensors: the ", name == kWeights ? "weights of `" : "master of `", "are there twice"});
        names.pop_back();
    }
    names.push_back("optimizer-00009-of-00002.safetensors");
    expect_error([&] { open(); }, {folder.file(names.back()), "No such file"});
    names.pop_back();
    for (const std::string& name : {kFirst, kWeights}) {
        const std::string before = read_file(folder.file(name));
        write_file(folder.file(name), before.substr(0, before.size() - 1));
        expect_error([&] { open(); }, {folder.file(name)});
        write_file(folder.file(name), before);
    }
}

TEST_F(CheckpointTensorsRefusals, PiecesThatDoNotFitTogether) {
    const auto shifted = [&](const std::string& name, size_t offset, const Names& words) {
        refused(name, [&](Parts& parts) { parts.metadata["offset:" + cut] = std::to_string(offset); }, words);
    };
    shifted(kSecond, cut_at - 1, {folder.file(kSecond), "the master of `" + cut + "` from element " + std::to_string(cut_at - 1), "are there twice"});
    shifted(kSecond, cut_at + 1, {folder.file(kSecond), "the master of `" + cut + "` from element " + std::to_string(cut_at), "are missing before it"});
    shifted(kSecond, 0, {"`" + cut + "` from element 0", "are there twice"});
    shifted(kFirst, 1, {folder.file(kFirst), "`" + cut + "` from element 0", "are missing before it"});
    shifted(kSecond, table.find(cut).count(), {folder.file(kSecond), "`" + cut + "`", "are missing before it"});
    const auto resized = [&](const std::string& name, const char* suffix, long change, const Names& words) {
        refused(name, [&](Parts& parts) {
            Parts::Tensor& tensor = parts.get(cut + suffix);
            tensor.entry.shape[0] += change;
            tensor.data.resize(tensor.entry.shape[0] * sizeof(float));
        }, words);
    };
    for (const char* suffix : kSuffixes) {
        const std::string of = std::string("the ") + (suffix + 1) + " of `" + cut + "`";
        resized(kFirst, suffix, 1, {folder.file(kSecond), of, "are there twice"});
        resized(kFirst, suffix, -1, {folder.file(kSecond), of + " from element " + std::to_string(cut_at - 1), "are missing before it"});
        resized(kSecond, suffix, 1, {folder.file(kSecond), of, "beyond its " + std::to_string(table.find(cut).count()) + " elements"});
        resized(kSecond, suffix, -1, {of + " from element " + std::to_string(table.find(cut).count() - 1), "in no file"});
        refused(kSecond, [&](Parts& parts) { parts.erase(cut + suffix); }, {of + " from element " + std::to_string(cut_at), "in no file"});
        refused(kFirst, [&](Parts& parts) { parts.erase(cut + suffix); }, {folder.file(kSecond), of + " from element 0", "are missing before it"});
    }
}

TEST_F(CheckpointTensorsRefusals, OffsetsThatAreNone) {
    const std::string beyond = std::to_string(table.find(cut).count() + 1);
    for (const std::string& text : Names{"", "x", "1x", "-1", "+1", " 1", "1 ", "0x10", "1.0", "1e3", "99999999999999999999999", "18446744073709551615", std::string("1\0", 2), beyond})
        refused(kSecond, [&](Parts& parts) { parts.metadata["offset:" + cut] = text; }, {folder.file(kSecond), "the offset of `" + cut + "` is no element of it"});
    refused(kSecond, [&](Parts& parts) { parts.metadata.erase("offset:" + cut); }, {folder.file(kSecond), "there is no offset of `" + cut + "`"});
}

TEST_F(CheckpointTensorsRefusals, TensorsOfAnotherKind) {
    for (const char* suffix : kSuffixes) {
        const std::string name = cut + suffix;
        for (const TensorType type : {TensorType::BF16, TensorType::I32, TensorType::F64}) {
            refused(kSecond, [&](Parts& parts) {
                Parts::Tensor& tensor = parts.get(name);
                tensor.entry.type = type;
                tensor.data.resize(tensor.entry.shape[0] * tensor_type_bytes(type));
            }, {folder.file(kSecond), "tensor `" + name + "` is " + tensor_type_name(type) + ", expected F32"});
        }
        refused(kSecond, [&](Parts& parts) { parts.get(name).entry.shape.push_back(1); }, {folder.file(kSecond), "tensor `" + name + "` has 2 dimensions"});
        refused(kSecond, [&](Parts& parts) { parts.get(name).entry.shape.clear(), parts.get(name).data.resize(4); }, {folder.file(kSecond), "tensor `" + name + "` has 0 dimensions"});
    }
    for (const std::string& name : Names{"extra.master", "model.norm.weight", "model.norm.weight.exp", ".master", "model.norm.weight.master.master", "model.norm.weight.exp_avg_sq ", "", "optimizer"})
        refused(kFirst, [&](Parts& parts) { parts.tensors.push_back({{name, TensorType::F32, {1}}, "1234"}); }, {folder.file(kFirst), "tensor `" + name + "` is none of this model's"});
    refused(kFirst, [&](Parts& parts) { parts.tensors.push_back({{"\033[31m", TensorType::F32, {1}}, "1234"}); }, {"tensor `?[31m`"});
}

TEST_F(CheckpointTensorsRefusals, WeightsThatAreNotThisModels) {
    const std::string down = "model.layers.1.mlp.down_proj.weight", norm = "model.norm.weight";
    for (const std::string& name : {down, norm}) {
        refused(kWeights, [&](Parts& parts) { parts.erase(name); }, {"the weights of `" + name + "` from element 0", "in no file"});
        refused(kWeights, [&](Parts& parts) { parts.get(name).entry.name = name + "s"; }, {folder.file(kWeights), "tensor `" + name + "s` is none of this model's"});
        refused(kWeights, [&](Parts& parts) { parts.get(name).entry.shape.push_back(1); }, {folder.file(kWeights), "tensor `" + name + "` has shape"});
    }
    refused(kWeights, [&](Parts& parts) { parts.get(down).entry.shape = {40, 24}; }, {folder.file(kWeights), "tensor `" + down + "` has shape (40, 24), expected (24, 40)"});
    refused(kWeights, [&](Parts& parts) { parts.get(norm).entry.shape = {23}, parts.get(norm).data.resize(46); }, {folder.file(kWeights), "has shape (23), expected (24)"});
    refused(kWeights, [&](Parts& parts) { parts.get(norm).entry.type = TensorType::F32, parts.get(norm).data.resize(96); }, {folder.file(kWeights), "`" + norm + "` is F32, expected BF16"});
    refused(kWeights, [&](Parts& parts) { parts.get(norm).entry.type = TensorType::F16; }, {"`" + norm + "` is F16, expected BF16"});
    refused(kWeights, [&](Parts& parts) { parts.tensors.push_back({{norm + ".master", TensorType::F32, {24}}, std::string(96, 'x')}); }, {folder.file(kWeights), norm + ".master` is none of this model's"});
    expect_error([&] { CheckpointTensors(folder.path(), names, table, TensorType::F32); }, {folder.file(kWeights), "is BF16, expected F32"});
    // One of several files.
    std::erase(names, kWeights);
    const Names several = write_weights(folder.path(), table, 20000);
    names.insert(names.end(), several.begin(), several.end());
    ASSERT_EQ(several.size(), 4u);
    EXPECT_NO_THROW(open());
    without(several[1], {"the weights of `model.layers.0.mlp.gate_proj.weight`", "in no file"});
    refused(several[3], [&](Parts& parts) { parts.tensors.push_back({{norm, TensorType::BF16, {24}}, std::string(48, 'x')}); }, {".safetensors: the weights of `" + norm + "`", "are there twice"});
}

TEST_F(CheckpointTensorsRefusals, AnotherModel) {
    const auto other = [&](const ModelConfig& config, const Names& words) {
        const ParamTable changed = make_param_table(config);
        expect_error([&] { CheckpointTensors(folder.path(), names, changed, TensorType::BF16); }, words);
    };
    other(small_config(true), {"`lm_head.weight", "none of this model's"});
    other(small_config(false, true), {"self_attn.q_proj.bias", "in no file"});
    other(small_config(false, false, true), {"self_attn.q_norm.weight", "in no file"});
    ModelConfig config = small_config();
    config.num_layers = 2;
    other(config, {"`model.layers.2.", "none of this model's"});
    config.num_layers = 4;
    other(config, {"`model.layers.3.", "in no file"});
    config.num_layers = 3;
    config.vocab_size = 299;  // one row less in as many padded ones
    other(config, {".weight` has shape (300, 24), expected (299, 24)"});
}

TEST_F(CheckpointTensorsRefusals, ElementsThatAreNotThereAreNotRead) {
    const CheckpointTensors tensors(folder.path(), names, table, TensorType::BF16);
    const size_t all = table.parameters[0].count(), huge = ~size_t{0};
    std::vector<float> out(all + 16);
    for (const auto& [first, count] : std::vector<std::pair<size_t, size_t>>{{0, all + 1}, {all, 1}, {all + 1, 1}, {all + 5, 0}, {huge, 1}, {huge, 2}, {1, huge}, {all - 1, 2}}) {
        expect_error([&] { tensors.read_weights(0, first, count, out.data()); }, {"are in no piece"});
        expect_error([&] { tensors.read_state(StateArray::kMaster, 0, first, count, out.data()); }, {"are in no piece"});
    }
    EXPECT_NO_THROW(tensors.read_weights(0, all, 0, out.data()));
}

TEST(CheckpointTensorsMore, RanksThatHoldNothingWriteFilesThatHoldNothing) {
    const TempFolder folder;
    const ParamTable table = make_param_table(small_config());
    const FlatLayout layout = make_flat_layout(table, 200, 0.0, 2);
    EXPECT_EQ(optimizer_file(table, layout, 199).data_bytes, 0u);
    Names names = write_state(folder.path(), table, layout);
    EXPECT_EQ(names.back(), "optimizer-00199-of-00200.safetensors");
    for (const std::string& name : write_weights(folder.path(), table)) names.push_back(name);
    const CheckpointTensors tensors(folder.path(), names, table, TensorType::BF16);
    const std::vector<size_t> starts = starts_of(table);
    for (size_t i = 0; i < table.parameters.size(); ++i) expect_values(tensors, starts, static_cast<int>(i), 0, table.parameters[i].count());
}

}  // namespace
