// Rotary position embedding, Hugging Face's half-split pairing: element i of a head turns with element i + HD / 2.
//
//   (x[i], x[i + HD/2]) -> (x[i] cos a - x[i + HD/2] sin a, x[i + HD/2] cos a + x[i] sin a),   a = position * inv_freq[i]
//
// In place (=), forward and backward (which turns the other way). Bytes an element (bf16): 2 read + 2 written; the table's 4 bytes an
// element are shared by all heads of a token and come from the cache. Requires HD even; HD a multiple of 16 takes the vector path.
#pragma once

#include <cmath>
#include <vector>

#include "llmc/device.cuh"
#include "llmc/model_config.h"

// cos and sin of every angle: (max_T, 2, HD / 2), the cosines of a position before its sines so that both load as vectors.
// Computed as Hugging Face does, in float32: frequencies, their llama3 scaling and the product with the position each round to float;
// only the cosine and sine are taken in double and then rounded.
inline std::vector<float> rope_table(int max_T, int HD, double theta, const RopeScaling& scaling) {
    CHECK(HD > 0 && HD % 2 == 0, "head_dim %d is odd; RoPE turns pairs", HD);
    const int half = HD / 2;
    std::vector<float> inv_freq(half);
    for (int i = 0; i < half; i++) {
        const float exponent = static_cast<float>(2 * i) / static_cast<float>(HD);
        inv_freq[i] = 1.0f / static_cast<float>(std::pow(theta, static_cast<double>(exponent)));
    }
    if (scaling.type == RopeScaling::Type::Llama3) {
        // Long wavelengths are stretched by `factor`, short ones kept, those between blended.
        const float factor = static_cast<float>(scaling.factor);
        const float old_length = static_cast<float>(scaling.original_max_seq_len);
        const float low = static_cast<float>(scaling.low_freq_factor), high = static_cast<float>(scaling.high_freq_factor);
        for (float& frequency : inv_freq) {
            const float wavelength = static_cast<float>(2.0 * M_PI) / frequency;
            if (wavelength > old_length / low) {
                frequency = frequency / factor;
            } else if (!(wavelength < old_length / high)) {
                const float blend = (old_length / wavelength - low) / (high - low);
                frequency = (1.0f - blend) * frequency / factor + blend * frequency;
            }
        }
    }
    std::vector<float> table(static_cast<size_t>(max_T) * HD);
    for (int t = 0; t < max_T; t++) {
        for (int i = 0; i < half; i++) {
            const float angle = static_cast<float>(t) * inv_freq[i];
            table[static_cast<size_t>(t) * HD + i] = static_cast<float>(std::cos(static_cast<double>(angle)));
            table[static_cast<size_t>(t) * HD + half + i] = static_cast<float>(std::sin(static_cast<double>(angle)));
        }
    }
    return table;
}

inline constexpr int kRopeThreads = 128;

// One block a token. Without Vectors (HD = 8, 24, ...) a thread turns one pair.
template <bool Vectors, bool Backward>
__global__ void __launch_bounds__(kRopeThreads) rope_kernel(floatX* x, const float* table, const int* positions, int T, int num_heads, int HD, size_t row_stride) {
    const size_t token = blockIdx.x;
    const int half = HD / 2;
    const size_t position = positions != nullptr ? positions[token] : token % T;
    const float* cosines = table + position * HD;
    const float* sines = cosines + half;
    const int width = Vectors ? kVector : 1;
    const int per_head = half / width;
    for (int item = threadIdx.x; item < num_heads * per_head; item += kRopeThreads) {
        const int head = item / per_head;
        const int i = (item - head * per_head) * width;
        floatX* a = x + token * row_stride + static_cast<size_t>(head) * HD + i;
        floatX* b = a + half;
        if constexpr (Vectors) {
            const Float8 c = load8(cosines + i), s = Backward ? -load8(sines + i) : load8(sines + i);
            const Float8 va = load8(a), vb = load8(b);
            store8(a, va * c - vb * s);
            store8(b, vb * c + va * s);
        } else {
            const float c = cosines[i], s = Backward ? -sines[i] : sines[i];
            const float va = to_float(*a), vb = to_float(*b);
            *a = from_float<floatX>(va * c - vb * s);
            *b = from_float<floatX>(vb * c + va * s);
        }
    }
}

template <bool Backward>
inline void rope(const char* name, floatX* x, const float* table, const int* positions, int B, int T, int num_heads, int HD, size_t row_stride, cudaStream_t stream) {
    NvtxRange range(name);
    CHECK(HD > 0 && HD % 2 == 0, "%s: head_dim %d is odd", name, HD);
    CHECK(row_stride >= static_cast<size_t>(num_heads) * HD, "%s: rows %zu apart are shorter than %d heads of %d", name, row_stride, num_heads, HD);
    const size_t num_tokens = static_cast<size_t>(B) * T;
    if (num_tokens == 0 || num_heads == 0) return;
    with_bool(HD % (2 * kVector) == 0 && row_stride % kVector == 0, [&](auto vectors) {
        launch(rope_kernel<vectors.value, Backward>, grid_for(num_tokens, 1), kRopeThreads, 0, stream, x, table, positions, T, num_heads, HD, row_stride);
    });
}

// x (B, T, row_stride): the first num_heads heads of each row, in place; table of rope_table; positions (B, T), or nullptr for 0 .. T-1
inline void rope_forward(floatX* x, const float* table, const int* positions, int B, int T, int num_heads, int HD, size_t row_stride, cudaStream_t stream) {
    rope<false>(__func__, x, table, positions, B, T, num_heads, HD, row_stride, stream);
}

// The gradient's turn back; arguments as in forward, x = the gradient
inline void rope_backward(floatX* x, const float* table, const int* positions, int B, int T, int num_heads, int HD, size_t row_stride, cudaStream_t stream) {
    rope<true>(__func__, x, table, positions, B, T, num_heads, HD, row_stride, stream);
}
