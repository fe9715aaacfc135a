// Instructions that CUDA C++ has no word for, each with its twin on a CPU: copies to shared memory that run by themselves, tensor-core products of
// one warp, 2^x.
//
// Names: cp_async_16, cp_async_commit, cp_async_wait; ldmatrix_x4, ldmatrix_x4_transposed, mma_m16n8k16; Fragment, to_fragment, store_fragment,
//        FragmentsA, SharedA, SharedB, Stored, set_product, add_product, warp_mma, product_by_instructions; quad_max, quad_sum, row_pair8; exp2_8.
//
// Lane layouts (PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type" and "ldmatrix"). In lane l, g = l / 4 and t = l % 4:
//
//   A (16 x 16, bf16)   four registers of two neighbouring columns:   reg 0: row g,     columns 2t, 2t + 1     reg 2: row g,     columns 2t + 8, 2t + 9
//                                                                     reg 1: row g + 8, columns 2t, 2t + 1     reg 3: row g + 8, columns 2t + 8, 2t + 9
//   B (16 x 8, bf16)    two registers of two neighbouring depths:     reg 0: depths 2t, 2t + 1, column g       reg 1: depths 2t + 8, 2t + 9, column g
//   C (16 x 8, fp32)    four floats:                                  0, 1:  row g,     columns 2t, 2t + 1     2, 3:  row g + 8, columns 2t, 2t + 1
//   ldmatrix x4         lane l brings the address of row l % 8 (16 bytes) of 8 x 8 matrix l / 8; register i of a lane is row g, columns 2t, 2t + 1 of
//                       matrix i, or of its transpose.
//
// Two C side by side (16 x 16) are one Float8, and rounded to bf16 its eight elements are an A in the same order: what one product made is the next
// one's left side without a move. So everything here is counted in 16 x 16 tiles.
//
// warp_mma is the batched form: products of whole tiles. On a GPU it unrolls into ldmatrix and mma (product_by_instructions, which a CPU can run, too, and a test
// does); on a CPU the lanes meet once for all of them, and the last one computes them with vectors as wide as the machine's, each element's sum in the order of
// depth.
#pragma once

#include "llmc/device.cuh"

// Eight bf16 of a 16 x 16 tile in each lane: an A, or two B.
struct alignas(16) Fragment {
    unsigned reg[4];
};

// How an operand lies in shared memory. Its "row" is a row of A or a column of B; its depth is what the product sums over.
enum class Stored {
    kByRow,    // (row, depth) at base[row * stride + depth]
    kByDepth,  // (row, depth) at base[depth * stride + row]
};

// A product's left side in registers: 16 MT rows, depth 16 KT.
template <int MT, int KT>
struct FragmentsA {
    Fragment tile[MT][KT];
};

#ifdef __CUDACC__

// Whether a kernel is better off with few warps that have much to do: not here, where a lane's variables must fit its registers.
inline constexpr bool kFatWarps = false;

// threadIdx.x, read anew: what is made of it in a loop is not kept in registers around the loop, where those are scarce.
__device__ __forceinline__ unsigned fresh_thread_index() {
    unsigned index;
    asm volatile("mov.u32 %0, %%tid.x;\n" : "=r"(index));
    return index;
}
__device__ __forceinline__ int fresh_lane() { return static_cast<int>(fresh_thread_index() % kWarpSize); }
__device__ __forceinline__ int fresh_warp() { return static_cast<int>(fresh_thread_index() / kWarpSize); }

// ---- asynchronous copies ---------------------------------------------------------------------------------------------------------

// A place in shared memory as instructions take it, and the one `elements` of bf16 further.
using SharedAddress = unsigned;
__device__ __forceinline__ SharedAddress shared_address(const void* pointer) { return static_cast<unsigned>(__cvta_generic_to_shared(pointer)); }
__device__ __forceinline__ SharedAddress shared_address(SharedAddress from, int elements) { return from + 2 * elements; }

// Starts copying 16 bytes, past the L1 cache; zeros instead of them where `valid` is false, and then `global` is not read.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(shared)), "l"(global), "r"(valid ? 16 : 0));
}

