// Attention in fp32 arithmetic, without tensor cores: every head_dim, and the FP32 build. attention.cuh says what is computed; this file how.
//
// Work: 4 Tq Tkv HD flops a head forward, 14 backward (S and dP in both backward kernels), half of it under the causal mask. Scores live one tile at a time in
// shared memory. q, out and their gradients move once; k and v once for each tile of queries.
//
// The one scheme of the three kernels. A block owns kRows rows (queries; keys in the dk/dv kernel) and streams the other side past them,
// kCols columns at a time:
//   scores      Own rows are kept transposed in shared memory, a_t[d][row], the others as they are. A thread holds 8 rows x kColsPerThread
//               columns: a step in d is one 8-wide load, a broadcast of each column's element and 8-wide fused multiply-adds. The softmax works on
//               8 rows at once, so nothing is ever summed across a vector, and no warp shuffle is needed.
//   accumulate  The tile's weights come back from shared memory as p_t[column][row]; a thread holds kRowsPerThread rows x kSlices groups of 8
//               dims in registers through the whole kernel.
// Both phases are register-tiled products, which suits a GPU's and a CPU's arithmetic alike, and a CPU meets only two or three barriers a tile.
// All sums run in a fixed order and no two threads add to one place: same inputs, same bits.
#pragma once

#include "llmc/attention_args.cuh"

// ---- tiles ---------------------------------------------------------------------------------------------------------------------

// Few and fat threads: 8 x 8 products in registers. With 128 a CPU needs 1.4 times as long, for barriers and for what every thread does once.
inline constexpr int kAttentionThreads = 64;

template <int Rows, int Cols, int Slices>
struct AttentionTile {
    static constexpr int kRows = Rows, kCols = Cols;
    static constexpr int kSlices = Slices;    // groups of 8 dims a thread accumulates
    static constexpr int kMaxHD = Slices * 64;  // 8 threads side by side, 8 dims each
    static constexpr int kGroupThreads = kAttentionThreads / (kRows / 8);  // threads that share 8 rows when scoring
    static constexpr int kColsPerThread = kCols > kGroupThreads ? kCols / kGroupThreads : 1;
    static constexpr int kRowsPerThread = kRows / (kAttentionThreads / 8);
    // Partial sums of a dot product, so that at least four multiply-adds are in flight.
    static constexpr int kChains = kColsPerThread >= 4 ? 1 : 4 / kColsPerThread;
    // Padding by 4 floats keeps 16-byte alignment and spreads the rows that neighbouring threads read over the banks.
    static constexpr int kScoreStride = kRows + 4;
    static constexpr __host__ __device__ int stream_stride(int HD) { return HD + 4; }

    static_assert(kRows % 8 == 0 && kRowsPerThread >= 1 && kRowsPerThread * (kAttentionThreads / 8) == kRows,
                  "the rows of an attention tile are a multiple of 8: 64 threads accumulate, 8 side by side over the dims");
    static_assert(kCols % kGroupThreads == 0 || kCols < kGroupThreads, "the threads of 8 rows share the columns evenly");
    static_assert(kChains == 1 || kChains == 2 || kChains == 4, "partial sums split four dims evenly");

    // Floats of shared memory: own rows transposed, streamed rows, tiles of weights.
    static constexpr __host__ __device__ size_t own_count(int HD) { return static_cast<size_t>(kRows) * HD; }
    static constexpr __host__ __device__ size_t stream_count(int HD) { return static_cast<size_t>(kCols) * stream_stride(HD); }
    static constexpr size_t kWeightCount = static_cast<size_t>(kCols) * kScoreStride;
    static constexpr size_t kPartialCount = static_cast<size_t>(kGroupThreads) * kScoreStride;

    static constexpr size_t forward_bytes(int HD) {
        return sizeof(float) * (own_count(HD) + 2 * stream_count(HD) + kWeightCount + kPartialCount + kRows);
    }
    static constexpr size_t dq_bytes(int HD) { return sizeof(float) * (2 * own_count(HD) + 2 * stream_count(HD) + kWeightCount); }
    static constexpr size_t dkv_bytes(int HD) { return sizeof(float) * (2 * own_count(HD) + 2 * stream_count(HD) + 2 * kWeightCount); }
};

