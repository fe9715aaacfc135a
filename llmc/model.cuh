// The Llama-family model: activations, forward, backward. Parameters and gradients come from the ZeRO engine unit by unit.
//
// Shapes: B micro-batch, T sequence length, N = B*T, C channels, L layers, NH query heads, NKV key/value heads, HD head dimension,
// F feed-forward dimension, V vocabulary, Vp V padded to 128. QKV = (NH + 2*NKV) * HD.
#pragma once

#include <string>
#include <vector>

#include "llmc/attention.cuh"
#include "llmc/cross_entropy.cuh"
#include "llmc/device_memory.cuh"
#include "llmc/embedding.cuh"
#include "llmc/matmul.cuh"
#include "llmc/model_config.h"
#include "llmc/qk_norm.cuh"
#include "llmc/rmsnorm.cuh"
#include "llmc/rope.cuh"
#include "llmc/swiglu.cuh"
#include "llmc/zero.cuh"

// Where each parameter lies inside its unit (elements); every layer unit has the same inner layout.
struct UnitOffsets {
    size_t embedding = 0, final_norm = 0, head = 0;
    size_t attention_norm = 0, qkv = 0, qkv_bias = 0, q_norm = 0, k_norm = 0, attention_out = 0, ffn_norm = 0, gate_up = 0, down = 0;

    UnitOffsets(const ParamTable& table, const ModelConfig& config) {
        const std::string layer = "model.layers.0.";
        embedding = table.offset_in_unit("model.embed_tokens.weight");
        final_norm = table.offset_in_unit("model.norm.weight");
        if (!config.tied) head = table.offset_in_unit("lm_head.weight");
        attention_norm = table.offset_in_unit(layer + "input_layernorm.weight");
        qkv = table.offset_in_unit(layer + "self_attn.q_proj.weight");
        if (config.qkv_bias) qkv_bias = table.offset_in_unit(layer + "self_attn.q_proj.bias");
        if (config.qk_norm) {
            q_norm = table.offset_in_unit(layer + "self_attn.q_norm.weight");
            k_norm = table.offset_in_unit(layer + "self_attn.k_norm.weight");
        }
        attention_out = table.offset_in_unit(layer + "self_attn.o_proj.weight");
        ffn_norm = table.offset_in_unit(layer + "post_attention_layernorm.weight");
        gate_up = table.offset_in_unit(layer + "mlp.gate_proj.weight");
        down = table.offset_in_unit(layer + "mlp.down_proj.weight");
    }
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

class Model {
public:
    // Buffers for micro-batches of up to B sequences of T tokens. `training` also allocates what backward needs.
    Model(const ModelConfig& config, const ParamTable& table, int B, int T, DeviceMemory& memory, MatmulContext& matmuls, cudaStream_t stream)
        : config_(config), table_(table), offsets_(table, config), B_(B), T_(T), matmuls_(matmuls), stream_(stream) {
        const size_t N = static_cast<size_t>(B) * T, C = config.channels, F = config.ffn_dim, Vp = config.padded_vocab();
        const size_t HD = config.head_dim, NH = config.num_heads, NKV = config.num_kv_heads;
        const size_t QKV = (NH + 2 * NKV) * HD, QK = (NH + NKV) * HD;
        const auto activation = [&](const char* name, size_t count) { return memory.allocate<floatX>("activations", name, count); };
        const auto statistic = [&](const char* name, size_t count) { return memory.allocate<float>("activations", name, count); };
        for (int l = 0; l < config.num_layers; ++l) {
            LayerActivations a;
            a.residual_in = activation("residual entering the layer", N * C);
            a.norm1 = activation("attention norm", N * C);
            a.rstd1 = statistic("attention norm rstd", N);
            a.qkv = activation("qkv", N * QKV);
            a.qk = config.qk_norm ? activation("normalised q and k", N * QK) : nullptr;
            a.qk_rstd = config.qk_norm ? statistic("q and k rstd", N * (NH + NKV)) : nullptr;
            a.attention = activation("attention", N * NH * HD);
            a.lse = statistic("attention log-sum-exp", N * NH);
            a.residual_mid = activation("residual after attention", N * C);
            a.norm2 = activation("feed-forward norm", N * C);
            a.rstd2 = statistic("feed-forward norm rstd", N);
            a.gate_up = activation("gate and up", N * 2 * F);
            a.swiglu = activation("SwiGLU", N * F);
            layers_.push_back(a);
        }
        residual_final_ = activation("final residual", N * C);
        norm_final_ = activation("final norm", N * C);
        rstd_final_ = statistic("final norm rstd", N);
        logits_ = activation("logits", N * Vp);
        losses_ = statistic("losses", N);
        branch_ = activation("branch output", N * C);

        d_residual_ = activation("d residual", N * C);
        d_norm_ = activation("d norm", N * C);
        d_wide_ = activation("d gate and up", N * 2 * F);
        d_swiglu_ = activation("d SwiGLU", N * F);
        d_attention_ = activation("d attention", N * NH * HD);
        d_qkv_ = activation("d qkv", N * QKV);
        d_qk_ = config.qk_norm ? activation("d normalised q and k", N * QK) : nullptr;
        size_t scratch = std::max(rmsnorm_backward_scratch_count(N, C), attention_backward_scratch_count(attention_args(B, T)));
        if (config.qkv_bias) scratch = std::max(scratch, bias_backward_scratch_count(N, QKV));
        if (config.qk_norm) scratch = std::max(scratch, qk_norm_backward_scratch_count(N, HD));
        scratch_ = statistic("scratch", scratch);

        const std::vector<float> table_host = rope_table(T, config.head_dim, config.rope_theta, config.rope_scaling);
        rope_table_ = memory.allocate<float>("other", "RoPE table", table_host.size());
        CUDA_CHECK(cudaMemcpyAsync(rope_table_, table_host.data(), table_host.size() * sizeof(float), cudaMemcpyHostToDevice, stream_));
        CUDA_CHECK(cudaStreamSynchronize(stream_));  // table_host leaves scope
    }

