// The cuBLASLt subset of cublasLt.h on oneDNN.
//
// Column-major D (m x n) = op(A) op(B) is read as row-major D' (n x m) = op(B)' op(A)', which oneDNN takes with plain
// strides in all four transposes. The product is cut into pieces along the longer side of D, each piece is a
// single-threaded oneDNN primitive, and the pieces run on the block pool. Two reasons not to let oneDNN use its own
// OpenMP threads: they spin for a while after each product, on cores that the next kernel needs, and ThreadSanitizer
// cannot follow them. Measured on 2 cores with AVX-512 BF16 (N = 256 tokens, channels 768, all training layouts):
// pieces 380-440 GFLOP/s bf16 and 200-228 fp32, oneDNN's own threads 350-449 and 182-233, the peak of those
// cores being about 450 and 225. The cut depends on the shape only, so results never depend on the number of threads.
//
// Without AVX-512 BF16 oneDNN has no fast bf16 product: bf16 inputs are then converted to fp32 (exact), multiplied
// as fp32 and rounded once. HOSTCUDA_CUBLASLT_CONVERT=1 takes that way on any machine.
#include "cublasLt.h"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <type_traits>
#include <unordered_map>

#include <oneapi/dnnl/dnnl.hpp>

#include "hostcuda/internal.h"
#include "sanitizers.h"
#include "thread_pool.h"

#if HOSTCUDA_TSAN
extern "C" void __tsan_read_range(void* address, unsigned long size);
extern "C" void __tsan_write_range(void* address, unsigned long size);
#endif

struct cublasLtContext { uint64_t magic; };

// OpenMP's own declarations, without omp.h: clang has that header only with a package of its own, and nothing else of OpenMP is used here.
extern "C" int omp_get_max_threads();
extern "C" void omp_set_num_threads(int);

