// The Llama-family model: forward and backward, one unit (embedding, layer, head) at a time; the schedule (schedule.h) says in which order.
// Activations lie in model_memory.cuh's buffers, parameters and gradients come from the ZeRO engine.
//
// Two levers trade time for memory. Recompute: activations that one layer needs in backward are kept for one layer only and computed again, by the same
// kernels from the same inputs, so the bits stay. Chunks of the head: logits are made, used and forgotten for a part of the rows at a time.
//
// Shapes: B micro-batch, T sequence length, N = B*T, C channels, L layers, NH query heads, NKV key/value heads, HD head dimension,
// F feed-forward dimension, V vocabulary, Vp V padded to 128. QKV = (NH + 2*NKV) * HD.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "llmc/attention.cuh"
#include "llmc/cross_entropy.cuh"
#include "llmc/embedding.cuh"
#include "llmc/matmul.cuh"
#include "llmc/model_config.h"
#include "llmc/model_memory.cuh"
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
        head = config.tied ? embedding : table.offset_in_unit("lm_head.weight");
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

class Model {
public:
    // For micro-batches of up to B sequences of T tokens, in the memory that was allocated for them.
    Model(const ModelConfig& config, const ParamTable& table, int B, int T, const MemoryLevers& levers, const ModelMemory& memory, MatmulContext& matmuls, cudaStream_t stream)
        : config_(config), table_(table), offsets_(table, config), B_(B), T_(T), levers_(levers), buf_(memory), matmuls_(matmuls), stream_(stream) {
        const std::vector<float> table_host = rope_table(T, config.head_dim, config.rope_theta, config.rope_scaling);
        CUDA_CHECK(cudaMemcpyAsync(buf_.rope_table, table_host.data(), table_host.size() * sizeof(float), cudaMemcpyHostToDevice, stream_));
        CUDA_CHECK(cudaStreamSynchronize(stream_));  // table_host leaves scope
    }

    // Has the library choose an algorithm for every product of a training micro-batch, without computing anything. `params` is any parameter memory.
    void choose_products(const floatX* params) {
        const int N = B_ * T_, C = config_.channels, F = config_.ffn_dim, width = config_.num_heads * config_.head_dim;
        const int QKV = (config_.num_heads + 2 * config_.num_kv_heads) * config_.head_dim;
        floatX* gradients = buf_.d_wide;  // addresses only; nothing is written
        const auto choose = [&](int rows, int in, int out, const floatX* bias) {
            matmul_forward(matmuls_, buf_.d_wide, buf_.d_wide, params, bias, rows, in, out, stream_);
            matmul_backward_input(matmuls_, buf_.d_wide, buf_.d_wide, params, rows, in, out, stream_);
            matmul_backward_weight(matmuls_, gradients, buf_.d_wide, buf_.d_wide, rows, in, out, stream_);
        };
        matmuls_.plan_only = true;
        choose(N, C, QKV, config_.qkv_bias ? params : nullptr);
        choose(N, width, C, nullptr);
        choose(N, C, 2 * F, nullptr);
        choose(N, F, C, nullptr);
        choose(N / levers_.lmhead_chunks, C, config_.padded_vocab(), nullptr);
        matmuls_.plan_only = false;
    }

    // ---- forward: units in their order, then one of the heads ------------------------------------------------------------------
    // The embedding or a layer. tokens (B, T), B and T up to the constructor's.
    void forward_unit(ZeroEngine& zero, int unit, const int* tokens, int B, int T) {
        const NvtxRange range("forward");
        if (unit == table_.embedding_unit()) {
            embedding_forward(buf_.layers[0].residual_in, tokens, zero.params(unit) + offsets_.embedding, B * T, config_.channels, stream_);
            return;
        }
        const int l = unit - table_.layer_unit(0), N = B * T, C = config_.channels, F = config_.ffn_dim;
        const LayerActivations& a = buf_.layers[l];
        const floatX* w = zero.params(unit);
        if (l > 0) {  // joins the branch of the layer before on the way
            fused_residual_rmsnorm_forward(a.residual_in, a.norm1, a.rstd1, buf_.layers[l - 1].residual_mid, buf_.branch, w + offsets_.attention_norm, N, C, config_.norm_eps, stream_);
        } else {
            rmsnorm_forward(a.norm1, a.rstd1, a.residual_in, w + offsets_.attention_norm, N, C, config_.norm_eps, stream_);
        }
        attention_part(a, w, B, T);
        feed_forward_part(a, w, N);
        matmul_forward(matmuls_, buf_.branch, a.swiglu, w + offsets_.down, nullptr, N, F, C, stream_);
    }

