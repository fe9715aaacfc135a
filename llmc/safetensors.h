// The safetensors format: a read-only view of a file, memory-mapped, and the header for a file to be written.
//
// A file is 8 bytes of header length (little-endian), the header (a JSON object: tensor name -> dtype, shape, bytes of the data), then the data. One that is read
// is treated as hostile: every size is checked before it is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "llmc/mapped_file.h"

enum class TensorType { F64, F32, F16, BF16, I64, I32, I16, I8, U8, Bool };
const char* tensor_type_name(TensorType type);

// A tensor's name for messages: names come from the file, so control characters must not reach the terminal.
std::string printable(const std::string& name);

size_t tensor_type_bytes(TensorType type);

struct SafetensorsTensor {
    TensorType type;
    std::vector<size_t> shape;
    size_t count;               // elements
    const unsigned char* data;  // count * tensor_type_bytes(type) bytes; not necessarily aligned to the type
};

class SafetensorsFile {
public:
    // Throws Error naming the file, the tensor and what is wrong.
    explicit SafetensorsFile(const std::string& path);

    const std::string& path() const { return file_.path(); }
    const std::map<std::string, SafetensorsTensor>& tensors() const { return tensors_; }
    const std::map<std::string, std::string>& metadata() const { return metadata_; }

    bool has(const std::string& name) const { return tensors_.count(name) != 0; }
    // Throws Error naming the file and the tensor when it is not there.
    const SafetensorsTensor& get(const std::string& name) const;
    // As get(), and the shape must be the one given.
    const SafetensorsTensor& get(const std::string& name, const std::vector<size_t>& shape) const;
    // Values converted: from any floating type to float (F64 is rounded), from any integer type to int64.
    std::vector<float> floats(const std::string& name) const;
    std::vector<int64_t> integers(const std::string& name) const;

private:
    MappedFile file_;
    std::map<std::string, SafetensorsTensor> tensors_;
    std::map<std::string, std::string> metadata_;
};

// A tensor of a file to be written.
struct SafetensorsEntry {
    std::string name;
    TensorType type;
    std::vector<size_t> shape;
};

// The first bytes of a file that holds these tensors one after the other, in this order and without gaps: the length, then the header, padded with spaces so that the
// data begin at a multiple of 8 bytes. Throws Error on names that JSON cannot hold or that appear twice, sizes that overflow, and a header above the 100 MB that readers allow.
std::string safetensors_header(const std::vector<SafetensorsEntry>& tensors, const std::map<std::string, std::string>& metadata);
