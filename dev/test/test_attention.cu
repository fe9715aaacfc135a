// Attention forward and backward against a loop in double precision that follows the definition and bounds, along the way, what fp32 arithmetic may
// make of it.
#include "dev/test/kernel_test.cuh"

#include <memory>
#include <string>

#include "llmc/attention.cuh"

namespace {

constexpr double kUnit = kRoundoff32;
constexpr double kStored = kRoundoff<floatX>;
constexpr double kUnderflow = 1e-36;  // more than underflow to zero loses, in fp32 or bf16
constexpr double kFlush = 0x1p-126;   // what a weight loses that becomes 0 below the normal numbers

// Where (batch, token, head, dim) lies: tokens `row` elements apart, sequences `batch`, heads side by side from `first`.
struct Layout {
    int B, T, heads, HD;
    size_t first, row, batch;
    size_t at(int b, int t, int h, int d) const { return first + b * batch + t * row + static_cast<size_t>(h) * HD + d; }
};

// A buffer in which every element that no tensor owns is a guard: a NaN with its own bits, which no kernel may read into a result or overwrite.
class Buffer {
public:
    Buffer(size_t count) : values_(count, to_storage<floatX>(std::nanf(""))), owned_(count, 0), device_(count) {}

    template <typename Function>
    void fill(const Layout& layout, Function&& value) {
        for (int b = 0; b < layout.B; b++)
            for (int t = 0; t < layout.T; t++)
                for (int h = 0; h < layout.heads; h++) {
                    const size_t first = layout.at(b, t, h, 0);
                    for (int d = 0; d < layout.HD; d++) {
                        values_[first + d] = to_storage<floatX>(value(b, t, h, d));
                        owned_[first + d] = 1;
                    }
                }
    }
    void own(const Layout& layout) {
        fill(layout, [](int, int, int, int) { return std::nanf(""); });
    }
    void upload() { device_.upload(values_); }
    void download() { result_ = device_.download(); }
    floatX* device(const Layout& layout) { return device_.get() + layout.first; }
    double value(size_t i) const { return to_double(values_[i]); }
    double result(size_t i) const { return to_double(result_[i]); }
    const std::vector<floatX>& results() const { return result_; }

    void expect_guards_untouched(const char* name) const {
        for (size_t i = 0; i < values_.size(); i++) {
            if (!owned_[i] && memcmp(&values_[i], &result_[i], sizeof(floatX)) != 0) {
                ADD_FAILURE() << name << ": element " << i << " belongs to no output and was overwritten with " << to_double(result_[i]);
                return;
            }
        }
    }

private:
    std::vector<floatX> values_, result_;
    std::vector<char> owned_;
    DeviceBuffer<floatX> device_;
};

// Which keys a query sees besides the causal rule.
enum class Starts {
    kNone,           // all before it
    kDocuments,      // packed documents, 19 tokens long on average
    kLongDocuments,  // packed documents of 150 tokens: whole tiles of keys are out of sight
    kWindow,         // the last 21 keys
    kOwn,            // one key
    kBeyond,         // some queries see nothing, and starts go up and down
    kBlindTile       // queries 64 to 229 see nothing: whole tiles of them
};
const char* const kStartsNames[] = {"", "_documents", "_long_documents", "_window", "_own", "_beyond", "_blind_tile"};
enum class Values { kNormal, kExtreme };

struct Case {
    int B, Tq, Tkv, NH, NKV, HD;
    Starts starts = Starts::kNone;
    bool packed = true;  // q, k, v side by side in one row; else apart, with gaps everywhere and gradients in a layout of their own
    Values values = Values::kNormal;

    std::string name() const {
        return format("B%d_Tq%d_Tkv%d_NH%d_NKV%d_HD%d%s%s%s", B, Tq, Tkv, NH, NKV, HD, kStartsNames[static_cast<int>(starts)], packed ? "" : "_apart",
                      values == Values::kExtreme ? "_extreme" : "");
    }
};

std::ostream& operator<<(std::ostream& stream, const Case& c) { return stream << c.name(); }

// A CPU has tiles of its own in the tensor-core kernels. Tests run those and the GPU's.
enum class Tiles { kOwn, kGpu };
std::vector<Tiles> tiles_of(int HD) {
    return kFatWarps && attention_uses_tensor_cores(HD) ? std::vector<Tiles>{Tiles::kOwn, Tiles::kGpu} : std::vector<Tiles>{Tiles::kOwn};
}
const char* in_words(Tiles tiles) { return tiles == Tiles::kOwn ? "" : ", tiles of a GPU"; }

// Forward and backward.
void run_attention(Tiles tiles, floatX* out, float* lse, floatX* dq, floatX* dk, floatX* dv, float* scratch, const floatX* dout, const floatX* q,
                   const floatX* k, const floatX* v, const AttentionArgs& args) {
    if constexpr (kTensorCoreBuild && kFatWarps) {
        if (tiles == Tiles::kGpu) {
            const AttentionArgs whole = checked_attention_args(args);
            attention_forward_mma<false>(out, lse, q, k, v, whole, test_stream());
            attention_backward_mma<false>(dq, dk, dv, scratch, dout, q, k, v, out, lse, whole, test_stream());
            return;
        }
    }
    attention_forward(out, lse, q, k, v, args, test_stream());
    attention_backward(dq, dk, dv, scratch, dout, q, k, v, out, lse, args, test_stream());
}

// ---- the reference -------------------------------------------------------------------------------------------------------------

// What a path's arithmetic may do to the definition: Problem::reference derives the bounds from it.
struct Arithmetic {
    double addition;     // error of each term of a product's sum, relative to the sum of magnitudes
    double weight;       // rounding of p and ds before they go into the next product
    int exponent;        // roundings of s - max, relative to it
    int lse;             // roundings of the maximum's way into lse, relative to it
    int lse_again;       // roundings of s and of lse on their way into backward's exponent, relative to each
    int keys_a_rescale;  // fewest keys between two rescalings
};
constexpr Arithmetic kPlainArithmetic = {kUnit, 0, 1, 0, 0, 16};
constexpr Arithmetic kTensorCoreArithmetic = {2 * kUnit, kRoundoff<__nv_bfloat16>, 3, 4, 2, 64};
constexpr Arithmetic arithmetic_of(int HD) { return attention_uses_tensor_cores(HD) ? kTensorCoreArithmetic : kPlainArithmetic; }

using Doubles = std::vector<double>;

// One head of a tensor in double, by token and by dim. Each loop below runs along whichever leaves its sums independent of one another: a compiler may
// then make several at once. They touch memory of their own thread only, and ThreadSanitizer, told not to watch them, runs the tests in half the time.
struct Head {
    int T, HD;
    Doubles rows, columns;
    Head(const Buffer& buffer, const Layout& layout, int b, int h) : T(layout.T), HD(layout.HD), rows(static_cast<size_t>(T) * HD), columns(rows.size()) {
        for (int t = 0; t < T; t++)
            for (int d = 0; d < HD; d++)
                rows[static_cast<size_t>(t) * HD + d] = columns[static_cast<size_t>(d) * T + t] = buffer.value(layout.at(b, t, h, d));
    }
    const double* row(int t) const { return &rows[static_cast<size_t>(t) * HD]; }

