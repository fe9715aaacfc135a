// Matrix products, all through one cuBLASLt wrapper, and the gradient of a bias. Row-major tensors; a weight is (OC, C) as in Hugging Face's Linear.
//
//   matmul_forward          out (N,OC) =  inp (N,C) weight^T + bias
//   matmul_backward_input   dinp (N,C) =  dout (N,OC) weight
//   matmul_backward_weight  dweight (OC,C) =  dout^T inp
//   bias_backward           dbias (OC) =  column sums of dout (N,OC)
//
// 2 N C OC flops each, summed in fp32 (true fp32 for fp32 tensors, no TF32), rounded once. N is free; C, OC and row distances are multiples of 8
// elements and every address of 16 bytes.
//
// An algorithm is chosen once for each kind of product and kept. Two libraries or two heuristics may choose differently, and then the last bits
// differ: export_choices() gives the choices as bytes, for rank 0 to send around and to store, import_choices() takes them.
#pragma once

#include <array>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include <cublasLt.h>

#include "llmc/device.cuh"

// ---- tensors -------------------------------------------------------------------------------------------------------------------

// A row-major matrix in device memory, (rows, cols) as stored.
struct MatrixDesc {
    const void* data;
    cudaDataType_t type;
    size_t rows, cols;
    size_t ld;                     // elements from one row to the next
    bool transposed = false;       // the product takes it as (cols, rows)
    const float* scale = nullptr;  // device; true value = scale * stored value. For types that need one (fp8)
};

inline cudaDataType_t matrix_type(const float*) { return CUDA_R_32F; }
inline cudaDataType_t matrix_type(const __nv_bfloat16*) { return CUDA_R_16BF; }

template <typename T>
inline MatrixDesc matrix(const T* data, size_t rows, size_t cols) {
    return MatrixDesc{data, matrix_type(data), rows, cols, cols};
}

template <typename T>
inline MatrixDesc transposed(const T* data, size_t rows, size_t cols) {
    MatrixDesc desc = matrix(data, rows, cols);
    desc.transposed = true;
    return desc;
}

inline const char* matrix_type_name(cudaDataType_t type) { return type == CUDA_R_32F ? "fp32" : type == CUDA_R_16BF ? "bf16" : "other type"; }

inline std::string matrix_text(const MatrixDesc& desc) {
    return format("(%zu x %zu %s, row distance %zu)%s", desc.rows, desc.cols, matrix_type_name(desc.type), desc.ld, desc.transposed ? "^T" : "");
}

// ---- the wrapper ---------------------------------------------------------------------------------------------------------------

// What split sums may use. cuBLAS asks for 32 MiB on sm_90 and gains nothing from more.
inline constexpr size_t kMatmulWorkspaceBytes = 32 << 20;

// The library handle, the workspace and the choices made so far. One stream at a time: products on two streams would share the workspace.
class MatmulContext {
public:
    // A kind of product: everything an algorithm may depend on.
    enum KeyField { kRows, kCols, kInner, kLdOut, kLdA, kLdB, kTypeOut, kTypeA, kTypeB, kTransposedA, kTransposedB, kBias, kAccumulate, kScaled, kKeyFields };
    using Key = std::array<int64_t, kKeyFields>;

    // workspace: kMatmulWorkspaceBytes of device memory, a multiple of 256; nullptr: the context allocates its own.
    explicit MatmulContext(void* workspace = nullptr) : workspace_(workspace), owns_workspace_(workspace == nullptr) {
        check(cublasLtCreate(&handle_), "cublasLtCreate");
        check(cublasLtMatmulPreferenceCreate(&preference_), "cublasLtMatmulPreferenceCreate");
        const uint64_t workspace_bytes = kMatmulWorkspaceBytes;
        check(cublasLtMatmulPreferenceSetAttribute(preference_, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes, sizeof(workspace_bytes)),
              "workspace preference");
        // Where the library splits a sum, the parts stay fp32: in the output's type each would be rounded to bf16 before it is added.
        const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
        check(cublasLtMatmulPreferenceSetAttribute(preference_, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions, sizeof(reductions)), "reduction preference");
        // Promising no more than 16 bytes keeps a choice independent of where a stage of ZeRO happens to put a tensor.
        const uint32_t alignment = kAlignment;
        for (const auto attribute : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                                     CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
            check(cublasLtMatmulPreferenceSetAttribute(preference_, attribute, &alignment, sizeof(alignment)), "alignment preference");
        }
        if (owns_workspace_) CUDA_CHECK(cudaMalloc(&workspace_, kMatmulWorkspaceBytes));
        int device = 0;
        cudaDeviceProp properties;
        CUDA_CHECK(cudaGetDevice(&device));
        CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
        architecture_ = 10 * properties.major + properties.minor;
    }
    MatmulContext(const MatmulContext&) = delete;
    MatmulContext& operator=(const MatmulContext&) = delete;
    ~MatmulContext() {
        for (auto& [key, plan] : plans_) destroy(plan);
        if (owns_workspace_) cudaFree(workspace_);
        cublasLtMatmulPreferenceDestroy(preference_);
        cublasLtDestroy(handle_);
    }

