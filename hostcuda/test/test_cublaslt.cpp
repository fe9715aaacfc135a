// cuBLASLt subset: every transpose, type pair, leading dimension, epilogue and beta against a double loop; refusals.
#include <cublasLt.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "hostcuda/internal.h"

namespace {

uint16_t bf16_bits(float f) {   // to nearest even; the values here are finite
    uint32_t u;
    memcpy(&u, &f, 4);
    return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
float bf16_value(uint16_t h) {
    const uint32_t u = static_cast<uint32_t>(h) << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

struct Device {   // a device buffer with a host copy of its values
    cudaDataType type;
    std::vector<float> values;
    char* raw = nullptr;
    char* data = nullptr;
    size_t size() const { return type == CUDA_R_32F ? 4 : 2; }
    Device(cudaDataType t, size_t count, std::mt19937& random, size_t shift_elements = 0) : type(t), values(count) {
        std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
        for (float& v : values) v = t == CUDA_R_32F ? uniform(random) : bf16_value(bf16_bits(uniform(random)));
        EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&raw), (count + shift_elements) * size()), cudaSuccess);
        data = raw + shift_elements * size();
        upload();
    }
    ~Device() { cudaFree(raw); }
    Device(const Device&) = delete;
    void upload() {
        if (type == CUDA_R_32F) {
            cudaMemcpy(data, values.data(), values.size() * 4, cudaMemcpyHostToDevice);
        } else {
            std::vector<uint16_t> bits(values.size());
            for (size_t i = 0; i < bits.size(); ++i) bits[i] = bf16_bits(values[i]);
            cudaMemcpy(data, bits.data(), bits.size() * 2, cudaMemcpyHostToDevice);
        }
        // A copy from pageable memory may land after the call; streams other than the default one do not wait for it.
        EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
    std::vector<float> download() const {
        std::vector<float> out(values.size());
        if (type == CUDA_R_32F) {
            cudaMemcpy(out.data(), data, out.size() * 4, cudaMemcpyDeviceToHost);
        } else {
            std::vector<uint16_t> bits(values.size());
            cudaMemcpy(bits.data(), data, bits.size() * 2, cudaMemcpyDeviceToHost);
            for (size_t i = 0; i < bits.size(); ++i) out[i] = bf16_value(bits[i]);
        }
        return out;
    }
};

struct Case {
    int m, n, k;
    bool ta = false, tb = false;
    cudaDataType in = CUDA_R_16BF, out = CUDA_R_16BF;
    int pad = 0;           // leading dimensions are this much over their minimum
    bool bias = false;
    float alpha = 1, beta = 0;
    bool in_place = true;
    int batch = 1;
    bool row_order = false;
    size_t workspace_limit = 0;
    std::string name() const {
        return "m " + std::to_string(m) + " n " + std::to_string(n) + " k " + std::to_string(k) + " ta " + std::to_string(ta) + " tb " + std::to_string(tb) +
               (in == CUDA_R_32F ? " f32" : " bf16") + (out == CUDA_R_32F ? "->f32" : "->bf16") + " pad " + std::to_string(pad) + " bias " + std::to_string(bias) +
               " alpha " + std::to_string(alpha) + " beta " + std::to_string(beta) + " in place " + std::to_string(in_place) + " batch " + std::to_string(batch) +
               (row_order ? " row order" : "");
    }
};

struct Objects {   // descriptors of a case
    cublasLtHandle_t handle = nullptr;
    cublasLtMatmulDesc_t op = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr, d = nullptr;
    cublasLtMatmulPreference_t pref = nullptr;
    cudaStream_t stream = nullptr;