// What this thread started since its last commit is one group.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Waits for all but this thread's latest kPending groups. The other threads see the data after a barrier.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// ---- one instruction ---------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ Fragment ldmatrix_x4(SharedAddress address) {
    Fragment f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n" : "=r"(f.reg[0]), "=r"(f.reg[1]), "=r"(f.reg[2]), "=r"(f.reg[3]) : "r"(address));
    return f;
}
__device__ __forceinline__ Fragment ldmatrix_x4_transposed(SharedAddress address) {
    Fragment f;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
                 : "=r"(f.reg[0]), "=r"(f.reg[1]), "=r"(f.reg[2]), "=r"(f.reg[3])
                 : "r"(address));
    return f;
}
__device__ __forceinline__ Fragment ldmatrix_x4(const __nv_bfloat16* row) { return ldmatrix_x4(shared_address(row)); }
__device__ __forceinline__ Fragment ldmatrix_x4_transposed(const __nv_bfloat16* row) { return ldmatrix_x4_transposed(shared_address(row)); }

// c += a b; c[0 .. 3] is the 16 x 8 tile in fp32.
__device__ __forceinline__ void mma_m16n8k16(float* c, const Fragment& a, unsigned b0, unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a.reg[0]), "r"(a.reg[1]), "r"(a.reg[2]), "r"(a.reg[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ Fragment to_fragment(const Float8& x) {
    Fragment f;
    pack_bf16(f.reg, x);
    return f;
}

#else  // a CPU

// A lane's variables are memory, and each meeting of the lanes costs 10 to 15 ns a lane.
inline constexpr bool kFatWarps = true;

inline unsigned fresh_thread_index() { return threadIdx.x; }
inline int fresh_lane() { return static_cast<int>(threadIdx.x % kWarpSize); }
inline int fresh_warp() { return static_cast<int>(threadIdx.x / kWarpSize); }

using SharedAddress = const __nv_bfloat16*;
inline SharedAddress shared_address(SharedAddress pointer) { return pointer; }
inline SharedAddress shared_address(SharedAddress from, int elements) { return from + elements; }

// ---- asynchronous copies: hostcuda's, which land at the wait where that is asked for ---------------------------------------------------

inline void cp_async_16(void* shared, const void* global, bool valid) { ::hostcuda::async_copy(shared, global, 16, valid ? 16 : 0); }
inline void cp_async_commit() { ::hostcuda::async_copy_commit(); }
template <int kPending>
inline void cp_async_wait() {
    ::hostcuda::async_copy_wait(kPending);
}

inline Fragment to_fragment(Float8 x) {
    Fragment f;
    store8(reinterpret_cast<__nv_bfloat16*>(f.reg), x);
    return f;
}
inline Float8 from_fragment(const Fragment& f) { return load8(reinterpret_cast<const __nv_bfloat16*>(f.reg)); }

// ---- one instruction: the lanes meet, the last one computes for all -------------------------------------------------------------------

struct LdmatrixArgs {
    const __nv_bfloat16* row;
    Fragment result;
};

template <bool kTransposed>
inline void compute_ldmatrix(void** lane_args, unsigned) {
    const auto args = [&](int lane) { return static_cast<LdmatrixArgs*>(lane_args[lane]); };
    for (int lane = 0; lane < kWarpSize; lane++) ::hostcuda::check_aligned(args(lane)->row, 16);
    for (int lane = 0; lane < kWarpSize; lane++) {
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++) {
            for (int j = 0; j < 2; j++) {
                const int row = kTransposed ? 2 * t + j : g, column = kTransposed ? g : 2 * t + j;
                memcpy(reinterpret_cast<char*>(&args(lane)->result.reg[i]) + 2 * j, args(8 * i + row)->row + column, 2);
            }
        }
    }
}

inline Fragment ldmatrix_x4(const __nv_bfloat16* row) {
    LdmatrixArgs args{row, {}};
    ::hostcuda::warp_collective(0xffffffffu, &args, compute_ldmatrix<false>, "ldmatrix");
    return args.result;
}
inline Fragment ldmatrix_x4_transposed(const __nv_bfloat16* row) {
    LdmatrixArgs args{row, {}};
    ::hostcuda::warp_collective(0xffffffffu, &args, compute_ldmatrix<true>, "ldmatrix.trans");
    return args.result;
}

struct MmaArgs {
    float* c;
    Fragment a;
    unsigned b[2];
};

// The low or the high half of a register, a bfloat16, as a float.
inline float half_of(unsigned reg, int high) {
    const unsigned bits = high != 0 ? reg & 0xffff0000u : reg << 16;
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

inline void compute_mma(void** lane_args, unsigned) {
    float a[16][16], b[16][8];
    const auto args = [&](int lane) { return static_cast<MmaArgs*>(lane_args[lane]); };
    for (int lane = 0; lane < kWarpSize; lane++) {
        const int g = lane / 4, t = lane % 4;
        for (int j = 0; j < 2; j++) {
            for (int i = 0; i < 4; i++) a[g + i % 2 * 8][2 * t + j + i / 2 * 8] = half_of(args(lane)->a.reg[i], j);
            for (int i = 0; i < 2; i++) b[2 * t + j + 8 * i][g] = half_of(args(lane)->b[i], j);
        }
    }
    for (int lane = 0; lane < kWarpSize; lane++) {
        for (int i = 0; i < 4; i++) {
            const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
            for (int k = 0; k < 16; k++) args(lane)->c[i] += a[row][k] * b[k][column];
        }
    }
}

inline void mma_m16n8k16(float* c, const Fragment& a, unsigned b0, unsigned b1) {
    MmaArgs args{c, a, {b0, b1}};
    ::hostcuda::warp_collective(0xffffffffu, &args, compute_mma, "mma");
}

#endif

// ---- products of whole tiles ---------------------------------------------------------------------------------------------------------

// One side of a product in shared memory; the "rows" of the right side are its columns. base and rows lie on multiples of 16 bytes; a stride of an odd number of
// 16 bytes meets no bank conflict. The two sides want the second and third of a tile's 8 x 8 matrices in opposite order, and so do the two ways to store one.
template <bool kLeft, Stored kStored_, int kStride_>
struct SharedSide {
    static constexpr Stored kStored = kStored_;
    static constexpr int kStride = kStride_;
    SharedAddress row;  // what this lane brings to ldmatrix for the first tile
    __device__ __forceinline__ explicit SharedSide(const __nv_bfloat16* base) {
        const int lane = fresh_lane();
        if constexpr (kLeft == (kStored == Stored::kByRow)) {
            row = shared_address(base + lane % 16 * kStride + lane / 16 * 8);
        } else {
            row = shared_address(base + (lane / 16 * 8 + lane % 8) * kStride + lane / 8 % 2 * 8);
        }
    }
    // Tile `tile` of the rows, k of the depth.
    __device__ __forceinline__ Fragment load(int tile, int k) const {
        if constexpr (kStored == Stored::kByRow) {
            return ldmatrix_x4(shared_address(row, 16 * tile * kStride + 16 * k));
        } else {
            return ldmatrix_x4_transposed(shared_address(row, 16 * k * kStride + 16 * tile));
        }
    }
};
template <Stored kStored, int kStride>
using SharedA = SharedSide<true, kStored, kStride>;
template <Stored kStored, int kStride>
using SharedB = SharedSide<false, kStored, kStride>;

template <int MT, int KT>
__device__ __forceinline__ Fragment load_a(const FragmentsA<MT, KT>& a, int m, int k) { return a.tile[m][k]; }
template <Stored kStored, int kStride>
__device__ __forceinline__ Fragment load_a(const SharedA<kStored, kStride>& a, int m, int k) { return a.load(m, k); }

// A product of whole tiles: acc (16 MT x 16 NT) = or, with kAdd, += A (16 MT x 16 KT) B (16 KT x 16 NT); only the first depth_tiles and column_tiles are
// computed, the same in all lanes.
template <int KT, bool kAdd, int MT, int NT, class A, class B>
struct WarpProduct {
    Float8 (&acc)[MT][NT];
    const A& a;
    const B& b;
    int depth_tiles, column_tiles;
};

template <int KT, int MT, int NT, class A, class B>
__device__ __forceinline__ WarpProduct<KT, false, MT, NT, A, B> set_product(Float8 (&acc)[MT][NT], const A& a, const B& b) {
    return {acc, a, b, KT, NT};
}
template <int KT, int MT, int NT, class A, class B>
__device__ __forceinline__ WarpProduct<KT, true, MT, NT, A, B> add_product(Float8 (&acc)[MT][NT], const A& a, const B& b, int depth_tiles = KT, int column_tiles = NT) {
    return {acc, a, b, depth_tiles, column_tiles};
}

// One product, instruction by instruction.
template <int KT, bool kAdd, int MT, int NT, class A, class B>
__device__ __forceinline__ void product_by_instructions(const WarpProduct<KT, kAdd, MT, NT, A, B>& product) {
    if constexpr (!kAdd) {
        UNROLL
        for (int m = 0; m < MT; m++)
            UNROLL
            for (int n = 0; n < NT; n++) product.acc[m][n] = zero8();
    }
    UNROLL
    for (int k = 0; k < KT; k++) {
        if (k >= product.depth_tiles) break;
        Fragment left[MT];
        UNROLL
        for (int m = 0; m < MT; m++) left[m] = load_a(product.a, m, k);
        UNROLL
        for (int n = 0; n < NT; n++) {
            if (n >= product.column_tiles) break;
            const Fragment right = product.b.load(n, k);
            UNROLL
            for (int m = 0; m < MT; m++) {
                mma_m16n8k16(reinterpret_cast<float*>(&product.acc[m][n]), left[m], right.reg[0], right.reg[1]);
                mma_m16n8k16(reinterpret_cast<float*>(&product.acc[m][n]) + 4, left[m], right.reg[2], right.reg[3]);
            }
        }
    }
}

#ifdef __CUDACC__

template <class... Products>
__device__ __forceinline__ void warp_mma(const Products&... products) {
    (product_by_instructions(products), ...);
}

// ---- the four lanes of a row --------------------------------------------------------------------------------------------------------

template <int N>
__device__ __forceinline__ void quad_max(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = fmaxf(x[i], __shfl_xor_sync(0xffffffffu, x[i], 1));
        x[i] = fmaxf(x[i], __shfl_xor_sync(0xffffffffu, x[i], 2));
    }
}

template <int N>
__device__ __forceinline__ void quad_sum(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] += __shfl_xor_sync(0xffffffffu, x[i], 1);
        x[i] += __shfl_xor_sync(0xffffffffu, x[i], 2);
    }
}

