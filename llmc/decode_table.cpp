#include "llmc/decode_table.h"

#include <algorithm>
#include <cstring>

#include "llmc/error.h"
#include "llmc/mapped_file.h"

DecodeTable::DecodeTable(const std::string& path) {
    static constexpr char kMagic[] = "LLMZDEC1";
    const MappedFile file(path);
    size_t offset = 0;
    const auto need = [&](size_t bytes, const char* what) {
        CHECK(bytes <= file.size() - offset, "%s: ends at byte %zu, where %s of %zu bytes should be at offset %zu; make the data again with dev/data/prepare.py",
              path.c_str(), file.size(), what, bytes, offset);
    };
    const auto read_u32 = [&](const char* what) {
        need(4, what);
        const unsigned char* p = file.data() + offset;
        offset += 4;
        return static_cast<uint32_t>(p[0]) | static_cast<uint32_t>(p[1]) << 8 | static_cast<uint32_t>(p[2]) << 16 | static_cast<uint32_t>(p[3]) << 24;
    };
    need(8, "the magic");
    CHECK(memcmp(file.data(), kMagic, 8) == 0, "%s: does not begin with %s, so it is no decode table; make the data again with dev/data/prepare.py",
          path.c_str(), kMagic);
    offset = 8;
    const uint32_t vocab = read_u32("the vocabulary size");
    // Every entry takes at least its length field, which bounds the count by the file before anything is allocated.
    CHECK(vocab >= 1 && vocab <= file.size() / 4 && vocab <= (1u << 24), "%s: the vocabulary size at offset 8 is %u, which the file of %zu bytes cannot hold",
          path.c_str(), vocab, file.size());
    const uint32_t end = read_u32("the end-of-text id");
    CHECK(end < vocab, "%s: the end-of-text id at offset 12 is %u; it must be below the vocabulary size %u", path.c_str(), end, vocab);
    end_of_text_ = static_cast<int>(end);
    bytes_.reserve(vocab);
    for (uint32_t id = 0; id < vocab; ++id) {
        const uint32_t length = read_u32("the length of an entry");
        need(length, "an entry");
        bytes_.emplace_back(reinterpret_cast<const char*>(file.data()) + offset, length);
        offset += length;
        if (length == 0 || static_cast<int>(id) == end_of_text_) continue;
        ids_.emplace(bytes_.back(), static_cast<int>(id));  // the first id wins where two have the same bytes
        longest_ = std::max(longest_, static_cast<size_t>(length));
    }
    CHECK(offset == file.size(), "%s: has %zu bytes after the last entry, at offset %zu", path.c_str(), file.size() - offset, offset);
}

const std::string& DecodeTable::decode(int id) const {
    static const std::string nothing;
    return id >= 0 && id < vocab_size() && id != end_of_text_ ? bytes_[id] : nothing;
}

std::string DecodeTable::decode(const std::vector<int>& ids) const {
    std::string text;
    for (const int id : ids) text += decode(id);
    return text;
}

std::vector<int> DecodeTable::encode(const std::string& text) const {
    std::vector<int> ids;
    for (size_t at = 0; at < text.size();) {
        size_t length = std::min(longest_, text.size() - at);
        auto found = ids_.end();
        for (; length > 0; --length) {
            found = ids_.find(text.substr(at, length));
            if (found != ids_.end()) break;
        }
        CHECK(found != ids_.end(), "the prompt's byte %zu (0x%02x) is in no token of the vocabulary; use other characters in --prompt", at,
              static_cast<unsigned char>(text[at]));
        ids.push_back(found->second);
        at += length;
    }
    return ids;
}
