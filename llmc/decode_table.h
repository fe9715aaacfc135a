// The decode table that data preparation writes beside the shards (`decode.bin`): the bytes of every token id, so that samples can be
// printed without a tokenizer.
//
//   8 bytes "LLMZDEC1", uint32 vocabulary size, uint32 end-of-text id, then for each id a uint32 length and that many bytes
//   (little-endian; nothing after the last entry)
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

class DecodeTable {
public:
    // Throws Error naming the file, the offset and what is wrong there.
    explicit DecodeTable(const std::string& path);

    int vocab_size() const { return static_cast<int>(bytes_.size()); }
    int end_of_text() const { return end_of_text_; }

    // The bytes of one id; "" for the end of text and for an id outside the table (a model's vocabulary may be padded beyond it).
    const std::string& decode(int id) const;
    std::string decode(const std::vector<int>& ids) const;

    // Ids whose bytes are `text`: at each place the longest entry that matches. For the byte tokenizer this is the tokenizer itself;
    // for a merged vocabulary it may split a word differently than its merges would, which a prompt survives. Throws Error where
    // no entry fits.
    std::vector<int> encode(const std::string& text) const;

private:
    std::vector<std::string> bytes_;
    std::unordered_map<std::string, int> ids_;
    size_t longest_ = 0;
    int end_of_text_ = 0;
};
