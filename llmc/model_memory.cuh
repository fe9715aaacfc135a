// The memory a model works in, and what it comes to: allocated here alone, for a run and for the plan of one.
//
// Shapes: B micro-batch, T sequence length, N = B*T, C channels, L layers, NH query heads, NKV key/value heads, HD head dimension,
// F feed-forward dimension, V vocabulary, Vp V padded to 128. QKV = (NH + 2*NKV) * HD.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "llmc/attention.cuh"
#include "llmc/device_memory.cuh"
#include "llmc/matmul.cuh"
#include "llmc/model_config.h"
#include "llmc/qk_norm.cuh"
#include "llmc/rmsnorm.cuh"

// What is computed again in backward; each level includes those before it. Bytes saved a layer, in elements of floatX: norm 2 N C; ffn also 3 N F; block
// everything but the residual stream that enters the layer. Extra work: norm two RMSNorms, ffn also 1/9 to 1/6 of a layer's products, block all of its forward but
// the last product. The last layer's activations are still there and are never computed again.
enum class Recompute { kNone, kNorm, kFfn, kBlock };

inline Recompute recompute_from_name(const std::string& name) {
    const std::vector<std::string> names = {"none", "norm", "ffn", "block"};
    const auto found = std::find(names.begin(), names.end(), name);
    CHECK(found != names.end(), "recompute '%s' is not one of none, norm, ffn, block", name.c_str());
    return static_cast<Recompute>(found - names.begin());
}

struct MemoryLevers {
    Recompute recompute = Recompute::kNone;
    int lmhead_chunks = 1;  // a divisor of the rows of a micro-batch, B * T
};

// What backward needs of one layer.
struct LayerActivations {
    floatX* residual_in;   // (N, C)  residual stream entering the layer
    floatX* norm1;         // (N, C)
    float* rstd1;          // (N)
    floatX* qkv;           // (N, QKV)  rotated in place, unless there is a QK-norm
    floatX* qk;            // (N, (NH + NKV) * HD)  QK-norm only: normalised and rotated; else nullptr
    float* qk_rstd;        // (N, NH + NKV)  QK-norm only
    floatX* attention;     // (N, NH * HD)
    float* lse;            // (B, NH, T)  log-sum-exp of the scores
    floatX* residual_mid;  // (N, C)  residual stream between attention and feed-forward
    floatX* norm2;         // (N, C)
    float* rstd2;          // (N)
    floatX* gate_up;       // (N, 2 * F)
    floatX* swiglu;        // (N, F)
};

// Elements from one token's q (and k) to the next one's: the packed row, unless a QK-norm gave q and k a buffer of their own.
inline size_t rotated_row(const ModelConfig& config) { return static_cast<size_t>(config.num_heads + (config.qk_norm ? 1 : 2) * config.num_kv_heads) * config.head_dim; }

// Attention as the model calls it.
inline AttentionArgs model_attention_args(const ModelConfig& config, int B, int T) {
    AttentionArgs args = packed_attention_args(B, T, config.num_heads, config.num_kv_heads, config.head_dim);
    args.q_row = args.k_row = rotated_row(config);
    args.q_batch = args.k_batch = rotated_row(config) * T;
    return args;
}

struct ModelMemory {
    std::vector<LayerActivations> layers;     // L
    floatX* residual_final;                   // (N, C)
    floatX* norm_final;                       // (N, C)
    float* rstd_final;                        // (N)
    floatX* logits;                           // (rows of a chunk, Vp), then their gradients
    float* losses;                            // (N)
    floatX* branch;                           // (N, C)  output of attention or feed-forward, before it joins the residual stream
    floatX *d_residual, *d_norm;              // (N, C)
    floatX* d_wide;                           // (N, 2 * F)
    floatX* d_swiglu;                         // (N, F)
    floatX* d_attention;                      // (N, NH * HD)
    floatX* d_qkv;                            // (N, QKV)
    floatX* d_qk;                             // (N, (NH + NKV) * HD)  QK-norm only
    float* scratch;                           // partial sums of whoever runs, but for attention
    float* attention_scratch;                 // (attention_backward_scratch_count)
    float* rope_table;                        // (T, 2, HD / 2) cosines, sines

