// Moving parameters between Hugging Face tensors on the host and the flat buffer on the device.
#pragma once

#include <vector>

#include "llmc/hash.h"
#include "llmc/safetensors.h"
#include "llmc/zero.cuh"

// Fills every parameter from the file (Hugging Face names and shapes, any floating type, rounded to floatX to nearest even); vocabulary padding rows become 0.
// Waits for the copies. Throws Error naming file and tensor when one is missing or misshapen.
inline void load_parameters(ZeroEngine& zero, const SafetensorsFile& file, cudaStream_t stream) {
    zero.write_params([&](const Parameter& p, floatX* address) {
        const std::vector<size_t> shape = p.is_matrix ? std::vector<size_t>{p.rows, p.cols} : std::vector<size_t>{p.rows};
        file.get(p.name, shape);
        const std::vector<float> values = file.floats(p.name);
        std::vector<floatX> stored(values.size());
        for (size_t i = 0; i < values.size(); ++i) stored[i] = static_cast<floatX>(values[i]);
        CUDA_CHECK(cudaMemcpyAsync(address, stored.data(), stored.size() * sizeof(floatX), cudaMemcpyHostToDevice, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));  // `stored` leaves scope
    });
}

// Hash of all parameters in the order of the table, padding left out: equal for equal weights, whatever the number of ranks, the buckets or the stage.
// Collective where parameters are sharded; every rank that calls it gets it. Waits for the engine's streams.
inline std::string hash_parameters(ZeroEngine& zero, cudaStream_t stream) {
    Hash64 hash;
    zero.read_params([&](const Parameter& p, const floatX* address) {
        std::vector<floatX> raw(p.count());
        CUDA_CHECK(cudaMemcpyAsync(raw.data(), address, raw.size() * sizeof(floatX), cudaMemcpyDeviceToHost, stream));
        CUDA_CHECK(cudaStreamSynchronize(stream));
        hash.add(raw.data(), raw.size() * sizeof(floatX));
    });
    return hash.hex();
}
