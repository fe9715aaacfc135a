// Attention on tensor cores, bf16, head_dim 64, 80, 96 or 128: forward and backward. attention.cuh says what is computed; this file how.
//
// Forward (after FlashAttention-2, Dao 2023). A block has 128 rows of one key/value head and all keys they see, 64 at a time; a row is a (query, head of the
// group) pair, so the query heads of a group share each tile of keys and values. Scores, weights and output stay in the registers of the warp that owns the
// rows; tiles wholly above the diagonal are neither loaded nor computed.
//
// Backward: five products in one kernel. A block has one query head and a share of its keys, 128 at a time (64 where shared memory is small), past which all
// queries stream. Keys are the rows of S^T = k q^T and dP^T = v dout^T, so P^T and dS^T are the left sides of dv = P^T dout and dk = dS^T q as they stand in
// the registers, and dS alone goes through shared memory, for dq = dS k.
//   dq without atomics: its sum over keys is spread over blocks. FlashAttention-2 adds with atomics, in another order each time. Two kernels, one by queries
//   and one by keys, would be 7 products instead of 5. Here each block adds the tiles of keys it owns, one after the other, into a partial sum of its own in
//   fp32, always by the same thread; 1 to 4 blocks (attention_backward_splits) share the keys of a head, and a last kernel adds their sums in order. Cost for
//   a tile of 128 keys: a read and a write of dq in fp32, 8 bytes a query and dim through the L2 cache (the atomic adds 4), with queries and dout 15 to 19 bytes a cycle
//   and multiprocessor beside what the products take (table); in memory up to 4 fp32 copies of dq, which the model keeps where its logits are idle.
//   dk and dv of a group are kept by query head in fp32 and added in order at the end: 16 bytes an element, once.
//
// RoPE and the QK-norm are not fused into the loads. It would save reading and writing q and k once each way, 16 bytes an element of q forward and backward
// together: for T 1024 and head_dim 128 on an H100 0.6 us a head, beside 3.5 us of attention at FlashAttention-2's speed, 4 % of a layer of the 124M preset.
// But rotated on load, every block would rotate all the keys it reads (backward: all the queries), in registers instead of by cp.async: some 4 instructions an
// element, 256 cycles a tile, 16 % of a forward tile and 4 % of a backward one, which grows with T squared and is the dearer one from T 2600 on. And these kernels
// have no register left for it.
//
// The arithmetic, for one tile (forward 128 rows x 64 keys, backward keys x queries as given), a multiprocessor alone. mma: cycles of the tensor cores at 2048
// flops a cycle (A100: 312 TFLOP/s) and at 2580 (H100: mma.sync reaches 63 % of wgmma's 4096; Luo et al., arXiv 2402.13499). shared: bytes through shared memory,
// at 128 a cycle. L2: bytes from and to it a cycle of the slower of both (H100). exp2: 16 a cycle.
//
//               tile      flops    mma A100  mma H100  shared KB  cycles  exp2  L2   registers: sums + left sides   shared KB a block   blocks on an A100, H100
//   forward  64 128 x  64  2.1 M     1024       813        82       640    512  20   64 + 64 + 32 (q)                 45                  2, 2
//            80            2.6 M     1280      1016       123       960    512  20   80 + 64                          44                  2, 2
//            96            3.1 M     1536      1219       147      1152    512  20   96 + 64                          65                  2, 2
//           128            4.2 M     2048      1626       197      1536    512  20   128 + 64                         68                  2, 2
//   backward 64 128 x  32  2.6 M     1280      1016       164      1280    256  19   128 + 64                         65                  2, 2
//            80 128 x  64  6.6 M     3200      2540       520      4064    512  15   80 + 64                         107                  1, 1
//            96 128 x  64  7.9 M     3840      3048       614      4800    512  15   96 + 64                         123                  1, 1
//           128 128 x  64 10.5 M     5120      4065       770      6016    512  16   128 + 64                        155                  1, 1
//
// What follows. A warp owns 32 rows in the forward pass: with 16 each ldmatrix of a key would feed half as many products, and shared memory, not the tensor
// cores, would set the pace. Two blocks share a multiprocessor, so that one's softmax hides behind the other's products. head_dim 64 keeps its queries in
// registers, the others cannot. Backward has twice the sums, so beyond head_dim 64 its warps own 16 keys and shared memory sets the pace (H100: 404 TFLOP/s at
// most for head_dim 128, 474 for 64); 256 registers a thread allow one such block. An sm_89 card gives a block 99 KB: there 64 keys x 32 queries.
// Registers are full to the last one, so what depends on the thread is made anew where it is used (fresh_lane). dev/gpu/kernels.md has what the compiler made of it.
// Hopper's own path (wgmma reads both sides from shared memory, TMA loads them) would be another pair of kernels, chosen in the launchers at the end.
#pragma once

#include "llmc/attention_args.cuh"
#include "llmc/ptx.cuh"

inline constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;

// ---- tiles ---------------------------------------------------------------------------------------------------------------------

// kFat: few warps with twice as many rows each, for a CPU (kFatWarps).
template <int HD_, bool kFat>
struct AttentionForwardMma {
    static constexpr int HD = HD_;
    static constexpr int kWarpTiles = kFat ? 4 : 2;             // 16-row tiles of a warp: each key or value that ldmatrix brings serves so many products
    static constexpr int kWarps = 8 / kWarpTiles, kThreads = kWarps * kWarpSize, kBlocks = 2;  // kBlocks: on a multiprocessor
    static constexpr int kWarpRows = 16 * kWarpTiles, kRows = kWarps * kWarpRows, kKeys = 64;
    static constexpr int kStages = HD == 64 || HD == 96 ? 3 : 2;  // tiles of keys or values in the ring; two blocks of 64 and 80 fit an sm_89, too
    static constexpr int kStride = HD + 8;                      // an odd number of 16 bytes: ldmatrix meets no bank conflict
    static constexpr int kDepth = HD / 16;                      // 16-wide tiles of a head
    static constexpr bool kKeepQueries = !kFat && HD == 64;     // in registers
    static constexpr size_t kBytes = sizeof(__nv_bfloat16) * kStride * (kRows + kStages * kKeys);
};