    // sum[t] = x . row t, size[t] = the sum of its terms' magnitudes.
    __attribute__((no_sanitize_thread)) void dot(Doubles& sum, Doubles& size, const double* x, int begin, int end) const {
        double *const __restrict sums = sum.data(), *const __restrict sizes = size.data();
        for (int t = begin; t < end; t++) sums[t] = sizes[t] = 0;
        for (int d = 0; d < HD; d++) {
            const double* const column = &columns[static_cast<size_t>(d) * T];
            const double factor = x[d];
            for (int t = begin; t < end; t++) {
                sums[t] += factor * column[t];
                sizes[t] += std::abs(factor * column[t]);
            }
        }
    }
};

// A tensor of sums and of bounds of their errors: (B, heads, T, HD).
struct Sums {
    Layout layout;
    Doubles want, error;
    explicit Sums(const Layout& layout_) : layout(layout_), want(row(layout.B, 0, 0)), error(want.size()) {}
    size_t row(int b, int t, int h) const { return ((static_cast<size_t>(b) * layout.heads + h) * layout.T + t) * layout.HD; }

    // A row's want += w x, its error += w_error |x|.
    __attribute__((no_sanitize_thread)) void add(size_t row, double w, double w_error, const double* x) {
        double *const __restrict wants = &want[row], *const __restrict errors = &error[row];
        for (int d = 0; d < layout.HD; d++) {
            wants[d] += w * x[d];
            errors[d] += w_error * std::abs(x[d]);
        }
    }
};

// The error of a sum that is stored.
double stored_error(double want, double error) {
    const double all = 1.02 * error + kUnderflow;
    return all + kStored * (std::abs(want) + all);
}

// What is right, and how far off each element may be.
struct Expected {
    Sums out, lse, dq, dk, dv;
};

struct Problem {
    Case c;
    Layout q, k, v, out, dout, dq, dk, dv;
    std::vector<int> starts;  // (B, Tq)
    std::unique_ptr<Buffer> inputs, outs, douts, dqk, dvs;
    std::unique_ptr<DeviceBuffer<float>> lse, scratch;
    std::unique_ptr<DeviceBuffer<int>> starts_device;
    AttentionArgs args = {};

