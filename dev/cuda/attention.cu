// Causal self-attention over packed rows, forward and backward.
//
// Useful operations: forward 4 T T HD a head, half of it under the causal mask; backward 2.5 times that, the convention of the FlashAttention papers (five
// products instead of two). What a kernel computes twice does not count. Their "forward + backward" is 3.5 times forward's operations over the sum of the two
// times, so it follows from two rows: dev/gpu/performance.py --attention prints it.
#include "dev/cuda/bench.cuh"
#include "llmc/attention.cuh"
#include "llmc/attention_mma.cuh"
#include "llmc/attention_plain.cuh"

namespace attention_bench {

struct Shape {
    int B, T, NH, NKV, HD;
    size_t row() const { return static_cast<size_t>(NH + 2 * NKV) * HD; }
    size_t width() const { return static_cast<size_t>(NH) * HD; }
    size_t tokens() const { return static_cast<size_t>(B) * T; }
    double forward_flops() const { return 4.0 * T * T * HD / 2 * NH * B; }
    AttentionArgs args() const { return checked_attention_args(packed_attention_args(B, T, NH, NKV, HD)); }
    std::string text() const { return format("B=%d/T=%d/NH=%d/NKV=%d/HD=%d", B, T, NH, NKV, HD); }
};

// The functions measured, and whether they use tensor cores for a head_dim, which decides what they round.
struct Kernels {
    decltype(&attention_forward) forward;
    decltype(&attention_backward) backward;
    decltype(&attention_backward_scratch_count) backward_scratch_count;
    bool (*tensor_cores)(int HD);
};

// How far the sums of a kernel may be off. fp32 arithmetic adds by rounding to nearest. Tensor cores multiply bf16 exactly and add in fp32, but may truncate:
// an addition is off by up to 2 u, always towards zero, so that the errors of many do not mix. And what they multiply by values, keys or queries, a weight
// or a ds, is rounded to bf16 first.
struct Rounding {
    bool tensor_cores;
    // A sum of products, relative to the sum of their magnitudes: in the worst case, and as sum_error has it.
    double dot(int terms) const { return (tensor_cores ? 2 : 1) * terms * kRoundoff32; }
    double long_dot(double terms) const { return tensor_cores ? 2 * terms * kRoundoff32 : bench::sum_error(terms); }
    // One factor of each product was rounded.
    double factors(double size, double squares) const { return tensor_cores ? bench::rounded_terms_error<floatX>(size, squares) : 0; }
};

// Keys and values of one key/value head, and what the definition says of one query; every error bound is of the first order in u = 2^-24.
class Head {
public:
    Head(const Shape& shape, Rounding rounding, const bench::Buffer<floatX>& qkv, int b, int kv_head)
        : shape_(shape), rounding_(rounding), b_(b), scale_(1 / std::sqrt(static_cast<double>(shape.HD))) {
        const size_t first = b * shape.T * shape.row() + shape.width() + static_cast<size_t>(kv_head) * shape.HD;
        k = qkv.block(first, shape.T, shape.row(), shape.HD);
        v = qkv.block(first + static_cast<size_t>(shape.NKV) * shape.HD, shape.T, shape.row(), shape.HD);
        // Transposed, so that the scores of all keys are made side by side: the compiler may vectorise that, and may not reorder a dot product.
        k_t_.resize(k.size());
        for (int j = 0; j < shape.T; j++) {
            double squares = 0;
            for (int d = 0; d < shape.HD; d++) {
                k_t_[static_cast<size_t>(d) * shape.T + j] = k[static_cast<size_t>(j) * shape.HD + d];
                squares += k[static_cast<size_t>(j) * shape.HD + d] * k[static_cast<size_t>(j) * shape.HD + d];
            }
            k_length_.push_back(std::sqrt(squares));
        }
    }