// Three shapes: kLarge for a card that gives a block 163 KiB, kSmall for an sm_89's 99 KiB and for head_dim 64 everywhere, kFat for a CPU.
enum class BackwardShape { kLarge, kSmall, kFat };

inline constexpr BackwardShape attention_backward_shape(int HD, bool large_card, bool fat) {
    if (!large_card) return BackwardShape::kSmall;
    return fat ? BackwardShape::kFat : HD == 64 ? BackwardShape::kSmall : BackwardShape::kLarge;
}

template <int HD_, BackwardShape kShape>
struct AttentionBackwardMma {
    static constexpr int HD = HD_;
    // 16-key tiles of a warp. dk and dv of two would fill a GPU's registers beyond head_dim 64.
    static constexpr int kWarpTiles = kShape == BackwardShape::kFat ? 4 : HD == 64 ? 2 : 1;
    static constexpr int kWarps = kShape == BackwardShape::kLarge ? 8 : kShape == BackwardShape::kSmall ? 4 : 2;
    static constexpr int kThreads = kWarps * kWarpSize, kBlocks = 256 / kThreads;
    static constexpr int kWarpKeys = 16 * kWarpTiles, kKeys = kWarps * kWarpKeys;
    static constexpr int kQueries = kShape == BackwardShape::kSmall ? 32 : 64;
    static constexpr int kStride = HD + 8, kScoreStride = kQueries + 8;
    static constexpr int kDepth = HD / 16, kQueryTiles = kQueries / 16;
    // dq (kQueries x HD) is split over the warps: kDqColumns warps side by side, each kDqTiles x kDqWidth tiles.
    static constexpr int kDqTiles = kShape == BackwardShape::kFat ? 4 : HD % 64 == 0 ? 2 : 1;
    static constexpr int kDqColumns = kWarps * kDqTiles / kQueryTiles;
    static constexpr int kDqWidth = ceil_div(kDepth, kDqColumns);
    static constexpr size_t kStageElements = 2 * static_cast<size_t>(kQueries) * kStride;  // queries, and dout
    static constexpr size_t kBytes = sizeof(__nv_bfloat16) * (2 * static_cast<size_t>(kKeys) * kStride + 2 * kStageElements + static_cast<size_t>(kKeys) * kScoreStride) +
                                     2 * sizeof(float2) * kQueries;
    static_assert(kQueryTiles % kDqTiles == 0 && kWarps * kDqTiles % kQueryTiles == 0, "the warps of a backward tile share dq evenly");
};

// ---- pieces of the kernels -----------------------------------------------------------------------------------------------------

// Column of element i of a lane's part of a 16 x 16 tile.
__device__ __forceinline__ int element_column(int lane, int i) { return lane % 4 * 2 + i % 2 + i / 4 * 8; }

template <int MT, int NT>
__device__ __forceinline__ void zero_tiles(Float8 (&x)[MT][NT]) {
    UNROLL
    for (int m = 0; m < MT; m++)
        UNROLL
        for (int n = 0; n < NT; n++) x[m][n] = zero8();
}

// As first_key_seen, the lanes of a warp together: some ten loads instead of `count`.
__device__ __forceinline__ int warp_first_key_seen(const AttentionArgs& args, int b, int query, int count) {
    if (args.key_start == nullptr) return 0;
    const int* const starts = args.key_start + static_cast<size_t>(b) * args.Tq + query;
    int first = starts[0];
    for (int i = fresh_lane(); i < count; i += kWarpSize) first = min(first, starts[i]);
    return max(__reduce_min_sync(0xffffffffu, first), 0);
}

// Starts copying kRows rows of HD elements into a tile; rows from `count` on are zeros, since 0 times what lies there must be 0.
template <int kRows, int HD, int kThreads>
__device__ __forceinline__ void copy_rows(__nv_bfloat16* tile, const __nv_bfloat16* x, size_t x_row, int count) {
    constexpr int kChunks = HD / 8, kRowsAtOnce = kThreads / kChunks;  // beyond whole rows threads are idle
    const unsigned thread = fresh_thread_index();
    const int first = static_cast<int>(thread / kChunks), d = static_cast<int>(thread % kChunks * 8);
    if (first >= kRowsAtOnce) return;
    tile += first * (HD + 8) + d;
    x += first * x_row + d;
    UNROLL
    for (int row = 0; row < kRows; row += kRowsAtOnce) {
        if (kRows % kRowsAtOnce == 0 || first + row < kRows) cp_async_16(tile + row * (HD + 8), x, first + row < count);
        x += kRowsAtOnce * x_row;  // one step in registers, where row * x_row would be one for each row
    }
}

