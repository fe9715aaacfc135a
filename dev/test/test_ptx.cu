// The instructions of ptx.cuh: on a GPU these tests prove what the header says of the instructions, on a CPU that their twins do the same.
//
// What each lane holds is written down here anew, from the PTX ISA (section numbers of edition 9.2), and never taken from ptx.cuh. Everything whose
// result is exact is compared bit for bit: integers small enough that any order of additions, and a tensor core that truncates, give the same.
#include "dev/test/kernel_test.cuh"
#include "llmc/ptx.cuh"

namespace {

// ---- layouts -----------------------------------------------------------------------------------------------------------------

struct TilePlace {
    int row, column;
};

// 9.7.14.5.8, "Matrix Fragments for mma.m16n8k16 with floating point type": where a lane's elements a0 to a7 of A (16 x 16), b0 to b3 of B (16 x 8) and
// c0 to c3 of C (16 x 8) belong. A register holds two elements, the lower one in its low half.
TilePlace place_of_a(int lane, int i) {
    const int group = lane >> 2, thread_in_group = lane % 4;
    return {(0 <= i && i < 2) || (4 <= i && i < 6) ? group : group + 8, i < 4 ? thread_in_group * 2 + (i & 1) : thread_in_group * 2 + (i & 1) + 8};
}
TilePlace place_of_b(int lane, int i) {
    const int group = lane >> 2, thread_in_group = lane % 4;
    return {i < 2 ? thread_in_group * 2 + (i & 1) : thread_in_group * 2 + (i & 1) + 8, group};
}
__host__ __device__ inline TilePlace place_of_c(int lane, int i) {
    const int group = lane >> 2, thread_in_group = lane % 4;
    return {i < 2 ? group : group + 8, thread_in_group * 2 + (i & 1)};
}
// ptx.cuh's own: a Float8 is two C side by side.
__host__ __device__ inline TilePlace place_of_float8(int lane, int i) {
    const TilePlace place = place_of_c(lane, i % 4);
    return {place.row, place.column + i / 4 * 8};
}

unsigned pair_of(uint16_t low, uint16_t high) { return low | static_cast<unsigned>(high) << 16; }

const __nv_bfloat16 kPoison16 = bfloat16_of(0x7FED);  // a NaN

double exactly(size_t) { return 0.0; }  // a tolerance

// ---- asynchronous copies -----------------------------------------------------------------------------------------------------

constexpr int kCopyGroups = 4, kCopiesOfGroup = 2, kCopyThreads = 96, kCopySlots = kCopyGroups * kCopiesOfGroup * kCopyThreads;

__host__ __device__ inline int copy_slot(int group, int copy, int thread) { return (group * kCopiesOfGroup + copy) * kCopyThreads + thread; }
__host__ __device__ inline bool copy_valid(int slot) { return (slot + slot / kCopyThreads) % 3 != 1; }
// Odd threads commit one more group, an empty one: the groups with data that a wait for all but `pending` covers.
__host__ __device__ inline int groups_landed(int thread, int pending) {
    const int landed = kCopyGroups + thread % 2 - pending;
    return landed > kCopyGroups ? kCopyGroups : landed;
}
__host__ __device__ inline int other_copy_thread(int thread) { return (thread + 37) % kCopyThreads; }

// A wait that is too weak shows on a CPU with HOSTCUDA_ASYNC=1, where nothing lands before the wait that covers it, and on a GPU with some luck.
// own: what each thread sees of its copies right after its wait; others: of another thread's after the barrier; all: of another's after the last wait.
template <int kPending>
__global__ void copy_groups_kernel(uint4* own, uint4* others, uint4* all, const uint4* in) {
    uint4* const tile = dynamic_shared<uint4>();
    const int thread = static_cast<int>(threadIdx.x), other = other_copy_thread(thread);
    for (int i = thread; i < kCopySlots; i += kCopyThreads) tile[i] = make_uint4(7, 7, 7, 7);
    __syncthreads();
    for (int group = 0; group < kCopyGroups; group++) {
        for (int copy = 0; copy < kCopiesOfGroup; copy++) {
            const int slot = copy_slot(group, copy, thread);
            // A source that is not valid is not read, so it may be anything.
            cp_async_16(tile + slot, copy_valid(slot) ? in + slot : nullptr, copy_valid(slot));
        }
        cp_async_commit();
    }
    if (thread % 2 != 0) cp_async_commit();
    cp_async_wait<kPending>();
    for (int slot = thread; slot < copy_slot(groups_landed(thread, kPending), 0, 0); slot += kCopyThreads) own[slot] = tile[slot];
    __syncthreads();
    for (int slot = other; slot < copy_slot(groups_landed(other, kPending), 0, 0); slot += kCopyThreads) others[slot] = tile[slot];
    cp_async_wait<0>();
    __syncthreads();
    for (int slot = other; slot < kCopySlots; slot += kCopyThreads) all[slot] = tile[slot];
}

void check_copy_groups(void (*kernel)(uint4*, uint4*, uint4*, const uint4*), int pending) {
    std::vector<unsigned> values(4 * kCopySlots), landed(values.size(), 0x7FED7FED), expected(values.size());  // poison where nothing was looked at
    for (size_t i = 0; i < values.size(); i++) {
        const int slot = static_cast<int>(i / 4), thread = slot % kCopyThreads;
        values[i] = static_cast<unsigned>(1000003 * i + 12345);
        expected[i] = copy_valid(slot) ? values[i] : 0;
        if (slot < copy_slot(groups_landed(thread, pending), 0, 0)) landed[i] = expected[i];
    }
    DeviceBuffer<unsigned> in(values), own(values.size()), others(values.size()), all(values.size());
    const auto vectors = [](const DeviceBuffer<unsigned>& buffer) { return reinterpret_cast<uint4*>(buffer.get()); };
    launch(kernel, 1, kCopyThreads, kCopySlots * sizeof(uint4), test_stream(), vectors(own), vectors(others), vectors(all), vectors(in));
    expect_same_bits("own copies", own.download(), landed);
    expect_same_bits("another thread's copies", others.download(), landed);
    expect_same_bits("all copies", all.download(), expected);
}

TEST(AsyncCopy, WaitsForAllButTheLatestGroups) {
    check_copy_groups(copy_groups_kernel<0>, 0);
    check_copy_groups(copy_groups_kernel<1>, 1);
    check_copy_groups(copy_groups_kernel<2>, 2);
    check_copy_groups(copy_groups_kernel<3>, 3);
    check_copy_groups(copy_groups_kernel<4>, 4);
}

// ---- ldmatrix ----------------------------------------------------------------------------------------------------------------

constexpr int kLdmatrixElements = 2048;

template <bool kTransposed>
__global__ void ldmatrix_kernel(unsigned* out, const __nv_bfloat16* in, const int* rows) {
    __nv_bfloat16* const tile = dynamic_shared<__nv_bfloat16>();
    for (int i = static_cast<int>(threadIdx.x); i < kLdmatrixElements; i += static_cast<int>(blockDim.x)) tile[i] = in[i];
    __syncthreads();
    const __nv_bfloat16* const row = tile + rows[threadIdx.x];
    Fragment f;
    if constexpr (kTransposed) {
        f = ldmatrix_x4_transposed(row);
    } else {
        f = ldmatrix_x4(row);
    }
    for (int i = 0; i < 4; i++) out[4 * threadIdx.x + i] = f.reg[i];
}

// 9.7.14.5.15, "Warp-level matrix load instruction: ldmatrix": lanes 8 i to 8 i + 7 bring the addresses of the rows of matrix i, whose elements come in
// register i; four lanes hold a row (with .trans: a column), each two neighbouring elements, lanes 0 to 3 the first.
template <bool kTransposed>
void check_ldmatrix() {
    constexpr int kThreads = 64;
    std::vector<__nv_bfloat16> values;
    for (unsigned i = 0; i < kLdmatrixElements; i++) values.push_back(bfloat16_of(static_cast<uint16_t>(i * 40503u)));  // all different, NaN among them
    std::vector<int> rows = random_ints(kThreads, 5, 0, kLdmatrixElements / 8 - 1);
    for (int& row : rows) row *= 8;
    std::vector<unsigned> expected;
    for (int thread = 0; thread < kThreads; thread++) {
        const int lane = thread % 32, first = thread - lane;
        for (int i = 0; i < 4; i++) {
            uint16_t element[2];
            for (int j = 0; j < 2; j++) {
                const int line = lane / 4, position = lane % 4 * 2 + j;
                const int row = kTransposed ? position : line, column = kTransposed ? line : position;
                element[j] = bits_of(values[rows[first + 8 * i + row] + column]);
            }
            expected.push_back(pair_of(element[0], element[1]));
        }
    }
    DeviceBuffer<__nv_bfloat16> in(values);
    DeviceBuffer<int> row_places(rows);
    DeviceBuffer<unsigned> out(expected.size());
    launch(ldmatrix_kernel<kTransposed>, 1, kThreads, kLdmatrixElements * sizeof(__nv_bfloat16), test_stream(), out, in, row_places);
    expect_same_bits("registers", out.download(), expected);
}

TEST(Ldmatrix, RowsAnywhere) { check_ldmatrix<false>(); }
TEST(Ldmatrix, TransposedRowsAnywhere) { check_ldmatrix<true>(); }

// ---- one product -------------------------------------------------------------------------------------------------------------

// A warp takes a product.
__global__ void mma_kernel(float* c, const unsigned* a, const unsigned* b, int count) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i / 32 >= count) return;
    Fragment left;
    for (int r = 0; r < 4; r++) left.reg[r] = a[4 * i + r];
    float x[4];
    for (int r = 0; r < 4; r++) x[r] = c[4 * i + r];
    mma_m16n8k16(x, left, b[2 * i], b[2 * i + 1]);
    for (int r = 0; r < 4; r++) c[4 * i + r] = x[r];
}