    struct Query {
        std::vector<double> s, s_error, p;  // scores, and weights, of keys 0 .. i
        double lse, lse_error, p_error;      // p_error: relative
    };
    struct Output {
        std::vector<double> value, error;  // (HD); the error with its rounding to floatX
    };

    // A = 1, or 2 on tensor cores, is how many u an addition of a product may be off.
    //
    // score   q is scaled (1 rounding) and multiplied with k: |error of s_j| <= (A HD + 4) u scale |q| |k_j| (lengths, by Cauchy and Schwarz). On tensor cores
    //         q k is exact but for its additions, and the factor scale log2(e) of an exponent to base 2 is off by at most 4 u: scale itself by 2, log2(e) and
    //         the product.
    // weight  exp(s_j - m) against a running maximum m that grows to the last one: the differences add up to max s - s_j, each rounded; the exponential and
    //         each rescaling, at most one every 16 keys, is within 4 u and a product: r_j = |error of s_j| + u (max s - s_j + 4 + 6 tiles). To base 2 it is the
    //         same: differences are log2(e) times as large, a weight changes by ln 2 of their errors, and a GPU's own exponential is within 2^-22. Scores of
    //         these inputs lie within a few sqrt(HD) of each other, so no weight is so small that it becomes 0.
    // out     sum p_j v_j over sum p_j: max r, once for each sum; then the sums' own errors, and the quotient. On tensor cores also the rounding of each p_j
    //         to bf16 above; the sum below is of the unrounded ones.
    // lse     max r, the sum, the logarithm (4 u) and the last addition; on tensor cores also 2 u of the maximum, which goes back to base e: ln 2 and a product
    Query query(int i, const double* q) const {
        const int T = shape_.T, HD = shape_.HD, keys = i + 1;
        Query result;
        result.s.assign(keys, 0);
        double squares = 0;
        for (int d = 0; d < HD; d++) {
            const double* const k_d = &k_t_[static_cast<size_t>(d) * T];
            const double q_d = scale_ * q[d];
            for (int j = 0; j < keys; j++) result.s[j] += q_d * k_d[j];
            squares += q[d] * q[d];
        }
        const double largest = *std::max_element(result.s.begin(), result.s.end());
        double sum = 0, r = 0;
        for (int j = 0; j < keys; j++) {
            result.s_error.push_back((rounding_.dot(HD) + 4 * kRoundoff32) * scale_ * std::sqrt(squares) * k_length_[j]);
            result.p.push_back(std::exp(result.s[j] - largest));
            sum += result.p[j];
            r = std::max(r, result.s_error[j] + kRoundoff32 * (largest - result.s[j] + 4 + 6 * (keys / 16.0 + 1)));
        }
        for (double& p : result.p) p /= sum;
        result.lse = largest + std::log(sum);
        result.p_error = r;
        const double back_to_e = rounding_.tensor_cores ? 2 * std::abs(largest) : 0;
        result.lse_error = r + bench::sum_error(keys) + kRoundoff32 * (4 * std::log(sum) + std::abs(result.lse) + back_to_e);
        return result;
    }

    Output output(const Query& query) const {
        const int HD = shape_.HD;
        Output result = {std::vector<double>(HD), {}};
        std::vector<double> size(HD), squares(HD);
        const double keys = static_cast<double>(query.p.size());
        for (size_t j = 0; j < query.p.size(); j++) {
            for (int d = 0; d < HD; d++) {
                const double term = query.p[j] * v[j * HD + d];
                result.value[d] += term;
                size[d] += std::abs(term);
                squares[d] += term * term;
            }
        }
        const double relative = 2 * query.p_error + bench::sum_error(keys) + rounding_.long_dot(keys) + 4 * kRoundoff32;
        for (int d = 0; d < HD; d++) {
            result.error.push_back(bench::stored<floatX>(result.value[d], relative * size[d] + rounding_.factors(size[d], squares[d])));
        }
        return result;
    }