// A tile of floats to rows of HD, this warp's from warp_row on; rows from `count` on do not exist.
template <int HD, int MT>
__device__ __forceinline__ void store_rows(float* x, const Float8 (&acc)[MT][HD / 16], int count, int warp_row) {
    const int lane = fresh_lane();
    UNROLL
    for (int m = 0; m < MT; m++) {
        const int row = warp_row + 16 * m + lane / 4;
        UNROLL
        for (int n = 0; n < HD / 16; n++) {
            float* const to = x + static_cast<size_t>(row) * HD + 16 * n + lane % 4 * 2;
            if (row < count) {
                *reinterpret_cast<float2*>(to) = float2{acc[m][n][0], acc[m][n][1]};
                *reinterpret_cast<float2*>(to + 8) = float2{acc[m][n][4], acc[m][n][5]};
            }
            if (row + 8 < count) {
                *reinterpret_cast<float2*>(to + 8 * HD) = float2{acc[m][n][2], acc[m][n][3]};
                *reinterpret_cast<float2*>(to + 8 * HD + 8) = float2{acc[m][n][6], acc[m][n][7]};
            }
        }
    }
}

// ---- forward -------------------------------------------------------------------------------------------------------------------
// One block: kRows rows of one key/value head; row r is query r / group of the group's head r % group. Each warp owns 32 rows and keeps their output.
// scale: of the scores in powers of two. Keys and values come by turns through a ring of tiles: while one is multiplied the next ones land. One barrier for each.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    attention_forward_mma_kernel(__nv_bfloat16* out, float* lse, const __nv_bfloat16* q, const __nv_bfloat16* k, const __nv_bfloat16* v, float scale, AttentionArgs args) {
    constexpr int HD = Tile::HD, kStride = Tile::kStride, MT = Tile::kWarpTiles, kKeyTiles = Tile::kKeys / 16;
    const int b = blockIdx.z, kv_head = blockIdx.y, group = args.NH / args.NKV;
    const int first_row = (gridDim.x - 1 - blockIdx.x) * Tile::kRows;  // the longest rows first
    const int num_rows = min(Tile::kRows, args.Tq * group - first_row);
    const int first_query = first_row / group, last_query = (first_row + num_rows - 1) / group;
    const int diagonal = args.Tkv - args.Tq;  // query i sees keys up to i + diagonal
    const int key_begin = warp_first_key_seen(args, b, first_query, last_query + 1 - first_query);
    const int key_end = diagonal + last_query + 1;
    const int num_steps = key_begin < key_end ? 2 * ceil_div(key_end - key_begin, Tile::kKeys) : 0;  // keys and values count apart

    q += b * args.q_batch + static_cast<size_t>(kv_head) * group * HD;
    out += b * args.o_batch + static_cast<size_t>(kv_head) * group * HD;
    k += b * args.k_batch + static_cast<size_t>(kv_head) * HD;
    v += b * args.v_batch + static_cast<size_t>(kv_head) * HD;
    lse += (static_cast<size_t>(b) * args.NH + static_cast<size_t>(kv_head) * group) * args.Tq;

    __nv_bfloat16* const queries = dynamic_shared<__nv_bfloat16>();  // [kRows][HD + 8], at the end the output
    __nv_bfloat16* const ring = queries + Tile::kRows * kStride;     // [kStages][kKeys][HD + 8]

    const auto start_step = [&](int step) {
        if (step < num_steps) {
            const int key = key_begin + step / 2 * Tile::kKeys, count = min(Tile::kKeys, key_end - key);
            __nv_bfloat16* const tile = ring + step % Tile::kStages * (Tile::kKeys * kStride);
            if (step % 2 == 0) {
                copy_rows<Tile::kKeys, HD, Tile::kThreads>(tile, k + key * args.k_row, args.k_row, count);
            } else {
                copy_rows<Tile::kKeys, HD, Tile::kThreads>(tile, v + key * args.v_row, args.v_row, count);
            }
        }
        cp_async_commit();  // also without a copy, so that a group is always a step
    };
    for (int i = threadIdx.x; i < Tile::kRows * (HD / 8); i += Tile::kThreads) {
        const int row = i / (HD / 8), d = i % (HD / 8) * 8, packed = first_row + row;
        cp_async_16(queries + row * kStride + d, q + packed / group * args.q_row + packed % group * HD + d, row < num_rows);
    }
    cp_async_commit();
    UNROLL
    for (int step = 0; step < Tile::kStages - 1; step++) start_step(step);

    const int warp_row = fresh_warp() * Tile::kWarpRows;
    const int warp_first_query = (first_row + warp_row) / group;
    const int warp_last_key = warp_row < num_rows ? diagonal + (first_row + min(warp_row + Tile::kWarpRows, num_rows) - 1) / group : -1;
    float reference[2 * MT], row_sum[2 * MT];  // the largest score so far; the sum of this lane's weights relative to it
    UNROLL
    for (int i = 0; i < 2 * MT; i++) reference[i] = -kInfinity, row_sum[i] = 0.0f;
    Float8 acc[MT][Tile::kDepth];
    zero_tiles(acc);
    FragmentsA<MT, Tile::kKeepQueries ? Tile::kDepth : 1> kept;

    for (int step = 0; step < num_steps; step += 2) {
        const int key = key_begin + step / 2 * Tile::kKeys;
        const bool active = key <= warp_last_key;  // the same in the whole warp
        FragmentsA<MT, kKeyTiles> weights;

        cp_async_wait<Tile::kStages - 2>();
        __syncthreads();  // these keys have landed for all, and all have left the tile that the next copy overwrites
        start_step(step + Tile::kStages - 1);
        if (active) {
            Float8 s[MT][kKeyTiles];
            const SharedA<Stored::kByRow, kStride> warp_queries(queries + warp_row * kStride);
            const SharedB<Stored::kByRow, kStride> keys(ring + step % Tile::kStages * (Tile::kKeys * kStride));
            if constexpr (Tile::kKeepQueries) {
                if (step == 0) load_fragments(kept, warp_queries);
                warp_mma(set_product<Tile::kDepth>(s, kept, keys));
            } else {
                warp_mma(set_product<Tile::kDepth>(s, warp_queries, keys));
            }
            if (args.key_start != nullptr || key + Tile::kKeys > diagonal + warp_first_query + 1) {
                const int lane = fresh_lane();
                UNROLL
                for (int row = 0; row < 2 * MT; row++) {
                    const int query = (first_row + min(warp_row + 8 * row + lane / 4, num_rows - 1)) / group;
                    const int begin = args.key_start == nullptr ? 0 : args.key_start[static_cast<size_t>(b) * args.Tq + query];
                    UNROLL
                    for (int n = 0; n < kKeyTiles; n++)
                        UNROLL
                        for (int i = 0; i < 4; i++) {
                            const int element = row % 2 * 2 + i % 2 + i / 2 * 4, my_key = key + 16 * n + element_column(lane, element);
                            if (my_key > diagonal + query || my_key < begin) s[row / 2][n][element] = -kInfinity;
                        }
                }
            }
            float largest[2 * MT], shrink[2 * MT];
            UNROLL
            for (int m = 0; m < MT; m++) {
                Float8 x = s[m][0];
                UNROLL
                for (int n = 1; n < kKeyTiles; n++) x = max8(x, s[m][n]);
                largest[2 * m] = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[4], x[5]));
                largest[2 * m + 1] = fmaxf(fmaxf(x[2], x[3]), fmaxf(x[6], x[7]));
            }
            quad_max(largest);
            float subtract[2 * MT];
            UNROLL
            for (int i = 0; i < 2 * MT; i++) {
                const float grown = fmaxf(reference[i], largest[i] * scale);
                // While a row has seen no key its largest score is -infinity, and -infinity less itself would be no number.
                subtract[i] = grown == -kInfinity ? 0.0f : grown;
                shrink[i] = reference[i] - subtract[i];
                reference[i] = grown;
            }
            exp2_in_place(shrink);
            UNROLL
            for (int m = 0; m < MT; m++) {
                Float8 minus[kKeyTiles], sum = zero8();
                UNROLL
                for (int n = 0; n < kKeyTiles; n++) minus[n] = row_pair8(subtract[2 * m], subtract[2 * m + 1]);
                exp2_scaled<kKeyTiles>(s[m], scale, minus);
                UNROLL
                for (int n = 0; n < kKeyTiles; n++) sum = sum + s[m][n];
                to_fragments<kKeyTiles>(weights.tile[m], s[m]);
                row_sum[2 * m] = row_sum[2 * m] * shrink[2 * m] + ((sum[0] + sum[1]) + (sum[4] + sum[5]));
                row_sum[2 * m + 1] = row_sum[2 * m + 1] * shrink[2 * m + 1] + ((sum[2] + sum[3]) + (sum[6] + sum[7]));
                if (shrink[2 * m] != 1.0f || shrink[2 * m + 1] != 1.0f) {  // most tiles bring no larger score
                    const Float8 factor = row_pair8(shrink[2 * m], shrink[2 * m + 1]);
                    UNROLL
                    for (int n = 0; n < Tile::kDepth; n++) acc[m][n] = acc[m][n] * factor;
                }
            }
        }

        cp_async_wait<Tile::kStages - 2>();
        __syncthreads();  // the same for the values
        start_step(step + Tile::kStages);
        if (active) {
            const SharedB<Stored::kByDepth, kStride> values(ring + (step + 1) % Tile::kStages * (Tile::kKeys * kStride));
            warp_mma(add_product<kKeyTiles>(acc, weights, values));
        }
    }

    quad_sum(row_sum);
    const int lane = fresh_lane();  // its rows of the warp: 8 i + lane / 4
    if (lane % 4 == 0) {
        UNROLL
        for (int i = 0; i < 2 * MT; i++) {
            const int row = warp_row + 8 * i + lane / 4, packed = first_row + row;
            if (row < num_rows) {
                lse[packed % group * static_cast<size_t>(args.Tq) + packed / group] = row_sum[i] == 0.0f ? -kInfinity : fmaf(reference[i], kLn2, logf(row_sum[i]));
            }
        }
    }
    cp_async_wait<0>();
    __syncthreads();  // a block without keys comes here at once, and its queries may still be landing
    const int place = fragment_offset<kStride>();
    UNROLL
    for (int m = 0; m < MT; m++) {
        // Only a row without a key sums to 0: the largest weight of any other is 1. A NaN stays one.
        float inverse[2];
        UNROLL
        for (int i = 0; i < 2; i++) inverse[i] = row_sum[2 * m + i] == 0.0f ? 0.0f : 1.0f / row_sum[2 * m + i];
        const Float8 factor = row_pair8(inverse[0], inverse[1]);
        UNROLL
        for (int n = 0; n < Tile::kDepth; n++) {
            store_fragment<kStride>(queries + (warp_row + 16 * m) * kStride + 16 * n + place, to_fragment(acc[m][n] * factor));
        }
    }
    __syncwarp();
    for (int i = lane; i < Tile::kWarpRows * (HD / 8); i += kWarpSize) {
        const int row = warp_row + i / (HD / 8), d = i % (HD / 8) * 8, packed = first_row + row;
        if (row < num_rows) {
            *reinterpret_cast<uint4*>(out + packed / group * args.o_row + packed % group * HD + d) = *reinterpret_cast<const uint4*>(queries + row * kStride + d);
        }
    }
}

