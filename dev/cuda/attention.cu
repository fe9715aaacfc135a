// Causal self-attention over packed rows, forward and backward.
//
// Useful operations: forward 4 T T HD a head, half of it under the causal mask; backward 2.5 times that, the convention of the FlashAttention papers (five
// products instead of two). What a kernel computes twice does not count.
#include "dev/cuda/bench.cuh"
#include "llmc/attention.cuh"

namespace attention_bench {

struct Shape {
    int B, T, NH, NKV, HD;
    size_t row() const { return static_cast<size_t>(NH + 2 * NKV) * HD; }
    size_t width() const { return static_cast<size_t>(NH) * HD; }
    size_t tokens() const { return static_cast<size_t>(B) * T; }
    double forward_flops() const { return 4.0 * T * T * HD / 2 * NH * B; }
    AttentionArgs args() const { return packed_attention_args(B, T, NH, NKV, HD); }
    std::string text() const { return format("B=%d/T=%d/NH=%d/NKV=%d/HD=%d", B, T, NH, NKV, HD); }
};

// Keys and values of one key/value head, and what the definition says of one query; every error bound is of the first order in u = 2^-24.
class Head {
public:
    Head(const Shape& shape, const bench::Buffer<floatX>& qkv, int b, int kv_head) : shape_(shape), b_(b), scale_(1 / std::sqrt(static_cast<double>(shape.HD))) {
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

    // score   q is scaled (1 rounding) and multiplied with k: |error of s_j| <= (HD + 4) u scale |q| |k_j| (lengths, by Cauchy and Schwarz)
    // weight  exp(s_j - m) against a running maximum m that grows to the last one: the differences add up to max s - s_j, each rounded; the exponential and
    //         each rescaling, at most one every 16 keys, is within 4 u and a product: r_j = |error of s_j| + u (max s - s_j + 4 + 6 tiles)
    // out     sum p_j v_j over sum p_j: max r, once for each sum; then the sums' own errors, and the quotient
    // lse     max r, the sum, the logarithm (4 u) and the last addition
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
            result.s_error.push_back((HD + 4) * kRoundoff32 * scale_ * std::sqrt(squares) * k_length_[j]);
            result.p.push_back(std::exp(result.s[j] - largest));
            sum += result.p[j];
            r = std::max(r, result.s_error[j] + kRoundoff32 * (largest - result.s[j] + 4 + 6 * (keys / 16.0 + 1)));
        }
        for (double& p : result.p) p /= sum;
        result.lse = largest + std::log(sum);
        result.p_error = r;
        result.lse_error = r + bench::sum_error(keys) + kRoundoff32 * (4 * std::log(sum) + std::abs(result.lse));
        return result;
    }

    Output output(const Query& query) const {
        const int HD = shape_.HD;
        Output result = {std::vector<double>(HD), {}};
        std::vector<double> size(HD);
        for (size_t j = 0; j < query.p.size(); j++) {
            for (int d = 0; d < HD; d++) {
                result.value[d] += query.p[j] * v[j * HD + d];
                size[d] += query.p[j] * std::abs(v[j * HD + d]);
            }
        }
        const double relative = 2 * query.p_error + 2 * bench::sum_error(query.p.size()) + 4 * kRoundoff32;
        for (int d = 0; d < HD; d++) result.error.push_back(bench::stored<floatX>(result.value[d], relative * size[d]));
        return result;
    }

    // What one pair of query and key gives to the gradients, with |dp| the sum of magnitudes:
    //   p    again from s and lse: relative error rp = errors of s and lse + u (|s - lse| + 4)
    //   dp   (HD + 4) u |dp|;   D = sum dout out, of the stored out, which is an input here: (HD + 8) u sum |dout out|
    //   ds = p (dp - D): p (rp |dp - D| + e + 2 u |dp - D|), e the errors of dp and D together
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
        const double rp = query.s_error[j] + query.lse_error + kRoundoff32 * (std::abs(query.s[j] - query.lse) + 4), difference = std::abs(dp - D);
        const double e = (shape_.HD + 4) * kRoundoff32 * dp_size + D_error, p = query.p[j];
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
    const int b_;
    const double scale_;
    std::vector<double> k_t_, k_length_;  // (HD, T), (T)
};