// Largest tiles that leave room for two blocks on an sm_80 multiprocessor (163 KiB) and fit an sm_89 card.
template <int Slices> struct AttentionForwardTile;
template <> struct AttentionForwardTile<1> { using Type = AttentionTile<64, 64, 1>; };
template <> struct AttentionForwardTile<2> { using Type = AttentionTile<64, 32, 2>; };
template <> struct AttentionForwardTile<4> { using Type = AttentionTile<32, 16, 4>; };
template <int Slices> struct AttentionBackwardTile;
template <> struct AttentionBackwardTile<1> { using Type = AttentionTile<64, 32, 1>; };
template <> struct AttentionBackwardTile<2> { using Type = AttentionTile<32, 32, 2>; };
template <> struct AttentionBackwardTile<4> { using Type = AttentionTile<16, 16, 4>; };

// ---- pieces of the kernels -----------------------------------------------------------------------------------------------------

struct AttentionSplit {
    int group;      // of 8 rows, when scoring
    int lane;       // among the threads of that group: columns lane, lane + kGroupThreads, ...
    bool scores;    // false where a tile has fewer columns than the group has threads
    int first_row;  // first of the rows accumulated
    int slice;      // first of the slices accumulated; the others are 8 further each
};

template <class Tile>
__device__ __forceinline__ AttentionSplit attention_split() {
    const int thread = threadIdx.x;
    AttentionSplit split;
    split.group = thread / Tile::kGroupThreads;
    split.lane = thread % Tile::kGroupThreads;
    split.scores = split.lane < Tile::kCols;
    split.first_row = thread / 8 * Tile::kRowsPerThread;
    split.slice = thread % 8;
    return split;
}

// a_t[d][row] = factor * x[row][d]; rows from `count` on are 0.
template <class Tile>
__device__ __forceinline__ void stage_transposed(float* a_t, const floatX* x, size_t x_row, int count, int HD, float factor) {
    // Neighbouring threads take neighbouring rows, so that the scattered stores meet no bank conflict.
    for (int i = threadIdx.x; i < Tile::kRows * (HD / 8); i += kAttentionThreads) {
        const int row = i % Tile::kRows, d = i / Tile::kRows * 8;
        const Float8 value = row < count ? load8(x + row * x_row + d) * factor : zero8();
        float* const to = a_t + d * Tile::kRows + row;
        UNROLL
        for (int j = 0; j < 8; j++) to[j * Tile::kRows] = value[j];
    }
}

// b[col][d] = factor * x[col][d]; columns from `count` on are 0, since 0 times what lies there must be 0.
template <class Tile>
__device__ __forceinline__ void stage_rows(float* b, const floatX* x, size_t x_row, int count, int HD, float factor) {
    const int chunks = HD / 8;
    for (int i = threadIdx.x; i < Tile::kCols * chunks; i += kAttentionThreads) {
        const int col = i / chunks, d = i % chunks * 8;
        store8(b + col * Tile::stream_stride(HD) + d, col < count ? load8(x + col * x_row + d) * factor : zero8());
    }
}