// ---- backward ------------------------------------------------------------------------------------------------------------------

// Rows of scratch a head has: queries, filled up to whole tiles of every kind.
inline __host__ __device__ size_t attention_padded_queries(const AttentionArgs& args) { return ceil_div(static_cast<size_t>(args.Tq), size_t{64}) * 64; }

// Scratch of the backward pass.
struct AttentionBackwardScratch {
    int splits;     // partial sums of dq, each of some tiles of keys
    float2* stats;  // (B, NH, padded Tq)  lse in powers of two, +infinity where nothing is seen; D
    float* dq;      // (splits, B, NH, padded Tq / 16, HD / 16, 256)  16 x 16 tiles as store_tile writes them
    float* dk;      // (B, NH, Tkv, HD)  of each query head, where a key/value head has several; else nullptr
    float* dv;
};

// stats, one thread a row; neighbouring threads read neighbouring heads.
__global__ void attention_backward_stats_kernel(float2* stats, const __nv_bfloat16* dout, const __nv_bfloat16* out, const float* lse, AttentionArgs args) {
    const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x, padded = attention_padded_queries(args);
    if (i >= args.B * padded * args.NH) return;
    const size_t head = i % args.NH, query = i / args.NH % padded, b = i / args.NH / padded;
    float2 row = {kInfinity, 0.0f};
    if (query < static_cast<size_t>(args.Tq)) {
        row.x = usable_lse(lse[(b * args.NH + head) * args.Tq + query]) * kLog2e;
        row.y = attention_row_dot(dout, out, args, b, query, head);
    }
    stats[(b * args.NH + head) * padded + query] = row;
}

