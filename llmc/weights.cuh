// Moving parameters between Hugging Face tensors on the host and the flat buffer on the device.
#pragma once

#include <vector>

#include "llmc/hash.h"
#include "llmc/safetensors.h"
#include "llmc/zero.cuh"

// Fills every parameter of the table from the file (Hugging Face names and shapes, any floating type, rounded to floatX to nearest even).
// Vocabulary padding rows stay as they are (0). Waits for the copies. Throws Error naming file and tensor when one is missing or misshapen.
inline void load_parameters(ZeroEngine& zero, const ParamTable& table, const SafetensorsFile& file, cudaStream_t stream) {
    for (const Parameter& p : table.parameters) {
        const std::vector<size_t> shape = p.is_matrix ? std::vector<size_t>{p.rows, p.cols} : std::vector<size_t>{p.rows};
        file.get(p.name, shape);
        const std::vector<float> values = file.floats(p.name);
        std::vector<floatX> stored(values.size());
        for (size_t i = 0; i < values.size(); ++i) stored[i] = static_cast<floatX>(values[i]);
        CUDA_CHECK(cudaMemcpyAsync(zero.parameter_address(p), stored.data(), stored.size() * sizeof(floatX), cudaMemcpyHostToDevice, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));  // `stored` leaves scope
    }
}

// `count` elements of device memory as floats on the host; waits for the stream.
template <class T>
std::vector<float> read_floats(const T* address, size_t count, cudaStream_t stream) {
    std::vector<T> raw(count);
    CUDA_CHECK(cudaMemcpyAsync(raw.data(), address, count * sizeof(T), cudaMemcpyDeviceToHost, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    std::vector<float> values(count);
    for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(raw[i]);
    return values;
}

// Hash of all parameters in the order of the table, padding left out: equal for equal weights, whatever the number of ranks or the buckets.
// The caller's rank must hold all parameters (stages 0 to 2); waits for the engine's streams.
inline std::string hash_parameters(const ZeroEngine& zero, const ParamTable& table, cudaStream_t stream) {
    zero.synchronize();
    Hash64 hash;
    for (const Parameter& p : table.parameters) {
        std::vector<floatX> raw(p.count());
        CUDA_CHECK(cudaMemcpyAsync(raw.data(), zero.parameter_address(p), raw.size() * sizeof(floatX), cudaMemcpyDeviceToHost, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
        hash.add(raw.data(), raw.size() * sizeof(floatX));
    }
    return hash.hex();
}