// s[j][i] = sum over d of a_t[d][8 group + i] * b[lane + j kGroupThreads][d]
template <class Tile>
__device__ __forceinline__ void tile_scores(Float8 (&s)[Tile::kColsPerThread], const float* a_t, const float* b, const AttentionSplit& split, int HD) {
    constexpr int kN = Tile::kColsPerThread, kChains = Tile::kChains;
    Float8 sum[kChains][kN];
    UNROLL
    for (int chain = 0; chain < kChains; chain++)
        UNROLL
        for (int j = 0; j < kN; j++) sum[chain][j] = zero8();
    a_t += 8 * split.group;
    b += split.lane * Tile::stream_stride(HD);
    const int col_step = Tile::kGroupThreads * Tile::stream_stride(HD);
    for (int d = 0; d < HD; d += 4) {
        const Float8 x0 = load8(a_t + (d + 0) * Tile::kRows), x1 = load8(a_t + (d + 1) * Tile::kRows);
        const Float8 x2 = load8(a_t + (d + 2) * Tile::kRows), x3 = load8(a_t + (d + 3) * Tile::kRows);
        // Column by column: loading all columns first makes g++ run out of registers.
        UNROLL
        for (int j = 0; j < kN; j++) {
            const float4 y = *reinterpret_cast<const float4*>(b + j * col_step + d);
            sum[0][j] = x0 * y.x + sum[0][j];
            sum[1 % kChains][j] = x1 * y.y + sum[1 % kChains][j];
            sum[2 % kChains][j] = x2 * y.z + sum[2 % kChains][j];
            sum[3 % kChains][j] = x3 * y.w + sum[3 % kChains][j];
        }
    }
    UNROLL
    for (int j = 0; j < kN; j++) {
        s[j] = sum[0][j];
        UNROLL
        for (int chain = 1; chain < kChains; chain++) s[j] = s[j] + sum[chain][j];
    }
}

// kCount floats, four at a time where they come in fours.
template <int kCount>
__device__ __forceinline__ void load_weights(float (&w)[kCount], const float* from) {
    if constexpr (kCount % 4 == 0) {
        UNROLL
        for (int i = 0; i < kCount; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(from + i);
            w[i] = four.x, w[i + 1] = four.y, w[i + 2] = four.z, w[i + 3] = four.w;
        }
    } else {
        UNROLL
        for (int i = 0; i < kCount; i++) w[i] = from[i];
    }
}

// acc[r][s] += sum over columns c in [begin, end) of w_t[c][first_row + r] * b[c][slice s]
template <class Tile>
__device__ __forceinline__ void tile_accumulate(Float8 (&acc)[Tile::kRowsPerThread][Tile::kSlices], const float* w_t, const float* b,
                                                const AttentionSplit& split, int begin, int end, int HD) {
    const int stride = Tile::stream_stride(HD);
    const int slices = HD / 8;
    w_t += split.first_row;
    for (int c = begin; c < end; c++) {
        float w[Tile::kRowsPerThread];
        load_weights(w, w_t + c * Tile::kScoreStride);
        UNROLL
        for (int s = 0; s < Tile::kSlices; s++) {
            const int slice = split.slice + 8 * s;
            if (slice < slices) {
                const Float8 y = load8(b + c * stride + 8 * slice);
                UNROLL
                for (int r = 0; r < Tile::kRowsPerThread; r++) acc[r][s] = y * w[r] + acc[r][s];
            }
        }
    }
}

template <class Tile>
__device__ __forceinline__ void zero_accumulators(Float8 (&acc)[Tile::kRowsPerThread][Tile::kSlices]) {
    UNROLL
    for (int r = 0; r < Tile::kRowsPerThread; r++)
        UNROLL
        for (int s = 0; s < Tile::kSlices; s++) acc[r][s] = zero8();
}

// x[row][slices] = acc * factor for the thread's rows below `count`
template <class Tile>
__device__ __forceinline__ void store_accumulators(floatX* x, size_t x_row, const Float8 (&acc)[Tile::kRowsPerThread][Tile::kSlices],
                                                   const AttentionSplit& split, int count, int HD, float factor) {
    UNROLL
    for (int r = 0; r < Tile::kRowsPerThread; r++) {
        const int row = split.first_row + r;
        UNROLL
        for (int s = 0; s < Tile::kSlices; s++) {
            const int slice = split.slice + 8 * s;
            if (row < count && slice < HD / 8) store8(x + row * x_row + 8 * slice, acc[r][s] * factor);
        }
    }
}