struct SmallProduct {
    std::vector<double> a = std::vector<double>(16 * 16), b = std::vector<double>(16 * 8), c = std::vector<double>(16 * 8);
};

void check_mma(const std::vector<SmallProduct>& products) {
    std::vector<unsigned> a, b;
    std::vector<float> c;
    std::vector<double> expected;
    for (const SmallProduct& p : products) {
        for (int lane = 0; lane < 32; lane++) {
            const auto a_bits = [&](int i) { return bits_of(to_storage<__nv_bfloat16>(p.a[place_of_a(lane, i).row * 16 + place_of_a(lane, i).column])); };
            const auto b_bits = [&](int i) { return bits_of(to_storage<__nv_bfloat16>(p.b[place_of_b(lane, i).row * 8 + place_of_b(lane, i).column])); };
            for (int r = 0; r < 4; r++) a.push_back(pair_of(a_bits(2 * r), a_bits(2 * r + 1)));
            for (int r = 0; r < 2; r++) b.push_back(pair_of(b_bits(2 * r), b_bits(2 * r + 1)));
            for (int i = 0; i < 4; i++) {
                const TilePlace place = place_of_c(lane, i);
                double sum = p.c[place.row * 8 + place.column];
                c.push_back(static_cast<float>(sum));
                for (int k = 0; k < 16; k++) sum += p.a[place.row * 16 + k] * p.b[k * 8 + place.column];
                expected.push_back(sum);
            }
        }
    }
    DeviceBuffer<unsigned> left(a), right(b);
    DeviceBuffer<float> out(c);
    launch(mma_kernel, grid_for(products.size(), 2), 64, 0, test_stream(), out, left, right, static_cast<int>(products.size()));
    expect_close("c", out.values(), expected, exactly);
}

// Every element different, and a bfloat16.
std::vector<double> counted(size_t count) {
    std::vector<double> values(count);
    for (size_t i = 0; i < count; i++) values[i] = static_cast<double>(i + 1);
    return values;
}

TEST(Mma, Integers) {
    std::vector<SmallProduct> products(40);
    for (size_t i = 0; i < products.size(); i++) {
        const unsigned seed = static_cast<unsigned>(3 * i);
        const auto integers = [&](std::vector<double>& to, unsigned s, int largest) {
            const std::vector<int> values = random_ints(to.size(), s, -largest, largest);
            to.assign(values.begin(), values.end());
        };
        integers(products[i].a, seed, 100);
        integers(products[i].b, seed + 1, 100);
        if (i % 4 != 0) integers(products[i].c, seed + 2, 100000);
    }
    check_mma(products);
}

// One element of A, or of B, alone: the result is one row of B, or one column of A, in one row or column. A layout with two places exchanged does not pass.
TEST(Mma, EachElementAlone) {
    std::vector<SmallProduct> products;
    for (int i = 0; i < 256 + 128; i++) {
        SmallProduct p;
        p.c = counted(p.c.size());
        if (i < 256) {
            p.a[i] = 1;
            p.b = counted(p.b.size());
        } else {
            p.a = counted(p.a.size());
            p.b[i - 256] = 1;
        }
        products.push_back(p);
    }
    check_mma(products);
}

// ---- fragments ---------------------------------------------------------------------------------------------------------------

