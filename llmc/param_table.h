// One table describes every parameter: allocation, initialisation, sharding, weight decay, import/export and the start-up print follow it.
//
// The flat buffer holds units in the order [embedding][layer 0] ... [layer L-1][final norm, head]. A unit is never split. Offsets inside a
// unit do not depend on the number of ranks; the flat layout (buckets, padding, slices) does, and is made by make_flat_layout().
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "llmc/model_config.h"

constexpr size_t kParameterAlign = 128;  // elements: 256 bytes of bf16, so that every product sees aligned operands
constexpr size_t kSliceAlign = 64;       // elements: a rank's slice of a bucket is a multiple of this (128 bytes of bf16)

enum class Init { kNormal, kNormalScaled, kOne, kZero };  // N(0, 0.02); N(0, 0.02 / sqrt(2L)); 1; 0

struct Parameter {
    std::string name;        // Hugging Face name; "lm_head.weight" is absent when the head is tied
    size_t rows = 0;         // Hugging Face's shape: (rows, cols) for a matrix, (rows) with cols = 1 for a vector
    size_t cols = 1;
    size_t stored_rows = 0;  // rows in memory: the vocabulary is padded; padding rows are 0 and stay 0
    bool is_matrix = false;
    Init init = Init::kZero;
    bool weight_decay = false;  // matrices only
    bool trainable = true;
    int unit = 0;
    size_t offset = 0;  // elements from the unit's first

    size_t count() const { return rows * cols; }
    size_t stored_count() const { return stored_rows * cols; }
};

struct Unit {
    std::string name;
    size_t count = 0;          // elements, alignment gaps included; a multiple of kParameterAlign
    size_t logical_begin = 0;  // elements of all units before it: a position that does not depend on ranks or buckets
    int first_parameter = 0, end_parameter = 0;
    struct Gap {
        size_t offset, count;  // elements of the unit that belong to no parameter; kept 0
    };
    std::vector<Gap> gaps;
};

struct ParamTable {
    std::vector<Parameter> parameters;  // in flat order
    std::vector<Unit> units;            // embedding, layers, head
    bool tied = false;                  // the embedding unit's gradient is complete only at the end of backward

    int embedding_unit() const { return 0; }
    int layer_unit(int layer) const { return 1 + layer; }
    int head_unit() const { return static_cast<int>(units.size()) - 1; }

    // Number of trainable weights, vocabulary padding and alignment gaps not counted.
    size_t parameter_count() const;

    // The parameter of that name; throws Error if there is none.
    const Parameter& find(const std::string& name) const;

    // Elements from the first of its unit to the parameter of that name.
    size_t offset_in_unit(const std::string& name) const { return find(name).offset; }
};

// The table of a model. Parameters of one product (q/k/v weights, their biases, gate/up) are contiguous and aligned as one.
ParamTable make_param_table(const ModelConfig& config);

// A bucket is what is reduced, gathered and stepped at once: one unit, or several adjacent ones.
struct Bucket {
    int first_unit = 0, end_unit = 0;
    size_t begin = 0;          // elements from the start of the flat buffer; a multiple of kParameterAlign
    size_t count = 0;          // elements, padding included: num_ranks * slice_count
    size_t unit_count = 0;     // elements of its units; [unit_count, count) is padding
    size_t slice_count = 0;    // rank r owns [r * slice_count, (r + 1) * slice_count) of the bucket
    size_t slice_begin = 0;    // elements of all slices of earlier buckets: where this one starts in a rank's own shard
    size_t logical_begin = 0;  // logical position of its first element
};

struct FlatLayout {
    int num_ranks = 1;
    std::vector<Bucket> buckets;
    std::vector<size_t> unit_begin;    // elements from the start of the flat buffer
    std::vector<int> bucket_of_unit;
    size_t total_count = 0;            // elements of the flat buffer
    size_t shard_count = 0;            // elements of one rank's slices together
    size_t max_unit_count = 0, max_bucket_count = 0, max_slice_count = 0;
};

// Merges adjacent units while their bytes fit bucket_mb (10^6 bytes, element_bytes each; 0 = never merge), pads each bucket to num_ranks slices.
FlatLayout make_flat_layout(const ParamTable& table, int num_ranks, double bucket_mb, size_t element_bytes);

// The elements of a parameter that lie in a range of the flat buffer; padding of the vocabulary is no element.
struct ParameterPiece {
    int parameter = 0;     // of the table
    size_t first = 0;      // element of the parameter
    size_t count = 0;
    size_t in_range = 0;   // elements from the start of the range
};

// Pieces of [begin, begin + count) of the flat buffer, within one bucket, in its order; gaps and padding are in none.
std::vector<ParameterPiece> parameter_pieces(const ParamTable& table, const FlatLayout& layout, size_t bucket, size_t begin, size_t count);

// One byte per kParameterAlign elements of the flat buffer: 1 where weight decay applies.
std::vector<uint8_t> make_decay_map(const ParamTable& table, const FlatLayout& layout);
size_t decay_map_count(const FlatLayout& layout);