namespace {

constexpr uint64_t kHandleMagic = 0x68634c7448616e64;
constexpr uint64_t kLiveMagic = 0x68634c744c697665;   // a live descriptor, layout or preference
constexpr uint64_t kAlgoMagic = 0x68634c74416c676f;

// The first choice of the heuristic wants this much, when the limit allows it. It is not needed: it is there, and is
// written, so that a workspace that is missing, too small or shared by two streams is seen here and not on a GPU.
constexpr size_t kWorkspaceBytes = 64 << 10;
constexpr double kWorkspaceFlops = 1e6;
// A GPU's fastest kernels load 16 bytes at a time.
constexpr uint32_t kVectorBytes = 16;

struct Desc {
    uint64_t magic;
    int32_t compute_type, scale_type, pointer_mode, trans[3];
    uint32_t epilogue;
    int32_t bias_type;
    const void* bias;
    int64_t bias_batch_stride;
    const void* scales[5];
    int8_t fast_accum;
};
static_assert(sizeof(Desc) <= sizeof(cublasLtMatmulDescOpaque_t) && std::is_trivially_copyable_v<Desc>);

struct Layout {
    uint64_t magic;
    uint32_t type;
    int32_t order;
    uint64_t rows, cols;
    int64_t ld, batch_stride;
    int32_t batch_count;
};
static_assert(sizeof(Layout) <= sizeof(cublasLtMatrixLayoutOpaque_t) && std::is_trivially_copyable_v<Layout>);

struct Preference {
    uint64_t magic, max_workspace;
    uint32_t alignment[4], search_mode, reduction_mask;
    float max_waves;
};
static_assert(sizeof(Preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t) && std::is_trivially_copyable_v<Preference>);

struct Algo {
    uint64_t magic, index, problem_hash, workspace;
    uint32_t alignment[4];
    uint64_t unused[2];
};
static_assert(sizeof(Algo) == sizeof(cublasLtMatmulAlgo_t));

// A live object, or null. The opaque structs are copied by callers at will, so they are read through memcpy.
template <typename T, typename Opaque>
bool load(T& out, const Opaque* opaque) {
    if (!opaque) return false;
    memcpy(&out, opaque, sizeof(T));
    return out.magic == kLiveMagic;
}
template <typename T, typename Opaque>
void store(Opaque* opaque, const T& value) { memcpy(opaque, &value, sizeof(T)); }

template <typename T, typename Opaque>
cublasStatus_t create(Opaque** out, const T& value) {
    if (!out) return CUBLAS_STATUS_INVALID_VALUE;
    *out = new (std::nothrow) Opaque{};
    if (!*out) return CUBLAS_STATUS_ALLOC_FAILED;
    store(*out, value);
    return CUBLAS_STATUS_SUCCESS;
}
template <typename T, typename Opaque>
cublasStatus_t destroy(Opaque* opaque) {
    T value;
    if (!load(value, opaque)) return CUBLAS_STATUS_INVALID_VALUE;
    memset(static_cast<void*>(opaque), 0, sizeof(*opaque));
    delete opaque;
    return CUBLAS_STATUS_SUCCESS;
}

// One attribute: where it lives and how long it is.
struct Field { void* data; size_t size; };

Field field(Desc& d, cublasLtMatmulDescAttributes_t attribute) {
    switch (attribute) {
        case CUBLASLT_MATMUL_DESC_COMPUTE_TYPE: return {&d.compute_type, sizeof(d.compute_type)};
        case CUBLASLT_MATMUL_DESC_SCALE_TYPE: return {&d.scale_type, sizeof(d.scale_type)};
        case CUBLASLT_MATMUL_DESC_POINTER_MODE: return {&d.pointer_mode, sizeof(d.pointer_mode)};
        case CUBLASLT_MATMUL_DESC_TRANSA: return {&d.trans[0], sizeof(int32_t)};
        case CUBLASLT_MATMUL_DESC_TRANSB: return {&d.trans[1], sizeof(int32_t)};
        case CUBLASLT_MATMUL_DESC_TRANSC: return {&d.trans[2], sizeof(int32_t)};
        case CUBLASLT_MATMUL_DESC_EPILOGUE: return {&d.epilogue, sizeof(d.epilogue)};
        case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return {&d.bias, sizeof(d.bias)};
        case CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE: return {&d.bias_batch_stride, sizeof(d.bias_batch_stride)};
        case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER: return {&d.scales[0], sizeof(void*)};
        case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER: return {&d.scales[1], sizeof(void*)};
        case CUBLASLT_MATMUL_DESC_C_SCALE_POINTER: return {&d.scales[2], sizeof(void*)};
        case CUBLASLT_MATMUL_DESC_D_SCALE_POINTER: return {&d.scales[3], sizeof(void*)};
        case CUBLASLT_MATMUL_DESC_AMAX_D_POINTER: return {&d.scales[4], sizeof(void*)};
        case CUBLASLT_MATMUL_DESC_FAST_ACCUM: return {&d.fast_accum, sizeof(d.fast_accum)};
        case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE: return {&d.bias_type, sizeof(d.bias_type)};
        default: return {nullptr, 0};
    }
}

Field field(Layout& l, cublasLtMatrixLayoutAttribute_t attribute) {
    switch (attribute) {
        case CUBLASLT_MATRIX_LAYOUT_TYPE: return {&l.type, sizeof(l.type)};
        case CUBLASLT_MATRIX_LAYOUT_ORDER: return {&l.order, sizeof(l.order)};
        case CUBLASLT_MATRIX_LAYOUT_ROWS: return {&l.rows, sizeof(l.rows)};
        case CUBLASLT_MATRIX_LAYOUT_COLS: return {&l.cols, sizeof(l.cols)};
        case CUBLASLT_MATRIX_LAYOUT_LD: return {&l.ld, sizeof(l.ld)};
        case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return {&l.batch_count, sizeof(l.batch_count)};
        case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return {&l.batch_stride, sizeof(l.batch_stride)};
        default: return {nullptr, 0};
    }
}

Field field(Preference& p, cublasLtMatmulPreferenceAttributes_t attribute) {
    switch (attribute) {
        case CUBLASLT_MATMUL_PREF_SEARCH_MODE: return {&p.search_mode, sizeof(p.search_mode)};
        case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return {&p.max_workspace, sizeof(p.max_workspace)};
        case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return {&p.reduction_mask, sizeof(p.reduction_mask)};
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return {&p.alignment[0], sizeof(uint32_t)};
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return {&p.alignment[1], sizeof(uint32_t)};
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return {&p.alignment[2], sizeof(uint32_t)};
        case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return {&p.alignment[3], sizeof(uint32_t)};
        case CUBLASLT_MATMUL_PREF_MAX_WAVES_COUNT: return {&p.max_waves, sizeof(p.max_waves)};
        default: return {nullptr, 0};
    }
}

template <typename T, typename Opaque, typename Attribute>
cublasStatus_t set_attribute(Opaque* opaque, Attribute attribute, const void* value, size_t size) {
    T object;
    if (!load(object, opaque) || !value) return CUBLAS_STATUS_INVALID_VALUE;
    const Field f = field(object, attribute);
    if (!f.data || size != f.size) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(f.data, value, size);
    store(opaque, object);
    return CUBLAS_STATUS_SUCCESS;
}

template <typename T, typename Opaque, typename Attribute>
cublasStatus_t get_attribute(const Opaque* opaque, Attribute attribute, void* value, size_t size, size_t* written) {
    T object;
    if (!load(object, opaque)) return CUBLAS_STATUS_INVALID_VALUE;
    const Field f = field(object, attribute);
    if (!f.data) return CUBLAS_STATUS_INVALID_VALUE;
    if (size == 0) {   // asks for the length
        if (!written) return CUBLAS_STATUS_INVALID_VALUE;
        *written = f.size;
        return CUBLAS_STATUS_SUCCESS;
    }
    if (!value || size != f.size) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(value, f.data, size);
    if (written) *written = size;
    return CUBLAS_STATUS_SUCCESS;
}

// ---- the problem --------------------------------------------------------------------------------------------------

// One matrix as stored: `rows` contiguous elements per column, columns ld apart (column order).
struct Matrix {
    size_t rows, cols, ld;
    int64_t batch_stride;
    cudaDataType_t type;
    size_t element() const { return type == CUDA_R_32F ? 4 : 2; }
    // Bytes from the first element to the end of the last one.
    size_t span_bytes() const { return ((cols - 1) * ld + rows) * element(); }
};

struct Problem {
    size_t m, n, k;
    bool ta, tb;
    Matrix a, b, c, d;
    int batch_count;
    bool bias;
    bool row_order;   // all four matrices were given in row order and are read as their transposes, A and B swapped
    int64_t bias_batch_stride;
};

// Fills p from the descriptors, or says what the real library would say.
cublasStatus_t describe(Problem& p, cublasLtMatmulDesc_t desc_in, cublasLtMatrixLayout_t a_in, cublasLtMatrixLayout_t b_in,
                        cublasLtMatrixLayout_t c_in, cublasLtMatrixLayout_t d_in) {
    Desc desc;
    Layout layouts[4];
    if (!load(desc, desc_in) || !load(layouts[0], a_in) || !load(layouts[1], b_in) || !load(layouts[2], c_in) || !load(layouts[3], d_in))
        return CUBLAS_STATUS_INVALID_VALUE;
    for (const int32_t op : desc.trans)
        if (op != CUBLAS_OP_N && op != CUBLAS_OP_T && op != CUBLAS_OP_C) return CUBLAS_STATUS_INVALID_VALUE;
    if (desc.trans[2] != CUBLAS_OP_N) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (desc.pointer_mode != CUBLASLT_POINTER_MODE_HOST) return CUBLAS_STATUS_NOT_SUPPORTED;
    switch (desc.compute_type) {
        case CUBLAS_COMPUTE_32F:
        case CUBLAS_COMPUTE_32F_PEDANTIC:
        case CUBLAS_COMPUTE_32F_FAST_TF32:
        case CUBLAS_COMPUTE_32F_FAST_16BF:
        case CUBLAS_COMPUTE_32F_FAST_16F: break;
        default: return CUBLAS_STATUS_NOT_SUPPORTED;
    }
    if (desc.scale_type != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
    for (const void* scale : desc.scales)
        if (scale) return CUBLAS_STATUS_INVALID_VALUE;   // belongs to fp8

    const int32_t order = layouts[0].order;
    for (const Layout& l : layouts) {
        if (l.order != order || (order != CUBLASLT_ORDER_COL && order != CUBLASLT_ORDER_ROW)) return CUBLAS_STATUS_NOT_SUPPORTED;
        if (l.rows == 0 || l.cols == 0) return CUBLAS_STATUS_INVALID_VALUE;
        if (l.ld <= 0 || static_cast<uint64_t>(l.ld) < (order == CUBLASLT_ORDER_COL ? l.rows : l.cols)) return CUBLAS_STATUS_INVALID_VALUE;
        if (l.batch_count < 1 || l.batch_count != layouts[0].batch_count) return CUBLAS_STATUS_INVALID_VALUE;
    }
    const uint32_t in = layouts[0].type, out = layouts[3].type;
    if (layouts[1].type != in || layouts[2].type != out) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (!(in == CUDA_R_16BF && (out == CUDA_R_16BF || out == CUDA_R_32F)) && !(in == CUDA_R_32F && out == CUDA_R_32F))
        return CUBLAS_STATUS_NOT_SUPPORTED;

    // Row order read as column order is the transpose: D' = op(B)' op(A)', and op(X)' of X' is op(X') again.
    const bool swap = order == CUBLASLT_ORDER_ROW;
    const auto matrix = [swap](const Layout& l) {
        return Matrix{swap ? l.cols : l.rows, swap ? l.rows : l.cols, static_cast<size_t>(l.ld), l.batch_stride, static_cast<cudaDataType_t>(l.type)};
    };
    p.row_order = swap;
    p.a = matrix(layouts[swap ? 1 : 0]);
    p.b = matrix(layouts[swap ? 0 : 1]);
    p.c = matrix(layouts[2]);
    p.d = matrix(layouts[3]);
    p.ta = desc.trans[swap ? 1 : 0] != CUBLAS_OP_N;
    p.tb = desc.trans[swap ? 0 : 1] != CUBLAS_OP_N;
    p.m = p.d.rows;
    p.n = p.d.cols;
    p.k = p.ta ? p.a.rows : p.a.cols;
    p.batch_count = layouts[0].batch_count;
    if ((p.ta ? p.a.cols : p.a.rows) != p.m || (p.tb ? p.b.cols : p.b.rows) != p.k || (p.tb ? p.b.rows : p.b.cols) != p.n ||
        p.c.rows != p.m || p.c.cols != p.n)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (p.batch_count > 1 && p.d.batch_stride == 0) return CUBLAS_STATUS_INVALID_VALUE;   // batches would write over one another

    if (desc.epilogue != CUBLASLT_EPILOGUE_DEFAULT && desc.epilogue != CUBLASLT_EPILOGUE_BIAS) return CUBLAS_STATUS_NOT_SUPPORTED;
    p.bias = desc.epilogue == CUBLASLT_EPILOGUE_BIAS;
    if (p.bias && desc.bias_type != -1 && desc.bias_type != static_cast<int32_t>(out)) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (p.bias && swap) return CUBLAS_STATUS_NOT_SUPPORTED;
    p.bias_batch_stride = p.bias ? desc.bias_batch_stride : 0;
    return CUBLAS_STATUS_SUCCESS;
}

uint64_t mix(uint64_t h, uint64_t x) {
    h = (h ^ x) * 0x9e3779b97f4a7c15ull;
    return h ^ (h >> 29);
}

uint64_t problem_hash(const Problem& p) {
    uint64_t h = 1;
    for (const uint64_t x : {uint64_t{p.m}, uint64_t{p.n}, uint64_t{p.k}, uint64_t{p.ta}, uint64_t{p.tb}, uint64_t{p.bias}, uint64_t{p.row_order},
                             static_cast<uint64_t>(p.a.type), static_cast<uint64_t>(p.d.type), static_cast<uint64_t>(p.batch_count)})
        h = mix(h, x);
    return h;
}

// The largest power of two, at most kVectorBytes, that divides all.
uint32_t alignment_of(uint64_t x, uint32_t limit) {
    uint32_t result = kVectorBytes < limit ? kVectorBytes : limit;
    while (result > 1 && (x % result != 0 || (result & (result - 1)) != 0)) --result;
    return result;
}

// The choices for a problem: one that wants a workspace, where the limit allows it and the product is not tiny, and one
// that does not. Pointers must have the alignment that was promised, up to what leading dimensions and strides keep.
cublasStatus_t choices(const Problem& p, uint64_t max_workspace, const uint32_t promised[4], Algo out[2], int& count) {
    count = 0;
    Algo algo{};
    algo.magic = kAlgoMagic;
    algo.problem_hash = problem_hash(p);
    const Matrix* matrices[4] = {&p.a, &p.b, &p.c, &p.d};
    for (int i = 0; i < 4; ++i) {
        // promised[] is in the caller's order of A and B
        const Matrix& m = *matrices[i < 2 && p.row_order ? 1 - i : i];
        uint32_t align = alignment_of(m.ld * m.element(), promised[i]);
        if (p.batch_count > 1) align = alignment_of(static_cast<uint64_t>(m.batch_stride < 0 ? -m.batch_stride : m.batch_stride) * m.element(), align);
        if (align < m.element()) return CUBLAS_STATUS_NOT_SUPPORTED;
        algo.alignment[i] = align;
    }
    const double flops = 2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
    if (max_workspace >= kWorkspaceBytes && flops >= kWorkspaceFlops) {
        algo.index = 0;
        algo.workspace = kWorkspaceBytes;
        out[count++] = algo;
    }
    algo.index = 1;
    algo.workspace = 0;
    out[count++] = algo;
    return CUBLAS_STATUS_SUCCESS;
}

// ---- oneDNN -------------------------------------------------------------------------------------------------------

using dnnl::memory;

const dnnl::engine& engine() {
    static const dnnl::engine e(dnnl::engine::kind::cpu, 0);
    return e;
}

// oneDNN asks OpenMP how many threads it has, when a primitive is made and when it runs: one, in this thread.
struct OneThread {
    const int before = omp_get_max_threads();
    OneThread() { omp_set_num_threads(1); }
    ~OneThread() { omp_set_num_threads(before); }
};

// Row-major dst (rows, cols) = src (rows, k) weights (k, cols) [+ bias (cols)] [+ dst].
struct Shape {
    int64_t rows, cols, k, ld_src, ld_weights, ld_dst;
    uint8_t src_transposed, weights_transposed, in_f32, out_f32, bias, sum;
    bool operator==(const Shape& o) const {
        return rows == o.rows && cols == o.cols && k == o.k && ld_src == o.ld_src && ld_weights == o.ld_weights && ld_dst == o.ld_dst &&
               src_transposed == o.src_transposed && weights_transposed == o.weights_transposed && in_f32 == o.in_f32 && out_f32 == o.out_f32 &&
               bias == o.bias && sum == o.sum;
    }
};
struct ShapeHash {
    size_t operator()(const Shape& s) const {
        uint64_t h = 2;
        for (const int64_t x : {s.rows, s.cols, s.k, s.ld_src, s.ld_weights, s.ld_dst}) h = mix(h, static_cast<uint64_t>(x));
        return mix(h, s.src_transposed | s.weights_transposed << 1 | s.in_f32 << 2 | s.out_f32 << 3 | s.bias << 4 | s.sum << 5);
    }
};

struct Product {
    dnnl::matmul primitive;
    memory::desc src, weights, dst, bias, scratch;
};

std::shared_ptr<const Product> make_product(const Shape& s) {
    const OneThread one;
    const auto in = s.in_f32 ? memory::data_type::f32 : memory::data_type::bf16;
    const auto out = s.out_f32 ? memory::data_type::f32 : memory::data_type::bf16;
    const auto strides = [](bool transposed, int64_t ld) { return transposed ? memory::dims{1, ld} : memory::dims{ld, 1}; };
    auto result = std::make_shared<Product>();
    try {
        result->src = memory::desc({s.rows, s.k}, in, strides(s.src_transposed, s.ld_src));
        result->weights = memory::desc({s.k, s.cols}, in, strides(s.weights_transposed, s.ld_weights));
        result->dst = memory::desc({s.rows, s.cols}, out, strides(false, s.ld_dst));
        if (s.bias) result->bias = memory::desc({1, s.cols}, out, memory::dims{s.cols, 1});
        dnnl::primitive_attr attr;
        attr.set_scratchpad_mode(dnnl::scratchpad_mode::user);   // the library's own is shared by all its users
        if (s.sum) {
            dnnl::post_ops ops;
            ops.append_sum(1.0f);
            attr.set_post_ops(ops);
        }
        const dnnl::matmul::desc op = s.bias ? dnnl::matmul::desc(result->src, result->weights, result->bias, result->dst)
                                             : dnnl::matmul::desc(result->src, result->weights, result->dst);
        const dnnl::matmul::primitive_desc pd(op, attr, engine());
        result->scratch = pd.scratchpad_desc();
        result->primitive = dnnl::matmul(pd);
    } catch (const dnnl::error&) {
        return nullptr;   // no implementation on this machine
    }
    return result;
}

// Primitives by shape, the least recently used dropped: building one takes milliseconds, a trainer has a few dozen.
class ProductCache {
public:
    std::shared_ptr<const Product> get(const Shape& shape) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = index_.find(shape);
        if (found != index_.end()) {
            order_.splice(order_.begin(), order_, found->second);
            return found->second->second;
        }
        auto product = make_product(shape);
        order_.emplace_front(shape, product);
        index_[shape] = order_.begin();
        if (order_.size() > kCapacity) {
            index_.erase(order_.back().first);
            order_.pop_back();
        }
        return product;
    }

private:
    static constexpr size_t kCapacity = 512;
    using Entry = std::pair<Shape, std::shared_ptr<const Product>>;
    std::mutex mutex_;
    std::list<Entry> order_;
    std::unordered_map<Shape, std::list<Entry>::iterator, ShapeHash> index_;
};

ProductCache& cache() {
    static ProductCache& c = *new ProductCache;   // never destroyed: stream workers may outlive main's statics
    return c;
}

bool bf16_products() {
    static const bool fast = [] {
        if (hostcuda::env_flag("HOSTCUDA_CUBLASLT_CONVERT")) return false;
        // Each bit of the value is a set of instructions that the machine has.
        const int bf16 = static_cast<int>(dnnl::cpu_isa::avx512_core_bf16);
        return (static_cast<int>(dnnl::get_effective_cpu_isa()) & bf16) == bf16;
    }();
    return fast;
}

// Memory that a thread keeps between products, one per use.
template <int Use>
void* thread_buffer(size_t bytes) {
    struct Buffer {
        void* data = nullptr;
        size_t bytes = 0;
        ~Buffer() { operator delete(data, std::align_val_t{64}); }
    };
    static thread_local Buffer buffer;
    if (buffer.bytes < bytes) {
        operator delete(buffer.data, std::align_val_t{64});
        buffer.data = nullptr;
        buffer.bytes = 0;
        buffer.data = operator new(bytes, std::align_val_t{64});
        buffer.bytes = bytes;
    }
    return buffer.data;
}

void execute(const Product& product, const void* src, const void* weights, const void* bias, void* dst) {
    const OneThread one;
    static thread_local dnnl::stream stream(engine());
    const auto at = [](const memory::desc& desc, const void* pointer) { return memory(desc, engine(), const_cast<void*>(pointer)); };
    std::unordered_map<int, memory> args{{DNNL_ARG_SRC, at(product.src, src)},
                                         {DNNL_ARG_WEIGHTS, at(product.weights, weights)},
                                         {DNNL_ARG_DST, at(product.dst, dst)},
                                         {DNNL_ARG_SCRATCHPAD, at(product.scratch, thread_buffer<0>(product.scratch.get_size()))}};
    if (bias) args.emplace(DNNL_ARG_BIAS, at(product.bias, bias));
    product.primitive.execute(stream, args);
    stream.wait();
}

float to_float(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

uint16_t to_bf16(float f) {   // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &f, 4);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fff : rounded);
}

// rows x cols bf16, rows ld apart, to dense fp32.
void to_fp32(float* out, const uint16_t* in, size_t rows, size_t cols, size_t ld) {
    for (size_t r = 0; r < rows; ++r)
        for (size_t c = 0; c < cols; ++c) out[r * cols + c] = to_float(in[r * ld + c]);
}

// d = alpha * sum + beta * c + bias over one row, with one rounding at the end.
template <typename Out>
void finish_row(Out* d, const float* sum, const Out* c, const Out* bias, float alpha, float beta, size_t count) {
    const auto get = [](Out x) {
        if constexpr (sizeof(Out) == 4) return x;
        else return to_float(x);
    };
    for (size_t i = 0; i < count; ++i) {
        float x = alpha * sum[i];
        if (c) x += beta * get(c[i]);
        if (bias) x += get(bias[i]);
        if constexpr (sizeof(Out) == 4) d[i] = x;
        else d[i] = to_bf16(x);
    }
}

// oneDNN is not instrumented: the sanitizers are told what it reads and writes, so that they see a product as they see
// a kernel.
void declare_access([[maybe_unused]] const void* base, [[maybe_unused]] size_t rows, [[maybe_unused]] size_t row_bytes,
                    [[maybe_unused]] size_t ld_bytes, [[maybe_unused]] bool write, [[maybe_unused]] const char* what) {
#if HOSTCUDA_TSAN || HOSTCUDA_ASAN
    for (size_t r = 0; r < rows; ++r) {
        char* row = const_cast<char*>(static_cast<const char*>(base)) + r * ld_bytes;
#if HOSTCUDA_TSAN
        if (write) __tsan_write_range(row, row_bytes);
        else __tsan_read_range(row, row_bytes);
#else
        if (__asan_region_is_poisoned(row, row_bytes))
            hostcuda::stop("cublasLtMatmul reaches memory outside an allocation through %s, row %zu; check its pointer, sizes and leading dimension", what, r);
#endif
    }
#endif
}

template <typename Function>
void for_each_piece(size_t count, const Function& function) {
    hostcuda::parallel_for(count, [](void* context, size_t i) { (*static_cast<const Function*>(context))(i); }, const_cast<Function*>(&function));
}

// What one call does, with pointers; runs on the stream.
struct Call {
    Problem p;
    float alpha, beta;
    const char *a, *b, *c, *bias;
    char* d;
    void* workspace;
    size_t workspace_bytes;
    // The cut: pieces of `width` columns of D' (rows when cut_rows).
    bool cut_rows;
    size_t width, piece_count;
    bool convert, direct;

    void plan() {
        p.c.batch_stride = beta != 0 ? p.c.batch_stride : 0;
        const size_t longer = p.m >= p.n ? p.m : p.n;
        cut_rows = p.n > p.m;
        // 16 MFLOP is 0.1 ms of one core, and pieces under 192 wide lose 10 % to packing the other operand; no more
        // than 64 of them.
        const double flops = 2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
        const double wanted = flops / 16e6;
        const size_t pieces = wanted < 1 ? 1 : wanted > 64 ? 64 : static_cast<size_t>(wanted);
        width = ((longer + pieces - 1) / pieces + 63) / 64 * 64;
        if (width < 192) width = 192;
        if (width > longer) width = longer;
        piece_count = (longer + width - 1) / width;
        convert = p.a.type == CUDA_R_16BF && !bf16_products();
        // oneDNN finishes by itself where no scaling is asked; otherwise it leaves fp32 sums for finish_row.
        direct = alpha == 1 && (beta == 0 || (beta == 1 && c == d)) && !(convert && p.d.type != CUDA_R_32F);
    }

    // The slice of piece i along the cut.
    void piece(size_t i, size_t& row, size_t& rows, size_t& col, size_t& cols) const {
        row = col = 0;
        rows = p.n;
        cols = p.m;
        size_t& begin = cut_rows ? row : col;
        size_t& count = cut_rows ? rows : cols;
        begin = i * width;
        count = count - begin < width ? count - begin : width;
    }

    Shape shape(size_t rows, size_t cols) const {
        Shape s{};
        s.rows = static_cast<int64_t>(rows);
        s.cols = static_cast<int64_t>(cols);
        s.k = static_cast<int64_t>(p.k);
        s.src_transposed = p.tb;
        s.weights_transposed = p.ta;
        // Converted operands are dense, and the one along the cut is converted piece by piece.
        const size_t dense_src = p.tb ? rows : p.k, dense_weights = p.ta ? p.k : cols;
        s.ld_src = static_cast<int64_t>(convert ? dense_src : p.b.ld);
        s.ld_weights = static_cast<int64_t>(convert ? dense_weights : p.a.ld);
        s.ld_dst = static_cast<int64_t>(direct ? p.d.ld : cols);
        s.in_f32 = convert || p.a.type == CUDA_R_32F;
        s.out_f32 = !direct || p.d.type == CUDA_R_32F;
        s.bias = direct && p.bias;
        s.sum = direct && beta != 0;
        return s;
    }

    // Makes every primitive the call needs, so that a refusal is a status and not a failure on the stream.
    bool prepare() const {
        if (alpha == 0) return true;
        for (const size_t i : {size_t{0}, piece_count - 1}) {
            size_t row, rows, col, cols;
            piece(i, row, rows, col, cols);
            if (!cache().get(shape(rows, cols))) return false;
        }
        return true;
    }

    void run() const {
        const hostcuda::DeviceAccess access;
        if (workspace_bytes) memset(workspace, 0x5a, workspace_bytes);
        for (int batch = 0; batch < p.batch_count; ++batch) {
            const auto at = [batch](const char* base, const Matrix& m) { return base + batch * m.batch_stride * static_cast<int64_t>(m.element()); };
            Call one = *this;
            one.a = at(a, p.a);
            one.b = at(b, p.b);
            one.c = at(c, p.c);
            one.d = const_cast<char*>(at(d, p.d));
            if (bias) one.bias = bias + batch * p.bias_batch_stride * static_cast<int64_t>(p.d.element());
            // In convert mode the operand that all pieces read is converted once.
            const void* shared = nullptr;
            if (convert && alpha != 0) {
                const Matrix& m = cut_rows ? p.a : p.b;
                float* whole = static_cast<float*>(thread_buffer<1>(m.rows * m.cols * 4));
                const uint16_t* from = reinterpret_cast<const uint16_t*>(cut_rows ? one.a : one.b);
                const size_t chunk = 64;
                const auto convert_columns = [&](size_t i) {
                    const hostcuda::DeviceAccess inner;
                    const size_t first = i * chunk, count = m.cols - first < chunk ? m.cols - first : chunk;
                    to_fp32(whole + first * m.rows, from + first * m.ld, count, m.rows, m.ld);
                };
                for_each_piece((m.cols + chunk - 1) / chunk, convert_columns);
                shared = whole;
            }
            const auto multiply = [&](size_t i) { one.run_piece(i, shared); };
            for_each_piece(piece_count, multiply);
        }
    }

    void run_piece(size_t i, const void* shared) const {
        const hostcuda::DeviceAccess access;
        size_t row, rows, col, cols;
        piece(i, row, rows, col, cols);
        const size_t in = p.a.element(), out = p.d.element();
        const void* src = b + (p.tb ? row : row * p.b.ld) * in;
        const void* weights = a + (p.ta ? col * p.a.ld : col) * in;
        char* dst = d + (row * p.d.ld + col) * out;
        const char* c_piece = beta != 0 ? c + (row * p.c.ld + col) * out : nullptr;
        const char* bias_piece = p.bias ? bias + col * out : nullptr;
        if (alpha != 0) {
            declare_access(src, p.tb ? p.k : rows, (p.tb ? rows : p.k) * in, p.b.ld * in, false, "B");
            declare_access(weights, p.ta ? cols : p.k, (p.ta ? p.k : cols) * in, p.a.ld * in, false, "A");
        }
        if (c_piece) declare_access(c_piece, rows, cols * out, p.c.ld * out, false, "C");
        if (bias_piece) declare_access(bias_piece, 1, cols * out, 0, false, "the bias");
        declare_access(dst, rows, cols * out, p.d.ld * out, true, "D");

        float* sums = nullptr;
        if (!direct) sums = static_cast<float*>(thread_buffer<2>(rows * cols * 4));
        if (alpha == 0) {   // A and B are not read, as BLAS has it
            memset(sums, 0, rows * cols * 4);
        } else {
            if (convert) {
                const Matrix& m = cut_rows ? p.b : p.a;
                // The slice as stored: `count` runs of `contiguous` elements.
                const bool transposed = cut_rows ? p.tb : p.ta;
                const size_t along = cut_rows ? rows : cols;
                const bool along_contiguous = cut_rows ? transposed : !transposed;
                const size_t contiguous = along_contiguous ? along : p.k, count = along_contiguous ? p.k : along;
                float* sliced = static_cast<float*>(thread_buffer<3>(contiguous * count * 4));
                to_fp32(sliced, static_cast<const uint16_t*>(cut_rows ? src : weights), count, contiguous, m.ld);
                src = cut_rows ? sliced : shared;
                weights = cut_rows ? shared : sliced;
            }
            const auto product = cache().get(shape(rows, cols));
            if (!product) hostcuda::stop("cublasLtMatmul: oneDNN has no product for m %zu, n %zu, k %zu any more", p.m, p.n, p.k);
            execute(*product, src, weights, direct ? bias_piece : nullptr, direct ? static_cast<void*>(dst) : sums);
        }
        if (direct) return;
        for (size_t r = 0; r < rows; ++r) {
            char* d_row = dst + r * p.d.ld * out;
            const char* c_row = c_piece ? c_piece + r * p.c.ld * out : nullptr;
            const float* sum = sums + r * cols;
            if (p.d.type == CUDA_R_32F)
                finish_row(reinterpret_cast<float*>(d_row), sum, reinterpret_cast<const float*>(c_row), reinterpret_cast<const float*>(bias_piece), alpha, beta, cols);
            else
                finish_row(reinterpret_cast<uint16_t*>(d_row), sum, reinterpret_cast<const uint16_t*>(c_row), reinterpret_cast<const uint16_t*>(bias_piece), alpha, beta, cols);
        }
    }
};

// A GPU would fault, or read another tensor, if a matrix left the memory of the device.
void check_matrix(const char* base, const Matrix& m, int batch_count, const char* name) {
    const int64_t last = (batch_count - 1) * m.batch_stride * static_cast<int64_t>(m.element());
    const char* first = last < 0 ? base + last : base;
    const char* end = (last > 0 ? base + last : base) + m.span_bytes() - 1;
    for (const char* p : {first, end})
        if (!hostcuda::is_device_pointer(p) && !hostcuda::is_pinned_pointer(p))
            hostcuda::stop("cublasLtMatmul: %s (%zu x %zu, leading dimension %zu, at %p) is not in device memory from its first to its last element; "
                           "check the pointer and the sizes",
                           name, m.rows, m.cols, m.ld, static_cast<const void*>(base));
}

bool live(cublasLtHandle_t handle) { return handle && handle->magic == kHandleMagic; }

}  // namespace

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    if (!handle) return CUBLAS_STATUS_INVALID_VALUE;
    *handle = new (std::nothrow) cublasLtContext{kHandleMagic};
    return *handle ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    if (!live(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
    handle->magic = 0;
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}

const char* cublasLtGetStatusName(cublasStatus_t status) {
    switch (status) {
        case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
        case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
        case CUBLAS_STATUS_ALLOC_FAILED: return "CUBLAS_STATUS_ALLOC_FAILED";
        case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
        case CUBLAS_STATUS_ARCH_MISMATCH: return "CUBLAS_STATUS_ARCH_MISMATCH";
        case CUBLAS_STATUS_MAPPING_ERROR: return "CUBLAS_STATUS_MAPPING_ERROR";
        case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
        case CUBLAS_STATUS_INTERNAL_ERROR: return "CUBLAS_STATUS_INTERNAL_ERROR";
        case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
        case CUBLAS_STATUS_LICENSE_ERROR: return "CUBLAS_STATUS_LICENSE_ERROR";
    }
    return "unknown cuBLAS status";
}

const char* cublasLtGetStatusString(cublasStatus_t status) {
    switch (status) {
        case CUBLAS_STATUS_SUCCESS: return "success";
        case CUBLAS_STATUS_NOT_INITIALIZED: return "the library handle is not valid";
        case CUBLAS_STATUS_ALLOC_FAILED: return "out of memory";
        case CUBLAS_STATUS_INVALID_VALUE: return "an argument is null, out of range or in conflict with another";
        case CUBLAS_STATUS_NOT_SUPPORTED: return "this combination of types, layouts and options is not supported";
        default: return cublasLtGetStatusName(status);
    }
}

const char* cublasGetStatusName(cublasStatus_t status) { return cublasLtGetStatusName(status); }
const char* cublasGetStatusString(cublasStatus_t status) { return cublasLtGetStatusString(status); }
size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
size_t cublasLtGetCudartVersion(void) { return CUDART_VERSION; }

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows, uint64_t cols, int64_t ld) {
    Layout l{};
    l.magic = kLiveMagic;
    l.type = type;
    l.order = CUBLASLT_ORDER_COL;
    l.rows = rows;
    l.cols = cols;
    l.ld = ld;
    l.batch_count = 1;
    return create(layout, l);
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) { return destroy<Layout>(layout); }
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, const void* value, size_t size) {
    return set_attribute<Layout>(layout, attribute, value, size);
}
cublasStatus_t cublasLtMatrixLayoutGetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, void* value, size_t size, size_t* written) {
    return get_attribute<Layout>(layout, attribute, value, size, written);
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute_type, cudaDataType_t scale_type) {
    Desc d{};
    d.magic = kLiveMagic;
    d.compute_type = compute_type;
    d.scale_type = scale_type;
    d.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    d.bias_type = -1;
    return create(desc, d);
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) { return destroy<Desc>(desc); }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, const void* value, size_t size) {
    return set_attribute<Desc>(desc, attribute, value, size);
}
cublasStatus_t cublasLtMatmulDescGetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, void* value, size_t size, size_t* written) {
    return get_attribute<Desc>(desc, attribute, value, size, written);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
    Preference p{};
    p.magic = kLiveMagic;
    for (uint32_t& alignment : p.alignment) alignment = 256;
    p.reduction_mask = ~0u;
    return create(preference, p);
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) { return destroy<Preference>(preference); }
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, const void* value, size_t size) {
    return set_attribute<Preference>(preference, attribute, value, size);
}
cublasStatus_t cublasLtMatmulPreferenceGetAttribute(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, void* value, size_t size, size_t* written) {
    return get_attribute<Preference>(preference, attribute, value, size, written);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested, cublasLtMatmulHeuristicResult_t* results, int* returned) {
    if (!live(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
    Preference pref;
    if (!results || !returned || requested <= 0 || !load(pref, preference)) return CUBLAS_STATUS_INVALID_VALUE;
    *returned = 0;
    if (pref.search_mode != 0) return CUBLAS_STATUS_NOT_SUPPORTED;
    Problem problem;
    cublasStatus_t status = describe(problem, desc, a, b, c, d);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    Algo found[2];
    int count;
    status = choices(problem, pref.max_workspace, pref.alignment, found, count);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    *returned = count < requested ? count : requested;
    for (int i = 0; i < *returned; ++i) {
        cublasLtMatmulHeuristicResult_t result{};
        memcpy(&result.algo, &found[i], sizeof(Algo));
        result.workspaceSize = found[i].workspace;
        result.state = CUBLAS_STATUS_SUCCESS;
        result.wavesCount = 1.0f;
        results[i] = result;
    }
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                              const void* alpha, const void* A, cublasLtMatrixLayout_t a, const void* B, cublasLtMatrixLayout_t b,
                              const void* beta, const void* C, cublasLtMatrixLayout_t c, void* D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t* algo_in, void* workspace, size_t workspace_bytes, cudaStream_t stream) {
    if (!live(handle)) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!alpha || !beta || !A || !B || !D) return CUBLAS_STATUS_INVALID_VALUE;
    Call call{};
    cublasStatus_t status = describe(call.p, desc, a, b, c, d);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    memcpy(&call.alpha, alpha, 4);
    memcpy(&call.beta, beta, 4);
    if (call.beta != 0 && !C) return CUBLAS_STATUS_INVALID_VALUE;
    // In place means in the same place: the same leading dimension and batch stride.
    const bool in_place = C == D;
    if (in_place && (call.p.c.ld != call.p.d.ld || (call.p.batch_count > 1 && call.p.c.batch_stride != call.p.d.batch_stride))) return CUBLAS_STATUS_INVALID_VALUE;
    Desc op;
    load(op, desc);
    if (call.p.bias && !op.bias) return CUBLAS_STATUS_INVALID_VALUE;

    const void* pointers[4] = {A, B, C ? C : D, D};
    Algo algo;
    if (algo_in) {
        memcpy(&algo, algo_in, sizeof(algo));
        if (algo.magic != kAlgoMagic || algo.index > 1) return CUBLAS_STATUS_INVALID_VALUE;
        if (algo.problem_hash != problem_hash(call.p)) return CUBLAS_STATUS_NOT_SUPPORTED;
    } else {
        uint32_t alignment[4];
        for (int i = 0; i < 4; ++i) alignment[i] = alignment_of(reinterpret_cast<uintptr_t>(pointers[i]), kVectorBytes);
        Algo found[2];
        int count;
        status = choices(call.p, workspace ? workspace_bytes : 0, alignment, found, count);
        if (status != CUBLAS_STATUS_SUCCESS) return status;
        algo = found[0];
    }
    // What the choice was told about alignment must hold, also for leading dimensions, which may have changed since.
    const Matrix* matrices[4] = {call.p.row_order ? &call.p.b : &call.p.a, call.p.row_order ? &call.p.a : &call.p.b, &call.p.c, &call.p.d};
    for (int i = 0; i < 4; ++i) {
        const uint32_t align = algo.alignment[i] ? algo.alignment[i] : 1;
        if (reinterpret_cast<uintptr_t>(pointers[i]) % align != 0 || matrices[i]->ld * matrices[i]->element() % align != 0) return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (algo.workspace > 0 && (!workspace || workspace_bytes < algo.workspace || reinterpret_cast<uintptr_t>(workspace) % kVectorBytes != 0))
        return CUBLAS_STATUS_INVALID_VALUE;

    call.a = static_cast<const char*>(call.p.row_order ? B : A);
    call.b = static_cast<const char*>(call.p.row_order ? A : B);
    call.c = static_cast<const char*>(C);
    call.d = static_cast<char*>(D);
    call.bias = static_cast<const char*>(call.p.bias ? op.bias : nullptr);
    call.workspace = workspace;
    call.workspace_bytes = algo.workspace;
    call.plan();

    check_matrix(call.a, call.p.a, call.p.batch_count, call.p.row_order ? "B" : "A");
    check_matrix(call.b, call.p.b, call.p.batch_count, call.p.row_order ? "A" : "B");
    if (call.beta != 0) check_matrix(call.c, call.p.c, call.p.batch_count, "C");
    check_matrix(call.d, call.p.d, call.p.batch_count, "D");
    if (call.bias) {
        check_matrix(call.bias, Matrix{call.p.m, 1, call.p.m, call.p.bias_batch_stride, call.p.d.type}, call.p.batch_count, "the bias");
        // The heuristic is not told about this pointer, and a GPU's kernels load it 16 bytes at a time.
        if (reinterpret_cast<uintptr_t>(call.bias) % kVectorBytes != 0)
            hostcuda::stop("cublasLtMatmul: the bias at %p is not aligned to 16 bytes, which faults on a GPU; align it or add it in a kernel", static_cast<const void*>(call.bias));
    }
    if (call.workspace_bytes) check_matrix(static_cast<const char*>(workspace), Matrix{call.workspace_bytes / 4, 1, call.workspace_bytes / 4, 0, CUDA_R_32F}, 1, "the workspace");
    if (!call.prepare()) return CUBLAS_STATUS_NOT_SUPPORTED;

    char name[128];
    const auto type = [](cudaDataType_t t) { return t == CUDA_R_32F ? "f32" : "bf16"; };
    snprintf(name, sizeof(name), "cublasLtMatmul %c%c m %zu n %zu k %zu%s %s->%s%s%s", call.p.ta ? 'T' : 'N', call.p.tb ? 'T' : 'N', call.p.m, call.p.n, call.p.k,
             call.p.batch_count > 1 ? " batched" : "", type(call.p.a.type), type(call.p.d.type), call.beta != 0 ? " +=" : "", call.p.bias ? " bias" : "");
    if (hostcuda::enqueue(stream, name, [call] { call.run(); }) != cudaSuccess) return CUBLAS_STATUS_EXECUTION_FAILED;
    return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