// kTiles tiles a warp. They are stored with a gap after each row, which stays as it was.
template <int kTiles, int kStride>
__global__ void fragments_kernel(unsigned* one_by_one, unsigned* together, __nv_bfloat16* stored, const float* in) {
    const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
    Float8 x[kTiles];
    Fragment f[kTiles];
    for (int n = 0; n < kTiles; n++)
        for (int i = 0; i < 8; i++) {
            const TilePlace place = place_of_float8(lane, i);
            x[n][i] = in[((warp * kTiles + n) * 16 + place.row) * 16 + place.column];
        }
    to_fragments<kTiles>(f, x);
    for (int n = 0; n < kTiles; n++) {
        const Fragment alone = to_fragment(x[n]);
        for (int r = 0; r < 4; r++) {
            one_by_one[((warp * kTiles + n) * 32 + lane) * 4 + r] = alone.reg[r];
            together[((warp * kTiles + n) * 32 + lane) * 4 + r] = f[n].reg[r];
        }
        store_fragment<kStride>(stored + (warp * kTiles + n) * 16 * kStride + fragment_offset<kStride>(), f[n]);
    }
}

void check_fragments(void (*kernel)(unsigned*, unsigned*, __nv_bfloat16*, const float*), int tiles_of_warp, int stride) {
    const int tile_count = 16 * tiles_of_warp;
    // Every exponent and sign; fractions that are ties, almost ties, all ones; random ones.
    std::mt19937 generator(static_cast<unsigned>(tiles_of_warp));
    std::vector<float> values(tile_count * 256);
    for (size_t i = 0; i < values.size(); i++) {
        const uint32_t telling[] = {0u, 1u, 0x8000u, 0x18000u, 0x7fffu, 0x8001u, 0x7f8000u, 0x7fffffu};
        const uint32_t fraction = i % 2 == 0 ? telling[i / 2 % 8] : static_cast<uint32_t>(generator() & 0x7fffffu);
        values[i] = float_of(static_cast<uint32_t>(i * 37 % 512) << 23 | fraction);
    }
    std::vector<unsigned> registers;
    std::vector<__nv_bfloat16> tiles(tile_count * 16 * stride, kPoison16);
    for (int tile = 0; tile < tile_count; tile++) {
        const auto element = [&](TilePlace place) { return round_to_bfloat16(values[(tile * 16 + place.row) * 16 + place.column]); };
        for (int lane = 0; lane < 32; lane++)
            for (int r = 0; r < 4; r++) registers.push_back(pair_of(element(place_of_a(lane, 2 * r)), element(place_of_a(lane, 2 * r + 1))));
        for (int row = 0; row < 16; row++)
            for (int column = 0; column < 16; column++) tiles[(tile * 16 + row) * stride + column] = bfloat16_of(element({row, column}));
    }
    DeviceBuffer<float> in(values);
    DeviceBuffer<unsigned> one_by_one(registers.size()), together(registers.size());
    DeviceBuffer<__nv_bfloat16> stored(tiles.size());
    launch(kernel, 8, 64, 0, test_stream(), one_by_one, together, stored, in);
    expect_same_bits("to_fragment", one_by_one.download(), registers);
    expect_same_bits("to_fragments", together.download(), registers);
    expect_same_bits("store_fragment", stored.download(), tiles);
}

TEST(Fragments, RoundedAndStored) {
    check_fragments(fragments_kernel<1, 16>, 1, 16);
    check_fragments(fragments_kernel<2, 24>, 2, 24);
    check_fragments(fragments_kernel<3, 72>, 3, 72);
    check_fragments(fragments_kernel<4, 24>, 4, 24);
    check_fragments(fragments_kernel<5, 24>, 5, 24);
    check_fragments(fragments_kernel<8, 24>, 8, 24);
}

__global__ void row_pair_kernel(float* out, const float* rows) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    store8(out + 8 * threadIdx.x, row_pair8(rows[lane / 4], rows[lane / 4 + 8]));
}

TEST(Fragments, RowPair) {
    const std::vector<double> rows = counted(16);
    DeviceBuffer<float> in(to_storage<float>(rows)), out(32 * 8);
    launch(row_pair_kernel, 1, 32, 0, test_stream(), out, in);
    std::vector<double> expected;
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 8; i++) expected.push_back(rows[place_of_float8(lane, i).row]);
    expect_close("x", out.values(), expected, exactly);
}

// ---- products of whole tiles -------------------------------------------------------------------------------------------------

enum class LeftSide { kRegisters, kByRow, kByDepth };

// What the host needs to know of a product.
struct ProductSize {
    int NT, KT, rows, columns, depth;
    Stored left, right;
    int left_stride, right_stride, left_elements, right_elements;
};

// Two warps: each multiplies its own 16 MT rows of A with the same B.
template <int MT_, int NT_, int KT_, LeftSide kLeft_, Stored kRight_>
struct ProductShape {
    static constexpr int MT = MT_, NT = NT_, KT = KT_, kWarps = 2, kRows = kWarps * 16 * MT, kColumns = 16 * NT, kDepth = 16 * KT;
    static constexpr LeftSide kLeft = kLeft_;
    static constexpr Stored kLeftStored = kLeft == LeftSide::kByDepth ? Stored::kByDepth : Stored::kByRow, kRight = kRight_;
    static constexpr int kLeftStride = (kLeftStored == Stored::kByRow ? kDepth : kRows) + 8, kRightStride = (kRight == Stored::kByRow ? kDepth : kColumns) + 24;
    static constexpr int kLeftElements = kLeftStride * (kLeftStored == Stored::kByRow ? kRows : kDepth);
    static constexpr int kRightElements = kRightStride * (kRight == Stored::kByRow ? kColumns : kDepth);
    static constexpr size_t kBytes = sizeof(__nv_bfloat16) * (kLeftElements + kRightElements);
    static constexpr ProductSize kSize = {NT, KT, kRows, kColumns, kDepth, kLeftStored, kRight, kLeftStride, kRightStride, kLeftElements, kRightElements};
    static_assert(kBytes <= 48 * 1024, "more shared memory than a kernel gets without asking");
};

// A warp's left side, from where its rows begin.
template <class Shape>
__device__ __forceinline__ auto left_side(const __nv_bfloat16* a) {
    const SharedA<Shape::kLeftStored, Shape::kLeftStride> shared(a);
    if constexpr (Shape::kLeft == LeftSide::kRegisters) {
        FragmentsA<Shape::MT, Shape::KT> fragments;
        load_fragments(fragments, shared);
        return fragments;
    } else {
        return shared;
    }
}
template <class Shape>
__device__ __forceinline__ const __nv_bfloat16* rows_of_warp(const __nv_bfloat16* a) {
    return a + threadIdx.x / 32 * 16 * Shape::MT * (Shape::kLeftStored == Stored::kByRow ? Shape::kLeftStride : 1);
}