    // The head in a step: per-token losses, and their backward as far as the last layer's output, scaled by *inv_valid.
    void head_forward_backward(ZeroEngine& zero, const int* targets, const float* inv_valid) {
        const NvtxRange range("head");
        const int N = B_ * T_, C = config_.channels, Vp = config_.padded_vocab(), chunks = levers_.lmhead_chunks, rows = N / chunks;
        const int head_unit = table_.head_unit(), weight_unit = head_weight_unit();
        final_norm(zero, N);
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const size_t first = static_cast<size_t>(chunk) * rows;
            cross_entropy<true>(buf_.losses + first, head_logits(zero, first, rows), targets + first, inv_valid, rows, config_.vocab_size, Vp, stream_);
            floatX* g = zero.gradients().begin(weight_unit, chunk, chunks);
            matmul_backward_weight(matmuls_, g + offsets_.head, buf_.logits, buf_.norm_final + first * C, rows, C, Vp, stream_);
            matmul_backward_input(matmuls_, buf_.d_norm + first * C, buf_.logits, zero.params(weight_unit) + offsets_.head, rows, C, Vp, stream_);
            if (chunk + 1 < chunks) zero.gradients().end_part(weight_unit, offsets_.head, static_cast<size_t>(Vp) * C);
        }
        floatX* g = config_.tied ? zero.gradients().begin(head_unit) : zero.gradients().open(head_unit);
        rmsnorm_backward(buf_.d_residual, g + offsets_.final_norm, buf_.scratch, buf_.d_norm, buf_.residual_final, zero.params(head_unit) + offsets_.final_norm, buf_.rstd_final, N, C, false, stream_);
        zero.gradients().end(head_unit);
    }

    // The head in an evaluation: per-token losses.
    void head_losses(ZeroEngine& zero, const int* targets) {
        const int N = B_ * T_, Vp = config_.padded_vocab(), rows = N / levers_.lmhead_chunks;
        final_norm(zero, N);
        for (int first = 0; first < N; first += rows) {
            cross_entropy<false>(buf_.losses + first, head_logits(zero, first, rows), targets + first, nullptr, rows, config_.vocab_size, Vp, stream_);
        }
    }

    // The head for generation and tests: logits (rows, Vp) of rows [first, first + rows) of N; at most as many as a chunk has.
    const floatX* head_rows(ZeroEngine& zero, int N, int first, int rows) {
        CHECK(first >= 0 && rows >= 1 && first + rows <= N && rows <= B_ * T_ / levers_.lmhead_chunks, "logits of rows %d to %d of %d; there is room for %d", first, first + rows, N,
              B_ * T_ / levers_.lmhead_chunks);
        final_norm(zero, N);
        return head_logits(zero, first, rows);
    }

    float* losses() const { return buf_.losses; }                 // (N)
    const floatX* norm_final() const { return buf_.norm_final; }  // (N, C)  what the head multiplies with its weight
    const floatX* d_norm() const { return buf_.d_norm; }          // (N, C)  after head_forward_backward() its gradient
    floatX* d_residual() const { return buf_.d_residual; }        // (N, C)  gradient of the residual stream where backward has got to

    // Adds this micro-step's losses to *sum, or with `first` sets it.
    void add_losses(double* sum, bool first, int B, int T) { sum_to_double(sum, buf_.losses, static_cast<size_t>(B) * T, !first, stream_); }

    // ---- backward: after head_forward_backward(), layers from the last to the first, then the embedding -----------------------------
    // sorted_positions (N): positions of `tokens` sorted stably by token.
    void backward_unit(ZeroEngine& zero, int unit, const int* tokens, const int* sorted_positions) {
        const NvtxRange range("backward");
        if (unit == table_.embedding_unit()) {
            embedding_part_backward(zero, tokens, sorted_positions);
        } else {
            layer_backward(zero, unit);
        }
    }