    static void batch(cublasLtMatrixLayout_t layout, int count, int64_t stride) {
        ASSERT_EQ(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count)), CUBLAS_STATUS_SUCCESS);
        ASSERT_EQ(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof(stride)), CUBLAS_STATUS_SUCCESS);
    }
    // Stored sizes; in row order a "column" of the storage is a row of the matrix.
    static void stored(const Case& x, char which, int& rows, int& cols, int& ld) {
        rows = which == 'a' ? (x.ta ? x.k : x.m) : which == 'b' ? (x.tb ? x.n : x.k) : x.m;
        cols = which == 'a' ? (x.ta ? x.m : x.k) : which == 'b' ? (x.tb ? x.k : x.n) : x.n;
        ld = (x.row_order ? cols : rows) + x.pad;
    }
    static size_t count(const Case& x, char which) {
        int rows, cols, ld;
        stored(x, which, rows, cols, ld);
        return static_cast<size_t>(ld) * static_cast<size_t>(x.row_order ? rows : cols);
    }
    explicit Objects(const Case& x) {
        EXPECT_EQ(cublasLtCreate(&handle), CUBLAS_STATUS_SUCCESS);
        EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
        EXPECT_EQ(cublasLtMatmulDescCreate(&op, CUBLAS_COMPUTE_32F, CUDA_R_32F), CUBLAS_STATUS_SUCCESS);
        const int32_t ta = x.ta ? CUBLAS_OP_T : CUBLAS_OP_N, tb = x.tb ? CUBLAS_OP_T : CUBLAS_OP_N;
        EXPECT_EQ(cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSA, &ta, sizeof(ta)), CUBLAS_STATUS_SUCCESS);
        EXPECT_EQ(cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSB, &tb, sizeof(tb)), CUBLAS_STATUS_SUCCESS);
        for (const char which : {'a', 'b', 'c', 'd'}) {
            cublasLtMatrixLayout_t& layout = which == 'a' ? a : which == 'b' ? b : which == 'c' ? c : d;
            int rows, cols, ld;
            stored(x, which, rows, cols, ld);
            EXPECT_EQ(cublasLtMatrixLayoutCreate(&layout, which < 'c' ? x.in : x.out, static_cast<uint64_t>(rows), static_cast<uint64_t>(cols), ld), CUBLAS_STATUS_SUCCESS);
            if (x.batch > 1) batch(layout, x.batch, static_cast<int64_t>(count(x, which)));
            const int32_t order = CUBLASLT_ORDER_ROW;
            if (x.row_order) {
                EXPECT_EQ(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_ORDER, &order, sizeof(order)), CUBLAS_STATUS_SUCCESS);
            }
        }
        EXPECT_EQ(cublasLtMatmulPreferenceCreate(&pref), CUBLAS_STATUS_SUCCESS);
        const uint64_t limit = x.workspace_limit;
        EXPECT_EQ(cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &limit, sizeof(limit)), CUBLAS_STATUS_SUCCESS);
    }
    ~Objects() {
        cublasLtMatmulPreferenceDestroy(pref);
        for (const auto layout : {a, b, c, d}) cublasLtMatrixLayoutDestroy(layout);
        cublasLtMatmulDescDestroy(op);
        cudaStreamDestroy(stream);
        cublasLtDestroy(handle);
    }
    void set_bias(const void* pointer) {
        const uint32_t epilogue = CUBLASLT_EPILOGUE_BIAS;
        EXPECT_EQ(cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue)), CUBLAS_STATUS_SUCCESS);
        EXPECT_EQ(cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &pointer, sizeof(pointer)), CUBLAS_STATUS_SUCCESS);
    }
    cublasStatus_t heuristic(std::vector<cublasLtMatmulHeuristicResult_t>& results) {
        results.resize(8);
        int returned = 0;
        const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, op, a, b, c, d, pref, 8, results.data(), &returned);
        results.resize(static_cast<size_t>(returned));
        return status;
    }
};