// The same from single instructions, with addresses of this test's own, where product_by_instructions has SharedA's and SharedB's.
template <class Shape>
__device__ void multiply_one_by_one(float (&acc)[Shape::MT][Shape::NT][8], const __nv_bfloat16* a, const __nv_bfloat16* b) {
    const int matrix = static_cast<int>(threadIdx.x % 32 / 8), line = static_cast<int>(threadIdx.x % 8), first = matrix % 2 * 8, second = matrix / 2 * 8;
    for (int k = 0; k < 16 * Shape::KT; k += 16)
        for (int m = 0; m < Shape::MT; m++) {
            // Registers 0 to 3 of A: rows 0 and 8 of depth 0, rows 0 and 8 of depth 8.
            Fragment left;
            if constexpr (Shape::kLeftStored == Stored::kByRow) {
                left = ldmatrix_x4(a + (16 * m + first + line) * Shape::kLeftStride + k + second);
            } else {
                left = ldmatrix_x4_transposed(a + (k + second + line) * Shape::kLeftStride + 16 * m + first);
            }
            for (int n = 0; n < Shape::NT; n++) {
                // Two B: columns 0, depths 0 and 8; columns 8, depths 0 and 8. ldmatrix brings a column of B where A had a row.
                Fragment right;
                if constexpr (Shape::kRight == Stored::kByRow) {
                    right = ldmatrix_x4(b + (16 * n + second + line) * Shape::kRightStride + k + first);
                } else {
                    right = ldmatrix_x4_transposed(b + (k + first + line) * Shape::kRightStride + 16 * n + second);
                }
                mma_m16n8k16(&acc[m][n][0], left, right.reg[0], right.reg[1]);
                mma_m16n8k16(&acc[m][n][4], left, right.reg[2], right.reg[3]);
            }
        }
}

// Element of a matrix of kRows x kColumns that element i of this lane's tile (m, n) is.
template <class Shape>
__device__ __forceinline__ size_t element_of(int m, int n, int i) {
    const TilePlace place = place_of_float8(static_cast<int>(threadIdx.x % 32), i);
    return (threadIdx.x / 32 * 16 * Shape::MT + 16 * m + place.row) * static_cast<size_t>(Shape::kColumns) + 16 * n + place.column;
}
template <class Shape>
__device__ __forceinline__ void store_product(float* out, const Float8 (&acc)[Shape::MT][Shape::NT]) {
    for (int m = 0; m < Shape::MT; m++)
        for (int n = 0; n < Shape::NT; n++)
            for (int i = 0; i < 8; i++) out[element_of<Shape>(m, n, i)] = acc[m][n][i];
}
template <class Shape>
__device__ __forceinline__ const __nv_bfloat16* copy_sides(__nv_bfloat16* shared, const __nv_bfloat16* a, const __nv_bfloat16* b) {
    for (int i = static_cast<int>(threadIdx.x); i < Shape::kLeftElements; i += 32 * Shape::kWarps) shared[i] = a[i];
    for (int i = static_cast<int>(threadIdx.x); i < Shape::kRightElements; i += 32 * Shape::kWarps) shared[Shape::kLeftElements + i] = b[i];
    return shared + Shape::kLeftElements;
}

// Block i takes sides i with limits i: a product added by warp_mma, and instruction by instruction; a whole one also set, and made by this test's instructions.
template <class Shape>
__global__ void product_kernel(float* set, float* set_by_instructions, float* added, float* added_by_instructions, float* single, const __nv_bfloat16* a,
                               const __nv_bfloat16* b, const float* c, const int2* limits) {
    constexpr int MT = Shape::MT, NT = Shape::NT, KT = Shape::KT;
    __nv_bfloat16* const shared = dynamic_shared<__nv_bfloat16>();
    const size_t block = blockIdx.x;
    const __nv_bfloat16* const right = copy_sides<Shape>(shared, a + block * Shape::kLeftElements, b + block * Shape::kRightElements);
    __syncthreads();
    const __nv_bfloat16* const left = rows_of_warp<Shape>(shared);
    added += block * Shape::kRows * Shape::kColumns;
    added_by_instructions += block * Shape::kRows * Shape::kColumns;
    const auto left_of_warp = left_side<Shape>(left);
    const SharedB<Shape::kRight, Shape::kRightStride> right_of_all(right);
    const int depth_tiles = limits[block].x, column_tiles = limits[block].y;
    Float8 set_acc[MT][NT], added_acc[MT][NT], instructions_acc[MT][NT];
    for (int m = 0; m < MT; m++)
        for (int n = 0; n < NT; n++) {
            set_acc[m][n] = set8(kInfinity);  // counts for nothing
            for (int i = 0; i < 8; i++) added_acc[m][n][i] = c[element_of<Shape>(m, n, i)];
            instructions_acc[m][n] = added_acc[m][n];
        }
    warp_mma(set_product<KT>(set_acc, left_of_warp, right_of_all), add_product<KT>(added_acc, left_of_warp, right_of_all, depth_tiles, column_tiles));
    product_by_instructions(add_product<KT>(instructions_acc, left_of_warp, right_of_all, depth_tiles, column_tiles));
    store_product<Shape>(added, added_acc);
    store_product<Shape>(added_by_instructions, instructions_acc);
    if (depth_tiles == KT && column_tiles == NT) {
        store_product<Shape>(set, set_acc);
        product_by_instructions(set_product<KT>(instructions_acc, left_of_warp, right_of_all));
        store_product<Shape>(set_by_instructions, instructions_acc);
        float single_acc[MT][NT][8];
        for (int m = 0; m < MT; m++)
            for (int n = 0; n < NT; n++)
                for (int i = 0; i < 8; i++) single_acc[m][n][i] = c[element_of<Shape>(m, n, i)];
        multiply_one_by_one<Shape>(single_acc, left, right);
        for (int m = 0; m < MT; m++)
            for (int n = 0; n < NT; n++)
                for (int i = 0; i < 8; i++) single[element_of<Shape>(m, n, i)] = single_acc[m][n][i];
    }
}

// The sides of a product as plain matrices: a[row][depth], b[column][depth], c[row][column].
struct Sides {
    ProductSize size;
    std::vector<double> a, b, c;