// One block: one query head, and every splits-th tile of its keys, there and back (0, 2s-1, 2s, ...), so that under the causal mask each block has as much
// to do. For each tile of keys all queries that see them stream past; dk and dv stay in registers, dq is added to this block's own partial sum, always by
// the same thread.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocks)
    attention_backward_mma_kernel(__nv_bfloat16* dk, __nv_bfloat16* dv, AttentionBackwardScratch scratch, const __nv_bfloat16* dout, const __nv_bfloat16* q,
                                  const __nv_bfloat16* k, const __nv_bfloat16* v, float scale, AttentionArgs args) {
    constexpr int HD = Tile::HD, kStride = Tile::kStride, MT = Tile::kWarpTiles, QT = Tile::kQueryTiles;
    const int split = blockIdx.x, head = blockIdx.y, b = blockIdx.z, kv_head = head / (args.NH / args.NKV);
    const int diagonal = args.Tkv - args.Tq;
    const size_t padded = attention_padded_queries(args), batch_head = static_cast<size_t>(b) * args.NH + head;

    q += b * args.q_batch + static_cast<size_t>(head) * HD;
    dout += b * args.do_batch + static_cast<size_t>(head) * HD;
    k += b * args.k_batch + static_cast<size_t>(kv_head) * HD;
    v += b * args.v_batch + static_cast<size_t>(kv_head) * HD;
    const float2* const stats = scratch.stats + batch_head * padded;

    __nv_bfloat16* const keys = dynamic_shared<__nv_bfloat16>();       // [kKeys][HD + 8], at the end dk
    __nv_bfloat16* const values = keys + Tile::kKeys * kStride;        // [kKeys][HD + 8], at the end dv
    __nv_bfloat16* const stages = values + Tile::kKeys * kStride;      // [2][queries, dout][kQueries][HD + 8]
    __nv_bfloat16* const ds = stages + 2 * Tile::kStageElements;       // [kKeys][kQueries + 8]
    float2* const stage_stats = reinterpret_cast<float2*>(ds + Tile::kKeys * Tile::kScoreStride);  // [2][kQueries]

    float* const partial = scratch.dq + (split * static_cast<size_t>(args.B) * args.NH + batch_head) * padded * HD;

    const auto start_queries = [&](int tile) {
        const int query = tile * Tile::kQueries, count = min(Tile::kQueries, args.Tq - query);
        __nv_bfloat16* const stage = stages + tile % 2 * Tile::kStageElements;
        copy_rows<Tile::kQueries, HD, Tile::kThreads>(stage, q + query * args.q_row, args.q_row, count);
        copy_rows<Tile::kQueries, HD, Tile::kThreads>(stage + Tile::kQueries * kStride, dout + query * args.do_row, args.do_row, count);
        const unsigned pair = fresh_thread_index();
        if (pair < Tile::kQueries / 2) cp_async_16(stage_stats + tile % 2 * Tile::kQueries + 2 * pair, stats + query + 2 * pair, true);
        cp_async_commit();
    };

    const int num_key_tiles = ceil_div(args.Tkv, Tile::kKeys), num_query_tiles = ceil_div(args.Tq, Tile::kQueries);
    // Tiles split, 2 splits - 1 - split, 2 splits + split, ...
    for (int key_tile = split, step = 2 * (scratch.splits - split) - 1; key_tile < num_key_tiles; key_tile += step, step = 2 * scratch.splits - step) {
        const int first_key = key_tile * Tile::kKeys, num_keys = min(Tile::kKeys, args.Tkv - first_key);
        const int first_tile = max(0, first_key - diagonal) / Tile::kQueries;
        copy_rows<Tile::kKeys, HD, Tile::kThreads>(keys, k + first_key * args.k_row, args.k_row, num_keys);
        copy_rows<Tile::kKeys, HD, Tile::kThreads>(values, v + first_key * args.v_row, args.v_row, num_keys);
        start_queries(first_tile);

        Float8 dk_acc[MT][Tile::kDepth], dv_acc[MT][Tile::kDepth];
        zero_tiles(dk_acc);
        zero_tiles(dv_acc);
        for (int tile = first_tile; tile < num_query_tiles; tile++) {
            const int query = tile * Tile::kQueries, last_query = min(query + Tile::kQueries, args.Tq) - 1;
            const int last_key = min(diagonal + last_query, first_key + Tile::kKeys - 1);  // that is seen of this tile
            cp_async_wait<0>();
            __syncthreads();  // these queries have landed for all, and all have left the other stage and ds
            if (tile + 1 < num_query_tiles) start_queries(tile + 1);
            // False in a tile of documents that begin after these keys.
            const bool seen = warp_first_key_seen(args, b, query, last_query + 1 - query) <= last_key;

            // What depends on the thread is made anew where it is used: registers around the loop are for dk and dv.
            const int warp_key = fresh_warp() * Tile::kWarpKeys;
            if (seen && first_key + warp_key <= last_key) {
                const int lane = fresh_lane();
                const __nv_bfloat16* const tile_queries = stages + tile % 2 * Tile::kStageElements;
                const __nv_bfloat16* const tile_dout = tile_queries + Tile::kQueries * kStride;
                const float4* const tile_stats = reinterpret_cast<const float4*>(stage_stats + tile % 2 * Tile::kQueries);
                Float8 s[MT][QT], dp[MT][QT];
                const SharedA<Stored::kByRow, kStride> warp_keys(keys + warp_key * kStride), warp_values(values + warp_key * kStride);
                const SharedB<Stored::kByRow, kStride> queries_by_row(tile_queries), dout_by_row(tile_dout);
                warp_mma(set_product<Tile::kDepth>(s, warp_keys, queries_by_row), set_product<Tile::kDepth>(dp, warp_values, dout_by_row));
                if (args.key_start != nullptr || first_key + warp_key + Tile::kWarpKeys - 1 > diagonal + query) {
                    UNROLL
                    for (int n = 0; n < QT; n++)
                        UNROLL
                        for (int i = 0; i < 8; i++) {
                            const int my_query = query + 16 * n + element_column(lane, i);
                            const int begin = args.key_start == nullptr ? 0 : args.key_start[static_cast<size_t>(b) * args.Tq + min(my_query, args.Tq - 1)];
                            UNROLL
                            for (int m = 0; m < MT; m++) {
                                const int my_key = first_key + warp_key + 16 * m + i / 2 % 2 * 8 + lane / 4;
                                if (my_key > diagonal + my_query || my_key < begin) s[m][n][i] = -kInfinity;
                            }
                        }
                }
                FragmentsA<MT, QT> p_left, ds_left;
                __nv_bfloat16* const lane_ds = ds + warp_key * Tile::kScoreStride + fragment_offset<Tile::kScoreStride>();
                UNROLL
                for (int n = 0; n < QT; n += 2) {
                    Float8 column_lse[2], column_d[2];  // of this lane's queries
                    UNROLL
                    for (int i = 0; i < 2; i++) {
                        const float4 x = tile_stats[8 * (n + i) + lane % 4], y = tile_stats[8 * (n + i) + 4 + lane % 4];
                        column_lse[i] = Float8{x.x, x.z, x.x, x.z, y.x, y.z, y.x, y.z};
                        column_d[i] = Float8{x.y, x.w, x.y, x.w, y.y, y.w, y.y, y.w};
                    }
                    UNROLL
                    for (int m = 0; m < MT; m++) {
                        exp2_scaled<2>(&s[m][n], scale, column_lse);
                        to_fragments<2>(&p_left.tile[m][n], &s[m][n]);
                        UNROLL
                        for (int i = 0; i < 2; i++) s[m][n + i] = s[m][n + i] * (dp[m][n + i] - column_d[i]);
                        to_fragments<2>(&ds_left.tile[m][n], &s[m][n]);
                        UNROLL
                        for (int i = 0; i < 2; i++) store_fragment<Tile::kScoreStride>(lane_ds + 16 * m * Tile::kScoreStride + 16 * (n + i), ds_left.tile[m][n + i]);
                    }
                }
                const SharedB<Stored::kByDepth, kStride> queries_by_depth(tile_queries), dout_by_depth(tile_dout);
                warp_mma(add_product<QT>(dv_acc, p_left, dout_by_depth), add_product<QT>(dk_acc, ds_left, queries_by_depth));
            }

            // This warp's part of dq. The first tile of keys begins the sum. Loaded before the barrier, so that the wait for it hides there.
            const int dq_warp = fresh_warp();
            const int dq_row = dq_warp / Tile::kDqColumns * Tile::kDqTiles, dq_column = dq_warp % Tile::kDqColumns * Tile::kDqWidth;
            const int dq_width = Tile::kDepth % Tile::kDqColumns == 0 ? Tile::kDqWidth : min(Tile::kDqWidth, Tile::kDepth - dq_column);
            float* const tile_partial = partial + static_cast<size_t>(tile) * (Tile::kQueries * HD) + (dq_row * Tile::kDepth + dq_column) * kTileFloats;
            Float8 dq_acc[Tile::kDqTiles][Tile::kDqWidth];
            if (key_tile == split || !seen) {
                zero_tiles(dq_acc);
            } else {
                UNROLL
                for (int m = 0; m < Tile::kDqTiles; m++)
                    UNROLL
                    for (int n = 0; n < Tile::kDqWidth; n++)
                        if (n < dq_width) dq_acc[m][n] = load_tile(tile_partial + (m * Tile::kDepth + n) * kTileFloats);
            }
            __syncthreads();  // ds is there
            const SharedA<Stored::kByDepth, Tile::kScoreStride> dq_scores(ds + 16 * dq_row);
            const SharedB<Stored::kByDepth, kStride> dq_keys(keys + 16 * dq_column);
            if (seen) warp_mma(add_product<Tile::kKeys / 16>(dq_acc, dq_scores, dq_keys, (last_key - first_key) / 16 + 1, dq_width));
            if (seen || key_tile == split) {
                UNROLL
                for (int m = 0; m < Tile::kDqTiles; m++)
                    UNROLL
                    for (int n = 0; n < Tile::kDqWidth; n++)
                        if (n < dq_width) store_tile(tile_partial + (m * Tile::kDepth + n) * kTileFloats, dq_acc[m][n]);
            }
        }
        __syncthreads();  // keys and values have been read for the last time

        const int lane = fresh_lane(), warp_key = fresh_warp() * Tile::kWarpKeys;
        if (scratch.dk != nullptr) {
            // Summed over the heads of the group later.
            const size_t first = (batch_head * args.Tkv + first_key) * HD;
            store_rows<HD>(scratch.dk + first, dk_acc, num_keys, warp_key);
            store_rows<HD>(scratch.dv + first, dv_acc, num_keys, warp_key);
        } else {
            UNROLL
            for (int m = 0; m < MT; m++)
                UNROLL
                for (int n = 0; n < Tile::kDepth; n++) {
                    const int at = (warp_key + 16 * m) * kStride + 16 * n + fragment_offset<kStride>();
                    store_fragment<kStride>(keys + at, to_fragment(dk_acc[m][n] * args.scale));
                    store_fragment<kStride>(values + at, to_fragment(dv_acc[m][n]));
                }
            __syncwarp();
            const size_t dk_first = b * args.dk_batch + first_key * args.dk_row + static_cast<size_t>(kv_head) * HD;
            const size_t dv_first = b * args.dv_batch + first_key * args.dv_row + static_cast<size_t>(kv_head) * HD;
            for (int i = lane; i < Tile::kWarpKeys * (HD / 8); i += kWarpSize) {
                const int row = warp_key + i / (HD / 8), d = i % (HD / 8) * 8;
                if (row < num_keys) {
                    *reinterpret_cast<uint4*>(dk + dk_first + row * args.dk_row + d) = *reinterpret_cast<const uint4*>(keys + row * kStride + d);
                    *reinterpret_cast<uint4*>(dv + dv_first + row * args.dv_row + d) = *reinterpret_cast<const uint4*>(values + row * kStride + d);
                }
            }
        }
        __syncthreads();  // before the next tile of keys lands there
    }
}

