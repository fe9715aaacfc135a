// A 64-bit hash of bytes (XXH3): to compare weights of two runs by one number. Not cryptographic.
#pragma once

#include <cstddef>
#include <string>

class Hash64 {
public:
    Hash64();
    ~Hash64();
    Hash64(const Hash64&) = delete;
    Hash64& operator=(const Hash64&) = delete;

    void add(const void* data, size_t bytes);
    std::string hex() const;  // 16 hexadecimal digits

private:
    void* state_;
};

// Of one text.
std::string hash_of(const std::string& text);