    // What one pair of query and key gives to the gradients, with |dp| the sum of magnitudes:
    //   p    again from s and lse: relative error rp = errors of s and lse + u (|s - lse| + 4); on tensor cores 2 |lse| more, which goes to base 2
    //   dp   (A HD + 4) u |dp|;   D = sum dout out, of the stored out, which is an input here: (HD + 8) u sum |dout out|
    //   ds = p (dp - D): p (rp |dp - D| + e + 2 u |dp - D|), e the errors of dp and D together
    // That tensor cores get p and ds rounded to bf16 is added where they are summed, in Sums.
    struct Pair {
        double p, p_error, ds, ds_error;
    };
    Pair pair(const Query& query, int j, const double* dout, double D, double D_error) const {
        double dp = 0, dp_size = 0;
        for (int d = 0; d < shape_.HD; d++) {
            const double term = dout[d] * v[static_cast<size_t>(j) * shape_.HD + d];
            dp += term;
            dp_size += std::abs(term);
        }
        const double to_base_2 = rounding_.tensor_cores ? 2 * std::abs(query.lse) : 0;
        const double rp = query.s_error[j] + query.lse_error + kRoundoff32 * (std::abs(query.s[j] - query.lse) + 4 + to_base_2);
        const double e = (rounding_.dot(shape_.HD) + 4 * kRoundoff32) * dp_size + D_error, p = query.p[j], difference = std::abs(dp - D);
        return {p, p * rp, p * (dp - D), p * ((rp + 2 * kRoundoff32) * difference + e)};
    }
    // D of a query, and its error.
    static std::pair<double, double> row_dot(const double* out, const double* dout, int HD) {
        double D = 0, size = 0;
        for (int d = 0; d < HD; d++) {
            D += dout[d] * out[d];
            size += std::abs(dout[d] * out[d]);
        }
        return {D, (HD + 8) * kRoundoff32 * size};
    }

    std::vector<double> q_of(const bench::Buffer<floatX>& qkv, int head, int i) const {
        return qkv.fetch((static_cast<size_t>(b_) * shape_.T + i) * shape_.row() + static_cast<size_t>(head) * shape_.HD, shape_.HD);
    }
    size_t out_at(int head, int i) const { return (static_cast<size_t>(b_) * shape_.T + i) * shape_.width() + static_cast<size_t>(head) * shape_.HD; }
    double scale() const { return scale_; }