// dq = scale times the sum of the partial ones. One thread writes columns 16 n to 16 n + 15 of rows g and g + 8: what the four lanes with that g hold of a tile.
__global__ void attention_dq_kernel(__nv_bfloat16* dq, AttentionBackwardScratch scratch, int tile_keys, int tile_queries, AttentionArgs args) {
    const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const size_t padded = attention_padded_queries(args), row_tiles = padded / 16, depth = args.HD / 16, partial_count = args.B * padded * args.NH * args.HD;
    if (i >= args.B * row_tiles * args.NH * depth * 8) return;
    const int g = i % 8, n = i / 8 % depth;
    const size_t row_tile = i / 8 / depth % row_tiles, batch_head = i / 8 / depth / row_tiles;
    const int query = static_cast<int>(row_tile) * 16 + g;
    if (query >= args.Tq) return;
    const float* const tile = scratch.dq + batch_head * padded * args.HD + (row_tile * depth + n) * kTileFloats + g * 16;
    Float8 sum[4];  // columns 0 .. 7 from lanes 0 and 1, lanes 2 and 3; then 8 .. 15
    UNROLL
    for (int j = 0; j < 4; j++) sum[j] = zero8();
    for (int split = 0; split < scratch.splits; split++) {
        // Queries before the block's first tile of keys were never added.
        if (query / tile_queries < max(0, split * tile_keys - (args.Tkv - args.Tq)) / tile_queries) break;
        UNROLL
        for (int j = 0; j < 4; j++) sum[j] = sum[j] + load8(tile + split * partial_count + j / 2 * (kTileFloats / 2) + j % 2 * 8);
    }
    __nv_bfloat16* const row = dq + batch_head / args.NH * args.dq_batch + query * args.dq_row + batch_head % args.NH * args.HD + 16 * n;
    UNROLL
    for (int j = 0; j < 2; j++) {
        const Float8 &x = sum[2 * j], &y = sum[2 * j + 1];
        store8(row + 8 * j, Float8{x[0], x[1], x[4], x[5], y[0], y[1], y[4], y[5]} * args.scale);
        if (query + 8 < args.Tq) store8(row + 8 * args.dq_row + 8 * j, Float8{x[2], x[3], x[6], x[7], y[2], y[3], y[6], y[7]} * args.scale);
    }
}