// ---- 2^x ---------------------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_approximately(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(x));
    return result;
}

// Within 2 ulp of the correctly rounded result (PTX ISA, ex2.approx.ftz.f32); a result below 2^-126 is 0. NaN and infinities as they should be.
__device__ __forceinline__ Float8 exp2_8(const Float8& x) {
    Float8 result;
#pragma unroll
    for (int i = 0; i < 8; i++) result[i] = exp2_approximately(x[i]);
    return result;
}

// x[i] = 2^(x[i] factor - minus[i]), N vectors
template <int N>
__device__ __forceinline__ void exp2_scaled(Float8* x, float factor, const Float8* minus) {
#pragma unroll
    for (int i = 0; i < N; i++) x[i] = exp2_8(fma8(x[i], set8(factor), -minus[i]));
}

template <int N>
__device__ __forceinline__ void to_fragments(Fragment* f, const Float8* x) {
#pragma unroll
    for (int i = 0; i < N; i++) f[i] = to_fragment(x[i]);
}

#else  // a CPU: the lanes meet once for all products, the last one computes them

// Vectors of one or two tiles' worth of eight floats. With two, machines with AVX-512 take neighbouring tiles together.
template <int kTiles>
struct TileVector;
template <>
struct TileVector<1> { typedef float Type __attribute__((vector_size(32))); typedef uint32_t Bits __attribute__((vector_size(32))); typedef uint16_t Halves __attribute__((vector_size(16))); };
template <>
struct TileVector<2> { typedef float Type __attribute__((vector_size(64))); typedef uint32_t Bits __attribute__((vector_size(64))); typedef uint16_t Halves __attribute__((vector_size(32))); };
#ifdef __AVX512F__
inline constexpr int kWideTiles = 2, kVectorRegisters = 32;
#else
inline constexpr int kWideTiles = 1, kVectorRegisters = 16;
#endif
inline constexpr int tiles_together(int count) { return count % kWideTiles == 0 ? kWideTiles : 1; }