    explicit Problem(const Case& c_) : c(c_) {
        // Guards follow the last row of each sequence: a tile that reaches past it meets them.
        constexpr int kGuardRows = 2;
        const size_t NHD = static_cast<size_t>(c.NH) * c.HD, KVD = static_cast<size_t>(c.NKV) * c.HD;
        const size_t gap = c.packed ? 0 : 8, q_rows = c.Tq + kGuardRows, kv_rows = c.Tkv + kGuardRows;
        const bool one_row = c.packed && c.Tq == c.Tkv;
        size_t input_count, dqk_count, dv_count;
        if (one_row) {
            const size_t row = NHD + 2 * KVD + 16, batch = row * q_rows + 24;
            q = {c.B, c.Tq, c.NH, c.HD, 8, row, batch};
            k = {c.B, c.Tkv, c.NKV, c.HD, 8 + NHD, row, batch};
            v = {c.B, c.Tkv, c.NKV, c.HD, 8 + NHD + KVD, row, batch};
            input_count = c.B * batch + 8;
            dq = q, dk = k, dv = v;
            dqk_count = dv_count = input_count;
        } else {
            // v lies farther apart than k, as it does where q and k are normalised into a buffer of their own.
            const size_t q_row = NHD + gap, k_row = KVD + gap, v_row = KVD + 4 * gap;
            q = {c.B, c.Tq, c.NH, c.HD, 8, q_row, q_row * q_rows + gap};
            k = {c.B, c.Tkv, c.NKV, c.HD, 8 + c.B * q.batch, k_row, k_row * kv_rows + gap};
            v = {c.B, c.Tkv, c.NKV, c.HD, k.first + c.B * k.batch, v_row, v_row * kv_rows + 2 * gap};
            input_count = v.first + c.B * v.batch + 8;
            dq = {c.B, c.Tq, c.NH, c.HD, 16, NHD + 2 * gap, (NHD + 2 * gap) * q_rows};
            const size_t dkv = 16 + c.B * dq.batch;
            dk = {c.B, c.Tkv, c.NKV, c.HD, dkv, KVD + gap, (KVD + gap) * kv_rows};
            dqk_count = dkv + c.B * dk.batch + 8;
            dv = {c.B, c.Tkv, c.NKV, c.HD, 8, KVD + 3 * gap, (KVD + 3 * gap) * kv_rows + 8};
            dv_count = 8 + c.B * dv.batch + 8;
        }
        out = {c.B, c.Tq, c.NH, c.HD, 8, NHD + gap, (NHD + gap) * q_rows};
        dout = {c.B, c.Tq, c.NH, c.HD, 16, NHD + 2 * gap, (NHD + 2 * gap) * q_rows};

        std::mt19937 random(1);
        auto normal = [next = size_t{0}]() mutable {
            static const std::vector<double> values = random_values<floatX>(100003, 1);  // a prime number: rows of no length repeat soon
            return values[next++ % values.size()];
        };
        inputs = std::make_unique<Buffer>(input_count);
        if (c.values == Values::kNormal) {
            inputs->fill(q, [&](int, int, int, int) { return normal(); });
            inputs->fill(k, [&](int, int, int, int) { return normal(); });
        } else {
            // Logits of +-10^4 and 0 from one product each, so that the reference's bound on their error stays small.
            const float root = std::sqrt(1e4f * std::sqrt(static_cast<float>(c.HD)));
            inputs->fill(q, [&](int, int t, int, int d) { return d == t % c.HD ? (t % 3 == 0 ? -root : root) : 0.0f; });
            inputs->fill(k, [&](int, int t, int, int d) { return (t + d) % 4 == 0 ? 0.0f : (t + d) % 4 == 1 ? -root : root; });
        }
        inputs->fill(v, [&](int, int, int, int) { return normal(); });
        outs = std::make_unique<Buffer>(out.first + c.B * out.batch + 8);
        outs->own(out);
        douts = std::make_unique<Buffer>(dout.first + c.B * dout.batch + 8);
        douts->fill(dout, [&](int, int, int, int) { return normal(); });
        dqk = std::make_unique<Buffer>(dqk_count);
        dqk->own(dq);
        dqk->own(dk);
        if (one_row) {
            dqk->own(dv);
        } else {
            dvs = std::make_unique<Buffer>(dv_count);
            dvs->own(dv);
        }

        for (int b = 0; b < c.B; b++) {
            int document = -3;
            for (int i = 0; i < c.Tq; i++) {
                const int last = c.Tkv - c.Tq + i;
                if (random() % 19 == 0) document = last;
                switch (c.starts) {
                    case Starts::kNone: starts.push_back(0); break;
                    case Starts::kDocuments: starts.push_back(document); break;
                    case Starts::kLongDocuments: starts.push_back(last / 150 * 150); break;
                    case Starts::kWindow: starts.push_back(last - 20); break;
                    case Starts::kOwn: starts.push_back(last); break;
                    case Starts::kBeyond: starts.push_back(i % 5 == 2 || i < 3 ? last + 1 : i % 5 == 3 ? c.Tkv + 100 : last / 2); break;
                    case Starts::kBlindTile: starts.push_back(i >= 64 && i < 230 ? c.Tkv + i : 0); break;
                }
            }
        }
        starts_device = std::make_unique<DeviceBuffer<int>>(starts);
        args.B = c.B, args.Tq = c.Tq, args.Tkv = c.Tkv, args.NH = c.NH, args.NKV = c.NKV, args.HD = c.HD;
        args.q_row = q.row, args.k_row = k.row, args.v_row = v.row, args.o_row = out.row;
        args.q_batch = q.batch, args.k_batch = k.batch, args.v_batch = v.batch, args.o_batch = out.batch;
        if (!one_row) {
            args.dq_row = dq.row, args.dk_row = dk.row, args.dv_row = dv.row, args.dq_batch = dq.batch, args.dk_batch = dk.batch, args.dv_batch = dv.batch;
        }
        args.do_row = dout.row, args.do_batch = dout.batch;
        args.scale = 1.0f / std::sqrt(static_cast<float>(c.HD));
        args.key_start = c.starts == Starts::kNone ? nullptr : starts_device->get();
        lse = std::make_unique<DeviceBuffer<float>>(static_cast<size_t>(c.B) * c.NH * c.Tq);
        scratch = std::make_unique<DeviceBuffer<float>>(attention_backward_scratch_count(args));
    }

    Buffer& dv_buffer() const { return dvs ? *dvs : *dqk; }
    // The keys that query i sees: from first_key to end_key - 1.
    int first_key(int b, int i) const { return std::max(0, starts[static_cast<size_t>(b) * c.Tq + i]); }
    int end_key(int i) const { return std::min(c.Tkv, c.Tkv - c.Tq + i + 1); }
    bool sees(int b, int i, int j) const { return j >= first_key(b, i) && j < end_key(i); }
    size_t lse_at(int b, int i, int h) const { return (static_cast<size_t>(b) * c.NH + h) * c.Tq + i; }

    void run(Tiles tiles = Tiles::kOwn) {
        for (Buffer* buffer : {inputs.get(), outs.get(), douts.get(), dqk.get(), dvs.get()})
            if (buffer != nullptr) buffer->upload();
        lse->upload(std::vector<float>(lse->count(), std::nanf("")));
        scratch->upload(std::vector<float>(scratch->count(), std::nanf("")));
        run_attention(tiles, outs->device(out), lse->get(), dqk->device(dq), dqk->device(dk), dv_buffer().device(dv), scratch->get(), douts->device(dout),
                      inputs->device(q), inputs->device(k), inputs->device(v), args);
        for (Buffer* buffer : {inputs.get(), outs.get(), douts.get(), dqk.get(), dvs.get()})
            if (buffer != nullptr) buffer->download();
    }