    static Sides integers(const ProductSize& size, unsigned seed) {
        const auto values = [](int count, unsigned s, int largest) {
            const std::vector<int> ints = random_ints(count, s, -largest, largest);
            return std::vector<double>(ints.begin(), ints.end());
        };
        return {size, values(size.rows * size.depth, seed, 60), values(size.columns * size.depth, seed + 1, 60), values(size.rows * size.columns, seed + 2, 100000)};
    }
    static Sides random(const ProductSize& size, unsigned seed) {
        return {size, random_values<__nv_bfloat16>(size.rows * size.depth, seed), random_values<__nv_bfloat16>(size.columns * size.depth, seed + 1),
                random_values<float>(size.rows * size.columns, seed + 2, 4.0)};
    }
    // As they lie in shared memory: NaN between rows and beyond the limits, where nothing may be used.
    std::vector<__nv_bfloat16> stored_left(int depth_tiles) const { return stored(a, size.left, size.left_stride, size.left_elements, size.rows, 16 * depth_tiles); }
    std::vector<__nv_bfloat16> stored_right(int depth_tiles, int column_tiles) const {
        return stored(b, size.right, size.right_stride, size.right_elements, 16 * column_tiles, 16 * depth_tiles);
    }
    std::vector<__nv_bfloat16> stored_left() const { return stored_left(size.KT); }
    std::vector<__nv_bfloat16> stored_right() const { return stored_right(size.KT, size.NT); }

    // `start` plus the product up to the limits.
    std::vector<double> product(const std::vector<double>& start, int depth_tiles, int column_tiles) const {
        return fold(start, depth_tiles, column_tiles, [](double x) { return x; });
    }
    std::vector<double> product(const std::vector<double>& start) const { return product(start, size.KT, size.NT); }
    // The magnitudes of all that is added.
    std::vector<double> magnitude(const std::vector<double>& start) const {
        return fold(start, size.KT, size.NT, [](double x) { return std::abs(x); });
    }

private:
    std::vector<__nv_bfloat16> stored(const std::vector<double>& values, Stored order, int stride, int elements, int rows, int depth) const {
        std::vector<__nv_bfloat16> result(elements, kPoison16);
        for (int row = 0; row < rows; row++)
            for (int k = 0; k < depth; k++) {
                result[order == Stored::kByRow ? row * stride + k : k * stride + row] = to_storage<__nv_bfloat16>(values[row * size.depth + k]);
            }
        return result;
    }
    template <typename Function>
    std::vector<double> fold(const std::vector<double>& start, int depth_tiles, int column_tiles, Function&& term) const {
        std::vector<double> result;
        for (int row = 0; row < size.rows; row++)
            for (int column = 0; column < size.columns; column++) {
                double sum = term(start[result.size()]);
                for (int k = 0; k < 16 * depth_tiles && column < 16 * column_tiles; k++) sum += term(a[row * size.depth + k] * b[column * size.depth + k]);
                result.push_back(sum);
            }
        return result;
    }
};

using ProductKernel = void (*)(float*, float*, float*, float*, float*, const __nv_bfloat16*, const __nv_bfloat16*, const float*, const int2*);

// 128 products of at most 3600, and at most 100000 before them, stay below 2^24.
void check_integer_products(ProductKernel kernel, int threads, size_t bytes, const ProductSize& size) {
    const Sides sides = Sides::integers(size, 7);
    std::vector<__nv_bfloat16> a, b;
    std::vector<int> limits;  // pairs
    std::vector<double> added_expected;
    for (int depth_limit = 1; depth_limit <= size.KT + 1; depth_limit++)
        for (int column_limit = 1; column_limit <= size.NT + 1; column_limit++) {
            const int depth_tiles = std::min(depth_limit, size.KT), column_tiles = std::min(column_limit, size.NT);  // a limit beyond the end is none
            const std::vector<__nv_bfloat16> left = sides.stored_left(depth_tiles), right = sides.stored_right(depth_tiles, column_tiles);
            a.insert(a.end(), left.begin(), left.end());
            b.insert(b.end(), right.begin(), right.end());
            limits.insert(limits.end(), {depth_limit, column_limit});
            const std::vector<double> product = sides.product(sides.c, depth_tiles, column_tiles);
            added_expected.insert(added_expected.end(), product.begin(), product.end());
        }
    DeviceBuffer<__nv_bfloat16> left(a), right(b);
    DeviceBuffer<int> pairs(limits);
    DeviceBuffer<float> c(to_storage<float>(sides.c)), set(sides.c.size()), set_by_instructions(sides.c.size()), single(sides.c.size());
    DeviceBuffer<float> added(added_expected.size()), added_by_instructions(added_expected.size());
    launch(kernel, grid_for(limits.size(), 2), threads, bytes, test_stream(), set, set_by_instructions, added, added_by_instructions, single, left, right, c,
           reinterpret_cast<const int2*>(pairs.get()));
    const std::vector<double> set_expected = sides.product(std::vector<double>(sides.c.size()));
    expect_close("set_product", set.values(), set_expected, exactly);
    expect_close("set_product by instructions", set_by_instructions.values(), set_expected, exactly);
    expect_close("add_product", added.values(), added_expected, exactly);
    expect_close("add_product by instructions", added_by_instructions.values(), added_expected, exactly);
    expect_close("ldmatrix and mma", single.values(), sides.product(sides.c), exactly);
}

// Products of bfloat16 are exact in fp32. A tensor core may truncate: each addition is off by at most v = 2^-23 of what has been added in magnitude. n terms
// are n - 1 additions, (n - 1) v (1 + v)^(n - 1) < n v. The element that a product is added to is one more term.
void check_random_products(ProductKernel kernel, int threads, size_t bytes, const ProductSize& size) {
    const Sides sides = Sides::random(size, 11);
    DeviceBuffer<__nv_bfloat16> left(sides.stored_left()), right(sides.stored_right());
    DeviceBuffer<int> pair(std::vector<int>{size.KT, size.NT});
    DeviceBuffer<float> c(to_storage<float>(sides.c)), set(sides.c.size()), set_by_instructions(sides.c.size()), single(sides.c.size());
    DeviceBuffer<float> added(sides.c.size()), added_by_instructions(sides.c.size());
    launch(kernel, 1, threads, bytes, test_stream(), set, set_by_instructions, added, added_by_instructions, single, left, right, c,
           reinterpret_cast<const int2*>(pair.get()));
    const std::vector<double> zeros(sides.c.size()), added_expected = sides.product(sides.c);
    const std::vector<double> set_size = sides.magnitude(zeros), added_size = sides.magnitude(sides.c);
    const auto set_bound = [&](size_t i) { return size.depth * 0x1p-23 * set_size[i]; };
    const auto added_bound = [&](size_t i) { return (size.depth + 1) * 0x1p-23 * added_size[i]; };
    expect_close("set_product", set.values(), sides.product(zeros), set_bound);
    expect_close("set_product by instructions", set_by_instructions.values(), sides.product(zeros), set_bound);
    expect_close("add_product", added.values(), added_expected, added_bound);
    expect_close("add_product by instructions", added_by_instructions.values(), added_expected, added_bound);
    expect_close("ldmatrix and mma", single.values(), added_expected, added_bound);
}