// ---- forward -------------------------------------------------------------------------------------------------------------------
// One block: kRows queries of one head. Two barriers a tile: the next keys are staged while the weights of this tile are made, the values of this
// tile likewise, because at that moment nobody reads either buffer.
template <class Tile>
__global__ void __launch_bounds__(kAttentionThreads)
    attention_forward_kernel(floatX* out, float* lse, const floatX* q, const floatX* k, const floatX* v, AttentionArgs args) {
    const int HD = args.HD, b = blockIdx.z, head = blockIdx.y, kv_head = head / (args.NH / args.NKV);
    const int first_query = (gridDim.x - 1 - blockIdx.x) * Tile::kRows;  // the longest rows first
    const int num_queries = min(Tile::kRows, args.Tq - first_query);
    const int diagonal = args.Tkv - args.Tq;  // query i sees keys up to i + diagonal
    const int key_begin = first_key_seen(args, b, first_query, num_queries);
    const int key_end = diagonal + first_query + num_queries;

    q += b * args.q_batch + first_query * args.q_row + static_cast<size_t>(head) * HD;
    k += b * args.k_batch + static_cast<size_t>(kv_head) * HD;
    v += b * args.v_batch + static_cast<size_t>(kv_head) * HD;
    out += b * args.o_batch + first_query * args.o_row + static_cast<size_t>(head) * HD;
    lse += (static_cast<size_t>(b) * args.NH + head) * args.Tq + first_query;

    float* const q_t = dynamic_shared<float>();                // [HD][kRows]
    float* const keys = q_t + Tile::own_count(HD);             // [kCols][HD + 4]
    float* const values = keys + Tile::stream_count(HD);       // [kCols][HD + 4]
    float* const weights = values + Tile::stream_count(HD);    // [kCols][kRows + 4]
    float* const partial = weights + Tile::kWeightCount;       // [kGroupThreads][kRows + 4]: maxima, at last sums, of a thread's own columns
    float* const rescale = partial + Tile::kPartialCount;      // [kRows]

    const AttentionSplit split = attention_split<Tile>();
    float* const my_partial = partial + split.lane * Tile::kScoreStride + 8 * split.group;
    const float* const group_partials = partial + 8 * split.group;

    int start[8];  // first key of each scored row
    UNROLL
    for (int i = 0; i < 8; i++) {
        const int query = first_query + min(8 * split.group + i, num_queries - 1);
        start[i] = args.key_start == nullptr ? 0 : args.key_start[static_cast<size_t>(b) * args.Tq + query];
    }
    Float8 row_max = set8(-INFINITY);  // of the scores so far; the same in all threads of the group
    Float8 row_sum = zero8();          // of the weights of this thread's columns
    Float8 acc[Tile::kRowsPerThread][Tile::kSlices];
    zero_accumulators<Tile>(acc);

    stage_transposed<Tile>(q_t, q, args.q_row, num_queries, HD, args.scale);
    if (key_begin < key_end) stage_rows<Tile>(keys, k + key_begin * args.k_row, args.k_row, min(Tile::kCols, key_end - key_begin), HD, 1.0f);
    __syncthreads();

    for (int key = key_begin; key < key_end; key += Tile::kCols) {
        const int num_keys = min(Tile::kCols, key_end - key);
        Float8 s[Tile::kColsPerThread];
        if (split.scores) {
            tile_scores<Tile>(s, q_t, keys, split, HD);
            const int row_end = diagonal + first_query + 8 * split.group;  // last key of the group's first query
            if (args.key_start != nullptr || key + Tile::kCols - 1 > row_end) {
                UNROLL
                for (int j = 0; j < Tile::kColsPerThread; j++) {
                    const int my_key = key + split.lane + j * Tile::kGroupThreads;
                    UNROLL
                    for (int i = 0; i < 8; i++) s[j][i] = my_key > row_end + i || my_key < start[i] ? -INFINITY : s[j][i];
                }
            }
            Float8 largest = s[0];
            UNROLL
            for (int j = 1; j < Tile::kColsPerThread; j++) largest = max8(largest, s[j]);
            store8(my_partial, largest);
        }
        __syncthreads();

        if (split.scores) {
            Float8 new_max = row_max;
            for (int lane = 0; lane < min(Tile::kGroupThreads, Tile::kCols); lane++)
                new_max = max8(new_max, load8(group_partials + lane * Tile::kScoreStride));
            // While a row has seen no key its maximum is -infinity, and -infinity less itself would be no number.
            Float8 reference = new_max;
            UNROLL
            for (int i = 0; i < 8; i++) reference[i] = new_max[i] == -INFINITY ? 0.0f : new_max[i];
            const Float8 shrink = exp8(row_max - reference);
            row_max = new_max;
            row_sum = row_sum * shrink;
            UNROLL
            for (int j = 0; j < Tile::kColsPerThread; j++) {
                const Float8 weight = exp8(s[j] - reference);
                row_sum = row_sum + weight;
                store8(weights + (split.lane + j * Tile::kGroupThreads) * Tile::kScoreStride + 8 * split.group, weight);
            }
            if (split.lane == 0) store8(rescale + 8 * split.group, shrink);
        }
        stage_rows<Tile>(values, v + key * args.v_row, args.v_row, num_keys, HD, 1.0f);
        const int next_key = key + Tile::kCols;
        if (next_key < key_end) stage_rows<Tile>(keys, k + next_key * args.k_row, args.k_row, min(Tile::kCols, key_end - next_key), HD, 1.0f);
        __syncthreads();

        UNROLL
        for (int r = 0; r < Tile::kRowsPerThread; r++) {
            const Float8 shrink = set8(rescale[split.first_row + r]);
            UNROLL
            for (int s = 0; s < Tile::kSlices; s++) acc[r][s] = acc[r][s] * shrink;
        }
        // Keys beyond the last of these queries have weight 0; they are not worth adding.
        const int last_key = diagonal + first_query + split.first_row + Tile::kRowsPerThread - 1;
        tile_accumulate<Tile>(acc, weights, values, split, 0, min(num_keys, last_key + 1 - key), HD);
    }

    if (split.scores) store8(my_partial, row_sum);
    __syncthreads();
    if (split.scores && split.lane == 0) {
        Float8 sum = load8(group_partials);
        for (int lane = 1; lane < min(Tile::kGroupThreads, Tile::kCols); lane++) sum = sum + load8(group_partials + lane * Tile::kScoreStride);
        UNROLL
        for (int i = 0; i < 8; i++) {
            const int row = 8 * split.group + i;
            if (row < num_queries) lse[row] = sum[i] == 0.0f ? -INFINITY : row_max[i] + logf(sum[i]);
        }
    }
    UNROLL
    for (int r = 0; r < Tile::kRowsPerThread; r++) {
        float sum = partial[split.first_row + r];
        for (int lane = 1; lane < min(Tile::kGroupThreads, Tile::kCols); lane++) sum += partial[lane * Tile::kScoreStride + split.first_row + r];
        // Only a row without a key sums to 0: the largest weight of any other is 1. A NaN stays one.
        const Float8 inverse = set8(sum == 0.0f ? 0.0f : 1.0f / sum);
        UNROLL
        for (int s = 0; s < Tile::kSlices; s++) acc[r][s] = acc[r][s] * inverse;
    }
    store_accumulators<Tile>(out, args.o_row, acc, split, num_queries, HD, 1.0f);
}