    // Has the library choose an algorithm for every product of a training micro-batch, without computing anything. `params` is any parameter memory.
    void choose_products(const floatX* params) {
        const int N = B_ * T_, C = config_.channels, F = config_.ffn_dim, width = config_.num_heads * config_.head_dim;
        const int QKV = (config_.num_heads + 2 * config_.num_kv_heads) * config_.head_dim;
        floatX* gradients = d_wide_;  // addresses only; nothing is written
        const auto choose = [&](int in, int out, const floatX* bias) {
            matmul_forward(matmuls_, d_wide_, d_wide_, params, bias, N, in, out, stream_);
            matmul_backward_input(matmuls_, d_wide_, d_wide_, params, N, in, out, stream_);
            matmul_backward_weight(matmuls_, gradients, d_wide_, d_wide_, N, in, out, stream_);
        };
        matmuls_.plan_only = true;
        choose(C, QKV, config_.qkv_bias ? params : nullptr);
        choose(width, C, nullptr);
        choose(C, 2 * F, nullptr);
        choose(F, C, nullptr);
        choose(C, config_.padded_vocab(), nullptr);
        matmuls_.plan_only = false;
    }

    floatX* logits() const { return logits_; }  // (N, Vp), valid after forward() until backward starts
    float* losses() const { return losses_; }   // (N)

    // Logits of `tokens` (B, T), B and T up to the constructor's.
    void forward(ZeroEngine& zero, const int* tokens, int B, int T) {
        const NvtxRange range("forward");
        const int N = B * T, C = config_.channels, F = config_.ffn_dim, L = config_.num_layers;
        const int QKV = (config_.num_heads + 2 * config_.num_kv_heads) * config_.head_dim;
        const int attention_width = config_.num_heads * config_.head_dim;

        const floatX* embedding = zero.acquire_params(table_.embedding_unit()) + offsets_.embedding;
        embedding_forward(layers_[0].residual_in, tokens, embedding, N, C, stream_);
        zero.release_params(table_.embedding_unit());
        for (int l = 0; l < L; ++l) {
            const LayerActivations& a = layers_[l];
            const floatX* w = zero.acquire_params(table_.layer_unit(l));
            if (l == 0) {
                rmsnorm_forward(a.norm1, a.rstd1, a.residual_in, w + offsets_.attention_norm, N, C, config_.norm_eps, stream_);
            } else {
                fused_residual_rmsnorm_forward(a.residual_in, a.norm1, a.rstd1, layers_[l - 1].residual_mid, branch_, w + offsets_.attention_norm, N, C,
                                               config_.norm_eps, stream_);
            }
            matmul_forward(matmuls_, a.qkv, a.norm1, w + offsets_.qkv, config_.qkv_bias ? w + offsets_.qkv_bias : nullptr, N, C, QKV, stream_);
            if (config_.qk_norm) {
                qk_norm_forward(a.qk, a.qk_rstd, a.qkv, w + offsets_.q_norm, w + offsets_.k_norm, N, config_.num_heads, config_.num_kv_heads, config_.head_dim,
                                config_.norm_eps, stream_);
            }
            rope_forward(rotated(a), rope_table_, nullptr, B, T, config_.num_heads + config_.num_kv_heads, config_.head_dim, rotated_row(), stream_);
            const AttentionArgs args = attention_args(B, T);
            attention_forward(a.attention, a.lse, q_of(a), k_of(a), v_of(a), args, stream_);
            matmul_forward(matmuls_, branch_, a.attention, w + offsets_.attention_out, nullptr, N, attention_width, C, stream_);
            fused_residual_rmsnorm_forward(a.residual_mid, a.norm2, a.rstd2, a.residual_in, branch_, w + offsets_.ffn_norm, N, C, config_.norm_eps, stream_);
            matmul_forward(matmuls_, a.gate_up, a.norm2, w + offsets_.gate_up, nullptr, N, C, 2 * F, stream_);
            swiglu_forward(a.swiglu, a.gate_up, N, F, stream_);
            matmul_forward(matmuls_, branch_, a.swiglu, w + offsets_.down, nullptr, N, F, C, stream_);
            zero.release_params(table_.layer_unit(l));
        }
        const floatX* head_unit = zero.acquire_params(table_.head_unit());
        fused_residual_rmsnorm_forward(residual_final_, norm_final_, rstd_final_, layers_[L - 1].residual_mid, branch_, head_unit + offsets_.final_norm, N, C,
                                       config_.norm_eps, stream_);
        matmul_forward(matmuls_, logits_, norm_final_, head_weight(zero), nullptr, N, C, config_.padded_vocab(), stream_);
    }