// Sums with their errors and magnitudes, for gradients: a term's rounding is in sum_error, 3 more are for the scalings.
struct Sums {
    std::vector<double> value, error, size;
    explicit Sums(int HD) : value(HD), error(HD), size(HD) {}
    void add(const double* x, double weight, double weight_error) {
        for (size_t d = 0; d < value.size(); d++) {
            value[d] += weight * x[d];
            error[d] += weight_error * std::abs(x[d]);
            size[d] += (std::abs(weight) + weight_error) * std::abs(x[d]);
        }
    }
    void expect(bench::Case& c, const char* name, const bench::Buffer<floatX>& buffer, size_t first, double terms) const {
        const std::vector<double> got = buffer.fetch(first, value.size());
        for (size_t d = 0; d < value.size(); d++) {
            c.expect(name, first + d, got[d], value[d], bench::stored<floatX>(value[d], error[d] + (bench::sum_error(terms) + 3 * kRoundoff32) * size[d]));
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

void forward(bench::Case& c, const Shape& shape) {
    const auto qkv = c.normal<floatX>(shape.tokens(), shape.row());
    const auto out = c.output<floatX>("out", shape.tokens(), shape.width());
    const auto lse = c.output<float>("lse", shape.tokens(), shape.NH);
    const size_t k_first = shape.width(), v_first = k_first + static_cast<size_t>(shape.NKV) * shape.HD;
    c.run([&](cudaStream_t stream) { attention_forward(out, lse, qkv, qkv + k_first, qkv + v_first, shape.args(), stream); });
    for (const auto& [b, head, i] : sample_queries(shape)) {
        const Head heads(shape, qkv, b, head / (shape.NH / shape.NKV));
        const Head::Query query = heads.query(i, heads.q_of(qkv, head, i).data());
        const Head::Output want = heads.output(query);
        const size_t lse_at = (static_cast<size_t>(b) * shape.NH + head) * shape.T + i, out_at = heads.out_at(head, i);
        c.expect("lse", lse_at, lse.at(lse_at), query.lse, query.lse_error);
        const std::vector<double> got = out.fetch(out_at, shape.HD);
        for (int d = 0; d < shape.HD; d++) c.expect("out", out_at + d, got[d], want.value[d], want.error[d]);
    }
    c.time(bench::bytes(qkv, out, lse), shape.forward_flops());
}

void backward(bench::Case& c, const Shape& shape) {
    const int T = shape.T, HD = shape.HD, group = shape.NH / shape.NKV;
    const auto qkv = c.normal<floatX>(shape.tokens(), shape.row()), dout = c.normal<floatX>(shape.tokens(), shape.width());
    const auto dqkv = c.output<floatX>("dqkv", shape.tokens(), shape.row());
    const bench::Buffer<floatX> out(dout.count());
    const bench::Buffer<float> lse(shape.tokens() * shape.NH);
    const auto scratch = c.scratch<float>(attention_backward_scratch_count(shape.args()));
    const size_t k_first = shape.width(), v_first = k_first + static_cast<size_t>(shape.NKV) * HD;
    attention_forward(out, lse, qkv, qkv + k_first, qkv + v_first, shape.args(), bench::stream());
    c.run([&](cudaStream_t stream) {
        attention_backward(dqkv, dqkv + k_first, dqkv + v_first, scratch, dout, qkv, qkv + k_first, qkv + v_first, out, lse, shape.args(), stream);
    });

    for (const auto& [b, head, i] : sample_queries(shape)) {
        const Head heads(shape, qkv, b, head / group);
        const Head::Query query = heads.query(i, heads.q_of(qkv, head, i).data());
        const std::vector<double> grad = dout.fetch(heads.out_at(head, i), HD), out_row = out.fetch(heads.out_at(head, i), HD);
        const auto [D, D_error] = Head::row_dot(out_row.data(), grad.data(), HD);
        Sums dq(HD);
        for (int j = 0; j <= i; j++) {
            const Head::Pair pair = heads.pair(query, j, grad.data(), D, D_error);
            dq.add(&heads.k[static_cast<size_t>(j) * HD], heads.scale() * pair.ds, heads.scale() * pair.ds_error);
        }
        dq.expect(c, "dq", dqkv, (static_cast<size_t>(b) * T + i) * shape.row() + static_cast<size_t>(head) * HD, i + 1);
    }
    // Gradients of keys come from every later query of every head of the group: one head of the last sequence, its first and last key and some between.
    const int b = shape.B - 1, kv_head = shape.NKV - 1;
    const Head heads(shape, qkv, b, kv_head);
    const std::vector<size_t> keys = bench::sample(T, 6);
    std::vector<Sums> dk(keys.size(), Sums(HD)), dv(keys.size(), Sums(HD));
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

const bench::Registration registration([](const bench::Settings& s) {
    for (const ModelConfig& model : s.models) {
        const Shape shape = {s.N / s.T, s.T, model.num_heads, model.num_kv_heads, model.head_dim};
        bench::add("attention_forward/" + shape.text(), [=](bench::Case& c) { forward(c, shape); });
        bench::add("attention_backward/" + shape.text(), [=](bench::Case& c) { backward(c, shape); });
    }
});

}  // namespace attention_bench
