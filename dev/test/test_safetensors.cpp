// Safetensors: every type, every way a hostile file can lie about its tensors, and what is written is read back.
#include <array>
#include <cmath>

#include "dev/test/host_test.h"
#include "llmc/safetensors.h"

namespace {

class Safetensors : public testing::Test {
protected:
    void put(const std::string& header, const std::string& data) { write_file(path(), bytes_of(static_cast<uint64_t>(header.size())) + header + data); }
    void refused(const std::string& header, const std::string& data, const std::vector<std::string>& words) {
        put(header, data);
        expect_error([&] { SafetensorsFile file(path()); }, words);
    }
    // One tensor `w` described by the text after its name, with 16 bytes of data.
    void refused_tensor(const std::string& description, const std::vector<std::string>& words) {
        refused("{\"w\":" + description + "}", std::string(16, '\1'), words);
    }
    std::string path() const { return folder_.file("m.safetensors"); }
    TempFolder folder_;
};

TEST_F(Safetensors, ReadsTypesShapesAndMetadata) {
    const uint16_t bf16[] = {0x3f80, 0xc000, 0x7f80};                                    // 1, -2, inf
    const uint16_t f16[] = {0x3c00, 0xc000, 0x0001, 0x7c00, 0x03ff, 0x7e00, 0x8000};     // 1, -2, 2^-24, inf, largest subnormal, NaN, -0
    const std::string data = bytes_of(1.5f) + bytes_of(-2.5f) + bytes_of(bf16) + bytes_of(int32_t{-7}) + bytes_of(int64_t{1} << 40) + "\xff" + bytes_of(f16) + bytes_of(0.1);
    put("{\"__metadata__\":{\"format\":\"pt\"},"
        "\"f\":{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[0,8]},"
        "\"b\":{\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[8,14]},"
        "\"i\":{\"dtype\":\"I32\",\"shape\":[],\"data_offsets\":[14,18]},"
        "\"l\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[18,26]},"
        "\"u\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[26,27]},"
        "\"none\":{\"dtype\":\"F32\",\"shape\":[0,5],\"data_offsets\":[27,27]},"
        "\"h\":{\"dtype\":\"F16\",\"shape\":[7],\"data_offsets\":[27,41]},"
        "\"d\":{\"dtype\":\"F64\",\"shape\":[1],\"data_offsets\":[41,49]}}   ",
        data);
    const SafetensorsFile file(path());
    EXPECT_EQ(file.tensors().size(), 8u);
    EXPECT_EQ(file.metadata().at("format"), "pt");
    EXPECT_EQ(file.floats("f"), (std::vector<float>{1.5f, -2.5f}));
    EXPECT_EQ(file.floats("b"), (std::vector<float>{1.0f, -2.0f, INFINITY}));
    EXPECT_EQ(file.integers("i"), std::vector<int64_t>{-7});
    EXPECT_EQ(file.get("i").count, 1u);
    EXPECT_EQ(file.integers("l"), std::vector<int64_t>{int64_t{1} << 40});
    EXPECT_EQ(file.integers("u"), std::vector<int64_t>{255});
    EXPECT_TRUE(file.floats("none").empty());
    const std::vector<float> h = file.floats("h");
    EXPECT_EQ(h[0], 1.0f);
    EXPECT_EQ(h[1], -2.0f);
    EXPECT_EQ(h[2], 0x1p-24f);
    EXPECT_EQ(h[3], INFINITY);
    EXPECT_EQ(h[4], 1023 * 0x1p-24f);
    EXPECT_TRUE(std::isnan(h[5]));
    EXPECT_TRUE(h[6] == 0.0f && std::signbit(h[6]));
    EXPECT_EQ(file.floats("d"), std::vector<float>{0.1f});
    EXPECT_EQ(file.get("f", {2, 1}).count, 2u);
    expect_error([&] { file.get("f", {1, 2}); }, {path(), "`f`", "(2, 1)", "(1, 2)"});
    expect_error([&] { file.get("gone"); }, {path(), "no tensor `gone`"});
    expect_error([&] { file.floats("i"); }, {"`i`", "I32", "floating"});
    expect_error([&] { file.integers("f"); }, {"`f`", "F32", "integer"});
}

TEST_F(Safetensors, EveryTruncationIsRefused) {
    put("{\"w\":{\"dtype\":\"F32\",\"shape\":[4],\"data_offsets\":[0,16]}}", std::string(16, '\1'));
    const std::string good = read_file(path());
    EXPECT_NO_THROW(SafetensorsFile file(path()));
    for (size_t size = 0; size < good.size(); ++size) {
        write_file(path(), good.substr(0, size));
        expect_error([&] { SafetensorsFile file(path()); }, {path()});
    }
    write_file(path(), good + "x");
    expect_error([&] { SafetensorsFile file(path()); }, {"belong to no tensor"});
}

TEST_F(Safetensors, TheHeaderLengthIsChecked) {
    for (const uint64_t length : {uint64_t{3}, uint64_t{100'000'000}, uint64_t{100'000'001}, ~uint64_t{0}, ~uint64_t{0} - 7, uint64_t{1} << 63}) {
        write_file(path(), bytes_of(length) + "{}");
        expect_error([&] { SafetensorsFile file(path()); }, {path(), "header"});
    }
    write_file(path(), bytes_of(uint64_t{2}) + "{}");
    EXPECT_TRUE(SafetensorsFile(path()).tensors().empty());
}

TEST_F(Safetensors, TheHeaderMustBeOneObjectWithoutDuplicates) {
    for (const char* header : {"", "[]", "null", "{", "{}}", "{\"w\":}", "\xff\xfe"}) refused(header, "", {path(), "JSON object"});
    refused("{\"w\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"w\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}", "ab", {"`w` appears twice"});
    refused_tensor("{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[16],\"data_offsets\":[0,16]}", {"`dtype` appears twice"});
    refused(std::string(100000, '['), "", {path()});
    refused("{\"w\":[[[[1]]]]}", "", {"nests deeper"});
    refused("{\"__metadata__\":{\"a\":1}}", "", {"__metadata__"});
    refused("{\"__metadata__\":[]}", "", {"__metadata__"});
}

TEST_F(Safetensors, ADescriptionMustBeWellFormed) {
    refused_tensor("7", {"`w`", "dtype, shape and data_offsets"});
    refused_tensor("{\"dtype\":\"U8\",\"shape\":[16]}", {"`w`", "dtype, shape and data_offsets"});
    refused_tensor("{\"dtype\":\"U8\",\"shape\":[16],\"data_offsets\":[0,16],\"x\":1}", {"nothing else"});
    refused_tensor("{\"dtype\":8,\"shape\":[16],\"data_offsets\":[0,16]}", {"dtype is not a string"});
    refused_tensor("{\"dtype\":\"F8_E4M3\",\"shape\":[16],\"data_offsets\":[0,16]}", {"F8_E4M3", "not supported"});
    refused_tensor("{\"dtype\":\"U8\",\"shape\":16,\"data_offsets\":[0,16]}", {"shape is not a list"});
    refused_tensor("{\"dtype\":\"U8\",\"shape\":[-16],\"data_offsets\":[0,16]}", {"shape", "whole numbers"});
    refused_tensor("{\"dtype\":\"U8\",\"shape\":[16.0],\"data_offsets\":[0,16]}", {"shape", "whole numbers"});
    refused_tensor("{\"dtype\":\"U8\",\"shape\":[16],\"data_offsets\":[0]}", {"data_offsets"});
    refused_tensor("{\"dtype\":\"U8\",\"shape\":[16],\"data_offsets\":[0,16.0]}", {"data_offsets"});
    refused_tensor("{\"dtype\":\"U8\",\"shape\":[16],\"data_offsets\":[0,-1]}", {"data_offsets"});
}

TEST_F(Safetensors, SizesAreCheckedWithoutOverflow) {
    refused_tensor("{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,16]}", {"`w`", "16 bytes", "(3)", "12"});
    refused_tensor("{\"dtype\":\"U8\",\"shape\":[17],\"data_offsets\":[0,17]}", {"0 to 17", "16 bytes"});
    refused_tensor("{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,0]}", {"1 to 0"});
    refused_tensor("{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,16]}", {"product overflows"});
    refused_tensor("{\"dtype\":\"F32\",\"shape\":[4611686018427387908],\"data_offsets\":[0,16]}", {"size in bytes overflows"});  // 2^62 + 4 floats: 16 bytes modulo 2^64
    refused_tensor("{\"dtype\":\"U8\",\"shape\":[16],\"data_offsets\":[18446744073709551600,18446744073709551615]}", {"`w`"});
    refused_tensor("{\"dtype\":\"U8\",\"shape\":[16],\"data_offsets\":[99999999999999999999,16]}", {"`w`"});
}

TEST_F(Safetensors, OverlapsAndHolesAreRefused) {
    const auto two = [](int a0, int a1, int b0, int b1) {
        return format("{\"a\":{\"dtype\":\"U8\",\"shape\":[%d],\"data_offsets\":[%d,%d]},\"b\":{\"dtype\":\"U8\",\"shape\":[%d],\"data_offsets\":[%d,%d]}}", a1 - a0, a0, a1, b1 - b0, b0, b1);
    };
    put(two(8, 16, 0, 8), std::string(16, 'x'));  // any order in the header
    EXPECT_NO_THROW(SafetensorsFile file(path()));
    refused(two(0, 9, 8, 16), std::string(16, 'x'), {"`b` overlaps"});
    refused(two(0, 16, 0, 16), std::string(16, 'x'), {"overlaps"});
    refused(two(0, 7, 8, 16), std::string(16, 'x'), {"bytes 7 to 8", "no tensor"});
    refused(two(1, 8, 8, 16), std::string(16, 'x'), {"bytes 0 to 1", "no tensor"});
    refused(two(0, 8, 8, 15), std::string(16, 'x'), {"bytes 15 to 16", "no tensor"});
}

TEST_F(Safetensors, MissingFilesAndOddNamesAreReported) {
    expect_error([&] { SafetensorsFile file(folder_.file("no.safetensors")); }, {"no.safetensors", "No such file"});
    refused("{\"a\\u001b[31m\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,2]}}", "ab", {"`a?[31m`"});  // no control character reaches a terminal
}

TEST_F(Safetensors, WhatIsWrittenIsReadBack) {
    const std::vector<std::string> odd = {"", "a \"b\" \\ /", std::string("\0\x01\x1f\n\t\x7f", 6), "Gewicht \u00fc \u4e2d \U0001f600", "{\"x\":[", "dtype", " metadata"};
    std::vector<SafetensorsEntry> entries = {{"z.last_by_name", TensorType::F32, {2, 3}}, {"none", TensorType::F32, {0, 5}}, {"scalar", TensorType::F64, {}},
                                             {"b", TensorType::BF16, {3}},                {"none, too", TensorType::I64, {7, 0}}, {"truth", TensorType::Bool, {1, 1, 1}}};
    std::string data = bytes_of(std::array<float, 6>{1, 2, 3, -4, 0.5f, 6}) + bytes_of(0.25) + bytes_of(std::array<uint16_t, 3>{0x3f80, 0xc000, 0x7f80}) + "\1";
    for (const std::string& name : odd) {
        entries.push_back({name, TensorType::U8, {name.size() + 1}});
        data += name + "!";
    }
    for (const TensorType type : {TensorType::F16, TensorType::I32, TensorType::I16, TensorType::I8}) {
        entries.push_back({tensor_type_name(type), type, {2}});
        data += std::string(2 * tensor_type_bytes(type), '\1');
    }
    std::map<std::string, std::string> metadata = {{"format", "pt"}, {"offset:model.norm.weight", "18446744073709551615"}, {"empty", ""}};
    for (const std::string& text : odd) metadata["key " + text] = text;

    const std::string header = safetensors_header(entries, metadata);
    EXPECT_EQ(header.size() % 8, 0u);
    write_file(path(), header + data);
    const SafetensorsFile file(path());
    EXPECT_EQ(file.metadata(), metadata);
    EXPECT_EQ(file.tensors().size(), entries.size());
    for (const SafetensorsEntry& entry : entries) {
        ASSERT_TRUE(file.has(entry.name)) << entry.name;
        EXPECT_EQ(file.get(entry.name).type, entry.type);
        EXPECT_EQ(file.get(entry.name).shape, entry.shape);
    }
    EXPECT_EQ(reinterpret_cast<uintptr_t>(file.get("z.last_by_name").data) % 8, 0u);
    EXPECT_EQ(file.floats("z.last_by_name"), (std::vector<float>{1, 2, 3, -4, 0.5f, 6}));
    EXPECT_EQ(file.floats("scalar"), std::vector<float>{0.25f});
    EXPECT_EQ(file.floats("b"), (std::vector<float>{1.0f, -2.0f, INFINITY}));
    EXPECT_TRUE(file.floats("none").empty() && file.integers("none, too").empty());
    EXPECT_EQ(file.integers("truth"), std::vector<int64_t>{1});
    EXPECT_EQ(file.integers("I16"), (std::vector<int64_t>{0x0101, 0x0101}));
    for (const std::string& name : odd) {
        const SafetensorsTensor& tensor = file.get(name);
        EXPECT_EQ(std::string(reinterpret_cast<const char*>(tensor.data), tensor.count), name + "!");
    }
}

TEST_F(Safetensors, TheDataBeginAtAMultipleOf8AfterAnyName) {
    for (size_t length = 1; length <= 17; ++length) {
        const std::string name(length, 'n'), header = safetensors_header({{name, TensorType::F32, {1}}}, {});
        EXPECT_EQ(header.size() % 8, 0u) << length;
        EXPECT_EQ(header[8], '{');
        EXPECT_LT(header.size() - header.rfind('}'), 9u) << "more spaces than needed";
        write_file(path(), header + bytes_of(1.5f));
        EXPECT_EQ(SafetensorsFile(path()).floats(name), std::vector<float>{1.5f});
    }
}

TEST_F(Safetensors, AFileMayHoldNoTensor) {
    for (const std::map<std::string, std::string>& metadata : {std::map<std::string, std::string>{}, {{"format", "pt"}}}) {
        write_file(path(), safetensors_header({}, metadata));
        const SafetensorsFile file(path());
        EXPECT_TRUE(file.tensors().empty());
        EXPECT_EQ(file.metadata(), metadata);
        expect_error([&] { file.get("w"); }, {"no tensor `w`"});
    }
}

TEST_F(Safetensors, AllTensorsMayBeEmpty) {
    write_file(path(), safetensors_header({{"b", TensorType::F32, {0}}, {"a", TensorType::U8, {3, 0}}}, {}));
    const SafetensorsFile file(path());
    EXPECT_EQ(file.get("b", {0}).count + file.get("a", {3, 0}).count, 0u);
}

TEST_F(Safetensors, WhatNoReaderWouldTakeIsNotWritten) {
    const auto refused = [](const std::vector<SafetensorsEntry>& entries, const std::vector<std::string>& words) { expect_error([&] { safetensors_header(entries, {}); }, words); };
    refused({{"a", TensorType::U8, {1}}, {"b", TensorType::U8, {1}}, {"a", TensorType::F32, {2}}}, {"two tensors `a`"});
    refused({{"__metadata__", TensorType::U8, {1}}}, {"`__metadata__`"});
    refused({{"big", TensorType::U8, {size_t{1} << 32, size_t{1} << 32}}}, {"`big`", "(4294967296, 4294967296)", "overflows"});
    refused({{"big", TensorType::F32, {size_t{1} << 62}}}, {"`big`", "overflows"});
    refused({{"half", TensorType::U8, {size_t{1} << 63}}, {"other", TensorType::U8, {size_t{1} << 63}}}, {"`other`", "overflow together"});
    refused({{"\xff\x1b[31m", TensorType::U8, {1}}}, {"`??[31m`", "UTF-8"});
    expect_error([] { safetensors_header({}, {{"key", "\xc3"}}); }, {"UTF-8"});
    expect_error([] { safetensors_header({}, {{"\xc3", "value"}}); }, {"UTF-8"});
    const size_t around = safetensors_header({{"n", TensorType::U8, {1}}}, {}).find_last_of('}') - 8;  // header bytes beside a name
    const std::string longest(100'000'000 - around, 'n');
    EXPECT_EQ(safetensors_header({{longest, TensorType::U8, {1}}}, {}).size(), 100'000'008u);
    refused({{longest + "n", TensorType::U8, {1}}}, {"1 tensors", "100000008 bytes", "100000000"});
}

TEST(ReferenceDumps, AreRead) {
    for (const char* model : {"llama", "qwen2", "qwen3", "llama64"})
        for (const char* name : {"model", "reference"}) {
            const std::string path = std::string("dev/reference/") + model + "/" + name + ".safetensors";
            if (!std::filesystem::exists(path)) GTEST_SKIP() << "not at the root of the repository";
            EXPECT_FALSE(SafetensorsFile(path).tensors().empty()) << path;
        }
}

}  // namespace