// dk and dv: the sums over the heads of a group, in their order; dk times scale.
__global__ void attention_dkv_kernel(__nv_bfloat16* dk, __nv_bfloat16* dv, AttentionBackwardScratch scratch, AttentionArgs args) {
    const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x, chunks = args.HD / 8;
    if (i >= static_cast<size_t>(args.B) * args.Tkv * args.NKV * chunks) return;
    const size_t d = i % chunks * 8, kv_head = i / chunks % args.NKV, key = i / chunks / args.NKV % args.Tkv, b = i / chunks / args.NKV / args.Tkv;
    const size_t group = args.NH / args.NKV, head_count = static_cast<size_t>(args.Tkv) * args.HD;
    const size_t first = (b * args.NH + kv_head * group) * head_count + key * args.HD + d;
    Float8 dk_sum = zero8(), dv_sum = zero8();
    for (size_t head = 0; head < group; head++) {
        dk_sum = dk_sum + load8(scratch.dk + first + head * head_count);
        dv_sum = dv_sum + load8(scratch.dv + first + head * head_count);
    }
    store8(dk + b * args.dk_batch + key * args.dk_row + kv_head * args.HD + d, dk_sum * args.scale);
    store8(dv + b * args.dv_batch + key * args.dv_row + kv_head * args.HD + d, dv_sum);
}

