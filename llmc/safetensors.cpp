#include "llmc/safetensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

#include <nlohmann/json.hpp>

#include "llmc/error.h"

using nlohmann::json;

namespace {

constexpr struct { TensorType type; const char* name; size_t bytes; bool floating; } kTypes[] = {
    {TensorType::F64, "F64", 8, true},  {TensorType::F32, "F32", 4, true},   {TensorType::F16, "F16", 2, true},
    {TensorType::BF16, "BF16", 2, true}, {TensorType::I64, "I64", 8, false}, {TensorType::I32, "I32", 4, false},
    {TensorType::I16, "I16", 2, false}, {TensorType::I8, "I8", 1, false},    {TensorType::U8, "U8", 1, false},
    {TensorType::Bool, "BOOL", 1, false},
};

constexpr size_t kMaxHeaderBytes = 100'000'000;  // what the format's own reader allows

std::string shape_text(const std::vector<size_t>& shape) {
    std::string text = "(";
    for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + ")";
}

// Parses the header strictly: no duplicate keys (a plain parse keeps the last and hides the other), no deep nesting.
json parse_header(const std::string& path, const char* text, size_t bytes) {
    std::vector<std::set<std::string>> keys;
    const json::parser_callback_t check = [&](int depth, json::parse_event_t event, json& parsed) {
        if (event == json::parse_event_t::object_start || event == json::parse_event_t::array_start) {
            if (depth >= 3) fail("%s: the header nests deeper than a tensor's description does", path.c_str());
            if (event == json::parse_event_t::object_start) keys.emplace_back();
        } else if (event == json::parse_event_t::object_end) {
            keys.pop_back();
        } else if (event == json::parse_event_t::key) {
            const std::string key = parsed.get<std::string>();
            if (!keys.back().insert(key).second) fail("%s: `%s` appears twice in the header", path.c_str(), printable(key).c_str());
        }
        return true;
    };
    json root = json::parse(text, text + bytes, check, /*allow_exceptions=*/false);
    if (root.is_discarded() || !root.is_object()) fail("%s: the header is not a JSON object; the file is damaged or is no safetensors file", path.c_str());
    return root;
}

// A JSON string, quotes and escapes included.
std::string json_string(const std::string& text) {
    try {
        return json(text).dump();
    } catch (const json::exception&) {
        fail("the name or text `%s` is not UTF-8, which a safetensors header cannot hold; rename it", printable(text).c_str());
    }
}

float half_to_float(uint16_t half) {
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    float value;
    if (exponent == 31) {
        value = fraction ? NAN : INFINITY;
    } else if (exponent == 0) {
        value = std::ldexp(static_cast<float>(fraction), -24);
    } else {
        value = std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
    }
    return half & 0x8000 ? -value : value;
}

template <typename T>
T load(const unsigned char* data, size_t i) {
    T value;
    memcpy(&value, data + i * sizeof(T), sizeof(T));
    return value;
}

}  // namespace

std::string printable(const std::string& name) {
    std::string text;
    for (const char c : name.substr(0, 120)) text += c >= 32 && c < 127 ? c : '?';
    return name.size() > 120 ? text + "..." : text;
}

const char* tensor_type_name(TensorType type) {
    for (const auto& t : kTypes)
        if (t.type == type) return t.name;
    return "?";
}