    // After forward(): per-token losses; the logits become their gradients, scaled by *inv_valid.
    void loss_and_logit_gradients(const int* targets, const float* inv_valid, int B, int T) {
        cross_entropy<true>(losses_, logits_, targets, inv_valid, B * T, config_.vocab_size, config_.padded_vocab(), stream_);
    }

    // After forward(): per-token losses only; logits stay.
    void loss_only(const int* targets, int B, int T) {
        cross_entropy<false>(losses_, logits_, targets, nullptr, B * T, config_.vocab_size, config_.padded_vocab(), stream_);
    }

    // Adds this micro-step's losses to *sum, or with `first` sets it.
    void add_losses(double* sum, bool first, int B, int T) { sum_to_double(sum, losses_, static_cast<size_t>(B) * T, !first, stream_); }

    // After loss_and_logit_gradients(): gradients of every unit to the engine, last unit first.
    // sorted_positions (N): positions of `tokens` sorted stably by token.
    void backward(ZeroEngine& zero, const int* tokens, const int* sorted_positions) {
        const NvtxRange range("backward");
        const int B = B_, T = T_, N = B * T, C = config_.channels, F = config_.ffn_dim, L = config_.num_layers, Vp = config_.padded_vocab();
        const int HD = config_.head_dim, NH = config_.num_heads, NKV = config_.num_kv_heads, QKV = (NH + 2 * NKV) * HD;

        const int embedding_unit = table_.embedding_unit(), head_unit = table_.head_unit();
        const floatX* w = zero.acquire_params(head_unit);
        floatX* g = zero.begin_gradients(head_unit);
        floatX* g_embedding = config_.tied ? zero.begin_gradients(embedding_unit) + offsets_.embedding : nullptr;
        matmul_backward_weight(matmuls_, config_.tied ? g_embedding : g + offsets_.head, logits_, norm_final_, N, C, Vp, stream_);
        matmul_backward_input(matmuls_, d_norm_, logits_, head_weight(zero), N, C, Vp, stream_);
        rmsnorm_backward(d_residual_, g + offsets_.final_norm, scratch_, d_norm_, residual_final_, w + offsets_.final_norm, rstd_final_, N, C, false, stream_);
        zero.release_params(head_unit);
        zero.end_gradients(head_unit);

        for (int l = L - 1; l >= 0; --l) {
            const LayerActivations& a = layers_[l];
            const int unit = table_.layer_unit(l);
            w = zero.acquire_params(unit);
            g = zero.begin_gradients(unit);
            // Feed-forward: d_residual is the gradient of the layer's output and of the branch alike.
            matmul_backward_weight(matmuls_, g + offsets_.down, d_residual_, a.swiglu, N, F, C, stream_);
            matmul_backward_input(matmuls_, d_swiglu_, d_residual_, w + offsets_.down, N, F, C, stream_);
            swiglu_backward(d_wide_, d_swiglu_, a.gate_up, N, F, stream_);
            matmul_backward_weight(matmuls_, g + offsets_.gate_up, d_wide_, a.norm2, N, C, 2 * F, stream_);
            matmul_backward_input(matmuls_, d_norm_, d_wide_, w + offsets_.gate_up, N, C, 2 * F, stream_);
            rmsnorm_backward(d_residual_, g + offsets_.ffn_norm, scratch_, d_norm_, a.residual_mid, w + offsets_.ffn_norm, a.rstd2, N, C, true, stream_);
            // Attention.
            matmul_backward_weight(matmuls_, g + offsets_.attention_out, d_residual_, a.attention, N, NH * HD, C, stream_);
            matmul_backward_input(matmuls_, d_attention_, d_residual_, w + offsets_.attention_out, N, NH * HD, C, stream_);
            floatX* dq = config_.qk_norm ? d_qk_ : d_qkv_;
            floatX* dv = d_qkv_ + (NH + NKV) * HD;
            attention_backward(dq, dq + NH * HD, dv, scratch_, d_attention_, q_of(a), k_of(a), v_of(a), a.attention, a.lse, attention_args(B, T), stream_);
            rope_backward(dq, rope_table_, nullptr, B, T, NH + NKV, HD, rotated_row(), stream_);
            if (config_.qk_norm) {
                qk_norm_backward(d_qkv_, g + offsets_.q_norm, g + offsets_.k_norm, scratch_, d_qk_, a.qkv, w + offsets_.q_norm, w + offsets_.k_norm, a.qk_rstd, N, NH,
                                 NKV, HD, stream_);
            }
            if (config_.qkv_bias) bias_backward(g + offsets_.qkv_bias, scratch_, d_qkv_, N, QKV, stream_);
            matmul_backward_weight(matmuls_, g + offsets_.qkv, d_qkv_, a.norm1, N, C, QKV, stream_);
            matmul_backward_input(matmuls_, d_norm_, d_qkv_, w + offsets_.qkv, N, C, QKV, stream_);
            rmsnorm_backward(d_residual_, g + offsets_.attention_norm, scratch_, d_norm_, a.residual_in, w + offsets_.attention_norm, a.rstd1, N, C, true, stream_);
            zero.release_params(unit);
            zero.end_gradients(unit);
        }
        if (!config_.tied) {
            g_embedding = zero.begin_gradients(embedding_unit) + offsets_.embedding;
            const size_t bytes = static_cast<size_t>(Vp) * C * sizeof(floatX);
            CUDA_CHECK(cudaMemsetAsync(g_embedding, 0, bytes, stream_));  // most tokens of the vocabulary do not occur
        }
        embedding_backward(g_embedding, d_residual_, tokens, sorted_positions, N, C, stream_);
        zero.end_gradients(embedding_unit);
    }

private:
    // The head's weight: its own, or the embedding's.
    const floatX* head_weight(ZeroEngine& zero) const {
        if (config_.tied) return zero.acquire_params(table_.embedding_unit()) + offsets_.embedding;
        return zero.acquire_params(table_.head_unit()) + offsets_.head;
    }