    // While true, products choose their algorithm and do nothing else: a dry pass over the model fills the choices.
    bool plan_only = false;

    // out = a b (+ bias) (+ out when accumulate), where a.transposed and b.transposed are applied. bias (out.cols) has out's type.
    void multiply(const MatrixDesc& out, const MatrixDesc& a, const MatrixDesc& b, const void* bias, bool accumulate, cudaStream_t stream) {
        const Key key = make_key(out, a, b, bias, accumulate);
        auto found = plans_.find(key);
        if (found == plans_.end()) found = plans_.emplace(key, make_plan(key, out, a, b, bias)).first;
        Plan& plan = found->second;
        if (plan_only) return;
        CHECK(!used_ || stream == stream_, "matrix products on two streams share one workspace; give the second stream a MatmulContext of its own");
        used_ = true;
        stream_ = stream;
        set_pointers(plan, out, a, b, bias);
        const float one = 1.0f, beta = accumulate ? 1.0f : 0.0f;
        void* const target = const_cast<void*>(out.data);
        // The library is column-major: it sees each matrix transposed and computes out^T = b^T a^T.
        const cublasStatus_t status = cublasLtMatmul(handle_, plan.operation, &one, b.data, plan.b, a.data, plan.a, &beta, target, plan.out, target, plan.out,
                                                     &plan.choice.algorithm, workspace_, kMatmulWorkspaceBytes, stream);
        CHECK(status == CUBLAS_STATUS_SUCCESS, "cublasLtMatmul: %s, for %s%s", cublasLtGetStatusString(status), product_text(out, a, b, bias).c_str(),
              plan.imported ? "; its algorithm was imported and this library does not accept it: choose again without the stored choices" : "");
    }

    size_t num_choices() const { return choices().size(); }

    // All choices, in an order that depends on nothing but them.
    std::vector<unsigned char> export_choices() const {
        const std::map<Key, Choice> all = choices();
        std::vector<unsigned char> bytes;
        const Header header = make_header(all.size());
        append(bytes, &header, sizeof(header));
        for (const auto& [key, choice] : all) {
            append(bytes, key.data(), sizeof(key));
            append(bytes, &choice, sizeof(choice));
        }
        return bytes;
    }