template <class Shape>
class WarpMma : public testing::Test {};

// Each tile count that a kernel of ours has, and each kind of left side with each kind of right side, with odd and with even counts.
using ProductShapes = testing::Types<ProductShape<1, 1, 1, LeftSide::kRegisters, Stored::kByRow>, ProductShape<2, 4, 5, LeftSide::kRegisters, Stored::kByRow>,
                                     ProductShape<2, 5, 4, LeftSide::kRegisters, Stored::kByDepth>, ProductShape<4, 4, 2, LeftSide::kRegisters, Stored::kByDepth>,
                                     ProductShape<2, 2, 8, LeftSide::kByRow, Stored::kByRow>, ProductShape<4, 3, 5, LeftSide::kByRow, Stored::kByRow>,
                                     ProductShape<1, 8, 4, LeftSide::kByRow, Stored::kByDepth>, ProductShape<2, 3, 1, LeftSide::kByRow, Stored::kByDepth>,
                                     ProductShape<1, 4, 8, LeftSide::kByDepth, Stored::kByRow>, ProductShape<2, 1, 2, LeftSide::kByDepth, Stored::kByRow>,
                                     ProductShape<4, 2, 4, LeftSide::kByDepth, Stored::kByDepth>, ProductShape<1, 5, 5, LeftSide::kByDepth, Stored::kByDepth>>;
TYPED_TEST_SUITE(WarpMma, ProductShapes);

TYPED_TEST(WarpMma, IntegersWithinEveryLimit) { check_integer_products(product_kernel<TypeParam>, 32 * TypeParam::kWarps, TypeParam::kBytes, TypeParam::kSize); }
TYPED_TEST(WarpMma, RandomValues) { check_random_products(product_kernel<TypeParam>, 32 * TypeParam::kWarps, TypeParam::kBytes, TypeParam::kSize); }

// Products of different kinds and sizes in one call.
template <class Shape>
struct ProductArgs {
    float* out;
    const __nv_bfloat16 *a, *b;
    const float* c;
};
template <class First, class Second, class Third>
__global__ void several_products_kernel(ProductArgs<First> first, ProductArgs<Second> second, ProductArgs<Third> third) {
    __nv_bfloat16* const first_left = dynamic_shared<__nv_bfloat16>();
    __nv_bfloat16* const second_left = first_left + First::kLeftElements + First::kRightElements;
    __nv_bfloat16* const third_left = second_left + Second::kLeftElements + Second::kRightElements;
    const SharedB<First::kRight, First::kRightStride> first_b(copy_sides<First>(first_left, first.a, first.b));
    const SharedB<Second::kRight, Second::kRightStride> second_b(copy_sides<Second>(second_left, second.a, second.b));
    const SharedB<Third::kRight, Third::kRightStride> third_b(copy_sides<Third>(third_left, third.a, third.b));
    __syncthreads();
    const auto first_a = left_side<First>(rows_of_warp<First>(first_left));
    const auto second_a = left_side<Second>(rows_of_warp<Second>(second_left));
    const auto third_a = left_side<Third>(rows_of_warp<Third>(third_left));
    Float8 first_acc[First::MT][First::NT], second_acc[Second::MT][Second::NT], third_acc[Third::MT][Third::NT];
    for (int m = 0; m < Second::MT; m++)
        for (int n = 0; n < Second::NT; n++)
            for (int i = 0; i < 8; i++) second_acc[m][n][i] = second.c[element_of<Second>(m, n, i)];
    warp_mma(set_product<First::KT>(first_acc, first_a, first_b), add_product<Second::KT>(second_acc, second_a, second_b),
             set_product<Third::KT>(third_acc, third_a, third_b));
    store_product<First>(first.out, first_acc);
    store_product<Second>(second.out, second_acc);
    store_product<Third>(third.out, third_acc);
}

TEST(WarpMmaTogether, ThreeProducts) {
    using First = ProductShape<1, 2, 1, LeftSide::kByRow, Stored::kByRow>;
    using Second = ProductShape<2, 1, 2, LeftSide::kRegisters, Stored::kByDepth>;
    using Third = ProductShape<1, 1, 4, LeftSide::kByDepth, Stored::kByRow>;
    const Sides first = Sides::integers(First::kSize, 1);
    const Sides second = Sides::integers(Second::kSize, 2);
    const Sides third = Sides::integers(Third::kSize, 3);
    DeviceBuffer<__nv_bfloat16> a1(first.stored_left()), b1(first.stored_right()), a2(second.stored_left()), b2(second.stored_right());
    DeviceBuffer<__nv_bfloat16> a3(third.stored_left()), b3(third.stored_right());
    DeviceBuffer<float> c(to_storage<float>(second.c)), out1(first.c.size()), out2(second.c.size()), out3(third.c.size());
    launch(several_products_kernel<First, Second, Third>, 1, 64, First::kBytes + Second::kBytes + Third::kBytes, test_stream(),
           ProductArgs<First>{out1, a1, b1, nullptr}, ProductArgs<Second>{out2, a2, b2, c}, ProductArgs<Third>{out3, a3, b3, nullptr});
    expect_close("first", out1.values(), first.product(std::vector<double>(first.c.size())), exactly);
    expect_close("second", out2.values(), second.product(second.c), exactly);
    expect_close("third", out3.values(), third.product(std::vector<double>(third.c.size())), exactly);
}

template <int MT, int KT, Stored kStored>
constexpr int kLoadStride = 16 * (kStored == Stored::kByRow ? KT : MT) + 8;

template <int MT, int KT, Stored kStored>
__global__ void load_fragments_kernel(unsigned* out, const __nv_bfloat16* in, int count) {
    __nv_bfloat16* const tile = dynamic_shared<__nv_bfloat16>();
    for (int i = static_cast<int>(threadIdx.x); i < count; i += 32) tile[i] = in[i];
    __syncthreads();
    FragmentsA<MT, KT> fragments;
    load_fragments(fragments, SharedA<kStored, kLoadStride<MT, KT, kStored>>(tile));
    for (int m = 0; m < MT; m++)
        for (int k = 0; k < KT; k++)
            for (int r = 0; r < 4; r++) out[((m * KT + k) * 32 + threadIdx.x) * 4 + r] = fragments.tile[m][k].reg[r];
}