    // The definition, in double, with bounds. Names follow the header: s, p, dp, ds. u = 2^-24; n is the number of keys the query sees. What differs
    // between plain and tensor cores is in Arithmetic, here in brackets [plain, tensor cores].
    //   sum         of n products: n a times the sum of magnitudes, a = [u, 2u]. Plain: a rounding for each fused multiply-add. A tensor core multiplies
    //               exactly; an instruction aligns its 16 products and the sum so far to the largest, cuts off what lies lower (cards with bf16 keep a bit
    //               or more below fp32's) and cuts off the result: less than 2u a product. Terms that are 0 add no error, so padding and keys out of
    //               sight do not count. Further roundings are written as more terms
    //   score       |error of s_j| <= es_j = (terms of q that are not 0 + 4) a scale sum |q||k|. The 4: plain scales q (1 rounding) and joins up to 4
    //               chains of multiply-adds (3 additions)
    //   weight      exp(s_j - m) against a running maximum m that later grows to the last one: the differences taken add up to R_j = max s - s_j, each
    //               rounded once [u, u]; tensor cores take 2^(s c - m) in one multiply-add, with c = scale log2(e), a rounded product of a rounded
    //               constant [0, 2u]: R_j times [1, 3] u. The maximum's own rounding is the same for all weights and leaves with their sum. The
    //               exponential is within 4 u (2 ulp of a good one; ex2.approx 2^-22), and so is each rescaling, applied with one rounding; a
    //               rescaling comes at most once every [16, 64] keys (the smallest tile): relative error <= e^x - 1,
    //               x = es_j + ([1, 3] R_j + 4 + 6 rescalings) u, and below 2^-126 a weight may be 0. pe_j is the error in all of p_j = weight / sum
    //   out         sum p_j v_j over sum p_j. Above, weights are rounded once more, w = [0, 2^-8], to errors pe_j + w (p_j + pe_j); the sum below takes
    //               them as they are, with error beta = sum pe_j: |error| <= (sum (error) |v_j| + beta |out|) / (1 - beta), plus n (a + u)
    //               + 4 u for the two sums and the quotient, relative to sum p_j |v_j|, plus the rounding to floatX
    //   lse         -log(1 - beta), plus roundings of the sum (n u), the logarithm (4 u |log|) and the last addition (u |lse|); tensor cores keep the
    //               maximum as s c and come back with ln(2): four roundings relative to it [0, 4]
    //   backward    p again from s and lse: e^x - 1, x = es_j + error of lse + (|s_j - lse| + 4) u, and for tensor cores two roundings of c, relative
    //               to s_j, and two of lse log2(e) [0, 2]; rounded once more, w, for dv, as is ds for dq and dk;
    //               dp: (HD + 4) a sum |dout||v|;  D: (HD + 8) u sum |dout||out| + sum |dout| (error of out);
    //               ds = p (dp - D): pe (|dp - D| + e) + p e + 2 u p |dp - D|, e the errors of dp and D together;
    //               dq, dk, dv: those errors times |k|, |q|, |dout|, plus a for each term and for 3 more (the scalings, the parts that are summed
    //               apart), plus the rounding to floatX
    // The bounds are first order in u except for the exponentials; 2 % are added for the rest.
    Expected reference() const {
        const Arithmetic a = arithmetic_of(c.HD);
        const int group = c.NH / c.NKV, HD = c.HD;
        const double scale = args.scale;
        const auto rounded = [&](double value, double error) { return error + a.weight * (std::abs(value) + error); };
        Expected result{Sums(out), Sums({c.B, c.Tq, c.NH, 1, 0, 0, 0}), Sums(dq), Sums(dk), Sums(dv)};
        Doubles s(c.Tkv), es(c.Tkv), p(c.Tkv), pe(c.Tkv), dp(c.Tkv), edp(c.Tkv);
        for (int b = 0; b < c.B; b++) {
            std::vector<int> queries_of(c.Tkv);
            for (int i = 0; i < c.Tq; i++)
                for (int j = first_key(b, i); j < end_key(i); j++) queries_of[j]++;
            for (int h = 0; h < c.NH; h++) {
                const int kvh = h / group;
                const Head queries(*inputs, q, b, h), keys(*inputs, k, b, kvh), values(*inputs, v, b, kvh), grads(*douts, dout, b, h);
                for (int i = 0; i < c.Tq; i++) {
                    const double *const qi = queries.row(i), *const gi = grads.row(i);
                    const int begin = first_key(b, i), end = end_key(i), n = end - begin;
                    const size_t row = result.out.row(b, i, h);
                    double& lse_want = result.lse.want[result.lse.row(b, i, h)];
                    double& lse_error = result.lse.error[result.lse.row(b, i, h)];
                    lse_want = -INFINITY;
                    if (n <= 0) continue;

                    keys.dot(s, es, qi, begin, end);
                    const auto score_terms = HD - std::count(qi, qi + HD, 0.0) + 4;
                    double max = -INFINITY, sum = 0, beta = 0;
                    for (int j = begin; j < end; j++) {
                        s[j] *= scale;
                        es[j] *= scale * score_terms * a.addition;
                        max = std::max(max, s[j]);
                    }
                    for (int j = begin; j < end; j++) sum += p[j] = std::exp(s[j] - max);
                    const int rescales = ceil_div(n, a.keys_a_rescale) + 1;
                    for (int j = begin; j < end; j++) {
                        p[j] /= sum;
                        pe[j] = weight_error(p[j], es[j] + (a.exponent * (max - s[j]) + 4 + 6 * rescales) * kUnit);
                        beta += pe[j];
                        result.out.add(row, p[j], rounded(p[j], pe[j]) + p[j] * (n * (a.addition + kUnit) + 4 * kUnit), values.row(j));
                    }
                    EXPECT_LT(beta, 0.9) << c << ": the bound has no meaning here";
                    lse_want = max + std::log(sum);
                    lse_error = 1.02 * (-std::log1p(-beta) + kUnit * (std::abs(lse_want) + a.lse * std::abs(max) + 4 * std::log(sum) + n));
                    double D = 0, D_error = 0;
                    for (int d = 0; d < HD; d++) {
                        const double want = result.out.want[row + d];
                        double& error = result.out.error[row + d];
                        error = stored_error(want, (error + beta * std::abs(want)) / (1 - beta));
                        D += gi[d] * want;
                        D_error += std::abs(gi[d]) * (error + (HD + 8) * kUnit * std::abs(want));
                    }

                    values.dot(dp, edp, gi, begin, end);
                    for (int j = begin; j < end; j++) {
                        const double exponent = std::abs(s[j] - lse_want) + 4 + a.lse_again * (std::abs(s[j]) + std::abs(lse_want));
                        pe[j] = weight_error(p[j], es[j] + lse_error + exponent * kUnit);
                        const double difference = dp[j] - D, e = edp[j] * (HD + 4) * a.addition + D_error;
                        const double ds = scale * p[j] * difference;
                        const double ds_error = scale * (pe[j] * (std::abs(difference) + e) + p[j] * (e + 2 * kUnit * std::abs(difference)));
                        const double adding_n = (n + 3) * a.addition, adding_queries = (group * queries_of[j] + 3) * a.addition;
                        const double ds_weight_error = rounded(ds, ds_error), ds_size = std::abs(ds) + ds_error;
                        const size_t key_row = result.dk.row(b, j, kvh);
                        result.dq.add(row, ds, ds_weight_error + adding_n * ds_size, keys.row(j));
                        result.dk.add(key_row, ds, ds_weight_error + adding_queries * ds_size, qi);
                        result.dv.add(key_row, p[j], rounded(p[j], pe[j]) + adding_queries * (p[j] + pe[j]), gi);
                    }
                }
            }
        }
        // Gradients of rows that nothing is added to are 0 exactly.
        for (Sums* sums : {&result.dq, &result.dk, &result.dv})
            for (size_t i = 0; i < sums->want.size(); i++)
                if (sums->error[i] > 0) sums->error[i] = stored_error(sums->want[i], sums->error[i]);
        return result;
    }