// ---- backward ------------------------------------------------------------------------------------------------------------------
// With P = exp(S - lse), dP = dout v^T and D = rowsum(dout * out):  dS = P (dP - D),  dq = scale dS k,  dk = scale dS^T q,  dv = P^T dout.

// row_dot (B,NH,Tq) = sum over dims of dout * out. One thread a row; neighbouring threads read neighbouring heads.
__global__ void attention_row_dot_kernel(float* row_dot, const floatX* dout, const floatX* out, AttentionArgs args) {
    const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= static_cast<size_t>(args.B) * args.Tq * args.NH) return;
    const size_t head = i % args.NH, query = i / args.NH % args.Tq, b = i / args.NH / args.Tq;
    row_dot[(b * args.NH + head) * args.Tq + query] = attention_row_dot(dout, out, args, b, query, head);
}

// One block: kRows queries of one head, all the keys they see.
template <class Tile>
__global__ void __launch_bounds__(kAttentionThreads)
    attention_backward_dq_kernel(floatX* dq, const floatX* dout, const floatX* q, const floatX* k, const floatX* v, const float* lse,
                                 const float* row_dot, AttentionArgs args) {
    const int HD = args.HD, b = blockIdx.z, head = blockIdx.y, kv_head = head / (args.NH / args.NKV);
    const int first_query = (gridDim.x - 1 - blockIdx.x) * Tile::kRows;
    const int num_queries = min(Tile::kRows, args.Tq - first_query);
    const int diagonal = args.Tkv - args.Tq;
    const int key_begin = first_key_seen(args, b, first_query, num_queries);
    const int key_end = diagonal + first_query + num_queries;

    q += b * args.q_batch + first_query * args.q_row + static_cast<size_t>(head) * HD;
    dout += b * args.do_batch + first_query * args.do_row + static_cast<size_t>(head) * HD;
    dq += b * args.dq_batch + first_query * args.dq_row + static_cast<size_t>(head) * HD;
    k += b * args.k_batch + static_cast<size_t>(kv_head) * HD;
    v += b * args.v_batch + static_cast<size_t>(kv_head) * HD;
    lse += (static_cast<size_t>(b) * args.NH + head) * args.Tq + first_query;
    row_dot += (static_cast<size_t>(b) * args.NH + head) * args.Tq + first_query;

    float* const q_t = dynamic_shared<float>();              // [HD][kRows]
    float* const dout_t = q_t + Tile::own_count(HD);         // [HD][kRows]
    float* const keys = dout_t + Tile::own_count(HD);        // [kCols][HD + 4]
    float* const values = keys + Tile::stream_count(HD);     // [kCols][HD + 4]
    float* const weights = values + Tile::stream_count(HD);  // [kCols][kRows + 4]: dS

    const AttentionSplit split = attention_split<Tile>();
    int start[8];
    Float8 row_lse, row_d;
    UNROLL
    for (int i = 0; i < 8; i++) {
        const int row = 8 * split.group + i;
        start[i] = args.key_start == nullptr ? 0 : args.key_start[static_cast<size_t>(b) * args.Tq + first_query + min(row, num_queries - 1)];
        row_lse[i] = row < num_queries ? usable_lse(lse[row]) : INFINITY;
        row_d[i] = row < num_queries ? row_dot[row] : 0.0f;
    }
    Float8 acc[Tile::kRowsPerThread][Tile::kSlices];
    zero_accumulators<Tile>(acc);

    stage_transposed<Tile>(q_t, q, args.q_row, num_queries, HD, args.scale);
    stage_transposed<Tile>(dout_t, dout, args.do_row, num_queries, HD, 1.0f);
    for (int key = key_begin; key < key_end; key += Tile::kCols) {
        const int num_keys = min(Tile::kCols, key_end - key);
        stage_rows<Tile>(keys, k + key * args.k_row, args.k_row, num_keys, HD, 1.0f);
        stage_rows<Tile>(values, v + key * args.v_row, args.v_row, num_keys, HD, 1.0f);
        __syncthreads();

        if (split.scores) {
            Float8 s[Tile::kColsPerThread], dp[Tile::kColsPerThread];
            tile_scores<Tile>(s, q_t, keys, split, HD);
            tile_scores<Tile>(dp, dout_t, values, split, HD);
            const int row_end = diagonal + first_query + 8 * split.group;
            const bool masked = args.key_start != nullptr || key + Tile::kCols - 1 > row_end;
            UNROLL
            for (int j = 0; j < Tile::kColsPerThread; j++) {
                const int my_key = key + split.lane + j * Tile::kGroupThreads;
                if (masked) {
                    UNROLL
                    for (int i = 0; i < 8; i++) s[j][i] = my_key > row_end + i || my_key < start[i] ? -INFINITY : s[j][i];
                }
                store8(weights + (split.lane + j * Tile::kGroupThreads) * Tile::kScoreStride + 8 * split.group, exp8(s[j] - row_lse) * (dp[j] - row_d));
            }
        }
        __syncthreads();

        const int last_key = diagonal + first_query + split.first_row + Tile::kRowsPerThread - 1;
        tile_accumulate<Tile>(acc, weights, keys, split, 0, min(num_keys, last_key + 1 - key), HD);
        __syncthreads();  // before the next tile overwrites the keys
    }
    store_accumulators<Tile>(dq, args.dq_row, acc, split, num_queries, HD, args.scale);
}

