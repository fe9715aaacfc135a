// The decode table: bytes of ids and back, and every way the file can be broken.
#include "dev/test/host_test.h"
#include "llmc/decode_table.h"

namespace {

std::string table_bytes(const std::vector<std::string>& entries, uint32_t end) {
    std::string bytes = "LLMZDEC1" + bytes_of(static_cast<uint32_t>(entries.size())) + bytes_of(end);
    for (const std::string& entry : entries) bytes += bytes_of(static_cast<uint32_t>(entry.size())) + entry;
    return bytes;
}

std::vector<std::string> byte_entries() {
    std::vector<std::string> entries;
    for (int b = 0; b < 256; ++b) entries.push_back(std::string(1, static_cast<char>(b)));
    entries.push_back("");
    return entries;
}

TEST(DecodeTable, BytesGoThereAndBack) {
    TempFolder folder;
    write_file(folder.file("decode.bin"), table_bytes(byte_entries(), 256));
    const DecodeTable table(folder.file("decode.bin"));
    EXPECT_EQ(table.vocab_size(), 257);
    EXPECT_EQ(table.end_of_text(), 256);
    std::string all;
    std::vector<int> ids;
    for (int b = 0; b < 256; ++b) {
        all += static_cast<char>(b);
        ids.push_back(b);
    }
    EXPECT_EQ(table.encode(all), ids);
    EXPECT_EQ(table.decode(ids), all);
    EXPECT_EQ(table.encode(""), std::vector<int>{});
    EXPECT_EQ(table.decode(256), "");
    EXPECT_EQ(table.decode(-1), "");
    EXPECT_EQ(table.decode(383), "");  // a padded id
}

TEST(DecodeTable, TheLongestEntryWins) {
    TempFolder folder;
    write_file(folder.file("decode.bin"), table_bytes({"a", "b", "ab", "abc", "<|end|>", "b", ""}, 4));
    const DecodeTable table(folder.file("decode.bin"));
    EXPECT_EQ(table.encode("abcaba"), (std::vector<int>{3, 2, 0}));
    EXPECT_EQ(table.encode("b"), std::vector<int>{1});
    EXPECT_EQ(table.decode({3, 4, 1}), "abcb");
    expect_error([&] { table.encode("abx"); }, {"byte 2", "0x78"});
    expect_error([&] { table.encode("<|end|>"); }, {"byte 0"});  // text never becomes the end-of-text id
}

TEST(DecodeTable, EveryTruncationAndATailAreRefused) {
    TempFolder folder;
    const std::string path = folder.file("decode.bin"), good = table_bytes({"a", "bc", ""}, 2);
    for (size_t size = 0; size < good.size(); ++size) {
        write_file(path, good.substr(0, size));
        expect_error([&] { DecodeTable table(path); }, {path});
    }
    write_file(path, good + "x");
    expect_error([&] { DecodeTable table(path); }, {path, "after the last entry"});
    write_file(path, good);
    EXPECT_EQ(DecodeTable(path).vocab_size(), 3);
}

TEST(DecodeTable, HostileFieldsAreRefused) {
    TempFolder folder;
    const std::string path = folder.file("decode.bin"), good = table_bytes({"", "a", "bc"}, 0);
    const auto refused = [&](size_t offset, uint32_t value, const std::string& word) {
        std::string bad = good;
        memcpy(bad.data() + offset, &value, 4);
        write_file(path, bad);
        expect_error([&] { DecodeTable table(path); }, {path, word});
    };
    refused(0, 0, "LLMZDEC1");
    refused(8, 0, "offset 8");
    refused(8, 4, "ends at");
    refused(8, 2, "after the last entry");
    refused(8, 0xffffffffu, "offset 8");
    refused(12, 3, "offset 12");
    refused(16, 0xffffffffu, "ends at");
    refused(16, 0x7fffffffu, "ends at");
    expect_error([&] { DecodeTable table(folder.file("no.bin")); }, {"no.bin", "No such file"});
}

}  // namespace