    // Takes export_choices()'s bytes, before the first product (or between steps): they replace what was chosen or imported before. Throws Error where
    // they are broken or come from another library version or GPU architecture, whose algorithms mean something else here.
    void import_choices(const std::vector<unsigned char>& bytes) {
        Header header;
        CHECK(bytes.size() >= sizeof(header), "matrix product choices: %zu bytes are fewer than the header's %zu; they were cut off", bytes.size(), sizeof(header));
        memcpy(&header, bytes.data(), sizeof(header));
        const Header own = make_header(0);
        CHECK(memcmp(header.magic, own.magic, sizeof(own.magic)) == 0, "matrix product choices: these bytes are something else (they do not begin with %.8s)", own.magic);
        CHECK(header.library_version == own.library_version && header.architecture == own.architecture,
              "matrix product choices were made by cuBLASLt %zu on sm_%zu, this is %zu on sm_%zu; choose again without the stored choices",
              static_cast<size_t>(header.library_version), static_cast<size_t>(header.architecture), static_cast<size_t>(own.library_version),
              static_cast<size_t>(own.architecture));
        const size_t entry_bytes = sizeof(Key) + sizeof(Choice);
        CHECK(header.entry_bytes == entry_bytes && header.count == (bytes.size() - sizeof(header)) / entry_bytes &&
                  (bytes.size() - sizeof(header)) % entry_bytes == 0,
              "matrix product choices: %zu entries of %zu bytes are announced, %zu bytes follow; they were cut off or made by another version of this program",
              static_cast<size_t>(header.count), static_cast<size_t>(header.entry_bytes), bytes.size() - sizeof(header));
        std::map<Key, Choice> imported;
        for (const unsigned char* entry = bytes.data() + sizeof(header); entry != bytes.data() + bytes.size(); entry += entry_bytes) {
            Key key;
            Choice choice;
            memcpy(key.data(), entry, sizeof(key));
            memcpy(&choice, entry + sizeof(key), sizeof(choice));
            CHECK(choice.workspace_bytes <= kMatmulWorkspaceBytes, "matrix product choices: one needs %zu bytes of workspace, there are %zu; choose again",
                  static_cast<size_t>(choice.workspace_bytes), kMatmulWorkspaceBytes);
            imported[key] = choice;
        }
        for (auto& [key, plan] : plans_) destroy(plan);
        plans_.clear();
        imported_ = std::move(imported);
    }

private:
    static constexpr uint32_t kAlignment = 16;  // bytes, of every tensor

    struct Choice {
        cublasLtMatmulAlgo_t algorithm;
        uint64_t workspace_bytes;
    };

    struct Plan {
        cublasLtMatmulDesc_t operation = nullptr;
        cublasLtMatrixLayout_t out = nullptr, a = nullptr, b = nullptr;
        Choice choice;
        bool imported = false;
    };

    struct Header {
        char magic[8];
        uint64_t library_version, architecture, entry_bytes, count;
    };

    Header make_header(size_t count) const {
        Header header = {{'L', 'L', 'M', 'Z', 'M', 'M', '0', '1'}, cublasLtGetVersion(), architecture_, sizeof(Key) + sizeof(Choice), count};
        return header;
    }

    static void append(std::vector<unsigned char>& bytes, const void* data, size_t count) {
        const unsigned char* const first = static_cast<const unsigned char*>(data);
        bytes.insert(bytes.end(), first, first + count);
    }

    static void check(cublasStatus_t status, const char* what) {
        CHECK(status == CUBLAS_STATUS_SUCCESS, "%s: %s", what, cublasLtGetStatusString(status));
    }

    static std::string product_text(const MatrixDesc& out, const MatrixDesc& a, const MatrixDesc& b, const void* bias) {
        return "out " + matrix_text(out) + " = a " + matrix_text(a) + " b " + matrix_text(b) + (bias != nullptr ? " + bias" : "");
    }

    // Choices in use and imported ones not used yet.
    std::map<Key, Choice> choices() const {
        std::map<Key, Choice> all = imported_;
        for (const auto& [key, plan] : plans_) all[key] = plan.choice;
        return all;
    }

    static Key make_key(const MatrixDesc& out, const MatrixDesc& a, const MatrixDesc& b, const void* bias, bool accumulate) {
        const size_t a_rows = a.transposed ? a.cols : a.rows, a_cols = a.transposed ? a.rows : a.cols;
        const size_t b_rows = b.transposed ? b.cols : b.rows, b_cols = b.transposed ? b.rows : b.cols;
        CHECK(out.rows == a_rows && out.cols == b_cols && a_cols == b_rows && !out.transposed && out.rows >= 1 && out.cols >= 1 && a_cols >= 1,
              "matrix product: shapes do not fit: %s", product_text(out, a, b, bias).c_str());
        for (const MatrixDesc* desc : {&out, &a, &b}) {
            CHECK(desc->cols % 8 == 0 && desc->ld % 8 == 0 && desc->ld >= desc->cols,
                  "matrix product: columns and row distances must be multiples of 8 elements, and a row distance at least the columns: %s",
                  product_text(out, a, b, bias).c_str());
            CHECK(reinterpret_cast<uintptr_t>(desc->data) % kAlignment == 0, "matrix product: %s is at %p, not on a multiple of %u bytes: %s",
                  desc == &out ? "out" : desc == &a ? "a" : "b", desc->data, kAlignment, product_text(out, a, b, bias).c_str());
            narrow_int(desc->rows, "rows of a matrix");
            narrow_int(desc->ld, "row distance of a matrix");
        }
        CHECK(reinterpret_cast<uintptr_t>(bias) % kAlignment == 0, "matrix product: bias is at %p, not on a multiple of %u bytes: %s", bias, kAlignment,
              product_text(out, a, b, bias).c_str());
        Key key;
        key[kRows] = static_cast<int64_t>(out.rows);
        key[kCols] = static_cast<int64_t>(out.cols);
        key[kInner] = static_cast<int64_t>(a_cols);
        key[kLdOut] = static_cast<int64_t>(out.ld);
        key[kLdA] = static_cast<int64_t>(a.ld);
        key[kLdB] = static_cast<int64_t>(b.ld);
        key[kTypeOut] = out.type;
        key[kTypeA] = a.type;
        key[kTypeB] = b.type;
        key[kTransposedA] = a.transposed;
        key[kTransposedB] = b.transposed;
        key[kBias] = bias != nullptr;
        key[kAccumulate] = accumulate;
        key[kScaled] = (out.scale != nullptr) | (a.scale != nullptr) << 1 | (b.scale != nullptr) << 2;
        return key;
    }

