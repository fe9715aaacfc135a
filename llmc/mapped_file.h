// A whole file mapped read-only into memory.
#pragma once

#include <cstddef>
#include <string>
#include <utility>

class MappedFile {
public:
    MappedFile() = default;
    // Throws Error with the system's reason. An empty file gives data() == nullptr and size() == 0.
    explicit MappedFile(const std::string& path);
    ~MappedFile();
    MappedFile(MappedFile&& other) noexcept { swap(other); }
    MappedFile& operator=(MappedFile&& other) noexcept {
        swap(other);
        return *this;
    }

    const std::string& path() const { return path_; }
    const unsigned char* data() const { return data_; }
    size_t size() const { return size_; }

private:
    void swap(MappedFile& other) noexcept {
        std::swap(path_, other.path_);
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
    }
    std::string path_;
    const unsigned char* data_ = nullptr;
    size_t size_ = 0;
};