// Runs the case and returns D as stored; checks it against double sums.
std::vector<float> check(const Case& x, unsigned seed = 1) {
    std::mt19937 random(seed);
    Objects o(x);
    Device a(x.in, Objects::count(x, 'a') * static_cast<size_t>(x.batch), random);
    Device b(x.in, Objects::count(x, 'b') * static_cast<size_t>(x.batch), random);
    Device d(x.out, Objects::count(x, 'd') * static_cast<size_t>(x.batch), random);
    Device c(x.out, Objects::count(x, 'c') * static_cast<size_t>(x.batch), random);
    Device bias(x.out, static_cast<size_t>(x.m), random);
    if (x.bias) o.set_bias(bias.data);
    const Device& c_used = x.in_place ? d : c;
    void* workspace = nullptr;
    if (x.workspace_limit) cudaMalloc(&workspace, x.workspace_limit);
    std::vector<cublasLtMatmulHeuristicResult_t> algos;
    EXPECT_EQ(o.heuristic(algos), CUBLAS_STATUS_SUCCESS);
    EXPECT_FALSE(algos.empty());
    if (algos.empty()) return {};
    EXPECT_EQ(cublasLtMatmul(o.handle, o.op, &x.alpha, a.data, o.a, b.data, o.b, &x.beta, c_used.data, o.c, d.data, o.d, &algos[0].algo, workspace,
                             x.workspace_limit, o.stream),
              CUBLAS_STATUS_SUCCESS)
        << x.name();
    EXPECT_EQ(cudaStreamSynchronize(o.stream), cudaSuccess);
    const std::vector<float> got = d.download();
    cudaFree(workspace);

    const auto index = [&x](char which, int row, int col, int batch) {
        int rows, cols, ld;
        Objects::stored(x, which, rows, cols, ld);
        return static_cast<size_t>(batch) * Objects::count(x, which) + (x.row_order ? static_cast<size_t>(row) * static_cast<size_t>(ld) + static_cast<size_t>(col)
                                                                                     : static_cast<size_t>(col) * static_cast<size_t>(ld) + static_cast<size_t>(row));
    };
    // From one summand to the next.
    const size_t a_step = x.k < 2 ? 0 : (x.ta ? index('a', 1, 0, 0) : index('a', 0, 1, 0));
    const size_t b_step = x.k < 2 ? 0 : (x.tb ? index('b', 0, 1, 0) : index('b', 1, 0, 0));
    // Padding between columns must stay as it was.
    std::vector<float> expected = d.values;
    std::vector<char> inside(got.size(), 0);
    int shown = 0;
    for (int batch = 0; batch < x.batch; ++batch)
        for (int i = 0; i < x.m; ++i)
            for (int j = 0; j < x.n; ++j) {
                double sum = 0, magnitude = 0;
                const float* pa = &a.values[x.ta ? index('a', 0, i, batch) : index('a', i, 0, batch)];
                const float* pb = &b.values[x.tb ? index('b', j, 0, batch) : index('b', 0, j, batch)];
                for (int p = 0; p < x.k; ++p, pa += a_step, pb += b_step) {
                    const double product = static_cast<double>(*pa) * static_cast<double>(*pb);
                    sum += product;
                    magnitude += std::fabs(product);
                }
                double want = static_cast<double>(x.alpha) * sum;
                double size = std::fabs(static_cast<double>(x.alpha)) * magnitude;
                const double addends[2] = {x.beta != 0 ? static_cast<double>(x.beta) * static_cast<double>(c_used.values[index('c', i, j, batch)]) : 0,
                                           x.bias ? static_cast<double>(bias.values[static_cast<size_t>(i)]) : 0};
                for (const double addend : addends) {
                    want += addend;
                    size += std::fabs(addend);
                }
                // A sum of K products in fp32, in any order, is off by at most K * 2^-24 * sum |a b| (to first order); scaling and the two
                // addends are three roundings more; then one rounding to the output type: 2^-24 or 2^-8 of the value.
                const double error = (x.k + 4) * std::ldexp(1.0, -24) * size;
                const double tolerance = error + (x.out == CUDA_R_32F ? std::ldexp(1.0, -24) : std::ldexp(1.0, -8)) * (std::fabs(want) + error);
                const size_t at = index('d', i, j, batch);
                inside[at] = 1;
                if (!(std::fabs(static_cast<double>(got[at]) - want) <= tolerance) && shown++ < 3)
                    ADD_FAILURE() << x.name() << ": D(" << i << "," << j << ") batch " << batch << " is " << got[at] << ", expected " << want << " +- " << tolerance;
            }
    for (size_t i = 0; i < got.size() && shown < 3; ++i)
        if (!inside[i] && got[i] != expected[i]) {
            ADD_FAILURE() << x.name() << ": wrote outside D at element " << i;
            ++shown;
        }
    return got;
}

constexpr cudaDataType kPairs[3][2] = {{CUDA_R_16BF, CUDA_R_16BF}, {CUDA_R_16BF, CUDA_R_32F}, {CUDA_R_32F, CUDA_R_32F}};

