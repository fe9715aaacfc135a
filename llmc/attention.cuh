// Causal attention with grouped key/value heads: out = softmax(scale q k^T) v, row by row.
//
//   forward   out (B,Tq,NH,HD) =, lse (B,NH,Tq) =        from q (B,Tq,NH,HD), k and v (B,Tkv,NKV,HD)
//   backward  dq, dk, dv =, shapes of q, k, v            from dout, q, k, v, out, lse
//
// Head h lies at h * HD in its token's row; rows and batches are any distance apart (AttentionArgs), so q, k, v may be one packed buffer or a
// key/value cache. Query head h reads key/value head h / (NH / NKV), which is never copied. Query i stands at key Tkv - Tq + i and sees the keys
// from key_start[b, i] (0 without the array) up to its own place. A query that sees no key gives out = 0, lse = -infinity and no gradient.
// lse is the natural logarithm of sum over keys of exp(scale q.k). HD is a multiple of 8, at most 256.
//
// Two sets of kernels: attention_mma.cuh (bf16, head_dim 64, 80, 96, 128: tensor cores) and attention_plain.cuh (fp32 arithmetic, every head_dim). Neither has
// a T x T buffer, all sums run in a fixed order and no two threads add to one place: same inputs, same bits.
#pragma once

#include "llmc/attention_args.cuh"
#include "llmc/attention_mma.cuh"
#include "llmc/attention_plain.cuh"

inline constexpr bool kTensorCoreBuild = std::is_same_v<floatX, __nv_bfloat16>;
inline constexpr bool attention_uses_tensor_cores(int HD) {
    return kTensorCoreBuild && (HD == 64 || HD == 80 || HD == 96 || HD == 128);
}

// out =, lse =. Where key_start is given it must have been written before on this stream.
inline void attention_forward(floatX* out, float* lse, const floatX* q, const floatX* k, const floatX* v, const AttentionArgs& unchecked, cudaStream_t stream) {
    NvtxRange range("attention_forward");
    const AttentionArgs args = checked_attention_args(unchecked);
    check_attention_pointer("out", out);
    check_attention_pointer("q", q);
    check_attention_pointer("k", k);
    check_attention_pointer("v", v);
    if constexpr (kTensorCoreBuild) {
        if (attention_uses_tensor_cores(args.HD)) return attention_forward_mma(out, lse, q, k, v, args, stream);
    }
    attention_forward_plain(out, lse, q, k, v, args, stream);
}

// Floats of scratch for attention_backward.
inline size_t attention_backward_scratch_count(const AttentionArgs& args) {
    return attention_uses_tensor_cores(args.HD) ? attention_backward_mma_scratch_count(args) : attention_backward_plain_scratch_count(args);
}

// dq =, dk =, dv =. out and lse are attention_forward's for the same q, k, v, args. scratch lies on a multiple of 16 bytes.
inline void attention_backward(floatX* dq, floatX* dk, floatX* dv, float* scratch, const floatX* dout, const floatX* q, const floatX* k, const floatX* v,
                               const floatX* out, const float* lse, const AttentionArgs& unchecked, cudaStream_t stream) {
    NvtxRange range("attention_backward");
    const AttentionArgs args = checked_attention_args(unchecked);
    check_attention_pointer("dq", dq);
    check_attention_pointer("dk", dk);
    check_attention_pointer("dv", dv);
    check_attention_pointer("scratch", scratch);
    check_attention_pointer("dout", dout);
    check_attention_pointer("q", q);
    check_attention_pointer("k", k);
    check_attention_pointer("v", v);
    check_attention_pointer("out", out);
    if constexpr (kTensorCoreBuild) {
        if (attention_uses_tensor_cores(args.HD)) return attention_backward_mma(dq, dk, dv, scratch, dout, q, k, v, out, lse, args, stream);
    }
    attention_backward_plain(dq, dk, dv, scratch, dout, q, k, v, out, lse, args, stream);
}