    // For micro-batches of up to B sequences of T tokens. Takes memory, touches none.
    ModelMemory(const ModelConfig& config, int B, int T, const MemoryLevers& levers, DeviceMemory& memory) : layers(config.num_layers) {
        const size_t N = static_cast<size_t>(B) * T, C = config.channels, F = config.ffn_dim, Vp = config.padded_vocab();
        const size_t HD = config.head_dim, NH = config.num_heads, NKV = config.num_kv_heads;
        const size_t QKV = (NH + 2 * NKV) * HD, QK = (NH + NKV) * HD;
        CHECK(levers.lmhead_chunks >= 1 && N % levers.lmhead_chunks == 0, "%zu rows (micro-batch %d x seq-len %d) do not split into %d chunks of the head", N, B, T, levers.lmhead_chunks);
        // A field of every layer: its own memory in each, or from level `from` on one for all.
        const auto field = [&](auto LayerActivations::*member, Recompute from, const char* name, size_t count) {
            using T = std::remove_pointer_t<std::remove_reference_t<decltype(layers[0].*member)>>;
            for (LayerActivations& layer : layers) {
                const bool shared = levers.recompute >= from && &layer != &layers[0];
                layer.*member = shared ? layers[0].*member : memory.allocate<T>("activations", name, count);
            }
        };
        const auto kept = static_cast<Recompute>(static_cast<int>(Recompute::kBlock) + 1);  // at every level
        field(&LayerActivations::residual_in, kept, "residual entering the layer", N * C);
        field(&LayerActivations::norm1, Recompute::kNorm, "attention norm", N * C);
        field(&LayerActivations::rstd1, Recompute::kBlock, "attention norm rstd", N);
        field(&LayerActivations::qkv, Recompute::kBlock, "qkv", N * QKV);
        field(&LayerActivations::qk, Recompute::kBlock, "normalised q and k", config.qk_norm ? N * QK : 0);
        field(&LayerActivations::qk_rstd, Recompute::kBlock, "q and k rstd", config.qk_norm ? N * (NH + NKV) : 0);
        field(&LayerActivations::attention, Recompute::kBlock, "attention", N * NH * HD);
        field(&LayerActivations::lse, Recompute::kBlock, "attention log-sum-exp", N * NH);
        field(&LayerActivations::residual_mid, Recompute::kBlock, "residual after attention", N * C);
        field(&LayerActivations::norm2, Recompute::kNorm, "feed-forward norm", N * C);
        field(&LayerActivations::rstd2, Recompute::kBlock, "feed-forward norm rstd", N);
        field(&LayerActivations::gate_up, Recompute::kFfn, "gate and up", N * 2 * F);
        field(&LayerActivations::swiglu, Recompute::kFfn, "SwiGLU", N * F);

        const auto activation = [&](const char* name, size_t count) { return memory.allocate<floatX>("activations", name, count); };
        const auto statistic = [&](const char* name, size_t count) { return memory.allocate<float>("activations", name, count); };
        residual_final = activation("final residual", N * C);
        norm_final = activation("final norm", N * C);
        rstd_final = statistic("final norm rstd", N);
        logits = activation("logits", N / levers.lmhead_chunks * Vp);
        losses = statistic("losses", N);
        branch = activation("branch output", N * C);

        d_residual = activation("d residual", N * C);
        d_norm = activation("d norm", N * C);
        d_wide = activation("d gate and up", N * 2 * F);
        d_swiglu = activation("d SwiGLU", N * F);
        d_attention = activation("d attention", N * NH * HD);
        d_qkv = activation("d qkv", N * QKV);
        d_qk = config.qk_norm ? activation("d normalised q and k", N * QK) : nullptr;
        size_t scratch_count = rmsnorm_backward_scratch_count(N, C);
        if (config.qkv_bias) scratch_count = std::max(scratch_count, bias_backward_scratch_count(N, QKV));
        if (config.qk_norm) scratch_count = std::max(scratch_count, qk_norm_backward_scratch_count(N, HD));
        scratch = statistic("scratch", scratch_count);
        // Attention's backward works in the logits or in d gate and up, which nobody needs meanwhile, where one of them is large enough.
        const size_t attention_count = attention_backward_scratch_count(model_attention_args(config, B, T)), attention_bytes = attention_count * sizeof(float);
        if (attention_bytes <= N / levers.lmhead_chunks * Vp * sizeof(floatX)) {
            attention_scratch = reinterpret_cast<float*>(logits);
        } else if (attention_bytes <= N * 2 * F * sizeof(floatX)) {
            attention_scratch = reinterpret_cast<float*>(d_wide);
        } else {
            attention_scratch = statistic("attention scratch", attention_count);
        }

        rope_table = memory.allocate<float>("other", "RoPE table", T * HD);
    }
};