TEST(CublasLt, AllCombinations) {
    const int sizes[][3] = {{1, 1, 1}, {3, 5, 7}, {16, 8, 24}, {33, 1, 40}, {1, 19, 64}, {70, 45, 33}};
    for (const auto& s : sizes)
        for (const auto& pair : kPairs)
            for (const bool ta : {false, true})
                for (const bool tb : {false, true})
                    for (const int pad : {0, 5})
                        for (const bool bias : {false, true})
                            for (const float beta : {0.0f, 1.0f, -0.5f}) {
                                Case x{s[0], s[1], s[2], ta, tb, pair[0], pair[1], pad};
                                x.bias = bias;
                                x.beta = beta;
                                check(x);
                            }
}

TEST(CublasLt, SeveralPieces) {   // long enough along rows or columns to be cut, with a narrower last piece
    const int sizes[][3] = {{520, 130, 260}, {130, 520, 260}};
    for (const auto& s : sizes)
        for (const auto& pair : kPairs)
            for (const bool ta : {false, true})
                for (const bool tb : {false, true}) {
                    Case x{s[0], s[1], s[2], ta, tb, pair[0], pair[1], ta ? 8 : 0};
                    x.bias = tb;
                    x.beta = ta == tb ? 1.0f : 0.0f;
                    check(x);
                }
}

TEST(CublasLt, ScalesAndOutOfPlace) {
    for (const auto& pair : kPairs)
        for (const float alpha : {1.0f, 0.25f, -3.0f, 0.0f})
            for (const float beta : {0.0f, 1.0f, 2.5f})
                for (const bool in_place : {false, true}) {
                    Case x{40, 24, 56, true, false, pair[0], pair[1], 8};
                    x.bias = true;
                    x.alpha = alpha;
                    x.beta = beta;
                    x.in_place = in_place;
                    check(x);
                }
}

TEST(CublasLt, RowOrderAndBatches) {
    for (const auto& pair : kPairs)
        for (const bool ta : {false, true})
            for (const bool tb : {false, true})
                for (const bool row_order : {false, true})
                    for (const float beta : {0.0f, 1.0f}) {
                        Case x{24, 17, 32, ta, tb, pair[0], pair[1], 3};
                        x.batch = 3;
                        x.row_order = row_order;
                        x.beta = beta;
                        x.bias = !row_order;
                        check(x);
                    }
}

TEST(CublasLt, LayoutsOfTraining) {   // an MLP and a head: forward, input gradient, weight gradient
    const int tokens = 64, channels = 96;
    for (const auto& pair : kPairs)
        for (const int outputs : {3 * channels, 8 * channels, 500}) {
            check({outputs, tokens, channels, true, false, pair[0], pair[1]});
            check({channels, tokens, outputs, false, false, pair[0], pair[1]});
            Case weight{channels, outputs, tokens, false, true, pair[0], pair[1]};
            weight.beta = 1;
            check(weight);
        }
}

TEST(CublasLt, SameBitsEveryTime) {
    for (const auto& pair : kPairs) {
        Case x{520, 130, 260, true, false, pair[0], pair[1]};
        x.workspace_limit = 1 << 20;
        const std::vector<float> first = check(x), second = check(x);
        EXPECT_EQ(0, memcmp(first.data(), second.data(), first.size() * sizeof(float)));
    }
}