template <int MT, int KT, Stored kStored>
void check_load_fragments() {
    constexpr int kStride = kLoadStride<MT, KT, kStored>;
    std::vector<__nv_bfloat16> values;
    for (unsigned i = 0; i < 16 * (kStored == Stored::kByRow ? MT : KT) * kStride; i++) values.push_back(bfloat16_of(static_cast<uint16_t>(i * 40503u)));
    std::vector<unsigned> expected;
    for (int m = 0; m < MT; m++)
        for (int k = 0; k < KT; k++)
            for (int lane = 0; lane < 32; lane++)
                for (int r = 0; r < 4; r++) {
                    const auto element = [&](TilePlace place) {
                        const int row = 16 * m + place.row, depth = 16 * k + place.column;
                        return bits_of(values[kStored == Stored::kByRow ? row * kStride + depth : depth * kStride + row]);
                    };
                    expected.push_back(pair_of(element(place_of_a(lane, 2 * r)), element(place_of_a(lane, 2 * r + 1))));
                }
    DeviceBuffer<__nv_bfloat16> in(values);
    DeviceBuffer<unsigned> out(expected.size());
    launch(load_fragments_kernel<MT, KT, kStored>, 1, 32, values.size() * sizeof(__nv_bfloat16), test_stream(), out, in, static_cast<int>(values.size()));
    expect_same_bits("registers", out.download(), expected);
}

TEST(Fragments, Loaded) {
    check_load_fragments<1, 1, Stored::kByRow>();
    check_load_fragments<2, 4, Stored::kByRow>();
    check_load_fragments<4, 5, Stored::kByRow>();
    check_load_fragments<1, 2, Stored::kByDepth>();
    check_load_fragments<4, 3, Stored::kByDepth>();
}

// A tile of floats in memory: the first four elements of each lane, then the last four.
__global__ void tile_kernel(float* loaded, float* stored, const float* in) {
    store8(loaded + 8 * threadIdx.x, load_tile(in + threadIdx.x / 32 * kTileFloats));
    store_tile(stored + threadIdx.x / 32 * kTileFloats, load8(in + 8 * threadIdx.x));
}

TEST(Fragments, TilesInMemory) {
    constexpr int kThreads = 64;
    const std::vector<double> values = counted(8 * kThreads);
    std::vector<double> loaded(values.size()), stored(values.size());
    for (int thread = 0; thread < kThreads; thread++)
        for (int i = 0; i < 8; i++) {
            const int lane_element = 8 * thread + i, memory_element = thread / 32 * 256 + i / 4 * 128 + thread % 32 * 4 + i % 4;
            loaded[lane_element] = values[memory_element];
            stored[memory_element] = values[lane_element];
        }
    DeviceBuffer<float> in(to_storage<float>(values)), actual_loaded(values.size()), actual_stored(values.size());
    launch(tile_kernel, 1, kThreads, 0, test_stream(), actual_loaded, actual_stored, in);
    expect_close("load_tile", actual_loaded.values(), loaded, exactly);
    expect_close("store_tile", actual_stored.values(), stored, exactly);
}

// ---- the four lanes of a row -------------------------------------------------------------------------------------------------

template <int N>
__global__ void quad_kernel(float* sums, float* largest, const float* terms, const float* candidates) {
    float sum[N], most[N];
    for (int i = 0; i < N; i++) {
        sum[i] = terms[N * threadIdx.x + i];
        most[i] = candidates[N * threadIdx.x + i];
    }
    quad_sum(sum);
    quad_max(most);
    for (int i = 0; i < N; i++) {
        sums[N * threadIdx.x + i] = sum[i];
        largest[N * threadIdx.x + i] = most[i];
    }
}

template <int N>
void check_quads() {
    constexpr int kThreads = 64;
    const std::vector<float> terms = to_storage<float>(random_values<float>(N * kThreads, N));
    std::vector<float> candidates = to_storage<float>(random_values<float>(N * kThreads, N + 100)), sums, largest;
    for (size_t i = 0; i < candidates.size(); i++) {
        const size_t lane = i / N % 32;
        if (lane < 8) candidates[i] = -std::abs(candidates[i]) - 1;  // a maximum that starts at zero shows
        if (lane % 8 == 1) candidates[i] = -kInfinity;
        if (lane / 4 == 2) candidates[i] = -kInfinity;  // in all four lanes
        if (lane >= 16 && lane % 5 == 0) candidates[i] = float_of(0x7fed7fed);  // as fmaxf: of a number and a NaN, the number
    }
    for (int thread = 0; thread < kThreads; thread++)
        for (int i = 0; i < N; i++) {
            const auto at = [&](int lane) { return N * (thread / 4 * 4 + lane) + i; };
            sums.push_back((terms[at(0)] + terms[at(1)]) + (terms[at(2)] + terms[at(3)]));  // in this order on every device, the same bits in all four lanes
            float most = -kInfinity;
            for (int lane = 0; lane < 4; lane++) most = candidates[at(lane)] > most ? candidates[at(lane)] : most;
            largest.push_back(most);
        }
    DeviceBuffer<float> in(terms), compared(candidates), actual_sums(terms.size()), actual_largest(terms.size());
    launch(quad_kernel<N>, 1, kThreads, 0, test_stream(), actual_sums, actual_largest, in, compared);
    expect_same_bits("quad_sum", actual_sums.download(), sums);
    expect_same_bits("quad_max", actual_largest.download(), largest);
}

TEST(Quads, SumAndMax) {
    check_quads<1>();
    check_quads<2>();
    check_quads<8>();
}

// ---- 2^x ---------------------------------------------------------------------------------------------------------------------

// Whether `actual` is 2^t for a t within `slack` of `argument`: within a relative 2^-22, positive zero where that is below 2^-126, infinity from 2^128 on.
bool is_exp2(float actual, double argument, double slack) {
    if (std::isnan(argument)) return std::isnan(actual);
    if (actual == 0) return !std::signbit(actual) && argument - slack < -126;
    if (std::isinf(actual)) return actual > 0 && argument + slack >= 128;
    const double expected = std::exp2(argument);
    return argument + slack >= -126 && argument - slack < 128 && std::abs(actual - expected) <= expected * (0x1p-22 + (1 + 0x1p-22) * (std::exp2(slack) - 1));
}

template <int N>
__global__ void exp2_kernel(float* vectors, float* in_place, const float* in, int count) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (i >= count) return;
    store8(vectors + i, exp2_8(load8(in + i)));
    float x[N];
    for (int j = 0; j < N; j++) x[j] = in[i + j];
    exp2_in_place(x);
    for (int j = 0; j < 8; j++) in_place[i + j] = j < N ? x[j] : vectors[i + j];
}