// One block: kRows keys of one key/value head, all queries that see them, of each query head of the group in turn.
template <class Tile>
__global__ void __launch_bounds__(kAttentionThreads)
    attention_backward_dkv_kernel(floatX* dk, floatX* dv, const floatX* dout, const floatX* q, const floatX* k, const floatX* v, const float* lse,
                                  const float* row_dot, AttentionArgs args) {
    const int HD = args.HD, b = blockIdx.z, kv_head = blockIdx.y, heads = args.NH / args.NKV;
    const int first_key = blockIdx.x * Tile::kRows;  // the first keys are seen most: longest first
    const int num_keys = min(Tile::kRows, args.Tkv - first_key);
    const int diagonal = args.Tkv - args.Tq;
    const int query_begin = max(0, first_key - diagonal);

    k += b * args.k_batch + first_key * args.k_row + static_cast<size_t>(kv_head) * HD;
    v += b * args.v_batch + first_key * args.v_row + static_cast<size_t>(kv_head) * HD;
    dk += b * args.dk_batch + first_key * args.dk_row + static_cast<size_t>(kv_head) * HD;
    dv += b * args.dv_batch + first_key * args.dv_row + static_cast<size_t>(kv_head) * HD;

    float* const k_t = dynamic_shared<float>();               // [HD][kRows]
    float* const v_t = k_t + Tile::own_count(HD);             // [HD][kRows]
    float* const queries = v_t + Tile::own_count(HD);         // [kCols][HD + 4], times scale
    float* const douts = queries + Tile::stream_count(HD);    // [kCols][HD + 4]
    float* const p_t = douts + Tile::stream_count(HD);        // [kCols][kRows + 4]
    float* const ds_t = p_t + Tile::kWeightCount;             // [kCols][kRows + 4]

    const AttentionSplit split = attention_split<Tile>();
    Float8 dk_acc[Tile::kRowsPerThread][Tile::kSlices], dv_acc[Tile::kRowsPerThread][Tile::kSlices];
    zero_accumulators<Tile>(dk_acc);
    zero_accumulators<Tile>(dv_acc);

    stage_transposed<Tile>(k_t, k, args.k_row, num_keys, HD, 1.0f);
    stage_transposed<Tile>(v_t, v, args.v_row, num_keys, HD, 1.0f);
    for (int head = kv_head * heads; head < (kv_head + 1) * heads; head++) {
        const floatX* const head_q = q + b * args.q_batch + static_cast<size_t>(head) * HD;
        const floatX* const head_dout = dout + b * args.do_batch + static_cast<size_t>(head) * HD;
        const size_t stats = (static_cast<size_t>(b) * args.NH + head) * args.Tq;
        for (int query = query_begin; query < args.Tq; query += Tile::kCols) {
            const int num_queries = min(Tile::kCols, args.Tq - query);
            // A packed document that begins after these keys.
            if (first_key_seen(args, b, query, num_queries) >= first_key + num_keys) continue;
            stage_rows<Tile>(queries, head_q + query * args.q_row, args.q_row, num_queries, HD, args.scale);
            stage_rows<Tile>(douts, head_dout + query * args.do_row, args.do_row, num_queries, HD, 1.0f);
            __syncthreads();

            if (split.scores) {
                Float8 s[Tile::kColsPerThread], dp[Tile::kColsPerThread];
                tile_scores<Tile>(s, k_t, queries, split, HD);
                tile_scores<Tile>(dp, v_t, douts, split, HD);
                const int group_key = first_key + 8 * split.group;
                UNROLL
                for (int j = 0; j < Tile::kColsPerThread; j++) {
                    const int col = split.lane + j * Tile::kGroupThreads;
                    const bool real = col < num_queries;
                    const float col_lse = real ? usable_lse(lse[stats + query + col]) : INFINITY;
                    const float col_d = real ? row_dot[stats + query + col] : 0.0f;
                    const int start = real && args.key_start != nullptr ? args.key_start[static_cast<size_t>(b) * args.Tq + query + col] : 0;
                    const int end = diagonal + query + col;
                    if (group_key + 7 > end || group_key < start) {
                        UNROLL
                        for (int i = 0; i < 8; i++) s[j][i] = group_key + i > end || group_key + i < start ? -INFINITY : s[j][i];
                    }
                    const Float8 p = exp8(s[j] - col_lse);
                    store8(p_t + col * Tile::kScoreStride + 8 * split.group, p);
                    store8(ds_t + col * Tile::kScoreStride + 8 * split.group, p * (dp[j] - col_d));
                }
            }
            __syncthreads();

            // Queries before the first of this thread's keys have weight 0.
            const int first_col = max(0, first_key + split.first_row - diagonal - query);
            tile_accumulate<Tile>(dv_acc, p_t, douts, split, first_col, num_queries, HD);
            tile_accumulate<Tile>(dk_acc, ds_t, queries, split, first_col, num_queries, HD);
            __syncthreads();  // before the next tile overwrites queries and douts
        }
    }
    store_accumulators<Tile>(dv, args.dv_row, dv_acc, split, num_keys, HD, 1.0f);
    store_accumulators<Tile>(dk, args.dk_row, dk_acc, split, num_keys, HD, 1.0f);
}