TEST(CublasLt, ChoicesAreBytesThatDependOnTheProblemOnly) {
    Case x{256, 128, 64, true, false};
    x.workspace_limit = 1 << 20;
    Objects first(x), second(x);
    std::vector<cublasLtMatmulHeuristicResult_t> one, two;
    ASSERT_EQ(first.heuristic(one), CUBLAS_STATUS_SUCCESS);
    ASSERT_EQ(second.heuristic(two), CUBLAS_STATUS_SUCCESS);
    ASSERT_EQ(one.size(), 2u);
    ASSERT_EQ(two.size(), 2u);
    EXPECT_EQ(0, memcmp(one.data(), two.data(), 2 * sizeof(one[0])));
    EXPECT_GT(one[0].workspaceSize, 0u);
    EXPECT_EQ(one[1].workspaceSize, 0u);
    x.workspace_limit = 0;
    Objects third(x);
    ASSERT_EQ(third.heuristic(two), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(two.size(), 1u);
    EXPECT_EQ(sizeof(cublasLtMatmulAlgo_t), 64u);
}

TEST(CublasLt, PlainSumsAreOffWhereSixteenBitsWouldBe) {
    // 512 ones and then 512 values of 2^-9: fp32 sums keep them, sums rounded to bf16 on the way would lose them all.
    const int k = 1024;
    std::mt19937 random(3);
    Case x{8, 8, k, true, false, CUDA_R_16BF, CUDA_R_32F};
    Objects o(x);
    Device a(CUDA_R_16BF, 8 * k, random), b(CUDA_R_16BF, 8 * k, random), d(CUDA_R_32F, 64, random);
    for (size_t i = 0; i < a.values.size(); ++i) {
        a.values[i] = 1;
        b.values[i] = i % k < 512 ? 1.0f : 0x1p-9f;
    }
    a.upload();
    b.upload();
    const float alpha = 1, beta = 0;
    ASSERT_EQ(cublasLtMatmul(o.handle, o.op, &alpha, a.data, o.a, b.data, o.b, &beta, d.data, o.c, d.data, o.d, nullptr, nullptr, 0, o.stream), CUBLAS_STATUS_SUCCESS);
    ASSERT_EQ(cudaStreamSynchronize(o.stream), cudaSuccess);
    for (const float v : d.download()) EXPECT_EQ(v, 513.0f);
}

// ---- refusals -----------------------------------------------------------------------------------------------------

struct Refusals : testing::Test {
    Case x{64, 48, 32, true, false};
    std::mt19937 random{7};
    Objects o{x};
    Device a{CUDA_R_16BF, 64 * 32 + 64, random}, b{CUDA_R_16BF, 48 * 32 + 64, random}, d{CUDA_R_16BF, 64 * 48 + 64, random};
    float alpha = 1, beta = 0;
    std::vector<cublasLtMatmulHeuristicResult_t> results;

    cublasStatus_t run(const cublasLtMatmulAlgo_t* algo = nullptr, void* workspace = nullptr, size_t workspace_bytes = 0) {
        return cublasLtMatmul(o.handle, o.op, &alpha, a.data, o.a, b.data, o.b, &beta, d.data, o.c, d.data, o.d, algo, workspace, workspace_bytes, o.stream);
    }
    void both(cublasStatus_t expected) {
        EXPECT_EQ(o.heuristic(results), expected);
        EXPECT_TRUE(results.empty());
        EXPECT_EQ(run(), expected);
    }
    template <typename T>
    void layout(cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t attribute, T value) {
        ASSERT_EQ(cublasLtMatrixLayoutSetAttribute(l, attribute, &value, sizeof(value)), CUBLAS_STATUS_SUCCESS);
    }
    template <typename T>
    void op(cublasLtMatmulDescAttributes_t attribute, T value) {
        ASSERT_EQ(cublasLtMatmulDescSetAttribute(o.op, attribute, &value, sizeof(value)), CUBLAS_STATUS_SUCCESS);
    }
};

TEST_F(Refusals, NothingWrongToBeginWith) { EXPECT_EQ(run(), CUBLAS_STATUS_SUCCESS); }

TEST_F(Refusals, NullPointers) {
    EXPECT_EQ(cublasLtMatmul(o.handle, o.op, nullptr, a.data, o.a, b.data, o.b, &beta, d.data, o.c, d.data, o.d, nullptr, nullptr, 0, o.stream), CUBLAS_STATUS_INVALID_VALUE);
    EXPECT_EQ(cublasLtMatmul(o.handle, o.op, &alpha, nullptr, o.a, b.data, o.b, &beta, d.data, o.c, d.data, o.d, nullptr, nullptr, 0, o.stream), CUBLAS_STATUS_INVALID_VALUE);
    EXPECT_EQ(cublasLtMatmul(o.handle, o.op, &alpha, a.data, o.a, nullptr, o.b, &beta, d.data, o.c, d.data, o.d, nullptr, nullptr, 0, o.stream), CUBLAS_STATUS_INVALID_VALUE);
    EXPECT_EQ(cublasLtMatmul(o.handle, o.op, &alpha, a.data, o.a, b.data, o.b, nullptr, d.data, o.c, d.data, o.d, nullptr, nullptr, 0, o.stream), CUBLAS_STATUS_INVALID_VALUE);
    EXPECT_EQ(cublasLtMatmul(o.handle, o.op, &alpha, a.data, o.a, b.data, o.b, &beta, d.data, o.c, nullptr, o.d, nullptr, nullptr, 0, o.stream), CUBLAS_STATUS_INVALID_VALUE);
    EXPECT_EQ(cublasLtMatmul(o.handle, o.op, &alpha, a.data, nullptr, b.data, o.b, &beta, d.data, o.c, d.data, o.d, nullptr, nullptr, 0, o.stream), CUBLAS_STATUS_INVALID_VALUE);
    EXPECT_EQ(cublasLtMatmul(o.handle, nullptr, &alpha, a.data, o.a, b.data, o.b, &beta, d.data, o.c, d.data, o.d, nullptr, nullptr, 0, o.stream), CUBLAS_STATUS_INVALID_VALUE);
    EXPECT_EQ(cublasLtMatmul(nullptr, o.op, &alpha, a.data, o.a, b.data, o.b, &beta, d.data, o.c, d.data, o.d, nullptr, nullptr, 0, o.stream), CUBLAS_STATUS_NOT_INITIALIZED);
    beta = 1;
    EXPECT_EQ(cublasLtMatmul(o.handle, o.op, &alpha, a.data, o.a, b.data, o.b, &beta, nullptr, o.c, d.data, o.d, nullptr, nullptr, 0, o.stream), CUBLAS_STATUS_INVALID_VALUE);
    EXPECT_EQ(cublasLtCreate(nullptr), CUBLAS_STATUS_INVALID_VALUE);
    EXPECT_EQ(cublasLtMatrixLayoutCreate(nullptr, CUDA_R_32F, 1, 1, 1), CUBLAS_STATUS_INVALID_VALUE);
    EXPECT_EQ(cublasLtMatmulDescDestroy(nullptr), CUBLAS_STATUS_INVALID_VALUE);
    int returned;
    EXPECT_EQ(cublasLtMatmulAlgoGetHeuristic(o.handle, o.op, o.a, o.b, o.c, o.d, o.pref, 1, nullptr, &returned), CUBLAS_STATUS_INVALID_VALUE);
    EXPECT_EQ(cublasLtMatmulAlgoGetHeuristic(o.handle, o.op, o.a, o.b, o.c, o.d, nullptr, 1, results.data(), &returned), CUBLAS_STATUS_INVALID_VALUE);
}

TEST_F(Refusals, SizesThatDisagree) {
    layout(o.b, CUBLASLT_MATRIX_LAYOUT_ROWS, uint64_t{31});
    both(CUBLAS_STATUS_INVALID_VALUE);
}
TEST_F(Refusals, OutputOfAnotherSize) {
    layout(o.d, CUBLASLT_MATRIX_LAYOUT_COLS, uint64_t{47});
    both(CUBLAS_STATUS_INVALID_VALUE);
}
TEST_F(Refusals, TransposeThatDoesNotFit) {
    op(CUBLASLT_MATMUL_DESC_TRANSA, int32_t{CUBLAS_OP_N});
    both(CUBLAS_STATUS_INVALID_VALUE);
}
TEST_F(Refusals, LeadingDimensionTooSmall) {
    layout(o.a, CUBLASLT_MATRIX_LAYOUT_LD, int64_t{31});
    both(CUBLAS_STATUS_INVALID_VALUE);
}
TEST_F(Refusals, NoRows) {
    layout(o.a, CUBLASLT_MATRIX_LAYOUT_COLS, uint64_t{0});
    layout(o.c, CUBLASLT_MATRIX_LAYOUT_ROWS, uint64_t{0});
    layout(o.d, CUBLASLT_MATRIX_LAYOUT_ROWS, uint64_t{0});
    both(CUBLAS_STATUS_INVALID_VALUE);
}
TEST_F(Refusals, MixedInputs) {
    layout(o.b, CUBLASLT_MATRIX_LAYOUT_TYPE, uint32_t{CUDA_R_32F});
    both(CUBLAS_STATUS_NOT_SUPPORTED);
}
TEST_F(Refusals, Fp32IntoBf16) {
    layout(o.a, CUBLASLT_MATRIX_LAYOUT_TYPE, uint32_t{CUDA_R_32F});
    layout(o.b, CUBLASLT_MATRIX_LAYOUT_TYPE, uint32_t{CUDA_R_32F});
    both(CUBLAS_STATUS_NOT_SUPPORTED);
}
TEST_F(Refusals, CAndDOfDifferentTypes) {
    layout(o.c, CUBLASLT_MATRIX_LAYOUT_TYPE, uint32_t{CUDA_R_32F});
    both(CUBLAS_STATUS_NOT_SUPPORTED);
}
TEST_F(Refusals, ComputeType) {
    op(CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, int32_t{CUBLAS_COMPUTE_16F});
    both(CUBLAS_STATUS_NOT_SUPPORTED);
}
TEST_F(Refusals, Epilogue) {
    op(CUBLASLT_MATMUL_DESC_EPILOGUE, uint32_t{CUBLASLT_EPILOGUE_GELU});
    both(CUBLAS_STATUS_NOT_SUPPORTED);
}
TEST_F(Refusals, BiasType) {
    op(CUBLASLT_MATMUL_DESC_EPILOGUE, uint32_t{CUBLASLT_EPILOGUE_BIAS});
    op(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, int32_t{CUDA_R_32F});
    both(CUBLAS_STATUS_NOT_SUPPORTED);
}
TEST_F(Refusals, NoBias) {
    op(CUBLASLT_MATMUL_DESC_EPILOGUE, uint32_t{CUBLASLT_EPILOGUE_BIAS});
    EXPECT_EQ(run(), CUBLAS_STATUS_INVALID_VALUE);
}
TEST_F(Refusals, ScalesOfOtherTypes) {
    op(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, static_cast<const void*>(d.data));
    both(CUBLAS_STATUS_INVALID_VALUE);
}
TEST_F(Refusals, DevicePointerMode) {
    op(CUBLASLT_MATMUL_DESC_POINTER_MODE, int32_t{CUBLASLT_POINTER_MODE_DEVICE});
    both(CUBLAS_STATUS_NOT_SUPPORTED);
}
TEST_F(Refusals, MixedOrders) {
    layout(o.a, CUBLASLT_MATRIX_LAYOUT_ORDER, int32_t{CUBLASLT_ORDER_ROW});
    layout(o.a, CUBLASLT_MATRIX_LAYOUT_LD, int64_t{64});
    both(CUBLAS_STATUS_NOT_SUPPORTED);
}
TEST_F(Refusals, BatchCounts) {
    layout(o.a, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, int32_t{2});
    both(CUBLAS_STATUS_INVALID_VALUE);
}
TEST_F(Refusals, AttributeOfTheWrongLength) {
    const int32_t value = CUBLAS_OP_T;
    EXPECT_EQ(cublasLtMatmulDescSetAttribute(o.op, CUBLASLT_MATMUL_DESC_TRANSA, &value, 1), CUBLAS_STATUS_INVALID_VALUE);
    EXPECT_EQ(cublasLtMatmulDescSetAttribute(o.op, CUBLASLT_MATMUL_DESC_TRANSA, nullptr, sizeof(value)), CUBLAS_STATUS_INVALID_VALUE);
    EXPECT_EQ(cublasLtMatmulDescSetAttribute(o.op, static_cast<cublasLtMatmulDescAttributes_t>(999), &value, sizeof(value)), CUBLAS_STATUS_INVALID_VALUE);
    int32_t read = 0;
    size_t written = 0;
    EXPECT_EQ(cublasLtMatmulDescGetAttribute(o.op, CUBLASLT_MATMUL_DESC_TRANSA, &read, sizeof(read), &written), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(read, CUBLAS_OP_T);
    EXPECT_EQ(written, sizeof(read));
    EXPECT_EQ(cublasLtMatmulDescGetAttribute(o.op, CUBLASLT_MATMUL_DESC_TRANSA, nullptr, 0, &written), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(written, 4u);
}
TEST_F(Refusals, InPlaceWithAnotherLeadingDimension) {
    layout(o.c, CUBLASLT_MATRIX_LAYOUT_LD, int64_t{72});
    beta = 1;
    EXPECT_EQ(run(), CUBLAS_STATUS_INVALID_VALUE);
}
TEST_F(Refusals, PointerLessAlignedThanPromised) {
    ASSERT_EQ(o.heuristic(results), CUBLAS_STATUS_SUCCESS);
    a.data += 2;
    EXPECT_EQ(run(&results[0].algo), CUBLAS_STATUS_INVALID_VALUE);
    const uint32_t two = 2;
    ASSERT_EQ(cublasLtMatmulPreferenceSetAttribute(o.pref, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &two, sizeof(two)), CUBLAS_STATUS_SUCCESS);
    ASSERT_EQ(o.heuristic(results), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(run(&results[0].algo), CUBLAS_STATUS_SUCCESS);
    a.data -= 1;   // not even an element
    EXPECT_EQ(run(&results[0].algo), CUBLAS_STATUS_INVALID_VALUE);
}
TEST_F(Refusals, ChoiceOfAnotherProblem) {
    Case other = x;
    other.m = 128;
    Objects o2(other);
    ASSERT_EQ(o2.heuristic(results), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(run(&results[0].algo), CUBLAS_STATUS_NOT_SUPPORTED);
    cublasLtMatmulAlgo_t nothing{};
    EXPECT_EQ(run(&nothing), CUBLAS_STATUS_INVALID_VALUE);
}
TEST_F(Refusals, Workspace) {
    Case large{256, 256, 64, true, false};
    large.workspace_limit = 1 << 20;
    Objects o2(large);
    ASSERT_EQ(o2.heuristic(results), CUBLAS_STATUS_SUCCESS);
    const size_t needed = results[0].workspaceSize;
    ASSERT_GT(needed, 0u);
    Device la(CUDA_R_16BF, 256 * 64, random), lb(CUDA_R_16BF, 256 * 64, random), ld(CUDA_R_16BF, 256 * 256, random), workspace(CUDA_R_32F, needed / 4, random);
    const auto with = [&](void* pointer, size_t bytes) {
        return cublasLtMatmul(o2.handle, o2.op, &alpha, la.data, o2.a, lb.data, o2.b, &beta, ld.data, o2.c, ld.data, o2.d, &results[0].algo, pointer, bytes, o2.stream);
    };
    EXPECT_EQ(with(workspace.data, needed), CUBLAS_STATUS_SUCCESS);
    EXPECT_EQ(with(workspace.data, needed - 1), CUBLAS_STATUS_INVALID_VALUE);
    EXPECT_EQ(with(nullptr, needed), CUBLAS_STATUS_INVALID_VALUE);
    EXPECT_EQ(with(nullptr, 0), CUBLAS_STATUS_INVALID_VALUE);
    cudaStreamSynchronize(o2.stream);
}
TEST_F(Refusals, MatrixOutsideDeviceMemoryStops) {
    testing::FLAGS_gtest_death_test_style = "threadsafe";
    std::vector<uint16_t> host(64 * 32);
    a.data = reinterpret_cast<char*>(host.data());
    EXPECT_DEATH(run(), "cublasLtMatmul: A .*not in device memory");
    layout(o.a, CUBLASLT_MATRIX_LAYOUT_LD, int64_t{1 << 20});   // runs past the end
    a.data = a.raw;
    EXPECT_DEATH(run(), "cublasLtMatmul: A .*not in device memory");
}
TEST_F(Refusals, UnalignedBiasStops) {
    testing::FLAGS_gtest_death_test_style = "threadsafe";
    o.set_bias(b.data + 2);
    EXPECT_DEATH(run(), "the bias .*aligned to 16 bytes");
}

}  // namespace

// The same tests once more without the bf16 product of the machine: a process decides once which way it takes.
TEST(CublasLtConvert, AllOfTheAbove) {
    if (getenv("HOSTCUDA_CUBLASLT_CONVERT")) GTEST_SKIP() << "this is the second run";
    char self[4096];
    const ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
    ASSERT_GT(length, 0);
    const std::string command = "HOSTCUDA_CUBLASLT_CONVERT=1 '" + std::string(self, static_cast<size_t>(length)) + "' --gtest_brief=1";
    EXPECT_EQ(system(command.c_str()), 0);
}