    Plan make_plan(const Key& key, const MatrixDesc& out, const MatrixDesc& a, const MatrixDesc& b, const void* bias) {
        Plan plan;
        try {
            check(cublasLtMatmulDescCreate(&plan.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
            // The library's A is b and its B is a; a transposed reading of the stored matrix stays one.
            const cublasOperation_t op_a = b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
            set(plan, CUBLASLT_MATMUL_DESC_TRANSA, op_a);
            set(plan, CUBLASLT_MATMUL_DESC_TRANSB, op_b);
            const cublasLtEpilogue_t epilogue = bias != nullptr ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
            set(plan, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
            set_pointers(plan, out, a, b, bias);
            for (const auto& [layout, desc] : {std::pair{&plan.out, &out}, std::pair{&plan.a, &a}, std::pair{&plan.b, &b}}) {
                check(cublasLtMatrixLayoutCreate(layout, desc->type, desc->cols, desc->rows, static_cast<int64_t>(desc->ld)), "cublasLtMatrixLayoutCreate");
            }
            const auto imported = imported_.find(key);
            if (imported != imported_.end()) {
                plan.choice = imported->second;
                plan.imported = true;
                return plan;
            }
            cublasLtMatmulHeuristicResult_t result;
            int found = 0;
            const cublasStatus_t status =
                cublasLtMatmulAlgoGetHeuristic(handle_, plan.operation, plan.b, plan.a, plan.out, plan.out, preference_, 1, &result, &found);
            CHECK(status == CUBLAS_STATUS_SUCCESS && found > 0, "cuBLASLt has no algorithm (%s) for %s", cublasLtGetStatusString(status),
                  product_text(out, a, b, bias).c_str());
            plan.choice = {result.algo, result.workspaceSize};
        } catch (...) {
            destroy(plan);
            throw;
        }
        return plan;
    }

    // The addresses that live in the descriptor; the library reads them during the call.
    static void set_pointers(Plan& plan, const MatrixDesc& out, const MatrixDesc& a, const MatrixDesc& b, const void* bias) {
        if (bias != nullptr) set(plan, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
        if (b.scale != nullptr) set(plan, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, b.scale);
        if (a.scale != nullptr) set(plan, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, a.scale);
        if (out.scale != nullptr) set(plan, CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, out.scale);
    }

    template <typename Value>
    static void set(Plan& plan, cublasLtMatmulDescAttributes_t attribute, const Value& value) {
        check(cublasLtMatmulDescSetAttribute(plan.operation, attribute, &value, sizeof(value)), "cublasLtMatmulDescSetAttribute");
    }

    static void destroy(Plan& plan) {
        for (cublasLtMatrixLayout_t layout : {plan.out, plan.a, plan.b}) {
            if (layout != nullptr) cublasLtMatrixLayoutDestroy(layout);
        }
        if (plan.operation != nullptr) cublasLtMatmulDescDestroy(plan.operation);
    }

    cublasLtHandle_t handle_ = nullptr;
    cublasLtMatmulPreference_t preference_ = nullptr;
    void* workspace_;
    bool owns_workspace_;
    uint64_t architecture_ = 0;
    bool used_ = false;
    cudaStream_t stream_ = nullptr;
    std::map<Key, Plan> plans_;       // in use
    std::map<Key, Choice> imported_;  // taken by import_choices()
};

// out = a b (+ bias); out += a b when accumulate (which rounds the running sum each time: for fp32 tensors).
inline void matmul(MatmulContext& context, const MatrixDesc& out, const MatrixDesc& a, const MatrixDesc& b, const void* bias, bool accumulate,
                   cudaStream_t stream) {
    NvtxRange range("matmul");
    context.multiply(out, a, b, bias, accumulate, stream);
}

// out (N,OC) = inp (N,C) weight (OC,C)^T + bias (OC); bias may be nullptr
inline void matmul_forward(MatmulContext& context, floatX* out, const floatX* inp, const floatX* weight, const floatX* bias, int N, int C, int OC,
                           cudaStream_t stream) {
    matmul(context, matrix(out, N, OC), matrix(inp, N, C), transposed(weight, OC, C), bias, false, stream);
}

// dinp (N,C) = dout (N,OC) weight (OC,C)
inline void matmul_backward_input(MatmulContext& context, floatX* dinp, const floatX* dout, const floatX* weight, int N, int C, int OC, cudaStream_t stream) {
    matmul(context, matrix(dinp, N, C), matrix(dout, N, OC), matrix(weight, OC, C), nullptr, false, stream);
}

// dweight (OC,C) = dout (N,OC)^T inp (N,C)
inline void matmul_backward_weight(MatmulContext& context, floatX* dweight, const floatX* dout, const floatX* inp, int N, int C, int OC, cudaStream_t stream) {
    matmul(context, matrix(dweight, OC, C), transposed(dout, N, OC), matrix(inp, N, C), nullptr, false, stream);
}

// ---- gradient of a bias --------------------------------------------------------------------------------------------------------
// Two kernels, since no block waits for another: sums over a slice of the rows, then over the slices in their order. The slices depend on N only.

inline constexpr int kBiasThreads = 128;
inline constexpr int kBiasMinRows = 64;    // a slice shorter than this costs more to finish than to sum
inline constexpr int kBiasMaxSlices = 128;  // enough blocks for any GPU, and a small scratch

inline int bias_backward_slices(int N) {
    const int slices = ceil_div(N, kBiasMinRows);
    return slices < kBiasMaxSlices ? slices : kBiasMaxSlices;
}

// Floats of scratch for bias_backward.
inline size_t bias_backward_scratch_count(int N, int OC) { return static_cast<size_t>(bias_backward_slices(N)) * OC; }

// partials (slices, OC) =; one thread sums 8 columns of one slice
__global__ void bias_backward_partial_kernel(float* partials, const floatX* dout, int N, int OC, int slice_rows) {
    const int col = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (col >= OC) return;
    const int first = blockIdx.y * slice_rows, end = min(N, first + slice_rows);
    Float8 sum = zero8();
    for (int row = first; row < end; row++) sum = sum + load8(dout + static_cast<size_t>(row) * OC + col);
    store8(partials + static_cast<size_t>(blockIdx.y) * OC + col, sum);
}

__global__ void bias_backward_kernel(floatX* dbias, const float* partials, int slices, int OC) {
    const int col = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (col >= OC) return;
    Float8 sum = load8(partials + col);
    for (int slice = 1; slice < slices; slice++) sum = sum + load8(partials + static_cast<size_t>(slice) * OC + col);
    store8(dbias + col, sum);
}

// dbias (OC) =
inline void bias_backward(floatX* dbias, float* scratch, const floatX* dout, int N, int OC, cudaStream_t stream) {
    NvtxRange range("bias_backward");
    CHECK(N >= 1 && OC >= 8 && OC % 8 == 0, "bias_backward over %d rows of %d columns: at least one row, columns a multiple of 8", N, OC);
    const int slices = bias_backward_slices(N);
    const dim3 block(kBiasThreads);
    const unsigned blocks = grid_for(OC / 8, kBiasThreads);
    launch(bias_backward_partial_kernel, dim3(blocks, slices), block, 0, stream, scratch, dout, N, OC, ceil_div(N, slices));
    launch(bias_backward_kernel, dim3(blocks), block, 0, stream, dbias, static_cast<const float*>(scratch), slices, OC);
}