    std::vector<double> k, v;  // (T, HD)

private:
    const Shape shape_;
    const Rounding rounding_;
    const int b_;
    const double scale_;
    std::vector<double> k_t_, k_length_;  // (HD, T), (T)
};

// Sums with their errors and magnitudes, for gradients: the additions are in long_dot (a product's rounding too), 3 more are for the scalings.
struct Sums {
    const Rounding rounding;
    std::vector<double> value, error, size, squares;
    Sums(int HD, Rounding rounding) : rounding(rounding), value(HD), error(HD), size(HD), squares(HD) {}
    void add(const double* x, double weight, double weight_error) {
        for (size_t d = 0; d < value.size(); d++) {
            const double magnitude = (std::abs(weight) + weight_error) * std::abs(x[d]);
            value[d] += weight * x[d];
            error[d] += weight_error * std::abs(x[d]);
            size[d] += magnitude;
            squares[d] += magnitude * magnitude;
        }
    }
    void expect(bench::Case& c, const char* name, const bench::Buffer<floatX>& buffer, size_t first, double terms) const {
        const std::vector<double> got = buffer.fetch(first, value.size());
        for (size_t d = 0; d < value.size(); d++) {
            const double sums = (rounding.long_dot(terms) + 3 * kRoundoff32) * size[d] + rounding.factors(size[d], squares[d]);
            c.expect(name, first + d, got[d], value[d], bench::stored<floatX>(value[d], error[d] + sums));
        }
    }
};

// A query with one key, the last one of all, and some between: (batch, head, query).
std::vector<std::array<int, 3>> sample_queries(const Shape& shape) {
    std::vector<std::array<int, 3>> queries;
    for (const size_t index : bench::sample(shape.tokens() * shape.NH, 10)) {
        queries.push_back({static_cast<int>(index / shape.NH / shape.T), static_cast<int>(index % shape.NH), static_cast<int>(index / shape.NH % shape.T)});
    }
    return queries;
}

void forward(bench::Case& c, const Shape& shape, const Kernels& kernels) {
    const Rounding rounding = {kernels.tensor_cores(shape.HD)};
    const auto qkv = c.normal<floatX>(shape.tokens(), shape.row());
    const auto out = c.output<floatX>("out", shape.tokens(), shape.width());
    const auto lse = c.output<float>("lse", shape.tokens(), shape.NH);
    const size_t k_first = shape.width(), v_first = k_first + static_cast<size_t>(shape.NKV) * shape.HD;
    c.run([&](cudaStream_t stream) { kernels.forward(out, lse, qkv, qkv + k_first, qkv + v_first, shape.args(), stream); });
    for (const auto& [b, head, i] : sample_queries(shape)) {
        const Head heads(shape, rounding, qkv, b, head / (shape.NH / shape.NKV));
        const Head::Query query = heads.query(i, heads.q_of(qkv, head, i).data());
        const Head::Output want = heads.output(query);
        const size_t lse_at = (static_cast<size_t>(b) * shape.NH + head) * shape.T + i, out_at = heads.out_at(head, i);
        c.expect("lse", lse_at, lse.at(lse_at), query.lse, query.lse_error);
        const std::vector<double> got = out.fetch(out_at, shape.HD);
        for (int d = 0; d < shape.HD; d++) c.expect("out", out_at + d, got[d], want.value[d], want.error[d]);
    }
    c.time(bench::bytes(qkv, out, lse), shape.forward_flops());
}

void backward(bench::Case& c, const Shape& shape, const Kernels& kernels) {
    const Rounding rounding = {kernels.tensor_cores(shape.HD)};
    const int T = shape.T, HD = shape.HD, group = shape.NH / shape.NKV;
    const auto qkv = c.normal<floatX>(shape.tokens(), shape.row()), dout = c.normal<floatX>(shape.tokens(), shape.width());
    const auto dqkv = c.output<floatX>("dqkv", shape.tokens(), shape.row());
    const bench::Buffer<floatX> out(dout.count());
    const bench::Buffer<float> lse(shape.tokens() * shape.NH);
    const auto scratch = c.scratch<float>(kernels.backward_scratch_count(shape.args()));
    const size_t k_first = shape.width(), v_first = k_first + static_cast<size_t>(shape.NKV) * HD;
    kernels.forward(out, lse, qkv, qkv + k_first, qkv + v_first, shape.args(), bench::stream());
    c.run([&](cudaStream_t stream) {
        kernels.backward(dqkv, dqkv + k_first, dqkv + v_first, scratch, dout, qkv, qkv + k_first, qkv + v_first, out, lse, shape.args(), stream);
    });

    for (const auto& [b, head, i] : sample_queries(shape)) {
        const Head heads(shape, rounding, qkv, b, head / group);
        const Head::Query query = heads.query(i, heads.q_of(qkv, head, i).data());
        const std::vector<double> grad = dout.fetch(heads.out_at(head, i), HD), out_row = out.fetch(heads.out_at(head, i), HD);
        const auto [D, D_error] = Head::row_dot(out_row.data(), grad.data(), HD);
        Sums dq(HD, rounding);
        for (int j = 0; j <= i; j++) {
            const Head::Pair pair = heads.pair(query, j, grad.data(), D, D_error);
            dq.add(&heads.k[static_cast<size_t>(j) * HD], heads.scale() * pair.ds, heads.scale() * pair.ds_error);
        }
        dq.expect(c, "dq", dqkv, (static_cast<size_t>(b) * T + i) * shape.row() + static_cast<size_t>(head) * HD, i + 1);
    }
    // Gradients of keys come from every later query of every head of the group: one head of the last sequence, its first and last key and some between.
    const int b = shape.B - 1, kv_head = shape.NKV - 1;
    const Head heads(shape, rounding, qkv, b, kv_head);
    const std::vector<size_t> keys = bench::sample(T, 6);
    std::vector<Sums> dk(keys.size(), Sums(HD, rounding)), dv(keys.size(), Sums(HD, rounding));
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
        const std::vector<double> q = qkv.block(b * static_cast<size_t>(T) * shape.row() + static_cast<size_t>(head) * HD, T, shape.row(), HD);
        const std::vector<double> grads = dout.block(heads.out_at(head, 0), T, shape.width(), HD), outs = out.block(heads.out_at(head, 0), T, shape.width(), HD);
        for (int i = 0; i < T; i++) {
            const double *const q_i = &q[static_cast<size_t>(i) * HD], *const grad = &grads[static_cast<size_t>(i) * HD];
            const Head::Query query = heads.query(i, q_i);
            const auto [D, D_error] = Head::row_dot(&outs[static_cast<size_t>(i) * HD], grad, HD);
            for (size_t index = 0; index < keys.size() && static_cast<int>(keys[index]) <= i; index++) {
                const Head::Pair pair = heads.pair(query, static_cast<int>(keys[index]), grad, D, D_error);
                dk[index].add(q_i, heads.scale() * pair.ds, heads.scale() * pair.ds_error);
                dv[index].add(grad, pair.p, pair.p_error);
            }
        }
    }
    for (size_t index = 0; index < keys.size(); index++) {
        const size_t at = (static_cast<size_t>(b) * T + keys[index]) * shape.row() + static_cast<size_t>(kv_head) * HD;
        const double terms = static_cast<double>(group) * (T - keys[index]);
        dk[index].expect(c, "dk", dqkv, at + k_first, terms);
        dv[index].expect(c, "dv", dqkv, at + v_first, terms);
    }
    c.time(bench::bytes(qkv, out, lse, dout, dqkv), 2.5 * shape.forward_flops());
}