// ---- launchers: args are checked and whole -------------------------------------------------------------------------------------------

// Calls function(tile constant) with the number of slices that head_dim needs.
template <typename Function>
inline void with_attention_slices(int HD, Function&& function) {
    if (HD <= 64) {
        function(std::integral_constant<int, 1>{});
    } else if (HD <= 128) {
        function(std::integral_constant<int, 2>{});
    } else {
        function(std::integral_constant<int, 4>{});
    }
}

inline void attention_forward_plain(floatX* out, float* lse, const floatX* q, const floatX* k, const floatX* v, const AttentionArgs& args, cudaStream_t stream) {
    with_attention_slices(args.HD, [&](auto slices) {
        using Tile = typename AttentionForwardTile<slices.value>::Type;
        static_assert(Tile::forward_bytes(Tile::kMaxHD) <= kAttentionSmallShared, "the forward tile does not fit the shared memory of an sm_89 card");
        const dim3 grid(ceil_div(args.Tq, Tile::kRows), args.NH, args.B);
        launch_attention(attention_forward_kernel<Tile>, grid, kAttentionThreads, Tile::forward_bytes(args.HD), stream, out, lse, q, k, v, args);
    });
}

// Floats of scratch.
inline size_t attention_backward_plain_scratch_count(const AttentionArgs& args) { return static_cast<size_t>(args.B) * args.NH * args.Tq; }