template <class V, class T>
inline V load_as(const T* from) {
    V x;
    memcpy(&x, from, sizeof(x));
    return x;
}
template <class V, class T>
inline void store_as(T* to, const V& x) {
    memcpy(to, &x, sizeof(x));
}
// 8 kTiles bf16 at `from` as floats.
template <int kTiles>
inline typename TileVector<kTiles>::Type load_bf16(const void* from) {
    const auto raw = load_as<typename TileVector<kTiles>::Halves>(static_cast<const char*>(from));
    return reinterpret_cast<typename TileVector<kTiles>::Type>(__builtin_convertvector(raw, typename TileVector<kTiles>::Bits) << 16);
}

// x[i][j] = x[j][i], in each eight floats.
inline void transpose8(TileVector<1>::Type (&x)[8]) {
    TileVector<1>::Type a[8], b[8];
    UNROLL
    for (int i = 0; i < 8; i += 2) {
        a[i] = __builtin_shufflevector(x[i], x[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        a[i + 1] = __builtin_shufflevector(x[i], x[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    UNROLL
    for (int i = 0; i < 8; i += i % 4 == 1 ? 3 : 1) {
        b[i] = __builtin_shufflevector(a[i], a[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        b[i + 2] = __builtin_shufflevector(a[i], a[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    UNROLL
    for (int i = 0; i < 4; i++) {
        x[i] = __builtin_shufflevector(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        x[i + 4] = __builtin_shufflevector(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}
inline void transpose8(TileVector<2>::Type (&x)[8]) {
    TileVector<2>::Type a[8], b[8];
    UNROLL
    for (int i = 0; i < 8; i += 2) {
        a[i] = __builtin_shufflevector(x[i], x[i + 1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
        a[i + 1] = __builtin_shufflevector(x[i], x[i + 1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
    UNROLL
    for (int i = 0; i < 8; i += i % 4 == 1 ? 3 : 1) {
        b[i] = __builtin_shufflevector(a[i], a[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
        b[i + 2] = __builtin_shufflevector(a[i], a[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    UNROLL
    for (int i = 0; i < 4; i++) {
        x[i] = __builtin_shufflevector(b[i], b[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
        x[i + 4] = __builtin_shufflevector(b[i], b[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
}

// Where a lane's eight elements of a 16 x 16 tile lie: element i of the lanes with the same t is column tile_column(t, i), rows tile_rows(i) to + 7.
inline constexpr int tile_column(int t, int i) { return 2 * t + i % 2 + i / 4 * 8; }
inline constexpr int tile_rows(int i) { return i / 2 % 2 * 8; }

// The left side by depth, fp32: a_t[depth][row].
template <int MT, int KT>
inline void left_by_depth(float (*a_t)[16 * MT], const FragmentsA<MT, KT>* const* lanes, int depth_tiles) {
    constexpr int kTiles = tiles_together(KT);
    for (int k = 0; k < depth_tiles; k += kTiles)
        for (int m = 0; m < MT; m++)
            for (int t = 0; t < 4; t++) {
                typename TileVector<kTiles>::Type x[8];
                UNROLL
                for (int g = 0; g < 8; g++) x[g] = load_bf16<kTiles>(&lanes[4 * g + t]->tile[m][k]);
                transpose8(x);
                UNROLL
                for (int i = 0; i < 8; i++)
                    UNROLL
                    for (int j = 0; j < kTiles; j++) store_as(&a_t[16 * (k + j) + tile_column(t, i)][16 * m + tile_rows(i)], load_as<Float8>(reinterpret_cast<const float*>(&x[i]) + 8 * j));
            }
}
template <int MT, Stored kStored, int kStride>
inline void left_by_depth(float (*a_t)[16 * MT], const SharedA<kStored, kStride>* const* lanes, int depth_tiles) {
    const __nv_bfloat16* const base = lanes[0]->row;  // lane 0 brings the first
    if constexpr (kStored == Stored::kByDepth) {
        for (int k = 0; k < 16 * depth_tiles; k++)
            for (int row = 0; row < 16 * MT; row += 8 * kWideTiles) store_as(&a_t[k][row], load_bf16<kWideTiles>(base + k * kStride + row));
    } else {
        for (int k = 0; k < 16 * depth_tiles; k += 8 * kWideTiles)
            for (int row = 0; row < 16 * MT; row += 8) {
                typename TileVector<kWideTiles>::Type x[8];
                UNROLL
                for (int i = 0; i < 8; i++) x[i] = load_bf16<kWideTiles>(base + (row + i) * kStride + k);
                transpose8(x);
                UNROLL
                for (int i = 0; i < 8; i++)
                    UNROLL
                    for (int j = 0; j < kWideTiles; j++) store_as(&a_t[k + 8 * j + i][row], load_as<Float8>(reinterpret_cast<const float*>(&x[i]) + 8 * j));
            }
    }
}

// 16 columns of the right side in fp32, in the order they are stored: b[column * 16 KT + depth] or b[depth * 16 + column].
template <int KT, Stored kStored, int kStride>
inline void right_columns(float* b, const __nv_bfloat16* base, int n, int depth_tiles) {
    if constexpr (kStored == Stored::kByRow) {
        for (int column = 0; column < 16; column++)
            for (int k = 0; k < 16 * depth_tiles; k += 8 * kWideTiles) store_as(b + column * 16 * KT + k, load_bf16<kWideTiles>(base + (16 * n + column) * kStride + k));
    } else {
        for (int k = 0; k < 16 * depth_tiles; k++)
            for (int column = 0; column < 16; column += 8 * kWideTiles) store_as(b + k * 16 + column, load_bf16<kWideTiles>(base + k * kStride + 16 * n + column));
    }
}

// c[column][row] = or += sum over depth of a_t[depth][row] * b(column, depth), 16 columns. Rows fill the vectors, so nothing is added across one. Half of
// the registers hold sums, of as square a block as that gives: the fewest loads, and enough sums in flight.
template <int MT, bool kAdd, int kColumnStep, int kDepthStep>
inline void tile_product(float (*c)[16 * MT], const float (*a_t)[16 * MT], const float* b, int depth) {
    using Wide = typename TileVector<kWideTiles>::Type;
    constexpr int kLanes = 8 * kWideTiles, kVectors = std::min(16 * MT / kLanes, kVectorRegisters / 8), kColumns = kVectorRegisters / 2 / kVectors;
    static_assert(16 % kColumns == 0 && 16 * MT % (kVectors * kLanes) == 0, "blocks of sums fill a tile");
    for (int column = 0; column < 16; column += kColumns) {
        for (int row = 0; row < 16 * MT; row += kVectors * kLanes) {
            Wide sum[kColumns][kVectors];
            UNROLL
            for (int j = 0; j < kColumns; j++)
                UNROLL
                for (int i = 0; i < kVectors; i++) sum[j][i] = kAdd ? load_as<Wide>(&c[column + j][row + i * kLanes]) : Wide{};
            for (int k = 0; k < depth; k++) {
                Wide left[kVectors];
                UNROLL
                for (int i = 0; i < kVectors; i++) left[i] = load_as<Wide>(&a_t[k][row + i * kLanes]);
                UNROLL
                for (int j = 0; j < kColumns; j++) {
                    const float right = b[(column + j) * kColumnStep + k * kDepthStep];
                    UNROLL
                    for (int i = 0; i < kVectors; i++) sum[j][i] += left[i] * right;
                }
            }
            UNROLL
            for (int j = 0; j < kColumns; j++)
                UNROLL
                for (int i = 0; i < kVectors; i++) store_as(&c[column + j][row + i * kLanes], sum[j][i]);
        }
    }
}

// lanes[i]: what lane i brought.
template <int KT, bool kAdd, int MT, int NT, class A, class B>
inline void compute_product(const WarpProduct<KT, kAdd, MT, NT, A, B>* const* lanes) {
    const int depth_tiles = std::min(lanes[0]->depth_tiles, KT), column_tiles = std::min(lanes[0]->column_tiles, NT);
    const A* left[kWarpSize];
    for (int lane = 0; lane < kWarpSize; lane++) left[lane] = &lanes[lane]->a;
    alignas(64) float a_t[16 * KT][16 * MT], b[16 * 16 * KT], c[16 * tiles_together(NT)][16 * MT];
    left_by_depth<MT>(a_t, left, depth_tiles);
    // Columns of `together` tiles from tile n on.
    const auto compute_columns = [&](int n, auto together) {
        constexpr int kTiles = together.value;
        if constexpr (kAdd) {
            for (int m = 0; m < MT; m++)
                for (int t = 0; t < 4; t++) {
                    typename TileVector<kTiles>::Type x[8];
                    UNROLL
                    for (int g = 0; g < 8; g++) x[g] = load_as<typename TileVector<kTiles>::Type>(&lanes[4 * g + t]->acc[m][n]);
                    transpose8(x);
                    UNROLL
                    for (int i = 0; i < 8; i++)
                        UNROLL
                        for (int j = 0; j < kTiles; j++) store_as(&c[16 * j + tile_column(t, i)][16 * m + tile_rows(i)], load_as<Float8>(reinterpret_cast<const float*>(&x[i]) + 8 * j));
                }
        }
        for (int j = 0; j < kTiles; j++) {
            right_columns<KT, B::kStored, B::kStride>(b, lanes[0]->b.row, n + j, depth_tiles);
            if constexpr (B::kStored == Stored::kByRow) {
                tile_product<MT, kAdd, 16 * KT, 1>(c + 16 * j, a_t, b, 16 * depth_tiles);
            } else {
                tile_product<MT, kAdd, 1, 16>(c + 16 * j, a_t, b, 16 * depth_tiles);
            }
        }
        for (int m = 0; m < MT; m++)
            for (int t = 0; t < 4; t++) {
                typename TileVector<kTiles>::Type x[8];
                UNROLL
                for (int i = 0; i < 8; i++)
                    UNROLL
                    for (int j = 0; j < kTiles; j++) store_as(reinterpret_cast<float*>(&x[i]) + 8 * j, load_as<Float8>(&c[16 * j + tile_column(t, i)][16 * m + tile_rows(i)]));
                transpose8(x);
                UNROLL
                for (int g = 0; g < 8; g++) store_as(&lanes[4 * g + t]->acc[m][n], x[g]);
            }
    };
    int n = 0;
    for (; n + tiles_together(NT) <= column_tiles; n += tiles_together(NT)) compute_columns(n, std::integral_constant<int, tiles_together(NT)>{});
    for (; n < column_tiles; n++) compute_columns(n, std::integral_constant<int, 1>{});
}

// The lanes bring an array of pointers to their products.
template <class Product, int kIndex>
inline void compute_one(void** lane_args) {
    const Product* lanes[kWarpSize];
    for (int lane = 0; lane < kWarpSize; lane++) lanes[lane] = static_cast<const Product*>(static_cast<const void**>(lane_args[lane])[kIndex]);
    compute_product(lanes);
}
template <class... Products, int... kIndices>
inline void compute_products(void** lane_args, std::integer_sequence<int, kIndices...>) {
    (compute_one<Products, kIndices>(lane_args), ...);
}
template <class... Products>
inline void compute_warp_mma(void** lane_args, unsigned) {
    compute_products<Products...>(lane_args, std::make_integer_sequence<int, sizeof...(Products)>{});
}

template <class... Products>
inline void warp_mma(const Products&... products) {
    const void* args[] = {&products...};
    ::hostcuda::warp_collective(0xffffffffu, args, compute_warp_mma<Products...>, "warp_mma");
}

// ---- the four lanes of a row --------------------------------------------------------------------------------------------------------

template <int N, bool kMax>
inline void compute_quad_fold(void** lane_args, unsigned) {
    for (int lane = 0; lane < kWarpSize; lane += 4) {
        float* x[4];
        for (int t = 0; t < 4; t++) x[t] = static_cast<float*>(lane_args[lane + t]);
        for (int i = 0; i < N; i++) {
            const float folded = kMax ? fmaxf(fmaxf(x[0][i], x[1][i]), fmaxf(x[2][i], x[3][i])) : (x[0][i] + x[1][i]) + (x[2][i] + x[3][i]);
            for (int t = 0; t < 4; t++) x[t][i] = folded;
        }
    }
}

template <int N>
inline void quad_max(float (&x)[N]) {
    ::hostcuda::warp_collective(0xffffffffu, x, compute_quad_fold<N, true>, "quad_max");
}
template <int N>
inline void quad_sum(float (&x)[N]) {
    ::hostcuda::warp_collective(0xffffffffu, x, compute_quad_fold<N, false>, "quad_sum");
}

// ---- 2^x ---------------------------------------------------------------------------------------------------------------------------

// x = n + r, |r| <= 1/2, 2^r = 1 + r q(r) with q of degree 5 fitted for the smallest largest relative error, 2e-9; the roundings are what is left, within 2 ulp
// as on the GPU. The powers of two are added to the exponent, which has room for 2^128 times less than 1; as a factor 2^128 would be infinite.
template <class V>
inline V exp2_of(V x) {
    typedef decltype(x < x) Mask;
    const Mask tiny = x < -126.0f, number = x == x;
    V clamped = tiny ? V{} - 126.0f : x;
    clamped = clamped > 128.0f ? V{} + 128.0f : clamped;
    const float shifter = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer that sits in the low bits
    const V shifted = clamped + shifter;
    const Mask n = reinterpret_cast<Mask>(shifted) - 0x4b400000;
    const V r = clamped - (shifted - shifter);
    V p = r * 1.5353362e-4f + 1.33988739e-3f;
    p = p * r + 9.61843692e-3f;
    p = p * r + 5.55033237e-2f;
    p = p * r + 2.40226477e-1f;
    p = p * r + 6.93147182e-1f;
    p = p * r + 1.0f;
    const V power = reinterpret_cast<V>(reinterpret_cast<Mask>(p) + (n << 23));
    return number ? (tiny ? V{} : power) : x;
}
inline Float8 exp2_8(Float8 x) { return exp2_of(x); }

// x[i] = 2^(x[i] factor - minus[i]), N vectors
template <int N>
inline void exp2_scaled(Float8* x, float factor, const Float8* minus) {
    constexpr int kTiles = tiles_together(N);
    using V = typename TileVector<kTiles>::Type;
    UNROLL
    for (int i = 0; i < N; i += kTiles) store_as(&x[i], exp2_of(load_as<V>(&x[i]) * factor - load_as<V>(&minus[i])));
}

template <int N>
inline void to_fragments(Fragment* f, const Float8* x) {
    constexpr int kTiles = tiles_together(N);
    using Bits = typename TileVector<kTiles>::Bits;
    UNROLL
    for (int i = 0; i < N; i += kTiles) {
        store_as(&f[i], __builtin_convertvector(bf16_bits(load_as<Bits>(&x[i])), typename TileVector<kTiles>::Halves));
    }
}

#endif

// ---- the same on both --------------------------------------------------------------------------------------------------------------

// A row's values in the order of a tile: a for row g, b for row g + 8.
__device__ __forceinline__ Float8 row_pair8(float a, float b) { return Float8{a, a, b, b, a, a, b, b}; }

// A left side that is used again and again, from shared memory into registers.
template <int MT, int KT, class A>
__device__ __forceinline__ void load_fragments(FragmentsA<MT, KT>& fragments, const A& a) {
    UNROLL
    for (int m = 0; m < MT; m++)
        UNROLL
        for (int k = 0; k < KT; k++) fragments.tile[m][k] = a.load(m, k);
}

// x[i] = 2^x[i], as exp2_8.
template <int N>
__device__ __forceinline__ void exp2_in_place(float (&x)[N]) {
    static_assert(N <= 8, "one vector");
    Float8 y = zero8();
    UNROLL
    for (int i = 0; i < N; i++) y[i] = x[i];
    y = exp2_8(y);
    UNROLL
    for (int i = 0; i < N; i++) x[i] = y[i];
}

// Where this lane's part of a 16 x 16 tile begins, rows kStride apart.
template <int kStride>
__device__ __forceinline__ int fragment_offset() {
    const int lane = fresh_lane();
    return lane / 4 * kStride + lane % 4 * 2;
}

// A 16 x 16 tile of floats in memory as the lanes hold it: the first four of each lane, then the last four, so that a warp's accesses have no gaps.
inline constexpr int kTileFloats = 256;
__device__ __forceinline__ Float8 load_tile(const float* tile) {
    const int lane = fresh_lane();
    const float4 low = reinterpret_cast<const float4*>(tile)[lane], high = reinterpret_cast<const float4*>(tile)[kWarpSize + lane];
    return Float8{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
}
__device__ __forceinline__ void store_tile(float* tile, const Float8& x) {
    const int lane = fresh_lane();
    reinterpret_cast<float4*>(tile)[lane] = float4{x[0], x[1], x[2], x[3]};
    reinterpret_cast<float4*>(tile)[kWarpSize + lane] = float4{x[4], x[5], x[6], x[7]};
}

// Writes this lane's part, which begins at `place`.
template <int kStride>
__device__ __forceinline__ void store_fragment(__nv_bfloat16* place, const Fragment& f) {
    unsigned* const to = reinterpret_cast<unsigned*>(place);
    to[0] = f.reg[0];
    to[4 * kStride] = f.reg[1];
    to[4] = f.reg[2];
    to[4 * kStride + 4] = f.reg[3];
}