// Edges of the range, of the results' range, and of the ranges that exponents divide it into.
std::vector<float> exp2_arguments() {
    std::vector<float> values;
    constexpr int kSteps = 1 << 20;
    for (int i = 0; i <= kSteps; i++) values.push_back(static_cast<float>(-150 + 280 * (i / static_cast<double>(kSteps - 5))));
    for (double x = -150; x <= 130; x += 0.5) {
        float below = static_cast<float>(x), above = below;
        values.push_back(below);
        for (int i = 0; i < 4; i++) {
            values.push_back(below = std::nextafter(below, -kInfinity));
            values.push_back(above = std::nextafter(above, kInfinity));
        }
    }
    for (const float x : {0.0f, 1e-40f, 0x1p-126f, 0x1p-30f, 1e10f, kFloatMax, kInfinity, float_of(0x7fc00000), float_of(0x7fed7fed), float_of(0x7fffffff)}) {
        values.push_back(x);
        values.push_back(-x);
    }
    while (values.size() % 8 != 0) values.push_back(0.0f);
    return values;
}

void check_exp2(void (*kernel)(float*, float*, const float*, int), const std::vector<float>& values) {
    DeviceBuffer<float> in(values), vectors(values.size()), in_place(values.size());
    launch(kernel, grid_for(values.size(), 128 * 8), 128, 0, test_stream(), vectors, in_place, in, static_cast<int>(values.size()));
    const std::vector<float> actual = vectors.download();
    double worst = 0;
    int worst_ulp = 0;
    for (size_t i = 0; i < values.size(); i++) {
        const double x = values[i], expected = std::exp2(x);
        ASSERT_TRUE(is_exp2(actual[i], x, 0))
            << "2^" << values[i] << " is " << actual[i] << ", expected " << expected << ", relative error " << actual[i] / expected - 1;
        if (x >= -126 && x < 128) {
            // 9.7.3.21, "Floating Point Instructions: ex2": within 2 ulp of the correctly rounded result. Just above a power of two that alone would allow a
            // relative 2.5 * 2^-23; ptx.cuh, and the bounds of attention, count on 2^-22.
            const int ulp = std::abs(static_cast<int>(bits_of(actual[i])) - static_cast<int>(bits_of(static_cast<float>(expected))));
            ASSERT_LE(ulp, 2) << "2^" << values[i] << " is " << actual[i] << ", expected " << expected;
            worst_ulp = std::max(worst_ulp, ulp);
            worst = std::max(worst, std::abs(actual[i] / expected - 1));
        }
        if (x == 0) {
            ASSERT_EQ(bits_of(actual[i]), bits_of(1.0f));
        }
    }
    ::testing::Test::RecordProperty("worst_ulp", worst_ulp);
    ::testing::Test::RecordProperty("worst_relative_error_2p32", static_cast<int>(worst * 0x1p32));
    expect_same_bits("exp2_in_place", in_place.download(), actual);
}

TEST(Exp2, WithinItsBound) {
    const std::vector<float> values = exp2_arguments();
    check_exp2(exp2_kernel<8>, values);
    const std::vector<float> few(values.begin(), values.begin() + 8 * 1024);
    check_exp2(exp2_kernel<1>, few);
    check_exp2(exp2_kernel<4>, few);
}

__global__ void multiply_subtract_kernel(float* out, const float* x) { out[0] = x[0] * x[1] - x[2]; }

// Whether the device's compiler makes one rounding of a product and a difference: not for a CPU without such an instruction.
bool device_fuses() {
    DeviceBuffer<float> in(std::vector<float>{1 + 0x1p-12f, 1 + 0x1p-12f, 1 + 0x1p-11f}), out(1);
    launch(multiply_subtract_kernel, 1, 1, 0, test_stream(), out, in);
    return out.values()[0] == 0x1p-24;
}

template <int N>
__global__ void exp2_scaled_kernel(float* out, const float* in, const float* minus, float factor, int count) {
    const int first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) * 8 * N;
    if (first >= count) return;
    Float8 x[N], y[N];
    for (int i = 0; i < N; i++) x[i] = load8(in + first + 8 * i), y[i] = load8(minus + first + 8 * i);
    exp2_scaled<N>(x, factor, y);
    for (int i = 0; i < N; i++) store8(out + first + 8 * i, x[i]);
}

// What is subtracted comes close to a large product, so that a second rounding would show.
void check_exp2_scaled(void (*kernel)(float*, const float*, const float*, float, int), unsigned vectors, float factor, double scale) {
    const size_t count = 8 * vectors * 2048;
    std::vector<double> x = random_values<float>(count, vectors, scale), result = random_values<float>(count, vectors + 100, 40);
    std::vector<float> values = to_storage<float>(x), minus;
    for (size_t i = 0; i < count; i++) {
        if (i % 61 == 0) values[i] = -kInfinity;
        if (i % 67 == 0) values[i] = float_of(0x7fed7fed);
        minus.push_back(static_cast<float>((std::isfinite(values[i]) ? static_cast<double>(values[i]) * factor : 1.0) - result[i]));
    }
    DeviceBuffer<float> in(values), subtracted(minus), out(count);
    launch(kernel, grid_for(count, 64 * 8 * vectors), 64, 0, test_stream(), out, in, subtracted, factor, static_cast<int>(count));
    const std::vector<float> actual = out.download();
    const bool fused = device_fuses();
    for (size_t i = 0; i < count; i++) {
        // Exact in double up to 2^-53. The argument rounds once; without a fused multiply-add the product rounds, too.
        const double product = static_cast<double>(values[i]) * factor, argument = product - minus[i];
        const double rounding = kRoundoff32 * (std::abs(argument) + (fused ? 0 : 1.001 * std::abs(product))) + 0x1p-52 * std::abs(product);
        ASSERT_TRUE(is_exp2(actual[i], argument, std::isfinite(argument) ? rounding : 0))
            << "2^(" << values[i] << " * " << factor << " - " << minus[i] << ") is " << actual[i] << ", expected " << std::exp2(argument);
    }
}

TEST(Exp2, Scaled) {
    check_exp2_scaled(exp2_scaled_kernel<1>, 1, 0.125f * 1.44269504f, 100);
    check_exp2_scaled(exp2_scaled_kernel<2>, 2, 0.125f * 1.44269504f, 10000);
    check_exp2_scaled(exp2_scaled_kernel<3>, 3, 1.0f, 1000);
    check_exp2_scaled(exp2_scaled_kernel<4>, 4, 0.0883883f * 1.44269504f, 1);
    check_exp2_scaled(exp2_scaled_kernel<5>, 5, -3.7f, 1000);
    check_exp2_scaled(exp2_scaled_kernel<8>, 8, 0.1f, 10000);
}

}  // namespace
