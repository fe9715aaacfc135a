#include "llmc/checkpoint_tensors.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <fstream>

#include <nlohmann/json.hpp>

#include "llmc/error.h"
#include "llmc/units.h"

namespace {

const char* suffix_of(StateArray array) {
    switch (array) {
        case StateArray::kMaster: return ".master";
        case StateArray::kFirstMoment: return ".exp_avg";
        case StateArray::kSecondMoment: return ".exp_avg_sq";
    }
    return "";
}

std::vector<size_t> shape_of(const Parameter& p) { return p.is_matrix ? std::vector<size_t>{p.rows, p.cols} : std::vector<size_t>{p.rows}; }

TensorType weights_type_of(size_t element_bytes) { return element_bytes == 2 ? TensorType::BF16 : TensorType::F32; }

}  // namespace

std::vector<WeightsFile> weights_files(const ParamTable& table, size_t element_bytes, size_t max_file_bytes) {
    std::vector<WeightsFile> files;
    for (size_t i = 0; i < table.parameters.size(); ++i) {
        const size_t bytes = table.parameters[i].count() * element_bytes;
        if (files.empty() || files.back().file.data_bytes + bytes > max_file_bytes) {
            files.emplace_back();
            files.back().first_parameter = static_cast<int>(i);
        }
        files.back().file.data_bytes += bytes;
        files.back().end_parameter = static_cast<int>(i) + 1;
    }
    for (size_t f = 0; f < files.size(); ++f) {
        WeightsFile& weights = files[f];
        weights.file.name = files.size() == 1 ? "model.safetensors" : format("model-%05zu-of-%05zu.safetensors", f + 1, files.size());
        std::vector<SafetensorsEntry> entries;
        for (int i = weights.first_parameter; i < weights.end_parameter; ++i) entries.push_back({table.parameters[i].name, weights_type_of(element_bytes), shape_of(table.parameters[i])});
        weights.file.header = safetensors_header(entries, {{"format", "pt"}});  // transformers asks for this word
    }
    return files;
}

std::string weights_index(const ParamTable& table, const std::vector<WeightsFile>& files, size_t element_bytes) {
    if (files.size() == 1) return "";
    nlohmann::json index = {{"metadata", {{"total_size", table.parameter_count() * element_bytes}}}};
    for (const WeightsFile& weights : files) {
        for (int i = weights.first_parameter; i < weights.end_parameter; ++i) index["weight_map"][table.parameters[i].name] = weights.file.name;
    }
    return index.dump(2) + "\n";
}

StateFile optimizer_file(const ParamTable& table, const FlatLayout& layout, int rank) {
    StateFile file;
    file.name = format("optimizer-%05d-of-%05d.safetensors", rank, layout.num_ranks);
    std::vector<SafetensorsEntry> entries;
    std::map<std::string, std::string> metadata = {{"format", "llm.zero optimizer"}};
    for (const StateArray array : kStateArrays) {
        for (size_t b = 0; b < layout.buckets.size(); ++b) {
            const Bucket& bucket = layout.buckets[b];
            for (const ParameterPiece& piece : parameter_pieces(table, layout, b, bucket.begin + rank * bucket.slice_count, bucket.slice_count)) {
                const std::string& name = table.parameters[piece.parameter].name;
                entries.push_back({name + suffix_of(array), TensorType::F32, {piece.count}});
                metadata["offset:" + name] = std::to_string(piece.first);
                file.data_bytes += piece.count * sizeof(float);
            }
        }
    }
    file.header = safetensors_header(entries, metadata);
    return file;
}

size_t checkpoint_data_bytes(const ParamTable& table, size_t element_bytes) { return table.parameter_count() * (element_bytes + std::size(kStateArrays) * sizeof(float)); }

size_t largest_share_bytes(const FlatLayout& layout, const std::vector<WeightsFile>& files) {
    std::vector<size_t> weights(std::min<size_t>(files.size(), layout.num_ranks), 0);
    for (size_t f = 0; f < files.size(); ++f) weights[f % layout.num_ranks] += files[f].file.data_bytes;
    return layout.shard_count * std::size(kStateArrays) * sizeof(float) + *std::max_element(weights.begin(), weights.end());
}

void check_host_memory(size_t bytes, int ranks, const char* what) {
    std::ifstream meminfo("/proc/meminfo");
    for (std::string line; std::getline(meminfo, line);) {
        size_t available_kib = 0;
        if (sscanf(line.c_str(), "MemAvailable: %zu kB", &available_kib) != 1) continue;
        CHECK(bytes <= available_kib * 1024 / ranks, "%s needs %s of host memory for each of the %d rank(s) on this machine, and %s are available: use --save-mode stream, or more machines", what,
              format_bytes(bytes).c_str(), ranks, format_bytes(available_kib * 1024).c_str());
    }
}

void PieceIndex::add(int parameter, size_t first, const SafetensorsTensor& tensor, const std::string& where) {
    if (pieces_.size() <= static_cast<size_t>(parameter)) pieces_.resize(parameter + 1);
    pieces_[parameter].push_back({first, tensor.count, tensor_type_bytes(tensor.type), tensor.data, where});
}