// Shapes of the FlashAttention papers' tables, causal: 16384 tokens, 2048 dims, as many key/value heads as query heads. For a CPU they are far too large; it gets
// one shape of its own.
std::vector<Shape> published_shapes(bool gpu) {
    if (!gpu) return {{1, 1024, 12, 12, 64}};
    std::vector<Shape> shapes;
    for (const int HD : {64, 128}) {
        for (const int T : {1024, 2048, 4096}) shapes.push_back({16384 / T, T, 2048 / HD, 2048 / HD, HD});
    }
    return shapes;
}

const Kernels shipped = {attention_forward, attention_backward, attention_backward_scratch_count, attention_uses_tensor_cores};
const Kernels plain = {attention_forward_plain, attention_backward_plain, attention_backward_plain_scratch_count, [](int) { return false; }};

const bench::Registration registration([](const bench::Settings& s) {
    std::vector<Shape> shapes;
    for (const ModelConfig& model : s.models) shapes.push_back({s.N / s.T, s.T, model.num_heads, model.num_kv_heads, model.head_dim});
    const std::vector<Shape> published = published_shapes(s.gpu);
    shapes.insert(shapes.end(), published.begin(), published.end());
    for (const Shape& shape : shapes) {
        bench::add("attention_forward/" + shape.text(), [=](bench::Case& c) { forward(c, shape, shipped); });
        bench::add("attention_backward/" + shape.text(), [=](bench::Case& c) { backward(c, shape, shipped); });
    }
    // How many times faster than plain fp32 arithmetic: one shape says it.
    const Shape& shape = published.front();
    bench::add("attention_forward_plain/" + shape.text(), [=](bench::Case& c) { forward(c, shape, plain); });
    bench::add("attention_backward_plain/" + shape.text(), [=](bench::Case& c) { backward(c, shape, plain); });
});

}  // namespace attention_bench
