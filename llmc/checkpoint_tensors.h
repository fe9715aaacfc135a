// The tensors of a checkpoint: which file holds what, for whoever writes them and whoever reads them. Host only; see checkpoint.h.
//
// Weights are whole tensors in the order of the table. Optimizer state is in pieces: rank r of N wrote slice r of every bucket, so where a piece ends depends on ranks and
// buckets, and the file says it: a reader with other ranks and buckets takes the elements it wants from whatever pieces hold them.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "llmc/param_table.h"
#include "llmc/safetensors.h"

// The three fp32 arrays of the optimizer, as their tensors are called.
enum class StateArray { kMaster, kFirstMoment, kSecondMoment };
inline constexpr StateArray kStateArrays[] = {StateArray::kMaster, StateArray::kFirstMoment, StateArray::kSecondMoment};

// ---- files ------------------------------------------------------------------------------------------------------------------------

// What one rank writes into one file: a header, then parts of what it holds on the device, one after the other.
struct StateFile {
    std::string name;
    std::string header;
    size_t data_bytes = 0;
    size_t bytes() const { return header.size() + data_bytes; }
};

// The largest file of weights that Hugging Face's own writer makes is 5 GB (max_shard_size of save_pretrained; 50 GB in its newest versions).
inline constexpr size_t kMaxWeightsFileBytes = 5'000'000'000;

// A file of weights, and the parameters of the table in it: [first, end).
struct WeightsFile {
    StateFile file;
    int first_parameter = 0, end_parameter = 0;
};
std::vector<WeightsFile> weights_files(const ParamTable& table, size_t element_bytes, size_t max_file_bytes = kMaxWeightsFileBytes);

// model.safetensors.index.json of several files; "" for one.
std::string weights_index(const ParamTable& table, const std::vector<WeightsFile>& files, size_t element_bytes);

// Rank r's file of optimizer state: master weights of its slice of every bucket, then first moments, then second moments.
StateFile optimizer_file(const ParamTable& table, const FlatLayout& layout, int rank);

// Data of all tensors of a checkpoint: weights, fp32 master weights and two moments.
size_t checkpoint_data_bytes(const ParamTable& table, size_t element_bytes);

// The most data that one of the ranks saves: its slices (with their padding) and its files of weights, of which rank f % N writes file f.
size_t largest_share_bytes(const FlatLayout& layout, const std::vector<WeightsFile>& files);

// Throws Error where `ranks` processes of this machine cannot each take that much memory; `what` it is for.
void check_host_memory(size_t bytes, int ranks, const char* what);

// ---- reading ----------------------------------------------------------------------------------------------------------------------

// Tensors of one kind that lie in pieces over files.
class PieceIndex {
public:
    // Adds elements [first, first + tensor.count) of parameter `parameter`.
    void add(int parameter, size_t first, const SafetensorsTensor& tensor, const std::string& where);
    // Throws Error unless the pieces of every parameter are each of its elements once.
    void check(const ParamTable& table, const char* what);
    // Copies elements [first, first + count) of a parameter.
    void read(int parameter, size_t first, size_t count, void* out) const;

private:
    struct Piece { size_t first, count, element_bytes; const unsigned char* data; std::string where; };
    std::vector<std::vector<Piece>> pieces_;  // by parameter, by first element
};

// The tensors of a checkpoint folder. Opens the files (mapped: nothing is read before it is asked for).
class CheckpointTensors {
public:
    // `files`: names of all files of the folder. Throws Error naming file and tensor where one is missing, foreign or misshapen, for this table and element type of the weights.
    CheckpointTensors(const std::string& folder, const std::vector<std::string>& files, const ParamTable& table, TensorType weights_type);

    void read_weights(int parameter, size_t first, size_t count, void* out) const { weights_.read(parameter, first, count, out); }
    void read_state(StateArray array, int parameter, size_t first, size_t count, float* out) const { state_[static_cast<int>(array)].read(parameter, first, count, out); }

private:
    std::vector<std::unique_ptr<SafetensorsFile>> files_;
    PieceIndex weights_, state_[3];
};