inline void attention_backward_plain(floatX* dq, floatX* dk, floatX* dv, float* scratch, const floatX* dout, const floatX* q, const floatX* k, const floatX* v,
                                     const floatX* out, const float* lse, const AttentionArgs& args, cudaStream_t stream) {
    const size_t rows = attention_backward_plain_scratch_count(args);
    launch(attention_row_dot_kernel, dim3(grid_for(rows, kAttentionThreads)), dim3(kAttentionThreads), 0, stream, scratch, dout, out, args);
    with_attention_slices(args.HD, [&](auto slices) {
        using Tile = typename AttentionBackwardTile<slices.value>::Type;
        static_assert(Tile::dkv_bytes(Tile::kMaxHD) <= kAttentionSmallShared && Tile::dq_bytes(Tile::kMaxHD) <= kAttentionSmallShared,
                      "the backward tiles do not fit the shared memory of an sm_89 card");
        const dim3 query_grid(ceil_div(args.Tq, Tile::kRows), args.NH, args.B);
        launch_attention(attention_backward_dq_kernel<Tile>, query_grid, kAttentionThreads, Tile::dq_bytes(args.HD), stream, dq, dout, q, k, v, lse, scratch, args);
        const dim3 key_grid(ceil_div(args.Tkv, Tile::kRows), args.NKV, args.B);
        launch_attention(attention_backward_dkv_kernel<Tile>, key_grid, kAttentionThreads, Tile::dkv_bytes(args.HD), stream, dk, dv, dout, q, k, v, lse, scratch, args);
    });
}