size_t tensor_type_bytes(TensorType type) {
    for (const auto& t : kTypes)
        if (t.type == type) return t.bytes;
    return 0;
}

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(path) {
    const char* name = path.c_str();
    CHECK(file_.size() >= 8, "%s: has %zu bytes, less than a safetensors file's first field; the file is truncated", name, file_.size());
    uint64_t header_bytes = 0;
    for (int i = 7; i >= 0; --i) header_bytes = header_bytes << 8 | file_.data()[i];
    CHECK(header_bytes <= kMaxHeaderBytes, "%s: says its header has %llu bytes, more than the %zu allowed; the file is damaged or is no safetensors file", name,
          static_cast<unsigned long long>(header_bytes), kMaxHeaderBytes);
    CHECK(header_bytes <= file_.size() - 8, "%s: says its header has %llu bytes, but the file has %zu; it is truncated", name,
          static_cast<unsigned long long>(header_bytes), file_.size());
    const unsigned char* data = file_.data() + 8 + header_bytes;
    const size_t data_bytes = file_.size() - 8 - header_bytes;
    const json root = parse_header(path, reinterpret_cast<const char*>(file_.data()) + 8, header_bytes);

    struct Range { size_t begin, end; std::string name; };
    std::vector<Range> ranges;
    for (const auto& item : root.items()) {
        const std::string shown = printable(item.key());
        const json& entry = item.value();
        const auto broken = [&](const char* what) { fail("%s: tensor `%s`: %s", name, shown.c_str(), what); };
        if (item.key() == "__metadata__") {
            if (!entry.is_object()) broken("must be an object of strings");
            for (const auto& pair : entry.items()) {
                if (!pair.value().is_string()) broken("must be an object of strings");
                metadata_[pair.key()] = pair.value().get<std::string>();
            }
            continue;
        }
        if (!entry.is_object() || entry.size() != 3 || !entry.contains("dtype") || !entry.contains("shape") || !entry.contains("data_offsets"))
            broken("must have dtype, shape and data_offsets, and nothing else");
        SafetensorsTensor tensor{};
        if (!entry["dtype"].is_string()) broken("dtype is not a string");
        const std::string dtype = entry["dtype"].get<std::string>();
        size_t element_bytes = 0;
        for (const auto& t : kTypes) {
            if (dtype != t.name) continue;
            tensor.type = t.type;
            element_bytes = t.bytes;
        }
        if (element_bytes == 0) fail("%s: tensor `%s` has dtype `%s`, which is not supported", name, shown.c_str(), printable(dtype).c_str());
        const json& shape = entry["shape"];
        if (!shape.is_array()) broken("shape is not a list");
        tensor.count = 1;
        for (const json& extent : shape) {
            if (!extent.is_number_unsigned()) broken("shape holds something other than whole numbers");
            tensor.shape.push_back(extent.get<uint64_t>());
            if (__builtin_mul_overflow(tensor.count, tensor.shape.back(), &tensor.count)) broken("the shape's product overflows");
        }
        size_t tensor_bytes;
        if (__builtin_mul_overflow(tensor.count, element_bytes, &tensor_bytes)) broken("the size in bytes overflows");
        const json& offsets = entry["data_offsets"];
        if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() || !offsets[1].is_number_unsigned())
            broken("data_offsets is not a pair of whole numbers");
        const uint64_t begin = offsets[0].get<uint64_t>(), end = offsets[1].get<uint64_t>();
        if (begin > end || end > data_bytes)
            fail("%s: tensor `%s` lies at bytes %llu to %llu of the data, which has %zu bytes; the file is truncated or damaged", name, shown.c_str(),
                 static_cast<unsigned long long>(begin), static_cast<unsigned long long>(end), data_bytes);
        if (end - begin != tensor_bytes)
            fail("%s: tensor `%s` has %llu bytes, but shape %s of %s makes %zu", name, shown.c_str(), static_cast<unsigned long long>(end - begin),
                 shape_text(tensor.shape).c_str(), dtype.c_str(), tensor_bytes);
        tensor.data = data + begin;
        ranges.push_back({begin, end, shown});
        tensors_.emplace(item.key(), std::move(tensor));
    }

    // The tensors must tile the data: an overlap is two names for one memory, a hole hides something.
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin != b.begin ? a.begin < b.begin : a.end < b.end; });
    size_t at = 0;
    for (const Range& range : ranges) {
        CHECK(range.begin >= at, "%s: tensor `%s` overlaps the one before it at byte %zu of the data", name, range.name.c_str(), range.begin);
        CHECK(range.begin == at, "%s: bytes %zu to %zu of the data belong to no tensor", name, at, range.begin);
        at = range.end;
    }
    CHECK(at == data_bytes, "%s: bytes %zu to %zu of the data belong to no tensor", name, at, data_bytes);
}

const SafetensorsTensor& SafetensorsFile::get(const std::string& name) const {
    const auto it = tensors_.find(name);
    if (it == tensors_.end()) fail("%s: holds no tensor `%s`", path().c_str(), printable(name).c_str());
    return it->second;
}