private:
    // From the first norm's output to the second's.
    void attention_part(const LayerActivations& a, const floatX* w, int B, int T) {
        const int N = B * T, C = config_.channels, NH = config_.num_heads, NKV = config_.num_kv_heads, HD = config_.head_dim, QKV = (NH + 2 * NKV) * HD;
        matmul_forward(matmuls_, a.qkv, a.norm1, w + offsets_.qkv, config_.qkv_bias ? w + offsets_.qkv_bias : nullptr, N, C, QKV, stream_);
        if (config_.qk_norm) {
            qk_norm_forward(a.qk, a.qk_rstd, a.qkv, w + offsets_.q_norm, w + offsets_.k_norm, N, NH, NKV, HD, config_.norm_eps, stream_);
        }
        rope_forward(rotated(a), buf_.rope_table, nullptr, B, T, NH + NKV, HD, rotated_row(), stream_);
        attention_forward(a.attention, a.lse, q_of(a), k_of(a), v_of(a), attention_args(B, T), stream_);
        matmul_forward(matmuls_, buf_.branch, a.attention, w + offsets_.attention_out, nullptr, N, NH * HD, C, stream_);
        fused_residual_rmsnorm_forward(a.residual_mid, a.norm2, a.rstd2, a.residual_in, buf_.branch, w + offsets_.ffn_norm, N, C, config_.norm_eps, stream_);
    }

    // From the second norm's output to what the last product takes.
    void feed_forward_part(const LayerActivations& a, const floatX* w, int N) {
        matmul_forward(matmuls_, a.gate_up, a.norm2, w + offsets_.gate_up, nullptr, N, config_.channels, 2 * config_.ffn_dim, stream_);
        swiglu_forward(a.swiglu, a.gate_up, N, config_.ffn_dim, stream_);
    }

    void final_norm(ZeroEngine& zero, int N) {
        fused_residual_rmsnorm_forward(buf_.residual_final, buf_.norm_final, buf_.rstd_final, buf_.layers.back().residual_mid, buf_.branch, zero.params(table_.head_unit()) + offsets_.final_norm, N,
                                       config_.channels, config_.norm_eps, stream_);
    }

    // Where the head's weight lies, at offsets_.head.
    int head_weight_unit() const { return config_.tied ? table_.embedding_unit() : table_.head_unit(); }

    // After final_norm(): logits of rows [first, first + rows).
    floatX* head_logits(ZeroEngine& zero, size_t first, int rows) {
        const int C = config_.channels;
        matmul_forward(matmuls_, buf_.logits, buf_.norm_final + first * C, zero.params(head_weight_unit()) + offsets_.head, nullptr, rows, C, config_.padded_vocab(), stream_);
        return buf_.logits;
    }

    // Brings back what the layer shares with others, which have overwritten it since.
    void recompute(const LayerActivations& a, const floatX* w) {
        const int N = B_ * T_, C = config_.channels;
        if (levers_.recompute == Recompute::kNone || &a == &buf_.layers.back()) return;
        const NvtxRange range("recompute");
        rmsnorm_forward(a.norm1, a.rstd1, a.residual_in, w + offsets_.attention_norm, N, C, config_.norm_eps, stream_);
        if (levers_.recompute == Recompute::kBlock) {
            attention_part(a, w, B_, T_);
        } else {
            rmsnorm_forward(a.norm2, a.rstd2, a.residual_mid, w + offsets_.ffn_norm, N, C, config_.norm_eps, stream_);
        }
        if (levers_.recompute >= Recompute::kFfn) feed_forward_part(a, w, N);
    }

    void layer_backward(ZeroEngine& zero, int unit) {
        const int B = B_, T = T_, N = B * T, C = config_.channels, F = config_.ffn_dim;
        const int HD = config_.head_dim, NH = config_.num_heads, NKV = config_.num_kv_heads, QKV = (NH + 2 * NKV) * HD;
        const LayerActivations& a = buf_.layers[unit - table_.layer_unit(0)];
        const floatX* w = zero.params(unit);
        recompute(a, w);
        floatX* g = zero.gradients().begin(unit);
        // Feed-forward: d_residual is the gradient of the layer's output and of the branch alike.
        matmul_backward_weight(matmuls_, g + offsets_.down, buf_.d_residual, a.swiglu, N, F, C, stream_);
        matmul_backward_input(matmuls_, buf_.d_swiglu, buf_.d_residual, w + offsets_.down, N, F, C, stream_);
        swiglu_backward(buf_.d_wide, buf_.d_swiglu, a.gate_up, N, F, stream_);
        matmul_backward_weight(matmuls_, g + offsets_.gate_up, buf_.d_wide, a.norm2, N, C, 2 * F, stream_);
        matmul_backward_input(matmuls_, buf_.d_norm, buf_.d_wide, w + offsets_.gate_up, N, C, 2 * F, stream_);
        rmsnorm_backward(buf_.d_residual, g + offsets_.ffn_norm, buf_.scratch, buf_.d_norm, a.residual_mid, w + offsets_.ffn_norm, a.rstd2, N, C, true, stream_);
        // Attention.
        matmul_backward_weight(matmuls_, g + offsets_.attention_out, buf_.d_residual, a.attention, N, NH * HD, C, stream_);
        matmul_backward_input(matmuls_, buf_.d_attention, buf_.d_residual, w + offsets_.attention_out, N, NH * HD, C, stream_);
        floatX* dq = config_.qk_norm ? buf_.d_qk : buf_.d_qkv;
        floatX* dv = buf_.d_qkv + (NH + NKV) * HD;
        attention_backward(dq, dq + NH * HD, dv, buf_.attention_scratch, buf_.d_attention, q_of(a), k_of(a), v_of(a), a.attention, a.lse, attention_args(B, T), stream_);
        rope_backward(dq, buf_.rope_table, nullptr, B, T, NH + NKV, HD, rotated_row(), stream_);
        if (config_.qk_norm) {
            qk_norm_backward(buf_.d_qkv, g + offsets_.q_norm, g + offsets_.k_norm, buf_.scratch, buf_.d_qk, a.qkv, w + offsets_.q_norm, w + offsets_.k_norm, a.qk_rstd, N, NH, NKV, HD, stream_);
        }
        if (config_.qkv_bias) bias_backward(g + offsets_.qkv_bias, buf_.scratch, buf_.d_qkv, N, QKV, stream_);
        matmul_backward_weight(matmuls_, g + offsets_.qkv, buf_.d_qkv, a.norm1, N, C, QKV, stream_);
        matmul_backward_input(matmuls_, buf_.d_norm, buf_.d_qkv, w + offsets_.qkv, N, C, QKV, stream_);
        rmsnorm_backward(buf_.d_residual, g + offsets_.attention_norm, buf_.scratch, buf_.d_norm, a.residual_in, w + offsets_.attention_norm, a.rstd1, N, C, true, stream_);
        zero.gradients().end(unit);
    }

    void embedding_part_backward(ZeroEngine& zero, const int* tokens, const int* sorted_positions) {
        const int unit = table_.embedding_unit(), C = config_.channels;
        floatX* g = nullptr;
        if (config_.tied) {  // the head's gradient is there
            g = zero.gradients().open(unit) + offsets_.embedding;
        } else {
            g = zero.gradients().begin(unit) + offsets_.embedding;
            const size_t bytes = static_cast<size_t>(config_.padded_vocab()) * C * sizeof(floatX);
            CUDA_CHECK(cudaMemsetAsync(g, 0, bytes, stream_));  // most tokens of the vocabulary do not occur
        }
        embedding_backward(g, buf_.d_residual, tokens, sorted_positions, B_ * T_, C, stream_);
        zero.gradients().end(unit);
    }

    // q and k as attention sees them lie in qkv, or with a QK-norm in a buffer of their own; v always lies in qkv.
    floatX* rotated(const LayerActivations& a) const { return config_.qk_norm ? a.qk : a.qkv; }
    size_t rotated_row() const { return ::rotated_row(config_); }
    const floatX* q_of(const LayerActivations& a) const { return rotated(a); }
    const floatX* k_of(const LayerActivations& a) const { return rotated(a) + config_.num_heads * config_.head_dim; }
    const floatX* v_of(const LayerActivations& a) const { return a.qkv + (config_.num_heads + config_.num_kv_heads) * config_.head_dim; }

    AttentionArgs attention_args(int B, int T) const { return model_attention_args(config_, B, T); }

    const ModelConfig config_;
    const ParamTable& table_;
    const UnitOffsets offsets_;
    const int B_, T_;
    const MemoryLevers levers_;
    const ModelMemory buf_;
    MatmulContext& matmuls_;
    cudaStream_t stream_;
};