    void expect_close_to(const Expected& want, Tiles tiles) const {
        expect_close("out", want.out, [&](int b, int t, int h, int d) { return outs->result(out.at(b, t, h, d)); }, tiles);
        const std::vector<float> lse_got = lse->download();
        expect_close("lse", want.lse, [&](int b, int t, int h, int) { return lse_got[lse_at(b, t, h)]; }, tiles);
        expect_close("dq", want.dq, [&](int b, int t, int h, int d) { return dqk->result(dq.at(b, t, h, d)); }, tiles);
        expect_close("dk", want.dk, [&](int b, int t, int h, int d) { return dqk->result(dk.at(b, t, h, d)); }, tiles);
        expect_close("dv", want.dv, [&](int b, int t, int h, int d) { return dv_buffer().result(dv.at(b, t, h, d)); }, tiles);
        outs->expect_guards_untouched("out");
        dqk->expect_guards_untouched("dq, dk");
        dv_buffer().expect_guards_untouched("dv");
    }

private:
    // Error of a weight p whose relative error is e^x - 1, or that is so small that it becomes 0.
    static double weight_error(double p, double x) { return (p > 0 ? p * std::expm1(x) : 0) + kFlush; }

    // Fails with the worst element, and records its error over its bound.
    template <typename Function>
    void expect_close(const char* name, const Sums& sums, Function&& result, Tiles tiles) const {
        const Layout& layout = sums.layout;
        double worst = 0;
        std::string where;
        for (int b = 0; b < layout.B; b++)
            for (int h = 0; h < layout.heads; h++)
                for (int t = 0; t < layout.T; t++)
                    for (int d = 0; d < layout.HD; d++) {
                        const size_t i = sums.row(b, t, h) + d;
                        const double got = result(b, t, h, d), want = sums.want[i], error = std::abs(got - want);
                        const double ratio = got == want ? 0 : error / sums.error[i];
                        if (!(ratio <= worst)) {
                            worst = std::isnan(ratio) ? INFINITY : ratio;
                            where = format("%s[b %d, t %d, head %d, d %d] is %.9g, not %.9g: error %.3g, bound %.3g", name, b, t, h, d, got, want, error,
                                           sums.error[i]);
                        }
                    }
        EXPECT_LE(worst, 1) << c << in_words(tiles) << ": " << where;
        ::testing::Test::RecordProperty(format("error_over_bound_of_%s%s", name, tiles == Tiles::kOwn ? "" : "_gpu"), format("%.4f", worst));
    }
};

void run_and_check(const Case& c) {
    Problem problem(c);
    const Expected reference = problem.reference();
    for (const Tiles tiles : tiles_of(c.HD)) {
        problem.run(tiles);
        problem.expect_close_to(reference, tiles);
    }
}

class AttentionTest : public ::testing::TestWithParam<Case> {};

TEST_P(AttentionTest, MatchesTheDefinition) { run_and_check(GetParam()); }

std::string name_of(const ::testing::TestParamInfo<Case>& info) { return info.param.name(); }

// Every length, ratio of heads (1, 2, 7) and way to start with every kind of head_dim: tensor cores have a kernel each for 64, 80, 96 and 128, plain
// kernels one each up to 64, 128 and 256. All combinations are in EveryCombination.
INSTANTIATE_TEST_SUITE_P(Lengths, AttentionTest,
                         ::testing::Values(Case{2, 1, 1, 7, 1, 64}, Case{1, 17, 17, 2, 2, 64}, Case{2, 64, 64, 4, 2, 64},
                                           Case{1, 127, 127, 7, 1, 64}, Case{1, 200, 200, 2, 1, 64}, Case{1, 1024, 1024, 1, 1, 64},
                                           Case{1, 1000, 1000, 2, 1, 64, Starts::kWindow}, Case{1, 1, 1, 2, 1, 80}, Case{2, 17, 17, 7, 1, 80},
                                           Case{1, 64, 64, 1, 1, 80}, Case{1, 127, 127, 4, 2, 80}, Case{1, 1000, 1000, 1, 1, 80, Starts::kDocuments},
                                           Case{2, 1, 1, 3, 3, 96}, Case{1, 17, 17, 2, 1, 96}, Case{1, 64, 64, 7, 1, 96},
                                           Case{1, 127, 127, 2, 2, 96}, Case{1, 1024, 1024, 1, 1, 96, Starts::kDocuments}, Case{3, 1, 1, 2, 2, 128},
                                           Case{1, 17, 17, 14, 2, 128}, Case{1, 64, 64, 2, 1, 128}, Case{1, 127, 127, 2, 2, 128},
                                           Case{1, 200, 200, 2, 1, 128}, Case{1, 1000, 1000, 1, 1, 128, Starts::kWindow}, Case{1, 1, 1, 2, 1, 256},
                                           Case{2, 17, 17, 2, 2, 256}, Case{1, 64, 64, 2, 1, 256}, Case{1, 127, 127, 1, 1, 256},
                                           Case{1, 1000, 1000, 1, 1, 8, Starts::kDocuments}),
                         name_of);
INSTANTIATE_TEST_SUITE_P(HeadDims, AttentionTest,
                         ::testing::Values(Case{2, 70, 70, 4, 2, 8}, Case{1, 70, 70, 3, 3, 16}, Case{2, 70, 70, 6, 3, 32}, Case{1, 70, 70, 4, 2, 80},
                                           Case{1, 70, 70, 4, 4, 96}, Case{1, 35, 35, 7, 1, 136}, Case{1, 35, 35, 2, 1, 192}),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Strides, AttentionTest,
                         ::testing::Values(Case{2, 65, 65, 4, 2, 64, Starts::kNone, false}, Case{2, 33, 33, 7, 1, 96, Starts::kNone, false},
                                           Case{2, 129, 129, 3, 3, 80, Starts::kDocuments, false}, Case{1, 97, 97, 4, 2, 128, Starts::kNone, false},
                                           Case{2, 19, 19, 2, 2, 200, Starts::kNone, false}),
                         name_of);
// Tensor cores take 128 rows at once, a row being a query and a head of its group: the end of a tile falls inside a query's heads, a group is larger
// than a tile, or rows are few.
INSTANTIATE_TEST_SUITE_P(Groups, AttentionTest,
                         ::testing::Values(Case{1, 18, 18, 7, 1, 64}, Case{2, 19, 19, 14, 2, 64}, Case{1, 37, 37, 7, 1, 80, Starts::kNone, false},
                                           Case{1, 128, 128, 3, 1, 96}, Case{1, 43, 43, 6, 2, 128}, Case{1, 3, 3, 130, 1, 64},
                                           Case{1, 5, 5, 64, 2, 128}, Case{2, 129, 129, 2, 2, 64}, Case{1, 257, 257, 1, 1, 128}),
                         name_of);
// Fewer queries than keys: a key/value cache. More: the first ones see no key. Around multiples of the tiles and fragments: 16, 32, 64, 128.
INSTANTIATE_TEST_SUITE_P(QueriesAndKeys, AttentionTest,
                         ::testing::Values(Case{2, 1, 130, 4, 2, 64, Starts::kNone, false}, Case{1, 5, 70, 7, 1, 32, Starts::kNone, false},
                                           Case{1, 33, 100, 2, 2, 128, Starts::kWindow, false}, Case{2, 20, 12, 2, 1, 64, Starts::kNone, false},
                                           Case{1, 150, 70, 2, 1, 80, Starts::kNone, false}, Case{1, 40, 3, 2, 1, 256, Starts::kNone, false},
                                           Case{1, 15, 64, 2, 2, 64}, Case{2, 16, 65, 7, 1, 80}, Case{1, 17, 63, 4, 2, 96},
                                           Case{1, 31, 128, 2, 1, 128}, Case{1, 33, 129, 7, 1, 64}, Case{1, 63, 127, 2, 1, 96},
                                           Case{2, 65, 64, 4, 2, 64}, Case{1, 64, 16, 2, 1, 80}, Case{1, 128, 1, 2, 2, 128},
                                           Case{1, 129, 128, 2, 1, 64}, Case{1, 127, 257, 1, 1, 80, Starts::kBeyond},
                                           Case{1, 200, 65, 3, 1, 64, Starts::kDocuments}, Case{1, 161, 97, 7, 1, 128, Starts::kNone, false}),
                         name_of);
INSTANTIATE_TEST_SUITE_P(KeyStart, AttentionTest,
                         ::testing::Values(Case{2, 127, 127, 4, 2, 64, Starts::kDocuments}, Case{2, 200, 200, 2, 1, 32, Starts::kWindow},
                                           Case{2, 90, 90, 4, 2, 64, Starts::kBeyond}, Case{1, 90, 90, 2, 1, 96, Starts::kDocuments},
                                           Case{1, 60, 60, 2, 1, 128, Starts::kBeyond, false}, Case{1, 60, 60, 2, 2, 256, Starts::kDocuments},
                                           Case{2, 1, 1, 2, 1, 64, Starts::kBeyond}, Case{2, 17, 17, 7, 1, 80, Starts::kBeyond},
                                           Case{1, 400, 400, 2, 1, 64, Starts::kLongDocuments},
                                           Case{1, 600, 600, 1, 1, 128, Starts::kLongDocuments, false},
                                           Case{2, 300, 300, 1, 1, 80, Starts::kBlindTile}, Case{1, 300, 300, 1, 1, 96, Starts::kBlindTile, false},
                                           Case{1, 250, 250, 7, 1, 64, Starts::kBlindTile}, Case{2, 70, 70, 4, 2, 64, Starts::kOwn},
                                           Case{1, 70, 70, 2, 1, 128, Starts::kOwn}),
                         name_of);
INSTANTIATE_TEST_SUITE_P(ExtremeLogits, AttentionTest,
                         ::testing::Values(Case{1, 100, 100, 4, 2, 64, Starts::kNone, true, Values::kExtreme},
                                           Case{1, 70, 70, 2, 1, 128, Starts::kDocuments, true, Values::kExtreme},
                                           Case{1, 40, 40, 2, 1, 256, Starts::kNone, false, Values::kExtreme},
                                           Case{1, 130, 130, 2, 1, 80, Starts::kBeyond, true, Values::kExtreme},
                                           Case{1, 150, 150, 7, 1, 96, Starts::kNone, true, Values::kExtreme},
                                           Case{1, 200, 200, 1, 1, 128, Starts::kNone, false, Values::kExtreme},
                                           Case{1, 30, 30, 2, 1, 8, Starts::kNone, true, Values::kExtreme},
                                           Case{1, 40, 40, 7, 1, 64, Starts::kOwn, true, Values::kExtreme},
                                           Case{1, 1, 1, 2, 2, 128, Starts::kNone, true, Values::kExtreme}),
                         name_of);

// For `make test-long`, which sets LLMC_LONG_TESTS; else none.
std::vector<Case> every_combination() {
    std::vector<Case> cases;
    if (getenv("LLMC_LONG_TESTS") == nullptr) return cases;
    for (const int HD : {8, 64, 80, 96, 128, 256})
        for (const int T : {1, 17, 64, 127, 1000, 1024})
            for (const int ratio : {1, 2, 7})
                for (const Starts starts : {Starts::kNone, Starts::kDocuments, Starts::kWindow, Starts::kBeyond})
                    cases.push_back({1, T, T, ratio, 1, HD, starts});
    return cases;
}
INSTANTIATE_TEST_SUITE_P(EveryCombination, AttentionTest, ::testing::ValuesIn(every_combination()), name_of);

TEST(Attention, TwoRunsGiveTheSameBits) {
    for (const Case& c : {Case{1, 100, 100, 7, 1, 64}, Case{1, 70, 70, 4, 2, 128, Starts::kDocuments}, Case{1, 40, 40, 2, 1, 256},
                          Case{1, 150, 150, 2, 1, 80}, Case{2, 140, 140, 1, 1, 96, Starts::kBeyond, false}}) {
        for (const Tiles tiles : tiles_of(c.HD)) {
            SCOPED_TRACE(c.name() + in_words(tiles));
            Problem first(c), second(c);
            first.run(tiles);
            second.run(tiles);
            expect_same_bits("out", first.outs->results(), second.outs->results());
            expect_same_bits("lse", first.lse->download(), second.lse->download());
            expect_same_bits("dq, dk", first.dqk->results(), second.dqk->results());
            expect_same_bits("dv", first.dv_buffer().results(), second.dv_buffer().results());
        }
    }
}

// Device memory of exactly `count` elements: hostcuda (closely with ASAN=1, else by pages) and compute-sanitizer stop whoever touches what lies beyond.
template <typename T>
class ExactBuffer {
public:
    explicit ExactBuffer(size_t count) : count_(count) { CUDA_CHECK(cudaMalloc(&elements_, count * sizeof(T))); }
    ~ExactBuffer() { cudaFree(elements_); }
    ExactBuffer(const ExactBuffer&) = delete;
    ExactBuffer& operator=(const ExactBuffer&) = delete;
    T* get() const { return elements_; }
    void upload(const std::vector<T>& values) { copy(elements_, values.data(), cudaMemcpyHostToDevice); }
    std::vector<T> download() const {
        std::vector<T> values(count_);
        copy(values.data(), elements_, cudaMemcpyDeviceToHost);
        return values;
    }

private:
    void copy(void* to, const void* from, cudaMemcpyKind kind) const {
        CUDA_CHECK(cudaMemcpyAsync(to, from, count_ * sizeof(T), kind, test_stream()));
        synchronize();
    }
    size_t count_;
    T* elements_ = nullptr;
};

// The trainer's layout: nothing lies between rows and sequences, and the last row ends the allocation. The same bits as with gaps.
TEST(Attention, NeedsNothingBeyondTheLastRow) {
    for (const Case& c : {Case{2, 1, 1, 2, 1, 64}, Case{2, 19, 19, 7, 1, 64, Starts::kDocuments}, Case{1, 65, 65, 4, 2, 80}, Case{2, 33, 33, 2, 2, 96},
                          Case{1, 130, 130, 2, 1, 128}, Case{2, 19, 19, 2, 1, 32}, Case{1, 35, 35, 2, 1, 256}}) {
        Problem problem(c);
        AttentionArgs args = packed_attention_args(c.B, c.Tq, c.NH, c.NKV, c.HD);
        const size_t NHD = static_cast<size_t>(c.NH) * c.HD, KVD = static_cast<size_t>(c.NKV) * c.HD;
        const Layout q = {c.B, c.Tq, c.NH, c.HD, 0, args.q_row, args.q_batch}, k = {c.B, c.Tq, c.NKV, c.HD, NHD, args.k_row, args.k_batch};
        const Layout v = {c.B, c.Tq, c.NKV, c.HD, NHD + KVD, args.v_row, args.v_batch}, out = {c.B, c.Tq, c.NH, c.HD, 0, args.o_row, args.o_batch};
        const size_t qkv_count = c.B * args.q_batch, out_count = c.B * args.o_batch;
        ExactBuffer<floatX> qkv(qkv_count), dqkv(qkv_count), outs(out_count), douts(out_count);
        ExactBuffer<float> lse(problem.lse->count()), scratch(attention_backward_scratch_count(args));
        ExactBuffer<int> starts(problem.starts.size());
        starts.upload(problem.starts);
        args.key_start = c.starts == Starts::kNone ? nullptr : starts.get();

        // packed = apart, element by element
        const auto gather = [](std::vector<floatX>& packed, const Layout& to, const std::vector<floatX>& apart, const Layout& from) {
            for (int b = 0; b < to.B; b++)
                for (int t = 0; t < to.T; t++)
                    for (int h = 0; h < to.heads; h++)
                        for (int d = 0; d < to.HD; d++) packed[to.at(b, t, h, d)] = apart[from.at(b, t, h, d)];
        };
        for (const Tiles tiles : tiles_of(c.HD)) {
            SCOPED_TRACE(c.name() + in_words(tiles));
            problem.run(tiles);
            std::vector<floatX> qkv_values(qkv_count), dout_values(out_count), want_out(out_count), want_dqkv(qkv_count);
            gather(qkv_values, q, problem.inputs->results(), problem.q);
            gather(qkv_values, k, problem.inputs->results(), problem.k);
            gather(qkv_values, v, problem.inputs->results(), problem.v);
            gather(dout_values, out, problem.douts->results(), problem.dout);
            gather(want_out, out, problem.outs->results(), problem.out);
            gather(want_dqkv, q, problem.dqk->results(), problem.dq);
            gather(want_dqkv, k, problem.dqk->results(), problem.dk);
            gather(want_dqkv, v, problem.dv_buffer().results(), problem.dv);
            qkv.upload(qkv_values);
            douts.upload(dout_values);
            run_attention(tiles, outs.get(), lse.get(), dqkv.get(), dqkv.get() + k.first, dqkv.get() + v.first, scratch.get(), douts.get(), qkv.get(),
                          qkv.get() + k.first, qkv.get() + v.first, args);
            expect_same_bits("out", outs.download(), want_out);
            expect_same_bits("lse", lse.download(), problem.lse->download());
            expect_same_bits("dq, dk, dv", dqkv.download(), want_dqkv);
        }
    }
}

// A NaN must show: a hidden one would train on as if nothing had happened. One in a query's row (q, dout) shows in all that this row makes: its own
// out and dq, and dk and dv of the keys it sees. One in a key's row (k, v) shows in all queries that see the key and, of the gradients of k and v, in the
// key's own. Whom it must not reach: rows of other queries, where it is in q or dout, and in any case other key/value heads and other sequences, which
// keep their bits. A NaN in k or v may reach queries that do not see it, where a tile holds both: their weight for it is 0, but 0 * NaN is NaN. So may
// one in q or dout the keys that it does not see.
class AttentionNanTest : public ::testing::TestWithParam<Case> {
protected:
    void show_in_their_head_only(Tiles tiles);
};

// What became of a head's row of a result in comparison with the row of another run.
struct RowSeen {
    bool any_nan = false, nan_at_d = false, same_bits = true;
    RowSeen(const Buffer& buffer, const Buffer& clean, const Layout& layout, int b, int t, int h, int at_d) {
        for (int d = 0; d < layout.HD; d++) {
            const size_t i = layout.at(b, t, h, d);
            const bool nan = std::isnan(buffer.result(i));
            any_nan = any_nan || nan;
            nan_at_d = nan_at_d || (nan && d == at_d);
            same_bits = same_bits && memcmp(&buffer.results()[i], &clean.results()[i], sizeof(floatX)) == 0;
        }
    }
};

TEST_P(AttentionNanTest, ShowsInItsHeadOnly) {
    for (const Tiles tiles : tiles_of(GetParam().HD)) show_in_their_head_only(tiles);
}

void AttentionNanTest::show_in_their_head_only(Tiles tiles) {
    const Case c = GetParam();
    Problem clean(c);
    clean.run(tiles);
    const std::vector<float> clean_lse = clean.lse->download();
    const int group = c.NH / c.NKV;
    const int at_b = c.B - 1, at_kvh = c.NKV - 1, at_h = at_kvh * group, at_query = c.Tq * 3 / 4, at_key = c.Tkv / 2, at_d = 5;
    for (const std::string input : {"q", "k", "v", "dout"}) {
        SCOPED_TRACE("NaN in " + input + in_words(tiles));
        Problem problem(c);
        const bool in_query = input == "q" || input == "dout";
        const Layout& layout = input == "q" ? problem.q : input == "k" ? problem.k : input == "v" ? problem.v : problem.dout;
        const size_t at = in_query ? layout.at(at_b, at_query, at_h, at_d) : layout.at(at_b, at_key, at_kvh, at_d);
        (input == "dout" ? problem.douts : problem.inputs)->fill(Layout{1, 1, 1, 1, at, 0, 0}, [](int, int, int, int) { return std::nanf(""); });
        problem.run(tiles);
        const std::vector<float> lse = problem.lse->download();
        int poisoned = 0, apart = 0;
        for (int b = 0; b < c.B; b++)
            for (int t = 0; t < c.Tq; t++)
                for (int h = 0; h < c.NH; h++) {
                    const RowSeen out(*problem.outs, *clean.outs, problem.out, b, t, h, at_d);
                    const RowSeen dq(*problem.dqk, *clean.dqk, problem.dq, b, t, h, at_d);
                    const size_t l = problem.lse_at(b, t, h);
                    const std::string where = format(" of b %d, query %d, head %d", b, t, h);
                    if (b != at_b || h / group != at_kvh) {
                        const bool same_lse = memcmp(&lse[l], &clean_lse[l], sizeof(float)) == 0;
                        ASSERT_TRUE(out.same_bits && dq.same_bits && same_lse) << "out, dq or lse changed" << where;
                        apart++;
                    } else if (in_query ? t == at_query && h == at_h : problem.sees(b, t, at_key)) {
                        ASSERT_TRUE(dq.nan_at_d) << "no NaN in dq" << where;
                        if (input != "dout") { ASSERT_TRUE(out.nan_at_d) << "no NaN in out" << where; }
                        if (input == "q" || input == "k") { ASSERT_TRUE(std::isnan(lse[l])) << "no NaN in lse" << where; }
                        poisoned++;
                    } else if (in_query) {
                        ASSERT_FALSE(out.any_nan || dq.any_nan || std::isnan(lse[l])) << "NaN in out, dq or lse" << where;
                    }
                }
        EXPECT_GE(poisoned, 1);
        for (int b = 0; b < c.B; b++)
            for (int t = 0; t < c.Tkv; t++)
                for (int h = 0; h < c.NKV; h++) {
                    const RowSeen dk(*problem.dqk, *clean.dqk, problem.dk, b, t, h, at_d);
                    const RowSeen dv(problem.dv_buffer(), clean.dv_buffer(), problem.dv, b, t, h, at_d);
                    const std::string where = format(" of b %d, key %d, head %d", b, t, h);
                    if (b != at_b || h != at_kvh) {
                        ASSERT_TRUE(dk.same_bits && dv.same_bits) << "dk or dv changed" << where;
                        apart++;
                    } else if (in_query ? problem.sees(b, at_query, t) : t == at_key) {
                        ASSERT_TRUE(dk.nan_at_d) << "no NaN in dk" << where;
                        if (input != "v") { ASSERT_TRUE(dv.nan_at_d) << "no NaN in dv" << where; }
                        poisoned++;
                    }
                }
        EXPECT_GE(poisoned, 2);
        EXPECT_GE(apart, c.Tq);
    }
}
INSTANTIATE_TEST_SUITE_P(Nan, AttentionNanTest,
                         ::testing::Values(Case{2, 70, 70, 4, 2, 64}, Case{2, 40, 40, 4, 2, 128, Starts::kDocuments}, Case{1, 130, 130, 2, 2, 128},
                                           Case{2, 30, 50, 2, 1, 80, Starts::kNone, false}, Case{2, 30, 30, 2, 1, 96}, Case{2, 20, 20, 2, 1, 256}),
                         name_of);

template <typename Function>
void expect_refused(const char* text, Function&& change) {
    AttentionArgs args = packed_attention_args(1, 4, 4, 2, 64);
    change(args);
    try {
        checked_attention_args(args);
        ADD_FAILURE() << "not refused: " << text;
    } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
}

TEST(Attention, RefusesWhatItCannotDo) {
    expect_refused("head_dim 12", [](AttentionArgs& args) { args.HD = 12; });
    expect_refused("head_dim 264", [](AttentionArgs& args) { args.HD = 264; });
    expect_refused("4 query heads and 3 key/value heads", [](AttentionArgs& args) { args.NKV = 3; });
    expect_refused("rows of k are 100 elements", [](AttentionArgs& args) { args.k_row = 100; });
    expect_refused("rows of out are 248 elements", [](AttentionArgs& args) { args.o_row = 248; });
    expect_refused("rows of dv are 64 elements", [](AttentionArgs& args) { args.dv_row = 64; });
    expect_refused("batches 4", [](AttentionArgs& args) { args.v_batch = 4; });
    expect_refused("B = 0", [](AttentionArgs& args) { args.B = 0; });
    expect_refused("scores times -1", [](AttentionArgs& args) { args.scale = -1; });
    expect_refused("scores times inf", [](AttentionArgs& args) { args.scale = INFINITY; });
    expect_refused("scores times nan", [](AttentionArgs& args) { args.scale = std::nanf(""); });
    AttentionArgs args = packed_attention_args(1, 4, 4, 2, 64);
    EXPECT_THROW(attention_forward(reinterpret_cast<floatX*>(8), nullptr, nullptr, nullptr, nullptr, args, test_stream()), Error);
}

}  // namespace