void PieceIndex::check(const ParamTable& table, const char* what) {
    pieces_.resize(table.parameters.size());
    for (size_t i = 0; i < pieces_.size(); ++i) {
        const Parameter& p = table.parameters[i];
        std::sort(pieces_[i].begin(), pieces_[i].end(), [](const Piece& a, const Piece& b) { return a.first < b.first; });
        size_t at = 0;
        for (const Piece& piece : pieces_[i]) {
            CHECK(piece.first == at, "%s: the %s of `%s` from element %zu on %s", piece.where.c_str(), what, p.name.c_str(), std::min(at, piece.first),
                  piece.first > at ? "are missing before it" : "are there twice");
            CHECK(piece.count <= p.count() - at, "%s: the %s of `%s` go on beyond its %zu elements", piece.where.c_str(), what, p.name.c_str(), p.count());
            at += piece.count;
        }
        CHECK(at == p.count(), "the %s of `%s` from element %zu of %zu on are in no file of the checkpoint", what, p.name.c_str(), at, p.count());
    }
}

void PieceIndex::read(int parameter, size_t first, size_t count, void* out) const {
    const std::vector<Piece>& pieces = pieces_[parameter];
    auto piece = std::upper_bound(pieces.begin(), pieces.end(), first, [](size_t element, const Piece& p) { return element < p.first; });
    const size_t end = pieces.empty() ? 0 : pieces.back().first + pieces.back().count;
    CHECK(piece != pieces.begin() && first <= end && count <= end - first, "elements %zu to %zu of parameter %d are in no piece", first, first + count, parameter);
    unsigned char* to = static_cast<unsigned char*>(out);
    for (--piece; count > 0; ++piece) {
        const size_t skipped = first - piece->first, here = std::min(count, piece->count - skipped);
        memcpy(to, piece->data + skipped * piece->element_bytes, here * piece->element_bytes);
        to += here * piece->element_bytes;
        first += here;
        count -= here;
    }
}

CheckpointTensors::CheckpointTensors(const std::string& folder, const std::vector<std::string>& files, const ParamTable& table, TensorType weights_type) {
    std::map<std::string, int> parameters;
    for (size_t i = 0; i < table.parameters.size(); ++i) parameters[table.parameters[i].name] = static_cast<int>(i);
    for (const std::string& name : files) {
        const bool weights = name.starts_with("model") && name.ends_with(".safetensors"), optimizer = name.starts_with("optimizer-");
        if (!weights && !optimizer) continue;
        files_.push_back(std::make_unique<SafetensorsFile>(folder + "/" + name));
        const SafetensorsFile& file = *files_.back();
        for (const auto& [tensor_name, tensor] : file.tensors()) {
            // NAME of the weights, NAME.master and so on of the state; no name of a parameter ends like that.
            std::string parameter_name = tensor_name;
            PieceIndex* index = &weights_;
            for (const StateArray array : kStateArrays) {
                if (weights || !tensor_name.ends_with(suffix_of(array))) continue;
                parameter_name = tensor_name.substr(0, tensor_name.size() - strlen(suffix_of(array)));
                index = &state_[static_cast<int>(array)];
            }
            const auto found = parameters.find(parameter_name);
            if (found == parameters.end() || (optimizer && index == &weights_))
                fail("%s: tensor `%s` is none of this model's", file.path().c_str(), printable(tensor_name).c_str());
            const Parameter& p = table.parameters[found->second];
            if (weights) {
                file.get(tensor_name, shape_of(p));
                CHECK(tensor.type == weights_type, "%s: tensor `%s` is %s, expected %s", file.path().c_str(), tensor_name.c_str(), tensor_type_name(tensor.type), tensor_type_name(weights_type));
                index->add(found->second, 0, tensor, file.path());
                continue;
            }
            CHECK(tensor.type == TensorType::F32, "%s: tensor `%s` is %s, expected F32", file.path().c_str(), tensor_name.c_str(), tensor_type_name(tensor.type));
            CHECK(tensor.shape.size() == 1, "%s: tensor `%s` has %zu dimensions, a piece has one", file.path().c_str(), tensor_name.c_str(), tensor.shape.size());
            const auto offset = file.metadata().find("offset:" + p.name);
            CHECK(offset != file.metadata().end(), "%s: there is no offset of `%s`", file.path().c_str(), p.name.c_str());
            size_t first = 0;
            const char *begin = offset->second.data(), *end = begin + offset->second.size();
            const auto parsed = std::from_chars(begin, end, first);
            CHECK(parsed.ec == std::errc() && parsed.ptr == end && first <= p.count(), "%s: the offset of `%s` is no element of it", file.path().c_str(), p.name.c_str());
            index->add(found->second, first, tensor, file.path());
        }
    }
    weights_.check(table, "weights");
    for (const StateArray array : kStateArrays) state_[static_cast<int>(array)].check(table, suffix_of(array) + 1);
}
