// Token shards: files of token ids in llm.c's format, memory-mapped and checked.
//
//   256 int32 header: [0] magic, [1] version, [2] number of tokens, rest unused; then the tokens
//   magic 20240520, version 1: uint16 tokens        magic 20240801, version 7: uint32 tokens
//
// Beside `NAME.bin` there may be `NAME.bin.mask`: ceil(tokens / 8) bytes, bit i % 8 (least significant first) of byte i / 8 is 1 when
// token i counts as a target, 0 when its loss is ignored (the prompt of a dialogue).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "llmc/mapped_file.h"

class TokenShard {
public:
    // Throws Error naming the file, what is wrong with it, and the byte offset. A shard with no tokens is legal here.
    explicit TokenShard(const std::string& path);

    const std::string& path() const { return file_.path(); }
    size_t count() const { return count_; }                     // tokens
    int token_bytes() const { return token_bytes_; }            // 2 or 4
    bool has_mask() const { return mask_.data() != nullptr; }
    const unsigned char* header() const { return file_.data(); }  // kHeaderBytes bytes
    size_t offset_bytes(size_t i) const { return kHeaderBytes + i * token_bytes_; }  // of token i in the file

    uint32_t token(size_t i) const {
        if (token_bytes_ == 2) return reinterpret_cast<const uint16_t*>(file_.data() + kHeaderBytes)[i];
        return reinterpret_cast<const uint32_t*>(file_.data() + kHeaderBytes)[i];
    }
    // Whether token i is trained on where it is a target.
    bool counts_as_target(size_t i) const { return !has_mask() || (mask_.data()[i / 8] >> (i % 8) & 1); }

    static constexpr size_t kHeaderBytes = 256 * sizeof(int32_t);

private:
    MappedFile file_, mask_;
    size_t count_ = 0;
    int token_bytes_ = 0;
};

// All shards of one data set, in their one order.
struct ShardSet {
    std::string pattern;                // as asked for
    std::vector<TokenShard> shards;     // bytewise by path, empty ones left out
    std::vector<std::string> warnings;  // one line for each shard that was skipped
    size_t count = 0;                   // tokens of all shards
};

// Files that match, bytewise sorted, mask files left out. Throws Error naming the pattern when there are none.
std::vector<std::string> expand_glob(const std::string& pattern);

// Opens every shard that matches. Throws when one is broken, or when none holds a token.
ShardSet open_shards(const std::string& pattern);