const SafetensorsTensor& SafetensorsFile::get(const std::string& name, const std::vector<size_t>& shape) const {
    const SafetensorsTensor& tensor = get(name);
    if (tensor.shape != shape)
        fail("%s: tensor `%s` has shape %s, expected %s", path().c_str(), printable(name).c_str(), shape_text(tensor.shape).c_str(), shape_text(shape).c_str());
    return tensor;
}

std::vector<float> SafetensorsFile::floats(const std::string& name) const {
    const SafetensorsTensor& tensor = get(name);
    std::vector<float> values(tensor.count);
    for (size_t i = 0; i < tensor.count; ++i) {
        switch (tensor.type) {
            case TensorType::F64: values[i] = static_cast<float>(load<double>(tensor.data, i)); break;
            case TensorType::F32: values[i] = load<float>(tensor.data, i); break;
            case TensorType::F16: values[i] = half_to_float(load<uint16_t>(tensor.data, i)); break;
            case TensorType::BF16: {
                const uint32_t bits = static_cast<uint32_t>(load<uint16_t>(tensor.data, i)) << 16;
                memcpy(&values[i], &bits, sizeof bits);
                break;
            }
            default: fail("%s: tensor `%s` is %s, expected a floating type", path().c_str(), printable(name).c_str(), tensor_type_name(tensor.type));
        }
    }
    return values;
}

std::vector<int64_t> SafetensorsFile::integers(const std::string& name) const {
    const SafetensorsTensor& tensor = get(name);
    std::vector<int64_t> values(tensor.count);
    for (size_t i = 0; i < tensor.count; ++i) {
        switch (tensor.type) {
            case TensorType::I64: values[i] = load<int64_t>(tensor.data, i); break;
            case TensorType::I32: values[i] = load<int32_t>(tensor.data, i); break;
            case TensorType::I16: values[i] = load<int16_t>(tensor.data, i); break;
            case TensorType::I8: values[i] = load<int8_t>(tensor.data, i); break;
            case TensorType::U8:
            case TensorType::Bool: values[i] = load<uint8_t>(tensor.data, i); break;
            default: fail("%s: tensor `%s` is %s, expected an integer type", path().c_str(), printable(name).c_str(), tensor_type_name(tensor.type));
        }
    }
    return values;
}

std::string safetensors_header(const std::vector<SafetensorsEntry>& tensors, const std::map<std::string, std::string>& metadata) {
    std::string text = "{";
    if (!metadata.empty()) {
        text += "\"__metadata__\":{";
        for (const auto& [key, value] : metadata) {
            if (text.back() != '{') text += ',';
            text += json_string(key) + ":" + json_string(value);
        }
        text += '}';
    }
    std::set<std::string> names = {"__metadata__"};  // the one name that is no tensor's
    size_t begin = 0;
    for (const SafetensorsEntry& tensor : tensors) {
        const std::string shown = printable(tensor.name);
        CHECK(names.insert(tensor.name).second, "a safetensors file cannot hold two tensors `%s`; give each its own name, and none `__metadata__`", shown.c_str());
        size_t bytes = tensor_type_bytes(tensor.type), end;
        std::string shape;
        for (const size_t extent : tensor.shape) {
            CHECK(!__builtin_mul_overflow(bytes, extent, &bytes), "tensor `%s` of shape %s: the size in bytes overflows", shown.c_str(), shape_text(tensor.shape).c_str());
            if (!shape.empty()) shape += ',';
            shape += std::to_string(extent);
        }
        CHECK(!__builtin_add_overflow(begin, bytes, &end), "tensor `%s` of shape %s: the sizes of the tensors up to this one overflow together", shown.c_str(),
              shape_text(tensor.shape).c_str());
        if (text.size() > 1) text += ',';
        text += json_string(tensor.name);
        text += format(":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%zu,%zu]}", tensor_type_name(tensor.type), shape.c_str(), begin, end);
        begin = end;
    }
    text += '}';
    text.append((8 - text.size() % 8) % 8, ' ');  // the length before it has 8 bytes itself
    CHECK(text.size() <= kMaxHeaderBytes, "the header of %zu tensors has %zu bytes, more than the %zu that readers allow; use several files", tensors.size(), text.size(),
          kMaxHeaderBytes);
    std::string length(8, '\0');
    for (size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(text.size() >> (8 * i) & 255);
    return length + text;
}