// ---- launchers: args are checked and whole -------------------------------------------------------------------------------------------

// Calls function(constant) with the head_dim.
template <typename Function>
inline void with_mma_head_dim(int HD, Function&& function) {
    switch (HD) {
        case 64: return function(std::integral_constant<int, 64>{});
        case 80: return function(std::integral_constant<int, 80>{});
        case 96: return function(std::integral_constant<int, 96>{});
        case 128: return function(std::integral_constant<int, 128>{});
        default: fail("there is no tensor-core attention for head_dim %d", HD);
    }
}

// For floatX = bf16 only: in the FP32 build nobody calls it, and a template that is not called need not compile. kFat: the shape of the tiles; a test runs the GPU's on a CPU, too.
template <bool kFat = kFatWarps>
inline void attention_forward_mma(floatX* out, float* lse, const floatX* q, const floatX* k, const floatX* v, const AttentionArgs& args,
                                  cudaStream_t stream) {
    with_mma_head_dim(args.HD, [&](auto HD) {
        using Tile = AttentionForwardMma<HD.value, kFat>;
        static_assert(Tile::kBytes <= kAttentionSmallShared, "the forward tile does not fit the shared memory of an sm_89 card");
        const dim3 grid(ceil_div(args.Tq * (args.NH / args.NKV), Tile::kRows), args.NKV, args.B);
        launch_attention(attention_forward_mma_kernel<Tile>, grid, Tile::kThreads, Tile::kBytes, stream, out, lse, q, k, v, args.scale * kLog2e, args);
    });
}

// Partial sums of dq: enough blocks for two on each multiprocessor of an H100, at most 4, for the memory. Depends on shapes alone, so that a plan
// made anywhere holds and all cards of a kind give the same bits.
inline int attention_backward_splits(const AttentionArgs& args) {
    constexpr size_t kWantedBlocks = 256, kMostSplits = 4, kTileKeys = 128;
    const size_t heads = static_cast<size_t>(args.B) * args.NH;
    return static_cast<int>(std::min({kMostSplits, ceil_div(static_cast<size_t>(args.Tkv), kTileKeys), ceil_div(kWantedBlocks, heads)}));
}

// Divides `scratch` up; with nullptr only counts. Returns the number of floats.
inline size_t divide_attention_scratch(AttentionBackwardScratch& parts, float* scratch, const AttentionArgs& args) {
    const size_t heads = static_cast<size_t>(args.B) * args.NH, padded = attention_padded_queries(args);
    const size_t stats = 2 * heads * padded, dq = heads * padded * args.HD, dkv = args.NH > args.NKV ? heads * args.Tkv * args.HD : 0;
    parts.splits = attention_backward_splits(args);
    const size_t dk_at = stats + parts.splits * dq, dv_at = dk_at + dkv;
    if (scratch != nullptr) {
        parts.stats = reinterpret_cast<float2*>(scratch);
        parts.dq = scratch + stats;
        parts.dk = dkv > 0 ? scratch + dk_at : nullptr;
        parts.dv = dkv > 0 ? scratch + dv_at : nullptr;
    }
    return dv_at + dkv;
}

// Floats of scratch.
inline size_t attention_backward_mma_scratch_count(const AttentionArgs& args) {
    AttentionBackwardScratch parts;
    return divide_attention_scratch(parts, nullptr, args);
}

template <bool kFat = kFatWarps>
inline void attention_backward_mma(floatX* dq, floatX* dk, floatX* dv, float* scratch, const floatX* dout, const floatX* q,
                                   const floatX* k, const floatX* v, const floatX* out, const float* lse, const AttentionArgs& args, cudaStream_t stream) {
    AttentionBackwardScratch parts;
    divide_attention_scratch(parts, scratch, args);
    constexpr int kThreads = 128;
    const size_t rows = args.B * attention_padded_queries(args) * args.NH;
    launch(attention_backward_stats_kernel, dim3(grid_for(rows, kThreads)), dim3(kThreads), 0, stream, parts.stats, dout, out, lse, args);
    int device = 0, shared_limit = 0;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    with_mma_head_dim(args.HD, [&](auto HD) {
        with_bool(static_cast<size_t>(shared_limit) >= kAttentionLargeShared, [&](auto large) {
            using Tile = AttentionBackwardMma<HD.value, attention_backward_shape(HD.value, large.value, kFat)>;
            static_assert(Tile::kBytes <= (large.value ? kAttentionLargeShared : kAttentionSmallShared), "the backward tile does not fit the shared memory it is for");
            const dim3 grid(static_cast<unsigned>(parts.splits), args.NH, args.B);
            launch_attention(attention_backward_mma_kernel<Tile>, grid, Tile::kThreads, Tile::kBytes, stream, dk, dv, parts, dout, q, k, v, args.scale * kLog2e, args);
            launch(attention_dq_kernel, dim3(grid_for(rows * args.HD / 32, kThreads)), dim3(kThreads), 0, stream, dq, parts, Tile::kKeys, Tile::kQueries, args);
        });
    });
    if (parts.dk != nullptr) {
        const size_t count = static_cast<size_t>(args.B) * args.Tkv * args.NKV * (args.HD / 8);
        launch(attention_dkv_kernel, dim3(grid_for(count, kThreads)), dim3(kThreads), 0, stream, dk, dv, parts, args);
    }
}