    // q and k as attention sees them lie in qkv, or with a QK-norm in a buffer of their own; v always lies in qkv.
    floatX* rotated(const LayerActivations& a) const { return config_.qk_norm ? a.qk : a.qkv; }
    size_t rotated_row() const {
        return static_cast<size_t>(config_.num_heads + (config_.qk_norm ? 1 : 2) * config_.num_kv_heads) * config_.head_dim;
    }
    const floatX* q_of(const LayerActivations& a) const { return rotated(a); }
    const floatX* k_of(const LayerActivations& a) const { return rotated(a) + config_.num_heads * config_.head_dim; }
    const floatX* v_of(const LayerActivations& a) const { return a.qkv + (config_.num_heads + config_.num_kv_heads) * config_.head_dim; }

    AttentionArgs attention_args(int B, int T) const {
        AttentionArgs args = packed_attention_args(B, T, config_.num_heads, config_.num_kv_heads, config_.head_dim);
        args.q_row = args.k_row = rotated_row();  // the packed row, unless a QK-norm gave q and k a buffer of their own
        args.q_batch = args.k_batch = rotated_row() * T;
        return args;
    }

    const ModelConfig config_;
    const ParamTable& table_;
    const UnitOffsets offsets_;
    const int B_, T_;
    MatmulContext& matmuls_;
    cudaStream_t stream_;

    std::vector<LayerActivations> layers_;  // L
    floatX* residual_final_;                // (N, C)
    floatX* norm_final_;                    // (N, C)
    float* rstd_final_;                     // (N)
    floatX* logits_;                        // (N, Vp), then their gradients
    float* losses_;                         // (N)
    floatX* branch_;                        // (N, C)  output of attention or feed-forward, before it joins the residual stream
    floatX *d_residual_, *d_norm_;          // (N, C)
    floatX* d_wide_;                        // (N, 2 * F)
    floatX* d_swiglu_;                      // (N, F)
    floatX* d_attention_;                   // (N, NH * HD)
    floatX* d_qkv_;                         // (N, QKV)
    floatX* d_qk_;                          // (N, (NH + NKV) * HD)  QK-norm only
    float* scratch_;                        // partial sums of whoever runs
    float* rope_table_;                     // (T, 2, HD / 2) cosines, sines
};
