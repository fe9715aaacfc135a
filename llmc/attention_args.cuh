// What every attention kernel is told, and what all of them rely on. attention.cuh says what is computed.
#pragma once

#include <cmath>

#include "llmc/device.cuh"

struct AttentionArgs {
    int B, Tq, Tkv, NH, NKV, HD;
    size_t q_row, k_row, v_row, o_row;          // elements from one token to the next; multiples of 8 (o: out, and dout)
    size_t q_batch, k_batch, v_batch, o_batch;  // elements from one sequence to the next; multiples of 8
    float scale;                                // of the scores, as a rule 1 / sqrt(HD)
    const int* key_start = nullptr;             // (B, Tq) on the device: first key a query sees; nullptr: all start at 0
    // Rows of the gradients and of dout where they lie differently from their tensors; 0: the same.
    size_t dq_row = 0, dk_row = 0, dv_row = 0, do_row = 0;
    size_t dq_batch = 0, dk_batch = 0, dv_batch = 0, do_batch = 0;
};

// Self-attention over qkv (B, T, (NH + 2*NKV) * HD), out (B, T, NH * HD).
inline AttentionArgs packed_attention_args(int B, int T, int NH, int NKV, int HD) {
    AttentionArgs args = {};
    args.B = B, args.Tq = T, args.Tkv = T, args.NH = NH, args.NKV = NKV, args.HD = HD;
    args.q_row = args.k_row = args.v_row = (static_cast<size_t>(NH) + 2 * static_cast<size_t>(NKV)) * HD;
    args.o_row = static_cast<size_t>(NH) * HD;
    args.q_batch = args.k_batch = args.v_batch = T * args.q_row;
    args.o_batch = T * args.o_row;
    args.scale = 1.0f / std::sqrt(static_cast<float>(HD));
    return args;
}

// First key that any of `count` queries from `query` on sees. Every thread of the block reads the same few numbers and so decides the same.
__device__ __forceinline__ int first_key_seen(const AttentionArgs& args, int b, int query, int count) {
    if (args.key_start == nullptr) return 0;
    const int* const starts = args.key_start + static_cast<size_t>(b) * args.Tq + query;
    int first = starts[0];
    for (int i = 1; i < count; i++) first = starts[i] < first ? starts[i] : first;
    return first > 0 ? first : 0;
}

// A row without a key has lse -infinity; +infinity in its place makes all its weights exp(s - lse) zero.
__device__ __forceinline__ float usable_lse(float lse) { return lse == -INFINITY ? INFINITY : lse; }

// D of the backward pass: sum over dims of dout * out, of one query of one head.
template <typename T>
__device__ __forceinline__ float attention_row_dot(const T* dout, const T* out, const AttentionArgs& args, size_t b, size_t query, size_t head) {
    dout += b * args.do_batch + query * args.do_row + head * args.HD;
    out += b * args.o_batch + query * args.o_row + head * args.HD;
    Float8 sum = zero8();
    for (int d = 0; d < args.HD; d += 8) sum = fma8(load8(dout + d), load8(out + d), sum);
    return sum8(sum);
}

// Checks what the kernels rely on and fills in the strides that were left at 0.
inline AttentionArgs checked_attention_args(AttentionArgs args) {
    CHECK(args.B >= 1 && args.Tq >= 1 && args.Tkv >= 1 && args.B <= 65535, "attention over B = %d, Tq = %d, Tkv = %d: each is at least 1, B at most 65535",
          args.B, args.Tq, args.Tkv);
    CHECK(args.NKV >= 1 && args.NH >= 1 && args.NH <= 65535 && args.NH % args.NKV == 0,
          "attention with %d query heads and %d key/value heads: the first must be a multiple of the second", args.NH, args.NKV);
    CHECK(args.HD >= 8 && args.HD <= 256 && args.HD % 8 == 0, "attention with head_dim %d: it must be a multiple of 8, at most 256", args.HD);
    CHECK(args.scale > 0 && std::isfinite(args.scale), "attention with scores times %g: the factor must be positive", static_cast<double>(args.scale));
    const size_t q_heads = static_cast<size_t>(args.NH) * args.HD, kv_heads = static_cast<size_t>(args.NKV) * args.HD;
    const auto check = [](const char* name, size_t row, size_t batch, size_t heads) {
        CHECK(row >= heads && row % 8 == 0 && batch % 8 == 0,
              "attention: rows of %s are %zu elements apart and batches %zu; multiples of 8 are needed, and rows of at least %zu", name, row, batch, heads);
    };
    const auto fill = [](size_t& own, size_t same) { own = own != 0 ? own : same; };
    fill(args.dq_row, args.q_row), fill(args.dk_row, args.k_row), fill(args.dv_row, args.v_row), fill(args.do_row, args.o_row);
    fill(args.dq_batch, args.q_batch), fill(args.dk_batch, args.k_batch), fill(args.dv_batch, args.v_batch), fill(args.do_batch, args.o_batch);
    check("q", args.q_row, args.q_batch, q_heads);
    check("k", args.k_row, args.k_batch, kv_heads);
    check("v", args.v_row, args.v_batch, kv_heads);
    check("out", args.o_row, args.o_batch, q_heads);
    check("dq", args.dq_row, args.dq_batch, q_heads);
    check("dk", args.dk_row, args.dk_batch, kv_heads);
    check("dv", args.dv_row, args.dv_batch, kv_heads);
    check("dout", args.do_row, args.do_batch, q_heads);
    return args;
}

// What an sm_89 card and an sm_80 card give one block.
inline constexpr size_t kAttentionSmallShared = 99 * 1024, kAttentionLargeShared = 163 * 1024;

inline void check_attention_pointer(const char* name, const void* pointer) {
    CHECK(reinterpret_cast<uintptr_t>(pointer) % 16 == 0, "attention: %s at %p is not on a multiple of 16 bytes", name, pointer);
}

// launch() with more shared memory than a kernel may have without asking.
template <typename... Params, typename... Args>
inline void launch_attention(void (*kernel)(Params...), dim3 grid, int threads, size_t smem_bytes, cudaStream_t stream, Args&&... args) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, narrow_int(smem_bytes, "shared memory of attention")));
    launch(kernel, grid, dim3(static_cast<unsigned>(threads)), smem_bytes, stream, std::forward<Args>(args)...);
}
